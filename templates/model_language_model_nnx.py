"""The network and its settings. This is the file to edit first."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .runtime.settings import require


@dataclass(frozen=True)
class ModelConfig:
    context: int = 96
    """Tokens (bytes) that the network sees at once."""
    width: int = 128
    """Features of each token."""
    depth: int = 3
    """Number of blocks."""
    heads: int = 4
    """Attention heads of each block; they share the width."""
    dropout_rate: float = 0.0
    """Share of the features that dropout sets to zero after each attention and each MLP."""
    tie_embeddings: bool = False
    """Compute the logits with the embedding's parameters instead of a layer of their own."""
    remat: bool = False
    """Compute each block again in the backward pass instead of storing it: slower, less memory."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used."""
        for name in ("context", "width", "depth", "heads"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}", value, "at least 1")
        rule = f"a multiple of twice --model.heads {self.heads}"
        require(self.width % (2 * self.heads) == 0, "model.width", self.width, rule)
        rate = self.dropout_rate
        require(0 <= rate < 1, "model.dropout_rate", rate, "at least 0 and below 1")


TINY = ModelConfig(context=16, width=16, depth=1, heads=2, dropout_rate=0.1)  # for tests


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        def dense():
            return nnx.Linear(config.width, config.width, use_bias=False, dtype=dtype, rngs=rngs)

        self.heads = config.heads
        self.query, self.key, self.value = dense(), dense(), dense()
        self.out = dense()

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        query = rotate(self.query(x).reshape(heads))
        key = rotate(self.key(x).reshape(heads))
        value = self.value(x).reshape(heads)
        if query.dtype == jnp.float16:  # in which JAX has no attention on CPU and TPU
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        x = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(x.reshape(batch, length, width))


class SwiGLU(nnx.Module):
    """The gated MLP of Shazeer (2020), with as many parameters as a plain one of 4 x width."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
        hidden = hidden_width(width)
        self.gate = nnx.Linear(width, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gated = nnx.silu(self.gate(x)) * self.up(x)
        return self.down(gated)


class Block(nnx.Module):
    """Attention and MLP, each on the normalised residual stream that they add to."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.mlp = SwiGLU(config.width, dtype, rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        attended = self.attention(self.attention_norm(x))
        x += self.dropout(attended)
        transformed = self.mlp(self.mlp_norm(x))
        return x + self.dropout(transformed)


class Transformer(nnx.Module):
    """A decoder: embedding, blocks, norm, and logits for the token that comes next."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(num_tokens, config.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(config, dtype, rngs) for _ in range(config.depth))
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        if not config.tie_embeddings:
            self.head = nnx.Linear(config.width, num_tokens, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int32 [batch, length] to logits [batch, length, num_tokens]."""
        apply_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        x = self.embed(tokens)
        for block in self.blocks:
            x = apply_block(block, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.config.tie_embeddings else self.head(x)


def hidden_width(width: int) -> int:
    """Two thirds of 4 x width, rounded up to a multiple of 32."""
    return -(-8 * width // 3 // 32) * 32


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021): turn pairs of features [batch, length, heads, features].

    The angle grows with the position, at a speed of its own for each pair, so that the product of
    two turned vectors depends on their distance only.
    """
    length, features = x.shape[1], x.shape[-1]
    speeds = 10_000.0 ** -(jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * speeds
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = first * cos - second * sin, first * sin + second * cos
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def build(
    config: ModelConfig,
    inputs: jax.ShapeDtypeStruct,
    num_outputs: int,
    dtype: Any,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """The network for inputs of this shape. It computes in dtype; its parameters are float32."""
    return Transformer(config, num_outputs, dtype, rngs)
