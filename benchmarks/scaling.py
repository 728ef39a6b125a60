"""What more devices and more processes cost by themselves: python benchmarks/scaling.py [steps]

Trains the same network on 1, 2, 4 and 8 simulated devices of one process and in 2 processes, with
the same global batch (strong scaling) and with the same batch per device (weak scaling). All share
the cores of this machine, so that nothing gets faster: the time beyond that of one device for the
same rows is what the mechanism itself takes. The Python of `make setup` has what it needs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from projects import bake

ROWS = 64  # of the global batch, or of each device


def step_ms(project: Path, devices: int, processes: int, rows: int, steps: int) -> float:
    """Milliseconds per step of a run with this many devices in all."""
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    environ["JAX_NUM_CPU_DEVICES"] = str(devices // processes)
    command = ["bash", "launch.sh", "local", processes, "--total-steps", steps]
    command += ["--batch-size", rows, "--eval-every", 0, "--checkpoint-every", 0]
    workdir = project / f"runs/{devices}-{processes}-{rows}-{len(os.listdir(project))}"
    words = [str(word) for word in (*command, "--workdir", workdir)]
    subprocess.run(words, cwd=project, env=environ, check=True, capture_output=True)
    found = json.loads((workdir / "result.json").read_text())["step_ms"]
    subprocess.run(["rm", "-rf", workdir], check=True)
    return found


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        project = bake.generated(out)
        bake.add_python(project)
        alone = {n: step_ms(project, 1, 1, n * ROWS, steps) for n in (1, 2, 4, 8)}
        print("| devices | processes | rows | ms a step | one device, same rows | own share |")
        print("|---|---|---|---|---|---|")
        for devices, processes in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
            for rows in (ROWS, devices * ROWS):
                one = alone[rows // ROWS]
                ms = step_ms(project, devices, processes, rows, steps)
                share = max(1 - one / ms, 0)
                cells = devices, processes, rows, f"{ms:.1f}", f"{one:.1f}", f"{share:.0%}"
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
