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
from .runtime.functional import pure_functions
from .runtime.network import PureFunctions


class LossScale(flax.struct.PyTreeNode):
    """Factor by which the loss is multiplied, so that small gradients do not become 0 in float16.

    Micikevicius et al. 2018, Mixed Precision Training.
    """

    factor: jax.Array
    good_steps: jax.Array
    """Steps with finite gradients since the factor last changed."""

    def adjust(self, finite: jax.Array) -> "LossScale":
        """Halve it after an overflow, double it after 1000 steps without one; 1 to 2**24."""
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grows = good_steps == 1000
        doubled = jnp.minimum(self.factor * 2, 2.0**24)
        halved = jnp.maximum(self.factor / 2, 1.0)
        factor = jnp.where(grows, doubled, self.factor)
        return LossScale(
            factor=jnp.where(finite, factor, halved),
            good_steps=jnp.where(grows, 0, good_steps),
        )


def average_decay(decay: float, updates: jax.typing.ArrayLike) -> jax.Array:
    """Decay of the average of parameters after this many updates.

    It is low at first, so that the average forgets the random parameters it began with: with a
    constant decay of 0.999 these would still weigh three quarters after 300 updates.
    """
    return jnp.minimum(decay, (1 + updates) / (10 + updates))


class TrainState(train_state.TrainState):
    """Flax's TrainState (step, apply_fn, params, tx, opt_state) and what this project adds.

    To carry more through training, add a field here and its first value in create_train_state: the
    field is then saved, restored, sharded and protected from non-finite updates like the rest.
    """

    model_state: dict
    """Collections that the network keeps beside its parameters, such as {"batch_stats": ...}."""
    ema: dict | None
    """Averages of `variables`; None without --ema-decay."""
    loss_scale: LossScale
    """Only --precision float16 uses it. It is always there, so that a run may change to float16."""
    skipped_steps: jax.Array
    """Updates that were skipped because a gradient was not finite. `step` counts them too."""
    skipped_in_a_row: jax.Array
    """Updates skipped since the last one that was applied."""
    first_bad_leaf: jax.Array
    """Index, among the leaves of params, of the first bad gradient in the last skipped update."""

    @property
    def applied_updates(self) -> jax.Array:
        """Number of updates that were not skipped: schedule and average count these."""
        return self.step - self.skipped_steps

    @property
    def variables(self) -> dict:
        """What training applies the network with: {"params": ..., "batch_stats": ..., ...}."""
        return {"params": self.params, **self.model_state}

    @property
    def eval_variables(self) -> dict:
        """What evaluation applies the network with: the averages if there are any."""
        return self.variables if self.ema is None else self.ema

    def start_from(self, params: dict) -> "TrainState":
        """The same state with other parameters."""
        ema = self.ema and self.ema | {"params": jax.tree.map(jnp.copy, params)}
        return self.replace(params=params, ema=ema)


def update_average(ema: dict, variables: dict, decay: jax.Array) -> dict:
    """The averages after one more update. Counters and other integers are copied, not averaged."""

    def average(old, new):
        is_float = jnp.issubdtype(new.dtype, jnp.floating)
        return optax.incremental_update(new, old, 1 - decay) if is_float else new

    return jax.tree.map(average, ema, variables)


def create_train_state(
    config: Config, network: PureFunctions, tx: optax.GradientTransformation
) -> TrainState:
    """The state at step 0. Under jit, every device creates only its own part of each array."""
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
    # TrainState.create() makes step a Python int, for which the step would be compiled again.
    return state.replace(step=zero)


def plan_train_state(
    config: Config, data: Data, mesh: jax.sharding.Mesh
) -> tuple[Callable[[], TrainState], TrainState]:
    """A function that creates the state of this run on the mesh, and the abstract state.

    The abstract state has a jax.ShapeDtypeStruct with a sharding in the place of each array.
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
