"""check_flags.py names what is wrong with the variables of xla_flags.env instead of aborting."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys

import bake
import pytest

CHECKER = bake.PACKAGE / "tools/check_flags.py"
FLAGS_FILE = CHECKER.parents[2] / "xla_flags.env"

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("jaxlib"), reason="jaxlib is not installed here"
)


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Run the checker of a project for an accelerator, with some variables set."""

    def check(accelerator="cuda12", **variables):
        root = tmp_path_factory.mktemp("project")
        (root / "net/tools").mkdir(parents=True)
        text = bake.render(FLAGS_FILE.read_text(encoding="utf-8"), {"accelerator": accelerator})
        (root / "xla_flags.env").write_text(text, encoding="utf-8")
        return run(shutil.copy(CHECKER, root / "net/tools"), variables)

    return check


def run(checker, variables):
    foreign = ("JAX_", "XLA_", "LIBTPU_", "TF_", "LD_LIBRARY_PATH", "NCCL_", "TRAIN_", "CUDA_")
    kept = {name: x for name, x in os.environ.items() if not name.startswith(foreign)}
    return subprocess.run(
        [sys.executable, checker],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_flags_that_are_set_are_shown_when_they_are_good(check):
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
def test_a_bad_flag_is_named(check, flags, named):
    result = check(XLA_FLAGS=flags)
    assert result.returncode == 2
    messages = result.stderr.splitlines()
    assert all(line.startswith("error: XLA_FLAGS: ") for line in messages)
    assert len(messages) == len(named)
    for message, word in zip(messages, named, strict=True):
        assert word in message
        assert "--xla_gpu_autotune_level=4" not in message


def test_cuda_libraries_of_the_system_are_named(check, tmp_path):
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
        ({"JAX_ENABLE_X64": "maybe"}, "maybe"),  # which JAX itself says
    ],
)
def test_a_bad_variable_is_named(check, variables, word):
    result = check(**variables)
    assert result.returncode == 2, result.stdout
    (message,) = result.stderr.splitlines()
    assert word in message and "Traceback" not in message


# Every variable of xla_flags.env, of launch.sh and of those around them: values that nothing would
# complain about, or only the run, later.
BAD_VALUES = {
    "XLA_CLIENT_MEM_FRACTION": ["75", "0", "-0.5", "0.9,", "90%", "nan", "1_0"],
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ["75"],
    "XLA_PYTHON_CLIENT_PREALLOCATE": ["no", "off", "FALSE"],
    "XLA_PYTHON_CLIENT_ALLOCATOR": ["arena", "address"],
    "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": ["1GB"],
    "JAX_COMPILATION_CACHE_DIR": ["/dev/null/cache", "/proc/cache"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ["abc", "-1", "", "1s"],
    "JAX_NUM_CPU_DEVICES": ["0", "-2", "two", "2.0", ""],
    "JAX_OPTIMIZATION_LEVEL": ["O9", "1", "o1"],
    "JAX_PLATFORMS": ["cude", "cpu;cuda", "cuda, cpu"],
    "NCCL_DEBUG": ["LOUD", "1"],
    "NCCL_SOCKET_IFNAME": ["nosuch0", "=nosuch0", "lo,nosuch0", "=l"],
    "CUDA_VISIBLE_DEVICES": ["gpu0", "0;1", "0 1", "0,0", "0,,1", "cuda:0"],
    "TRAIN_COORDINATOR": ["here", "here:port", ":1", "a b:1"],
    "TRAIN_COORDINATOR_TIMEOUT": ["0", "5m"],
    "TRAIN_NUM_PROCESSES": ["0", "two"],
    "TRAIN_PROCESS_ID": ["-1", "first"],
    "TRAIN_LOCAL_DEVICE_IDS": ["all", "0 1"],
    "TRAIN_PORT": ["0", "65536", "http"],
    "TRAIN_DISTRIBUTED": ["yes"],
}
GOOD_VALUES = {
    "XLA_CLIENT_MEM_FRACTION": ["0.9", ".75", "1"],
    "XLA_PYTHON_CLIENT_PREALLOCATE": ["false", "true", "0"],
    "XLA_PYTHON_CLIENT_ALLOCATOR": ["platform", "CUDA_ASYNC"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ["0", "1.5", "1e-3"],
    "JAX_NUM_CPU_DEVICES": ["2"],
    "JAX_OPTIMIZATION_LEVEL": ["O1", "UNKNOWN"],
    "JAX_PLATFORMS": ["cpu", "cuda,cpu", "tpu,cpu", "rocm", ""],
    "JAX_COMPILATION_CACHE_DIR": ["gs://bucket/cache"],
    "NCCL_DEBUG": ["INFO", "warn"],
    "NCCL_SOCKET_IFNAME": ["lo", "=lo", "^docker", "l", "^=docker0,lo"],
    "CUDA_VISIBLE_DEVICES": ["", "-1", "0", "3,1", "GPU-8f2a", "MIG-GPU-8f2a/1/0"],
    "TRAIN_COORDINATOR": ["node-1.cluster:2345", "[::1]:2345"],
    "TRAIN_PORT": ["20000"],
}


@pytest.fixture(scope="module")
def rules():
    return runpy.run_path(str(CHECKER))["RULES"]


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_value_that_cannot_work_is_named_with_its_rule(check, rules, name):
    result = check(**{name: BAD_VALUES[name][0]})
    (message,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert message.startswith(f"error: {name}={BAD_VALUES[name][0]}: ")
    assert all(rules[name](value) for value in BAD_VALUES[name])


def test_values_that_work_are_taken(rules):
    for name, values in GOOD_VALUES.items():
        assert {value: rules[name](value) for value in values} == dict.fromkeys(values)


def test_more_than_all_memory_is_for_unified_memory_only(check):
    assert check(XLA_CLIENT_MEM_FRACTION="4.0").returncode == 2
    assert check(XLA_CLIENT_MEM_FRACTION="4.0", TF_FORCE_UNIFIED_MEMORY="1").returncode == 0


def test_a_variable_that_is_empty_but_read_is_named(check):
    """JAX makes a number of it, and its message does not say of what."""
    result = check(JAX_NUM_CPU_DEVICES="")
    assert result.stderr.startswith("error: JAX_NUM_CPU_DEVICES=: must be a whole number")
    assert check(XLA_CLIENT_MEM_FRACTION="", CUDA_VISIBLE_DEVICES="").returncode == 0


def test_every_variable_that_the_project_sets_has_a_check_of_its_value(rules):
    files = [FLAGS_FILE, FLAGS_FILE.parent / "launch.sh"]
    text, launcher = (path.read_text(encoding="utf-8") for path in files)
    names = set(re.findall(r"export ([A-Z_]+)$", text, re.MULTILINE))
    names |= set(re.findall(r'^ *(?:# )?(?:: "\$\{)?([A-Z][A-Z_]+):?="', text, re.MULTILINE))
    names |= set(re.findall(r'"\$\{([A-Z_]+):=', text))
    assert {"NCCL_SOCKET_IFNAME", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"} <= names
    names |= set(re.findall(r"\bTRAIN_[A-Z_]+\b", launcher))
    assert names - {"XLA_FLAGS", "LIBTPU_INIT_ARGS"} <= set(rules)
    assert set(rules) - {"JAX_PLATFORM_NAME"} == set(BAD_VALUES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("XLA_FLAG", "XLA_FLAGS"),
        ("xla_flags", "XLA_FLAGS"),
        ("JAX_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR"),
        ("JAX_PLATFORM", "JAX_PLATFORMS"),
        ("LIBTPU_INIT_ARG", "LIBTPU_INIT_ARGS"),
        ("XLA_CLIENT_MEMORY_FRACTION", "XLA_CLIENT_MEM_FRACTION"),
        ("XLA_PYTHON_CLIENT_PREALOCATE", "XLA_PYTHON_CLIENT_PREALLOCATE"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("TRAIN_NUM_PROCESS", "TRAIN_NUM_PROCESSES"),
    ],
)
def test_a_misspelt_name_is_named(check, name, meant):
    result = check(**{name: "1"})
    assert result.returncode == 2
    assert result.stderr == f"error: no program reads {name}: did you mean {meant}?\n"


def test_other_variables_are_left_alone(check):
    """Settings of JAX that look like those above, and what other programs read."""
    names = ("JAX_CUDA_VISIBLE_DEVICES", "JAX_CPU_COLLECTIVES_IMPLEMENTATION")
    values = dict(zip(names, ("0", "gloo"), strict=True))
    result = check(**values, NCCL_DEBUG_SUBSYS="ALL", NCCL_IB_DISABLE="1", TRAIN_DATA="/d")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("value", ["cuda14", "", "'gpu'", "cuda 12"])
def test_a_bad_accelerator_in_the_file_itself(check, value):
    result = check(accelerator=value)
    assert result.returncode == 2
    shown = value.strip("'")
    assert f"error: xla_flags.env: accelerator={shown}: must be one of cpu, cuda12" in result.stderr
    assert check(accelerator="'tpu' # as a word").returncode == 0
