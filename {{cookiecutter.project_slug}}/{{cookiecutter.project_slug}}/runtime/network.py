"""What training needs of a network, whichever API of Flax it is written in."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

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


def arguments_of(network: Any, kind: type, *given: str) -> Callable[..., dict[str, Any]]:
    """A function (train, **given) -> the arguments that __call__ asks for beside its inputs.

    Raises SettingError if the network is no callable module of this kind, or asks for others.
    """
    if not (isinstance(network, kind) and callable(network)):
        library = ".".join(kind.__module__.split(".")[:2])  # flax.linen or flax.nnx
        raise SettingError(f"build in model.py: must return a {library} module, not {network!r}")
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


def require_same_form(name: str, before: Any, after: Any, advice: str) -> None:
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
                f"and becomes {new}. {advice}"
            )
