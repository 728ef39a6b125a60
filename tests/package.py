"""A generated package in the process of the tests: its modules, steps and scores, without a run.

test_numbers.py asks whether the numbers of the project's own networks are right, test_networks.py
whether those of others are.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np

# Most tests use one of these devices. Set here, before any test starts a backend, and not in the
# environment, which the children of other tests inherit.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

ROWS, STEPS = 96, 240


class Package:
    """A generated package and a small data set for it, with shorthands for what a run does."""

    def __init__(self, package, task):
        self.package, self.is_image = package, task == "image_classification"
        self.data = self.make_data(ROWS)
        self.started, self.trajectories = {}, {}

    def module(self, name):
        return importlib.import_module(f"{self.package}.{name}")

    def make_data(self, rows):
        """A data set, three times the same split. Images are float32: those can have a NaN."""
        data, rng = self.module("data"), np.random.default_rng(0)
        if self.is_image:
            images = rng.integers(0, 256, (rows, 8, 8, 1)).astype(np.float32) / np.float32(255)
            split = data.Split(images, rng.integers(0, 10, rows).astype(np.int32))
        else:  # texts of one window each, of all lengths: 1 to 16 of the predictions count
            lengths = rng.integers(0, 16, rows)
            split = data.Split([rng.integers(1, 256, n).astype(np.uint8) for n in lengths], 16)
        assert len(split) == rows
        return data.Data(split, split, split, 10 if self.is_image else 256, "")

    def config(self, optimizer=None, **changes):
        """With everything on that a step can do, unless changed."""
        config, model = self.module("config"), self.module("model")
        rule = {"name": "sgd", "learning_rate": 0.01, "schedule": "linear", "warmup_steps": 0}
        rule |= {"weight_decay": 0.1, "clip_norm": 1.0} | (optimizer or {})
        settings = {
            "total_steps": STEPS,
            "batch_size": 16,
            "accumulation_steps": 2,
            "ema_decay": 0.99,
            "max_skipped_steps": 2,
            "model": dataclasses.replace(model.TINY, dropout_rate=0.3),
            "optimizer": config.OptimizerConfig(**rule),
        }
        return config.Config(**settings | changes)

    def mesh(self, data=1, fsdp=1):
        devices, kinds = jax.devices()[: data * fsdp], (jax.sharding.AxisType.Auto,) * 2
        return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=kinds, devices=devices)

    def start(self, config=None, mesh=None, data=None, change=None):
        """What train.main sets up: (state, step, compiled). `change` edits the state before."""
        config, mesh, data = config or self.config(), mesh or self.mesh(), data or self.data
        create, abstract = self.module("train_state").plan_train_state(config, data, mesh)
        state = create()
        if change:
            apply = change(state.apply_fn)
            state, abstract = (x.replace(apply_fn=apply) for x in (state, abstract))
        compiled, fresh, _ = self.module("train_step").compile_train_step(
            config, abstract, data.train, mesh
        )
        sharding = self.module("mesh").batch_sharding(mesh)

        def step(state, rows):
            """One step on a copy: the given state can be used again."""
            state = jax.tree.map(jnp.copy, state)
            *results, step.status = compiled(state, fresh(), jax.device_put(rows, sharding))
            return results

        return state, step, compiled

    def start_once(self, config=None, change=None):
        """The same, compiled for the first test that asks for it."""
        key = config or self.config(), change
        if key not in self.started:
            self.started[key] = self.start(config, change=change)
        return self.started[key]

    def batch(self, first=0, size=16):
        return self.data.train.rows(np.arange(first, first + size) % ROWS)

    def score(self, state, rows, mesh=None):
        """Metrics of a batch."""
        return self.module("train_step").jit_eval_step(self.config(), mesh or self.mesh())(
            state, rows
        )

    def evaluate(self, state, batch_size=7, mesh=None, data=None):
        """Metrics of the test split, as train.main and evaluate.main have them computed."""
        mesh, data = mesh or self.mesh(), data or self.data
        sharding = self.module("mesh").batch_sharding(mesh)
        config = self.config(batch_size=batch_size)
        return self.module("evaluate").evaluate(
            lambda state, rows: self.score(state, rows, mesh),
            state,
            data.test,
            config,
            sharding,
            "test",
        )

    def targets(self, rows):
        """What a batch predicts, and the weight of each prediction."""
        return (rows["label"] if self.is_image else rows["tokens"][:, 1:]), rows["mask"]

    def inputs(self, rows):
        """What the network should see of a batch."""
        return rows["image"] if self.is_image else rows["tokens"][:, :-1].astype(np.int32)


def named(tree):
    """Leaves by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), *map(named, (a, b)))


def same_bits(a, b):
    a, b = named(a), named(b)
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def largest_change(a, b):
    a, b = named(a), named(b)
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def value(metrics, name):
    return float(metrics[name][0] / metrics[name][1])


def cross_entropy(logits, targets):
    """In float64, for each prediction."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(log_p, np.asarray(targets, np.int64)[..., None], -1)[..., 0]


def with_infinite_weight(rows):
    """A batch whose loss is not finite: one row, of micro-batch 1, weighs infinitely."""
    mask = rows["mask"].copy()
    mask[1] = np.inf
    return rows | {"mask": mask}


# ------------------------------------------------------------------- What holds for every network


def check_decay_moves_kernels_and_nothing_else(project, name):
    config = project.config({"name": name, "learning_rate": 0.1})
    plan = project.module("train_state").plan_train_state
    _, abstract = plan(config, project.data, project.mesh())
    params = project.start_once()[0].params
    gradients = jax.tree.map(jnp.zeros_like, params)
    state = abstract.replace(step=0, params=params, opt_state=abstract.tx.init(params))
    after = jax.jit(lambda: state.apply_gradients(grads=gradients).params)()
    before, after = named(params), named(after)
    kinds = {name.split("/")[-1] for name in before}
    assert len(kinds) > 1
    for path, x in before.items():
        factor = 1 - 0.1 * 0.1 if path.endswith("kernel") else 1
        np.testing.assert_allclose(after[path], factor * x, rtol=1e-6, atol=1e-7, err_msg=path)
        assert np.array_equal(after[path], x) == (factor == 1), path


def check_a_row_depends_on_no_other_row(project):
    state, _, _ = project.start_once()

    def loss(number, first, size=7, place=3):
        """That of one row, at this place in a batch of others."""
        rows = project.batch(first, size)
        for name, x in project.data.train.rows(np.array([number])).items():
            rows[name][place] = x[0]
        rows["mask"][np.arange(size) != place] = 0
        return project.score(state, rows)["loss"]

    alone = loss(50, 0)
    assert same_bits(loss(50, 0), alone)
    assert same_bits(loss(50, 20), alone)
    assert_close(loss(50, 0, size=128), alone, rtol=1e-6)
    assert_close(loss(50, 0, place=5), alone, rtol=1e-6)
    assert not same_bits(loss(51, 0), alone)


def check_a_bad_batch_leaves_everything_as_it_was(project, precision):
    """One row spoils the gradients: it is in the second of two micro-batches."""
    first, step, _ = project.start_once(project.config(precision=precision))
    good = project.batch()
    state, _ = step(first, project.batch(16))
    assert (int(state.step), int(state.skipped_steps)) == (1, 0)
    assert not same_bits(state.ema, first.ema)

    cases = [(state, with_infinite_weight(good))]
    if project.is_image:
        # The last of them is too much for float16 only.
        for pixel in (np.nan, np.inf, 6e8)[: 3 if precision == "float16" else 2]:
            rows = good | {"image": good["image"].copy()}
            rows["image"][1, 2, 2] = pixel
            cases.append((state, rows))
    if precision == "float16":  # gradients of the logits up to the scale / weight: over 65504
        scale = state.loss_scale.replace(factor=jnp.float32(2**24))
        cases.append((state.replace(loss_scale=scale), good))
    for before, rows in cases:
        after, metrics = step(before, rows)
        for name in ("params", "opt_state", "model_state", "ema"):
            assert same_bits(getattr(after, name), getattr(before, name)), name
        assert (int(after.step), int(after.skipped_steps), int(after.skipped_in_a_row)) == (2, 1, 1)
        assert all(float(x) == 0 for x in jax.tree.leaves(metrics))
        if precision == "float16":
            assert float(after.loss_scale.factor) == float(before.loss_scale.factor) / 2
            assert int(after.loss_scale.good_steps) == 0
        # But for the counters it goes on as if that batch had not been.
        same = {"step": jnp.int32(2), "skipped_steps": jnp.int32(1)}
        same |= {"loss_scale": state.loss_scale}
        after, metrics = step(after.replace(**same), good)
        expected, _ = step(before.replace(**same), good)
        counters = {name: getattr(expected, name) for name in ("skipped_steps", "first_bad_leaf")}
        assert same_bits(after.replace(**counters), expected)
        assert not same_bits(after.params, before.params)
        assert np.isfinite(value(metrics, "loss"))
    assert np.isfinite(project.evaluate(after)["loss"])
