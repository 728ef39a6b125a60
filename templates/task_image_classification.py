"""The task: what the model sees of a batch, the loss and its settings, the metrics."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .runtime.settings import require, setting
from .sources import DataConfig

# The validation metric that chooses the best checkpoint, and whether more of it is better.
BEST_METRIC, HIGHER_IS_BETTER = "accuracy", True


@dataclass(frozen=True)
class TaskConfig:
    label_smoothing: float = setting(0.0, least=0.0)
    """Share of each target that is spread evenly over all classes (Szegedy et al. 2016)."""
    class_weights: Literal["none", "balanced"] = "none"
    """How much a row counts in the loss (balanced: every class counts the same in total)."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used."""
        smoothing = self.label_smoothing
        require(smoothing < 1, "task.label_smoothing", smoothing, "below 1")


def model_inputs(batch: dict[str, Any]) -> jax.Array:
    """What the model is applied to: images float32 [batch, height, width, channels], 0 to 1."""
    return normalize(batch["image"])


def augment(batch: dict[str, Any], key: jax.Array, config: DataConfig) -> dict[str, Any]:
    """A batch to train on with its images changed at random, as --data.augment says.

    Each row has a key of its own, from the seed, the step and its place in the batch: a resumed
    run, or one on more devices, changes every image as before.
    """
    if config.augment == "none":
        return batch
    images = batch["image"]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(images)))
    images = jnp.where(
        jax.vmap(jax.random.bernoulli)(keys)[:, None, None, None], images[:, :, ::-1], images
    )
    if config.augment == "crop-flip":
        images = jax.vmap(move)(images, keys)
    return batch | {"image": images}


def move(image: jax.Array, key: jax.Array) -> jax.Array:
    """An image [height, width, channels], moved by up to an eighth; its border is reflected."""
    most = jnp.array([image.shape[0] // 8, image.shape[1] // 8])
    padded = jnp.pad(image, [(n // 8, n // 8) for n in image.shape[:2]] + [(0, 0)], "reflect")
    start = jax.random.randint(jax.random.fold_in(key, 1), (2,), 0, 2 * most + 1)
    return jax.lax.dynamic_slice(padded, (*start, 0), image.shape)


def normalize(images: jax.Array) -> jax.Array:
    """Bring uint8 images (0 to 255) to float32 (0 to 1); float images are there already."""
    return images / jnp.float32(255) if images.dtype == jnp.uint8 else images


def loss_and_metrics(
    logits: jax.Array, batch: dict[str, Any], config: TaskConfig
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Each metric as (sum, weight) over the rows that count, from logits [batch, classes].

    Training minimises "loss": its sum divided by its weight. All sums are divided by their weights
    once, after micro-batches, devices and batches were added up, so that uneven parts weigh what
    they should.
    """
    logits = logits.astype(jnp.float32)
    labels, mask = batch["label"], batch["mask"]
    plain = loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if config.label_smoothing:
        targets = jax.nn.one_hot(labels, logits.shape[-1])
        smooth = optax.smooth_labels(targets, config.label_smoothing)
        loss = optax.softmax_cross_entropy(logits, smooth)
    correct = jnp.argmax(logits, axis=-1) == labels
    weight = mask * batch["class_weight"] if config.class_weights == "balanced" else mask
    return {
        "loss": (jnp.sum(loss * weight), jnp.sum(weight)),
        "cross_entropy": (jnp.sum(plain * mask), jnp.sum(mask)),
        "accuracy": (jnp.sum(correct * mask), jnp.sum(mask)),
    }


def report(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Turn the (sum, weight) of a whole evaluation or log interval into the numbers to show."""
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    return means | {"num_examples": int(totals["accuracy"][1])}
