"""Errors that need advice: out of memory, a full disk, missing permissions."""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import jax

from ..config import Config
from .watchdog import Watchdog


def fetch(tree: Any) -> Any:
    """Copy the arrays of a tree to the host, as NumPy arrays.

    Raises the error of the computation that should have made them. device_get alone would hang
    forever on an array that could not be computed for lack of memory, so wait for the arrays first.
    """
    return jax.device_get(jax.block_until_ready(tree))


class OutOfMemory(RuntimeError):
    """The device or the host has less memory than this run needs."""


@contextlib.contextmanager
def explained(config: Config, watchdog: Watchdog) -> Generator[None]:
    """Turn a lack of memory inside into OutOfMemory, whose message says what to change."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        what = watchdog.failed_in or "training"
        first_line = str(error).strip().partition("\n")[0]
        raise OutOfMemory(
            f"out of memory while {what} ({first_line}). {memory_advice(config, what)}"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or bool(
        re.search(r"out of memory|failed to allocate|bad_alloc", str(error), re.IGNORECASE)
    )


def memory_advice(config: Config, what: str) -> str:
    """The flags that reduce the memory of a run, those first that change the run least."""
    devices, parts = jax.device_count(), config.accumulation_steps
    candidates = range(2 * parts, 64 * parts + 1)
    finer = [n for n in candidates if config.batch_size % (devices * n) == 0]
    flags = []
    if finer and "state" not in what:
        flags.append(f"--accumulation-steps {finer[0]} (the same batch in smaller parts)")
    if config.precision == "float32":
        flags.append("--precision bfloat16")
    if devices > config.mesh.fsdp:
        flags.append(f"--mesh.fsdp {devices} (splits parameters and optimizer over the devices)")
    flags.append("a smaller network (--model.*)")
    flags.append(f"a --batch-size below {config.batch_size}")
    return (
        f"Try, in this order: {', '.join(flags)}. The last two need a new run. Also check whether "
        f"another program uses the memory"
    )


def is_outside(error: Exception) -> bool:
    """Whether a read failed for a reason other than the contents of the file."""
    words = r"permission.denied|too many open files|stale file handle|transport endpoint"
    return bool(re.search(words, str(error), re.IGNORECASE))


def remedy(error: Exception) -> str:
    """What to do after a write failed with this error."""
    if re.search(r"no space|quota|too large|resource_exhausted", str(error), re.IGNORECASE):
        return "free some space"
    if re.search(r"permission|read-only", str(error), re.IGNORECASE):
        return "make the directory writable"
    return "fix that"


def summary(error: Exception) -> str:
    """The type and first line of an error, shortened: those of Orbax may go on for pages."""
    line = str(error).strip().partition("\n")[0].partition(" [")[0]
    line = line if len(line) <= 200 else f"{line[:100]} ... {line[-100:]}"
    return f"{type(error).__name__}: {line}"
