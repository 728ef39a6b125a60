"""What training needs of a network: two pure functions of its variables, made of a Linen module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

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


def pure_functions(build: Callable[[], nn.Module], inputs: Any) -> PureFunctions:
    """Functions of the module that build() returns, for inputs of these shapes and dtypes."""
    network = build()

    def init(key):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        return {"batch_stats": {}} | network.init(key, zeros, train=False)

    def apply(variables, inputs, *, train, key=None):
        kept = {name: x for name, x in variables.items() if name != "params"}
        if not train:
            return network.apply(variables, inputs, train=False), kept, {}
        outputs, updated = network.apply(
            variables, inputs, train=True, rngs={"dropout": key}, mutable=list(kept)
        )
        return outputs, kept | updated, {}

    return PureFunctions(init, apply)
