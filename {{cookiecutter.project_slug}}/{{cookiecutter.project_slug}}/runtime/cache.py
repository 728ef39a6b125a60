"""What is converted once and kept in runs/cache/, which may be removed at any time."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from .settings import SettingError

CACHE = Path("runs", "cache")
SAMPLE = 2**20  # bytes at the start, middle and end of a file that its key depends on

log = logging.getLogger(__package__.partition(".")[0])

Contents = TypeVar("Contents")


def key_of(files: Iterable[Path], version: str) -> str:
    """A name for what is made of these files: another one for other contents, or another version.

    Raises OSError for a file that cannot be read.
    """
    key = blake2b(version.encode(), digest_size=12)
    for path in files:
        facts = path.stat()
        key.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns} ".encode("utf-8", "replace"))
        with path.open("rb") as file:
            for start in (0, facts.st_size // 2, max(facts.st_size - SAMPLE, 0)):
                file.seek(start)
                key.update(file.read(SAMPLE))
    return key.hexdigest()


def cached(
    key: str, write: Callable[[Path], None], read: Callable[[Path], Contents | None]
) -> Contents:
    """What read() returns of the directory with this name, which write() fills if it must.

    read() returns None for a directory that is not there or not whole. The directory appears when
    it is complete, so several processes may ask for it at once. Raises SettingError if there is no
    room.
    """
    place = CACHE / key
    found = read(place)
    if found is not None:
        return found
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=CACHE))
    except OSError as error:
        log.warning("%s: %s, so the data are converted at each start", CACHE, error.strerror)
        partial = place = Path(tempfile.mkdtemp(prefix="cache-"))
    try:
        write(partial)
        if partial != place:
            shutil.rmtree(place, ignore_errors=True)  # if it is not whole
            os.rename(partial, place)
    except OSError as error:
        if read(place) is None:  # else another process was faster
            raise SettingError(
                f"{place} cannot be written ({error.strerror}): make room"
            ) from error
    finally:
        if partial != place:
            shutil.rmtree(partial, ignore_errors=True)
    contents = read(place)
    assert contents is not None, place
    return contents
