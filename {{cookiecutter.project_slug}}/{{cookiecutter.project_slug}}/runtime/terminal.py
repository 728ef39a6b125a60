"""What people see of a run on their terminal, where it must never fail for being shown."""

import contextlib
import io
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

log = logging.getLogger(__package__.partition(".")[0])

Item = TypeVar("Item")

SOON, AGAIN = 2, 30  # seconds until a bar appears; between two lines where there is no terminal

shows_progress = True
"""False with --quiet, and in all processes but the first."""


class Screen:
    """A stream to the terminal that shows what it can and never raises.

    A character that the terminal does not have is shown by its number. A terminal that went away,
    as with a lost ssh connection, shows nothing.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or io.StringIO()  # None: it was closed before Python started

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
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


def create_bar(total: int, what: str, **options: Any) -> tqdm:
    """A progress bar, on a terminal only. It is taken away when it is closed."""
    screen = Screen(sys.stderr)
    hidden = not shows_progress or not screen.isatty()
    return tqdm(total=total, desc=what, leave=False, file=screen, disable=hidden, **options)


def track(items: Iterable[Item], total: int, what: str, unit: str) -> Iterator[Item]:
    """Yield the items, and show how many of `total` are done when it takes over 2 seconds.

    On a terminal this is a progress bar with an estimate, elsewhere a log line every 30 seconds.
    """
    began = said = time.monotonic()
    with create_bar(total, what, unit=unit, delay=SOON) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.update()
            now = time.monotonic()
            if bar.disable and shows_progress and now > said + AGAIN:
                said = now
                left = (now - began) / done * (total - done)
                log.info("%s: %d of %d %s, %.0f s left", what, done, total, unit, left)
