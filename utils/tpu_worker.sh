#!/usr/bin/env bash
# The part of run_tpu_xla.sh that runs on each worker, in the worker's clone of this repository.
#
#   check    COMMIT VENV MIN_DISK_GB [CONFIG overrides...]          checks all that a start needs
#   setup    VENV PYTHON UV_OPTIONS...                              makes the virtual environment
#   start    LAUNCH GRACE_S COMMAND...                              starts a run; refused while one runs
#   foreground LAUNCH COMMAND...                                    the same, shown here to its end; its exit code
#   devices                                                         exit code 0 where this machine has a TPU
#   status                                                          exit code 0 while the run goes on, else 3 to 5
#   logs     LINES [follow]
#   stop     WAIT_S KILL_AFTER [LAUNCH]                             sends SIGTERM to the run, and waits
#   sync     DIR COMMIT BUNDLE                                      makes or moves the clone; runs from a copy
#
# Each line on stdout is for the user; a line that begins with "error:" says what is wrong and what to do. Exit
# codes: 0 done, 1 refused or failed; of status also 3 not running, and start goes on, 4 not running, and a person
# has to correct something, 5 finished. State is in runs/launcher: `process` (pid, start time in ticks, boot,
# launch), `exit_code`, `command`, `log`. The system reuses a pid; pid, start time and boot together belong to one
# process only.
set -euo pipefail

STATE=runs/launcher
LOG=$STATE/log

say() { printf '%s\n' "$*"; }

fail() {
    say "error: $*"
    exit 1
}

start_ticks() { # PID: its start time in clock ticks since boot; fails when it is gone or a zombie
    local stat fields
    { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
    read -ra fields <<<"${stat##*) }" # after the name, which may contain spaces: state is field 3
    [[ ${fields[0]} != [ZX] ]] && printf '%s\n' "${fields[19]}"
}

read_process() { # sets run_*; fails when nothing was ever started
    [[ -f $STATE/process ]] && read -r run_pid run_ticks run_boot run_launch <"$STATE/process"
}

running() { # succeeds when the started process is alive; sets run_*
    read_process && [[ $run_boot == "$(</proc/sys/kernel/random/boot_id)" ]] &&
        [[ $(start_ticks "$run_pid") == "$run_ticks" ]]
}

family() { # the living processes of the last launch; they inherited OCT_LAUNCH from it
    read_process || return 0
    { grep -lzxF -e "OCT_LAUNCH=$run_launch $PWD" /proc/[0-9]*/environ 2>/dev/null || true; } | cut -d / -f 3 |
        paste -sd ' '
}

refuse_while_running() {
    if running; then
        fail "a run is in progress here, pid $run_pid, since $(date -r "$STATE/process" '+%F %T'); stop it first"
    fi
    local left
    left=$(family)
    [[ -z $left ]] || fail "processes of the last run are left, pids $left; stop --kill ends them"
}

last_attempt() { # the log's lines since the last start, backwards
    tac "$LOG" 2>/dev/null | sed '/^== .* start at commit /q'
}

last_words() { # CODE: the last line of the run, or the error that ended it
    local words=''
    if [[ $1 != 0 ]]; then words=$(last_attempt | grep -m 1 -E '^error:') || true; fi
    if [[ -z $words ]]; then words=$(last_attempt | grep -m 1 -Ev '^(==.*|[-= ]*)$') || true; fi
    printf '%.300s' "$words"
}

# ---- check

wrong() { # prints one fault; the check goes on
    say "error: $*"
    faults=$((faults + 1))
}

tpu_glob() { # prints the pattern of the TPU's devices
    local glob=${OCT_DEVICE_GLOB:-/dev/accel[0-9]*}
    if [[ -z ${OCT_DEVICE_GLOB:-} ]] && compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
        compgen -G "$glob" >/dev/null || glob='/dev/vfio/[0-9]*' # the devices of newer TPUs
    fi
    say "$glob"
}

devices() { # succeeds where this machine has a TPU
    compgen -G "$(tpu_glob)" >/dev/null
}

check_devices() {
    local glob devices users as=()
    glob=$(tpu_glob)
    devices=$({ compgen -G "$glob" || true; } | wc -l)
    if ((devices == 0)); then
        wrong "devices: expected $glob, found none; this is no TPU VM, or its TPU is not attached"
        return
    fi
    # Only root sees the open files of another user's processes.
    if sudo -n true 2>/dev/null; then as=(sudo -n); fi
    users=$("${as[@]}" find /proc/[0-9]*/fd -lname "$glob" 2>/dev/null | cut -d / -f 3 | sort -un | paste -sd ' ') ||
        true
    if [[ -n $users ]]; then
        wrong "devices: expected $glob free, found them in use by pid $users"
    else
        facts+=", $devices devices free"
    fi
}

check() {
    local commit=$1 venv=$2 min_gb=$3 faults=0 facts='' free answer
    local python=$venv/bin/python
    shift 3
    if running; then fail "a run is in progress here, pid $run_pid; see status, or stop it"; fi
    facts="commit $(git rev-parse --short=10 HEAD)"
    [[ $(git rev-parse HEAD) == "$commit" ]] ||
        wrong "commit: expected ${commit:0:10}, found $(git rev-parse --short=10 HEAD); run sync"
    [[ -z $(git status --porcelain --untracked-files=no) ]] ||
        wrong "clone: expected no changes in $PWD, found some; run git diff there"
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
    ((free >= min_gb)) || wrong "disk: expected $min_gb GiB free in $PWD, found $free"
    facts+=", $free GiB free"
    check_devices
    if [[ ! -x $python ]]; then
        wrong "environment: expected $python, found none; run setup"
    elif ! "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch_xla"))'; then
        wrong "environment: expected torch_xla in $venv, found none; run setup"
    elif (($# > 0)); then
        if answer=$("$python" -m utils.doctor --config "$@" 2>&1); then
            facts+=", $answer"
        else
            wrong "$(tail -n 1 <<<"$answer" | sed 's/^error: //')"
        fi
    fi
    ((faults == 0)) || exit 1
    say "ready: $facts"
}

# ---- sync, setup

sync() {
    local folder=$1 commit=$2 bundle=$3 shallow
    if [[ ! -d $folder/.git ]]; then
        [[ -z $(ls -A "$folder" 2>/dev/null) ]] ||
            fail "$folder: expected a clone or nothing, found another folder; give --dir"
        mkdir -p "$folder"
        git init -q "$folder"
    fi
    bundle=$(realpath "$bundle")
    cd "$folder"
    refuse_while_running
    [[ -z $(git status --porcelain --untracked-files=no) ]] ||
        fail "clone: expected no changes in $PWD, found some; they would be lost: run git diff there"
    shallow=$(git rev-parse --git-path shallow) # the bundle has no commit before this one
    grep -qsxF "$commit" "$shallow" || say "$commit" >>"$shallow"
    git fetch -q "$bundle" refs/heads/oct-sync 2>&1 || fail "$bundle: git could not read it"
    git checkout -q --detach "$commit" 2>&1 || fail "git could not check out ${commit:0:10}"
    say "at commit $(git rev-parse --short=10 HEAD)"
}

setup() {
    local venv=$1 stamp=$1/launcher_setup wanted log=$STATE/setup.log
    refuse_while_running
    wanted=$({ cat requirements.txt requirements-tpu.txt constraints-tpu.txt && say "$@"; } | sha256sum)
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        say "environment $venv: nothing to do"
        return
    fi
    mkdir -p "$STATE"
    if ! install "$@" >"$log" 2>&1; then
        tail -n 20 "$log"
        fail "environment $venv: not installed, see above and $PWD/$log"
    fi
    say "$wanted" >"$stamp"
    say "environment $venv: installed constraints-tpu.txt"
}

# torch_xla needs libpython, which lies beside uv's Python alone, and looks for it in its own lib (pytorch/xla#6372).
LINK_LIBPYTHON='
import pathlib, sysconfig
library = pathlib.Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
link = pathlib.Path(sysconfig.get_path("platlib"), "torch_xla/lib", library.name)
if library.suffix != ".a":
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(library)
'

install() { # VENV PYTHON UV_OPTIONS...
    local venv=$1 python=$2 uv
    shift 2
    uv=$(find_uv) && "$uv" venv --clear --python "$python" "$venv" &&
        "$uv" pip install --python "$venv/bin/python" -r requirements-tpu.txt -c constraints-tpu.txt "$@" &&
        "$venv/bin/python" -c "$LINK_LIBPYTHON" && PJRT_DEVICE=CPU "$venv/bin/python" -c 'import torch_xla'
}

find_uv() { # prints its path; brings it, by the image's own pip, where it is missing
    local own=$STATE/uv
    if type -P uv; then return; fi
    if [[ ! -x $own/bin/uv ]]; then
        {
            if ! python3 -m pip --version; then
                # After a boot the system's own upgrades hold the lock for minutes.
                sudo -n apt-get -o DPkg::Lock::Timeout=600 -q update
                sudo -n apt-get -o DPkg::Lock::Timeout=600 -q install -y python3-pip
            fi
            python3 -m pip install -q --target "$own" uv || return 1
        } >&2
    fi
    say "$own/bin/uv"
}

# ---- start, stop

supervise() { # LAUNCH COMMAND...: runs the command and writes its exit code
    local launch=$1 child ticks code interrupted=1
    shift
    trap 'interrupted=1' TERM INT # a shutdown signals every process; wait for the command's end
    OCT_LAUNCH="$launch $PWD" "$@" &
    child=$!
    ticks=$(start_ticks "$child") || ticks=0
    say "$child $ticks $(</proc/sys/kernel/random/boot_id) $launch" >"$STATE/process.partial"
    mv "$STATE/process.partial" "$STATE/process"
    while [[ -n $interrupted ]]; do
        interrupted='' code=0
        wait "$child" || code=$?
    done
    say "== $(date '+%F %T') ended with exit code $code"
    say "$code" >"$STATE/exit_code"
}

lock() { # one start at a time
    mkdir -p "$STATE"
    exec 9>"$STATE/lock"
    flock -n 9 || fail "another start is in progress here"
}

detach() { # LAUNCH COMMAND...: runs it apart from this terminal, where no other run is
    local self commit
    self=$(realpath "${BASH_SOURCE[0]}")
    refuse_while_running
    rm -f "$STATE/process" "$STATE/exit_code"
    commit=$(git rev-parse --short=10 HEAD 2>/dev/null) || commit=unknown
    printf '%q ' "${@:2}" >"$STATE/command"
    say "== $(date '+%F %T') start at commit $commit: $(<"$STATE/command")" >>"$LOG"
    setsid nohup bash "$self" supervise "$@" </dev/null >>"$LOG" 2>&1 9>&- &
}

foreground() { # LAUNCH COMMAND...: SIGTERM and Ctrl-C reach the run, the end of the terminal does not
    local from interrupted=1
    lock
    from=$(($({ cat "$LOG" 2>/dev/null || true; } | wc -l) + 1))
    detach "$@"
    until read_process; do sleep 0.1; done
    trap 'interrupted=1; kill -TERM "$run_pid" 2>/dev/null || true' TERM INT
    exec 9>&-
    (trap '' INT && exec tail -n "+$from" -F --pid="$run_pid" "$LOG" 2>/dev/null) &
    while [[ -n $interrupted ]]; do
        interrupted=''
        wait $! || true
    done
    while running; do sleep 0.2; done # nobody may be there to read
    wait_for_exit_code
    exit "$(cat "$STATE/exit_code" 2>/dev/null || say 1)"
}

start() {
    local wanted=$1 grace=$2 deadline
    shift 2
    lock
    if running && [[ $run_launch == "$wanted" ]]; then
        say "started, pid $run_pid" # gcloud repeats a command when its connection breaks
        return
    fi
    detach "$wanted" "$@"
    # Wait for what utils/runtime/open.py says of every host once its devices are open; `status` shows a later end.
    deadline=$((SECONDS + grace))
    until [[ -f $STATE/exit_code ]] ||
        [[ -f $STATE/process && $(last_attempt | grep -c '^opened: ') != 0 ]]; do
        ((SECONDS < deadline)) || fail "opened no devices within $grace s (OCT_START_GRACE_S); see logs"
        sleep 0.1
    done
    if [[ -f $STATE/exit_code ]]; then
        fail "ended at once with exit code $(<"$STATE/exit_code"): $(last_words 1)"
    fi
    read_process
    say "started, pid $run_pid"
}

stop() {
    local wait_s=$1 kill_after=$2 wanted=${3:-} deadline left code
    if ! running; then
        left=$(family)
        if [[ -n $left && $kill_after == yes && (-z $wanted || $run_launch == "$wanted") ]]; then
            # shellcheck disable=SC2086 # a list of pids
            kill -KILL $left 2>/dev/null || true
            say "killed what the last run had left, pids $left"
        else
            say "not running"
        fi
        return
    fi
    if [[ -n $wanted && $run_launch != "$wanted" ]]; then
        say "left alone: pid $run_pid is of another start"
        return
    fi
    kill -TERM "$run_pid" 2>/dev/null || true
    deadline=$((SECONDS + wait_s))
    while running && ((SECONDS < deadline)); do sleep 0.2; done
    if running; then
        [[ $kill_after == yes ]] ||
            fail "pid $run_pid was sent SIGTERM and still runs after $wait_s s; wait with status, or use stop --kill"
        # shellcheck disable=SC2046 # a list of pids
        kill -KILL "$run_pid" $(family) 2>/dev/null || true
        say "killed, pid $run_pid: no checkpoint was written"
        return
    fi
    while [[ ! -f $STATE/exit_code ]] && ((SECONDS < deadline + 5)); do sleep 0.1; done
    code=$(cat "$STATE/exit_code" 2>/dev/null) || code=unknown
    say "stopped, pid $run_pid, exit code $code: $(last_words "$code")"
}

# ---- status, logs

meaning() { # CODE: what the training's exit code says; docs/reference/troubleshooting.md has the table
    case $1 in
    0) say "finished" ;;
    2) say "a person has to correct it; start does not help" ;;
    75) say "lost another worker, or its storage; start goes on" ;;
    76) say "stopped before its end; start goes on" ;;
    *) if (($1 > 128)); then say "killed by signal $(($1 - 128)); start goes on"; else say "start goes on"; fi ;;
    esac
}

wait_for_exit_code() { # the command may have ended a moment ago, and `supervise` not have written how yet
    local tries=0
    while [[ -f $STATE/process && ! -f $STATE/exit_code ]] && ((tries++ < 30)); do sleep 0.1; done
}

status() {
    local code='' left
    if running; then
        say "running, pid $run_pid, since $(date -r "$STATE/process" '+%F %T'), commit" \
            "$(git rev-parse --short=10 HEAD): $(last_words 0)"
        return
    fi
    wait_for_exit_code
    if [[ ! -f $STATE/process ]]; then
        say "never started"
    elif [[ -f $STATE/exit_code ]]; then
        code=$(<"$STATE/exit_code")
        say "ended at $(date -r "$STATE/exit_code" '+%F %T') with exit code $code ($(meaning "$code")): $(last_words "$code")"
    else
        say "gone without an exit code: the machine went down, or it was killed; start resumes"
    fi
    left=$(family)
    [[ -z $left ]] || say "processes of it are left, pids $left; stop --kill ends them"
    case $code in
    0) exit 5 ;;
    2) exit 4 ;;
    *) exit 3 ;;
    esac
}

logs() {
    local lines=$1 follow=${2:-}
    [[ -f $LOG ]] || fail "no log: never started"
    if [[ -n $follow ]] && running; then
        exec tail -n "$lines" -F --pid="$run_pid" "$LOG"
    fi
    exec tail -n "$lines" "$LOG"
}

main() { # bash parses a function whole before it runs: sync may replace this file
    local verb=$1
    shift
    case $verb in
    check) check "$@" ;;
    setup) setup "$@" ;;
    sync) sync "$@" ;;
    start) start "$@" ;;
    foreground) foreground "$@" ;;
    devices) devices ;;
    supervise) supervise "$@" ;;
    status) status ;;
    logs) logs "$@" ;;
    stop) stop "$@" ;;
    *) fail "tpu_worker.sh: no such verb: $verb" ;;
    esac
    exit
}

main "$@"
