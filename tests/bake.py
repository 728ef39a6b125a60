"""Generate projects: with the real cookiecutter, or only their files, in this process."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from answers import GOOD, ROOT, SETTINGS

TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
PACKAGE = TEMPLATE / TEMPLATE.name


def generated(
    out, task="image_classification", flax_api="linen", package="my_flax_project", **answers
):
    """Write the files of a project and return its directory, out/<package>. No hook runs, and
    answers are taken as they are, not rendered as those on a command line."""
    from cookiecutter.generate import generate_files  # takes 0.3 s, and most children need it not

    chosen = {"task": task, "flax_api": flax_api, "project_slug": package} | answers
    private = {key: value for key, value in SETTINGS.items() if key[0] == "_" != key[1]}
    context = {"cookiecutter": private | with_derived(GOOD | chosen)}
    return Path(generate_files(ROOT, context, out, accept_hooks=False))


def with_derived(answers):
    """The answers together with what cookiecutter.json works out from them."""
    expressions = {key: SETTINGS[key] for key in SETTINGS if key[:2] == "__" != key[-2:]}
    return answers | {key: render(text, answers) for key, text in expressions.items()}


def add_python(project):
    """Make the Python of the tests that of the project, as `make setup` would make one."""
    python = Path(project) / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)


class Project:
    """A generated project whose commands run in processes of their own."""

    foreign = ("JAX_", "XLA_", "TRAIN_", "SLURM_", "OMPI_", "PMI")

    def __init__(self, root, **environment):
        self.root, self.package = root, root.name
        kept = {k: v for k, v in os.environ.items() if not k.startswith(self.foreign)}
        self.environment = kept | environment

    def start(self, *command, log, **options):
        """Start a command in the project's directory, with its output at the end of a file."""
        with open(log, "ab") as file:
            return subprocess.Popen(
                [str(word) for word in command],
                cwd=self.root,
                env=self.environment | options.pop("env", {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                **options,
            )


# ----------------------------------------------------------------------------------- The command


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
    from cookiecutter.utils import create_env_with_context

    context = {"cookiecutter": answers}
    return create_env_with_context(context).from_string(text).render(**context)


def render_hook(name, answers):
    """The source of a hook as cookiecutter runs it."""
    return render((ROOT / "hooks" / f"{name}.py").read_text(encoding="utf-8"), answers)
