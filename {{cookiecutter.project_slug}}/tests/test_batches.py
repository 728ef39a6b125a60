"""The data order: a pure function of seed and step."""

import numpy as np


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
