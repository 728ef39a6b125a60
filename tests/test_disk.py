"""A full disk ends a run at the next checkpoint, and loses nothing that was saved before."""

import contextlib
import json
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from children import IMAGES, TEXT, TEXT_NNX, flags, snapshot, steps_in, train, train_with
from run_hooks import before_step

pytestmark = pytest.mark.slow


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
        train_with, {fill_disk_before: [6, str(small_disk)]}, *words, package=package
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


def test_a_write_that_fails_ends_the_run_at_the_next_checkpoint(server, tmp_path):
    words = flags(server, TEXT, workdir=tmp_path, eval_every=0, checkpoint_every=4)
    server.start(train, *words, "--stop-after-step", "4", package=TEXT).ends_with(75)
    before = snapshot(tmp_path / "checkpoints")
    hooks = {limit_file_size_before: [6, 12000]}  # more than what is printed
    text = server.start(train_with, hooks, *words, package=TEXT).ends_with(1)
    assert "could not be written" in text and "arge" in text, text
    assert "Logging error" not in text
    assert snapshot(tmp_path / "checkpoints").items() >= before.items()
    nothing_half_written(tmp_path)
    text = server.start(train, *words, package=TEXT).ends_with(0)
    assert "resumed at step 4" in text
    assert steps_in(tmp_path) == ["12", "8"]


def limit_file_size_before(get, arguments):
    """No file may grow beyond this size: a write then fails as it does on a full disk."""
    step, size = arguments

    def act():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    before_step(get, step, act)


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
