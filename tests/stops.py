"""Stop a generated project's run in every way, resume it, and compare it with one never stopped.

    python tests/stops.py --number 30 --task language_model --api nnx [--hard] [--seed 1]

prints a table with one line per stop, and exits with 1 if any resumed run differs. test_stops.py
makes a few of these stops. `--hard` adds float16, accumulation, averaging and early stopping.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import bake
import numpy as np
from answers import APIS
from run_hooks import around_step, use_compile_step

STEPS, STEPS_PER_EPOCH = 24, 5
FLAGS = ["--total-steps", STEPS, "--log-every", 4, "--checkpoint-every", 3]
FLAGS += ["--optimizer.warmup-steps", 4]
HARD = ["--precision", "float16", "--accumulation-steps", 4, "--ema-decay", 0.99]
# With this learning rate updates overflow, and the run ends early, at step 8 to 14.
HARD += ["--early-stopping-patience", 3, "--eval-every", 2, "--optimizer.learning-rate", 1.0]
TASK_FLAGS = {
    "image_classification": ["--batch-size", 256, "--model.features", 8],
    "language_model": [
        *("--batch-size", 32, "--model.context", 16, "--model.width", 16, "--model.depth", 1),
        *("--model.heads", 2, "--model.dropout-rate", 0.1),
    ],
}

EXIT_CODES = {
    "SIGTERM": 75,
    "SIGUSR1": 75,
    "SIGHUP": 75,
    "SIGUSR2": 75,
    "SIGXCPU": 75,
    "SIGINT": 75,
    "SIGINT twice": 130,
    "SIGKILL": -9,
    "exception": 1,
    "full disk": 1,
    "--stop-after-step": 75,
}
MOMENTS = ("start", "compile", "step", "evaluation", "save", "test", "any")


@dataclass(frozen=True)
class Stop:
    """What stops a run, and when: the count-th step, evaluation or save; or after some seconds."""

    kind: str
    moment: str
    count: float = 1

    def __str__(self) -> str:
        count = f"{self.count:.2f} s" if self.moment in ("any", "start") else self.count
        return f"{self.kind} at {self.moment} {count}"


def random_stops(number: int, seed: int, steps: int, seconds: float) -> list[Stop]:
    """Each kind in turn, at random moments. A run takes `steps` and `seconds`."""
    draw = random.Random(seed)
    stops = []
    for i in range(number):
        kind = list(EXIT_CODES)[i % len(EXIT_CODES)]
        moments = MOMENTS
        if kind in ("exception", "full disk"):  # made by the run itself
            moments = ("step", "evaluation", "save", "test") if kind == "exception" else ("step",)
        moment = "step" if kind.startswith("--") else draw.choice(moments)
        count: float = 1
        if moment == "step":
            count = draw.randrange(1, steps)
        elif moment in ("evaluation", "save"):
            count = draw.randrange(1, 5)
        elif moment in ("any", "start"):
            count = draw.uniform(0.0, seconds if moment == "any" else 1.0)
        stops.append(Stop(kind, moment, count))
    return stops


class StoppedProject(bake.Project):
    """A generated project, and how its runs go when they are stopped."""

    def __init__(self, root: Path, task: str, hard: bool = False):
        super().__init__(
            root,
            JAX_PLATFORMS="cpu",
            JAX_COMPILATION_CACHE_DIR=str(root.parent / "cache"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        self.flags = [*TASK_FLAGS[task], *FLAGS, *(HARD if hard else [])]
        if task == "language_model":
            text = root.parent / "text"
            draw = random.Random(0)
            words = ["".join(draw.choices("abcdef", k=3)) for _ in range(40)]
            text.write_text(" ".join(draw.choices(words, k=718)))  # 5 batches of 32 windows
            self.flags += ["--data.path", text]

    def train(self, workdir: Path, *flags, stop: Stop | None = None) -> subprocess.Popen:
        """Train in a process of its own, watched by `watch` below."""
        command = [sys.executable, __file__, "child", self.root, "--workdir", workdir]
        command += [*self.flags, *flags]
        return self.start(*command, log=f"{workdir}.log", env=orders(workdir, stop))

    def run(self, workdir: Path, *flags) -> int:
        return self.train(workdir, *flags).wait(timeout=300)

    def run_and_stop(self, workdir: Path, stop: Stop) -> int:
        """The exit code of a run that is stopped."""
        if stop.kind == "--stop-after-step":
            return self.run(workdir, stop.kind, stop.count)
        process = self.train(workdir, stop=stop)
        if stop.moment in ("any", "start"):
            name, *twice = stop.kind.split()
            while not Path(f"{workdir}.seen").exists() and process.poll() is None:
                time.sleep(0.01)  # from then on the handlers are there
            try:
                return process.wait(timeout=stop.count)
            except subprocess.TimeoutExpired:
                process.send_signal(getattr(signal, name))
                while twice and process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    time.sleep(0.01)
        return process.wait(timeout=300)

    def outcome(self, workdir: Path) -> dict:
        """Everything that a stopped run must share with one that was not, by name."""
        result = json.loads((workdir / "result.json").read_text())
        found = {name: result[name] for name in ("status", "step", "best_step", "best_metric")}
        found |= {"eval": result["eval"], "skipped_steps": result["skipped_steps"]}
        directory = workdir / "checkpoints"
        steps = sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
        found["best is kept"] = result["best_step"] in steps
        progress = next((directory / str(steps[-1]) / "progress").glob("metadata"))
        saved = json.loads(progress.read_text())
        # The first loss is that of the first interval since the resume, and the check covers it.
        del saved["first_loss"], saved["check"]
        found |= {f"progress {name}": value for name, value in saved.items()}
        found |= arrays(directory / str(steps[-1]))
        found |= evaluations(workdir)
        seen = [line.split() for line in Path(f"{workdir}.seen").read_text().splitlines()]
        # A step that was made again after a kill must have seen the same batch again.
        for step, digest in sorted({tuple(line) for line in seen if len(line) == 2}):
            name = f"batch {step}"
            found[name] = digest if name not in found else "two different batches"
        return found


def orders(workdir: Path, stop: Stop | None) -> dict[str, str]:
    """The environment that tells `watch` what to do and where to note what it sees."""
    what = [stop.kind, stop.moment, stop.count] if stop else None
    return {"STOP": json.dumps(what), "SEEN": f"{workdir}.seen"}


def arrays(checkpoint: Path) -> dict[str, bytes]:
    """The bits of every array in a checkpoint."""
    import jax
    import orbax.checkpoint as ocp

    found = {}
    with ocp.StandardCheckpointer() as reader:
        for item in ("model", "training"):
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                reader.restore(checkpoint / item)
            ):
                name = item + jax.tree_util.keystr(path)
                found[name] = np.asarray(leaf).tobytes()
    return found


def evaluations(workdir: Path) -> dict[str, str]:
    """What TensorBoard has of each evaluation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workdir / "tb"))
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        if tag.startswith("eval/"):
            for event in events.Scalars(tag):
                name = f"{tag} {event.step}"
                value = repr(event.value)  # in which NaN equals NaN
                found[name] = value if name not in found else "more than one value"
    return found


def compare(straight: dict, resumed: dict) -> list[str]:
    """Names of what differs."""
    names = sorted(straight.keys() | resumed.keys())
    return [name for name in names if straight.get(name) != resumed.get(name)]


def try_stop(
    project: StoppedProject, scratch: Path, stop: Stop, straight: dict, resumes: int = 1
) -> tuple[int, list[str]]:
    """The exit code of a stopped run, and what differs after it was resumed so many times.

    The first time it trains to the end; after that it is over and must stay as it is.
    """
    code = project.run_and_stop(scratch, stop)
    expected = {EXIT_CODES[stop.kind]}
    if stop.moment in ("any", "start", "save", "test", "evaluation"):
        expected.add(0)  # the run was over before
    problems = [] if code in expected else [f"exit code {code}"]
    for _ in range(resumes):
        again = project.run(scratch)
        if again != 0:
            tail = Path(f"{scratch}.log").read_text(errors="replace")[-2000:]
            return code, [*problems, f"exit code {again} on resume:\n{tail}"]
        problems += compare(straight, project.outcome(scratch))
        if problems:
            break
    return code, problems


# ------------------------------------------------------------------------------------ In the child


def watch_in_process(project: Path, *flags) -> int:
    sys.path.insert(0, str(project))
    return watch(lambda name: importlib.import_module(f"{project.name}.{name}"), *flags)


def watch(get, *flags) -> int:
    """Train like `python -m <package>.train`, noting each batch, and fail as $STOP says. `get`
    imports a module of the package."""
    get("runtime.stop").install_handlers()
    seen = Path(os.environ["SEEN"]).open("a", buffering=1)  # noqa: SIM115
    seen.write("started\n")
    train = get("train")
    kind, when, count = json.loads(os.environ["STOP"]) or ("", "", 0)
    counts = dict.fromkeys(MOMENTS, 0)

    def reach(moment: str) -> None:
        """Count this moment, and stop at the one that is asked for."""
        counts[moment] += 1
        if moment == when and counts[moment] == count:
            strike(kind)

    def wrap(step):
        def watched(state, totals, batch):
            number = int(np.asarray(state.step)) + 1
            leaves = [np.asarray(batch[name]).tobytes() for name in sorted(batch)]
            result = step(state, totals, batch)
            seen.write(f"{number} {hashlib.md5(b''.join(leaves)).hexdigest()}\n")
            reach("step")
            return result

        return watched

    compile_wrapped = around_step(get, wrap)

    def compile_watched(*args):
        reach("compile")
        return compile_wrapped(*args)

    evaluate = train.evaluate

    def evaluate_watched(score_batch, state, split, config, sharding, name, keep_going):
        moment = "test" if name == "test" else "evaluation"

        def score_watched(*args):
            reach(moment) if not started else None
            started.append(1)
            return score_batch(*args)

        started: list = []
        return evaluate(score_watched, state, split, config, sharding, name, keep_going)

    save = train.Checkpoints.save

    def save_watched(self, *args):
        save(self, *args)
        reach("save")  # while it is being written

    use_compile_step(get, compile_watched)
    train.evaluate = evaluate_watched
    train.Checkpoints.save = save_watched
    sys.argv = ["train.py", *map(str, flags)]
    return train.cli()


def strike(kind: str) -> None:
    if kind == "exception":
        raise RuntimeError("made for the test")
    if kind == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return
    for name in [kind.split()[0]] * (1 + kind.endswith("twice")):
        if name == "SIGKILL":  # a moment later: in the middle of what is going on
            threading.Timer(random.uniform(0, 0.05), os.kill, (os.getpid(), 9)).start()
        else:
            os.kill(os.getpid(), getattr(signal, name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="image_classification", choices=TASK_FLAGS)
    parser.add_argument("--api", default="linen", choices=APIS)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = bake.generated(scratch, options.task, options.api)
        project = StoppedProject(root, options.task, options.hard)
        directory = Path(scratch) / "straight"
        assert project.run(directory) == 0, Path(f"{directory}.log").read_text()
        began = time.monotonic()
        assert project.run(Path(scratch) / "timed") == 0
        seconds = time.monotonic() - began
        straight = project.outcome(directory)
        print(f"an uninterrupted run: {straight['status']} at step {straight['step']}")
        failures = 0
        for i, stop in enumerate(
            random_stops(options.number, options.seed, straight["step"], seconds)
        ):
            code, problems = try_stop(project, Path(scratch) / str(i), stop, straight, 2)
            failures += bool(problems)
            print(f"{i + 1:3}  {stop!s:36} exit {code:4}  {'; '.join(problems) or 'equal'}")
            sys.stdout.flush()
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.exit(watch_in_process(Path(sys.argv[2]), *sys.argv[3:]))
    sys.exit(main())
