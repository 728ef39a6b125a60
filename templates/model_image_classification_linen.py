"""The network and its settings. This is the file to edit first."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

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


class CNN(nn.Module):
    """Blocks of convolution, batch normalisation and ReLU, then one dense layer.

    Images may have any size: the last block is averaged over a grid of GRID x GRID places.
    """

    config: ModelConfig
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Images [batch, height, width, channels] to logits [batch, num_classes]."""
        for features in self.config.features:
            for i in range(2):
                x = nn.Conv(features, (3, 3), use_bias=False, dtype=self.dtype)(x)
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
                if i == 1:
                    # Before ReLU, which gives the same: after, XLA makes bfloat16 NaN on the CPU.
                    x = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")
                x = nn.relu(x)
        x = jax.image.resize(x, (len(x), GRID, GRID, x.shape[3]), "linear")
        x = x.reshape(len(x), -1)
        x = nn.Dropout(self.config.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


def build(
    config: ModelConfig, inputs: jax.ShapeDtypeStruct, num_outputs: int, dtype: Any
) -> nn.Module:
    """The network for inputs of this shape. It computes in dtype; its parameters are float32."""
    return CNN(config, num_outputs, dtype)
