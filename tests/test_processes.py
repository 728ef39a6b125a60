"""Several processes train one model: the same batches, one result, one cause when they cannot.

Each process is a child of children.py; what launch.sh would tell it is in its environment.
"""

import hashlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from children import (
    IMAGES,
    PACKAGES,
    TEXT,
    TEXT_NNX,
    flags,
    paused,
    read_state,
    train_with,
)
from run_hooks import (
    before_step,
    die_before,
    no_preemption_service,
    raise_before,
    save_synchronously,
    use_compile_step,
    use_devices,
)

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(server, count, words, hooks=None, package=IMAGES, words_of=None, hooks_of=None):
    """Start the processes of one run; `words_of` and `hooks_of`: what one rank has of its own."""
    address = f"127.0.0.1:{free_port()}"
    ranks = []
    for rank in range(count):
        told = {"TRAIN_COORDINATOR": address, "TRAIN_NUM_PROCESSES": str(count)}
        told |= {"TRAIN_PROCESS_ID": str(rank), "TRAIN_COORDINATOR_TIMEOUT": "60"}
        own = {**(hooks or {}), **(hooks_of or {}).get(rank, {})}
        more = (words_of or {}).get(rank, [])
        env = told if count > 1 else None
        ranks.append(server.start(train_with, own, *words, *more, package=package, env=env))
    return ranks


def end(ranks, code):
    """Wait for this exit code of every rank; return what each printed."""
    codes = [rank.wait() for rank in ranks]
    texts = [rank.text for rank in ranks]
    assert codes == [code] * len(ranks), "\n====\n".join(text[-3000:] for text in texts)
    return texts


def note_batches(get, file):
    """Hooks: write a digest of every global training batch, put together again, to this file."""
    import jax
    from jax.experimental import multihost_utils

    batches = get("batches")
    original = batches.train_batches

    def noting(*args):
        for batch in original(*args):
            whole = batch
            if jax.process_count() > 1:
                whole = multihost_utils.process_allgather(batch, tiled=True)
            if jax.process_index() == 0:
                digest = hashlib.sha256()
                for name in sorted(whole):
                    digest.update(np.asarray(whole[name]).tobytes())
                with open(file, "a") as lines:
                    print(digest.hexdigest(), file=lines)
            yield batch

    batches.train_batches = noting


def note_losses(get, file):
    """Write what goes to TensorBoard, in full, to this file."""
    recorder = get("runtime.recorder").Recorder
    write = recorder.write

    def noting(self, kind, step, metrics):
        write(self, kind, step, metrics)
        if self.events:
            with open(file, "a") as lines:
                print(json.dumps([kind, step, metrics]), file=lines)

    recorder.write = noting


def read_params(get, workdir):
    """The newest parameters, as nested lists."""
    import jax

    *_, state = get("evaluate").load_run(Path(workdir), "latest")
    return [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(state.params)]


def params_of(server, workdir, package):
    leaves = server.start(read_params, workdir, package=package).answer()
    return np.concatenate([np.asarray(leaf) for leaf in leaves])


def lines(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def losses(file, kind="train"):
    return [metrics["loss"] for which, _, metrics in lines(file) if which == kind]


def noted(folder):
    return {note_batches: str(folder / "batches"), note_losses: str(folder / "metrics")}


SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.05, "total_steps": 20}
SGD |= {"log_every": 1, "eval_every": 10, "checkpoint_every": 10}


# --------------------------------------------------------------------------------------- The result


@pytest.mark.parametrize(
    "package", PACKAGES if os.environ.get("ALL_COMBINATIONS") else PACKAGES[::3]
)
def test_processes_compute_what_one_does(server, tmp_path, package):
    seen = {}
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        words = flags(server, package, workdir=folder / "run", **SGD)
        texts = end(start(server, count, words, noted(folder), package), 0)
        seen[count] = (
            (folder / "batches").read_text().split(),
            losses(folder / "metrics"),
            params_of(server, folder / "run", package),
            json.loads((folder / "run/result.json").read_text()),
        )
        assert all("step 20/20" not in text for text in texts[1:])  # one process speaks
    batches, loss, params, result = seen[1]
    assert len(set(batches)) > 6 and len(batches) == len(loss) == 20
    for count in (2, 4):
        assert seen[count][0] == batches
        np.testing.assert_allclose(seen[count][1], loss, rtol=0, atol=1e-5)
        np.testing.assert_allclose(seen[count][2], params, rtol=0, atol=1e-5)
        assert seen[count][3]["processes"] == seen[count][3]["devices"] == count
        tested = seen[count][3]["eval"]
        assert tested["num_examples"] == result["eval"]["num_examples"]
        assert tested["loss"] == pytest.approx(result["eval"]["loss"], abs=1e-5)


@pytest.mark.parametrize("package", [IMAGES, TEXT_NNX])
def test_a_run_goes_on_with_another_number_of_processes_and_layout(server, tmp_path, package):
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    more = {"ema_decay": 0.9} | SGD
    if package == TEXT_NNX:  # large enough to be split
        more |= {"model.width": 128}
    for folder in (straight, moved):
        folder.mkdir()
    words = flags(server, package, workdir=straight / "run", **more)
    end(start(server, 1, words, noted(straight), package), 0)
    words = flags(server, package, workdir=moved / "run", **more)
    stages = [(4, "4", "6"), (2, "1", "11"), (1, "1", "15"), (2, "2", None)]
    for count, fsdp, until in stages:
        stage = [*words, "--mesh.fsdp", fsdp, *(["--stop-after-step", until] if until else [])]
        texts = end(start(server, count, stage, noted(moved), package), 75 if until else 0)
        if count < 4:
            assert "not bit for bit" in texts[0]
    assert (moved / "batches").read_text() == (straight / "batches").read_text()
    np.testing.assert_allclose(
        losses(moved / "metrics"), losses(straight / "metrics"), rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        params_of(server, moved / "run", package),
        params_of(server, straight / "run", package),
        rtol=0,
        atol=1e-5,
    )


def test_everything_on_at_once_with_sharded_parameters(server, tmp_path):
    """Evaluation, best, saving, the test, --init-from and evaluate.py, on every process."""
    changes = {"ema_decay": 0.9, "accumulation_steps": 2, "precision": "float16"}
    changes |= {"early_stopping_patience": 2, "mesh.fsdp": 2, "model.width": 128}
    words = flags(server, TEXT, workdir=tmp_path / "run", **changes)
    texts = end(start(server, 2, words, package=TEXT), 0)
    assert "test" in texts[0]
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["best_step"] and result["eval"]["num_tokens"] > 0
    digests = server.start(read_state, tmp_path / "run", "best", package=TEXT).answer()
    assert digests
    words = flags(server, TEXT, workdir=tmp_path / "next", **changes, init_from=tmp_path / "run")
    end(start(server, 2, words, package=TEXT), 0)
    assert len(list((tmp_path / "run/tb").glob("*tfevents*"))) == 1  # one process writes
    logged = (tmp_path / "run/train.log").read_text()
    assert len(re.findall(r" eval  step 4/", logged)) == 1


@pytest.mark.parametrize("package", [TEXT, TEXT_NNX])
def test_a_device_holds_its_share_of_parameters_moments_and_average(server, package):
    words = flags(server, package, **{"model.width": 256, "ema_decay": 0.9, "batch_size": 8})
    whole = server.start(bytes_per_device, 1, *words, package=package).answer()
    split = server.start(bytes_per_device, 8, *words, package=package).answer()
    for name in ("parameters", "moments", "average"):
        assert whole[name] / split[name] == pytest.approx(8, rel=0.05), name


def bytes_per_device(get, devices, *words):
    """The most bytes that any of these devices holds, by what they are."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    config = get("runtime.command_line").parse_settings([*words, "--mesh.fsdp", str(devices)])
    dataset = get("data").load(config)
    grid = get("mesh").create_mesh(config.mesh, config.batch_size, 1)
    create, _ = get("train_state").plan_train_state(config, dataset, grid)
    state = create()

    def most(tree):
        held = dict.fromkeys(jax.devices(), 0)
        for array in jax.tree.leaves(tree):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        return max(held.values())

    parts = {"parameters": state.params, "moments": state.opt_state, "average": state.ema}
    return {name: most(tree) for name, tree in parts.items()}


# -------------------------------------------------------------------------------------------- Stops


LONG = {"total_steps": 100, "log_every": 20, "eval_every": 10, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """The state after two processes that nothing stopped."""
    run = tmp_path_factory.mktemp("straight") / "run"
    end(start(server, 2, flags(server, IMAGES, workdir=run, **LONG)), 0)
    return server.start(read_state, run).answer()


@pytest.mark.parametrize(
    ("name", "moment"),
    [("SIGHUP", "compilation"), ("SIGTERM", "evaluation"), ("SIGUSR2", "step")],
)
def test_a_signal_to_one_process_stops_all_at_one_step(server, tmp_path, straight, name, moment):
    words = flags(server, IMAGES, workdir=tmp_path / "run", **LONG)
    texts = end(start(server, 2, words, hooks_of={1: {signal_self: [moment, name]}}), 75)
    (step,) = re.findall(r"preempted at step (\d+)", texts[0])
    result = json.loads((tmp_path / "run/result.json").read_text())
    expected = ("preempted", "stopped by a signal to one of the processes")
    assert (result["status"], result["reason"]) == expected
    texts = end(start(server, 2, words), 0)
    assert step == "0" or f"resumed at step {step}" in texts[0]
    assert server.start(read_state, tmp_path / "run").answer() == straight


def signal_self(get, arguments):
    """Send this process a signal at the moment: a step, in an evaluation, while compiling."""
    moment, name = arguments

    def act():
        os.kill(os.getpid(), signal.Signals[name])

    if moment == "step":
        before_step(get, 5, act)
        return
    train, done = get("train"), []

    def after_signal(function):
        def watched(*args):
            if not done:
                done.append(act())
            return function(*args)

        return watched

    if moment == "evaluation":
        train.evaluate = after_signal(train.evaluate)
    else:
        use_compile_step(get, after_signal(get("train_step").compile_train_step))


def test_the_service_that_agrees_on_a_step_is_on_whatever_the_environment_says(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    hooks = {no_preemption_service: None, note_batches: str(tmp_path / "batches")}
    end(start(server, 2, words, hooks), 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_process_is_killed_the_others_end(server, tmp_path, rank):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    began = time.monotonic()
    hooks = {save_synchronously: None}
    ranks = start(server, 2, words, hooks, hooks_of={rank: {die_before: 5}})
    assert ranks[rank].wait() == -signal.SIGKILL
    assert ranks[1 - rank].wait() not in (0, 75)
    assert time.monotonic() - began < 60  # JAX alone: 100 s
    texts = end(start(server, 2, words), 0)
    assert "resumed at step 4" in texts[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stuck_process_ends_the_run_with_the_stacks_of_all(server, tmp_path, rank):
    words = flags(server, IMAGES, workdir=tmp_path / "run", stall_timeout=6)
    ranks = start(server, 2, words, hooks_of={rank: {sleep_before: 5}})
    codes = [each.wait() for each in ranks]
    assert codes[rank] == 1
    assert codes[1 - rank] in (1, 134, -signal.SIGABRT)
    for each in ranks:
        assert "most recent call first" in each.text or "Traceback" in each.text, each.text
    assert "in sleep_for_ever" in ranks[rank].text


def sleep_for_ever():
    time.sleep(1e6)


def sleep_before(get, step):
    before_step(get, step, sleep_for_ever)


# -------------------------------------------------------------------------------- Before the start


def test_one_process_stays_alone_whatever_is_left_in_the_environment(server, tmp_path):
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "1"}
    slurm |= {"LOCALID": "0", "JOB_NODELIST": "n[1-2]", "NNODES": "2"}
    env = {f"SLURM_{name}": value for name, value in slurm.items()}
    env |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    env |= {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    server.start(train_with, {}, *words, env=env).ends_with(0)
    assert json.loads((tmp_path / "run/result.json").read_text())["processes"] == 1


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_hardware_that_is_not_there_is_named_with_the_way_out(server, tmp_path, platform):
    words = flags(server, IMAGES, workdir=tmp_path / "run", platform=platform)
    text = server.start(train_with, {}, *words).ends_with(2)
    assert f"error: --platform {platform}: " in text and "extra" in text
    assert "Traceback" not in text and not (tmp_path / "run").exists()


def refused(server, words, *expected, **options):
    """Both processes exit with 2 and one message that has these words; nothing is trained."""
    texts = end(start(server, 2, words, **options), 2)
    for text in texts:
        message = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(message) == 1 and "Traceback" not in text, text
        for word in expected:
            assert word in message[0], message[0]


def test_a_run_directory_in_use_is_refused_by_all(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run", mesh__data=-1)
    run = paused(server, words, 3)
    refused(server, words, f"process {run.pid} on", "training there since")
    os.kill(run.pid, signal.SIGTERM)
    run.ends_with(75)


def test_processes_with_other_settings_are_named(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    other = {1: ["--optimizer.warmup-steps", "3", "--seed", "1"]}
    expected = ["process 1 on", "--optimizer.warmup-steps 3", "--seed 1", "process 0 on"]
    refused(server, words, *expected, words_of=other)
    other = {1: ["--workdir", tmp_path / "other"]}
    refused(server, words, "process 1 on", "--workdir", words_of=other)
    assert not (tmp_path / "run").exists() and not (tmp_path / "other").exists()


def other_flax(get, _):
    facts = get("runtime.manifest")
    found = facts.metadata.version

    class Metadata:
        @staticmethod
        def version(name):
            return "9.9.9" if name == "flax" else found(name)

    facts.metadata = Metadata


def other_data(get, _):
    data = get("data")
    load = data.load
    data.load = lambda config: load(config)._replace(fingerprint="another")


def other_xla_flags(get, _):
    os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX2"


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ({other_flax: None}, ["process 1 on", "versions.flax 9.9.9"]),
        ({other_data: None}, ["process 1 on", "data.fingerprint"]),
        ({use_devices: 2}, ["process 0 has 1", "process 1 has 2"]),
        ({other_xla_flags: None}, ["process 1 on", "xla_flags", "--xla_cpu_max_isa"]),
    ],
)
def test_processes_in_other_circumstances_are_named(server, tmp_path, hook, expected):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    refused(server, words, *expected, hooks_of={1: hook})
    assert not (tmp_path / "run").exists()


def test_a_problem_of_one_process_is_told_by_all(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    hook = {1: {lose_data: None}}
    refused(server, words, "process 1 on", "images.npz", hooks_of=hook)
    assert not (tmp_path / "run").exists()


def lose_data(get, _):
    data, error = get("data"), get("config").SettingError

    def fail(config):
        raise error(f"--data.path {config.data.path}: no such file")

    data.load = fail


def test_a_run_directory_that_is_not_shared_is_noticed(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir(parents=True)  # as an earlier run on this host left it
    hook = {1: {hide_from_this_process: str(tmp_path / "run")}}
    refused(server, words, "process 1 on", "share", hooks_of=hook)
    assert os.listdir(tmp_path / "run") == ["checkpoints"]


def hide_from_this_process(get, directory):
    """What another host sees there: a directory of the same name without what process 0 wrote."""
    workdir, exists = get("runtime.workdir"), os.path.exists

    class Shadow:
        def __init__(self, original, **replaced):
            self.__dict__.update(original=original, **replaced)

        def __getattr__(self, name):
            return getattr(self.original, name)

    def sees(path):
        return exists(path) and not str(path).startswith(f"{directory}/.shared-")

    workdir.os = Shadow(os, path=Shadow(os.path, exists=sees))


def test_a_port_in_use_is_named(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        env = {"TRAIN_COORDINATOR": address, "TRAIN_NUM_PROCESSES": "2", "TRAIN_PROCESS_ID": "0"}
        text = server.start(train_with, {}, *words, env=env).ends_with(2)
    assert address in text and "TRAIN_PORT" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("rank", "address", "reason"), [(1, "127.0.0.1:1", "refused"), (0, "nowhere.invalid:80", "")]
)
def test_an_unreachable_coordinator_is_named(server, tmp_path, rank, address, reason):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    env = {"TRAIN_COORDINATOR": address, "TRAIN_NUM_PROCESSES": "2"}
    env |= {"TRAIN_PROCESS_ID": str(rank), "TRAIN_COORDINATOR_TIMEOUT": "1"}
    text = server.start(train_with, {}, *words, env=env).ends_with(1)
    (message,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert f"process {rank} on " in message and address in message and reason in message
    assert "Traceback" not in text and not (tmp_path / "run").exists()


@pytest.mark.parametrize("others_come", [True, False])
def test_a_stop_request_while_the_others_are_not_there(server, tmp_path, others_come):
    """It joins them first, if they come: they would wait for it."""
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    env = {"TRAIN_COORDINATOR": f"127.0.0.1:{free_port()}", "TRAIN_NUM_PROCESSES": "2"}
    env |= {"TRAIN_COORDINATOR_TIMEOUT": "30" if others_come else "3"}
    hook = {signal_while_waiting: None}
    ranks = [server.start(train_with, hook, *words, env=env | {"TRAIN_PROCESS_ID": "1"})]
    if others_come:
        while not ranks[0].output.exists() or "sent" not in ranks[0].text:
            time.sleep(0.05)
        ranks.append(server.start(train_with, {}, *words, env=env | {"TRAIN_PROCESS_ID": "0"}))
    end(ranks, 75)


def signal_while_waiting(get, _):
    """SIGTERM to this process when it finds nobody at the coordinator's address."""
    processes = get("runtime.processes")
    sleep = time.sleep

    class Time:
        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds):
            if get("runtime.stop").requested is None:
                os.kill(os.getpid(), signal.SIGTERM)
                print("sent", flush=True)
            sleep(seconds)

    processes.time = Time


def test_a_computation_at_import_is_explained(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    env = {"TRAIN_COORDINATOR": f"127.0.0.1:{free_port()}", "TRAIN_NUM_PROCESSES": "2"}
    env |= {"TRAIN_PROCESS_ID": "0"}
    hook = {compute_at_import: None}
    text = server.start(train_with, hook, *words, env=env).ends_with(1)
    assert "outside of any function" in text


def compute_at_import(get, _):
    import jax.numpy as jnp

    get("model").OFFSET = jnp.ones(3)


def test_an_exception_of_one_process_ends_all_soon(server, tmp_path):
    words = flags(server, IMAGES, workdir=tmp_path / "run")
    began = time.monotonic()
    ranks = start(server, 2, words, hooks_of={1: {raise_before: 5}})
    assert ranks[1].wait() == 1
    assert "RuntimeError: boom" in ranks[1].text
    assert ranks[0].wait() not in (0, 2, 75)
    assert time.monotonic() - began < 90  # JAX alone: 5 minutes
