"""The check of the answers: its rules, what it says, and that nothing is left behind."""

import ast
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib

import bake
import pytest
from answers import GOOD, NASTY, SETTINGS, TASKS, shown
from bake import with_derived
from cookiecutter.utils import create_env_with_context

hook = bake.load_hook("pre_gen_project")


def words(text):
    return text.split()


# --- The rules -----------------------------------------------------------------------------------

# Words of the rule, and slugs that it refuses.
REFUSED_SLUGS = {
    "at least one letter": [""],
    "not a path": words(r"../x /abs a/b a/b/c .. . C:\x c:x ~ ~/x a\b ./x /"),
    "at most 50": ["x" * 51, "x" * 200],
    "lower_snake_case": [
        *words("CamelCase HTTPServer a.b-c_D my-net a.b -rf _x x_ __init__ -x x- _ 123 9lives x"),
        *("x y", "x ", " x", "net.", "net ", "net\n", "net\n\n", "a\tb", "na\x00me", "na\x1b[31m"),
        *(
            "é",
            "你好",
            "🍪",
            "!!!",
            "naïve",
            "\ufb01ne",
            "\udcff",
            "a\u202eb",
            "n\u0435t",
            "\u0661",
        ),
        *("{{ 7*7 }}", "{% raw %}", "{{cookiecutter.task}}", "{#", "it's", 'a"b', "$HOME", "a;b"),
        "123 go",
    ],
    "Python language": words(
        "class lambda import None True False match case type none true null print list object "
        "exec async yield Class"
    ),
    "standard library": words(
        "test types random logging code json typing asyncio select queue this idlelib distutils "
        "imp compression Logging"
    ),
    "a library": words(
        "jax jaxlib flax optax orbax orbax_checkpoint orbax-checkpoint numpy tensorboard "
        "tensorboardX tensorboardx tyro tqdm pytest ruff ty chex grain tensorflow torch absl "
        "absl_py etils msgpack xprof datasets PIL pil pillow JAX orbax__checkpoint"
    ),
    "inside the project": words(
        "train model data task config optimizer train_state train_step mesh runtime tools digits "
        "evaluate sources batches tests launch setup runs checkpoints src build dist "
        "scripts docs Train"
    ),
    "on Windows": words("con nul aux prn com1 com9 lpt1 lpt9 CON con. Nul"),
}
BAD_SLUGS = [(slug, rule) for rule, slugs in REFUSED_SLUGS.items() for slug in slugs]


@pytest.mark.parametrize(("slug", "rule"), BAD_SLUGS, ids=shown)
def test_slug_is_refused(slug, rule):
    faults = hook.faults("project_slug", slug, GOOD | {"project_slug": slug})
    assert any(rule in fault for fault in faults), faults


ACCEPTED = words("my_flax_project ab a1 net2 x_y mnist class_net jax_net x__y training models")
ACCEPTED += ["project_123_go", "unnamed_net", "x" * 50]


@pytest.mark.parametrize("slug", ACCEPTED)
def test_slug_is_accepted(slug):
    assert hook.check(GOOD | {"project_slug": slug}) == []


@pytest.mark.parametrize("name", ["My Flax Project", "🍪", "../x", "Class", "1" * 90, "", None])
def test_every_suggested_slug_is_valid(name):
    for slug, _ in BAD_SLUGS:
        answers = GOOD | {"project_slug": slug, "project_name": name}
        suggestion = hook.suggest("project_slug", slug, answers)
        assert hook.check(GOOD | {"project_slug": suggestion}) == [], slug


@pytest.mark.parametrize(
    ("slug", "suggestion"),
    [
        ("class", "class_net"),
        ("123 go", "project_123_go"),
        ("CamelCase", "camel_case"),
        ("HTTPServer", "http_server"),
        ("a.b-c_D", "a_b_c_d"),
        ("../x", "x_net"),
        ("a/b/c", "a_b_c"),
        ("orbax-checkpoint", "orbax_checkpoint_net"),
        ("con.", "con_net"),
        ("naïve", "naive"),
        ("你好", "my_flax_project"),
        ("", "my_flax_project"),
        ("x" * 200, "x" * 40),
    ],
    ids=shown,
)
def test_suggested_slug(slug, suggestion):
    assert hook.suggest("project_slug", slug, GOOD) == suggestion


CONTROL = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F)]
CONTROL += [*range(0x2066, 0x206A), 0xD800, 0xDCFF, 0xDFFF]


@pytest.mark.parametrize("field", ["project_name", "author_name"])
@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        ("control", [f"Zoë{chr(code)} B" for code in CONTROL] + ["\n"]),
        ("blank", ["", "  ", "\u3000", "\r\n"]),
        ("at most 100", ["x" * 101, "名" * 5000]),
        ("must be text", [None, 7, ["a"], {}, True]),
    ],
)
def test_text_is_refused_and_the_suggestion_is_valid(field, rule, texts):
    for text in texts:
        answers = GOOD | {field: text}
        (problem,) = hook.check(answers)
        assert problem.field == field
        assert rule in problem.rule, text
        assert hook.check(answers | {field: problem.suggestion}) == []


def test_a_suggested_text_keeps_the_rest():
    assert hook.suggest("author_name", "Zoë\n\tO'Brien \x1b", GOOD) == "Zoë O'Brien"


@pytest.mark.parametrize("field", ["project_name", "author_name"])
@pytest.mark.parametrize("text", [*NASTY, "x" * 100, "名" * 100], ids=shown)
def test_text_is_accepted(field, text):
    assert hook.check(GOOD | {field: text}) == []


@pytest.mark.parametrize("name", ["🍪", "!!!", "", " ", "\u200b", "…", "---"], ids=shown)
def test_a_name_without_letters_is_refused(name):
    answers = GOOD | {"project_name": name}
    answers["project_slug"] = bake.render(SETTINGS["project_slug"], answers)
    problem = next(p for p in hook.check(answers) if p.field == "project_slug")
    assert "at least one letter" in problem.rule
    assert ascii(name) in problem.rule
    assert problem.suggestion == "my_flax_project"
    fits = hook.check(answers | {"project_slug": "cookie_net"})
    assert [p.field for p in fits] == ([] if name.strip() else ["project_name"])


def test_unnamed_is_a_name_like_any_other():
    assert hook.check(GOOD | {"project_name": "Unnamed", "project_slug": "unnamed"}) == []


@pytest.mark.parametrize("field", list(hook.CHOICES))
@pytest.mark.parametrize("value", ["", "CPU ", "x\n", None, True, 3, ["linen"], {}], ids=shown)
def test_a_choice_that_is_not_offered_is_refused(field, value):
    (problem,) = hook.check(GOOD | {field: value})
    assert problem.field == field
    assert all(choice in problem.rule for choice in hook.CHOICES[field])
    assert hook.check(GOOD | {field: problem.suggestion}) == []


def test_a_misspelled_choice_gets_the_nearest_one():
    assert hook.suggest("accelerator", "cuda-12", GOOD) == "cuda12"
    assert hook.suggest("flax_api", "NNX", GOOD) == "nnx"


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_answer_is_refused(field):
    answers = {key: value for key, value in GOOD.items() if key != field}
    (problem,) = hook.check(answers)
    assert (problem.field, "missing" in problem.rule) == (field, True)
    assert hook.check(answers | {field: problem.suggestion}) == []
    assert f"{field}=" in hook.retry_command(answers, [problem], "utf-8", existing=True)


def test_all_problems_are_found_at_once():
    bad = {"project_name": "a\nb", "project_slug": "Class", "author_name": " ", "flax_api": "haiku"}
    problems = hook.check(GOOD | bad | {"task": None}, version="2.3.1")
    fields = words("cookiecutter project_name project_slug author_name task flax_api")
    assert [problem.field for problem in problems] == fields
    (slug,) = [problem for problem in problems if problem.field == "project_slug"]
    assert "lower_snake_case" in slug.rule
    assert "Python language" in slug.rule


@pytest.mark.parametrize("version", ["1.7.3", "2.1.1", "2.3.1", "2.3.1.dev0"])
def test_an_old_cookiecutter_is_refused(version):
    (problem,) = hook.check(GOOD, version=version)
    assert problem.suggestion == "uvx cookiecutter@latest"
    retry = hook.retry_command(GOOD | {"_template": "gh:a/b"}, [problem], "utf-8")
    assert retry.startswith("uvx cookiecutter@latest gh:a/b --no-input ")


@pytest.mark.parametrize("version", ["2.4.0", "2.7.1", "2.10.0", "3.0", "10.0.dev1", "?", "", None])
def test_another_cookiecutter_is_accepted(version):
    assert hook.check(GOOD, version=version) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("你好", True),
        ("Сеть 2", True),
        ("Flax 网", True),
        ("Ünïcode Ñet", False),
        ("🍪 net", False),
    ],
)
def test_a_name_in_another_script_is_noted(name, expected):
    note = hook.note(GOOD | {"project_name": name, "project_slug": "the_slug"})
    assert bool(note) is expected
    assert not expected or (note.isascii() and "the_slug" in note)


# --- The lists agree with the template -----------------------------------------------------------


def test_the_questions_are_those_of_cookiecutter_json():
    asked = {key: value for key, value in SETTINGS.items() if not key.startswith("_")}
    assert tuple(asked) == hook.FIELDS
    choices = {key: tuple(value) for key, value in asked.items() if isinstance(value, list)}
    assert choices == hook.CHOICES
    assert all(asked[key] == value for key, value in hook.DEFAULTS.items())
    assert set(hook.DERIVED) == set(with_derived(GOOD)) - set(GOOD)


@pytest.mark.parametrize("text", NASTY, ids=shown)
@pytest.mark.parametrize("field", ["project_name", "author_name"])
def test_what_follows_from_an_answer_is_no_answer(field, text):
    answers = with_derived(GOOD | {field: text})
    assert hook.check(answers) == []
    for key, source in hook.DERIVED.items():
        (problem,) = hook.check(answers | {key: "x"})
        assert (problem.field, source in problem.rule) == (key, True)
        assert hook.check(answers | {key: problem.suggestion}) == []
        assert "_in_toml" not in hook.retry_command(answers, [problem], "utf-8")


def test_every_dependency_is_refused():
    path = bake.TEMPLATE / "pyproject.toml"
    text = bake.render(path.read_text(encoding="utf-8"), with_derived(GOOD))
    project = tomllib.loads(text)["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [requirement for one in lists for requirement in one]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}
    names -= {GOOD["project_slug"], GOOD["project_slug"].replace("_", "-")}  # its own extras
    assert {"jax", "flax", "optax", "numpy"} <= names
    accepted = {n for n in names if not hook.slug_faults(re.sub(r"[-.]+", "_", n.lower()))}
    assert not accepted


# Names of OWN that no generated project has, and what a project of this name would meet.
NOT_YET_THERE = {
    "checkpoints": "a directory of every run",
    "runs": "made by the first run",
    "venv": "an environment beside .venv",
    "src": "an installer would look for the package in it",
    "build": "made by build tools, and removed by them",
    "dist": "the same",
    "license": "a file that its owner adds",
    "scripts": "where people put commands",
    "docs": "where people put pages",
    "conftest": "pytest imports it by this name",
}


@pytest.fixture(scope="module")
def names_of_projects(tmp_path_factory):
    """What a project's name would clash with: whatever stands in the package, at its top, or
    beside it."""
    names = set()
    for task in TASKS:
        project = bake.generated(tmp_path_factory.mktemp(task), task)
        entries = [*project.iterdir(), *(project / project.name).iterdir()]
        names |= {path.stem.lower() for path in entries if path.name[0] not in "._"}
    return names - {project.name}


def test_every_module_and_directory_of_the_project_is_refused(names_of_projects):
    assert {"model", "sources", "runtime", "tests", "readme"} <= names_of_projects
    assert {name for name in names_of_projects if not hook.slug_faults(name)} == set()


def test_every_name_that_is_refused_as_the_projects_own_is_one(names_of_projects):
    assert {hook.canonical(name) for name in hook.OWN} == hook.OWN
    assert hook.OWN - names_of_projects == set(NOT_YET_THERE)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("My Flax  Net!", "my_flax_net"),
        ("CamelCase", "camelcase"),
        ("a.b-c D", "a_b_c_d"),
        ("123 go", "project_123_go"),
        ("C++ / CUDA", "c_cuda"),
        ("Ünïcode Näme", "unicode_name"),
        ("你好", "ni_hao"),
        ("../../etc", "etc"),
        ("-rf", "rf"),
        ("🍪", "unnamed"),
        ("{{ 7*7 }}", "project_7_7"),
    ],
)
def test_the_derived_slug(name, slug):
    answers = GOOD | {"project_name": name}
    assert bake.render(SETTINGS["project_slug"], answers) == slug
    answers["project_slug"] = slug
    assert bool(hook.check(answers)) is (slug == "unnamed")


@pytest.mark.parametrize("unit", ["ab ", "9 x", "名"])
def test_a_long_name_derives_a_valid_slug(unit):
    for length in range(1, 99):
        answers = GOOD | {"project_name": (unit * length)[:length].strip() + "ab"}
        answers["project_slug"] = bake.render(SETTINGS["project_slug"], answers)
        assert hook.check(answers) == []


# --- The hook as a file --------------------------------------------------------------------------


def test_the_hook_is_one_plain_file():
    text = (bake.ROOT / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8")
    assert text.isascii()
    assert re.findall(r"\{[{%#].*", text) == ['{{ cookiecutter | tojson }}""")))']
    nodes = list(ast.walk(ast.parse(text)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


@pytest.mark.parametrize("text", [*NASTY, "\udcff\x00\n\u2028", "x" * 5000], ids=shown)
def test_the_rendered_hook_reads_the_answers_as_they_are(text):
    answers = GOOD | {"author_name": text, "_template": text, "_checkout": None}
    tree = ast.parse(bake.render_hook("pre_gen_project", answers))
    (raw,) = [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "json.loads"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert json.loads(raw) == answers


# --- What it says --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_quoted_answers_come_back(shell, encoding):
    line = " ".join(hook.quote_answer("author_name", text, encoding) for text in NASTY)
    line.encode(encoding)
    pasted = subprocess.run(
        [shell, "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, encoding="utf-8"
    )
    words = pasted.stdout.split("\0")[:-1]
    env = create_env_with_context({"cookiecutter": {}})
    answers = [env.from_string(word.split("=", 1)[1]).render() for word in words]
    assert answers == NASTY


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize(
    "path", ["/a b/it's $HOME", "/tmp/ü/你好 %s\\n", "/x/\udcff/100%"], ids=shown
)
def test_quoted_paths_come_back(path, encoding):
    quoted = hook.quote_path(path, encoding)
    quoted.encode(encoding)
    for shell in ("bash", "sh"):
        pasted = subprocess.run([shell, "-c", f"printf %s {quoted}"], capture_output=True)
        assert pasted.stdout == path.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("text", [*NASTY, "\x1b[31mred\n", "\udcff", "\u202egnp"], ids=shown)
def test_the_report_is_ascii(text):
    answers = dict.fromkeys(GOOD, text) | {"_template": "t", "_output_dir": "/o"}
    report = hook.report(answers, hook.check(answers), "ascii")
    assert report.isascii()
    assert "\x1b" not in report


def test_the_report_shortens_what_is_long():
    answers = GOOD | {"project_slug": "x" * 5000}
    assert len(hook.report(answers, hook.check(answers), "utf-8")) < 2000


@pytest.mark.parametrize(
    ("uv", "python", "found", "expected"),
    [
        (False, "/v/bin/python", "/v/bin/cookiecutter", "cookiecutter"),
        (False, "/v/bin/python", "/other/bin/cookiecutter", "/v/bin/python -m cookiecutter"),
        (False, "/a b/bin/python", None, "'/a b/bin/python' -m cookiecutter"),
        (True, "/v/bin/python", "/v/bin/cookiecutter", "/v/bin/python -m cookiecutter"),
        (True, "/c/uv/archive-v0/x/bin/python", "/c/x/bin/cookiecutter", "uvx cookiecutter"),
    ],
)
def test_the_program_is_one_that_the_reader_has(monkeypatch, uv, python, found, expected):
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(shutil, "which", lambda _: found)
    monkeypatch.setenv("UV", "/uv") if uv else monkeypatch.delenv("UV", raising=False)
    assert hook.program("utf-8") == expected


# --- The real command ----------------------------------------------------------------------------
# The real questions and the real hook, in a project of one file that records the answers.


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template")
    shutil.copy(bake.ROOT / "cookiecutter.json", root)
    (root / "hooks").mkdir()
    shutil.copy(bake.ROOT / "hooks" / "pre_gen_project.py", root / "hooks")
    (root / bake.TEMPLATE.name).mkdir()
    (root / bake.TEMPLATE.name / "answers.json").write_text("{{ cookiecutter | tojson }}")
    return root


@pytest.fixture
def out(tmp_path):
    """An output directory in a place of its own, with what an awkward path can have."""
    out = tmp_path / "place" / "it's an $OUT ü"
    out.mkdir(parents=True)
    return out


def generate(out, template, **options_and_answers):
    answers = {"smoke_test": "off", **options_and_answers}
    return bake.run_cookiecutter(out, template=template, **answers)


def left_in(out):
    """Everything in the output directory and beside it."""
    return sorted(
        str(path.relative_to(out.parent)) for path in out.parent.rglob("*") if path != out
    )


def answers_in(project):
    text = (project / "answers.json").read_text(encoding="utf-8")
    return {key: value for key, value in json.loads(text).items() if key in hook.FIELDS}


def retry_line(result):
    lines = result.stderr.splitlines()
    return lines[lines.index("Try again with:") + 2]


def assert_refused(result, *fragments):
    assert result.returncode == 1, result.stdout + result.stderr
    report = result.stderr.partition("Stopping generation")[0]
    assert all(fragment in report for fragment in ("Refused: ", "--replay", *fragments)), report
    prose = [line for line in report.splitlines() if line != retry_line(result)]
    assert "\n".join(prose).isascii()


def assert_retry_works(result, out, slug, **env):
    pasted = bake.run(["bash", "-c", retry_line(result)], cwd=out.parent, env=env)
    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    assert left_in(out) == [f"{out.name}/{slug}", f"{out.name}/{slug}/answers.json"]
    return answers_in(out / slug)


@pytest.mark.parametrize(
    ("slug", "rule", "suggestion"),
    [
        ("class", "Python language", "class_net"),
        ("jax", "library", "jax_net"),
        ("train", "inside the project", "train_net"),
        ("-rf", "lower_snake_case", "rf"),
        ("x" * 200, "at most 50", "x" * 40),
        ("net\udcff ", "lower_snake_case", "net"),
        ("C:\\x", "not a path", "c_x"),
        ("../x", "not a path", "x_net"),
        ("a/b/c", "not a path", "a_b_c"),
        ("../p/q/r", "not a path", "p_q_r"),
        ("ABSOLUTE", "not a path", None),
    ],
    ids=shown,
)
def test_refused_then_retried(out, template, slug, rule, suggestion):
    slug = str(out.parent / "elsewhere" / "deep") if slug == "ABSOLUTE" else slug
    suggestion = suggestion or hook.suggest_slug(slug)
    result = generate(out, template, project_slug=slug)
    assert_refused(result, "1 problem in", "project_slug", ascii(slug)[:100], rule, suggestion)
    assert left_in(out) == []
    assert assert_retry_works(result, out, suggestion) == GOOD | {"project_slug": suggestion}


def test_all_problems_are_said_and_mended_at_once(out, template):
    name, author = "Zoë's\t{{ '{{' }}🍪", "a\nb"
    bad = {"project_name": name, "author_name": author, "project_slug": "jax", "flax_api": "nnx"}
    result = generate(out, template, **bad)
    assert_refused(
        result, "3 problems in", "project_name", "project_slug", "author_name", "'a\\nb'"
    )
    assert left_in(out) == []
    mended = {"project_name": "Zoë's {{🍪", "author_name": "a b", "project_slug": "jax_net"}
    assert assert_retry_works(result, out, "jax_net") == GOOD | mended | {"flax_api": "nnx"}


@pytest.mark.parametrize(
    "env",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1:strict"}, {"LC_ALL": "C"}],
    ids=str,
)
def test_a_poor_terminal_gets_a_retry_command_that_works(out, template, env):
    author = "Zoë 🍪 'O' \"B\" \\"
    result = generate(out, template, project_slug="jax", author_name=author, env=env)
    assert_refused(result, "jax_net")
    if "PYTHONIOENCODING" in env:
        assert retry_line(result).isascii() or "latin" in env["PYTHONIOENCODING"]
    if "latin-1:strict" not in env.values():  # a terminal that decodes UTF-8 cannot paste latin-1
        assert assert_retry_works(result, out, "jax_net", **env)["author_name"] == author
    assert "UnicodeEncodeError" not in result.stderr


@pytest.mark.parametrize("author", [text for text in NASTY if "PWNED" in text], ids=shown)
def test_answers_are_data(out, template, author):
    """Whatever ran would leave a file: beside the output, or in the project."""
    result = generate(out, template, project_slug="jax", author_name=author, cwd=out.parent)
    assert_refused(result, "jax_net")
    assert left_in(out) == []
    assert assert_retry_works(result, out, "jax_net")["author_name"] == author


def test_texts_typed_at_a_prompt_come_through(out, template):
    for number, text in enumerate(["{{ 7*7 }} {% x %} {# y #}", '🍪 O\'Brien "B" \\x']):
        typed = [text, f"net_{number}", text, "1", "2", "3", "3"]
        result = generate(out, template, flags=(), stdin="\n".join(typed) + "\n")
        assert result.returncode == 0, result.stdout + result.stderr
        written = answers_in(out / f"net_{number}")
        assert (written["project_name"], written["author_name"]) == (text, text)


def test_jinja_typed_as_a_slug_is_refused(out, template):
    typed = ["Net", "{{ 7*7 }}", "{{ 7*7 }}", "1", "1", "1", "3"]
    result = generate(out, template, flags=(), stdin="\n".join(typed) + "\n")
    assert_refused(result, "'{{ 7*7 }}'", "lower_snake_case", "project_7_7")
    assert left_in(out) == []
    assert assert_retry_works(result, out, "project_7_7")["author_name"] == "{{ 7*7 }}"


def test_no_answer_at_all_is_fine(out, template):
    result = bake.run_cookiecutter(out, template=template)
    assert (result.returncode, result.stderr) == (0, "")
    assert answers_in(out / "my_flax_project") == GOOD | {"smoke_test": "auto"}


def test_a_choice_that_is_not_offered_stops_cookiecutter_itself(out, template):
    """Before any hook, with a traceback: its last line is all that the reader gets."""
    result = generate(out, template, task="vision")
    assert result.returncode == 1
    assert "the choices are" in result.stderr.splitlines()[-1]
    assert left_in(out) == []


@pytest.mark.parametrize("slug", ["my_flax_project", "", ".", ".."])
def test_an_existing_directory_stops_cookiecutter_itself(out, template, slug):
    (out / "my_flax_project").mkdir()
    result = generate(out, template, project_slug=slug)
    assert (result.returncode, result.stderr) == (1, "")
    assert "directory already exists" in result.stdout
    assert left_in(out) == [f"{out.name}/my_flax_project"]


def test_the_settings_of_the_user_are_checked_too(out, template, tmp_path):
    settings = tmp_path / "rc"
    answers = {
        "project_slug": "jax",
        "author_name": "Zoë",
        "license": "MIT",
        "version": "9",
        "x": {},
    }
    settings.write_text(json.dumps({"default_context": answers}), encoding="utf-8")
    result = generate(out, template, env={"COOKIECUTTER_CONFIG": str(settings)})
    assert_refused(result, "1 problem in", "'jax'")
    assert assert_retry_works(result, out, "jax_net")["author_name"] == "Zoë"


def test_a_name_without_letters_is_refused_by_the_hook(out, template):
    result = generate(out, template, project_name="🍪")
    assert_refused(result, "at least one letter", "'\\U0001f36a'", "my_flax_project")
    assert left_in(out) == []
    assert assert_retry_works(result, out, "my_flax_project")["project_name"] == "🍪"


def test_a_name_in_another_script_is_noted_once(out, template):
    result = generate(out, template, project_name="你好", env={"PYTHONIOENCODING": "cp1252"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("ni_hao") == 1
    assert answers_in(out / "ni_hao")["project_name"] == "你好"


def test_an_old_cookiecutter_is_told_to_go(out, template, tmp_path):
    metadata = tmp_path / "site" / "cookiecutter-2.3.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: cookiecutter\nVersion: 2.3.1\n")
    result = generate(out, template, env={"PYTHONPATH": str(tmp_path / "site")})
    assert_refused(result, "'2.3.1'", "2.4 or later")
    assert retry_line(result).startswith("uvx cookiecutter@latest ")
    assert left_in(out) == []


def test_replay_repeats_a_refused_answer(out, template, tmp_path):
    """Which is why the message says so; should it stop being true, the sentence can go."""
    result = generate(out, template, project_slug="jax", home=tmp_path / "home")
    assert_refused(result, "Do not use --replay")
    again = bake.run_cookiecutter(
        out, template=template, flags=["--replay"], home=tmp_path / "home"
    )
    assert_refused(again, "'jax'")
    assert left_in(out) == []


def test_an_old_replay_file_is_refused(out, template, tmp_path):
    old = GOOD | {"flax_api": "haiku", "accelerator": None, "author_name": 7, "devices": 8}
    old = with_derived(old) | {"__project_name_in_toml": "My"}
    replay = tmp_path / "old.json"
    replay.write_text(json.dumps({"cookiecutter": old}))
    result = bake.run_cookiecutter(out, template=template, flags=["--replay-file", replay])
    assert_refused(result, "4 problems in", "author_name", "flax_api", "accelerator", "'haiku'")
    assert left_in(out) == []
    assert assert_retry_works(result, out, "my_flax_project") == GOOD


def test_the_checkout_is_in_the_retry_command(out, template):
    flags = ("--no-input", "--checkout", "v1.0 rc")
    result = generate(out, template, project_slug="jax", flags=flags)
    assert "--checkout 'v1.0 rc'" in retry_line(result)
    assert_retry_works(result, out, "jax_net")


@pytest.mark.parametrize("slug", ["jax", "a/b/c"])
def test_keep_project_on_failure_keeps_it(out, template, slug):
    flags = ("--no-input", "--keep-project-on-failure")
    result = generate(out, template, project_slug=slug, flags=flags)
    assert_refused(result)
    assert (out / slug).is_dir()


@pytest.mark.parametrize("slug", ["jax", "a/jax"])
def test_an_existing_directory_is_left_as_it_was(out, template, slug):
    (out / slug).mkdir(parents=True)
    (out / slug / "mine.txt").write_text("mine")
    before = left_in(out)
    result = generate(out, template, project_slug=slug, flags=("--no-input", "-f"))
    assert_refused(result, "No file was written")
    assert left_in(out) == before
    assert "--overwrite-if-exists" not in retry_line(result)


def test_overwriting_is_repeated_for_the_same_directory_only(out, template):
    (out / "my_net").mkdir()
    (out / "my_net" / "mine.txt").write_text("mine")
    author, flags = "a\nb", ("--no-input", "-f")
    result = generate(out, template, project_slug="my_net", author_name=author, flags=flags)
    assert_refused(result)
    pasted = bake.run(["bash", "-c", retry_line(result)])
    assert pasted.returncode == 0, pasted.stderr
    assert sorted(path.name for path in (out / "my_net").iterdir()) == ["answers.json", "mine.txt"]


def test_the_output_directory_itself_is_never_removed(out, template):
    for slug in ("..", "."):
        result = generate(out, template, project_slug=slug, flags=("--no-input", "-f"))
        assert_refused(result, "not a path")
        assert out.is_dir()


def test_an_empty_directory_that_was_there_stays(out, template):
    (out / "a").mkdir()
    time.sleep(1.1)  # the hook tells old from new by the second
    assert_refused(generate(out, template, project_slug="a/b/c"))
    assert left_in(out) == [f"{out.name}/a"]


def test_the_real_template_refuses_too(out):
    result = generate(out, bake.ROOT, project_slug="jax")
    assert_refused(result, "jax_net")
    assert left_in(out) == []
