"""The network and its settings. This is the file to edit first."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from .runtime.settings import require


@dataclass(frozen=True)
class ModelConfig:
    features: tuple[int, ...] = (32, 64)
    """Channels of each block: two convolutions, then the image is halved."""
    dropout_rate: float = 0.3
    """Share of the features that dropout sets to zero before the last layer."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used."""
        features, rate = self.features, self.dropout_rate
        is_positive = bool(features) and min(features) >= 1
        require(is_positive, "model.features", features, "positive numbers")
        require(0 <= rate < 1, "model.dropout_rate", rate, "at least 0 and below 1")


GRID = 2  # places along each side that the dense layer sees of an image, whatever its size
TINY = ModelConfig(features=(8,), dropout_rate=0.5)  # for tests: compiles in a moment


class ConvNorm(nnx.Module):
    """Convolution and batch normalisation."""

    def __init__(self, channels: int, features: int, dtype: Any, rngs: nnx.Rngs):
        self.conv = nnx.Conv(channels, features, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class CNN(nnx.Module):
    """Blocks of convolution, batch normalisation and ReLU, then one dense layer.

    Images may have any size: the last block is averaged over a grid of GRID x GRID places.
    """

    def __init__(
        self, config: ModelConfig, channels: int, num_classes: int, dtype: Any, rngs: nnx.Rngs
    ):
        self.blocks: nnx.List = nnx.List()
        for features in config.features:
            first = ConvNorm(channels, features, dtype, rngs)
            second = ConvNorm(features, features, dtype, rngs)
            self.blocks.append(nnx.List([first, second]))
            channels = features
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)
        self.head = nnx.Linear(GRID * GRID * channels, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images [batch, height, width, channels] to logits [batch, num_classes]."""
        for first, second in self.blocks:
            x = second(nnx.relu(first(x)))
            # Before ReLU, which gives the same: after it, XLA makes bfloat16 NaN on the CPU.
            x = nnx.relu(nnx.max_pool(x, (2, 2), strides=(2, 2), padding="SAME"))
        x = jax.image.resize(x, (len(x), GRID, GRID, x.shape[3]), "linear")
        x = x.reshape(len(x), -1)
        return self.head(self.dropout(x))


def build(
    config: ModelConfig,
    inputs: jax.ShapeDtypeStruct,
    num_outputs: int,
    dtype: Any,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """The network for inputs of this shape. It computes in dtype; its parameters are float32."""
    return CNN(config, inputs.shape[-1], num_outputs, dtype, rngs)
