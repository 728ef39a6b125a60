"""Limits how many steps Python queues ahead of the device, and measures the time they take."""

import contextlib
import time
from collections import deque
from collections.abc import Generator
from typing import Any

import jax

# Python queues steps faster than the device runs them, so the loop must wait now and then, or the
# batches of queued steps would fill the device's memory. It waits until all but KEEP_RUNNING steps
# are done: to wait for the last one would leave the device idle. It waits only when MAX_QUEUED are
# queued or SECONDS_BETWEEN_WAITS have passed: on a CPU each wait takes time from the computation.
KEEP_RUNNING = 2  # steps
MAX_QUEUED = 100  # steps
SECONDS_BETWEEN_WAITS = 1.0


class Pace:
    """The queue of steps that are not known to be done, and the training time without pauses."""

    def __init__(self) -> None:
        self.queued: deque = deque()
        self.last_wait = 0.0
        self.steps = 0
        self.seconds = 0.0
        self.input_seconds = 0.0
        """The part of `seconds` in which the loop waited for the next batch."""
        self._clock = time.monotonic()

    def restart_clock(self) -> None:
        """Begin to measure again: the time since the last read does not count."""
        self._clock = time.monotonic()

    def read_clock(self) -> None:
        """Add the time since the last read or restart to `seconds`."""
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now

    def step(self, output: jax.Array) -> None:
        """Add a step to the queue, given by an array that it computes; wait if it is time to."""
        self.steps += 1
        self.queued.append(output)
        is_time = time.monotonic() > self.last_wait + SECONDS_BETWEEN_WAITS
        is_full = len(self.queued) >= MAX_QUEUED
        if (is_time or is_full) and len(self.queued) > KEEP_RUNNING:
            while len(self.queued) > KEEP_RUNNING:
                oldest = self.queued.popleft()
            jax.block_until_ready(oldest)
            self.last_wait = time.monotonic()

    def wait_for_all(self) -> None:
        """Wait until all queued steps are done."""
        jax.block_until_ready(list(self.queued))

    @contextlib.contextmanager
    def waiting_for_input(self) -> Generator[None]:
        """Count the time inside as time spent waiting for the next batch."""
        start = time.perf_counter()
        yield
        self.input_seconds += time.perf_counter() - start

    @property
    def input_fraction(self) -> float:
        """The share of the training time in which the loop waited for the next batch."""
        return min(self.input_seconds / self.seconds, 1.0) if self.seconds else 0.0

    def summary(self, batch_size: int) -> dict[str, Any]:
        """Training speed since this start of the run, without pauses and compilation."""
        if not self.steps or not self.seconds:
            return dict.fromkeys(("examples_per_second", "step_ms", "input_wait_fraction"))
        return {
            "examples_per_second": self.steps * batch_size / self.seconds,
            "step_ms": 1000 * self.seconds / self.steps,
            "input_wait_fraction": self.input_fraction,
        }
