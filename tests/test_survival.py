"""A run survives what is done to it here: full disks, damaged files, bad data, NaN, kill -9.

The functions under "What children do" run in children of children.py.
"""

import contextlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    before_step,
    changed,
    digests,
    flags,
    kill,
    one_message,
    paused,
    read_state,
    result_of,
    snapshot,
    steps_in,
    train,
    train_in_turn,
    train_with,
    try_settings,
)

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------- What children do


def limit_file_size(get, size):
    """No file may grow beyond this: a write then fails as it does on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def fill_disk_before(get, arguments):
    """Fill the disk of this directory to the last byte."""
    step, directory = arguments
    before_step(get, step, lambda: fill(directory))


def fill(directory):
    with open(Path(directory) / "ballast", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def score_by_step(get, _):
    """Evaluations get worse and worse: the first one is the best."""
    evaluate, task = get("train"), get("task")
    original = evaluate.evaluate

    def worse(score_batch, state, *rest):
        sign = 1 if task.HIGHER_IS_BETTER else -1
        return original(score_batch, state, *rest) | {task.BEST_METRIC: -sign * float(state.step)}

    evaluate.evaluate = worse


def poison(get, steps, pixels=True):
    """Give these steps a batch whose loss is not finite."""
    batches = get("batches")
    place, current = batches.place, {}
    original = batches.train_indices

    def watched(step, *args):
        current["bad"] = step in range(*steps)
        return original(step, *args)

    def poisoned(batch, *args):
        if current.pop("bad", False):
            batch["mask"][0] = np.inf
            if pixels and "image" in batch:
                batch["image"] = np.full_like(batch["image"], np.nan)
        return place(batch, *args)

    batches.train_indices, batches.place = watched, poisoned


def poison_weights(get, steps):
    """The same by the weights of the rows only, so that the NaN is first made by the step."""
    poison(get, steps, pixels=False)


def rename_layer(get, _):
    """An edit of model.py: one parameter has another name."""
    train_state = get("train_state")
    create = train_state.create_model

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

    train_state.create_model = renamed


def damage(file, kind):
    if kind == "delete":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if kind == "truncate":
        content = content[: len(content) // 2]
    elif kind == "empty":
        content = b""
    elif content:
        content[len(content) // 2] ^= 4
    file.write_bytes(content)


def damage_in_turn(get, workdir, kinds):
    """Damage each file of the newest checkpoint in each way; say what is then restored."""
    import jax

    workdir = Path(workdir)
    config, log = (
        get("runtime.command_line").saved_config(workdir),
        logging.getLogger(get("train").__package__),
    )
    get("runtime.logs").start_logging(quiet=True)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    dataset = get("data").load(config)
    grid = get("mesh").create_mesh(config.mesh, config.batch_size, 1)
    _, abstract = get("train_state").plan_train_state(config, dataset, grid)

    def restore(path):
        said.clear()
        try:
            with contextlib.closing(get("runtime.checkpoint").Checkpoints(path)) as checkpoints:
                state, progress = checkpoints.restore_latest(abstract)
            return int(state.step), digests(jax, state), vars(progress), list(said)
        except BaseException as error:
            return type(error).__name__, str(error)[:300], None, list(said)

    steps = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    newest = workdir / "checkpoints" / str(steps[-1])
    whole, copy = restore(workdir), workdir.parent / "copy"
    shutil.copytree(workdir, copy)
    shutil.rmtree(copy / "checkpoints" / newest.name)
    older, answers = restore(copy), {}
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        for kind in kinds:
            name, content = file.relative_to(workdir), file.read_bytes()
            damage(file, kind)
            got = restore(workdir)
            for moved in workdir.glob("damaged/*"):
                moved.rename(newest)
            file.write_bytes(content)
            if got[:3] == whole[:3]:
                outcome = "same" if not got[3] else f"same, but said {got[3]}"
            elif got[:3] == older[:3]:
                outcome = "older" if len(got[3]) == 1 else f"older, but said {got[3]}"
            else:
                outcome = f"{got[0]} {got[1]}"[:400]
            answers[f"{name}: {kind}"] = outcome
    return {"steps": steps, "whole": whole[0], "older": older[0], "answers": answers}


def count_live_arrays(get, *words):
    """Train and count the live arrays before every 50th step."""
    import gc

    import jax

    counts, train_module = [], get("train")
    original = train_module.compile_train_step

    def compile_watched(*args):
        step, *rest = original(*args)
        calls = iter(range(10**9))

        def watched(*arguments):
            if next(calls) % 50 == 0:
                gc.collect()
                counts.append(len(jax.live_arrays()))
            return step(*arguments)

        return watched, *rest

    train_module.compile_train_step = compile_watched
    get("train").main(get("runtime.command_line").parse_settings(list(words)))
    return counts


# ------------------------------------------------------------------------------------- Checkpoints


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_the_last_checkpoint_is_there_after_every_kind_of_end(server, tmp_path, package):
    run = server.start(train, *flags(server, package, workdir=tmp_path / "a"), package=package)
    run.ends_with(0)
    assert steps_in(tmp_path / "a")[0] == "10" and "12" in steps_in(tmp_path / "a")
    words = flags(server, package, workdir=tmp_path / "b", eval_every=0)
    text = server.start(train_with, {"raise_before": 7}, *words, package=package).ends_with(1)
    assert "RuntimeError: boom" in text
    assert steps_in(tmp_path / "b") == ["6", "7"]  # what an exception would lose is saved
    assert result_of(tmp_path / "b")["status"] == "failed"
    change = {"eval_every": 1, "early_stopping_patience": 2, "checkpoint_every": 0}
    words = flags(server, package, workdir=tmp_path / "c", **change)
    server.start(train_with, {"score_by_step": None}, *words, package=package).ends_with(0)
    result = result_of(tmp_path / "c")
    assert (result["status"], result["step"], result["best_step"]) == ("early_stopped", 3, 1)
    assert steps_in(tmp_path / "c") == ["1", "3"]


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_latest_and_best_are_kept_while_the_metric_gets_worse(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, eval_every=2, total_steps=40)
    hooks = {"score_by_step": None, "save_synchronously": None}
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


CHANGES = [
    ({"optimizer__name": "lion"}, {}, ["--optimizer.name", "adamw -> lion"]),
    ({"optimizer__clip_norm": 0}, {}, ["--optimizer.clip-norm", "1.0 -> 0.0"]),
    ({"ema_decay": 0.9}, {}, ["--ema-decay", "0.0 -> 0.9"]),
    ({}, {"rename_layer": None}, ["_", "absent", "here", "there"]),
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
    for name, place in places.items():
        words = flags(server, IMAGES, workdir=name, total_steps=4)
        run = server.start(train, *words, "--stop-after-step", "2", cwd=cwd)
        assert str(place) in run.ends_with(75)
        run = server.start(train, "--workdir", name, cwd=cwd)
        assert "resumed at step 2" in run.ends_with(0)
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
    assert server.start(train_with, {"die_in_save": None}, *words).wait() == -signal.SIGKILL
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
    server.start(train_with, {"no_preemption_service": None}, *words).ends_with(0)
    assert "12" in steps_in(tmp_path)


def no_preemption_service(get, _):
    import jax

    jax.config.update("jax_enable_preemption_service", False)


# --------------------------------------------------------------------------------- Damaged files


@pytest.mark.parametrize(
    ("package", "kinds"),
    [(IMAGES, ["truncate", "empty", "delete", "flip"]), (TEXT_NNX, ["flip"])],
)
def test_every_damage_to_the_newest_checkpoint_is_noticed(server, tmp_path, package, kinds):
    words = flags(server, package, workdir=tmp_path / "run")
    server.start(train, *words, package=package).ends_with(0)
    run = server.start(damage_in_turn, tmp_path / "run", kinds, package=package)
    answer = run.answer()
    assert (answer["whole"], answer["older"]) == (12, 10)
    outcomes = answer["answers"]
    assert len(outcomes) > 15 * len(kinds)
    assert {name: x for name, x in outcomes.items() if x not in ("same", "older")} == {}
    assert sum(x == "older" for x in outcomes.values()) > len(outcomes) / 4
    assert "Traceback" not in run.text, run.text[:3000]


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_a_run_goes_on_from_the_older_checkpoint(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path / "a")
    straight = server.start(train, *words, package=package)
    words = flags(server, package, workdir=tmp_path / "b")
    server.start(train, *words, "--stop-after-step", "8", package=package).ends_with(75)
    straight.ends_with(0)
    largest = max((tmp_path / "b/checkpoints/8").rglob("*"), key=lambda p: p.stat().st_size)
    damage(largest, "truncate")
    text = server.start(train, *words, package=package).ends_with(0)
    assert text.count("checkpoint 8 is damaged") == 1 and "Traceback" not in text
    assert "resumed at step 6" in text and (tmp_path / "b/damaged").is_dir()
    assert "checkpoint 8 is damaged" in (tmp_path / "b/train.log").read_text()
    a, b = (server.start(read_state, tmp_path / x, package=package) for x in "ab")
    assert a.answer() == b.answer()
    assert result_of(tmp_path / "a")["eval"] == result_of(tmp_path / "b")["eval"]


def test_a_run_with_damaged_checkpoints_only_does_not_start_all_over(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, stop_after_step=8)
    server.start(train, *words).ends_with(75)
    for file in (tmp_path / "checkpoints").rglob("*"):
        if file.is_file():
            damage(file, "truncate")
    before = snapshot(tmp_path)
    for _ in range(2):
        text = server.start(train, "--workdir", tmp_path).ends_with(2)
        one_message(text, "checkpoint 8 is", "checkpoint 6 is", "--workdir")
        assert not changed(before, snapshot(tmp_path))


def test_a_lost_result_or_config(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run", total_steps=4)
    server.start(train, *words).ends_with(0)
    expected = result_of(tmp_path / "run")
    for content in ("", '{"status": "comple', "[]", "null", None):
        for name in ("result.json", "config.json"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(tmp_path / "run", copy)
            if content is None:
                (copy / name).unlink()
            else:
                (copy / name).write_text(content)
            before = snapshot(copy)
            run = server.start(train, "--workdir", copy)
            if name == "result.json":
                text = run.ends_with(0)
                assert "resumed at step 4" in text and "Traceback" not in text
                assert result_of(copy)["eval"] == expected["eval"]
            else:
                one_message(run.ends_with(2), "config.json", "--init-from", "--workdir")
                assert before == snapshot(copy)


def test_a_config_of_something_else_is_not_overwritten(server, tmp_path):
    (tmp_path / "config.json").write_text('{"name": "something else"}')
    run = server.start(train, *flags(server, IMAGES, workdir=tmp_path))
    one_message(run.ends_with(2), "config.json")
    assert (tmp_path / "config.json").read_text() == '{"name": "something else"}'


# ---------------------------------------------------------------------------------------- Full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def nothing_half_written(workdir):
    """What is there can be read."""
    for name in ("config.json", "result.json"):
        if (workdir / name).exists():
            json.loads((workdir / name).read_text(encoding="utf-8"))
    assert not list(workdir.glob("*.tmp"))


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_a_disk_that_fills_up_ends_the_run_at_the_next_checkpoint(server, small_disk, package):
    """Until then the log and TensorBoard lose lines, without a hang and without noise."""
    workdir = small_disk / "run"
    words = flags(server, package, workdir=workdir, log_every=1, eval_every=0, checkpoint_every=30)
    words += ["--total-steps", "40"]
    server.start(train, *words, "--stop-after-step", "4", package=package).ends_with(75)
    before = snapshot(workdir / "checkpoints")
    run = server.start(
        train_with, {"fill_disk_before": [6, str(small_disk)]}, *words, package=package
    )
    text = run.ends_with(1)
    assert "SaveFailed" in text and "could not be written" in text, text
    assert "No space left on device" in text.split("SaveFailed: ")[1], text
    assert "Logging error" not in text and text.count("gets no more") == 2, text
    assert text.count("Traceback") <= 3, text  # of the checkpoint, and of result.json
    assert snapshot(workdir / "checkpoints").items() >= before.items()
    nothing_half_written(workdir)
    (small_disk / "ballast").unlink()
    text = server.start(train, *words, package=package).ends_with(0)
    assert "resumed at step 4" in text
    assert steps_in(workdir) == ["30", "40"]


def test_a_write_that_fails_ends_the_run_at_the_next_checkpoint(server, tmp_path):
    words = flags(server, TEXT, workdir=tmp_path, eval_every=0, checkpoint_every=4)
    server.start(train, *words, "--stop-after-step", "4", package=TEXT).ends_with(75)
    before = snapshot(tmp_path / "checkpoints")
    hooks = {"limit_file_size_before": [6, 12000]}  # more than what is printed
    text = server.start(train_with, hooks, *words, package=TEXT).ends_with(1)
    assert "could not be written" in text and "arge" in text, text
    assert "Logging error" not in text
    assert snapshot(tmp_path / "checkpoints").items() >= before.items()
    nothing_half_written(tmp_path)
    text = server.start(train, *words, package=TEXT).ends_with(0)
    assert "resumed at step 4" in text
    assert steps_in(tmp_path) == ["12", "8"]


def test_a_disk_that_is_full_from_the_start(server, small_disk):
    words = flags(server, IMAGES, workdir=small_disk / "old", total_steps=4)
    server.start(train, *words).ends_with(0)
    fill(small_disk)
    before = snapshot(small_disk / "old")
    log = before.pop(small_disk / "old" / "train.log")
    text = server.start(train, "--workdir", small_disk / "old", "--total-steps", "8").wait()
    assert text in (1, 2)
    after = snapshot(small_disk / "old")
    assert after.pop(small_disk / "old" / "train.log").startswith(log)
    assert after == before
    run = server.start(train, *flags(server, IMAGES, workdir=small_disk / "new"))
    assert run.wait() in (1, 2)
    assert "No space left on device" in run.text and "Logging error" not in run.text, run.text
    nothing_half_written(small_disk / "new")
    (small_disk / "ballast").unlink()
    server.start(train, *flags(server, IMAGES, workdir=small_disk / "new")).ends_with(0)


def limit_file_size_before(get, arguments):
    step, size = arguments
    before_step(get, step, lambda: limit_file_size(get, size))


# -------------------------------------------------------------------------------------- TensorBoard


class Board:
    """TensorBoard's own server on a directory of runs."""

    def __init__(self, logdir, *options):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
        command += ["--host", "localhost", "--port", str(port), "--reload_interval", "1", *options]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.url = f"http://localhost:{port}/data/plugin/scalars/"
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def get(self, page, **query):
        with urllib.request.urlopen(f"{self.url}{page}?{urllib.parse.urlencode(query)}") as reply:
            return json.load(reply)

    def steps(self, run):
        """The steps of each tag of a run, in the order in which TensorBoard has them."""
        run = f"{run}/tb"
        tags = self.get("tags").get(run, {})
        return {tag: [p[1] for p in self.get("scalars", run=run, tag=tag)] for tag in tags}

    def shows(self, run, accept, timeout):
        """Wait until the steps of a run are accepted."""
        deadline, found = time.monotonic() + timeout, None
        while time.monotonic() < deadline:
            try:
                found = self.steps(run)
                if accept(found):
                    return
            except OSError as error:  # it is still starting
                found = error
            time.sleep(0.1)
        pytest.fail(f"after {timeout} s TensorBoard has {found}")

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    """The directory of runs, and TensorBoard with its fast and its old way of reading it."""
    logdir = tmp_path_factory.mktemp("boards")
    boards = [Board(logdir), Board(logdir, "--load_fast=false")]
    for board in boards:
        board.shows("nothing", lambda found: found == {}, 120)
    yield logdir, boards
    for board in boards:
        board.stop()


def complete(last):
    """Exactly one value of every step that is due, in order."""

    def accept(found):
        assert {"train/loss", "train/learning_rate", "eval/loss"} <= set(found) or not found
        due = {"train": list(range(1, last + 1)), "eval": list(range(4, last + 1, 4))}
        return found and all(
            steps == due.get(tag.split("/")[0], sorted(set(steps))) for tag, steps in found.items()
        )

    return accept


def every_step(server, package, logdir, name, **changes):
    return flags(server, package, workdir=logdir / name, log_every=1, checkpoint_every=4, **changes)


def test_curves_are_seen_while_the_run_goes_on_and_after_kill_9(server, boards):
    logdir, boards = boards
    words = every_step(server, IMAGES, logdir, "killed")
    run = paused(server, words, 7)
    for board in boards:
        board.shows("killed", lambda found: found.get("train/loss") == [1, 2, 3, 4, 5, 6], 10)
    kill(run)
    assert "resumed at step 4" in server.start(train, *words).ends_with(0)
    for board in boards:
        board.shows("killed", complete(12), 20)


def test_curves_after_an_exception(server, boards):
    logdir, boards = boards
    words = every_step(server, TEXT, logdir, "raised")
    server.start(train_with, {"raise_before": 7}, *words, package=TEXT).ends_with(1)
    for board in boards:
        board.shows("raised", lambda found: found.get("train/loss", [])[:5] == [1, 2, 3, 4, 5], 10)
    server.start(train, *words, package=TEXT).ends_with(0)
    for board in boards:
        board.shows("raised", complete(12), 20)


def test_curves_after_sigterm(server, boards):
    logdir, boards = boards
    words = every_step(server, IMAGES_NNX, logdir, "stopped")
    run = paused(server, words, 7, package=IMAGES_NNX)
    os.kill(run.pid, signal.SIGTERM)
    run.ends_with(75)
    for board in boards:
        board.shows("stopped", lambda found: found.get("train/loss") == list(range(1, 9)), 10)
    server.start(train, *words, package=IMAGES_NNX).ends_with(0)
    for board in boards:
        board.shows("stopped", complete(12), 20)


def test_curves_of_a_finished_run_that_is_prolonged(server, boards):
    logdir, boards = boards
    words = every_step(server, TEXT_NNX, logdir, "longer")
    server.start(train, *words, package=TEXT_NNX).ends_with(0)
    (logdir / "longer" / "result.json").unlink()  # the test is made again
    server.start(train, *words, package=TEXT_NNX).ends_with(0)
    words = ["--workdir", logdir / "longer", "--total-steps", "16"]
    server.start(train, *words, package=TEXT_NNX).ends_with(0)
    for board in boards:
        board.shows("longer", complete(16), 20)


# --------------------------------------------------------------------------------------------- Data


def image_cases(folder):
    """Data that cannot be trained on: {name: (file, words of the message)}."""
    draw = np.random.default_rng(0)
    images, labels = draw.uniform(0, 1, (160, 8, 8, 1)), np.arange(160) % 4
    cases = {}

    def add(name, *words, images=images, labels=labels, **others):
        np.savez(folder / f"{name}.npz", images=images, labels=labels, **others)
        cases[name] = (folder / f"{name}.npz", words)

    def label(value, dtype=np.int64):
        changed = labels.astype(dtype)
        changed[7] = value
        return changed

    def pixel(value):
        changed = images.copy()
        changed[7, 3, 3, 0] = value
        return changed

    gap = ("without gaps", "[4")
    add("label 10", "10", *gap, labels=label(10))
    add("label -1", "from -1", "without gaps", labels=label(-1))
    add("label 255", "255", *gap, labels=label(255, np.uint8))
    add("label 2e9", "2000000000", *gap, labels=label(2_000_000_000))
    add("label beyond int32", "4294967297", *gap, labels=label(2**32 + 1))
    add("labels from 1", "[0]", "0 to 3 without gaps", "np.unique", labels=labels + 1)
    add("one class", "two classes", labels=labels * 0)
    soft, several = np.eye(4)[labels] * 0.8 + 0.05, np.eye(4)[labels] + np.eye(4)[0]
    add("labels soft", "(160, 4)", "not one-hot", "argmax", labels=soft)
    add("labels several", "(160, 4)", "row 0 is [2.0", "column", labels=several)
    add("labels in pairs", "(80, 2)", "one label for each", labels=labels.reshape(80, 2))
    add("labels half", "row 1 is 0.5", "whole number", "np.unique", labels=labels / 2)
    add("labels NaN", "row 7 is nan", "isfinite", labels=label(np.nan, float))
    add("labels text", "<U", "whole numbers", "np.unique", labels=labels.astype(str))
    add("labels objects", "`labels`", "object", "tolist", labels=labels.astype(object))
    add("labels missing", "(159,)", "one label for each", labels=labels[1:])
    add("NaN", "number 7", "not finite", "remove", images=pixel(np.nan))
    add("infinite", "number 7", "not finite", images=pixel(np.inf))
    add("beyond float32", "number 7", "not finite", images=pixel(1e300))
    add("0 to 255", "to 255", "0 to 1", images=pixel(255.0))
    add("negative", "-1", "0 to 1", images=pixel(-1))
    add("channels first", "(160, 3, 8, 8)", "moveaxis", images=np.ones((160, 3, 8, 8)))
    add("constant", "every value", "is 1", images=np.ones((160, 8, 8)))
    add("flat", "(160, 64)", "height", images=images.reshape(160, 64))
    add("five dimensions", "(1, 160, 8, 8, 1)", "height", images=images[None])
    add("no dimension", "()", "height", images=np.float32(1))
    add("no width", "(160, 8, 0, 1)", "height", images=images[:, :, :0])
    add("integers", "int64", "255", "uint8", images=(images * 255).astype(int))
    add("bool", "bool", "astype(np.uint8) * 255", images=images > 0.5)
    add("complex", "complex128", "uint8", images=images * 1j)
    add("text", "<U3", "uint8", images=np.full((160, 8, 8, 1), "0.5"))
    add("objects", "`images`", "object", "tolist", images=images.astype(object))
    add("groups missing", "(159,)", "160 images", groups=np.arange(159))
    add("two groups", "2 units", "no row is left", groups=np.arange(160) % 2)
    add("one row a class", "no row is left", "classes 0, 1, ", labels=np.arange(160))
    add("one image", "no row is left", "1 units", images=np.repeat(images[:1], 160, axis=0))
    add("no rows", "0 rows", "at least", images=images[:0], labels=labels[:0])
    add("few rows", "9 rows", "at least", images=images[:9], labels=labels[:9])
    add(
        "fewer than a batch",
        "--batch-size 16",
        "at most 14",
        images=images[:20],
        labels=labels[:20],
    )
    whole = (folder / "NaN.npz").read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 1
    contents = {
        "cut": whole[: len(whole) // 2],
        "flipped": broken,
        "empty": b"",
        "words": b"a,b\n1,2",
    }
    at = whole.index(b"160")
    contents["longer header"] = whole[:at] + b"960" + whole[at + 3 :]
    contents["pickle"] = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtin\x94."
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        cases[name] = (folder / name, ["--data.path", ".npz", "images", "labels"])
    np.save(folder / "one.npy", images)
    np.savez(folder / "other.npz", x_train=images, y_train=labels)
    with zipfile.ZipFile(folder / "photos.zip", "w") as file:
        file.writestr("a.jpg", b"no array")
    os.mkfifo(folder / "pipe")
    (folder / "directory").mkdir()
    for name in ("one.npy", "other.npz", "directory", "photos.zip", "pipe"):
        cases[name] = (folder / name, ["--data.path", ".npz", "images", "labels"])
    cases["other.npz"][1].extend(["`x_train` float64 [160, 8, 8, 1]", "file['y_train']"])
    cases["absent.npz"] = (folder / "absent.npz", ["--data.path", "no such file"])
    below = folder / "one.npy" / "my.npz"
    cases["below a file"] = (below, ["--data.path", "Not a directory"])
    return cases


def text_cases(folder):
    cases = {}
    contents = {
        "binary": (b"words\0" * 900, ["zero", "not text", "--data.path"]),
        "utf-16": (("words " * 900).encode("utf-16"), ["UTF-16", "iconv"]),
        "utf-16 without mark": (("words " * 900).encode("utf-16le"), ["zero", "not text"]),
        "utf-32": (("words " * 900).encode("utf-32"), ["UTF-32", "iconv"]),
        "empty": (b"", ["--data.path", "not empty"]),
        "tiny": (b"word", ["4 bytes", "too little"]),
        "fewer than a batch": (b"words " * 20, ["--batch-size 16", "at most 7"]),
    }
    for name, (content, words) in contents.items():
        (folder / name).write_bytes(content)
        cases[name] = (folder / name, words)
    (folder / "nothing in it" / "inner").mkdir(parents=True)
    (folder / "binary in it").mkdir()
    (folder / "binary in it" / "a.txt").write_bytes(b"words " * 900)
    (folder / "binary in it" / "b.bin").write_bytes(b"\0" * 900)
    (folder / "the same").mkdir()
    for i in range(30):
        (folder / "the same" / f"{i}.txt").write_bytes(b"words " * 900)
    cases["the same"] = (folder / "the same", ["30 files", "1 different"])
    cases["directories"] = (folder / "binary i*", ["directories only", "/**/*"])
    os.mkfifo(folder / "pipe")
    for name in ("absent", "nothing in it", "*.none", "pipe"):
        cases[name] = (folder / name, ["--data.path", "text file", "glob"])
    cases["binary in it"] = (folder / "binary in it", ["b.bin", "not text", "glob"])
    return cases


@pytest.mark.parametrize(("package", "make_cases"), [(IMAGES, image_cases), (TEXT, text_cases)])
def test_bad_data_is_refused_before_anything_happens(server, tmp_path, package, make_cases):
    words = flags(server, package, workdir=tmp_path / "run", total_steps=4, stop_after_step=2)
    server.start(train, *words, package=package).ends_with(75)
    (tmp_path / "data").mkdir()
    cases = make_cases(tmp_path / "data")
    before = snapshot(tmp_path / "run")
    attempts = [
        flags(server, package, workdir=tmp_path / place, data__path=path)
        for path, _ in cases.values()
        for place in ("run", "new")
    ]
    answers = server.start(try_settings, attempts, package=package).answer()
    wrong = []
    for (name, (_, expected)), *two in zip(cases.items(), answers[::2], answers[1::2], strict=True):
        for code, text, compiled in two:
            fine = code == 2 and text.count("error:") == 1 and "Traceback" not in text
            if not fine or compiled or [word for word in expected if word not in text]:
                wrong.append(f"{name}: {code}, {compiled} compiled, {text[-600:]}")
    assert not wrong, "\n".join(wrong)
    assert before == snapshot(tmp_path / "run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_files_that_may_not_be_read(server, tmp_path, package):
    data = tmp_path / "data"
    shutil.copy(server.root / ("images.npz" if "image" in package else "text.txt"), data)
    data.chmod(0)
    hooks = {"become_nobody": None}
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        words = flags(server, package, workdir=Path(place, "new"), data__path=data)
        text = server.start(train_with, hooks, *words, package=package).ends_with(2)
        assert not Path(place, "new").exists()
    one_message(text, f"--data.path {data}", "ermission denied", "read it")
    assert "npz" not in text


def test_a_place_that_may_not_be_written(server, tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    place.chmod(0o555)
    words = flags(server, IMAGES, workdir=place, data__source=None, data__path=None)
    hooks = {"become_nobody_with_data": None}
    text = server.start(train_with, hooks, *words).ends_with(2)
    one_message(text, "--workdir", "ermission denied")


def become_nobody(get, _):
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)


def become_nobody_with_data(get, _):
    load = get("data").load

    def load_first(config):
        dataset = load(config)
        become_nobody(get, None)
        return dataset

    get("data").load = load_first


# --------------------------------------------------------------------------------------- Not finite


def strict_result(workdir):
    """result.json, which must not have NaN in it."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads((workdir / "result.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_one_bad_batch_is_skipped_and_counted(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, ema_decay=0.9)
    text = server.start(train_with, {"poison": [5, 6]}, *words, package=package).ends_with(0)
    assert "step 6: 1 of the last 2 updates were skipped" in text
    result = strict_result(tmp_path)
    assert (result["status"], result["step"], result["skipped_steps"]) == ("completed", 12, 1)
    assert all(np.isfinite(x) for x in result["eval"].values())


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_a_diverged_run_names_step_and_leaf_and_leaves_a_good_checkpoint(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path / "a", eval_every=0, max_skipped_steps=2)
    run = server.start(train_with, {"poison": [5, 99]}, *words, package=package)
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
    hooks = {"poison_weights": [5, 99]}
    text = server.start(train_with, hooks, *words, package=package).ends_with(1)
    assert "FloatingPointError" in text and "encountered in" in text, text[-3000:]
    assert strict_result(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_float16_gets_over_an_overflow(server, tmp_path, package):
    hooks = {"raise_loss_scale": None}
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


# -------------------------------------------------------------------------------------------- Speed


def test_a_run_that_waits_for_its_data_says_so_once(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=24)
    text = server.start(train_with, {"slow_data": None}, *words).ends_with(0)
    assert text.count("--data.workers") == 1
    assert result_of(tmp_path)["input_wait_fraction"] > 0.2


def slow_data(get, _):
    batches = get("batches")
    indices = batches.train_indices

    def slowly(*args):
        time.sleep(0.1)
        return indices(*args)

    batches.train_indices = slowly


def test_the_second_run_compiles_nothing(server, tmp_path):
    found = []
    for name in ("one", "two"):
        words = flags(server, IMAGES, workdir=tmp_path / name)
        server.start(train_with, {"use_cache": str(tmp_path / "cache")}, *words).ends_with(0)
        found.append({x.name for x in (tmp_path / "cache").iterdir() if x.name.endswith("-cache")})
    assert found[0] and found[0] == found[1]


def use_cache(get, directory):
    import jax

    jax.config.update("jax_compilation_cache_dir", directory)


# ----------------------------------------------------------------------------------------- Settings


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
    hooks = {"score_by_step": None}
    words = flags(server, IMAGES, workdir=tmp_path, **change)
    server.start(train_with, hooks, *words, "--stop-after-step", "3").ends_with(75)
    server.start(train_with, hooks, *words).ends_with(0)
    result = result_of(tmp_path)
    assert (result["status"], result["step"], result["best_step"]) == ("early_stopped", 5, 1)
    assert "over, early_stopped" in server.start(train_with, hooks, *words).ends_with(0)
    words = ["--workdir", tmp_path, "--total-steps", "30"]
    server.start(train_with, hooks, *words).ends_with(0)
    assert result_of(tmp_path)["step"] > 5


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_parameters_of_another_run(server, tmp_path, package):
    def start(name, source, **change):
        words = flags(
            server, package, workdir=tmp_path / name, init_from=source, eval_every=0, **change
        )
        hooks = {"raise_before": 0}
        return server.start(train_with, hooks, *words, package=package)

    words = flags(server, package, workdir=tmp_path / "a", precision="bfloat16", ema_decay=0.9)
    run = server.start(train_with, {"use_devices": 2}, *words, package=package)
    run.ends_with(0)
    best = result_of(tmp_path / "a")["best_step"]
    runs = {
        "run": start("b", tmp_path / "a"),
        "checkpoint": start("c", tmp_path / "a" / "checkpoints" / "12", precision="float16"),
    }
    for kind, run in runs.items():
        text = run.ends_with(1)
        step = best if kind == "run" else 12
        assert f"parameters come from {tmp_path / 'a'}, step {step}" in text
        assert "boom" in text and "left out" not in text and "keep their new" not in text
    other, width = (TEXT, {}) if "image" in package else (IMAGES, {})
    text = server.start(
        train,
        *flags(server, other, workdir=tmp_path / "d", init_from=tmp_path / "a"),
        package=other,
    ).ends_with(2)
    one_message(text, "--init-from", "no parameter has the name and shape")
    assert not (tmp_path / "d" / "config.json").exists()
    width = {"model__features": 12} if "image" in package else {"model__depth": 2}
    text = start("e", tmp_path / "a", **width).ends_with(1)
    assert "keep their new values" in text and "parameters come from" in text
    assert ("left out" in text) == ("image" in package)
    (tmp_path / "f").mkdir()
    for source in (tmp_path / "f", tmp_path / "none", tmp_path / "a" / "checkpoints" / "3"):
        one_message(start("g", source).ends_with(2), "--init-from", str(source))


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_the_parameters_taken_are_those_that_were_saved(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path / "a", eval_every=0)
    server.start(train, *words, package=package).ends_with(0)
    words = flags(server, package, workdir=tmp_path / "b", init_from=tmp_path / "a", seed=7)
    kept = server.start(first_state, *words, package=package).answer()
    saved = server.start(read_state, tmp_path / "a", "latest", package=package).answer()
    names = [name for name in saved if name.startswith(".params")]
    assert names and all(kept[name] == saved[name] for name in names)
    # It is remembered: the first start got nowhere.
    again = server.start(first_state, "--workdir", tmp_path / "b", package=package).answer()
    assert again == kept
    largest = max((tmp_path / "a/checkpoints/12/model").rglob("*"), key=lambda p: p.stat().st_size)
    damage(largest, "truncate")
    words = flags(server, package, workdir=tmp_path / "c", init_from=tmp_path / "a")
    text = server.start(train, *words, package=package).ends_with(2)
    one_message(text, "--init-from", "checkpoint 12 is damaged")


def first_state(get, *words):
    """Digests of the state that the first step gets."""
    import jax

    found, train_module = [], get("train")
    original = train_module.compile_train_step

    def compile_watched(*args):
        _, *rest = original(*args)

        def watched(state, *arguments):
            found.append(digests(jax, state))
            raise KeyboardInterrupt

        return watched, *rest

    train_module.compile_train_step = compile_watched
    with contextlib.suppress(KeyboardInterrupt):
        train(get, *words)
    return found[0]


def use_devices(get, count):
    import jax

    jax.config.update("jax_num_cpu_devices", count)


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_main_twice_in_one_process(server, tmp_path, package):
    """Half a run, another run, and the other half, are what they are in processes of their own."""
    a, b, c = (flags(server, package, workdir=tmp_path / name) for name in "abc")
    stop = ["--stop-after-step", "5"]
    run = server.start(
        train_in_turn, [*a, *stop], [*b, "--precision", "bfloat16"], a, package=package
    )
    first, second, third = run.answer()
    assert [x["status"] for x in (first, second, third)] == ["preempted", "completed", "completed"]
    assert run.text.count(f"{tmp_path / 'a'}: completed") == 1  # no handler is left over
    server.start(train, *c, package=package).ends_with(0)
    a, c = (server.start(read_state, tmp_path / x, package=package) for x in "ac")
    assert a.answer() == c.answer()
    assert len(list((tmp_path / "a" / "tb").iterdir())) == 2


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_arrays_do_not_pile_up(server, tmp_path, package):
    change = {"total_steps": 300, "log_every": 10, "eval_every": 50, "checkpoint_every": 25}
    words = flags(server, package, workdir=tmp_path, **change)
    counts = server.start(count_live_arrays, *words, package=package).answer()
    assert len(counts) == 6
    # Up to 100 steps and a checkpoint are under way; one array more per step would be 250.
    assert max(counts) - min(counts) < 200, counts
