"""Train a model: python -m <package>.train --help shows every setting."""

from .runtime import startup

if __name__ == "__main__":
    startup.prepare()  # first: the imports below take seconds, and a signal may come in them

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from . import batches, data, mesh
from .config import Config, check, resolve
from .evaluate import evaluate
from .optimizer import decayed
from .runtime import advice, command_line, devices, logs, manifest, processes, stop
from .runtime.checkpoint import Checkpoints, Damaged, Unreadable
from .runtime.failures import explained
from .runtime.init_from import restore_params
from .runtime.progress import Progress
from .runtime.recorder import Diverged, Recorder
from .runtime.watchdog import Watchdog
from .runtime.workdir import Run, open_run
from .train_state import plan_train_state
from .train_step import compile_train_step, eval_step

log = logging.getLogger(__package__)


def main(config: Config, compile_step: Callable = compile_train_step) -> dict[str, Any]:
    """Train as configured and return the contents of result.json.

    `compile_step` stands in for compile_train_step, for tools that watch the steps.

    Raises SettingError for a setting, data or a run directory that cannot be used, before anything
    is compiled or overwritten.
    """
    began = time.monotonic()
    check(config)
    logs.start_logging(config.quiet)
    with (
        Watchdog(config.stall_timeout) as watchdog,
        stop.listening(lambda reason: watchdog.abandon(reason)),
        explained(config, watchdog),
    ):
        with watchdog.waiting_for("looking for devices"):
            devices.open_devices(config)
        logs.show(config.quiet)
        with watchdog.waiting_for("reading the data"), processes.failing_together():
            dataset = data.load(config)
            config = resolve(config, len(dataset.train))
            grid = mesh.create_mesh(config.mesh, config.batch_size, config.accumulation_steps)
        known = manifest.describe(config, dataset)
        processes.require_same(known)
        with open_run(config, known, watchdog, began) as run:
            if run.is_over:
                log.info("%s", manifest.describe_end(run.path, run.result, is_over=True))
                return run.result
            return train(run, dataset, grid, watchdog, compile_step)


def train(
    run: Run,
    dataset: data.Data,
    grid: jax.sharding.Mesh,
    watchdog: Watchdog,
    compile_step: Callable,
) -> dict[str, Any]:
    """Train from where the run is to its end, and return the contents of result.json."""
    config, sharding = run.config, mesh.batch_sharding(grid)
    with contextlib.ExitStack() as closing:
        # ------------------------------------------------------ The state: new, or as it was left
        with watchdog.waiting_for("creating or restoring the train state"):
            create, abstract = plan_train_state(config, dataset, grid)
            checkpoints = closing.enter_context(contextlib.closing(Checkpoints(run.path)))
            found = checkpoints.restore_latest(abstract)
            state, progress = found or (jax.block_until_ready(create()), Progress())
            step = start = saved = int(state.step)
            if step == 0 and config.init_from:
                state = state.start_from(restore_params(Path(config.init_from), state.params))
        lines = advice.check(config, dataset, state, run.earlier)
        run.facts["weight_decay_on"] = decayed(state.params)["decayed"]
        run.accept()
        manifest.announce(run, dataset, step, lines)
        progress.extend(config.total_steps)

        steps_per_epoch = len(dataset.train) // config.batch_size
        recorder = Recorder(config, progress, state, steps_per_epoch, watchdog)
        closing.callback(recorder.close)
        run.summary = recorder.summary
        score_batch = jax.jit(eval_step, out_shardings=mesh.replicated(grid))
        guard = None

        def score(name, split):
            """Metrics of the state on a split; None if a stop was requested meanwhile."""
            with recorder.paused(step, guard), watchdog.waiting_for("evaluating"):
                stream = batches.eval_batches(split, config, sharding)
                count = batches.count_eval_batches(split, config)
                found = evaluate(score_batch, state, stream, count, name, recorder.keep_going)
                return found and found | batches.baseline(split)

        try:
            # ---------------------------------------------------------------- The compiled step
            with watchdog.waiting_for("compiling the step"):
                train_step, fresh_totals, recorder.costs = compile_step(
                    config, abstract, dataset.train, grid
                )
                processes.wait_for_all("compiled")
            run.begin()
            totals = fresh_totals()
            stream = batches.train_batches(dataset.train, config, sharding, step)
            closing.callback(stream.close)
            recorder.begin(step)

            # ------------------------------------------------------------------------- The loop
            while True:
                # Before every step: evaluate, save and end the run, each if it is due.
                is_last, is_best = step >= config.total_steps, False
                stopping = stop.poll() or start < step == config.stop_after_step
                is_due = is_last or is_multiple(step, config.eval_every)
                if config.eval_every and is_due and step > progress.evaluated_step and not stopping:
                    scores = score("eval", dataset.validation)
                    stopping = scores is None
                    if scores:
                        recorder.write("eval", step, scores)
                        is_best = progress.update(step, scores)
                status, reason = how_it_ends(config, progress, step, stopping)
                is_due = bool(status) or is_multiple(step, config.checkpoint_every)
                if is_best or (is_due and step > saved):
                    with recorder.paused(step, guard), watchdog.waiting_for("saving"):
                        # While updates are skipped nothing pushes out the checkpoints from before.
                        if status or is_best or not recorder.skipped_in_a_row:
                            checkpoints.save(step, state, progress)
                            saved = step
                if status:
                    break

                with recorder.waiting():
                    batch = next(stream)
                state, totals, guard = train_step(state, totals, batch)
                step += 1
                totals = recorder.step(step, totals, guard, fresh_totals)

            # ------------------------------------------------------- The test of the best state
            recorder.finish(step, totals, guard)
            with watchdog.waiting_for("saving the last checkpoint"):
                checkpoints.wait()
            tested, tested_step = None, None
            if status != "preempted":
                if progress.best_step not in (None, step):
                    try:
                        with watchdog.waiting_for("restoring the best checkpoint"):
                            state, _ = checkpoints.restore(progress.best_step, abstract)
                    except (Damaged, Unreadable) as error:
                        log.error("%s. The last step is tested in place of the best", error)
                tested_step = int(state.step)
                tested = score("test", dataset.test)
                if tested:
                    recorder.write("test", tested_step, tested)
                else:
                    status, reason = "preempted", "stopped on request in the test"
        except Diverged as error:
            status, reason, tested, tested_step = "diverged", str(error), None, None
            good = max(checkpoints.steps, default="none")
            log.error("%s; last good checkpoint: %s", error, good)
        except (Exception, SystemExit):
            with contextlib.suppress(Exception):  # the metrics may be what failed
                recorder.finish(step, totals, guard)
            checkpoints.rescue(step, state, progress)
            raise
    result = run.end(
        status,
        reason,
        eval=tested,
        tested_step=tested_step,
        eval_batches=config.eval_batches or None,
    )
    processes.wait_for_all("the end of the run")
    log.info("%s", manifest.describe_end(run.path, result))
    return result


def how_it_ends(
    config: Config, progress: Progress, step: int, stopping: bool
) -> tuple[str | None, str]:
    """The status with which the run ends before this step, and why; None if it goes on."""
    if stopping:
        is_planned = step == config.stop_after_step and not stop.requested
        signal = stop.requested or "a signal to one of the processes"
        return "preempted", f"--stop-after-step {step}" if is_planned else f"stopped by {signal}"
    patience = config.early_stopping_patience
    if 0 < patience <= progress.evaluations_since_best:
        return "early_stopped", f"no new best in {patience} evaluations"
    if step >= config.total_steps:
        return "completed", "all steps are done"
    return None, ""


def is_multiple(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def cli() -> int:
    """Run with the command line's settings and return the exit code."""
    return command_line.run(
        lambda: stop.EXIT_CODES[main(command_line.parse_settings(sys.argv[1:]))["status"]]
    )


if __name__ == "__main__":
    sys.exit(cli())
