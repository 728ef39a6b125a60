"""What training needs of a network: two pure functions of its variables, made of an NNX module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

Variables = dict[str, Any]


class PureFunctions(NamedTuple):
    """A network as two pure functions of its variables.

    Variables are {"params": ..., and by its name each other collection that the network keeps, such
    as "batch_stats": ...}, pure dictionaries of arrays. init(key) returns new ones.
    apply(variables, inputs, train, key) returns (outputs, kept, sown): the collections beside the
    parameters after this call, and what the network has sown, by collection. The key draws dropout
    and other noise; evaluation needs none.
    """

    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[Any, Variables, Variables]]


def pure_functions(build: Callable[..., nnx.Module], inputs: Any) -> PureFunctions:
    """Functions of the module that build(rngs=...) returns.

    The module is split into its structure, kept here, and pure dictionaries of arrays, which the
    rest of the project sees: passing nnx.State or nnx.jit in the loop costs time at every step.
    """

    def create(key):
        network = build(rngs=nnx.Rngs(key))
        graph, params, batch_stats = nnx.split(network, nnx.Param, nnx.BatchStat)
        return graph, {"params": params, "batch_stats": batch_stats}

    graph, states = nnx.eval_shape(create, jax.random.key(0))

    def init(key):
        return {name: nnx.to_pure_dict(state) for name, state in create(key)[1].items()}

    def merge(variables):
        filled = []
        for name, state in states.items():
            state = jax.tree.map(lambda x: x, state)
            nnx.replace_by_pure_dict(state, variables[name])
            filled.append(state)
        return nnx.merge(graph, *filled)

    def apply(variables, inputs, *, train, key=None):
        network = merge(variables)
        outputs = network(inputs, train=train, rngs=nnx.Rngs(dropout=key) if train else None)
        batch_stats = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
        return outputs, {"batch_stats": batch_stats}, {}

    return PureFunctions(init, apply)
