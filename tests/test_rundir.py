"""The run directory: one owner, a latest that holds, and nothing left of a start that fails."""

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    evaluate,
    flags,
    kill,
    one_message,
    paused,
    result_of,
    snapshot,
    steps_in,
    train,
    train_with,
    try_settings,
)
from run_hooks import before_step, die_before

pytestmark = pytest.mark.slow


def everything(directory):
    """Every directory, link and file below this one."""
    names = {p: os.readlink(p) if p.is_symlink() else None for p in sorted(directory.rglob("*"))}
    return names, snapshot(directory)


def place_of(directory):
    """Where runs/latest leads to."""
    return Path(directory / "runs" / "latest").resolve()


# --------------------------------------------------------------------------- A start that fails


REFUSED = {
    "--init-from": ["--init-from", "nowhere"],
    "--data.path": ["--data.path", "nowhere"],
    "--batch-size": ["--batch-size", "1000"],
    "--profile-steps": ["--profile-steps", "90:95"],
    "--precision": ["--debug-nans", "--precision", "float16"],
    "--mesh.fsdp": ["--mesh.fsdp", "3"],
    "--early-stopping-patience": ["--eval-every", "0", "--early-stopping-patience", "2"],
}


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_a_refused_start_leaves_everything_as_it_was(server, tmp_path, package):
    words = flags(server, package, total_steps=4)
    server.start(train, *words, package=package, cwd=tmp_path).ends_with(0)
    latest = str(place_of(tmp_path))
    cases = [
        (name, [*words, *refused, *place])
        for name, refused in REFUSED.items()
        for place in ([], ["--workdir", "new/deep"], ["--workdir", latest])
        # That run is over: these two do not matter.
        if place[1:] != [latest] or name not in ("--init-from", "--profile-steps")
    ]
    attempts = [case for _, case in cases]
    run = server.start(try_and_look, attempts, tmp_path, package=package, cwd=tmp_path)
    for (name, case), (code, text, untouched) in zip(cases, run.answer(), strict=True):
        assert code == 2, text
        one_message(text, name)
        assert untouched, case


def try_and_look(get, cases, directory):
    """For each list of flags: exit code, output, and whether the directory is as it was."""
    before, answers = everything(Path(directory)), []
    for case in cases:
        ((code, text, _),) = try_settings(get, [case])
        answers.append([code, text, everything(Path(directory)) == before])
    return answers


def test_a_new_run_can_start_from_the_latest_one(server, tmp_path):
    words = flags(server, IMAGES, total_steps=4)
    server.start(train, *words, cwd=tmp_path).ends_with(0)
    first = place_of(tmp_path)
    text = server.start(train, *words, "--init-from", "runs/latest", cwd=tmp_path).ends_with(0)
    assert f"come from {first}, step 4" in text
    assert place_of(tmp_path) != first and result_of(place_of(tmp_path))["step"] == 4


# ----------------------------------------------------------------------------------- runs/latest


def test_resuming_goes_on_with_the_newest_run_that_has_a_checkpoint(server, tmp_path):
    resume = ["--workdir", "runs/latest"]
    for function in (train, evaluate):
        one_message(server.start(function, *resume, cwd=tmp_path).ends_with(2), "no run to use")
    assert not list(tmp_path.iterdir())
    words = flags(server, IMAGES, checkpoint_every=0, eval_every=0)
    server.start(train, *words, "--stop-after-step", "3", cwd=tmp_path).ends_with(75)
    first = place_of(tmp_path)
    run = server.start(train_with, {die_before: 5}, *words, cwd=tmp_path)
    assert run.wait() == -9
    assert place_of(tmp_path) != first and not steps_in(place_of(tmp_path))
    text = server.start(train, *resume, cwd=tmp_path).ends_with(0)
    assert f"using {first}, the newest run" in text and "resumed at step 3" in text
    shutil.rmtree(place_of(tmp_path))  # the link leads nowhere now
    text = server.start(evaluate, *resume, cwd=tmp_path).ends_with(0)
    assert f"using {first}, the newest run" in text and "accuracy" in text


def test_a_link_that_copying_made_a_directory_stops_no_run(server, tmp_path):
    words = flags(server, IMAGES, total_steps=4)
    server.start(train, *words, cwd=tmp_path / make(tmp_path, "here")).ends_with(0)
    shutil.copytree(tmp_path / "here", tmp_path / "there")  # follows links, as `scp -r` does
    there = tmp_path / "there"
    assert not (there / "runs" / "latest").is_symlink()
    text = server.start(train, *words, "--seed", "1", cwd=there).ends_with(0)
    assert "latest could not be made a link" in text
    (newest,) = [run for run in (there / "runs").iterdir() if seed_of(run) == 1]
    resume = ["--workdir", "runs/latest", "--total-steps", "6"]
    assert str(newest) in server.start(train, *resume, cwd=there).ends_with(0)
    assert result_of(newest)["step"] == 6


def make(directory, name):
    (directory / name).mkdir()
    return name


def seed_of(run):
    return json.loads((run / "config.json").read_text())["settings"]["seed"]


# ---------------------------------------------------------------------------------------- Owners


@pytest.mark.parametrize("package", [IMAGES_NNX, TEXT])
def test_a_second_process_is_refused_and_a_dead_one_locks_nobody_out(server, tmp_path, package):
    workdir = tmp_path / "run"
    words = flags(server, package, workdir=workdir)
    run = paused(server, words, 7, package=package)
    before = snapshot(workdir)
    text = server.start(train, *words, package=package).ends_with(2)
    one_message(text, f"process {run.pid}", "since", "--workdir")
    assert snapshot(workdir) == before
    kill(run)
    assert "resumed at step 6" in server.start(train, *words, package=package).ends_with(0)
    assert not (workdir / "owner.json").exists()


def test_an_owner_on_another_host_is_known_by_its_signs_of_life(server, tmp_path):
    """Locks of a network file system may not reach other hosts."""
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=2)
    owner = tmp_path / "owner.json"
    content = json.dumps({"host": "elsewhere", "pid": 7, "since": "2026-01-01 00:00:00"})
    owner.write_text(content)
    over = threading.Event()

    def live():
        while not over.wait(0.2):
            owner.touch()

    alive = threading.Thread(target=live)
    alive.start()
    run = server.start(train_with, {be_impatient: 3}, *words)
    text = run.ends_with(2)
    over.set()
    alive.join()
    one_message(text, "process 7 on elsewhere", "2026-01-01")
    assert owner.read_text() == content
    text = server.start(train_with, {be_impatient: 2}, *words).ends_with(0)  # silent now: dead
    assert "completed at step 2" in text
    owner.write_text(content)
    os.utime(owner, (time.time() - 3600,) * 2)
    assert "waiting up to" not in server.start(train, *words).ends_with(0)


def be_impatient(get, seconds):
    get("runtime.owner").DEAD_AFTER = float(seconds)


def test_one_process_cannot_run_twice_in_one_directory(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path)
    text = server.start(train_with, {run_again_before: 5}, *words).ends_with(0)
    assert "refused" in text and "this program's earlier call" in text
    assert result_of(tmp_path)["status"] == "completed"


def run_again_before(get, step):
    def act():
        config = get("runtime.command_line").parse_settings(sys.argv[1:])
        try:
            get("train").main(config)
        except get("config").SettingError as error:
            print("refused:", error)

    before_step(get, step, act)


# ------------------------------------------------------------------------------- What was moved


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_a_run_and_its_data_can_move(server, tmp_path, package):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    name = "images.npz" if "image" in package else "text.txt"
    shutil.copy(server.root / name, here / name)
    words = flags(server, package, workdir="runs/a", data__path=here / name)
    start = {"package": package}
    server.start(train, *words, "--stop-after-step", "8", cwd=here, **start).ends_with(75)
    score = ["--checkpoint", "latest", "--json", "--workdir"]
    scores = server.start(evaluate, *score, "runs/a", cwd=here, **start).ends_with(0)
    shutil.move(here, there)
    moved = server.start(evaluate, *score, there / "runs/a", cwd=tmp_path, **start).ends_with(0)
    assert moved == scores  # both moved together

    (tmp_path / "data").mkdir()
    shutil.move(there / name, tmp_path / "data" / name)
    run = ["--workdir", there / "runs/a"]
    text = server.start(evaluate, *score, there / "runs/a", cwd=tmp_path, **start).ends_with(2)
    one_message(text, str(here / name), "evaluate --data.path")
    found = ["--data.path", tmp_path / "data" / name]
    text = server.start(evaluate, *score, there / "runs/a", *found, cwd=tmp_path, **start)
    assert text.ends_with(0) == scores
    text = server.start(train, *run, *found, cwd=tmp_path, **start).ends_with(0)
    assert "changed --data.path" in text and "resumed at step 8" in text
    settings = json.loads((there / "runs/a/config.json").read_text())["settings"]
    assert settings["data"]["path"] == str(tmp_path / "data" / name)
    text = server.start(train, *run, "--data.path", "elsewhere", cwd=tmp_path, **start)
    one_message(text.ends_with(2), "elsewhere")


def test_other_data_is_scored_and_said_to_be_other(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run", total_steps=4)
    server.start(train, *words).ends_with(0)
    with np.load(server.root / "images.npz") as file:
        images, labels = file["images"], file["labels"]
    np.savez(tmp_path / "other.npz", images=images[:80] / 2, labels=labels[:80])
    np.savez(tmp_path / "more.npz", images=images, labels=np.arange(160) % 5)
    run = ["--workdir", tmp_path / "run", "--data.path"]
    text = server.start(evaluate, *run, tmp_path / "other.npz").ends_with(0)
    assert "other data than the run was trained on" in text
    one_message(server.start(evaluate, *run, tmp_path / "more.npz").ends_with(2), "5 classes", "4")
