"""Microseconds a batch that the data order costs: python benchmarks/order.py

A table of the generated project's order, in processor time of one thread, beside a permutation of
all rows of each epoch, which it replaced. "first" is the longest that any batch took, in ms: with a
permutation the first of an epoch, and otherwise the first of a block. The Python of `make setup`
has what it needs. A permutation of more than 10**8 rows is left out: it takes gigabytes.
"""

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROWS, BATCH_SIZES = (10**3, 10**5, 45 * 10**6, 10**9), (32, 256, 1024)
LARGEST_PERMUTATION = 10**8
ROUND = 2.0  # seconds, about


def generate(out: str):
    """Generate a project and import its module batches."""
    command = [sys.executable, "-m", "cookiecutter", ROOT, "--no-input", "--accept-hooks", "no"]
    subprocess.run([*command, "-o", out, "project_slug=order_net"], check=True)
    sys.path.insert(0, f"{out}/order_net")
    return importlib.import_module("order_net.batches")


class Permutation:
    """What the project did before: all rows at once, kept for the epoch."""

    epoch, order = -1, np.empty(0)

    def train_indices(self, step: int, rows: int, batch_size: int, seed: int) -> np.ndarray:
        epoch, batch = divmod(step, rows // batch_size)
        if epoch != self.epoch:
            draw = np.random.Generator(np.random.Philox(key=[seed, epoch]))
            self.epoch, self.order = epoch, draw.permutation(rows)
        return self.order[batch * batch_size : (batch + 1) * batch_size]


def measure(train_indices: Callable, rows: int, batch_size: int) -> str:
    """'mean microseconds, longest in ms' over whole epochs, or as many batches as fit in."""
    seconds, began = [], time.perf_counter()
    steps = rows // batch_size
    while time.perf_counter() < began + ROUND:
        start = time.thread_time()
        train_indices(len(seconds), rows, batch_size, 0)
        seconds.append(time.thread_time() - start)
    longest = max(seconds)
    if steps > len(seconds):  # the epoch's start counts for all of its batches
        rest = sorted(seconds)[:-1] or [0.0]
        mean = longest / steps + sum(rest) / len(rest)
    else:
        mean = sum(seconds) / len(seconds)
    return f"{1e6 * mean:.1f} | {1e3 * longest:.2f}"


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        batches = generate(out)
        print("| rows | batch | us | first, ms | permutation, us | first, ms |")
        print("|---|---|---|---|---|---|")
        for rows in ROWS:
            for batch_size in BATCH_SIZES:
                if batch_size > rows:
                    continue
                old = "- | -"
                if rows <= LARGEST_PERMUTATION:
                    old = measure(Permutation().train_indices, rows, batch_size)
                new = measure(batches.train_indices, rows, batch_size)
                print(f"| {rows:,} | {batch_size} | {new} | {old} |", flush=True)


if __name__ == "__main__":
    main()
