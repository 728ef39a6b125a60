"""The data set: images and labels, divided into three splits by their content, not their order."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .config import Config, SettingError
from .sources import arrays, checks

TRAIN, VALIDATION, TEST = range(3)
RULE = (
    "Sorted by class and by a digest of {content} (blake2b, key '{seed}'), every fifth {unit} is "
    "for the test and every tenth of the others for validation."
)
EQUAL_IMAGES = {"content": "the pixels", "unit": "image, equal ones counted once,"}
GROUPS = {"content": "their names", "unit": "group"}


class Split:
    """Images uint8 or float32 [rows, height, width, channels] and labels int32 [rows].

    One of the two kinds of split that batches.py describes: Rows. All splits share one array of
    images, and `numbers` int64 [rows] are the rows of this one (default: all of them).
    """

    class_weights: np.ndarray | None = None
    """Weight float32 [classes] of each class in the loss, with --task.class-weights balanced."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, numbers: np.ndarray | None = None):
        self.numbers = np.arange(len(labels)) if numbers is None else numbers
        self.shared_images = images
        self.labels = labels[self.numbers]
        self.counts = np.bincount(self.labels, minlength=len(np.bincount(labels)))

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these rows. The mask says which count: all of them, here."""
        labels = self.labels[indices]
        batch = {
            "image": self.shared_images[self.numbers[indices]],
            "label": labels,
            "mask": np.ones(len(indices), np.float32),
        }
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
        sizes = f"{counts.min():,} to {counts.max():,}"
        if counts.max() > 2 * counts.min() and len(counts) <= 20:
            sizes = ", ".join(f"{count:,}" for count in counts)
        return f"{len(self):,} rows, {len(counts)} classes of {sizes} rows"

    @property
    def baseline(self) -> dict[str, float]:
        """The accuracy of always answering the most frequent class."""
        return {"largest_class": float(self.counts.max() / len(self))}


class Data(NamedTuple):
    """What load() returns: a DataSet as batches.py describes it."""

    train: Split
    validation: Split
    test: Split
    num_outputs: int
    """Number of classes."""
    fingerprint: str
    """Digest of every image, label and group: a resumed run must see the same data."""
    split_rule: str = ""
    """How the rows were divided."""
    metadata: dict[str, Any] | None = None
    """What config.json keeps of the data, for when it is not there."""
    warnings: tuple[str, ...] = ()
    """What is unusual about the data or its splits, one line each."""


def load(config: Config, metadata: dict[str, Any] | None = None) -> Data:
    """Read the data set and check it. Raises SettingError for data that cannot be trained on.

    --data.path is an .npz file with `images` [rows, height, width] or [rows, height, width,
    channels], uint8 (0 to 255) or float (0 to 1), and `labels`, numbers [rows] that count the
    classes from 0, or one-hot [rows, classes]. In an optional array `groups` [rows] rows that
    belong together, such as all images of one patient, have the same number or name.
    """
    path = config.data.path
    try:
        if path is not None:
            data = split_rows(**arrays.read_npz(Path(os.path.expanduser(path))))
        else:
            digits = arrays.read_npz(Path(__file__).parent / "digits.npz")
            pixels = digits["images"].astype(np.uint16) * 255 // 16
            data = split_rows(pixels.astype(np.uint8), digits["labels"])
    except SettingError as error:
        place = "digits.npz" if path is None else f"--data.path {path}"
        raise SettingError(f"{place}: {error}") from error
    if config.task.class_weights == "balanced":
        counts = data.train.counts
        weights = (len(data.train) / (len(counts) * counts)).astype(np.float32)
        for split in (data.train, data.validation, data.test):
            split.class_weights = weights
    return data


def split_rows(images: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None) -> Data:
    """Check arrays of the form that load() describes, and divide their rows into three splits.

    The rows of one group, or else of equal images, form a unit, which is in one split as a whole.
    """
    images = checks.with_channels(images)
    labels = checks.class_numbers(labels, rows=len(images))
    keys, warnings = checks.examine(images)
    units = keys if groups is None else checks.group_keys(groups, rows=len(images))
    parts = divide(units, labels)
    train, validation, test = splits = [
        Split(images, labels, np.flatnonzero(parts == part)) for part in (TRAIN, VALIDATION, TEST)
    ]
    units_are = EQUAL_IMAGES if groups is None else GROUPS
    content = keys.tobytes() + labels.tobytes() + units.tobytes()
    return Data(
        train,
        validation,
        test,
        num_outputs=len(train.counts),
        fingerprint=blake2b(content, digest_size=16).hexdigest(),
        split_rule=RULE.format(seed=checks.SEED.decode(), **units_are),
        warnings=(*warnings, *doubts(splits, keys, labels)),
    )


def divide(keys: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The split of each row: TRAIN, VALIDATION or TEST, int8 [rows].

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
    part[order[::5]] = TEST
    part[np.delete(order, np.s_[::5])[::10]] = VALIDATION
    rank = np.argsort(order)
    untrained = np.setdiff1d(labels, labels[part[unit_of_row] == TRAIN])
    for label in untrained:
        holders = pair_unit[pair_class == label]  # of the test if possible: it has more of them
        part[holders[np.lexsort((rank[holders], part[holders] == VALIDATION))[0]]] = TRAIN
    small = np.union1d(np.flatnonzero(np.bincount(pair_class) < 3), untrained)
    for held_out, name in ((VALIDATION, "validation"), (TEST, "the test")):
        if held_out not in part:
            raise SettingError(
                f"no row is left for {name}: equal images and rows of one group stay together, "
                f"which leaves {len(units)} units, and every class must be trained on. Add rows of "
                f"{of_classes(small)}, which fewer than three units have, or leave them out"
            )
    return part[unit_of_row]


def doubts(splits: list[Split], keys: np.ndarray, labels: np.ndarray) -> list[str]:
    """What to know about the splits before their scores are trusted, one line each."""
    found = []
    train, validation, test = splits
    bounds = ((validation, "validation", 0.03, 0.2), (test, "the test", 0.1, 0.35))
    for split, name, least, most in bounds:
        missing = np.flatnonzero(split.counts == 0)
        if len(missing):
            found.append(
                f"{name} has no row of {of_classes(missing)}: its scores do not count them"
            )
        share = len(split) / len(labels)
        if not least <= share <= most:
            found.append(f"{name} has {share:.1%} of the rows: the groups are few or unequal")
        leaked = np.isin(keys[split.numbers], keys[train.numbers]).sum()
        if leaked:
            found.append(f"{leaked} images of {name} are trained on as well, in another group")
    counts = np.bincount(labels)
    if counts.max() > 0.9 * len(labels):
        found.append(
            f"{counts.max():,} of {len(labels):,} rows are of class {counts.argmax()}: always to "
            f"answer it is an accuracy of {counts.max() / len(labels):.4f}"
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


def of_classes(numbers: np.ndarray) -> str:
    """'class 3' or 'classes 0, 5, 6, ...'."""
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"{'class' if len(numbers) == 1 else 'classes'} {shown}"
