"""launch.sh with the real thing: a Slurm cluster, Open MPI, local processes that are killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import bake
import pytest
import slurm as slurm_cluster
from slurm import wait_until

pytestmark = pytest.mark.slow

STEPS = 600
FLAGS = ["--total-steps", STEPS, "--log-every", 20, "--eval-every", 200, "--checkpoint-every", 50]
FLAGS = [str(word) for word in [*FLAGS, "--model.features", 8, "--ema-decay", 0.9]]


class LaunchedProject(bake.Project):
    """A generated project whose .venv is the environment of the tests."""

    def __init__(self, root: Path):
        cache = str(root.parent / "cache")
        super().__init__(root, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=cache)
        bake.add_python(root)

    def launch(self, *command) -> subprocess.Popen:
        """Start a command that prints to `self.log`."""
        self.log = self.root / f"log-{time.monotonic_ns()}"
        return self.start(*command, log=self.log, start_new_session=True)

    def succeed(self, *command) -> str:
        process = self.launch(*command)
        code = process.wait(180)
        assert code == 0, self.log.read_text()[-3000:]
        return self.log.read_text()

    def outcome(self, run: Path) -> dict:
        """Digests of every bit that was saved at the last step, and how the run ended."""
        facts = json.loads((run / f"checkpoints/{STEPS}/progress/metadata").read_text())
        result = json.loads((run / "result.json").read_text())
        keys = ("status", "step", "best_step", "best_metric", "eval", "processes")
        return facts["digest"] | {key: result[key] for key in keys}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    output = tmp_path_factory.mktemp("cluster") / "sp ace"
    project = LaunchedProject(bake.generated(output))
    with open(project.root / "my_flax_project/batches.py", "a") as file:
        file.write(SLOW)
    return project


# While there is a file "slow" steps take their time, so that a run is still there to be stopped.
SLOW = """

import os
import time

indices_at_full_speed = train_indices


def train_indices(*arguments):
    if os.path.exists("slow"):
        time.sleep(0.3)
    return indices_at_full_speed(*arguments)
"""


@pytest.fixture(scope="module")
def straight(project):
    """The outcome of two processes that nothing stopped."""
    project.succeed("bash", "launch.sh", "local", 2, *FLAGS, "--workdir", "runs/straight")
    return project.outcome(project.root / "runs/straight")


def reached(run: Path, step: int) -> bool:
    log = run / "train.log"
    return log.exists() and f"step {step}/" in log.read_text()


# -------------------------------------------------------------------------------------------- Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = slurm_cluster.unavailable()
    if reason:
        pytest.skip(reason)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "home") as cluster:
        yield cluster


def submit(slurm, project, *options) -> tuple[str, Path]:
    """Submit the batch file as its comments say; return the job and its run directory."""
    command = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    environment = {name: project.environment[name] for name in project.environment if "JAX" in name}
    job = slurm.run(
        *command, *options, "launch/slurm.sbatch", *FLAGS, cwd=project.root, **environment
    )
    return job, project.root / f"runs/slurm-{job}"


def explain(slurm, project, job):
    def text():
        log = project.root / f"slurm-{job}.out"
        return f"{slurm.field(job, 'JobState')} {log.read_text()[-3000:]}"

    return text


def test_a_slurm_job_that_is_stopped_goes_on_and_ends_as_if_never_stopped(slurm, project, straight):
    job, run = submit(slurm, project, "--time=60", "--signal=TERM@600")
    why = explain(slurm, project, job)
    stops = {
        "a signal": ["scancel", "--signal=TERM", job],
        "a requeue": ["scontrol", "requeue", job],
        "the time limit": ["scontrol", "update", f"JobId={job}", "TimeLimit=5"],  # under 600 s left
    }
    for number, command in enumerate(stops.values()):

        def is_training(restarts=number):
            slurm.start_now(job)
            return trains(run, restarts)

        wait_until(is_training, 120, why)
        (project.root / "slow").touch()
        slurm.run(*command)  # time limits are looked at twice a minute
        wait_until(lambda n=number: int(slurm.field(job, "Restarts")) > n, 120, why)
        (project.root / "slow").unlink()

    def is_complete():  # a job that is being requeued counts as FAILED for a moment
        slurm.start_now(job)
        return slurm.field(job, "JobState") == "COMPLETED"

    wait_until(is_complete, 180, why)
    assert (run / "train.log").read_text().count("resumed at step") == len(stops)
    assert project.outcome(run) == straight


def trains(run: Path, restarts: int) -> bool:
    """Whether a run has trained since it was started again so often."""
    log = run / "train.log"
    starts = log.read_text().split(": resumed at step ") if log.exists() else []
    return len(starts) == restarts + 1 and "train step " in starts[-1]


def test_a_cancelled_slurm_job_saves_and_stays_cancelled(slurm, project):
    job, run = submit(slurm, project)
    why = explain(slurm, project, job)
    wait_until(lambda: reached(run, 20), 90, why)
    slurm.run("scancel", job)
    wait_until(lambda: slurm.field(job, "JobState") == "CANCELLED", 90, why)
    wait_until(lambda: (run / "result.json").exists(), 60, why)
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"


def test_each_task_of_an_array_is_a_run_of_its_own(slurm, project):
    """With its own directory and seed; what stops and requeues one leaves the others alone."""
    command = ["sbatch", "--parsable", "--array=3,5", "--nodes=1", "--cpus-per-task=1"]
    environment = {name: project.environment[name] for name in project.environment if "JAX" in name}
    job = slurm.run(*command, "launch/slurm.sbatch", *FLAGS, cwd=project.root, **environment)
    tasks = {seed: f"{job}_{seed}" for seed in (3, 5)}
    runs = {seed: project.root / f"runs/slurm-{task}" for seed, task in tasks.items()}
    wait_until(lambda: all(reached(run, 20) for run in runs.values()), 120, slurm.logs)
    # The one whose plain number is that of the whole array.
    number = {seed: slurm.field(task, "JobId") for seed, task in tasks.items()}
    stopped = next(seed for seed in tasks if number[seed] == job)
    other = 8 - stopped
    why = explain(slurm, project, job)
    (project.root / "slow").touch()
    slurm.run("scancel", "--batch", "--signal=USR2", tasks[stopped])
    wait_until(lambda: int(slurm.field(tasks[stopped], "Restarts")) == 1, 120, why)
    (project.root / "slow").unlink()

    def are_over():
        slurm.start_now(tasks[stopped])
        return all(slurm.field(task, "JobState") == "COMPLETED" for task in tasks.values())

    wait_until(are_over, 180, why)
    assert slurm.field(tasks[other], "Restarts") == "0"
    for seed, run in runs.items():
        assert json.loads((run / "config.json").read_text())["settings"]["seed"] == seed
        resumed = (run / "train.log").read_text().count(": resumed at step ")
        assert resumed == (seed == stopped)


def test_a_bad_setting_ends_a_slurm_job_with_2_and_no_requeue(slurm, project):
    command = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    job = slurm.run(*command, "launch/slurm.sbatch", "--batch-size", "0", cwd=project.root)
    why = explain(slurm, project, job)
    wait_until(lambda: slurm.field(job, "JobState") == "FAILED", 90, why)
    assert slurm.field(job, "ExitCode") == "2:0"
    assert "--batch-size 0: must be at least 1" in why()
    assert slurm.field(job, "Restarts") == "0"


# --------------------------------------------------------------------------------------- Open MPI


@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed")
def test_mpirun_trains_stops_at_sigusr1_and_goes_on(project, straight):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    command = [*mpirun, "bash", "launch.sh", "mpi", *FLAGS, "--workdir", "runs/mpi"]
    process = project.launch(*command)
    run = project.root / "runs/mpi"
    wait_until(lambda: reached(run, 20), 90, project.log.read_text)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75, project.log.read_text()[-3000:]
    project.succeed(*command)
    assert project.outcome(run) == straight


# --------------------------------------------------------------------------------- Local processes


def ranks_of(process) -> dict[int, int]:
    """Process ids of the ranks that launch.sh has started, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [x.partition(b"=")[2] for x in environment if x.startswith(b"TRAIN_PROCESS_ID=")]
            if rank and int(stat[1]) == process.pid:
                found[int(rank[0])] = int(folder.name)
    return found


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_ends_the_job_which_then_goes_on(project, rank):
    name = f"runs/killed-{rank}"
    few = ["--total-steps", 120, "--eval-every", 0, "--checkpoint-every", 20]
    command = ["bash", "launch.sh", "local", 4, *FLAGS, *few, "--workdir", name]
    process = project.launch(*command)
    log = project.log
    wait_until(lambda: reached(project.root / name, 40), 120, log.read_text)
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[rank], signal.SIGKILL)
    began = time.monotonic()
    code = process.wait(60)
    assert time.monotonic() - began < 30
    assert code == 137, log.read_text()[-3000:]
    assert f"process {rank} failed with exit code 137" in log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    text = project.succeed(*command)
    assert re.search(r"resumed at step [24]0", text) and "completed at step 120" in text
