"""Check names every fault of the TPU VM, of its workers and of a configuration's paths."""

from __future__ import annotations

import os

import pytest

from tests.support.launcher_factory import Pod, git
from tests.utils.launcher.launching import CONFIG, OVERRIDES, launch, lines


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
