"""The data order: a pure function of seed and step."""

import itertools
import math
import tracemalloc
import types

import jax
import numpy as np
import pytest


def indices(module, steps, rows=52, batch_size=16, seed=0):
    return [module("batches").train_indices(step, rows, batch_size, seed) for step in steps]


def test_every_row_comes_at_most_once_per_epoch(module):
    for epoch in range(3):
        rows = np.concatenate(indices(module, range(3 * epoch, 3 * epoch + 3)))
        assert len(np.unique(rows)) == 48
        assert set(rows) <= set(range(52))


def test_epochs_and_seeds_have_orders_of_their_own(module):
    first, second = indices(module, [0, 3])
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, indices(module, [0], seed=1)[0])


def test_rows_left_over_change_from_epoch_to_epoch(module):
    left = [
        set(range(52)) - set(np.concatenate(indices(module, range(3 * e, 3 * e + 3))))
        for e in range(4)
    ]
    assert len(set(map(frozenset, left))) > 1


def orders(module, rows, count):
    """The orders of `count` epochs of different seeds."""
    order = module("runtime.order").order.__wrapped__  # not kept
    return np.array([order(0, rows, rows, seed, seed % 5) for seed in range(count)])


def chi_square(counts):
    """How far from equal the counts are, in standard deviations of what chance would do."""
    expected = np.mean(counts)
    freedom = np.size(counts) - 1
    return (np.sum((counts - expected) ** 2) / expected - freedom) / np.sqrt(2 * freedom)


SIZES = [*range(1, 71), 97, 1009, 1293, 2**13 - 1, 2**13, 2**13 + 1, 65_537, 10**5]


@pytest.mark.parametrize("rows", SIZES)
def test_an_epoch_is_a_permutation_of_all_rows(module, rows):
    for batch_size in {1, 7, 32, rows}:
        if (batch_size == 1 and rows > 1000) or batch_size > rows:
            continue
        steps = rows // batch_size
        for epoch in range(2):
            found = indices(module, range(epoch * steps, (epoch + 1) * steps), rows, batch_size)
            found = np.concatenate(found)
            assert len(found) == len(np.unique(found)) == steps * batch_size
            assert 0 <= found.min() <= found.max() < rows


def test_the_batch_size_cuts_one_order_into_batches(module):
    order = np.concatenate(indices(module, range(20_000), 20_000, 1))
    for batch_size in (3, 32, 10_000, 20_000):
        count = 20_000 // batch_size
        cut = np.concatenate(indices(module, range(count), 20_000, batch_size))
        np.testing.assert_array_equal(cut, order[: count * batch_size])


def test_all_orders_of_a_few_rows_are_equally_frequent(module):
    for rows, count in ((2, 1000), (3, 1000), (4, 1000), (5, 2000), (6, 6000)):
        found = orders(module, rows, count)
        _, counts = np.unique(found, axis=0, return_counts=True)
        assert len(counts) == math.factorial(rows)
        assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("rows", [7, 16, 52, 64, 144, 1293])
def test_places_and_neighbours_are_as_of_a_random_order(module, rows):
    """In every order of a random one each row is as likely at each place, and after each other."""
    count = 2000
    found = orders(module, rows, count)
    for place in (0, 1, rows // 2, rows - 1):
        assert chi_square(np.bincount(found[:, place], minlength=rows)) < 6
    for one, other in ((0, 1), (0, rows // 2), (1, rows - 1), (rows - 2, rows - 1)):
        apart = (found[:, one] - found[:, other]) % rows
        assert chi_square(np.bincount(apart, minlength=rows)[1:]) < 6
    followed = np.sum(np.diff(found, axis=1) == 1, axis=1)  # Poisson, of a mean of nearly 1
    assert abs(followed.mean() - (rows - 1) / rows) < 6 / np.sqrt(count)
    quarter = rows // 4
    sums = found[:, :quarter].sum(axis=1)  # of the first batch, say
    variance = quarter * (rows - quarter) * (rows + 1) / 12
    assert abs(sums.mean() - quarter * (rows - 1) / 2) < 6 * np.sqrt(variance / count)
    assert sums.var() == pytest.approx(variance, rel=0.15)


def test_epochs_and_seeds_that_follow_each_other_are_independent(module):
    order = module("runtime.order").order
    for changed in (lambda i: (0, i), lambda i: (i, 0)):
        ranks = np.array([order(0, 1000, 1000, *changed(i)) for i in range(40)])
        correlation = np.corrcoef(ranks)[~np.eye(40, dtype=bool)]
        assert abs(correlation).max() < 5.5 / np.sqrt(1000)
        assert correlation.std() == pytest.approx(1 / np.sqrt(1000), rel=0.15)
        same = np.mean([np.sum(a == b) for a, b in itertools.pairwise(ranks)])
        assert abs(same - 1) < 6 / np.sqrt(39)


@pytest.mark.parametrize("rows", [10**9, 10**12, 2**62])
def test_no_number_of_rows_is_too_large(module, rows):
    found = np.array(indices(module, [0, 1, rows // 32 - 1, rows // 32, 10**6], rows, 32))
    assert found.shape == (5, 32) and found.dtype == np.int64
    assert found.min() >= 0 and found.max() < rows
    assert found.std() == pytest.approx(rows / np.sqrt(12), rel=0.2)
    assert len(np.unique(found)) == found.size


def test_no_more_is_computed_or_kept_for_more_rows(module):
    order = module("runtime.order").order
    sizes = []
    for rows in (10**5, 10**12):
        order.cache_clear()
        tracemalloc.start()
        indices(module, range(300), rows, 32)
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert order.cache_info().misses == 2  # blocks, of 8192 rows each
    assert max(sizes) < 2**20


def test_processes_load_disjoint_parts_of_one_global_batch(module, monkeypatch):
    batches = module("batches")
    parts = []
    for process in range(4):
        monkeypatch.setattr(batches.jax, "process_count", lambda: 4)
        monkeypatch.setattr(batches.jax, "process_index", lambda process=process: process)
        parts.append(np.arange(16)[batches.local_rows(16)])
    assert np.array_equal(np.concatenate(parts), np.arange(16))


class Numbers:
    """A split whose rows are their own numbers."""

    def __len__(self):
        return 100

    def rows(self, indices):
        return {"row": indices, "mask": np.ones(len(indices), np.float32)}


@pytest.mark.parametrize(("eval_batches", "count"), [(0, 100), (3, 24), (13, 100), (99, 100)])
def test_an_evaluation_sees_every_row_once_or_an_even_sample(module, eval_batches, count):
    data = types.SimpleNamespace(workers=0)
    config = types.SimpleNamespace(batch_size=8, eval_batches=eval_batches, data=data)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batches = list(module("batches").eval_batches(Numbers(), config, sharding))
    assert len(batches) == module("batches").count_eval_batches(Numbers(), config)
    rows = np.concatenate([batch["row"][batch["mask"] > 0] for batch in batches])
    assert len(rows) == len(np.unique(rows)) == count
    assert np.ptp(np.diff(rows)) <= 1 and rows[0] == 0 and rows[-1] >= 99 - 100 / count


def test_prefetched_batches_keep_their_order_and_errors_surface(module):
    def make(i):
        if i == 7:
            raise ValueError("row 7")
        return i

    stream = module("batches").prefetch(make, range(10), workers=3)
    got = []
    try:
        for item in stream:
            got.append(item)
    except ValueError as error:
        assert str(error) == "row 7"
    assert got == list(range(7))
