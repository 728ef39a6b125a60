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

from . import batches, data, mesh, optimizer, task, train_state
from .config import Config, check, resolve
from .evaluate import evaluate
from .runtime import (
    advice,
    command_line,
    devices,
    logs,
    manifest,
    processes,
    splits,
    stop,
    streams,
)
from .runtime.checkpoint import Checkpoints, Damaged, Unreadable
from .runtime.failures import explained
from .runtime.init_from import restore_params
from .runtime.progress import Progress
from .runtime.recorder import Diverged, Recorder
from .runtime.watchdog import Watchdog
from .runtime.workdir import Run, open_run
from .train_step import compile_train_step, jit_eval_step

log = logging.getLogger(__package__)


def main(config: Config, compile_step: Callable = compile_train_step) -> dict[str, Any]:
    """Train as configured and return the contents of result.json.

    Tools that watch the steps give another `compile_step`. Raises SettingError for a setting, data
    or a run directory that cannot be used, before anything is compiled or overwritten.
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
            config = resolve(config, splits.count_rows(dataset.train))
            device_mesh = mesh.create_mesh(
                config.mesh, config.batch_size, config.accumulation_steps
            )
            dataset = streams.prepare(dataset, config)
        known = manifest.describe(
            config,
            splits.describe(dataset),
            split_rule=dataset.split_rule,
            metadata=dataset.metadata,
            best_by=task.BEST_METRIC,
        )
        processes.require_same(known)
        with open_run(config, known, watchdog, began) as run:
            if not run.is_over:
                train(run, dataset, device_mesh, watchdog, compile_step)
            log.info("%s", manifest.describe_end(run))
            return run.result


def train(
    run: Run,
    dataset: data.Data,
    device_mesh: jax.sharding.Mesh,
    watchdog: Watchdog,
    compile_step: Callable,
) -> None:
    """Train from where the run is to its end, and write result.json."""
    config, sharding = run.config, mesh.batch_sharding(device_mesh)
    with contextlib.ExitStack() as closing:
        # ------------------------------------------------------ The state: new, or as it was left
        with watchdog.waiting_for("creating or restoring the train state"):
            create, abstract = train_state.plan_train_state(config, dataset, device_mesh)
            checkpoints = closing.enter_context(contextlib.closing(Checkpoints(run.path)))
            restored = checkpoints.restore_latest(abstract)
            state, progress = restored or (jax.block_until_ready(create()), Progress())
            step = start = int(state.step)
            if step == 0 and config.init_from:
                state = state.start_from(restore_params(Path(config.init_from), state.params))
        introduce(run, dataset, state)
        progress.extend(config.total_steps)
        rows = splits.count_rows(dataset.train)
        steps_per_epoch = rows and rows // config.batch_size
        recorder = Recorder(config, progress, state, task.report, steps_per_epoch, watchdog)
        closing.callback(recorder.close)
        run.summary = recorder.summary
        score_batch = jit_eval_step(config, device_mesh)

        def score(name, state, split):
            """Metrics of the state on a split; None if a stop was requested meanwhile."""
            with recorder.paused(), watchdog.waiting_for("evaluating"):
                return evaluate(
                    score_batch, state, split, config, sharding, name, recorder.keep_going
                )

        try:
            # ---------------------------------------------------------------- The compiled step
            with watchdog.waiting_for("compiling the step"):
                run_step, fresh_totals, recorder.costs = compile_step(
                    config, abstract, dataset.train, device_mesh
                )
                processes.wait_for_all("compiled")
            run.begin()
            stream = batches.train_batches(dataset.train, config, sharding, step)
            closing.callback(stream.close)
            totals = recorder.begin(fresh_totals)

            # ------------------------------------------------------------------------- The loop
            while True:
                # Before every step: evaluate, save and end the run, each if it is due.
                is_best = False
                stopping = stop.poll() or start < step == config.stop_after_step
                if not stopping and is_evaluation_due(config, progress, step):
                    scores = score("eval", state, dataset.validation)
                    stopping = scores is None
                    if scores:
                        recorder.write("eval", step, scores)
                        is_best = progress.record(
                            step, scores, task.BEST_METRIC, task.HIGHER_IS_BETTER
                        )

                status, reason = how_it_ends(config, progress, step, stopping)
                is_due = status or is_multiple(step, config.checkpoint_every)
                if is_best or (is_due and checkpoints.has_less(step, progress)):
                    with recorder.paused(), watchdog.waiting_for("saving"):
                        # While updates are being skipped, regular saves pause: only the latest two
                        # checkpoints are kept, and new ones would push out the last good ones.
                        if status or is_best or not recorder.skipped_in_a_row:
                            checkpoints.save(step, state, progress)
                if status:
                    break

                with recorder.pace.waiting_for_input():
                    batch = next(stream)
                state, totals, step_status = run_step(state, totals, batch)
                step += 1
                totals = recorder.step(step, totals, step_status)

            # ------------------------------------------------------- The test of the best state
            recorder.finish()
            with watchdog.waiting_for("saving the last checkpoint"):
                checkpoints.wait()
            test = {}
            if status != "preempted":
                with watchdog.waiting_for("restoring the best checkpoint"):
                    state = best_state(checkpoints, progress, state, abstract)
                scores = score("test", state, dataset.test)
                if scores:
                    test = {"eval": scores, "tested_step": int(state.step)}
                    recorder.write("test", test["tested_step"], scores)
                else:
                    status, reason = "preempted", "stopped on request in the test"
        except Diverged as error:
            status, reason, test = "diverged", str(error), {}
            good = max(checkpoints.steps, default="none")
            log.error("%s; last good checkpoint: %s", error, good)
        except (Exception, SystemExit):
            with contextlib.suppress(Exception):  # the metrics may be what failed
                recorder.finish()
            checkpoints.rescue(step, state, progress)
            raise
    run.end(status, reason, **test)
    processes.wait_for_all("the end of the run")


def introduce(run: Run, dataset: data.Data, state: train_state.TrainState) -> None:
    """Say what this run is and what may surprise; from here on its start leaves traces.

    Raises SettingError for settings that cannot be meant.
    """
    config, step = run.config, int(state.step)
    rows = splits.describe(dataset)["rows"]
    decayed = optimizer.decayed(state.params)
    final_decay = float(train_state.average_decay(1.0, config.total_steps))
    warnings = [
        *dataset.warnings,
        *advice.check(config, step, rows, state.params),
        *advice.of_optimizer(config.optimizer, decayed),
        *advice.of_average(config, final_decay),
    ]
    if state.model_state.get("batch_stats"):
        warnings += advice.of_batch_norm(config)
    if run.earlier and step:
        warnings += splits.doubts_on_resume(dataset.train, step)
        warnings += advice.of_resuming(
            config,
            run.earlier["settings"],
            step,
            lambda total: float(optimizer.create_schedule(config.optimizer, total)(step)),
        )
    lines = splits.summary(dataset, config.total_steps, config.batch_size)
    if config.optimizer.weight_decay:
        count = logs.counted(len(decayed["decayed"]), "parameter")
        lines.append(f"weight decay on {count} named kernel")
    run.manifest["weight_decay_on"] = decayed["decayed"]
    run.accept()
    manifest.announce(run, step, lines, warnings)


def best_state(
    checkpoints: Checkpoints,
    progress: Progress,
    last: train_state.TrainState,
    abstract: train_state.TrainState,
) -> train_state.TrainState:
    """The state with the best evaluation; the last one if that cannot be read."""
    if progress.best_step in (None, int(last.step)):
        return last
    try:
        return checkpoints.restore(progress.best_step, abstract)[0]
    except (Damaged, Unreadable) as error:
        log.error("%s. The last step is tested in place of the best", error)
        return last


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
        return "early_stopped", f"no new best in {logs.counted(patience, 'evaluation')}"
    if step >= config.total_steps:
        return "completed", "all steps are done"
    return None, ""


def is_evaluation_due(config: Config, progress: Progress, step: int) -> bool:
    """Whether to evaluate before this step; not twice for the same step, as after a resume."""
    is_last = config.eval_every > 0 and step >= config.total_steps
    is_due = is_last or is_multiple(step, config.eval_every)
    return is_due and step > progress.evaluated_step


def is_multiple(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def cli() -> int:
    """Run with the command line's settings and return the exit code."""
    return command_line.run(
        lambda: stop.EXIT_CODES[main(command_line.parse_settings(sys.argv[1:]))["status"]]
    )


if __name__ == "__main__":
    sys.exit(cli())
