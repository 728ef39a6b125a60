"""--init-from: start a new run from the parameters of another one."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax

from .checkpoint import Checkpoints, Damaged
from .digests import leaves_by_name, name_of
from .settings import SettingError
from .workdir import find_run

log = logging.getLogger(__package__.partition(".")[0])


def restore_params(path: Path, params: Any) -> Any:
    """Parameters of another run's best checkpoint, or of a checkpoint directory (--init-from).

    Takes every parameter whose name and shape match and keeps the given value of the others; says
    which. Raises SettingError if the path holds no checkpoint or nothing matches.
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
    new = []

    def choose(path, param):
        value = found.get(name_of(path))
        if value is None or value.shape != param.shape:
            new.append(name_of(path))
            return param
        if value.dtype != param.dtype:
            log.warning("%s was saved as %s, used as %s", name_of(path), value.dtype, param.dtype)
        return found.pop(name_of(path)).astype(param.dtype)

    chosen = jax.tree_util.tree_map_with_path(choose, params)
    matched = len(jax.tree.leaves(params)) - len(new)
    if not matched:
        raise SettingError(f"--init-from {path}: no parameter has the name and shape of this model")
    log.info("%d parameters come from %s, step %d", matched, workdir, step)
    for title, names in (("keep their new values", new), ("are left out", list(found))):
        if names:
            log.warning("%d parameters %s: %s", len(names), title, ", ".join(names))
    return chosen
