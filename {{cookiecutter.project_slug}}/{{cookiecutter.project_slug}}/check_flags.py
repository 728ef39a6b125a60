"""Check the variables that xla_flags.env sets, without the accelerator: make check-flags.

XLA ends the process at a flag or value that it does not know, often without naming it, and drops
every flag after a word that is none without a sound.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata

# What reads each variable, as a program that ends with an error when it does not like it.
PARSERS = {
    "XLA_FLAGS": "import jaxlib._jax as jaxlib; jaxlib.CompileOptions()",
    "LIBTPU_INIT_ARGS": "from jax.experimental import topologies; "
    "topologies.get_topology_desc('v5e:2x2', 'tpu')",
}
PACKAGES = {"XLA_FLAGS": "jaxlib", "LIBTPU_INIT_ARGS": "libtpu"}
# Where there is no TPU, libtpu looks for one at its cloud for minutes.
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
NO_TPU |= {"TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}
ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")


def check_flags(name: str, text: str) -> list[str]:
    """What is wrong with the flags in this variable, a sentence each."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        return [f"{name}: {error}, in {text}"]
    if name == "XLA_FLAGS" and os.path.isfile(text):  # XLA reads the flags in it
        reason = probe(name, text)
        return [f"{name}: the flags in {text} end the process: {reason}"] if reason else []
    problems = [problem for word in words if (problem := misplaced(name, word))]
    known = importlib.util.find_spec(PACKAGES[name])
    if problems or not words or not known or probe(name, text) is None:
        return problems
    # The message for all flags does not always say which one is meant.
    return [
        f"{name}: {word} ends the process: {reason}"
        for word in words
        if (reason := probe(name, word)) is not None
    ] or [f"{name}: these flags end the process together, not alone: {text}"]


def misplaced(name: str, word: str) -> str | None:
    """Why this word has no place in this variable; None if it may have."""
    if not word.startswith("--"):
        return f"{name}: '{word}' is no flag; XLA drops every flag after it, without a message"
    if name == "XLA_FLAGS" and word.startswith("--xla_tpu_"):
        return f"{name}: {word} belongs in LIBTPU_INIT_ARGS, here it ends the process"
    if name == "LIBTPU_INIT_ARGS" and word.startswith(("--xla_gpu_", "--xla_cpu_", "--xla_dump_")):
        return f"{name}: {word} belongs in XLA_FLAGS, libtpu does not know it"
    return None


def probe(name: str, text: str) -> str | None:
    """What the parser says against this value of the variable; None if it takes it."""
    environ = os.environ | NO_TPU | dict.fromkeys(PARSERS, "") | {name: text}
    command = [sys.executable, "-c", PARSERS[name]]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    lines = [re.sub(r"^[EFIW]\d+ .*?\] ", "", line) for line in run.stderr.splitlines()]
    telling = [x for x in lines if re.search(r"[Uu]nknown|[Ii]llegal|interpret value", x)]
    return (telling or [line for line in lines if line] or [f"exit code {run.returncode}"])[0]


def check_environment(environ: dict[str, str]) -> list[str]:
    """What is wrong with the other variables, a sentence each."""
    problems = []
    if environ.get("XLA_CLIENT_MEM_FRACTION") and environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):
        problems.append(
            "XLA_CLIENT_MEM_FRACTION and its old name, XLA_PYTHON_CLIENT_MEM_FRACTION, are both "
            "set, and JAX refuses to start: unset the old one"
        )
    allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() or "default"
    if allocator not in ALLOCATORS:
        problems.append(
            f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}: must be one of {', '.join(ALLOCATORS)}"
        )
    if "TF_GPU_ALLOCATOR" in environ:
        problems.append("TF_GPU_ALLOCATOR is not read: use XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async")
    libraries = [x for x in environ.get("LD_LIBRARY_PATH", "").split(":") if "cud" in x.lower()]
    if libraries and importlib.util.find_spec("nvidia"):
        problems.append(
            f"LD_LIBRARY_PATH has {':'.join(libraries)}, which hides the CUDA libraries that were "
            f"installed with JAX: unset it"
        )
    if not problems and any(name.startswith("JAX_") for name in environ):
        command, bare = [sys.executable, "-c", "import jax"], environ | {"XLA_FLAGS": ""}
        run = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
        if run.returncode:
            problems.append(f"import jax fails: {run.stderr.strip().splitlines()[-1]}")
    return problems


def main() -> int:
    """Print what is wrong and return the exit code."""
    problems = check_environment(dict(os.environ))
    for name, package in PACKAGES.items():
        text = os.environ.get(name, "").strip()
        found = check_flags(name, text)
        if not found and not importlib.util.find_spec(package):
            if text:
                print(f"{name}: {package} is not installed here to say whether it takes: {text}")
            continue
        problems += found
        if not found:
            print(f"{name}: {package} {metadata.version(package)} takes: {text or 'no flag'}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
