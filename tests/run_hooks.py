"""What is done to a run, in its child, before it starts: the hooks of children.train_with.

Each is a function of (get, argument): `get` imports a module of the generated package by its name.
A hook that only one file of tests needs is in that file.
"""

import os
import signal
import time

import numpy as np

# ------------------------------------------------------------------------------------------ A step


def before_step(get, step, act):
    """Call act() before this step's batch is made."""
    batches = get("batches")
    original = batches.train_batches

    def watched(split, config, sharding, start):
        for number, batch in enumerate(original(split, config, sharding, start), start):
            if number == step:
                act()
            yield batch

    batches.train_batches = watched


def raise_before(get, step):
    def act():
        raise RuntimeError("boom")

    before_step(get, step, act)


def die_before(get, step):
    before_step(get, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def pause_before(get, arguments):
    """Tell the test through a FIFO that this step is reached; go on after a signal."""
    step, fifo = arguments

    def act():
        with open(fifo, "w") as file:
            file.write("here")
        while get("runtime.stop").requested is None:
            time.sleep(0.01)

    before_step(get, step, act)


def use_compile_step(get, compile_step):
    """Let cli(), which has no such parameter, call main(config, compile_step)."""
    module, main = get("train"), get("train").main
    module.main = lambda config: main(config, compile_step)


def around_step(get, wrap):
    """A compile_step for main(): what it compiles is wrap(step) in place of the step."""
    compile_train_step = get("train_step").compile_train_step

    def compile_wrapped(*args):
        step, *rest = compile_train_step(*args)
        return wrap(step), *rest

    return compile_wrapped


# ------------------------------------------------------------------------------ Batches and scores


def poison(get, steps, pixels=True):
    """Give these steps, from the first up to the second, a batch whose loss is not finite."""
    batches = get("batches")
    place, current = batches.place, {}
    original = batches.train_indices

    def watched(step, *args):
        current["bad"] = step in range(*steps)
        return original(step, *args)

    def poisoned(batch, *args):
        if current.pop("bad", False):
            batch["mask"][0] = np.inf
            if pixels and "image" in batch:
                batch["image"] = np.full_like(batch["image"], np.nan)
        return place(batch, *args)

    batches.train_indices, batches.place = watched, poisoned


def poison_weights(get, steps):
    """The same by the weights of the rows only, so that the NaN is first made by the step."""
    poison(get, steps, pixels=False)


def score_by_step(get, _):
    """Evaluations get worse and worse: the first one is the best."""
    module, task = get("train"), get("task")
    original = module.evaluate

    def worse(score_batch, state, *rest):
        sign = 1 if task.HIGHER_IS_BETTER else -1
        return original(score_batch, state, *rest) | {task.BEST_METRIC: -sign * float(state.step)}

    module.evaluate = worse


# -------------------------------------------------------------------------- Saving and the machine


def save_synchronously(get, _):
    """So that a test knows which checkpoints there are when it kills."""
    cls = get("runtime.checkpoint").Checkpoints
    save = cls.save

    def save_and_wait(self, *args):
        save(self, *args)
        self.wait()

    cls.save = save_and_wait


def no_preemption_service(get, _):
    import jax

    jax.config.update("jax_enable_preemption_service", False)


def use_devices(get, count):
    import jax

    jax.config.update("jax_num_cpu_devices", count)


def become_nobody(get, _):
    """Lose the rights of root, who may read and write everywhere."""
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
