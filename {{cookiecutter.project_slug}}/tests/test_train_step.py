"""The train step: what one batch does to the state."""

import dataclasses
import typing

import jax
import numpy as np
import pytest


@pytest.fixture
def setup(module, config, dataset):
    """Make (state, step function, batch) for a configuration."""

    def make(**changes):
        changed = dataclasses.replace(config, **changes)
        device_mesh = module("mesh").create_mesh(changed.mesh, 16, changed.accumulation_steps)
        create, abstract = module("train_state").plan_train_state(changed, dataset, device_mesh)
        step, fresh, _ = module("train_step").compile_train_step(
            changed, abstract, dataset.train, device_mesh
        )
        rows = dataset.train.rows(np.arange(16))
        sharding = module("mesh").batch_sharding(device_mesh)
        return create(), lambda state, batch: step(state, fresh(), batch), rows, sharding

    return make


def poison(rows):
    """Make the loss of the batch infinite, whatever the task: the first row weighs infinitely."""
    return rows | {"mask": np.where(np.arange(16) == 0, np.inf, rows["mask"].T).T.astype("f4")}


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_non_finite_step_changes_nothing_but_the_counters(setup, precision):
    state, step, rows, sharding = setup(precision=precision, ema_decay=0.9)
    before = jax.device_get(state)
    state, metrics, status = step(state, jax.device_put(poison(rows), sharding))
    after = jax.device_get(state)
    for name in ("params", "opt_state", "model_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    assert (int(after.step), int(status["skipped_steps"]), int(status["skipped_in_a_row"])) == (
        1,
    ) * 3
    assert metrics["loss"] == (0, 0)
    if precision == "float16":
        assert after.loss_scale.factor == before.loss_scale.factor / 2


def test_a_finite_step_updates_everything_and_ends_the_row_of_skipped_ones(setup):
    state, step, rows, sharding = setup()
    state, _, _ = step(state, jax.device_put(poison(rows), sharding))
    before = jax.device_get(state.params)
    for _ in range(2):  # what starts at zero may hide others from the first update
        state, metrics, status = step(state, jax.device_put(rows, sharding))
    changed = jax.tree.map(
        lambda a, b: not np.array_equal(a, b), before, jax.device_get(state.params)
    )
    assert all(jax.tree.leaves(changed))
    assert (int(status["skipped_steps"]), int(status["skipped_in_a_row"])) == (1, 0)
    assert np.isfinite(metrics["loss"][0])


def test_parameters_and_moments_stay_in_float32_whatever_the_precision(setup):
    state, step, rows, sharding = setup(precision="bfloat16", ema_decay=0.9)
    state, metrics, _ = step(state, jax.device_put(rows, sharding))
    dtypes = {x.dtype.name for x in jax.tree.leaves((state, metrics))}
    assert dtypes == {"float32", "int32"}


def test_the_network_computes_in_low_precision_what_it_does_in_full(module, config, dataset):
    losses = []
    for precision in ("float32", "bfloat16", "float16"):
        changed = dataclasses.replace(
            config, precision=precision, model=module("model").ModelConfig()
        )
        device_mesh = module("mesh").create_mesh(changed.mesh, 16, 1)
        create, _ = module("train_state").plan_train_state(changed, dataset, device_mesh)
        batch = jax.device_put(
            dataset.train.rows(np.arange(16)), module("mesh").batch_sharding(device_mesh)
        )
        score = module("train_step").jit_eval_step(changed, device_mesh)
        losses.append(score(create(), batch)["loss"][0])
    np.testing.assert_allclose(losses[1:], losses[0], rtol=0.05)


def test_accumulation_sees_every_row_once(setup):
    state, step, rows, sharding = setup(accumulation_steps=4)
    _, metrics, _ = step(state, jax.device_put(rows, sharding))
    assert metrics["loss"][1] == rows["mask"].sum()


def test_gradients_are_divided_by_the_weight_of_the_logged_loss(module, setup, monkeypatch):
    """Whatever the task weighs its rows by: the gradient is that of the loss that is shown."""
    task = module("task")
    original = task.loss_and_metrics

    def weigh(factor):
        def loss_and_metrics(*args):
            metrics = original(*args)
            total, weight = metrics["loss"]
            return metrics | {"loss": (factor * total, factor * weight)}

        monkeypatch.setattr(task, "loss_and_metrics", loss_and_metrics)

    norms = []  # of the gradients: the update itself hardly depends on their size
    for factor in (1.0, 8.0):
        weigh(factor)
        state, step, rows, sharding = setup(accumulation_steps=2)
        _, metrics, _ = step(state, jax.device_put(rows, sharding))
        assert metrics["loss"][1] == factor * rows["mask"].sum()
        norms.append(float(metrics["grad_norm"][0]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_dropout_differs_from_step_to_step_and_repeats_on_resume(module, setup):
    if not getattr(module("model").TINY, "dropout_rate", 0):
        pytest.skip("the model has no dropout")
    state, step, rows, sharding = setup()
    batch = jax.device_put(rows, sharding)

    def loss(offset):
        copy = jax.tree.map(lambda x: x.copy(), state)
        return float(step(copy.replace(step=copy.step + offset), batch)[1]["loss"][0])

    assert loss(0) == loss(0)
    assert loss(0) != loss(1)


# Arrays as Flax's layers name them and nn.scan stacks them: the number of dimensions says nothing.
SHAPES = {
    "dense": {"kernel": (4, 3), "bias": (3,)},
    "conv": {"kernel": (3, 3, 2, 4), "bias": (4,)},
    "stacked": {"kernel": (5, 4, 3), "bias": (5, 3), "scale": (5, 4)},
    "embed": {"embedding": (5, 4)},
    "cls_token": (1, 1, 4),
}


def ones():
    return jax.tree.map(
        lambda shape: np.ones(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def test_weight_decay_shrinks_kernels_only(module):
    fields = typing.get_type_hints(module("config").OptimizerConfig)
    for name in typing.get_args(fields["name"]):
        check_weight_decay(module, name)


def check_weight_decay(module, name):
    config = module("config").OptimizerConfig(name=name, weight_decay=0.5, learning_rate=0.1)
    tx = module("optimizer").create_optimizer(config, lambda count: 0.1)
    params = ones()
    updates, _ = tx.update(jax.tree.map(np.zeros_like, params), tx.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        wanted = -0.05 if path[-1].key == "kernel" else 0.0
        np.testing.assert_allclose(update, np.full(update.shape, wanted), atol=1e-6)


def test_what_is_decayed_can_be_listed(module):
    assert module("optimizer").decayed(ones()) == {
        "decayed": ["conv/kernel", "dense/kernel", "stacked/kernel"],
        "not_decayed": [
            "conv/bias",
            "dense/bias",
            "embed/embedding",
            "stacked/bias",
            "stacked/scale",
        ],
        "unknown": ["cls_token"],
    }


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_rise_to_the_peak_and_end_where_they_should(module, schedule):
    config = module("config").OptimizerConfig(schedule=schedule, learning_rate=0.5, warmup_steps=10)
    rates = np.array([module("optimizer").create_schedule(config, 100)(i) for i in range(101)])
    np.testing.assert_allclose(rates[:10], 0.05 * np.arange(1, 11), rtol=1e-6)
    assert rates.max() == rates[10] == pytest.approx(0.5)
    assert all(np.diff(rates[10:]) <= 1e-6)
    assert rates[100] == pytest.approx(0.5 if schedule == "constant" else 0.0, abs=1e-6)
    assert rates[80] == pytest.approx({"constant": 0.5, "wsd": 0.5}.get(schedule, rates[80]))
