"""The command line: settings from flags and from the run that is resumed, and the exit code."""

import dataclasses
import functools
import glob
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ..config import Config
from . import processes, stop, terminal
from .failures import OutOfMemory
from .manifest import read_manifest
from .settings import SettingError, build
from .workdir import find_run

Settings = TypeVar("Settings")

LEAST_COLUMNS = 60  # in a narrower terminal --help cannot be read


def read_flags(cls: type[Settings], arguments: list[str], **options: Any) -> Settings:
    """Build a dataclass from flags. Raises SystemExit after printing --help or a wrong flag."""
    if shutil.get_terminal_size().columns < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(LEAST_COLUMNS)
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else Path(sys.argv[0]).name
    try:
        try:
            return tyro.cli(cls, args=arguments, prog=program, **options)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the help has closed the pipe, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def parse_settings(arguments: list[str]) -> Config:
    """Settings from the command line; if --workdir holds a run, its settings are the defaults.

    Raises SettingError if the settings of that run cannot be read, or its data is gone.
    """
    read = functools.partial(
        read_flags,
        Config,
        arguments,
        description="All settings. If --workdir holds a run, its settings are the defaults.",
    )
    config = read()
    if not config.workdir or "://" in config.workdir:
        return config
    path = find_run(config.workdir)
    config = dataclasses.replace(config, workdir=os.fspath(path))
    saved = saved_config(path)
    if not saved:
        return config
    # None for each of these shows whether the flag is given, or belongs to one start only.
    unset = dict.fromkeys(("total_steps", "workdir", "stop_after_step", "profile_steps"))
    given = read(default=dataclasses.replace(saved, **unset))
    path_of_data = given.data.path
    if path_of_data and path_of_data == saved.data.path and not is_there(path_of_data):
        raise SettingError(
            f"--data.path {path_of_data}: the data of this run is no longer there. If it has "
            f"moved, resume with --data.path PLACE (the data itself must be the same)"
        )
    if given.epochs is None and given.total_steps is None:
        given = dataclasses.replace(given, total_steps=saved.total_steps)
    return dataclasses.replace(given, workdir=config.workdir)


def saved_config(path: Path) -> Config | None:
    """The settings of the run in this directory; None if there is no run.

    Where its data is gone, but has been moved together with the run, `data.path` is the new place.
    Raises SettingError if the settings cannot be read.
    """
    saved = read_manifest(path)
    if not saved:
        return None
    config = build(Config, saved["settings"])
    data_path, relative = config.data.path, saved.get("data_beside_run")
    if data_path and relative and not is_there(data_path):
        moved = os.path.normpath(path / relative)
        if is_there(moved):
            data = dataclasses.replace(config.data, path=moved)
            config = dataclasses.replace(config, data=data)
    return config


def is_there(place: str) -> bool:
    """Whether there is a file or a directory with this name, or files that match this pattern."""
    place = os.path.expanduser(place)
    return os.path.exists(place) or bool(glob.glob(place))


def run(main: Callable[[], int]) -> int:
    """Call main and return its exit code. If it raises, print the error and return the code of it.

    After an error that other processes may not know of, this does not return: see leave_at_once().
    """
    screen: Any = terminal.Screen(sys.stderr)
    try:
        return main()
    except SettingError as error:
        print(f"error: {error}", file=screen)
        return stop.BAD_SETTING
    except (processes.Unreachable, OutOfMemory) as error:
        print(f"error: {error}", file=screen)
        processes.leave_at_once()
    except Exception:
        traceback.print_exc(file=screen)
        processes.leave_at_once()
    return stop.EXIT_CODES["failed"]
