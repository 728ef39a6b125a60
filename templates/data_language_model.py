"""The data set: text as bytes, cut into windows, in three splits by content."""

from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from .config import Config, SettingError
from .runtime.logs import counted
from .sources.texts import SEED, SEPARATOR, read_texts

TRAIN, VALIDATION, TEST = range(3)
RULE = (
    "A text over a twentieth of all bytes is cut: of its last tenth the first half is for "
    "validation and the second for the test. Of the others, sorted by a digest of their content "
    "(blake2b, key '{seed}'), each goes to the smaller of test and validation if that brings it "
    "nearer to a twentieth of all bytes, else to training."
)


class Split:
    """Texts uint8 [bytes], each in windows of `context` bytes to predict. A row is a window.

    One of the two kinds of split that batches.py describes: Rows.
    """

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

    @property
    def summary(self) -> str:
        """How much text there is, as the start of the log shows it."""
        counts = (len(self.texts), "text"), (self.num_bytes, "byte"), (len(self), "window")
        return ", ".join(counted(*count) for count in counts)

    @property
    def baseline(self) -> dict[str, float]:
        """Scores to compare with: none that costs no pass over the text."""
        return {}

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.texts))


class Data(NamedTuple):
    """What load() returns: a DataSet as batches.py describes it."""

    train: Split
    validation: Split
    test: Split
    num_outputs: int
    """Number of tokens: the values of a byte."""
    fingerprint: str
    """Digest of the text: a resumed run must see the same."""
    split_rule: str = ""
    """How the text was divided."""
    metadata: dict[str, Any] | None = None
    """What config.json keeps of the data, for when it is not there."""
    warnings: tuple[str, ...] = ()
    """What is unusual about the splits, one line each."""


def load(config: Config, metadata: dict[str, Any] | None = None) -> Data:
    """Find the text and check it. Raises SettingError for text that cannot be trained on.

    --data.path is a text file, a directory (every file in it that is not hidden), or a glob such as
    'books/**/*.txt'. Without it the text is the source code of Python's standard library. RULE says
    how it is divided; what belongs together should be in one file.
    """
    path = config.data.path
    try:
        texts = read_texts(path)
        parts = divide(texts)
    except SettingError as error:
        place = "the standard library" if path is None else f"--data.path {path}"
        raise SettingError(f"{place}: {error}") from error
    train, validation, test = (Split(part, config.model.context) for part in parts)
    copies = b"".join(digest * len(same) for digest, same in texts.items())
    return Data(
        train,
        validation,
        test,
        num_outputs=256,
        fingerprint=blake2b(copies, digest_size=16).hexdigest(),
        split_rule=RULE.format(seed=SEED.decode()),
        warnings=tuple(doubts(train, validation, test)),
    )


def divide(texts: dict[bytes, list[np.ndarray]]) -> list[list[np.ndarray]]:
    """The texts of training, validation and test, by RULE. Parts of a text are views of it.

    The keys of `texts` are digests in their order; equal texts have the same and stay together.
    """
    parts: list[list[np.ndarray]] = [[], [], []]
    num_bytes = [0, 0, 0]

    def add(part, *pieces):
        parts[part] += [piece for piece in pieces if len(piece)]
        num_bytes[part] += sum(map(len, pieces))

    total = sum(len(text) for same in texts.values() for text in same)
    whole = [same for same in texts.values() if len(same[0]) * 20 <= total]
    large = [text for same in texts.values() for text in same if len(text) * 20 > total]
    for text in large:
        first, second = len(text) * 18 // 20, len(text) * 19 // 20
        add(TRAIN, text[:first])
        add(VALIDATION, text[first:second])
        add(TEST, text[second:])
    for same in whole:
        size = sum(map(len, same))
        smaller = TEST if num_bytes[TEST] <= num_bytes[VALIDATION] else VALIDATION
        add(smaller if num_bytes[smaller] + size / 2 < total / 20 else TRAIN, *same)
    if not all(parts):
        count = sum(map(len, texts.values()))
        raise SettingError(
            f"{total} bytes of text in {count} files ({len(texts)} different ones) are too little "
            f"to hold out a twentieth each for validation and the test: add text"
        )
    return parts


def doubts(train: Split, validation: Split, test: Split) -> list[str]:
    """What to know about the splits before their scores are trusted, one line each."""
    total = sum(split.num_bytes for split in (train, validation, test))
    found = []
    for split, name in ((validation, "validation"), (test, "the test")):
        share = split.num_bytes / total
        if not 0.01 <= share <= 0.15:
            found.append(
                f"{name} has {split.num_bytes:,} bytes, {share:.1%} of the text: texts are few, or "
                f"many are equal, so its score says little"
            )
    return found
