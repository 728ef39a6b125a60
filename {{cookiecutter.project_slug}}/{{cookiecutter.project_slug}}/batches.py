"""Batches: which rows, in which order, prepared ahead and placed on the devices."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from .config import Config
from .runtime import streams
from .runtime.order import train_indices

Batch = dict[str, np.ndarray]
"""Arrays by name; the first axis of each counts the rows.

One of them is `mask` float32, [rows] or [rows, positions] if a row has several predictions: 1 for
what counts in loss and metrics, 0 for what only fills the batch. Only task.py reads the others.
Store pixels and tokens as uint8: they move to the device in a quarter of the time, and task.py
converts them there. int64 and float64 become int32 and float32 on the device.
"""


class Rows(Protocol):
    """A split with random access: rows are asked for by their numbers, by several threads at once.

    It may have `summary`, a line for the start of the log; `baseline`, scores to show beside those
    of the model, such as {"largest_class": 0.1}; and `workers`, how many threads should prepare
    batches unless --data.workers says it.
    """

    def __len__(self) -> int:
        """Number of rows."""

    def rows(self, indices: np.ndarray) -> Batch:
        """The batch of the rows with these numbers, int64 [rows], each from 0 to len - 1.

        A number must always give the same row. The mask must be a new array, because evaluation
        writes to it.
        """


@runtime_checkable
class Stream(Protocol):
    """A split without random access: the source decides the order of the rows.

    The number of rows is not known, so there are no epochs, and --epochs is refused. A stream with
    the attribute `resumes_exactly = True` promises that batches(n) continues where batches(0) is
    after n batches, bit for bit. Without this promise a resumed run warns that it sees other rows.
    `summary` and `baseline` are as in Rows.

    Evaluation reads batches(0) to its end, where the last batch may have fewer rows, or N batches
    with --eval-batches N. Several processes need the flag, since all must see the same number.
    """

    def batches(self, start_step: int) -> Iterator[Batch]:
        """This process's part of each global batch, from this step on.

        A part has batch_size / jax.process_count() rows, in new arrays each time. Every process
        calls this method: use jax.process_index() to give each process other rows. Only one thread
        uses the iterator. A stream to train on must not end before the run does.
        """


Split = Rows | Stream


class DataSet(Protocol):
    """What load() in data.py returns: a NamedTuple of three splits and facts about them."""

    @property
    def train(self) -> Split: ...
    @property
    def validation(self) -> Split:
        """The rows that choose the best checkpoint and the early stop."""

    @property
    def test(self) -> Split:
        """The rows that are scored once, at the end."""

    @property
    def num_outputs(self) -> int:
        """Size of the network's output: number of classes, or of different tokens."""

    @property
    def fingerprint(self) -> str:
        """A text, such as a digest, that changes when the content or order of the rows does.

        A resumed run refuses data with another fingerprint.
        """

    @property
    def split_rule(self) -> str:
        """How the rows were divided into splits, for config.json and the log; may be empty."""

    @property
    def warnings(self) -> Sequence[str]:
        """A line for each thing that is unusual about the data."""

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """What must be known of the data when it is not there, such as the names of the classes.

        config.json keeps it, so it is made of texts, numbers, lists and dictionaries.
        """


AHEAD = 2  # batches that each worker prepares before they are asked for


def train_batches(
    split: Split, config: Config, sharding: jax.sharding.Sharding, start: int
) -> Generator[dict]:
    """Global batches for the steps from start to the end of the run.

    Raises SettingError if a stream ends earlier, or has a batch that is not like its first.
    """
    if isinstance(split, Stream):
        return placed(streams.parts_to_train_on(split, config, start), config, sharding)

    def make_batch(step):
        if config.overfit_batches:
            step %= config.overfit_batches
        indices = train_indices(step, len(split), config.batch_size, config.seed)
        rows = split.rows(indices[local_rows(len(indices))])
        return place(rows, len(indices), sharding, workers)

    workers = count_workers(split, config)
    return prefetch(make_batch, range(start, config.total_steps), workers)


def eval_batches(split: Split, config: Config, sharding: jax.sharding.Sharding) -> Generator[dict]:
    """Every row of the split once, in order; masked rows fill up the last batch.

    With --eval-batches N these are N batches of rows, spread evenly over the split and always the
    same; of a stream, the first N batches.
    """
    if isinstance(split, Stream):
        return placed(streams.parts_to_score(split, config), config, sharding)
    size, rows = config.batch_size, len(split)
    count = rows if not config.eval_batches else min(config.eval_batches * size, rows)

    def make_batch(start):
        places = np.arange(start, start + size)[local_rows(size)]
        batch = split.rows(np.minimum(places, count - 1) * rows // count)
        batch["mask"][places >= count] = 0
        return place(batch, size, sharding, workers)

    workers = count_workers(split, config)
    return prefetch(make_batch, range(0, count, size), workers)


def placed(
    parts: Iterator[Batch], config: Config, sharding: jax.sharding.Sharding
) -> Generator[dict]:
    """Global batches of these parts. At most one thread prepares them, as they come in turn."""
    workers = min(config.data.workers or 0, 1)

    def take_next(_):
        part = next(parts, None)
        return part and place(part, config.batch_size, sharding, workers)

    yield from itertools.takewhile(bool, prefetch(take_next, itertools.count(), workers))


def count_workers(split: Split, config: Config) -> int:
    """Threads that prepare batches."""
    asked = config.data.workers
    return getattr(split, "workers", 0) if asked is None else asked


def example(split: Split) -> Batch:
    """A batch of one row, for the names, shapes and dtypes of what is in it."""
    if isinstance(split, Stream):
        return {name: rows[:1] for name, rows in streams.first_batch(split).items()}
    return split.rows(np.zeros(1, np.int64))


def abstract(split: Split, batch_size: int, sharding: jax.sharding.Sharding) -> Any:
    """A global batch in abstract form: a shape, dtype and sharding in the place of each array."""

    def widen(rows):
        return jax.ShapeDtypeStruct((batch_size, *rows.shape[1:]), rows.dtype, sharding=sharding)

    return jax.tree.map(widen, example(split))


def count_eval_batches(split: Split, config: Config) -> int | None:
    """Number of batches that eval_batches yields; None if a stream decides."""
    if isinstance(split, Stream):
        return config.eval_batches or None
    every = -(-len(split) // config.batch_size)
    return min(config.eval_batches or every, every)


def baseline(split: Split) -> dict[str, float]:
    """Scores to compare those of the model with, if the split has any: see data.py."""
    return getattr(split, "baseline", {})


def local_rows(batch_size: int) -> slice:
    """The contiguous part of a global batch that this process loads."""
    size = batch_size // jax.process_count()
    return slice(jax.process_index() * size, (jax.process_index() + 1) * size)


def place(batch: Batch, size: int, sharding: jax.sharding.Sharding, workers: int) -> dict:
    """Put this process's rows on its devices, as its part of global arrays of `size` rows."""
    if workers == 0 and len(sharding.device_set) == 1:
        # The compiled step copies NumPy arrays itself, which is faster than a separate transfer.
        return batch

    def put(rows):
        return jax.make_array_from_process_local_data(sharding, rows, (size, *rows.shape[1:]))

    return jax.tree.map(put, batch)


def prefetch(make_batch: Callable, arguments: Iterable, workers: int) -> Generator:
    """Yield make_batch(argument) for each argument, in order; so many threads work ahead."""
    if workers == 0:
        yield from map(make_batch, arguments)
        return
    # Threads are enough, because NumPy and image decoders release the interpreter lock. Worker
    # processes would take time to start, copy every batch, and must not fork after JAX has started.
    with ThreadPoolExecutor(workers, thread_name_prefix="prefetch") as pool:
        pending: deque = deque()
        try:
            for argument in arguments:
                pending.append(pool.submit(make_batch, argument))
                if len(pending) > AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
