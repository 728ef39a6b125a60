#!/bin/sh
# Creates or repairs .venv, so that it has what pyproject.toml, or uv.lock, asks for:
#
#   sh setup.sh cuda13,dev    what `make setup` does; exits at once if nothing has changed
#   sh setup.sh --check       only prints what is wrong with .venv, with exit code 1 if something is
#
# .venv/.setup is the stamp of a complete installation: the extras, a checksum of the files that
# asked for them, the Python, the place of the project, and the packages. It is written last.
set -u

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

cd -- "$(dirname -- "$0")" || exit 1
here=$(pwd -P)
python=.venv/bin/python
stamp=.venv/.setup
busy=.venv/.setup.new # exists while packages are installed, and after an interrupted installation
accelerators=cuda12,cuda13,tpu

has() { case ,$1, in *,"$2",*) ;; *) return 1 ;; esac }
sum_of_files() { cat pyproject.toml uv.lock 2>/dev/null | cksum; }

# --- What .venv has ---------------------------------------------------------------------------

# inspect WANTED: sets `broken` to the reason why .venv must be made again, or else `stale` to the
# reason why packages must be installed; `extras` to all extras that it should have (WANTED and
# those installed earlier); `now` and `site` to its Python version and its packages.
inspect() {
  broken='' stale='' lost=''
  made=$(sed -n 's/^extras //p' "$stamp" 2>/dev/null)
  extras=$1 other=''
  for extra in $(echo "$made" | tr , ' '); do
    if has "$1" "$extra"; then
      continue
    elif has "$accelerators" "$extra" && wants_accelerator "$1"; then
      other=$extra
    else
      extras=${extras:+$extras,}$extra
    fi
  done
  inspect_python
  [ -n "$broken" ] || inspect_packages "$1"
}

inspect_python() {
  if [ ! -e .venv ] && [ ! -L .venv ]; then
    broken='it does not exist'
    return
  fi
  now=$("$python" -I -S -c '
import os, sys
thread = "t" if "t" in sys.abiflags else ""
print("%d.%d%s %s" % (*sys.version_info[:2], thread, os.uname().machine))
sys.exit(sys.version_info < (3, 11))' 2>/dev/null)
  case $?$now in
    0*) ;;
    *.*) broken="it has Python ${now% *}, and the project needs 3.11 or later" ;;
    *) broken='its Python does not start' ;;
  esac
  site=.venv/lib/python${now% *}/site-packages
  if [ -n "$broken" ]; then
    :
  elif [ ! -f .venv/pyvenv.cfg ] && [ ! -d .venv/conda-meta ]; then
    broken='it has no pyvenv.cfg, so its Python is that of the system'
  elif [ ! -d "$site" ]; then
    broken="its packages are not for its Python, ${now% *}"
  fi
}

inspect_packages() {
  for extra in $(echo "$1" | tr , ' '); do
    has "$made" "$extra" || stale="'$extra' is not installed"
  done
  if [ -z "$made" ]; then
    stale='it has no stamp of a complete installation'
  else
    while read -r key value; do
      case $key in
        files) [ "$value" = "$(sum_of_files)" ] || stale='pyproject.toml or uv.lock has changed' ;;
        python) [ "$value" = "$now" ] || broken="it was made for Python $value, but has $now" ;;
        place) [ "$value" = "$here" ] || broken="it was made in $value" ;;
        entry) [ -e "$site/$value" ] || lost=$value ;;
      esac
    done <"$stamp"
  fi
  [ -z "$lost" ] || stale="$lost is missing in it"
  # JAX must not find the plug-ins of two accelerators in one environment.
  [ -z "$other" ] || broken="it is for $other"
  [ ! -f "$busy" ] || broken='an installation was interrupted'
  # A link, or an environment of conda, is not ours to delete: reinstall all packages into it.
  if [ -n "$broken" ] && ! is_ours; then stale=$broken lost=all broken=''; fi
}

wants_accelerator() {
  for each in $(echo "$accelerators" | tr , ' '); do has "$1" "$each" && return; done
  return 1
}

has_pip() {
  "$python" -m pip --version >/dev/null 2>&1 ||
    { "$python" -m ensurepip --default-pip && "$python" -m pip --version; } >/dev/null 2>&1
}

# Whether .venv is an environment that this project made, so that it may be deleted.
is_ours() {
  [ -d .venv ] && [ ! -L .venv ] && [ ! -d .venv/conda-meta ] || return 1
  [ -f .venv/pyvenv.cfg ] || [ -f .venv/bin/activate ] || [ -z "$(find .venv -type f)" ]
}

# --- What setup does --------------------------------------------------------------------------

# Makes a new .venv. If that fails, the old one is put back: it may still be usable.
make_again() {
  if [ -e .venv ] || [ -L .venv ]; then
    is_ours || fail ".venv: $broken. This project did not make it: move it away, then run" \
      "'make setup' again"
    say ".venv: $broken: making a new one"
    rm -rf .venv.old
    mv .venv .venv.old || exit 1
  fi
  trap put_back EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  if command -v uv >/dev/null; then
    uv venv --quiet --no-project --python "${UV_PYTHON:->=3.11}" .venv || exit 1
  else
    find_python
    "$base" -m venv .venv >&2 || needs_venv_package "$base"
  fi
}

put_back() {
  status=$?
  [ "$status" -eq 0 ] || [ ! -d .venv.old ] || { rm -rf .venv && mv .venv.old .venv; }
  rm -rf .venv.old
  exit "$status"
}

# Sets `base` to a Python that is new enough and has venv and ensurepip.
find_python() {
  found='' incomplete=''
  for base in ${UV_PYTHON:+"$UV_PYTHON" "python$UV_PYTHON"} \
    python3.14 python3.13 python3.12 python3.11 python3 python; do
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      has "$found" "$version" || found=${found:+$found,}$version
    elif "$base" -I -c 'import venv, ensurepip' 2>/dev/null; then
      return
    else
      incomplete=${incomplete:-$base}
    fi
  done
  [ -z "$incomplete" ] || needs_venv_package "$incomplete"
  fail "no Python 3.11 or later on PATH (found: ${found:-none}): install one, or uv, which" \
    "brings its own"
}

needs_venv_package() {
  case $1 in python3.*) package=${1##*/}-venv ;; *) package=python3-venv ;; esac
  [ -d .venv.old ] || rm -rf .venv # incomplete
  fail "$1 cannot make an environment, because its ensurepip does not work: on Debian and Ubuntu" \
    "run 'apt install $package', then 'make setup' again; or install uv"
}

# install [ARGUMENTS]: runs uv or pip, for .venv.
install() {
  if command -v uv >/dev/null; then
    uv pip install --python "$python" "$@"
  else
    [ "$1" != --reinstall ] || { shift && set -- --force-reinstall "$@"; }
    "$python" -m pip install --disable-pip-version-check "$@" >&2
  fi
}

# install_all [--reinstall]: the versions of uv.lock, if it exists, then the project itself.
install_all() {
  if [ -f uv.lock ]; then
    # Runs uv on a copy elsewhere. In this directory it would also lock a uv workspace of a parent.
    copy=$(mktemp -d) && cp pyproject.toml uv.lock "$copy" || return
    flags=$(echo "$extras" | sed 's/,/ --extra /g; s/^/--extra /')
    # shellcheck disable=SC2086
    uv export --quiet --frozen --no-emit-project --project "$copy" $flags >.venv/locked.txt &&
      install "$@" --requirements .venv/locked.txt
    status=$?
    rm -rf "$copy"
    [ "$status" -eq 0 ] || return "$status"
  fi
  install "$@" --editable ".[$extras]"
}

write_stamp() {
  {
    printf '%s\n' "extras $extras" "files $(sum_of_files)" "python $now" "place $here"
    for path in "$site"/*; do
      case $path in *.dist-info | */__pycache__ | *"/*") continue ;; esac
      printf 'entry %s\n' "${path##*/}"
    done
  } >"$busy" && mv "$busy" "$stamp"
}

# --- The two commands -------------------------------------------------------------------------

[ -f pyproject.toml ] ||
  fail "pyproject.toml is missing: 'git checkout pyproject.toml' restores it"
if [ "${1-}" = --check ]; then
  inspect ''
  [ -z "$broken$stale" ] || fail ".venv: ${broken:-$stale}: 'make setup' repairs it"
  exit 0
fi

wanted=$(echo "$*" | tr -s ' ,' ',,' | sed 's/^,//; s/,$//')
for extra in $(echo "$wanted" | tr , ' '); do
  grep -Eq "^\"?$extra\"? *= *\[" pyproject.toml ||
    fail "'$extra' is not an extra of pyproject.toml"
done
inspect "$wanted"
[ -n "$broken$stale" ] || exit 0
if ! command -v uv >/dev/null; then
  [ ! -f uv.lock ] ||
    fail 'only uv can read uv.lock, and uv is not on PATH: install uv, or delete uv.lock'
  [ -n "$broken" ] || has_pip || broken='it has no pip, and uv is not on PATH'
fi

all_extras=$extras reinstall=$lost
if [ -n "$broken" ]; then
  make_again
  inspect "$wanted"
  extras=$all_extras reinstall=''
  [ -z "$broken" ] || fail "the new .venv cannot be used: $broken"
else
  say ".venv: $stale"
fi
rm -f "$stamp"
: >"$busy" || exit 1
install_all && { [ -z "$reinstall" ] || [ -e "$site/$reinstall" ] || install_all --reinstall; }
status=$?
if [ "$status" -ne 0 ]; then
  [ "$status" -gt 128 ] || rm -f "$busy" # no signal ended it, so no package is half installed
  fail 'the packages were not installed, for the reason above'
fi
write_stamp || fail "$stamp cannot be written"
