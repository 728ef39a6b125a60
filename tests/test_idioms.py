"""Modules written as Flax's documentation writes them train, resume and evaluate unchanged.

Each takes the place of a generated project's model, and the project's own step trains it.
"""

import contextlib
import functools
import importlib
from typing import Any

import bake
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import APIS
from flax import nnx

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_fast")]

CLASSES, PIXELS, ROWS = 10, 16, 16


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The name of a generated package for each API."""
    with pytest.MonkeyPatch.context() as patch:
        made = {}
        for api in APIS:
            out = tmp_path_factory.mktemp(f"idioms_{api}")
            project = bake.generated(out, flax_api=api, package=f"idioms_{api}")
            patch.syspath_prepend(project)
            made[api] = project.name
        yield made


class Project:
    """A generated package in which a module of a test is the model."""

    def __init__(self, package, patch):
        self.package, self.patch = package, patch
        self.loss_and_metrics = self.module("task").loss_and_metrics
        data, rng = self.module("data"), np.random.default_rng(0)
        images = rng.uniform(size=(ROWS, 4, 4, 1)).astype(np.float32)
        split = data.Split(images, np.arange(ROWS, dtype=np.int32) % CLASSES)
        self.data = data.Data(split, split, split, CLASSES, "")
        self.batch = split.rows(np.arange(ROWS))

    def module(self, name):
        return importlib.import_module(f"{self.package}.{name}")

    def use(self, build, model_inputs=None, extra_loss=None, logits=lambda outputs: outputs):
        """Have model.build call `build`, of (rngs) in NNX; the task as a user would edit it."""
        task, model = self.module("task"), self.module("model")

        def edited(outputs, batch, config):
            metrics = self.loss_and_metrics(logits(outputs), batch, config)
            if extra_loss:
                total, weight = metrics["loss"]
                metrics["loss"] = total + weight * extra_loss(outputs, batch), weight
            return metrics

        self.patch.setattr(
            model, "build", lambda config, inputs, outputs, dtype, **rngs: build(**rngs)
        )
        self.patch.setattr(task, "loss_and_metrics", edited)
        if model_inputs:
            self.patch.setattr(task, "model_inputs", model_inputs)
        return self.start()

    def config(self):
        config = self.module("config")
        rule = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0}
        settings = {"total_steps": 8, "batch_size": ROWS}
        return config.Config(
            **settings, ema_decay=0.9, optimizer=config.OptimizerConfig(**rule, clip_norm=0.0)
        )

    def start(self):
        """The state at step 0 of the model in use; sets what `step` and `score` compute."""
        config = self.config()
        kinds = (jax.sharding.AxisType.Auto,) * 2  # one device: other tests may ask for more
        mesh = jax.make_mesh((1, 1), ("data", "fsdp"), kinds, devices=jax.devices()[:1])
        create, self.abstract = self.module("train_state").plan_train_state(config, self.data, mesh)
        step, fresh, _ = self.module("train_step").compile_train_step(
            config, self.abstract, self.data.train, mesh
        )
        score = self.module("train_step").jit_eval_step(config, mesh)

        def step_of_a_copy(state):
            state, metrics, status = step(jax.tree.map(jnp.copy, state), fresh(), self.batch)
            assert not status["skipped_steps"]
            return state, float(metrics["loss"][0] / metrics["loss"][1])

        self.step = step_of_a_copy
        self.score = lambda state: float(np.divide(*score(state, self.batch)["loss"]))
        return create()

    def train(self, state, steps=3):
        for _ in range(steps):
            state, _ = self.step(state)
        return state

    def through_a_checkpoint(self, state, path):
        checkpoint, progress = self.module("runtime.checkpoint"), self.module("runtime.progress")
        with contextlib.closing(checkpoint.Checkpoints(path)) as checkpoints:
            checkpoints.save(int(state.step), state, progress.Progress())
            checkpoints.wait()
            restored, _ = checkpoints.restore_latest(self.abstract)
        assert same(restored, state)
        return restored.replace(apply_fn=state.apply_fn, tx=state.tx)


@pytest.fixture
def project(api, packages, monkeypatch):
    return Project(packages[api], monkeypatch)


def on(**networks):
    """Run a test with each of these: `linen=` and `nnx=`, with any suffix."""
    pairs = [(name.split("_")[0], network) for name, network in networks.items()]
    return pytest.mark.parametrize("api, network", pairs, ids=list(networks))


def same(a, b):
    """Whether two pytrees have the same structure and bits."""
    a, b = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    return [path for path, _ in a] == [path for path, _ in b] and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for (_, x), (_, y) in zip(a, b, strict=True)
    )


def flat(x):
    return x.reshape(len(x), -1)


class NnxHead(nnx.Module):
    """What the NNX modules below share: a layer to the logits."""

    def __init__(self, rngs):
        self.head = nnx.Linear(PIXELS, CLASSES, rngs=rngs)


# ------------------------------------------------------------------------------------------ Dropout


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dropout(0.5, deterministic=not train)(flat(x))
        return nn.Dense(CLASSES)(x)


class LinenTraining(nn.Module):
    @nn.compact
    def __call__(self, x, *, training):
        return LinenDropout()(x, training)


class LinenDeterministic(nn.Module):
    def setup(self):
        self.dropout, self.head = nn.Dropout(0.5), nn.Dense(CLASSES)

    def __call__(self, x, deterministic=True):
        return self.head(self.dropout(flat(x), deterministic=deterministic))


class NnxDropout(NnxHead):
    """The layer has its own rngs, and the call says nothing of training."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(flat(x)))


class NnxRngsInCall(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, *, train, rngs=None):
        return self.head(self.dropout(flat(x), deterministic=not train, rngs=rngs))


class NnxDeterministic(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.rngs = rngs

    def __call__(self, x, deterministic: bool):
        dropout = nnx.Dropout(0.5, rngs=self.rngs)
        return self.head(dropout(flat(x), deterministic=deterministic))


DROPOUT = {
    "linen_train": LinenDropout,
    "linen_training": LinenTraining,
    "linen_deterministic": LinenDeterministic,
    "nnx_own_rngs": NnxDropout,
    "nnx_rngs_in_call": NnxRngsInCall,
    "nnx_deterministic": NnxDeterministic,
}


@on(**DROPOUT)
def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation(project, network):
    state = project.use(network)
    assert state.model_state == {}
    losses = [project.step(state.replace(step=jnp.int32(i)))[1] for i in range(4)]
    assert losses == [project.step(state.replace(step=jnp.int32(i)))[1] for i in range(4)]
    assert len(set(losses)) == 4
    outputs, *_ = state.apply_fn(state.variables, project.batch["image"], train=False)
    layer = next(x for x in jax.tree.leaves(state.params, is_leaf=lambda x: "kernel" in x))
    expected = flat(project.batch["image"]) @ layer["kernel"] + layer["bias"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@on(**{name: DROPOUT[name] for name in ("linen_train", "nnx_own_rngs")})
def test_a_run_that_was_interrupted_draws_the_same_dropout(project, network, tmp_path):
    state = project.use(network)
    straight = project.train(state, 4)
    resumed = project.through_a_checkpoint(project.train(state, 2), tmp_path)
    assert same(project.train(resumed, 2), straight)


class LinenMasks(nn.Module):
    """Of equal layers on ones, one after the other and in a stack, what they leave."""

    @nn.compact
    def __call__(self, x, train):
        ones = jnp.ones((len(x), 64))

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, ones, _):
                return ones, nn.Dropout(0.5, deterministic=not train)(ones)

        layers = [nn.Dropout(0.5, deterministic=not train)(ones) for _ in range(2)]
        stack = nn.scan(Layer, split_rngs={"dropout": True}, length=3)()(ones, None)[1]
        return nn.Dense(CLASSES)(flat(x)), jnp.concatenate([jnp.stack(layers), stack])


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


class NnxMasks(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = nnx.List([NnxLayer(rngs), NnxLayer(rngs)])

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return NnxLayer(rngs)

        self.stack = stack(rngs)

    def __call__(self, x):
        ones = jnp.ones((len(x), 64))

        @nnx.scan(in_axes=(0, None), out_axes=0)
        def run(layer, ones):
            return layer(ones)

        layers = jnp.stack([layer(ones) for layer in self.layers])
        return self.head(flat(x)), jnp.concatenate([layers, run(self.stack, ones)])


@on(linen=LinenMasks, nnx=NnxMasks)
def test_equal_layers_and_those_of_a_stack_drop_different_features(project, network):
    state = project.use(network, logits=lambda outputs: outputs[0])
    (_, masks), *_ = state.apply_fn(
        state.variables, project.batch["image"], train=True, key=jax.random.key(1)
    )
    assert len({x.tobytes() for x in np.asarray(masks)}) == 5
    assert 0.4 < (np.asarray(masks) > 0).mean() < 0.6
    project.train(state, 1)


def test_dropout_changes_no_parameter_that_is_drawn_after_it(packages):
    class First(nnx.Module):
        def __init__(self, rngs, rate):
            self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None
            self.head = nnx.Linear(PIXELS, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.head(x)

    functional = importlib.import_module(f"{packages['nnx']}.runtime.functional")
    inputs = jax.ShapeDtypeStruct((1, PIXELS), np.float32)
    made = [
        functional.pure_functions(functools.partial(First, rate=rate), inputs) for rate in (0, 0.5)
    ]
    assert same(*(x.init(jax.random.key(0)) for x in made))


# -------------------------------------------------------------------------------------------- Noise


class LinenNoise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(flat(x)) + jax.random.normal(self.make_rng("noise"), (CLASSES,))


class NnxNoise(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.rngs = rngs

    def __call__(self, x):
        return self.head(flat(x)) + jax.random.normal(self.rngs.noise(), (CLASSES,))


class NnxNoiseInCall(NnxHead):
    def __call__(self, x, rngs):
        return self.head(flat(x)) + rngs.noise.normal((CLASSES,))


@on(linen=LinenNoise, nnx_own=NnxNoise, nnx_in_call=NnxNoiseInCall)
def test_noise_differs_from_step_to_step_and_stands_still_in_evaluation(project, network):
    state = project.use(network)
    losses = [project.step(state.replace(step=jnp.int32(i % 3)))[1] for i in range(6)]
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3
    assert project.score(state) == project.score(state.replace(step=jnp.int32(5)))


# ------------------------------------------------------------------------------ Batch normalisation


class LinenBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=not train)(flat(x)))


class NnxBatchNorm(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(PIXELS, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(flat(x)))


@on(linen=LinenBatchNorm, nnx=NnxBatchNorm)
def test_batch_statistics_move_in_training_and_are_used_in_evaluation(project, network):
    state = project.use(network)
    assert set(state.model_state) == {"batch_stats"}
    trained = project.train(state)
    assert not same(trained.model_state, state.model_state)
    images = project.batch["image"]
    outputs, kept, _ = trained.apply_fn(trained.variables, images, train=False)
    assert same(kept, trained.model_state)
    alone, *_ = trained.apply_fn(trained.variables, images[:1], train=False)
    np.testing.assert_allclose(alone, outputs[:1], rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------- Sown


class LinenSowing(nn.Module):
    collection: str = "intermediates"

    @nn.compact
    def __call__(self, x, train):
        x = LinenSowingBlock(self.collection, name="block")(flat(x))
        return nn.Dense(CLASSES)(x)


class LinenSowingBlock(nn.Module):
    collection: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        self.sow(self.collection, "x", x)
        return x


class LinenSumming(nn.Module):
    """As in the documentation of sow: added up, where a tuple is the default."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="layer")(flat(x))

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                add = {"init_fn": lambda: 0, "reduce_fn": lambda a, b: a + b}
                self.sow("losses", "x", x / 4, **add)
                self.sow("losses", "x", x * 3 / 4, **add)

        Block(name="block")(x)
        return nn.Dense(CLASSES)(x)


class OwnLoss(nnx.Intermediate):
    """A type of its own is a collection of its own."""


class NnxSowing(nnx.Module):
    def __init__(self, rngs, kind=nnx.Intermediate):
        self.block = NnxSowingBlock(kind, rngs)
        self.head = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(flat(x)))


class NnxSowingBlock(nnx.Module):
    def __init__(self, kind, rngs):
        self.layer, self.kind = nnx.Linear(PIXELS, 8, rngs=rngs), kind

    def __call__(self, x):
        x = self.layer(x)
        self.sow(self.kind, "x", x)
        return self.perturb("perturbation", x)


class NnxOwnKind(NnxSowing):
    def __init__(self, rngs):
        super().__init__(rngs, OwnLoss)


class NnxAssigning(nnx.Module):
    """Without sow: a variable assigned in the call."""

    def __init__(self, rngs):
        self.block, self.head = NnxHead(rngs), nnx.Linear(CLASSES, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.block.head(flat(x))
        self.block.x = nnx.Intermediate((x,))
        return self.head(x)


SOWN = {
    "linen": (LinenSowing, "intermediates"),
    "linen_any_name": (functools.partial(LinenSowing, "losses"), "losses"),
    "linen_summed": (LinenSumming, "losses"),
    "nnx": (NnxSowing, "intermediates"),
    "nnx_own_kind": (NnxOwnKind, "OwnLoss"),
    "nnx_assigned": (NnxAssigning, "intermediates"),
}


@on(**SOWN)
def test_what_is_sown_can_be_part_of_the_loss_and_is_not_carried(project, network):
    build, name = network

    def auxiliary(outputs, batch):
        """100 plus the mean square of what the block has sown."""
        leaves = jax.tree.leaves(batch[name]["block"]["x"])
        return 100 + sum(jnp.mean(jnp.square(x)) for x in leaves)

    def size(state):
        images = project.batch["image"]
        sown = state.apply_fn(state.variables, images, train=False)[2]
        assert len(jax.tree.leaves(sown[name])) == 1
        return float(auxiliary(None, sown)) - 100

    state = project.use(build, extra_loss=auxiliary)
    assert state.model_state == {}
    assert project.step(state)[1] > 100
    assert project.score(state) > 100
    trained = project.train(state, 8)
    assert jax.tree.structure(trained) == jax.tree.structure(state)
    assert size(trained) < 0.9 * size(state)
    plain = project.use(build)
    assert size(project.train(plain, 8)) > size(trained)  # the gradients come from the loss


class LinenSowingStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = nn.Dense(PIXELS)(x)
                self.sow("intermediates", "x", x)
                return x, None

        axes = {"variable_axes": {"params": 0, "intermediates": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Layer), length=3, **axes)(name="stack")(flat(x), None)
        return nn.Dense(CLASSES)(x)


class NnxSowingStack(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)

        class Layer(nnx.Module):
            def __init__(self, rngs):
                self.layer = nnx.Linear(PIXELS, PIXELS, rngs=rngs)

            def __call__(self, x):
                x = self.layer(x)
                self.sow(nnx.Intermediate, "x", x)
                return x

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return Layer(rngs)

        self.stack = stack(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        return self.head(run(self.stack, flat(x)))


@on(linen=LinenSowingStack, nnx=NnxSowingStack)
def test_a_stack_of_layers_sows_as_a_stack(project, network):
    def auxiliary(outputs, batch):
        (x,) = batch["intermediates"]["stack"]["x"]
        assert x.shape == (3, ROWS, PIXELS)
        return jnp.mean(jnp.square(x))

    project.train(project.use(network, extra_loss=auxiliary), 2)


class LinenPerturbing(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.perturb("before_the_loss", nn.Dense(CLASSES)(flat(x)))


@on(linen=LinenPerturbing)
def test_perturbations_are_not_carried(project, network):
    state = project.use(network)
    assert project.train(state, 2).model_state == {}


# ------------------------------------------------------------------------------- Inputs and outputs


class LinenOfDict(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(CLASSES)(flat(inputs["image"])) + nn.Embed(2, CLASSES)(inputs["side"])


class NnxOfDict(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.embed = nnx.Embed(2, CLASSES, rngs=rngs)

    def __call__(self, inputs):
        return self.head(flat(inputs["image"])) + self.embed(inputs["side"])


class LinenOfTuple(LinenOfDict):
    @nn.compact
    def __call__(self, inputs):
        image, side = inputs
        return nn.Dense(CLASSES)(flat(image)) + nn.Embed(2, CLASSES)(side)


class NnxOfTuple(NnxOfDict):
    def __call__(self, inputs):
        image, side = inputs
        return super().__call__({"image": image, "side": side})


def as_dictionary(batch):
    return {"image": batch["image"], "side": batch["label"] % 2}


def as_tuple(batch):
    return tuple(as_dictionary(batch).values())


INPUTS = {
    "linen_dict": (LinenOfDict, as_dictionary),
    "nnx_dict": (NnxOfDict, as_dictionary),
    "linen_tuple": (LinenOfTuple, as_tuple),
    "nnx_tuple": (NnxOfTuple, as_tuple),
}


@on(**INPUTS)
def test_inputs_may_be_a_dictionary_or_tuple(project, network):
    build, model_inputs = network
    state = project.use(build, model_inputs)
    trained = project.train(state, 8)
    assert project.score(trained) < project.score(state)
    assert all(
        not same(a, b)
        for a, b in zip(*map(jax.tree.leaves, (state.params, trained.params)), strict=True)
    )


class LinenToDict(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"logits": nn.Dense(CLASSES)(flat(x)), "size": nn.Dense(1)(flat(x))}


class LinenToTuple(nn.Module):
    @nn.compact
    def __call__(self, x):
        return tuple(LinenToDict(name="inner")(x).values())


class NnxToDict(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.size = nnx.Linear(PIXELS, 1, rngs=rngs)

    def __call__(self, x):
        return {"logits": self.head(flat(x)), "size": self.size(flat(x))}


class NnxToTuple(NnxToDict):
    def __call__(self, x):
        return tuple(super().__call__(x).values())


@on(linen_dict=LinenToDict, linen_tuple=LinenToTuple, nnx_dict=NnxToDict, nnx_tuple=NnxToTuple)
def test_outputs_may_be_a_dictionary_or_tuple(project, network):
    def part(outputs, name):
        return outputs[name] if isinstance(outputs, dict) else outputs[name == "size"]

    state = project.use(
        network,
        logits=lambda outputs: part(outputs, "logits"),
        extra_loss=lambda outputs, batch: jnp.mean(jnp.square(part(outputs, "size") - 3)),
    )
    assert project.score(project.train(state, 8)) < project.score(state) - 1


# ---------------------------------------------------------------------------------- Other variables


class LinenVariables(nn.Module):
    """A counter and, as in the documentation's BiasAdderWithRunningMean, an average."""

    decay: float = 0.9

    @nn.compact
    def __call__(self, x):
        x = flat(x)
        is_initialized = self.has_variable("stats", "mean")
        mean = self.variable("stats", "mean", lambda shape: jnp.zeros(shape), x.shape[1:])
        count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if is_initialized:
            mean.value = self.decay * mean.value + (1 - self.decay) * jnp.mean(x, axis=0)
            count.value += 1
        return nn.Dense(CLASSES)(x - mean.value)


class Stats(nnx.Variable):
    """A type of variable that Flax does not know."""


class Counts(nnx.Variable):
    pass


class NnxVariables(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean, self.calls = Stats(jnp.zeros(PIXELS)), Counts(jnp.zeros((), jnp.int32))
        self.unused = nnx.Cache({"deep": (jnp.zeros(2), jnp.ones(3))})
        self.scale = jax.random.uniform(rngs.params(), (PIXELS,))  # an array that is no variable

    def __call__(self, x):
        x = self.scale * flat(x)
        self.mean[...] = 0.9 * self.mean + 0.1 * jnp.mean(x, axis=0)
        self.calls[...] += 1
        return self.head(x - self.mean)


def count_of(tree):
    return next(int(x) for x in jax.tree.leaves(tree) if x.dtype == np.int32)


@on(linen=LinenVariables, nnx=NnxVariables)
def test_other_variables_are_carried_saved_restored_and_left_alone_in_evaluation(
    project, network, tmp_path
):
    state = project.use(network)
    names = {"linen": {"stats", "counts"}, "nnx": {"Stats", "Counts", "cache", "arrays"}}
    assert set(state.model_state) == names["linen" if network is LinenVariables else "nnx"]
    assert count_of(state.model_state) == 0
    half = project.train(state, 2)
    assert count_of(half.model_state) == count_of(half.ema) == 2
    project.score(half)
    _, kept, _ = half.apply_fn(half.variables, project.batch["image"], train=False)
    assert same(kept, half.model_state)
    restored = project.through_a_checkpoint(half, tmp_path)
    assert same(project.train(restored, 2), project.train(half, 2))
    assert project.score(half) != project.score(half.replace(ema=half.ema | state.model_state))


# ------------------------------------------------------------------------------------------ Boxes


class LinenBoxes(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        mean = self.variable(
            "stats", "mean", nn.with_partitioning(lambda: jnp.zeros(PIXELS), ("model",))
        )
        if train:
            mean.value = flat(x).mean(axis=0)
        return nn.Dense(CLASSES, kernel_init=kernel)(flat(x) - mean.value)


@on(linen=LinenBoxes)
def test_boxes_with_names_of_axes_are_taken_off(project, network):
    state = project.use(network)
    trained = project.train(state)
    assert not any(
        isinstance(x, nn.Partitioned)
        for x in jax.tree.leaves(trained, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    )
    assert jax.tree.structure(trained) == jax.tree.structure(state)
    assert not same(trained.model_state, state.model_state)


# --------------------------------------------------------------------------------- What cannot work


class LinenLate(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        if train:
            self.variable("late", "count", lambda: jnp.zeros(())).value += 1
        return nn.Dense(CLASSES)(flat(x))


class NnxLate(NnxHead):
    def __call__(self, x):
        self.count = nnx.Cache(jnp.zeros(()))
        return self.head(flat(x))


class LinenGrowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        rows = self.variable("seen", "rows", lambda: jnp.zeros((0, PIXELS)))
        if not self.is_initializing():
            rows.value = jnp.concatenate([rows.value, flat(x)])
        return nn.Dense(CLASSES)(flat(x))


class NnxGrowing(NnxHead):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.rows = nnx.Cache(jnp.zeros((0, PIXELS)))

    def __call__(self, x):
        self.rows.set_value(jnp.concatenate([self.rows.get_value(), flat(x)]))
        return self.head(flat(x))


class LinenAsking(nn.Module):
    @nn.compact
    def __call__(self, x, z_rng):
        return nn.Dense(CLASSES)(flat(x))


class NnxAsking(NnxHead):
    def __call__(self, x, z_rng):
        return self.head(flat(x))


class NnxWithoutCall(nnx.Module):
    def __init__(self, rngs):
        pass


def no_module(**rngs) -> Any:
    return lambda x: x


UNUSABLE = {
    "linen_late": (LinenLate, r"collection 'late' .*\['count'\] was nothing"),
    "nnx_late": (NnxLate, r"collection 'cache' .*\['count'\] was nothing"),
    "linen_growing": (LinenGrowing, r"'seen' .*float32\[0, 16\] and becomes float32\[16, 16\]"),
    "nnx_growing": (NnxGrowing, r"'cache' .*float32\[0, 16\] and becomes float32\[16, 16\]"),
    "linen_asking": (LinenAsking, "asks for 'z_rng'"),
    "nnx_asking": (NnxAsking, "asks for 'z_rng'"),
    "linen_no_module": (no_module, "must return a flax.linen module"),
    "nnx_no_module": (no_module, "must return a flax.nnx module"),
    "linen_no_call": (nn.Module, "must return a flax.linen module"),
    "nnx_no_call": (NnxWithoutCall, "must return a flax.nnx module"),
}


@on(**UNUSABLE)
def test_what_cannot_work_is_said(project, network):
    build, message = network
    with pytest.raises(project.module("runtime.settings").SettingError, match=message):
        project.use(build)
