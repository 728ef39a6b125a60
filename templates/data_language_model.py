"""The data set: text as bytes, cut into windows, with whole files held out."""

import glob
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .config import Config, SettingError

SEPARATOR = 0  # stands before and after each text: the model starts from it and ends with it
LARGE = 2**24  # bytes from which on a file is mapped into memory instead of read
BLOCK, MOST_BLOCKS = 2**20, 64  # bytes at a time, and how many of each file, that are looked at
EXCLUDED = {"test", "tests", "site-packages", "dist-packages"}  # of the standard library


class Split:
    """Texts uint8 [bytes], each in windows of `context` bytes to predict. A row is a window."""

    def __init__(self, texts: list[np.ndarray], context: int):
        self.texts, self.context = texts, context
        self.windows = np.array([-(-(len(text) + 1) // context) for text in texts], np.int64)
        self.ends = np.cumsum(self.windows)

    def __len__(self) -> int:
        return int(self.windows.sum())

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these windows: tokens uint8 [rows, context + 1], mask [rows, context].

        Each token but the last of a row predicts the next one. The mask says which predictions
        count: those of the bytes of a text and of the separator after it, not of the padding.
        """
        tokens = np.full((len(indices), self.context + 1), SEPARATOR, np.uint8)
        mask = np.zeros((len(indices), self.context), np.float32)
        numbers = np.searchsorted(self.ends, indices, side="right")
        starts = (indices - self.ends[numbers] + self.windows[numbers]) * self.context
        for i, (number, start) in enumerate(zip(numbers, starts, strict=True)):
            text = self.texts[number]
            piece = text[max(start - 1, 0) : start + self.context]
            first = 1 if start == 0 else 0
            tokens[i, first : first + len(piece)] = piece
            mask[i, : len(text) + 1 - start] = 1
        return {"tokens": tokens, "mask": mask}


class Data(NamedTuple):
    train: Split
    validation: Split
    test: Split
    num_outputs: int
    """Number of tokens: the values of a byte."""
    fingerprint: str
    """Digest of the text: a resumed run must see the same."""


def load(config: Config) -> Data:
    """Find the text and check it. Raises SettingError for text that cannot be trained on.

    --data.path is a text file, a directory (every file in it that is not hidden), or a glob such as
    'books/**/*.txt'. Without it the text is the source code of Python's standard library. Of every
    twenty files the first is for the test and the eleventh for validation; of fewer than twenty,
    the last tenth of each is, in two halves.
    """
    try:
        files = find_files(config)
        texts = [read(file) for file in files]
        digest = fingerprint(texts, files)
    except OSError as error:
        raise SettingError(f"--data.path: {error.filename} cannot be read ({error})") from error
    if len(texts) >= 20:
        held_out = set(range(0, len(texts), 10))
        parts = [
            [text for i, text in enumerate(texts) if i not in held_out],
            texts[10::20],
            texts[0::20],
        ]
    else:
        parts = [
            [text[len(text) * a // 20 : len(text) * b // 20] for text in texts]
            for a, b in ((0, 18), (18, 19), (19, 20))
        ]
    parts = [[text for text in part if len(text)] for part in parts]
    if not all(parts):
        raise SettingError(
            f"{sum(map(len, texts))} bytes of text in {len(texts)} files: too little to hold out "
            f"a tenth for validation and test"
        )
    train, validation, test = (Split(part, config.model.context) for part in parts)
    return Data(train, validation, test, 256, digest)


def find_files(config: Config) -> list[Path]:
    """The files of text that are not empty, in a fixed order."""
    if config.data.source == "builtin":
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        root, pattern = Path(config.data.path).expanduser(), "*"
    if root.is_dir():
        files = [file for file in root.rglob(pattern) if not hidden(file.relative_to(root))]
    elif root.exists():
        files = [root]
    else:
        files = [Path(name) for name in glob.glob(str(root), recursive=True)]
    files = sorted(file for file in files if file.is_file() and file.stat().st_size)
    if not files:
        raise SettingError(
            f"--data.path {config.data.path or root}: must be a text file, a directory or a glob "
            f"with at least one that is not empty"
        )
    return files


def hidden(file: Path) -> bool:
    """True for what no one means to train on: dot files, and what the library excludes."""
    return any(part.startswith(".") or part in EXCLUDED for part in file.parts)


def read(file: Path) -> np.ndarray:
    """The bytes uint8 of a file. Those of a large one stay on disk until they are used."""
    if file.stat().st_size >= LARGE:
        return np.memmap(file, np.uint8, mode="r")
    return np.fromfile(file, np.uint8)


def fingerprint(texts: list[np.ndarray], files: list[Path]) -> str:
    """Digest of all texts, of evenly spread blocks of those over 64 MiB. Refuses what is binary."""
    digest = hashlib.blake2b(digest_size=16)
    for text, file in zip(texts, files, strict=True):
        digest.update(len(text).to_bytes(8, "little"))
        blocks = -(-len(text) // BLOCK)
        for block in np.unique(np.linspace(0, blocks - 1, min(blocks, MOST_BLOCKS)).astype(int)):
            piece = text[block * BLOCK : (block + 1) * BLOCK]
            if (piece == SEPARATOR).any():
                raise SettingError(
                    f"{file} has bytes of zero, so it is not text: leave it out with a glob such "
                    f"as --data.path '{file.parent}/**/*.txt'"
                )
            digest.update(piece.tobytes())
    return digest.hexdigest()
