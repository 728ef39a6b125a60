"""What a run notes and says of its data."""

from typing import Any

from .logs import counted
from .streams import is_stream


def count_rows(split: Any) -> int | None:
    """Number of rows, None for a stream."""
    return None if is_stream(split) else len(split)


def describe(data: Any) -> dict[str, Any]:
    """What must be the same when a run is resumed: fingerprint, rows of each split, outputs.

    `data` is the DataSet of batches.py.
    """
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        "fingerprint": data.fingerprint,
        "rows": {name: count_rows(split) for name, split in splits.items()},
        "outputs": data.num_outputs,
    }


def summary(data: Any, total_steps: int, batch_size: int) -> list[str]:
    """What the start of the log says of the data."""
    found, known = getattr(data, "found", ""), describe(data)["rows"]
    lines = [found] if found else []
    for name, rows in known.items():
        size = "a stream" if rows is None else f"{rows:,} rows"
        lines.append(f"{name:10}  {getattr(getattr(data, name), 'summary', size)}")
    if data.split_rule:
        lines.append(data.split_rule)
    if known["train"] is None:
        return lines
    steps_per_epoch, left_over = divmod(known["train"], batch_size)
    line = (
        f"run length {total_steps / steps_per_epoch:.3g} epochs: {counted(total_steps, 'step')}, "
        f"{steps_per_epoch} in each epoch"
    )
    if left_over:
        line += f"; each epoch leaves out {counted(left_over, 'row')}, others every time"
    return [*lines, line]


def doubts_on_resume(split: Any, step: int) -> list[str]:
    """A line if a resumed run does not see the rows that it would have seen without the stop."""
    if not is_stream(split) or getattr(split, "resumes_exactly", False):
        return []
    return [
        f"the stream to train on does not promise to resume exactly (resumes_exactly): from step "
        f"{step} on the run may see other rows than without the stop, so the result may differ"
    ]
