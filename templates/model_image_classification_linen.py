"""The network and its settings. This is the file to edit first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ModelConfig:
    features: tuple[int, ...] = (32, 64)
    """Channels of each block: two convolutions, then the image is halved."""
    dropout_rate: float = 0.3
    """Share of the features that dropout sets to zero before the last layer."""

    def check(self, require: Callable[..., None]) -> None:
        """Call require(holds, name, value, rule) for every rule of these settings."""
        features, rate = self.features, self.dropout_rate
        require(features and min(features) >= 1, "model.features", features, "positive numbers")
        require(0 <= rate < 1, "model.dropout_rate", rate, "at least 0 and below 1")


TINY = ModelConfig(features=(8,), dropout_rate=0.5)  # for tests: compiles in a moment


class CNN(nn.Module):
    """Blocks of convolution, batch normalisation and ReLU, then one dense layer."""

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
                # Before ReLU, which gives the same: after it, XLA makes bfloat16 NaN on the CPU.
                x = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME") if i == 1 else x
                x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(self.config.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


class Model(NamedTuple):
    """A network as two pure functions of its variables {"params": ..., "batch_stats": ...}.

    init(key) returns new variables; apply(variables, inputs, train, key) returns the outputs and
    the batch statistics after this call. The key draws dropout; evaluation needs none.
    """

    init: Callable[[jax.Array], dict]
    apply: Callable[..., tuple[jax.Array, dict]]


def create_model(
    config: ModelConfig, inputs: jax.ShapeDtypeStruct, num_outputs: int, dtype: Any
) -> Model:
    """The network for inputs of this shape. It computes in dtype; its parameters are float32."""
    network = CNN(config, num_outputs, dtype)

    def init(key):
        variables = network.init(key, jnp.zeros(inputs.shape, inputs.dtype), train=False)
        return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}

    def apply(variables, inputs, *, train, key=None):
        if not train:
            return network.apply(variables, inputs, train=False), variables["batch_stats"]
        outputs, updated = network.apply(
            variables, inputs, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return outputs, updated.get("batch_stats", {})

    return Model(init, apply)
