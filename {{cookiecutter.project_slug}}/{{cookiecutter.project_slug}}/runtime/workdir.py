"""The run directory: find or create it, own it, and leave no trace of a start that is refused."""

import contextlib
import dataclasses
import datetime
import glob
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax

from ..config import Config
from . import logs, processes
from .failures import OutOfMemory, explained
from .manifest import FINISHED, REPEATED, compare, read_json, read_manifest, write_json
from .owner import Owner
from .settings import SettingError
from .watchdog import Watchdog

log = logging.getLogger(__package__.partition(".")[0])


class Run:
    """A run directory that this process owns, and the contents of its JSON files.

    `manifest` describes this start of the run and `earlier` the last one, if there was one.
    `is_over` says that nothing is left to train. `began` is the monotonic time of the start.
    """

    def __init__(self, path: Path, config: Config, manifest: dict[str, Any], began: float):
        self.path, self.manifest, self.began = path, manifest, began
        self.has_default_path = config.workdir is None
        self.config = dataclasses.replace(config, workdir=os.fspath(path))
        manifest["settings"]["workdir"] = os.fspath(path)
        self.earlier = read_manifest(path)
        self.result = read_json(path / "result.json", "status", "step")
        self.changes, self.is_over = compare(path, self.earlier, self.result, manifest, self.config)
        self.summary: Callable[[], dict[str, Any]] = dict
        """Returns what else belongs into result.json. end() calls it."""
        self.is_accepted = self.has_begun = False

    def accept(self) -> None:
        """The settings are valid: from now on this start writes to the run directory."""
        self.is_accepted = True
        logs.open_log(self.path)

    def begin(self) -> None:
        """Training begins: write config.json and delete the result of an earlier start."""
        self.has_begun = True
        data_path = self.config.data.path
        relative = os.path.relpath(os.path.expanduser(data_path), self.path) if data_path else None
        now = datetime.datetime.now().isoformat(" ", "seconds")
        # The relative path finds the data again when it has been moved together with the run.
        notes = {"data_beside_run": relative, "began": now}
        write_json(self.path / "config.json", self.manifest | notes)
        if jax.process_index() == 0:
            (self.path / "result.json").unlink(missing_ok=True)
            if self.has_default_path:
                point_latest(self.path)

    def end(self, status: str, reason: str, **more: Any) -> None:
        """Write result.json. Raises OSError if that fails."""
        result = {"status": status, "reason": reason} | self.summary() | more
        result |= {name: self.manifest[name] for name in REPEATED}
        result["seconds"] = time.monotonic() - self.began
        write_json(self.path / "result.json", result)
        self.result = result

    def abandon(self, reason: str, error: BaseException | None = None) -> None:
        """Log why this start failed, and write that to result.json if the disk allows it."""
        if not self.is_accepted:
            self.accept()
        is_explained = isinstance(error, (OutOfMemory, SettingError, type(None)))
        log.error("%s", reason, exc_info=None if is_explained else error, extra=logs.FILE_ONLY)
        was_finished = self.result and self.result["status"] in FINISHED
        if was_finished and not self.has_begun:
            return  # the result of the finished run is still true: this start has changed nothing
        try:
            self.end("failed", reason)
        except OSError as problem:
            log.error("%s", problem)


@contextlib.contextmanager
def open_run(
    config: Config, manifest: dict[str, Any], watchdog: Watchdog, began: float
) -> Generator[Run]:
    """Find or create the run directory of this configuration, and own it inside the `with` block.

    Raises SettingError if the directory cannot be used, or if the run in it differs from what
    `manifest` describes. If a SettingError ends the start before run.accept(), the directory is
    left as it was.
    """
    with contextlib.ExitStack() as closing:
        closing.callback(logs.end_logging)
        path, created = claim(config.workdir, watchdog, closing)
        run = Run(path, config, manifest, began)
        watchdog.abandon = run.abandon
        try:
            with explained(config, watchdog):
                yield run
        except BaseException as error:
            if run.is_accepted or not isinstance(error, SettingError):
                run.abandon(f"{type(error).__name__}: {error}", error)
            raise
        finally:
            if run.is_accepted:
                created.clear()


def claim(
    name: str | None, watchdog: Watchdog, closing: contextlib.ExitStack
) -> tuple[Path, list[Path]]:
    """The run directory in every process, after process 0 has created it and become its owner.

    The second value is the list of directories that were created. When `closing` ends, this process
    gives up the ownership and removes those that are still in the list. Raises SettingError if the
    directory cannot be written, has another owner, or is not seen by all processes.
    """
    created: list[Path] = []
    with contextlib.ExitStack() as until_seen:
        token = ""  # a file that process 0 creates and every process must then see
        with processes.failing_together():
            if jax.process_index() == 0:
                closing.callback(remove, created)
                try:
                    path = find_run(name) if name else new_run(created)
                    create(path / "checkpoints", created)
                    owner = Owner(path)
                    owner.take()
                    closing.callback(owner.release)
                    watchdog.beat = owner.beat
                    # Try a write now: the first checkpoint may come hours later.
                    tempfile.TemporaryFile(dir=path / "checkpoints").close()
                    token = until_seen.enter_context(
                        tempfile.NamedTemporaryFile(dir=path, prefix=".shared-")
                    ).name
                except OSError as error:
                    where = f"--workdir {name}" if name else os.path.abspath("runs")
                    raise SettingError(
                        f"{where}: the run directory cannot be created or written ({error}). Make "
                        f"it writable, or give another --workdir"
                    ) from error
        token = processes.gather(token)[0]
        with processes.failing_together():
            if not os.path.exists(token):
                raise SettingError(
                    f"--workdir {os.path.dirname(token)}: this process does not see the file that "
                    f"process 0 wrote there: use a file system that all processes share"
                )
    return Path(token).parent, created


def find_run(name: str) -> Path:
    """The absolute path of a run directory, which need not exist, with links resolved.

    runs/latest is a link to the run that started to train last. If that run has no checkpoint, and
    was not preempted before its first one, the newest run with a checkpoint is used in its place.
    Raises SettingError if there is no such run, and for the address of a bucket.
    """
    if "://" in name:
        raise SettingError(
            f"--workdir {name}: must be a directory of this machine's file system. Mount the "
            f"bucket, or copy finished checkpoints there"
        )
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if (path.parent.name, path.name) != ("runs", "latest") or (
        path.is_symlink() and (has_checkpoint(path) or was_preempted(path))
    ):
        return path.resolve()
    runs = [run for run in path.parent.glob("*") if not run.is_symlink() and has_checkpoint(run)]
    if not runs:
        raise SettingError(
            f"{path}: there is no run to use, because no directory in {path.parent} has a "
            f"checkpoint: train a new run first"
        )

    def start_time(run):
        began = (read_json(run / "config.json") or {}).get("began", "")
        return began, run.name != "latest", run.name

    newest = max(runs, key=start_time)
    log.warning(
        "%s does not lead to a run with a checkpoint: using %s, the newest run that has one",
        *(path, newest),
    )
    return newest


def was_preempted(run: Path) -> bool:
    """Whether a run was stopped on request, which may be before its first step."""
    return (read_json(run / "result.json") or {}).get("status") == "preempted"


def has_checkpoint(run: Path) -> bool:
    saved = glob.glob(os.path.join(glob.escape(os.fspath(run)), "checkpoints", "[0-9]*"))
    return any(os.path.basename(name).isdigit() for name in saved)


def new_run(created: list[Path]) -> Path:
    """Create runs/<date-time>, with a number after it if another run has that name."""
    runs = Path("runs").resolve()
    create(runs, created)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = runs / (stamp + suffix)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            created.append(path)
            return path
    raise FileExistsError(f"{runs}/{stamp} and 999 more")


def point_latest(path: Path) -> None:
    """Make runs/latest a link to this run. A failure is only a warning: the run can go on."""
    link = path.parent / f".latest-{os.getpid()}"
    try:
        link.symlink_to(path.name)
        link.replace(path.parent / "latest")
    except OSError as error:
        with contextlib.suppress(OSError):
            link.unlink()
        log.warning(
            "%s/latest could not be made a link to this run (%s). If it is a directory, as some "
            "ways of copying make of a link, rename it",
            *(path.parent, error.strerror),
        )


def create(path: Path, created: list[Path]) -> None:
    """Create a directory and its missing parents; add them to the list, the outermost first."""
    missing = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        missing.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    created.extend(reversed(missing))


def remove(created: list[Path]) -> None:
    """Remove the directories that a refused start has created."""
    for folder in reversed(created):
        with contextlib.suppress(OSError):
            if folder.name == "checkpoints":
                shutil.rmtree(folder)
            else:
                folder.rmdir()
