"""What training needs of a network: two pure functions of its variables, made of a Linen module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from .settings import SettingError

Variables = dict[str, Any]

# Names by which a __call__ may ask whether this is training, and the answer if it is.
MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}


class PureFunctions(NamedTuple):
    """A network as two pure functions of its variables.

    Variables are {"params": ..., and by its name each other collection that the network keeps, such
    as "batch_stats": ...}, pure dictionaries of arrays. init(key) returns new ones.
    apply(variables, inputs, train=..., key=...) returns (outputs, kept, sown): the collections
    beside the parameters after this call, which evaluation leaves as they are, and by collection
    what the network has sown. The key draws dropout and other noise. Without one, as in evaluation,
    a fixed key does: the same inputs then give the same outputs.

    Inputs are any pytree, the first argument of __call__; outputs are any pytree as well.
    apply raises SettingError for variables that change their form in a call.
    """

    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[Any, Variables, Variables]]


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
                require_same_form(name, {}, sown[name])
        if train:
            for name, before in kept.items():
                require_same_form(name, before, updated.get(name, before))
            kept = {name: updated.get(name, before) for name, before in kept.items()}
        return outputs, kept, sown

    return PureFunctions(init, apply)


def arguments_of(network: Any, kind: type, *given: str) -> Callable[..., dict[str, Any]]:
    """A function (train, **given) -> the arguments that __call__ asks for beside its inputs."""
    if not (isinstance(network, kind) and callable(network)):
        raise SettingError(f"build in model.py: must return a Linen module, not {network!r}")
    asked = list(inspect.signature(network.__call__).parameters.values())[1:]
    for x in asked:
        is_optional = x.default is not x.empty or x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        if not is_optional and x.name not in (*MODES, *given):
            raise SettingError(
                f"the network's __call__ asks for {x.name!r}: beside its inputs (model_inputs in "
                f"task.py; a dictionary can hold several) it can have {', '.join((*MODES, *given))}"
            )

    def arguments(train, **given):
        answers = {name: train == means for name, means in MODES.items()} | given
        return {x.name: answers[x.name] for x in asked if x.name in answers}

    return arguments


def require_same_form(name: str, before: Any, after: Any) -> None:
    """Raise SettingError unless a collection has the arrays, shapes and dtypes that it had."""
    forms = [
        {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (before, after))
    ]
    for path in sorted(forms[0].keys() | forms[1].keys()):
        old, new = (form.get(path, "nothing") for form in forms)
        if old != new:
            raise SettingError(
                f"the network's collection {name!r} changes its form in a call: {path} was {old} "
                f"and becomes {new}. Make every variable in init too, where training is off; sow() "
                "what is of one call only"
            )
