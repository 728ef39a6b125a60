"""NaN and infinity: a bad update is skipped and counted, and too many of them end the run."""

import json
import re

import numpy as np
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    flags,
    read_state,
    steps_in,
    train,
    train_with,
)
from run_hooks import poison, poison_weights

pytestmark = pytest.mark.slow


def strict_result(workdir):
    """result.json, which must not have NaN in it."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads((workdir / "result.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_one_bad_batch_is_skipped_and_counted(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, ema_decay=0.9)
    text = server.start(train_with, {poison: [5, 6]}, *words, package=package).ends_with(0)
    assert "step 6: 1 of the last 2 updates were skipped" in text
    result = strict_result(tmp_path)
    assert (result["status"], result["step"], result["skipped_steps"]) == ("completed", 12, 1)
    assert all(np.isfinite(x) for x in result["eval"].values())


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_a_diverged_run_names_step_and_leaf_and_leaves_a_good_checkpoint(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path / "a", eval_every=0, max_skipped_steps=2)
    run = server.start(train_with, {poison: [5, 99]}, *words, package=package)
    text = run.ends_with(3)
    leaf = r"gradient is that of (\['\w+'\]|\[\d+\])+; last good checkpoint: [45]\n"
    assert re.search(leaf, text), text
    for word in ("from step 6 on", "more than 2 times in a row"):
        assert word in text, text
    assert "Traceback" not in text
    result = strict_result(tmp_path / "a")
    assert result["status"] == "diverged" and result["eval"] is None
    named = text.split("last good checkpoint: ")[1].split()[0]
    assert named == max(steps_in(tmp_path / "a"), key=int)
    straight = flags(server, package, workdir=tmp_path / "b", eval_every=0, stop_after_step=named)
    server.start(train, *straight, package=package).ends_with(75)
    good = server.start(read_state, tmp_path / "b", named, package=package).answer()
    found = server.start(read_state, tmp_path / "a", named, package=package).answer()
    assert {k: x for k, x in found.items() if k.startswith((".params", ".opt_state"))}.items() <= (
        good.items()
    )
    again = server.start(train, *words, package=package)
    assert "over, diverged" in again.ends_with(3)
    words = flags(server, package, workdir=tmp_path / "a", eval_every=0, max_skipped_steps=9)
    assert f"resumed at step {named}" in server.start(train, *words, package=package).ends_with(0)


@pytest.mark.parametrize("rate", ["1e4", "1e30"])
def test_a_learning_rate_that_is_far_too_high(server, tmp_path, rate):
    change = {"total_steps": 60, "optimizer__learning_rate": rate, "max_skipped_steps": 5}
    words = flags(server, TEXT, workdir=tmp_path, **change)
    run = server.start(train, *words, package=TEXT)
    code = run.wait()
    assert "Traceback" not in run.text, run.text
    result = strict_result(tmp_path)
    if code == 3:
        assert "diverged: " in run.text and "last good checkpoint: " in run.text
        assert result["status"] == "diverged"
    else:
        assert code == 0 and "over 10 times the first" in run.text, run.text
        assert result["status"] == "completed"


def test_a_finite_blow_up_warns(server, tmp_path):
    change = {"optimizer__name": "sgd", "optimizer__learning_rate": 30, "optimizer__clip_norm": 0}
    words = flags(server, IMAGES, workdir=tmp_path, **change, total_steps=40)
    run = server.start(train, *words, "--optimizer.warmup-steps", "0")
    assert run.wait() in (0, 3)  # it may become infinite after that
    assert ": loss " in run.text and "is over 10 times the first" in run.text, run.text


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_debug_nans_names_the_primitive(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, debug_nans=True)
    hooks = {poison_weights: [5, 99]}
    text = server.start(train_with, hooks, *words, package=package).ends_with(1)
    assert "FloatingPointError" in text and "encountered in" in text, text[-3000:]
    assert strict_result(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_float16_gets_over_an_overflow(server, tmp_path, package):
    hooks = {raise_loss_scale: None}
    words = flags(server, package, workdir=tmp_path / "a", precision="float16")
    text = server.start(train_with, hooks, *words, package=package).ends_with(0)
    result = strict_result(tmp_path / "a")
    assert 0 < result["skipped_steps"] < 12 and "updates were skipped" in text
    assert all(np.isfinite(x) for x in result["eval"].values())
    words[1:2] = []
    words = flags(server, package, workdir=tmp_path / "b", precision="float16", stop_after_step=3)
    server.start(train_with, hooks, *words, package=package).ends_with(75)
    words = flags(server, package, workdir=tmp_path / "b", precision="float16")
    server.start(train, *words, package=package).ends_with(0)
    a, b = (server.start(read_state, tmp_path / x, package=package) for x in "ab")
    assert a.answer() == b.answer()


def raise_loss_scale(get, _):
    """Start with a loss scale that overflows in float16."""
    module = get("train_state")
    create = module.create_train_state

    def raised(*args):
        state = create(*args)
        return state.replace(
            loss_scale=state.loss_scale.replace(factor=state.loss_scale.factor * 512)
        )

    module.create_train_state = raised
