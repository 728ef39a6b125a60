"""A source without random access: a split that has batches(start_step) in place of rows."""

import json
import re
import socket
from dataclasses import dataclass

import bake
import numpy as np
import pytest
from children import (
    IMAGES,
    TEXT_NNX,
    flags,
    one_message,
    read_state,
    result_of,
    steps_in,
    train_with,
)

pytestmark = pytest.mark.slow


class Source:
    """The rows of a split as a stream, which begins again after the last one."""

    def __init__(self, split, config, options):
        self.split, self.config, self.options = split, config, options
        if options.get("exact", True):
            self.resumes_exactly = True

    def batches(self, start_step):
        import jax

        if "opened" in self.options:
            with open(self.options["opened"], "a") as file:
                print(start_step, file=file)
        size = self.config.batch_size // jax.process_count()
        step = start_step if self.options.get("exact", True) else 0
        ends_here = self.options.get("only_in", jax.process_index()) == jax.process_index()
        while step != self.options.get("ends") or not ends_here:
            first = step * self.config.batch_size + jax.process_index() * size
            part = self.split.rows(np.arange(first, first + size) % len(self.split))
            if step >= self.options.get("spoiled", 10**9):
                part = SPOILED[self.options["how"]](part)
            yield part
            step += 1


class Finite(Source):
    """The rows of a split once: the last batch is shorter."""

    def batches(self, start_step):
        size = self.config.batch_size
        for first in range(start_step * size, len(self.split), size):
            yield self.split.rows(np.arange(first, min(first + size, len(self.split))))


def without(part, name):
    return {key: x for key, x in part.items() if key != name}


SPOILED = {
    "short": lambda part: {name: x[1:] for name, x in part.items()},
    "ragged": lambda part: part | {"mask": part["mask"][1:]},
    "no mask": lambda part: without(part, "mask"),
    "mask of integers": lambda part: part | {"mask": part["mask"].astype(np.int32)},
    "a list": lambda part: part | {"label": part["label"].tolist()},
    "a tuple": lambda part: tuple(part.values()),
    "a scalar": lambda part: part | {"label": np.float32(1)},
    "another dtype": lambda part: part | {"image": part["image"].astype(np.float64)},
    "another shape": lambda part: part | {"image": part["image"][:, 1:]},
    "one more": lambda part: part | {"more": part["label"]},
}


def streaming(get, options):
    """Hook: the data of this run is a stream, for training or for every split."""
    data = get("data")
    load = data.load

    def load_streams(config):
        dataset = load(config)
        if options.get("train", True):
            dataset = dataset._replace(train=Source(dataset.train, config, options))
        for name in ("validation", "test"):
            if options.get("evaluated"):
                cls = {"finite": Finite, "endless": Source}[options["evaluated"]]
                split = cls(getattr(dataset, name), config, options)
                dataset = dataset._replace(**{name: split})
        return dataset

    data.load = load_streams


def train(server, workdir, options=None, package=IMAGES, **changes):
    """Start a run on a stream."""
    words = flags(server, package, workdir=workdir, **changes)
    return server.start(train_with, {streaming: options or {}}, *words, package=package)


def state_of(server, workdir, package=IMAGES):
    return server.start(read_state, workdir, package=package).answer()


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_a_stream_that_keeps_its_promise_resumes_bit_for_bit(server, tmp_path, package):
    opened = tmp_path / "opened"
    options = {"opened": str(opened)}
    train(server, tmp_path / "straight", package=package).ends_with(0)
    first = {"stop_after_step": 5, "data__workers": 3}
    train(server, tmp_path / "run", options, package, **first).ends_with(75)
    assert opened.read_text().split() == ["0"]
    text = train(server, tmp_path / "run", options, package).ends_with(0)
    assert opened.read_text().split() == ["0", "0", "5"]
    assert "resumes_exactly" not in text and "epoch" not in text
    assert "train       a stream" in text
    a, b = (state_of(server, tmp_path / name, package) for name in ("run", "straight"))
    assert a == b
    for key in ("eval", "best_step", "best_metric"):
        assert result_of(tmp_path / "run")[key] == result_of(tmp_path / "straight")[key]


def test_a_stream_without_the_promise_says_so_when_it_is_resumed(server, tmp_path):
    options = {"exact": False}
    straight = train(server, tmp_path / "straight", options).ends_with(0)
    first = train(server, tmp_path / "run", options, stop_after_step=5).ends_with(75)
    second = train(server, tmp_path / "run", options).ends_with(0)
    assert "resumes_exactly" not in straight + first
    assert "from step 5 on the run may see other rows than without the stop" in second
    assert state_of(server, tmp_path / "run") != state_of(server, tmp_path / "straight")


def test_epochs_of_a_stream_are_refused_and_evaluations_come_every_1000_steps(server, tmp_path):
    run = train(server, tmp_path / "run", epochs=2, total_steps=None)
    one_message(run.ends_with(2), "--epochs 2", "stream", "--total-steps")
    assert not (tmp_path / "run").exists()
    text = train(server, tmp_path / "run", eval_every=None).ends_with(0)
    settings = json.loads((tmp_path / "run/config.json").read_text())["settings"]
    assert settings["eval_every"] == 1000
    assert "--eval-every is 1000 (default: 1000 for a stream)" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_ends_too_early_ends_the_run_with_its_state(server, tmp_path, workers):
    options = {"ends": 7}
    run = train(server, tmp_path / "run", options, data__workers=workers)
    one_message(run.ends_with(2), "ended at step 7 of 12", "--total-steps 7")
    assert "7" in steps_in(tmp_path / "run")
    train(server, tmp_path / "run", options, total_steps=7).ends_with(0)
    assert result_of(tmp_path / "run")["status"] == "completed"
    one_message(train(server, tmp_path / "empty", {"ends": 0}).ends_with(2), "empty")
    assert not (tmp_path / "empty").exists()


FIRST = [how for how in SPOILED if not how.startswith(("another", "one"))]


@pytest.mark.parametrize("how", FIRST)
def test_a_stream_that_begins_with_a_wrong_batch_is_refused(server, tmp_path, how):
    text = train(server, tmp_path / "run", {"spoiled": 0, "how": how}).ends_with(2)
    one_message(text, "the first batch", "NumPy arrays of 16 rows", "mask float32")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", [how for how in SPOILED if how != "a scalar"])
def test_a_wrong_batch_later_on_is_named(server, tmp_path, how):
    text = train(server, tmp_path / "run", {"spoiled": 5, "how": how}).ends_with(2)
    one_message(text, "batch 5", "image float32 [16, 8, 8, 1], label int32 [16]", "as the first")
    assert "5" in steps_in(tmp_path / "run")


def test_overfit_batches_repeats_the_first_batches_of_a_stream(server, tmp_path):
    opened = tmp_path / "opened"
    options = {"opened": str(opened), "ends": 2}
    settings = {"overfit_batches": 2, "total_steps": 9, "eval_every": 0}
    train(server, tmp_path / "straight", options, **settings).ends_with(0)
    train(server, tmp_path / "run", options, stop_after_step=5, **settings).ends_with(75)
    train(server, tmp_path / "run", options, **settings).ends_with(0)
    assert opened.read_text().split() == ["0"] * 3
    assert state_of(server, tmp_path / "run") == state_of(server, tmp_path / "straight")


def evaluate_with(get, hooks, *words):
    from children import evaluate

    streaming(get, hooks)
    return evaluate(get, *words)


def test_a_stream_is_evaluated_to_its_end_or_for_so_many_batches(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "rows")
    server.start(train_with, {}, *words).ends_with(0)
    finite = {"train": False, "evaluated": "finite"}
    train(server, tmp_path / "run", finite).ends_with(0)
    rows, run = result_of(tmp_path / "rows"), result_of(tmp_path / "run")
    assert run["eval"].keys() == rows["eval"].keys() - {"largest_class"}
    for name, score in run["eval"].items():
        assert score == pytest.approx(rows["eval"][name], rel=1e-5), name
    assert state_of(server, tmp_path / "rows") == state_of(server, tmp_path / "run")

    endless = {"train": False, "evaluated": "endless"}
    train(server, tmp_path / "few", endless, eval_batches=3).ends_with(0)
    assert result_of(tmp_path / "few")["eval"]["num_examples"] == 48
    for options, more, count in ((finite, [], 32), (endless, ["--eval-batches", "2"], 32)):
        words = ["--workdir", str(tmp_path / "run"), "--json", *more]
        text = server.start(evaluate_with, options, *words).ends_with(0)
        assert json.loads(text.splitlines()[-1])["num_examples"] == count


def adapted(get, code):
    """Hook: each split is the class of the README over a list, as of Hugging Face or torch."""
    names = {"np": np, "dataclass": dataclass, "Any": object}
    exec(code, names)
    data = get("data")
    load = data.load

    def load_adapted(config):
        dataset = load(config)
        for name in ("train", "validation", "test"):
            split = getattr(dataset, name)
            batch = without(split.rows(np.arange(len(split))), "mask")
            rows = [{key: x[i] for key, x in batch.items()} for i in range(len(split))]
            dataset = dataset._replace(**{name: names["Split"](rows)})
        return dataset

    data.load = load_adapted


def test_the_adapter_of_the_readme_gives_the_rows_of_any_data_set_with_a_length(server, tmp_path):
    readme = (bake.ROOT / "{{cookiecutter.project_slug}}/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    words = flags(server, IMAGES)
    server.start(train_with, {}, *words, "--workdir", tmp_path / "rows").ends_with(0)
    hooks = {adapted: code}
    server.start(train_with, hooks, *words, "--workdir", tmp_path / "run").ends_with(0)
    assert state_of(server, tmp_path / "rows") == state_of(server, tmp_path / "run")


def processes(server, count, words, hooks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        told = {"TRAIN_COORDINATOR": f"127.0.0.1:{probe.getsockname()[1]}"}
    told |= {"TRAIN_NUM_PROCESSES": str(count), "TRAIN_COORDINATOR_TIMEOUT": "60"}
    envs = [told | {"TRAIN_PROCESS_ID": str(rank)} for rank in range(count)]
    return [server.start(train_with, hooks, *words, env=env) for env in envs]


def test_two_processes_share_a_stream(server, tmp_path):
    """Each takes its part: the global batches of one process, and its result but for rounding."""
    options = {"evaluated": "endless"}
    train(server, tmp_path / "one", options, eval_batches=2).ends_with(0)
    words = flags(server, IMAGES, workdir=tmp_path / "two", eval_batches=2)
    for rank in processes(server, 2, [*words, "--stop-after-step", "5"], {streaming: options}):
        rank.ends_with(75)
    for rank in processes(server, 2, words, {streaming: options}):
        rank.ends_with(0)
    one, two = result_of(tmp_path / "one")["eval"], result_of(tmp_path / "two")["eval"]
    assert one["num_examples"] == two["num_examples"] == 32
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_what_two_processes_cannot_do_with_a_stream_ends_both_with_the_cause(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "all")
    for rank in processes(server, 2, words, {streaming: {"evaluated": "finite"}}):
        assert "give --eval-batches N" in rank.ends_with(2)
    words = flags(server, IMAGES, workdir=tmp_path / "ended")
    for rank in processes(server, 2, words, {streaming: {"ends": 5}}):
        assert "ended at step 5 of 12" in rank.ends_with(2)
    spoiled = {"spoiled": 0, "how": "short"}
    for rank in processes(server, 2, words, {streaming: spoiled}):
        assert "NumPy arrays of 8 rows" in rank.ends_with(2)


def test_a_stream_that_ends_in_one_process_ends_both_runs(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    options = {"ends": 5, "only_in": 1}
    other, one = processes(server, 2, words, {streaming: options})
    assert one.wait() not in (0, 75) and other.wait() not in (0, 75)
    assert "ended at step 5 of 12" in one.text
