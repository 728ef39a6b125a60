"""How fast the steps of a run go: a limit to how far Python runs ahead, and the time they take."""

import contextlib
import time
from collections import deque
from collections.abc import Generator
from typing import Any

import jax

# Python queues steps faster than the device runs them, so the loop must wait now and then, or the
# batches of queued steps would fill the device's memory. It waits until all but KEEP_RUNNING steps
# are done: to wait for the last one would leave the device idle. It does so when MAX_QUEUED are
# queued or SECONDS_BETWEEN_WAITS have passed: on a CPU each wait takes time from the computation.
KEEP_RUNNING, MAX_QUEUED, SECONDS_BETWEEN_WAITS = 2, 100, 1.0


class Pace:
    """The steps of one run that are under way, and the seconds spent on them, pauses left out."""

    def __init__(self) -> None:
        self.queued: deque = deque()
        self.last_wait = 0.0
        self.steps = 0
        self.seconds = 0.0
        self.input_seconds = 0.0
        """Those of the seconds in which the loop waited for the next batch."""
        self._clock = time.monotonic()

    def restart_clock(self) -> None:
        """Leave out the time that has passed since the clock was read last."""
        self._clock = time.monotonic()

    def read_clock(self) -> None:
        """Add the time that has passed since the clock was read last."""
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now

    def step(self, output: jax.Array) -> None:
        """Note that a step was queued, which will compute this array; wait if it is time to."""
        self.steps += 1
        self.queued.append(output)
        is_time = time.monotonic() > self.last_wait + SECONDS_BETWEEN_WAITS
        if len(self.queued) > KEEP_RUNNING and (is_time or len(self.queued) >= MAX_QUEUED):
            while len(self.queued) > KEEP_RUNNING:
                oldest = self.queued.popleft()
            jax.block_until_ready(oldest)
            self.last_wait = time.monotonic()

    def wait_for_all(self) -> None:
        """Wait until no step is under way."""
        jax.block_until_ready(list(self.queued))

    @contextlib.contextmanager
    def waiting_for_input(self) -> Generator[None]:
        """Count the time inside as waiting for the next batch."""
        start = time.perf_counter()
        yield
        self.input_seconds += time.perf_counter() - start

    @property
    def input_fraction(self) -> float:
        """Share of the time in which the loop waited for the next batch."""
        return min(self.input_seconds / self.seconds, 1.0) if self.seconds else 0.0

    def summary(self, batch_size: int) -> dict[str, Any]:
        """Training speed over the whole run so far, pauses and compilation left out."""
        if not self.steps or not self.seconds:
            return dict.fromkeys(("examples_per_second", "step_ms", "input_wait_fraction"))
        return {
            "examples_per_second": self.steps * batch_size / self.seconds,
            "step_ms": 1000 * self.seconds / self.steps,
            "input_wait_fraction": self.input_fraction,
        }
