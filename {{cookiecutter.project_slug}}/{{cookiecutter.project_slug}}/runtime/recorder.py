"""What a run shows while it trains: log lines, TensorBoard, the progress bar, throughput."""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from .. import task
from ..config import Config
from ..train_state import TrainState
from ..train_step import COUNTERS
from . import stop, terminal
from .events import Events
from .failures import fetch
from .progress import Progress
from .watchdog import Watchdog

log = logging.getLogger(__package__.partition(".")[0])

# The loop waits for the device once in a while, else batches would pile up in the device's memory.
# It leaves LAG steps under way: waiting for the last one would leave the device idle. It waits when
# there are MOST, or after WHILE: on a CPU each wait takes time from the threads that compute.
LAG, MOST, WHILE = 2, 100, 1.0  # steps, steps, seconds


class Diverged(Exception):
    """More non-finite updates in a row than allowed."""


class Recorder:
    """Follows the steps of one run and shows their metrics, averaged over each log interval."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        state: TrainState,
        steps_per_epoch: int,
        watchdog: Watchdog,
    ):
        self.config, self.progress, self.watchdog = config, progress, watchdog
        start = self.current = int(state.step)
        self.steps_per_epoch = steps_per_epoch
        self.leaf_names = [keystr(path) for path, _ in tree_leaves_with_path(state.params)]
        self.in_flight: deque = deque()
        self.waited_at = 0.0
        self.due: tuple | None = None
        self.skipped_steps = int(state.skipped_steps)
        self.skipped_in_a_row = 0
        self.checked = start
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0  # of training, without pauses
        self.interval_start = (start, 0.0)
        self.warned_of_waiting = False
        self.clock = time.monotonic()
        self.costs: dict[str, float | None] = {}
        self.directory = Path(config.workdir) / "tb"
        self.is_writer = jax.process_index() == 0
        self.tensorboard = Events(self.directory, start) if self.is_writer else None
        self.profiling = False
        self.bar = terminal.create_bar(config.total_steps, "train", initial=start, unit="step")

    def begin(self, step: int) -> None:
        """Training starts now, after compilation."""
        self.clock = time.monotonic()
        self.profile(step)

    def step(self, step: int, totals, guard, fresh):
        """Note that this step was started. Returns the totals to go on with.

        `totals` are the metrics since the last log line and `guard` the state's counters, both
        still being computed. They are read LAG steps later, when others are under way.
        """
        self.steps, self.current = self.steps + 1, step
        self.in_flight.append(guard["skipped_steps"])
        if len(self.in_flight) > LAG:
            self.limit_run_ahead()
        self.watchdog.moved()
        self.bar.update()
        self.profile(step)
        if self.due is not None and step == self.due[0] + LAG:
            self.flush()
        if step % self.config.log_every == 0:
            self.flush()  # the one before may be less than LAG steps old
            self.due = (step, totals, guard)
            return fresh()
        return totals

    def limit_run_ahead(self) -> None:
        """Wait for all but the last steps, if it is time to."""
        if len(self.in_flight) >= MOST or time.monotonic() > self.waited_at + WHILE:
            while len(self.in_flight) > LAG:
                oldest = self.in_flight.popleft()
            jax.block_until_ready(oldest)
            self.waited_at = time.monotonic()

    def profile(self, step: int) -> None:
        """Record what happens between the two steps of --profile-steps, for TensorBoard."""
        first, last = self.config.profile_range or (None, None)
        if step == first:
            jax.profiler.start_trace(str(self.directory))
            self.profiling = True
        elif self.profiling and step == last:
            jax.block_until_ready(list(self.in_flight))
            self.stop_profiling()

    def stop_profiling(self) -> None:
        jax.profiler.stop_trace()
        self.profiling = False
        log.info("the profile is in %s: see it with make tensorboard", self.directory)

    def flush(self) -> None:
        """Log the interval that ended last, if that was not done yet."""
        if self.due is None:
            return
        (step, totals, guard), self.due = self.due, None
        totals, guard = fetch((totals, guard))
        self.tick()
        self.check(step, guard)
        self.show("train", step, totals, guard)

    def finish(self, step: int, totals, guard) -> None:
        """Log what is left at the end of the run."""
        self.flush()
        if guard is not None and step % self.config.log_every:
            self.due = (step, totals, guard)
            self.flush()

    def check(self, step: int, guard) -> None:
        """Say what was skipped; raise Diverged if it was once too often in a row."""
        guard = fetch(guard)
        counts = {name: int(guard[name]) for name in COUNTERS}
        in_a_row, limit = counts["skipped_in_a_row"], self.config.max_skipped_steps
        leaf = self.leaf_names[counts["first_bad_leaf"]]
        if in_a_row > limit:
            self.skipped_steps, self.skipped_in_a_row = counts["skipped_steps"], in_a_row
            raise Diverged(
                f"diverged: the loss or the gradients were not finite from step "
                f"{step - in_a_row + 1} on, more than {limit} times in a row; the first bad "
                f"gradient is that of {leaf}"
            )
        new = counts["skipped_steps"] - self.skipped_steps
        if new > 0 and step > self.checked:
            scale = float(guard["loss_scale"])
            is_search = self.config.precision == "float16" and scale > 1
            log.warning(
                "step %d: %d of the last %d updates were skipped, because the loss or a gradient "
                "was not finite; in the last of them first that of %s%s",
                *(step, new, step - self.checked, leaf),
                f"; float16's loss scale is now {scale:g}" if is_search else "",
            )
        self.skipped_steps, self.skipped_in_a_row = counts["skipped_steps"], in_a_row
        self.checked = step

    def show(self, kind: str, step: int, totals, guard) -> None:
        """Log and write the metrics of one interval, and what is of its last step alone."""
        metrics = task.report({name: (float(s), float(w)) for name, (s, w) in totals.items()})
        (first, since), self.interval_start = self.interval_start, (step, self.seconds)
        rate = (step - first) * self.config.batch_size / max(self.seconds - since, 1e-9)
        metrics["learning_rate"] = float(guard["learning_rate"])
        metrics["skipped_steps"] = int(guard["skipped_steps"])
        if self.config.precision == "float16":
            metrics["loss_scale"] = float(guard["loss_scale"])
        metrics["examples_per_second"] = rate
        self.warn_of_blow_up(step, metrics.get("loss"))
        self.warn_of_waiting(step)
        self.write(kind, step, metrics)

    def write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Write metrics to the log and to TensorBoard as <kind>/<metric>."""
        shown = {name: value for name, value in metrics.items() if not name.startswith("num_")}
        said = {name: x for name, x in shown.items() if x or name != "skipped_steps"}
        text = "  ".join(f"{name} {value:.4g}" for name, value in said.items())
        self.bar.clear()
        bad = [name for name, value in shown.items() if not math.isfinite(value)]
        if bad:
            log.warning(
                "step %d: not finite in %s: %s. Such an evaluation is never the best; compare with "
                "--precision float32",
                *(step, kind, ", ".join(bad)),
            )
        epoch = step / self.steps_per_epoch
        log.info(
            "%-5s step %d/%d (epoch %.4g)  %s",
            *(kind, step, self.config.total_steps, epoch, text),
        )
        if self.tensorboard and kind != "test":  # which is a result, not a curve
            self.tensorboard.write(step, {f"{kind}/{name}": x for name, x in shown.items()})

    def warn_of_blow_up(self, step: int, loss: float | None) -> None:
        if loss is None:
            return
        first = self.progress.first_loss = self.progress.first_loss or loss
        if loss > 10 * first:
            log.warning("step %d: loss %.4g is over 10 times the first, %.4g", step, loss, first)

    def warn_of_waiting(self, step: int) -> None:
        """Once, when the device has to wait for its data."""
        fraction = self.waited / max(self.seconds, 1e-9)
        if fraction > 0.2 and self.seconds > 1 and not self.warned_of_waiting:
            self.warned_of_waiting = True
            log.warning(
                "step %d: %.0f %% of the time went into preparing batches: raise --data.workers, "
                "or do less in data.py",
                *(step, 100 * fraction),
            )

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time inside as waiting for input."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self, step: int, guard) -> Generator[None]:
        """Wait for this step, check it, and keep the time inside out of the throughput."""
        self.flush()
        if guard is not None:
            self.check(step, guard)
        self.tick()
        yield
        self.clock = time.monotonic()

    def keep_going(self) -> bool:
        """Called between the batches of an evaluation: false once a stop was requested."""
        self.watchdog.moved()
        return not stop.poll()

    def tick(self) -> None:
        """Add the time since the last tick to the training time."""
        now = time.monotonic()
        self.seconds += now - self.clock
        self.clock = now

    def summary(self) -> dict[str, Any]:
        """What result.json says of the steps and evaluations."""
        return {
            "step": self.current,
            "best_step": self.progress.best_step,
            "best_metric": self.progress.best_metric,
            "eval": None,
            **self.throughput(),
            "compile_seconds": self.costs.get("compile_seconds"),
            "skipped_steps": self.skipped_steps,
            "model_flops_per_step": self.costs.get("model_flops_per_step"),
        }

    def throughput(self) -> dict[str, float | None]:
        """Training speed over the whole run so far, pauses and compilation left out."""
        if not self.steps or not self.seconds:
            return dict.fromkeys(("examples_per_second", "step_ms", "input_wait_fraction"))
        return {
            "examples_per_second": self.steps * self.config.batch_size / self.seconds,
            "step_ms": 1000 * self.seconds / self.steps,
            "input_wait_fraction": min(self.waited / self.seconds, 1.0),
        }

    def close(self) -> None:
        """Write out everything. The progress bar goes."""
        if self.profiling:
            self.stop_profiling()
        self.bar.close()
        if self.tensorboard:
            self.tensorboard.close()
