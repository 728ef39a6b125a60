"""A run says when it waits for its data, compiles nothing twice, and leaks no arrays."""

import gc
import time

import pytest
from children import IMAGES, TEXT_NNX, flags, result_of, train_with
from run_hooks import around_step

pytestmark = pytest.mark.slow


def test_a_run_that_waits_for_its_data_says_so_once(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path, total_steps=24)
    text = server.start(train_with, {slow_data: None}, *words).ends_with(0)
    assert text.count("--data.workers") == 1
    assert result_of(tmp_path)["input_wait_fraction"] > 0.2


def slow_data(get, _):
    batches = get("batches")
    indices = batches.train_indices

    def slowly(*args):
        time.sleep(0.1)
        return indices(*args)

    batches.train_indices = slowly


def test_the_second_run_compiles_nothing(server, tmp_path):
    found = []
    for name in ("one", "two"):
        words = flags(server, IMAGES, workdir=tmp_path / name)
        server.start(train_with, {use_cache: str(tmp_path / "cache")}, *words).ends_with(0)
        found.append({x.name for x in (tmp_path / "cache").iterdir() if x.name.endswith("-cache")})
    assert found[0] and found[0] == found[1]


def use_cache(get, directory):
    import jax

    jax.config.update("jax_compilation_cache_dir", directory)


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_arrays_do_not_pile_up(server, tmp_path, package):
    change = {"total_steps": 300, "log_every": 10, "eval_every": 50, "checkpoint_every": 25}
    words = flags(server, package, workdir=tmp_path, **change)
    counts = server.start(count_live_arrays, *words, package=package).answer()
    assert len(counts) == 6
    # Up to 100 steps and a checkpoint are under way; one array more per step would be 250.
    assert max(counts) - min(counts) < 200, counts


def count_live_arrays(get, *words):
    """Train and count the live arrays before every 50th step."""

    import jax

    counts = []

    def watch(step):
        calls = iter(range(10**9))

        def watched(*arguments):
            if next(calls) % 50 == 0:
                gc.collect()
                counts.append(len(jax.live_arrays()))
            return step(*arguments)

        return watched

    config = get("runtime.command_line").parse_settings(list(words))
    get("train").main(config, around_step(get, watch))
    return counts
