"""The run directory: where it is, who trains there, and what stays of a start that fails."""

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
from .manifest import CIRCUMSTANCES, OVER, compare, read_json, read_manifest, write_json
from .owner import Owner
from .settings import SettingError
from .watchdog import Watchdog

log = logging.getLogger(__package__.partition(".")[0])


class Run:
    """The directory of a run, while this process trains there."""

    def __init__(self, path: Path, config: Config, manifest: dict[str, Any], began: float):
        self.path, self.manifest, self.began = path, manifest, began
        self.is_default = config.workdir is None
        self.config = dataclasses.replace(config, workdir=os.fspath(path))
        manifest["settings"]["workdir"] = os.fspath(path)
        self.earlier = read_manifest(path)
        self.result = read_json(path / "result.json", "status", "step")
        self.changes, self.is_over = compare(path, self.earlier, self.result, manifest, self.config)
        self.summary: Callable[[], dict[str, Any]] = dict
        """What else belongs into result.json; called at the end."""
        self.is_accepted = self.has_begun = False

    def accept(self) -> None:
        """Nothing is wrong with the settings: from here on this start leaves traces."""
        self.is_accepted = True
        logs.open_log(self.path)

    def begin(self) -> None:
        """Training begins: note with what, forget the end of an earlier start."""
        self.has_begun = True
        place = self.config.data.path
        beside = os.path.relpath(os.path.expanduser(place), self.path) if place else None
        now = datetime.datetime.now().isoformat(" ", "seconds")
        notes = {"data_beside_run": beside, "began": now}
        write_json(self.path / "config.json", self.manifest | notes)
        if jax.process_index() == 0:
            (self.path / "result.json").unlink(missing_ok=True)
            if self.is_default:
                point_latest(self.path)

    def end(self, status: str, reason: str, **more: Any) -> None:
        """Write result.json."""
        result = {"status": status, "reason": reason} | self.summary() | more
        result |= {name: self.manifest[name] for name in CIRCUMSTANCES}
        result["seconds"] = time.monotonic() - self.began
        write_json(self.path / "result.json", result)
        self.result = result

    def abandon(self, reason: str, error: BaseException | None = None) -> None:
        """Write down why this start ends before its time, as far as that is still possible."""
        if not self.is_accepted:
            self.accept()
        is_explained = isinstance(error, (OutOfMemory, SettingError, type(None)))
        log.error("%s", reason, exc_info=None if is_explained else error, extra=logs.FILE_ONLY)
        if self.result and self.result["status"] in OVER and not self.has_begun:
            return  # of a run that is complete the result still holds
        try:
            self.end("failed", reason)
        except OSError as problem:
            log.error("%s", problem)


@contextlib.contextmanager
def open_run(
    config: Config, manifest: dict[str, Any], watchdog: Watchdog, began: float
) -> Generator[Run]:
    """Own the run directory of this configuration while a run goes on in it.

    Raises SettingError if the directory cannot be used, or is of a run that differs from what this
    `manifest` describes. A start that is refused, here or inside, leaves everything as it was.
    """
    with contextlib.ExitStack() as closing:
        closing.callback(logs.end_logging)
        path, made = claim(config.workdir, watchdog, closing)
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
                made.clear()


def claim(
    name: str | None, watchdog: Watchdog, closing: contextlib.ExitStack
) -> tuple[Path, list[Path]]:
    """The run directory, made and owned by process 0 and the same in every process.

    When `closing` ends, it is owned no more, and the directories that are still in the returned
    list are removed: they were made for it.
    """
    made: list[Path] = []
    with contextlib.ExitStack() as seen:
        token = ""
        with processes.failing_together():
            if jax.process_index() == 0:
                closing.callback(remove, made)
                try:
                    path = find_run(name) if name else new_run(made)
                    make(path / "checkpoints", made)
                    owner = Owner(path)
                    owner.take()
                    closing.callback(owner.release)
                    watchdog.beat = owner.beat
                    # A directory that cannot be written would else be noticed much later.
                    tempfile.TemporaryFile(dir=path / "checkpoints").close()
                    token = seen.enter_context(
                        tempfile.NamedTemporaryFile(dir=path, prefix=".shared-")
                    ).name
                except OSError as error:
                    where = f"--workdir {name}" if name else os.path.abspath("runs")
                    raise SettingError(
                        f"{where}: the run directory cannot be made or written ({error}). Make it "
                        f"writable, or give another --workdir"
                    ) from error
        token = processes.gather(token)[0]
        with processes.failing_together():
            if not os.path.exists(token):
                raise SettingError(
                    f"--workdir {os.path.dirname(token)}: does not see what process 0 wrote there: "
                    f"use a file system that all processes share"
                )
    return Path(token).parent, made


def find_run(name: str) -> Path:
    """The absolute directory of a run.

    runs/latest is a link to the run that began last. Where it leads to no checkpoint, the newest
    run that has one is meant. Raises SettingError if there is none.
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
            f"{path}: there is no run to go on from, as no directory in {path.parent} has a "
            f"checkpoint: train a new one first"
        )

    def age(run):
        began = (read_json(run / "config.json") or {}).get("began", "")
        return began, run.name != "latest", run.name

    newest = max(runs, key=age)
    log.warning("%s leads to no run with a checkpoint: the newest that has one is %s", path, newest)
    return newest


def was_preempted(run: Path) -> bool:
    """Whether a run was stopped on request, which may be before its first step."""
    return (read_json(run / "result.json") or {}).get("status") == "preempted"


def has_checkpoint(run: Path) -> bool:
    saved = glob.glob(os.path.join(glob.escape(os.fspath(run)), "checkpoints", "[0-9]*"))
    return any(os.path.basename(name).isdigit() for name in saved)


def new_run(made: list[Path]) -> Path:
    """Make runs/<date-time>, under a name of its own."""
    runs = Path("runs").resolve()
    make(runs, made)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = runs / (stamp + suffix)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            made.append(path)
            return path
    raise FileExistsError(f"{runs}/{stamp} and 999 more")


def point_latest(path: Path) -> None:
    """Let runs/latest lead to this run, if that can be: no failure of it stops a run."""
    link = path.parent / f".latest-{os.getpid()}"
    try:
        link.symlink_to(path.name)
        link.replace(path.parent / "latest")
    except OSError as error:
        with contextlib.suppress(OSError):
            link.unlink()
        log.warning(
            "%s/latest does not lead to this run (%s). Is it a directory, as copying makes of a "
            "link? Then give it a name of its own",
            *(path.parent, error.strerror),
        )


def make(path: Path, made: list[Path]) -> None:
    """Make a directory and those above it; add them to the list, the outermost first."""
    missing = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        missing.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    made.extend(reversed(missing))


def remove(made: list[Path]) -> None:
    """Remove the directories that a refused start has made."""
    for folder in reversed(made):
        with contextlib.suppress(OSError):
            if folder.name == "checkpoints":
                shutil.rmtree(folder)
            else:
                folder.rmdir()
