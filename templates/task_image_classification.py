"""The task: what the model sees of a batch, the loss, the metrics."""

import jax
import jax.numpy as jnp
import optax

# The validation metric that chooses the best checkpoint, and whether more of it is better.
BEST_METRIC, HIGHER_IS_BETTER = "accuracy", True


def model_inputs(batch: dict[str, jax.Array]) -> jax.Array:
    """What the model is applied to: images float32 [batch, height, width, channels], 0 to 1."""
    return normalize(batch["image"])


def normalize(images: jax.Array) -> jax.Array:
    """Bring uint8 images (0 to 255) to float32 (0 to 1); float images are there already."""
    return images / jnp.float32(255) if images.dtype == jnp.uint8 else images


def loss_and_metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> dict[str, tuple]:
    """Each metric as (sum, weight) over the rows that count; "loss" is what training minimises.

    Logits [batch, classes]. Sums are divided by weights once, after all micro-batches, devices
    and batches were added up, so that uneven parts weigh what they should.
    """
    logits, labels, mask = logits.astype(jnp.float32), batch["label"], batch["mask"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return {
        "loss": (jnp.sum(loss * mask), jnp.sum(mask)),
        "accuracy": (jnp.sum(correct * mask), jnp.sum(mask)),
    }


def report(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Turn the (sum, weight) of a whole evaluation or log interval into the numbers to show."""
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    return means | {"num_examples": int(totals["loss"][1])}
