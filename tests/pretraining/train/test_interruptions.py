"""A run that is stopped, wherever it is, goes on as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pretraining import train as loop
from pretraining.gauges import validation
from pretraining.train import train
from tests.pretraining.train.runs import METHODS, assert_same_weights, metrics, without_clock
from tests.support.pipeline_factory import WITH_WANDB, pipeline_config
from tests.support.wandb_reader import run_ids
from utils.checkpoint import list_steps, load_checkpoint
from utils.errors import EXIT_STOPPED, UserError

pytestmark = pytest.mark.usefixtures("small_encoder")


@pytest.mark.parametrize(
    ("recipe", "number", "word"),
    [("vjepa2", signal.SIGTERM, "SIGTERM"), ("methods", signal.SIGINT, "Ctrl-C")],
)
def test_a_signal_then_resume_equals_no_interruption(
    folder: Path,
    tmp_path: Path,
    recipe: str,
    number: signal.Signals,
    word: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished = request.getfixturevalue("finished" if recipe == "vjepa2" else "finished_methods")
    run = tmp_path / f"interrupted_{recipe}"
    cfg = pipeline_config(folder, f"run.dir={run}", *(METHODS if recipe == "methods" else (WITH_WANDB,)))
    real = loop.train_step

    def step_then_signal(*args):
        if args[5].step == 4:
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step_then_signal)
    assert train(cfg) == EXIT_STOPPED
    assert list_steps(str(run / "checkpoints"))[-1] == 5
    stopped = f"stopped by {word} at step 5 of 8; run the same command again to go on"
    assert stopped in (run / "log.txt").read_text()
    assert "resuming" not in (run / "log.txt").read_text()
    monkeypatch.setattr(loop, "train_step", real)
    assert train(cfg) == 0
    assert "resuming from step 5" in (run / "log.txt").read_text()
    assert_same_weights(run, finished)
    assert without_clock(metrics(run)) == without_clock(metrics(finished))
    assert len(run_ids(run)) == (1 if recipe == "vjepa2" else 0)
    before = (run / "metrics.jsonl").read_text()
    assert train(cfg) == 0  # a third time there is nothing to do
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_whose_checkpoints_are_gone_is_an_error_and_keeps_its_history(
    folder: Path, tmp_path: Path, finished: Path
) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    elsewhere = (finished / "checkpoints").rename(tmp_path / "elsewhere")
    try:
        expected = (
            r"finished: expected checkpoints of this run, which is at step 8, found none in .*checkpoints;"
        )
        with pytest.raises(UserError, match=expected):
            train(pipeline_config(folder, f"run.dir={finished}"))
    finally:
        shutil.rmtree(finished / "checkpoints", ignore_errors=True)
        elsewhere.rename(finished / "checkpoints")
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew_and_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "early"
    cfg = pipeline_config(folder, f"run.dir={run}", "train.ckpt_every_steps=4", "train.max_steps=4")
    real = loop.train_step

    def step_or_end(*args):
        if args[5].step == 2:
            raise UserError("planted")
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step_or_end)
    with pytest.raises(UserError, match="planted"):
        train(cfg)
    monkeypatch.setattr(loop, "train_step", real)
    assert train(cfg) == 0
    assert "the run ended at about step 2 and begins anew at step 0" in (run / "log.txt").read_text()
    assert [r["step"] for r in metrics(run) if "train/loss" in r] == [1, 2, 3, 4]
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="which is at step 4"):
        train(cfg)


def test_a_run_goes_on_where_its_machine_is_replaced(
    folder: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at step 7, its run directory gone: one W&B run, one history, one log."""
    run, kept = tmp_path / "moved", tmp_path / "bucket"
    cfg = pipeline_config(folder, f"run.dir={run}", f"train.ckpt_dir={kept}", WITH_WANDB)
    real = loop.train_step

    def step_then_signal(*args):
        if args[5].step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step_then_signal)
    assert train(cfg) == EXIT_STOPPED
    monkeypatch.setattr(loop, "train_step", real)
    (wandb_id,) = run_ids(run)
    old = run.rename(tmp_path / "old_machine")
    with (old / "metrics.jsonl").open("a") as file:  # of steps that no checkpoint has
        file.write('{"step": 8, "train/loss": 0.0}\n')
    assert train(cfg) == 0
    assert run_ids(run) == {wandb_id}
    assert without_clock(metrics(run)) == without_clock(metrics(finished))
    text = (run / "log.txt").read_text()
    assert text.count("stopped by SIGTERM at step 7 of 8") == text.count("resuming from step 7") == 1
    assert text.index("stopped by SIGTERM") < text.index("resuming from step 7")

    shutil.rmtree(run)
    old.rename(run)  # the first machine again: it takes over what the second one did
    places = f"run.dir={run}", f"train.ckpt_dir={kept}"
    longer = pipeline_config(folder, *places, "train.max_steps=9", "optim.extend=cooldown_from_here")
    assert train(longer) == 0
    assert [r["step"] for r in metrics(run) if "train/loss" in r] == list(range(1, 10))
    shared = [row for row in without_clock(metrics(run)) if row["step"] <= 8]
    assert shared == without_clock(metrics(finished))
    assert (run / "log.txt").read_text().count("finished at step 8") == 1


@pytest.mark.parametrize("at", [4, 8])
def test_sigterm_in_a_validation_ends_it_and_the_next_start_makes_it(
    folder: Path, tmp_path: Path, finished: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in that of the last step. The run is then as if nothing had happened, its best checkpoint too."""
    run = tmp_path / f"validating_{at}"
    cfg = pipeline_config(folder, f"run.dir={run}")
    real = validation.measure_batch

    def signal_then_measure(*arguments: Any, **options: Any) -> Any:
        if [row["step"] for row in metrics(run)][-1:] == [at]:
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(validation, "measure_batch", never)
            monkeypatch.setattr(validation, "probe_scores", never)
        return real(*arguments, **options)

    monkeypatch.setattr(validation, "measure_batch", signal_then_measure)
    assert train(cfg) == EXIT_STOPPED
    assert list_steps(str(run / "checkpoints"))[-1] == at
    assert [row for row in metrics(run) if "val/loss" in row and row["step"] == at] == []
    monkeypatch.undo()
    assert train(cfg) == 0
    assert without_clock(metrics(run)) == without_clock(metrics(finished))
    assert_same_weights(run, finished)
    best = [load_checkpoint(str(r / "checkpoints" / "best_val_loss.pt"))["step"] for r in (run, finished)]
    assert best[0] == best[1]
    assert train(cfg) == 0  # and nothing is owed any more
    assert without_clock(metrics(run)) == without_clock(metrics(finished))


@pytest.mark.parametrize("phase", ["open_run", "restore", "settle_memory"])
def test_sigterm_while_it_starts_ends_it_before_the_next_phase(
    folder: Path, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(loop, phase)

    def signal_then(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(loop, phase, signal_then)
    after = {"open_run": "restore", "restore": "settle_memory", "settle_memory": "open_log"}[phase]
    monkeypatch.setattr(loop, after, never)
    assert train(pipeline_config(folder, f"run.dir={tmp_path / phase}")) == EXIT_STOPPED
    files = {path.name for path in (tmp_path / phase).rglob("*") if path.is_file()}
    assert not files


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("expected the run to have ended")
