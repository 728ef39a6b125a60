"""launch.sh, launch/ and xla_flags.env, with a stand-in for the package that needs no JAX."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import bake
import kubernetes_validate as validate
import pytest
import yaml
from answers import ACCELERATORS

PROJECT = bake.TEMPLATE

UNWANTED = ("TRAIN_", "SLURM_", "CUDA_", "PYTHON", "PIP_", "VIRTUAL_ENV")

# Notes what launch.sh told it, then does what an argument such as "1=exit:4" says for its rank.
STUB = """
import json, os, pathlib, signal, subprocess, sys, time

rank = os.environ.get("TRAIN_PROCESS_ID", "0")
here = pathlib.Path(os.environ["STUB_DIR"])
orders = dict(arg.split("=", 1) for arg in sys.argv[1:] if arg[:1].isdigit() and "=" in arg)
order, _, value = orders.get(rank, "").partition(":")
env = {k: v for k, v in os.environ.items() if k.startswith("TRAIN_")}
seen = dict(env=env, argv=sys.argv[1:], cwd=os.getcwd(), pid=os.getpid(), signals=[],
            no_proxy=os.environ.get("no_proxy"),
            foreign=[k for k in os.environ if k.startswith(("PYTHON", "PIP_", "VIRTUAL_"))])


def note():
    (here / f"{rank}.new").write_text(json.dumps(seen))
    os.replace(here / f"{rank}.new", here / f"{rank}.json")


def outlive(other):
    while not (here / f"{other}.json").exists():
        time.sleep(0.02)
    try:
        while True:
            os.kill(json.loads((here / f"{other}.json").read_text())["pid"], 0)
            time.sleep(0.02)
    except ProcessLookupError:
        pass


def stop(number, frame):
    seen["signals"].append(signal.Signals(number).name)
    note()
    if order == "last":  # saves until well after the other rank has left
        outlive(value)
        time.sleep(1)
        seen["saved"] = True
        note()
    if order != "stubborn":
        sys.exit(75)


early = orders.get(rank, "").startswith("early")  # Python is not up yet: the default action
for name in () if early else ("TERM", "USR1", "USR2", "INT", "HUP", "XCPU"):
    number = getattr(signal, "SIG" + name)
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, stop)
print("this is rank", rank, flush=True)
if order == "stubborn":
    seen["worker"] = subprocess.Popen(["sleep", "600"]).pid
note()
if order in ("wait", "last", "stubborn", "early"):
    while True:
        signal.pause()
if value:
    while not all((here / f"{other}.json").exists() for other in orders):
        time.sleep(0.02)
if order == "after":
    outlive(0)
if order in ("after", "exit"):
    sys.exit(int(value))
if order == "die":
    os.kill(os.getpid(), int(value))
"""


def wait_until(condition, what):
    """The value of `condition` once it is true; half a minute is a failure, not a measurement."""
    for _ in range(1500):
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


def hear_signals():
    """Undo what nohup and a shell's "&" hand down: no shell can trap a signal ignored before it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def ignore_hangup():
    """As nohup does."""
    hear_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def alive(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        )
        return not state.stdout.startswith("Z")
    return False


class Launcher:
    """A project with the stub package, and what its processes noted."""

    def __init__(self, directory, accelerator="cpu"):
        self.root = directory / "a 'project' \"of\" Zoë $HOME"
        self.notes = directory / "notes"
        self.bin = directory / "bin"
        for path in (self.root / "stub", self.notes, self.bin, self.root / ".venv/bin"):
            path.mkdir(parents=True)
        shutil.copy(PROJECT / "launch.sh", self.root)
        (self.root / "stub/train.py").write_text(STUB, encoding="utf-8")
        self.accelerate(accelerator)
        self.add_python(self.root / ".venv/bin")
        kept = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        self.env = {
            **{k: v for k, v in kept.items() if not k.startswith(UNWANTED)},
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "STUB_DIR": str(self.notes),
        }
        self.started = []

    def accelerate(self, accelerator):
        text = (PROJECT / "xla_flags.env").read_text(encoding="utf-8")
        text = bake.render(text, {"accelerator": accelerator})
        (self.root / "xla_flags.env").write_text(text, encoding="utf-8")

    @staticmethod
    def add_python(directory):
        python = directory / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
        python.chmod(0o755)

    def command(self, name, text):
        """Put a stand-in for a program on PATH."""
        (self.bin / name).write_text("#!/usr/bin/env bash\n" + text, encoding="utf-8")
        (self.bin / name).chmod(0o755)

    def start(self, *arguments, hear=hear_signals, **env):
        process = subprocess.Popen(
            ["bash", str(self.root / "launch.sh"), *map(str, arguments)],
            env={**self.env, **{k: str(v) for k, v in env.items()}},
            cwd=self.notes,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hear,
        )
        self.started.append(process)
        return process

    def run(self, *arguments, **env):
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def seen(self, rank=0):
        return json.loads((self.notes / f"{rank}.json").read_text(encoding="utf-8"))

    def wait_for_ranks(self, *ranks):
        for rank in ranks:
            wait_until((self.notes / f"{rank}.json").exists, f"rank {rank}")
        return [self.seen(rank) for rank in ranks]


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
    for note in launcher.notes.glob("*.json"):
        with contextlib.suppress(OSError):
            os.killpg(json.loads(note.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def coordinator():
    """A port where something answers, as process 0 of a real run does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --- Usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which mode"),
        (["remote"], "unknown mode 'remote'"),
        (["local"], "positive number"),
        (["local", "0"], "'0'"),
        (["local", "-1"], "'-1'"),
        (["local", "two"], "'two'"),
        (["local", "--steps", "3"], "'--steps'"),
        (["slurm"], "sbatch launch/slurm.sbatch"),
        (["mpi"], "mpirun -n N"),
        (["kubernetes"], "JOB_COMPLETION_INDEX"),
        (["tpu"], "TPU_NAME"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(launcher, arguments, message):
    result = launcher.run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(launcher.notes.iterdir())


def test_the_package_is_the_one_directory_with_a_train_file(launcher):
    other = launcher.root / "other"
    shutil.copytree(launcher.root / "stub", other)
    two = launcher.run("local", 1)
    shutil.rmtree(other)
    (launcher.root / "stub/train.py").unlink()
    none = launcher.run("local", 1)
    assert (two.returncode, none.returncode) == (2, 2)
    assert "other and stub" in two.stderr
    assert "no directory with a train.py" in none.stderr


def test_a_missing_flags_file_is_one_message(launcher):
    (launcher.root / "xla_flags.env").unlink()
    result = launcher.run("local", 1)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "xla_flags.env is not in" in result.stderr and "git checkout" in result.stderr


def test_an_accelerator_that_does_not_exist_is_refused(launcher):
    launcher.accelerate("cuda14")
    result = launcher.run("local", 1)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "accelerator=cuda14: must be cpu, cuda12, cuda13 or tpu" in result.stderr


# --- The environment --------------------------------------------------------------------------


@pytest.mark.parametrize("venv", ["dangling link", "no python", "broken python"])
def test_another_python_never_takes_the_place_of_a_broken_environment(launcher, venv):
    launcher.add_python(launcher.bin)
    python = launcher.root / ".venv/bin/python"
    python.unlink()
    if venv == "dangling link":
        shutil.rmtree(launcher.root / ".venv")
        (launcher.root / ".venv").symlink_to("/nowhere")
    if venv == "broken python":
        python.symlink_to("/nowhere/python3.11")
    result = launcher.run("local", 1)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "run 'make setup'" in result.stderr
    assert not list(launcher.notes.iterdir())


def test_an_environment_that_setup_would_mend_is_mentioned(launcher):
    shutil.copy(PROJECT / "setup.sh", launcher.root)
    (launcher.root / "pyproject.toml").touch()
    version = "python{}.{}".format(*sys.version_info[:2])
    (launcher.root / ".venv/lib" / version / "site-packages").mkdir(parents=True)
    (launcher.root / ".venv/pyvenv.cfg").touch()
    result = launcher.run("local", 1)
    assert result.returncode == 0
    assert result.stderr == (
        "setup: .venv: it has no stamp of a complete installation: 'make setup' repairs it\n"
    )


def test_a_python_without_jax_is_not_taken(launcher):
    shutil.rmtree(launcher.root / ".venv")
    launcher.command("python", 'exec "$REAL" -S -E "$@"')
    result = launcher.run("local", 1, REAL=getattr(sys, "_base_executable", sys.executable))
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "has no jax: run 'make setup' first" in result.stderr


def test_what_other_environments_left_behind_does_not_reach_the_run(launcher):
    left = {"PYTHONPATH": "/nowhere", "VIRTUAL_ENV": "/v", "PIP_TARGET": "/t", "PYTHONOPTIMIZE": 2}
    result = launcher.run("local", 1, **left)
    assert result.returncode == 0, result.stderr
    assert launcher.seen()["foreign"] == []
    assert result.stderr == (
        "launch.sh: PYTHONPATH=/nowhere is ignored: only the packages in .venv are used\n"
    )


def foreign_of(name):
    """The names in the list of variables to clean away in a file of the template."""
    text = (bake.ROOT / name).read_text(encoding="utf-8")
    pattern = {
        "Makefile": r"^FOREIGN := ((?:.*\\\n)*.*)$",
        "launch.sh": r"^  unset (VIRTUAL_ENV(?:.*\\\n)*.*)$",
        "post_gen_project.py": r"((?:^FOREIGN \+?= .*\n)+)",
    }[Path(name).name]
    found = re.search(pattern, text, re.MULTILINE)[1].replace("FOREIGN", "")
    return set(re.findall(r"[A-Z_]{3,}", found))


def test_hook_make_and_launch_sh_clean_the_same_variables_away():
    lists = [foreign_of("hooks/post_gen_project.py")]
    lists += [foreign_of(f"{PROJECT.name}/{name}") for name in ("Makefile", "launch.sh")]
    assert len(lists[0]) > 12 and lists[0] == lists[1] == lists[2]


# --- local ------------------------------------------------------------------------------------


def test_one_process_joins_nobody_whatever_the_environment_says(launcher):
    leftovers = {
        **{f"SLURM_{k}": 2 for k in ("JOB_ID", "NTASKS", "PROCID", "LOCALID", "NNODES")},
        "SLURM_JOB_NODELIST": "node[1-2]",
        "OMPI_COMM_WORLD_RANK": 1,
        "OMPI_COMM_WORLD_SIZE": 2,
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "TRAIN_COORDINATOR": "gone:1",
        "TRAIN_NUM_PROCESSES": 8,
        "TRAIN_PROCESS_ID": 3,
        "TRAIN_LOCAL_DEVICE_IDS": 3,
        "TRAIN_DISTRIBUTED": "auto",
    }
    result = launcher.run("local", 1, "--name", "two words", "it's", **leftovers)
    assert result.returncode == 0, result.stderr
    assert launcher.seen()["env"] == {}
    assert launcher.seen()["argv"] == ["--name", "two words", "it's"]
    assert launcher.seen()["cwd"] == str(launcher.root)
    assert not (launcher.root / "runs").exists()
    assert launcher.run("local", 2, **leftovers).returncode == 0
    assert launcher.seen(1)["env"]["TRAIN_NUM_PROCESSES"] == "2"


@pytest.mark.parametrize("accelerator", ["cpu", "cuda12"])
def test_local_gives_each_process_its_number_and_its_gpu(launcher, accelerator):
    launcher.accelerate(accelerator)
    result = launcher.run("local", 3, "a b")
    assert result.returncode == 0, result.stderr
    envs = [launcher.seen(rank)["env"] for rank in range(3)]
    for rank, env in enumerate(envs):
        gpu = {"TRAIN_LOCAL_DEVICE_IDS": str(rank)} if accelerator == "cuda12" else {}
        assert env == {
            "TRAIN_COORDINATOR": envs[0]["TRAIN_COORDINATOR"],
            "TRAIN_NUM_PROCESSES": "3",
            "TRAIN_PROCESS_ID": str(rank),
            **gpu,
        }
    assert re.fullmatch(r"127\.0\.0\.1:\d+", envs[0]["TRAIN_COORDINATOR"])
    assert launcher.seen(2)["argv"] == ["a b"]
    assert result.stdout == "this is rank 0\n"
    (log,) = launcher.root.glob("runs/launch-*/rank-2.log")
    assert log.read_text() == "this is rank 2\n"


def test_proxies_are_kept_away_from_the_coordinator(launcher):
    launcher.run("local", 2)
    assert launcher.seen(1)["no_proxy"] is None
    launcher.run("local", 2, https_proxy="http://proxy:3128", no_proxy="intranet")
    assert launcher.seen(1)["no_proxy"] == "127.0.0.1,intranet"


def test_without_a_venv_it_takes_the_python_on_the_path(launcher):
    shutil.rmtree(launcher.root / ".venv")
    launcher.add_python(launcher.bin)
    assert launcher.run("local", 2).returncode == 0
    assert launcher.seen(1)["env"]["TRAIN_PROCESS_ID"] == "1"


def test_two_launches_at_once_use_different_ports(tmp_path):
    launchers = [Launcher(tmp_path / name) for name in "ab"]
    processes = [each.start("local", 2, "0=wait", "1=wait") for each in launchers]
    notes = [each.wait_for_ranks(0, 1) for each in launchers]
    ports = {note["env"]["TRAIN_COORDINATOR"] for pair in notes for note in pair}
    for process in processes:
        process.terminate()
        process.communicate(timeout=30)
    assert len(ports) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_ends_the_job_with_its_exit_code(launcher, rank):
    orders = ["0=wait", "1=wait"]
    orders[rank] = f"{rank}=exit:7"
    result = launcher.run("local", 2, *orders)
    assert result.returncode == 7
    assert f"process {rank} failed with exit code 7" in result.stderr
    assert ("this is rank 1" in result.stderr) == (rank == 1)  # the end of its log
    assert launcher.seen(1 - rank)["signals"] == ["SIGTERM"]


def test_a_killed_rank_ends_the_job_and_leaves_no_orphan(launcher):
    result = launcher.run("local", 2, "0=stubborn", "1=die:9")
    assert result.returncode == 128 + signal.SIGKILL
    assert launcher.seen(0)["signals"] == ["SIGTERM"]
    assert not alive(launcher.seen(0)["pid"])
    assert not alive(launcher.seen(0)["worker"])
    assert "Killed" not in result.stderr  # bash's own report


@pytest.mark.parametrize("code", [2, 3])
def test_exit_codes_of_all_ranks_pass_through(launcher, code):
    result = launcher.run("local", 2, f"0=exit:{code}", f"1=exit:{code}")
    assert result.returncode == code


def test_a_rank_that_fails_to_save_counts_more_than_one_that_saved(launcher):
    assert launcher.run("local", 2, "0=exit:75", "1=after:5").returncode == 5


def test_the_rank_that_died_counts_more_than_those_that_jax_then_aborted(launcher):
    # Let launch.sh look again only when all are gone.
    pid = """sed -n 's/.*"pid": \\([0-9]*\\).*/\\1/p' "$STUB_DIR/$rank.json" 2>/dev/null"""
    gone = f'pid=$({pid}) && [ -n "$pid" ] && ! kill -0 "$pid" 2>/dev/null'
    wait = f"until {gone}; do /bin/sleep 0.02; done"
    launcher.command("sleep", f"for rank in 0 1 2; do {wait}; done")
    assert launcher.run("local", 3, "0=die:6", "1=exit:1", "2=die:6").returncode == 1
    for note in launcher.notes.glob("*.json"):
        note.unlink()
    assert launcher.run("local", 3, "0=exit:1", "1=die:6", "2=die:9").returncode == 137


SIGNALS = ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGINT"]


@pytest.mark.parametrize("name", SIGNALS)
def test_a_stop_request_reaches_every_rank_once_and_ends_with_75(launcher, name):
    process = launcher.start("local", 2, "0=last:1", "1=wait")
    launcher.wait_for_ranks(0, 1)
    process.send_signal(signal.Signals[name])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    expected = "SIGTERM" if name == "SIGINT" else name
    assert [launcher.seen(rank)["signals"] for rank in (0, 1)] == [[expected], [expected]]
    assert launcher.seen(0)["saved"]  # though rank 1 had left with 75 long before


@pytest.mark.parametrize("name", SIGNALS)
def test_a_stop_request_that_comes_before_python_can_take_it_ends_with_75(launcher, name):
    process = launcher.start("local", 2, "0=early", "1=early")
    launcher.wait_for_ranks(0, 1)
    process.send_signal(signal.Signals[name])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err


def test_the_hangup_that_nohup_ignores_stays_ignored(launcher):
    process = launcher.start("local", 2, "0=wait", "1=wait", hear=ignore_hangup)
    launcher.wait_for_ranks(0, 1)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR2)  # had the first one counted, this would not
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "SIGHUP" in err) == (75, False), err
    assert [launcher.seen(rank)["signals"] for rank in (0, 1)] == [["SIGUSR2"], ["SIGUSR2"]]


def test_ctrl_c_twice_gives_up_at_once(launcher):
    process = launcher.start("local", 2, "0=stubborn", "1=stubborn")
    notes = launcher.wait_for_ranks(0, 1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # two signals of one kind in one instant count as one
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(alive(note[key]) for note in notes for key in ("pid", "worker"))


# --- slurm ------------------------------------------------------------------------------------

SRUN = """printf '%s\\n' "$@" > "$STUB_DIR/srun"
while [[ $1 == --* ]]; do shift; done
for task in 0 1 2; do
  SLURM_NTASKS=3 SLURM_NNODES=2 SLURM_PROCID=$task SLURM_LOCALID=$((task / 2)) "$@" &
done
wait
"""


def test_slurm_asks_scontrol_for_the_host_and_starts_itself_in_every_task(launcher, coordinator):
    launcher.accelerate("cuda13")
    launcher.command("scontrol", 'echo "$*" > "$STUB_DIR/scontrol"; printf "localhost\\nother\\n"')
    launcher.command("srun", SRUN)
    allocation = {
        "SLURM_JOB_ID": 7,
        "SLURM_JOB_NODELIST": "node[1-2]-ib",
        "SLURM_CPUS_PER_TASK": 4,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "TRAIN_PORT": coordinator,
    }
    result = launcher.run("slurm", "a b", **allocation)
    assert result.returncode == 0, result.stderr
    assert (launcher.notes / "scontrol").read_text() == "show hostnames node[1-2]-ib\n"
    options = (launcher.notes / "srun").read_text().splitlines()[:3]
    assert options == ["--kill-on-bad-exit=0", "--wait=30", "--cpus-per-task=4"]
    for rank in range(3):
        assert launcher.seen(rank)["argv"] == ["a b"]
        assert launcher.seen(rank)["env"] == {
            "TRAIN_COORDINATOR": f"localhost:{coordinator}",
            "TRAIN_NUM_PROCESSES": "3",
            "TRAIN_PROCESS_ID": str(rank),
            "TRAIN_LOCAL_DEVICE_IDS": str(rank // 2),
            "TRAIN_PORT": str(coordinator),
        }


@pytest.mark.parametrize(
    ("accelerator", "tasks", "nodes", "local_rank", "visible", "expected"),
    [
        ("cuda12", 4, 2, 1, None, "1"),
        ("cuda12", 4, 2, 1, "0,1", "1"),
        ("cuda12", 2, 1, 1, "2,3", "1"),  # JAX counts within the visible ones
        ("cuda12", 2, 1, 1, "GPU-8f,GPU-9a", "1"),
        ("cuda12", 2, 1, 1, "0", "0"),  # the scheduler gave each task one
        ("cuda12", 2, 2, 0, "0,1,2,3", None),  # one task on each host: all GPUs
        ("cpu", 4, 2, 1, None, None),
    ],
)
def test_slurm_device_ids(
    launcher, coordinator, accelerator, tasks, nodes, local_rank, visible, expected
):
    launcher.accelerate(accelerator)
    task = {"SLURM_NTASKS": tasks, "SLURM_NNODES": nodes, "SLURM_LOCALID": local_rank}
    if visible:
        task["CUDA_VISIBLE_DEVICES"] = visible
    result = launcher.run("slurm-rank", f"127.0.0.1:{coordinator}", SLURM_PROCID=1, **task)
    assert result.returncode == 0, result.stderr
    assert launcher.seen(1)["env"].get("TRAIN_LOCAL_DEVICE_IDS") == expected


# --- mpi --------------------------------------------------------------------------------------


def open_mpi(rank, size, local_size):
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{key}": value for key, value in names.items()}


def mpich(rank, size, local_size):
    names = {"MPI_LOCALRANKID": rank % local_size, "MPI_LOCALNRANKS": local_size}
    return {"PMI_RANK": rank, "PMI_SIZE": size, **names}


@pytest.mark.parametrize("variables", [open_mpi, mpich])
def test_mpi_on_several_hosts_takes_the_coordinator_from_the_user(launcher, coordinator, variables):
    launcher.accelerate("cuda12")
    address = f"localhost:{coordinator}"
    result = launcher.run("mpi", "a b", **variables(3, 4, 2), TRAIN_COORDINATOR=address)
    assert result.returncode == 0, result.stderr
    assert launcher.seen(3)["argv"] == ["a b"]
    assert launcher.seen(3)["env"] == {
        "TRAIN_COORDINATOR": address,
        "TRAIN_NUM_PROCESSES": "4",
        "TRAIN_PROCESS_ID": "3",
        "TRAIN_LOCAL_DEVICE_IDS": "1",
    }
    missing = launcher.run("mpi", **variables(3, 4, 2))
    assert missing.returncode == 2
    assert "TRAIN_COORDINATOR=host:port" in missing.stderr


@pytest.mark.parametrize("variables", [open_mpi, mpich])
def test_mpi_on_one_host_derives_one_port_for_each_job(launcher, variables):
    def address(job):
        shared = {"PMIX_NAMESPACE": job} if variables is open_mpi else {}
        assert launcher.run("mpi", **variables(0, 2, 2), **shared).returncode == 0
        return launcher.seen(0)["env"]["TRAIN_COORDINATOR"]

    assert address("prterun-host-1@1") == address("prterun-host-1@1")
    assert re.fullmatch(r"127\.0\.0\.1:2\d{4}", address("prterun-host-2@1"))
    if variables is open_mpi:
        assert address("prterun-host-1@1") != address("prterun-host-2@1")
    assert launcher.run("mpi", **variables(0, 1, 1)).returncode == 0
    assert launcher.seen(0)["env"] == {}


# --- kubernetes -------------------------------------------------------------------------------


def test_kubernetes_replaces_the_shell_by_python(launcher, coordinator):
    pod = {"TRAIN_NUM_PROCESSES": 2, "TRAIN_COORDINATOR": f"localhost:{coordinator}"}
    process = launcher.start("kubernetes", "1=wait", **pod, JOB_COMPLETION_INDEX=1)
    (seen,) = launcher.wait_for_ranks(1)
    assert seen["pid"] == process.pid  # so the SIGTERM of the kubelet reaches it
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert seen["env"] == {**{k: str(v) for k, v in pod.items()}, "TRAIN_PROCESS_ID": "1"}


def test_the_manifest_agrees_with_itself_and_with_launch_sh(launcher):
    text = (PROJECT / "launch/jobset.yaml").read_text(encoding="utf-8")
    jobset = yaml.safe_load(bake.render(text, {"project_slug": "my_net_2"}))
    name = jobset["metadata"]["name"]
    assert name == "my-net-2"
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(env["TRAIN_NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert env["TRAIN_COORDINATOR"].startswith(f"{name}-{workers['name']}-0-0.{name}:")
    assert container["args"][0] == "kubernetes"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_manifest_holds_valid_objects():
    """The Job in it, and the Pod in that, by the schemas of Kubernetes itself."""
    text = (PROJECT / "launch/jobset.yaml").read_text(encoding="utf-8")
    jobset = yaml.safe_load(bake.render(text, {"project_slug": "my_net"}))
    assert all(rule["name"] for rule in jobset["spec"]["failurePolicy"]["rules"])  # of JobSet's
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    job |= {"spec": workers["template"]["spec"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    pod |= {"spec": job["spec"]["template"]["spec"]}
    for each in (job, pod):
        validate.validate(each, validate.latest_version(), strict=True)
    job["spec"]["backofLimit"] = 0
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


# --- tpu --------------------------------------------------------------------------------------

GCLOUD = """printf '%s\\n' "$@" > "$STUB_DIR/gcloud-$4"
case $4 in
  scp) cp "$5" "$STUB_DIR/${6#*:}" ;;
  ssh) command=${!#}; cd "$STUB_DIR" && bash -c "${command#--command=}" ;;
esac
"""


def test_tpu_copies_the_sources_and_starts_training_on_all_workers(launcher):
    launcher.command("gcloud", GCLOUD)
    launcher.command("make", 'echo "$*" > "$STUB_DIR/make"')
    launcher.add_python(launcher.bin)
    for unwanted in ("runs/old/log", ".git/config"):
        (launcher.root / unwanted).parent.mkdir(parents=True)
        (launcher.root / unwanted).touch()
    flags = ["--workdir", 'gs://bucket/it\'s "a" $HOME run', "", "Zoë"]
    result = launcher.run("tpu", *flags, TPU_NAME="pod", ZONE="europe-west4-b", PROJECT="p")
    assert result.returncode == 0, result.stderr
    for action in ("scp", "ssh"):
        words = (launcher.notes / f"gcloud-{action}").read_text().splitlines()
        assert words[:4] == ["compute", "tpus", "tpu-vm", action]
        assert {"--zone=europe-west4-b", "--project=p", "--worker=all"} <= set(words)
    assert (launcher.notes / "make").read_text() == "setup\n"
    assert launcher.seen()["argv"] == flags
    assert launcher.seen()["env"] == {"TRAIN_DISTRIBUTED": "auto"}
    with tarfile.open(launcher.notes / "stub.tgz") as archive:
        names = {Path(name).parts[0] for name in archive.getnames() if Path(name).parts}
    assert names == {"launch.sh", "stub", "xla_flags.env"}


# --- Files ------------------------------------------------------------------------------------


@pytest.fixture(params=ACCELERATORS)
def flags_file(request, tmp_path):
    path = tmp_path / "xla_flags.env"
    text = (PROJECT / "xla_flags.env").read_text(encoding="utf-8")
    assert text.count("{{") == 1 and "{%" not in text and "{#" not in text
    path.write_text(bake.render(text, {"accelerator": request.param}), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["launch.sh", "setup.sh", "launch/slurm.sbatch", "xla_flags.env"])
def test_shellcheck(tmp_path, name):
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    path = tmp_path / "script"
    text = (PROJECT / name).read_text(encoding="utf-8")
    if name == "xla_flags.env":
        text = bake.render(text, {"accelerator": "cuda12"})
    path.write_text(text, encoding="utf-8")
    shell = "sh" if name in ("xla_flags.env", "setup.sh") else "bash"
    result = subprocess.run(["shellcheck", "-s", shell, path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def sourced(path, shell, **env):
    script = 'set -eu; . "$1"; exec env'
    command = [shell, "-c", script, shell, str(path)]
    clean = {"PATH": os.environ["PATH"], "HOME": "/home/zoe", **env}
    out = subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout
    pairs = dict(line.split("=", 1) for line in out.splitlines())
    return {k: v for k, v in pairs.items() if k not in ("_", "PWD", "OLDPWD", "SHLVL", "PATH")}


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_the_flags_file_sets_only_what_it_means_to(flags_file, shell):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    expected = {
        "HOME": "/home/zoe",
        "JAX_COMPILATION_CACHE_DIR": "/home/zoe/.cache/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if "accelerator=cuda" in flags_file.read_text(encoding="utf-8"):
        expected["NCCL_DEBUG"] = "WARN"
    assert sourced(flags_file, shell) == expected
    mine = {"XLA_FLAGS": "--mine=1", "LIBTPU_INIT_ARGS": "--mine=2", **dict.fromkeys(expected, "x")}
    assert sourced(flags_file, shell, **mine) == mine


def flag_lines(text):
    """(variable, flag, line that sets it), of the active and of the commented lines."""
    pattern = r'^ *(?:# )?((XLA_FLAGS|LIBTPU_INIT_ARGS)="(--\S+) \$\{\2-\}")$'
    return [(name, flag, line) for line, name, flag in re.findall(pattern, text, re.MULTILINE)]


def test_every_flag_is_on_a_line_of_its_own_before_those_of_the_caller():
    text = (PROJECT / "xla_flags.env").read_text(encoding="utf-8")
    flags = [flag for _, flag, _ in flag_lines(text)]
    assert flags == re.findall(r"--xla_\S+", text)
    assert len(flags) == len(set(flags)) > 5
    for name, flag, _ in flag_lines(text):
        assert name == ("LIBTPU_INIT_ARGS" if "xla_tpu" in flag else "XLA_FLAGS")


def test_a_flag_that_is_switched_on_gives_way_to_the_callers(tmp_path):
    for name, flag, line in flag_lines((PROJECT / "xla_flags.env").read_text(encoding="utf-8")):
        path = tmp_path / "one.env"
        path.write_text(f"export {name}\n{line}\n", encoding="utf-8")
        assert sourced(path, "sh")[name].split() == [flag]
        assert sourced(path, "sh", **{name: "--mine"})[name].split() == [flag, "--mine"]


@pytest.mark.skipif(not importlib.util.find_spec("jaxlib"), reason="jaxlib is not installed here")
def test_jaxlib_knows_every_flag():
    text = (PROJECT / "xla_flags.env").read_text(encoding="utf-8")
    flags = [flag for name, flag, _ in flag_lines(text) if name == "XLA_FLAGS"]

    def parse(flags):
        code = "import jaxlib._jax as jaxlib; jaxlib.CompileOptions()"
        env = {**os.environ, "XLA_FLAGS": " ".join(flags)}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)

    result = parse(flags)
    assert result.returncode == 0, result.stderr
    assert parse([*flags, "--xla_no_such_flag=1"]).returncode != 0  # it does look
