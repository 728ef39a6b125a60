"""TrainState: everything that training changes, as one pytree of arrays."""

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from . import batches, model, task
from .config import Config
from .data import Data
from .mesh import state_sharding
from .optimizer import create_optimizer, create_schedule
from .runtime.functional import PureFunctions, pure_functions


class LossScale(flax.struct.PyTreeNode):
    """Factor that keeps float16 gradients above underflow (Micikevicius et al. 2018)."""

    factor: jax.Array
    good_steps: jax.Array
    """Finite steps since the factor last changed."""

    def adjust(self, finite: jax.Array) -> "LossScale":
        """Halve after an overflow, double after 1000 steps without one, within 1 and 2**24."""
        grow = self.good_steps + 1 >= 1000
        grown = jnp.where(grow, jnp.minimum(self.factor * 2, 2.0**24), self.factor)
        return LossScale(
            factor=jnp.where(finite, grown, jnp.maximum(self.factor / 2, 1.0)),
            good_steps=jnp.where(finite & ~grow, self.good_steps + 1, 0),
        )


def average_decay(decay: float, updates: jax.typing.ArrayLike) -> jax.Array:
    """Decay of the average after so many updates: low at first, so that it forgets its start.

    A constant decay of 0.999 would hold three quarters of the random start after 300 updates.
    """
    return jnp.minimum(decay, (1 + updates) / (10 + updates))


class TrainState(train_state.TrainState):
    """Flax's TrainState (step, apply_fn, params, tx, opt_state) and what this project adds.

    Add a field here, and its first value below, to carry more through training: it is then saved,
    restored, sharded and protected from non-finite updates like the rest.
    """

    model_state: dict
    """What the network keeps beside parameters: {"batch_stats": ..., and other collections}."""
    ema: dict | None
    """Averaged parameters and model state, as in `variables`, when --ema-decay is on."""
    loss_scale: LossScale
    """Used with --precision float16 only, but always there: a resumed run may change to it."""
    skipped_steps: jax.Array
    """Updates left out because their gradients were not finite; step counts them too."""
    skipped_in_a_row: jax.Array
    first_bad_leaf: jax.Array
    """Position in the gradients' leaves of the first that was not finite, when one was skipped."""

    @property
    def applied_updates(self) -> jax.Array:
        """The optimizer's own count: by it go learning rate and average."""
        return self.step - self.skipped_steps

    @property
    def variables(self) -> dict:
        """What training computes with: {"params": ..., "batch_stats": ..., ...}."""
        return {"params": self.params, **self.model_state}

    @property
    def eval_variables(self) -> dict:
        """What evaluation, predictions and exports compute with."""
        return self.variables if self.ema is None else self.ema

    def start_from(self, params: dict) -> "TrainState":
        """The same state with other parameters."""
        ema = self.ema and self.ema | {"params": jax.tree.map(jnp.copy, params)}
        return self.replace(params=params, ema=ema)


def update_average(ema: dict, variables: dict, decay: jax.Array) -> dict:
    """The average after one more update. What is no float, such as a counter, is taken over."""

    def average(old, new):
        is_float = jnp.issubdtype(new.dtype, jnp.floating)
        return optax.incremental_update(new, old, 1 - decay) if is_float else new

    return jax.tree.map(average, ema, variables)


def create_train_state(
    config: Config, network: PureFunctions, tx: optax.GradientTransformation
) -> TrainState:
    """The state at step 0. Call it inside jit, so that each array is born where it belongs."""
    variables = network.init(jax.random.key(config.seed))
    ema = jax.tree.map(jnp.copy, variables) if config.ema_decay else None
    params = variables.pop("params")
    zero = jnp.zeros((), jnp.int32)
    state = TrainState.create(
        apply_fn=network.apply,
        params=params,
        tx=tx,
        model_state=variables,
        ema=ema,
        loss_scale=LossScale(jnp.float32(2**15), zero),
        skipped_steps=zero,
        skipped_in_a_row=zero,
        first_bad_leaf=zero,
    )
    return state.replace(step=zero)  # create() has a Python int, which would compile a second time


def plan_train_state(
    config: Config, data: Data, mesh: jax.sharding.Mesh
) -> tuple[Callable[[], TrainState], TrainState]:
    """A function that makes the state of this run, and the state in abstract form.

    The abstract state has a shape, dtype and sharding in the place of each array.
    """
    inputs = jax.eval_shape(task.model_inputs, batches.example(data.train))
    dtype = jnp.dtype(config.precision)
    build = functools.partial(model.build, config.model, inputs, data.num_outputs, dtype)
    schedule = create_schedule(config.optimizer, config.total_steps)
    tx = create_optimizer(config.optimizer, schedule)
    create = functools.partial(create_train_state, config, pure_functions(build, inputs), tx)
    abstract = jax.eval_shape(create)
    shardings = state_sharding(mesh, abstract)
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        *(abstract, shardings),
    )
    return jax.jit(create, out_shardings=shardings), abstract
