"""The exact commands of a dry run; mistakes on the command line are named before anything runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launcher_factory import CONFIG, OVERRIDES, Pod, git, launch, lines
from tests.support.pipeline_factory import ROOT

SCRIPTS = [ROOT / "run_tpu_xla.sh", ROOT / "utils" / "tpu_worker.sh", ROOT / ".ci" / "run"]


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
