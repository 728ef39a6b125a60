"""The device mesh, and how arrays are laid out over it."""

import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .config import MeshConfig, SettingError

log = logging.getLogger(__package__)

MIN_SPLIT_SIZE = 2**14  # elements; to split a smaller array costs more than it saves


def create_mesh(config: MeshConfig, batch_size: int, accumulation_steps: int) -> jax.sharding.Mesh:
    """Arrange all devices in a mesh with the axes "data" and "fsdp".

    Raises SettingError if the devices cannot be arranged so, or the batch cannot be divided.
    """
    devices = jax.device_count()
    data, fsdp = config.data, config.fsdp
    if data == -1 and devices % fsdp:
        raise SettingError(f"--mesh.fsdp {fsdp}: must divide {devices}, the number of devices")
    if data == -1:
        data = devices // fsdp
    if data * fsdp != devices:
        raise SettingError(
            f"--mesh.data {data} times --mesh.fsdp {fsdp}: must be {devices}, the number of devices"
        )
    multiple = devices * accumulation_steps
    if batch_size % multiple:
        raise SettingError(
            f"--batch-size {batch_size}: must be a multiple of {multiple} ({devices} devices x "
            f"{accumulation_steps} --accumulation-steps)"
        )
    # Auto: the compiler decides how intermediate results are laid out.
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The rows of a batch are split over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def state_sharding(mesh: jax.sharding.Mesh, state: Any) -> Any:
    """The sharding of each array of the state: its largest divisible dimension over "fsdp".

    Arrays below MIN_SPLIT_SIZE, and those without a dimension that can be divided, are replicated.
    The rule looks at shapes only, so an optimizer's moments are split as their parameters are.
    """
    size = mesh.shape["fsdp"]

    def rule(array):
        if size == 1 or array.size < MIN_SPLIT_SIZE:
            return replicated(mesh)
        largest_first = np.argsort(array.shape)[::-1]
        for dimension in largest_first:
            if array.shape[dimension] % size == 0:
                axes = [None] * int(dimension)
                return NamedSharding(mesh, PartitionSpec(*axes, "fsdp"))
        log.warning("an array of shape %s has no dimension to split by %d", array.shape, size)
        return replicated(mesh)

    return jax.tree.map(rule, state)
