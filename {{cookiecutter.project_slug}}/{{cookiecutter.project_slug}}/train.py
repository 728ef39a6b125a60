"""Train a model: python -m <package>.train --help shows every setting."""

from . import stop

if __name__ == "__main__":
    stop.install_handlers()  # first: the imports below take seconds, and a signal may come in them

import contextlib
import dataclasses
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

from . import batches, data, logs, mesh, processes, workdir
from .checkpoint import Checkpoints, Damaged, Progress
from .config import Config, SettingError, check, resolve
from .evaluate import evaluate
from .init_from import restore_params
from .metrics import Diverged, Recorder
from .train_state import plan_train_state
from .train_step import compile_train_step, eval_step

log = logging.getLogger(__package__)


def main(config: Config) -> dict[str, Any]:
    """Train as configured and return the contents of result.json.

    Raises SettingError for a setting, data or a run directory that cannot be used, before anything
    is compiled or overwritten.
    """
    # ---------------------------------------------------------------- Devices, processes and data
    began = time.monotonic()
    check(config)
    mesh.open_devices(config)
    with processes.failing_together():
        dataset = data.load(config)
        config = resolve(config, len(dataset.train))
        grid = mesh.create_mesh(config.mesh, config.batch_size, config.accumulation_steps)
    sharding = mesh.batch_sharding(grid)
    facts = workdir.describe(config, dataset)
    processes.require_same(facts)

    # -------------------------------------------------------------------------- The run directory
    path = workdir.open_workdir(config.workdir)
    config = dataclasses.replace(config, workdir=os.fspath(path))
    facts["settings"]["workdir"] = config.workdir
    logs.start_logging(path, config.quiet)
    earlier, is_over = workdir.check_resumable(path, facts, config)
    if is_over:
        log.info("%s: over, %s at step %d", path, earlier["status"], earlier["step"])
        return earlier

    # ---------------------------------------------------------- The state: new, or as it was left
    create, abstract = plan_train_state(config, dataset, grid)
    checkpoints = Checkpoints(path)
    state, progress = checkpoints.restore_latest(abstract) or (create(), Progress())
    step = start = saved = int(state.step)
    if step == 0 and config.init_from:
        state = state.start_from(restore_params(Path(config.init_from), state.params))
    progress.extend(config.total_steps)
    workdir.begin(path, facts, config)
    log.info("%s: %s", path, f"resumed at step {step}" if step else "a new run")

    recorder = Recorder(path, config, progress, step, state.params)
    score_batch = jax.jit(eval_step, out_shardings=mesh.replicated(grid))
    status, tested, guard = "failed", None, None
    costs: dict[str, float | None] = {}

    def score(state, split):
        """Metrics of the state on a split; None if a stop was requested meanwhile."""
        with recorder.paused(step, guard):
            stream = batches.eval_batches(split, config, sharding)
            return evaluate(score_batch, state, stream, recorder.keep_going)

    try:
        with contextlib.ExitStack() as closing:
            closing.callback(recorder.close)
            closing.callback(checkpoints.close)
            # ---------------------------------------------------------------- The compiled step
            train_step, fresh_totals, costs = compile_train_step(
                config, abstract, dataset.train, grid
            )
            processes.wait_for_all("compiled")
            totals = fresh_totals()
            stream = batches.train_batches(dataset.train, config, sharding, step)
            closing.callback(stream.close)
            recorder.begin(step)

            # ------------------------------------------------------------------------- The loop
            while True:
                # What is due at a step comes before the next one: evaluate, judge, save, end.
                is_last, is_best = step >= config.total_steps, False
                stopping = stop.poll() or start < step == config.stop_after_step
                is_due = is_last or is_multiple(step, config.eval_every)
                if config.eval_every and is_due and step > progress.evaluated_step and not stopping:
                    scores = score(state, dataset.validation)
                    stopping = scores is None
                    if scores:
                        recorder.write("eval", step, scores)
                        is_best = progress.update(step, scores)
                is_enough = 0 < config.early_stopping_patience <= progress.evaluations_since_best
                endings = {"preempted": stopping, "early_stopped": is_enough, "completed": is_last}
                ending = next((name for name, holds in endings.items() if holds), None)
                is_due = bool(ending) or is_multiple(step, config.checkpoint_every)
                if is_best or (is_due and step > saved):
                    with recorder.paused(step, guard):
                        # While updates are skipped nothing pushes out the checkpoints from before.
                        if ending or is_best or not recorder.skipped_in_a_row:
                            checkpoints.save(step, state, progress)
                            saved = step
                if ending:
                    break

                with recorder.waiting():
                    batch = next(stream)
                state, totals, guard = train_step(state, totals, batch)
                step += 1
                totals = recorder.step(step, totals, guard, fresh_totals)

            # ------------------------------------------------------- The test of the best state
            recorder.finish(step, totals, guard)
            checkpoints.wait()
            if ending != "preempted":
                if progress.best_step not in (None, step):
                    state, _ = checkpoints.restore(progress.best_step, abstract)
                tested = score(state, dataset.test)
                if tested:
                    recorder.write("test", progress.best_step or step, tested)
            status = ending if tested else "preempted"
    except Diverged as error:
        status = "diverged"
        log.error("%s; last good checkpoint: %s", error, max(checkpoints.steps, default="none"))
    except Damaged as error:  # a SettingError would mean that nothing was trained
        raise RuntimeError(f"the best checkpoint cannot be tested: {error}") from error
    finally:
        result = {"status": status, "step": step, "eval": tested} | recorder.summary()
        result |= {name: costs.get(name) for name in ("compile_seconds", "model_flops_per_step")}
        result |= {name: facts[name] for name in workdir.CIRCUMSTANCES}
        result["seconds"] = time.monotonic() - began
        workdir.write_json(path / "result.json", result)
    processes.wait_for_all("the end of the run")
    log.info("%s: %s at step %d", path, status, step)
    return result


def is_multiple(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def cli() -> int:
    """Run with the command line's settings and return the exit code."""
    try:
        result = main(workdir.parse_settings(sys.argv[1:]))
    except (SettingError, processes.Unreachable) as error:
        print(f"error: {error}", file=sys.stderr)
        return stop.BAD_SETTING if isinstance(error, SettingError) else stop.EXIT_CODES["failed"]
    except Exception:
        processes.leave_at_once()
        raise
    return stop.EXIT_CODES[result["status"]]


if __name__ == "__main__":
    sys.exit(cli())
