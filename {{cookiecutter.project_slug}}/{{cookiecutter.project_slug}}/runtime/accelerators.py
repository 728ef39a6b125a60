"""Which accelerator this machine has, and whether the installed JAX can use it.

This module imports neither JAX nor anything else that is slow to import, so that a start without
the right JAX is reported at once.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

# The plug-in modules of JAX for each accelerator, best first. The keys are values of JAX_PLATFORMS.
PLUGINS = {
    "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "rocm": ("jax_rocm7_plugin", "jax_rocm60_plugin", "jax_rocm_plugin"),
    "tpu": ("libtpu",),
}
OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}  # first number of the version of NVIDIA's driver
HIDES_ALL = ("", "-1", "void", "none", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES and the like
FLAGS = Path(__file__).parents[2] / "xla_flags.env"


class Unused(NamedTuple):
    """An accelerator of this machine that JAX would leave idle."""

    what: str
    why: str
    remedy: str  # what to do, as a sentence
    is_wanted: bool  # whether this project was generated for this accelerator

    def __str__(self) -> str:
        return f"this machine has {self.what}, but {self.why}. {self.remedy}"


def unused_accelerator(platform: str, root: Path = Path("/")) -> Unused | None:
    """An accelerator that the installed JAX cannot use. Call this before JAX is imported.

    `platform` is the setting of the run. Returns None if this machine has no such accelerator, or
    the run is meant for the CPU.
    """
    for name in platforms(platform):
        if plugin(name):
            continue
        if what := FINDERS[name](root):
            return explain(name, what, "the installed JAX is the one for CPUs", root)
    return None


def left_on_cpu(platform: str, backend: str, root: Path = Path("/")) -> Unused | None:
    """An accelerator that JAX does not use, although its plug-in is installed.

    Call this once JAX has found its devices. `backend` is jax.default_backend().
    """
    if backend != "cpu":
        return None
    for name in platforms(platform):
        module = plugin(name)
        if module and (what := FINDERS[name](root)):
            return explain(name, what, f"JAX, with {module}, runs on the CPU", root, module)
    return None


def platforms(platform: str) -> list[str]:
    """The accelerators that this run may use: none if the run is meant for the CPU."""
    if os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS"):  # JAX gets its plug-in from elsewhere
        return []
    asked = platform if platform != "auto" else os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    asked = asked.strip().lower()
    if asked == "":
        return list(PLUGINS)
    if asked == "gpu":
        return ["cuda", "rocm"]
    return [name for name in PLUGINS if name == asked]


def plugin(name: str) -> str | None:
    """The installed plug-in module for this accelerator; None if there is none."""
    return next(filter(importlib.util.find_spec, PLUGINS[name]), None)


def explain(name: str, what: str, why: str, root: Path, module: str = "") -> Unused:
    """Add what helps: another extra, another driver, or asking JAX for the reason."""
    made_for = accelerator_of_project()
    driver = nvidia_driver(root) if name == "cuda" else None
    fitting = [extra for extra, oldest in OLDEST_DRIVER.items() if (driver or oldest) >= oldest]
    if name == "tpu":
        fitting = ["tpu"]
    elif driver is None:
        fitting.reverse()  # CUDA 12 runs with more drivers, so try it first
    extra = made_for if made_for in fitting else next(iter(fitting), "")
    installed = "tpu" if module == "libtpu" else module.removeprefix("jax_").split("_")[0]
    if name == "rocm":
        remedy = "AMD's documentation of ROCm says how to install JAX for it"
    elif not fitting:
        remedy = f"Update its driver to {OLDEST_DRIVER['cuda12']} or later"
    elif installed in fitting:
        remedy = f"JAX_PLATFORMS={name} in front of the same command shows JAX's reason"
    else:
        if installed == "cuda13":
            why += f" (CUDA 13 needs driver {OLDEST_DRIVER['cuda13']} or later)"
        remedy = f"'make setup EXTRAS={extra},dev' installs what it needs"
        if made_for != extra:
            remedy += f"; to keep it, write 'EXTRAS := {extra},dev' in the Makefile and "
            remedy += f"'accelerator={extra}' in xla_flags.env"
    remedy += ". To stay on the CPU: --platform cpu"
    is_wanted = made_for is not None and made_for.startswith(name)
    return Unused(what, why, remedy, is_wanted)


def accelerator_of_project() -> str | None:
    """The accelerator that this project was generated for, as written in xla_flags.env."""
    try:
        text = FLAGS.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    line = re.search(r"^accelerator=(\w+)", text, re.MULTILINE)
    return line[1] if line else None


# --- Which accelerator this machine has ----------------------------------------------------------


def find_nvidia(root: Path) -> str | None:
    if is_hidden("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        return None
    count = sum(map(can_open, root.glob("dev/nvidia[0-9]*")))
    if not count and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        count = can_open(root / "dev/dxg")  # WSL2 shows all GPUs as one
    if not count:
        return None
    driver = nvidia_driver(root)
    gpus = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
    return f"{gpus} (driver {driver})" if driver else gpus


def find_amd(root: Path) -> str | None:
    if is_hidden("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        return None
    # The graphics cards of other makers have render nodes as well. Only AMD's have /dev/kfd.
    cards = sum(map(can_open, root.glob("dev/dri/renderD*")))
    return "an AMD GPU" if cards and can_open(root / "dev/kfd") else None


def find_tpu(root: Path) -> str | None:
    """A PCI device of Google that is neither a disk nor a network card, and can be opened."""
    for folder in root.glob("sys/bus/pci/devices/*"):
        vendor, kind = (read(folder / name) for name in ("vendor", "class"))
        if vendor == "0x1ae0" and not kind.startswith(("0x01", "0x02")):
            paths = [*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]
            return "a TPU" if any(map(can_open, paths)) else None
    return None


FINDERS = {"cuda": find_nvidia, "rocm": find_amd, "tpu": find_tpu}


def is_hidden(*names: str) -> bool:
    """Whether one of these variables hides all GPUs from this process."""
    return any(os.environ.get(name, "all").strip() in HIDES_ALL for name in names)


def can_open(path: Path) -> bool:
    """Whether this process can open a device. Permissions do not tell: a container may refuse."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def nvidia_driver(root: Path) -> int | None:
    """The first number of the driver's version; None without a driver.

    A driver is no sign of a GPU: containers see the driver of their host.
    """
    match = re.search(r"Module.*?\s(\d+)\.\d+", read(root / "proc/driver/nvidia/version"))
    return int(match[1]) if match else None


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
