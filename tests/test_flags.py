"""check_flags.py names what is wrong with the variables of xla_flags.env instead of aborting."""

import importlib.util
import os
import subprocess
import sys

import bake
import pytest

CHECKER = bake.ROOT.joinpath(*["{{cookiecutter.project_slug}}"] * 2) / "check_flags.py"

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("jaxlib"), reason="jaxlib is not installed here"
)


def check(**variables):
    foreign = ("JAX_", "XLA_", "LIBTPU_", "TF_", "LD_LIBRARY_PATH")
    kept = {name: x for name, x in os.environ.items() if not name.startswith(foreign)}
    return subprocess.run(
        [sys.executable, CHECKER],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_flags_that_are_set_are_shown_when_they_are_good():
    flags = "--xla_gpu_autotune_level=2 --xla_dump_to='a b'"
    result = check(XLA_FLAGS=flags, JAX_OPTIMIZATION_LEVEL="O1", XLA_CLIENT_MEM_FRACTION="0.9")
    assert (result.returncode, result.stderr) == (0, "")
    assert flags in result.stdout and "jaxlib" in result.stdout
    assert check().returncode == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--xla_gpu_autotune_level=4 --xla_no_such_flag=1", ["--xla_no_such_flag=1"]),
        ("--xla_no=1 --xla_gpu_autotune_level=4 --xla_nor=2", ["--xla_no=1", "--xla_nor=2"]),
        ("--xla_gpu_autotune_level=high", ["--xla_gpu_autotune_level=high"]),
        ("--xla_gpu_enable_command_buffer=BOGUS", ["--xla_gpu_enable_command_buffer=BOGUS"]),
        ("--xla_gpu_autotune_level=4 # fast --xla_no_such_flag=1", ["'#'", "'fast'"]),
        ("--xla_gpu_autotune_level = 3", ["'='", "'3'"]),
        ("-xla_gpu_autotune_level=3", ["'-xla_gpu_autotune_level=3'"]),
        ("flags.txt", ["'flags.txt'"]),
        ("--xla_dump_to='a b", ["quotation"]),
        ("--xla_tpu_enable_latency_hiding_scheduler=true", ["belongs in LIBTPU_INIT_ARGS"]),
    ],
)
def test_a_bad_flag_is_named(flags, named):
    result = check(XLA_FLAGS=flags)
    assert result.returncode == 2
    messages = result.stderr.splitlines()
    assert all(line.startswith("error: XLA_FLAGS: ") for line in messages)
    assert len(messages) == len(named)
    for message, word in zip(messages, named, strict=True):
        assert word in message
        assert "--xla_gpu_autotune_level=4" not in message


def test_cuda_libraries_of_the_system_are_named(tmp_path):
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/__init__.py").touch()  # as the wheels of jax[cuda13] are
    libraries = {"LD_LIBRARY_PATH": "/opt/lib:/usr/local/cuda/lib64"}
    assert check(**libraries).returncode == 0
    result = check(**libraries, PYTHONPATH=str(tmp_path))
    assert result.returncode == 2 and "/usr/local/cuda/lib64, which hides" in result.stderr


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        (
            {"XLA_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"},
            "unset the old one",
        ),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "arena"}, "must be one of default"),
        ({"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, "XLA_PYTHON_CLIENT_ALLOCATOR"),
        ({"LIBTPU_INIT_ARGS": "--xla_gpu_autotune_level=4"}, "belongs in XLA_FLAGS"),
        ({"JAX_OPTIMIZATION_LEVEL": "O9"}, "O9"),
    ],
)
def test_a_bad_variable_is_named(variables, word):
    result = check(**variables)
    assert result.returncode == 2, result.stdout
    (message,) = result.stderr.splitlines()
    assert word in message and "Traceback" not in message
