"""Stopping on request: the signals, and what a run's exit code means."""

import faulthandler
import os
import signal
import sys

BAD_SETTING, ABANDONED = 2, 130
EXIT_CODES = {"completed": 0, "early_stopped": 0, "failed": 1, "diverged": 3, "preempted": 75}

requested: str | None = None
"""Name of the first signal that asked this process to stop."""

_interrupts = 0
_polls = 0
_agreed = _joined = False


def install_handlers() -> None:
    """Let SIGTERM, SIGUSR1 and Ctrl-C ask for a stop instead of killing the process.

    Where native code aborts it, as JAX does when another process died, the stacks are shown.
    """
    faulthandler.enable(sys.__stderr__)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, _handle)


def _handle(number: int, frame: object) -> None:
    global requested, _interrupts
    _interrupts += number == signal.SIGINT
    if _interrupts > 1:
        os.write(2, b"\nSecond Ctrl-C: abandoned, nothing saved.\n")
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
    """True once this run shall stop. All processes must call it equally often: they then agree."""
    global _polls, _agreed
    import jax
    from jax.experimental import multihost_utils

    if not jax.distributed.is_initialized():
        return requested is not None
    _polls += 1
    _agreed = _agreed or multihost_utils.reached_preemption_sync_point(_polls)
    return _agreed
