"""Where log lines go: the terminal and train.log."""

import contextlib
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger(__package__)


def start_logging(workdir: Path, quiet: bool) -> None:
    """Log to the terminal and, everything, to train.log; in process 0 only, but for warnings."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.INFO)
    log.propagate = False
    for name in ("absl", "asyncio", "concurrent.futures"):  # Orbax shows what it raises as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = quiet_hook
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setLevel(logging.WARNING if quiet or jax.process_index() else logging.INFO)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    add_handler(terminal)
    if jax.process_index() == 0:
        file = logging.FileHandler(workdir / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        add_handler(file)


def quiet_hook(unraisable: Any) -> None:
    """Drop the tracebacks that Orbax leaves, one for each array, beside the error it raises."""
    files = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
    if not any("orbax" in name or "asyncio" in name for name in files):
        sys.__unraisablehook__(unraisable)


def add_handler(handler: logging.Handler) -> None:
    """Log to this handler until it fails, on a full disk for one. Python would go on with it and
    show a traceback for every line."""

    def give_up(record):
        log.removeHandler(handler)
        with contextlib.suppress(OSError):  # when the terminal is gone
            print(f"{handler}: gets no more lines ({sys.exc_info()[1]})", file=sys.stderr)

    handler.handleError = give_up  # type: ignore[method-assign]
    log.addHandler(handler)
