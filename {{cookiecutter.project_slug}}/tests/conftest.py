"""Settings and fixtures of all tests: everything runs on two simulated CPU devices."""

import importlib
import os
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_NUM_CPU_DEVICES": "2",
    # Most tests compile the same few functions.
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parent.parent / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
# Quick to compile matters here, and quick to run does not.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import pytest
from smoke import PACKAGE, FewRows


@pytest.fixture
def module():
    """Import a module of the package by its short name."""
    return lambda name: importlib.import_module(f"{PACKAGE}.{name}")


@pytest.fixture
def dataset(module, monkeypatch):
    """A small part of the data, which main() and load_run() are given as well."""
    data, config = module("data"), module("config")
    full = data.load(config.Config(model=module("model").TINY))
    few = full._replace(
        train=FewRows(full.train, 52),
        validation=FewRows(full.validation, 21),
        test=FewRows(full.test, 21),
    )
    monkeypatch.setattr(data, "load", lambda config: few)
    return few


@pytest.fixture
def config(module, tmp_path: Path):
    """A tiny configuration: 3 steps per epoch, two epochs."""
    settings = module("config")
    return settings.Config(
        workdir=str(tmp_path / "run"),
        total_steps=6,
        batch_size=16,
        log_every=2,
        checkpoint_every=0,
        model=module("model").TINY,
        optimizer=settings.OptimizerConfig(learning_rate=0.01),
    )
