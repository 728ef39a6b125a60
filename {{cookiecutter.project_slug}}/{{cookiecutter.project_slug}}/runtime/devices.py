"""The devices of this process: joining the others, finding them, refusing what does not fit."""

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
    """Join the other processes and find the devices. Raises SettingError if they do not fit."""
    select_platform(config)
    processes.join()
    require_devices(config)
    unused = accelerators.left_on_cpu(config.platform, jax.default_backend())
    if unused and unused.wanted:
        raise SettingError(str(unused))
    if unused:
        log.warning("%s", unused)


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
            else "install the extra of your hardware (make setup EXTRAS=cuda13,dev, or cuda12 or "
            "tpu), check the driver, or use --platform auto without JAX_PLATFORMS"
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
