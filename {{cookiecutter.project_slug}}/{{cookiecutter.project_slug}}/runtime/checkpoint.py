"""Checkpoints with Orbax: the latest ones and the best one, verified when they are read."""

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

MODEL_FIELDS = ("params", "model_state", "ema")  # those of a state that evaluation needs


class SaveFailed(OSError):
    """A checkpoint could not be written, most often because the disk is full."""


class Damaged(SettingError):
    """A checkpoint is not what was saved."""


class Unreadable(SettingError):
    """A checkpoint cannot be read for a reason outside of it, such as missing permission."""


class Checkpoints:
    """The checkpoints of one run: a directory per step with the items model, training, progress.

    A state is a dataclass that is a pytree, such as Flax's TrainState: `model` holds those of its
    fields that evaluation needs and `training` the others. The two latest checkpoints and the best
    one are kept. Every process must make every call.
    """

    def __init__(self, workdir: Path):
        self.directory = workdir / "checkpoints"
        self.replaced = workdir / "replaced"
        self.best_step: int | None = None
        self.saved_step = 0
        """The step that was saved last, or that the run was restored from."""
        self.failed = self.replacing = False
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self,
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
            ),
        )

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Tell Orbax, which gives the checkpoints from old to new, which ones to keep."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in (*steps[-2:], self.best_step) for step in steps]

    def save(self, step: int, state: Any, progress: Progress) -> None:
        """Start to write a checkpoint in the background. Its failure is raised by the next call."""
        self.wait()
        if step in self.manager.all_steps():  # stays at hand until the new one is complete
            self._move(step, self.replaced)
            self.replacing = True  # another process that reads this run must leave it alone
        self.best_step, self.saved_step = progress.best_step, step
        items = _items(state)
        metadata = dataclasses.asdict(progress) | {
            "layout": {name: layout(item) for name, item in items.items()},
            "digest": {name: int(fetch(digest(item))) for name, item in items.items()},
        }
        args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        args["progress"] = ocp.args.JsonSave(metadata | {"check": checksum(metadata)})
        with self._saving():
            self.manager.save(step, args=ocp.args.Composite(**args), force=True)

    def rescue(self, step: int, state: Any, progress: Progress) -> None:
        """Save what an exception outside of the step would lose, if that can be done."""
        if step in self.steps or not step or self.failed:
            return
        why = None
        if jax.process_count() > 1:
            why = "this takes all processes, and the others do not know of the error"
        elif any(x.is_deleted() for x in jax.tree.leaves(state)):
            why = "the step that failed had taken its arrays"
        else:
            try:
                self.save(step, state, progress)
                self.wait()
            except Exception as error:  # of a machine in trouble: the first error matters more
                why = summary(error)
        if why:
            log.warning("step %d is not saved: %s", step, why)
        else:
            log.warning("step %d is saved, the last one before the error", step)

    def wait(self) -> None:
        """Wait for the save under way; raise SaveFailed if it failed."""
        with self._saving():
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        if self.replacing:
            self._settle()

    @contextlib.contextmanager
    def _saving(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises almost anything, with pages of its own functions
            self.failed = True
            there = "The ones before it are there." if self.steps else "There is no earlier one."
            raise SaveFailed(
                f"a checkpoint could not be written to {self.directory}: {summary(error)}. {there} "
                f"{remedy(error).capitalize()}, then go on with "
                f"--workdir {self.directory.parent}"
            ) from None

    def close(self) -> None:
        """Finish the save under way, then part; raises SaveFailed if that was not done yet."""
        try:
            if not self.failed:
                self.wait()
        finally:
            if self.replacing:
                self._settle()
            with contextlib.suppress(Exception):  # it was raised by wait() already
                self.manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def find(self, name: str) -> int:
        """The step of the checkpoint called best, latest or by its number."""
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
                log.warning("no evaluation chose a best checkpoint yet: step %d is used", steps[0])
                return steps[0]
            raise SettingError(f"the best checkpoint, step {best}, is gone. {self.others(best)}")
        if not steps:
            raise SettingError(f"there is no checkpoint yet in {self.directory}")
        raise SettingError(
            f"--checkpoint {name}: must be best, latest or one of {steps}, the steps with a "
            f"checkpoint in {self.directory}"
        )

    def others(self, step: int, as_start: bool = False) -> str:
        """What to use in place of this checkpoint."""
        there = self.directory if as_start else "--checkpoint"
        ways = [f"{there}{'/' if as_start else ' '}{n}" for n in self.steps if n != step]
        return f"There are others: {', '.join(ways)}" if ways else "There is no other"

    def _best(self) -> int | None:
        """The best step as the newest readable checkpoint knows it; None before there is one."""
        for step in self.steps:
            with contextlib.suppress(Damaged):
                return self._metadata(step)["best_step"]
        return None

    def restore_latest(self, state: Any) -> tuple[Any, Progress] | None:
        """State and progress of the newest checkpoint that can be read, None if there is none.

        The given abstract state says shapes, dtypes and shardings. Damaged checkpoints are moved to
        `damaged/` with a warning. Raises SettingError if the state has another structure, and if
        there are only damaged ones: to start all over must not come as a surprise.
        """
        self._tidy_up()
        found, damaged = None, {}
        for step in json.loads(gather(json.dumps(self.steps))[0]):  # as process 0 sees them
            try:
                found = self.restore(step, state)
                break
            except Damaged as error:
                damaged[step] = error
        if damaged and not found:
            raise SettingError(
                f"{self.directory}: {'; '.join(map(str, damaged.values()))}. There is no other to "
                f"go on from: put back a copy, or start a new --workdir"
            )
        for step, reason in damaged.items():
            log.warning("%s; it is moved to damaged/, and an older one is used", reason)
            self._move(step, self.directory.parent / "damaged")
        require_same({"the restored checkpoint": int(found[0].step) if found else None})
        if found:
            self.best_step, self.saved_step = found[1].best_step, int(found[0].step)
        return found

    def restore(self, step: int, state: Any) -> tuple[Any, Progress]:
        """State and progress of this step, placed like the given abstract state.

        Raises Damaged if it cannot be read, SettingError if the state has another structure.
        """
        metadata, items = self._metadata(step), _items(state)
        for name, item in items.items():
            require_same_layout(metadata["layout"][name], layout(item), self.directory / str(step))
        restored = self._read(step, metadata, items)
        progress = {f.name: metadata[f.name] for f in dataclasses.fields(Progress)}
        return state.replace(**restored["model"], **restored["training"]), Progress(**progress)

    def _metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays: progress, layouts and digests."""
        with _reading(step):
            args = ocp.args.Composite(progress=ocp.args.JsonRestore())
            metadata = dict(self.manager.restore(step, args=args)["progress"])
            if metadata.pop("check") != checksum(metadata):
                raise ValueError("its progress is not what was saved")
        return metadata

    def _read(self, step: int, metadata: dict[str, Any], items: dict[str, Any]) -> Any:
        """These items, given as abstract trees."""
        with _reading(step):
            args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
            restored = self.manager.restore(step, args=ocp.args.Composite(**args))
            for name in items:
                if int(fetch(digest(restored[name]))) != metadata["digest"][name]:
                    raise ValueError(f"its {name} is not what was saved")
        return restored

    def read_params(self, step: int, params: Any) -> Any:
        """The saved parameters as they are, placed like those of the same name and shape."""
        metadata, alike = self._metadata(step), leaves_by_name(params)

        def abstract(path, saved):
            like = alike.get(name_of(path[1:]))
            if like is not None and like.shape == saved.shape:
                return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=like.sharding)
            whole = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=whole)

        with _reading(step), ocp.StandardCheckpointer() as reader:
            saved = reader.metadata(self.directory / str(step) / "model").item_metadata
            if saved is None:
                raise ValueError("what it says of its arrays cannot be read")
            model = jax.tree_util.tree_map_with_path(abstract, saved.tree)
        return self._read(step, metadata, {"model": model})["model"]["params"]

    def _tidy_up(self) -> None:
        """Clear away what a killed save left: half a checkpoint, or one about to be replaced."""
        if jax.process_index() == 0:
            for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished)
        self._settle()
        wait_for_all("checkpoints tidied up")
        self.manager.reload()

    def _settle(self) -> None:
        """Drop what was replaced, or put it back if the new one was never completed."""
        if jax.process_index() == 0 and self.replaced.exists():
            for old in self.replaced.iterdir():
                target = self.directory / old.name.partition("-")[0]
                if not target.exists():
                    old.rename(target)
            shutil.rmtree(self.replaced, ignore_errors=True)

    def _move(self, step: int, folder: Path) -> None:
        if jax.process_index() == 0:
            folder.mkdir(exist_ok=True)
            target = folder / f"{step}-{len(list(folder.iterdir()))}"
            (self.directory / str(step)).rename(target)
        wait_for_all("checkpoint moved")
        self.manager.reload()


@contextlib.contextmanager
def _reading(step: int) -> Generator[None]:
    try:
        yield
    except Exception as error:  # TensorStore raises almost anything
        if is_out_of_memory(error):
            raise
        if is_outside(error):
            raise Unreadable(
                f"checkpoint {step} cannot be read now: {summary(error)}. Mend that and try again"
            ) from error
        raise Damaged(f"checkpoint {step} is damaged: {summary(error)}") from error


def _items(state: Any) -> dict[str, dict]:
    """The arrays of the state as the two items of a checkpoint."""
    fields = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
    }
    model = {name: fields.pop(name) for name in MODEL_FIELDS if name in fields}
    return {"model": model, "training": fields}
