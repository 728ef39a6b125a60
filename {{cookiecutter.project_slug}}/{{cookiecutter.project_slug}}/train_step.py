"""One step of training and of evaluation: pure functions, compiled once by train.py."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import batches, task
from .config import Config
from .mesh import batch_sharding, replicated
from .optimizer import create_schedule
from .train_state import TrainState, average_decay, update_average

AUGMENTATION = 2**31  # to make a key that no micro-batch has
Batch = dict[str, jax.Array]
Metrics = dict[str, tuple[jax.Array, jax.Array]]  # each a (sum, weight)


def train_step(state: TrainState, batch: Batch, *, config: Config) -> tuple[TrainState, Metrics]:
    """Update the state with one global batch.

    A step whose loss or gradients are not finite changes nothing but the counters and the loss
    scale, and has no weight in the metrics: one NaN would spoil the average of a log interval.
    After more than --max-skipped-steps of them in a row no step changes anything any more, until
    train.py notices and ends the run.
    """
    grads, metrics, model_state = compute_gradients(state, batch, config)
    squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
    metrics["grad_norm"] = jnp.sqrt(jnp.sum(squares)), jnp.float32(1)

    is_bad = ~jnp.isfinite(squares)
    has_diverged = state.skipped_in_a_row > config.max_skipped_steps
    is_good = jnp.isfinite(metrics["loss"][0]) & ~jnp.any(is_bad) & ~has_diverged
    # With --debug-nans let NaN through: JAX checks the outputs, where skipping would hide it.
    is_good |= config.debug_nans

    new = state.apply_gradients(grads=grads, model_state=model_state)
    if state.ema is not None:
        decay = average_decay(config.ema_decay, state.applied_updates)
        new = new.replace(ema=update_average(state.ema, new.variables, decay))

    def if_good(new, old):
        return jnp.where(is_good, new, old)

    kept = jax.tree.map(if_good, new, state)
    new = kept.replace(
        step=new.step,
        skipped_steps=state.skipped_steps + ~is_good,
        skipped_in_a_row=if_good(0, state.skipped_in_a_row + 1),
        first_bad_leaf=jnp.where(jnp.any(is_bad), jnp.argmax(is_bad), state.first_bad_leaf),
    )
    if config.precision == "float16":
        new = new.replace(loss_scale=state.loss_scale.adjust(is_good))
    return new, jax.tree.map(lambda total: if_good(total, 0), metrics)


def compute_gradients(
    state: TrainState, batch: Batch, config: Config
) -> tuple[dict, Metrics, dict]:
    """Gradients of the loss, metrics and the new model state, micro-batch by micro-batch.

    The loss is the (sum, weight) that task.py returns. The gradients are those of the sum over all
    micro-batches, divided by their weight at the end: by what the metric "loss" is divided by, too.
    Each micro-batch has its own dropout key, and batch normalisation sees one micro-batch at a
    time: its running averages move once for each.
    """
    scale: Any = 1 / batch["mask"].size  # so that the sum is about as large as the mean
    if config.precision == "float16":
        scale *= state.loss_scale.factor
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    batch = task.augment(batch, jax.random.fold_in(key, AUGMENTATION), config.data)

    def loss_fn(params, model_state, batch, key):
        variables = {"params": params, **model_state}
        inputs = task.model_inputs(batch)
        outputs, model_state, sown = state.apply_fn(variables, inputs, train=True, key=key)
        metrics = task.loss_and_metrics(outputs, batch | sown, config.task)
        return metrics["loss"][0] * scale, (metrics, model_state)

    total: Any = None
    model_state = state.model_state
    for i, micro_batch in enumerate(split(batch, config.accumulation_steps)):
        if i > 0:  # one after the other: side by side they would need the memory of the whole
            total, micro_batch = jax.lax.optimization_barrier((total, micro_batch))
        grads, (metrics, model_state) = jax.grad(loss_fn, has_aux=True)(
            state.params, model_state, micro_batch, jax.random.fold_in(key, i)
        )
        part = (grads, metrics)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    grads, metrics = total
    weight = metrics["loss"][1]
    divisor = scale * jnp.where(weight == 0, 1, weight)  # no row counts: the gradients are 0
    return jax.tree.map(lambda g: g / divisor, grads), metrics, model_state


def split(batch: Batch, parts: int) -> list[Batch]:
    """Micro-batch j takes the rows j::parts: every device keeps the rows that it has."""

    def rows(x, j):
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:])[:, j]

    return [jax.tree.map(lambda x, j=j: rows(x, j), batch) for j in range(parts)]


def eval_step(state: TrainState, batch: Batch, *, config: Config) -> Metrics:
    """Metrics of one batch with dropout off and batch normalisation on its running averages."""
    inputs = task.model_inputs(batch)
    outputs, _, sown = state.apply_fn(state.eval_variables, inputs, train=False)
    return task.loss_and_metrics(outputs, batch | sown, config.task)


def jit_eval_step(config: Config, mesh: jax.sharding.Mesh) -> Callable[..., Metrics]:
    """The evaluation step (state, batch) -> metrics, which the first call compiles."""
    return jax.jit(functools.partial(eval_step, config=config), out_shardings=replicated(mesh))


def compile_train_step(
    config: Config, state: TrainState, split: batches.Split, mesh: jax.sharding.Mesh
) -> tuple[Callable, Callable, dict[str, float | None]]:
    """Compile the step for this abstract state, ahead of time.

    Returns (run_step, fresh_totals, costs). run_step(state, totals, batch) returns the new state,
    the totals and the status: it adds its metrics to the totals on the device, so that they need
    to be fetched once in a log interval only; the status is what is of this step alone, the state's
    counters, the learning rate and the loss scale. State and totals are donated: the ones passed in
    cannot be used again. fresh_totals() makes totals of zero.
    """
    schedule = create_schedule(config.optimizer, config.total_steps)
    batch = batches.abstract(split, config.batch_size, batch_sharding(mesh))
    update = functools.partial(train_step, config=config)
    metrics = jax.eval_shape(update, state, batch)[1]
    fresh_totals = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics),
        out_shardings=replicated(mesh),
    )

    def step_with_totals(state, totals, batch):
        rate = schedule(state.applied_updates)
        state, metrics = update(state, batch)
        status = {
            "skipped_steps": state.skipped_steps,
            "skipped_in_a_row": state.skipped_in_a_row,
            "first_bad_leaf": state.first_bad_leaf,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "loss_scale": state.loss_scale.factor,
        }
        return state, jax.tree.map(jnp.add, totals, metrics), status

    step_with_totals.__name__ = "train_step"  # as profiles and JAX's compile events call it
    state_shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(
        step_with_totals,
        donate_argnums=(0, 1),
        out_shardings=(state_shardings, replicated(mesh), replicated(mesh)),
    )
    began = time.monotonic()
    compiled = jitted.lower(state, jax.eval_shape(fresh_totals), batch).compile()
    costs = {
        "compile_seconds": time.monotonic() - began,
        "model_flops_per_step": (compiled.cost_analysis() or {}).get("flops"),
    }

    def checked(*args):
        # On a NaN, jax_debug_nans runs the function again operation by operation to find the
        # culprit, which works for a jitted function and not for a compiled one. The setting is
        # global and Orbax resets it, so it is set anew for each step.
        with jax.debug_nans(True):
            return jitted(*args)

    return checked if config.debug_nans else compiled, fresh_totals, costs
