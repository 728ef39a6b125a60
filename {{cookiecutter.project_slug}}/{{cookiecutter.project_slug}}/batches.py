"""Batches: which rows, in which order, prepared ahead and placed on the devices."""

import functools
import math
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

Batch = dict[str, np.ndarray]


class Split(Protocol):
    """What training and evaluation ask of a split of the data."""

    def __len__(self) -> int:
        """Number of rows."""

    def rows(self, indices: np.ndarray) -> Batch:
        """The batch of these rows."""


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

    A Feistel network in mixed radix with cycle walking, by Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains" (CT-RSA 2002), sections 3 and 4: a place is a pair of digits below a
    and b, and each round adds to one of them a random function of the other. The function, a key
    and two multiplications, is for good mixing and not for secrecy.
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


def train_batches(split, config, sharding, start: int) -> Generator[dict]:
    """Global batches for the steps from start to the end of the run."""

    def make_batch(step):
        if config.overfit_batches:
            step %= config.overfit_batches
        indices = train_indices(step, len(split), config.batch_size, config.seed)
        rows = split.rows(indices[local_rows(len(indices))])
        return place(rows, len(indices), sharding, workers)

    workers = config.data.workers
    return prefetch(make_batch, range(start, config.total_steps), workers)


def eval_batches(split, config, sharding) -> Generator[dict]:
    """Every row of the split once, in order; the last batch is filled up with masked rows.

    With --eval-batches N it is N batches of rows, spread evenly over the split: always the same.
    """
    size, rows = config.batch_size, len(split)
    count = rows if not config.eval_batches else min(config.eval_batches * size, rows)

    def make_batch(start):
        places = np.arange(start, start + size)[local_rows(size)]
        batch = split.rows(np.minimum(places, count - 1) * rows // count)
        batch["mask"][places >= count] = 0
        return place(batch, size, sharding, workers)

    workers = config.data.workers
    return prefetch(make_batch, range(0, count, size), workers)


def example(split: Split) -> Batch:
    """A batch of one row, for the names, shapes and dtypes of what is in it."""
    return split.rows(np.zeros(1, np.int64))


def abstract(split: Split, batch_size: int, sharding: jax.sharding.Sharding) -> Any:
    """A global batch in abstract form: a shape, dtype and sharding in the place of each array."""

    def widen(rows):
        return jax.ShapeDtypeStruct((batch_size, *rows.shape[1:]), rows.dtype, sharding=sharding)

    return jax.tree.map(widen, example(split))


def describe(data: Any) -> dict[str, Any]:
    """What a resumed run must find again: fingerprint, rows of each split, number of outputs."""
    return {
        "fingerprint": data.fingerprint,
        "rows": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
        "outputs": data.num_outputs,
    }


def summary(data: Any, total_steps: int, batch_size: int) -> list[str]:
    """What the start of the log says of the data."""
    lines = []
    for name in ("train", "validation", "test"):
        split = getattr(data, name)
        lines.append(f"{name:10}  {getattr(split, 'summary', f'{len(split):,} rows')}")
    if data.split_rule:
        lines.append(data.split_rule)
    steps_per_epoch, left_over = divmod(len(data.train), batch_size)
    lines.append(
        f"{total_steps} steps are {total_steps / steps_per_epoch:.3g} epochs of {steps_per_epoch} "
        f"steps"
        + (f"; {left_over} rows are left over in each, others every time" if left_over else "")
    )
    return lines


def count_eval_batches(split, config) -> int:
    """How many batches eval_batches has."""
    every = -(-len(split) // config.batch_size)
    return min(config.eval_batches or every, every)


def baseline(split) -> dict[str, float]:
    """What scores of this split should be compared with, if it says: see data.py."""
    return getattr(split, "baseline", {})


def local_rows(batch_size: int) -> slice:
    """The contiguous part of a global batch that this process loads."""
    size = batch_size // jax.process_count()
    return slice(jax.process_index() * size, (jax.process_index() + 1) * size)


def place(batch: dict[str, np.ndarray], size: int, sharding, workers: int) -> dict:
    """Put this process's rows on its devices, as its part of global arrays of `size` rows."""
    if workers == 0 and len(sharding.device_set) == 1:
        return batch  # the compiled step takes it along faster than a transfer of its own

    def put(rows):
        return jax.make_array_from_process_local_data(sharding, rows, (size, *rows.shape[1:]))

    return jax.tree.map(put, batch)


def prefetch(make_batch, arguments: range, workers: int) -> Generator:
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
