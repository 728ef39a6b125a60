"""Children that run the generated code: a server process imports the projects of all combinations
once and forks for each run. Every child is a process of its own, with real exit codes, signals and
files, but without the seconds that imports take.

The functions of a child get `get`, which imports a module of the generated package by its name.
A request is a pickle, and so a function goes to the server by its module and name. train_with takes
hooks, of which run_hooks.py has most: {hook: its argument}.
"""

import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import bake
import numpy as np
import pytest
from answers import COMBINATIONS
from run_hooks import pause_before, save_synchronously

PACKAGES = [f"{task}_{api}" for task, api in COMBINATIONS]
IMAGES, IMAGES_NNX, TEXT, TEXT_NNX = PACKAGES
TIMEOUT = 120  # seconds that no run comes near
TWO = {"TRAIN_NUM_PROCESSES": "2", "TRAIN_COORDINATOR_TIMEOUT": "60"}


def serve(root):
    """Import the projects below root and fork a child for every request."""
    sys.path[:0] = [os.path.join(root, package) for package in PACKAGES]
    sys.dont_write_bytecode = True
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    for package in PACKAGES:
        for module in ("train", "evaluate"):
            importlib.import_module(f"{package}.{module}")
        # What a run would import on the way, every child anew.
        importlib.import_module(f"{package}.runtime.command_line").parse_settings([])
    importlib.import_module("jaxlib.mlir.dialects.mhlo")
    gc.collect()
    gc.freeze()  # else every child looks for garbage among all that was imported
    print("ready", flush=True)
    with contextlib.suppress(EOFError):
        while request := pickle.load(sys.stdin.buffer):
            pid = request.get("wait")
            if pid is None:
                pid = os.fork()
                if pid == 0:
                    return child(**request)
                print(pid, flush=True)
            else:
                print(json.dumps(reap(pid, time.monotonic() + request["timeout"])), flush=True)


def reap(pid, deadline):
    """The exit code of a child, None if it is still running at the deadline."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def child(function, package, args, output, env, cwd):
    """Run a function of the tests to its end, and exit as its caller's interpreter would."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, other in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
        os.dup2(other, number)
    sys.stdin = io.StringIO()
    os.environ.update(env)
    os.chdir(cwd)
    answer = function(lambda name: importlib.import_module(f"{package}.{name}"), *args)
    if not isinstance(answer, int):
        Path(output + ".json").write_text(json.dumps(answer), encoding="utf-8")
        answer = 0
    sys.exit(answer)


class Run:
    """A child: its process id, its output and its end."""

    def __init__(self, server, pid, output):
        self.server, self.pid, self.output = server, pid, output

    @property
    def text(self):
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout=TIMEOUT):
        """The exit code."""
        code = self.server.ask({"wait": self.pid, "timeout": timeout})
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.server.ask({"wait": self.pid, "timeout": 10})
            pytest.fail(f"still running after {timeout} s:\n{self.text[-3000:]}")
        return code

    def ends_with(self, code):
        """Wait for this exit code; return what was printed."""
        found = self.wait()
        assert found == code, f"exit code {found}\n{self.text[-4000:]}"
        return self.text

    def answer(self):
        """What the function returned."""
        self.ends_with(0)
        return json.loads(Path(f"{self.output}.json").read_text(encoding="utf-8"))


class Server:
    def __init__(self, root, cache):
        foreign = ("JAX_", "XLA_", "TRAIN_", "LIBTPU_", "TPU_", "CUDA_")
        env = {name: x for name, x in os.environ.items() if not name.startswith(foreign)}
        env |= {
            "JAX_PLATFORMS": "cpu",
            # Quick to compile matters here, and quick to run does not.
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "HOME": str(root / "home"),
        }
        (root / "home").mkdir()
        self.root, self.count, self.environment = root, 0, env
        self.process = subprocess.Popen(
            [sys.executable, __file__, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        assert self.process.stdout.readline() == b"ready\n"

    def ask(self, request):
        pickle.dump(request, self.process.stdin)
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, function, *args, package=IMAGES, env=None, cwd=None):
        """Start a function of the tests, which gets `get` and these arguments, in a child."""
        self.count += 1
        output = self.root / f"output-{self.count}"
        args = [str(x) if isinstance(x, Path) else x for x in args]
        request = {"function": function, "args": args, "package": package, "output": str(output)}
        request |= {"env": env or {}, "cwd": str(cwd or self.root)}
        return Run(self, self.ask(request), output)

    def stop(self):
        self.process.stdin.close()
        self.process.wait(60)


def start_server(root, cache):
    """A server with the projects of all combinations, each named after it."""
    for (task, api), package in zip(COMBINATIONS, PACKAGES, strict=True):
        bake.generated(root, task, api, package)
    write_data(root)
    return Server(root, cache)


def write_data(root):
    """A small data set for each task."""
    draw = np.random.default_rng(0)
    labels = np.arange(160, dtype=np.int64) % 4
    images = draw.uniform(0, 0.5, (160, 8, 8, 1)).astype(np.float32)
    images[np.arange(160), labels, labels] = 1
    np.savez(root / "images.npz", images=images, labels=labels)
    words = draw.choice(["to be ", "or ", "not to be\n", "that is the question "], 1200)
    (root / "text.txt").write_text("".join(words), encoding="utf-8")


def flags(server, package, **changes):
    """Flags of a tiny run: 7 steps per epoch, or more for text."""
    settings = {"total_steps": 12, "batch_size": 16, "log_every": 2, "eval_every": 4}
    settings |= {"checkpoint_every": 2, "optimizer.learning_rate": 0.01}
    if "image" in package:
        settings |= {"data.path": server.root / "images.npz", "model.features": 8}
    else:
        settings |= {"data.path": server.root / "text.txt", "model.context": 16, "model.depth": 1}
        settings |= {"model.width": 16, "model.heads": 2}
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None:
            words += [flag, str(value)]
    return words


# ------------------------------------------------------------------------- What tests ask of runs


def steps_in(workdir):
    """Names of the directories of checkpoints, finished or not."""
    return sorted(path.name for path in (Path(workdir) / "checkpoints").iterdir())


def result_of(workdir):
    return json.loads((Path(workdir) / "result.json").read_text(encoding="utf-8"))


def snapshot(directory):
    """Every file below a directory."""
    return {p: p.read_bytes() for p in sorted(Path(directory).rglob("*")) if p.is_file()}


def changed(before, after):
    return sorted(path for path in before | after if before.get(path) != after.get(path))


def one_message(text, *words):
    """It is one error line that has these words, and no traceback."""
    assert text.count("error:") == 1 and "Traceback" not in text, text
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


def paused(server, run_flags, step, hooks=None, package=IMAGES, name="fifo"):
    """Start a run and wait until it pauses before this step."""
    server.count += 1
    fifo = server.root / f"{name}-{server.count}"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    hooks = {save_synchronously: None, **(hooks or {}), pause_before: [step, str(fifo)]}
    run = server.start(train_with, hooks, *run_flags, package=package)
    readable, _, _ = select.select([reader], [], [], TIMEOUT)
    os.close(reader)
    assert readable, run.text
    return run


def kill(run):
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL


def damage(file, kind):
    """Delete, truncate or empty a file, or flip one bit in it."""
    if kind == "delete":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if kind == "truncate":
        content = content[: len(content) // 2]
    elif kind == "empty":
        content = b""
    elif content:
        content[len(content) // 2] ^= 4
    file.write_bytes(content)


def two_processes():
    """What launch.sh would tell two processes that join each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        TWO | {"TRAIN_COORDINATOR": address, "TRAIN_PROCESS_ID": str(rank)} for rank in range(2)
    ]


def start_two(server, function, *args, package=IMAGES):
    return [server.start(function, *args, package=package, env=env) for env in two_processes()]


def end_with(processes, code):
    """Wait for this exit code of every process; return what each printed."""
    codes = [process.wait() for process in processes]
    texts = [process.text for process in processes]
    assert codes == [code] * len(codes), "\n====\n".join(text[-3000:] for text in texts)
    return texts


# ------------------------------------------------------------------------------- What children do


def train(get, *words):
    """What `python -m <package>.train` does."""
    get("runtime.stop").install_handlers()
    sys.argv = ["train.py", *words]
    return get("train").cli()


def evaluate(get, *words):
    """What `python -m <package>.evaluate` does."""
    sys.argv = ["evaluate.py", *words]
    return get("evaluate").cli()


def train_with(get, hooks, *words):
    """Train after these hooks: {hook: its argument}."""
    for hook, argument in hooks.items():
        hook(get, argument)
    return train(get, *words)


def train_in_turn(get, *runs):
    """Call main() for each list of flags, in one process; return the results."""
    parse = get("runtime.command_line").parse_settings
    return [get("train").main(parse(list(words))) for words in runs]


def try_settings(get, cases):
    """For each list of flags: the exit code, what was printed, and how much was compiled."""
    import jax

    compiled, answers = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            event.endswith("backend_compile_duration") and compiled.append(1)
        )
    )
    for words in cases:
        compiled.clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                code = train(get, *words)
            except BaseException as error:
                code = f"{type(error).__name__}: {error}"
        answers.append([code, printed.getvalue(), len(compiled)])
    return answers


def read_state(get, workdir, checkpoint="latest"):
    """A digest of every array of a checkpoint, by its path."""
    import jax

    *_, state = get("evaluate").load_run(Path(workdir), str(checkpoint))
    return digests(jax, state)


def digests(jax, state):
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


if __name__ == "__main__":
    sys.modules["children"] = sys.modules[__name__]
    serve(sys.argv[1])
