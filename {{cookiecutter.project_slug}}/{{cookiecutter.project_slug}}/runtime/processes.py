"""The processes of one run: how they join, find out where they differ, and wait for each other."""

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

ARRIVAL, PATIENCE = 120, 24 * 3600  # seconds, until all have joined; for the slowest later on

_barriers = itertools.count()


class Unreachable(ConnectionError):
    """The other processes did not come, or cannot be reached."""


def join() -> None:
    """Join the other processes of this run, when launch.sh started it as one of several.

    launch.sh passes everything explicitly. JAX's own detection would also fire on Slurm, MPI or
    Kubernetes variables that are merely left over, so it is only asked on TPU pods.
    """
    environ = os.environ
    on_tpu = environ.get("TRAIN_DISTRIBUTED") == "auto"
    count = int(environ.get("TRAIN_NUM_PROCESSES", "1"))
    if jax.distributed.is_initialized() or not (on_tpu or count > 1):
        return
    jax.config.update("jax_enable_preemption_service", True)  # by which stop.py agrees on a step
    try:
        if on_tpu:
            jax.distributed.initialize()
        else:
            ids = environ.get("TRAIN_LOCAL_DEVICE_IDS")
            address, rank = environ["TRAIN_COORDINATOR"], int(environ["TRAIN_PROCESS_ID"])
            timeout = int(environ.get("TRAIN_COORDINATOR_TIMEOUT", ARRIVAL))
            require_coordinator(address, rank, timeout)
            jax.distributed.initialize(
                address,
                count,
                rank,
                local_device_ids=[int(i) for i in ids.split(",")] if ids else None,
                cluster_detection_method="deactivate",
                initialization_timeout=timeout,
                heartbeat_timeout_seconds=20,  # how soon the others end after one was killed
                shutdown_timeout_seconds=30,
            )
    except RuntimeError as error:
        if "before any JAX" in str(error):
            error.add_note(
                "A module of this project computes with JAX while it is imported, as with X = "
                "jnp.ones(3) outside of any function: do that in a function, or with NumPy."
            )
        raise
    stop.tell_jax()


def require_coordinator(address: str, rank: int, timeout: float) -> None:
    """Wait until process 0 listens at this address, or see that it can if this is process 0.

    JAX itself would end this process without a Python error when it cannot connect. Raises
    SettingError for a port in use, Unreachable after `timeout` seconds.
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
        # Even when asked to stop, join the others first: they may be waiting for this process.
        if stop.requested and waited > min(timeout, 20):
            sys.exit(stop.EXIT_CODES["preempted"])
        if waited > timeout:
            raise Unreachable(
                f"process {rank} on {platform.node()} did not reach the coordinator at {address} "
                f"within {timeout} s ({reason}). Has process 0 failed, is the address right, is "
                f"there a firewall? TRAIN_COORDINATOR_TIMEOUT=seconds waits longer"
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
    """End this process after an exception.

    At a usual exit Python would wait for threads of Orbax, for ever after a save that failed, and
    JAX minutes for the other processes, which wait for this one, and then abort them all.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        terminal.Screen(stream).flush()
    os._exit(stop.EXIT_CODES["failed"])


def wait_for_all(place: str) -> None:
    """Wait until every process of the run got to this place.

    This asks the service at which they joined: a collective would give up on a slow one within
    half a minute.
    """
    if jax.process_count() > 1:
        ocp.multihost.sync_global_processes(
            f"{place} {next(_barriers)}",
            timeout=PATIENCE,
            processes=set(range(jax.process_count())),
        )


def gather(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    wait_for_all("texts")
    encoded = np.frombuffer(text.encode(), np.uint8)
    longest = np.max(multihost_utils.process_allgather(np.int32(len(encoded))))
    padded = np.pad(encoded, (0, longest - len(encoded)))
    return [bytes(x).rstrip(b"\0").decode() for x in multihost_utils.process_allgather(padded)]


@contextlib.contextmanager
def failing_together() -> Generator[None]:
    """Raise a SettingError of some processes in all: the others would wait for these in vain."""
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
    if problem is None:
        return ""
    return f"process {jax.process_index()} on {platform.node()}: {problem}"


def require_same(values: dict[str, Any]) -> None:
    """Raise SettingError naming the processes whose values differ from those of process 0."""
    own = {"host": platform.node(), **dict(flatten(values))}
    first, *others = map(json.loads, gather(json.dumps(own)))
    differing = []
    for rank, other in enumerate(others, 1):
        for name in sorted((first.keys() | other.keys()) - {"host"}):
            if first.get(name) != other.get(name):
                shown = name.removeprefix("settings.")
                differing.append(
                    f"process {rank} on {other['host']} has "
                    f"{flag(shown) if shown != name else name} {other.get(name)}, process 0 on "
                    f"{first['host']} has {first.get(name)}"
                )
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise SettingError(
            f"the processes of this run differ: {'; '.join(differing[:5])}{more}. Start all with "
            f"the same command, code, data and environment"
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> Generator[tuple[str, Any]]:
    """Values by dotted name."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
