"""Check the variables that xla_flags.env sets, without the accelerator: make check-flags.

XLA aborts at an unknown flag or value, often without naming it. It silently ignores every flag
after the first word that is not a flag.
"""

import difflib
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

# For each variable a program that parses it like XLA or libtpu, and fails if they would.
PARSERS = {
    "XLA_FLAGS": "import jaxlib._jax as jaxlib; jaxlib.CompileOptions()",
    "LIBTPU_INIT_ARGS": "from jax.experimental import topologies; "
    "topologies.get_topology_desc('v5e:2x2', 'tpu')",
}
PACKAGES = {"XLA_FLAGS": "jaxlib", "LIBTPU_INIT_ARGS": "libtpu"}
# Without these libtpu would search for a TPU for minutes, by asking the metadata server of a cloud.
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
NO_TPU |= {"TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}
FLAGS_FILE = Path(__file__).parents[2] / "xla_flags.env"
ACCELERATORS = ("cpu", "cuda12", "cuda13", "tpu")


def check_flags(name: str, text: str) -> list[str]:
    """What is wrong with the flags in this variable, one sentence for each problem."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        return [f"{name}: {error}, in {text}"]
    if name == "XLA_FLAGS" and os.path.isfile(text):  # XLA then reads flags from this file
        reason = probe(name, text)
        return [f"{name}: the flags in {text} end the process: {reason}"] if reason else []
    problems = [problem for word in words if (problem := misplaced(name, word))]
    known = importlib.util.find_spec(PACKAGES[name])
    if problems or not words or not known or probe(name, text) is None:
        return problems
    # XLA's message for all flags together does not always name the bad one: try each alone.
    return [
        f"{name}: {word} ends the process: {reason}"
        for word in words
        if (reason := probe(name, word)) is not None
    ] or [f"{name}: these flags end the process only together, not each alone: {text}"]


def misplaced(name: str, word: str) -> str | None:
    """Why this word does not belong in this variable; None if it may belong there."""
    if not word.startswith("--"):
        return f"{name}: '{word}' is not a flag; XLA ignores every flag after it, without a message"
    if name == "XLA_FLAGS" and word.startswith("--xla_tpu_"):
        return f"{name}: {word} belongs in LIBTPU_INIT_ARGS, here it ends the process"
    if name == "LIBTPU_INIT_ARGS" and word.startswith(("--xla_gpu_", "--xla_cpu_", "--xla_dump_")):
        return f"{name}: {word} belongs in XLA_FLAGS, libtpu does not know it"
    return None


def probe(name: str, text: str) -> str | None:
    """The error of the parser for this value of the variable; None if it accepts the value."""
    environ = os.environ | NO_TPU | dict.fromkeys(PARSERS, "") | {name: text}
    command = [sys.executable, "-c", PARSERS[name]]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    lines = [re.sub(r"^[EFIW]\d+ .*?\] ", "", line) for line in run.stderr.splitlines()]
    telling = [x for x in lines if re.search(r"[Uu]nknown|[Ii]llegal|interpret value", x)]
    return (telling or [line for line in lines if line] or [f"exit code {run.returncode}"])[0]


# --- The other variables -------------------------------------------------------------------------


# A rule takes the text of a variable and returns what is wrong with it, or None.


def one_of(*values: str) -> Callable[[str], str | None]:
    """A rule for a variable that has one of these values."""
    return lambda text: None if text in values else f"must be one of {', '.join(values)}"


def number(lowest: float, highest: float, kind: type = int) -> Callable[[str], str | None]:
    """A rule for a number. It refuses "1_0" and " 1", which only Python reads as numbers."""
    what = "a whole number" if kind is int else "a number"
    limits = f"of at least {lowest}" if highest == float("inf") else f"from {lowest} to {highest}"
    pattern = r"-?\d+" if kind is int else r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?"

    def rule(text: str) -> str | None:
        fits = re.fullmatch(pattern, text) and lowest <= kind(text) <= highest
        return None if fits else f"must be {what} {limits}"

    return rule


def fraction(text: str) -> str | None:
    """A rule for a share of GPU memory: above 1 only with unified memory, which adds the host's."""
    highest = 1 if os.environ.get("TF_FORCE_UNIFIED_MEMORY", "0") == "0" else 100
    if number(0, highest, float)(text) or float(text) == 0:
        return "must be a share above 0 and up to 1, such as 0.9"
    return None


def matching(pattern: str, what: str) -> Callable[[str], str | None]:
    """A rule for a text that matches this regular expression; `what` describes it."""
    return lambda text: None if re.fullmatch(pattern, text) else f"must be {what}"


def writable_directory(text: str) -> str | None:
    """A rule for a directory: try to write there. An address such as gs://... is left to JAX."""
    if "://" in text:
        return None
    try:
        os.makedirs(text, exist_ok=True)
        with tempfile.TemporaryFile(dir=text):
            return None
    except OSError as error:
        return (
            f"nothing can be written there ({error.strerror}), so every start would compile "
            f"again: give another directory"
        )


def interfaces(text: str) -> str | None:
    """A rule for names of network interfaces.

    NCCL takes the beginnings of names, or whole names after "=", or all other interfaces after "^".
    """
    here = [name for _, name in socket.if_nameindex()]
    wanted = text.removeprefix("^").removeprefix("=")
    exact = "=" in text[:2]
    for name in wanted.split(",") if not text.startswith("^") else ():
        name = name.partition(":")[0]
        if not name or not any(x == name if exact else x.startswith(name) for x in here):
            return f"this machine has no network interface '{name}', but {', '.join(here)}"
    return None


def visible_gpus(text: str) -> str | None:
    """A rule for a list of GPUs. CUDA silently stops reading at the first entry that is wrong."""
    if text in ("", "-1", "NoDevFiles", "void", "none"):
        return None  # no GPU
    words = text.split(",")
    if len(set(words)) < len(words):
        return "names one GPU twice, and CUDA then shows no GPU at all"
    unknown = [x for x in words if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", x)]
    if unknown:
        return f"'{unknown[0]}' is no GPU: must be numbers or UUIDs, such as 0,1"
    return None


def platforms(text: str) -> str | None:
    """A rule for names of JAX platforms."""
    known = ["cpu", "gpu", "cuda", "rocm", "tpu"]
    known += [entry.name for entry in metadata.entry_points(group="jax_plugins")]
    known += [x.partition(":")[0] for x in os.environ.get(PJRT, "").split(",") if x]
    unknown = [x for x in text.split(",") if text and x not in known]
    return f"'{unknown[0]}' is not one of {', '.join(dict.fromkeys(known))}" if unknown else None


PJRT = "PJRT_NAMES_AND_LIBRARY_PATHS"
AT_LEAST_0, AT_LEAST_1 = number(0, float("inf")), number(1, float("inf"))
RULES: dict[str, Callable[[str], str | None]] = {
    "XLA_CLIENT_MEM_FRACTION": fraction,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction,
    # JAX takes everything but "false", "False" and "0" for true, even "no" and "off".
    "XLA_PYTHON_CLIENT_PREALLOCATE": one_of("true", "false", "True", "False", "1", "0"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": lambda text: one_of(
        "default", "platform", "bfc", "cuda_async", "vmm"
    )(text.lower()),
    "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": AT_LEAST_0,
    "JAX_COMPILATION_CACHE_DIR": writable_directory,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": number(0, float("inf"), float),
    "JAX_NUM_CPU_DEVICES": AT_LEAST_1,
    "JAX_OPTIMIZATION_LEVEL": one_of("UNKNOWN", "O0", "O1", "O2", "O3"),
    "JAX_PLATFORMS": platforms,
    "JAX_PLATFORM_NAME": platforms,
    "NCCL_DEBUG": lambda text: one_of("VERSION", "WARN", "INFO", "TRACE")(text.upper()),
    "NCCL_SOCKET_IFNAME": interfaces,
    "CUDA_VISIBLE_DEVICES": visible_gpus,
    "TRAIN_COORDINATOR": matching(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", "host:port"),
    "TRAIN_COORDINATOR_TIMEOUT": AT_LEAST_1,
    "TRAIN_NUM_PROCESSES": AT_LEAST_1,
    "TRAIN_PROCESS_ID": AT_LEAST_0,
    "TRAIN_LOCAL_DEVICE_IDS": matching(r"\d+(,\d+)*", "numbers such as 0,1"),
    "TRAIN_PORT": number(1, 65535),
    "TRAIN_DISTRIBUTED": one_of("auto"),
}
# For these variables an empty value is an error; for the others it is the same as no value.
CHECKED_WHEN_EMPTY = (
    "JAX_NUM_CPU_DEVICES",
    "JAX_OPTIMIZATION_LEVEL",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)
# Variables without a rule that XLA, JAX, NCCL or libtpu read: these are not misspelt.
OTHERS = {*PARSERS, PJRT, "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_ADDRESS"}
OTHERS |= {"XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "NCCL_DEBUG_FILE"}
OTHERS |= {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_NTHREADS"}


def check_environment(environ: dict[str, str]) -> list[str]:
    """What is wrong with the variables other than those of flags, one sentence for each problem."""
    problems = []
    for name, rule in RULES.items():
        text = environ.get(name)
        if text or (text == "" and name in CHECKED_WHEN_EMPTY):
            problem = rule(text)
            if problem:
                problems.append(f"{name}={text}: {problem}")
    if environ.get("XLA_CLIENT_MEM_FRACTION") and environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):
        problems.append(
            "XLA_CLIENT_MEM_FRACTION and its old name, XLA_PYTHON_CLIENT_MEM_FRACTION, are both "
            "set, and JAX refuses to start: unset the old one"
        )
    if "TF_GPU_ALLOCATOR" in environ:
        problems.append("TF_GPU_ALLOCATOR is not read: use XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async")
    libraries = [x for x in environ.get("LD_LIBRARY_PATH", "").split(":") if "cud" in x.lower()]
    if libraries and importlib.util.find_spec("nvidia"):
        problems.append(
            f"LD_LIBRARY_PATH has {':'.join(libraries)}, which hides the CUDA libraries that were "
            f"installed with JAX: unset it"
        )
    problems += misspelt(environ)
    if not problems and any(name.startswith("JAX_") for name in environ):
        command, bare = [sys.executable, "-c", "import jax"], environ | {"XLA_FLAGS": ""}
        run = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
        if run.returncode:
            problems.append(f"import jax fails: {run.stderr.strip().splitlines()[-1]}")
    return problems


def misspelt(environ: dict[str, str]) -> list[str]:
    """Variables whose names are nearly those of known ones: no program reads or reports them."""
    known = OTHERS | {*RULES}
    prefixes = ("XLA_", "JAX_", "LIBTPU_", "NCCL_", "TRAIN_", "CUDA_VISIBLE")
    problems = []
    for name in environ:
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.85)
        if near and name not in known and name.upper().startswith(prefixes) and not is_jax(name):
            problems.append(f"no program reads {name}: did you mean {near[0]}?")
    return problems


def is_jax(name: str) -> bool:
    """Whether this variable is one of the hundreds of settings of JAX."""
    if not name.startswith("JAX_"):
        return False
    code = f"import jax, sys; sys.exit({name.lower()!r} not in jax.config.values)"
    bare = {x: text for x, text in os.environ.items() if not x.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-c", code]
    return not subprocess.run(command, env=bare, capture_output=True, check=False).returncode


def check_accelerator() -> list[str]:
    """What is wrong with the line of xla_flags.env that chooses the accelerator."""
    try:
        text = FLAGS_FILE.read_text(encoding="utf-8")
    except OSError as error:
        return [f"{FLAGS_FILE}: {error.strerror}"]
    line = re.search(r"^ *accelerator=(.*?) *(#.*)?$", text, re.MULTILINE)
    value = line[1].strip("'\"") if line else ""
    if value in ACCELERATORS:
        return []
    return [f"xla_flags.env: accelerator={value}: must be one of {', '.join(ACCELERATORS)}"]


def main() -> int:
    """Print what is wrong and return the exit code."""
    problems = check_accelerator() + check_environment(dict(os.environ))
    for name, package in PACKAGES.items():
        text = os.environ.get(name, "").strip()
        found = check_flags(name, text)
        if not found and not importlib.util.find_spec(package):
            if text:
                print(f"{name}: not checked, because {package} is not installed: {text}")
            continue
        problems += found
        if not found:
            print(f"{name}: {package} {metadata.version(package)} accepts: {text or 'no flag'}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
