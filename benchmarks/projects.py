"""The projects that are measured: generated as the tests generate theirs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import bake


def importable(out: str, task: str, api: str = "linen") -> str:
    """Generate a project and make it importable; return the name of its package."""
    project = bake.generated(out, task, api, f"{task}_{api}_net")
    sys.path.insert(0, str(project))
    return project.name
