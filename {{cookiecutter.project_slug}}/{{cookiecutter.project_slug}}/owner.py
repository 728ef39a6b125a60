"""One owner for each run directory: a second process must not write there at the same time."""

import contextlib
import fcntl
import json
import logging
import os
import platform
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from .config import SettingError

log = logging.getLogger(__package__)

HERE = platform.node()
SILENCE = 35.0  # seconds without a sign of life, three of which were due, after which it is dead


class Owner:
    """Holds the file owner.json of a run directory: which process trains there, since when.

    The operating system's lock on it ends with the process, however that ends. On a network file
    system it may not reach other hosts: for those the age of the file tells, which the owner's
    watchdog renews every 10 seconds.
    """

    def __init__(self, directory: Path):
        self.path = directory / "owner.json"
        self.file: IO[str] | None = None

    def take(self) -> None:
        """Become the owner. Raises SettingError naming a process that is it already."""
        while True:
            file = self.path.open("a+", encoding="utf-8")
            is_free = try_lock(file)
            file.seek(0)
            other = parse(file.read())
            if is_free is False and not other:  # its owner is about to write who it is
                file.close()
                time.sleep(0.1)
                continue
            if other and self.is_held(other, is_free):
                file.close()
                raise SettingError(
                    f"{self.path.parent}: process {other.get('pid')} on {other.get('host')} has "
                    f"been training there since {other.get('since')}. Wait for its end, stop it, "
                    f"or give another --workdir"
                )
            if is_same_file(self.path, file):  # else its owner took it away at its end
                break
            file.close()
        own = {
            "host": HERE,
            "pid": os.getpid(),
            "since": datetime.now().isoformat(" ", "seconds"),
        }
        self.file = file
        try:
            file.truncate(0)
            file.write(json.dumps(own) + "\n")
            file.flush()
        except OSError:  # the disk is full
            self.release()
            raise

    def is_held(self, other: dict[str, Any], is_free: bool | None) -> bool:
        """Whether the process in the file still trains. On this host the lock tells."""
        if is_free is not None and other.get("host") == HERE:
            return not is_free
        return self.is_alive()

    def is_alive(self) -> bool:
        """Whether the file is renewed, by a process that may be on another host."""
        changed = self.path.stat()
        with tempfile.TemporaryFile(dir=self.path.parent) as file:
            age = os.fstat(file.fileno()).st_mtime - changed.st_mtime  # by the clock over there
        if age < SILENCE:
            log.info("waiting up to %.0f s to see whether %s is in use", SILENCE, self.path.parent)
        for _ in range(int(SILENCE - age)):
            time.sleep(1)
            with contextlib.suppress(OSError), self.path.open() as file:  # asks the server anew
                if os.fstat(file.fileno()).st_mtime != changed.st_mtime:
                    return True
        return False

    def beat(self) -> None:
        """Show that this process lives."""
        os.utime(self.path)

    def release(self) -> None:
        """Own it no more."""
        if self.file:
            with contextlib.suppress(OSError):
                self.path.unlink()
            with contextlib.suppress(OSError):  # it writes out what it has
                self.file.close()
            self.file = None


def try_lock(file: IO[str]) -> bool | None:
    """Whether the file is now locked by this process; None where there are no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another process has it
        return False
    except OSError:
        return None
    return True


def parse(text: str) -> dict[str, Any]:
    """What the file says, nothing if it is empty or half written."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def is_same_file(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
