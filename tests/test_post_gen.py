"""The hook after generation: what it says and leaves behind, with stand-ins for uv and Python."""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bake
import pytest

hook = bake.load_hook("post_gen_project")
LIMITS = "INSTALL_LIMIT, SMOKE_LIMIT = 1200, 330"
REFUSED = (
    "error: Failed to fetch: https://i/simple/jax/\n  cause: Connection refused (os error 111)"
)

# Each notes how it was called and with which environment, then does what the test ordered.
UV = """#!/bin/sh
echo "uv $*" >> "$NOTES/calls"
env > "$NOTES/env-$1"
case $1 in
    venv)
        mkdir -p .venv/bin .venv/lib/python3.13/site-packages && touch .venv/pyvenv.cfg &&
            cp "$NOTES/python" .venv/bin/python && sh -c "${ON_VENV:-:}" ;;
    pip) sh -c "${ON_INSTALL:-:}" ;;
esac
"""
PYTHON = """#!/bin/sh
case $* in
    *abiflags*) echo 3.13 x86_64; exit ;;
esac
echo "python $*" >> "$NOTES/calls"
case $* in
    *smoke.py) env > "$NOTES/env-smoke"; sh -c "${ON_SMOKE:-:}" ;;
    *) echo Python 3.13.0 jax 0.12.0 flax 0.12.9 ;;
esac
"""
TOOLS = ["cat", "chmod", "cksum", "cp", "dirname", "env", "find", "grep", "mkdir", "mv", "ps", "rm"]
TOOLS += ["sed", "sh", "sleep", "touch", "tr"]


@pytest.fixture
def notes(tmp_path):
    """A directory with the stand-ins, with bin/ for the PATH and with what they note."""
    notes = tmp_path / "notes"
    (notes / "bin").mkdir(parents=True)
    for path, text in ((notes / "python", PYTHON), (notes / "bin" / "uv", UV)):
        path.write_text(text)
        path.chmod(0o755)
    for tool in TOOLS:
        (notes / "bin" / tool).symlink_to(shutil.which(tool))
    return notes


@pytest.fixture
def out(tmp_path):
    out = tmp_path / "it's an $OUT ü"
    out.mkdir()
    return out


def environment(notes, **env):
    return {"NOTES": str(notes), "PATH": str(notes / "bin"), **env}


def generate(out, notes, env=(), **options_and_answers):
    options_and_answers.setdefault("home", notes / "home")
    env = environment(notes, **dict(env))
    return bake.run_cookiecutter(out, env=env, **options_and_answers)


def calls(notes):
    path = notes / "calls"
    return path.read_text().splitlines() if path.exists() else []


def noted(notes, name):
    lines = (notes / f"env-{name}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def copy_of_template(path, file="hooks/post_gen_project.py", old="", new=""):
    """The template with one change."""
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
    shutil.copytree(bake.ROOT, path, ignore=ignored)
    text = (path / file).read_text(encoding="utf-8")
    assert text.count(old) == 1 or not old
    (path / file).write_text(text.replace(old, new) if old else text + new, encoding="utf-8")
    return path


def assert_kept(out, venv):
    project = out / "my_flax_project"
    assert (project / "README.md").exists()
    assert (project / ".venv").exists() is venv


def assert_skipped(result, out, *fragments, venv=False):
    assert result.returncode == 0, result.stdout + result.stderr
    for fragment in ("Smoke test SKIPPED: ", "make smoke", "Created ", *fragments):
        assert fragment in result.stdout
    assert_kept(out, venv)


def assert_failed(result, *fragments):
    assert result.returncode == 1, result.stdout + result.stderr
    for fragment in ("--keep-project-on-failure", *fragments):
        assert fragment in result.stdout


def gone(pid):
    """Whether the process has ended, or is about to be collected."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# --- Passed --------------------------------------------------------------------------------------


def test_what_is_said_when_it_passed(out, notes):
    result = generate(out, notes, projct_name="x", author_name="Zoë 🍪", accelerator="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Smoke test passed: Python 3.13.0 jax 0.12.0 flax 0.12.9; " in result.stdout
    summary = result.stdout.partition("Created ")[2]
    assert "    author_name    Zo" in summary
    assert "    project_name   My Flax Project\n" in summary
    assert "projct_name" not in summary
    assert summary.endswith("make train\n    make help\n")
    assert_kept(out, venv=True)
    project = out / "my_flax_project"
    create, install, versions, smoke = calls(notes)
    assert create == "uv venv --quiet --no-project --python >=3.11 .venv"
    assert install == "uv pip install --python .venv/bin/python --editable .[dev]"
    assert versions.startswith("python -I -c ")
    assert smoke == f"python {project}/tests/smoke.py"
    assert make(project, notes, "smoke").returncode == 0
    assert calls(notes)[4:] == ["python tests/smoke.py"]  # the same, and setup is done


def make(project, notes, *words):
    command = [shutil.which("make"), *words]
    return bake.run(command, home=notes / "home", cwd=project, env=environment(notes))


@pytest.mark.parametrize("accelerator", ["cuda12", "cuda13", "tpu"])
def test_the_packages_of_an_accelerator_are_left_to_make(out, notes, accelerator):
    result = generate(out, notes, accelerator=accelerator)
    assert "Smoke test passed" in result.stdout
    assert calls(notes)[1].endswith(" .[dev]")
    setup = make(out / "my_flax_project", notes, "setup")
    assert f"setup: .venv: '{accelerator}' is not installed\n" in setup.stderr
    assert calls(notes)[-1].endswith(f" .[{accelerator},dev]")


def test_which_variables_reach_the_children(out, notes):
    kept = {
        **{"HTTPS_PROXY": "http://p:1", "no_proxy": "localhost", "SSL_CERT_FILE": "/c.pem"},
        **{"UV_INDEX_URL": "http://i/", "UV_OFFLINE": "1", "PIP_INDEX_URL": "http://i/"},
        **{"UV_CACHE_DIR": "/cache", "PIP_CERT": "/c.pem"},
    }
    removed = {
        **{"VIRTUAL_ENV": "/v", "PYTHONPATH": "/nowhere", "PYTHONWARNINGS": "ignore"},
        **{"PYTHONSTARTUP": "/s.py", "CONDA_PREFIX": "/c", "UV_PROJECT": "/p"},
        **{"UV_PROJECT_ENVIRONMENT": "/e", "UV_SYSTEM_PYTHON": "1", "PIP_TARGET": "/t"},
    }
    result = generate(out, notes, env=kept | removed)
    assert "Smoke test passed" in result.stdout, result.stdout + result.stderr
    for name in ("venv", "pip", "smoke"):
        seen = noted(notes, name)
        assert {key: seen.get(key) for key in kept} == kept
        assert not removed.keys() & seen.keys()


def test_the_smoke_test_itself_forgets_accelerators_and_schedulers(tmp_path):
    hostile = {"XLA_FLAGS": "--xla_no_such_flag=1", "JAX_PLATFORMS": "cuda", "JAX_ENABLE_X64": "1"}
    hostile |= {"CUDA_VISIBLE_DEVICES": "7", "TRAIN_NUM_PROCESSES": "2", "TPU_NAME": "x"}
    code = (
        "import json, os, smoke; smoke.prepare_environment('/s'); print(json.dumps({**os.environ}))"
    )
    out = bake.run_cookiecutter(tmp_path, smoke_test="off", accelerator="cuda13")
    assert out.returncode == 0, out.stderr
    tests = tmp_path / "my_flax_project" / "tests"
    seen = json.loads(bake.run([sys.executable, "-c", code], cwd=tests, env=hostile).stdout)
    assert not seen.keys() & {"JAX_ENABLE_X64", "TRAIN_NUM_PROCESSES", "TPU_NAME"}
    assert "no_such_flag" not in seen["XLA_FLAGS"]
    assert (seen["JAX_PLATFORMS"], seen["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")


def test_uv_python_is_honoured(out, notes):
    generate(out, notes, env={"UV_PYTHON": "3.12"})
    assert calls(notes)[0] == "uv venv --quiet --no-project --python 3.12 .venv"


def test_a_bare_container(out, notes):
    """No user, no terminal, no temporary directory that exists, standard input closed."""
    command = [sys.executable, "-m", "cookiecutter", bake.ROOT, "--no-input", "-o", out]
    unset = ["env", "-u", "USER", "-u", "LOGNAME", "-u", "TERM", "TMPDIR=/nowhere"]
    shell = ["sh", "-c", '"$@" <&-', "sh", *unset, *command]
    result = bake.run(shell, env=environment(notes), home=notes / "home")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Smoke test passed" in result.stdout


def test_an_existing_environment_is_used_again(out, notes):
    generate(out, notes)
    generate(out, notes, flags=("--no-input", "-f"))
    assert [line.split()[1] for line in calls(notes) if "uv" in line] == ["venv", "pip"]


def test_an_environment_that_was_there_survives_a_failed_installation(out, notes):
    generate(out, notes)
    venv = out / "my_flax_project/.venv"
    (venv / ".setup").unlink()
    order = {"ON_INSTALL": f"echo '{REFUSED}'; exit 2"}
    result = generate(out, notes, order, flags=("--no-input", "-f"))
    assert_skipped(result, out, "no network", venv=True)
    assert (venv / "bin/python").exists()


def test_two_generations_at_once(out, notes):
    """They fail, at the same time, with one name: each has a log of its own."""
    (out / "a").mkdir()
    (out / "b").mkdir()
    env = {"ON_SMOKE": "sleep 0.5; exit 1"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(generate, out / name, notes, env) for name in "ab"]
    for run in runs:
        assert_failed(run.result(), "exit code 1")
    assert len({re.search(r"full log: (\S+)", run.result().stdout)[1] for run in runs}) == 2


# --- Skipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"ON_INSTALL": f"echo '{REFUSED}'; exit 2"}, ["no network", "Connection refused"]),
        (
            {"ON_INSTALL": "echo 'No space left on device (os error 28)'; exit 2"},
            ["the disk is full", "about 1 GB needed", "No space left"],
        ),
        (
            {"ON_VENV": "echo 'error: No interpreter found for Python >=3.11'; exit 2"},
            ["no matching Python", "No interpreter found"],
        ),
        ({"ON_INSTALL": "echo 'hm'; exit 1"}, ["the packages cannot be installed", "hm"]),
    ],
    ids=["network", "disk", "python", "unknown"],
)
def test_a_fault_of_the_machine_skips(out, notes, order, words):
    assert_skipped(generate(out, notes, order), out, *words)
    assert "error" not in generate(out, notes, order).stderr.lower()


def test_required_makes_a_skip_a_failure(out, notes):
    order = {"ON_INSTALL": f"echo '{REFUSED}'; exit 2"}
    result = generate(out, notes, order, smoke_test="required")
    assert_failed(result, "SKIPPED: no network", "It was required")
    assert list(out.iterdir()) == []


def test_versions_that_do_not_go_together_are_a_failure(out, notes):
    """Of the template, not of the machine: skipping would hide it."""
    order = {"ON_INSTALL": "echo 'No solution found: only jax<=0.12 is available'; exit 1"}
    assert_failed(generate(out, notes, order), "cannot be installed", "only jax<=0.12")
    assert list(out.iterdir()) == []


def test_a_disk_that_is_full_in_the_smoke_test_skips(out, notes):
    order = {"ON_SMOKE": "echo 'OSError: [Errno 28] No space left on device'; exit 1"}
    assert_skipped(generate(out, notes, order), out, "the disk is full", venv=True)


def test_an_installation_without_end_skips(out, notes, tmp_path):
    template = copy_of_template(tmp_path / "t", old=LIMITS, new=LIMITS.replace("1200", "1"))
    order = {"ON_INSTALL": 'echo $$ > "$NOTES/pid"; sleep 600 & sleep 600'}
    result = generate(out, notes, order, template=template)
    assert_skipped(result, out, "not installed after 1 s")
    assert gone((notes / "pid").read_text())


def test_without_uv_it_takes_venv_and_pip(out, notes):
    """The real ones, up to the package index, which does not answer."""
    (notes / "bin" / "uv").unlink()
    env = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "0"}
    env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": ""}
    assert_skipped(generate(out, notes, env), out, "no network", "the installer's last words")


def test_the_python_that_runs_the_hook_makes_the_environment(out, notes):
    (notes / "bin" / "uv").unlink()
    base = sys._base_executable
    result = generate(out, notes, {"PIP_NO_INDEX": "1"}, flags=("--no-input", "-v"))
    assert "SKIPPED" in result.stdout
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook.shutil, "which", lambda name: None if name == "uv" else name)
        patch.setattr(hook, "run", lambda *arguments: seen.append(arguments) or (0, ""))
        patch.delenv("UV_PYTHON", raising=False)
        hook.prepare_environment()
        patch.setenv("UV_PYTHON", "3.12")
        hook.prepare_environment()
    assert [x[2]["UV_PYTHON"] for x in seen] == [base, "3.12"]


def test_without_sh_nothing_can_be_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hook.Skipped, match="no sh on PATH"):
        hook.prepare_environment()


def fake_python(path, answer):
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


# What uv 0.13 and pip 23 to 26 said, each in a situation that was made for the purpose.
NETWORK = [
    # uv: offline and an empty cache; a port that is closed; no such host; a proxy that is gone;
    # a certificate of its own; no answer; 503; a Python that would have to be downloaded.
    "error: No solution found when resolving dependencies\n  cause: Because jax was not found in "
    "the cache and you require jax, we can conclude that your requirements are unsatisfiable.\n\n"
    "hint: Packages were unavailable because the network was disabled. When the network is "
    "disabled, registry packages may only be read from the cache.",
    "error: Failed to fetch: http://127.0.0.1:9/simple/jax/\n  cause: error sending request for "
    "url (http://127.0.0.1:9/simple/jax/)\n  cause: client error (Connect)\n  cause: tcp connect "
    "error\n  cause: Connection refused (os error 111)",
    "cause: dns error\n  cause: error resolving DNS\n  cause: failed to lookup address "
    "information: Name or service not known",
    "cause: tunnel error: failed to create underlying connection\n  cause: tcp connect error\n  "
    "cause: Connection refused (os error 111)",
    "error: Failed to fetch: https://localhost:8943/simple/flax/\n  cause: client error (Connect)"
    "\n  cause: invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))",
    "cause: error sending request for url (http://localhost/simple/flax/)\n  cause: operation "
    "timed out",
    "error: Failed to fetch: http://localhost:8945/simple/flax/\n  cause: HTTP status server error "
    "(503 Service Unavailable) for url (http://localhost:8945/simple/flax/)",
    "error: Failed to download `http://127.0.0.1:9/20261110/cpython-3.15.2.tar.gz`\n  cause: error "
    "sending request for url (http://127.0.0.1:9/20261110/cpython-3.15.2.tar.gz)",
    # pip: a port that is closed; a proxy that is gone; a certificate; no answer; nothing there.
    "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after "
    "connection broken by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPConnection "
    "object at 0x7f95b9692ba0>: Failed to establish a new connection: [Errno 111] Connection "
    "refused')': /simple/jax/",
    "after connection broken by 'ProxyError('Cannot connect to proxy.', NewConnectionError('...'))'"
    ": /simple/jax/",
    "after connection broken by 'SSLError(SSLCertVerificationError(1, '[SSL: "
    "CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate "
    "(_ssl.c:1020)'))': /simple/jax/",
    "after connection broken by 'ReadTimeoutError(\"HTTPConnectionPool(host='localhost', "
    "port=8944): Read timed out. (read timeout=3.0)\")': /simple/jax/",
    "ERROR: Could not find a version that satisfies the requirement jax (from versions: none)\n"
    "ERROR: No matching distribution found for jax",
]
DISK = [
    "error: Failed to install: numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (numpy==2.4.6)\n"
    "  cause: Failed to copy to `/t/.venv/lib/libscipy_openblas64_.so`\n  cause: failed to copy "
    "file from /c/libscipy_openblas64_.so: No space left on device (os error 28)",
    "error: Failed to write to the client cache\n  cause: failed to write to file `/c/.tmpW3M5ve`: "
    "No space left on device (os error 28)",
]
OTHER_FAULTS = [
    (
        "error: No interpreter found for Python >=3.99 in managed installations or search path",
        "no matching Python",
    ),
    (
        "error: Failed to create virtual environment\n  cause: failed to create directory `.venv`: "
        "Permission denied (os error 13)",
        "no permission to write",
    ),
    (
        "error: Failed to create virtual environment\n  cause: failed to create directory `.venv`: "
        "Read-only file system (os error 30)",
        "no permission to write",
    ),
    ("Error: [Errno 30] Read-only file system: '/p/.venv'", "no permission to write"),
]
# These speak of the template or of a package and are no fault of the machine.
NO_FAULT = [
    "error: No solution found when resolving dependencies\n  cause: Because only jax<=0.12.0.1 is "
    "available and you require jax>=0.99, we can conclude that your requirements are "
    "unsatisfiable.",
    "cause: Because absl-py-nonexist-xyz was not found in the package registry and you require "
    "absl-py-nonexist-xyz, we can conclude that your requirements are unsatisfiable.",
    "ERROR: Could not find a version that satisfies the requirement jax>=0.99 (from versions: 0.0, "
    "0.1, 0.12.0, 0.12.0.1)\nERROR: No matching distribution found for jax>=0.99",
    "ValueError: Unable to determine which files to ship inside the wheel using the following "
    "heuristics: https://hatch.pypa.io/latest/plugins/builder/wheel/#default-file-selection",
    "ModuleNotFoundError: No module named 'jax'",
]


@pytest.mark.parametrize("log", NETWORK)
def test_no_network_is_recognised(log):
    assert hook.environment_fault(log) == "no network"


@pytest.mark.parametrize("log", DISK)
def test_a_full_disk_is_recognised(log):
    assert hook.environment_fault(log) == "the disk is full"


def test_a_full_disk_is_recognised_behind_a_broken_connection():
    log = (
        'ERROR: Could not install packages due to an OSError: ("Connection broken: OSError(28, '
        "'No space left on device')\", OSError(28, 'No space left on device'))"
    )
    assert hook.environment_fault(log) == "the disk is full"


@pytest.mark.parametrize(("log", "fault"), OTHER_FAULTS)
def test_other_faults_are_recognised(log, fault):
    assert hook.environment_fault(log) == fault


@pytest.mark.parametrize("log", NO_FAULT)
def test_what_is_no_fault_of_the_machine(log):
    assert hook.environment_fault(log) is None


# --- Off, and the variable that overrides the answer ---------------------------------------------


@pytest.mark.parametrize(
    ("variable", "answer", "code", "words"),
    [
        ("off", "required", 0, "Smoke test off."),
        ("auto", "required", 0, "Smoke test SKIPPED: no network"),
        ("required", "off", 1, "It was required"),
        ("maybe", "required", 1, "It was required"),
        ("maybe", "auto", 0, "FLAX_TEMPLATE_SMOKE_TEST=maybe is none of auto, required, off"),
        (None, "off", 0, "Smoke test off."),
    ],
)
def test_the_variable_overrides_the_answer(out, notes, variable, answer, code, words):
    env = {"ON_INSTALL": f"echo '{REFUSED}'; exit 2"}
    env |= {"FLAX_TEMPLATE_SMOKE_TEST": variable} if variable else {}
    result = generate(out, notes, env, smoke_test=answer)
    assert result.returncode == code
    assert words in result.stdout
    assert bool(calls(notes)) is (variable in ("auto", "required"))


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("/v/bin/python /v/bin/cruft update", True),
        ("/v/bin/python /v/bin/cruft update --skip-apply-ask", True),
        ("python -m cruft diff --exit-code", True),
        ("/v/bin/python /v/bin/cruft check", True),
        ("/v/bin/python /v/bin/cruft create gh:a/b", False),
        ("/v/bin/python /v/bin/cookiecutter gh:a/cruft_net", False),
        ("/v/bin/cookiecutter /home/update/check project_name=diff", False),
        ("", False),
    ],
)
def test_cruft_is_noticed(monkeypatch, tmp_path, parent, expected):
    fake_python(tmp_path / "ps", f"echo '{parent}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook.compares_versions() is expected


def test_without_ps_it_is_not_cruft(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook.compares_versions() is False


def test_the_real_cruft_trains_once(tmp_path, notes):
    """It generates both versions again for an update, and each time would train."""
    pytest.importorskip("cruft")
    template = copy_of_template(tmp_path / "template")
    env = environment(notes, PATH=f"{notes / 'bin'}:{os.environ['PATH']}")
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@t"}

    def call(*command, cwd):
        result = bake.run(command, home=notes / "home", cwd=cwd, env=env)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def commit(root):
        call("git", "init", "--quiet", cwd=root)
        call("git", "add", "--all", cwd=root)
        call("git", "commit", "--quiet", "--message", "x", cwd=root)

    cruft = [sys.executable, "-m", "cruft"]
    commit(template)
    made = call(*cruft, "create", "--no-input", template, cwd=tmp_path)
    assert "Smoke test passed" in made
    commit(tmp_path / "my_flax_project")
    makefile = template / "{{cookiecutter.project_slug}}" / "Makefile"
    makefile.write_text(makefile.read_text(encoding="utf-8") + "# new\n", encoding="utf-8")
    commit(template)
    updated = call(*cruft, "update", "--skip-apply-ask", cwd=tmp_path / "my_flax_project")
    assert "cruft only compares" in updated
    assert len([line for line in calls(notes) if line.endswith("smoke.py")]) == 1
    assert (tmp_path / "my_flax_project" / "Makefile").read_text().endswith("# new\n")


# --- Failed --------------------------------------------------------------------------------------

BROKEN = "seq=0; while [ $seq -lt 99 ]; do seq=$((seq+1)); echo line $seq; done; exit 1"


def test_a_failing_smoke_test(out, notes):
    result = generate(out, notes, {"ON_SMOKE": BROKEN})
    assert_failed(result, "exit code 1", "jax 0.12.0", "\n    line 99\n")
    log = Path(re.search(r"full log: (.*)", result.stdout)[1])
    assert log.read_text().splitlines() == [f"line {i + 1}" for i in range(99)]
    assert out not in log.parents
    assert list(out.iterdir()) == []


def test_a_failing_smoke_test_of_a_project_to_keep(out, notes):
    flags = ("--no-input", "--keep-project-on-failure")
    result = generate(out, notes, {"ON_SMOKE": "exit 1"}, flags=flags)
    assert_failed(result, str(out / "my_flax_project")[-20:])
    assert_kept(out, venv=True)


def test_a_failing_smoke_test_of_a_project_that_was_there(out, notes):
    generate(out, notes)
    (out / "my_flax_project" / "mine.txt").write_text("mine")
    result = generate(out, notes, {"ON_SMOKE": "exit 1"}, flags=("--no-input", "-f"))
    assert_failed(result, "unless it was there before", "mixed")
    assert (out / "my_flax_project" / "mine.txt").read_text() == "mine"
    assert_kept(out, venv=True)


def test_a_smoke_test_that_is_killed(out, notes):
    assert_failed(generate(out, notes, {"ON_SMOKE": "kill -9 $PPID"}), "exit code -9")


def test_a_smoke_test_without_end(out, notes, tmp_path):
    template = copy_of_template(tmp_path / "t", old=LIMITS, new=LIMITS.replace("330", "1"))
    order = 'echo started; sleep 600 & echo $! > "$NOTES/pid"; wait'
    result = generate(out, notes, {"ON_SMOKE": order}, template=template)
    assert_failed(result, "not finished after 1 s", "    started\n")
    assert gone((notes / "pid").read_text())
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tests/test_run.py", "\ndef x(:\n", "invalid syntax"),
        ("pyproject.toml", "\nx = [\n", "pyproject.toml is broken"),
        ("tests/test_run.py", "\nX = '{{ '{{' }} cookiecutter.task }}'\n", "was not rendered"),
    ],
)
def test_a_broken_file_is_a_failure_without_any_environment(
    out, notes, tmp_path, file, text, words
):
    template = copy_of_template(tmp_path / "t", "{{cookiecutter.project_slug}}/" + file, new=text)
    assert_failed(generate(out, notes, template=template), file, words)
    assert calls(notes) == []
    assert list(out.iterdir()) == []


# --- Interrupted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["ON_INSTALL", "ON_SMOKE"])
def test_interrupted(out, notes, name, moment):
    process = interrupted(out, notes, name, moment)
    assert "Interrupted. The project is complete at" in process.said
    assert "make setup, then make smoke" in process.said
    assert "Traceback" not in process.said
    assert process.returncode == (1 if name == "SIGINT" else 0)
    assert gone((notes / "pid").read_text())
    assert_kept(out, venv=moment == "ON_SMOKE")


def test_interrupting_a_required_smoke_test_is_a_failure(out, notes):
    process = interrupted(out, notes, "SIGTERM", "ON_SMOKE", "smoke_test=required")
    assert "Interrupted before the required smoke test was finished." in process.said
    assert "--keep-project-on-failure" in process.said
    assert process.returncode == 1
    assert list(out.iterdir()) == []


def interrupted(out, notes, name, moment, *answers):
    """Ctrl-C goes to every process of the terminal; SIGTERM, here, to the hook alone."""
    command = [sys.executable, "-m", "cookiecutter", bake.ROOT, "--no-input", "-o", out, *answers]
    parent = "$(ps -o ppid= -p $PPID)"  # the hook, or the sh that runs setup.sh for it
    parent = f"$(ps -o ppid= -p {parent})" if moment == "ON_INSTALL" else parent
    order = f'sleep 600 & echo $! > "$NOTES/new"; echo {parent} > "$NOTES/hook"; '
    order += 'cp "$NOTES/new" "$NOTES/pid"; wait'
    env = bake.isolated(notes / "home", **environment(notes, **{moment: order}))
    process = subprocess.Popen(
        [str(word) for word in command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # As on a terminal; tests that run in the background inherit an ignored SIGINT.
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        if name == "SIGINT"
        else None,
    )
    until = time.monotonic() + 60
    while not (notes / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(int((notes / "hook").read_text()), signal.SIGTERM)
    process.said, _ = process.communicate(timeout=30)
    return process


# --- run() ---------------------------------------------------------------------------------------


def test_run_returns_the_output_and_the_exit_code(capsys):
    assert hook.run(["sh", "-c", "echo a; echo b >&2; printf c; exit 3"], 60, None) == (
        3,
        "a\nb\nc",
    )
    assert capsys.readouterr().out == "    a\n    b\n    c\n"


def test_run_shows_bytes_that_are_no_text():
    assert hook.run(["printf", "\\377\\n"], 60, None) == (0, "\ufffd\n")


@pytest.mark.parametrize("output", ["", "exec > /dev/null 2>&1;"])
def test_run_ends_what_takes_too_long_and_its_children(tmp_path, output):
    script = f"{output} sleep 600 & echo $! > {tmp_path}/pid; wait"
    began = time.monotonic()
    assert hook.run(["sh", "-c", script], 0.5, None) == (None, "")
    assert time.monotonic() - began < 5
    assert gone((tmp_path / "pid").read_text())


def test_run_gives_no_input():
    assert hook.run(["cat"], 10, None) == (0, "")
