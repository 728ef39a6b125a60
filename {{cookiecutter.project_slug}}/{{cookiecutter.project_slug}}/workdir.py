"""The run directory: where it is, what it remembers of a run, and whether a run may go on there."""

import contextlib
import dataclasses
import datetime
import functools
import glob
import json
import logging
import math
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import tyro

from . import processes
from .config import Config, SettingError, flag, flatten
from .data import Data

log = logging.getLogger(__package__)

# Settings that belong to one start of a run, and those that a resumed run may change; "mesh."
# stands for all settings below it.
PER_START = ("workdir", "init_from", "stop_after_step", "profile_steps")
CHANGEABLE = (
    *("total_steps", "log_every", "eval_every", "checkpoint_every", "early_stopping_patience"),
    *("max_skipped_steps", "platform", "debug_nans", "stall_timeout", "quiet"),
    *("data.path", "data.workers", "mesh."),
)
CIRCUMSTANCES = ("devices", "processes", "xla_flags", "versions")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def open_workdir(name: str | None) -> Path:
    """The absolute run directory, made by process 0 and the same in every process."""
    if name is not None and "://" in name:
        raise SettingError(f"--workdir {name}: must be a directory of this machine's file system")
    with contextlib.ExitStack() as closing:
        token = ""
        with processes.failing_together():
            if jax.process_index() == 0:
                try:
                    path = Path(os.path.expanduser(name)).resolve() if name else new_run()
                    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
                    # A directory that cannot be written would else be noticed much later.
                    token = closing.enter_context(
                        tempfile.NamedTemporaryFile(dir=path, prefix=".shared-")
                    ).name
                except OSError as error:
                    where = name or "runs"
                    raise SettingError(
                        f"--workdir {where}: cannot be made or written ({error})"
                    ) from error
        token = processes.gather(token)[0]
        with processes.failing_together():
            if not os.path.exists(token):
                raise SettingError(
                    f"--workdir {os.path.dirname(token)}: does not see what process 0 wrote there: "
                    f"use a file system that all processes share"
                )
    return Path(token).parent


def new_run() -> Path:
    """Make runs/<date-time> and point runs/latest to it."""
    runs = Path("runs").resolve()
    runs.mkdir(exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = runs / (stamp + suffix)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        link = runs / f".latest-{os.getpid()}"
        link.symlink_to(path.name)
        link.replace(runs / "latest")
        return path
    raise FileExistsError(f"{runs}/{stamp} and 999 more")


def describe(config: Config, data: Data) -> dict[str, Any]:
    """What config.json holds: every setting, the data and the circumstances."""
    return {
        "settings": dataclasses.asdict(config),
        "data": {
            "fingerprint": data.fingerprint,
            "rows": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
            "outputs": data.num_outputs,
        },
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def announce(facts: dict[str, Any], config: Config) -> None:
    """Say what the run has to work with."""
    found = facts["versions"]
    log.info(
        "%s %s, %d in all; %d process(es); jax %s, flax %s%s; XLA_FLAGS: %s",
        *(jax.local_device_count(), jax.devices()[0].device_kind, facts["devices"]),
        *(facts["processes"], found["jax"], found["flax"]),
        " (the newest for Python 3.11)" if found["python"].startswith("3.11") else "",
        facts["xla_flags"].strip() or "none",
    )
    rows = ", ".join(f"{count} {name}" for name, count in facts["data"]["rows"].items())
    log.info("rows: %s; outputs: %d", rows, facts["data"]["outputs"])
    if config.optimizer.warmup_steps > config.total_steps // 2:
        log.warning("the warm-up is shortened to half of the %d steps", config.total_steps)


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


def begin(path: Path, facts: dict[str, Any], config: Config) -> None:
    """Note that this run is under way, and say what it has to work with."""
    write_json(path / "config.json", facts)
    if jax.process_index() == 0:
        (path / "result.json").unlink(missing_ok=True)
    announce(facts, config)


def read_json(path: Path, *needed: str) -> dict[str, Any] | None:
    """The object in a JSON file, None if it cannot be read or lacks one of these keys."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents if isinstance(contents, dict) and contents.keys() >= set(needed) else None


def read_facts(path: Path) -> dict[str, Any] | None:
    """What config.json says of the run in this directory, None if there is none.

    Raises SettingError if it is lost: its run would go on with other settings.
    """
    file = path / "config.json"
    needed = ("settings", "data", "platform", "devices", "processes", "versions")
    facts = read_json(file, *needed)
    checkpoints = glob.glob(os.path.join(glob.escape(os.fspath(path)), "checkpoints", "*"))
    if facts is None and (checkpoints or os.path.exists(file)):
        raise SettingError(
            f"{file} is missing or damaged, so the settings of this run are not known: put back a "
            f"copy, or start a new --workdir, with --init-from {path} to go on from its parameters"
        )
    return facts


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write in one go, by process 0 only: readers see the old file or the whole new one.

    NaN and infinity, which JSON does not have, become null.
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


def parse_settings(arguments: list[str]) -> Config:
    """Settings from the command line; a run that is resumed provides the defaults."""
    cli = functools.partial(
        tyro.cli,
        Config,
        args=arguments,
        prog=f"python -m {__package__}.{Path(sys.argv[0]).stem}",
        description="All settings. A --workdir with an earlier run in it provides the defaults.",
    )
    config = cli()
    saved = config.workdir and saved_config(Path(os.path.expanduser(config.workdir)))
    if not saved:
        return config
    forgotten = dict.fromkeys(("total_steps", "workdir", "stop_after_step", "profile_steps"))
    defaults = dataclasses.replace(saved, **forgotten)
    config = cli(default=defaults)
    if config.epochs is None and config.total_steps is None:
        config = dataclasses.replace(config, total_steps=saved.total_steps)
    return config


def saved_config(path: Path) -> Config | None:
    """The settings of the run in this directory, None if there is none."""
    saved = read_facts(path)
    return build(Config, saved["settings"]) if saved else None


def build(cls: type, values: dict[str, Any]) -> Any:
    """A (nested) dataclass from JSON; settings that it does not have any more are left out."""
    fields = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            value = values[field.name]
            if dataclasses.is_dataclass(field.default):
                value = build(type(field.default), value)
            fields[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**fields)


def check_resumable(
    path: Path, facts: dict[str, Any], config: Config
) -> tuple[dict[str, Any] | None, bool]:
    """Print what changed since the run in this directory was last started.

    Returns its result.json, None if it has none, and whether nothing is left to do. Raises
    SettingError for a change that would make the outcome neither the old run's nor a new one's.
    """
    earlier, result = read_facts(path), read_json(path / "result.json", "status", "step")
    if earlier is None:
        return None, False
    before, after = flatten(build(Config, earlier["settings"])), flatten(config)
    changed = [name for name in after if before[name] != after[name] and name not in PER_START]
    for name in changed:
        change = f"{flag(name)}: {before[name]} -> {after[name]}"
        if not name.startswith(CHANGEABLE):
            raise SettingError(
                f"{change} cannot change when a run is resumed. Keep {before[name]}, or start a "
                f"new --workdir, with --init-from {path} to go on from its parameters"
            )
        log.info("changed %s", change)
    if earlier["data"] != facts["data"]:
        raise SettingError(
            f"the data changed since this run was started: {earlier['data']} -> {facts['data']}. "
            f"Restore it, or start a new --workdir with --init-from {path}"
        )
    for name in ("platform", "devices", "processes", "versions", "xla_flags"):
        if earlier.get(name) != facts[name]:
            change = f"{name} {earlier.get(name)} -> {facts[name]}"
            log.info("changed %s: this continues correctly, but not bit for bit", change)
    grew = config.total_steps > earlier["settings"]["total_steps"]
    status = result and result["status"]
    is_over = (status in ("completed", "early_stopped") and not grew) or (
        status == "diverged" and not changed
    )
    return result, is_over
