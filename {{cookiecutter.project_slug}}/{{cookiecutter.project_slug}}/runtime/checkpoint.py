"""Checkpoints with Orbax: the two latest and the best one are kept, and every read is verified."""

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from .digests import checksum, digest, layout, leaves_by_name, name_of, require_same_layout
from .failures import fetch, is_out_of_memory, is_outside, remedy, summary
from .processes import gather, require_same, wait_for_all
from .progress import Progress
from .settings import SettingError

log = logging.getLogger(__package__.partition(".")[0])

MODEL_FIELDS = ("params", "model_state", "ema")  # the fields of a state that evaluation needs


class SaveFailed(OSError):
    """A checkpoint could not be written, most often because the disk is full."""


class Damaged(SettingError):
    """The contents of a checkpoint are not what was saved."""


class Unreadable(SettingError):
    """Reading a checkpoint failed for a reason other than its contents, such as permissions."""


class Checkpoints:
    """The checkpoints of one run: a directory per step with the items model, training, progress.

    A state is a dataclass that is a pytree, such as Flax's TrainState. The item `model` holds the
    fields that evaluation needs, and `training` holds the others. The two latest checkpoints and
    the best one are kept. In a run of several processes every process must make every call.
    """

    def __init__(self, workdir: Path):
        self.directory = workdir / "checkpoints"
        self.replaced = workdir / "replaced"
        self.best_step: int | None = None
        self.saved = (0, 0)
        """The step that was saved last, or restored, and the last one evaluated before that."""
        self.has_failed = self.is_replacing = False
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self,
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
            ),
        )

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax calls this with the checkpoints from old to new: True for each one to keep."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in (*steps[-2:], self.best_step) for step in steps]

    def save(self, step: int, state: Any, progress: Progress) -> None:
        """Start to write a checkpoint in the background.

        Raises SaveFailed if the previous save failed or this one cannot start. If this one fails
        later, the next call of save(), wait() or close() raises SaveFailed.
        """
        self.wait()
        if step in self.manager.all_steps():
            # Set the old checkpoint of this step aside until the new one is complete. The flag says
            # that this process did so: it must clean up, and a concurrent reader must not.
            self._move(step, self.replaced)
            self.is_replacing = True
        self.best_step, self.saved = progress.best_step, (step, progress.evaluated_step)
        items = _items(state)
        metadata = dataclasses.asdict(progress) | {
            "layout": {name: layout(item) for name, item in items.items()},
            "digest": {name: int(fetch(digest(item))) for name, item in items.items()},
        }
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        args["progress"] = ocp.args.JsonSave(metadata | {"check": checksum(metadata)})
        with self._saving():
            self.manager.save(step, args=ocp.args.Composite(**args), force=True)

    def has_less(self, step: int, progress: Progress) -> bool:
        """Whether what was saved last lacks this step, or the evaluation of it."""
        return self.saved != (step, progress.evaluated_step)

    def rescue(self, step: int, state: Any, progress: Progress) -> None:
        """Save the state after an exception, if that is still possible, and log what was done.

        Does nothing if this step is saved already. Never raises: the first error matters more.
        """
        if step in self.steps or not step or self.has_failed:
            return
        obstacle = None
        if jax.process_count() > 1:
            obstacle = "a save needs all processes, and the others do not know of the error"
        elif any(x.is_deleted() for x in jax.tree.leaves(state)):
            obstacle = "its arrays were donated to the step that failed"
        else:
            try:
                self.save(step, state, progress)
                self.wait()
            except Exception as error:
                obstacle = summary(error)
        if obstacle:
            log.warning("step %d is not saved: %s", step, obstacle)
        else:
            log.warning("step %d, the last one before the error, is saved", step)

    def wait(self) -> None:
        """Wait until a save in progress is complete. Raises SaveFailed if it failed."""
        with self._saving():
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        if self.is_replacing:
            self._end_replacement()

    @contextlib.contextmanager
    def _saving(self) -> Generator[None]:
        """Turn any exception inside into SaveFailed, without the long traceback inside Orbax."""
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            self.has_failed = True
            kept = "Earlier checkpoints are kept." if self.steps else "There is no earlier one."
            raise SaveFailed(
                f"a checkpoint could not be written to {self.directory}: {summary(error)}. {kept} "
                f"{remedy(error).capitalize()}, then resume with "
                f"--workdir {self.directory.parent}"
            ) from None

    def close(self) -> None:
        """Wait for a save in progress and close Orbax's manager.

        Raises SaveFailed if that save failed and no earlier call has reported it.
        """
        try:
            if not self.has_failed:
                self.wait()
        finally:
            if self.is_replacing:
                self._end_replacement()
            with contextlib.suppress(Exception):  # wait() has already raised the same error
                self.manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def find(self, name: str) -> int:
        """The step of a checkpoint given as best, latest or the number of its step.

        Raises SettingError if there is no such checkpoint.
        """
        steps = self.steps
        if name == "latest" and steps:
            return steps[0]
        if name.isdigit() and int(name) in steps:
            return int(name)
        if name == "best" and steps:
            best = self._best()
            if best in steps:
                return best
            if best is None:
                log.warning(
                    "no evaluation has chosen a best checkpoint yet: using step %d", steps[0]
                )
                return steps[0]
            raise SettingError(f"the best checkpoint, step {best}, is gone. {self.others(best)}")
        if not steps:
            raise SettingError(f"there is no checkpoint yet in {self.directory}")
        raise SettingError(
            f"--checkpoint {name}: must be best, latest or one of {steps}, the steps with a "
            f"checkpoint in {self.directory}"
        )

    def others(self, step: int, as_start: bool = False) -> str:
        """The sentence of an error message that names the checkpoints other than this one.

        They are written as --checkpoint takes them, or with `as_start` as --init-from does.
        """
        prefix = f"{self.directory}/" if as_start else "--checkpoint "
        others = [f"{prefix}{other}" for other in self.steps if other != step]
        return f"There are others: {', '.join(others)}" if others else "There is no other"

    def _best(self) -> int | None:
        """The best step recorded in the newest readable checkpoint; None if none is recorded."""
        for step in self.steps:
            with contextlib.suppress(Damaged):
                return self._metadata(step)["best_step"]
        return None

    def restore_latest(self, state: Any) -> tuple[Any, Progress] | None:
        """State and progress of the newest undamaged checkpoint; None if there is no checkpoint.

        `state` is abstract and gives shapes, dtypes and shardings. Damaged checkpoints are moved to
        `damaged/` with a warning. Raises SettingError if the saved state has another structure, and
        if all checkpoints are damaged: a run must not silently start again from step 0. Raises
        Unreadable if a read fails for another reason.
        """
        self._clean_up()
        found, damaged = None, {}
        steps = json.loads(gather(json.dumps(self.steps))[0])  # the same list in all processes
        for step in steps:
            try:
                found = self.restore(step, state)
                break
            except Damaged as error:
                damaged[step] = error
        if damaged and not found:
            raise SettingError(
                f"{self.directory}: {'; '.join(map(str, damaged.values()))}. There is no other to "
                f"resume from: put back a copy, or start a new --workdir"
            )
        for step, reason in damaged.items():
            log.warning("%s; it is moved to damaged/, and an older checkpoint is used", reason)
            self._move(step, self.directory.parent / "damaged")
        require_same({"the restored checkpoint": int(found[0].step) if found else None})
        if found:
            self.best_step = found[1].best_step
            self.saved = (int(found[0].step), found[1].evaluated_step)
        return found

    def restore(self, step: int, state: Any) -> tuple[Any, Progress]:
        """State and progress from the checkpoint of this step.

        `state` is abstract and gives shapes, dtypes and shardings. Raises SettingError if the saved
        state has another structure, Damaged if the contents are not what was saved, Unreadable if
        the read fails for another reason.
        """
        metadata, items = self._metadata(step), _items(state)
        for name, item in items.items():
            require_same_layout(metadata["layout"][name], layout(item), self.directory / str(step))
        restored = self._read(step, metadata, items)
        progress = {f.name: metadata[f.name] for f in dataclasses.fields(Progress)}
        return state.replace(**restored["model"], **restored["training"]), Progress(**progress)

    def _metadata(self, step: int) -> dict[str, Any]:
        """The JSON saved beside the arrays: progress, and the layout and digest of each item."""
        with _reading(step):
            args = ocp.args.Composite(progress=ocp.args.JsonRestore())
            metadata = dict(self.manager.restore(step, args=args)["progress"])
            if metadata.pop("check") != checksum(metadata):
                raise ValueError("its progress is not what was saved")
        return metadata

    def _read(self, step: int, metadata: dict[str, Any], items: dict[str, Any]) -> Any:
        """Read these items, each given as an abstract tree, and compare their digests."""
        with _reading(step):
            args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
            restored = self.manager.restore(step, args=ocp.args.Composite(**args))
            for name in items:
                if int(fetch(digest(restored[name]))) != metadata["digest"][name]:
                    raise ValueError(f"its {name} is not what was saved")
        return restored

    def read_params(self, step: int, params: Any) -> Any:
        """The saved parameters, in their own shapes and dtypes.

        A saved array gets the sharding of the array in `params` that has its name and shape; where
        there is no such array, it is replicated. Raises Damaged or Unreadable like restore().
        """
        metadata, own = self._metadata(step), leaves_by_name(params)
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        replicated = NamedSharding(mesh, PartitionSpec())

        def abstract(path, saved):
            param = own.get(name_of(path[1:]))
            fits = param is not None and param.shape == saved.shape
            sharding = param.sharding if fits else replicated
            return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)

        with _reading(step), ocp.StandardCheckpointer() as reader:
            saved = reader.metadata(self.directory / str(step) / "model").item_metadata
            if saved is None:
                raise ValueError("the list of its arrays cannot be read")
            model = jax.tree_util.tree_map_with_path(abstract, saved.tree)
        return self._read(step, metadata, {"model": model})["model"]["params"]

    def _clean_up(self) -> None:
        """Clean up after a process that was killed while saving.

        Removes half-written checkpoints, and puts back one that was about to be replaced.
        """
        if jax.process_index() == 0:
            for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished)
        self._end_replacement()
        wait_for_all("checkpoints cleaned up")
        self.manager.reload()

    def _end_replacement(self) -> None:
        """Delete the checkpoint that was set aside, or put it back if its replacement failed."""
        if jax.process_index() == 0 and self.replaced.exists():
            for old in self.replaced.iterdir():
                target = self.directory / old.name.partition("-")[0]
                if not target.exists():
                    old.rename(target)
            shutil.rmtree(self.replaced, ignore_errors=True)

    def _move(self, step: int, folder: Path) -> None:
        """Move the checkpoint of this step into another folder of the run directory."""
        if jax.process_index() == 0:
            folder.mkdir(exist_ok=True)
            target = folder / f"{step}-{len(list(folder.iterdir()))}"
            (self.directory / str(step)).rename(target)
        wait_for_all("checkpoint moved")
        self.manager.reload()


@contextlib.contextmanager
def _reading(step: int) -> Generator[None]:
    """Turn exceptions inside into Damaged or Unreadable, except a lack of memory."""
    try:
        yield
    except Exception as error:  # Orbax and TensorStore raise many types
        if is_out_of_memory(error):
            raise
        if is_outside(error):
            raise Unreadable(
                f"checkpoint {step} cannot be read now: {summary(error)}. Fix that and try again"
            ) from error
        raise Damaged(f"checkpoint {step} is damaged: {summary(error)}") from error


def _items(state: Any) -> dict[str, dict]:
    """The fields of the state that hold arrays, divided into the two items of a checkpoint."""
    fields = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
    }
    model = {name: fields.pop(name) for name in MODEL_FIELDS if name in fields}
    return {"model": model, "training": fields}
