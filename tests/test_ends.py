"""However a run ends: what can be saved is saved, the reason is written, a way on is named."""

import dataclasses
import fcntl
import importlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import types
from pathlib import Path

import bake
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    PACKAGES,
    TEXT,
    TEXT_NNX,
    evaluate,
    flags,
    kill,
    one_message,
    paused,
    read_state,
    result_of,
    steps_in,
    train,
    train_in_turn,
    train_with,
)
from run_hooks import (
    around_step,
    become_nobody,
    before_step,
    poison,
    score_by_step,
    use_compile_step,
)

pytestmark = pytest.mark.slow


def log_of(workdir):
    return (Path(workdir) / "train.log").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------- Signals


@pytest.mark.parametrize(
    ("name", "package"),
    list(zip(("SIGHUP", "SIGUSR2", "SIGXCPU", "SIGTERM"), PACKAGES, strict=True)),
)
def test_a_signal_saves_and_is_written_down(server, tmp_path, name, package):
    words = flags(server, package, workdir=tmp_path, checkpoint_every=0, eval_every=0)
    run = paused(server, words, 6, package=package)
    os.kill(run.pid, getattr(signal, name))
    text = run.ends_with(75)
    result = result_of(tmp_path)
    assert (result["status"], result["reason"]) == ("preempted", f"stopped by {name}")
    assert steps_in(tmp_path) == [str(result["step"])]
    for shown in (text, log_of(tmp_path)):
        assert f"stopped by {name}" in shown and f"to go on: --workdir {tmp_path}" in shown
    text = server.start(train, "--workdir", tmp_path, package=package).ends_with(0)
    assert f"resumed at step {result['step']}" in text


def test_nohup_keeps_a_run_going(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    run = paused(server, words, 6, {ignore_sighup: None})
    os.kill(run.pid, signal.SIGHUP)
    os.kill(run.pid, signal.SIGUSR2)  # which ends the pause
    run.ends_with(75)
    assert result_of(tmp_path)["reason"] == "stopped by SIGUSR2"


def ignore_sighup(get, _):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    get("runtime.stop").install_handlers()


def test_a_terminal_that_goes_away(server, tmp_path):
    """Its process gets SIGHUP, and errors for whatever it writes."""
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=100_000, eval_every=0)
    command = [sys.executable, "-m", f"{IMAGES}.train", *map(str, words)]
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=server.root / IMAGES,
        env=server.environment,
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(other)
    seen = b""
    while b"train step 2/" not in seen:
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(60) == 75
    assert result_of(tmp_path)["reason"] == "stopped by SIGHUP"
    assert str(result_of(tmp_path)["step"]) in steps_in(tmp_path)


def take_terminal():
    """Make standard input the terminal that this process belongs to."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_the_second_ctrl_c_is_written_down(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    run = server.start(train_with, {interrupt_twice_before: 5}, *words)
    assert "abandoned, nothing saved" in run.ends_with(130)
    assert "second Ctrl-C" in result_of(tmp_path)["reason"]
    assert "second Ctrl-C" in log_of(tmp_path)


def interrupt_twice_before(get, step):
    def act():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before_step(get, step, act)


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_main_in_a_notebook(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path)
    seen = server.start(call_main, tmp_path, *words, package=package).answer()
    assert seen["first"] == ["preempted", "stopped by SIGINT"]
    assert seen["second"] == "KeyboardInterrupt"
    assert seen["third"] == ["completed", "all steps are done"]
    assert seen["handlers"] is True and seen["in a thread"] == "completed"


def call_main(get, workdir, *words):
    """What a notebook does: no handlers of train.py's own, interrupts, main() again."""
    config = get("runtime.command_line").parse_settings(list(words))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    original, count = get("batches").train_batches, [1]

    def interrupted(*args):
        for number, batch in enumerate(original(*args)):
            if number == 2:
                for _ in range(count[0]):
                    os.kill(os.getpid(), signal.SIGINT)
            yield batch

    get("batches").train_batches = interrupted
    main, seen = get("train").main, {}
    result = main(config)
    seen["first"] = [result["status"], result["reason"]]
    count[0] = 2
    try:
        main(config)
    except KeyboardInterrupt:
        seen["second"] = "KeyboardInterrupt"
    count[0] = 0
    result = main(config)
    seen["third"] = [result["status"], result["reason"]]
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen["handlers"] = before == after
    config = dataclasses.replace(config, workdir=f"{workdir}/other")
    thread = threading.Thread(target=lambda: seen.update({"in a thread": main(config)["status"]}))
    thread.start()
    thread.join()
    return seen


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


# -------------------------------------------------------------------------------------- Exceptions


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_an_exception_is_written_down_and_loses_no_step(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, checkpoint_every=0, eval_every=0)
    text = server.start(train_with, {fail_before: 6}, *words, package=package).ends_with(1)
    assert text.count("ValueError: row 7 is broken") == 1 and text.count("Traceback") == 1
    assert result_of(tmp_path)["status"] == "failed"
    assert result_of(tmp_path)["reason"] == "ValueError: row 7 is broken"
    assert "Traceback" in log_of(tmp_path) and "row 7 is broken" in log_of(tmp_path)
    assert steps_in(tmp_path) == ["6"]


def fail_before(get, step):
    def act():
        raise ValueError("row 7 is broken")

    before_step(get, step, act)


def test_an_evaluation_that_failed_at_the_last_step_is_saved_when_it_was_made_again(
    server, tmp_path
):
    """The last step was saved without it. A longer run would otherwise count it a second time."""
    changes = {"total_steps": 8, "eval_every": 4, "checkpoint_every": 0}
    words = flags(server, IMAGES, workdir=tmp_path, **changes)
    server.start(train_with, {evaluate_alike_and_fail_at: 2}, *words).ends_with(1)
    assert progress_of(tmp_path, 8)["evaluated_step"] == 4
    server.start(train_with, {evaluate_alike_and_fail_at: None}, *words).ends_with(0)
    progress = progress_of(tmp_path, 8)
    assert (progress["evaluated_step"], progress["evaluations_since_best"]) == (8, 1)


def evaluate_alike_and_fail_at(get, number):
    """Every evaluation is as good as the first, so none of the others is a new best."""
    evaluations, evaluate = iter(range(1, 100)), get("train").evaluate

    def failing(*arguments):
        if next(evaluations) == number:
            raise RuntimeError("in the evaluation")
        return evaluate(*arguments) | {"accuracy": 0.5}

    get("train").evaluate = failing


def progress_of(workdir, step):
    file = next((workdir / "checkpoints" / str(step) / "progress").glob("metadata"))
    return json.loads(file.read_text())


def test_what_the_step_has_taken_is_not_saved_and_that_is_said(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, checkpoint_every=0, eval_every=0)
    text = server.start(train_with, {fail_in_step: 6}, *words).ends_with(1)
    assert "is not saved" in text and not steps_in(tmp_path)


def fail_in_step(get, step):
    def wrap(compiled):
        calls = iter(range(1, 10**6))

        def failing(*arguments):
            results = compiled(*arguments)
            if next(calls) == step:
                raise RuntimeError("in the step")
            return results

        return failing

    use_compile_step(get, around_step(get, wrap))


def test_a_failed_start_keeps_the_result_of_a_complete_run(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    server.start(train, *words).ends_with(0)
    before = result_of(tmp_path)
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=20)
    text = server.start(train_with, {break_the_model: None}, *words).ends_with(1)
    assert "the model is broken" in text and "the model is broken" in log_of(tmp_path)
    assert result_of(tmp_path) == before
    server.start(train, *words).ends_with(0)
    assert result_of(tmp_path)["step"] == 20


def break_the_model(get, _):
    def compile_nothing(*_):
        raise TypeError("the model is broken")

    use_compile_step(get, compile_nothing)


def test_a_save_that_is_not_allowed_ends_the_process(server):
    """Orbax leaves threads behind that Python would wait for."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        words = flags(server, IMAGES, workdir=f"{place}/run", eval_every=0, checkpoint_every=6)
        run = server.start(train_with, {lose_rights_before: 4}, *words)
        assert run.wait(60) == 1
    assert "could not be written" in run.text and "ake the directory writable" in run.text


def lose_rights_before(get, step):
    before_step(get, step, lambda: become_nobody(get, None))


# ------------------------------------------------------------------------------------------ Stalls


def hurry(get, _):
    get("runtime.watchdog").PATIENCE = 1.5


def hang(*_):
    threading.Event().wait()


def hang_before(get, step):
    before_step(get, step, hang)


def hang_in_data(get, _):
    get("data").load = hang


def hang_in_save(get, _):
    get("runtime.checkpoint").Checkpoints.save = hang


@pytest.mark.parametrize(
    ("package", "hook"), [(IMAGES, hang_before), (TEXT, hang_in_data), (IMAGES, hang_in_save)]
)
def test_a_stall_is_written_down_with_the_stacks(server, tmp_path, package, hook):
    words = flags(server, package, workdir=tmp_path, stall_timeout=3)
    run = server.start(train_with, {hurry: None, hook: 5}, *words, package=package)
    text = run.ends_with(1)
    assert "stalled: nothing was finished for" in text and "in hang" in text
    if hook != hang_in_data:  # before there is a run directory
        assert result_of(tmp_path)["reason"].startswith("stalled")
        assert "in hang" in log_of(tmp_path) and "stalled" in log_of(tmp_path)


def test_a_pause_of_the_machine_is_no_stall(monkeypatch):
    """By a clock that jumps, as it does after SIGSTOP."""
    watchdog = load("runtime.watchdog")
    ended, clock = [], [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    dog = watchdog.Watchdog(limit=10)
    monkeypatch.setattr(dog, "_end", lambda *why: ended.append(why))

    class Closed:
        def __init__(self, seconds):
            self.seconds = iter(seconds)

        def wait(self, _):
            jump = next(self.seconds, None)
            clock[0] += jump or 0
            return jump is None or bool(ended)

    for seconds, stalls in (([0.5] * 15, 0), ([0.5, 3600, 0.5] * 3, 0), ([0.5] * 30, 1)):
        ended.clear()
        dog._closed = Closed(seconds)
        dog._watch()
        assert len(ended) == stalls


def load(name):
    """A module of the template that needs no package around it but stop.py."""
    package = types.ModuleType("standing_alone")
    package.__path__ = [str(bake.PACKAGE)]
    sys.modules["standing_alone"] = package
    return importlib.import_module(f"standing_alone.{name}")


# --------------------------------------------------------------------------------- Out of memory


def no_memory(*_, **__):
    import jax

    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")


def lack_memory_at(get, step):
    before_step(get, step, no_memory)


def lack_memory_in_evaluation(get, _):
    get("train_step").eval_step = no_memory


def lack_memory_in_data(get, _):
    def load(config):
        raise MemoryError

    get("data").load = load


OOM = {
    "state": (IMAGES, {"model__features": 3_000_000}, {}, "creating or restoring"),
    "step": (TEXT_NNX, {}, {lack_memory_at: 4}, "training"),
    "evaluation": (IMAGES_NNX, {}, {lack_memory_in_evaluation: None}, "evaluating"),
    "data": (TEXT, {}, {lack_memory_in_data: None}, "reading the data"),
}


@pytest.mark.parametrize("where", OOM)
def test_a_lack_of_memory_ends_soon_with_advice(server, tmp_path, where):
    package, changes, hooks, said = OOM[where]
    words = flags(server, package, workdir=tmp_path / "run", batch_size=32, **changes)
    text = server.start(train_with, hooks, *words, package=package).ends_with(1)
    one_message(text, "out of memory while " + said, "--precision bfloat16", "--batch-size")
    if where != "data":
        assert "out of memory while" in log_of(tmp_path / "run")
        assert result_of(tmp_path / "run")["status"] == "failed"
        assert "out of memory" in result_of(tmp_path / "run")["reason"]
    if where == "step":
        (advised,) = re.findall(r"--accumulation-steps \d+", text)
        words = flags(server, package, workdir=tmp_path / "run", batch_size=32)
        again = server.start(train, *words, *advised.split(), package=package).ends_with(0)
        assert "changed --accumulation-steps: 1 -> 2 (the same updates" in again


# ----------------------------------------------------------------------------- Damaged checkpoints


def break_checkpoint(workdir, step):
    for file in (Path(workdir) / "checkpoints" / str(step)).rglob("*"):
        if file.is_file() and "model" in str(file):
            file.write_bytes(b"")


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_a_damaged_best_checkpoint_is_no_dead_end(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, eval_every=4)
    run = paused(server, words, 11, {score_by_step: None}, package=package)
    kill(run)
    break_checkpoint(tmp_path, 4)
    text = server.start(train_with, {score_by_step: None}, *words, package=package).ends_with(0)
    assert "checkpoint 4 is damaged" in text and "in place of the best" in text
    result = result_of(tmp_path)
    assert (result["best_step"], result["tested_step"]) == (4, 12) and result["eval"]
    text = server.start(evaluate, "--workdir", tmp_path, package=package).ends_with(2)
    one_message(text, "checkpoint 4 is damaged", "There are others")
    for advised in re.findall(r"--checkpoint (\d+)", text.partition("There are others")[2]):
        score = ["--workdir", tmp_path, "--checkpoint", advised, "--json"]
        text = server.start(evaluate, *score, package=package).ends_with(0)
        assert json.loads(text)["step"] == int(advised)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    text = server.start(evaluate, "--workdir", tmp_path, package=package).ends_with(2)
    one_message(text, "the best checkpoint, step 4, is gone", "--checkpoint 12")


def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    server.start(train, *words, "--stop-after-step", "6").ends_with(75)
    before = steps_in(tmp_path)
    text = server.start(train_with, {forbid_reading: None}, *words).ends_with(2)
    one_message(text, "cannot be read now", "Permission denied")
    assert steps_in(tmp_path) == before and not (tmp_path / "damaged").exists()
    server.start(train, *words).ends_with(0)


def forbid_reading(get, _):
    import orbax.checkpoint as ocp

    def restore(*args, **kwargs):
        raise ValueError("PERMISSION_DENIED: Error opening file: Permission denied")

    ocp.CheckpointManager.restore = restore


def test_a_diverged_run_names_a_way_on_that_works(server, tmp_path):
    """Settings cannot change, but the code may: an edit is a reason to try again."""
    workdir = tmp_path / "run"
    words = flags(server, IMAGES, workdir=workdir, max_skipped_steps=1, checkpoint_every=2)
    server.start(train_with, {poison: [6, 99]}, *words).ends_with(3)
    text = server.start(train, *words).ends_with(3)
    assert "over, diverged" in text
    (way,) = re.findall(r"--init-from \S+", text.replace(",", ""))
    new = flags(server, IMAGES, workdir=tmp_path / "new", optimizer__learning_rate=1e-4)
    assert "parameters come from" in server.start(train, *new, *way.split()).ends_with(0)
    config = json.loads((workdir / "config.json").read_text())
    config["code"]["model.py"] = "as it was before an edit"
    (workdir / "config.json").write_text(json.dumps(config))
    text = server.start(train, *words).ends_with(0)
    assert "the code changed: model.py" in text and "correctly" not in text
