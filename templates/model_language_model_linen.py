"""The network and its settings. This is the file to edit first."""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

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


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        dense = functools.partial(nn.Dense, width, use_bias=False, dtype=self.dtype)
        heads = (batch, length, self.config.heads, width // self.config.heads)
        query = rotate(dense(name="query")(x).reshape(heads))
        key = rotate(dense(name="key")(x).reshape(heads))
        value = dense(name="value")(x).reshape(heads)
        if query.dtype == jnp.float16:  # in which JAX has no attention on CPU and TPU
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        x = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return dense(name="out")(x.reshape(batch, length, width))


class SwiGLU(nn.Module):
    """The gated MLP of Shazeer (2020), with as many parameters as a plain one of 4 x width."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        hidden = hidden_width(width)
        gate = nn.silu(dense(hidden, name="gate")(x))
        up = dense(hidden, name="up")(x)
        return dense(width, name="down")(gate * up)


class Block(nn.Module):
    """Attention and MLP, each on the normalised residual stream that they add to."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        dropout = functools.partial(nn.Dropout, self.config.dropout_rate, deterministic=not train)
        normed = nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x)
        attended = Attention(self.config, self.dtype, name="attention")(normed)
        x += dropout()(attended)
        normed = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x)
        transformed = SwiGLU(self.dtype, name="mlp")(normed)
        return x + dropout()(transformed)


class Transformer(nn.Module):
    """A decoder: embedding, blocks, norm, and logits for the token that comes next."""

    config: ModelConfig
    num_tokens: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        """Tokens int32 [batch, length] to logits [batch, length, num_tokens]."""
        config = self.config
        embed = nn.Embed(self.num_tokens, config.width, dtype=self.dtype, name="embed")
        block = nn.remat(Block, static_argnums=(2,)) if config.remat else Block
        x = embed(tokens)
        for i in range(config.depth):
            x = block(config, self.dtype, name=f"block_{i}")(x, train)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        if config.tie_embeddings:
            return embed.attend(x)
        return nn.Dense(self.num_tokens, use_bias=False, dtype=self.dtype, name="head")(x)


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
    config: ModelConfig, inputs: jax.ShapeDtypeStruct, num_outputs: int, dtype: Any
) -> nn.Module:
    """The network for inputs of this shape. It computes in dtype; its parameters are float32."""
    return Transformer(config, num_outputs, dtype)
