"""The learning-rate schedule and the optimizer: a chain of optax transformations."""

import itertools
from typing import Any

import jax
import optax

from .config import OptimizerConfig


def create_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of applied updates."""
    peak, warmup = config.learning_rate, min(config.warmup_steps, total_steps // 2)
    rest = max(total_steps - warmup, 1)
    fifth = max(rest // 5, 1)
    after_warmup = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "constant": lambda: optax.constant_schedule(peak),
        # Warm-up, stable, decay (Hu et al. 2024, MiniCPM): the stable part can be prolonged.
        "wsd": lambda: optax.linear_schedule(peak, 0.0, fifth, rest - fifth),
    }
    schedule = after_warmup[config.schedule]()
    if warmup == 0:
        return schedule
    # The first update already learns: the rise is from peak / warmup, not from 0.
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, schedule], [warmup])


def create_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clip the gradients by their global norm, then update by the named rule."""
    decay = {"weight_decay": config.weight_decay, "mask": decay_mask}
    descent = optax.add_decayed_weights(**decay), optax.scale_by_learning_rate(schedule)
    rules = {
        "adamw": lambda: optax.adamw(schedule, b2=0.99, **decay),
        "sgd": lambda: optax.chain(optax.trace(0.9, nesterov=True), *descent),
        "lion": lambda: optax.lion(schedule, **decay),
        "muon": lambda: optax.chain(muon(), *descent),
    }
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, rules[config.name]())


def decay_mask(params: Any) -> Any:
    """True for what Flax's layers call "kernel"; a matrix of your own is decayed under that name.

    The number of dimensions says nothing: nn.scan and nnx.vmap add one to every bias and scale.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: names(path)[-1] == "kernel", params)


def decayed(params: Any) -> dict[str, list[str]]:
    """Names of the arrays that weight decay shrinks, and of the others, as in "block_0/mlp/kernel".

    "unknown" are those of the others that may be matrices: their names are not of Flax's layers.
    """
    kinds: dict[str, list[str]] = {"decayed": [], "not_decayed": [], "unknown": []}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, x), is_decayed in zip(leaves, jax.tree.leaves(decay_mask(params)), strict=True):
        is_known = names(path)[-1] in ("bias", "scale", "embedding") or x.ndim < 2
        kind = "decayed" if is_decayed else "not_decayed" if is_known else "unknown"
        kinds[kind].append("/".join(names(path)))
    return kinds


def names(path: Any) -> tuple[str, ...]:
    """The modules around an array and its own name; nn.Partitioned adds an attribute, left out."""
    keys = (key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def muon() -> optax.GradientTransformation:
    """Orthogonal updates of matrices (Jordan et al. 2024), and those of AdamW for all else.

    Both are of AdamW's size (Liu et al. 2025, Moonlight), so that its learning rates fit.
    """

    def rule(params):
        shapes = as_matrices(params)  # here, because in its update optax shows a part of params
        # A rate of -1 leaves sign and size to the learning rate that follows.
        return optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=shapes)

    return optax.GradientTransformation(
        lambda params: rule(params).init(params),
        lambda updates, state, params: rule(params).update(updates, state, params),
    )


def as_matrices(params: Any) -> Any:
    """How muon reads each kernel: [stack, input, output], each of any number of dimensions.

    Stacked layers (nn.scan, nn.vmap, nnx.vmap) share their first dimensions with the biases and
    scales around them. The bias of a layer has the dimensions of its output. Without one, two
    dimensions are a matrix, four a convolution, and three are read in Flax's attention only.
    None, for whatever else there is, leaves it to AdamW.
    """
    arrays = {names(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    stacks: dict[tuple[str, ...], list] = {}  # of the biases and scales in each module
    for (*module, name), x in arrays.items():
        for n in range(len(module) + 1) if name in ("bias", "scale") else ():
            stacks.setdefault(tuple(module[:n]), []).append(x.shape[:-1])

    def matrices(path, kernel):
        *module, name = names(path)
        around = [tuple(module[:n]) for n in range(len(module), -1, -1)]
        near = next((stacks[place] for place in around if place in stacks), [()])
        sizes = zip(kernel.shape[:-2], *near, strict=False)
        stack = len(list(itertools.takewhile(lambda same: len(set(same)) == 1, sizes)))
        dims, bias = kernel.ndim - stack, arrays.get((*module, "bias"))
        if bias is not None:
            outputs = bias.ndim - stack
            outputs *= bias.shape[stack:] == kernel.shape[-outputs:]
        else:
            outputs = {2: 1, 4: 1, 3: attention_outputs(module, arrays)}.get(dims, 0)
        if name != "kernel" or not 0 < outputs < dims:
            return None
        axes = tuple(range(stack, kernel.ndim))
        return optax.contrib.MuonDimensionNumbers(axes[:-outputs], axes[-outputs:])

    return jax.tree_util.tree_map_with_path(matrices, params)


def attention_outputs(module: list[str], arrays: dict) -> int:
    """1 for "out" [heads, features, output] of Flax's multi-head attention, 2 for its others."""
    query, out = (arrays.get((*module[:-1], name, "kernel")) for name in ("query", "out"))
    if query is None or out is None or query.shape[-2:] != out.shape[-3:-1]:
        return 0
    return {"query": 2, "key": 2, "value": 2, "out": 1}.get(module[-1], 0)
