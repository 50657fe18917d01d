"""Sync moves every clone to the commit, loses no changes, and goes gcloud's way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.launcher_factory import Pod, git
from tests.utils.launcher.launching import CONFIG, launch, lines


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
