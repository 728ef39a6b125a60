"""The data set: images and labels, divided into three splits by their content, not their order."""

import dataclasses
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .config import Config, SettingError
from .sources import Found, checks, read
from .sources.listing import NOT_GIVEN, TEST, TRAIN, VALIDATION
from .sources.pictures import Pictures

SORTED = "by class and by a digest of {content} (blake2b, key '{seed}'), every"
RULES = {  # by the splits that the data do not bring
    (): "The data bring their splits.",
    (TEST, VALIDATION): "Sorted " + SORTED + " fifth {unit} is for the test and every tenth of "
    "the others for validation.",
    (TEST,): "The data bring no test: of the rows to train on, sorted " + SORTED + " fifth {unit} "
    "is for it.",
    (VALIDATION,): "The data bring no validation: of the rows to train on, sorted " + SORTED + " "
    "tenth {unit} is for it.",
}
EQUAL_IMAGES = {"content": "the pixels", "unit": "image, equal ones counted once,"}
EQUAL_NAMES = {"content": "the path", "unit": "picture"}
GROUPS = {"content": "their names", "unit": "group"}


class Split:
    """Images uint8 or float32 [rows, height, width, channels] and labels int32 [rows].

    One of the two kinds of split that batches.py describes: Rows. All splits share the images,
    and `numbers` int64 [rows] are the rows of this one (default: all of them). `classes` are the
    names of the classes (default: their numbers).
    """

    class_weights: np.ndarray | None = None
    """Weight float32 [classes] of each class in the loss, with --task.class-weights balanced."""

    def __init__(
        self,
        images: Any,
        labels: np.ndarray,
        numbers: np.ndarray | None = None,
        classes: Sequence[str] = (),
    ):
        self.numbers = np.arange(len(labels)) if numbers is None else numbers
        self.shared_images = images
        self.labels = labels[self.numbers]
        self.classes = classes or tuple(map(str, range(labels.max() + 1)))
        self.counts = np.bincount(self.labels, minlength=len(self.classes))

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these rows. The mask says which count: all but unreadable pictures."""
        labels, numbers = self.labels[indices], self.numbers[indices]
        batch = {
            "image": self.shared_images[numbers],
            "label": labels,
            "mask": np.ones(len(indices), np.float32),
        }
        if isinstance(self.shared_images, Pictures):
            batch["mask"] = self.shared_images.is_readable(numbers).astype(np.float32)
        if self.class_weights is not None:
            batch["class_weight"] = self.class_weights[labels]
        return batch

    @property
    def images(self) -> np.ndarray:
        """The images of this split alone: a copy."""
        return self.shared_images[self.numbers]

    @property
    def summary(self) -> str:
        """Rows and classes, as the start of the log shows them."""
        counts = self.counts
        sizes = f" of {counts.min():,} to {counts.max():,} rows"
        if counts.max() > 2 * counts.min() and len(counts) <= 20:
            pairs = zip(self.classes, counts, strict=True)
            sizes = ": " + ", ".join(f"{ascii(name)[1:-1]} {count:,}" for name, count in pairs)
        return f"{len(self):,} rows, {len(counts)} classes{sizes}"

    @property
    def baseline(self) -> dict[str, float]:
        """The accuracy of always answering the most frequent class."""
        return {"largest_class": float(self.counts.max() / len(self))}

    @property
    def workers(self) -> int:
        """Threads that prepare batches unless --data.workers says how many."""
        return min(os.cpu_count() or 1, 8) if isinstance(self.shared_images, Pictures) else 0


class Data(NamedTuple):
    """What load() returns: a DataSet as batches.py describes it."""

    train: Split
    validation: Split
    test: Split
    num_outputs: int
    """Number of classes."""
    fingerprint: str
    """Digest of every image, label and group: a resumed run must see the same data."""
    found: str = ""
    """What was read, one line."""
    split_rule: str = ""
    """How the rows were divided."""
    metadata: dict[str, Any] | None = None
    """What config.json keeps of the data, for when it is not there."""
    warnings: tuple[str, ...] = ()
    """What is unusual about the data or its splits, one line each."""


def load(config: Config, metadata: dict[str, Any] | None = None) -> Data:
    """Read the data set and check it. Raises SettingError for data that cannot be trained on.

    README.md says what --data.path may be. `metadata` is that of a run which the data are to be
    scored by: they get the image size and the numbers of the classes that it was trained with.
    """
    settings, place = config.data, f"--data.path {config.data.path}"
    if settings.path is None:
        settings = dataclasses.replace(settings, path=str(Path(__file__).parent / "digits.npz"))
        place = "digits.npz"
    try:
        found = read(settings, metadata)
        if config.data.path is None:
            pixels = found.images.astype(np.uint16) * 255 // 16
            found = found._replace(images=pixels.astype(np.uint8))
        data = split_rows(found)
    except SettingError as error:
        raise SettingError(f"{place}: {error}") from error
    if config.task.class_weights == "balanced":
        counts = np.maximum(data.train.counts, 1)
        weights = (len(data.train) / (len(counts) * counts)).astype(np.float32)
        for split in (data.train, data.validation, data.test):
            split.class_weights = weights
    return data


def split_rows(found: Found) -> Data:
    """Check images and groups, and divide the rows into three splits if the data do not.

    The rows of one group, or else of equal images, form a unit, which is in one split as a whole.
    """
    images, labels, warnings = found.images, found.labels, list(found.notes)
    if len(images) < 10 and (found.parts == NOT_GIVEN).all():
        raise SettingError(f"{len(images)} rows: three splits need at least 10")
    if isinstance(images, Pictures):
        keys, units_are, values = images.keys(), EQUAL_NAMES, "values from 0 to 255"
    else:
        keys, values, doubts_of_images = checks.examine(images)
        warnings, units_are = warnings + doubts_of_images, EQUAL_IMAGES
    units = keys
    if found.groups is not None:
        units, units_are = checks.group_keys(found.groups, rows=len(images)), GROUPS
    parts, rule = fill_splits(found.parts, units, labels, found.classes)
    train, validation, test = splits = [
        Split(images, labels, np.flatnonzero(parts == part), found.classes)
        for part in (TRAIN, VALIDATION, TEST)
    ]
    content = keys.tobytes() + labels.tobytes() + units.tobytes()
    if (found.parts != NOT_GIVEN).any():
        content += found.parts.tobytes()
    fingerprint = blake2b(content, digest_size=16)
    fingerprint.update(str((images.shape, found.classes)).encode())
    return Data(
        train,
        validation,
        test,
        num_outputs=len(found.classes),
        fingerprint=fingerprint.hexdigest(),
        found=f"{describe(found)}, {values}",
        split_rule=rule.format(seed=checks.SEED.decode(), **units_are),
        metadata={"classes": list(found.classes), "image_shape": list(images.shape[1:])},
        warnings=(*warnings, *doubts(splits, keys, labels)),
    )


def describe(found: Found) -> str:
    """One line about what was found, for the start of the log."""
    height, width, channels = found.images.shape[1:]
    names = ", ".join(ascii(name)[1:-1] for name in found.classes[:8])
    more = ", ..." if len(found.classes) > 8 else ""
    return (
        f"{found.form}: {len(found.images):,} images {height} x {width} x {channels} "
        f"{found.images.dtype}, {len(found.classes)} classes ({names}{more})"
    )


def fill_splits(
    parts: np.ndarray, units: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> tuple[np.ndarray, str]:
    """The split of each row, int8 [rows], and the rule: what the data leave open is divided."""
    missing = [part for part in (TEST, VALIDATION) if part not in parts]
    divided = np.flatnonzero((parts == NOT_GIVEN) | (parts == TRAIN))
    if not len(divided):
        raise SettingError("has no rows to train on: there must be some beside those held out")
    filled = parts.copy()
    if missing:
        filled[divided] = divide(units[divided], labels[divided], classes, missing)
    return filled, RULES[tuple(missing)]


def divide(
    keys: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    held_out: Sequence[int] = (TEST, VALIDATION),
) -> np.ndarray:
    """The split of each row: TRAIN or one of those held out, int8 [rows].

    `keys` uint64 [rows] are equal for the rows of a unit. Only keys and labels decide, so the rows
    of a file may come in any order. Every class is trained on, or SettingError says which cannot.
    """
    units, unit_of_row = np.unique(keys, return_inverse=True)
    # Each pair of a unit and a class that occurs in it, and the most frequent class of each unit.
    num_classes = int(labels.max()) + 1
    pairs, rows = np.unique(unit_of_row * num_classes + labels, return_counts=True)
    pair_unit, pair_class = np.divmod(pairs, num_classes)
    by_unit = np.lexsort((pair_class, -rows, pair_unit))
    first_of_unit = by_unit[np.unique(pair_unit[by_unit], return_index=True)[1]]
    order = np.lexsort((units, pair_class[first_of_unit]))

    part = np.full(len(units), TRAIN, np.int8)
    rest = order
    if TEST in held_out:
        part[rest[::5]], rest = TEST, np.delete(rest, np.s_[::5])
    if VALIDATION in held_out:
        part[rest[::10]] = VALIDATION
    rank = np.argsort(order)
    untrained = np.setdiff1d(labels, labels[part[unit_of_row] == TRAIN])
    for label in untrained:
        holders = pair_unit[pair_class == label]  # of the test if possible: it has more of them
        part[holders[np.lexsort((rank[holders], part[holders] == VALIDATION))[0]]] = TRAIN
    small = np.union1d(np.flatnonzero(np.bincount(pair_class) < 3), untrained)
    for number, name in ((VALIDATION, "validation"), (TEST, "the test")):
        if number in held_out and number not in part:
            raise SettingError(
                f"no row is left for {name}: equal images and rows of one group stay together, "
                f"which leaves {len(units)} units, and every class must be trained on. Add rows of "
                f"{of_classes(small, classes)}, which fewer than three units have, or remove them"
            )
    return part[unit_of_row]


def doubts(splits: list[Split], keys: np.ndarray, labels: np.ndarray) -> list[str]:
    """What to know about the splits before their scores are trusted, one line each."""
    found = []
    train, validation, test = splits
    missing = np.flatnonzero(train.counts == 0)
    if len(missing):
        found.append(f"no row of {of_classes(missing, train.classes)} is trained on")
    bounds = ((validation, "validation", 0.03, 0.2), (test, "the test", 0.1, 0.35))
    for split, name, least, most in bounds:
        missing = np.setdiff1d(labels, split.labels)
        if len(missing):
            which = of_classes(missing, train.classes)
            found.append(f"{name} has no row of {which}: its scores do not count them")
        share = len(split) / len(labels)
        if not least <= share <= most:
            found.append(f"{name} has {share:.1%} of the rows, an unusual share")
        leaked = np.isin(keys[split.numbers], keys[train.numbers]).sum()
        if leaked:
            found.append(f"{leaked} images of {name} are trained on as well")
    counts = np.bincount(labels)
    if counts.max() > 0.9 * len(labels):
        found.append(
            f"{counts.max():,} of {len(labels):,} rows are of "
            f"{of_classes(np.array([counts.argmax()]), train.classes)}: always to answer it is "
            f"an accuracy of {counts.max() / len(labels):.4f}"
        )
    order = np.lexsort((labels, keys))
    equal, differ = np.diff(keys[order]) == 0, np.diff(labels[order]) != 0
    again = np.flatnonzero(equal & differ)
    if len(again):
        one, other = sorted(order[again[0] : again[0] + 2])
        found.append(
            f"{len(again)} images occur again with another label, such as rows {one} and {other}"
        )
    return found


def of_classes(numbers: np.ndarray, names: Sequence[str]) -> str:
    """'class 3' or 'classes cat, dog, ...'."""
    shown = ", ".join(ascii(names[number])[1:-1] for number in numbers[:5])
    return f"{'class' if len(numbers) == 1 else 'classes'} {shown}{', ...' * (len(numbers) > 5)}"
