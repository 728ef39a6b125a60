"""--init-from: start a new run from the parameters of another one."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax

from .checkpoint import Checkpoints, Damaged
from .digests import leaves_by_name, name_of
from .logs import counted
from .settings import SettingError
from .workdir import find_run

log = logging.getLogger(__package__.partition(".")[0])


def restore_params(path: Path, params: Any) -> Any:
    """Parameters from the best checkpoint of another run, or from a checkpoint directory.

    A parameter whose name and shape match is taken from there; the others keep their value in
    `params`, and the log names them. Raises SettingError if the path holds no checkpoint, if the
    checkpoint cannot be read, or if nothing matches.
    """
    path = find_run(str(path))
    is_checkpoint = path.name.isdigit() and (path / "model").is_dir()
    workdir = path.parent.parent if is_checkpoint else path
    if not (workdir / "checkpoints").is_dir():
        raise SettingError(f"--init-from {path}: must be a run directory or one of its checkpoints")
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
        if not checkpoints.steps:
            raise SettingError(f"--init-from {path}: this run has no checkpoint yet")
        step = checkpoints.find(path.name if is_checkpoint else "best")
        try:
            found = leaves_by_name(checkpoints.read_params(step, params))
        except Damaged as error:
            others = checkpoints.others(step, as_start=True)
            raise SettingError(f"--init-from {path}: {error}. {others}") from error
    unmatched = []

    def choose(path, param):
        name = name_of(path)
        value = found.get(name)
        if value is None or value.shape != param.shape:
            unmatched.append(name)
            return param
        if value.dtype != param.dtype:
            log.warning("%s was saved as %s, used as %s", name, value.dtype, param.dtype)
        return found.pop(name).astype(param.dtype)

    chosen = jax.tree_util.tree_map_with_path(choose, params)
    matched = len(jax.tree.leaves(params)) - len(unmatched)
    if not matched:
        raise SettingError(f"--init-from {path}: no parameter has the name and shape of this model")
    taken = counted(matched, "parameter comes", "parameters come")
    log.info("%s from %s, step %d", taken, workdir, step)
    if unmatched:
        kept = counted(
            len(unmatched), "parameter keeps its new value", "parameters keep their new values"
        )
        log.warning("%s: %s", kept, ", ".join(unmatched))
    if found:
        left = counted(len(found), "parameter is left out", "parameters are left out")
        log.warning("%s: %s", left, ", ".join(found))
    return chosen
