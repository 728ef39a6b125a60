"""The data order: a pure function of seed and step."""

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
