"""What is written: every file, for all answers, from and to awkward places. Nothing is trained."""

import ast
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile

import bake
import pytest
import yaml
from answers import ACCELERATORS, APIS, COMBINATIONS, GOOD, NASTY, SETTINGS, TASKS, shown
from bake import TEMPLATE, generated, with_derived
from markdown_it import MarkdownIt

PACKAGE_FILES = """
    __init__ batches config data evaluate mesh model optimizer sources/__init__ task train
    train_state train_step
    runtime/__init__ runtime/accelerators runtime/advice runtime/cache runtime/checkpoint
    runtime/command_line runtime/devices runtime/digests runtime/events runtime/failures
    runtime/functional runtime/init_from runtime/logs runtime/manifest runtime/network runtime/order
    runtime/owner runtime/pace runtime/processes runtime/progress runtime/recorder
    runtime/settings runtime/splits runtime/startup runtime/stop runtime/streams
    runtime/terminal runtime/watchdog runtime/workdir
    tools/__init__ tools/bench tools/check_flags
"""
OF_IMAGES = {
    *("digits.npz", "sources/arrays.py", "sources/checks.py", "sources/folders.py"),
    *("sources/listing.py", "sources/parquet.py", "sources/pictures.py", "sources/tables.py"),
}
OF_TEXT = {"sources/records.py", "sources/texts.py", "sources/tokens.py"}
FILES = {
    *(".gitattributes", ".github/workflows/ci.yml", ".gitignore", "Makefile", "README.md"),
    *("launch.sh", "launch/Dockerfile", "launch/jobset.yaml", "launch/slurm.sbatch"),
    *("pyproject.toml", "setup.sh", "xla_flags.env"),
    *(f"my_flax_project/{name}.py" for name in PACKAGE_FILES.split()),
    *(f"my_flax_project/{name}" for name in OF_IMAGES),
    *("tests/conftest.py", "tests/smoke.py", "tests/test_batches.py", "tests/test_imports.py"),
    *("tests/test_data.py", "tests/test_run.py", "tests/test_task.py", "tests/test_train_step.py"),
}  # of the first choice of each question
NO_HOOKS = ("--no-input", "--accept-hooks", "no")


def files_of(task):
    """Names of the files of a project of this task."""
    of_images = {f"my_flax_project/{name}" for name in OF_IMAGES}
    of_text = {f"my_flax_project/{name}" for name in OF_TEXT}
    return FILES if task == "image_classification" else FILES - of_images | of_text


def files_in(project):
    return {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}


def texts(project):
    """Every text file by its name."""
    names = sorted(name for name in files_in(project) if not name.endswith(".npz"))
    return {name: (project / name).read_bytes().decode("utf-8") for name in names}


def made(result, out, slug="my_flax_project"):
    """The project that a run of cookiecutter made."""
    assert result.returncode == 0, result.stdout + result.stderr
    return out / slug


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def project(request, tmp_path_factory):
    """Each task with each API."""
    task, flax_api = request.param
    return generated(tmp_path_factory.mktemp("out"), task=task, flax_api=flax_api)


@pytest.fixture
def out(tmp_path):
    """An output directory with what an awkward path can have."""
    out = tmp_path / "it's an $OUT ü"
    out.mkdir()
    return out


@pytest.fixture(scope="module")
def template_copy(tmp_path_factory):
    """The template without history, environments and caches."""
    copy = tmp_path_factory.mktemp("copy") / "flax-train-template"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
    shutil.copytree(bake.ROOT, copy, ignore=ignored)
    return copy


# --- Every file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "flax_api"), COMBINATIONS)
def test_the_files_are_these(tmp_path, task, flax_api):
    assert files_in(generated(tmp_path, task=task, flax_api=flax_api)) == files_of(task)


def test_the_readme_lists_every_file(project):
    text = (project / "README.md").read_text(encoding="utf-8")
    tree = text.split("\n## What is where\n")[1].split("```")[1].splitlines()
    parents, listed = [], []
    for line in tree:
        if match := re.match(r"([│ ]*)[├└]── (\S+)", line):
            depth, name = len(match[1]) // 4, match[2]
            parents[depth:] = [name]
            if not name.endswith("/"):
                listed.append("".join(parents))
    assert len(listed) == len(set(listed))
    assert set(listed) == files_in(project)


def test_nothing_of_the_template_is_left(project):
    for name, text in texts(project).items():
        if name.startswith(".github/workflows/"):
            text = re.sub(r"\$\{\{ [\w.-]+ \}\}", "", text)
        assert not re.search(r"\{\{|\{%|cookiecutter", text), name


def test_line_endings(project):
    for name, text in texts(project).items():
        assert "\r" not in text, name
        assert not text or text.endswith("\n"), name
        assert not text.endswith("\n\n"), name
        assert not text.startswith("\n"), name


def test_every_file_parses(project):
    for name, text in texts(project).items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith(".toml"):
            tomllib.loads(text)
        elif name.endswith((".yml", ".yaml")):
            assert all(yaml.safe_load_all(text)), name


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_ruff_finds_nothing(tmp_path, accelerator):
    for task, flax_api in COMBINATIONS:
        out = tmp_path / flax_api / task
        project = generated(out, task=task, flax_api=flax_api, accelerator=accelerator)
        for command in (["check"], ["format", "--check", "--diff"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
            result = subprocess.run(ruff, cwd=project, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout + result.stderr


# What may differ between two projects that differ in one answer.
TASK = {"README.md", "tests/test_data.py", "tests/test_task.py"}
TASK |= {f"my_flax_project/{name}.py" for name in ("data", "model", "sources/__init__", "task")}
TASK |= {f"my_flax_project/{name}" for name in OF_IMAGES | OF_TEXT}
DIFFERING = {
    "project_name": {"README.md", "pyproject.toml"},
    "author_name": {"pyproject.toml"},
    "task": TASK,
    "flax_api": {
        "README.md",
        "my_flax_project/model.py",
        "my_flax_project/runtime/functional.py",
    },
    "accelerator": {"Makefile", "xla_flags.env"},
    "smoke_test": set(),
}


def choices(question):
    return SETTINGS[question] if isinstance(SETTINGS[question], list) else ["One", "Another"]


@pytest.mark.parametrize("question", DIFFERING)
@pytest.mark.parametrize(("task", "flax_api"), COMBINATIONS)
def test_an_answer_changes_these_files_only(tmp_path, question, task, flax_api):
    bakes = []
    for i, choice in enumerate(choices(question)):
        answers = {"task": task, "flax_api": flax_api} | {question: choice}
        project = generated(tmp_path / str(i), package="net", **answers)
        bakes.append({name: (project / name).read_bytes() for name in files_in(project)})
    allowed = {name.replace("my_flax_project", "net") for name in DIFFERING[question]}
    found = set()
    for a, b in itertools.combinations(bakes, 2):
        differing = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
        assert differing <= allowed
        found |= differing
    assert found == allowed


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_the_accelerator_is_an_extra(tmp_path, accelerator):
    makefile = (generated(tmp_path, accelerator=accelerator) / "Makefile").read_text(
        encoding="utf-8"
    )
    extras = "dev" if accelerator == "cpu" else f"{accelerator},dev"
    assert f"\nEXTRAS := {extras}\n" in makefile


def test_file_names_are_legal_everywhere():
    names = [path for path in files_in(TEMPLATE) if "__pycache__" not in path]
    assert not any(re.search(r'[<>:"|?*\\]', name) for name in names)
    assert len(FILES) == len({name.lower() for name in FILES})
    for name in FILES:
        assert re.fullmatch(r"[A-Za-z0-9_./-]+", name)
        assert not name.endswith(".")
    assert len(names) >= len(FILES)
    assert not any(path.is_symlink() for path in TEMPLATE.rglob("*"))


# --- The sources of the template -----------------------------------------------------------------


def test_only_include_stubs_have_jinja_in_python():
    stubs = 0
    for path in [*TEMPLATE.rglob("*.py"), *(bake.ROOT / "templates").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if re.fullmatch(r"\{% include '.*' %\}", text):
            stubs += 1
        else:
            assert not re.search(r"\{[{%#]", text), path
    assert stubs == 7  # data, model, sources, task, functional, test_data, test_task


def test_every_variant_is_used():
    wanted = {
        f"{name}_{task}.py"
        for name in ("data", "sources", "task", "test_data", "test_task")
        for task in TASKS
    }
    wanted |= {f"model_{task}_{flax_api}.py" for task, flax_api in COMBINATIONS}
    wanted |= {f"functional_{flax_api}.py" for flax_api in APIS}
    assert {path.name for path in (bake.ROOT / "templates").glob("*.py")} == wanted


def test_git_fixes_the_line_endings(project):
    for root in (bake.ROOT, project):
        lines = (root / ".gitattributes").read_text(encoding="utf-8").splitlines()
        # In the template the condition for the data set is a part of its file name.
        npz = "*.npz*" if root == bake.ROOT else "*.npz"
        assert lines == ["* text=auto eol=lf", f"{npz} binary"]
    for path in (TEMPLATE, bake.ROOT / "hooks", bake.ROOT / "templates"):
        for file in path.rglob("*"):
            if file.is_file() and ".npz" not in file.name and file.suffix != ".pyc":
                assert b"\r" not in file.read_bytes(), file


# --- Answers in the files ------------------------------------------------------------------------


def heading(markdown):
    """The text that a reader sees as the title."""
    tokens = MarkdownIt().parse(markdown)
    assert (tokens[0].type, tokens[0].tag) == ("heading_open", "h1")
    return "".join(child.content for child in tokens[1].children)


@pytest.mark.parametrize("text", NASTY, ids=shown)
def test_texts_come_back_as_they_were_typed(tmp_path, text):
    project = generated(tmp_path, project_name=text, author_name=text)
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert metadata["description"] == text
    assert metadata["authors"] == [{"name": text}]
    assert heading((project / "README.md").read_text(encoding="utf-8")) == text
    plain = texts(generated(tmp_path / "plain"))
    differing = {name for name, content in texts(project).items() if content != plain[name]}
    assert differing == {"README.md", "pyproject.toml"}


@pytest.mark.parametrize(
    "name", ["<b>x</b> & [y](z)", "*a* _b_ `c`", "C #", "&amp; &copy;", "a\\*b", "1. x", "![x](y)"]
)
def test_markdown_in_a_name_is_text(tmp_path, name):
    readme = generated(tmp_path, project_name=name) / "README.md"
    assert heading(readme.read_text(encoding="utf-8")) == name


def test_texts_come_back_through_a_replay_file(out, tmp_path):
    text = 'Zoë 🍪 O\'Brien "B" \\ {{ 7*7 }} {% x %}'
    answers = with_derived(GOOD | {"project_name": text, "author_name": text})
    private = {key: value for key, value in SETTINGS.items() if key[0] == "_" != key[1]}
    replay = tmp_path / "answers.json"
    replay.write_text(json.dumps({"cookiecutter": answers | private}), encoding="utf-8")
    result = bake.run_cookiecutter(out, flags=["--replay-file", replay])
    metadata = (made(result, out) / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(metadata)["project"]["description"] == text
    assert texts(out / "my_flax_project") == texts(
        generated(tmp_path, project_name=text, author_name=text)
    )


def test_the_slug_is_everywhere(tmp_path):
    project = generated(tmp_path, package="other_net")
    renamed = {name.replace("my_flax_project", "other_net") for name in FILES}
    assert files_in(project) == renamed
    assert not any("my_flax_project" in text for text in texts(project).values())
    manifest = yaml.safe_load((project / "launch/jobset.yaml").read_text(encoding="utf-8"))
    assert manifest["metadata"]["name"] == "other-net"


# --- Security ------------------------------------------------------------------------------------


def test_nothing_executes_data(project):
    forbidden = (
        r"pickle|trust_remote_code|shell=True|os\.system|(?<![.\w])(?:eval|exec|__import__)\("
    )
    for name, text in texts(project).items():
        text = text.replace("allow_pickle=False", "")
        if name == "tests/test_data.py":  # does what the project's own messages advise
            text = re.sub(r"\bexec\(re\.findall", "", text)
        assert not re.search(forbidden, text), name
    for path in (project / "my_flax_project").rglob("*.py"):
        # Followed by a brace it is a line of code in a message.
        for call in re.findall(r"np\.load\((?!\{).*", path.read_text(encoding="utf-8")):
            assert "allow_pickle=False" in call


def test_tensorboard_listens_to_this_machine_only(project):
    makefile = (project / "Makefile").read_text(encoding="utf-8")
    (line,) = [line for line in makefile.splitlines() if "tensorboard.main" in line]
    assert " --host localhost " in line


def test_workflows_may_only_read(project):
    for root in (bake.ROOT, project):
        for path in (root / ".github" / "workflows").iterdir():
            text = path.read_text(encoding="utf-8")
            workflow = yaml.safe_load(text)
            assert workflow["permissions"] == {"contents": "read"}
            assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads "on" as true
            for job in workflow["jobs"].values():
                assert "permissions" not in job
                for step in job["steps"]:
                    is_checkout = step.get("uses", "").startswith("actions/checkout@")
                    assert not is_checkout or step["with"]["persist-credentials"] is False
                    assert "${{" not in step.get("run", "")
            assert not re.search(r"\b(write|secrets|pull_request_target)\b", text)


@pytest.mark.parametrize("name", ["pre_gen_project", "post_gen_project"])
def test_hooks_ask_nothing_and_leave_git_alone(name):
    source = (bake.ROOT / "hooks" / f"{name}.py").read_text(encoding="utf-8")
    assert source.isascii()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.match(r"git( |$)|https?:", node.value), node.value
        if isinstance(node, (ast.Name, ast.Attribute)):
            word = node.id if isinstance(node, ast.Name) else node.attr
            assert word not in ("input", "stdin", "eval", "exec", "system", "urlopen"), word


# --- The real command, and places ----------------------------------------------------------------


def test_without_hooks_the_project_is_the_same(out):
    without = made(bake.run_cookiecutter(out, flags=NO_HOOKS), out)
    result = bake.run_cookiecutter(out, project_slug="net_2", smoke_test="off")
    with_hooks = made(result, out, "net_2")
    assert files_in(without) == FILES
    renamed = {
        name.replace("my_flax_project", "net_2"): text.replace("my_flax_project", "net_2")
        for name, text in texts(without).items()
    }
    for name, text in texts(with_hooks).items():
        assert text == renamed[name].replace("my-flax-project", "net-2"), name
    assert os.access(with_hooks / "launch.sh", os.X_OK)
    assert sorted(path.name for path in out.iterdir()) == ["my_flax_project", "net_2"]


def test_from_a_zip_archive(out, tmp_path, template_copy):
    archive = tmp_path / "template.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"{template_copy.name}/", "")  # cookiecutter wants it to come first
        for path in template_copy.rglob("*"):
            if path.is_file():
                name = path.relative_to(template_copy.parent).as_posix()
                file.writestr(zipfile.ZipInfo(name), path.read_bytes())  # no permission bits
    project = made(bake.run_cookiecutter(out, template=archive, smoke_test="off"), out)
    assert files_in(project) == FILES
    assert os.access(project / "launch.sh", os.X_OK)


def test_from_a_read_only_checkout(out, template_copy, tmp_path):
    read_only = shutil.copytree(template_copy, tmp_path / "read_only")
    for path in read_only.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    project = made(bake.run_cookiecutter(out, template=read_only, smoke_test="off"), out)
    assert files_in(project) == FILES
    for path in read_only.rglob("*"):
        path.chmod(0o755)


def test_replay_after_a_good_run(out, tmp_path):
    home = tmp_path / "home"
    first = bake.run_cookiecutter(out, home=home, smoke_test="off", project_name="Net 3")
    before = texts(made(first, out, "net_3"))
    shutil.rmtree(out / "net_3")
    again = bake.run_cookiecutter(out, home=home, flags=["--replay"])
    assert texts(made(again, out, "net_3")) == before


@pytest.fixture
def edited(out):
    """A project in use: two files of the user's own, one of the template's changed, one gone."""
    project = made(bake.run_cookiecutter(out, smoke_test="off"), out)
    for name in ("notes.txt", ".github/workflows/mine.yml", "my_flax_project/mine.py"):
        (project / name).write_text("mine")
    (project / "my_flax_project/model.py").write_text("# mine")
    (project / "Makefile").unlink()
    return project


MINE = {"notes.txt", ".github/workflows/mine.yml", "my_flax_project/mine.py"}


@pytest.mark.parametrize("hooks", ["yes", "no"])
def test_overwriting_keeps_the_files_of_the_user(out, edited, hooks):
    flags = ("--no-input", "-f", "--accept-hooks", hooks)
    made(bake.run_cookiecutter(out, flags=flags, smoke_test="off"), out)
    assert files_in(edited) == FILES | MINE
    assert all((edited / name).read_text() == "mine" for name in MINE)
    assert (edited / "my_flax_project/model.py").read_text() != "# mine"


def test_skipping_adds_only_what_is_missing(out, edited):
    flags = ("--no-input", "-s", "-f")
    made(bake.run_cookiecutter(out, flags=flags, smoke_test="off"), out)
    assert files_in(edited) == FILES | MINE
    assert (edited / "my_flax_project/model.py").read_text() == "# mine"


def test_inside_another_repository(out):
    subprocess.run(["git", "init", "--quiet", out], check=True)
    before = {path: path.stat().st_mtime_ns for path in (out / ".git").rglob("*")}
    project = made(bake.run_cookiecutter(out, smoke_test="off"), out)
    assert not (project / ".git").exists()
    assert {path: path.stat().st_mtime_ns for path in (out / ".git").rglob("*")} == before


def test_a_locale_without_utf_8(out):
    text = "Zoë 🍪 你好"
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    flags = ("--no-input", "--config-file", out.parent / "rc")
    settings = {"default_context": {"project_name": text, "author_name": text}}
    (out.parent / "rc").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
    plain = out.parent / "plain"
    options = {"flags": flags, "smoke_test": "off", "project_slug": "net_4", "env": env}
    project = made(bake.run_cookiecutter(plain, **options), plain, "net_4")
    expected = generated(out, package="net_4", project_name=text, author_name=text)
    assert texts(project) == texts(expected)


def test_permissions_under_a_umask(out):
    command = [sys.executable, "-m", "cookiecutter", bake.ROOT, "--no-input", "-o", out]
    result = bake.run(["sh", "-c", 'umask 077; "$@"', "sh", *command, "smoke_test=off"])
    project = made(result, out)
    sources = {bake.render(path, GOOD): TEMPLATE / path for path in files_in(TEMPLATE)}
    for name in FILES:
        path, source = project / name, sources[name]
        mode = stat.S_IMODE(path.stat().st_mode)
        if name == "launch.sh":
            assert mode == 0o755
        else:
            assert mode == stat.S_IMODE(source.stat().st_mode), name
    assert stat.S_IMODE(project.stat().st_mode) == 0o700


@pytest.mark.parametrize("page", ["bad-inputs.md", "failures.md"])
def test_every_test_that_the_docs_name_exists(page):
    text = (bake.ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/\w+\.py)::(\w+)", text))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (bake.ROOT / file).read_text(encoding="utf-8"), (file, test)


def test_cuda_is_for_linux_only(tmp_path):
    text = (generated(tmp_path) / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for name in ("cuda12", "cuda13", "tpu"):
        assert all(entry.endswith("; sys_platform == 'linux'") for entry in extras[name])
    assert "metal" not in text
