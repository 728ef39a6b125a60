"""Check the answers before a file is written; refuse all faults at once, with a command that works.

Cookiecutter renders this file, so the answers enter as data in one place only (the last line)
and no other line may hold an opening Jinja delimiter.
"""

import builtins
import contextlib
import difflib
import importlib.metadata
import json
import keyword
import os
import re
import shlex
import shutil
import sys
import time
import unicodedata
from pathlib import Path
from typing import NamedTuple

# --- What is refused -----------------------------------------------------------------------------

CHOICES = {
    "task": ("image_classification", "language_model"),
    "flax_api": ("linen", "nnx"),
    "accelerator": ("cpu", "cuda12", "cuda13", "tpu"),
    "smoke_test": ("auto", "required", "off"),
}
DEFAULTS = {"project_name": "My Flax Project", "author_name": "Your Name"}
FIELDS = ("project_name", "project_slug", "author_name", *CHOICES)
# What cookiecutter.json works out from an answer, for use between the quotes of a TOML string.
DERIVED = {"__project_name_in_toml": "project_name", "__author_name_in_toml": "author_name"}


def words(text):
    return set(text.split())


# `type` is a keyword from 3.12 on only; the others are constants in YAML and TOML.
LANGUAGE = {name.lower() for name in keyword.kwlist + keyword.softkwlist} | set(dir(builtins))
LANGUAGE |= words("type null yes no on off nan inf")
# The project's Python is not the one that runs this file: names that only some versions have.
STDLIB = {name.lower() for name in sys.stdlib_module_names}
STDLIB |= words("test compression annotationlib distutils imp asyncore asynchat")
# Import names and distribution names, those of indirect dependencies included: `python -m` puts
# the project first on the path, and an installer takes an equal name for the project itself.
LIBRARIES = words("""
    jax jaxlib jaxtyping flax flaxlib optax orbax orbax_checkpoint orbax_export chex grain clu
    numpy scipy ml_dtypes opt_einsum tensorstore treescope etils absl absl_py msgpack libtpu
    jax_plugins jax_cuda12_plugin jax_cuda12_pjrt jax_cuda13_plugin jax_cuda13_pjrt nvidia triton
    tensorboard tensorboardx tensorboard_data_server tensorboard_plugin_profile xprof werkzeug
    markupsafe markdown grpc grpcio google protobuf tensorflow tensorflow_datasets torch keras
    tyro docstring_parser typeguard shtab tqdm rich pygments markdown_it markdown_it_py mdurl
    datasets huggingface_hub hf_xet transformers tokenizers pandas pyarrow pil pillow fsspec gcsfs
    pytest pytest_xdist xdist execnet pluggy iniconfig py packaging ruff ty mypy mypy_extensions
    setuptools wheel pip uv hatchling build coverage wandb array_record cloudpickle tzdata
    aiofiles humanize simplejson psutil uvloop prometheus_client yaml pyyaml attr attrs six wrapt
    typing_extensions importlib_resources zipp nest_asyncio requests urllib3 certifi idna httpx
    charset_normalizer dateutil python_dateutil filelock multidict aiohttp yarl matplotlib sklearn
""")
OWN = words("""
    batches config data digits evaluate mesh model optimizer runtime sources task tools train
    train_state train_step
    tests launch runs checkpoints src build dist scripts docs conftest setup venv xla_flags
    makefile readme license pyproject
""")
WINDOWS = words("con prn aux nul conin conout clock")
WINDOWS |= {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}


def is_path(text):
    return bool(re.search(r"[/\\]", text) or re.match(r"\.\.?$|~|[A-Za-z]:", text))


def is_control(character):
    """Whatever breaks a line, reorders what a terminal shows, or cannot be written as UTF-8."""
    reorders = 0x202A <= ord(character) <= 0x202E or 0x2066 <= ord(character) <= 0x2069
    return reorders or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def canonical(text):
    """The form in which pip, macOS and Windows compare names: `Orbax-Checkpoint` is taken too."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


# (what breaks the rule, the rule). The slug's rules see the answer and its canonical form.
TEXT_RULES = (
    (lambda text: not text.strip(), "must not be blank"),
    (lambda text: len(text) > 100, "must have at most 100 characters"),
    (lambda text: any(map(is_control, text)), "must not contain control characters"),
)
SLUG_RULES = (
    (lambda slug, _: not slug, "needs at least one letter"),
    (lambda slug, _: is_path(slug), "must be a name, not a path (--output-dir is for the place)"),
    (lambda slug, _: len(slug) > 50, "must have at most 50 characters"),
    (
        lambda slug, _: not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", slug),
        "must be lower_snake_case: ^[a-z][a-z0-9_]*[a-z0-9]$",
    ),
    (lambda _, name: name in LANGUAGE, "is a word of the Python language"),
    (lambda _, name: name in STDLIB, "is a module of Python's standard library"),
    (
        lambda _, name: name in LIBRARIES,
        "is the name of a library: `import` would find the project instead of it, "
        "and an installer would leave it out",
    ),
    (lambda _, name: name in OWN, "is the name of a module or directory inside the project"),
    (lambda _, name: name in WINDOWS, "is a device name on Windows"),
)


# --- Checking ------------------------------------------------------------------------------------


class Problem(NamedTuple):
    field: str
    value: object
    rule: str
    suggestion: str


def slug_faults(slug):
    return [rule for broken, rule in SLUG_RULES if broken(slug, canonical(slug))]


def faults(field, value, answers):
    if field not in answers:
        return ["is missing: the answers may come from another version of the template"]
    if field in CHOICES:
        return [] if value in CHOICES[field] else ["must be one of " + ", ".join(CHOICES[field])]
    if not isinstance(value, str):
        return ["must be text"]
    if field != "project_slug":
        return [rule for broken, rule in TEXT_RULES if broken(value)]
    # cookiecutter.json falls back to this slug, so that an empty one gets as far as here.
    name = answers.get("project_name")
    if value == "unnamed" and not canonical(unicodedata.normalize("NFKD", str(name))):
        return [f"needs at least one letter, and the project name {name!a} has none to offer"]
    return slug_faults(value)


def suggest_slug(*texts):
    """The nearest valid slug to the first text that has a letter or digit to offer."""
    for text in texts:
        text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
        slug = canonical(text)[:40].rstrip("_")
        if slug and slug != "unnamed":
            slug = slug if slug[0].isalpha() else f"project_{slug}"
            return f"{slug}_net" if slug_faults(slug) else slug
    return "my_flax_project"


def suggest(field, value, answers):
    text, name = (v if isinstance(v, str) else "" for v in (value, answers.get("project_name")))
    if field in CHOICES:
        return (difflib.get_close_matches(text.lower(), CHOICES[field], 1) or CHOICES[field])[0]
    if field == "project_slug":
        return suggest_slug(text, name)
    kept = "".join(" " if is_control(character) else character for character in text)
    return " ".join(kept.split())[:100].rstrip() or DEFAULTS[field]


def check(answers, version=None):
    problems = []
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers and tuple(map(int, numbers.groups())) < (2, 4):
        latest = "uvx cookiecutter@latest"
        problems.append(Problem("cookiecutter", version, "must be 2.4 or later", latest))
    for field in FIELDS:
        value = answers.get(field)
        if rules := faults(field, value, answers):
            suggestion = suggest(field, value, answers)
            problems.append(Problem(field, value, "; ".join(rules), suggestion))
    # A replay file keeps what an older version derived, and the command line can set it.
    for field, source in DERIVED.items():
        derived = str(answers.get(source)).replace("\\", "\\\\").replace('"', '\\"')
        if answers.get(field, derived) != derived:
            rule = f"is not an answer: it follows from {source}"
            problems.append(Problem(field, answers[field], rule, derived))
    return problems


# --- Saying it -----------------------------------------------------------------------------------


def encodable(text, encoding):
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def quote_answer(field, text, encoding):
    """Cookiecutter renders key=value, so what it would interpret, and what the terminal cannot
    show, goes in as a Jinja string."""

    def literal(match):
        if match[0] != "{" and encodable(match[0], encoding):
            return match[0]
        return "{" * 2 + f' "{ascii(match[0])[1:-1]}" ' + "}" * 2

    return shlex.quote(f"{field}=" + re.sub(r"\{|[^\x00-\x7f]", literal, text))


def quote_path(path, encoding):
    if encodable(path, encoding):
        return shlex.quote(path)
    octal = "".join(f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"\"$(printf '{octal}')\""


def program(encoding):
    """How the reader's shell can start the cookiecutter that runs this hook."""
    if "UV" in os.environ and "archive-v" in sys.executable:
        return "uvx cookiecutter"
    found = shutil.which("cookiecutter")
    ours = found and Path(found).resolve().parent == Path(sys.executable).parent.resolve()
    if ours and "UV" not in os.environ:  # uv run extends our PATH, but not that of the shell
        return "cookiecutter"
    return quote_path(sys.executable, encoding) + " -m cookiecutter"


def retry_command(answers, problems, encoding, existing=False):
    fixed = {**answers, **{problem.field: problem.suggestion for problem in problems}}
    command = [fixed.get("cookiecutter") or program(encoding)]
    command += [quote_path(answers.get("_template") or "TEMPLATE", encoding), "--no-input"]
    for flag, key in (("--checkout", "_checkout"), ("--output-dir", "_output_dir")):
        if answers.get(key):
            command += [flag, quote_path(answers[key], encoding)]
    if existing and fixed["project_slug"] == answers.get("project_slug"):
        command.append("--overwrite-if-exists")
    return " ".join(command + [quote_answer(field, fixed[field], encoding) for field in FIELDS])


def report(answers, problems, encoding, existing=False):
    count = f"{len(problems)} problem" + "s" * (len(problems) > 1)
    lines = [f"Refused: {count} in the answers. No file was written.", ""]
    for field, value, rule, suggestion in problems:
        received = ascii(value) if len(ascii(value)) <= 150 else ascii(value)[:150] + "..."
        lines += [field, f"    received:   {received}", f"    rule:       {rule}"]
        lines += [f"    suggestion: {suggestion!a}", ""]
    lines += ["Try again with:", "", retry_command(answers, problems, encoding, existing), ""]
    lines += ["Do not use --replay: it would repeat the refused answers."]
    lines += ["(What follows is cookiecutter's own way to say that it stopped.)", ""]
    return "\n".join(lines)


def note(answers):
    """A name in another script becomes a transliteration that its author may not expect."""
    letters = filter(str.isalpha, answers["project_name"])
    if all(unicodedata.name(letter, "").startswith("LATIN") for letter in letters):
        return ""
    return f"The project name is not in Latin letters: the directory is {answers['project_slug']}\n"


# --- Leaving nothing behind ----------------------------------------------------------------------


def born(path):
    """A new directory's access time is its birth, where the system keeps no birth."""
    status = os.stat(path)
    return getattr(status, "st_birthtime", status.st_atime)


def sweep(output_dir, patience=3.0):
    """Cookiecutter removes the innermost directory only: those above it, which it made for a slug
    like a/b, a child removes afterwards. Cookiecutter would trip over one that is gone before."""
    leaf = Path.cwd()
    made = [path for path in leaf.parents if born(path) > born(leaf) - 1]
    made = [path for path in made if not Path(output_dir).resolve().is_relative_to(path)]
    if not made or not hasattr(os, "fork") or os.fork():
        return
    deadline = time.monotonic() + patience
    while leaf.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for path in made:
        with contextlib.suppress(OSError):  # not empty, so not ours
            path.rmdir()
    os._exit(0)


def main(answers):
    try:
        version = importlib.metadata.version("cookiecutter")
    except importlib.metadata.PackageNotFoundError:
        version = None
    problems = check(answers, version)
    if not problems:
        print(note(answers), end="", flush=True)
        return 0
    existing = bool(os.listdir())
    print(report(answers, problems, sys.stderr.encoding, existing), file=sys.stderr, flush=True)
    if "_output_dir" in answers and not existing:
        sweep(answers["_output_dir"])
    return 1


if __name__ == "__main__":
    sys.exit(main(json.loads(r"""{{ cookiecutter | tojson }}""")))
