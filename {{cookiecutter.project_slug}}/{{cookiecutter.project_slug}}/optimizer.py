"""The learning-rate schedule and the optimizer: a chain of optax transformations."""

import itertools
from typing import Any

import jax
import optax

from .config import OptimizerConfig


def create_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of applied updates."""
    peak = config.learning_rate
    warmup = min(config.warmup_steps, total_steps // 2)
    rest = max(total_steps - warmup, 1)
    fifth = max(rest // 5, 1)
    schedules = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
        # Warm-up, stable, decay (Hu et al. 2024, MiniCPM): a run can be made longer in its stable
        # part without a jump of the learning rate.
        "wsd": optax.linear_schedule(peak, 0.0, fifth, rest - fifth),
    }
    schedule = schedules[config.schedule]
    if warmup == 0:
        return schedule
    # The warm-up starts at peak / warmup, because an update with a rate of 0 would be wasted.
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, schedule], [warmup])


def create_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clip the gradients by their global norm, then update by the named rule."""
    clip = optax.identity()
    if config.clip_norm:
        clip = optax.clip_by_global_norm(config.clip_norm)
    directions = {
        "adamw": optax.scale_by_adam(b2=0.99),
        "sgd": optax.trace(0.9, nesterov=True),
        "lion": optax.scale_by_lion(),
        "muon": muon(),
    }
    decay = optax.add_decayed_weights(config.weight_decay, decay_mask)
    descent = optax.scale_by_learning_rate(schedule)
    return optax.chain(clip, directions[config.name], decay, descent)


def decay_mask(params: Any) -> Any:
    """True for each parameter to decay: those that Flax's layers call "kernel".

    A matrix of your own is decayed if you call it kernel. The number of dimensions cannot tell:
    nn.scan and nnx.vmap add one to every bias and scale.
    """

    def is_kernel(path, _):
        return names(path)[-1] == "kernel"

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def decayed(params: Any) -> dict[str, list[str]]:
    """Names such as "block_0/mlp/kernel" of the parameters that weight decay shrinks, and others.

    "unknown" are parameters that are not decayed and perhaps should be: they may be matrices, and
    Flax's layers do not use their names.
    """
    kinds: dict[str, list[str]] = {"decayed": [], "not_decayed": [], "unknown": []}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    mask = jax.tree.leaves(decay_mask(params))
    for (path, x), is_decayed in zip(leaves, mask, strict=True):
        is_vector = names(path)[-1] in ("bias", "scale", "embedding") or x.ndim < 2
        kind = "not_decayed" if is_vector else "unknown"
        kinds["decayed" if is_decayed else kind].append("/".join(names(path)))
    return kinds


def names(path: Any) -> tuple[str, ...]:
    """Names of the modules around a parameter, then its own, such as ("block_0", "mlp", "kernel").

    nn.Partitioned wraps a parameter in an attribute, which is left out.
    """
    keys = (key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def muon() -> optax.GradientTransformation:
    """Orthogonal updates of matrices (Jordan et al. 2024), and Adam's for all other parameters.

    The updates of both have the size of Adam's (Liu et al. 2025, Moonlight), so that learning rates
    for AdamW fit.
    """

    def rule(params):
        # The dimensions are found here, because optax passes only a part of params to its update.
        shapes = as_matrices(params)
        # A rate of -1 leaves sign and size to the learning rate that follows in the chain.
        return optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=shapes)

    def init(params):
        return rule(params).init(params)

    def update(updates, state, params):
        return rule(params).update(updates, state, params)

    return optax.GradientTransformation(init, update)


def as_matrices(params: Any) -> Any:
    """How muon reads each kernel: [stack, input, output], each of any number of dimensions.

    Stacked layers (nn.scan, nn.vmap, nnx.vmap) share their first dimensions with the biases and
    scales around them. A layer's bias has the dimensions of its output. For a layer without bias,
    two dimensions are a matrix and four a convolution; three are read only in Flax's attention.
    Every other parameter gets None, which leaves it to Adam.
    """
    arrays = {names(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    stacks: dict[tuple[str, ...], list] = {}  # dimensions before the last, of biases and scales
    for (*module, name), x in arrays.items():
        if name in ("bias", "scale"):
            for n in range(len(module) + 1):
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
