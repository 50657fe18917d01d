"""Before a start: check names every fault, setup installs the lock once, sync moves every clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.launcher_factory import CONFIG, OVERRIDES, Pod, git, launch, lines
from tests.support.pipeline_factory import ROOT


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
    assert (done.returncode, done.stderr) == (1, "error: gcloud: not on PATH; install the Google Cloud CLI\n")


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


# --- setup ---

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


# --- sync ---


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
