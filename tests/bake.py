"""Run the real cookiecutter, away from the settings and caches of whoever runs the tests."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cookiecutter.utils import create_env_with_context

ROOT = Path(__file__).resolve().parents[1]


def isolated(home, **env):
    """The environment of a child that finds its settings, replay files and temporary files in
    `home`, and only its package caches where they were."""
    home = Path(home)
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    settings = home / "cookiecutterrc"
    if not settings.exists():
        text = f'cookiecutters_dir: "{home}/clones"\nreplay_dir: "{home}/replay"\n'
        settings.write_text(text, encoding="utf-8")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Without compiled files each child compiles cookiecutter anew: 1.1 s instead of 0.4.
    unwanted = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    unwanted += ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the `make test` that runs the tests
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    return {
        "UV_CACHE_DIR": str(cache / "uv"),
        "PIP_CACHE_DIR": str(cache / "pip"),
        **inherited,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "COOKIECUTTER_CONFIG": str(settings),
        **env,
    }


def run(command, *, home=None, cwd=None, stdin="", env=None, timeout=300):
    """Run a command to its end, and to that of whatever still holds its output."""
    with tempfile.TemporaryDirectory() as scratch:
        return subprocess.run(
            [str(word) for word in command],
            input=stdin,
            env=isolated(home or scratch, **(env or {})),
            cwd=cwd or scratch,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )


def run_cookiecutter(output_dir, *, template=ROOT, flags=("--no-input",), **options_and_answers):
    """`python -m cookiecutter TEMPLATE FLAGS --output-dir OUTPUT_DIR key=value ...`

    `home`, `cwd`, `stdin`, `env` and `timeout` are options of `run`; every other keyword is an
    answer. Without `home`, each call starts with an empty one.
    """
    options = {"home", "cwd", "stdin", "env", "timeout"} & set(options_and_answers)
    chosen = {key: options_and_answers.pop(key) for key in options}
    answers = [f"{key}={value}" for key, value in options_and_answers.items()]
    command = [sys.executable, "-m", "cookiecutter", template, *flags, "--output-dir", output_dir]
    return run([*command, *answers], **chosen)


def load_hook(name):
    """A hook as a module, not rendered: its functions, without its answers."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(text, answers):
    """What cookiecutter makes of a text."""
    context = {"cookiecutter": answers}
    return create_env_with_context(context).from_string(text).render(**context)


def render_hook(name, answers):
    """The source of a hook as cookiecutter runs it."""
    return render((ROOT / "hooks" / f"{name}.py").read_text(encoding="utf-8"), answers)
