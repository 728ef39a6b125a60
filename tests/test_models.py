"""The Linen and the NNX file of a model are the same network."""

import dataclasses
import functools
import importlib

import bake
import jax
import numpy as np
import pytest
from answers import APIS, COMBINATIONS, TASKS

# A setting that changes the structure of the network.
VARIANTS = [(task, {}) for task in TASKS] + [("language_model", {"tie_embeddings": True})]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages of all combinations, by (task, api). Those of one name would clash."""
    root, made = tmp_path_factory.mktemp("models"), {}
    with pytest.MonkeyPatch.context() as patch:
        for task, api in COMBINATIONS:
            project = bake.generated(root, task, api, f"models_{task}_{api}")
            patch.syspath_prepend(project)
            made[task, api] = project.name
        yield made


def place_of(task, name):
    """Where a leaf lies in the NNX variables, by its path in Linen's."""
    if task == "language_model":  # block_0/mlp/up/kernel is blocks/0/mlp/up/kernel
        first, *rest = name
        number = first.removeprefix("block_")
        return ("blocks", int(number), *rest) if number != first else name
    layer, leaf = name
    kind, number = layer.split("_")
    if kind == "Dense":
        return ("head", leaf)
    member = {"Conv": "conv", "BatchNorm": "norm"}[kind]
    return ("blocks", int(number) // 2, int(number) % 2, member, leaf)


def paths(tree):
    """Leaves by their path, a tuple of keys."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(getattr(key, "key", None) for key in path): leaf for path, leaf in leaves}


def as_nnx(task, tree, like):
    """Linen's variables in the form of NNX's."""
    found = {place_of(task, path): leaf for path, leaf in paths(tree).items()}
    assert {path: x.shape for path, x in found.items()} == {
        path: x.shape for path, x in paths(like).items()
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, _: found[tuple(key.key for key in path)], like
    )


def create(package, config, inputs, num_outputs):
    """The pure functions of a package's network."""
    model = importlib.import_module(f"{package}.model")
    functional = importlib.import_module(f"{package}.runtime.functional")
    build = functools.partial(model.build, config, inputs, num_outputs, np.float32)
    return functional.pure_functions(build, inputs)


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join([variant[0], *variant[1]]))
def pair(request, packages):
    """(Linen model, its variables, NNX model, the same variables, inputs, task)."""
    task, changes = request.param
    if task == "image_classification":
        inputs = jax.random.uniform(jax.random.key(1), (6, 8, 8, 1))
        changes, outputs = {"features": (8, 16)}, 10
    else:
        inputs = jax.random.randint(jax.random.key(1), (6, 16), 0, 256)
        changes, outputs = changes | {"depth": 2}, 256
    models = []
    for api in APIS:
        module = importlib.import_module(f"{packages[task, api]}.model")
        config = dataclasses.replace(module.TINY, **changes)
        shape = jax.ShapeDtypeStruct((1, *inputs.shape[1:]), inputs.dtype)
        models.append(create(packages[task, api], config, shape, outputs))
    linen, nnx = models
    variables, like = linen.init(jax.random.key(0)), nnx.init(jax.random.key(0))
    same = {name: as_nnx(task, variables[name], like[name]) for name in variables}
    return linen, variables, nnx, same, inputs, task


def outputs(model, variables, inputs, **train):
    return model.apply(variables, inputs, **train or {"train": False})[0]


def test_given_the_same_weights_outputs_and_gradients_agree(pair):
    linen, variables, nnx, same, inputs, task = pair
    np.testing.assert_allclose(
        outputs(linen, variables, inputs), outputs(nnx, same, inputs), rtol=1e-5, atol=1e-5
    )

    def gradients(model, variables):
        def loss(params):
            logits = outputs(model, variables | {"params": params}, inputs)
            return (jax.nn.log_softmax(logits)[..., 3]).mean()

        return jax.jit(jax.grad(loss))(variables["params"])

    got = gradients(nnx, same)
    expected = as_nnx(task, gradients(linen, variables), got)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
    assert max(float(abs(x).max()) for x in jax.tree.leaves(got)) > 1e-2


def test_new_weights_are_drawn_alike(pair):
    _, _, nnx, same, _, _ = pair
    drawn = nnx.init(jax.random.key(7))

    def check(a, b):
        if a.ndim > 1:
            np.testing.assert_allclose(a.std(), b.std(), rtol=0.3)
        else:
            np.testing.assert_array_equal(a, b)  # zeros, or ones

    jax.tree.map(check, same, drawn)


def test_training_moves_the_batch_statistics_alike(pair):
    linen, variables, nnx, same, inputs, task = pair
    key = jax.random.key(2)
    _, expected, _ = linen.apply(variables, inputs, train=True, key=key)
    _, got, _ = nnx.apply(same, inputs, train=True, key=key)
    assert expected.keys() == got.keys()
    for name in got:
        moved = as_nnx(task, expected[name], got[name])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, got[name]
        )


@pytest.mark.slow
def test_recomputing_blocks_changes_no_gradient(packages):
    for api in APIS:
        module = importlib.import_module(f"{packages['language_model', api]}.model")
        tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)
        found = []
        for remat in (False, True):
            config = dataclasses.replace(module.TINY, depth=2, dropout_rate=0.3, remat=remat)
            shape = jax.ShapeDtypeStruct((1, 16), np.int32)
            model = create(packages["language_model", api], config, shape, 256)
            variables = model.init(jax.random.key(0))

            def loss(params, model=model, tokens=tokens):
                logits, *_ = model.apply(
                    {"params": params}, tokens, train=True, key=jax.random.key(3)
                )
                return (logits**2).mean()

            grad = jax.jit(jax.grad(loss))
            found.append(grad(variables["params"]))
            recomputed = str(jax.make_jaxpr(grad)(variables["params"])).count("remat")
            assert (recomputed > 0) == remat
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)
