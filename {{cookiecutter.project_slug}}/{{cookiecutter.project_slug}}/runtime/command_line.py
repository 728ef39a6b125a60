"""The command line: settings from flags, those of a run that goes on, and the exit code."""

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

NARROW = 60  # columns below which --help cannot be read


def read_flags(cls: type[Settings], arguments: list[str], **options: Any) -> Settings:
    """A dataclass from flags; --help and mistakes are shown, and end the process."""
    if shutil.get_terminal_size().columns < NARROW:
        os.environ["COLUMNS"] = str(NARROW)
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else Path(sys.argv[0]).name
    try:
        try:
            return tyro.cli(cls, args=arguments, prog=program, **options)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the help has seen enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def parse_settings(arguments: list[str]) -> Config:
    """Settings from the command line; a run that is resumed provides the defaults."""
    read = functools.partial(
        read_flags,
        Config,
        arguments,
        description="All settings. A --workdir with an earlier run in it provides the defaults.",
    )
    config = read()
    if not config.workdir or "://" in config.workdir:
        return config
    path = find_run(config.workdir)
    config = dataclasses.replace(config, workdir=os.fspath(path))
    saved = saved_config(path)
    if not saved:
        return config
    forgotten = dict.fromkeys(("total_steps", "workdir", "stop_after_step", "profile_steps"))
    given = read(default=dataclasses.replace(saved, **forgotten))
    if given.epochs is None and given.total_steps is None:
        given = dataclasses.replace(given, total_steps=saved.total_steps)
    return dataclasses.replace(given, workdir=config.workdir)


def saved_config(path: Path) -> Config | None:
    """The settings of the run in this directory, None if there is none."""
    saved = read_manifest(path)
    if not saved:
        return None
    config = build(Config, saved["settings"])
    place, beside = config.data.path, saved.get("data_beside_run")
    if place and beside and not glob.glob(os.path.expanduser(place)):
        moved = os.path.normpath(path / beside)  # run and data may have moved together
        if glob.glob(moved):
            data = dataclasses.replace(config.data, path=moved)
            config = dataclasses.replace(config, data=data)
    return config


def run(main: Callable[[], int]) -> int:
    """Call main and return its exit code, or that of its failure, which is shown."""
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
