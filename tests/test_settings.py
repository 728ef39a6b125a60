"""Settings whose effect must last across a stop."""

import pytest
from children import IMAGES, flags, result_of, train, train_with
from run_hooks import score_by_step

pytestmark = pytest.mark.slow


def test_overfit_batches_repeats_the_first_ones_also_after_a_stop(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, overfit_batches=3, total_steps=12)
    first = server.start(train_noting_rows, *words, "--stop-after-step", "5").answer()
    second = server.start(train_noting_rows, *words).answer()
    rows = first + second
    assert len(rows) == 12 and len({str(r) for r in rows}) == 3
    assert all(rows[i] == rows[i % 3] for i in range(12))


def train_noting_rows(get, *words):
    batches, rows = get("batches"), []
    original = batches.train_indices

    def watched(*args):
        rows.append(original(*args).tolist())
        return original(*args)

    batches.train_indices = watched
    train(get, *words)
    return rows


def test_patience_counts_across_a_stop(server, tmp_path):
    change = {"eval_every": 1, "early_stopping_patience": 4}
    hooks = {score_by_step: None}
    words = flags(server, IMAGES, workdir=tmp_path, **change)
    server.start(train_with, hooks, *words, "--stop-after-step", "3").ends_with(75)
    server.start(train_with, hooks, *words).ends_with(0)
    result = result_of(tmp_path)
    assert (result["status"], result["step"], result["best_step"]) == ("early_stopped", 5, 1)
    assert "over, early_stopped" in server.start(train_with, hooks, *words).ends_with(0)
    words = ["--workdir", tmp_path, "--total-steps", "30"]
    server.start(train_with, hooks, *words).ends_with(0)
    assert result_of(tmp_path)["step"] > 5
