"""What a checkpoint holds besides the train state: the best step, the evaluations since then."""

import dataclasses
import math


@dataclasses.dataclass
class Progress:
    """How far a run has come, saved in every checkpoint."""

    best_step: int | None = None
    best_metric: float | None = None
    evaluated_step: int = 0
    """The last step that was evaluated to the end."""
    evaluations_since_best: int = 0
    first_loss: float | None = None
    """Mean loss of the first log interval. A loss over 10 times as high is a blow-up."""
    total_steps: int = 0
    """Length of the run, which a later start may increase."""

    def extend(self, total_steps: int) -> None:
        """Set the length of the run. A longer run starts to count for early stopping from 0."""
        if total_steps > self.total_steps:
            self.total_steps, self.evaluations_since_best = total_steps, 0

    def record(
        self, step: int, scores: dict[str, float], best_metric: str, higher_is_better: bool
    ) -> bool:
        """Record an evaluation; True if it is a new best by the metric `best_metric`.

        Of equal evaluations the first is the best. An evaluation in which any metric is not finite
        is never the best: accuracy, for example, is a number even when the loss is NaN.
        """
        metric = scores[best_metric]
        sign = 1 if higher_is_better else -1
        best = -math.inf if self.best_metric is None else sign * self.best_metric
        is_finite = all(map(math.isfinite, scores.values()))
        is_best = is_finite and sign * metric > best
        if is_best:
            self.best_step, self.best_metric = step, metric
        self.evaluated_step = step
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best
