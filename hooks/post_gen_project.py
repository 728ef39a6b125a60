"""Check the generated files, prepare the environment, and train for a few steps to prove both.

Cookiecutter renders this file, so the answers enter as data in one place only (the last line)
and no other line may hold an opening Jinja delimiter.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

INSTALL_LIMIT, SMOKE_LIMIT = 1200, 330  # seconds
DISK_NEEDED = "about 1 GB"

# What an installer or the smoke test prints when the machine is at fault and not the template.
ENVIRONMENT_FAULTS = {
    "no network": r"dns error|failed to lookup|name resolution|could not connect|connection"
    r" (refused|reset|error)|network is unreachable|timed? ?out|error sending request|failed to"
    r" fetch|offline|max retries|proxy|certificate|from versions: none|was not found in the cache",
    "the disk is full": r"no space left|disk quota|errno 28",
    "no matching Python": r"no interpreter found|no python|requires-python|requires a different",
    "this Python makes no environments": r"ensurepip",
    "no permission to write": r"permission denied|read-only file system",
}


# What it prints when the versions that pyproject.toml asks for do not go together or do not exist.
UNSOLVABLE = r"no solution found|resolutionimpossible|no matching distribution|conflicting dep"
LAST_LINE = "the packages were not installed, for the reason above"  # of setup.sh

# What would lead the project to another Python environment; its Makefile has the same list.
FOREIGN = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
FOREIGN += ("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONSAFEPATH")
FOREIGN += ("__PYVENV_LAUNCHER__", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_SYSTEM_PYTHON")
FOREIGN += ("PIP_USER", "PIP_TARGET", "PIP_PREFIX")


class Skipped(Exception):
    """The smoke test cannot be made on this machine; says why."""


class Failed(Exception):
    """The template, or this combination of package versions, is broken; says how."""


def main(answers):
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, interrupt)
    project = Path.cwd()
    override = os.environ.get("FLAX_TEMPLATE_SMOKE_TEST")
    is_known = override in ("auto", "required", "off")
    mode = override if is_known else answers["smoke_test"]
    try:
        check_files(project)
        if override is not None and not is_known:
            raise Skipped(f"FLAX_TEMPLATE_SMOKE_TEST={override} is none of auto, required, off")
        if mode == "off":
            outcome = "Smoke test off."
        elif compares_versions():
            outcome = "Smoke test skipped: cruft only compares two versions of the template."
        else:
            outcome = "Smoke test passed: " + prove(project, answers)
    except Skipped as reason:
        outcome = (
            f"Smoke test SKIPPED: {reason}\nThe project is complete. Run the test later: make smoke"
        )
        if mode == "required":
            say(outcome + "\nIt was required, so the generation fails.", *keeping(project))
            return 1
    except Failed as reason:
        say(f"Smoke test FAILED: {reason}", *keeping(project))
        return 1
    except KeyboardInterrupt:
        if mode == "required":
            say("Interrupted before the required smoke test was finished.", *keeping(project))
            return 1
        say(f"Interrupted. The project is complete at {project}; its environment may not be.")
        say("To go on: make setup, then make smoke")
        return 0
    say("", outcome, "", f"Created {project} from these answers:")
    for name, value in answers.items():
        if not name.startswith("_"):
            say(f"    {name:<14} {value}")
    say("Next:", f"    cd {project.name}", "    make train", "    make help")
    return 0


def interrupt(number, frame):
    # Not by way of SIGINT: that is ignored where a shell started this in the background.
    raise KeyboardInterrupt


def say(*lines):
    print(*lines, sep="\n", flush=True)


def keeping(project):
    """What a failure says of the files that it leaves or not."""
    return [
        "Cookiecutter now removes the project, unless it was there before (then files may be",
        "mixed: see git diff). To look at it, generate again with --keep-project-on-failure:",
        f"it will be at {project}",
    ]


# --- Files ---------------------------------------------------------------------------------------


def check_files(project):
    """Raise Failed if a file is not what its name says: that is a defect of the template."""
    for path in project.rglob("*"):
        if ".venv" in path.parts or path.suffix not in (".py", ".toml", ".md", ".env", ".yaml"):
            continue
        text = path.read_bytes().decode("utf-8")
        try:
            if path.suffix == ".py":
                compile(text, str(path), "exec")
            if path.suffix == ".toml":
                tomllib.loads(text)
        except (SyntaxError, tomllib.TOMLDecodeError) as error:
            raise Failed(f"{path.relative_to(project)} is broken: {error}") from error
        if path.suffix == ".py" and re.search("[{](%|[{] *cookiecutter)", text):
            raise Failed(f"{path.relative_to(project)} was not rendered")
    with contextlib.suppress(OSError):  # the documentation calls it as `bash launch.sh`
        (project / "launch.sh").chmod(0o755)


def compares_versions():
    """Whether this is cruft's update, diff or check, which generates projects to throw away."""
    try:
        command = ["ps", "-o", "args=", "-p", str(os.getppid())]
        words = subprocess.check_output(command, text=True).split()
    except (OSError, subprocess.SubprocessError):
        return False
    return any("cruft" in word for word in words) and bool({"update", "diff", "check"} & {*words})


# --- Environment and smoke test ------------------------------------------------------------------


def prove(project, answers):
    """Make the environment, run the smoke test; return a line on what was proved."""
    began = time.monotonic()
    python, was_there = project / ".venv" / "bin" / "python", (project / ".venv").exists()
    say("Preparing .venv (CPU packages only) ...")
    try:
        prepare_environment()
    except BaseException:
        if not was_there:
            shutil.rmtree(project / ".venv", ignore_errors=True)
        raise
    versions = installed_versions(python)
    installed = time.monotonic()
    say(f"    {installed - began:.0f} s: {versions}", "Training for a few steps ...")
    code, log = run([python, project / "tests" / "smoke.py"], SMOKE_LIMIT, clean_environment())
    if code != 0:
        fault = environment_fault(log, only=("the disk is full",))
        if fault:
            raise Skipped(f"{fault} ({DISK_NEEDED} needed)")
        file = Path(tempfile.gettempdir()) / f"{answers['project_slug']}-smoke-{os.getpid()}.log"
        file.write_text(log, encoding="utf-8")
        why = f"not finished after {SMOKE_LIMIT} s" if code is None else f"exit code {code}"
        raise Failed(f"{why}, with {versions}. The full log: {file}")
    trained = time.monotonic()
    seconds = f"{installed - began:.0f} s for packages, {trained - installed:.0f} s for training"
    return f"{versions}; {seconds}"


def prepare_environment():
    """Create .venv and install the project with its development tools. Raises Skipped.

    It is what `make setup` does, so that make knows what is there, and completes or mends it.
    """
    if not shutil.which("sh"):
        raise Skipped("there is no sh on PATH, which the project needs")
    patience = {"PIP_RETRIES": "1", "PIP_TIMEOUT": "30"}
    if not shutil.which("uv"):  # the Python that runs this has the first claim
        patience["UV_PYTHON"] = getattr(sys, "_base_executable", sys.executable)
    code, log = run(["sh", "setup.sh", "dev"], INSTALL_LIMIT, patience | clean_environment())
    if code is None:
        raise Skipped(f"the packages were not installed after {INSTALL_LIMIT} s")
    if code != 0:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        lines = [line for line in lines if not line.endswith(LAST_LINE)]
        words = f"(the installer's last words: {' '.join(lines[-3:])[-300:]})"
        fault = environment_fault(log)
        if fault is None and re.search(UNSOLVABLE, log, re.IGNORECASE):
            raise Failed(f"the versions in pyproject.toml cannot be installed {words}")
        fault = fault or "the packages cannot be installed"
        need = f", {DISK_NEEDED} needed" if "disk" in fault else ""
        raise Skipped(f"{fault}{need} {words}")


def environment_fault(log, only=tuple(ENVIRONMENT_FAULTS)):
    """Which fault of the machine the log speaks of, None if of none."""
    faults = (name for name in only if re.search(ENVIRONMENT_FAULTS[name], log, re.IGNORECASE))
    return next(faults, None)


def clean_environment():
    """The environment without traces of other Python environments; proxies and indexes stay."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def installed_versions(python):
    code = (
        "import platform; from importlib.metadata import version; "
        "print('Python', platform.python_version(), 'jax', version('jax'), 'flax', version('flax'))"
    )
    result = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    versions = result.stdout.strip()
    if "Python 3.11" in versions:
        versions += " (the newest JAX for Python 3.11; 3.12 and later get current releases)"
    return versions


def run(command, limit, environment):
    """Run, show each line as it comes, and return (exit code, None if out of time; the output)."""
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        [os.fspath(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )

    def show():
        for line in process.stdout:
            lines.append(line)
            say("    " + line.rstrip())

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    heartbeat = 15
    try:
        while process.poll() is None and time.monotonic() - began < limit:
            reader.join(0.1 if reader.is_alive() else 0)
            if not reader.is_alive():
                process.wait(timeout=max(limit - (time.monotonic() - began), 0.1))
            if time.monotonic() - began > heartbeat:
                say(f"    ... {heartbeat} s")
                heartbeat += 15
    except subprocess.TimeoutExpired:
        pass
    finally:
        timed_out = process.poll() is None
        if timed_out:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reader.join(5)
    return (None if timed_out else process.returncode), "".join(lines)


if __name__ == "__main__":
    sys.exit(main(json.loads(r"""{{ cookiecutter | tojson }}""")))
