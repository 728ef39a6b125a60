"""Checkpoints: which are kept and when, what they hold, and what a changed model makes of them."""

import os
import shutil
import signal

import numpy as np
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    changed,
    flags,
    kill,
    one_message,
    paused,
    read_state,
    result_of,
    snapshot,
    steps_in,
    train,
    train_with,
    try_settings,
)
from run_hooks import no_preemption_service, raise_before, save_synchronously, score_by_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_the_last_checkpoint_is_there_after_every_kind_of_end(server, tmp_path, package):
    run = server.start(train, *flags(server, package, workdir=tmp_path / "a"), package=package)
    run.ends_with(0)
    assert steps_in(tmp_path / "a")[0] == "10" and "12" in steps_in(tmp_path / "a")
    words = flags(server, package, workdir=tmp_path / "b", eval_every=0)
    text = server.start(train_with, {raise_before: 7}, *words, package=package).ends_with(1)
    assert "RuntimeError: boom" in text
    assert steps_in(tmp_path / "b") == ["6", "7"]  # what an exception would lose is saved
    assert result_of(tmp_path / "b")["status"] == "failed"
    change = {"eval_every": 1, "early_stopping_patience": 2, "checkpoint_every": 0}
    words = flags(server, package, workdir=tmp_path / "c", **change)
    server.start(train_with, {score_by_step: None}, *words, package=package).ends_with(0)
    result = result_of(tmp_path / "c")
    assert (result["status"], result["step"], result["best_step"]) == ("early_stopped", 3, 1)
    assert steps_in(tmp_path / "c") == ["1", "3"]


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_latest_and_best_are_kept_while_the_metric_gets_worse(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, eval_every=2, total_steps=40)
    hooks = {score_by_step: None, save_synchronously: None}
    run = paused(server, words, 11, hooks, package)
    kill(run)
    assert steps_in(tmp_path) == ["10", "2", "8"]
    run = paused(server, words, 15, hooks, package)
    assert "resumed at step 10" in run.text
    kill(run)
    assert steps_in(tmp_path) == ["12", "14", "2"]
    best = server.start(read_state, tmp_path, "best", package=package)
    second = server.start(read_state, tmp_path, "2", package=package)
    assert best.answer() == second.answer()


def test_a_saved_checkpoint_is_that_of_its_step_though_training_goes_on(server, tmp_path):
    """Saving is asynchronous and the state is donated to the next step."""
    straight = flags(server, IMAGES, workdir=tmp_path / "a", checkpoint_every=1, eval_every=0)
    server.start(train, *straight).ends_with(0)
    stopped = flags(server, IMAGES, workdir=tmp_path / "b", stop_after_step=11, eval_every=0)
    server.start(train, *stopped, "--checkpoint-every", "0").ends_with(75)
    a, b = (server.start(read_state, tmp_path / name, "11") for name in ("a", "b"))
    assert a.answer() == b.answer()


def rename_layer(get, _):
    """An edit of model.py: one parameter has another name."""
    train_state = get("train_state")
    create = train_state.pure_functions

    def renamed(*args):
        model = create(*args)
        swap = {"embedding_": "embedding", "head_": "head", "Dense_0_": "Dense_0"}

        def rename(params, names):
            return {names.get(name, name): value for name, value in params.items()}

        def init(key):
            variables = model.init(key)
            there = {old: new for new, old in swap.items() if old in variables["params"]}
            return variables | {"params": rename(variables["params"], there)}

        def apply(variables, *args, **kwargs):
            return model.apply(
                variables | {"params": rename(variables["params"], swap)}, *args, **kwargs
            )

        return model._replace(init=init, apply=apply)

    train_state.pure_functions = renamed


CHANGES = [
    ({"optimizer__name": "lion"}, {}, ["--optimizer.name", "adamw -> lion"]),
    ({"optimizer__clip_norm": 0}, {}, ["--optimizer.clip-norm", "1.0 -> 0.0"]),
    ({"ema_decay": 0.9}, {}, ["--ema-decay", "0.0 -> 0.9"]),
    ({}, {rename_layer: None}, ["_", "absent", "here", "there"]),
]


WIDER = {
    IMAGES: ({"model__features": 12}, ["--model.features", "[8] -> [12]"]),
    TEXT: ({"model__width": 32}, ["--model.width", "16 -> 32"]),
}


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_a_changed_model_or_optimizer_is_named_and_nothing_is_lost(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, stop_after_step=4)
    server.start(train, *words, package=package).ends_with(75)
    before = snapshot(tmp_path / "checkpoints") | {"result": result_of(tmp_path)}
    changed, named = WIDER[package]
    for change, hooks, message in [*CHANGES, (changed, {}, named)]:
        words = flags(server, package, workdir=tmp_path, **change)
        run = server.start(train_with, hooks, *words, package=package)
        one_message(run.ends_with(2), *message, "new --workdir", "--init-from")
    assert before == snapshot(tmp_path / "checkpoints") | {"result": result_of(tmp_path)}


def test_another_number_of_classes_is_named(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run", stop_after_step=2)
    server.start(train, *words).ends_with(75)
    with np.load(server.root / "images.npz") as file:
        np.savez(tmp_path / "b.npz", images=file["images"], labels=file["labels"] % 3)
    words = flags(server, IMAGES, workdir=tmp_path / "run", data__path=tmp_path / "b.npz")
    one_message(server.start(train, *words).ends_with(2), "data changed", "fingerprint")


def test_relative_and_odd_paths(server, tmp_path):
    (tmp_path / "sp ace" / "deep").mkdir(parents=True)
    cwd = tmp_path / "sp ace" / "deep"
    places = {
        "runs/x": cwd / "runs" / "x",
        "../ü b": tmp_path / "sp ace" / "ü b",
        "~/x y": server.root / "home" / "x y",
    }
    starts = []
    for name in places:
        words = flags(server, IMAGES, workdir=name, total_steps=4, checkpoint_every=0)
        starts += [[*words, "--stop-after-step", "2"], ["--workdir", name]]
    answers = server.start(try_settings, starts, cwd=cwd).answer()
    for place, first, second in zip(places.values(), answers[::2], answers[1::2], strict=True):
        assert first[0] == 75 and str(place) in first[1], first
        assert second[0] == 0 and "resumed at step 2" in second[1], second
        assert steps_in(place) == ["2", "4"]


def test_a_step_that_has_a_checkpoint_already(server, tmp_path):
    """The last step is saved once; a finished run is prolonged, or not touched."""
    server.start(train, *flags(server, IMAGES, workdir=tmp_path, total_steps=4)).ends_with(0)
    before = snapshot(tmp_path)
    text = server.start(train, "--workdir", tmp_path).ends_with(0)
    assert "over, completed at step 4" in text
    assert not changed(before, snapshot(tmp_path))
    text = server.start(train, "--workdir", tmp_path, "--total-steps", "8").ends_with(0)
    assert "changed --total-steps: 4 -> 8" in text
    assert steps_in(tmp_path) == sorted({"6", "8", str(result_of(tmp_path)["best_step"])})
    text = server.start(train, "--workdir", tmp_path, "--epochs", "2").ends_with(0)
    assert result_of(tmp_path)["step"] == 14 and "changed --total-steps: 8 -> 14" in text


def test_killed_while_a_checkpoint_is_replaced_by_a_better_informed_one(server, tmp_path):
    """A resumed run evaluates the step it stopped at, finds it best and saves it again."""
    words = flags(server, IMAGES, workdir=tmp_path, checkpoint_every=0)
    server.start(train, *words, "--stop-after-step", "4").ends_with(75)
    assert server.start(train_with, {die_in_save: None}, *words).wait() == -signal.SIGKILL
    assert "4" not in steps_in(tmp_path)
    assert "resumed at step 4" in server.start(train, *words).ends_with(0)
    assert all(name.isdigit() for name in steps_in(tmp_path))
    assert not (tmp_path / "replaced").exists()


def die_in_save(get, _):
    """kill -9 when Orbax is asked to save."""
    manager = get("runtime.checkpoint").ocp.CheckpointManager
    manager.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)


def test_looking_at_a_run_does_not_disturb_it(server, tmp_path):
    """Evaluation and --init-from leave alone a save that is under way."""
    words = flags(server, IMAGES, workdir=tmp_path / "run", total_steps=4)
    server.start(train, *words).ends_with(0)
    unfinished = tmp_path / "run" / "checkpoints" / "6.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "4", unfinished)
    before = snapshot(tmp_path / "run")
    server.start(read_state, tmp_path / "run", "best").answer()
    words = flags(server, IMAGES, workdir=tmp_path / "b", init_from=tmp_path / "run", total_steps=2)
    server.start(train, *words).ends_with(0)
    assert before == snapshot(tmp_path / "run")
    words = ["--workdir", tmp_path / "run", "--total-steps", "6"]
    server.start(train, *words).ends_with(0)
    assert all(name.isdigit() for name in steps_in(tmp_path / "run"))


def test_saving_without_the_preemption_service(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    server.start(train_with, {no_preemption_service: None}, *words).ends_with(0)
    assert "12" in steps_in(tmp_path)
