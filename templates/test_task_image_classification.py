"""The task: three splits without overlap, pixels scaled once, metrics as NumPy has them."""

import jax
import numpy as np
import pytest


@pytest.fixture
def load(module):
    """Load the data set at a path."""
    config, data = module("config"), module("data")

    def load(path):
        settings = config.DataConfig(source="path", path=str(path))
        return data.load(config.Config(data=settings))

    return load


def write(path, images, labels):
    np.savez(path, images=images, labels=labels)
    return path


def test_every_image_is_in_one_split(load, tmp_path):
    images = np.arange(100, dtype=np.uint8).repeat(16).reshape(100, 4, 4)
    data = load(write(tmp_path / "my.npz", images, np.arange(100) % 3))
    parts = [split.images[:, 0, 0, 0] for split in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [72, 8, 20]
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert data.num_outputs == 3
    for split in (data.train, data.validation, data.test):
        np.testing.assert_array_equal(split.labels, split.images[:, 0, 0, 0] % 3)


def test_the_fingerprint_follows_images_and_labels(load, tmp_path):
    images, labels = np.zeros((20, 2, 2), np.uint8), np.arange(20) % 2
    first = load(write(tmp_path / "a.npz", images, labels)).fingerprint
    assert load(write(tmp_path / "b.npz", images, labels)).fingerprint == first
    assert load(write(tmp_path / "c.npz", images, 1 - labels)).fingerprint != first
    images[7, 1, 1] = 1
    assert load(write(tmp_path / "d.npz", images, labels)).fingerprint != first


def test_pixels_are_scaled_once(module):
    pixels = np.array([0, 51, 255], np.uint8).reshape(1, 3, 1, 1)
    once = module("task").model_inputs({"image": jax.numpy.asarray(pixels)})
    np.testing.assert_allclose(once.ravel(), [0, 0.2, 1], rtol=1e-6)
    twice = module("task").model_inputs({"image": once})
    np.testing.assert_array_equal(twice, once)


def score(module, logits, labels, mask):
    task = module("task")
    totals = task.loss_and_metrics(logits, {"label": labels, "mask": mask})
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


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((20, 3, 8, 8), np.uint8), np.arange(20) % 2, ["channels last"]),
        (np.zeros((20, 8, 8), np.int64), np.arange(20) % 2, ["int64", "uint8"]),
        (np.full((20, 8, 8), 255.0), np.arange(20) % 2, ["255", "0 to 1"]),
        (np.full((20, 8, 8), np.nan), np.arange(20) % 2, ["not finite"]),
        (np.zeros((20, 8, 8), np.uint8), np.arange(19) % 2, ["one label for each image"]),
        (np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2 - 1, ["-1", "from 0"]),
        (np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2 * 5, ["up to 5", "[1]", "without gaps"]),
        (np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2 * 1.0, ["float64", "integers"]),
        (np.zeros((9, 8, 8), np.uint8), np.arange(9) % 2, ["9 rows", "at least 10"]),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(load, module, tmp_path, images, labels, words):
    with pytest.raises(module("config").SettingError) as error:
        load(write(tmp_path / "my.npz", images, labels))
    assert all(word in str(error.value) for word in words)


def test_what_is_no_data_set_is_refused(load, module, tmp_path):
    (tmp_path / "junk.npz").write_bytes(b"junk")
    for name in ("junk.npz", "absent.npz"):
        with pytest.raises(module("config").SettingError, match=f"{name}.*`images` and `labels`"):
            load(tmp_path / name)
