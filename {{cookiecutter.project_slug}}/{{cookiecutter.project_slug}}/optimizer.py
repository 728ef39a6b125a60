"""The learning-rate schedule and the optimizer: a chain of optax transformations."""

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
    rules = {
        "adamw": lambda: optax.adamw(schedule, b2=0.99, **decay),
        "sgd": lambda: optax.chain(
            optax.trace(0.9, nesterov=True),
            optax.add_decayed_weights(**decay),
            optax.scale_by_learning_rate(schedule),
        ),
        "lion": lambda: optax.lion(schedule, **decay),
        # Scaled to updates of AdamW's size (Liu et al. 2025, Moonlight): its learning rates fit.
        "muon": lambda: optax.contrib.muon(
            schedule,
            weight_decay=config.weight_decay,
            weight_decay_mask=decay_mask,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=as_matrices,
        ),
    }
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, rules[config.name]())


def decay_mask(params: Any) -> Any:
    """True for kernels: everything with two or more dimensions, except embeddings."""

    def is_kernel(path, param):
        return param.ndim > 1 and "embedding" not in jax.tree_util.keystr(path)

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def as_matrices(params: Any) -> Any:
    """How muon reads each kernel as a matrix: all dimensions but the last by the last."""

    def matrix(param, is_kernel):
        last = param.ndim - 1
        shape = optax.contrib.MuonDimensionNumbers(tuple(range(last)), last)
        return shape if is_kernel else None

    return jax.tree.map(matrix, params, decay_mask(params))
