"""Memory and time: a batch that fits keeps the losses, and each part of a step is timed."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from models.vjepa3d import VJEPA3D
from pretraining import step as step_module
from pretraining import train as loop
from pretraining import trial as trial_module
from pretraining.gauges import validation
from pretraining.gauges.profiling import StepTrace
from pretraining.gauges.validation import validate
from pretraining.train import train
from tests.pretraining.train.runs import assert_same_weights, metrics, weights, without_clock
from tests.support.model_factory import small_config
from tests.support.pipeline_factory import pipeline_config
from tests.support.wandb_reader import history
from utils.errors import UserError
from utils.runtime.single import Runtime

pytestmark = pytest.mark.usefixtures("small_encoder")


def test_workers_and_accumulation_change_nothing(folder: Path, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "accumulated"
    train(pipeline_config(folder, f"run.dir={run}", "train.per_core_batch_size=1", "data.workers=2"))
    pairs = zip(metrics(run), metrics(finished), strict=True)
    for a, b in pairs:
        for key in ("train/loss", "val/loss"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-4), (a["step"], key)


def test_out_of_memory_halves_the_batch_and_keeps_the_losses(
    folder: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "small_memory"
    real = trial_module.trial_step

    def trial(model, optimizer, batch, cfg, runtime) -> None:
        if len(batch["row"]) > 1:
            raise torch.OutOfMemoryError("planted")
        real(model, optimizer, batch, cfg, runtime)

    monkeypatch.setattr(trial_module, "trial_step", trial)
    train(pipeline_config(folder, f"run.dir={run}"))
    assert "per_core_batch_size 4 -> 2" in (run / "log.txt").read_text()
    assert "per_core_batch_size 2 -> 1" in (run / "log.txt").read_text()
    for a, b in zip(metrics(run), metrics(finished), strict=True):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)

    def never(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(trial_module, "trial_step", never)
    with pytest.raises(UserError, match=r"out of memory: one volume of spatial\.image_size \[8, 24, 32\]"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'no_memory'}"))

    monkeypatch.setattr(trial_module, "trial_step", trial)  # one volume alone has no other to take targets of
    with pytest.raises(UserError, match=r"out of memory: a batch of two volumes of spatial"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'control'}", "method.control=mismatched_targets"))
    latents = "method.control=mismatched_latents", "method.neighbour_weight=1"
    with pytest.raises(UserError, match=r"out of memory: a batch of two volumes of spatial"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'latents'}", *latents))


def test_later_out_of_memory_names_the_last_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.train_step

    def step_then_fail(*args):
        if args[5].step == 5:
            raise torch.OutOfMemoryError("planted")
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step_then_fail)
    with pytest.raises(UserError, match=r"out of memory, .*step_00000004\.pt"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'late'}"))


def test_validation_uses_the_batch_that_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = trial_module.trial_step, []

    def trial(model, optimizer, batch, cfg, runtime) -> None:
        if len(batch["row"]) > 1:
            raise torch.OutOfMemoryError("planted")
        real(model, optimizer, batch, cfg, runtime)

    def spy(run, **options):
        seen.append(run.cfg.train.per_core_batch_size)
        return validate(run, **options)

    monkeypatch.setattr(trial_module, "trial_step", trial)
    monkeypatch.setattr(validation, "validate", spy)
    assert train(pipeline_config(folder, f"run.dir={tmp_path / 'fits'}", "train.max_steps=1")) == 0
    assert set(seen) == {1}
    # programs of the batches that did not fit (4, then 2) are forgotten
    forgotten = []
    monkeypatch.setattr("pretraining.run.choose_kernels", lambda *_: None)
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(1))
    again = (f"run.dir={tmp_path / 'compiled'}", "train.max_steps=1", "train.compile=true")
    assert train(pipeline_config(folder, *again)) == 0
    assert len(forgotten) == 2


PARTS = ("data_wait", "forward", "backward", "update", "logging", "other")


def test_where_the_time_of_a_step_goes(finished: Path) -> None:
    rows = [r for r in metrics(finished) if "train/loss" in r]
    parameters = sum(w.numel() * w.element_size() for w in weights(finished).values())
    for row in rows:
        assert sum(row[f"perf/{part}_fraction"] for part in PARTS) == pytest.approx(1, abs=0.01)
        assert row["perf/step_s"] * row["perf/volumes_per_s"] == pytest.approx(4)  # the global batch
        assert all(row[f"perf/{part}_fraction"] > 0 for part in PARTS)
        assert row["perf/mfu"] > 0
        assert parameters < row["perf/peak_memory_gib"] * 2**30 < 64 * 2**30
    peaks = [row["perf/flops_per_s"] / row["perf/mfu"] for row in rows]
    assert peaks == pytest.approx([peaks[0]] * len(rows))
    sent = {int(r["_step"]): r for r in history(finished) if "train/loss" in r}
    for row in rows:
        logged = {key: value for key, value in row.items() if key.startswith("perf/")}
        assert logged.items() <= sent[row["step"]].items()


def test_slow_parts_are_named_and_a_profile_is_a_trace_that_changes_no_loss(
    folder: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause planted in one part of each of some steps; the last three are profiled."""
    run, pause_s, slow = tmp_path / "slow", 0.3, {1: "data_wait", 2: "forward", 3: "backward", 4: "update"}
    current = [0]
    real_next, real_step, real_report = loop.next_or_stop, loop.train_step, loop.report
    real_predict, real_update = step_module.predict, VJEPA3D.update_target

    def pause(part: str) -> None:
        time.sleep(pause_s if slow.get(current[0]) == part else 0)

    def next_or_stop(*args):
        pause("data_wait")
        return real_next(*args)

    def train_step(*args):
        result = real_step(*args)
        current[0] = args[5].step + 1
        return result

    def predict(*args, **kwargs):
        output = real_predict(*args, **kwargs)
        pause("forward")
        if output.loss_B.requires_grad:
            output.loss_B.register_hook(lambda _: pause("backward"))
        return output

    def update_target(*args):
        pause("update")
        real_update(*args)

    def report(run_log, gauges, step, values):
        time.sleep(pause_s if step == 6 else 0)
        real_report(run_log, gauges, step, values)

    for where, name, planted in (
        (loop, "next_or_stop", next_or_stop),
        (loop, "train_step", train_step),
        (loop, "report", report),
        (step_module, "predict", predict),
        (VJEPA3D, "update_target", update_target),
    ):
        monkeypatch.setattr(where, name, planted)
    assert train(pipeline_config(folder, f"run.dir={run}", "run.profile=true")) == 0
    monkeypatch.undo()
    rows = {r["step"]: r for r in metrics(run) if "train/loss" in r}
    for step, part in (*((s + 1, p) for s, p in slow.items()), (7, "logging")):
        assert rows[step]["perf/step_s"] * rows[step][f"perf/{part}_fraction"] >= pause_s, part
    assert without_clock(metrics(run)) == without_clock(metrics(finished))
    assert_same_weights(run, finished)

    (path,) = (run / "profile").iterdir()
    assert str(path) in (run / "log.txt").read_text()
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= names


def test_a_run_too_short_for_a_profile_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cfg = small_config("vjepa2", "run.profile=true")
    trace = StepTrace(cfg, Runtime(torch.device("cpu"), use_bf16=False), start=2)
    assert not any(trace.at(step) for step in range(2, 7))
    trace.close()
    assert "run.profile: no trace, the run ended before step 8" in caplog.text
