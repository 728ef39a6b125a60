"""The order of the training rows: a pure function of seed and step, in constant memory."""

import functools
import math

import numpy as np

BLOCK = 2**13  # rows whose order is computed at once, in about half a millisecond
ROUNDS = 12  # of the network: with 8 the orders of 6 rows are not equally frequent yet


def train_indices(step: int, rows: int, batch_size: int, seed: int) -> np.ndarray:
    """Rows int64 [batch_size] of the global batch that training consumes at this step.

    A pure function: a resumed run needs no position but the step, and the number of processes may
    change. An epoch has rows // batch_size batches, in an order of its own and without any row
    twice. The rows that are left over differ from epoch to epoch.
    """
    epoch, batch = divmod(step, rows // batch_size)
    # Many batches are computed at once, because calling NumPy costs more than the numbers do.
    size = batch_size * max(BLOCK // batch_size, 1)
    block, place = divmod(batch * batch_size, size)
    last = min((block + 1) * size, rows)
    return order(block * size, last, rows, seed, epoch)[place : place + batch_size]


@functools.lru_cache(maxsize=2)
def order(first: int, last: int, rows: int, seed: int, epoch: int) -> np.ndarray:
    """The rows int64 [last - first] at the places from first to last in the order of an epoch.

    Each place is permuted without the others, so an epoch of any size begins without a pause, and
    only the last two blocks are kept in memory.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(ROUNDS)
    found = permute(np.arange(first, last, dtype=np.uint64), rows, keys)
    while len(outside := np.flatnonzero(found >= rows)):
        found[outside] = permute(found[outside], rows, keys)
    return found.astype(np.int64)


def permute(places: np.ndarray, rows: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the places uint64 below a * b, which is `rows` or a little more.

    The generalised Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
    (CT-RSA 2002). A place is a pair of digits below a and b, and each round adds to one of them a
    random function of the other. order() permutes again what falls outside of the rows, which the
    authors call cycle walking. The random function, a key and two multiplications, mixes well and
    keeps no secret.
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
