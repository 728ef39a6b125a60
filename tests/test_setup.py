"""`make setup` mends whatever .venv it finds, says what was wrong, and is then done at once."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import bake
import pytest

# uv and Python, as far as setup.sh looks at them. Packages are empty directories.
UV = """#!/bin/sh
echo "uv $*" >> "$NOTES/calls"
site=.venv/lib/python3.13/site-packages
case $1 in
    venv)
        [ ! -e .venv ] || { echo "uv: .venv is there" >&2; exit 2; }
        mkdir -p .venv/bin "$site"; touch .venv/pyvenv.cfg; cp "$NOTES/python" .venv/bin/python ;;
    pip)
        sh -c "${ON_INSTALL:-:}" || exit
        # A package whose metadata is there counts as installed.
        for name in jax flax; do
            case "$*" in *--reinstall*) rm -rf "$site/$name-1.dist-info" ;; esac
            [ -d "$site/$name-1.dist-info" ] || mkdir -p "$site/$name-1.dist-info" "$site/$name"
        done ;;
    export) echo "jax==1" ;;
esac
"""
PYTHON = "#!/bin/sh\necho ${ANSWER:-3.13 x86_64}\n"
INSTALL = "uv pip install --python .venv/bin/python --editable .[dev]"


class SetUpProject(bake.Project):
    """A generated project, with stand-ins for what installs."""

    def __init__(self, directory: Path):
        super().__init__(bake.generated(directory))
        self.notes = directory / "notes"
        self.bin = self.notes / "bin"
        self.bin.mkdir(parents=True)
        self.write(self.notes / "python", PYTHON)
        self.write(self.bin / "uv", UV)
        self.python = self.root / ".venv/bin/python"
        self.site = self.root / ".venv/lib/python3.13/site-packages"

    @staticmethod
    def write(path, text):
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def make(self, *words, path="/usr/bin:/bin", **environ):
        """Run make; return what it did as well: `calls` of uv, and `said` by setup.sh."""
        (self.notes / "calls").unlink(missing_ok=True)
        environ = {"NOTES": str(self.notes), "PATH": f"{self.bin}:{path}"} | environ
        result = bake.run(["make", *words], cwd=self.root, env=environ)
        calls = self.notes / "calls"
        result.calls = calls.read_text().splitlines() if calls.exists() else []
        result.said = [x[7:] for x in result.stderr.splitlines() if x.startswith("setup: ")]
        return result

    def mended(self, because, *calls, words=("setup",), **environ):
        """`make setup` says why, does this, and a second one does nothing."""
        result = self.make(*words, **environ)
        assert result.returncode == 0, result.stdout + result.stderr
        assert len(result.said) == 1 and because in result.said[0], result.said
        assert result.calls == list(calls)
        self.assert_complete(*words, **environ)

    def assert_complete(self, *words, **environ):
        again = self.make(*words, **environ)
        assert (again.returncode, again.calls, again.stderr) == (0, [], "")
        assert (self.site / "jax").is_dir() and (self.site / "flax").is_dir()


VENV = "uv venv --quiet --no-project --python >=3.11 .venv"
REINSTALL = INSTALL.replace("python --editable", "python --reinstall --editable")


@pytest.fixture
def project(tmp_path):
    project = SetUpProject(tmp_path / "sp ace 'ü")
    first = project.make("setup")
    assert (first.returncode, first.calls, first.said) == (0, [VENV, INSTALL], [])
    project.assert_complete("setup")
    return project


def test_a_touched_file_is_no_reason_and_a_changed_one_is(project):
    (project.root / "pyproject.toml").touch()
    project.assert_complete("setup")
    with open(project.root / "pyproject.toml", "a") as file:
        file.write("# mine\n")
    project.mended("pyproject.toml or uv.lock has changed", INSTALL)


def test_a_lock_that_comes_and_goes(project):
    (project.root / "uv.lock").write_text("version = 1\n")
    result = project.make("setup")
    export, locked, install = result.calls
    assert export.startswith("uv export ") and export.endswith(" --extra dev")
    assert locked.endswith("--requirements .venv/locked.txt") and install == INSTALL
    (project.root / "uv.lock").unlink()
    project.mended("uv.lock has changed", INSTALL)


def test_what_was_deleted_comes_back(project):
    shutil.rmtree(project.site / "flax")  # its metadata still says that it is installed
    project.mended("flax is missing", INSTALL, REINSTALL)
    for path in project.site.glob("jax*"):
        shutil.rmtree(path)
    project.mended("jax is missing", INSTALL)
    (project.site / "mine").mkdir()
    project.assert_complete("setup")


def test_other_extras_are_installed_and_kept(project):
    gpu = INSTALL.replace("[dev]", "[cuda12,dev]")
    project.mended("'cuda12' is not installed", gpu, words=("setup", "EXTRAS=cuda12,dev"))
    project.assert_complete("setup")  # [dev] is a part of it
    with open(project.root / "pyproject.toml", "a") as file:
        file.write("# mine\n")
    project.mended("has changed", INSTALL.replace("[dev]", "[dev,cuda12]"))
    other = INSTALL.replace("[dev]", "[cuda13,dev]")
    project.mended("it is for cuda12", VENV, other, words=("setup", "EXTRAS=cuda13,dev"))
    wrong = project.make("setup", "EXTRAS=cuda14,dev")
    assert wrong.returncode == 2 and wrong.said == ["'cuda14' is not an extra of pyproject.toml"]


def break_link(project):
    project.python.unlink()
    project.python.symlink_to("/nowhere/python3.13")


def upgrade(project):
    """Debian's python3, to which the link leads, is 3.14 since yesterday."""
    project.write(project.python, "#!/bin/sh\necho 3.14 x86_64\n")


def upgrade_both(project):
    upgrade(project)
    (project.root / ".venv/lib/python3.14/site-packages").mkdir(parents=True)


def move(project):
    new = project.root.with_name("moved")
    project.root.rename(new)
    project.site = new / project.site.relative_to(project.root)
    project.root, project.python = new, new / ".venv/bin/python"


@pytest.mark.parametrize(
    ("fault", "because"),
    [
        (break_link, "its Python does not start"),
        (lambda project: project.python.unlink(), "its Python does not start"),
        (upgrade, "its packages are not for its Python, 3.14"),
        (upgrade_both, "it was made for Python 3.13 x86_64, but has 3.14 x86_64"),
        (move, "it was made in /"),
        (lambda project: (project.root / ".venv/pyvenv.cfg").unlink(), "its Python is that of"),
    ],
)
def test_an_environment_that_cannot_be_mended_is_made_again(project, fault, because):
    if fault.__name__ == "<lambda>":
        (project.root / ".venv/bin/activate").touch()
    fault(project)
    project.mended(because, VENV, INSTALL)
    assert not (project.root / ".venv.old").exists()


def test_a_python_that_is_too_old(project):
    project.write(project.python, "#!/bin/sh\necho 3.9 x86_64\nexit 1\n")
    project.mended("it has Python 3.9, and the project needs 3.11", VENV, INSTALL)


def test_another_kind_of_machine_with_the_same_home(project):
    answer = "3.13 aarch64"
    project.write(project.notes / "python", f"#!/bin/sh\necho {answer}\n")
    shutil.copy(project.notes / "python", project.python)
    project.mended("made for Python 3.13 x86_64, but has 3.13 aarch64", VENV, INSTALL)


def test_an_interrupted_installation_is_not_built_upon(project):
    with open(project.root / "pyproject.toml", "a") as file:
        file.write("# mine\n")
    killed = project.make("setup", ON_INSTALL="kill -9 $PPID; sleep 0.1; kill -9 $PPID")
    assert killed.returncode == 2
    project.mended("an installation was interrupted", VENV, INSTALL)


def test_an_installation_that_failed_goes_on_where_it_was(project):
    with open(project.root / "pyproject.toml", "a") as file:
        file.write("# mine\n")
    failed = project.make("train", ON_INSTALL="echo no network >&2; exit 2")
    assert failed.returncode == 2
    assert failed.said[-1] == "the packages were not installed, for the reason above"
    project.mended("it has no stamp", INSTALL)


def test_a_failure_to_make_it_again_brings_the_old_one_back(project):
    """Someone renames the directory in the train, where there is no network."""
    move(project)
    failed = project.make("setup", ON_INSTALL="echo no network >&2; exit 2")
    assert failed.returncode == 2
    assert (project.site / "flax").is_dir() and not (project.root / ".venv.old").exists()
    project.mended("it was made in /", VENV, INSTALL)


def test_a_link_and_what_conda_made_stay_where_they_are(project):
    venv = project.root / ".venv"
    venv.rename(project.notes / "real")
    venv.symlink_to(project.notes / "real")
    project.assert_complete("setup")
    shutil.rmtree(project.site / "flax")
    project.mended("flax is missing", INSTALL, REINSTALL)
    assert venv.is_symlink()
    venv.unlink()
    (project.notes / "real").rename(venv)
    (venv / "pyvenv.cfg").unlink()
    (venv / "conda-meta").mkdir()
    project.assert_complete("setup")
    move(project)
    project.mended("it was made in /", INSTALL, REINSTALL)


@pytest.mark.parametrize("what", ["link", "file", "directory"])
def test_what_is_not_of_its_making_is_not_removed(project, what):
    venv = project.root / ".venv"
    shutil.rmtree(venv)
    if what == "link":
        venv.symlink_to("/nowhere")
    elif what == "file":
        venv.write_text("my-environment\n")
    else:
        venv.mkdir()
        (venv / "precious").touch()
    result = project.make("setup")
    assert result.returncode == 2 and result.calls == []
    assert len(result.said) == 1 and "move it away" in result.said[0]
    assert venv.is_symlink() if what == "link" else venv.exists()


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.sh", "xla_flags.env", "README.md"])
def test_a_missing_file_is_named(project, name):
    (project.root / name).unlink()
    result = project.make("train")
    assert result.returncode == 2 and result.calls == []
    assert f"{name} is missing" in result.stderr and f"git checkout {name}" in result.stderr


def test_check_says_what_is_wrong_and_changes_nothing(project):
    check = ["sh", project.root / "setup.sh", "--check"]
    env = {"PATH": f"{project.bin}:/usr/bin:/bin", "NOTES": str(project.notes)}
    good = bake.run(check, env=env)
    assert (good.returncode, good.stdout + good.stderr) == (0, "")
    move(project)
    check[1] = project.root / "setup.sh"
    bad = bake.run(check, env=env)
    assert bad.returncode == 1
    assert re.fullmatch(r"setup: \.venv: it was made in /.*: 'make setup' repairs it\n", bad.stderr)
    assert project.python.exists()


# --- Without uv ----------------------------------------------------------------------------------

TOOLS = "awk basename cat cksum cp dirname env find grep head make mkdir mktemp mv rm sed sh sort"
TOOLS += " touch tr uname sleep"

# Debian's python3 without python3-venv, until the package is there: real otherwise.
DEBIAN = """#!/bin/sh
echo "python3 $*" >> "$NOTES/calls"
if [ ! -e "$NOTES/python3-venv" ]; then
    case "$*" in
        *ensurepip*) [ -z "$HIDES" ] || exit 1 ;;
        "-m venv .venv")
            "$REAL" -m venv --without-pip .venv
            echo "The virtual environment was not created successfully because ensurepip is not" \\
                "available."
            exit 1 ;;
    esac
fi
exec "$REAL" "$@"
"""


@pytest.fixture
def without_uv(tmp_path):
    project = SetUpProject(tmp_path / "sp ace")
    (project.bin / "uv").unlink()
    for tool in TOOLS.split():
        if path := shutil.which(tool):
            (project.bin / tool).symlink_to(path)
    project.write(project.bin / "python3", DEBIAN)
    base = getattr(sys, "_base_executable", sys.executable)
    project.environ = {"REAL": base, "PATH": str(project.bin), "PIP_NO_INDEX": "1", "HIDES": ""}
    project.environ |= {"PIP_RETRIES": "0"}
    return project


@pytest.mark.slow
@pytest.mark.parametrize("hides", ["", "1"])
def test_debian_without_python3_venv(without_uv, hides):
    project = without_uv
    environ = project.environ | {"HIDES": hides}
    first = project.make("setup", **environ)
    assert first.returncode == 2
    assert len(first.said) == 1 and "apt install python3-venv" in first.said[0]
    assert not (project.root / ".venv").exists()
    (project.notes / "python3-venv").touch()
    second = project.make("setup", **environ)
    assert "No module named pip" not in second.stdout + second.stderr
    assert second.said == ["the packages were not installed, for the reason above"]  # no index
    pip = [project.python, "-m", "pip", "--version"]
    assert subprocess.run(pip, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_half_an_environment_from_before_gets_its_pip(without_uv):
    """What `make setup` of earlier versions of the template left behind on Debian."""
    project = without_uv
    real = project.environ["REAL"]
    subprocess.run([real, "-m", "venv", "--without-pip", project.root / ".venv"], check=True)
    (project.notes / "python3-venv").touch()
    result = project.make("setup", **project.environ)
    assert "No module named pip" not in result.stdout + result.stderr
    pip = [project.python, "-m", "pip", "--version"]
    assert subprocess.run(pip, capture_output=True, check=False).returncode == 0


def pretend(project, name, version, venv=True):
    """A Python of this version; `venv` is whether Debian's package for it is there."""
    text = f"""#!/bin/sh
echo "{name} $*" >> "$NOTES/calls"
case $* in
    *print*) echo {version} ;;
    *ensurepip) exit {0 if venv else 1} ;;
    "-m venv .venv")
        mkdir -p .venv/bin .venv/lib/python3.13/site-packages/jax; touch .venv/pyvenv.cfg
        cp "$NOTES/python" .venv/bin/python ;;
    *"< (3, 11))") exit {int(version == "3.9")} ;;
esac
"""
    project.write(project.bin / name, text)


def test_the_commands_without_uv(without_uv):
    project = without_uv
    pretend(project, "python3", "3.13")
    recording = PYTHON + 'echo "venv: $*" >> "$NOTES/calls"\n'
    project.write(project.notes / "python", recording)
    result = project.make("setup", **project.environ)
    assert result.returncode == 0, result.stderr
    calls = [x for x in result.calls if "-m" in x]
    install = "venv: -m pip install --disable-pip-version-check --editable .[dev]"
    assert calls == ["python3 -m venv .venv", install]


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": "3.9", "python3.12": "3.12"}, "python3.12"),
        ({"python3.13": "3.13", "python3": "3.11"}, "python3"),  # 3.13 has no venv
        ({"python": "3.12"}, "python"),
    ],
)
def test_the_first_python_that_fits(without_uv, pythons, chosen):
    project = without_uv
    (project.bin / "python3").unlink()
    for name, version in pythons.items():
        pretend(project, name, version, venv=name != "python3.13")
    result = project.make("setup", **project.environ)
    assert [x for x in result.calls if "venv .venv" in x] == [f"{chosen} -m venv .venv"]


def test_no_python_that_fits(without_uv):
    project = without_uv
    for name in ("python3", "python"):
        old = "#!/bin/sh\ncase $* in *print*) echo 3.9; exit ;; esac\nexit 1\n"
        project.write(project.bin / name, old)
    result = project.make("setup", **project.environ)
    assert result.returncode == 2
    (said,) = result.said
    assert said.startswith("no Python 3.11 or later on PATH (found: 3.9): install one, or uv")


def test_a_lock_file_needs_uv(without_uv):
    (without_uv.root / "uv.lock").touch()
    result = without_uv.make("setup", **without_uv.environ)
    assert result.returncode == 2
    assert result.said[0].startswith("only uv can read uv.lock, and uv is not on PATH")


# --- Git -----------------------------------------------------------------------------------------

# GitHub's file for Python, what people add to it, and one that ignores everything.
IGNORED = ["*.npz", "*.env", ".env", "env/", "lib/", "data/", "build/", "*.log", "*.lock", "*.sh"]
IGNORED += [".*", "tests/", "launch/", "*.yml", "my_flax_project/", "Makefile", "*.toml"]


@pytest.mark.parametrize("lines", [IGNORED, ["*"]], ids=["usual", "everything"])
def test_a_clone_has_every_file_whatever_the_user_ignores(tmp_path, lines):
    project = bake.generated(tmp_path / "out")
    files = {p.relative_to(project) for p in project.rglob("*") if p.is_file()}
    (project / "uv.lock").touch()
    (project / "my_flax_project/nets").mkdir()
    (project / "my_flax_project/nets/mine.py").touch()
    files |= {Path("uv.lock"), Path("my_flax_project/nets/mine.py")}
    for junk in (".venv/lib/x.py", "runs/a/config.json", "my_flax_project/__pycache__/x.pyc"):
        (project / junk).parent.mkdir(parents=True, exist_ok=True)
        (project / junk).touch()
    for junk in (".DS_Store", "my_flax_project/.DS_Store", "launch/.DS_Store"):
        (project / junk).touch()
    (tmp_path / "ignore").write_text("\n".join([*lines, ".DS_Store"]))
    git = ["git", "-c", f"core.excludesFile={tmp_path / 'ignore'}", "-c", "user.name=t"]
    git += ["-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        result = bake.run([*git, *command], cwd=project)
        assert result.returncode == 0, result.stderr
    clone = tmp_path / "clone"
    assert bake.run([*git, "clone", "-q", project, clone]).returncode == 0
    cloned = {p.relative_to(clone) for p in clone.rglob("*") if p.is_file()}
    assert {p for p in cloned if p.parts[0] != ".git"} == files
