"""A real Slurm cluster of two nodes on this machine, for as long as a `with` lasts.

Its daemons run in namespaces of their own, where /etc/hosts knows the nodes: nothing of the machine
is changed, and nothing of them outlives the `with`. Needs root, and Debian's slurm-wlm and munge.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
NODES = ("n1", "n2")


def unavailable() -> str | None:
    """Why there can be no cluster here; None if there can."""
    missing = [name for name in PROGRAMS if not find(name)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    namespaces = ["unshare", "--mount", "--pid", "--fork", "true"]
    if subprocess.run(namespaces, capture_output=True, check=False).returncode:
        return "namespaces are not allowed here"
    return None


def find(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configuration(home: Path, host: str) -> str:
    controller, *daemons = free_ports(1 + len(NODES))
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge"),
        f"AuthInfo=socket={home}/munge.socket",
        f"StateSaveLocation={home}/state",
        f"SlurmdSpoolDir={home}/spool-%n",
        f"SlurmctldPidFile={home}/slurmctld.pid",
        f"SlurmdPidFile={home}/slurmd-%n.pid",
        f"SlurmctldLogFile={home}/slurmctld.log",
        f"SlurmdLogFile={home}/slurmd-%n.log",
        *("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none"),
        *("SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU"),
        "SlurmdParameters=config_overrides",  # more CPUs than there are
        *("ReturnToService=2", "KillWait=60", "SchedulerParameters=sched_interval=2"),
    ]
    for name, port in zip(NODES, daemons, strict=True):
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


START = r"""
set -e
mount --bind "$1/hosts" /etc/hosts
munged --foreground --force --socket="$1/munge.socket" --key-file="$1/munge.key" \
    --pid-file="$1/munge.pid" --log-file="$1/munge.log" --seed-file="$1/munge.seed" &
until [ -S "$1/munge.socket" ]; do sleep 0.1; done
slurmctld -D &
for node in $2; do slurmd -D -N "$node" & done
wait
"""


class Cluster:
    """Commands of a running cluster."""

    def __init__(self, home: Path):
        self.home = home
        self.environment = os.environ | {
            "SLURM_CONF": str(home / "slurm.conf"),
            "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        }
        for name in list(self.environment):
            if name.startswith(("SLURM_", "SBATCH_", "TRAIN_")) and name != "SLURM_CONF":
                del self.environment[name]

    def run(self, *command, cwd: Path | None = None, **environment) -> str:
        """Run one of Slurm's commands and return what it printed."""
        result = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`, such as JobState, Restarts or ExitCode."""
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)[name]

    def start_now(self, job: str) -> None:
        """Do not make a requeued job wait its two minutes, and give it all its time again."""
        with contextlib.suppress(AssertionError):  # it may not be pending yet, or run again already
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")

    def idle_nodes(self) -> int:
        with contextlib.suppress(AssertionError):  # the controller may not listen yet
            return self.run("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
        return 0

    def logs(self) -> str:
        return "\n".join(x.read_text(errors="replace")[-2000:] for x in self.home.glob("*.log"))


@contextlib.contextmanager
def cluster(home: Path):
    """A started cluster with all its nodes idle; stopped, with all its jobs, at the end."""
    home.mkdir()
    host = socket.gethostname()
    hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in NODES)
    (home / "hosts").write_text(hosts)
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o600)
    home.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (home / name).mkdir()
    (home / "slurm.conf").write_text(configuration(home, host))
    made = Cluster(home)
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["bash", "-c", START, "cluster", str(home), " ".join(NODES)]
    with open(home / "daemons.log", "wb") as log:
        daemons = subprocess.Popen(
            command,
            env=made.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_the_tests,
        )
    try:
        wait_until(lambda: made.idle_nodes() == len(NODES), 60, made.logs)
        yield made
    finally:
        os.killpg(daemons.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemons.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemons.pid, signal.SIGKILL)
        daemons.wait()


def end_with_the_tests() -> None:
    """Ask Linux to kill this process when its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait_until(condition, seconds: float, explain=lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {explain()}"
        time.sleep(0.2)
