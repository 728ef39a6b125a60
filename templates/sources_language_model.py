"""Reading texts from files, each as its bytes, and refusing what is no text."""

import glob
import os
import shlex
import stat
import sysconfig
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from .config import SettingError
from .runtime.terminal import track

SEPARATOR = 0  # stands before and after each text: the model starts from it and ends with it
LARGE = 2**24  # bytes from which on a file is mapped into memory instead of read
BLOCK, MOST_BLOCKS = 2**20, 64  # bytes at a time, and how many of each file, that are looked at
SEED = b"splits, version 1"  # key of the digests: another one would hold out other texts
EXCLUDED = {"test", "tests", "site-packages", "dist-packages"}  # of the standard library
RULE = "must be a text file, a directory or a glob with at least one file that is not empty"
MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read_texts(path: str | None) -> dict[bytes, list[np.ndarray]]:
    """The texts uint8 [bytes] at a path, by the digest of their content, sorted by digest.

    Without a path the texts are the source code of Python's standard library. Raises SettingError
    for a path without text, and for files that cannot be read or are no text.
    """
    texts: dict[bytes, list[np.ndarray]] = {}
    try:
        files = find_files(path)
        for file in track(files, len(files), "reading text", "files"):
            text = read(file)
            texts.setdefault(digest(text, file), []).append(text)
    except OSError as error:
        raise SettingError(
            f"{error.filename} cannot be read ({error.strerror}): let the user who trains read it, "
            f"or leave it out with a glob"
        ) from error
    return dict(sorted(texts.items()))


def find_files(path: str | None) -> list[Path]:
    """The files that are not empty, in a fixed order."""
    if path is None:
        library = walk(sysconfig.get_path("stdlib"), EXCLUDED)
        found = [file for file in library if file.suffix == ".py"]
    else:
        root = os.path.expanduser(path)
        try:
            is_directory = stat.S_ISDIR(os.stat(root).st_mode)
            found = list(walk(root)) if is_directory else [Path(root)]
        except (FileNotFoundError, NotADirectoryError):
            found = list(map(Path, glob.glob(root, recursive=True)))
    files = sorted(file for file in found if size(file))
    if not files:
        folders = [str(file) for file in found if file.is_dir()]
        if folders:
            inside = os.path.join(path or "", "**", "*")
            raise SettingError(
                f"finds directories only, such as {folders[0]}: {RULE}. "
                f"--data.path {shlex.quote(inside)} takes what is in them"
            )
        raise SettingError(f"{RULE}; of {len(found)} found here none is, hidden ones left out")
    return files


def walk(root: str, excluded: Collection[str] = ()) -> Iterator[Path]:
    """The files below a directory that are not hidden. Raises OSError if one cannot be read."""

    def refuse(error):
        raise error  # without this, os.walk would skip the directory silently

    for place, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in excluded]
        yield from (Path(place, name) for name in names if name[0] != ".")


def size(file: Path) -> int:
    """Number of bytes of a file; 0 for anything else, such as a pipe or a broken link."""
    try:
        facts = file.stat()
    except FileNotFoundError:
        return 0
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


def read(file: Path) -> np.ndarray:
    """The bytes uint8 of a file. A large file is mapped: its bytes stay on disk until used."""
    if file.stat().st_size >= LARGE:
        return np.memmap(file, np.uint8, mode="r")
    return np.fromfile(file, np.uint8)


def digest(text: np.ndarray, file: Path) -> bytes:
    """Digest of a text; of blocks spread evenly over it if it is larger than 64 MiB.

    Raises SettingError for a file that is no text, or in an encoding with bytes of zero.
    """
    start = text[:4].tobytes()
    for mark, encoding in MARKS.items():
        if start.startswith(mark):
            name, new = shlex.quote(str(file)), shlex.quote(f"{file}.new")
            raise SettingError(
                f"{file} is {encoding}, must be UTF-8 or another encoding without bytes of zero: "
                f"`iconv -f {encoding} -t UTF-8 {name} > {new} && mv {new} {name}` converts it"
            )
    content = blake2b(len(text).to_bytes(8, "little"), digest_size=16, key=SEED)
    blocks = -(-len(text) // BLOCK)
    for block in np.unique(np.linspace(0, blocks - 1, min(blocks, MOST_BLOCKS)).astype(int)):
        piece = text[block * BLOCK : (block + 1) * BLOCK]
        if (piece == SEPARATOR).any():
            texts_only = shlex.quote(os.path.join(file.parent, "**", "*.txt"))
            raise SettingError(
                f"{file} has bytes of zero, so it is not text: leave it out with a glob such as "
                f"--data.path {texts_only}"
            )
        content.update(piece.tobytes())
    return content.digest()
