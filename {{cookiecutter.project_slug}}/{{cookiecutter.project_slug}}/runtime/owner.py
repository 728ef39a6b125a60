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

from .settings import SettingError

log = logging.getLogger(__package__.partition(".")[0])

HERE = platform.node()
PATIENCE = 5.0  # seconds for an owner to write who it is
SILENCE = 35.0  # seconds without a sign of life, three of which were due, after which it is dead


_owned: set[Path] = set()
"""Files that this process holds."""


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
        if self.path in _owned:  # locks do not tell two runs of one process apart
            self.refuse({"host": HERE, "pid": os.getpid(), "since": "this program's earlier call"})
        deadline = time.monotonic() + PATIENCE
        while True:
            file = self.path.open("a+", encoding="utf-8")
            is_free = try_lock(file)
            file.seek(0)
            other = parse(file.read())
            if is_free is False:
                file.close()
                if other or time.monotonic() > deadline:
                    self.refuse(other)
                time.sleep(0.1)  # it is about to write who it is
                continue
            is_elsewhere = is_free is None or other.get("host") != HERE
            if other and is_elsewhere and self.is_alive():
                file.close()
                self.refuse(other)
            if is_same_file(self.path, file):  # else its owner took it away at its end
                break
            file.close()
        own = {
            "host": HERE,
            "pid": os.getpid(),
            "since": datetime.now().isoformat(" ", "seconds"),
        }
        self.file = file
        _owned.add(self.path)
        try:
            file.truncate(0)
            file.write(json.dumps(own) + "\n")
            file.flush()
        except OSError:  # the disk is full
            self.release()
            raise

    def refuse(self, other: dict[str, Any]) -> None:
        who = f"process {other['pid']} on {other['host']}" if other else "another process"
        since = f" since {other['since']}" if other else ""
        raise SettingError(
            f"{self.path.parent}: {who} has been training there{since}. Wait for its end, stop it, "
            f"or give another --workdir"
        )

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
        _owned.discard(self.path)
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
        if isinstance(found, dict) and found.keys() >= {"host", "pid", "since"}:
            return found
    return {}


def is_same_file(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
