#!/usr/bin/env bash
# Train on every worker of a TPU VM, or here in the foreground (docs/guides/tpu.md).
#
#   run_tpu_xla.sh CONFIG [section.key=value ...]                        here, in the foreground; on a worker of a
#                                                                        TPU VM set up first, for status, logs, stop
#   run_tpu_xla.sh --tpu NAME [options] [VERB] [CONFIG [overrides ...]]  on all workers of a TPU VM
#
# VERB   check    login, TPU, commit, disk, devices, environment, store and checkpoints; changes nothing
#        sync     bring the commit to every worker
#        setup    make the virtual environment on every worker
#        start    check, then train on every worker, detached; resumes what was stopped (the default)
#        status   exit code 0 when all workers run, 3 when none does and a start goes on, 4 when none does
#                 and a mistake ended one, 5 when all have finished, 1 otherwise
#        logs     the last lines of every worker's log
#        stop     SIGTERM to the run's own process on every worker: it writes a checkpoint and ends
#
# --tpu NAME (OCT_TPU)   --zone ZONE (OCT_ZONE)   --project ID (OCT_PROJECT)   default: gcloud's
# --tunnel-through-iap, --internal-ip (OCT_SSH, without the dashes)   how gcloud's ssh and scp reach the workers
# --commit C (OCT_COMMIT)     what all workers run; default HEAD of a tree without changes
# --config FILE (OCT_CONFIG)  the same as CONFIG
# --dir DIR (OCT_DIR)         the clone on the workers, from their home; default oct-foundation
# --workers N (OCT_WORKERS)   refuse a TPU with another number; --dry-run shows N (default 1)
# --worker I                  status and logs of one worker
# -f, --follow   -n LINES     for logs
# --kill                      for stop: SIGKILL what still runs after the wait
# --dry-run                   print the commands; nothing is run, and gcloud is not needed
# Also from the environment: OCT_VENV (.venv), for setup OCT_PYTHON (3.11) and OCT_UV_OPTIONS (of `uv pip install`:
# --torch-backend=cpu), OCT_MIN_DISK_GB (10), OCT_STOP_WAIT_S (900), OCT_START_GRACE_S (300: how long the training
# may take until its devices are open).
#
# Exit codes: 0 done, 1 refused or failed on a worker, 2 a mistake on the command line, 3 to 5 see status.
set -euo pipefail

VERBS="check setup sync start status logs stop"
tpu=${OCT_TPU:-} zone=${OCT_ZONE:-} project=${OCT_PROJECT:-} commit=${OCT_COMMIT:-} config=${OCT_CONFIG:-}
folder=${OCT_DIR:-oct-foundation} num_workers=${OCT_WORKERS:-}
way=${OCT_SSH:-} venv=${OCT_VENV:-.venv} python=${OCT_PYTHON:-3.11}
verb='' is_asked='' overrides=() only='' follow='' lines=50 kill_after=no dry=''
scratch='' workers=() jobs=() codes=() failed=() line=() launch=''

say() { printf '%s\n' "$*"; }

usage_error() { # a mistake on the command line
    printf 'error: %s; see %s --help\n' "$*" "${0##*/}" >&2
    exit 2
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

quote() { # one word for a POSIX shell, as it is where it needs no quotes
    case $1 in
    '' | *[!A-Za-z0-9_./:=,@%+-]*) printf "'%s'" "${1//\'/\'\\\'\'}" ;;
    *) printf '%s' "$1" ;;
    esac
}

quoted() { # words as one line for a POSIX shell
    local word space=''
    for word in "$@"; do
        printf '%s' "$space"
        quote "$word"
        space=' '
    done
}

# ---- the command line

parse() {
    local rest=()
    while (($# > 0)); do
        case $1 in
        --tpu | --zone | --project | --commit | --config | --dir | --workers | --worker | -n)
            (($# > 1)) && [[ -n $2 ]] || usage_error "$1: expected a value, found none"
            option "$1" "$2"
            shift
            ;;
        --*=?*) option "${1%%=*}" "${1#*=}" ;;
        --tunnel-through-iap | --internal-ip)
            [[ -z $way || $way == "${1#--}" ]] || usage_error "$1: not beside --$way"
            way=${1#--}
            ;;
        -f | --follow) follow=follow ;;
        --kill) kill_after=yes ;;
        --dry-run) dry=yes ;;
        -h | --help)
            sed -n '2,/^set -euo/ { /^#/ s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        -*) usage_error "unknown option $1" ;;
        *) rest+=("$1") ;;
        esac
        shift
    done
    words ${rest[@]+"${rest[@]}"}
    [[ -n $verb ]] || verb=start
    check_words
}

option() { # NAME VALUE
    case $1 in
    --tpu) tpu=$2 is_asked=yes ;;
    --zone) zone=$2 ;;
    --project) project=$2 ;;
    --commit) commit=$2 ;;
    --config) config=$2 ;;
    --dir) folder=$2 ;;
    --workers) num_workers=$2 ;;
    --worker) only=$2 ;;
    -n) lines=$2 ;;
    *) usage_error "unknown option $1" ;;
    esac
}

words() { # [VERB] [CONFIG] [overrides...]
    if [[ " $VERBS " == *" ${1:-start} "* ]]; then
        verb=${1:-} is_asked=${1:+yes}${is_asked}
        (($# == 0)) || shift
    elif [[ $1 != *.yaml && $1 != *.yml && $1 != *=* ]]; then
        usage_error "expected one of $VERBS, or a .yaml configuration, found $1"
    fi
    if (($# > 0)) && [[ $1 == *.yaml || $1 == *.yml ]] && [[ $1 != *=* ]]; then
        config=$1
        shift
    fi
    local word
    for word in "$@"; do
        [[ $word == ?*=* ]] || usage_error "override $word: expected section.key=value"
        overrides+=("$word")
    done
}

check_words() {
    local number name
    for name in OCT_MIN_DISK_GB OCT_START_GRACE_S OCT_STOP_WAIT_S; do
        case ${!name:-} in *[!0-9]* | 0?*) usage_error "$name: expected a whole number, found ${!name}" ;; esac
    done
    for number in "$num_workers" "$only" "$lines"; do
        case $number in *[!0-9]*) usage_error "expected a whole number, found $number" ;; esac
    done
    case $way in
    '' | tunnel-through-iap | internal-ip) ;;
    *) usage_error "OCT_SSH: expected tunnel-through-iap or internal-ip, found $way" ;;
    esac
    [[ $num_workers != 0 ]] || usage_error "--workers: expected 1 or more, found 0"
    [[ -z $only || $verb == status || $verb == logs ]] || usage_error "--worker: only for status and logs"
    [[ -z $follow || $verb == logs ]] || usage_error "--follow: only for logs"
    [[ $kill_after == no || $verb == stop ]] || usage_error "--kill: only for stop"
    [[ $verb == check || $verb == start || ${#overrides[@]} == 0 ]] || usage_error "$verb: takes no overrides"
    if [[ -z $tpu && $verb != start ]]; then usage_error "$verb: expected --tpu NAME, found none"; fi
    if [[ $verb == start && -z $config ]]; then usage_error "start: expected a CONFIG, found none"; fi
    if [[ $verb == check && -z $config && ${#overrides[@]} -gt 0 ]]; then
        usage_error "check: expected a CONFIG before the overrides, found none"
    fi
    if [[ -n $config ]]; then # as it is called in every clone
        config=${config#"$PWD"/}
        case $config in
        /*) usage_error "$config: expected a configuration inside of $PWD, which is what the workers have" ;;
        esac
        [[ -f $config ]] || usage_error "$config: expected a configuration, found no such file"
    fi
}

# ---- what runs on a worker

training() { # sets `line` to the training command
    line=("$venv/bin/python" -m pretraining.train --config "$config" ${overrides[@]+"${overrides[@]}"})
    if [[ -n $tpu ]]; then
        line=(env PJRT_DEVICE=TPU "OCT_EXPECT_HOSTS=$num_workers" "${line[@]}")
    elif is_worker; then
        line=(env PJRT_DEVICE=TPU "${line[@]}")
    fi
}

is_worker() { # succeeds where this machine has a TPU
    bash utils/tpu_worker.sh devices
}

gcloud_tpu() { # WORKER SUBCOMMAND ARGUMENTS...: sets `line` to the gcloud command
    local worker=$1 subcommand=$2
    shift 2
    line=(gcloud)
    # The tunnel is known to its alpha track alone (seen with 528.0.0).
    [[ -z $worker || $way != tunnel-through-iap ]] || line+=(alpha)
    line+=(compute tpus tpu-vm "$subcommand" "$@" --quiet)
    [[ -z $worker ]] || line+=("--worker=$worker" ${way:+"--$way"})
    [[ -z $zone ]] || line+=("--zone=$zone")
    [[ -z $project ]] || line+=("--project=$project")
}

over_ssh() { # WORKER COMMAND: sets `line` to the gcloud command
    gcloud_tpu "$1" ssh "$tpu" --ssh-flag=-oServerAliveInterval=30 "--command=$2"
}

on_worker() { # WORKER VERB ARGUMENTS...: sets `line` to the gcloud command that runs it in the clone
    local worker=$1 clone
    shift
    clone=$(quote "$folder")
    over_ssh "$worker" \
        "cd $clone 2>/dev/null || { echo error: no clone in $clone, run sync; exit 1; }; exec bash utils/tpu_worker.sh $(quoted "$@")"
}

check_line() {
    local paths=()
    if [[ -n $config ]]; then paths=("$config" ${overrides[@]+"${overrides[@]}"}); fi
    on_worker "$1" check "$commit" "$venv" "${OCT_MIN_DISK_GB:-10}" ${paths[@]+"${paths[@]}"}
}
start_line() {
    training
    on_worker "$1" start "$launch" "${OCT_START_GRACE_S:-300}" "${line[@]}"
}
stop_line() { on_worker "$1" stop "${OCT_STOP_WAIT_S:-900}" "$kill_after"; }
undo_line() { on_worker "$1" stop 10 yes "$launch"; } # what has just been started has nothing to save
status_line() { on_worker "$1" status; }
logs_line() { on_worker "$1" logs "$lines" ${follow:+"$follow"}; }
setup_line() {
    local options
    read -ra options <<<"${OCT_UV_OPTIONS---torch-backend=cpu}"
    on_worker "$1" setup "$venv" "$python" ${options[@]+"${options[@]}"}
}
copy_line() { gcloud_tpu "$1" scp "$scratch/oct-sync.bundle" "$scratch/oct-sync.sh" "$tpu:"; }
sync_line() { over_ssh "$1" "exec bash oct-sync.sh sync $(quoted "$folder" "$commit" oct-sync.bundle)"; }
clean_line() { over_ssh "$1" "rm -f oct-sync.bundle oct-sync.sh"; }

# ---- on all workers at once

# One gcloud a worker: with --worker=all, older ones drop the exit codes.
fan_out() { # LINE_FUNCTION [together]: run its line for each worker, tell what they said; sets `codes` and `failed`
    local of_worker=$1 together=${2:-} worker
    jobs=() codes=() failed=()
    for worker in "${workers[@]}"; do
        "$of_worker" "$worker"
        if [[ -n $dry ]]; then
            say "$(quoted "${line[@]}")"
            continue
        fi
        "${line[@]}" </dev/null >"$scratch/$worker.out" 2>"$scratch/$worker.err" &
        jobs+=($!)
        # The first gcloud ever makes the ssh key; the others must find it.
        if [[ ! -f ~/.ssh/google_compute_engine ]]; then wait $! || true; fi
    done
    [[ -z $dry ]] || return 0
    if [[ -n $together ]]; then wait_for_failure; fi
    local i code
    for i in "${!workers[@]}"; do
        worker=${workers[i]} code=0
        wait "${jobs[i]}" || code=$?
        codes+=("$code")
        if [[ -n $together && $code == 143 ]]; then
            say "worker $worker: waited for the others"
            continue
        fi
        tell "$worker" "$code" "$scratch/$worker"
        if ((code > 0)); then failed+=("$worker"); fi
    done
    jobs=()
    ((${#failed[@]} == 0))
}

wait_for_failure() { # until all jobs have ended, or one has failed; the others may wait for that one
    local job running=yes
    while [[ -n $running ]]; do
        sleep 0.2
        running=''
        for job in "${jobs[@]}"; do
            if kill -0 "$job" 2>/dev/null; then
                running=yes
            elif ! wait "$job"; then
                sleep 2 # for those that fail by themselves
                end_jobs
                return
            fi
        done
    done
}

tell() { # WORKER CODE FILES: what it said; where it failed without a word of its own, gcloud's last
    sed "s/^/worker $1: /" "$3.out"
    if (($2 > 0)) && [[ ! -s $3.out ]]; then
        say "worker $1: error: gcloud ended with exit code $2: $(complaint "$3.err")"
    fi
}

complaint() { # FILE: what gcloud said was wrong
    grep -m 1 '^ERROR' "$1" || grep -v '^ *$' "$1" | tail -n 1
}

end_jobs() { # those of an interrupted launcher
    [[ ${#jobs[@]} == 0 ]] || kill "${jobs[@]}" 2>/dev/null || true
}

tail_logs() { # every worker's log as it grows, each line with its worker
    local worker job code=0
    for worker in "${workers[@]}"; do
        logs_line "$worker"
        "${line[@]}" </dev/null > >(while IFS= read -r text; do say "worker $worker: $text"; done) &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || code=1; done
    return "$code"
}

# ---- what is asked for

find_commit() {
    if [[ -n $commit ]]; then
        local asked=$commit
        commit=$(git rev-parse --verify --quiet "$asked^{commit}") ||
            usage_error "--commit: expected a commit of $PWD, found $asked"
    else
        commit=$(git rev-parse --verify --quiet HEAD) || usage_error "$PWD: expected a git clone, found none"
        [[ -z $(git status --porcelain --untracked-files=no) ]] ||
            usage_error "$PWD: expected no changes, found some; commit them, or name a commit with --commit"
    fi
    if [[ -n $config ]] && ! git cat-file -e "$commit:$config" 2>/dev/null; then
        usage_error "$config: not in commit ${commit:0:10}, which is what the workers run; commit it"
    fi
}

find_workers() { # sets num_workers
    local answer state address addresses
    gcloud_tpu '' describe "$tpu" '--format=value(state,networkEndpoints[].ipAddress.list())'
    if [[ -n $dry ]]; then
        : "${num_workers:=1}"
        say "$(quoted "${line[@]}")"
        return
    fi
    answer=$("${line[@]}" 2>"$scratch/describe.err") ||
        fail "tpu $tpu: gcloud could not describe it: $(complaint "$scratch/describe.err")"
    read -r state address <<<"$answer"
    [[ $state == READY ]] || fail "tpu $tpu: expected state READY, found $state"
    [[ -n $address ]] || fail "tpu $tpu: expected an address of every worker, found none"
    IFS=, read -ra addresses <<<"$address"
    [[ -z $num_workers || $num_workers == "${#addresses[@]}" ]] ||
        fail "tpu $tpu: expected $num_workers workers, found ${#addresses[@]}"
    num_workers=${#addresses[@]}
}

find_account() {
    local account
    line=(gcloud auth list '--filter=status:ACTIVE' '--format=value(account)')
    if [[ -n $dry ]]; then
        say "$(quoted "${line[@]}")"
        return
    fi
    account=$("${line[@]}" 2>/dev/null) || account=''
    [[ -n $account ]] || fail "gcloud: expected an active account, found none; run gcloud auth login"
    say "gcloud: account $account"
}

describe_plan() {
    say "# tpu $tpu, zone ${zone:-of gcloud}, project ${project:-of gcloud}, workers ${num_workers:-1}"
    say "# commit ${commit:-not used}, clone $folder"
    say "# config $(quoted "${config:-none}" ${overrides[@]+"${overrides[@]}"})"
}

sync_all() {
    local bare=$scratch/bare code=0
    if [[ -n $dry ]]; then
        say "# oct-sync.bundle: the files of commit ${commit:0:10}; oct-sync.sh: utils/tpu_worker.sh"
    else
        # Without the commits before it, which a shallow clone does not have and no worker needs.
        git init -q --bare "$bare"
        (cd "$(git rev-parse --git-path objects)" && pwd) >"$bare/objects/info/alternates"
        say "$commit" >"$bare/shallow"
        git -C "$bare" update-ref refs/heads/oct-sync "$commit"
        git -C "$bare" bundle create -q "$scratch/oct-sync.bundle" refs/heads/oct-sync
        git show "$commit:utils/tpu_worker.sh" >"$scratch/oct-sync.sh" 2>/dev/null ||
            fail "commit ${commit:0:10} has no utils/tpu_worker.sh"
    fi
    fan_out copy_line || fail "not all workers were reached: ${failed[*]}"
    fan_out sync_line || code=$?
    local guilty="${failed[*]-}"
    fan_out clean_line || say "error: oct-sync.bundle stays on worker ${failed[*]}"
    ((code == 0)) || fail "not all workers are at commit ${commit:0:10}: see worker $guilty"
}

start_all() {
    launch=$(date +%Y%m%dT%H%M%S)-$$
    [[ -z $dry ]] || launch=LAUNCH
    fan_out check_line || fail "nothing was started: see worker ${failed[*]}"
    trap 'trap - INT TERM; end_jobs; undo_start; exit 130' INT TERM
    if ! fan_out start_line together; then
        local guilty="${failed[*]}"
        undo_start
        fail "worker $guilty did not start, so the others were stopped"
    fi
    trap - INT TERM
    [[ -n $dry ]] || say "started on $num_workers workers at commit ${commit:0:10}; follow with: ${0##*/} --tpu $tpu logs -f"
}

undo_start() {
    fan_out undo_line || say "error: what was started on worker ${failed[*]} could not be stopped; run stop --kill"
}

status_all() { # 4 where a worker's is 4, 5 where all are 5, else 3; 1 where one runs or was not reached
    fan_out status_line && return
    local code answer=5
    for code in "${codes[@]}"; do
        case $code in
        4) answer=4 ;;
        3) ((answer == 4)) || answer=3 ;;
        5) ;;
        *) exit 1 ;;
        esac
    done
    exit "$answer"
}

foreground() {
    local setup=(bash utils/tpu_worker.sh setup "$venv" "$python") options
    training
    if ! is_worker; then
        [[ -x $venv/bin/python ]] || fail "expected $venv/bin/python, found none; make install makes it (OCT_VENV)"
    else
        read -ra options <<<"${OCT_UV_OPTIONS---torch-backend=cpu}"
        setup+=(${options[@]+"${options[@]}"})
        line=(bash utils/tpu_worker.sh foreground "$(date +%Y%m%dT%H%M%S)-$$" "${line[@]}")
        if [[ ! -x $venv/bin/python ]]; then
            say "$(quoted "${setup[@]}")"
            [[ -n $dry ]] || "${setup[@]}" || exit
        fi
    fi
    say "$(quoted "${line[@]}")"
    [[ -n $dry ]] || exec "${line[@]}"
}

main() {
    cd "$(dirname "${BASH_SOURCE[0]}")"
    parse "$@"
    if [[ -n $tpu && -z $is_asked ]] && is_worker; then tpu=''; fi # OCT_TPU of a worker's own environment
    if [[ -z $tpu ]]; then
        foreground
        return
    fi
    case $verb in check | start | sync) find_commit ;; esac
    if [[ -n $dry ]]; then
        scratch=SCRATCH
        describe_plan
    else
        command -v gcloud >/dev/null || fail "gcloud: not on PATH; install the Google Cloud CLI"
        scratch=$(mktemp -d)
        trap 'end_jobs; rm -rf "$scratch"' EXIT
    fi
    case $verb in check | start) find_account ;; esac
    find_workers
    local i
    for ((i = 0; i < num_workers; i++)); do
        [[ -n $only && $only != "$i" ]] || workers+=("$i")
    done
    ((${#workers[@]} > 0)) || usage_error "--worker: expected one below $num_workers, found $only"
    case $verb in
    check) fan_out check_line || fail "not ready: see worker ${failed[*]}" ;;
    sync) sync_all ;;
    setup) fan_out setup_line || fail "not set up: see worker ${failed[*]}" ;;
    start) start_all ;;
    stop) fan_out stop_line || fail "not stopped: see worker ${failed[*]}" ;;
    status) status_all ;;
    logs)
        if [[ -n $follow && -z $dry ]]; then
            tail_logs
        else
            fan_out logs_line || exit 1
        fi
        ;;
    esac
}

main "$@"
