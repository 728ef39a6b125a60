"""Reading images and labels from files; checks.py then checks what was read."""

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from .config import SettingError
from .runtime.terminal import track

BLOCK = 2**20  # values read at a time, because a copy of all of them would double the memory
ARRAYS = "`images` [rows, height, width] or [rows, height, width, channels] and `labels` [rows]"
MAKE = "make a file with `np.savez('my.npz', images=images, labels=labels)`"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays `images` and `labels` of a file, and `groups` if the file has them.

    np.load would read a whole array before float64 could become float32, and its errors do not
    distinguish a damaged file from one that is something else. Raises SettingError for both.
    """
    try:
        size = path.stat().st_size  # raises if the file cannot be reached
        if not path.is_file() or size == 0:
            kind = "a directory" if path.is_dir() else "empty or no file"
            raise SettingError(f"is {kind}: must be an .npz file with {ARRAYS}; {MAKE}")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if "images.npy" not in names or "labels.npy" not in names:
                raise SettingError(explain_names(path, archive))
            wanted = [name for name in ("images", "labels", "groups") if f"{name}.npy" in names]
            return {name: read_array(archive, name) for name in wanted}
    except OSError as error:
        way_out = "put the file where it can be read"
        if isinstance(error, FileNotFoundError):
            way_out = f"there is no such file, seen from {os.getcwd()}"
        elif isinstance(error, PermissionError):
            way_out = "let the user who trains read it (chmod, or another owner)"
        raise SettingError(f"cannot be read ({error.strerror or error}): {way_out}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SettingError(
            f"is no .npz file, or a damaged one ({error}): it must have {ARRAYS}; {MAKE}"
        ) from error


def open_array(archive: zipfile.ZipFile, name: str):
    """An array in the file, not read yet: (member, shape, is in Fortran order, dtype)."""
    try:
        member = archive.open(f"{name}.npy")
    except RuntimeError as error:  # a password, or a compression that Python does not have
        raise zipfile.BadZipFile(str(error)) from error
    header = np.lib.format
    try:
        newer = header.read_magic(member) > (1, 0)
        read = header.read_array_header_2_0 if newer else header.read_array_header_1_0
        return member, *read(member)
    except ValueError as error:
        raise zipfile.BadZipFile(f"`{name}` has no header of an array") from error


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of the file, read in blocks. Images of any float dtype become float32."""
    member, shape, in_fortran_order, dtype = open_array(archive, name)
    if dtype.hasobject:
        raise SettingError(
            f"`{name}` has Python objects in it (dtype {dtype}), which are never read since that "
            f"can run code: `{name} = np.array({name}.tolist())` makes it numbers or text "
            f"(images must be of one size)"
        )
    size = int(np.prod(shape, dtype=object))
    if archive.getinfo(f"{name}.npy").file_size != member.tell() + size * dtype.itemsize:
        raise zipfile.BadZipFile(f"`{name}` is not as long as its header says")
    is_float = name == "images" and dtype.kind == "f"
    try:
        array = np.empty(shape, np.float32 if is_float else dtype.newbyteorder("="))
    except (MemoryError, ValueError) as error:  # ValueError: more than any machine has
        needed = size * (4 if is_float else dtype.itemsize) / 2**30
        raise SettingError(f"`{name}` needs {needed:.1f} GiB of memory: too much here") from error
    values = array.T.flat if in_fortran_order else array.reshape(-1)
    starts = range(0, size, BLOCK)
    with np.errstate(over="ignore"):  # checks.py finds values that become infinite
        for start in track(starts, len(starts), f"reading {name}", "blocks"):
            piece = member.read(min(BLOCK, size - start) * dtype.itemsize)
            values[start : start + BLOCK] = np.frombuffer(piece, dtype)
    return array


def explain_names(path: Path, archive: zipfile.ZipFile) -> str:
    """A message for a file without `images` or `labels`: what it has, and how to convert it."""
    shapes, shown = {}, []
    for file in archive.namelist():
        name = file.removesuffix(".npy")
        try:
            _, shape, _, dtype = open_array(archive, name)
        except (zipfile.BadZipFile, KeyError):
            shown.append(f"{file} (no array)")
        else:
            shown.append(f"`{name}` {dtype} {list(shape)}")
            shapes[name] = shape
    message = f"has {', '.join(shown) or 'nothing in it'}, must have {ARRAYS}: "
    found = [name for name in shapes if len(shapes[name]) in (3, 4)]
    images = max(found, key=lambda name: shapes[name][0], default="")
    rows = shapes[images][0] if images else 0
    labels = [name for name in shapes if len(shapes[name]) in (1, 2) and shapes[name][0] == rows]
    if not labels:
        return message + MAKE
    # If several arrays have as many rows, y_train belongs to x_train: their names end alike.
    alike = max(labels, key=lambda name: common_end(name, images))
    new = path.with_name(f"{path.stem}-images.npz")
    return message + (
        f"`import numpy as np; file = np.load({str(path)!r}); "
        f"np.savez({str(new)!r}, images=file[{images!r}], labels=file[{alike!r}])` makes {new}"
    )


def common_end(one: str, other: str) -> int:
    """Number of letters at the end that are the same in both."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
