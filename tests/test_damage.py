"""Damaged files: every damage is noticed, nothing is lost, and the run goes on if it can."""

import contextlib
import logging
import shutil
from pathlib import Path

import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    changed,
    damage,
    digests,
    flags,
    one_message,
    read_state,
    result_of,
    snapshot,
    train,
)

pytestmark = pytest.mark.slow


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
