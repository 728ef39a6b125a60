"""What a run says: in its first second, of its settings, while one waits, and at its end."""

import json
import logging
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    evaluate,
    flags,
    one_message,
    result_of,
    steps_in,
    train,
    train_with,
    try_settings,
)
from run_hooks import before_step, poison, use_compile_step

pytestmark = pytest.mark.slow


def run_module(server, before, *words, **options):
    """`python -m <package>.train` in a process of its own, after some lines of Python."""
    code = f"""
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
{before}
runpy.run_module("{IMAGES}.train", run_name="__main__")
"""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(
        command, cwd=server.root / IMAGES, env=server.environment, text=True, check=False, **options
    )


# -------------------------------------------------------------------------------- The first second


def test_the_first_line_comes_before_the_long_imports(server):
    run = run_module(server, "sys.modules['jax'] = None", capture_output=True)
    first, *rest = run.stderr.splitlines()
    assert first.startswith("loading JAX") and "import of jax halted" in rest[-1]
    run = run_module(server, "sys.modules['jax'] = None", "--quiet", capture_output=True)
    assert "loading JAX" not in run.stderr


UNUSED = f"""
import {IMAGES}.runtime.accelerators as accelerators
accelerators.unused_accelerator = lambda platform: platform != "cpu" and accelerators.Unused(
    "a GPU", "JAX does not see it", "Do this.", is_wanted=True
)
sys.modules['jax'] = None
"""


def test_an_accelerator_that_goes_unused_ends_the_run_at_once(server):
    run = run_module(server, UNUSED, capture_output=True)
    assert run.returncode == 2
    one_message(run.stderr, "this machine has a GPU, but JAX does not see it. Do this.")
    run = run_module(server, UNUSED, "--platform=cpu", capture_output=True)
    assert "error:" not in run.stderr and "import of jax halted" in run.stderr
    words = ["--total-steps", "1", "--platform", "cpu"]
    run = run_module(server, UNUSED.replace("True", "False"), *words, capture_output=True)
    assert "import of jax halted" in run.stderr


def test_help_can_be_cut_off_and_read_in_a_narrow_window(server):
    reader, writer = os.pipe()
    os.close(reader)
    run = run_module(server, "", "--help", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert run.returncode == 0 and not run.stderr, run.stderr
    before = "import os; os.environ['COLUMNS'] = '30'"
    run = run_module(server, before, "--help", capture_output=True)
    assert run.returncode == 0
    boxes = [line for line in run.stdout.splitlines() if line.startswith("│")]
    assert 50 <= max(map(len, boxes)) <= 60
    assert "--optimizer.learning-rate FLOAT" in run.stdout


# -------------------------------------------------------------------------------------- Settings


ADVICE = [
    ({"optimizer.warmup_steps": 100}, "is shortened to 6, half of the 12 steps"),
    ({"stop_after_step": 50}, "--stop-after-step 50 has no effect"),
    ({"profile_steps": "8:9", "stop_after_step": 4}, "--profile-steps 8:9: this start runs"),
    ({"early_stopping_patience": 9}, "--early-stopping-patience 9 has no effect"),
    ({"eval_every": 50}, "the only evaluation is at the last step"),
    ({"log_every": 50}, "the only log line comes at step 12"),
    ({"checkpoint_every": 0, "eval_every": 0}, "no checkpoint is saved before the end"),
    ({"overfit_batches": 50, "model.dropout_rate": 0}, "is more than the"),
    ({"overfit_batches": 1, "model.dropout_rate": 0.5}, "keeps the loss of --overfit-batches"),
    ({"precision": "float16", "max_skipped_steps": 3}, "float16 may skip 16 updates"),
    ({"ema_decay": 0.999}, "rises to 0.591 only"),
    ({"deterministic": True}, "--deterministic has no effect on a CPU"),
    ({"debug_nans": True}, "instead of skipping the update"),
    ({"eval_batches": 1000}, "--eval-batches 1000 has no effect"),
    ({"optimizer.name": "sgd", "optimizer.learning_rate": 0.003}, "is low for sgd"),
    ({"accumulation_steps": 4}, "batch normalisation sees 4 rows"),
]


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_settings_with_little_effect_are_said(server, tmp_path, package):
    cases, words = [], []
    for number, (changes, said) in enumerate(ADVICE):
        if "image" in package or "batch norm" not in said:
            place = {"workdir": tmp_path / str(number), "optimizer.warmup_steps": 2}
            cases.append(list(map(str, flags(server, package, **place | changes))))
            words.append(said)
    answers = server.start(try_until_compiled, cases, package=package).answer()
    for (_, text, _), said in zip(answers, words, strict=True):
        assert said in text, text
        others = [other for other in words if other != said and other in text]
        assert not others, f"{others} in {text}"


def try_until_compiled(get, cases):
    def enough(*_):
        raise get("config").SettingError("enough")

    use_compile_step(get, enough)
    return try_settings(get, cases)


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_precision_and_accumulation_may_change_and_what_that_means_is_said(
    server, tmp_path, package
):
    words = flags(server, package, workdir=tmp_path)
    server.start(train, *words, "--stop-after-step", "3", package=package).ends_with(75)
    for step, change in ((6, "bfloat16"), (9, "float16")):
        words = ["--workdir", tmp_path, "--precision", change, "--stop-after-step", str(step)]
        text = server.start(train, *words, package=package).ends_with(75)
        assert f"-> {change} (from here on the network computes in it" in text
    words = ["--workdir", tmp_path, "--precision", "float32", "--accumulation-steps", "2"]
    text = server.start(train, *words, package=package).ends_with(0)
    assert "changed --accumulation-steps: 1 -> 2 (the same updates but for rounding" in text


def test_a_learning_rate_that_rises_again_is_said(server, tmp_path):
    for schedule, rises in (("cosine", True), ("constant", False)):
        place = tmp_path / schedule
        words = flags(server, IMAGES, workdir=place, optimizer__schedule=schedule)
        server.start(train, *words).ends_with(0)
        text = server.start(train, "--workdir", place, "--total-steps", "30").ends_with(0)
        assert ("the learning rate rises from" in text and "wsd" in text) == rises


def test_a_refused_change_names_a_way_on_that_works(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "a", stop_after_step=4)
    server.start(train, *words).ends_with(75)
    text = server.start(train, "--workdir", tmp_path / "a", "--seed", "5").ends_with(2)
    (way,) = re.findall(r"--init-from \S+", text)
    words = flags(server, IMAGES, workdir=tmp_path / "b", seed=5)
    assert "parameters come from" in server.start(train, *words, *way.split()).ends_with(0)


# ------------------------------------------------------------------------------------ While it runs


def test_every_wait_says_what_it_is_for(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    text = server.start(train_with, {say_waits_at_once: None}, *words).ends_with(0)
    waits = ["reading the data", "creating or restoring", "compiling the step", "evaluating"]
    found = [text.find(f"{wait}") for wait in waits]
    assert found == sorted(found) and found[0] >= 0, text


def say_waits_at_once(get, _):
    """And let the data, which is there in a moment, wait for its line."""
    watchdog, data, said = get("runtime.watchdog"), get("data"), threading.Event()
    watchdog.LONG_WAIT, watchdog.TICK = 0.0, 0.001
    load = data.load

    def hear(record):
        if "reading the data" in record.getMessage():
            said.set()

    def load_slowly(config):
        ear = logging.Handler()
        ear.emit = hear
        logging.getLogger(get("train").__package__).addHandler(ear)
        said.wait(60)
        return load(config)

    data.load = load_slowly


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_what_changes_the_learning_is_said_with_its_step(server, tmp_path, package):
    """Updates that are skipped between two log lines; the rate is that of the step, no average."""
    words = flags(server, package, workdir=tmp_path, log_every=6, optimizer__warmup_steps=0)
    words += ["--checkpoint-every", "0"]
    text = server.start(train_with, {poison: [2, 4]}, *words, package=package).ends_with(0)
    assert "2 of the last 4 updates were skipped" in text
    assert "train step 6/12 (epoch 0." in text
    assert "completed at step 12: all steps are done; best step" in text
    curves = read_curves(tmp_path)
    assert curves["train/skipped_steps"] == {6: 2, 12: 2}
    applied = {6: 3, 12: 9}  # updates before the last step of each interval
    for step, rate in curves["train/learning_rate"].items():
        cosine = 0.01 * (1 + np.cos(np.pi * applied[step] / 12)) / 2
        assert rate == pytest.approx(cosine, rel=1e-5)


def read_curves(workdir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workdir / "tb"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_an_evaluation_can_be_a_sample(server, tmp_path, package):
    words = flags(server, package, workdir=tmp_path, eval_batches=1, batch_size=4)
    server.start(train, *words, package=package).ends_with(0)
    result = result_of(tmp_path)
    assert (result["eval"]["num_examples"], result["eval_batches"]) == (4, 1)
    text = server.start(evaluate, "--workdir", tmp_path, "--json", package=package).ends_with(0)
    scores = json.loads(text)
    assert scores["num_examples"] > 4
    assert ("largest_class" in scores) == ("image" in package)


def test_long_passes_show_how_far_they_are(server, tmp_path):
    """A log line where there is no terminal."""
    words = flags(server, TEXT, workdir=tmp_path)
    text = server.start(train_with, {say_more_often: None}, *words, package=TEXT).ends_with(0)
    assert re.search(r"eval: 1 of \d+ batches, \d+ s left", text)
    assert re.search(r"test: 1 of \d+ batches, \d+ s left", text)


def say_more_often(get, _):
    get("runtime.terminal").LINE_INTERVAL = 0


def test_a_poor_terminal_shows_what_it_can(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "ü", eval_every=4)
    text = server.start(train_with, {use_ascii: None}, *words).ends_with(0)
    assert r"\xfc: a new run" in text and "train step 12/12" in text and "gets no more" not in text
    assert "ü: a new run" in (tmp_path / "ü" / "train.log").read_text(encoding="utf-8")
    words = flags(server, IMAGES, workdir=tmp_path / "closed")
    server.start(train_with, {close_output_before: 3}, *words).ends_with(0)
    assert "12" in steps_in(tmp_path / "closed")


def use_ascii(get, _):
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)  # noqa: SIM115


def close_output_before(get, step):
    def act():
        reader, writer = os.pipe()
        os.close(reader)
        for number in (1, 2):
            os.dup2(writer, number)  # every write now fails: who read has left

    before_step(get, step, act)
