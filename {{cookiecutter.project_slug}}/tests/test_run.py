"""Whole runs: stop, resume, refuse, finish."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest


def leaves(module, path):
    """Every array of the latest checkpoint."""
    *_, state = module("evaluate").load_run(Path(path), "latest")
    return jax.tree.leaves(jax.device_get(state))


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(module, config, dataset, tmp_path):
    main = module("train").main
    threads = dataclasses.replace(config.data, workers=2)  # change nothing
    stopped = main(dataclasses.replace(config, stop_after_step=4, data=threads))
    assert (stopped["status"], stopped["step"], stopped["eval"]) == ("preempted", 4, None)
    resumed = main(config)
    straight = main(dataclasses.replace(config, workdir=str(tmp_path / "straight")))
    assert resumed["status"] == straight["status"] == "completed"
    for key in ("eval", "best_step", "best_metric", "step"):
        assert resumed[key] == straight[key]
    a, b = leaves(module, config.workdir), leaves(module, tmp_path / "straight")
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_a_finished_run_is_not_trained_again(module, config, dataset):
    first = module("train").main(config)
    assert module("train").main(config) == first
    longer = module("train").main(dataclasses.replace(config, total_steps=8))
    assert (longer["status"], longer["step"]) == ("completed", 8)


def test_result_json_has_no_nan_and_the_best_checkpoint_is_kept(module, config, dataset):
    result = module("train").main(dataclasses.replace(config, eval_every=2))
    written = json.loads((Path(config.workdir) / "result.json").read_text())
    assert written == json.loads(json.dumps(result, allow_nan=False))
    kept = {p.name for p in (Path(config.workdir) / "checkpoints").iterdir()}
    assert {str(result["best_step"]), "6"} <= kept


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 32}, ["--batch-size", "16 -> 32", "--init-from"]),
        ({"seed": 1}, ["--seed", "0 -> 1", "--init-from"]),
        ({"task.first": 0.5}, ["--task.", "0.0 -> 0.5", "--init-from"]),
    ],
)
def test_a_setting_that_must_not_change_is_refused_on_resume(
    module, config, dataset, change, words
):
    module("train").main(dataclasses.replace(config, stop_after_step=2))
    if "task.first" in change:  # the first setting of the task, whichever it is
        (name, *_) = (field.name for field in dataclasses.fields(config.task))
        change = {"task": dataclasses.replace(config.task, **{name: change["task.first"]})}
    with pytest.raises(module("config").SettingError) as error:
        module("train").main(dataclasses.replace(config, **change))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 64}, ["--batch-size 64", "52"]),
        ({"batch_size": 15}, ["--batch-size 15", "2 devices"]),
        ({"total_steps": 0}, ["--total-steps 0", "at least 1"]),
        ({"epochs": 2}, ["--total-steps", "--epochs"]),
        ({"accumulation_steps": 3}, ["--batch-size 16", "--accumulation-steps 3"]),
        ({"profile_steps": "9"}, ["--profile-steps 9", "A:B"]),
    ],
)
def test_a_bad_setting_is_named_before_anything_is_written(module, config, dataset, change, words):
    with pytest.raises(module("config").SettingError) as error:
        module("train").main(dataclasses.replace(config, **change))
    assert all(word in str(error.value) for word in words)
    assert not Path(config.workdir).exists()


def test_a_diverging_run_ends_and_keeps_the_last_good_checkpoint(module, config, dataset):
    main, optimizer = module("train").main, config.optimizer
    config = dataclasses.replace(config, max_skipped_steps=1, checkpoint_every=2, total_steps=4)
    main(config)
    rows, split = dataset.train.rows, dataset.train

    def poisoned(indices):
        batch = rows(indices)
        return batch | {"mask": np.where(batch["mask"] > 0, np.float32(np.inf), np.float32(0))}

    split.rows = poisoned
    longer = dataclasses.replace(config, total_steps=20, optimizer=optimizer)
    result = main(longer)
    assert result["status"] == "diverged" and result["step"] <= 10
    assert (Path(config.workdir) / "checkpoints" / "4").is_dir()
    assert main(longer)["status"] == "diverged"


def test_evaluation_counts_every_row_once_for_any_batch_size(module, config, dataset):
    module("train").main(config)
    evaluate = module("evaluate")
    scores = []
    for batch_size in (2, 8, 64):
        run = json.loads((Path(config.workdir) / "config.json").read_text())
        run["settings"]["batch_size"] = batch_size
        (Path(config.workdir) / "config.json").write_text(json.dumps(run))
        scores.append(evaluate.main(evaluate.EvaluateConfig(workdir=config.workdir)))
    for score in scores:
        assert score["num_examples"] == 21
        assert score == pytest.approx(scores[0], rel=1e-5)  # perplexity is an exponential


def test_images_histograms_and_texts_reach_tensorboard(module, config, dataset):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboardX import summary

    recorder = module("runtime.recorder")
    write = recorder.Recorder.write

    def write_more(self, kind, step, metrics):
        write(self, kind, step, metrics)
        self.add_summary(step, summary.image("eval/image", np.zeros((3, 8, 8), np.uint8)))
        self.add_summary(step, summary.histogram("eval/weights", np.arange(10.0), "auto"))
        self.add_summary(step, summary.text("eval/text", "once upon a time"))

    recorder.Recorder.write = write_more
    try:
        module("train").main(config)
    finally:
        recorder.Recorder.write = write
    everything = {"images": 0, "histograms": 0}  # it would keep a sample of them otherwise
    found = EventAccumulator(str(Path(config.workdir) / "tb"), size_guidance=everything)
    found.Reload()
    assert {"eval/loss", "train/learning_rate"} <= set(found.Tags()["scalars"])
    assert 6 in {image.step for image in found.Images("eval/image")}
    assert 6 in {histogram.step for histogram in found.Histograms("eval/weights")}
    (tensor,) = {x.tensor_proto.string_val[0] for x in found.Tensors("eval/text/text_summary")}
    assert tensor == b"once upon a time"
