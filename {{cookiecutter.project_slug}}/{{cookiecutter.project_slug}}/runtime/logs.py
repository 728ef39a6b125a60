"""Where log lines go: the terminal, and train.log once the run is accepted."""

import contextlib
import logging
import logging.handlers
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import jax

from . import terminal

log = logging.getLogger(__package__.partition(".")[0])

FILE_ONLY = {"file_only": True}  # `extra` of a line that the terminal does not get
FILE_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class Kept(logging.handlers.MemoryHandler):
    """Lines for train.log, kept until it is known that this start may write there."""

    def __init__(self) -> None:
        super().__init__(capacity=10**6, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


class LogFile(logging.FileHandler):
    """train.log, which is given up when it cannot be written, as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        log.removeHandler(self)
        log.warning("%s gets no more lines (%s)", self.baseFilename, error)
        with contextlib.suppress(OSError):
            self.close()


def start_logging(quiet: bool) -> None:
    """Log to the terminal: all lines in process 0, warnings in the others and with --quiet."""
    end_logging()
    log.setLevel(logging.INFO)
    log.propagate = False
    for name in ("absl", "asyncio", "concurrent.futures"):  # Orbax shows what it raises as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = quiet_hook
    screen = logging.StreamHandler(terminal.Screen(sys.stdout))
    screen.setFormatter(logging.Formatter("%(message)s"))
    screen.addFilter(lambda record: not getattr(record, "file_only", False))
    log.addHandler(screen)
    log.addHandler(Kept())
    show(quiet)


def show(quiet: bool) -> None:
    """Choose what the terminal gets. To be called again once the process knows its number."""
    terminal.shows_progress = not quiet and not is_other_process()
    for handler in log.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(logging.INFO if terminal.shows_progress else logging.WARNING)


def is_other_process() -> bool:
    """True in all processes of a run but the first, before they have joined as well."""
    if jax.distributed.is_initialized():
        return jax.process_index() > 0
    is_one_of_many = int(os.environ.get("TRAIN_NUM_PROCESSES", "1")) > 1
    return is_one_of_many and os.environ.get("TRAIN_PROCESS_ID", "0") != "0"


def open_log(workdir: Path) -> None:
    """Write to train.log from now on, first what was said before; by process 0 only."""
    for kept in [handler for handler in log.handlers if isinstance(handler, Kept)]:
        log.removeHandler(kept)
        if jax.process_index() == 0:
            try:
                file = LogFile(workdir / "train.log", encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                log.warning("train.log gets no lines (%s)", error)
                return
            file.setFormatter(FILE_FORMAT)
            log.addHandler(file)
            kept.setTarget(file)
            kept.flush()


def end_logging() -> None:
    """Close train.log, and forget what was not written there."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


def quiet_hook(unraisable: Any) -> None:
    """Drop the tracebacks that Orbax leaves, one for each array, beside the error it raises."""
    files = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
    if not any("orbax" in name or "asyncio" in name for name in files):
        sys.__unraisablehook__(unraisable)
