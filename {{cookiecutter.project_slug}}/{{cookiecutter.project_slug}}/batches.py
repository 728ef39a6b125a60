"""Batches: which rows, in which order, prepared ahead and placed on the devices."""

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from .config import Config, SettingError

Batch = dict[str, np.ndarray]
"""Arrays by name, all with the rows as their first axis. One of them is `mask` float32, which says
what counts in loss and metrics: [rows], or [rows, positions] where a row has several predictions.
It is 0 for what only fills the batch up. No other name has a meaning here: task.py reads them.

Pixels and tokens are best uint8, a quarter of the bytes to move; task.py scales them on the device.
int64 and float64 become int32 and float32 there."""


class Rows(Protocol):
    """A split whose rows can be asked for by their numbers, in any order and by several threads.

    May have `summary`, a line for the start of the log, and `baseline`, scores to show beside its
    own: {"largest_class": 0.1}.
    """

    def __len__(self) -> int:
        """Number of rows."""

    def rows(self, indices: np.ndarray) -> Batch:
        """The batch of these rows, whose numbers int64 [rows] are from 0 to len - 1.

        The same number always gives the same row. The mask is a new array: evaluation writes to it.
        """


@runtime_checkable
class Stream(Protocol):
    """A split without random access: its rows come in an order of its own.

    Its length is not known, so that there are no epochs: --epochs is refused. `resumes_exactly =
    True` is its promise that batches(n) goes on as batches(0) does after n batches, bit for bit;
    without it a resumed run says that it sees other rows. May have `summary` and `baseline` too.

    A stream that is evaluated is read from batches(0): to its end, where the last batch may have
    fewer rows, or for --eval-batches N batches, which several processes need, as all must see the
    same number.
    """

    def batches(self, start_step: int) -> Iterator[Batch]:
        """This process's part of each global batch, from this step on.

        A part has batch_size / jax.process_count() rows, and new arrays each time. Every process
        calls this: share the rows out by jax.process_index(). The iterator is used by one thread at
        a time, and dropped in the middle when the run ends. Training must not reach its end.
        """


Split = Rows | Stream


class DataSet(Protocol):
    """What load() in data.py returns: a NamedTuple of three splits and what is known of them."""

    @property
    def train(self) -> Split: ...
    @property
    def validation(self) -> Split:
        """For every choice: the best checkpoint, early stopping."""

    @property
    def test(self) -> Split:
        """Scored once, at the end."""

    @property
    def num_outputs(self) -> int:
        """Size of what the network puts out: classes or tokens."""

    @property
    def fingerprint(self) -> str:
        """A text that changes when the content or the order of the rows does, such as a digest.

        A resumed run refuses data with another one.
        """

    @property
    def split_rule(self) -> str:
        """How the rows were divided, for config.json and the log ("" = nothing to say)."""

    @property
    def warnings(self) -> Sequence[str]:
        """What is unusual about the data, a line each."""


AHEAD = 2  # batches prepared before they are asked for, for each worker
BLOCK = 2**13  # rows whose order is computed at once, in about half a millisecond
ROUNDS = 12  # of the network: with 8 the orders of 6 rows are not equally frequent yet


def train_indices(step: int, rows: int, batch_size: int, seed: int) -> np.ndarray:
    """Rows int64 [batch_size] of the global batch that training consumes at this step.

    A pure function: a resumed run needs no position but the step, and the number of processes may
    change. An epoch is rows // batch_size batches in an order of its own, no row twice; the rows
    left over differ from epoch to epoch.
    """
    epoch, batch = divmod(step, rows // batch_size)
    # The batches of a block share the cost of NumPy's calls.
    size = batch_size * max(BLOCK // batch_size, 1)
    block, place = divmod(batch * batch_size, size)
    last = min((block + 1) * size, rows)
    return order(block * size, last, rows, seed, epoch)[place : place + batch_size]


@functools.lru_cache(maxsize=2)
def order(first: int, last: int, rows: int, seed: int, epoch: int) -> np.ndarray:
    """The rows int64 [last - first] at these places in the order of an epoch.

    Each place is permuted on its own, whatever the number of rows: no epoch begins with a pause,
    and nothing is kept but the last two blocks.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(ROUNDS)
    found = permute(np.arange(first, last, dtype=np.uint64), rows, keys)
    while len(outside := np.flatnonzero(found >= rows)):
        found[outside] = permute(found[outside], rows, keys)
    return found.astype(np.int64)


def permute(places: np.ndarray, rows: int, keys: np.ndarray) -> np.ndarray:
    """Each place uint64 below a * b as another one, a * b being `rows` or little more.

    The generalised Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
    (CT-RSA 2002); that order() permutes again what falls outside is their cycle walking. A place is
    a pair of digits below a and b, and each round adds to one of them a random function of the
    other. The function, a key and two multiplications, is for good mixing and not for secrecy.
    """
    a = math.isqrt(rows - 1) + 1
    sizes = a, -(-rows // a)
    digits = list(np.divmod(places, sizes[1]))
    for number, key in enumerate(keys):
        i = number % 2
        x = digits[1 - i] ^ key
        x *= 0x9E3779B97F4A7C15
        x ^= x >> 32
        x *= 0xD6E8FEB86659FD93
        x = digits[i] + ((x >> 32) * sizes[i] >> 32)
        digits[i] = np.minimum(x, x - sizes[i])  # modulo the size: below 0 it wraps to a large one
    return digits[0] * sizes[1] + digits[1]


def train_batches(
    split: Split, config: Config, sharding: jax.sharding.Sharding, start: int
) -> Generator[dict]:
    """Global batches for the steps from start to the end of the run.

    Raises SettingError where a stream ends before, or has a batch that is not like its first.
    """
    if isinstance(split, Stream):
        return placed(parts_to_train_on(split, config, start), config, sharding)

    def make_batch(step):
        if config.overfit_batches:
            step %= config.overfit_batches
        indices = train_indices(step, len(split), config.batch_size, config.seed)
        rows = split.rows(indices[local_rows(len(indices))])
        return place(rows, len(indices), sharding, workers)

    workers = config.data.workers
    return prefetch(make_batch, range(start, config.total_steps), workers)


def eval_batches(split: Split, config: Config, sharding: jax.sharding.Sharding) -> Generator[dict]:
    """Every row of the split once, in order; the last batch is filled up with masked rows.

    With --eval-batches N it is N batches of rows, spread evenly over the split: always the same. Of
    a stream it is the first N.
    """
    if isinstance(split, Stream):
        return placed(parts_to_score(split, config), config, sharding)
    size, rows = config.batch_size, len(split)
    count = rows if not config.eval_batches else min(config.eval_batches * size, rows)

    def make_batch(start):
        places = np.arange(start, start + size)[local_rows(size)]
        batch = split.rows(np.minimum(places, count - 1) * rows // count)
        batch["mask"][places >= count] = 0
        return place(batch, size, sharding, workers)

    workers = config.data.workers
    return prefetch(make_batch, range(0, count, size), workers)


class Opened:
    """A stream whose first batch was looked at: batches(0) still begins with it."""

    def __init__(self, stream: Stream):
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


def opened(data: Any, config: Config) -> Any:
    """The data set (a DataSet) with its stream for training opened, if it is one.

    A new run opens it once, at step 0; one that goes on opens it there for a look, and then at its
    own step. Raises SettingError for what is not as Rows and Stream say.
    """
    for split in (data.validation, data.test):
        count_eval_batches(split, config)
    if isinstance(data.train, Stream):
        data, rows = data._replace(train=Opened(data.train)), part_size(config)
        require_form(data.train.first, rows, rows, "the first batch of the stream to train on")
    else:
        require_form(example(data.train), 1, 1, "a batch of one row to train on")
    return data


def parts_to_train_on(stream: Stream, config: Config, start: int) -> Generator[Batch]:
    """This process's part of each batch from start to the end of the run."""
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
                f"the stream to train on ended at step {step} of {config.total_steps}: let it "
                f"begin again, or end the run there with --total-steps {step}"
            )
        require_form(part, rows, rows, f"batch {step} of the stream to train on", first)
        yield part


def parts_to_score(stream: Stream, config: Config) -> Generator[Batch]:
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


def placed(
    parts: Iterator[Batch], config: Config, sharding: jax.sharding.Sharding
) -> Generator[dict]:
    """Global batches of these parts, prepared ahead by one thread at most: they come in turn."""
    workers = min(config.data.workers, 1)

    def take_next(_):
        part = next(parts, None)
        return part and place(part, config.batch_size, sharding, workers)

    yield from itertools.takewhile(bool, prefetch(take_next, itertools.count(), workers))


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


def example(split: Split) -> Batch:
    """A batch of one row, for the names, shapes and dtypes of what is in it."""
    if isinstance(split, Stream):
        return {name: rows[:1] for name, rows in first_batch(split).items()}
    return split.rows(np.zeros(1, np.int64))


def first_batch(stream: Stream) -> Batch:
    """Its first batch; a stream that is not Opened yet is opened for it."""
    return (stream if isinstance(stream, Opened) else Opened(stream)).first


def abstract(split: Split, batch_size: int, sharding: jax.sharding.Sharding) -> Any:
    """A global batch in abstract form: a shape, dtype and sharding in the place of each array."""

    def widen(rows):
        return jax.ShapeDtypeStruct((batch_size, *rows.shape[1:]), rows.dtype, sharding=sharding)

    return jax.tree.map(widen, example(split))


def count_rows(split: Split) -> int | None:
    """Number of rows, None for a stream."""
    return None if isinstance(split, Stream) else len(split)


def count_eval_batches(split: Split, config: Config) -> int | None:
    """How many batches eval_batches has, None if a stream decides. Raises SettingError."""
    if isinstance(split, Stream):
        if jax.process_count() > 1 and not config.eval_batches:
            raise SettingError(
                "--eval-batches 0: a stream is evaluated, and only with a number of batches do all "
                "processes stop at the same one: give --eval-batches N"
            )
        return config.eval_batches or None
    every = -(-len(split) // config.batch_size)
    return min(config.eval_batches or every, every)


def describe(data: DataSet) -> dict[str, Any]:
    """What a resumed run must find again: fingerprint, rows of each split, number of outputs."""
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        "fingerprint": data.fingerprint,
        "rows": {name: count_rows(split) for name, split in splits.items()},
        "outputs": data.num_outputs,
    }


def summary(data: DataSet, total_steps: int, batch_size: int) -> list[str]:
    """What the start of the log says of the data."""
    lines, known = [], describe(data)["rows"]
    for name, rows in known.items():
        size = "a stream" if rows is None else f"{rows:,} rows"
        lines.append(f"{name:10}  {getattr(getattr(data, name), 'summary', size)}")
    if data.split_rule:
        lines.append(data.split_rule)
    if known["train"] is None:
        return lines
    steps_per_epoch, left_over = divmod(known["train"], batch_size)
    lines.append(
        f"{total_steps} steps are {total_steps / steps_per_epoch:.3g} epochs of {steps_per_epoch} "
        f"steps"
        + (f"; {left_over} rows are left over in each, others every time" if left_over else "")
    )
    return lines


def doubts_on_resume(split: Split, step: int) -> list[str]:
    """A line if training does not go on with the rows that it would have seen without a stop."""
    if not isinstance(split, Stream) or getattr(split, "resumes_exactly", False):
        return []
    return [
        f"the stream to train on does not promise to go on exactly (resumes_exactly): from step "
        f"{step} the run sees other rows than it would have without the stop, so the result is not "
        f"bit for bit the same"
    ]


def baseline(split: Split) -> dict[str, float]:
    """What scores of this split should be compared with, if it says: see data.py."""
    return getattr(split, "baseline", {})


def local_rows(batch_size: int) -> slice:
    """The contiguous part of a global batch that this process loads."""
    size = batch_size // jax.process_count()
    return slice(jax.process_index() * size, (jax.process_index() + 1) * size)


def part_size(config: Config) -> int:
    """Rows of a global batch that this process loads."""
    return config.batch_size // jax.process_count()


def place(batch: Batch, size: int, sharding: jax.sharding.Sharding, workers: int) -> dict:
    """Put this process's rows on its devices, as its part of global arrays of `size` rows."""
    if workers == 0 and len(sharding.device_set) == 1:
        return batch  # the compiled step takes it along faster than a transfer of its own

    def put(rows):
        return jax.make_array_from_process_local_data(sharding, rows, (size, *rows.shape[1:]))

    return jax.tree.map(put, batch)


def prefetch(make_batch: Callable, arguments: Iterable, workers: int) -> Generator:
    """Yield make_batch(argument) for each, in order, computed ahead by this many threads."""
    if workers == 0:
        yield from map(make_batch, arguments)
        return
    # NumPy and image decoders release the interpreter lock: threads do what worker processes would,
    # without their start-up time, their copies and their fork hazards.
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
