"""The device mesh, and how arrays are laid out over it."""

import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .config import MeshConfig, SettingError

log = logging.getLogger(__package__)

SMALL = 2**14  # elements below which splitting an array costs more than it saves


def create_mesh(config: MeshConfig, batch_size: int, accumulation_steps: int) -> jax.sharding.Mesh:
    """Arrange all devices in a grid of the axes "data" and "fsdp"."""
    devices = jax.device_count()
    data = devices // config.fsdp if config.data == -1 else config.data
    if config.data == -1 and devices % config.fsdp:
        raise SettingError(
            f"--mesh.fsdp {config.fsdp}: must divide the {devices} devices there are"
        )
    if data * config.fsdp != devices:
        raise SettingError(
            f"--mesh.data {config.data} times --mesh.fsdp {config.fsdp} must make up the "
            f"{devices} devices of this run"
        )
    if batch_size % (devices * accumulation_steps):
        raise SettingError(
            f"--batch-size {batch_size}: must be a multiple of {devices * accumulation_steps} "
            f"({devices} devices x {accumulation_steps} --accumulation-steps)"
        )
    return jax.make_mesh((data, config.fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows are split over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def state_sharding(mesh: jax.sharding.Mesh, state: Any) -> Any:
    """One sharding for each array of the state: its largest divisible dimension over "fsdp".

    Small arrays and those without a divisible dimension stay whole on every device. The rule sees
    shapes only, so optimizer moments and averages lie as their parameters do.
    """
    size = mesh.shape["fsdp"]

    def rule(array):
        dims = [d for d in np.argsort(array.shape)[::-1] if array.shape[d] % size == 0]
        if size > 1 and array.size >= SMALL and not dims:
            log.warning("an array of shape %s has no dimension to split by %d", array.shape, size)
        if size == 1 or array.size < SMALL or not dims:
            return replicated(mesh)
        return NamedSharding(mesh, PartitionSpec(*[None] * int(dims[0]), "fsdp"))

    return jax.tree.map(rule, state)
