"""One step of training and of evaluation: pure functions, compiled once by train.py."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import task
from .config import Config
from .data import Split
from .mesh import batch_sharding, replicated
from .optimizer import create_schedule
from .train_state import TrainState, average_decay

Batch = dict[str, jax.Array]
Metrics = dict[str, tuple[jax.Array, jax.Array]]  # each a (sum, weight)

COUNTERS = ("skipped_steps", "skipped_in_a_row", "first_bad_leaf")  # of the state, to be watched


def train_step(state: TrainState, batch: Batch, *, config: Config) -> tuple[TrainState, Metrics]:
    """Update the state with one global batch.

    A step whose loss or gradients are not finite changes nothing but the counters and the loss
    scale, and has no weight in the metrics: one NaN would spoil the average of a log interval.
    After more than --max-skipped-steps of them in a row no step changes anything any more, until
    the driver notices and ends the run.
    """
    is_float16 = config.precision == "float16"
    grads, metrics, batch_stats = compute_gradients(state, batch, config)
    squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
    bad = ~jnp.isfinite(squares)
    diverged = state.skipped_in_a_row > config.max_skipped_steps
    finite = jnp.isfinite(metrics["loss"][0]) & ~jnp.any(bad) & ~diverged
    finite |= config.debug_nans  # JAX looks for NaN in what comes out of the step

    new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    if state.ema is not None:
        decay = average_decay(config.ema_decay, state.applied_updates)
        ema = optax.incremental_update(new.variables, state.ema, 1 - decay)
        new = new.replace(ema=ema)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
    new = kept.replace(
        step=new.step,
        loss_scale=state.loss_scale.adjust(finite) if is_float16 else state.loss_scale,
        skipped_steps=state.skipped_steps + ~finite,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        first_bad_leaf=jnp.where(jnp.any(bad), jnp.argmax(bad), state.first_bad_leaf),
    )
    metrics["grad_norm"] = jnp.sqrt(jnp.sum(squares)), jnp.float32(1)
    return new, jax.tree.map(lambda x: jnp.where(finite, x, 0), metrics)


def compute_gradients(
    state: TrainState, batch: Batch, config: Config
) -> tuple[dict, Metrics, dict]:
    """Gradients of the mean loss, metrics and batch statistics, micro-batch by micro-batch.

    The loss of each micro-batch is divided by the weight of the whole batch, so that the parts add
    up to the gradient of the whole however the mask falls. Each has its own dropout key, and batch
    normalisation sees one micro-batch at a time: its running averages move once for each.
    """
    weight = jnp.maximum(jnp.sum(batch["mask"]), 1)
    scale = state.loss_scale.factor if config.precision == "float16" else 1.0
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)

    def loss_fn(params, batch_stats, batch, key):
        variables, inputs = {"params": params, "batch_stats": batch_stats}, task.model_inputs(batch)
        outputs, batch_stats = state.apply_fn(variables, inputs, train=True, key=key)
        metrics = task.loss_and_metrics(outputs, batch)
        return metrics["loss"][0] / weight * scale, (metrics, batch_stats)

    total: Any = None
    batch_stats = state.batch_stats
    for i, micro_batch in enumerate(split(batch, config.accumulation_steps)):
        if i > 0:  # one after the other: side by side they would need the memory of the whole
            total, micro_batch = jax.lax.optimization_barrier((total, micro_batch))
        grads, (metrics, batch_stats) = jax.grad(loss_fn, has_aux=True)(
            state.params, batch_stats, micro_batch, jax.random.fold_in(key, i)
        )
        part = (grads, metrics)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    grads, metrics = total
    return jax.tree.map(lambda g: g / scale, grads), metrics, batch_stats


def split(batch: Batch, parts: int) -> list[Batch]:
    """Micro-batch j takes the rows j::parts: every device keeps the rows that it has."""

    def rows(x, j):
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:])[:, j]

    return [jax.tree.map(lambda x, j=j: rows(x, j), batch) for j in range(parts)]


def eval_step(state: TrainState, batch: Batch) -> Metrics:
    """Metrics of one batch with dropout off and batch normalisation on its running averages."""
    outputs, _ = state.apply_fn(state.eval_variables, task.model_inputs(batch), train=False)
    return task.loss_and_metrics(outputs, batch)


def compile_train_step(
    config: Config, state: TrainState, split: Split, mesh: jax.sharding.Mesh
) -> tuple[Callable, Callable, dict[str, float | None]]:
    """Compile the step for this abstract state, ahead of time.

    Returns the step (state, totals, batch) -> (state, totals, guard), a function that makes totals
    of zero, and what the step costs. The step adds its metrics to the totals on the device, so that
    they need to be fetched once in a log interval only; the guard holds what is of this step alone,
    the state's counters, the learning rate and the loss scale. State and totals are donated: the
    ones passed in cannot be used again.
    """
    schedule = create_schedule(config.optimizer, config.total_steps)
    rows = split.rows(np.zeros(1, np.int64))
    batch = {
        name: jax.ShapeDtypeStruct(
            (config.batch_size, *x.shape[1:]), x.dtype, sharding=batch_sharding(mesh)
        )
        for name, x in rows.items()
    }
    update = functools.partial(train_step, config=config)
    metrics = jax.eval_shape(update, state, batch)[1]
    fresh_totals = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics),
        out_shardings=replicated(mesh),
    )

    @functools.wraps(train_step)
    def step(state, totals, batch):
        rate = schedule(state.applied_updates)
        state, metrics = update(state, batch)
        guard = {name: getattr(state, name) for name in COUNTERS}
        guard["learning_rate"] = jnp.asarray(rate, jnp.float32)
        guard["loss_scale"] = state.loss_scale.factor
        return state, jax.tree.map(jnp.add, totals, metrics), guard

    shardings = jax.tree.map(lambda x: x.sharding, state), replicated(mesh), replicated(mesh)
    began = time.monotonic()
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    compiled = jitted.lower(state, jax.eval_shape(fresh_totals), batch).compile()
    costs = {
        "compile_seconds": time.monotonic() - began,
        "model_flops_per_step": (compiled.cost_analysis() or {}).get("flops"),
    }

    def checked(*args):
        with jax.debug_nans(True):  # JAX is apt to forget the global setting
            return jitted(*args)

    # JAX finds the operation that made a NaN only in what it can trace again.
    return checked if config.debug_nans else compiled, fresh_totals, costs
