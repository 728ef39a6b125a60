"""The task: augmentation, pixels scaled once, loss and metrics as in NumPy."""

import jax
import numpy as np
import pytest


@pytest.mark.parametrize("augment", ["none", "flip", "crop-flip"])
def test_images_are_augmented_by_a_key_for_each_row(module, augment):
    images = np.random.default_rng(0).integers(0, 256, (64, 16, 8, 1), dtype=np.uint8)
    config = module("config").DataConfig(augment=augment)
    change = jax.jit(lambda key: module("task").augment({"image": images}, key, config)["image"])
    first, again, other = (np.asarray(change(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    is_same, is_mirrored = ((first == x).all(axis=(1, 2, 3)) for x in (images, images[:, :, ::-1]))
    if augment == "none":
        assert is_same.all()
        return
    assert (first != other).any()
    if augment == "flip":
        assert (is_same ^ is_mirrored).all() and 16 < is_same.sum() < 48
        return
    # Moved by up to two rows and a column: what was in the middle is still there.
    inner = {tuple(x.ravel()) for x in images[5][4:12, 2:6, 0][None]}
    windows = [first[5][y : y + 8, x : x + 4, 0] for y in range(2, 7) for x in range(1, 4)]
    windows += [window[:, ::-1] for window in windows]
    assert inner & {tuple(window.ravel()) for window in windows}
    assert len({x.tobytes() for x in first}) == len(first)


def test_pixels_are_scaled_once(module):
    pixels = np.array([0, 51, 255], np.uint8).reshape(1, 3, 1, 1)
    once = module("task").model_inputs({"image": jax.numpy.asarray(pixels)})
    np.testing.assert_allclose(once.ravel(), [0, 0.2, 1], rtol=1e-6)
    twice = module("task").model_inputs({"image": once})
    np.testing.assert_array_equal(twice, once)


def score(module, logits, labels, mask, weights=None, **settings):
    task = module("task")
    batch = {"label": labels, "mask": mask, "class_weight": weights}
    totals = task.loss_and_metrics(logits, batch, task.TaskConfig(**settings))
    return task.report({name: (float(s), float(w)) for name, (s, w) in totals.items()})


def test_accuracy_is_that_of_numpy_and_padding_does_not_count(module):
    logits = np.random.default_rng(0).normal(size=(50, 10)).astype(np.float32)
    labels = (np.arange(50) % 10).astype(np.int32)
    mask = (np.arange(50) < 41).astype(np.float32)
    scores = score(module, logits, labels, mask)
    right = logits.argmax(axis=1) == labels
    assert scores["accuracy"] == pytest.approx(right[:41].mean(), rel=1e-6)
    assert scores["num_examples"] == 41
    assert scores == pytest.approx(score(module, logits[:41], labels[:41], mask[:41]), rel=1e-6)


def test_the_loss_falls_as_the_right_class_becomes_more_likely(module):
    labels, mask = np.arange(10, dtype=np.int32), np.ones(10, np.float32)
    losses = [score(module, c * np.eye(10), labels, mask)["loss"] for c in (-2.0, 0.0, 2.0)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[1] == pytest.approx(np.log(10), rel=1e-5)  # all classes alike


def test_smoothed_and_weighted_losses_are_those_of_numpy(module):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 3)).astype(np.float32), np.array([0, 1, 2, 0, 0, 1])
    mask, weights = np.array([1, 1, 1, 1, 1, 0.0], np.float32), np.float32([0.5, 1, 3, 0.5, 0.5, 1])
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    plain, uniform = -log_p[np.arange(6), labels], -log_p.mean(axis=1)

    smooth = score(module, logits, labels, mask, label_smoothing=0.1)
    wanted = (0.9 * plain + 0.1 * uniform)[:5].mean()
    assert smooth["loss"] == pytest.approx(wanted, rel=1e-5)
    assert smooth["cross_entropy"] == pytest.approx(plain[:5].mean(), rel=1e-5)

    weighted = score(module, logits, labels, mask, weights, class_weights="balanced")
    wanted = np.average(plain[:5], weights=weights[:5])
    assert weighted["loss"] == pytest.approx(wanted, rel=1e-5)
    assert weighted["cross_entropy"] == pytest.approx(plain[:5].mean(), rel=1e-5)
    assert weighted["num_examples"] == smooth["num_examples"] == 5
