"""The data set: text as bytes, cut into windows, in three splits by content."""

import itertools
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from .config import Config, SettingError
from .runtime.logs import counted
from .sources import read, recognise
from .sources.texts import SEED, SEPARATOR, Texts
from .sources.tokens import digest, read_tokens

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

    def __init__(self, texts: Sequence[np.ndarray] | Texts, context: int):
        self.texts, self.context = texts, context
        lengths = texts.lengths if isinstance(texts, Texts) else list(map(len, texts))
        self.num_bytes = int(np.sum(lengths))
        self.windows = -(-(np.array(lengths, np.int64) + 1) // context)
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


class TokenSplit:
    """Tokens [tokens] that another program made, in windows of `context` tokens to predict.

    The other kind of split: a row is a window, and what is left over at the end is left out.
    """

    def __init__(self, tokens: np.ndarray, context: int, vocab_size: int):
        self.tokens, self.context = tokens, context
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.int32

    def __len__(self) -> int:
        return max((len(self.tokens) - 1) // self.context, 0)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these windows: tokens [rows, context + 1], mask [rows, context]."""
        places = indices[:, None] * self.context + np.arange(self.context + 1)
        mask = np.ones((len(indices), self.context), np.float32)
        return {"tokens": self.tokens[places].astype(self.dtype), "mask": mask}

    @property
    def summary(self) -> str:
        """How many tokens there are, as the start of the log shows it."""
        return f"{counted(len(self.tokens), 'token')}, {counted(len(self), 'window')}"


class Data(NamedTuple):
    """What load() returns: a DataSet as batches.py describes it."""

    train: Split | TokenSplit
    validation: Split | TokenSplit
    test: Split | TokenSplit
    num_outputs: int
    """Number of tokens: the values of a byte."""
    fingerprint: str
    """Digest of the text: a resumed run must see the same."""
    found: str = ""
    """What was read, one line."""
    split_rule: str = ""
    """How the text was divided."""
    metadata: dict[str, Any] | None = None
    """What config.json keeps of the data, for when it is not there."""
    warnings: tuple[str, ...] = ()
    """What is unusual about the splits, one line each."""


def load(config: Config, metadata: dict[str, Any] | None = None) -> Data:
    """Find the text and check it. Raises SettingError for text that cannot be trained on.

    README.md says what --data.path may be, and RULE how texts are divided; what belongs together
    should be one text. `metadata` is that of a run which the text is to be scored by.
    """
    settings = config.data
    try:
        data = load_tokens(config) if recognise(settings) == "tokens" else load_texts(config)
        if metadata is not None and metadata != data.metadata:
            raise SettingError(f"is {data.metadata}, and the run was trained on {metadata}")
    except (SettingError, OSError) as error:
        place = "the standard library" if settings.path is None else f"--data.path {settings.path}"
        if isinstance(error, OSError):
            error = SettingError(
                f"{error.filename} cannot be read ({error.strerror}): let the user who trains read "
                f"it, or leave it out with a glob"
            )
        raise SettingError(f"{place}: {error}") from error
    return data


def load_texts(config: Config) -> Data:
    """Texts, of which every byte is a token."""
    found = read(config.data)
    parts = divide(found.digests, found.texts)
    train, validation, test = (Split(part, config.model.context) for part in parts)
    return Data(
        train,
        validation,
        test,
        num_outputs=256,
        fingerprint=blake2b(found.digests.tobytes(), digest_size=16).hexdigest(),
        found=f"{found.form}: {counted(len(found.texts), 'text')}",
        split_rule=RULE.format(seed=SEED.decode()),
        metadata={"tokens": "bytes"},
        warnings=tuple(doubts(train, validation, test)),
    )


def load_tokens(config: Config) -> Data:
    """Tokens that another program made."""
    size = config.data.vocab_size
    parts, rule = read_tokens(os.path.expanduser(config.data.path), size)
    train, validation, test = (TokenSplit(part, config.model.context, size) for part in parts)
    if not (len(train) and len(validation) and len(test)):
        raise SettingError(
            f"has {sum(map(len, parts))} tokens, too few for a window of --model.context "
            f"{config.model.context} in each split"
        )
    return Data(
        train,
        validation,
        test,
        num_outputs=size,
        fingerprint=digest(parts),
        found=f"tokens of a vocabulary of {size:,}",
        split_rule=rule,
        metadata={"tokens": "file", "vocab_size": size},
    )


def divide(digests: np.ndarray, texts: Texts) -> list[Texts]:
    """The texts of training, validation and test, by RULE. Parts of a text are views of it.

    `digests` S16 [texts] are sorted; equal texts have the same and stay together.
    """
    lengths = texts.lengths
    total = int(lengths.sum())
    large = np.flatnonzero(lengths * 20 > total)
    first, second = (texts.starts[large] + lengths[large] * n // 20 for n in (18, 19))
    cuts = [texts.starts[large], first, second, texts.ends[large]]
    sizes = [int((end - start).sum()) for start, end in itertools.pairwise(cuts)]

    part = np.full(len(texts), TRAIN, np.int8)
    begins = np.flatnonzero(np.append(True, digests[1:] != digests[:-1]))
    counts = np.diff(np.append(begins, len(texts)))
    is_whole = lengths[begins] * 20 <= total
    for begin, count in zip(begins[is_whole].tolist(), counts[is_whole].tolist(), strict=True):
        size = int(lengths[begin]) * count
        smaller = TEST if sizes[TEST] <= sizes[VALIDATION] else VALIDATION
        chosen = smaller if sizes[smaller] + size / 2 < total / 20 else TRAIN
        sizes[chosen] += size
        part[begin : begin + count] = chosen
    part[large] = -1
    if not all(sizes):
        raise SettingError(
            f"{total} bytes of text in {len(texts)} files ({len(begins)} different ones) are too "
            f"little to hold out a twentieth each for validation and the test: add text"
        )
    parts = []
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        cut, whole = texts.take(large), texts.take(np.flatnonzero(part == number))
        joined = Texts(
            texts.arrays,
            np.append(cut.which, whole.which),
            np.append(start, whole.starts),
            np.append(end, whole.ends),
        )
        parts.append(joined.take(np.flatnonzero(joined.lengths)))
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
