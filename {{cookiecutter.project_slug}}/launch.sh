#!/usr/bin/env bash
# Starts training on one or many processes. Everything after the mode goes to train.py.
#
#   bash launch.sh local N [flags]             N processes on this machine, one per GPU
#   bash launch.sh slurm [flags]               inside an allocation: see launch/slurm.sbatch
#   mpirun -n N bash launch.sh mpi [flags]     Open MPI, MPICH or Intel MPI
#   bash launch.sh kubernetes [flags]          in every pod: see launch/jobset.yaml
#   TPU_NAME=... ZONE=... bash launch.sh tpu [flags]    from your machine, on all TPU hosts
#
# It works out the rank of each process and tells runtime/processes.py through these variables
# only: what a scheduler or an earlier job left in the environment must not make processes join.
#
#   TRAIN_COORDINATOR        host:port at which process 0 waits for the others
#   TRAIN_NUM_PROCESSES      how many processes there are
#   TRAIN_PROCESS_ID         which one this is, from 0
#   TRAIN_LOCAL_DEVICE_IDS   which GPUs of its host are its own (unset: all of them)
#   TRAIN_DISTRIBUTED=auto   in place of the four above on a TPU, where JAX finds out itself
#
# You may set two more: TRAIN_PORT, a port for the coordinator (two launches inside one Slurm job
# need two ports), and TRAIN_COORDINATOR_TIMEOUT, how many seconds the processes wait to join.
#
# Uses nothing newer than bash 3.2, so that it runs on macOS too.
set -u

say() { printf 'launch.sh: %s\n' "$*" >&2; }
usage() { say "$*"; exit 2; }

modes='local N, slurm, mpi, kubernetes or tpu'
[ $# -gt 0 ] || usage "which mode? bash launch.sh MODE [train flags], where MODE is $modes"
mode=$1
shift

cd -- "$(dirname -- "$0")" || exit 1

package='' # the one directory here that holds train.py
for file in */train.py; do
  [ -z "$package" ] || usage "train.py is in two directories: $package and ${file%/train.py}"
  package=${file%/train.py}
done
[ -f "$package/train.py" ] || usage "no directory with a train.py in $PWD"

python=$PWD/.venv/bin/python
if [ -e .venv ] || [ -L .venv ]; then # never another Python, with packages that were not tested
  "$python" -I -S -c '' 2>/dev/null || usage ".venv has no Python that starts: run 'make setup'"
  # Remove the variables of another Python environment, as in the Makefile.
  for name in PYTHONPATH PYTHONHOME; do
    [ -z "${!name:-}" ] || say "$name=${!name} is ignored: only the packages in .venv are used"
  done
  unset VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONWARNINGS \
    PYTHONOPTIMIZE PYTHONINSPECT PYTHONSAFEPATH __PYVENV_LAUNCHER__ \
    UV_PROJECT UV_PROJECT_ENVIRONMENT UV_SYSTEM_PYTHON PIP_USER PIP_TARGET PIP_PREFIX
else # a container has one environment and no .venv
  python=$(command -v python || command -v python3) ||
    usage "no .venv in $PWD and no python on PATH: run 'make setup' first"
  "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("jax"))' ||
    usage "no .venv in $PWD, and $python has no jax: run 'make setup' first"
fi

[ -f xla_flags.env ] ||
  usage "xla_flags.env is not in $PWD: 'git checkout xla_flags.env' restores it"
accelerator=''
# shellcheck disable=SC1091
. ./xla_flags.env
case $accelerator in
  cpu | cuda12 | cuda13 | tpu) ;;
  *) usage "xla_flags.env: accelerator=$accelerator: must be cpu, cuda12, cuda13 or tpu" ;;
esac

# --- Shared by all modes --------------------------------------------------------------------

# join COORDINATOR COUNT RANK GPUS: sets what runtime/processes.py reads: nothing for one process.
join() {
  case $2$3 in *[!0-9]*) usage "process '$3' of '$2': must be numbers" ;; esac
  unset TRAIN_COORDINATOR TRAIN_NUM_PROCESSES TRAIN_PROCESS_ID TRAIN_LOCAL_DEVICE_IDS
  unset TRAIN_DISTRIBUTED
  [ "$2" -gt 1 ] || return 0
  export TRAIN_COORDINATOR=$1 TRAIN_NUM_PROCESSES=$2 TRAIN_PROCESS_ID=$3
  [ -z "$4" ] || export TRAIN_LOCAL_DEVICE_IDS=$4
  # The connection to the coordinator must not go through a proxy. (Without a proxy leave the
  # variables unset: JAX warns about them.)
  if env | grep -qi '^[a-z]*_proxy=.'; then
    export no_proxy="${1%:*}${no_proxy:+,$no_proxy}" NO_PROXY="${1%:*}${NO_PROXY:+,$NO_PROXY}"
  fi
}

train() { exec "$python" -u -m "$package.train" "$@"; }

# gpus LOCAL_RANK RANKS_ON_THIS_HOST: the TRAIN_LOCAL_DEVICE_IDS of this process.
gpus() {
  case $accelerator in cpu | tpu) return ;; esac
  [ "$2" -gt 1 ] || return 0 # alone on its host: all of them
  # JAX counts the GPUs in CUDA_VISIBLE_DEVICES. A single entry means that the scheduler has given
  # each process one GPU, which then has the number 0.
  case ${CUDA_VISIBLE_DEVICES:-,} in *,*) echo "$1" ;; *) echo 0 ;; esac
}

# port_from TEXT: a port that all processes derive from a text that they share. It is below the
# ephemeral ports, which the system gives to other programs.
port_from() {
  local sum
  sum=$(printf '%s' "$1" | cksum)
  echo "${TRAIN_PORT:-$((20000 + ${sum%% *} % 10000))}"
}

# --- local: starts the processes here and looks after them ----------------------------------

# Prints what is wrong with .venv, and goes on: `make setup` may not be possible on this machine.
check_environment() {
  [ ! -e .venv ] || [ ! -f setup.sh ] || sh setup.sh --check
}

run_local() {
  local count=${1:-} name rank port ids=''
  case $count in
    '' | 0* | *[!0-9]*) usage "local: N must be a positive number, not '$count'" ;;
  esac
  shift
  check_environment
  [ "$count" -gt 1 ] || { join '' 1 0 ''; train "$@"; }

  port=${TRAIN_PORT:-$("$python" -c '
import socket
s = socket.socket()
s.bind(("", 0))
print(s.getsockname()[1])')} || exit 1
  mkdir -p runs 2>/dev/null
  logs=$(mktemp -d "runs/launch-$(date +%Y%m%d-%H%M%S)-XXXXXX" 2>/dev/null) ||
    logs=$(mktemp -d "${TMPDIR:-/tmp}/launch-XXXXXX") ||
    { say "neither runs/ here nor ${TMPDIR:-/tmp} can be written: set TMPDIR"; exit 1; }
  say "$count processes join at port $port; the output of all but process 0 is in $logs"

  # The traps only note a signal; supervise passes it on. So no process misses one that comes
  # before it is started.
  request='' interrupts=0 pids=()
  # (A signal that is ignored when this script starts, such as HUP under nohup, stays ignored.)
  trap 'request=TERM' TERM
  for name in HUP USR1 USR2 XCPU; do
    # shellcheck disable=SC2064
    trap "request=$name" "$name"
  done
  trap 'request=TERM interrupts=$((interrupts + 1))' INT
  trap 'for rank in "${!pids[@]}"; do kill_group "${pids[rank]}"; done' EXIT

  # Job control puts each process into a process group of its own, so Ctrl-C reaches this script
  # only. A process that got SIGINT from the terminal as well would count two and end at once.
  set -m
  for ((rank = 0; rank < count; rank++)); do
    case $accelerator in cpu | tpu) ;; *) ids=$rank ;; esac
    (
      [ "$rank" -eq 0 ] || exec >"$logs/rank-$rank.log" 2>&1
      join "127.0.0.1:$port" "$count" "$rank" "$ids"
      train "$@"
    ) </dev/null &
    pids[rank]=$!
  done
  set +m
  supervise
}

kill_group() { kill -KILL -- "-$1" 2>/dev/null; } # kills a process and its children

# Waits for all processes, passes signals on to them, and ends the others when one has failed.
# Exits with the code of the first process that failed, or with 75 after a stop on request.
supervise() {
  local rank status running news first='' code=0 passed='' deadline=''
  while :; do
    running=0 news=''
    for rank in "${!pids[@]}"; do
      if kill -0 "${pids[rank]}" 2>/dev/null; then
        running=$((running + 1))
        continue
      fi
      wait "${pids[rank]}" 2>/dev/null
      status=$?
      kill_group "${pids[rank]}"
      unset "pids[rank]"
      [ "$status" -ne 0 ] || continue
      # 75 is not a failure. A process ends with 134, or with an exception at the same moment,
      # because another one died: report that other process.
      if [ -z "$first" ] || [ "$code" -eq 75 ] || { [ "$code" -eq 134 ] && [ "$status" -ne 75 ]; } ||
        { [ -n "$news" ] && [ "$code" -eq 1 ] && [ "$status" -gt 128 ] && [ "$status" -ne 134 ]; }; then
        first=$rank code=$status news=yes
      fi
    done
    [ "$running" -gt 0 ] || break

    if [ -n "$news" ] && [ "$code" -eq 75 ]; then
      deadline=$((SECONDS + 120)) # the others may still be saving
    elif [ -n "$news" ]; then
      kill -TERM "${pids[@]}" 2>/dev/null
      deadline=$((SECONDS + 10))
    fi
    if [ "$interrupts" -gt 1 ]; then
      exit 130
    elif [ -n "$request" ]; then
      passed=$request request=''
      kill -s "$passed" "${pids[@]}" 2>/dev/null
      say "passed SIG$passed on: the run saves and stops (Ctrl-C again: at once, without saving)"
    fi
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
      say "killed, because still running long after process $first ended: process ${!pids[*]}"
      for rank in "${!pids[@]}"; do kill_group "${pids[rank]}"; done
      deadline=''
    fi
    { sleep 0.2; } 2>/dev/null # during this command bash prints messages about killed processes
  done

  # The signal may have killed a process before Python installed its handlers. Its exit code is then
  # 128 plus the number of HUP, INT, USR1, USR2, TERM or XCPU on Linux, or of USR1, USR2 on macOS.
  case ${passed:+$code} in 129 | 130 | 138 | 140 | 143 | 152 | 158 | 159) code=75 ;; esac
  if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then
    say "process $first failed with exit code $code"
    if [ "$first" -gt 0 ]; then
      say "the end of $logs/rank-$first.log:"
      tail -n 40 "$logs/rank-$first.log" >&2
    fi
  fi
  exit "$code"
}

# --- slurm ----------------------------------------------------------------------------------

run_slurm() {
  [ -n "${SLURM_JOB_NODELIST:-}" ] ||
    usage 'slurm: not inside an allocation. Submit with: sbatch launch/slurm.sbatch [flags]'
  local host # Slurm itself must expand the list: JAX's parser gets node[1-2]-ib wrong
  host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  [ -n "$host" ] || {
    say "scontrol cannot expand SLURM_JOB_NODELIST='$SLURM_JOB_NODELIST': is this node in the job?"
    exit 1
  }
  # --kill-on-bad-exit=0: srun must not kill processes that still save when the first one exits
  # with 75. --wait=30 ends the others 30 s later. srun does not inherit --cpus-per-task.
  check_environment
  exec srun --kill-on-bad-exit=0 --wait=30 \
    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
    bash "$PWD/launch.sh" slurm-rank "$host:$(port_from "$SLURM_JOB_ID")" "$@"
}

run_slurm_rank() { # what srun starts, once per process
  local coordinator=$1 per_host=$(((SLURM_NTASKS + SLURM_NNODES - 1) / SLURM_NNODES))
  shift
  join "$coordinator" "$SLURM_NTASKS" "$SLURM_PROCID" "$(gpus "$SLURM_LOCALID" "$per_host")"
  train "$@"
}

# --- mpi ------------------------------------------------------------------------------------

# Open MPI binds each process to one core if there are up to two: on a CPU, and with data workers,
# start it with --bind-to none. To stop with a checkpoint, send SIGUSR1 to mpirun, which passes it
# on. After a SIGTERM it would kill the processes one second later.
run_mpi() {
  # The variables of Open MPI, or else those of MPICH and Intel MPI.
  local rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}
  local size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}
  local local_rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-0}}
  local local_size=${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}
  local coordinator=${TRAIN_COORDINATOR:-}
  [ -n "${rank:+$size}" ] ||
    usage 'mpi: no rank in the environment. Start with: mpirun -n N bash launch.sh mpi [flags]'
  if [ -z "$coordinator" ] && [ "$local_size" -eq "$size" ]; then
    # All ranks are on one host. They share Open MPI's name of the job, or else a parent process.
    coordinator=127.0.0.1:$(port_from "${PMIX_NAMESPACE:-$PPID}")
  fi
  [ -n "$coordinator" ] ||
    usage 'mpi: on several hosts, name the host of rank 0 and a free port on it:' \
      'mpirun -x TRAIN_COORDINATOR=host:port ... (MPICH, Intel: -genv TRAIN_COORDINATOR host:port)'
  join "$coordinator" "$size" "$rank" "$(gpus "$local_rank" "$local_size")"
  train "$@"
}

# --- kubernetes -----------------------------------------------------------------------------

run_kubernetes() {
  [ "$accelerator" != tpu ] || run_tpu_rank "$@" # GKE sets what JAX needs to join
  local name
  for name in JOB_COMPLETION_INDEX TRAIN_NUM_PROCESSES TRAIN_COORDINATOR; do
    [ -n "${!name:-}" ] || usage "kubernetes: $name is not set: see launch/jobset.yaml"
  done
  # A pod sees its own GPUs only. train() replaces this shell, so that SIGTERM reaches Python.
  join "$TRAIN_COORDINATOR" "$TRAIN_NUM_PROCESSES" "$JOB_COMPLETION_INDEX" ''
  train "$@"
}

# --- tpu ------------------------------------------------------------------------------------

# Copies the sources to every host of a Cloud TPU VM and starts one process on each. --workdir
# must be on a file system that all hosts share, since all of them write the checkpoints. Ctrl-C
# ends the connection, not the run: to stop the run, send "pkill -TERM -f PACKAGE.train" to all
# hosts with the same gcloud command.
# Google offers TPU7x and later through GKE only: use launch/jobset.yaml there.
run_tpu() {
  if [ -z "${TPU_NAME:-}" ] || [ -z "${ZONE:-}" ]; then
    usage 'tpu: TPU_NAME=... ZONE=... [PROJECT=...] bash launch.sh tpu [flags]'
  fi
  local where archive command
  where=("--zone=$ZONE" --worker=all ${PROJECT:+"--project=$PROJECT"})
  archive=$(mktemp "${TMPDIR:-/tmp}/launch-XXXXXX") || exit 1
  trap 'rm -f "$archive"' EXIT
  tar -czf "$archive" --exclude=./.venv --exclude=./runs --exclude=./.git . || exit
  gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:$package.tgz" "${where[@]}" || exit
  # A shell on the other host parses the command: %q keeps the spaces and quotes in flags.
  command="mkdir -p $package && tar -xzf $package.tgz -C $package && cd $package && make setup"
  command="$command && bash launch.sh tpu-rank$([ $# -eq 0 ] || printf ' %q' "$@")"
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${where[@]}" --command="$command"
}

run_tpu_rank() { # what gcloud starts, once per host
  join '' 1 0 ''
  export TRAIN_DISTRIBUTED=auto
  train "$@"
}

case $mode in
  local) run_local "$@" ;;
  slurm) run_slurm "$@" ;;
  slurm-rank) run_slurm_rank "$@" ;;
  mpi) run_mpi "$@" ;;
  kubernetes) run_kubernetes "$@" ;;
  tpu) run_tpu "$@" ;;
  tpu-rank) run_tpu_rank "$@" ;;
  *) usage "unknown mode '$mode': use $modes" ;;
esac
