"""An NNX module as two pure functions of its variables: see network.py."""

import functools
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .network import PureFunctions, Variables, arguments_of, require_same_form

ADVICE = "Make every variable in __init__; what is of one call only, sow() as nnx.Intermediate"
RANDOM = "random"  # the collection of keys and counts in the layers


def pure_functions(build: Callable[..., nnx.Module], inputs: Any) -> PureFunctions:
    """Functions of the module that build(rngs=...) returns.

    The module is split into its structure, kept here, and pure dictionaries of arrays, which the
    rest of the project sees: passing nnx.State or nnx.jit in the loop costs time at every step.
    Each type of variable is a collection. Of these nnx.Intermediate is what is sown, and random
    state is no variable: every call draws it anew from its key.
    Raises SettingError for what is no module, or one that asks for what it cannot be given.
    """

    def create(key):
        # Dropout draws from a stream of its own: it then changes no parameter that is drawn later.
        network = build(rngs=nnx.Rngs(key, dropout=jax.random.fold_in(key, 1)))
        arguments_of(network, nnx.Module, "rngs")
        nnx.pop(network, nnx.Intermediate)
        mark_arrays(network)
        graph, state = nnx.split(network)
        return graph, by_collection(nnx.to_flat_state(state))

    graph, states = nnx.eval_shape(create, jax.random.key(0))

    def init(key):
        variables = as_dictionaries(create(key)[1])
        return {"params": {}} | {name: x for name, x in variables.items() if name != RANDOM}

    def apply(variables, inputs, *, train, key=None):
        key = jax.random.key(0) if key is None else key
        # Numbers that the count of draws from the stream "dropout" below does not reach.
        for_layers, for_others = (jax.random.fold_in(key, 2**32 - i) for i in (1, 2))
        filled = [
            draw(state, for_layers) if name == RANDOM else fill(state, variables[name])
            for name, state in states.items()
        ]
        network = nnx.merge(graph, *filled)
        network.train() if train else network.eval()
        rngs = nnx.Rngs(for_others, dropout=key)
        arguments = arguments_of(network, nnx.Module, "rngs")(train, rngs=rngs)
        with warnings.catch_warnings():
            # Flax prefers nnx.capture, but that of 0.12.8 fails in nnx.scan over an nnx.List.
            warnings.filterwarnings(
                "ignore", r"\s*Using 'Module\.(sow|perturb)", DeprecationWarning
            )
            outputs = network(inputs, **arguments)
        found = nnx.pop(network, nnx.Intermediate)
        sown = as_dictionaries(by_collection(nnx.to_flat_state(found)))
        kept = {name: x for name, x in variables.items() if name != "params"}
        if train:
            after = as_dictionaries(by_collection(nnx.to_flat_state(nnx.state(network))))
            for name in sorted({*variables, *after} - {RANDOM}):
                require_same_form(name, variables.get(name, {}), after.get(name, {}), ADVICE)
            kept = {name: after.get(name, {}) for name in kept}
        return outputs, kept, sown

    return PureFunctions(init, apply)


def collection(variable: Any) -> str:
    """Where a leaf of a module belongs: Flax's name for its type, or else the type's own name."""
    kind = type(variable)
    if not issubclass(kind, nnx.Variable):
        return "arrays"
    if issubclass(kind, (nnx.Param, nnx.RngState)):
        return "params" if issubclass(kind, nnx.Param) else RANDOM
    try:
        return nnx.variable_name_from_type(kind)
    except ValueError:
        return kind.__name__


def by_collection(leaves: Iterable[tuple[tuple, Any]]) -> dict[str, nnx.State]:
    """The leaves of a module, each with its path, as one state for each collection."""
    groups: dict[str, dict] = {}
    for path, leaf in leaves:
        groups.setdefault(collection(leaf), {})[path] = leaf
    return {name: nnx.from_flat_state(group) for name, group in groups.items()}


def as_dictionaries(states: dict[str, nnx.State]) -> Variables:
    return {name: nnx.to_pure_dict(state) for name, state in states.items()}


def fill(state: nnx.State, values: Any) -> nnx.State:
    """The state with the values of a pure dictionary."""
    filled = {}
    for path, leaf in nnx.to_flat_state(state):
        value = functools.reduce(operator.getitem, path, values)
        filled[path] = leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
    return nnx.from_flat_state(filled)


def draw(state: nnx.State, key: jax.Array) -> nnx.State:
    """Random state of another key, a different one for each stream, also of stacked layers."""
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(key, len(leaves))
    for i, leaf in enumerate(leaves):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        new = jax.random.split(keys[i], leaf.shape) if is_key else jnp.zeros(leaf.shape, leaf.dtype)
        leaves[i] = new
    return jax.tree.unflatten(structure, leaves)


def mark_arrays(network: nnx.Module) -> None:
    """Have Flax carry the arrays of a constructor, which it takes for settings under jax.jit."""
    for _, module in nnx.iter_modules(network):
        for name, value in list(vars(module).items()):
            if isinstance(value, jax.core.Tracer):
                setattr(module, name, nnx.data(value))
