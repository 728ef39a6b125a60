"""A thread beside the run: it says what a wait is for, and ends a run in which nothing moves."""

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

TICK, BEAT = 0.5, 10.0  # seconds between two looks, and between two signs of life
SOON = 2.0  # seconds of a wait until the user is told what it is for
SLACK = 10  # how many times longer than a step everything else may take
LAST_WORDS = 10.0  # seconds for what is written at the end, to a disk that may hang as well


class Watchdog:
    """Looks after a run from its start to its end, however that comes.

    `limit` is --stall-timeout in seconds. `abandon` is told why the run ends when it has stalled,
    and `beat` is called every 10 seconds as long as the process lives. Native code that waits
    without releasing Python's lock also stops this thread: such a hang is not noticed.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.abandon: Callable[[str], None] = lambda reason: None
        self.beat: Callable[[], None] = lambda: None
        self.wait: str | None = None
        self.failed_in: str | None = None
        """The wait that an exception ended."""
        self.moves = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join(LAST_WORDS)

    def moved(self) -> bool:
        """Note that a step, or a batch of an evaluation, was finished. True: go on."""
        self.moves += 1
        return True

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Generator[None]:
        """Everything inside is one wait, which has a name and may take longer than a step."""
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

    def _look(self) -> None:
        """Count the seconds since something moved last. A pause of the machine is no stall."""
        moves, idle, said, beaten = self.moves, 0.0, SOON, 0.0
        last = time.monotonic()
        while not self._closed.wait(TICK):
            now = time.monotonic()
            # After SIGSTOP, or with the lid closed, the clock has gone on and the run has not.
            idle += min(now - last, 2 * TICK)
            last = now
            if moves != self.moves:
                moves, idle, said = self.moves, 0.0, SOON
            what = self.wait
            if what and idle >= said:
                log.info("%s ...%s", what, f" ({idle:.0f} s)" if said > SOON else "")
                said = max(15.0, 2 * said)
            if now > beaten + BEAT:
                beaten = now
                with contextlib.suppress(OSError):
                    self.beat()
            if self.limit and idle > self.limit * (SLACK if what else 1):
                self._end(what or "training", idle)

    def _end(self, what: str, idle: float) -> None:
        """Show every thread's stack, write down why the run ends, and end it."""
        reason = f"stalled: nothing was finished for {idle:.0f} s (--stall-timeout) in: {what}"
        with contextlib.suppress(Exception):  # no stderr
            faulthandler.dump_traceback(sys.__stderr__)
        writer = threading.Thread(target=self._write, args=(reason,), daemon=True)
        writer.start()
        writer.join(LAST_WORDS)
        os._exit(EXIT_CODES["failed"])

    def _write(self, reason: str) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            log.error("%s", file.read(), extra={"file_only": True})
        log.error("error: %s", reason)
        self.abandon(reason)
        logging.shutdown()
