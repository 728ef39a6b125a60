"""The data set: images and labels, in three fixed splits."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .config import Config, SettingError


class Split(NamedTuple):
    """Images uint8 or float32 [rows, height, width, channels] and labels int32 [rows]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these rows. The mask says which count: all of them, here."""
        return {
            "image": self.images[indices],
            "label": self.labels[indices],
            "mask": np.ones(len(indices), np.float32),
        }


class Data(NamedTuple):
    train: Split
    validation: Split
    test: Split
    num_outputs: int
    """Number of classes."""
    fingerprint: str
    """Digest of every image and label: a resumed run must see the same data."""


def load(config: Config) -> Data:
    """Read the data set and check it. Raises SettingError for data that cannot be trained on.

    --data.path is an .npz file with `images` [rows, height, width] or [rows, height, width,
    channels], uint8 (0 to 255) or float (0 to 1), and integer `labels` [rows] from 0. Every fifth
    row is for the test, every tenth of the others for validation.
    """
    if config.data.source == "builtin":
        images, labels = read_npz(Path(__file__).parent / "digits.npz")
        images = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)
    else:
        images, labels = read_npz(Path(config.data.path).expanduser())
    if images.ndim == 3:
        images = images[..., None]
    check(images, labels)
    labels = labels.astype(np.int32)
    digest = hashlib.blake2b(images.tobytes() + labels.tobytes(), digest_size=16).hexdigest()
    position = np.arange(len(labels))
    test = position % 5 == 0
    validation = ~test & (np.cumsum(~test) % 10 == 1)
    parts = [Split(images[rows], labels[rows]) for rows in (~test & ~validation, validation, test)]
    return Data(parts[0], parts[1], parts[2], int(labels.max()) + 1, digest)


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except Exception as error:  # NumPy raises almost anything for a file that is something else
        raise SettingError(
            f"--data.path {path}: must be an .npz file with arrays `images` and `labels` ({error})"
        ) from error
    if np.issubdtype(images.dtype, np.floating):
        with np.errstate(over="ignore"):  # what becomes infinite is found by check()
            images = images.astype(np.float32)
    return images, labels


def check(images: np.ndarray, labels: np.ndarray) -> None:
    """Raise SettingError for images or labels that would train into nonsense."""

    def require(holds, problem, rule):
        if not holds:
            raise SettingError(f"{problem}: {rule}")

    require(
        images.ndim == 4 and images.shape[-1] <= 4 and 0 not in images.shape[1:],
        f"images have shape {images.shape}",
        "must be [rows, height, width] or [rows, height, width, channels], channels last, 1 to 4",
    )
    require(
        labels.shape == images.shape[:1],
        f"labels have shape {labels.shape} and images {images.shape}",
        "there must be one label for each image, a number (of one-hot rows it is the argmax)",
    )
    require(
        np.issubdtype(labels.dtype, np.integer),
        f"labels have dtype {labels.dtype}",
        "must be integers, counting the classes from 0",
    )
    require(len(labels) >= 10, f"{len(labels)} rows", "three splits need at least 10")
    require(
        images.dtype in (np.uint8, np.float32),
        f"images have dtype {images.dtype}",
        "must be uint8 (0 to 255) or float (0 to 1)",
    )
    if images.dtype == np.float32:
        bad = np.flatnonzero(~np.isfinite(images).all(axis=(1, 2, 3)))
        require(
            not len(bad),
            f"{len(bad)} images are not finite, the first is number {bad[:1]}",
            "remove or repair what has NaN or infinity",
        )
        low, high = images.min(), images.max()
        require(
            low >= 0 and high <= 1,
            f"float images range from {low:.4g} to {high:.4g}",
            "must be 0 to 1 (or pass uint8, 0 to 255)",
        )
    require(labels.min() >= 0, f"smallest label {labels.min()}", "labels count from 0")
    classes = np.unique(labels)
    missing = np.setdiff1d(np.arange(len(classes)), classes)
    require(
        not len(missing),
        f"labels run up to {labels.max()} but {missing[:5].tolist()} never occur",
        "number the classes from 0 without gaps",
    )
    require(len(classes) > 1, f"all labels are {classes[0]}", "there must be two classes or more")
