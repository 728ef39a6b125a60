"""A thread beside the run: it logs what a long wait is for, and ends a run that is stuck."""

import contextlib
import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator

from .stop import EXIT_CODES

log = logging.getLogger(__package__.partition(".")[0])

TICK = 0.5  # seconds between two looks of the thread
HEARTBEAT = 10.0  # seconds between two calls of `beat`
LONG_WAIT = 2.0  # seconds after which the log says what a wait is for
PATIENCE = 10  # how many times --stall-timeout everything but a training step may take
LAST_WRITE = 10.0  # seconds to write down why a run ends, on a disk that may hang as well


class Watchdog:
    """Watches a run from its start to its end, whatever ends it.

    `limit` is --stall-timeout in seconds (0 = never end the run). When the run has stalled,
    `abandon` is called with the reason and the process ends. `beat` is called every 10 seconds.
    Native code that waits without releasing Python's interpreter lock also stops this thread: such
    a hang is not noticed.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.abandon: Callable[[str], None] = lambda reason: None
        self.beat: Callable[[], None] = lambda: None
        self.wait: str | None = None
        self.failed_in: str | None = None
        """The wait in which an exception was raised."""
        self.moves = 0
        """Grows whenever a step, a batch or a wait is finished."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join(LAST_WRITE)

    def moved(self) -> bool:
        """Take note that a step or a batch was finished. Returns True, as keep_going() must."""
        self.moves += 1
        return True

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Generator[None]:
        """Everything inside is one wait with this name; it may take longer than a step."""
        outer, self.wait = self.wait, what
        self.moves += 1
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or what
            raise
        finally:
            self.wait = outer
            self.moves += 1

    def _watch(self) -> None:
        """Count the seconds since the last move, and act on them. Runs in the thread."""
        moves, idle, next_line, last_beat = self.moves, 0.0, LONG_WAIT, 0.0
        last = time.monotonic()
        while not self._closed.wait(TICK):
            now = time.monotonic()
            # A pause of the machine is no stall: after SIGSTOP, or with the lid of a laptop closed,
            # the clock has gone on and the run has not.
            idle += min(now - last, 2 * TICK)
            last = now
            if moves != self.moves:
                moves, idle, next_line = self.moves, 0.0, LONG_WAIT
            what = self.wait
            if what and idle >= next_line:
                log.info("%s ...%s", what, f" ({idle:.0f} s)" if next_line > LONG_WAIT else "")
                next_line = max(15.0, 2 * next_line)
            if now > last_beat + HEARTBEAT:
                last_beat = now
                with contextlib.suppress(OSError):
                    self.beat()
            allowed = self.limit * (PATIENCE if what else 1)
            if self.limit and idle > allowed:
                self._end(what or "training", idle)

    def _end(self, what: str, idle: float) -> None:
        """Print the stacks of all threads, write down why the run ends, and end the process."""
        reason = f"stalled: nothing was finished for {idle:.0f} s (--stall-timeout) in: {what}"
        with contextlib.suppress(Exception):  # there may be no stderr
            faulthandler.dump_traceback(sys.__stderr__)
        writer = threading.Thread(target=self._write, args=(reason,), daemon=True)
        writer.start()
        writer.join(LAST_WRITE)
        os._exit(EXIT_CODES["failed"])

    def _write(self, reason: str) -> None:
        """Write the stacks and the reason to train.log, and the reason to result.json."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            log.error("%s", file.read(), extra={"file_only": True})
        log.error("error: %s", reason)
        self.abandon(reason)
        logging.shutdown()
