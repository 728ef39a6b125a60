"""Errors for which there is a way out that the user should be told."""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import jax

from ..config import Config
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


def is_outside(error: Exception) -> bool:
    """Whether a failed read says nothing about the file itself."""
    words = r"permission.denied|too many open files|stale file handle|transport endpoint"
    return bool(re.search(words, str(error), re.IGNORECASE))


def remedy(error: Exception) -> str:
    """What helps against this failure of a write."""
    if re.search(r"no space|quota|too large|resource_exhausted", str(error), re.IGNORECASE):
        return "make room"
    if re.search(r"permission|read-only", str(error), re.IGNORECASE):
        return "make the directory writable"
    return "mend that"


def summary(error: Exception) -> str:
    """Both ends of the first line of an error, which may go on for pages."""
    line = str(error).strip().partition("\n")[0].partition(" [")[0]
    line = line if len(line) <= 200 else f"{line[:100]} ... {line[-100:]}"
    return f"{type(error).__name__}: {line}"
