"""Errors for which there is a way out that the user should be told."""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import jax

from .config import Config
from .watchdog import Watchdog


def fetch(tree: Any) -> Any:
    """The arrays of a tree as NumPy's. Raises the error of the computation that made them.

    Without waiting first, JAX hangs for ever on an array that could not be computed for lack of
    memory.
    """
    return jax.device_get(jax.block_until_ready(tree))


class OutOfMemory(RuntimeError):
    """The device, or the machine, has less memory than this run needs."""


@contextlib.contextmanager
def explained(config: Config, watchdog: Watchdog) -> Generator[None]:
    """Turn a lack of memory inside into OutOfMemory, which says what to change."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        what, first_line = watchdog.failed_in or "training", str(error).strip().partition("\n")[0]
        raise OutOfMemory(
            f"out of memory while {what} ({first_line}). {memory_advice(config, what)}"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or bool(
        re.search(r"out of memory|failed to allocate|bad_alloc", str(error), re.IGNORECASE)
    )


def memory_advice(config: Config, what: str) -> str:
    """Which flags make a run smaller, the ones first that change the least."""
    devices, parts = jax.device_count(), config.accumulation_steps
    finer = [n for n in range(2 * parts, 64 * parts + 1) if config.batch_size % (devices * n) == 0]
    ways = []
    if finer and "state" not in what:
        ways.append(f"--accumulation-steps {finer[0]} (the same batch in smaller parts)")
    if config.precision == "float32":
        ways.append("--precision bfloat16")
    if devices > config.mesh.fsdp:
        ways.append(f"--mesh.fsdp {devices} (splits parameters and optimizer over the devices)")
    ways.append("a smaller network (--model.*)")
    ways.append(f"a --batch-size below {config.batch_size}")
    return (
        f"Try, in this order: {', '.join(ways)}. The last two need a new run; and see whether "
        f"another program holds the memory"
    )
