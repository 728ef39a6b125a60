"""Each run directory has one owner, so that two processes never write there at the same time."""

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
WRITE_TIMEOUT = 5.0  # seconds that a new owner has to write who it is
DEAD_AFTER = (
    35.0  # seconds without a heartbeat, one being due every 10, after which an owner is dead
)


_owned: set[Path] = set()
"""The owner files that this process holds."""


class Owner:
    """Holds the file owner.json of a run directory: which process trains there, since when.

    The owner has locked the file, and the operating system drops the lock when the process ends,
    however it ends. On a network file system other hosts may not see the lock. They look at the age
    of the file, which the owner's watchdog renews every 10 seconds.
    """

    def __init__(self, directory: Path):
        self.path = directory / "owner.json"
        self.file: IO[str] | None = None

    def take(self) -> None:
        """Become the owner.

        Raises SettingError if another process is the owner, OSError if the file cannot be written.
        """
        if self.path in _owned:  # a lock does not stop a second run in the same process
            self.refuse({"host": HERE, "pid": os.getpid(), "since": "this program's earlier call"})
        deadline = time.monotonic() + WRITE_TIMEOUT
        while True:
            file = self.path.open("a+", encoding="utf-8")
            is_free = try_lock(file)
            file.seek(0)
            other = parse(file.read())
            if is_free is False:
                file.close()
                if other or time.monotonic() > deadline:
                    self.refuse(other)
                time.sleep(0.1)  # the owner is about to write who it is
                continue
            is_elsewhere = is_free is None or other.get("host") != HERE
            if other and is_elsewhere and self.is_alive():
                file.close()
                self.refuse(other)
            if is_same_file(self.path, file):  # otherwise its last owner has just deleted it
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
        """Raise SettingError naming the other owner."""
        who = f"process {other['pid']} on {other['host']}" if other else "another process"
        since = f" since {other['since']}" if other else ""
        raise SettingError(
            f"{self.path.parent}: {who} has been training there{since}. Wait until it ends, stop "
            f"it, or give another --workdir"
        )

    def is_alive(self) -> bool:
        """Whether the owner, which may be on another host, still renews the file. May wait."""
        last_beat = self.path.stat().st_mtime
        with tempfile.TemporaryFile(dir=self.path.parent) as file:
            # Both times come from the clock of the file server.
            age = os.fstat(file.fileno()).st_mtime - last_beat
        if age < DEAD_AFTER:
            log.info(
                "waiting up to %.0f s to see whether %s is in use", DEAD_AFTER, self.path.parent
            )
        for _ in range(int(DEAD_AFTER - age)):
            time.sleep(1)
            # To open a file makes NFS ask the server again; stat alone may be answered by a cache.
            with contextlib.suppress(OSError), self.path.open() as file:
                if os.fstat(file.fileno()).st_mtime != last_beat:
                    return True
        return False

    def beat(self) -> None:
        """Renew the file, which shows that this process is alive. Raises OSError if it cannot."""
        os.utime(self.path)

    def release(self) -> None:
        """Give up the ownership: delete the file and drop the lock."""
        _owned.discard(self.path)
        if self.file:
            with contextlib.suppress(OSError):
                self.path.unlink()
            with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
                self.file.close()
            self.file = None


def try_lock(file: IO[str]) -> bool | None:
    """Whether this process has locked the file now; None where the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another process has locked it
        return False
    except OSError:
        return None
    return True


def parse(text: str) -> dict[str, Any]:
    """The contents of the file as a dict, which is empty if the file is empty or half written."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and found.keys() >= {"host", "pid", "since"}:
            return found
    return {}


def is_same_file(path: Path, file: IO[str]) -> bool:
    """Whether this path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
