"""A run stopped in any way goes on as if it had not been: a sample of what stops.py can do."""

import pytest
import stops
from stops import Stop

pytestmark = pytest.mark.slow

SAMPLE = {
    ("image_classification", "linen", False): [
        Stop("SIGTERM", "step", 7),
        Stop("SIGKILL", "save", 3),
        Stop("SIGINT", "compile"),
    ],
    ("image_classification", "nnx", True): [
        Stop("SIGINT twice", "evaluation", 2),
        Stop("exception", "step", 8),
        Stop("SIGKILL", "step", 5),
    ],
    ("language_model", "linen", True): [
        Stop("SIGUSR1", "evaluation", 1),
        Stop("full disk", "step", 5),
    ],
    ("language_model", "nnx", False): [
        Stop("--stop-after-step", "step", 10),  # the end of an epoch
        Stop("SIGTERM", "save", 2),
    ],
}


class ForkedProject(stops.StoppedProject):
    """Its runs are children of children.py. `root` is for their data."""

    def __init__(self, server, package, *arguments):
        super().__init__(*arguments)
        self.server, self.package = server, package

    def train(self, workdir, *flags, stop=None):
        words, orders = ["--workdir", workdir, *self.flags, *flags], stops.orders(workdir, stop)
        run = self.server.start(stops.watch, *words, package=self.package, env=orders)
        log = workdir.with_name(f"{workdir.name}.log")
        log.unlink(missing_ok=True)
        log.symlink_to(run.output)
        return run


@pytest.mark.parametrize(("task", "api", "hard"), SAMPLE)
def test_a_stopped_and_resumed_run_equals_one_never_stopped(server, tmp_path, task, api, hard):
    project = ForkedProject(server, f"{task}_{api}", tmp_path / "root", task, hard)
    assert project.run(tmp_path / "straight") == 0
    straight = project.outcome(tmp_path / "straight")
    assert straight["status"] == ("early_stopped" if hard else "completed")
    for stop in SAMPLE[task, api, hard]:
        code, problems = stops.try_stop(project, tmp_path / str(stop), stop, straight)
        assert (code, problems) == (stops.EXIT_CODES[stop.kind], []), stop
