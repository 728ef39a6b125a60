"""Curves as TensorBoard's own server shows them: while a run goes on, and after every end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest
from children import IMAGES, IMAGES_NNX, TEXT, TEXT_NNX, flags, kill, paused, train, train_with
from run_hooks import raise_before

pytestmark = pytest.mark.slow


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
    server.start(train_with, {raise_before: 7}, *words, package=TEXT).ends_with(1)
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
