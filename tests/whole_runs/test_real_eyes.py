"""The path on two real OCT eyes: one trains, one validates; batches span epochs; the report shows them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_setup import prepare
from data_setup.store.reader import PreparedStore
from pretraining import train
from tests.support.pipeline_factory import ROOT, SMOKE
from tests.support.process_factory import losses, metrics
from utils.checkpoint import load_checkpoint
from utils.report import cli as report

EYES = ROOT.parent / "shared" / "data" / "real_oct"


@pytest.mark.skipif(not EYES.is_dir(), reason="the two real eyes are not part of the project")
def test_prepare_train_and_report_on_real_eyes(tmp_path: Path) -> None:
    arguments = ["--config", str(SMOKE), f"data.gcs_root={EYES}", f"data.store={tmp_path / 'store'}"]
    arguments += [f"data.manifest_path={EYES}/retinal_oct/manifest.tsv", f"run.dir={tmp_path / 'run'}"]
    arguments += ["train.max_steps=10", "train.global_batch_size=4", "train.per_core_batch_size=4"]
    arguments += ["data.workers=0", "wandb.mode=disabled"]
    assert prepare.main([*arguments, "--workers", "0"]) == 0
    store = PreparedStore.open(str(tmp_path / "store"))
    assert store.kept.tolist() == [0, 1]
    assert store.index.person_id.to_list() == ["9001", "9002"]
    assert store.index.device.to_list() == ["heidelberg_spectralis", "topcon_triton"]
    assert store.index.split.to_list() == ["train", "val"]
    assert store.attrs["synthetic"] is False
    assert (store.index.intensity_std > 10).all()
    field = [145 * 0.0298, 496 * 0.003872, 512 * 0.011182]
    valid = [store.index[f"valid_{a}1"][0] - store.index[f"valid_{a}0"][0] for a in "dhw"]
    expected = [f / s for f, s in zip(field, (0.375, 0.024, 0.09375), strict=True)]
    assert np.abs(np.array(valid) - expected).max() <= 1
    assert train.main(arguments) == 0
    run = tmp_path / "run"
    assert losses(run)[10] < losses(run)[1]
    assert all(row["val/loss"] > 0 for row in metrics(run) if "val/loss" in row)
    state = load_checkpoint(str(tmp_path / "run" / "checkpoints" / "step_00000010.pt"))
    assert state["participants"] == ["9001", "9002"]
    report.main([str(tmp_path / "run")])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "topcon_triton" in page
    # one fewer than with curves as pictures: the page draws these itself
    assert page.count("data:image/png;base64") >= 3
    assert "plotly.js" in page
    assert json.loads((tmp_path / "run" / "results.json").read_text())["probe"] is None
