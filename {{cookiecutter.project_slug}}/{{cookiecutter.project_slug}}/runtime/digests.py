"""What identifies a saved tree of arrays: names, shapes, dtypes, and a digest of all bits."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .settings import SettingError


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, each under its path, such as 'Dense_0/kernel'."""
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def layout(tree: Any) -> dict[str, str]:
    """The dtype and shape of every array under its path."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves_by_name(tree).items()}


def name_of(path: Any) -> str:
    """A JAX key path as text, such as 'Dense_0/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def require_same_layout(saved: dict[str, str], wanted: dict[str, str], path: Path) -> None:
    """Raise SettingError naming the arrays of a checkpoint that the state has in another form."""
    differing = [
        f"{name} is {saved.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise SettingError(
            f"checkpoint {path} does not fit this model and optimizer: {'; '.join(differing[:3])}"
            f"{more}. Undo the change, or start a new --workdir (--init-from keeps the parameters)"
        )


@jax.jit
def digest(tree: Any) -> jax.Array:
    """A uint32 checksum of every bit of the tree, the same on any number of devices.

    Orbax does not notice a flipped bit in its files. Each word is multiplied by an odd number that
    depends on its position. An odd factor is invertible modulo 2**32, so any change of a single
    word changes the sum.
    """
    total = jnp.uint32(0)
    for name, x in leaves_by_name(tree).items():
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        elif x.dtype == bool:
            x = x.astype(jnp.uint8)
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        position = jnp.full(x.shape, zlib.crc32(name.encode()), jnp.uint32)
        for axis in range(x.ndim):
            index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            position = position * jnp.uint32(x.shape[axis] + 7919) + index
        odd = 2 * position + 1
        total += jnp.sum(words.astype(jnp.uint32) * odd, dtype=jnp.uint32)
    return total


def checksum(contents: dict[str, Any]) -> int:
    """A checksum of contents that are saved as JSON."""
    return zlib.crc32(json.dumps(contents, sort_keys=True).encode())
