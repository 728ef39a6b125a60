"""Score a checkpoint: python -m <package>.evaluate --workdir runs/latest --split test."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro

from . import batches, data, mesh, processes, stop, task, workdir
from .checkpoint import Checkpoints
from .config import Config, MeshConfig, SettingError
from .train_state import TrainState, plan_train_state
from .train_step import Metrics, eval_step


def evaluate(
    score_batch: Callable[..., Metrics],
    state: TrainState,
    stream: Generator[dict],
    keep_going: Callable[[], bool] = lambda: True,
) -> dict[str, float] | None:
    """Metrics over all batches of the stream; None if keep_going() said no on the way."""
    parts = []
    with contextlib.closing(stream):
        for batch in stream:
            if not keep_going():
                return None
            parts.append(score_batch(state, batch))
            if len(parts) > 2:  # no more than a few batches wait in the device's memory
                jax.block_until_ready(parts[-3])
    parts = jax.device_get(parts)

    def total(name, i):
        # In float64, on the host: float32 would lose digits over many batches.
        return float(np.sum([part[name][i] for part in parts], dtype=np.float64))

    return task.report({name: (total(name, 0), total(name, 1)) for name in parts[0]})


@dataclass(frozen=True)
class EvaluateConfig:
    workdir: str = "runs/latest"
    """Run directory."""
    checkpoint: str = "best"
    """Which checkpoint: best, latest or a step."""
    split: Literal["train", "validation", "test"] = "test"
    """Rows to score."""
    json: bool = False
    """Print one JSON object and nothing else."""


def load_run(
    path: Path, checkpoint: str
) -> tuple[Config, data.Data, jax.sharding.Mesh, TrainState]:
    """Settings, data, mesh and state of a run. Raises SettingError if it has no such checkpoint."""
    path = path.expanduser().resolve()
    config = workdir.saved_config(path)
    if config is None:
        raise SettingError(f"--workdir {path}: there is no run here (no config.json)")
    mesh.open_devices(config)
    devices = jax.device_count()
    config = dataclasses.replace(
        config,
        batch_size=math.ceil(config.batch_size / devices) * devices,
        accumulation_steps=1,
        mesh=MeshConfig(fsdp=math.gcd(config.mesh.fsdp, devices)),
    )
    dataset = data.load(config)
    grid = mesh.create_mesh(config.mesh, config.batch_size, 1)
    _, abstract = plan_train_state(config, dataset, grid)
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        step = checkpoints.find(checkpoint)
        state, _ = checkpoints.restore(step, abstract)
    return config, dataset, grid, state


def main(options: EvaluateConfig) -> dict[str, float]:
    """Score one checkpoint of a run and return its metrics."""
    config, dataset, grid, state = load_run(Path(options.workdir), options.checkpoint)
    stream = batches.eval_batches(
        getattr(dataset, options.split), config, mesh.batch_sharding(grid)
    )
    score_batch = jax.jit(eval_step, out_shardings=mesh.replicated(grid))
    return {"step": int(state.step)} | evaluate(score_batch, state, stream)


def cli() -> int:
    """Evaluate as the command line says and return the exit code."""
    options = tyro.cli(
        EvaluateConfig,
        prog=f"python -m {__package__}.evaluate",
        description="Score a checkpoint of a run.",
    )
    try:
        scores = main(options)
    except (SettingError, processes.Unreachable) as error:
        print(f"error: {error}", file=sys.stderr)
        return stop.BAD_SETTING if isinstance(error, SettingError) else stop.EXIT_CODES["failed"]
    if jax.process_index() == 0:
        if options.json:
            print(json.dumps(scores))
        else:
            print("  ".join(f"{name} {value:.6g}" for name, value in scores.items()))
    return 0


if __name__ == "__main__":
    sys.exit(cli())
