"""A fresh project passes its own checks, tests and smoke test, and `make` works in it."""

import os
import shutil
import subprocess
import sys

import bake
import pytest
from answers import COMBINATIONS, TWO_COMBINATIONS


def succeed(command, cwd, **environment):
    result = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="session")
def caches(pytestconfig):
    """What mypy knows of the libraries, and what JAX has compiled, for the next project as well."""
    return {name: pytestconfig.cache.mkdir(f"projects_{name}") for name in ("mypy", "jax")}


@pytest.mark.parametrize(
    ("task", "api"),
    [
        pytest.param(*x, marks=() if x in TWO_COMBINATIONS else pytest.mark.slow)
        for x in COMBINATIONS
    ],
)
def test_a_fresh_project_passes_its_smoke_test(tmp_path, task, api):
    """Which trains, stops, resumes and uses two devices: what test-quick has of real runs."""
    project = bake.generated(tmp_path / "sp ace 'ü", task, api)
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    succeed([sys.executable, "tests/smoke.py"], project)
    assert before == {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "api"), COMBINATIONS)
def test_a_fresh_project_passes_its_own_checks(tmp_path, caches, task, api):
    project = bake.generated(tmp_path / "sp ace 'ü", task, api)
    succeed([sys.executable, "-m", "ruff", "check", "."], project)
    assert "left unchanged" in succeed([sys.executable, "-m", "ruff", "format", "."], project)
    succeed([sys.executable, "-m", "mypy"], project, MYPY_CACHE_DIR=str(caches["mypy"]))
    (project / ".pytest_cache").mkdir()
    (project / ".pytest_cache/jax").symlink_to(caches["jax"])
    succeed([sys.executable, "-m", "pytest", "-q"], project)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not on PATH")
def test_from_the_question_to_a_scored_model(tmp_path):
    output = tmp_path / "sp ace 'ü"
    output.mkdir()
    (output / "pyproject.toml").write_text(
        '[project]\nname = "parent"\nversion = "0"\n[tool.uv.workspace]\nmembers = ["*"]\n'
    )
    result = bake.run_cookiecutter(output, smoke_test="required", timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Smoke test passed" in result.stdout
    project = output / "my_flax_project"
    succeed(["make", "train", "ARGS=--total-steps 60 --seed 1"], project)
    assert "accuracy" in succeed(["make", "evaluate"], project)
    assert "over, completed" in succeed(["make", "resume"], project)
    assert "smoke" in succeed(["make"], project)
    succeed(["make", "lock"], project)
    assert (project / "uv.lock").exists()
    assert sorted(path.name for path in output.iterdir()) == ["my_flax_project", "pyproject.toml"]
