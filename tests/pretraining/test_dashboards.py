"""What a run sends to Weights & Biases and TensorBoard, read back from their files."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import wandb

from data_setup.loader import LoaderError
from pretraining import train as loop
from pretraining.gauges import examples
from pretraining.run import open_run
from pretraining.train import train
from tests.support.model_factory import small_config
from tests.support.pipeline_factory import ROOT, pipeline_config
from tests.support.process_factory import metrics, without_clock
from tests.support.tb_reader import events, scalars
from tests.support.wandb_reader import history, written
from utils.errors import UserError
from utils.report.pictures import Forecast, Snapshot, prediction_map, relative_error
from utils.run import skipped_updates
from utils.run.log import NoLog, RunLog
from utils.run.skipped_updates import NotFiniteError
from utils.runtime.single import Runtime, StopRequested

# what docs/guides/dashboard.md says that one should look at
GUIDE = (ROOT / "docs" / "guides" / "dashboard.md").read_text().split("## What to look at")[1]
ROWS = [line.strip("|").split("|") for line in GUIDE.splitlines() if line.startswith("|")]
PANELS = {name for row in ROWS if len(row) == 4 for name in re.findall(r"`(\w+/\w+)`", row[2])}
PICTURES = {name for row in ROWS if len(row) == 2 for name in re.findall(r"`(\w+/)", row[0])}
MANY_TO_VALIDATE = "pretraining.run.VAL_FRACTION", 0.75  # skill needs 16 volumes of 4 participants
pytestmark = pytest.mark.usefixtures("small_encoder")


@pytest.fixture(scope="module")
def watched(folder: Path, small_encoder: None) -> Path:
    """A run of 8 steps with both dashboards, and pictures at 0, 5 and 8."""
    run = folder / "watched"
    overrides = [f"run.dir={run}", "wandb.mode=offline", "log.tensorboard=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "EVERY_STEPS", 5)
        patch.setattr(*MANY_TO_VALIDATE)
        patch.setenv("WANDB_TAGS", "phantom,test")
        patch.setenv("WANDB_RUN_GROUP", "tests")
        patch.setenv("WANDB_NAME", "eight")
        assert train(pipeline_config(folder, *overrides)) == 0
    return run


def everything(run: Path, kind: str) -> list[Any]:
    """The records of one kind in the .wandb files."""
    return [getattr(r, kind) for one in written(run) for r in one if r.HasField(kind)]


def test_every_declared_panel_has_points_in_both_dashboards(watched: Path) -> None:
    rows, curves = history(watched), scalars(watched)
    (no_point,) = {name for name in PANELS if name not in curves}
    assert no_point == "train/volume_share"  # it needs 17 volumes to train on, beside 16 to validate
    assert {line[no_point] for line in metrics(watched) if no_point in line} == {None}
    for name in set(PANELS) - {no_point}:
        points = [row[name] for row in rows if name in row]
        assert points, name
        assert all(math.isfinite(value) for value in points), name
        assert name in curves, name
    for prefix in PICTURES:
        assert any(key.startswith(prefix) for row in rows for key in row), prefix


def test_training_comes_before_validation_on_one_clock(watched: Path) -> None:
    rows = history(watched)
    steps = [int(row["_step"]) for row in rows]
    assert steps == sorted(set(steps)) == list(range(9))
    trained = [step for step, row in zip(steps, rows, strict=True) if "train/loss" in row]
    assert trained == list(range(1, 9))
    validated = [step for step, row in zip(steps, rows, strict=True) if "val/loss" in row]
    assert validated == [0, 4, 8]
    kinds = [("val" if "val/loss" in line else "train", line["step"]) for line in metrics(watched)]
    assert kinds.index(("train", 4)) < kinds.index(("val", 4))
    assert kinds.index(("train", 8)) < kinds.index(("val", 8))


def test_both_dashboards_have_the_numbers_of_metrics_jsonl(watched: Path) -> None:
    sent, curves = {int(row["_step"]): row for row in history(watched)}, scalars(watched)
    for line in metrics(watched):
        for name, value in line.items():
            if name != "step" and value is not None:
                assert sent[line["step"]][name] == value
                assert curves[name][line["step"]] == pytest.approx(value, rel=1e-6)


def test_pictures_come_at_the_start_at_the_end_and_each_so_many_steps(watched: Path) -> None:
    for prefix, expected in (("masks/", [0, 5, 8]), ("prediction/", [0, 5, 8]), ("views/", [5, 8])):
        steps = [int(row["_step"]) for row in history(watched) for key in row if key.startswith(prefix)]
        assert sorted(set(steps)) == expected, prefix
    reader = events(watched)
    assert {tag.split("/")[0] + "/" for tag in reader.Tags()["images"]} == PICTURES
    kept = {path.stem[:13] for path in (watched / "snapshots").iterdir()}
    assert kept == {"step_00000000", "step_00000008"}  # those between are sent, not kept


@pytest.mark.slow
def test_pictures_move_no_number(
    folder: Path, watched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MANY_TO_VALIDATE)
    run = tmp_path / "unwatched"
    assert train(pipeline_config(folder, f"run.dir={run}")) == 0
    assert without_clock(run) == without_clock(watched)


def test_a_disk_that_is_full_at_the_first_picture_leaves_nobody_waiting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process computes on as the others do: their passes are collectives where weights are spread.
    A stop ends the pictures on all of them; what reads for it may be gone by then.
    """
    tried: list[Path] = []

    def full(path: Path, _: Any) -> None:
        tried.append(path)
        raise OSError(28, "No space left on device")

    def stopping(*_: Any) -> Any:
        runtime.stop_requested = True
        raise LoaderError("a worker is gone")
        yield

    monkeypatch.setattr(*MANY_TO_VALIDATE)
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    run = open_run(pipeline_config(folder, f"run.dir={tmp_path}"), runtime)
    devices = run.store.index.loc[run.rows.val, "device"].nunique()
    assert devices > 1
    monkeypatch.setattr("pretraining.gauges.examples.save_snapshot", full)
    drawn = examples.Examples(run, NoLog())
    with caplog.at_level(logging.WARNING):
        drawn.show(0, keep=True)
    assert (
        len(tried) == min(devices, examples.SNAPSHOTS) == caplog.text.count("not written, training goes on")
    )
    monkeypatch.setattr(examples, "validation_batches", stopping)
    drawn.show(1, keep=True)
    assert run.model.training


def test_the_run_says_what_it_is_and_what_its_best_probe_was(watched: Path) -> None:
    run = everything(watched, "run")[0]
    assert (run.project, run.display_name, run.run_group) == ("oct-foundation", "eight", "tests")
    assert list(run.tags) == ["phantom", "test"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["optim.base_lr"] == 5e-4
    assert config["units"]["spatial.target_spacing"] == "mm"
    assert config["units"]["augment.strength"] == "share"
    summary: dict[str, Any] = {}
    for record in everything(watched, "summary"):
        for item in record.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    probes = [line["val/probe"] for line in metrics(watched) if line.get("val/probe") is not None]
    losses = [line["val/loss"] for line in metrics(watched) if "val/loss" in line and line["step"] > 0]
    assert summary["best/probe"] == max(probes)
    assert summary["best/val_loss"] == min(losses)
    (alert,) = everything(watched, "alert")
    assert alert.title == "finished at step 8 of 8"
    assert "best/probe" in alert.text


class Recorder:
    """A dashboard that remembers its alerts."""

    takes_images = False

    def __init__(self) -> None:
        self.alerts: list[str] = []
        self.ends: list[bool] = []  # whether it heard of a failure, for each end

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(title)

    def close(self, is_failed: bool) -> None:
        self.ends.append(is_failed)


def test_collapse_and_nan_are_alerts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, real = Recorder(), loop.train_step
    monkeypatch.setattr("utils.run.log._open_writers", lambda *_: [recorder])

    def not_finite(*args: Any) -> Any:
        result = real(*args)
        result.is_finite = torch.tensor(args[5].step not in (1, 3, 4))
        return result

    monkeypatch.setattr(loop, "train_step", not_finite)
    overrides = [f"run.dir={tmp_path / 'nan'}", "train.val_every_steps=8"]
    monkeypatch.setattr(skipped_updates, "MAX_BAD_STEPS", 2)
    with pytest.raises((NotFiniteError, UserError), match="2 updates in a row"):
        train(pipeline_config(folder, *overrides))
    assert recorder.alerts == [
        "updates skipped until step 2: not finite",
        "updates skipped until step 4: not finite",
        "stopped: not finite",
    ]
    run_log = RunLog(small_config("vjepa2", f"run.dir={tmp_path / 'alarm'}"), 0, 10, synthetic=True)
    run_log.alarm(7, "collapse", "features collapse")
    run_log.close()
    assert recorder.alerts[-1] == "collapse at step 7"
    assert recorder.ends == [True, False]


@pytest.mark.parametrize("error", [RuntimeError("broken"), StopRequested()], ids=lambda e: type(e).__name__)
def test_a_run_that_breaks_has_failed_and_one_that_is_stopped_has_not(
    tmp_path: Path, error: Exception
) -> None:
    cfg = small_config("vjepa2", "wandb.mode=offline", f"run.dir={tmp_path}")
    with pytest.raises(type(error)), RunLog(cfg, 0, 10, synthetic=True):
        raise error
    (end,) = everything(tmp_path, "exit")
    assert end.exit_code == int(isinstance(error, RuntimeError))


def test_a_server_that_takes_nothing_more_holds_the_end_up_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W&B is asked to give up, and one warning says how to send the rest later."""
    settings: list[Any] = []

    class Slow:
        dir, offline = str(tmp_path / "wandb" / "run-1" / "files"), False

        def finish(self, exit_code: int) -> None:
            raise TimeoutError(exit_code)

    def init(**options: Any) -> Slow:
        settings.append(options["settings"])
        return Slow()

    monkeypatch.setattr(wandb, "init", init)
    cfg = small_config("vjepa2", "wandb.mode=offline", f"run.dir={tmp_path}")
    with caplog.at_level(logging.WARNING), RunLog(cfg, 0, 1, synthetic=True):
        pass
    assert (settings[0].finish_timeout, settings[0].finish_timeout_raises) == (120, True)
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("utils.dashboards")]
    assert f"within 120 s; later: wandb sync {tmp_path / 'wandb' / 'run-1'}" in warning


def test_a_run_outlives_weights_and_biases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its process is killed between two lines; one warning, and every line in metrics.jsonl."""
    wandb.teardown()
    cfg = small_config("vjepa2", "wandb.mode=offline", f"run.dir={tmp_path / 'run'}")
    run_log = RunLog(cfg, 0, 10, synthetic=True)
    run_log.metrics(1, {"train/loss": 0.5})
    (core,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.send_signal(signal.SIGKILL)
    # waited for by its own handle: one that nobody waited for fails whichever test collects it
    wandb.setup().ensure_service()._proc.join()
    time.sleep(0.2)  # until the client's end of the socket has heard of it
    with caplog.at_level(logging.WARNING):
        for step in range(2, 6):
            run_log.metrics(step, {"train/loss": 0.5})
        run_log.alert("title", "text")
        run_log.summary({"best/probe": 0.5})
        run_log.close()
    assert [r.name for r in caplog.records if r.levelno >= logging.WARNING and r.name[:5] != "wandb"] == [
        "utils.dashboards"
    ]
    assert caplog.text.count("training goes on without it") == 1
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def date_back(run: Path) -> None:
    """Name the event file that was just written as one of an earlier second: TensorBoard reads by name, and
    within a second the tenth file of a process has a name before the ninth's.
    """
    (new,) = (run / "tensorboard").glob("*.tfevents.[1-9]*")
    number = len(list(new.parent.iterdir()))
    new.rename(new.with_name(f"events.out.tfevents.000000000{number}.vm.1.0"))


@pytest.mark.parametrize("start", [0, 2])
def test_tensorboard_goes_on_where_the_checkpoint_was(tmp_path: Path, start: int) -> None:
    """What came after it is struck out, also of curves that the resumed run does not write again."""
    cfg = small_config("vjepa2", "wandb.mode=disabled", "log.tensorboard=true", f"run.dir={tmp_path}")
    run_log = RunLog(cfg, 0, 10, synthetic=False)
    for step in range(1, 5):
        run_log.metrics(step, {"train/loss": 1.0, "val/loss": 1.0})
    run_log.close()
    date_back(tmp_path)
    run_log = RunLog(cfg, start, 10, synthetic=False)
    run_log.metrics(start + 1, {"train/loss": 9.0})
    run_log.close()
    kept = dict.fromkeys(range(1, start + 1), 1.0)
    assert scalars(tmp_path).get("val/loss", {}) == kept
    assert scalars(tmp_path)["train/loss"] == kept | {start + 1: 9.0}


def test_tensorboard_that_is_missing_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.dashboards.find_spec", lambda _: None)
    cfg = small_config("vjepa2", "wandb.mode=disabled", "log.tensorboard=true", f"run.dir={tmp_path}")
    with pytest.raises(UserError, match="expected the package tensorboard, found none; pip install"):
        RunLog(cfg, 0, 10, synthetic=True)


def test_the_error_of_a_prediction_is_that_of_the_mean_where_it_is_the_mean() -> None:
    """Two planes of 2 x 2 tokens of 1 x 2 x 2 voxels; token 7 is padding."""
    targets = np.zeros((8, 1))
    targets[:7, 0] = [1, -1, 1, -1, 1, -1, 0]  # mean 0, mean square 6 / 7; padding does not count
    targets[7] = 100.0
    valid, spacing = np.array([1, 1, 1, 1, 1, 1, 1, 0.0]), (0.1, 0.01, 0.02)
    shape = (2, 2, 2), (1, 2, 2), spacing
    volume, hidden = np.full((2, 4, 4), 10, np.uint8), np.array([1, 6])
    seen = Snapshot(volume, np.array([0]), hidden, *shape, targets, valid, "device, step 1")
    shown = Forecast(seen, targets, np.array([[-1.0], [2.0]]))
    error = relative_error(shown)
    assert error[1] == 0.0
    assert error[6] == pytest.approx(4 / (6 / 7))
    assert np.isnan(error[[0, 2, 3, 4, 5, 7]]).all()
    drawn = np.ma.masked_invalid(prediction_map(shown).axes[3].images[0].get_array())
    assert drawn.compressed() == pytest.approx([0.0])  # of the first plane
