"""The task: what the model sees of a batch, the loss, the metrics."""

import math

import jax
import jax.numpy as jnp
import optax

# The validation metric that chooses the best checkpoint, and whether more of it is better.
BEST_METRIC, HIGHER_IS_BETTER = "loss", False


def model_inputs(batch: dict[str, jax.Array]) -> jax.Array:
    """What the model is applied to: tokens int32 [batch, context], all but the last of each row."""
    return batch["tokens"][:, :-1].astype(jnp.int32)


def loss_and_metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> dict[str, tuple]:
    """Each metric as (sum, weight) over the tokens that count; "loss" is what training minimises.

    Logits [batch, context, tokens] for the token after each. Sums are divided by weights once,
    after all micro-batches, devices and batches were added up, so that uneven parts weigh what they
    should.
    """
    targets, mask = batch["tokens"][:, 1:].astype(jnp.int32), batch["mask"]
    logits = logits.astype(jnp.float32)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    loss = cross_entropy
    rows = jnp.any(mask > 0, axis=1)
    return {
        "loss": (jnp.sum(loss * mask), jnp.sum(mask)),
        "cross_entropy": (jnp.sum(cross_entropy * mask), jnp.sum(mask)),
        "num_examples": (jnp.sum(rows, dtype=jnp.float32), jnp.float32(1)),
    }


def report(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Turn the (sum, weight) of a whole evaluation or log interval into the numbers to show."""
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    if "cross_entropy" in means:  # nats per token, and a token is a byte
        nats = means.pop("cross_entropy")
        means["perplexity"] = math.exp(min(nats, 700))
        means["bits_per_byte"] = nats / math.log(2)
    counts = {"num_tokens": totals["loss"][1], "num_examples": totals["num_examples"][0]}
    return means | {name: int(count) for name, count in counts.items()}
