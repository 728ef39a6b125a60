"""What a run must remember besides its train state: the best step, and how long ago that was."""

import dataclasses
import math


@dataclasses.dataclass
class Progress:
    """Goes into every checkpoint."""

    best_step: int | None = None
    best_metric: float | None = None
    evaluated_step: int = 0
    """Last step whose evaluation was finished."""
    evaluations_since_best: int = 0
    first_loss: float | None = None
    """Mean loss of the first log interval: a blow-up is judged by it."""
    total_steps: int = 0
    """Length of the run, which may grow."""

    def extend(self, total_steps: int) -> None:
        """Take note of the length of the run: an early stop was for the shorter one."""
        if total_steps > self.total_steps:
            self.total_steps, self.evaluations_since_best = total_steps, 0

    def record(
        self, step: int, scores: dict[str, float], best_metric: str, higher_is_better: bool
    ) -> bool:
        """Take note of an evaluation; True if it is a new best by the named metric.

        Of equal evaluations the first is best. One with a metric that is not finite never is:
        accuracy, for one, is a number even when the loss is NaN.
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
