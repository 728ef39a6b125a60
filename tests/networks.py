"""Networks as users write them, with Flax's own layers and in both APIs, instead of the project's.

Each is a class called like the project's own: Linen's with (dropout_rate, num_classes, dtype),
NNX's with (dropout_rate, image_shape, num_classes, dtype, rngs). All are tiny.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, DEPTH = 8, 2, 3


# -------------------------------------------------------------------------------------------- Linen


class Block(nn.Module):
    """Pre-norm attention and MLP, of which nn.scan makes a stack."""

    dropout_rate: float
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, x, _=None):
        settings = {"dropout_rate": self.dropout_rate, "deterministic": not self.train}
        attention = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, **settings)
        x += attention(nn.LayerNorm(dtype=self.dtype)(x))
        hidden = nn.gelu(nn.Dense(12, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        hidden = nn.Dropout(self.dropout_rate, deterministic=not self.train)(hidden)
        return x + nn.Dense(WIDTH, dtype=self.dtype)(hidden), None


class ViT(nn.Module):
    dropout_rate: float
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images, *, train):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), dtype=self.dtype)(images)
        x = x.reshape(len(x), -1, WIDTH)
        cls = self.param("cls_token", nn.initializers.normal(0.1), (1, 1, WIDTH)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(cls, (len(x), 1, WIDTH)), x], axis=1)
        place = self.param("pos_embed", nn.initializers.normal(0.1), (1, *x.shape[1:]))
        x += place.astype(x.dtype)
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
        blocks = nn.scan(nn.remat(Block), length=DEPTH, **axes)
        x, _ = blocks(self.dropout_rate, self.dtype, train, name="blocks")(x, None)
        return nn.Dense(self.num_classes, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x[:, 0]))


class ResNet(nn.Module):
    dropout_rate: float
    num_classes: int
    dtype: Any
    norm: str = "batch"

    @nn.compact
    def __call__(self, x, *, train):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        if self.norm == "batch":
            norm = functools.partial(
                nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
            )
        else:
            norm = functools.partial(nn.GroupNorm, 2, dtype=self.dtype)
        x = nn.relu(norm()(conv(4, (3, 3))(x)))
        for features in (4, 8):
            strides = (features // 4,) * 2
            y = nn.relu(norm()(conv(features, (3, 3), strides)(x)))
            y = norm()(conv(features, (3, 3))(y))
            x = nn.relu(y + (x if features == 4 else conv(features, (1, 1), strides)(x)))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


class LSTM(nn.Module):
    """Reads an image row by row."""

    dropout_rate: float
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images, *, train):
        x = images.reshape(*images.shape[:2], -1)
        x = nn.RNN(nn.LSTMCell(WIDTH, dtype=self.dtype))(x)[:, -1]
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


# ---------------------------------------------------------------------------------------------- NNX


class NnxBlock(nnx.Module):
    def __init__(self, dropout_rate, dtype, rngs):
        self.norms = nnx.List(nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=dropout_rate, decode=False, dtype=dtype, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 12, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(12, WIDTH, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.norms[0](x))
        return x + self.down(self.dropout(nnx.gelu(self.up(self.norms[1](x)))))


class NnxViT(nnx.Module):
    def __init__(self, dropout_rate, image_shape, num_classes, dtype, rngs):
        self.conv = nnx.Conv(image_shape[2], WIDTH, (4, 4), (4, 4), dtype=dtype, rngs=rngs)
        places = 1 + image_shape[0] // 4 * (image_shape[1] // 4)
        self.cls_token = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 1, WIDTH)))
        self.pos_embed = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, places, WIDTH)))

        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return NnxBlock(dropout_rate, dtype, rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(WIDTH, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, images):
        x = self.conv(images)
        x = x.reshape(len(x), -1, WIDTH)
        cls = jnp.broadcast_to(self.cls_token[...].astype(x.dtype), (len(x), 1, WIDTH))
        x = jnp.concatenate([cls, x], axis=1) + self.pos_embed[...].astype(x.dtype)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def blocks(block, x):
            return block(x)

        return self.head(self.norm(blocks(self.blocks, x)[:, 0]))


class NnxResNet(nnx.Module):
    def __init__(self, dropout_rate, image_shape, num_classes, dtype, rngs):
        settings = {"dtype": dtype, "rngs": rngs}

        def conv(*sizes):
            return nnx.Conv(*sizes, use_bias=False, **settings)

        def norm(features):
            return nnx.BatchNorm(features, momentum=0.9, **settings)

        self.stem = nnx.Sequential(conv(image_shape[2], 4, (3, 3)), norm(4), nnx.relu)
        self.blocks, self.shortcuts = nnx.List(), nnx.List()
        for inputs, outputs in ((4, 4), (4, 8)):
            strides = (outputs // inputs,) * 2
            layers = conv(inputs, outputs, (3, 3), strides), norm(outputs), nnx.relu
            layers += conv(outputs, outputs, (3, 3)), norm(outputs)
            self.blocks.append(nnx.Sequential(*layers))
            same = inputs == outputs
            self.shortcuts.append(nnx.identity if same else conv(4, outputs, (1, 1), strides))
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.head = nnx.Linear(8, num_classes, **settings)

    def __call__(self, x):
        x = self.stem(x)
        for block, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            x = nnx.relu(block(x) + shortcut(x))
        return self.head(self.dropout(x.mean(axis=(1, 2))))


class NnxLSTM(nnx.Module):
    def __init__(self, dropout_rate, image_shape, num_classes, dtype, rngs):
        features = image_shape[1] * image_shape[2]
        self.rnn = nnx.RNN(nnx.LSTMCell(features, WIDTH, dtype=dtype, rngs=rngs), rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.head = nnx.Linear(WIDTH, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, images):
        x = self.rnn(images.reshape(*images.shape[:2], -1))[:, -1]
        return self.head(self.dropout(x))


# ------------------------------------------------------------------------------------------ By name

GroupNormResNet = functools.partial(ResNet, norm="group")
LINEN = {"vit": ViT, "resnet": ResNet, "groupnorm": GroupNormResNet, "lstm": LSTM}
NNX = {"vit": NnxViT, "resnet": NnxResNet, "lstm": NnxLSTM}
