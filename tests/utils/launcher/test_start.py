"""Start, stop and status: all workers run or none does, and no process but the run's own is touched.

Status says whether a start would help, and the documented rule follows it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from threading import Timer

import pytest

from tests.support.launcher_factory import CONFIG, OVERRIDES, Pod, launch, lines, wait_for
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import is_running
from utils.runtime.open import open_runtime, report_opened


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
            *("TPU, 2 hosts", "-m", "pretraining.train", "--config", CONFIG, *OVERRIDES)
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


def test_in_the_foreground(pod: Pod) -> None:
    done = launch_foreground(pod, "--dry-run", CONFIG, "a.b=1 2")
    assert done.stdout.endswith(f"python -m pretraining.train --config {CONFIG} 'a.b=1 2'\n")
    (pod.folder / "home" / "broken").touch()
    done = launch_foreground(pod, CONFIG)
    assert done.returncode == 2
    assert done.stderr == "error: optim.base_lr: too hot\n"
    (pod.folder / "home" / "broken").unlink()
    assert "found none; make install makes it" in pod.launch(CONFIG, tpu=None).stderr


def test_the_line_that_starts_each_worker_by_itself(pod: Pod) -> None:
    """On a worker without an environment, with OCT_TPU of its own; the run stays when its terminal goes."""
    clone, home = pod.clone(0), pod.home(0)
    setup = "utils/tpu_worker.sh"
    script = (clone / setup).read_text()
    python = f'mkdir -p "$1/bin" && cp "{pod.folder}/venv/bin/python" "$1/bin" && say "set up $*" >>~/set_up'
    (clone / setup).write_text(script.replace("\nmain() {", f"\nsetup() {{ {python}; }}\nmain() {{"))
    names = {"HOME": str(home), "OCT_TPU": "pod", "OCT_DEVICE_GLOB": str(pod.folder / "accel*")}
    words = ["bash", "run_tpu_xla.sh", CONFIG, "a.b=1 2"]
    try:
        with subprocess.Popen(
            words, cwd=clone, env=pod.environment() | names, stdout=subprocess.PIPE, text=True
        ) as terminal:
            assert terminal.stdout is not None
            while "resuming" not in terminal.stdout.readline():
                assert terminal.poll() is None
            assert (home / "set_up").read_text() == "set up .venv 3.11 --torch-backend=cpu\n"
            assert (home / "argv").read_text().splitlines()[0].startswith("TPU, ")
            terminal.kill()
        assert "running, pid" in launch(pod, "status").stdout
        assert "resuming" in launch(pod, "logs", "--worker", "0").stdout
        stopped = launch(pod, "stop").stdout
        assert "worker 0: stopped, pid" in stopped
        assert "exit code 76" in stopped
        (home / "exit_code").write_text("2")
        again = subprocess.run(
            words, cwd=clone, env=pod.environment() | names, capture_output=True, text=True
        )
        assert again.returncode == 2
        assert "error: the reason" in again.stdout
        assert (home / "set_up").read_text().count("\n") == 1
    finally:
        (clone / setup).write_text(script)
        shutil.rmtree(clone / ".venv", ignore_errors=True)
        for name in ("exit_code", "argv", "set_up"):
            (home / name).unlink(missing_ok=True)


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


# --- status ---


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
