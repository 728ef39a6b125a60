"""Data without random access: streams of batches, checked as they come."""

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import jax
import numpy as np

from ..config import Config
from .settings import SettingError

Batch = dict[str, np.ndarray]


def is_stream(split: Any) -> bool:
    """Whether a split is a Stream of batches.py, and not Rows."""
    return hasattr(split, "batches")


def part_size(config: Config) -> int:
    """Rows of a global batch that this process loads."""
    return config.batch_size // jax.process_count()


class Opened:
    """A stream whose first batch was looked at; batches(0) still begins with that batch."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.iterator: Iterator[Batch] | None = iter(stream.batches(0))
        self.first = next(self.iterator, None)
        if self.first is None:
            raise SettingError("the stream to train on is empty")

    def batches(self, start_step: int) -> Iterator[Batch]:
        iterator, self.iterator = self.iterator, None
        if iterator is None or start_step:
            return iter(self.stream.batches(start_step))
        return itertools.chain([self.first], iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def prepare(data: Any, config: Config) -> Any:
    """The DataSet of batches.py with its first training batch checked, and its stream opened.

    A stream is opened only once in a new run, which may take long. Raises SettingError for a batch
    that is not what batches.py says, and for a stream that several processes cannot evaluate.
    """
    is_evaluated = is_stream(data.validation) or is_stream(data.test)
    if is_evaluated and jax.process_count() > 1 and not config.eval_batches:
        raise SettingError(
            "--eval-batches 0: several processes evaluate a stream, and all must stop at the same "
            "batch: give --eval-batches N"
        )
    if not is_stream(data.train):
        row = data.train.rows(np.zeros(1, np.int64))
        require_form(row, 1, 1, "a batch of one row to train on")
        return data
    data, rows = data._replace(train=Opened(data.train)), part_size(config)
    require_form(data.train.first, rows, rows, "the first batch of the stream to train on")
    return data


def parts_to_train_on(stream: Any, config: Config, start: int) -> Generator[Batch]:
    """This process's part of each batch, from the step `start` to the end of the run."""
    first, rows = first_batch(stream), part_size(config)
    parts: Iterator[Batch]
    if config.overfit_batches:
        few = itertools.islice(stream.batches(0), config.overfit_batches)
        parts = itertools.islice(itertools.cycle(few), start, None)
    else:
        parts = iter(stream.batches(start))
    for step in range(start, config.total_steps):
        part = next(parts, None)
        if part is None:
            raise SettingError(
                f"the stream to train on ended at step {step} of {config.total_steps}: make it "
                f"start again, or end the run there with --total-steps {step}"
            )
        require_form(part, rows, rows, f"batch {step} of the stream to train on", first)
        yield part


def parts_to_score(stream: Any, config: Config) -> Generator[Batch]:
    """This process's part of each batch of an evaluation, filled up with masked rows."""
    size, wanted = part_size(config), config.eval_batches
    count, first = 0, None
    for part in itertools.islice(stream.batches(0), wanted or None):
        require_form(part, 1, size, f"batch {count} of a stream to evaluate", first)
        missing = size - len(part["mask"])
        if missing:
            part = {name: np.append(x, x[-1:].repeat(missing, 0), 0) for name, x in part.items()}
            part["mask"][-missing:] = 0
        yield part
        count, first = count + 1, part
    if count == 0 or (jax.process_count() > 1 and count < wanted):
        raise SettingError(
            f"a stream to evaluate ended after {count} batches: it must have at least one, and on "
            f"several processes --eval-batches {wanted} of them in each"
        )


def require_form(
    batch: Batch, least: int, most: int, what: str, first: Batch | None = None
) -> None:
    """Raise SettingError for a batch that is not as Batch says, or not like the first one.

    It may have `least` to `most` rows, and `what` is its name in the message.
    """
    is_sound = (
        isinstance(batch, dict)
        and all(isinstance(x, np.ndarray) for x in batch.values())
        and {x.shape[:1] for x in batch.values()} in [{(n,)} for n in range(least, most + 1)]
        and batch.get("mask", np.empty(0, bool)).dtype == np.float32
    )
    wanted = f"NumPy arrays of {most} rows in a dictionary, one of them mask float32"
    if first is not None:
        is_sound = is_sound and of_row(batch) == of_row(first)
        wanted = f"{describe_batch(first)}, as the first was"
    if not is_sound:
        raise SettingError(f"{what} is {describe_batch(batch)}; it must be {wanted}")


def of_row(batch: Batch) -> dict[str, tuple]:
    """Dtype and shape of one row of each array."""
    return {name: (x.dtype, x.shape[1:]) for name, x in batch.items()}


def describe_batch(batch: Any) -> str:
    """What is in it, as in 'image uint8 [16, 8, 8, 1], mask float32 [16]'."""
    if not isinstance(batch, dict):
        return type(batch).__name__
    arrays = {name: x for name, x in batch.items() if isinstance(x, np.ndarray)}
    others = {name: type(x).__name__ for name, x in batch.items() if name not in arrays}
    found = {name: f"{x.dtype} {list(x.shape)}" for name, x in arrays.items()} | others
    return ", ".join(f"{name} {form}" for name, form in found.items())


def first_batch(stream: Any) -> Batch:
    """The first batch of a stream, which is opened only if it is not open yet."""
    return (stream if isinstance(stream, Opened) else Opened(stream)).first
