"""Warnings before a run starts: settings that together do not do what one would expect."""

from collections.abc import Callable
from typing import Any

import jax

from ..config import Config, OptimizerConfig
from .logs import counted
from .settings import SettingError


def check(config: Config, start: int, rows: dict[str, int | None], params: Any) -> list[str]:
    """A line for each setting that has little or no effect beside the others.

    `start` is the step from which the run continues. `rows` is the number of rows of each split,
    None where it is not known. Raises SettingError for --profile-steps after the end of the run.
    """
    return [
        *of_length(config, start, rows["train"]),
        *of_evaluation(config, rows),
        *of_numbers(config, params),
    ]


def of_length(config: Config, start: int, rows: int | None) -> list[str]:
    """Settings that count steps or batches, compared with the length of the run."""
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
            f"{total // 2}, half of the {counted(total, 'step')}"
        )
    if start < total and total // config.log_every == start // config.log_every:
        lines.append(f"--log-every {config.log_every}: the only log line comes at step {total}")
    if not config.checkpoint_every and not config.eval_every:
        lines.append("no checkpoint is saved before the end: a run that is killed has none")
    if rows is not None and config.overfit_batches > rows // config.batch_size:
        lines.append(
            f"--overfit-batches {config.overfit_batches} is more than the "
            f"{counted(rows // config.batch_size, 'batch', 'batches')} of an epoch, so some rows "
            f"are in several of them"
        )
    dropout_rate = getattr(config.model, "dropout_rate", 0)  # of the networks that have one
    if config.overfit_batches and dropout_rate:
        lines.append(
            f"--model.dropout-rate {dropout_rate} keeps the loss of "
            f"--overfit-batches from falling to 0: set it to 0"
        )
    return lines


def of_evaluation(config: Config, rows: dict[str, int | None]) -> list[str]:
    """Settings of the evaluation, compared with the length of the run and the rows to score."""
    lines, total, every = [], config.total_steps, config.eval_every
    if every > total:
        lines.append(
            f"the only evaluation is at the last step: --eval-every is {every} (default: "
            + ("1000 for a stream" if rows["train"] is None else "one epoch")
            + f"), and the run has {counted(total, 'step')}"
        )
    needed = every * (config.early_stopping_patience + 1)
    if config.early_stopping_patience and needed > total:
        lines.append(
            f"--early-stopping-patience {config.early_stopping_patience} has no effect: with "
            f"--eval-every {every} the run ends earlier, at step {total}"
        )
    validation, test = rows["validation"], rows["test"]
    if validation and test and config.eval_batches * config.batch_size >= max(validation, test):
        lines.append(
            f"--eval-batches {config.eval_batches} has no effect: it covers all rows of validation "
            f"({validation}) and of the test ({test})"
        )
    return lines


def of_numbers(config: Config, params: Any) -> list[str]:
    """Settings of precision and sharding, and those that end a run."""
    lines = []
    if config.precision == "float16" and config.max_skipped_steps < 16:
        lines.append(
            f"--max-skipped-steps {config.max_skipped_steps}: float16 may skip 16 updates in a row "
            f"until its loss scale fits, and the run then counts as diverged"
        )
    is_split = any("fsdp" in str(x.sharding.spec) for x in jax.tree.leaves(params))
    if config.mesh.fsdp > 1 and not is_split:
        lines.append(
            f"--mesh.fsdp {config.mesh.fsdp} has no effect: all parameters are too small to split"
        )
    if config.deterministic and jax.default_backend() == "cpu":
        lines.append("--deterministic has no effect on a CPU, which always repeats exactly")
    if config.debug_nans:
        lines.append("--debug-nans: the run ends at the first NaN, instead of skipping the update")
    if not config.stall_timeout and jax.process_count() > 1:
        lines.append("--stall-timeout 0: a process that is stuck will not be noticed")
    return lines


def of_optimizer(config: OptimizerConfig, decayed: dict[str, list[str]]) -> list[str]:
    """Settings that hardly change what is learned; `decayed` is what optimizer.decayed() found."""
    lines = []
    if config.name == "sgd" and config.learning_rate < 0.01:
        lines.append(
            f"--optimizer.learning-rate {config.learning_rate} is low for sgd: on the digits 0.03 "
            f"to 0.1 learned faster"
        )
    if config.weight_decay and decayed["unknown"]:
        lines.append(
            f"weight decay leaves out {', '.join(decayed['unknown'][:5])}, as only arrays named "
            f"kernel are decayed: see decay_mask in optimizer.py"
        )
    if config.weight_decay and not decayed["decayed"]:
        lines.append(
            f"--optimizer.weight-decay {config.weight_decay} has no effect: no array is named "
            f"kernel"
        )
    return lines


def of_average(config: Config, final_decay: float) -> list[str]:
    """An average of the parameters whose decay is still rising when the run ends."""
    if config.ema_decay <= final_decay:
        return []
    return [
        f"--ema-decay {config.ema_decay}: in {config.total_steps} steps the average's decay "
        f"rises to {final_decay:.3g} only, so that it forgets its start"
    ]


def of_batch_norm(config: Config) -> list[str]:
    """Accumulation in a network with batch normalisation."""
    rows = config.batch_size // config.accumulation_steps
    if config.accumulation_steps == 1 or rows >= 8:
        return []
    return [
        f"--accumulation-steps {config.accumulation_steps}: batch normalisation sees {rows} "
        f"rows at a time, which is few"
    ]


def of_resuming(
    config: Config, earlier: dict[str, Any], start: int, rate: Callable[[int], float]
) -> list[str]:
    """What has no effect, or an unexpected one, when a run goes on at this step.

    `earlier` are the settings of its earlier start; rate(total_steps) is the learning rate at this
    step in a run of that length.
    """
    lines = []
    if config.init_from and config.init_from != earlier.get("init_from"):
        lines.append(
            f"--init-from {config.init_from} is not read: the run continues from its own step "
            f"{start}"
        )
    before, after = rate(earlier["total_steps"]), rate(config.total_steps)
    if after > 1.01 * before:
        lines.append(
            f"--total-steps {earlier['total_steps']} -> {config.total_steps}: the learning rate "
            f"rises from {before:.3g} to {after:.3g}, where the longer schedule is by now. "
            f"A run with --optimizer.schedule wsd or constant can be prolonged without that"
        )
    return lines
