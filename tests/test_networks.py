"""What the project promises holds for other networks than its own, in both APIs of Flax."""

import contextlib
import dataclasses
import functools

import bake
import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from answers import APIS
from flax import nnx
from package import (
    Package,
    assert_close,
    check_a_bad_batch_leaves_everything_as_it_was,
    check_a_row_depends_on_no_other_row,
    check_decay_moves_kernels_and_nothing_else,
    largest_change,
    named,
    same_bits,
    value,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_fast")]

NAMES = ("adamw", "sgd", "lion", "muon")
NETWORKS = [(kind, "linen") for kind in networks.LINEN] + [(kind, "nnx") for kind in networks.NNX]
WITHOUT_BATCH_NORM = [("vit", "linen"), ("groupnorm", "linen"), ("lstm", "nnx")]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The name of a generated package for each API: the adaptor and the model differ."""
    with pytest.MonkeyPatch.context() as patch:
        made = {}
        for api in APIS:
            out = tmp_path_factory.mktemp(f"networks_{api}")
            project = bake.generated(out, flax_api=api, package=f"networks_{api}")
            patch.syspath_prepend(project)
            made[api] = project.name
        yield made


@pytest.fixture(scope="module")
def package(packages):
    """One of them, where the network makes no difference."""
    return packages["linen"]


@pytest.fixture(scope="module", params=NETWORKS, ids="-".join)
def project(request, packages):
    """The project with another network, which takes from the settings the dropout only."""
    kind, api = request.param
    project = Package(packages[api], "image_classification")

    def build(config, inputs, num_outputs, dtype, **rngs):
        if api == "linen":
            return networks.LINEN[kind](config.dropout_rate, num_outputs, dtype)
        image_shape = inputs.shape[1:]
        return networks.NNX[kind](config.dropout_rate, image_shape, num_outputs, dtype, **rngs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(project.module("model"), "build", build)
        yield project


def on(chosen):
    return pytest.mark.parametrize("project", chosen, ids="-".join, indirect=True)


# --------------------------------------------------------------------------- Decay, on each network


def test_kernels_are_decayed_and_what_flax_does_not_name_is_listed(project):
    params = project.start_once()[0].params
    found = project.module("optimizer").decayed(params)
    kinds = {name: name.split("/")[-1] for name in named(params)}
    assert found["decayed"] == [name for name in kinds if kinds[name] == "kernel"]
    assert {kinds[name] for name in found["not_decayed"]} <= {"bias", "scale"}
    is_vit = any("blocks/" in name and "attention" in name.lower() for name in kinds)
    assert found["unknown"] == (["cls_token", "pos_embed"] if is_vit else [])
    assert sum(map(len, found.values())) == len(kinds)


@on([("vit", "nnx"), ("resnet", "linen")])
def test_weight_decay_moves_kernels_and_nothing_else(project):
    check_decay_moves_kernels_and_nothing_else(project, "muon")


# ------------------------------------------------------------------- Each update rule, on any layer


class Layers(nn.Module):
    """One layer of each kind that nn.scan can stack, with biases and without."""

    @nn.compact
    def __call__(self, x, _=None):
        x += nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
        x += nn.MultiHeadDotProductAttention(3, use_bias=False, name="no_bias")(x)
        x += nn.Conv(6, (3,), name="conv_1d")(x)
        x += nn.Conv(6, (3, 3), use_bias=False, name="conv_2d")(x[:, :, None])[:, :, 0]
        x += nn.Dense(6, use_bias=False, name="down")(nn.Dense(5, name="up")(x))
        heads = nn.DenseGeneral((2, 5), name="split")(x)
        x += nn.DenseGeneral(6, axis=(-2, -1), name="merge")(heads)
        return x + nn.RNN(nn.GRUCell(6), name="rnn")(x), None


class NnxLayers(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.no_bias = nnx.MultiHeadAttention(3, 6, use_bias=False, rngs=rngs)
        self.conv_1d = nnx.Conv(6, 6, (3,), rngs=rngs)
        self.conv_2d = nnx.Conv(6, 6, (3, 3), use_bias=False, rngs=rngs)
        self.up = nnx.Linear(6, 5, rngs=rngs)
        self.down = nnx.Linear(5, 6, use_bias=False, rngs=rngs)
        self.split = nnx.LinearGeneral(6, (2, 5), rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 5), 6, axis=(-2, -1), rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(6, 6, rngs=rngs))


def shapes(api, depth=None):
    """Abstract parameters of these layers, or of a stack of them."""
    if api == "linen":
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        module = nn.scan(Layers, length=depth, **axes)() if depth else Layers()
        return jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((2, 4, 6)))["params"]

    def build():
        if depth is None:
            return NnxLayers(nnx.Rngs(0))
        stack = nnx.vmap(NnxLayers, in_axes=(0,), out_axes=0)
        return nnx.split_rngs(splits=depth)(stack)(nnx.Rngs(0))

    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(build), nnx.Param))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def drawn(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), tree)


def updates_of(package, name, params, *gradients):
    """What the last of several updates by this rule adds to the parameters."""
    module = Package(package, "image_classification").module
    config = module("config").OptimizerConfig(name=name, weight_decay=0.1, clip_norm=0.0)
    tx = module("optimizer").create_optimizer(config, lambda count: 0.1)
    state = tx.init(params)
    for gradient in gradients:
        updates, state = jax.jit(tx.update)(gradient, state, params)
    return updates


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("api", APIS)
def test_a_layer_of_a_stack_is_updated_like_the_same_layer_alone(package, api, name):
    one, stack = shapes(api), shapes(api, depth=2)
    stacked = [{"blocks": drawn(stack, seed), "norm": {"scale": jnp.ones(6)}} for seed in range(3)]
    alone = []
    for tree in stacked:
        layers = [jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(2)]
        assert jax.tree.map(jnp.shape, layers[0]) == jax.tree.map(lambda x: x.shape, one)
        alone.append({f"block_{i}": layer for i, layer in enumerate(layers)})
    found = updates_of(package, name, *stacked)["blocks"]
    wanted = updates_of(package, name, *alone)
    for i in range(2):
        layer = jax.tree.map(lambda x, i=i: x[i], found)
        assert_close(layer, wanted[f"block_{i}"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("api", APIS)
def test_muon_updates_a_layer_like_the_matrix_that_it_is(package, api):
    """From all inputs to all outputs: heads and places of a filter are not matrices of their own"""
    trees = [drawn(shapes(api), seed) for seed in range(3)]

    def flat(tree):
        """Every kernel as a matrix, each array in a module of its own."""
        found = {}
        for name, x in named(tree).items():
            *_, layer, kind = name.split("/")
            if kind == "kernel":
                inputs_first = layer in ("query", "key", "value", "split")
                x = x.reshape((len(x), -1) if inputs_first else (-1, x.shape[-1]))
            found[name.replace("/", "_")] = {kind: x}
        return found

    found, wanted = updates_of(package, "muon", *trees), map(flat, trees)
    assert_close(flat(found), updates_of(package, "muon", *wanted), rtol=0, atol=1e-5)


AMBIGUOUS = {
    "a convolution over one dimension, or a projection to heads": {"kernel": (3, 4, 5)},
    "transposed": {"kernel": (3, 3, 5, 4), "bias": (5,)},
    "stacked along the second dimension": {"kernel": (4, 3, 5), "bias": (5, 3)},
    "layers without bias or scale": {f"{x}/kernel": (3, 6, 6) for x in ("query", "out")},
    "numbers": {"kernel": (4,)},
}


@pytest.mark.parametrize("shapes", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_muon_leaves_to_adamw_what_may_be_read_in_two_ways(package, shapes):
    """With the decay of a kernel all the same."""
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    arrays = [drawn(arrays, seed) for seed in range(3)]
    trees = [flax.traverse_util.unflatten_dict(a, sep="/") for a in arrays]
    found = named(updates_of(package, "muon", *trees))
    vectors = [{name.replace("/", "_"): {"scale": x} for name, x in a.items()} for a in arrays]
    wanted = updates_of(package, "muon", *vectors)
    for name, update in found.items():
        update += 0.1 * 0.1 * arrays[0][name] * name.endswith("kernel")
        np.testing.assert_allclose(update, wanted[name.replace("/", "_")]["scale"], atol=1e-6)


# --------------------------------------------------------------------------- Steps, on each network


@on(WITHOUT_BATCH_NORM)
def test_micro_batches_add_up_to_the_whole(project):
    model = dataclasses.replace(project.config().model, dropout_rate=0.0)
    found, state = [], None
    for parts in (1, 2):
        config = project.config(model=model, accumulation_steps=parts)
        if state is None:
            state = project.module("train_state").plan_train_state(
                config, project.data, project.mesh()
            )[0]()
        compute = project.module("train_step").compute_gradients
        gradients, metrics, _ = jax.jit(compute, static_argnums=2)(state, project.batch(), config)
        found.append(gradients)
        assert metrics["loss"][1] == 16
    assert_close(*found, rtol=0, atol=1e-6)
    assert max(abs(x).max() for x in jax.tree.leaves(found[0])) > 1e-2


@on([("vit", "linen"), ("resnet", "nnx"), ("lstm", "nnx")])
def test_evaluation_of_a_row_depends_on_no_other_row(project):
    check_a_row_depends_on_no_other_row(project)


def test_dropout_differs_from_step_to_step_and_repeats(project):
    state, step, _ = project.start_once()

    def loss(number):
        return value(step(state.replace(step=jnp.int32(number)), project.batch())[1], "loss")

    losses = [loss(number) for number in range(4)]
    assert losses == [loss(number) for number in range(4)]
    assert len(set(losses)) > 2  # masks of so few features may be the same by chance


@on([("vit", "linen"), ("resnet", "nnx"), ("lstm", "linen")])
def test_a_bad_batch_changes_nothing_and_float16_stays_out_of_the_state(project):
    check_a_bad_batch_leaves_everything_as_it_was(project, "float16")
    config = project.config(precision="float16")
    state, _ = project.start_once(config)[1](project.start_once(config)[0], project.batch())
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}


def test_losses_in_low_precision_agree(project):
    state, *_ = project.start_once()
    losses, plan = [], project.module("train_state").plan_train_state
    for precision in ("float32", "bfloat16", "float16"):
        config = project.config(precision=precision)
        _, abstract = plan(config, project.data, project.mesh())
        apply = functools.partial(abstract.apply_fn, train=False)
        assert jax.eval_shape(apply, state.ema, project.batch()["image"])[0].dtype == precision
        scores = project.score(state.replace(apply_fn=abstract.apply_fn), project.batch())
        losses.append(value(scores, "loss"))
    np.testing.assert_allclose(losses[1:], losses[0], rtol=0.02)


def test_a_checkpoint_goes_on_bit_for_bit(project, tmp_path):
    checkpoint, plan = (
        project.module("runtime.checkpoint"),
        project.module("train_state").plan_train_state,
    )
    state, step, _ = project.start_once()
    state, _ = step(state, project.batch())
    with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, checkpoint.Progress())
        checkpoints.wait()
        _, abstract = plan(project.config(), project.data, project.mesh())
        restored, _ = checkpoints.restore(1, abstract)
    assert same_bits(restored, state)
    restored = restored.replace(apply_fn=state.apply_fn, tx=state.tx)  # else compiled anew
    assert same_bits(step(restored, project.batch(16)), step(state, project.batch(16)))


@on([("vit", "nnx"), ("resnet", "linen"), ("lstm", "nnx")])
def test_two_devices_with_half_of_the_parameters_each_train_alike(project, monkeypatch):
    monkeypatch.setattr(project.module("mesh"), "MIN_SPLIT_SIZE", 1)  # so that all are split
    results = []
    for state, step, _ in (project.start_once(), project.start(mesh=project.mesh(1, 2))):
        first, losses = state.params, []
        for number in range(3):
            state, metrics = step(state, project.batch(16 * number))
            losses.append(value(metrics, "loss"))
        results.append((losses, state.variables))
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))
    assert_close(*results, rtol=1e-5, atol=1e-6)
    assert largest_change(first, state.params) > 1e-3
