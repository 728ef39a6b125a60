"""--init-from: a new run starts with the parameters of another one."""

import contextlib
import re

import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    TEXT,
    TEXT_NNX,
    damage,
    digests,
    flags,
    one_message,
    read_state,
    result_of,
    train,
    train_with,
)
from run_hooks import around_step, raise_before, use_compile_step, use_devices

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_parameters_of_another_run(server, tmp_path, package):
    def start(name, source, **change):
        words = flags(
            server, package, workdir=tmp_path / name, init_from=source, eval_every=0, **change
        )
        hooks = {raise_before: 0}
        return server.start(train_with, hooks, *words, package=package)

    words = flags(server, package, workdir=tmp_path / "a", precision="bfloat16", ema_decay=0.9)
    run = server.start(train_with, {use_devices: 2}, *words, package=package)
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
    assert re.search("keeps? (its|their) new values?", text)
    assert re.search("parameters? comes? from", text)
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

    found = []

    def look(step):
        def stop_at_once(state, *arguments):
            found.append(digests(jax, state))
            raise KeyboardInterrupt

        return stop_at_once

    use_compile_step(get, around_step(get, look))
    with contextlib.suppress(KeyboardInterrupt):
        train(get, *words)
    return found[0]
