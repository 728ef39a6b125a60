"""The numbers of training are right: gradients, averages, counters, schedules, precision."""

import collections
import contextlib
import dataclasses
import functools
import itertools

import bake
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from answers import COMBINATIONS, TWO_COMBINATIONS
from package import (
    ROWS,
    STEPS,
    Package,
    assert_close,
    check_a_bad_batch_leaves_everything_as_it_was,
    check_a_row_depends_on_no_other_row,
    check_decay_moves_kernels_and_nothing_else,
    cross_entropy,
    largest_change,
    named,
    same_bits,
    value,
    with_infinite_weight,
)

pytestmark = pytest.mark.usefixtures("compile_fast")

ALL = [
    pytest.param(x, marks=() if x in TWO_COMBINATIONS else pytest.mark.slow) for x in COMBINATIONS
]


@pytest.fixture(scope="module", params=ALL, ids="-".join)
def project(request, tmp_path_factory):
    """One combination, with a package name of its own: those of one name would clash."""
    task, api = request.param
    root = tmp_path_factory.mktemp("numbers")
    made = bake.generated(root, task, api, f"numbers_{task}_{api}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        yield Package(made.name, task)


def only(combinations):
    """Run a test with some combinations only."""
    return pytest.mark.parametrize("project", combinations, ids="-".join, indirect=True)


def as_in_evaluation(apply):
    """A network without dropout and with batch normalisation on its running averages."""

    def wrapped(variables, inputs, *, train, key=None):
        return apply(variables, inputs, train=False)

    return wrapped


def with_zero_weight(rows):
    """A batch whose gradients are zero."""
    return rows | {"mask": np.zeros_like(rows["mask"])}


# --------------------------------------------------------------------------------------- Evaluation


def test_evaluation_equals_numpy_for_any_batch_size_and_number_of_devices(project):
    data = project.make_data(100)
    state, _, _ = project.start_once()
    state = state.replace(ema=jax.tree.map(lambda x: 3 * x, state.ema))  # surer, so wronger
    rows = data.test.rows(np.arange(100))
    logits, *_ = state.apply_fn(state.ema, project.inputs(rows), train=False)
    targets, mask = project.targets(rows)
    loss = (cross_entropy(logits, targets) * mask).sum() / mask.sum()
    right = int((np.argmax(logits, axis=-1) == targets)[mask > 0].sum())
    for batch_size, devices in [(7, 1), (32, 4), (128, 1)]:
        mesh = project.mesh(devices)
        placed = jax.device_put(state, project.module("mesh").replicated(mesh))
        scores = project.evaluate(placed, batch_size, mesh, data)
        assert scores["num_examples"] == 100
        assert scores["loss"] == pytest.approx(loss, rel=1e-6)
        if project.is_image:
            assert scores["accuracy"] == right / 100 > 0
        else:
            assert scores["num_tokens"] == mask.sum()


@pytest.mark.slow
@only(COMBINATIONS[::2])
def test_evaluation_in_bfloat16_counts_and_averages_in_float32(project):
    """In bfloat16 a count sticks at 256, and so does a sum of losses."""
    data = project.make_data(300)
    state, _, _ = project.start_once(project.config(precision="bfloat16"))
    if not project.is_image:
        scores = project.evaluate(state, 300, data=data)
        assert scores["num_examples"] == 300
        assert scores["num_tokens"] == data.test.rows(np.arange(300))["mask"].sum() > 1024
        return

    def sure_of_class_7(path, x):
        return x.at[7].set(100) if x.shape == (10,) else x

    ema = jax.tree_util.tree_map_with_path(sure_of_class_7, state.ema)
    labels = np.where(np.arange(300) < 291, 7, 3).astype(np.int32)
    data = data._replace(test=type(data.test)(data.test.images, labels))
    scores = project.evaluate(state.replace(ema=ema), 300, data=data)
    assert scores["accuracy"] == 291 / 300
    assert scores["loss"] == pytest.approx(100 * 9 / 300, rel=0.02)  # logits of 100 in bfloat16


@only(COMBINATIONS[::2])
def test_loss_and_counters_of_bfloat16_logits_are_exact(project):
    rng, task = np.random.default_rng(0), project.module("task")
    if project.is_image:
        logits = jnp.asarray(rng.normal(size=(301, 1000)), jnp.bfloat16)
        rows = {"label": np.argmax(logits, axis=-1), "mask": np.ones(301, np.float32)}
    else:
        logits = jnp.asarray(rng.normal(size=(301, 4, 256)), jnp.bfloat16)
        tokens = rng.integers(0, 256, (301, 5)).astype(np.uint8)
        rows = {"tokens": tokens, "mask": np.ones((301, 4), np.float32)}
    metrics = jax.jit(functools.partial(task.loss_and_metrics, config=task.TaskConfig()))(
        logits, rows
    )
    assert {x.dtype.name for x in jax.tree.leaves(metrics)} == {"float32"}
    expected = cross_entropy(logits, project.targets(rows)[0])
    np.testing.assert_allclose(metrics["loss"], (expected.sum(), expected.size), rtol=1e-6)
    if project.is_image:
        assert metrics["accuracy"] == (301, 301)
    else:
        assert metrics["num_examples"][0] == 301


def test_evaluation_of_a_row_depends_on_no_other_row(project):
    check_a_row_depends_on_no_other_row(project)


@only(COMBINATIONS[:2])
def test_bytes_and_floats_of_an_image_are_the_same_to_the_network(project):
    split = project.data.train
    as_bytes = type(split)(np.round(split.images * 255).astype(np.uint8), split.labels)
    assert as_bytes.images.max() == 255
    data = project.data._replace(train=as_bytes, test=as_bytes)
    state, step, _ = project.start_once()
    scores = project.evaluate(state), project.evaluate(state, data=data)
    assert_close(*scores, rtol=1e-6)
    updated, metrics = step(state, project.batch())
    state, step, _ = project.start(data=data)
    assert_close(
        step(state, as_bytes.rows(np.arange(16))), (updated, metrics), rtol=1e-4, atol=1e-6
    )


# ------------------------------------------------------------------------------------- Accumulation

PARTS = (1, 2, 4, 8)


def start_accumulating(project, parts):
    """A batch of 64 in so many parts, without what would make a difference."""
    rule = {"learning_rate": 0.1, "weight_decay": 0.5, "clip_norm": 0.0}
    config = project.config(rule, batch_size=64, accumulation_steps=parts, total_steps=12)
    return project.start_once(config, as_in_evaluation)


@pytest.mark.slow
@only(TWO_COMBINATIONS)
def test_accumulation_changes_memory_and_not_the_update(project):
    rows = project.batch(size=64)
    count = np.arange(64).reshape(-1, *[1] * (rows["mask"].ndim - 1))
    # From none of the first rows to all of the last, and none in micro-batch 0 of 8.
    chosen = np.random.default_rng(1).uniform(size=rows["mask"].shape) < count / 64
    rows["mask"] *= chosen & (count % 8 > 0)
    memory, params, metrics = [], [], []
    for parts in PARTS if project.is_image else PARTS[::2]:  # those of text compile for longer
        before, step, compiled = start_accumulating(project, parts)
        after, found = step(before, rows)
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        params.append(after.params)
        metrics.append(found)

    def mean_loss(params):
        variables = before.variables | {"params": params}
        logits, *_ = before.apply_fn(variables, project.inputs(rows), train=False)
        targets, mask = project.targets(rows)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.int32(targets))
        return (loss * mask).sum() / mask.sum()

    gradients = jax.jit(jax.grad(mean_loss))(before.params)
    # The first step of Nesterov's momentum is 1 + 0.9 times the gradient.
    expected = {
        name: p - 0.1 * (1.9 * g + (0.5 * p if name.endswith("kernel") else 0))
        for (name, p), g in zip(
            named(before.params).items(), named(gradients).values(), strict=True
        )
    }
    assert largest_change(gradients, jax.tree.map(jnp.zeros_like, gradients)) > 1e-2
    for found, sums in zip(params, metrics, strict=True):
        assert_close(named(found), expected, rtol=0, atol=1e-6)
        assert_close(
            {name: total for name, (total, _) in sums.items()},
            {name: total for name, (total, _) in metrics[0].items()},
            rtol=1e-5,
        )
        assert sums["loss"][1] == rows["mask"].sum()
    assert memory == sorted(set(memory), reverse=True)


@only(COMBINATIONS[:2])
def test_batch_normalisation_moves_once_per_micro_batch_in_order(project):
    rows = project.batch()
    before, step, _ = project.start_once()
    after, _ = step(before, rows)
    images = rows["image"]

    def chain(*order):
        model_state, key = before.model_state, jax.random.key(0)
        for j in order:
            variables = before.variables | model_state
            _, model_state, _ = before.apply_fn(variables, images[j::2], train=True, key=key)
        return model_state

    assert_close(after.model_state, chain(0, 1), rtol=1e-5, atol=1e-6)
    assert largest_change(chain(1, 0), after.model_state) > 1e-4
    assert largest_change(chain(1), after.model_state) > 1e-2

    # By hand, for the first layer, of which the input is a convolution of the pixels.
    kernel = next(x for x in named(before.params).values() if x.shape == (3, 3, 1, 8))
    padded = np.pad(images.astype(np.float64), [(0, 0), (1, 1), (1, 1), (0, 0)])
    features = sum(
        padded[:, i : i + 8, j : j + 8] * kernel[i, j, 0] for i in range(3) for j in range(3)
    )
    mean, var = np.zeros(8), np.ones(8)
    for j in range(2):
        mean = 0.9 * mean + 0.1 * features[j::2].mean(axis=(0, 1, 2))
        var = 0.9 * var + 0.1 * features[j::2].var(axis=(0, 1, 2))
    found = list(named(after.model_state).values())  # mean and var of each layer
    np.testing.assert_allclose(found[0], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], var, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ Learning rate


def applied_rate(project, before, after, decay):
    """Without gradients a step shrinks each kernel by the learning rate times the decay."""
    name = next(name for name in named(before.params) if name.endswith("kernel"))
    before, after = (named(x.params)[name].astype(np.float64) for x in (before, after))
    return abs(before - after).sum() / abs(before).sum() / decay


@pytest.mark.slow
@only(TWO_COMBINATIONS)
@pytest.mark.parametrize("parts", [1, 4])
def test_the_learning_rate_logged_is_the_one_applied_and_falls_to_zero(project, parts):
    state, step, _ = start_accumulating(project, parts)
    rows, logged, applied = with_zero_weight(project.batch(size=64)), [], []
    for _ in range(13):
        before = state
        state, _ = step(state, rows)
        logged.append(float(step.status["learning_rate"]))
        applied.append(applied_rate(project, before, state, decay=0.5))
    np.testing.assert_allclose(logged, 0.1 * (1 - np.arange(13) / 12), atol=1e-7)
    np.testing.assert_allclose(applied, logged, atol=1e-5)


def test_the_learning_rate_follows_the_updates_that_were_applied(project):
    state, step, _ = project.start_once()
    logged, applied = [], []
    for number in range(6):
        before, rows = state, with_zero_weight(project.batch())
        state, _ = step(state, with_infinite_weight(rows) if number in (1, 2, 4) else rows)
        logged.append(float(step.status["learning_rate"]))
        applied.append(applied_rate(project, before, state, decay=0.1))
    rates = 0.01 * (1 - np.arange(3) / STEPS)
    np.testing.assert_allclose(logged, rates[[0, 1, 1, 1, 2, 2]], atol=1e-8)
    np.testing.assert_allclose(applied, [rates[0], 0, 0, rates[1], 0, rates[2]], atol=1e-5)
    assert (int(state.step), int(state.skipped_steps)) == (6, 3)


@only(COMBINATIONS[:1])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_warm_up_longer_than_the_run_still_makes_a_schedule(project, schedule):
    create = project.module("optimizer").create_schedule
    for total in (1, 2, 3, 5, 100):
        for warmup in (0, 1, total, 100, 10_000):
            rule = {"schedule": schedule, "warmup_steps": warmup, "learning_rate": 0.5}
            made = create(project.config(rule).optimizer, total)
            rates = np.array(jax.vmap(made)(jnp.arange(total + 1)))
            assert all(rates[:total] > 0), "every step learns"
            assert rates.max() == pytest.approx(0.5), "the peak is reached"
            assert rates[total] == pytest.approx(0.5 if schedule == "constant" else 0, abs=1e-6)


# ------------------------------------------------------------------------------- Non-finite updates


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_bad_batch_leaves_everything_as_it_was(project, precision):
    check_a_bad_batch_leaves_everything_as_it_was(project, precision)


def test_after_too_many_bad_batches_in_a_row_nothing_changes_any_more(project):
    state, step, _ = project.start_once()
    first, good, bad = state, project.batch(), with_infinite_weight(project.batch())
    for rows in (bad, bad, good):  # two in a row are allowed
        state, _ = step(state, rows)
    assert not same_bits(state.params, first.params)
    for rows in (bad, bad, bad):
        state, _ = step(state, rows)
    last = state = state.replace(first_bad_leaf=jnp.int32(3))  # is still to blame in the end
    for rows in (good, good):
        state, metrics = step(state, rows)
    for name in ("params", "opt_state", "model_state", "ema"):
        assert same_bits(getattr(state, name), getattr(last, name)), name
    assert (int(state.skipped_in_a_row), int(state.first_bad_leaf)) == (5, 3)
    assert float(metrics["loss"][1]) == 0


@only(COMBINATIONS[:1])
def test_the_loss_scale_is_capped_floored_and_grows_after_1000_good_steps(project):
    scale_class = project.module("train_state").LossScale

    def after(factor, good_steps, finite):
        """Factor and counter after these outcomes."""
        scale = scale_class(jnp.float32(factor), jnp.int32(good_steps))
        scale, _ = jax.lax.scan(lambda s, f: (s.adjust(f), None), scale, jnp.array(finite))
        return float(scale.factor), int(scale.good_steps)

    good, bad = [True], [False]
    assert after(2**15, 0, 999 * good) == (2**15, 999)
    assert after(2**15, 0, 1000 * good) == (2**16, 0)
    assert after(2**15, 0, 2500 * good) == (2**17, 500)
    assert after(2**15, 999, bad + good) == (2**14, 1)
    assert after(2**15, 0, 600 * good + bad + 999 * good) == (2**14, 999)
    assert after(2**15, 0, 10_500 * good) == (2**24, 500)
    assert after(2**15, 0, 40 * bad) == (1, 0)


def test_the_loss_scale_does_not_scale_the_update(project):
    state, step, _ = project.start_once(project.config(precision="float16"))
    results = []
    for factor, good_steps in ((2.0**8, 0), (2.0**12, 999)):
        scale = state.loss_scale.replace(
            factor=jnp.float32(factor), good_steps=jnp.int32(good_steps)
        )
        after, metrics = step(state.replace(loss_scale=scale), project.batch())
        results.append((after.params, metrics["loss"], metrics["grad_norm"]))
        assert float(after.loss_scale.factor) == factor * (2 if good_steps == 999 else 1)
    assert_close(*results, rtol=2e-2, atol=1e-4)
    assert largest_change(state.params, results[0][0]) > 1e-3
    full, step, _ = project.start_once()
    _, metrics = step(full, project.batch())
    assert_close(metrics["grad_norm"], results[0][2], rtol=2e-2)


# ------------------------------------------------------------------------------------ Low precision

MANY = 200


def trajectory(project, precision):
    """Losses, variables after each of many small steps, and the last state."""
    if precision not in project.trajectories:
        state, step, _ = project.start_once(project.config(precision=precision))
        losses, variables = [], [jax.device_get(state.variables)]
        for number in range(MANY):
            state, metrics = step(state, project.batch(16 * number))
            losses.append(value(metrics, "loss"))
            variables.append(jax.device_get(state.variables))
        project.trajectories[precision] = losses, variables, jax.device_get(state)
    return project.trajectories[precision]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_many_steps_in_low_precision_go_where_those_in_float32_go(project, precision):
    losses, variables, _ = trajectory(project, "float32")
    low_losses, low_variables, low_state = trajectory(project, precision)
    assert int(low_state.skipped_steps) == 0

    def movement(variables):
        moved = jax.tree.map(np.subtract, variables[-1]["params"], variables[0]["params"])
        return np.concatenate([x.ravel() for x in jax.tree.leaves(moved)])

    full, low = movement(variables), movement(low_variables)
    error = np.linalg.norm(low - full) / np.linalg.norm(full)
    assert error < 0.1
    np.testing.assert_allclose(low_losses, losses, rtol=0.03)
    assert np.mean(losses[-6:]) < np.mean(losses[:6])


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_everything_kept_is_in_float32_whatever_the_precision(project, precision, name):
    config = project.config({"name": name}, precision=precision)
    plan = project.module("train_state").plan_train_state
    _, state = plan(config, project.data, project.mesh())
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        assert x.dtype.name in ("float32", "int32"), path
    assert len(jax.tree.leaves(state.opt_state)) >= len(jax.tree.leaves(state.params))


def test_the_average_in_bfloat16_training_matches_its_closed_form(project):
    _, variables, state = trajectory(project, "bfloat16")
    updates = np.arange(MANY, dtype=np.float64)
    decays = np.minimum(0.99, (1 + updates) / (10 + updates))
    kept = np.cumprod(decays[::-1])[::-1]  # of what there was before each update, at the end
    weights = (1 - decays) * np.append(kept[1:], 1)

    def closed_form(first, *later):
        average = kept[0] * first.astype(np.float64)
        return average + sum(w * x for w, x in zip(weights, later, strict=True))

    assert_close(state.ema, jax.tree.map(closed_form, *variables), rtol=1e-5, atol=1e-6)
    assert largest_change(state.ema["params"], variables[0]["params"]) > 5e-3
    assert largest_change(state.ema["params"], variables[-1]["params"]) > 2e-3


# ------------------------------------------------------------------------------------------ Dropout


def test_dropout_differs_between_steps_micro_batches_and_rows_only(project):
    """Of two different rows, each four times in each micro-batch, only one counts."""
    state, step, _ = project.start_once()
    weights = project.batch(size=ROWS)["mask"].reshape(ROWS, -1).sum(axis=1)
    longest = int(np.argmax(weights))
    rows = project.data.train.rows(np.array([longest, longest, 6, 6] * 4))

    def loss(row, number):
        only_row = (np.arange(16) == row).reshape(-1, *[1] * (rows["mask"].ndim - 1))
        counting = rows | {"mask": rows["mask"] * only_row}
        _, metrics = step(state.replace(step=jnp.int32(number)), counting)
        assert metrics["loss"][1] == weights[longest]
        return value(metrics, "loss")

    # Rows 0, 4, 8 and 12 are in micro-batch 0, rows 1, 5, 9 and 13, all the same, in 1.
    losses = [loss(row, 0) for row in (0, 4, 8, 12, 1, 5, 9, 13)]
    assert losses == [loss(row, 0) for row in (0, 4, 8, 12, 1, 5, 9, 13)]
    losses += [loss(row, 1) for row in (0, 4, 8, 12, 1, 5, 9, 13)]
    assert len(set(np.round(losses, 5))) == 16


# ------------------------------------------------------------------------------------------ Devices


@pytest.mark.slow
def test_several_devices_compute_what_one_does(project, monkeypatch):
    data, fsdp = (2, 2) if project.package.endswith("nnx") else (4, 1)
    monkeypatch.setattr(project.module("mesh"), "MIN_SPLIT_SIZE", 1)  # so that all are split
    results = []
    for started in (project.start_once(), project.start(mesh=project.mesh(data, fsdp))):
        state, step, _ = started
        before = jax.device_get(state.variables)
        for first in (0, 16):
            state, metrics = step(state, project.batch(first))
        results.append((state.variables, state.ema, metrics))
    split = [not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params)]
    assert any(split) == (fsdp > 1)
    assert largest_change(before["params"], results[0][0]["params"]) > 2e-3
    if project.is_image:
        assert largest_change(before["batch_stats"], results[0][0]["batch_stats"]) > 1e-2
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------- Optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_weight_decay_moves_kernels_and_nothing_else(project, name):
    check_decay_moves_kernels_and_nothing_else(project, name)


# ---------------------------------------------------------------------------- Tracing and compiling


def test_the_steps_leak_no_tracers(project):
    config = project.config(precision="float16")
    train_step = project.module("train_step")
    _, state = project.module("train_state").plan_train_state(config, project.data, project.mesh())
    step = functools.partial(train_step.train_step, config=config)
    with jax.checking_leaks():
        jax.eval_shape(step, state, project.batch())
        score = functools.partial(train_step.eval_step, config=config)
        jax.eval_shape(score, state, project.batch())


@pytest.mark.slow
@only(COMBINATIONS[:1])
def test_the_steps_compile_once_fresh_and_resumed(project, monkeypatch, tmp_path):
    """With a last batch of the evaluation that is not full, and twice in one process."""
    counts = collections.Counter()

    def count(event, duration, **facts):
        if event.endswith("backend_compile_duration"):
            counts[facts.get("fun_name")] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    data = project.make_data(100)
    monkeypatch.setattr(project.module("data"), "load", lambda config: data)
    config = project.config(
        precision="float16", workdir=str(tmp_path), total_steps=6, batch_size=24, eval_every=2
    )
    config = dataclasses.replace(config, accumulation_steps=1)
    for stop, status in ((3, "preempted"), (None, "completed")):
        counts.clear()
        result = project.module("train").main(dataclasses.replace(config, stop_after_step=stop))
        assert result["status"] == status
        assert counts["jit(train_step)"] == 1
        assert counts["jit(eval_step)"] == 1
    assert result["eval"]["num_examples"] == 100


# ------------------------------------------------------------------------------------ Other meshes


@pytest.mark.slow
@only(TWO_COMBINATIONS)
def test_a_checkpoint_is_restored_on_any_mesh_bit_for_bit(project, monkeypatch, tmp_path):
    monkeypatch.setattr(project.module("mesh"), "MIN_SPLIT_SIZE", 1)  # so that all are split
    checkpoint, plan = (
        project.module("runtime.checkpoint"),
        project.module("train_state").plan_train_state,
    )
    config = project.config(dict(name="adamw"), precision="float16")
    meshes = [project.mesh(*shape) for shape in ((1, 4), (1, 1), (4, 1), (2, 2), (1, 4))]
    for step, (mesh, other) in enumerate(itertools.pairwise(meshes)):
        state = plan(config, project.data, mesh)[0]()
        with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as checkpoints:
            checkpoints.save(step, state, checkpoint.Progress())
            checkpoints.wait()
            _, abstract = plan(config, project.data, other)
            restored, _ = checkpoints.restore(step, abstract)
        assert same_bits(jax.device_get(state), jax.device_get(restored))
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        assert jax.tree.map(lambda x: x.sharding, restored) == shardings


# -------------------------------------------------------------------------------------------- Seeds


@pytest.mark.slow
@only(COMBINATIONS[3:])
def test_a_seed_decides_everything(project):
    common, *_ = project.start_once()

    def run(config):
        """First parameters and rows, the loss that dropout decides, and the last state."""
        start, step, _ = project.start(config)
        sharding = project.module("mesh").batch_sharding(project.mesh())
        stream = project.module("batches").train_batches(project.data.train, config, sharding, 0)
        batches, state = list(stream), start
        for batch in batches:
            state, _ = step(state, batch)
        _, metrics = step(start.replace(params=common.params), project.batch())
        return jax.device_get((start.params, batches[0], metrics["loss"], state))

    config = project.config(total_steps=8)  # more than an epoch, of 6 steps
    first, again, other = map(run, (config, config, dataclasses.replace(config, seed=1)))
    assert all(map(same_bits, first, again))
    assert not any(map(same_bits, first, other))


# ----------------------------------------------------------------------------- An edited TrainState


NUMBERS = {"seen": lambda: jnp.arange(5), "best": lambda: jnp.ones(3, jnp.bfloat16)}
OTHERS = {"key": lambda: jax.random.key(7), "done": lambda: jnp.array([True, False])}


@pytest.mark.parametrize(
    ("project", "fields"),
    [
        pytest.param(COMBINATIONS[1], NUMBERS, id="numbers"),
        pytest.param(COMBINATIONS[2], OTHERS, id="others"),
    ],
    indirect=["project"],
)
def test_a_field_added_to_the_state_is_trained_with_saved_and_restored(
    project, fields, monkeypatch, tmp_path
):
    train_state, checkpoint = project.module("train_state"), project.module("runtime.checkpoint")
    create_state = train_state.create_train_state
    types = {name: jax.Array for name in fields}
    edited = type("Edited", (train_state.TrainState,), {"__annotations__": types})

    def create(config, model, tx):
        state = create_state(config, model, tx)
        old = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        return edited(**old, **{name: make() for name, make in fields.items()})

    monkeypatch.setattr(train_state, "create_train_state", create)
    state, step, _ = project.start()
    state, _ = step(state, project.batch())
    _, abstract = train_state.plan_train_state(project.config(), project.data, project.mesh())
    checkpoints = checkpoint.Checkpoints(tmp_path)
    checkpoints.save(1, state, checkpoint.Progress())
    checkpoints.close()
    checkpoints = checkpoint.Checkpoints(tmp_path)
    restored, _ = checkpoints.restore_latest(abstract)
    checkpoints.close()
    for name, make in fields.items():
        for found in (state, restored):
            assert getattr(found, name).dtype == make().dtype
            assert jnp.array_equal(getattr(found, name), make())
    assert same_bits(restored.params, state.params)
