"""Time the training loop against its bare step: python -m <package>.tools.bench [train flags]."""

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .. import train
from ..config import Config
from ..runtime import command_line, processes
from ..runtime.manifest import versions
from ..train_step import compile_train_step

WARM_UP_STEPS = 20
MIN_STEPS = 3  # in a round
MIN_ROUNDS = 15
ROUND_TIME = 0.25  # seconds, about
TOTAL_TIME = 60  # seconds, about


class Finished(Exception):
    """All rounds are timed: the training can end."""


class Stopwatch:
    """A compiled train step that measures the loop which calls it, and the bare step.

    After each round of the loop it runs as many bare steps: on a copy of the state, with batches
    that are already on the devices, and without logging. Loop and bare step alternate, so that
    other load on the machine slows down both.
    """

    def __init__(self, step: Callable, fresh_totals: Callable):
        self.compiled, self.fresh_totals = step, fresh_totals
        self.batches: list = []
        self.calls, self.steps, self.rounds, self.began = 0, WARM_UP_STEPS, 0, 0.0
        self.loop_ms: list[float] = []
        self.bare_ms: list[float] = []

    def __call__(self, state, totals, batch):
        if len(self.batches) < 4:
            self.batches.append(jax.tree.map(jnp.asarray, batch))
        state, totals, status = self.compiled(state, totals, batch)
        self.calls += 1
        if self.calls == self.steps:
            jax.block_until_ready(state)
            self.end_round(state)
        return state, totals, status

    def end_round(self, state) -> None:
        """Note the time of the loop, time the bare step and begin the next round.

        Raises Finished after the last round.
        """
        elapsed = time.perf_counter() - self.began
        if self.began:  # the warm-up, which comes first, does not count
            self.loop_ms.append(1000 * elapsed / self.steps)
        self.bare_ms.append(self.time_bare_steps(state))
        if not self.began:
            self.plan()
        if len(self.loop_ms) == self.rounds:
            raise Finished
        self.calls, self.began = 0, time.perf_counter()

    def plan(self) -> None:
        """Choose the number of rounds and the steps in each, the same in all processes."""
        seconds = self.bare_ms[0] / 1000
        steps = max(round(ROUND_TIME / seconds), MIN_STEPS)
        rounds = max(round(TOTAL_TIME / (2 * steps * seconds)), MIN_ROUNDS)
        plan = multihost_utils.broadcast_one_to_all(np.array([steps, rounds], np.int32))
        self.steps, self.rounds = map(int, plan)

    def time_bare_steps(self, state) -> float:
        """Milliseconds of one bare step."""
        copied = jax.tree.map(jnp.copy, state)
        state, totals = jax.block_until_ready((copied, self.fresh_totals()))
        began = time.perf_counter()
        for i in range(self.steps):
            state, totals, _ = self.compiled(state, totals, self.batches[i % len(self.batches)])
        jax.block_until_ready(state)
        return 1000 * (time.perf_counter() - began) / self.steps


def main(config: Config) -> dict[str, Any]:
    """Train with these settings until all rounds are timed, and return the times in ms.

    `ratio` is the median, over the rounds, of the time of a step in the loop divided by the time of
    the bare steps right before and after. It shows what metrics, logging and input pipeline cost.
    Checkpoints fall into few rounds and hardly count; evaluation is off. Raises what train.main
    raises.
    """
    watches: list[Stopwatch] = []

    def compile_watched(*args):
        step, fresh_totals, costs = compile_train_step(*args)
        watches.append(Stopwatch(step, fresh_totals))
        return watches[0], fresh_totals, costs

    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        config = dataclasses.replace(
            config, workdir=scratch, total_steps=10**9, epochs=None, eval_every=0
        )
        try:
            train.main(config, compile_watched)
        except Finished:
            processes.wait_for_all("the end of the benchmark")
    (watch,) = watches
    bare_ms = [(a + b) / 2 for a, b in itertools.pairwise(watch.bare_ms)]
    ratios = [loop / bare for loop, bare in zip(watch.loop_ms, bare_ms, strict=True)]
    loop_ms = statistics.median(watch.loop_ms)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "loop_ms": round(loop_ms, 4),
        "bare_ms": round(statistics.median(bare_ms), 4),
        "quartiles": [round(ratio, 4) for ratio in statistics.quantiles(ratios)],
        "rounds": watch.rounds,
        "steps_per_round": watch.steps,
        "examples_per_second": round(1000 * config.batch_size / loop_ms, 2),
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "versions": versions(),
    }


def cli() -> int:
    """Measure with the command line's settings and return the exit code."""
    return command_line.run(run)


def run() -> int:
    """Measure and print the result as one JSON object; return the exit code."""
    with contextlib.redirect_stdout(sys.stderr):  # log lines: stdout is for the result only
        result = main(command_line.parse_settings(sys.argv[1:]))
    if jax.process_index() == 0:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(cli())
