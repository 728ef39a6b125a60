"""The smoke test fails, and says what is wrong, when one line of the project is broken."""

import shutil
import subprocess
import sys

import bake
import pytest

pytestmark = pytest.mark.slow

RESTORED = (
    '        return state.replace(**restored["model"], **restored["training"]), '
    "Progress(**progress)"
)
LOST = RESTORED.replace(
    '**restored["training"])',
    """**restored["training"]
        | {"opt_state": jax.tree.map(lambda x: x * 0, restored["training"]["opt_state"])})""",
)
UPDATE = "    new = state.apply_gradients(grads=grads, model_state=model_state)"
INDICES = "        indices = train_indices(step, len(split), config.batch_size, config.seed)"

# What breaks: (file, the line, what it becomes, words of the message).
FAULTS = {
    "an update is dropped": (
        *(
            "train_step.py",
            UPDATE,
            UPDATE.replace("apply_gradients(grads=grads,", "replace(step=state.step + 1,"),
        ),
        "every parameter is updated",
    ),
    "the optimizer is not restored": (
        *("runtime/checkpoint.py", RESTORED, LOST),
        "everything comes back from a checkpoint: ['first.opt_state",
    ),
    "one dropout key serves every step": (
        "train_step.py",
        "    key = jax.random.fold_in(jax.random.key(config.seed), state.step)",
        "    key = jax.random.key(config.seed)",
        "dropout differs between steps",
    ),
    "batch statistics are dropped": (
        *("train_step.py", UPDATE, UPDATE.replace(", model_state=model_state", "")),
        "batch statistics move",
    ),
    "the same batch is fed again": (
        *("batches.py", INDICES, INDICES.replace("(step,", "(0,")),
        "every row comes once per epoch",
    ),
    "the data restarts at row 0 on resume": (
        "train.py",
        "    stream = batches.train_batches(dataset.train, config, sharding, step)",
        "    stream = batches.train_batches(dataset.train, config, sharding, 0)",
        "began with other rows at step",
    ),
    "padded rows count in an evaluation": (
        "batches.py",
        '        batch["mask"][places >= count] = 0',
        "        pass",
        "rows are tested once each",
    ),
    "the average is not updated": (
        *(
            "train_step.py",
            "        new = new.replace(ema=update_average(state.ema, new.variables, decay))",
            "        pass",
            "the average moves",
        ),
    ),
    "two devices are fed other rows": (
        *(
            "batches.py",
            INDICES,
            INDICES.replace("config.seed", "config.seed + jax.device_count()"),
        ),
        "two devices are fed other rows",
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return bake.generated(tmp_path_factory.mktemp("faults"))


# Faults that one run can have at once, because no line and no message of one is that of another.
TOGETHER = [
    ["an update is dropped", "padded rows count in an evaluation"],
    [
        "batch statistics are dropped",
        "one dropout key serves every step",
        "two devices are fed other rows",
    ],
    ["the average is not updated", "the same batch is fed again"],
    ["the optimizer is not restored", "the data restarts at row 0 on resume"],
]


def test_every_fault_is_made_once():
    assert sorted(fault for faults in TOGETHER for fault in faults) == sorted(FAULTS)


@pytest.mark.parametrize("faults", TOGETHER, ids=" and ".join)
def test_every_broken_line_is_found(project, tmp_path, faults):
    copy = shutil.copytree(project, tmp_path / "project")
    for fault in faults:
        name, line, broken, _ = FAULTS[fault]
        file = copy / "my_flax_project" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(line + "\n") == 1, "the line to break is not there any more"
        file.write_text(text.replace(line, broken), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "tests/smoke.py"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stdout, "it must not run into an error of another kind"
    for fault in faults:
        *_, words = FAULTS[fault]
        assert words in result.stdout, fault
