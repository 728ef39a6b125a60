"""The devices of a run: select the platform, join the other processes, check what JAX finds."""

import collections
import logging
import os
import re

import jax

from ..config import Config
from . import accelerators, processes
from .settings import SettingError

log = logging.getLogger(__package__.partition(".")[0])


def open_devices(config: Config) -> None:
    """Join the other processes and find the devices.

    Raises SettingError if the devices are not those that the run needs, Unreachable if the other
    processes do not come.
    """
    select_platform(config)
    processes.join()
    require_devices(config)
    unused = accelerators.left_on_cpu(config.platform, jax.default_backend())
    if unused and unused.is_wanted:
        raise SettingError(str(unused))
    if unused:
        log.warning("%s", unused)


def select_platform(config: Config) -> None:
    """Apply --platform, --debug-nans and --deterministic, before JAX looks for its devices."""
    if config.platform != "auto":
        name = {"gpu": "cuda"}.get(config.platform, config.platform)
        jax.config.update("jax_platforms", name)
    jax.config.update("jax_debug_nans", config.debug_nans)
    flags = os.environ.get("XLA_FLAGS", "")
    deterministic = "--xla_gpu_deterministic_ops=true"
    if config.deterministic and deterministic not in flags.split():
        os.environ["XLA_FLAGS"] = f"{deterministic} {flags}"


def require_devices(config: Config) -> None:
    """Check that there are devices, and equally many in each process: each takes an equal part of
    the batch.

    Raises SettingError if not, Unreachable if another process did not report its devices.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        if jax.distributed.is_initialized() and re.search("DEADLINE|opology", str(error)):
            raise processes.Unreachable(
                f"other processes did not report their devices, see their logs ({error})"
            ) from error
        advice = (
            "another process of this machine uses it: stop that process, or wait"
            if "in use" in str(error)
            else "install the extra of your hardware (make setup EXTRAS=cuda13,dev, or cuda12 or "
            "tpu), check the driver, or use --platform auto without JAX_PLATFORMS"
        )
        variable = os.environ.get("JAX_PLATFORMS") if config.platform == "auto" else None
        asked = f"JAX_PLATFORMS={variable}" if variable else f"--platform {config.platform}"
        reason = str(error) or type(error).__name__
        raise SettingError(
            f"{asked}: JAX finds no such device here: {advice} ({reason})"
        ) from error
    counts = collections.Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"process {rank} has {counts[rank]}" for rank in sorted(counts))
        raise SettingError(
            f"every process must have the same number of devices, but {found}: compare "
            f"CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES and what the scheduler gave each process"
        )
