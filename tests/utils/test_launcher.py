"""run_tpu_xla.sh, on folders that play the workers of a TPU VM (tests/support/fake_gcloud.py).

Here a small program stands in for the training, so that starting, stopping and refusing are seen in seconds;
tests/whole_runs/test_launcher_runs.py trains.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
from packaging.requirements import Requirement

from tests.support.launcher_factory import Pod, git, wait_for
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import is_running
from utils.check_paths import check_paths
from utils.config.load import load_config
from utils.errors import UserError
from utils.runtime.open import open_runtime, report_opened

SCRIPTS = [ROOT / "run_tpu_xla.sh", ROOT / "utils" / "tpu_worker.sh", ROOT / ".ci" / "run"]
CONFIG = "configs/small.yaml"
OVERRIDES = ("data.store=/the store/it's", "spatial.image_size=[8,24,32]", "a.b=$HOME;*")

# Stands where .venv/bin/python would: each command of the launcher, in a way that a test can see. SIGTERM is
# taken as training takes it; what is deaf to it has a process that outlives it.
PYTHON = r"""#!/usr/bin/env bash
train() {
    trap 'echo "stopped by SIGTERM at step 3 of 8"; exit 76' TERM
    if [[ -f ~/deaf ]]; then trap '' TERM; setsid sleep 600 & fi
    while [[ -f ~/slow ]]; do sleep 0.05; done
    echo "opened: 2 x TPU, host 1 of 2"
    echo "resuming"
    until [[ -f ~/exit_code ]]; do sleep 0.05; done
    echo "error: the reason"
    exit "$(<~/exit_code)"
}
case "$*" in
*"torch_xla"*) [[ ! -f ~/no_package ]] ;;
"-m utils.check_paths "*) if [[ -f ~/no_store ]]; then echo "error: data.store: none there" >&2; exit 2; fi
    echo "store readable" ;;
"-m pretraining.train "*)
    printf '%s\n' "$PJRT_DEVICE, $OCT_EXPECT_HOSTS hosts" "$@" >>~/argv
    if [[ -f ~/broken ]]; then echo "some words"; echo "error: optim.base_lr: too hot" >&2; exit 2; fi
    train ;;
*) echo "error: no such call: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Two workers, at the commit of the source tree; no test changes them for the next one."""
    folder = tmp_path_factory.mktemp("pod")
    pod = Pod(folder, 2, OCT_DEVICE_GLOB=str(folder / "accel*"))
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (folder / "accel0").touch()
    for name in ("run_tpu_xla.sh", "utils/tpu_worker.sh"):
        (pod.source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, pod.source / name)
    pod.commit(
        **{
            CONFIG: "seed: 0\n",
            "requirements.txt": "numpy\n",
            "requirements-tpu.txt": "-r requirements.txt\n",
            "constraints-tpu.txt": "numpy==2\n",
            ".gitignore": "/runs/\n.venv/\n",
        }
    )
    done = pod.launch("sync")
    assert done.returncode == 0, done
    return pod


@pytest.fixture
def pod(ready: Pod) -> Iterator[Pod]:
    """The workers, on which nothing runs and nothing is known of a run after the test."""
    yield ready
    if any(is_running(pid) for pid in ready.started()):
        ready.launch("stop", "--kill", OCT_STOP_WAIT_S="5")
    for worker in range(ready.size):
        shutil.rmtree(ready.clone(worker) / "runs", ignore_errors=True)


def launch(pod: Pod, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return pod.launch(*words, OCT_VENV=str(pod.folder / "venv"), **environment)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return (done.stdout + done.stderr).splitlines()


# ---- the command line


def test_shellcheck() -> None:
    program = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    if not Path(program).exists():
        pytest.skip("shellcheck is not installed (requirements-dev.txt)")
    done = subprocess.run([program, *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


NO_CLONE = "cd oct-foundation 2>/dev/null || { echo error: no clone in oct-foundation, run sync; exit 1; }"
SSH = "gcloud compute tpus tpu-vm ssh pod --ssh-flag=-oServerAliveInterval=30"


def test_dry_run_prints_the_exact_commands(pod: Pod) -> None:
    commit = git(pod.source, "rev-parse", "HEAD")
    before = pod.calls()
    done = pod.launch(
        *("--zone=us-central2-b", "--project", "a-project", "--workers", "2", "--dry-run"),
        *(CONFIG, "data.store=/the store"),
        gcloud=False,
        OCT_DIR="",
    )
    where = "--zone=us-central2-b --project=a-project"
    go = f"{SSH} '--command={NO_CLONE}; exec bash utils/tpu_worker.sh"
    store = r"'\''data.store=/the store'\'''"
    variables = "env PJRT_DEVICE=TPU OCT_EXPECT_HOSTS=2"
    train = f"{variables} .venv/bin/python -m pretraining.train --config {CONFIG} {store}"
    assert lines(done) == [
        "# tpu pod, zone us-central2-b, project a-project, workers 2",
        f"# commit {commit}, clone oct-foundation",
        f"# config {CONFIG} 'data.store=/the store'",
        "gcloud auth list --filter=status:ACTIVE '--format=value(account)'",
        "gcloud compute tpus tpu-vm describe pod '--format=value(state,networkEndpoints[].ipAddress.list())' "
        f"--quiet {where}",
        f"{go} check {commit} .venv 0 {CONFIG} {store} --quiet --worker=0 {where}",
        f"{go} check {commit} .venv 0 {CONFIG} {store} --quiet --worker=1 {where}",
        f"{go} start LAUNCH 240 {train} --quiet --worker=0 {where}",
        f"{go} start LAUNCH 240 {train} --quiet --worker=1 {where}",
    ]
    assert done.returncode == 0
    assert pod.calls() == before  # nothing was run


def test_quotes_survive_two_shells(pod: Pod) -> None:
    last = lines(pod.launch("--dry-run", CONFIG, *OVERRIDES))[-1]
    command = next(word for word in shlex.split(last) if word.startswith("--command="))
    assert tuple(shlex.split(command)[-len(OVERRIDES) :]) == OVERRIDES


def test_dry_run_of_sync(pod: Pod) -> None:
    commit = git(pod.source, "rev-parse", "HEAD")
    assert lines(pod.launch("--dry-run", "sync"))[4:] == [
        f"# oct-sync.bundle: the files of commit {commit[:10]}; oct-sync.sh: utils/tpu_worker.sh",
        "gcloud compute tpus tpu-vm scp SCRATCH/oct-sync.bundle SCRATCH/oct-sync.sh pod: --quiet --worker=0",
        f"{SSH} '--command=exec bash oct-sync.sh "
        rf"sync '\''the clone'\'' {commit} oct-sync.bundle' --quiet --worker=0",
        f"{SSH} '--command=rm -f oct-sync.bundle oct-sync.sh' --quiet --worker=0",
    ]


@pytest.mark.slow
def test_the_real_gcloud_knows_every_flag(pod: Pod, tmp_path: Path) -> None:
    """Needs gcloud; it reads the command line before it asks for a login."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    kinds: dict[tuple[str, str], str] = {}
    for way in ("", "tunnel-through-iap", "internal-ip"):
        for line in lines(pod.launch("--dry-run", "--zone=z", "--project=a-project", "sync", OCT_SSH=way)):
            if line.startswith("gcloud"):
                kinds[way, line.split(" tpu-vm ")[1].split()[0]] = line
    assert sorted(name for _, name in kinds) == ["describe"] * 3 + ["scp"] * 3 + ["ssh"] * 3
    nobody = os.environ | {
        "CLOUDSDK_CONFIG": str(tmp_path),
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }
    for line in [*kinds.values(), kinds["", "ssh"] + " --no-such-flag"]:
        done = subprocess.run(["bash", "-c", line], env=nobody, capture_output=True, text=True, timeout=120)
        if line.endswith("--no-such-flag"):
            assert "unrecognized arguments" in done.stderr
        else:
            assert "You do not currently have an active account selected" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strat"], "error: expected one of check setup sync start status logs stop, or a .yaml"),
        (["start"], "error: start: expected a CONFIG, found none"),
        (["start", "configs/none.yaml"], "error: configs/none.yaml: expected a configuration, found no such"),
        (["start", "/etc/none.yaml"], "error: /etc/none.yaml: expected a configuration inside of"),
        ([CONFIG, "seed"], "error: override seed: expected section.key=value"),
        (["status", "a.b=1"], "error: status: takes no overrides"),
        (["check", "a.b=1"], "error: check: expected a CONFIG before the overrides"),
        (["--zone"], "error: --zone: expected a value, found none"),
        (["--zone=", "status"], "error: unknown option --zone="),
        (["--colour", "red"], "error: unknown option --colour"),
        (["--workers", "four", "status"], "error: expected a whole number, found four"),
        (["--workers", "0", "status"], "error: --workers: expected 1 or more, found 0"),
        (["--worker", "1", CONFIG], "error: --worker: only for status and logs"),
        (["--tunnel-through-iap", "--internal-ip", "status"], "error: --internal-ip: not beside --tunnel"),
        (["--kill", "status"], "error: --kill: only for stop"),
        (["-f", "status"], "error: --follow: only for logs"),
        (["--commit", "nowhere", CONFIG], "error: --commit: expected a commit of ... found nowhere;"),
        (["--worker", "7", "status"], "error: --worker: expected one below 2, found 7"),
    ],
)
def test_mistakes_on_the_command_line(ready: Pod, words: list[str], message: str) -> None:
    done = ready.launch(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    start, _, end = message.partition(" ... ")
    assert done.stderr.startswith(start)
    assert end in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["OCT_STOP_WAIT_S", "OCT_START_GRACE_S", "OCT_MIN_DISK_GB"])
@pytest.mark.parametrize("value", ["15m", "2.5", "-1", "08"])
def test_numbers_of_the_environment_are_checked_before_anything_is_done(
    ready: Pod, name: str, value: str
) -> None:
    done = ready.launch("stop", **{name: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {name}: expected a whole number, found {value}")
    assert done.stderr.count("\n") == 1


def test_a_verb_without_a_tpu_is_a_mistake(ready: Pod) -> None:
    done = ready.launch("status", tpu=None)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "status: expected --tpu NAME" in done.stderr


def test_what_is_not_committed_does_not_start(pod: Pod) -> None:
    (pod.source / "configs/new.yaml").write_text("seed: 1\n")
    done = launch(pod, "start", "configs/new.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: configs/new.yaml: not in commit")
    (pod.source / "configs/new.yaml").unlink()
    (pod.source / CONFIG).write_text("seed: 2\n")
    try:
        for verb in (["sync"], ["start", CONFIG]):
            done = launch(pod, *verb)
            assert done.returncode == 2
            assert (
                "expected no changes, found some; commit them, or name a commit with --commit" in done.stderr
            )
        assert launch(pod, "check", "--commit", "HEAD", CONFIG).returncode == 0
    finally:
        git(pod.source, "checkout", "-q", CONFIG)


# ---- check


def test_check_says_what_it_saw(pod: Pod) -> None:
    done = launch(pod, "check", CONFIG, *OVERRIDES)
    assert done.returncode == 0, done
    short = git(pod.source, "rev-parse", "--short=10", "HEAD")
    first, *others = lines(done)
    assert first == "gcloud: account someone@example.com"
    for worker, line in enumerate(others):
        assert line.startswith(f"worker {worker}: ready: commit {short}, ")
        assert line.endswith("GiB free, 1 devices free, store readable")


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"account": ""}, [], "error: gcloud: expected an active account, found none; run gcloud auth login"),
        ({"name": "other"}, [], "error: tpu pod: gcloud could not describe it: ERROR: (gcloud) NOT_FOUND"),
        ({"state": "PREEMPTED"}, [], "error: tpu pod: expected state READY, found PREEMPTED"),
        ({"addresses": []}, [], "error: tpu pod: expected an address of every worker, found none"),
        ({}, ["--workers=4"], "error: tpu pod: expected 4 workers, found 2"),
    ],
)
def test_a_tpu_that_is_not_there(ready: Pod, change: dict, words: list[str], message: str) -> None:
    before = dict(ready.state)
    ready.set(**change)
    done = launch(ready, "check", *words, CONFIG)
    ready.set(**before)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_no_gcloud(ready: Pod) -> None:
    done = ready.launch("status", gcloud=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: gcloud: not on PATH; install the Google Cloud CLI\n",
    )


def test_check_names_every_fault_of_every_worker_and_nothing_starts(pod: Pod) -> None:
    commit = git(pod.source, "rev-parse", "--short=10", "HEAD")
    git(pod.clone(0), "commit", "-q", "--allow-empty", "-m", "Elsewhere")
    elsewhere = git(pod.clone(0), "rev-parse", "--short=10", "HEAD")
    (pod.clone(0) / CONFIG).write_text("seed: 2\n")
    (pod.home(1) / "no_store").touch()
    with (pod.folder / "accel0").open() as held:
        done = launch(pod, "start", CONFIG, OCT_MIN_DISK_GB="99999999")
        assert held.readable()
    git(pod.clone(0), "checkout", "-q", CONFIG)
    (pod.home(1) / "no_store").unlink()
    assert done.returncode == 1
    worker_lines = [line for line in lines(done) if "worker" in line]
    assert [line.split(", found")[0] for line in worker_lines] == [
        f"worker 0: error: commit: expected {commit}",
        f"worker 0: error: clone: expected no changes in {pod.clone(0)}",
        f"worker 0: error: disk: expected 99999999 GiB free in {pod.clone(0)}",
        f"worker 0: error: devices: expected {pod.folder}/accel* free",
        f"worker 1: error: disk: expected 99999999 GiB free in {pod.clone(1)}",
        f"worker 1: error: devices: expected {pod.folder}/accel* free",
        "worker 1: error: data.store: none there",
        "error: nothing was started: see worker 0 1",
    ]
    assert worker_lines[0].endswith(f", found {elsewhere}; run sync")
    assert worker_lines[3].endswith(f"them in use by pid {os.getpid()}")
    assert not (pod.home(0) / "argv").exists()

    (pod.home(1) / "no_package").touch()
    (pod.folder / "accel0").unlink()
    git(pod.clone(0), "checkout", "-q", commit)
    pod.clone(0).rename(pod.home(0) / "away")
    done = launch(pod, "check", CONFIG)
    (pod.home(0) / "away").rename(pod.clone(0))
    (pod.folder / "accel0").touch()
    (pod.home(1) / "no_package").unlink()
    assert [line for line in lines(done) if "worker" in line] == [
        "worker 0: error: no clone in the clone, run sync",
        f"worker 1: error: devices: expected {pod.folder}/accel*, found none; "
        "this is no TPU VM, or its TPU is not attached",
        f"worker 1: error: environment: expected torch_xla in {pod.folder}/venv, found none; run setup",
        "error: not ready: see worker 0 1",
    ]

    pod.set(unreachable=[1])
    followed = pod.launch("logs", "-f")
    done = pod.launch("check", CONFIG)
    pod.set(unreachable=[])
    assert followed.returncode == 1
    assert "exited with return code [255]" in followed.stderr
    assert done.returncode == 1
    worker_lines = [line for line in lines(done) if "worker" in line]
    assert worker_lines == [
        "worker 0: error: environment: expected .venv/bin/python, found none; run setup",
        "worker 1: error: gcloud ended with exit code 255: "
        "ERROR: (gcloud) [/usr/bin/ssh] exited with return code [255].",
        "error: not ready: see worker 0 1",
    ]


# ---- start, status, logs, stop


def test_start_refuse_status_stop_and_start_again(pod: Pod) -> None:
    decoy = subprocess.Popen(["bash", "-c", "exec -a pretraining.train sleep 60"], start_new_session=True)
    done = launch(pod, "start", CONFIG, *OVERRIDES)
    assert done.returncode == 0, done
    pids = [pod.pid(worker) for worker in range(2)]
    for worker, pid in enumerate(pids):
        assert f"worker {worker}: started, pid {pid}" in lines(done)
        # the ssh session is over and was killed; arguments arrive as they were typed
        wait_for(lambda worker=worker: pod.log_text(worker).endswith("resuming\n"))
        assert is_running(pid)
        assert (pod.home(worker) / "argv").read_text().splitlines() == [
            *("TPU, 2 hosts", "-m", "pretraining.train", "--config", CONFIG, *OVERRIDES),
        ]
    status = launch(pod, "status")
    assert status.returncode == 0
    assert f"worker 1: running, pid {pids[1]}, since" in status.stdout

    again = launch(pod, "start", CONFIG)
    assert again.returncode == 1
    assert f"worker 0: error: a run is in progress here, pid {pids[0]}; see status, or stop it" in lines(
        again
    )
    assert all(is_running(pid) for pid in pids)
    assert "a run is in progress here" in launch(pod, "sync").stdout

    follow = subprocess.Popen(
        [pod.source / "run_tpu_xla.sh", "--tpu", "pod", "logs", "-f"],
        env=pod.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    done = launch(pod, "stop")
    assert done.returncode == 0
    for worker, pid in enumerate(pids):
        assert (
            f"worker {worker}: stopped, pid {pid}, exit code 76: stopped by SIGTERM at step 3 of 8"
            in lines(done)
        )
        assert not is_running(pid)
    output, _ = follow.communicate(timeout=120)  # it ends with the run
    assert follow.returncode == 0
    assert {"worker 0: resuming", "worker 1: stopped by SIGTERM at step 3 of 8"} <= set(output.splitlines())
    assert is_running(decoy.pid)
    decoy.kill()
    decoy.wait()

    status = launch(pod, "status")
    assert status.returncode == 3
    assert status.stdout.count("start goes on): stopped by SIGTERM at step 3 of 8") == 2

    done = launch(pod, "start", CONFIG)
    assert done.returncode == 0, done
    assert pod.log_text(0).count(" start at commit ") == 2
    wait_for(lambda: pod.log_text(0).endswith("resuming\n"))
    assert launch(pod, "logs", "-n", "1", "--worker=0").stdout == "worker 0: resuming\n"
    os.kill(pod.pid(1), signal.SIGKILL)
    wait_for(lambda: (pod.clone(1) / "runs/launcher/exit_code").exists())
    status = launch(pod, "status")
    assert status.returncode == 1
    assert "with exit code 137" in status.stdout


@pytest.mark.parametrize(
    ("codes", "status", "words"),
    [
        ((0, 0), 5, "with exit code 0 (finished): "),
        ((76, 76), 3, "with exit code 76 (stopped before its end; start goes on): "),
        ((137, 75), 3, "with exit code 137 (killed by signal 9; start goes on): "),
        ((0, 137), 3, "with exit code 137 (killed by signal 9; start goes on): "),
        ((1, 75), 3, "with exit code 75 (lost another worker, or its storage; start goes on): "),
        ((2, 75), 4, "with exit code 2 (a person has to correct it; start does not help): "),
    ],
)
def test_status_says_whether_a_start_would_help(
    pod: Pod, codes: tuple[int, int], status: int, words: str
) -> None:
    states = [pod.clone(worker) / "runs/launcher" for worker in range(2)]
    for state, code in zip(states, codes, strict=True):
        state.mkdir(parents=True, exist_ok=True)
        (state / "process").write_text("1 1 another-boot before\n")
        (state / "exit_code").write_text(f"{code}\n")
    done = launch(pod, "status")
    assert done.returncode == status
    assert words in done.stdout


def test_status_waits_for_how_a_run_ended_that_ended_a_moment_ago(pod: Pod) -> None:
    for worker in range(2):
        state = pod.clone(worker) / "runs/launcher"
        state.mkdir(parents=True, exist_ok=True)
        (state / "process").write_text("1 1 another-boot before\n")
        (state / "exit_code").unlink(missing_ok=True)
        Timer(1.0, (state / "exit_code").write_text, ("0\n",)).start()
    done = launch(pod, "status")
    assert done.returncode == 5, done.stdout


def test_the_documented_rule_restarts_what_was_lost_and_nothing_else(pod: Pod) -> None:
    text = (ROOT / "docs/guides/launcher.md").read_text()
    (rule,) = [line for line in text.splitlines() if line.startswith("./run_tpu_xla.sh status;")]

    def follow_rule() -> str:
        return subprocess.run(
            ["bash", "-c", rule.replace("CONFIG ...", CONFIG)],
            cwd=pod.source,
            env=pod.environment(more={"OCT_TPU": "pod", "OCT_VENV": str(pod.folder / "venv")}),
            capture_output=True,
            text=True,
        ).stdout

    def end(*workers: int, code: int) -> None:
        for worker in workers:
            (pod.home(worker) / "exit_code").write_text(f"{code}\n")
            wait_for(lambda worker=worker: (pod.clone(worker) / "runs/launcher/exit_code").exists())
            (pod.home(worker) / "exit_code").unlink()

    assert launch(pod, "start", CONFIG).returncode == 0
    assert "started on" not in follow_rule()  # all workers run
    for lost in (True, False):
        first = pod.started()
        if lost:  # a host is killed, and the others leave for want of it
            os.kill(pod.pid(1), signal.SIGKILL)
            wait_for(lambda: (pod.clone(1) / "runs/launcher/exit_code").exists())
            end(0, code=75)
        else:
            launch(pod, "stop")
        assert "started on 2 workers" in follow_rule()
        assert all(map(is_running, pod.started()))
        assert not set(first) & set(pod.started())
    end(0, code=75)
    end(1, code=2)
    answer = follow_rule()
    assert "started on" not in answer
    assert "with exit code 2 (a person has to correct it; start does not help): error: the reason" in answer
    assert launch(pod, "start", CONFIG).returncode == 0
    end(0, 1, code=0)
    assert "started on" not in follow_rule()
    assert not any(map(is_running, pod.started()))


def test_a_pid_that_is_somebody_elses_now_is_left_alone(pod: Pod) -> None:
    """The same pid with another start time, and with the same one after a reboot."""
    stranger = subprocess.Popen(["sleep", "600"])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19]
    other_boot = boot[::-1]  # a fixed character in one place would be this boot's in one of 16
    assert other_boot != boot
    for worker, known in enumerate([f"{int(ticks) - 1} {boot}", f"{ticks} {other_boot}"]):
        path = pod.clone(worker) / "runs/launcher/process"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{stranger.pid} {known} before\n")
    assert launch(pod, "status").returncode == 3
    assert launch(pod, "stop").stdout == "worker 0: not running\nworker 1: not running\n"
    assert launch(pod, "start", CONFIG).returncode == 0
    assert is_running(stranger.pid)
    stranger.kill()
    stranger.wait()


def test_one_worker_that_does_not_start_stops_the_others(pod: Pod) -> None:
    """The other waits for it and opens nothing; nobody waits for the end of the grace."""
    (pod.home(0) / "slow").touch()
    (pod.home(1) / "broken").touch()
    done = launch(pod, "start", CONFIG, OCT_START_GRACE_S="60")
    (pod.home(1) / "broken").unlink()
    (pod.home(0) / "slow").unlink()
    assert done.returncode == 1
    pid = pod.pid(0)
    output = lines(done)
    assert "worker 1: error: ended at once with exit code 2: error: optim.base_lr: too hot" in output
    assert "worker 0: waited for the others" in output
    assert f"worker 0: stopped, pid {pid}, exit code 76: stopped by SIGTERM at step 3 of 8" in output
    assert output[-1] == "error: worker 1 did not start, so the others were stopped"
    assert not is_running(pid)


def test_a_worker_that_opens_no_devices_is_seen_when_the_grace_is_over(pod: Pod) -> None:
    (pod.home(1) / "slow").touch()
    done = launch(pod, "start", CONFIG, OCT_START_GRACE_S="2")
    (pod.home(1) / "slow").unlink()
    assert done.returncode == 1
    assert f"worker 0: started, pid {pod.pid(0)}" in lines(done)
    assert "worker 1: error: opened no devices within 2 s (OCT_START_GRACE_S); see logs" in lines(done)
    assert lines(done)[-1] == "error: worker 1 did not start, so the others were stopped"
    assert not any(map(is_running, pod.started()))


def start_on_worker(pod: Pod, name: str) -> subprocess.Popen[str]:
    words = ["start", name, "60", str(pod.folder / "venv/bin/python"), "-m", "pretraining.train", "x"]
    return subprocess.Popen(
        ["bash", "utils/tpu_worker.sh", *words],
        cwd=pod.clone(0),
        env=pod.environment() | {"HOME": str(pod.home(0)), "PJRT_DEVICE": "TPU", "OCT_EXPECT_HOSTS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_of_two_starts_at_once_one_is_refused(pod: Pod) -> None:
    """Two people at two machines; the devices of a TPU have one owner."""
    (pod.home(0) / "argv").unlink(missing_ok=True)
    (pod.home(0) / "slow").touch()
    starts = [start_on_worker(pod, name) for name in ("one", "other")]
    wait_for(lambda: any(start.poll() is not None for start in starts))
    (pod.home(0) / "slow").unlink()
    answers = {start.communicate()[0]: start.returncode for start in starts}
    assert answers == {f"started, pid {pod.pid(0)}\n": 0, "error: another start is in progress here\n": 1}
    assert (pod.home(0) / "argv").read_text().count("pretraining.train") == 1


def test_a_start_that_gcloud_repeats_is_one_start(pod: Pod) -> None:
    """A broken connection makes gcloud send the command again."""
    answers = [start_on_worker(pod, "the-launch").communicate()[0] for _ in range(2)]
    assert answers[0] == answers[1] == f"started, pid {pod.pid(0)}\n"
    other = subprocess.run(
        ["bash", "utils/tpu_worker.sh", "stop", "5", "yes", "another-launch"],
        cwd=pod.clone(0),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout == f"left alone: pid {pod.pid(0)} is of another start\n"
    assert is_running(pod.pid(0))


@pytest.mark.slow
def test_stop_kill_ends_what_does_not_listen(pod: Pod) -> None:
    (pod.home(0) / "deaf").touch()
    assert launch(pod, "start", CONFIG).returncode == 0
    wait_for(lambda: pod.log_text(0).endswith("resuming\n"))
    pid = pod.pid(0)
    done = launch(pod, "stop", OCT_STOP_WAIT_S="1")
    assert done.returncode == 1
    assert f"worker 0: error: pid {pid} was sent SIGTERM and still runs after 1 s" in done.stdout
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)  # it goes, what it started stays
    wait_for(lambda: not is_running(pid))
    assert "processes of it are left, pids" in launch(pod, "status", "--worker=0").stdout
    done = launch(pod, "start", CONFIG)
    assert "worker 0: error: processes of the last run are left, pids" in done.stdout
    done = launch(pod, "stop", "--kill", OCT_STOP_WAIT_S="1")
    (pod.home(0) / "deaf").unlink()
    assert "worker 0: killed what the last run had left, pids" in done.stdout
    assert launch(pod, "status").returncode == 3
    assert "are left" not in launch(pod, "status").stdout


# ---- sync, setup, foreground


def test_sync_moves_every_clone_and_loses_no_changes(pod: Pod) -> None:
    before = git(pod.source, "rev-parse", "HEAD")
    after = pod.commit(**{CONFIG: "seed: 5\n"})
    (pod.clone(1) / CONFIG).write_text("seed: 7\n")
    done = launch(pod, "sync")
    assert done.returncode == 1
    assert f"worker 0: at commit {after[:10]}" in lines(done)
    assert f"worker 1: error: clone: expected no changes in {pod.clone(1)}, found some" in done.stdout
    assert (pod.clone(1) / CONFIG).read_text() == "seed: 7\n"
    assert [path.name for path in pod.home(1).glob("oct-sync*")] == []
    git(pod.clone(1), "checkout", "-q", CONFIG)
    assert launch(pod, "sync", "--commit", before).returncode == 0
    assert [path.name for w in range(2) for path in pod.home(w).glob("oct-sync*")] == []
    assert {git(pod.clone(w), "rev-parse", "HEAD") for w in range(2)} == {before}
    git(pod.source, "reset", "-q", "--hard", before)


def test_sync_from_a_shallow_clone(pod: Pod, tmp_path: Path) -> None:
    """Its commit names a parent that is not there; on a worker with the history, and on a new one."""
    git(pod.source, "commit", "-q", "--allow-empty", "-m", "Another")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{pod.source}", "shallow")
    shallow = tmp_path / "shallow"
    commit = git(shallow, "rev-parse", "HEAD")
    git(pod.source, "reset", "-q", "--hard", "HEAD^")
    for folder in ("the clone", "a new clone"):
        done = subprocess.run(
            [shallow / "run_tpu_xla.sh", "--tpu", "pod", "--dir", folder, "sync"],
            env=pod.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done
        for worker in range(2):
            clone = pod.home(worker) / folder
            assert git(clone, "rev-parse", "HEAD") == commit
            assert git(clone, "status", "--porcelain") == ""
            git(clone, "fsck")
    assert launch(pod, "sync").returncode == 0


@pytest.mark.parametrize("way", ["tunnel-through-iap", "internal-ip"])
def test_the_way_to_the_workers_is_gclouds(pod: Pod, way: str) -> None:
    """Every ssh and scp takes it; describe asks the API and does not."""
    before = len(pod.calls())
    assert launch(pod, f"--{way}", "sync").returncode == 0
    assert launch(pod, "status", OCT_SSH=way).returncode == 3
    assert launch(pod, "logs", "-f", OCT_SSH=way).returncode == 1  # never started
    calls = pod.calls()[before:]
    reaching = [call for call in calls if " ssh " in call or " scp " in call]
    assert len(reaching) == 6 + 2 + 2
    assert [call for call in calls if f"--{way}" in call] == reaching


# Stand for programs of a worker's image: uv, and what brings uv where it is missing. Their calls are noted.
IMAGE = {
    "uv/uv": r"""
        if [[ -f ~/no_index ]]; then echo "Resolving"; echo "error: no index"; exit 1; fi >&2
        if [[ $1 == venv ]]; then exec PYTHON -m venv --clear --without-pip .venv; fi
        packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
        mkdir -p "$packages/torch_xla"
        if [[ -f ~/broken_wheel ]]; then echo "import _XLAC"; fi >"$packages/torch_xla/__init__.py"
        """.replace("PYTHON", sys.executable),
    "no_uv/python3": r"""
        if [[ ! -f ~/pip ]]; then echo "No module named pip" >&2; exit 1; fi
        if [[ $3 == install ]]; then mkdir -p "$6/bin" && cp "${0%/*}/../uv/uv" "$6/bin"; fi""",
    "no_uv/sudo": '[[ $* != *" install "* ]] || touch ~/pip',
}
INSTALL = "uv pip install --python .venv/bin/python -r requirements-tpu.txt -c constraints-tpu.txt"


@pytest.fixture
def image(pod: Pod) -> Iterator[dict[str, str]]:
    """A PATH of workers that have uv, and of workers that have neither uv nor pip."""
    for name, text in IMAGE.items():
        program = pod.folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/usr/bin/env bash\necho "{program.name} $*" >>~/calls\n{text}\n')
        program.chmod(0o755)
    yield {name: f"{pod.folder}/bin:{pod.folder}/{name}:/usr/bin:/bin" for name in ("uv", "no_uv")}
    for worker in range(pod.size):
        shutil.rmtree(pod.clone(worker) / ".venv", ignore_errors=True)
        (pod.home(worker) / "calls").unlink()


def calls(pod: Pod) -> list[str]:
    return (pod.home(1) / "calls").read_text().splitlines()


def test_setup_installs_the_lock_once_and_shows_its_log_where_it_fails(pod: Pod, image: dict) -> None:
    (pod.home(0) / "broken_wheel").touch()
    done = pod.launch("setup", PATH=image["uv"])
    (pod.home(0) / "broken_wheel").rename(pod.home(0) / "no_index")
    assert done.returncode == 1
    assert "worker 0: ModuleNotFoundError: No module named '_XLAC'" in lines(done)
    done = pod.launch("setup", PATH=image["uv"])
    (pod.home(0) / "no_index").unlink()
    assert done.returncode == 1
    log = pod.clone(0) / "runs/launcher/setup.log"
    assert lines(done) == [
        "worker 0: Resolving",
        "worker 0: error: no index",
        f"worker 0: error: environment .venv: not installed, see above and {log}",
        "worker 1: environment .venv: nothing to do",
        "error: not set up: see worker 0",
    ]
    done = pod.launch("setup", PATH=image["uv"])
    assert lines(done) == [
        "worker 0: environment .venv: installed constraints-tpu.txt",
        "worker 1: environment .venv: nothing to do",
    ]
    assert calls(pod) == ["uv venv --clear --python 3.11 .venv", f"{INSTALL} --torch-backend=cpu"]
    soname = sysconfig.get_config_var("INSTSONAME")
    links = list(pod.clone(0).glob("**/torch_xla/lib/*"))
    assert [(link.name, link.exists()) for link in links] == [(soname, True)] * (not soname.endswith(".a"))
    assert git(pod.clone(0), "status", "--porcelain") == ""
    options = {"OCT_UV_OPTIONS": "--extra-index-url file:///wheels", "OCT_PYTHON": "3.12"}
    assert pod.launch("setup", PATH=image["uv"], **options).returncode == 0
    assert calls(pod)[2:] == [
        "uv venv --clear --python 3.12 .venv",
        f"{INSTALL} --extra-index-url file:///wheels",
    ]


def test_setup_brings_uv_where_there_is_none(pod: Pod, image: dict) -> None:
    done = pod.launch("setup", PATH=image["no_uv"])
    assert done.returncode == 0, done
    apt = "sudo -n apt-get -o DPkg::Lock::Timeout=600 -q"
    assert calls(pod) == [
        "python3 -m pip --version",
        f"{apt} update",
        f"{apt} install -y python3-pip",
        "python3 -m pip install -q --target runs/launcher/uv uv",
        "uv venv --clear --python 3.11 .venv",
        f"{INSTALL} --torch-backend=cpu",
    ]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-tpu.txt"])
def test_every_requirement_of_a_worker_is_locked(name: str) -> None:
    locked = dict(
        line.split("==") for line in (ROOT / "constraints-tpu.txt").read_text().splitlines() if "==" in line
    )
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-r")):
            wanted = Requirement(line)
            assert wanted.specifier.contains(locked[wanted.name.replace("_", "-")]), line
    assert not [package for package in locked if package.startswith(("nvidia", "triton"))]


def test_in_the_foreground(pod: Pod) -> None:
    done = launch_foreground(pod, "--dry-run", CONFIG, "a.b=1 2")
    assert done.stdout.endswith(f"python -m pretraining.train --config {CONFIG} 'a.b=1 2'\n")
    (pod.folder / "home" / "broken").touch()
    done = launch_foreground(pod, CONFIG)
    assert done.returncode == 2
    assert done.stderr == "error: optim.base_lr: too hot\n"
    (pod.folder / "home" / "broken").unlink()
    assert "found none; make install makes it" in pod.launch(CONFIG, tpu=None).stderr


def launch_foreground(pod: Pod, *words: str) -> subprocess.CompletedProcess[str]:
    return pod.launch(*words, tpu=None, OCT_VENV=str(pod.folder / "venv"))


def test_training_says_that_its_devices_are_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = open_runtime(use_bf16=False)
    report_opened(runtime)
    monkeypatch.setenv("OCT_EXPECT_HOSTS", "1")
    report_opened(runtime)
    assert re.fullmatch(r"opened: .+, host 1 of 1\n", capsys.readouterr().err)


# ---- the paths of a configuration


def test_check_paths(tmp_path: Path) -> None:
    store, ckpt = tmp_path / "store", tmp_path / "ckpt"
    words = [f"data.store={store}", f"train.ckpt_dir={ckpt}"]
    smoke = ROOT / "configs" / "smoke_test.yaml"
    with pytest.raises(UserError, match=r"^data\.store: .*expected a prepared store, found none"):
        check_paths(load_config(smoke, words))
    store.mkdir()
    (store / "prepare_report.json").write_text("{}")
    assert check_paths(load_config(smoke, words)) == (
        "store readable, checkpoints writable (on the first worker's disk, lost with its VM)"
    )
    assert list(ckpt.iterdir()) == []
    assert "no checkpoints" in check_paths(load_config(smoke, [words[0], "train.ckpt_dir=null"]))
    ckpt.rmdir()
    ckpt.write_text("a file")
    with pytest.raises(UserError, match=str(ckpt)):
        check_paths(load_config(smoke, words))
