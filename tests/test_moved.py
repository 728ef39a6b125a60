"""Runs whose data has moved, whose length is given again, or whose evaluation is interrupted; and
several processes that run out of memory, score a sample, or find their data elsewhere."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import bake
import numpy as np
import pytest
from children import (
    IMAGES,
    TEXT_NNX,
    end_with,
    evaluate,
    flags,
    one_message,
    result_of,
    snapshot,
    start_two,
    train,
    train_with,
    two_processes,
)
from run_hooks import before_step

PROJECT = bake.ROOT / "{{cookiecutter.project_slug}}"


def score(server, run, *words, count=2, package=IMAGES):
    """The scores that `python -m <package>.evaluate --json` prints, and no other process prints."""
    command = [sys.executable, "-m", f"{package}.evaluate", "--workdir", run, "--json", *words]
    processes = [
        subprocess.Popen(
            command,
            cwd=server.root / package,
            env=server.environment | told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for told in (two_processes() if count == 2 else [{}])
    ]
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, ends
    (first, _), *others = ends
    assert all(printed == "" for printed, _ in others)
    return json.loads(first)


def own_data(server, package, folder):
    """A copy of the data of a package in this folder, and flags that use it."""
    name = "images.npz" if package == IMAGES else "text.txt"
    folder.mkdir(parents=True)
    return shutil.copy(server.root / name, folder / name)


# ---------------------------------------------------------------------- A run that is there already


@pytest.mark.slow
def test_fewer_steps_than_a_finished_run_has_change_nothing_and_that_is_said(server, tmp_path):
    server.start(train, *flags(server, IMAGES, workdir=tmp_path)).ends_with(0)
    before = snapshot(tmp_path / "checkpoints")
    text = server.start(train, "--workdir", tmp_path, "--total-steps", "6").ends_with(0)
    assert "over, completed at step 12" in text
    assert "already has 12 steps, so --total-steps 6 changes nothing" in text
    assert snapshot(tmp_path / "checkpoints") == before
    assert "changes nothing" not in server.start(train, "--workdir", tmp_path).ends_with(0)


@pytest.mark.slow
@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_a_resume_without_its_data_names_the_flag_for_its_new_place(server, tmp_path, package):
    data = own_data(server, package, tmp_path / "data [1]")
    run = tmp_path / "run"
    words = flags(server, package, workdir=run, data__path=data)
    server.start(train, *words, "--stop-after-step", "4", package=package).ends_with(75)
    text = server.start(train, "--workdir", run, "--stop-after-step", "6", package=package)
    assert "resumed at step 4" in text.ends_with(75)
    elsewhere = shutil.move(data, tmp_path / ("elsewhere" + os.path.splitext(data)[1]))
    before = snapshot(run)
    for function, *more in ((train,), (evaluate,)):
        text = server.start(function, "--workdir", run, *more, package=package).ends_with(2)
        one_message(text, f"--data.path {data}", "moved", "--data.path PLACE")
    assert snapshot(run) == before
    resume = ["--workdir", run, "--data.path", elsewhere]
    text = server.start(train, *resume, package=package).ends_with(0)
    assert "resumed at step 6" in text and result_of(run)["step"] == 12


def test_a_number_of_one_is_singular(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=1, eval_every=0)
    text = server.start(train, *words).ends_with(0)
    assert "in all; 1 process; jax" in text and "half of the 1 step" in text
    assert "process(es)" not in text


def test_tensorboard_gets_nan_without_a_warning_of_its_own(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=4, eval_every=0)
    text = server.start(train_with, {poison: None}, *words).ends_with(0)
    assert "not finite in train" in text and "NaN or Inf found" not in text
    written = b"".join(file.read_bytes() for file in (tmp_path / "tb").iterdir())
    assert b"train/loss" in written


def poison(get, _):
    """The loss that is reported is NaN."""
    task = get("task")
    original = task.report
    task.report = lambda totals: original(totals) | {"loss": float("nan")}


# ---------------------------------------------------------------- An evaluation that is interrupted


STUCK = """
import importlib, runpy, sys, threading
package, fifo, *words = sys.argv[1:]
sys.argv = ["evaluate.py", *words]

def stuck(*args):
    with open(fifo, "w") as file:
        file.write("here")
    threading.Event().wait()
    yield

importlib.import_module(package + ".batches").eval_batches = stuck
runpy.run_module(package + ".evaluate", run_name="__main__")
"""


def read_from(fifo, timeout=90):
    """What a process writes to a FIFO; nothing if it ends before."""
    file = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    written = select.select([file], [], [], timeout)[0]
    return os.read(file, 100).decode() if written else ""


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_at_once_and_leaves_no_trace(server, tmp_path):
    run = tmp_path / "run"
    server.start(train, *flags(server, IMAGES, workdir=run)).ends_with(0)
    before = snapshot(run)
    names = ("SIGTERM", "SIGINT", "SIGHUP")
    started = {}
    for name in names:
        fifo = tmp_path / name
        os.mkfifo(fifo)
        command = [sys.executable, "-c", STUCK, IMAGES, fifo, "--workdir", run]
        started[name] = subprocess.Popen(
            command,
            cwd=server.root / IMAGES,
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    for name, process in started.items():
        assert read_from(tmp_path / name) == "here", process.communicate(timeout=10)[0]
        process.send_signal(getattr(signal, name))
        text, _ = process.communicate(timeout=10)
        assert process.returncode == -getattr(signal, name), text  # a shell says 128 + n
        assert "Traceback" not in text and "KeyboardInterrupt" not in text
    assert snapshot(run) == before


@pytest.mark.slow
def test_a_signal_ends_one_process_of_an_evaluation(server, tmp_path):
    """JAX would take SIGTERM over, and the evaluation would go on."""
    run, fifo = tmp_path / "run", tmp_path / "fifo"
    server.start(train, *flags(server, IMAGES, workdir=run)).ends_with(0)
    os.mkfifo(fifo)
    processes = start_two(server, evaluate_stuck, fifo, "--workdir", run)
    assert "here" in read_from(fifo)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    assert [process.wait(30) for process in processes] == [-signal.SIGTERM] * 2


def evaluate_stuck(get, fifo, *words):
    def stuck(*args):
        with open(fifo, "w") as file:
            file.write("here")
        signal.pause()
        yield

    get("batches").eval_batches = stuck
    return evaluate(get, *words)


# --------------------------------------------------------------------------------- Two processes


@pytest.mark.slow
@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_two_processes_without_memory_end_soon_with_advice(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, batch_size=32)
    reached = time.monotonic()
    processes = start_two(server, train_with, {lack_memory_at: 4}, *words, package=package)
    texts = end_with(processes, 1)
    assert time.monotonic() - reached < 60
    for text in texts:
        one_message(text, "out of memory while training", "--accumulation-steps 2")
    result = result_of(tmp_path)
    assert result["status"] == "failed" and "out of memory" in result["reason"]
    assert "--accumulation-steps 2" in (tmp_path / "train.log").read_text()


def lack_memory_at(get, step):
    import jax

    def no_memory():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")

    before_step(get, step, no_memory)


@pytest.mark.slow
@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_two_processes_score_the_same_sample_as_one(server, tmp_path, package):
    results = {}
    for count in (1, 2):
        run = tmp_path / str(count)
        words = flags(server, package, workdir=run, eval_batches=2, batch_size=8)
        words += ["--optimizer.name", "sgd"]  # adamw makes much of the last bits
        start = start_two if count == 2 else lambda *args, **more: [server.start(*args[1:], **more)]
        end_with(start(server, train, *words, package=package), 0)
        results[count] = result_of(run)
    one, two = results[1], results[2]
    assert one["eval_batches"] == two["eval_batches"] == 2
    assert one["eval"]["num_examples"] == two["eval"]["num_examples"] <= 16
    assert two["eval"] == pytest.approx(one["eval"], rel=1e-6)
    # The same checkpoint, scored by one process and by two.
    sample = ["--eval-batches", "2"]
    alone = score(server, tmp_path / "1", *sample, count=1, package=package)
    assert score(server, tmp_path / "1", *sample, package=package) == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_two_processes_find_data_that_moved_with_their_run(server, tmp_path, package):
    old, new = tmp_path / "old", tmp_path / "new"
    words = flags(server, package, workdir=old / "run", eval_every=4)
    data = own_data(server, package, old / "data")
    words[words.index("--data.path") + 1] = data
    words += ["--stop-after-step", "6"]
    end_with(start_two(server, train, *words, package=package), 75)
    old.rename(new)
    run = new / "run"
    first, _ = end_with(start_two(server, train, "--workdir", run, package=package), 0)
    assert "resumed at step 6" in first and f"--data.path: {data} -> {new}" in first
    assert result_of(run)["step"] == 12 and result_of(run)["processes"] == 2
    scores = score(server, run, package=package)
    for name, value in result_of(run)["eval"].items():
        np.testing.assert_allclose(scores[name], value, rtol=1e-6)
    # One process has the data, the other does not: both say so, and end.
    (new / "data").rename(tmp_path / "gone")
    texts = end_with(start_two(server, train, "--workdir", run, package=package), 2)
    for text in texts:
        one_message(text, "--data.path PLACE")


# -------------------------------------------------------------- What comments and messages refer to


def test_what_comments_and_messages_name_exists():
    """Files, modules to run and targets of make."""
    sources = [
        path
        for path in PROJECT.rglob("*")
        if path.suffix in (".py", ".sh", ".env", ".sbatch", ".yaml", "") and path.is_file()
    ]
    package = PROJECT / PROJECT.name
    files = {path.name for path in PROJECT.rglob("*.py")} | {"predict.py"}
    targets = set(re.findall(r"(?m)^([a-z-]+):", (PROJECT / "Makefile").read_text()))
    problems = []
    for path in sources:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![$\w/.])([a-z_]+(?:/[a-z_]+)*\.py)\b", text):
            if name.rpartition("/")[2] not in files or ("/" in name and not known(name)):
                problems.append(f"{path.name}: {name}")
        for name in re.findall(r"python -m <package>\.([a-z_.]+[a-z_])", text):
            if not (package / (name.replace(".", "/") + ".py")).exists():
                problems.append(f"{path.name}: python -m <package>.{name}")
        for name in re.findall(r"[`'(]make ([a-z-]+)", text):
            if name not in targets:
                problems.append(f"{path.name}: make {name}")
    assert not problems


def known(name):
    package = PROJECT / PROJECT.name
    return any((folder / name).exists() for folder in (PROJECT, package, package / "runtime"))
