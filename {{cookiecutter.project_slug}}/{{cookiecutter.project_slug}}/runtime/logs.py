"""Where log lines go: to the terminal, and to train.log once the settings are accepted."""

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

FILE_ONLY = {"file_only": True}  # `extra` of a line that goes to train.log only
FILE_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class EarlyLines(logging.handlers.MemoryHandler):
    """Keeps the lines for train.log until it is known that this start may write there."""

    def __init__(self) -> None:
        super().__init__(capacity=10**6, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


class LogFile(logging.FileHandler):
    """train.log. After a failed write, as on a full disk, it gets no more lines."""

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
    for name in ("absl", "asyncio", "concurrent.futures"):  # Orbax logs errors that it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # It warns of each NaN that goes to TensorBoard, of which our own log says more.
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
    sys.unraisablehook = drop_orbax_tracebacks
    screen = logging.StreamHandler(terminal.Screen(sys.stdout))
    screen.setFormatter(logging.Formatter("%(message)s"))
    screen.addFilter(lambda record: not getattr(record, "file_only", False))
    log.addHandler(screen)
    log.addHandler(EarlyLines())
    show(quiet)


def show(quiet: bool) -> None:
    """Choose what the terminal shows. Call this again once the process knows its rank."""
    terminal.shows_progress = not quiet and not is_other_process()
    for handler in log.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(logging.INFO if terminal.shows_progress else logging.WARNING)


def is_other_process() -> bool:
    """True in all processes of a run but process 0, also before they have joined."""
    if jax.distributed.is_initialized():
        return jax.process_index() > 0
    is_one_of_many = int(os.environ.get("TRAIN_NUM_PROCESSES", "1")) > 1
    return is_one_of_many and os.environ.get("TRAIN_PROCESS_ID", "0") != "0"


def open_log(workdir: Path) -> None:
    """Write to train.log from now on, beginning with the lines so far; in process 0 only."""
    for early in [handler for handler in log.handlers if isinstance(handler, EarlyLines)]:
        log.removeHandler(early)
        if jax.process_index() == 0:
            try:
                file = LogFile(workdir / "train.log", encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                log.warning("train.log gets no lines (%s)", error)
                return
            file.setFormatter(FILE_FORMAT)
            log.addHandler(file)
            early.setTarget(file)
            early.flush()


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number of things in words: '1 process' or '2 processes'."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def end_logging() -> None:
    """Close train.log, and drop the lines that were kept for it."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


def drop_orbax_tracebacks(unraisable: Any) -> None:
    """An unraisablehook without the tracebacks that Orbax prints, one for each array, beside the
    error that it raises."""
    files = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
    if not any("orbax" in name or "asyncio" in name for name in files):
        sys.__unraisablehook__(unraisable)
