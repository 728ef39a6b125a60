"""The task: what the model sees of a batch, the loss and its settings, the metrics."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .runtime.settings import setting
from .sources import DataConfig

# The validation metric that chooses the best checkpoint, and whether more of it is better.
BEST_METRIC, HIGHER_IS_BETTER = "loss", False


@dataclass(frozen=True)
class TaskConfig:
    z_loss: float = setting(0.0, least=0.0)
    """Weight of log(Z)**2 in the loss, Z being the softmax's denominator: keeps logits small
    (Chowdhery et al. 2022, PaLM, where it is 1e-4)."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used, beyond its minimum."""


def model_inputs(batch: dict[str, Any]) -> jax.Array:
    """What the model is applied to: tokens int32 [batch, context], all but the last of each row."""
    return batch["tokens"][:, :-1].astype(jnp.int32)


def augment(batch: dict[str, Any], key: jax.Array, config: DataConfig) -> dict[str, Any]:
    """A batch to train on, changed at random: text is left as it is."""
    return batch


def loss_and_metrics(
    logits: jax.Array, batch: dict[str, Any], config: TaskConfig
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Each metric as (sum, weight) over the tokens that count.

    Logits [batch, context, tokens] are for the token after each. Training minimises "loss": its sum
    divided by its weight. All sums are divided by their weights once, after micro-batches, devices
    and batches were added up, so that uneven parts weigh what they should.
    """
    logits = logits.astype(jnp.float32)
    targets = batch["tokens"][:, 1:].astype(jnp.int32)
    mask = batch["mask"]
    plain = loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if config.z_loss:
        log_z = jax.nn.logsumexp(logits, axis=-1)
        loss = plain + config.z_loss * jnp.square(log_z)
    rows = jnp.any(mask > 0, axis=1)
    is_byte = batch["tokens"].dtype == jnp.uint8  # tokens of another program are wider
    return {
        "loss": (jnp.sum(loss * mask), jnp.sum(mask)),
        "cross_entropy": (jnp.sum(plain * mask), jnp.sum(mask)),
        "num_examples": (jnp.sum(rows, dtype=jnp.float32), jnp.float32(1)),
        "num_bytes": (jnp.sum(mask) * is_byte, jnp.float32(0)),
    }


def report(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Turn the (sum, weight) of a whole evaluation or log interval into the numbers to show."""
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    if "cross_entropy" in means:  # in nats
        means["perplexity"] = math.exp(min(means["cross_entropy"], 700))
        num_bytes = totals["num_bytes"][0]
        if num_bytes:
            means["bits_per_byte"] = totals["cross_entropy"][0] / num_bytes / math.log(2)
    counts = {"num_tokens": totals["loss"][1], "num_examples": totals["num_examples"][0]}
    return means | {name: int(count) for name, count in counts.items()}
