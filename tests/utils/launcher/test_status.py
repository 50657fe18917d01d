"""Status says whether a start would help, and the documented rule follows it."""

from __future__ import annotations

import os
import signal
import subprocess
from threading import Timer

import pytest

from tests.support.launcher_factory import Pod, wait_for
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import is_running
from tests.utils.launcher.launching import CONFIG, launch


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
    text = (ROOT / "docs/guides/tpu.md").read_text()
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
