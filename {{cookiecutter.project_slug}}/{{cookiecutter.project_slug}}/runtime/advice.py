"""What a user should know before a run: settings that do not do together what one may expect."""

from typing import Any

import jax

from ..config import Config
from .settings import SettingError


def check(config: Config, start: int, rows: dict[str, int | None], params: Any) -> list[str]:
    """A line for each combination of settings in which one of them has little or no effect.

    `start` is the step that the run goes on from, and `rows` those of each split, None where they
    are not known. Raises SettingError for what cannot be meant.
    """
    return [
        *of_length(config, start, rows["train"]),
        *of_evaluation(config, rows),
        *of_numbers(config, params),
    ]


def of_length(config: Config, start: int, rows: int | None) -> list[str]:
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
    if rows is not None and config.overfit_batches > rows // config.batch_size:
        lines.append(
            f"--overfit-batches {config.overfit_batches}: is more than the "
            f"{rows // config.batch_size} "
            f"batches of an epoch, so rows of these come more than once"
        )
    if config.overfit_batches and getattr(config.model, "dropout_rate", 0):
        lines.append(
            f"--model.dropout-rate {config.model.dropout_rate} keeps the loss of "
            f"--overfit-batches from falling to 0: try it without"
        )
    return lines


def of_evaluation(config: Config, rows: dict[str, int | None]) -> list[str]:
    lines, total, every = [], config.total_steps, config.eval_every
    if every > total:
        lines.append(
            f"the only evaluation is at the last step: --eval-every is {every}, by default "
            + ("1000 for a stream" if rows["train"] is None else "one epoch")
        )
    needed = every * (config.early_stopping_patience + 1)
    if config.early_stopping_patience and needed > total:
        lines.append(
            f"--early-stopping-patience {config.early_stopping_patience} has no effect: with an "
            f"evaluation every {every} steps the run ends before, at step {total}"
        )
    validation, test = rows["validation"], rows["test"]
    if validation and test and config.eval_batches * config.batch_size >= max(validation, test):
        lines.append(
            f"--eval-batches {config.eval_batches} has no effect on all of the {validation} rows "
            f"of validation and {test} of the test"
        )
    return lines


def of_numbers(config: Config, params: Any) -> list[str]:
    """Precision, layout, and what ends a run."""
    lines = []
    if config.precision == "float16" and config.max_skipped_steps < 16:
        lines.append(
            f"--max-skipped-steps {config.max_skipped_steps}: float16 may skip 16 updates in a row "
            f"until its loss scale fits, and the run then counts as diverged"
        )
    is_split = any("fsdp" in str(x.sharding.spec) for x in jax.tree.leaves(params))
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
    """Settings that have no effect when a run goes on, against those of its earlier start."""
    if not config.init_from or config.init_from == earlier.get("init_from"):
        return []
    return [
        f"--init-from {config.init_from} is not read: the run goes on from its own step {start}"
    ]
