"""Stopping on request: the signals, and what a run's exit code means."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

log = logging.getLogger(__package__.partition(".")[0])

BAD_SETTING, ABANDONED = 2, 130
EXIT_CODES = {"completed": 0, "early_stopped": 0, "failed": 1, "diverged": 3, "preempted": 75}

# Batch systems send one of these before they end a job; SIGHUP comes when a terminal goes away.
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")

requested: str | None = None
"""Name of the first signal that asked this process to stop."""

_owns_process = False  # this is `python -m <package>.train`, and no program that calls main()
_interrupts = 0
_polls = 0
_agreed = _joined = False
_abandon: Callable[[str], None] = lambda reason: None  # noqa: E731


def install_handlers() -> None:
    """Let the signals ask for a stop instead of killing the process, from now on.

    Where native code aborts it, as JAX does when another process died, the stacks are shown.
    """
    global _owns_process
    _owns_process = True
    if sys.__stderr__:
        faulthandler.enable(sys.__stderr__)
    _take_over()


def _take_over() -> dict[int, Any]:
    """Handle all signals; return their handlers from before."""
    previous = {}
    for name in SIGNALS:
        number = getattr(signal, name)
        # nohup has SIGHUP ignored, so that the run goes on without its terminal.
        if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, _handle) or signal.SIG_DFL
    return previous


@contextlib.contextmanager
def listening(abandon: Callable[[str], None]) -> Generator[None]:
    """Take stop requests while a run goes on. `abandon` is told when it is given up at once.

    A program that calls main(), such as a notebook, gets its own handlers back afterwards.
    """
    global requested, _interrupts, _agreed, _abandon
    _abandon = abandon
    previous: dict[int, Any] = {}
    if not _owns_process:
        requested, _interrupts, _agreed = None, 0, False
        if threading.current_thread() is threading.main_thread():
            previous = _take_over()
        else:
            log.warning("main() is not in the main thread, so no signal can ask this run to stop")
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _abandon = lambda reason: None  # noqa: E731


def _handle(number: int, frame: object) -> None:
    global requested, _interrupts
    _interrupts += number == signal.SIGINT
    if _interrupts > 1:
        if not _owns_process:
            raise KeyboardInterrupt
        os.write(2, b"\nSecond Ctrl-C: abandoned, nothing saved.\n")
        _abandon("second Ctrl-C: abandoned, nothing saved")
        os._exit(ABANDONED)
    requested = requested or signal.Signals(number).name
    if _joined and number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)


def tell_jax() -> None:
    """Once processes are joined JAX listens to SIGTERM, and brings them to agree on a step."""
    global _joined
    _joined = True
    if requested is not None:  # a signal that came before
        os.kill(os.getpid(), signal.SIGTERM)


def poll() -> bool:
    """True once the run should stop.

    With several processes every call is one round of JAX's agreement: all must make the same number
    of calls, and all get True in the same round.
    """
    global _polls, _agreed
    import jax
    from jax.experimental import multihost_utils

    if not jax.distributed.is_initialized():
        return requested is not None
    _polls += 1
    _agreed = _agreed or multihost_utils.reached_preemption_sync_point(_polls)
    return _agreed
