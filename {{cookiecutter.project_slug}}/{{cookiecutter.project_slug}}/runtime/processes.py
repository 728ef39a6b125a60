"""The processes of one run: how they join, compare their settings, and wait at barriers."""

import contextlib
import itertools
import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from . import stop, terminal
from .settings import SettingError, flag

JOIN_TIMEOUT = 120  # seconds until all processes must have joined
BARRIER_TIMEOUT = 24 * 3600  # seconds for which the others wait for the slowest process

_barriers = itertools.count()


class Unreachable(ConnectionError):
    """Other processes of this run did not join in time, or cannot be reached."""


def join() -> None:
    """Join the other processes of this run, if launch.sh started this one as one of several.

    launch.sh passes everything explicitly. JAX's own detection would also react to Slurm, MPI or
    Kubernetes variables that an earlier job left behind, so it is used on TPU pods only. Raises
    SettingError for a wrong address or a port in use, Unreachable when the others do not come.
    """
    environ = os.environ
    on_tpu = environ.get("TRAIN_DISTRIBUTED") == "auto"
    count = int(environ.get("TRAIN_NUM_PROCESSES", "1"))
    if jax.distributed.is_initialized() or not (on_tpu or count > 1):
        return
    # stop.poll() needs this service. A command that never polls must not have it: the service takes
    # SIGTERM over, so the signal would no longer end the process.
    jax.config.update("jax_enable_preemption_service", stop.is_listening)
    try:
        if on_tpu:
            jax.distributed.initialize()
        else:
            ids = environ.get("TRAIN_LOCAL_DEVICE_IDS")
            address, rank = environ["TRAIN_COORDINATOR"], int(environ["TRAIN_PROCESS_ID"])
            timeout = int(environ.get("TRAIN_COORDINATOR_TIMEOUT", JOIN_TIMEOUT))
            require_coordinator(address, rank, timeout)
            jax.distributed.initialize(
                address,
                count,
                rank,
                local_device_ids=[int(i) for i in ids.split(",")] if ids else None,
                cluster_detection_method="deactivate",
                initialization_timeout=timeout,
                heartbeat_timeout_seconds=20,  # until the others notice that one was killed
                shutdown_timeout_seconds=30,
            )
    except RuntimeError as error:
        if "before any JAX" in str(error):
            error.add_note(
                "A module of this project computes with JAX while it is imported, such as X = "
                "jnp.ones(3) outside of any function: move that into a function, or use NumPy."
            )
        raise
    if stop.is_listening:
        stop.tell_jax()


def require_coordinator(address: str, rank: int, timeout: float) -> None:
    """Wait until process 0 listens at this address; in process 0, check that it can listen there.

    JAX itself would kill this process without a Python error when it cannot connect. Raises
    SettingError for a wrong address or a port in use, Unreachable after `timeout` seconds. Exits
    with code 75 (preempted) if a stop was requested and process 0 does not listen within 20 s.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise SettingError(f"TRAIN_COORDINATOR={address}: must be host:port")
    where = host.strip("[]"), int(port)
    began = time.monotonic()
    while True:
        try:
            if rank:
                socket.create_connection(where, timeout=5).close()
            else:
                socket.getaddrinfo(*where)
            break
        except OSError as error:
            reason = error
        waited = time.monotonic() - began
        # After a stop request, still try to join: the others may be waiting for this process.
        if stop.requested and waited > min(timeout, 20):
            sys.exit(stop.EXIT_CODES["preempted"])
        if waited > timeout:
            raise Unreachable(
                f"process {rank} on {platform.node()} did not reach the coordinator at {address} "
                f"within {timeout} s ({reason}). Check that process 0 is running, that the address "
                f"is right and that no firewall blocks it. To wait longer, set "
                f"TRAIN_COORDINATOR_TIMEOUT to a number of seconds"
            )
        time.sleep(0.5)
    if rank == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise SettingError(
                f"process 0 on {platform.node()} cannot listen at {address}: {error}. If another "
                f"program uses this port, set TRAIN_PORT to a free one"
            ) from error


def leave_at_once() -> None:
    """End this process with exit code 1 after an exception, without Python's usual clean-up.

    At a normal exit Python would wait for Orbax's threads, forever after a save that failed. JAX
    would wait minutes for the other processes, which wait for this one, and then abort them all.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        terminal.Screen(stream).flush()
    os._exit(stop.EXIT_CODES["failed"])


def wait_for_all(place: str) -> None:
    """Wait at a barrier until every process of the run has reached this place.

    The barrier is one of JAX's coordination service: a collective in its place would time out after
    half a minute, too soon for a slow process.
    """
    if jax.process_count() > 1:
        ocp.multihost.sync_global_processes(
            f"{place} {next(_barriers)}",
            timeout=BARRIER_TIMEOUT,
            processes=set(range(jax.process_count())),
        )


def gather(text: str) -> list[str]:
    """The texts of all processes, in the order of their ranks."""
    if jax.process_count() == 1:
        return [text]
    wait_for_all("texts")
    encoded = np.frombuffer(text.encode(), np.uint8)
    longest = np.max(multihost_utils.process_allgather(np.int32(len(encoded))))
    padded = np.pad(encoded, (0, longest - len(encoded)))  # all must have the same shape
    gathered = multihost_utils.process_allgather(padded)
    return [bytes(row).rstrip(b"\0").decode() for row in gathered]


@contextlib.contextmanager
def failing_together() -> Generator[None]:
    """If any process raises SettingError inside, raise it in all of them.

    Otherwise the rest would wait forever for the process that stopped.
    """
    problem = None
    try:
        yield
    except SettingError as error:
        problem = error
    problems = [text for text in gather(describe_problem(problem)) if text]
    if problem and len(problems) == jax.process_count():
        raise problem
    if problems:
        raise SettingError("; ".join(problems))


def describe_problem(problem: Exception | None) -> str:
    """The error of this process with its rank and host; empty if there is no error."""
    if problem is None:
        return ""
    return f"process {jax.process_index()} on {platform.node()}: {problem}"


def require_same(values: dict[str, Any]) -> None:
    """Raise SettingError if the values of a process differ from those of process 0."""
    own = {"host": platform.node(), **dict(flatten(values))}
    first, *others = map(json.loads, gather(json.dumps(own)))
    differing = []
    for rank, other in enumerate(others, 1):
        for name in sorted((first.keys() | other.keys()) - {"host"}):
            if first.get(name) != other.get(name):
                setting = name.removeprefix("settings.")
                label = name if setting == name else flag(setting)
                differing.append(
                    f"process {rank} on {other['host']} has {label} {other.get(name)}, process 0 "
                    f"on {first['host']} has {first.get(name)}"
                )
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise SettingError(
            f"the processes of this run differ: {'; '.join(differing[:5])}{more}. Start all with "
            f"the same command, code, data and environment"
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> Generator[tuple[str, Any]]:
    """Each value with its dotted name, such as 'settings.seed'."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
