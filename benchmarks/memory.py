"""Memory over a long run of a tiny model: python benchmarks/memory.py [task] [api] [steps]

Prints a table of resident memory and the number of live arrays, every tenth of the run: after the
first tenth both should stay where they are. Evaluations, checkpoints and log lines are all in it.
The Python of `make setup` has what it needs.
"""

import gc
import importlib
import os
import sys
import tempfile
from pathlib import Path

import jax
from projects import importable


def resident() -> float:
    """Resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(task: str, api: str, steps: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        package = importable(out, task, api)
        sys.path.append(f"{out}/{package}/tests")
        from smoke import FewRows

        names = ("config", "data", "model", "train")
        config, data, model, train = (importlib.import_module(f"{package}.{n}") for n in names)
        load, compile_train_step = data.load, train.compile_train_step

        def load_few(settings):
            """Held-out data of a few batches: the standard library's has thousands."""
            dataset = load(settings)
            few = {name: FewRows(getattr(dataset, name), 64) for name in ("validation", "test")}
            return dataset._replace(**few)

        def compile_watched(*args):
            step, *rest = compile_train_step(*args)
            calls = iter(range(steps))

            def watched(*arguments):
                number = next(calls)
                if number % (steps // 10) == 0:
                    show(number)
                return step(*arguments)

            return watched, *rest

        def show(number):
            gc.collect()
            print(f"{number:8d} {resident():12.1f} {len(jax.live_arrays()):12d}", flush=True)

        data.load = load_few
        print(f"{task}, {api}\n{'step':>8} {'resident MB':>12} {'live arrays':>12}")
        settings = config.Config(
            workdir=f"{out}/run",
            total_steps=steps,
            log_every=10,
            eval_every=100,
            checkpoint_every=50,
            quiet=True,
            model=model.TINY,
        )
        train.main(settings, compile_watched)
        show(steps)


if __name__ == "__main__":
    arguments = dict(enumerate(sys.argv[1:]))
    task = arguments.get(0, "image_classification")
    main(task, arguments.get(1, "linen"), int(arguments.get(2, 5000)))
