"""The task: the network reads tokens in order, loss and metrics as in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def network(module):
    """Logits of new parameters for tokens [batch, 16], and the loss and gradients of a batch."""
    model, task = module("model"), module("task")
    config = dataclasses.replace(model.TINY, depth=1)
    inputs = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    build = functools.partial(model.build, config, inputs, 256, jnp.float32)
    made = module("runtime.functional").pure_functions(build, inputs)
    variables = made.init(jax.random.key(0))

    def logits(tokens):
        return made.apply(variables, jnp.asarray(tokens), train=False)[0]

    @jax.value_and_grad
    def loss(params, batch):
        changed = variables | {"params": params}
        outputs, *_ = made.apply(changed, task.model_inputs(batch), train=False)
        total, weight = task.loss_and_metrics(outputs, batch, task.TaskConfig())["loss"]
        return total / weight

    return logits, lambda batch: loss(variables["params"], batch)


def text(seed=0):
    return np.random.default_rng(seed).integers(97, 123, (1, 16))


def test_no_token_sees_a_later_one(network):
    logits, _ = network
    tokens, changed = text(), text()
    changed[0, 9] += 1
    before, after = logits(tokens)[0], logits(changed)[0]
    np.testing.assert_allclose(after[:9], before[:9], atol=1e-6)
    assert all(abs(after[9:] - before[9:]).max(axis=1) > 1e-4)


def test_the_order_of_earlier_tokens_matters(network):
    # In one block of attention only the positions can tell: the set of tokens is the same.
    logits, _ = network
    tokens, swapped = text(), text()
    swapped[0, [2, 3]] = tokens[0, [3, 2]]
    assert abs(logits(tokens)[0, -1] - logits(swapped)[0, -1]).max() > 1e-4


def test_padding_changes_neither_loss_nor_gradients(network):
    _, loss = network
    tokens = np.concatenate([text(), text(1)[:, :1]], axis=1).astype(np.uint8)
    mask = np.repeat([[1, 0]], [10, 6], axis=1).astype(np.float32)
    padded = tokens.copy()
    padded[:, 11:] = 0
    results = [loss({"tokens": x, "mask": mask}) for x in (tokens, padded)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results)
    padded[:, 10] = 0  # the last target that counts
    assert loss({"tokens": padded, "mask": mask})[0] != results[0][0]


def test_metrics_are_those_of_numpy(module):
    task = module("task")
    logits = np.random.default_rng(0).normal(size=(3, 4, 256)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 256, (3, 5)).astype(np.uint8)
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], np.float32)
    totals = task.loss_and_metrics(logits, {"tokens": tokens, "mask": mask}, task.TaskConfig())
    scores = task.report({name: (float(s), float(w)) for name, (s, w) in totals.items()})
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    wanted = [p[i, j, tokens[i, j + 1]] for i, j in zip(*np.nonzero(mask), strict=True)]
    assert scores["bits_per_byte"] == pytest.approx(-np.log2(wanted).mean(), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(2 ** scores["bits_per_byte"], rel=1e-5)
    assert (scores["num_tokens"], scores["num_examples"]) == (5, 2)
    # With a z-loss only the loss differs.
    totals = task.loss_and_metrics(logits, {"tokens": tokens, "mask": mask}, task.TaskConfig(0.1))
    log_z = np.log(np.exp(logits).sum(axis=-1))[mask == 1]
    loss, weight = map(float, totals["loss"])
    assert loss / weight == pytest.approx(scores["loss"] + 0.1 * np.mean(log_z**2), rel=1e-5)
    assert totals["cross_entropy"][0] / 5 == pytest.approx(scores["loss"], rel=1e-5)
