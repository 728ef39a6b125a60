"""What a run shows on the terminal. A terminal that fails must never make the run fail."""

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

log = logging.getLogger(__package__.partition(".")[0])

Item = TypeVar("Item")

BAR_DELAY = 2  # seconds until a progress bar appears
LINE_INTERVAL = 30  # seconds between two log lines about progress where there is no terminal

shows_progress = True
"""False with --quiet, and in all processes but process 0."""


class Screen:
    """A stream to the terminal that never raises.

    A character that the terminal cannot encode is shown as an escape such as \\u2713. Once the
    terminal is gone, as after a lost ssh connection, nothing is shown.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or io.StringIO()  # None: closed before Python started

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.stream.encoding or "ascii"
                shown = text.encode(encoding, "backslashreplace").decode(encoding)
                self.stream.write(shown)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self.stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def reserve_stdout() -> None:
    """Keep stdout for what Python prints: what native libraries print there goes to stderr.

    Gloo, for example, prints a line when processes connect.
    """
    if sys.stdout:
        with contextlib.suppress(OSError):  # one of the two is closed
            own = os.dup(sys.stdout.fileno())
            os.dup2(2, 1)
            encoding, errors = sys.stdout.encoding, sys.stdout.errors
            sys.stdout = open(own, "w", encoding=encoding, errors=errors)  # noqa: SIM115


def create_bar(total: int | None, what: str, **options: Any) -> tqdm:
    """A progress bar, shown on a terminal only. It disappears when it is closed."""
    screen = Screen(sys.stderr)
    hidden = not shows_progress or not screen.isatty()
    return tqdm(total=total, desc=what, leave=False, file=screen, disable=hidden, **options)


def track(items: Iterable[Item], total: int | None, what: str, unit: str) -> Iterator[Item]:
    """Yield the items, and show how many of `total` are done; None: nobody knows how many.

    On a terminal this is a progress bar with an estimate, which appears after 2 seconds. Elsewhere
    it is a log line every 30 seconds.
    """
    began = last_line = time.monotonic()
    with create_bar(total, what, unit=unit, delay=BAR_DELAY) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.update()
            now = time.monotonic()
            if bar.disable and shows_progress and now > last_line + LINE_INTERVAL:
                last_line = now
                if total is None:
                    log.info("%s: %d %s so far", what, done, unit)
                else:
                    left = (now - began) / done * (total - done)
                    log.info("%s: %d of %d %s, %.0f s left", what, done, total, unit, left)
