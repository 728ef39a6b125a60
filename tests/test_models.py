"""The Linen and the NNX file of a model are the same network; only model.py tells them apart."""

import dataclasses
import filecmp
import importlib
import sys

import bake
import jax
import numpy as np
import pytest


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """Two generated projects that differ in flax_api: {api: (directory, package)}."""
    root, made = tmp_path_factory.mktemp("models"), {}
    for api in ("linen", "nnx"):
        result = bake.run_cookiecutter(
            root / api, flags=("--no-input", "--accept-hooks", "no"), flax_api=api
        )
        assert result.returncode == 0, result.stderr
        # Two packages of one name cannot be imported side by side.
        directory = root / api / "my_flax_project"
        package = (directory / "my_flax_project").rename(directory / f"package_{api}").name
        sys.path.insert(0, str(directory))
        made[api] = (directory, package)
    yield made
    for directory, _ in made.values():
        sys.path.remove(str(directory))


def build(package):
    """(Model, its tiny configuration) for images of 8 by 8 pixels."""
    module = importlib.import_module(f"{package}.model")
    config = dataclasses.replace(module.TINY, features=(8, 16))
    inputs = jax.ShapeDtypeStruct((1, 8, 8, 1), np.float32)
    return module.create_model(config, inputs, 10, np.float32)


# Position of a layer in NNX by its name in Linen.
LAYERS = {"Dense_0": ("head",)}
for index in range(4):
    place = ("blocks", index // 2, index % 2)
    LAYERS |= {f"Conv_{index}": (*place, "conv"), f"BatchNorm_{index}": (*place, "norm")}


def as_nnx(tree, like):
    """The Linen variables of one collection in the form of the NNX ones."""
    filled = jax.tree.map(lambda x: x, like)
    for name, leaves in tree.items():
        target = filled
        for key in LAYERS[name]:
            target = target[key]
        assert target.keys() == leaves.keys()
        target.update(leaves)
    return filled


@pytest.fixture
def pair(projects):
    """Both models, images, the weights in either form, and the form of the NNX ones."""
    linen, nnx = (build(projects[api][1]) for api in ("linen", "nnx"))
    images = jax.random.uniform(jax.random.key(1), (6, 8, 8, 1))
    variables = linen.init(jax.random.key(0))
    template = nnx.init(jax.random.key(0))
    same = {name: as_nnx(variables[name], template[name]) for name in variables}
    return linen, nnx, images, variables, same, template


def test_given_the_same_weights_outputs_and_gradients_agree(pair):
    linen, nnx, images, variables, same, template = pair
    assert jax.tree.map(np.shape, same) == jax.tree.map(np.shape, template)

    def outputs(model, variables, train):
        key = jax.random.key(2) if train else None
        return model.apply(variables, images, train=train, key=key)[0]

    np.testing.assert_allclose(
        outputs(linen, variables, False), outputs(nnx, same, False), rtol=1e-5, atol=1e-5
    )

    def gradients(model, variables):
        def loss(params):
            return (outputs(model, variables | {"params": params}, False) ** 2).sum()

        return jax.grad(loss)(variables["params"])

    expected = as_nnx(gradients(linen, variables), template["params"])
    difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), expected, gradients(nnx, same))
    assert max(jax.tree.leaves(difference)) < 1e-5 * max(
        1, float(abs(expected["head"]["kernel"]).max())
    )


def test_training_moves_the_batch_statistics_alike(pair):
    linen, nnx, images, variables, same, template = pair
    key = jax.random.key(2)
    _, expected = linen.apply(variables, images, train=True, key=key)
    _, got = nnx.apply(same, images, train=True, key=key)
    expected = as_nnx(expected, template["batch_stats"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, got)


def test_only_model_py_differs_between_the_apis(projects):
    directories = [projects[api][0] for api in ("linen", "nnx")]
    packages = [projects[api][0] / projects[api][1] for api in ("linen", "nnx")]
    for a, b, expected in ((*packages, ["model.py"]), (*directories, [])):
        names = [path.name for path in a.iterdir() if path.is_file()]
        _, different, missing = filecmp.cmpfiles(a, b, names, shallow=False)
        assert (different, missing) == (expected, [])
