"""Score a checkpoint: python -m <package>.evaluate --workdir runs/latest --split test."""

from .runtime import startup

if __name__ == "__main__":
    startup.prepare(takes_requests=False)  # first: the imports below take seconds

import contextlib
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from . import batches, data, mesh, task
from .config import Config, MeshConfig, SettingError
from .runtime import command_line, devices, logs, manifest, terminal
from .runtime.checkpoint import Checkpoints, Damaged
from .runtime.failures import explained, fetch
from .runtime.watchdog import Watchdog
from .runtime.workdir import find_run
from .train_state import TrainState, plan_train_state
from .train_step import Metrics, jit_eval_step

log = logging.getLogger(__package__)


def evaluate(
    score_batch: Callable[..., Metrics],
    state: TrainState,
    split: batches.Split,
    config: Config,
    sharding: jax.sharding.Sharding,
    name: str,
    keep_going: Callable[[], bool] = lambda: True,
) -> dict[str, float] | None:
    """Metrics of the state on a split; None if keep_going() said no between two batches."""
    parts = []
    count = batches.count_eval_batches(split, config)
    with contextlib.closing(batches.eval_batches(split, config, sharding)) as stream:
        for batch in terminal.track(stream, count, name, "batches") if count else stream:
            if not keep_going():
                return None
            parts.append(score_batch(state, batch))
            if len(parts) > 2:  # no more than a few batches wait in the device's memory
                jax.block_until_ready(parts[-3])
    parts = fetch(parts)

    def total(name, i):
        # In float64, on the host: float32 would lose digits over many batches.
        return float(np.sum([part[name][i] for part in parts], dtype=np.float64))

    metrics = task.report({name: (total(name, 0), total(name, 1)) for name in parts[0]})
    return metrics | batches.baseline(split)


@dataclass(frozen=True)
class DataPath:
    path: str | None = None
    """Where the data of the run is now, or other data to score (default: where it was)."""


@dataclass(frozen=True)
class EvaluateConfig:
    workdir: str = "runs/latest"
    """Run directory."""
    checkpoint: str = "best"
    """Which checkpoint: best, latest or a step."""
    split: Literal["train", "validation", "test"] = "test"
    """Rows to score."""
    eval_batches: int = 0
    """Batches to score, spread evenly over the split (0 = all of it)."""
    json: bool = False
    """Print one JSON object and nothing else."""
    data: DataPath = DataPath()


def load_run(
    path: Path, checkpoint: str, data_path: str | None = None
) -> tuple[Config, data.Data, jax.sharding.Mesh, TrainState]:
    """Settings, data, mesh and state of a run. Raises SettingError if it has no such checkpoint.

    `data_path` is where the data is now, or other data to score.
    """
    path = find_run(str(path))
    known, config = manifest.read_manifest(path), command_line.saved_config(path)
    if config is None:
        raise SettingError(f"--workdir {path}: there is no run here (no config.json)")
    devices.open_devices(config)
    count = jax.device_count()
    config = dataclasses.replace(
        config,
        batch_size=math.ceil(config.batch_size / count) * count,
        accumulation_steps=1,
        mesh=MeshConfig(fsdp=math.gcd(config.mesh.fsdp, count)),
    )
    if data_path is not None:
        settings = dataclasses.replace(config.data, path=data_path)
        config = dataclasses.replace(config, data=settings)
    dataset = load_data(config, known, data_path is not None)
    device_mesh = mesh.create_mesh(config.mesh, config.batch_size, 1)
    _, abstract = plan_train_state(config, dataset, device_mesh)
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        step = checkpoints.find(checkpoint)
        try:
            state, _ = checkpoints.restore(step, abstract)
        except Damaged as error:
            others = checkpoints.others(step)
            raise SettingError(f"--checkpoint {checkpoint}: {error}. {others}") from error
    return config, dataset, device_mesh, state


def load_data(config: Config, known: dict, may_be_other: bool) -> data.Data:
    """The data of a run, wherever it is now, or other data for the same outputs.

    `known` is the content of the run's config.json. Other data are read by its metadata.
    """
    trained_on = known["data"]
    try:
        dataset = data.load(config, known["metadata"]) if may_be_other else data.load(config)
    except SettingError as error:
        raise SettingError(f"{error}. If the data has moved: evaluate --data.path PLACE") from error
    if dataset.fingerprint != trained_on["fingerprint"]:
        log.warning("this is other data than the run was trained on, split by its own rule")
    if dataset.num_outputs > trained_on["outputs"]:
        raise SettingError(
            f"this data has {dataset.num_outputs} classes, and the run was trained on "
            f"{trained_on['outputs']}: give --data.path with the classes of the run"
        )
    return dataset._replace(num_outputs=trained_on["outputs"])


def main(options: EvaluateConfig) -> dict[str, float]:
    """Score one checkpoint of a run and return its metrics."""
    logs.start_logging(quiet=options.json)
    with Watchdog(limit=0) as watchdog:
        with watchdog.waiting_for("loading the run and its data"):
            config, dataset, device_mesh, state = load_run(
                Path(options.workdir), options.checkpoint, options.data.path
            )
        config = dataclasses.replace(config, eval_batches=options.eval_batches)
        split = getattr(dataset, options.split)
        sharding = mesh.batch_sharding(device_mesh)
        score_batch = jit_eval_step(config, device_mesh)
        with explained(config, watchdog), watchdog.waiting_for("evaluating"):
            scores = evaluate(
                score_batch, state, split, config, sharding, options.split, watchdog.moved
            )
    return {"step": int(state.step)} | scores


def cli() -> int:
    """Evaluate as the command line says and return the exit code."""
    return command_line.run(run)


def run() -> int:
    options = command_line.read_flags(
        EvaluateConfig, sys.argv[1:], description="Score a checkpoint of a run."
    )
    scores = main(options)
    if jax.process_index() == 0:
        text = "  ".join(f"{name} {value:.6g}" for name, value in scores.items())
        print(json.dumps(scores) if options.json else text, file=terminal.Screen(sys.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(cli())
