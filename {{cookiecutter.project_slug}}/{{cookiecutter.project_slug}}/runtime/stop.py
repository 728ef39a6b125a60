"""Stopping on request: the signal handlers, and the exit code for each end of a run."""

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

# Exit codes: for each status of a run, for a setting that cannot be used, for a second Ctrl-C.
EXIT_CODES = {"completed": 0, "early_stopped": 0, "failed": 1, "diverged": 3, "preempted": 75}
BAD_SETTING = 2
ABANDONED = 130

# Batch systems send one of these before they end a job. SIGHUP comes when the terminal is closed.
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")

requested: str | None = None
"""Name of the first signal that asked this process to stop."""

_owns_process = False
"""True in `python -m <package>.train`, False in another program that calls main()."""
_interrupts = 0
"""How often Ctrl-C was pressed."""
_polls = 0
is_listening = False
"""True while a run goes on that handles stop requests."""
_has_agreed = False
"""True once all processes have agreed to stop."""
_has_joined = False
"""True once JAX listens to SIGTERM, which it does in a run of several processes."""
_abandon: Callable[[str], None] = lambda reason: None  # noqa: E731


def install_handlers() -> None:
    """From now on the signals request a stop instead of killing this process.

    When native code aborts the process, as JAX does after another process died, faulthandler prints
    the stacks of its threads.
    """
    global _owns_process
    _owns_process = True
    if sys.__stderr__:
        faulthandler.enable(sys.__stderr__)
    _take_over()


def end_at_once() -> None:
    """Let Ctrl-C end this process at once, as the other signals do: without a traceback."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _take_over() -> dict[int, Any]:
    """Install the handler for all signals; return the previous handlers."""
    previous = {}
    for name in SIGNALS:
        number = getattr(signal, name)
        # nohup makes its program ignore SIGHUP, so that it goes on without the terminal: keep that.
        if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, _handle) or signal.SIG_DFL
    return previous


@contextlib.contextmanager
def listening(abandon: Callable[[str], None]) -> Generator[None]:
    """Handle stop requests inside. A second Ctrl-C calls `abandon` and ends the process at once.

    In another program that calls main(), such as a notebook, a second Ctrl-C raises
    KeyboardInterrupt instead, and the program gets its own handlers back afterwards.
    """
    global requested, is_listening, _interrupts, _has_agreed, _abandon
    _abandon, is_listening = abandon, True
    previous: dict[int, Any] = {}
    if not _owns_process:
        requested, _interrupts, _has_agreed = None, 0, False
        if threading.current_thread() is threading.main_thread():
            previous = _take_over()
        else:
            log.warning("main() is not in the main thread, so no signal can ask this run to stop")
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _abandon, is_listening = lambda reason: None, False


def _handle(number: int, frame: object) -> None:
    """The signal handler: note the request; end the process at the second Ctrl-C."""
    global requested, _interrupts
    _interrupts += number == signal.SIGINT
    if _interrupts > 1:
        if not _owns_process:
            raise KeyboardInterrupt
        os.write(2, b"\nSecond Ctrl-C: abandoned, nothing saved.\n")
        _abandon("second Ctrl-C: abandoned, nothing saved")
        os._exit(ABANDONED)
    requested = requested or signal.Signals(number).name
    if _has_joined and number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)  # the one signal that JAX listens to


def tell_jax() -> None:
    """Call this after the processes have joined: pass stop requests on to JAX from now on.

    JAX then listens to SIGTERM and lets all processes agree on the step at which they stop.
    """
    global _has_joined
    _has_joined = True
    if requested is not None:  # the request came before JAX listened
        os.kill(os.getpid(), signal.SIGTERM)


def poll() -> bool:
    """True once the run should stop.

    With several processes every call is one round of JAX's agreement: all must make the same number
    of calls, and all get True in the same round.
    """
    global _polls, _has_agreed
    import jax
    from jax.experimental import multihost_utils

    if not jax.distributed.is_initialized():
        return requested is not None
    _polls += 1
    _has_agreed = _has_agreed or multihost_utils.reached_preemption_sync_point(_polls)
    return _has_agreed
