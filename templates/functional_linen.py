"""A Linen module as two pure functions of its variables: see network.py."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .network import PureFunctions, arguments_of, require_same_form

ADVICE = "Make every variable in init too, where training is off; sow() what is of one call only"


def pure_functions(build: Callable[[], nn.Module], inputs: Any) -> PureFunctions:
    """Functions of the module that build() returns, for inputs of these shapes and dtypes.

    A collection that the module can do without, neither finding nor writing it, is sown: all others
    are kept. Boxes around arrays, such as nn.Partitioned, are taken off: mesh.py lays arrays out.
    Raises SettingError for what is no module, or one that asks for what it cannot be given.
    """
    network = build()
    arguments = arguments_of(network, nn.Module)

    def call(variables, inputs, train, key, mutable):
        # make_rng() draws from "params" where it finds no stream of the name asked for.
        rngs = {"dropout": key, "params": jax.random.fold_in(key, 1)}
        return network.apply(variables, inputs, rngs=rngs, mutable=mutable, **arguments(train))

    def is_sown(name, variables, inputs):
        others = {key: x for key, x in variables.items() if key != name}
        mutable = [key for key in others if key != "params"]
        for train in (True, False):
            run = functools.partial(call, train=train, key=jax.random.key(0), mutable=mutable)
            try:
                jax.eval_shape(run, others, inputs)
            except Exception:  # Flax's, or one that a missing value causes in the network
                return False
        return True

    def init(key):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        variables = {"params": {}} | nn.unbox(network.init(key, zeros, **arguments(train=False)))
        sown = [name for name in variables if name != "params" and is_sown(name, variables, zeros)]
        return {name: x for name, x in variables.items() if name not in sown}

    def apply(variables, inputs, *, train, key=None):
        key = jax.random.key(0) if key is None else key
        outputs, updated = call(variables, inputs, train, key, nn.DenyList("params"))
        kept = {name: x for name, x in variables.items() if name != "params"}
        sown = {name: x for name, x in updated.items() if name not in kept}
        for name in sown:
            if not is_sown(name, variables, inputs):
                require_same_form(name, {}, sown[name], ADVICE)
        if train:
            for name, before in kept.items():
                require_same_form(name, before, updated.get(name, before), ADVICE)
            kept = {name: updated.get(name, before) for name, before in kept.items()}
        return outputs, kept, sown

    return PureFunctions(init, apply)
