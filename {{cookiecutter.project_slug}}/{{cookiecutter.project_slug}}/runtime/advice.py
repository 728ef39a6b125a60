"""What a user should know before a run: settings that do not do together what one may expect."""

from typing import Any

import jax

from ..config import Config, SettingError
from ..data import Data
from ..optimizer import create_schedule, decayed
from ..train_state import TrainState, average_decay


def check(
    config: Config, data: Data, state: TrainState, earlier: dict[str, Any] | None
) -> list[str]:
    """A line for each combination of settings in which one of them has little or no effect.

    `state` is the one that the run goes on from, `earlier` what config.json says of an earlier
    start. Raises SettingError for what cannot be meant.
    """
    start = int(state.step)
    lines = [
        *of_length(config, len(data.train) // config.batch_size, start),
        *of_evaluation(config, data),
        *of_numbers(config, state),
    ]
    if earlier and start:
        lines += of_resuming(config, earlier["settings"], start)
    return lines


def of_length(config: Config, steps_per_epoch: int, start: int) -> list[str]:
    """Settings that count steps, against the length of the run."""
    lines, total = [], config.total_steps
    first, last = config.profile_range or (0, 1)
    if first >= total:
        raise SettingError(f"--profile-steps {first}:{last}: the run ends at step {total}")
    end = min(total, config.stop_after_step or total)
    if config.profile_range and not start <= first < end:
        lines.append(f"--profile-steps {first}:{last}: this start runs from step {start} to {end}")
    if config.stop_after_step and not start < config.stop_after_step <= total:
        lines.append(
            f"--stop-after-step {config.stop_after_step} has no effect: this start runs from step "
            f"{start} to {total}"
        )
    if config.optimizer.warmup_steps > total // 2:
        lines.append(
            f"--optimizer.warmup-steps {config.optimizer.warmup_steps} is shortened to "
            f"{total // 2}, half of the {total} steps"
        )
    if start < total and total // config.log_every == start // config.log_every:
        lines.append(f"--log-every {config.log_every}: the only log line comes at step {total}")
    if not config.checkpoint_every and not config.eval_every:
        lines.append("no checkpoint is saved before the end: a run that is killed has none")
    if config.overfit_batches > steps_per_epoch:
        lines.append(
            f"--overfit-batches {config.overfit_batches}: is more than the {steps_per_epoch} "
            f"batches of an epoch, so rows of these come more than once"
        )
    if config.overfit_batches and getattr(config.model, "dropout_rate", 0):
        lines.append(
            f"--model.dropout-rate {config.model.dropout_rate} keeps the loss of "
            f"--overfit-batches from falling to 0: try it without"
        )
    return lines


def of_evaluation(config: Config, data: Data) -> list[str]:
    lines, total, every = [], config.total_steps, config.eval_every
    if every > total:
        lines.append(
            f"the only evaluation is at the last step: --eval-every is {every}, by default "
            "one epoch"
        )
    needed = every * (config.early_stopping_patience + 1)
    if config.early_stopping_patience and needed > total:
        lines.append(
            f"--early-stopping-patience {config.early_stopping_patience} has no effect: with an "
            f"evaluation every {every} steps the run ends before, at step {total}"
        )
    held_out = max(len(data.validation), len(data.test))
    if config.eval_batches * config.batch_size >= held_out:
        rows = f"{len(data.validation)} rows of validation and {len(data.test)} of the test"
        lines.append(f"--eval-batches {config.eval_batches} has no effect on all of the {rows}")
    return lines


def of_numbers(config: Config, state: TrainState) -> list[str]:
    """Precision, averages, layout."""
    lines = []
    if config.precision == "float16" and config.max_skipped_steps < 16:
        lines.append(
            f"--max-skipped-steps {config.max_skipped_steps}: float16 may skip 16 updates in a row "
            f"until its loss scale fits, and the run then counts as diverged"
        )
    reached = float(average_decay(1.0, config.total_steps))
    if config.ema_decay > reached:
        lines.append(
            f"--ema-decay {config.ema_decay}: in {config.total_steps} steps the average's decay "
            f"rises to {reached:.3g} only, so that it forgets its start"
        )
    rows = config.batch_size // config.accumulation_steps
    if config.accumulation_steps > 1 and rows < 8 and state.batch_stats:
        lines.append(
            f"--accumulation-steps {config.accumulation_steps}: batch normalisation sees {rows} "
            f"rows at a time, which is few"
        )
    if config.optimizer.name == "sgd" and config.optimizer.learning_rate < 0.01:
        lines.append(
            f"--optimizer.learning-rate {config.optimizer.learning_rate} is low for sgd: on the "
            f"digits 0.03 to 0.1 learned faster"
        )
    found = decayed(state.params)
    if config.optimizer.weight_decay and found["unknown"]:
        lines.append(
            f"weight decay leaves out {', '.join(found['unknown'][:5])}, as only arrays named "
            f"kernel are decayed: see decay_mask in optimizer.py"
        )
    if config.optimizer.weight_decay and not found["decayed"]:
        lines.append(
            f"--optimizer.weight-decay {config.optimizer.weight_decay} has no effect: no array is "
            f"named kernel"
        )
    is_split = any("fsdp" in str(x.sharding.spec) for x in jax.tree.leaves(state.params))
    if config.mesh.fsdp > 1 and not is_split:
        lines.append(f"--mesh.fsdp {config.mesh.fsdp}: all parameters are too small to be split")
    if config.deterministic and jax.default_backend() == "cpu":
        lines.append("--deterministic has no effect on a CPU, which always repeats exactly")
    if config.debug_nans:
        lines.append("--debug-nans: the run ends at the first NaN, no update is skipped")
    if not config.stall_timeout and jax.process_count() > 1:
        lines.append("--stall-timeout 0: a process that is stuck will not be noticed")
    return lines


def of_resuming(config: Config, earlier: dict[str, Any], start: int) -> list[str]:
    lines = []
    if config.init_from and config.init_from != earlier.get("init_from"):
        lines.append(
            f"--init-from {config.init_from} is not read: the run goes on from its own step {start}"
        )
    before, after = (
        float(create_schedule(config.optimizer, total)(start))
        for total in (earlier["total_steps"], config.total_steps)
    )
    if after > 1.01 * before:
        lines.append(
            f"--total-steps {earlier['total_steps']} -> {config.total_steps}: the learning rate "
            f"rises from {before:.3g} to {after:.3g}, where the longer schedule is by now. "
            f"A run with --optimizer.schedule wsd or constant can be prolonged without that"
        )
    return lines
