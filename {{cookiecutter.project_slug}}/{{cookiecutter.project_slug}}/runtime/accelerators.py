"""Which accelerator this machine has, and whether the JAX that is installed can use it.

Found without importing anything heavy, JAX least of all: it is said before the long imports.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

# The modules that bring an accelerator to JAX, best first, by the names JAX_PLATFORMS has for it.
PLUGINS = {
    "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "rocm": ("jax_rocm7_plugin", "jax_rocm60_plugin", "jax_rocm_plugin"),
    "tpu": ("libtpu",),
}
OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}  # of NVIDIA
HIDDEN = ("", "-1", "void", "none", "NoDevFiles")  # values that keep all GPUs from a process
FLAGS = Path(__file__).parents[2] / "xla_flags.env"


class Unused(NamedTuple):
    """An accelerator that is here and would be left idle."""

    what: str
    why: str
    mend: str  # what to do, as a sentence
    wanted: bool  # whether this project was generated for it

    def __str__(self) -> str:
        return f"this machine has {self.what}, but {self.why}. {self.mend}"


def unused_accelerator(platform: str, root: Path = Path("/")) -> Unused | None:
    """An accelerator that JAX, as it is installed, cannot use; to be asked before JAX is imported.

    `platform` is the run's setting. None where there is none, and for whoever asks for the CPU.
    """
    for name in platforms(platform):
        if not plugin(name) and (what := FINDERS[name](root)):
            return explain(name, what, "the installed JAX is the one for CPUs", root)
    return None


def left_on_cpu(platform: str, backend: str, root: Path = Path("/")) -> Unused | None:
    """An accelerator that JAX, which has the plug-in, did not take; to be asked once JAX has found
    its devices: `backend` is then jax.default_backend()."""
    for name in platforms(platform) if backend == "cpu" else ():
        if (module := plugin(name)) and (what := FINDERS[name](root)):
            return explain(name, what, f"JAX, with {module}, runs on the CPU", root, module)
    return None


def platforms(platform: str) -> list[str]:
    """The platforms that this run may use: none when it is for the CPU."""
    asked = platform if platform != "auto" else os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    asked = asked.strip().lower()
    if os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS"):  # a plug-in from elsewhere
        return []
    return [name for name in PLUGINS if asked in ("", name) or (asked == "gpu" and name != "tpu")]


def plugin(name: str) -> str | None:
    return next(filter(importlib.util.find_spec, PLUGINS[name]), None)


def explain(name: str, what: str, why: str, root: Path, module: str = "") -> Unused:
    """Say how to mend it: by another extra, another driver, or by asking JAX for the reason."""
    made_for = accelerator_of_project()
    driver = nvidia_driver(root) if name == "cuda" else None
    fitting = [extra for extra, oldest in OLDEST_DRIVER.items() if (driver or oldest) >= oldest]
    if name == "tpu":
        fitting = ["tpu"]
    elif driver is None:
        fitting.reverse()  # CUDA 12 runs with more drivers
    extra = made_for if made_for in fitting else next(iter(fitting), "")
    installed = "tpu" if module == "libtpu" else module.removeprefix("jax_").split("_")[0]
    if name == "rocm":
        mend = "AMD's documentation of ROCm says how to install JAX for it"
    elif not fitting:
        mend = f"Its driver must be updated to {OLDEST_DRIVER['cuda12']} or later"
    elif installed in fitting:
        mend = f"JAX_PLATFORMS={name} in front of the same command shows JAX's reason"
    else:
        if installed == "cuda13":
            why += f" (CUDA 13 needs driver {OLDEST_DRIVER['cuda13']} or later)"
        mend = f"'make setup EXTRAS={extra},dev' installs what it needs"
        if made_for != extra:
            mend += f"; with 'EXTRAS := {extra},dev' in the Makefile and 'accelerator={extra}' in "
            mend += "xla_flags.env it stays so"
    mend += ". To stay on the CPU: --platform cpu"
    return Unused(what, why, mend, bool(made_for and made_for.startswith(name)))


def accelerator_of_project() -> str | None:
    """The hardware this project was generated for, which xla_flags.env says."""
    try:
        line = re.search(r"^accelerator=(\w+)", FLAGS.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return line[1] if line else None


# --- What is here --------------------------------------------------------------------------------


def find_nvidia(root: Path) -> str | None:
    if is_hidden("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        return None
    count = sum(map(can_open, root.glob("dev/nvidia[0-9]*")))
    if not count and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        count = can_open(root / "dev/dxg")  # WSL2 shows all GPUs as one
    driver = nvidia_driver(root)
    named = f" (driver {driver})" if driver else ""
    return f"{'an NVIDIA GPU' if count == 1 else f'{count} NVIDIA GPUs'}{named}" if count else None


def find_amd(root: Path) -> str | None:
    if is_hidden("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        return None
    cards = sum(map(can_open, root.glob("dev/dri/renderD*")))  # Intel's are among them: so ask kfd
    return "an AMD GPU" if cards and can_open(root / "dev/kfd") else None


def find_tpu(root: Path) -> str | None:
    """A Google device that is no network card and no disk, and a way to open it."""
    for folder in root.glob("sys/bus/pci/devices/*"):
        vendor, kind = (read(folder / name) for name in ("vendor", "class"))
        if vendor == "0x1ae0" and not kind.startswith(("0x01", "0x02")):
            paths = [*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]
            return "a TPU" if any(map(can_open, paths)) else None
    return None


FINDERS = {"cuda": find_nvidia, "rocm": find_amd, "tpu": find_tpu}


def is_hidden(*names: str) -> bool:
    return any(os.environ.get(name, "all").strip() in HIDDEN for name in names)


def can_open(path: Path) -> bool:
    """By opening it: in a container a device may be there, with permissions, and yet refused."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def nvidia_driver(root: Path) -> int | None:
    """The first number of the driver's version. (Not a sign of a GPU: containers see it too.)"""
    match = re.search(r"Module.*?\s(\d+)\.\d+", read(root / "proc/driver/nvidia/version"))
    return int(match[1]) if match else None


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
