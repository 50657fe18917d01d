"""A store and a run that were written before the rooms (commit 1839fef) open, and the run goes on as it would
have.

tests/golden/before_rooms.tar.xz: a phantom's store of 24 volumes, a run stopped at step 4 of 8 with an
encoder of one block of width 24, and what the uninterrupted run logged after that step.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from data_setup.store.reader import PreparedStore
from models import vit3d
from pretraining import train as loop
from tests.support.pipeline_factory import ROOT, SMOKE

ARCHIVE = ROOT / "tests" / "golden" / "before_rooms.tar.xz"
OVERRIDES = (
    *("data.gcs_root=phantom", "data.store=store", "run.dir=run", "data.workers=0", "wandb.mode=disabled"),
    *("spatial.target_spacing=[0.75,0.096,0.1875]", "spatial.image_size=[8,24,32]"),
    *("method.predictor_depth=1", "method.predictor_width=32", "train.global_batch_size=4"),
    *("train.per_core_batch_size=4", "train.max_steps=8", "train.val_every_steps=4"),
    *("train.ckpt_every_steps=4", "train.log_every_steps=1", "train.keep_last=1"),
    *("optim.base_lr=5e-4", "method.neighbour_weight=0"),  # as the archive's run began
)


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        # the argument came with Python 3.11.4
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(vit3d.SIZES, "ti", vit3d.Size(1, 24, 1))
    return tmp_path


def test_an_old_store_opens(before: Path) -> None:
    store = PreparedStore.open("store")
    kept = store.index[store.index.status == "kept"]
    assert len(kept) == 24
    for row in kept.index:
        assert store.read(int(row)).shape == (8, 24, 32)  # read checks each chunk's checksum


def test_an_old_run_goes_on(before: Path) -> None:
    """Resuming reads every part of the checkpoint: weights, moments, gauges, counters, data order."""
    assert loop.main(["--config", str(SMOKE), *OVERRIDES]) == 0
    written = [json.loads(line) for line in (before / "run" / "metrics.jsonl").read_text().splitlines()]
    written = [line for line in written if line["step"] > 4]
    expected = json.loads((before / "expected.json").read_text())
    assert len(written) == len(expected)
    for line, old in zip(written, expected, strict=True):
        assert {key: line[key] for key in old} == pytest.approx(old, rel=1e-4)
