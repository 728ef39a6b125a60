"""The device mesh, and how arrays are laid out over it."""

import collections
import logging
import os
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import processes
from .config import Config, MeshConfig, SettingError

log = logging.getLogger(__package__)

SMALL = 2**14  # elements below which splitting an array costs more than it saves


def open_devices(config: Config) -> None:
    """Join the other processes and find the devices. Raises SettingError if they do not fit."""
    select_platform(config)
    processes.join()
    require_devices(config)


def select_platform(config: Config) -> None:
    """Apply --platform and the numeric switches; fail when the hardware asked for is not there."""
    if config.platform != "auto":
        name = {"gpu": "cuda"}.get(config.platform, config.platform)
        jax.config.update("jax_platforms", name)
    jax.config.update("jax_debug_nans", config.debug_nans)
    flags, exact = os.environ.get("XLA_FLAGS", ""), "--xla_gpu_deterministic_ops=true"
    if config.deterministic and exact not in flags.split():
        os.environ["XLA_FLAGS"] = f"{exact} {flags}"


def require_devices(config: Config) -> None:
    """Raise SettingError naming the way out when JAX finds no device of the asked kind, and when
    the processes, which take equal parts of the batch, do not have equally many."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        if jax.distributed.is_initialized() and re.search("DEADLINE|opology", str(error)):
            raise processes.Unreachable(
                f"other processes did not report their devices, see their logs ({error})"
            ) from error
        advice = (
            "another process of this machine holds it: stop that, or wait"
            if "in use" in str(error)
            else 'install the matching extra (pip install -e ".[cuda13]", "[cuda12]" or "[tpu]"), '
            "check the driver, or use --platform auto without JAX_PLATFORMS"
        )
        asked = os.environ.get("JAX_PLATFORMS") if config.platform == "auto" else None
        raise SettingError(
            f"{f'JAX_PLATFORMS={asked}' if asked else f'--platform {config.platform}'}: JAX finds "
            f"no such device here: {advice} "
            f"({str(error) or type(error).__name__})"
        ) from error
    counts = collections.Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"process {rank} has {counts[rank]}" for rank in sorted(counts))
        raise SettingError(
            f"every process must have the same number of devices, but {found}: compare "
            f"CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES and what the scheduler gave them"
        )


def create_mesh(config: MeshConfig, batch_size: int, accumulation_steps: int) -> jax.sharding.Mesh:
    """Arrange all devices in a grid of the axes "data" and "fsdp"."""
    devices = jax.device_count()
    data = devices // config.fsdp if config.data == -1 else config.data
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
