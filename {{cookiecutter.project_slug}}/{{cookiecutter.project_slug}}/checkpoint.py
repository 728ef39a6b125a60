"""Checkpoints with Orbax: the latest ones and the best one, verified when they are read."""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from . import task
from .config import SettingError
from .mesh import wait_for_all
from .train_state import TrainState

log = logging.getLogger(__package__)

MODEL_FIELDS = ("params", "batch_stats", "ema")


@dataclasses.dataclass
class Progress:
    """What a run must remember besides the train state."""

    best_step: int | None = None
    best_metric: float | None = None
    evaluated_step: int = 0
    """Last step whose evaluation was finished."""
    evaluations_since_best: int = 0
    first_loss: float | None = None
    """Mean loss of the first log interval: a blow-up is judged by it."""

    def update(self, step: int, metric: float) -> bool:
        """Take note of an evaluation; True if it is a new best. Of equal ones the first is best."""
        sign = 1 if task.HIGHER_IS_BETTER else -1
        best = -math.inf if self.best_metric is None else sign * self.best_metric
        is_best = math.isfinite(metric) and sign * metric > best
        if is_best:
            self.best_step, self.best_metric = step, metric
        self.evaluated_step = step
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best


class Checkpoints:
    """The checkpoints of one run: a directory per step with the items model, training, progress.

    `model` holds what evaluation needs and `training` the rest of the TrainState. The two latest
    checkpoints and the best one are kept. Every process must make every call.
    """

    def __init__(self, workdir: Path):
        self.directory = workdir / "checkpoints"
        policies = checkpoint_managers
        # Only a new best gets a score, its step: the highest score is the best checkpoint.
        best = policies.BestN(
            get_metric_fn=_score, n=1, reverse=False, keep_checkpoints_without_metrics=False
        )
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(2), best]),
                save_decision_policy=policies.FixedIntervalPolicy(1),
                best_fn=_score,  # without it Orbax forgets the scores when it reopens the directory
                best_mode="max",
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, step: int, state: TrainState, progress: Progress) -> None:
        """Start to write a checkpoint in the background. Its failure is raised by the next call."""
        self.wait()
        if step in self.manager.all_steps():
            self.manager.delete(step)
        items = _items(state)
        facts = dataclasses.asdict(progress) | {
            "layout": {name: _layout(item) for name, item in items.items()},
            "digest": {name: int(_digest(item)) for name, item in items.items()},
        }
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        self.manager.save(
            step,
            args=ocp.args.Composite(**args, progress=ocp.args.JsonSave(facts)),
            metrics={"score": float(step)} if step == progress.best_step else None,
            force=True,
        )

    def wait(self) -> None:
        """Wait for the save under way; raise its error if it failed."""
        self.manager.wait_until_finished()
        self.manager.check_for_errors()

    def close(self) -> None:
        """Finish the save under way, then part; raises the save's error if it failed."""
        try:
            self.wait()
        finally:
            self.manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def find(self, name: str) -> int:
        """The step of the checkpoint called best, latest or by its number."""
        best = self.manager.best_step()
        step = {"latest": max(self.steps, default=None), "best": best}.get(name)
        if name == "best" and best is None:  # a run without evaluations
            step = max(self.steps, default=None)
        elif name.isdigit() and int(name) in self.steps:
            step = int(name)
        if step is None:
            raise SettingError(
                f"--checkpoint {name}: must be best, latest or one of {self.steps}, the steps with "
                f"a checkpoint in {self.directory}"
            )
        return step

    def restore_latest(self, state: TrainState) -> tuple[TrainState, Progress] | None:
        """State and progress of the newest checkpoint that can be read, None if there is none.

        The given abstract state says shapes, dtypes and shardings. Unreadable checkpoints are moved
        to `damaged/` with a warning. Raises SettingError if the state has another structure.
        """
        for step in self.steps:
            try:
                return self.restore(step, state)
            except SettingError:
                raise
            except Exception as error:  # Orbax raises almost anything for a damaged directory
                reason = str(error).strip().partition("\n")[0][:200]
                log.warning(
                    "checkpoint %d cannot be read and is moved to damaged/: %s: %s",
                    *(step, type(error).__name__, reason),
                )
                self._set_aside(step)
        return None

    def restore(self, step: int, state: TrainState) -> tuple[TrainState, Progress]:
        """State and progress of this step, placed like the given abstract state."""
        items = _items(state)
        facts = self.manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))
        facts = facts["progress"]
        for name, item in items.items():
            _require_same_layout(facts["layout"][name], _layout(item), self.directory / str(step))
        args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
        restored = self.manager.restore(step, args=ocp.args.Composite(**args))
        for name in items:
            if int(_digest(restored[name])) != facts["digest"][name]:
                raise ValueError(f"the digest of {name} differs from the one that was saved")
        progress = {f.name: facts[f.name] for f in dataclasses.fields(Progress)}
        return state.replace(**restored["model"], **restored["training"]), Progress(**progress)

    def _set_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            damaged = self.directory.parent / "damaged"
            damaged.mkdir(exist_ok=True)
            target = damaged / f"{step}-{len(list(damaged.iterdir()))}"
            (self.directory / str(step)).rename(target)
        wait_for_all("damaged checkpoint set aside")
        self.manager.reload()


def restore_params(path: Path, params: Any) -> Any:
    """Parameters of another run's best checkpoint, or of a checkpoint directory (--init-from).

    Takes every parameter whose name and shape match and keeps the given value of the others; says
    which. Raises SettingError if the path holds no checkpoint or nothing matches.
    """
    path = path.expanduser().resolve()
    is_checkpoint = path.name.isdigit() and (path / "model").is_dir()
    workdir = path.parent.parent if is_checkpoint else path
    if not (workdir / "checkpoints").is_dir():
        raise SettingError(f"--init-from {path}: must be a run directory or one of its checkpoints")
    checkpoints = Checkpoints(workdir)
    try:
        step = int(path.name) if is_checkpoint else checkpoints.manager.best_step()
        step = checkpoints.manager.latest_step() if step is None else step
        if step is None:
            raise SettingError(f"--init-from {path}: this run has no checkpoint yet")
        saved = checkpoints.manager.restore(
            step, args=ocp.args.Composite(model=ocp.args.StandardRestore())
        )["model"]["params"]
    finally:
        checkpoints.manager.close()
    found = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(saved)}
    new = []

    def choose(path, param):
        value = found.get(_name(path))
        if value is None or value.shape != param.shape:
            new.append(_name(path))
            return param
        del found[_name(path)]
        return jax.device_put(value.astype(param.dtype), param.sharding)

    chosen = jax.tree_util.tree_map_with_path(choose, params)
    matched = len(jax.tree.leaves(params)) - len(new)
    if not matched:
        raise SettingError(f"--init-from {path}: no parameter has the name and shape of this model")
    log.info("%d parameters come from %s, step %d", matched, workdir, step)
    for title, names in (("keep their new values", new), ("are left out", list(found))):
        if names:
            log.warning("%d parameters %s: %s", len(names), title, ", ".join(names))
    return chosen


def _score(metrics: dict[str, float] | None) -> float:
    return float("-inf") if metrics is None else metrics["score"]


def _items(state: TrainState) -> dict[str, dict]:
    """The arrays of the state as the two items of a checkpoint."""
    fields = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
    }
    model = {name: fields.pop(name) for name in MODEL_FIELDS}
    return {"model": model, "training": fields}


def _layout(tree: Any) -> dict[str, str]:
    """Shape and dtype of every array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _require_same_layout(saved: dict[str, str], wanted: dict[str, str], path: Path) -> None:
    differing = [
        f"{name} is {saved.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise SettingError(
            f"checkpoint {path} does not fit this model and optimizer: {'; '.join(differing[:3])}"
            f"{more}. Undo the change, or start a new --workdir (--init-from keeps the parameters)"
        )


@jax.jit
def _digest(tree: Any) -> jax.Array:
    """A checksum, uint32, of every bit of the tree, the same on any number of devices.

    Orbax does not notice a flipped bit in its files. Every word is multiplied by an odd number of
    its own, so no change of a single word goes unnoticed.
    """
    digest = jnp.uint32(0)
    for i, x in enumerate(jax.tree.leaves(tree)):
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        position = jnp.full(x.shape, i, jnp.uint32)
        for axis in range(x.ndim):
            place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            position = position * jnp.uint32(x.shape[axis] + 7919) + place
        digest += jnp.sum(words.astype(jnp.uint32) * (2 * position + 1), dtype=jnp.uint32)
    return digest
