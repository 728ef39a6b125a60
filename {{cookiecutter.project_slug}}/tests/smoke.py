"""The smoke test: trains for a few steps on the CPU and checks what must hold on every machine.

Run it with `make smoke`. It leaves nothing behind: the runs, of tiny settings, write to a temporary
directory. One process imports everything, once, and forks a child for each run.
"""

import collections
import hashlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = next(ROOT.glob("*/train.py")).parent.name
TIMEOUT = 300  # seconds for all runs together

ROWS, BATCH, STOP, STEPS = 80, 16, 7, 15  # 5 steps per epoch: the stop is within the second


def main() -> int:
    """Make the runs, check them and print the outcome; return the exit code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smoke-") as scratch:
        prepare_environment(scratch)
        # Python warns of threads that a child would miss; those of the imports are idle ones.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        for module in ("train", "evaluate"):
            importlib.import_module(f"{PACKAGE}.{module}")
        print(f"  {time.monotonic() - began:5.1f} s  packages imported", flush=True)
        problems = make_runs(Path(scratch), began) or check(Path(scratch))
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"smoke test {'FAILED' if problems else 'passed'} in {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


def prepare_environment(scratch: str) -> None:
    """Run on the CPU, whatever is set for real runs, with a compilation cache of its own."""
    foreign = ("JAX_", "XLA_", "TRAIN_", "LIBTPU_", "TPU_", "CUDA_")
    for name in [name for name in os.environ if name.startswith(foreign)]:
        del os.environ[name]
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_COMPILATION_CACHE_DIR": f"{scratch}/cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Quick to compile matters here, and quick to run does not.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = True


def make_runs(scratch: Path, began: float) -> list[str]:
    """Two children at a time: the mesh beside the others, which share what they compile."""
    queues = [
        [
            ("stopped", {"workdir": "stopped", "stop_after_step": STOP}, 1),
            ("resumed", {"workdir": "stopped"}, 1),
            ("straight", {"workdir": "straight"}, 1),
        ],
        [("mesh", {"workdir": "mesh", "fsdp": 2}, 2)],
    ]
    running: dict[int, tuple[str, list]] = {}

    def start(queue):
        if queue:
            name, settings, devices = queue.pop(0)
            pid = os.fork()
            if pid == 0:
                run_child(scratch, name, settings, devices)
            running[pid] = (name, queue)

    for queue in queues:
        start(queue)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() - began > TIMEOUT:
                return [kill(running, f"not finished after {TIMEOUT} s", scratch)]
            time.sleep(0.02)
            continue
        name, queue = running.pop(pid)
        if status != 0:
            code = os.waitstatus_to_exitcode(status)
            running[pid] = (name, queue)
            return [kill(running, f"the run '{name}' ended with code {code}", scratch, name)]
        print(f"  {time.monotonic() - began:5.1f} s  run '{name}' done", flush=True)
        start(queue)
    return []


def kill(running: dict, problem: str, scratch: Path, culprit: str | None = None) -> str:
    """End the children and say what the one to blame, or each, printed last."""
    text = problem
    for pid, (name, _) in running.items():
        if name != culprit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if culprit in (name, None):
            lines = (scratch / f"{name}.log").read_text(encoding="utf-8").splitlines()
            text += f"\n--- last lines of '{name}':\n" + "\n".join(lines[-30:])
    return text


def run_child(scratch: Path, name: str, settings: dict, devices: int) -> None:
    """In a forked child: train with everything watched, write down what was seen, exit."""
    log = os.open(scratch / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        import jax

        jax.config.update("jax_num_cpu_devices", devices)
        watch(scratch / name, settings)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


class FewRows:
    """The first rows of a split, so that a few steps see all of them. A stream is read for them."""

    def __init__(self, split, count):
        self.split, self.count = split, count
        self.read = {}
        if hasattr(split, "batches"):
            import numpy as np

            parts = []
            stream = split.batches(0)
            while sum(len(part["mask"]) for part in parts) < count:
                parts.append(next(stream))
            self.read = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def __len__(self):
        return self.count

    def rows(self, indices):
        if self.read:
            return {name: x[indices] for name, x in self.read.items()}
        return self.split.rows(indices)


def watch(report: Path, settings: dict) -> None:
    """Train, and write what each step saw and the states at both ends to files <report>.*."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    names = ("config", "data", "model", "train")
    modules: list[Any] = [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    config, data, model, train = modules
    seen: dict = {"losses": [], "rows": [], "compiled": 0}
    states: dict = {}

    def row_digests(batch):
        leaves = [np.asarray(batch[name]) for name in sorted(batch)]
        rows = zip(*leaves, strict=True)
        return [hashlib.md5(b"".join(x.tobytes() for x in row)).hexdigest() for row in rows]

    def count_compilations(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            seen["compiled"] += kwargs.get("fun_name") == "jit(train_step)"

    load, compile_train_step = data.load, train.compile_train_step

    def load_few(config):
        dataset = load(config)
        few = {"train": ROWS, "validation": BATCH + 4, "test": BATCH + 4}
        splits = {name: FewRows(getattr(dataset, name), count) for name, count in few.items()}
        seen["dataset"] = row_digests(splits["train"].rows(np.arange(ROWS)))
        return dataset._replace(**splits)

    def compile_watched(*args):
        step, fresh_totals, costs = compile_train_step(*args)

        def probe_dropout(state, batch):
            """The losses of one batch at this step, at this step again and at the next."""
            for offset in (0, 0, 1):
                copy = jax.tree.map(jnp.copy, state)
                copy = copy.replace(step=copy.step + offset)
                _, metrics, _ = step(copy, fresh_totals(), batch)
                seen.setdefault("dropout", []).append(float(metrics["loss"][0]))

        def watched(state, totals, batch):
            if not states:
                states["first"] = jax.device_get(state)
                probe_dropout(state, batch)
            state, metrics, status = step(state, fresh_totals(), batch)
            seen["losses"].append(float(metrics["loss"][0] / metrics["loss"][1]))
            seen["rows"].append(row_digests(batch))
            states["last"] = state
            return state, jax.tree.map(jnp.add, totals, metrics), status

        return watched, fresh_totals, costs

    data.load = load_few
    jax.monitoring.register_event_duration_secs_listener(count_compilations)
    fsdp = settings.pop("fsdp", 1)
    settings["workdir"] = str(report.parent / "runs" / settings["workdir"])
    seen["result"] = train.main(
        config.Config(
            total_steps=STEPS,
            batch_size=BATCH,
            eval_every=5,
            log_every=4,
            checkpoint_every=0,
            ema_decay=0.9,
            optimizer=config.OptimizerConfig(learning_rate=0.01),
            mesh=config.MeshConfig(fsdp=fsdp),
            model=model.TINY,
            **settings,
        ),
        compile_watched,
    )
    seen["has_dropout"] = getattr(model.TINY, "dropout_rate", 0) > 0
    arrays = {}
    for moment, state in states.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state)):
            arrays[f"{moment}{jax.tree_util.keystr(path)}"] = leaf
    np.savez(f"{report}.npz", **arrays)
    Path(f"{report}.json").write_text(json.dumps(seen), encoding="utf-8")


def check(scratch: Path) -> list[str]:
    """What is wrong with the runs, most basic first."""
    import numpy as np

    runs, states = {}, {}
    for name in ("stopped", "resumed", "straight", "mesh"):
        runs[name] = json.loads((scratch / f"{name}.json").read_text(encoding="utf-8"))
        with np.load(scratch / f"{name}.npz") as file:
            states[name] = dict(file)
    straight, resumed, mesh = (runs[name] for name in ("straight", "resumed", "mesh"))
    problems = []

    def require(holds, problem):
        if not holds:
            problems.append(problem)

    def unchanged(prefix):
        state = states["straight"]
        names = [name for name in state if name.startswith(f"first.{prefix}")]
        return [n[6:] for n in names if np.array_equal(state[n], state["last" + n[5:]])]

    # Rows
    epoch = [row for rows in straight["rows"][: ROWS // BATCH] for row in rows]
    wrong = collections.Counter(straight["dataset"])
    wrong.subtract(epoch)
    repeated, missing = sum(n < 0 for n in wrong.values()), sum(n > 0 for n in wrong.values())
    require(
        not repeated and not missing,
        f"every row comes once per epoch: {repeated} rows came too often, {missing} not at all",
    )
    second = straight["rows"][ROWS // BATCH : 2 * ROWS // BATCH]
    require(second[0] != straight["rows"][0], "the second epoch has the same order as the first")
    require(mesh["rows"] == straight["rows"], "two devices are fed other rows than one")

    # Learning
    first, last = np.mean(straight["losses"][:5]), np.mean(straight["losses"][-5:])
    require(
        last < first, f"the loss falls: it went from {first:.4f} to {last:.4f} in {STEPS} steps"
    )
    require(
        not unchanged("params"), f"every parameter is updated: {unchanged('params')[:3]} never were"
    )
    require(
        not unchanged("model_state"),
        f"batch statistics move: {unchanged('model_state')[:3]} stayed as they were created",
    )
    require(not unchanged("ema"), f"the average moves: {unchanged('ema')[:3]} never did")
    same, again, other = straight["dropout"]
    require(same == again, "a step on the same state and batch gives the same loss twice")
    require(
        not straight["has_dropout"] or same != other,
        "dropout differs between steps: two steps drew the same mask",
    )
    for name, run in runs.items():
        count = run["compiled"]
        require(count == 1, f"the step compiles once: {count} times in the run '{name}'")

    # Stop and resume
    require(
        runs["stopped"]["result"]["status"] == "preempted",
        f"--stop-after-step stops: the run was {runs['stopped']['result']['status']}",
    )
    require(
        runs["stopped"]["rows"] + resumed["rows"] == straight["rows"],
        f"a resumed run reads the rows that come next: it began with other rows at step {STOP}",
    )
    a, b = states["resumed"], states["straight"]
    differing = [n[5:] for n in b if n.startswith("last") and a[n].tobytes() != b[n].tobytes()]
    require(
        not differing,
        f"a resumed run ends bit for bit as an uninterrupted one: {len(differing)} arrays differ, "
        f"the first are {differing[:3]}",
    )
    first = states["resumed"]
    lost = [n for n in first if n.startswith("first") and not_restored(n, first, states["stopped"])]
    require(not lost, f"everything comes back from a checkpoint: {lost[:3]} did not")
    for key in ("eval", "best_step", "best_metric"):
        x, y = resumed["result"][key], straight["result"][key]
        require(x == y, f"{key} is the same with and without a stop: {x} against {y}")

    count = straight["result"]["eval"]["num_examples"]
    require(count == BATCH + 4, f"{BATCH + 4} rows are tested once each: {count} were counted")

    # Several devices
    require(
        np.allclose(mesh["losses"][:3], straight["losses"][:3], rtol=1e-3),
        f"two devices compute what one does: losses {mesh['losses'][:3]} "
        f"against {straight['losses'][:3]}",
    )
    return problems


def not_restored(name: str, resumed: dict, stopped: dict) -> bool:
    return resumed[name].tobytes() != stopped["last" + name[5:]].tobytes()


if __name__ == "__main__":
    sys.exit(main())
