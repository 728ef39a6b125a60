"""What accumulation costs and saves: python benchmarks/accumulation.py [rounds]

Times the compiled step of the default networks with 1, 2, 4 and 8 micro-batches of a global batch,
interleaved, and prints its time by that of the whole batch (median and quartiles) and its temporary
memory. The Python of `make setup` has what it needs.
"""

import importlib
import os
import statistics
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from projects import importable

ROWS = {"image_classification": 512, "language_model": 32}
PARTS = (1, 2, 4, 8)


class Step:
    """A compiled step with its state and a batch on the device."""

    def __init__(self, package: str, rows: int, parts: int):
        names = ("config", "data", "mesh", "train_state", "train_step")
        modules = [importlib.import_module(f"{package}.{name}") for name in names]
        config, data, mesh, train_state, train_step = modules
        settings = config.Config(total_steps=10**6, batch_size=rows, accumulation_steps=parts)
        dataset = data.load(settings)
        grid = mesh.create_mesh(settings.mesh, rows, parts)
        create, abstract = train_state.plan_train_state(settings, dataset, grid)
        made = train_step.compile_train_step(settings, abstract, dataset.train, grid)
        self.step, fresh_totals, _ = made
        self.state, self.totals = create(), fresh_totals()
        batch = dataset.train.rows(np.arange(rows))
        self.batch = jax.device_put(batch, mesh.batch_sharding(grid))
        self.temporary = self.step.memory_analysis().temp_size_in_bytes

    def time(self) -> float:
        began = time.perf_counter()
        for _ in range(2):
            self.state, self.totals, _ = self.step(self.state, self.totals, self.batch)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began) / 2


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        print("| task | micro-batches | time by the whole batch | temporary memory |")
        print("|---|---|---|---|")
        for task, rows in ROWS.items():
            package = importable(out, task)
            steps = {parts: Step(package, rows, parts) for parts in PARTS}
            for step in steps.values():
                step.time()
            seconds = {parts: [] for parts in PARTS}
            for _ in range(rounds):
                for parts, step in steps.items():
                    seconds[parts].append(step.time())
            for parts, step in steps.items():
                ratios = [x / y for x, y in zip(seconds[parts], seconds[1], strict=True)]
                low, middle, high = statistics.quantiles(ratios)
                memory = f"{step.temporary / 2**20:.1f} MB"
                print(f"| {task} | {parts} | {middle:.2f} ({low:.2f} to {high:.2f}) | {memory} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
