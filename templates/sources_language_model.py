"""What the text is read from: --data.path, or the source code of Python's standard library."""

import glob
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ..runtime.settings import SettingError, setting
from . import records
from .texts import Texts, read_texts, walk

ENDINGS = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".bin", ".npy"), "tokens"),
}


@dataclass(frozen=True)
class DataConfig:
    path: str | None = setting(None, resume="allowed")
    """Your own text or tokens, see README.md (default: Python's standard library)."""
    format: Literal["auto", "text", "jsonl", "parquet", "tokens"] = setting(
        "auto", resume="allowed"
    )
    """What is at --data.path (auto: by the endings of the files)."""
    field: str = setting("text", resume="allowed")
    """Field of a JSON object, or column of Parquet, that is the text."""
    vocab_size: int = setting(0, least=0)
    """Number of different tokens (0 = no tokens: the bytes of a text)."""
    workers: int | None = setting(None, least=0, resume="allowed")
    """Threads that prepare batches ahead (default: 0, prepared in the loop: best for text)."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used."""
        if self.path is None and (self.format != "auto" or self.vocab_size):
            raise SettingError("--data.format and --data.vocab-size need --data.path")


class Found(NamedTuple):
    """Texts as they were found, before they are divided into splits."""

    form: str
    digests: np.ndarray
    """S16 [texts], sorted. Equal texts have the same."""
    texts: Texts


def read(settings: DataConfig) -> Found:
    """The texts at --data.path. Raises SettingError for what is not understood, and OSError."""
    path = settings.path and os.path.expanduser(settings.path)
    form = recognise(settings)
    if form in ("jsonl", "parquet"):
        return Found(f"{form}, field {settings.field!a}", *records.read(path, form, settings.field))
    name = "the source code of the standard library" if path is None else "text files"
    return Found(name, *read_texts(path))


def recognise(settings: DataConfig) -> str:
    """The form of what is at --data.path. Raises SettingError if it may be more than one."""
    form: str = settings.format
    if settings.path is None:
        form = "text"
    elif form == "auto":
        files = files_at(os.path.expanduser(settings.path))
        forms = {form_of(name) for name in files} or {"text"}
        if len(forms) > 1:
            raise SettingError(
                f"has files of several forms, {', '.join(sorted(forms))}, such as "
                f"{', '.join(map(ascii, files[:3]))}: say which with a glob, or with --data.format"
            )
        form = forms.pop()
    if (form == "tokens") != bool(settings.vocab_size):
        raise SettingError(
            "has tokens: give --data.vocab-size, the number of different ones"
            if form == "tokens"
            else f"is no file of tokens, for which alone --data.vocab-size {settings.vocab_size} is"
        )
    return form


def files_at(path: str) -> list[str]:
    """Names of some files at a path: its first thousand, without hidden ones."""
    if os.path.isfile(path):
        return [path]
    found = walk(path) if os.path.isdir(path) else map(Path, glob.glob(path, recursive=True))
    return [file.name for file in itertools.islice(found, 1000) if file.is_file()]


def form_of(name: str) -> str:
    """The form that the ending of a file's name says; every other ending is a text."""
    return next((form for end, form in ENDINGS.items() if name.lower().endswith(end)), "text")
