"""config.json and result.json of a run, and what changed since the run was last started."""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import logging
import math
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ..config import Config, check
from .logs import counted
from .settings import SettingError, build, fields_of, flag

log = logging.getLogger(__package__.partition(".")[0])

NOT_BIT_FOR_BIT = "the run continues correctly, but not bit for bit"
FINISHED = ("completed", "early_stopped")  # statuses of a run that trains on only if it gets longer
REPEATED = ("devices", "processes", "xla_flags", "versions")  # in result.json as in config.json
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe(config: Config, data: dict[str, Any], **notes: Any) -> dict[str, Any]:
    """The contents of config.json: every setting, the data, the code, the devices and versions.

    A resumed run must see the same `data`; the notes may differ.
    """
    return {
        "settings": dataclasses.asdict(config),
        "data": data,
        **notes,
        "code": code(),
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def code() -> dict[str, str]:
    """A digest of each Python file of this package."""
    package, digests = Path(__file__).parents[1], {}
    with contextlib.suppress(OSError):  # the package is not in a directory, but in a zip file
        for file in sorted(package.rglob("*.py")):
            digest = hashlib.blake2b(file.read_bytes(), digest_size=8)
            digests[os.fspath(file.relative_to(package))] = digest.hexdigest()
    return digests


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python, the packages and this project's code (its git commit)."""
    found = {"python": platform.python_version()}
    found |= {name: metadata.version(name) for name in PACKAGES}
    git = ["git", "-C", os.fspath(Path(__file__).parent)]
    try:
        run = functools.partial(subprocess.check_output, text=True, stderr=subprocess.DEVNULL)
        commit, changes = run([*git, "rev-parse", "HEAD"]), run([*git, "status", "--porcelain"])
        found["git"] = commit.strip() + ("-dirty" if changes else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return found


def announce(run: Any, step: int, lines: list[str], warnings: list[str]) -> None:
    """Log where and on what the run trains, what changed since its last start, and warnings."""
    known, found = run.manifest, run.manifest["versions"]
    log.info("%s: %s", run.path, f"resumed at step {step}" if step else "a new run")
    log.info(
        "%s %s, %d in all; %s; jax %s, flax %s%s; XLA_FLAGS: %s",
        *(jax.local_device_count(), jax.devices()[0].device_kind, known["devices"]),
        *(counted(known["processes"], "process", "processes"), found["jax"], found["flax"]),
        " (the newest for Python 3.11)" if found["python"].startswith("3.11") else "",
        known["xla_flags"].strip() or "none",
    )
    for line in (*lines, *run.changes):
        log.info("%s", line)
    for line in warnings:
        log.warning("%s", line)


def describe_end(run: Any) -> str:
    """One line: how a run ended, now or earlier, its best step, and how to continue."""
    path, result = run.path, run.result
    step, total = result["step"], run.config.total_steps
    line = f"{path}: {'over, ' if run.is_over else ''}{result['status']} at step {step}"
    if result.get("reason"):
        line += f": {result['reason']}"
    if run.is_over and total < step:
        line += f"; the run already has {step} steps, so --total-steps {total} changes nothing"
    if result.get("best_step") is not None and result.get("best_metric") is not None:
        metric = f"{run.manifest['best_by']} {result['best_metric']:.4g}"
        line += f"; best step {result['best_step']}, {metric}"
    ways = {
        "preempted": f"to go on: --workdir {path}",
        "completed": f"to train longer: --workdir {path} --total-steps N",
        "early_stopped": f"to train longer: --workdir {path} --total-steps N",
        "diverged": f"a new run can start from its parameters: --init-from {path}, with a smaller "
        "--optimizer.learning-rate",
    }
    return f"{line}; {ways[result['status']]}" if result["status"] in ways else line


def read_json(path: Path, *needed: str) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file or it lacks one of these keys.

    Raises SettingError if the file is there and cannot be read.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror})") from error
    return contents if isinstance(contents, dict) and contents.keys() >= set(needed) else None


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The contents of config.json of the run in this directory; None if there is no run.

    Raises SettingError if the file is damaged, or missing beside checkpoints: the run would
    otherwise continue with other settings.
    """
    file = path / "config.json"
    needed = ("settings", "data", "platform", "devices", "processes", "versions")
    manifest = read_json(file, *needed)
    if manifest is not None and not is_sound(manifest):
        manifest = None
    checkpoints = glob.glob(os.path.join(glob.escape(os.fspath(path)), "checkpoints", "*"))
    if manifest is None and (checkpoints or os.path.exists(file)):
        raise SettingError(
            f"{file} is missing or damaged, so the settings of this run are not known: put back a "
            f"copy, or start a new --workdir, with --init-from {path} to go on from its parameters"
        )
    return manifest


def is_sound(manifest: dict[str, Any]) -> bool:
    """Whether the contents of config.json are of the form that describe() gives them."""
    try:
        config = build(Config, manifest["settings"])
        check(config)
        return (
            config.total_steps is not None
            and manifest["data"].keys() >= {"fingerprint", "outputs"}
            and isinstance(manifest["versions"], dict)
        )
    except (AttributeError, TypeError, ValueError):
        return False


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write a file atomically, in process 0 only: readers see the old file or the whole new one.

    NaN and infinity, which JSON does not have, become null. Raises OSError if the write fails.
    """

    def finite(value):
        if isinstance(value, dict):
            return {name: finite(x) for name, x in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    if jax.process_index() == 0:
        partial = path.with_suffix(".tmp")
        text = json.dumps(finite(contents), indent=2, allow_nan=False)
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(error.errno, f"{error.strerror}: cannot write", str(path)) from error


def compare(
    path: Path,
    earlier: dict[str, Any] | None,
    result: dict[str, Any] | None,
    manifest: dict[str, Any],
    config: Config,
) -> tuple[list[str], bool]:
    """Compare a run with its last start: a line for each change, and whether the run is over.

    A run is over when nothing is left to train. Raises SettingError for a change after which the
    result would be neither that of the old run nor that of a new one.
    """
    if earlier is None:
        return [], False
    saved = {name: value for name, _, value in fields_of(build(Config, earlier["settings"]))}
    lines, changed = [], []
    for name, field, value in fields_of(config):
        on_resume = field.metadata.get("resume", "refused")
        if value == saved[name] or on_resume == "per start":
            continue
        change = f"{flag(name)}: {saved[name]} -> {value}"
        if on_resume == "refused":
            raise SettingError(
                f"{change} cannot change when a run is resumed. Keep {saved[name]}, or start a "
                f"new --workdir, with --init-from {path} to go on from its parameters"
            )
        changed.append(name)
        meaning = field.metadata.get("meaning")
        lines.append(f"changed {change}" + (f" ({meaning})" if meaning else ""))
    if earlier["data"] != manifest["data"]:
        raise SettingError(
            f"the data changed since this run was started: {earlier['data']} -> "
            f"{manifest['data']}. Restore it, give its new place with --data.path, or start a new "
            f"--workdir with --init-from {path}"
        )
    edited = differing(earlier.get("code") or manifest["code"], manifest["code"])
    if edited:
        lines.append(
            f"the code changed: {', '.join(edited)}. The run continues with the new code; you must "
            f"judge whether its result still makes sense"
        )
    for name in ("platform", "devices", "processes", "xla_flags"):
        if earlier.get(name) != manifest[name]:
            lines.append(
                f"changed {name}: {earlier.get(name)} -> {manifest[name]} ({NOT_BIT_FOR_BIT})"
            )
    for name in differing(earlier["versions"], manifest["versions"]):
        if name != "git":  # the code was compared above
            old, new = earlier["versions"].get(name), manifest["versions"].get(name)
            is_harmless = name in ("python", "numpy", "jax", "jaxlib")
            meaning = NOT_BIT_FOR_BIT if is_harmless else "the results may differ: compare them"
            lines.append(f"changed {name}: {old} -> {new} ({meaning})")
    status = result and result["status"]
    is_longer = config.total_steps > earlier["settings"]["total_steps"]
    is_finished = status in FINISHED and not is_longer
    diverges_again = status == "diverged" and not changed and not edited
    return lines, is_finished or diverges_again


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose values differ, or that only one of the two has."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name) != after.get(name)]
