"""A kill, a worker that dies and an error of ours cost a file at most, with every kind of worker."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_setup.jobs import Job, Outcome, run_jobs
from data_setup.manifest import read_records
from data_setup.prepare import main
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter
from tests.data_setup.prepare.runs import CONFIG, arguments, contents, dicoms, start
from tests.support.pipeline_factory import ROOT
from utils.config.load import load_config
from utils.errors import UserError


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.002)


def num_rows(store: Path) -> int:
    return len(list((store / "rows").glob("*.json"))) if (store / "rows").is_dir() else 0


def check_after_kill(tree: Path, clean: Path, store: Path, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = start(tree, store)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "kept by device" in out
    assert contents(store) == contents(clean)


def test_kill_in_the_middle_then_again_gives_the_same_bytes(tree: Path, clean: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with start(tree, store) as process:
        wait_until(lambda: num_rows(store) >= 2, "two rows")
        check_after_kill(tree, clean, store, process)


def test_runs_that_work_at_once_are_harmless(tree: Path, clean: Path, tmp_path: Path) -> None:
    """Two of them, started together in an empty store."""
    store = tmp_path / "store"
    runs = [start(tree, store) for _ in range(2)]
    errors = [process.communicate(timeout=240)[1] for process in runs]
    assert [process.returncode for process in runs] == [0, 0], errors
    assert contents(store) == contents(clean)
    assert set(PreparedStore.open(str(store)).index.status) == {"kept"}


@contextmanager
def documented_worker(address: str, folder: Path) -> Iterator[None]:
    """A worker of the scheduler at `address`, by the guide's command, started in another folder."""
    page = (ROOT / "docs/guides/prepare.md").read_text()
    (line,) = re.findall(r"^ +(.*dask worker .*) &", page, re.MULTILINE)
    line = line.replace("CLONE", str(ROOT)).replace("tcp://HOST:8786", address).replace("16", "1")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(["env", *line.split()], cwd=folder, env=os.environ | {"PATH": path}) as worker:
        try:
            yield
        finally:
            worker.terminate()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of dask and its event loop
def test_a_cluster_that_loses_a_worker_makes_the_same_store(tree: Path, clean: Path, tmp_path: Path) -> None:
    import dask  # here, since prepare does without
    from distributed import LocalCluster

    store, total = tmp_path / "store", len(dicoms(tree))
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        documented_worker(address := cluster.scheduler_address, tmp_path),
    ):
        wait_until(lambda: len(cluster.scheduler.workers) == 3, "three workers")
        with start(tree, store, "--dask", address) as process:
            wait_until(lambda: num_rows(store) >= 2, "two rows")
            workers = cluster.scheduler.workers.values()
            busy = next(w for w in workers if w.processing and w.name in cluster.workers)
            os.kill(cluster.workers[busy.name].pid, signal.SIGKILL)
            assert num_rows(store) < total, "the kill has to come in the middle"
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert {w.name for w in workers} - {*cluster.workers}, "the guide's worker met an error and ended"
        assert contents(store) == contents(clean)
        run = json.loads((store / "prepare_report.json").read_text())["run"]
        assert (run["prepared"], run["reused"], run["rejected"], run["workers"]) == (total, 0, {}, "dask")
        assert f"{total} prepared, 0 reused" in out
        assert main(arguments(tree, store, "--verify", "--dask", address)) == 0
        cfg = load_config(CONFIG, [f"data.gcs_root={tree}", f"data.store={tmp_path / 'other'}"])
        writer = StoreWriter(cfg.data.store)
        job = Job(2, read_records(cfg).records[0], writer, cfg.spatial, cfg.data.storage_options)
        (outcome,) = run_jobs([job], 0, _die_at_row_two, cluster=address)
        assert (outcome.status, outcome.message) == ("worker_died", "every worker that ran it was lost")
        assert writer.rows.read()[2]["status"] == "worker_died"


def test_a_cluster_that_is_not_there_is_named(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.workers.CONNECT_SECONDS", 0.2)
    with pytest.raises(
        UserError, match=r"--dask tcp://127\.0\.0\.1:9: expected a dask scheduler, found none: "
    ):
        main(arguments(tree, tmp_path / "store", "--dask", "tcp://127.0.0.1:9"))


@pytest.fixture
def jobs(tree: Path, tmp_path: Path) -> list[Job]:
    """Six rows of an empty store, each of the first file."""
    cfg = load_config(CONFIG, [f"data.gcs_root={tree}", f"data.store={tmp_path / 'store'}"])
    record, writer = read_records(cfg).records[0], StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, "source", synthetic=True)
    return [Job(row, record, writer, cfg.spatial, cfg.data.storage_options) for row in range(6)]


def _die_at_row_two(job: Job) -> Outcome:
    if job.row == 2:
        os._exit(9)
    if job.row == 4:
        raise ArithmeticError("a fault\nof ours")
    time.sleep(0.05)
    return Outcome(job.row, "kept")


def test_a_dying_worker_costs_its_file_only(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {o.row: o.status for o in run_jobs(jobs, 2, _die_at_row_two)}
    assert outcomes == dict.fromkeys(range(6), "kept") | {2: "worker_died", 4: "internal_error"}
    rows = jobs[0].writer.rows.read()
    assert rows[2]["message"].startswith("its worker process was lost twice")
    assert re.fullmatch(r"ArithmeticError at test_workers\.py:\d+", rows[4]["message"])
    err = capsys.readouterr().err
    assert re.search(r": ArithmeticError\n(  .*\n)*  .*test_workers\.py:\d+ _die_at_row_two\n", err)
    assert "a fault" not in err  # the text of an error may quote the file


def _run_out_at_row_two(job: Job) -> Outcome:
    if job.row == 2:
        raise MemoryError
    if job.row == 4:
        raise ArithmeticError("a fault\nof ours") from ValueError("another")
    return Outcome(job.row, "kept")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_ours_costs_its_file_only_with_and_without_processes(
    jobs: list[Job], capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    outcomes = {o.row: o.status for o in run_jobs(jobs, workers, _run_out_at_row_two)}
    assert outcomes == dict.fromkeys(range(6), "kept") | {2: "internal_error", 4: "internal_error"}
    rows = jobs[0].writer.rows.read()
    assert re.fullmatch(r"MemoryError at test_workers\.py:\d+", rows[2]["message"])
    assert re.fullmatch(r"ArithmeticError at test_workers\.py:\d+", rows[4]["message"])
    err = capsys.readouterr().err
    assert re.search(r": MemoryError\n(  .*\n)*  .*test_workers\.py:\d+ _run_out_at_row_two\n", err)
    assert "a fault" not in err


def test_without_processes_one_file_at_a_time_is_in_work(jobs: list[Job]) -> None:
    """So the run stops at the first reject too many, no file later."""
    begun = []

    def work(job: Job) -> Outcome:
        begun.append(job.row)
        return Outcome(job.row, "kept")

    outcomes = run_jobs(jobs, 0, work)
    assert [next(outcomes).row for _ in range(3)] == [0, 1, 2]
    outcomes.close()
    assert begun == [0, 1, 2]
