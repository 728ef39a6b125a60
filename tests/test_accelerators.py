"""accelerators.py says which hardware would be left idle, and the command that mends it."""

import importlib.util
import re
import subprocess
import sys

import bake
import pytest

FILE = bake.PACKAGE / "runtime/accelerators.py"
PCI = "sys/bus/pci/devices/0000:00:04.0"
GPU = {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/version": ""}
TPU = {"dev/vfio/0": "", f"{PCI}/vendor": "0x1ae0\n", f"{PCI}/class": "0x120000\n"}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "JAX_PLATFORMS")
VARIABLES += ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PJRT_NAMES_AND_LIBRARY_PATHS")


def version(driver, kind="NVIDIA UNIX x86_64 Kernel Module"):
    """/proc/driver/nvidia/version, as the closed and the open kernel module write it."""
    return f"NVRM version: {kind}  {driver}  Release Build\nGCC version:  gcc version 12.2.0\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Ask the module about a machine with these files, plug-ins and variables."""
    spec = importlib.util.spec_from_file_location("accelerators", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def ask(
        files, made_for="cpu", plugins=(), platform="auto", backend=None, driver=None, **environ
    ):
        root = tmp_path / "root"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(version(driver) if driver and "version" in name else text)
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name in plugins)
        monkeypatch.setattr(module, "FLAGS", tmp_path / "xla_flags.env")
        module.FLAGS.write_text(f"# accelerator=no\naccelerator={made_for}\n")
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        if backend:
            return module.left_on_cpu(platform, backend, root)
        return module.unused_accelerator(platform, root)

    ask.module, ask.root = module, tmp_path / "root"
    return ask


@pytest.mark.parametrize(
    ("files", "driver", "made_for", "extra"),
    [
        (GPU, "580.65.06", "cpu", "cuda13"),
        (GPU, "575.57", "cpu", "cuda12"),
        (GPU, None, "cpu", "cuda12"),
        (GPU, "595.1", "cuda12", "cuda12"),
        (GPU, "550.54", "cuda13", "cuda12"),
        (GPU, None, "cuda13", "cuda13"),
        (TPU, None, "cpu", "tpu"),
        (TPU, None, "tpu", "tpu"),
    ],
)
def test_what_is_idle_and_the_command_that_mends_it(machine, files, driver, made_for, extra):
    unused = machine(files, driver=driver, made_for=made_for)
    assert f"'make setup EXTRAS={extra},dev'" in unused.remedy
    assert (f"EXTRAS := {extra},dev" in unused.remedy) == (made_for != extra)
    assert unused.is_wanted == (made_for != "cpu")
    assert ("TPU" if extra == "tpu" else "NVIDIA GPU") in unused.what
    assert driver is None or driver.partition(".")[0] in unused.what
    assert "this machine has a" in str(unused) and str(unused).count(". ") == 2


@pytest.mark.parametrize(
    "kind", ["NVIDIA UNIX x86_64 Kernel Module", "NVIDIA UNIX Open Kernel Module for x86_64"]
)
def test_the_driver_of_either_kernel_module(machine, kind):
    unused = machine(GPU | {"proc/driver/nvidia/version": version("580.126.20", kind)})
    assert "driver 580" in unused.what


def test_a_driver_that_is_too_old_for_any_extra(machine):
    unused = machine(GPU, driver="470.82", made_for="cuda12")
    assert "Update its driver to 525" in unused.remedy and "make setup" not in unused.remedy


def test_amd_and_several_and_wsl(machine):
    amd = machine({"dev/kfd": "", "dev/dri/renderD128": ""})
    assert "AMD GPU" in amd.what and "ROCm" in amd.remedy and not amd.is_wanted
    wsl = machine({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""})
    assert "an NVIDIA GPU" in wsl.what
    assert "2 NVIDIA GPUs" in machine({"dev/nvidia0": "", "dev/nvidia1": ""}).what


@pytest.mark.parametrize(
    ("files", "environ"),
    [
        ({}, {}),
        ({"proc/driver/nvidia/version": version("580.1"), "dev/nvidiactl": ""}, {}),  # a container
        ({"dev/dri/renderD128": ""}, {}),  # Intel's graphics
        ({"dev/dxg": ""}, {}),  # WSL2 with another maker's graphics
        ({"dev/accel/accel0": "", "dev/vfio/0": ""}, {}),  # an NPU, and a disk handed through
        (TPU | {f"{PCI}/class": "0x020000"}, {}),  # a network card of Google's
        *((GPU, {"CUDA_VISIBLE_DEVICES": value}) for value in ("", "-1")),
        *((GPU, {"NVIDIA_VISIBLE_DEVICES": value}) for value in ("void", "none")),
        *((GPU, {"JAX_PLATFORMS": value}) for value in ("cpu", "cpu,cuda", "CPU", "tpu")),
        (GPU, {"platform": "cpu"}),
        (GPU, {"PJRT_NAMES_AND_LIBRARY_PATHS": "mine:/lib/mine.so"}),
        (GPU, {"plugins": ["jax_cuda12_plugin"]}),
        (GPU, {"plugins": ["jax_cuda13_plugin"]}),
        (TPU, {"plugins": ["libtpu"]}),
    ],
)
def test_no_false_alarm(machine, files, environ):
    assert machine(files, made_for="cuda12", **environ) is None


def test_a_device_that_may_not_be_opened_is_not_there(machine):
    (machine.root / "dev/nvidia0").mkdir(parents=True)  # what root cannot open either
    assert machine({"proc/driver/nvidia/version": version("580.1")}) is None


def test_the_setting_of_the_run_counts_more_than_the_variable(machine):
    assert machine(GPU, platform="gpu", JAX_PLATFORMS="cpu")
    assert machine(GPU, platform="tpu") is None


@pytest.mark.parametrize(
    ("plugin", "driver", "words"),
    [
        ("jax_cuda13_plugin", "550.54", ["needs driver 580", "make setup EXTRAS=cuda12,dev"]),
        ("jax_cuda13_plugin", "580.54", ["JAX_PLATFORMS=cuda in front"]),
        ("jax_cuda12_plugin", "595.54", ["JAX_PLATFORMS=cuda in front"]),
        ("jax_cuda12_plugin", "470.54", ["Update its driver to 525"]),
    ],
)
def test_a_plugin_that_did_not_help(machine, plugin, driver, words):
    unused = machine(GPU, plugins=[plugin], backend="cpu", driver=driver, made_for="cuda13")
    assert all(word in str(unused) for word in [plugin, *words]) and unused.is_wanted
    assert machine(GPU, plugins=[plugin], backend="gpu") is None
    assert machine({"dev/null": ""}, plugins=[], backend="cpu") is None
    assert machine(GPU, plugins=[plugin], backend="cpu", platform="cpu") is None


def test_a_missing_flags_file_is_no_reason_to_fail(machine, tmp_path):
    machine.module.FLAGS = tmp_path / "gone"
    assert machine.module.accelerator_of_project() is None


def test_it_is_found_at_once_and_without_jax():
    code = f"""
import runpy, sys, time
module = runpy.run_path({str(FILE)!r})
began = time.perf_counter()
module["unused_accelerator"]("auto")
took = time.perf_counter() - began
heavy = [x for x in ("jax", "jaxlib", "numpy", "libtpu") if x in sys.modules]
print(took < 0.02, heavy)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True []\n"


UV = """#!/bin/sh
echo "$*" >> "$NOTES"
case $1 in
    venv) mkdir -p .venv/bin .venv/lib/python3.13/site-packages; touch .venv/pyvenv.cfg
          printf '#!/bin/sh\\necho 3.13 x86_64\\n' > .venv/bin/python; chmod +x .venv/bin/python ;;
esac
"""


@pytest.mark.parametrize("driver", ["580.1", "550.1"])
def test_the_commands_that_it_prints_install_the_extra(machine, tmp_path, driver):
    project, bin_, notes = bake.generated(tmp_path), tmp_path / "bin", tmp_path / "notes"
    bin_.mkdir()
    (bin_ / "uv").write_text(UV)
    (bin_ / "uv").chmod(0o755)
    env = {"PATH": f"{bin_}:/usr/bin:/bin", "NOTES": str(notes)}
    remedy = machine(GPU, driver=driver).remedy
    command, line = re.search(r"'(make setup [^']*)'.*'(EXTRAS := [^']*)'", remedy).groups()
    extra = "cuda13" if driver == "580.1" else "cuda12"
    assert bake.run(["make", "setup"], cwd=project, env=env).returncode == 0
    assert bake.run(command.split(), cwd=project, env=env).returncode == 0
    assert notes.read_text().splitlines()[-1].endswith(f" --editable .[{extra},dev]")
    makefile = project / "Makefile"
    makefile.write_text(re.sub(r"(?m)^EXTRAS :=.*$", line, makefile.read_text()))
    (project / ".venv/.setup").unlink()
    assert bake.run(["make", "setup"], cwd=project, env=env).returncode == 0
    assert notes.read_text().splitlines()[-1].endswith(f" --editable .[{extra},dev]")
