"""What a run shows while it trains: log lines, TensorBoard, the progress bar, the profile."""

import contextlib
import logging
import math
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import scalar

from ..config import Config
from . import stop, terminal
from .events import Events
from .failures import fetch
from .pace import KEEP_RUNNING, Pace
from .progress import Progress
from .watchdog import Watchdog

log = logging.getLogger(__package__.partition(".")[0])

Totals = dict[str, tuple[jax.Array, jax.Array]]
Status = dict[str, jax.Array]


class Diverged(Exception):
    """More updates in a row than allowed were skipped, because they were not finite."""


class Recorder:
    """Watches the steps of one run and logs their metrics, averaged over each log interval.

    `state` is the train state from which this start of the run continues. `report` turns the
    (sum, weight) of each metric into the numbers to show. `steps_per_epoch` is None where epochs
    are not known.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        state: Any,
        report: Callable[[dict[str, Any]], dict[str, float]],
        steps_per_epoch: int | None,
        watchdog: Watchdog,
    ):
        self.config, self.progress, self.watchdog = config, progress, watchdog
        self.report, self.steps_per_epoch = report, steps_per_epoch
        start = self.current = int(state.step)
        self.leaf_names = [keystr(path) for path, _ in tree_leaves_with_path(state.params)]
        self.pace = Pace()
        self.fresh_totals: Callable[[], Totals] = dict
        self.latest: tuple[int, Totals, Status] | None = None
        """The last step that was started, the totals after it, and its status."""
        self.due: tuple[int, Totals, Status] | None = None
        """The same of the step that ended a log interval which is not logged yet."""
        self.interval_start = (start, 0.0)
        self.skipped_steps = int(state.skipped_steps)
        self.skipped_in_a_row = 0
        self.checked = start
        self.warned_of_waiting = False
        self.costs: dict[str, float | None] = {}
        self.directory = Path(config.workdir) / "tb"
        self.events = Events(self.directory, start) if jax.process_index() == 0 else None
        self.is_profiling = False
        self.bar = terminal.create_bar(config.total_steps, "train", initial=start, unit="step")

    # --- The steps -------------------------------------------------------------------------------

    def begin(self, fresh_totals: Callable[[], Totals]) -> Totals:
        """Start the clock after compilation. Returns the totals for the first step."""
        self.fresh_totals = fresh_totals
        self.pace.restart_clock()
        self.profile(self.current)
        return fresh_totals()

    def step(self, step: int, totals: Totals, status: Status) -> Totals:
        """Take note that this step was started. Returns the totals for the next step.

        `totals` are the metrics since the last log line, and `status` is the third output of the
        compiled step. The device may still be computing both, so they are read KEEP_RUNNING steps
        later, while it works on other steps. Raises Diverged like check().
        """
        self.current = step
        self.latest = (step, totals, status)
        self.pace.step(status["skipped_steps"])
        self.watchdog.moved()
        self.bar.update()
        self.profile(step)
        if self.due is not None and step == self.due[0] + KEEP_RUNNING:
            self.flush()
        if step % self.config.log_every == 0:
            self.flush()  # the interval before, if it ended less than KEEP_RUNNING steps ago
            self.due = self.latest
            return self.fresh_totals()
        return totals

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Wait for the last step and check it; the time inside does not count as training time.

        Raises Diverged like check().
        """
        self.flush()
        if self.latest is not None:
            step, _, status = self.latest
            self.check(step, fetch(status))
        self.pace.read_clock()
        yield
        self.pace.restart_clock()

    def keep_going(self) -> bool:
        """Called between the batches of an evaluation: False once the run should stop."""
        self.watchdog.moved()
        return not stop.poll()

    def finish(self) -> None:
        """Log the last, incomplete interval when training ends. Raises Diverged like check()."""
        self.flush()
        if self.latest is not None and self.latest[0] % self.config.log_every:
            self.due = self.latest
            self.flush()

    def close(self) -> None:
        """Finish the profile, remove the progress bar and close TensorBoard's file."""
        if self.is_profiling:
            self.stop_profiling()
        self.bar.close()
        if self.events:
            self.events.close()

    # --- Metrics ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Log the last complete interval, unless it is logged already."""
        if self.due is None:
            return
        (step, totals, status), self.due = self.due, None
        totals, status = fetch((totals, status))
        self.pace.read_clock()
        self.check(step, status)
        self.show(step, totals, status)

    def check(self, step: int, status: dict[str, Any]) -> None:
        """Warn of skipped updates. Raises Diverged if too many in a row were skipped."""
        skipped_steps, in_a_row = int(status["skipped_steps"]), int(status["skipped_in_a_row"])
        new = skipped_steps - self.skipped_steps
        self.skipped_steps, self.skipped_in_a_row = skipped_steps, in_a_row
        leaf, limit = self.leaf_names[status["first_bad_leaf"]], self.config.max_skipped_steps
        if in_a_row > limit:
            raise Diverged(
                f"diverged: the loss or the gradients were not finite from step "
                f"{step - in_a_row + 1} on, more than {limit} times in a row; the first bad "
                f"gradient is that of {leaf}"
            )
        if new > 0 and step > self.checked:
            scale = float(status["loss_scale"])
            is_search = self.config.precision == "float16" and scale > 1
            log.warning(
                "step %d: %d of the last %d updates were skipped, because the loss or a gradient "
                "was not finite; the first bad gradient of the last one is that of %s%s",
                *(step, new, step - self.checked, leaf),
                f"; float16's loss scale is now {scale:g}" if is_search else "",
            )
        self.checked = step

    def show(self, step: int, totals: dict[str, Any], status: dict[str, Any]) -> None:
        """Log the metrics of one interval, with learning rate and loss scale of its last step."""
        metrics = self.report({name: (float(s), float(w)) for name, (s, w) in totals.items()})
        (first, since), self.interval_start = self.interval_start, (step, self.pace.seconds)
        seconds = max(self.pace.seconds - since, 1e-9)
        metrics["learning_rate"] = float(status["learning_rate"])
        metrics["skipped_steps"] = int(status["skipped_steps"])
        if self.config.precision == "float16":
            metrics["loss_scale"] = float(status["loss_scale"])
        metrics["examples_per_second"] = (step - first) * self.config.batch_size / seconds
        self.warn_of_blow_up(step, metrics.get("loss"))
        self.warn_of_waiting(step)
        self.write("train", step, metrics)

    def write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Write metrics to the log and to TensorBoard as <kind>/<metric>."""
        shown = {name: value for name, value in metrics.items() if not name.startswith("num_")}
        logged = {name: x for name, x in shown.items() if x or name != "skipped_steps"}
        text = "  ".join(f"{name} {value:.4g}" for name, value in logged.items())
        self.bar.clear()
        bad = [name for name, value in shown.items() if not math.isfinite(value)]
        if bad:
            log.warning(
                "step %d: not finite in %s: %s. Such an evaluation is never the best; compare with "
                "--precision float32",
                *(step, kind, ", ".join(bad)),
            )
        epoch = f" (epoch {step / self.steps_per_epoch:.4g})" if self.steps_per_epoch else ""
        log.info("%-5s step %d/%d%s  %s", kind, step, self.config.total_steps, epoch, text)
        if kind != "test":  # the test is a single result, not a curve
            for name, value in shown.items():
                self.add_summary(step, scalar(f"{kind}/{name}", value))

    def add_summary(self, step: int, summary: Summary) -> None:
        """Write an image, a histogram or a text, made by tensorboardX.summary, to TensorBoard."""
        if self.events:
            self.events.write(step, summary)

    def warn_of_blow_up(self, step: int, loss: float | None) -> None:
        """Warn when the loss is over 10 times that of the first interval."""
        if loss is None:
            return
        first = self.progress.first_loss = self.progress.first_loss or loss
        if loss > 10 * first:
            log.warning("step %d: loss %.4g is over 10 times the first, %.4g", step, loss, first)

    def warn_of_waiting(self, step: int) -> None:
        """Warn, once, when over a fifth of the time was spent waiting for batches."""
        fraction = self.pace.input_fraction
        if fraction > 0.2 and self.pace.seconds > 1 and not self.warned_of_waiting:
            self.warned_of_waiting = True
            log.warning(
                "step %d: %.0f %% of the time went into preparing batches: raise --data.workers, "
                "or do less in data.py",
                *(step, 100 * fraction),
            )

    def summary(self) -> dict[str, Any]:
        """The part of result.json about steps, evaluations and speed."""
        return {
            "step": self.current,
            "best_step": self.progress.best_step,
            "best_metric": self.progress.best_metric,
            "eval": None,
            "tested_step": None,
            "eval_batches": self.config.eval_batches or None,
            **self.pace.summary(self.config.batch_size),
            "compile_seconds": self.costs.get("compile_seconds"),
            "skipped_steps": self.skipped_steps,
            "model_flops_per_step": self.costs.get("model_flops_per_step"),
        }

    # --- The profile -----------------------------------------------------------------------------

    def profile(self, step: int) -> None:
        """Start or stop the profiler of JAX, if this is one of the two --profile-steps."""
        first, last = self.config.profile_range or (None, None)
        if step == first:
            jax.profiler.start_trace(str(self.directory))
            self.is_profiling = True
        elif self.is_profiling and step == last:
            self.pace.wait_for_all()
            self.stop_profiling()

    def stop_profiling(self) -> None:
        jax.profiler.stop_trace()
        self.is_profiling = False
        log.info("the profile is in %s: see it with make tensorboard", self.directory)
