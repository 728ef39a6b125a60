"""What images and labels are read from: --data.path, or the digits that come with the code."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..runtime.settings import SettingError, setting
from . import folders, parquet, tables
from .arrays import Joined
from .arrays import read as read_arrays
from .checks import number_classes, renumber, with_channels
from .listing import Listing
from .pictures import DEFAULT_SIZE, Crop, Pictures, look

CORES = os.cpu_count() or 1
IN_MEMORY = 2**28  # bytes of decoded pictures that are kept in memory; more are decoded when needed
FORMS = {
    "arrays": "an .npz file, or a directory of .npy files",
    "folders": "a directory with a folder of pictures for each class",
    "table": "a .csv or .jsonl file with columns for path and label, or a directory with a "
    "metadata.csv or metadata.jsonl",
    "parquet": "a .parquet file, or a directory of them",
}
FINDERS = {"folders": folders.find, "parquet": parquet.find, "table": tables.find}


@dataclass(frozen=True)
class DataConfig:
    path: str | None = setting(None, resume="allowed")
    """Your own images: arrays, folders or a table, see README.md (default: the built-in digits)."""
    format: Literal["auto", "arrays", "folders", "parquet", "table"] = setting(
        "auto", resume="allowed"
    )
    """What is at --data.path (auto: what is found there)."""
    image_size: int | None = setting(None, least=1)
    """Height and width of pictures (default: their own if all are alike, else 64)."""
    crop: Crop = setting("center")
    """How a picture of other proportions is brought to that size: cut, stretched or padded."""
    augment: Literal["none", "flip", "crop-flip"] = setting("none")
    """Random changes of the images to train on: mirrored, or also moved by up to an eighth."""
    workers: int | None = setting(None, least=0, resume="allowed")
    """Threads that prepare batches ahead (default: 0 for data in memory, which needs none, else
    one for each core, at most 8)."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used."""
        if self.path is None and (self.format != "auto" or self.image_size is not None):
            raise SettingError("--data.format and --data.image-size need --data.path")


class Found(NamedTuple):
    """Images, labels and what the data say of them, before they are divided into splits."""

    form: str
    """What was found, for the log."""
    images: Any
    """[rows, height, width, channels]: an array, or what is indexed like one."""
    labels: np.ndarray
    """int32 [rows], indices of `classes`."""
    classes: tuple[str, ...]
    parts: np.ndarray
    """int8 [rows]: TRAIN, VALIDATION or TEST, or NOT_GIVEN for all."""
    groups: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    """What was left out or changed, and why."""


def read(settings: DataConfig, known: dict[str, Any] | None = None) -> Found:
    """The images at --data.path. Raises SettingError for what cannot be read or understood.

    `known` is the metadata of a run that the images are to be scored by: they get its image size,
    and its numbers for the classes.
    """
    place = os.path.expanduser(settings.path)
    try:
        form = recognise(place) if settings.format == "auto" else settings.format
        if form == "arrays":
            return from_arrays(Path(place), known)
        return from_pictures(form, FINDERS[form](place), settings, known)
    except OSError as error:
        way_out = "let the user who trains read it (chmod, or another owner)"
        if isinstance(error, FileNotFoundError):
            way_out = f"there is no such file, seen from {os.getcwd()}"
        name = error.filename or place
        raise SettingError(f"{name} cannot be read ({error.strerror}): {way_out}") from error


def recognise(place: str) -> str:
    """The form of what is at a place. Raises SettingError if it is none, or more than one."""
    if not os.path.isdir(place):
        if place.endswith(".parquet"):
            return "parquet"
        return "table" if tables.is_table(place) else "arrays"
    if tables.described(place):
        return "table"
    names = [name for name in sorted(os.listdir(place)) if not folders.is_hidden(name)]
    inner = folders.folders_in(place)
    found = {
        "arrays": any(name.endswith(".npy") for name in names),
        "parquet": any(name.endswith(".parquet") for name in names),
        "table": any(map(tables.is_table, names)),
        "folders": bool(inner),
    }
    if inner == ["data"] and any(Path(place, "data").glob("*.parquet")):
        return "parquet"
    if found["table"] and len(inner) == 1:
        found["folders"] = False  # the folder with the pictures that the table names
    forms = [form for form in found if found[form]]
    if len(forms) == 1:
        return forms[0]
    problem = "may be several things" if forms else "is nothing that is understood"
    raise SettingError(
        f"{problem}, it has {folders.shown(names) or 'no files'}. Understood are: "
        + "; ".join(f"{form}: {FORMS[form]}" for form in forms or FORMS)
        + (". Say which with --data.format" if forms else "")
    )


def from_arrays(path: Path, known: dict[str, Any] | None) -> Found:
    """Images and labels of arrays, checked but for the values of the images."""
    arrays, groups = read_arrays(path)
    images = [with_channels(images) for images, _ in arrays.values()]
    forms = {(x.shape[1:], x.dtype) for x in images}
    if len(forms) > 1:
        raise SettingError(
            f"the splits have images of different forms, {sorted(map(str, forms))}: they must "
            f"have one height, width, number of channels and dtype"
        )
    if known and list(images[0].shape[1:]) != known["image_shape"]:
        raise SettingError(
            f"images are {list(images[0].shape[1:])}, and those that the run was trained on "
            f"{known['image_shape']} (height, width, channels): bring them to that form"
        )
    rows = [len(x) for x in images]
    joined = np.concatenate([labels for _, labels in arrays.values()])
    labels, classes = number_classes(joined, sum(rows), known["classes"] if known else None)
    parts = np.repeat(np.array(list(arrays), np.int8), rows)
    together = images[0] if len(images) == 1 else Joined(images)
    is_mapped = any(isinstance(x, np.memmap) for x in images)
    form = "arrays, read from the file when needed" if is_mapped else "arrays in memory"
    return Found(form, together, labels, classes, parts, groups)


def from_pictures(
    form: str, listing: Listing, settings: DataConfig, known: dict[str, Any] | None
) -> Found:
    """The pictures of a listing, decoded into memory if they are few enough."""
    files, rows = listing.files, len(listing.files)
    shape, labels, classes = choose_shape(listing, settings), listing.labels, listing.classes
    if known:
        shape, classes = tuple(known["image_shape"]), tuple(known["classes"])
        labels = renumber(labels, listing.classes, classes)
    pictures = Pictures(files, shape, settings.crop)
    left_out = [f"left out: {count} {what}" for what, count in listing.left_out.items()]
    if rows * math.prod(shape) > IN_MEMORY:
        form = f"{form}, decoded when needed"
        return Found(form, pictures, labels, classes, listing.parts, None, tuple(left_out))
    images = pictures.in_memory(CORES)
    bad = sorted(pictures.unreadable)
    if bad:
        examples = ", ".join(f"{files.shown(x)} ({pictures.unreadable[x]})" for x in bad[:3])
        left_out.append(f"left out: {len(bad)} pictures that cannot be read, such as {examples}")
        images, labels = np.delete(images, bad, axis=0), np.delete(labels, bad)
    left_out += [f"{count} pictures {note}" for note, count in pictures.notes.items()]
    parts = np.delete(listing.parts, bad)
    form = f"{form}, decoded into memory"
    return Found(form, images, labels, classes, parts, None, tuple(left_out))


def choose_shape(listing: Listing, settings: DataConfig) -> tuple[int, int, int]:
    """Height, width and channels that all pictures are brought to."""
    seen, asked = look(listing.files), settings.image_size
    size = (asked, asked) if asked else seen.size or (DEFAULT_SIZE, DEFAULT_SIZE)
    return (*size, seen.channels)
