"""Step time of NNX against Linen, interleaved in one process: python benchmarks/apis.py [rounds]

Prints, for each task, the median over the rounds of NNX's time by Linen's, and its quartiles. The
Python of `make setup` has what it needs.
"""

import importlib
import statistics
import sys
import tempfile
import time

import jax
import numpy as np
from projects import importable

SECONDS = 0.25  # of each round


class Run:
    """The compiled step of a project, with its state and four batches on the device."""

    def __init__(self, package: str):
        names = ("config", "data", "mesh", "train_state", "train_step")
        modules = [importlib.import_module(f"{package}.{name}") for name in names]
        config, data, mesh, train_state, train_step = modules
        settings = config.Config(total_steps=10**6)
        dataset = data.load(settings)
        grid = mesh.create_mesh(settings.mesh, settings.batch_size, 1)
        create, abstract = train_state.plan_train_state(settings, dataset, grid)
        made = train_step.compile_train_step(settings, abstract, dataset.train, grid)
        self.step, fresh_totals, _ = made
        self.state, self.totals = create(), fresh_totals()
        size, sharding = settings.batch_size, mesh.batch_sharding(grid)
        rows = [np.arange(i * size, (i + 1) * size) for i in range(4)]
        self.batches = [jax.device_put(dataset.train.rows(r), sharding) for r in rows]

    def time(self, steps: int) -> float:
        """Seconds per step."""
        began = time.perf_counter()
        for i in range(steps):
            self.state, self.totals, _ = self.step(self.state, self.totals, self.batches[i % 4])
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began) / steps


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        for task in ("image_classification", "language_model"):
            linen, nnx = (Run(importable(out, task, api)) for api in ("linen", "nnx"))
            steps = max(round(SECONDS / max(linen.time(5), nnx.time(5))), 2)
            ratios = []
            for i in range(rounds):  # who goes first alternates
                order = (linen, nnx) if i % 2 else (nnx, linen)
                seconds = {run: run.time(steps) for run in order}
                ratios.append(seconds[nnx] / seconds[linen])
            quartiles = ", ".join(f"{x:.3f}" for x in statistics.quantiles(ratios))
            print(f"{task}: NNX / Linen {statistics.median(ratios):.3f} (quartiles {quartiles})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
