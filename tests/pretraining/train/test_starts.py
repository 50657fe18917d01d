"""A run starts from its own rows and weights, and refuses others before a step is made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_setup.store.reader import PreparedStore
from data_setup.transforms import JEPAMaskd
from pretraining.gauges.monitor import LeakError
from pretraining.rows import open_rows
from pretraining.train import train
from tests.pretraining.train.runs import metrics
from tests.support.pipeline_factory import pipeline_config
from utils.checkpoint import CheckpointWriter, load_checkpoint
from utils.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("small_encoder")


def test_a_changed_key_is_refused_by_name(folder: Path, finished: Path) -> None:
    cfg = pipeline_config(folder, f"run.dir={finished}", "optim.base_lr=1e-3")
    with pytest.raises(UserError, match=r"optim\.base_lr: expected 0\.0005 as the run began, found 0\.001"):
        train(cfg)


def test_a_foreign_store_geometry_is_refused(folder: Path, tmp_path: Path) -> None:
    cfg = pipeline_config(folder, f"run.dir={tmp_path / 'other'}", "spatial.image_size=[16,24,32]")
    with pytest.raises(UserError, match="image_size"):
        train(cfg)


@pytest.mark.parametrize("start", [0, 8])
def test_a_first_batch_with_a_token_on_both_sides_stops_the_run(
    folder: Path, tmp_path: Path, finished: Path, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run goes on: before any step is made."""
    real = JEPAMaskd.__call__

    def overlapping(self: JEPAMaskd, sample: dict) -> dict:
        masked = real(self, sample)
        masked["target"][0] = masked["context"][2]
        return masked

    monkeypatch.setattr(JEPAMaskd, "__call__", overlapping)
    monkeypatch.setattr("pretraining.trial.trial_step", None)
    run = tmp_path / "overlap"
    if start:
        shutil.copytree(finished / "checkpoints", run / "checkpoints")
    cfg = pipeline_config(folder, f"run.dir={run}", "train.max_steps=9", "optim.extend=rewarm")
    with pytest.raises(LeakError, match=r"row \d+: expected disjoint context and target .* found 1 in both"):
        train(cfg)


def test_a_run_that_could_not_start_leaves_no_claim(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "retry"
    with pytest.raises(ConfigError, match="global 5 != per core 4"):
        train(pipeline_config(folder, f"run.dir={run}", "train.global_batch_size=5"))
    with pytest.raises(UserError, match="found no such file"):
        train(pipeline_config(folder, f"run.dir={run}", "method.init_from=nowhere.pt"))
    assert train(pipeline_config(folder, f"run.dir={run}", "train.max_steps=1")) == 0


def test_filters_and_the_manifest_decide_what_is_trained_on(folder: Path) -> None:
    store = PreparedStore.open(str(folder / "store"))
    everything = open_rows(pipeline_config(folder), store)
    device = store.index.loc[everything.val[0], "device"]
    one = open_rows(pipeline_config(folder, f"data.device_filter=[{device}]"), store)
    assert set(store.index.loc[one.train, "device"]) == {device}
    assert 0 < len(one.train) < len(everything.train)
    assert set(one.val) <= set(everything.val)
    gone = everything.train[0]
    store.index.loc[gone, "listed"] = False
    assert gone not in open_rows(pipeline_config(folder), store).train


def test_one_volume_in_two_splits_is_not_trained_on(folder: Path) -> None:
    """Also where `prepare` has not been asked again since."""
    store = PreparedStore.open(str(folder / "store"))
    first, second = (store.index[store.index["split"] == split].index[0] for split in ("train", "test"))
    store.index.loc[second, "checksum"] = store.index.loc[first, "checksum"]
    with pytest.raises(UserError, match=r"store: expected no volume in two splits, found rows .*\(train\)"):
        open_rows(pipeline_config(folder), store)


def test_init_from_starts_from_these_weights(folder: Path, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "continued"
    source = finished / "checkpoints" / "step_00000008.pt"
    train(pipeline_config(folder, f"run.dir={run}", f"method.init_from={source}", "train.max_steps=1"))
    first = next(r for r in metrics(run) if "val/loss" in r)
    last = [r for r in metrics(finished) if "val/loss" in r][-1]
    assert first["val/loss"] == pytest.approx(last["val/loss"], rel=1e-5)
    state = load_checkpoint(str(source))
    state["participants"].append("a stranger")
    writer = CheckpointWriter(str(tmp_path / "strange"), 1)
    writer.save(state, ["stranger"])
    writer.close()
    overrides = [f"method.init_from={tmp_path / 'strange' / 'stranger.pt'}", "train.max_steps=1"]
    train(pipeline_config(folder, f"run.dir={tmp_path / 'inherits'}", *overrides))
    seen = load_checkpoint(str(tmp_path / "inherits" / "checkpoints" / "step_00000001.pt"))["participants"]
    assert "a stranger" in seen
    assert len(seen) > 1
    writer = CheckpointWriter(str(tmp_path / "strange"), 1)
    writer.save({**state, "normalisation": "minmax"}, ["stranger"])
    writer.close()
    with pytest.raises(UserError, match=r"normalisation: expected zscore_valid .*, found minmax"):
        train(pipeline_config(folder, f"run.dir={tmp_path / 'minmax'}", *overrides))


def test_a_checkpoint_refuses_another_configuration_under_a_new_run_dir(
    folder: Path, tmp_path: Path, finished: Path
) -> None:
    """A replaced machine has no run.dir, but its checkpoints in the bucket."""
    kept = shutil.copytree(finished / "checkpoints", tmp_path / "bucket")
    overrides = [f"run.dir={tmp_path / 'new_machine'}", f"train.ckpt_dir={kept}"]
    with pytest.raises(UserError, match=r"bucket: optim\.base_lr: expected 0\.0005 as the run began"):
        train(pipeline_config(folder, *overrides, "optim.base_lr=1e-2"))
    assert train(pipeline_config(folder, *overrides)) == 0  # nothing left to do
