"""What earlier code wrote opens, gives the numbers that it gave, and a run goes on as it would have.

tests/golden/before_rooms.tar.xz (commit 1839fef): a phantom's store of 24 volumes, a run stopped at step 4 of
8 with an encoder of one block of width 24, and what the uninterrupted run logged after that step.

tests/golden/formats.tar.xz (commit 2ec92a9, ENCODER in place of the size ti, in an empty folder):
    python -m data_setup.phantom --out phantom --participants 12 --seed 0 --heights plain --flow plain
        --labels lesions --workers 0; of it, the archive has the tables alone
    python -m data_setup.prepare --config configs/smoke_test.yaml --workers 0 WORDS; again with --heights,
        --labels, --flow. WORDS are what run/config.yaml has and the file has not
    python -m pretraining.train --config configs/smoke_test.yaml WORDS; the archive has it up to step 4 of 8
    python -m finetuning.train --config configs/CONFIG model.checkpoint=run/checkpoints/step_00000004.pt
        run.dir=NAME ...: linear (cls_linear_probe), trained (cls_finetune, head.kind=attentive), layers,
        segmentation, translation
    python -m models.weights export --checkpoint run/checkpoints/step_00000004.pt --portable portable
expected.json has what each function of NUMBERS gave then, and `resumed`, the lines of metrics.jsonl that the
uninterrupted run wrote after step 4.

tests/golden/unfinished.tar.xz (commit 2ec92a9, in the folder of formats.tar.xz; scans/one.dcm is one B-scan
of speckle, 16 times): what these commands wrote, less the picture's pixels, 25 of 35 rows and, in embed.json,
the folder's name
    python -m finetuning.predict --checkpoint linear --out answers MOVED --dicom scans/one.dcm
    python -m finetuning.segment --head segmentation --format nifti --out masks MOVED --files scans/one.dcm
    python -m finetuning.embed --checkpoint CHECKPOINT --out features --store store
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from benchmarks.evidence.arms import JEPA, PENALTY
from data_setup.attach.stored import StoredFlow, StoredHeights, StoredLabels
from data_setup.store.reader import PreparedStore
from finetuning import embed, predict
from finetuning.dense.kinds import KINDS
from finetuning.heads.head_file import open_head, predict_rows
from models import vit3d
from models.weights import __main__ as weights
from pretraining import train as loop
from tests.support.dicom_factory import speckle, write_opt
from tests.support.finetune_factory import RUNTIME
from tests.support.pipeline_factory import ROOT, SMOKE
from tests.support.process_factory import metrics
from utils.checkpoint import load_checkpoint
from utils.config.load import config_of_yaml, load_config
from utils.config.schema import StorageOptions
from utils.report import cli as report

GOLDEN = ROOT / "tests" / "golden"
OVERRIDES = (
    *("data.gcs_root=phantom", "data.store=store", "run.dir=run", "data.workers=0", "wandb.mode=disabled"),
    *("spatial.target_spacing=[0.75,0.096,0.1875]", "spatial.image_size=[8,24,32]"),
    *(*JEPA, *PENALTY, "method.predictor_depth=1", "method.predictor_width=32", "train.max_steps=8"),
    *("train.global_batch_size=4", "train.per_core_batch_size=4", "train.val_every_steps=4"),
    *("train.ckpt_every_steps=4", "train.log_every_steps=1", "train.keep_last=1"),
    *("optim.base_lr=5e-4", "model.rope=interleaved", "train.use_bf16=false"),  # as the run began
)
ENCODER = vit3d.Size(1, 12, 1)  # of formats.tar.xz
CHECKPOINT = "run/checkpoints/step_00000004.pt"
SCANS = "scans/one.dcm scans/two.dcm"
MOVED = f"model.checkpoint={CHECKPOINT}"  # heads name the folder in which they were trained


def unpack(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, size: vit3d.Size) -> Path:
    """The folder with the archive's content; it is where the test works."""
    with tarfile.open(GOLDEN / name) as archive:
        # the argument came with Python 3.11.4
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    monkeypatch.chdir(folder)
    monkeypatch.setitem(vit3d.SIZES, "ti", size)
    return folder


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return unpack("before_rooms.tar.xz", tmp_path, monkeypatch, vit3d.Size(1, 24, 1))


@pytest.fixture
def formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return unpack("formats.tar.xz", tmp_path, monkeypatch, ENCODER)


def assert_goes_on(run: Path, expected: list[dict[str, Any]]) -> None:
    """Resuming has read every part of the checkpoint: weights, moments, gauges, counters, data order."""
    written = [line for line in metrics(run) if line["step"] > 4]
    assert len(written) == len(expected)
    for line, old in zip(written, expected, strict=True):
        assert {key: line[key] for key in old} == pytest.approx(old, rel=1e-4)


def test_an_old_store_opens(before: Path) -> None:
    store = PreparedStore.open("store")
    kept = store.index[store.index.status == "kept"]
    assert len(kept) == 24
    for row in kept.index:
        assert store.read(int(row)).shape == (8, 24, 32)  # read checks each chunk's checksum


def test_an_old_run_goes_on(before: Path) -> None:
    assert loop.main(["--config", str(SMOKE), *OVERRIDES]) == 0
    assert_goes_on(before / "run", json.loads((before / "expected.json").read_text()))


def test_a_run_goes_on_from_its_own_configuration(formats: Path) -> None:
    """Both copies name keys that later code may not have: the run's config.yaml and the checkpoint's."""
    stored = Path("run/config.yaml").read_text()
    assert {"shard_parameters: false", "neighbour_places: all", "lora_rank: null"} <= {
        line.strip() for line in stored.splitlines()
    }
    assert config_of_yaml(load_checkpoint(CHECKPOINT)["config"], CHECKPOINT) == load_config("run/config.yaml")
    assert loop.main(["--config", "run/config.yaml"]) == 0
    assert_goes_on(formats / "run", json.loads((formats / "expected.json").read_text())["resumed"])


def numbers_of_store() -> dict[str, Any]:
    """All reads compare checksums."""
    store, heights = PreparedStore.open("store"), StoredHeights.open("store")
    labels, flow = StoredLabels.open("store"), StoredFlow.open("store")
    row = int(heights.index.index[-1])
    for kept in map(int, store.kept):
        store.read(kept)
    return {
        "kept": store.kept.tolist(),
        "columns": sorted(store.index.columns),
        "volume": [store.index.checksum[row], int(store.read(row).sum())],
        "with_heights": heights.index.index.tolist(),
        "heights": [[*pair] for pair in zip(heights.names(row), map(spread, heights.read(row)), strict=True)],
        "with_labels": labels.index.index.tolist(),
        "classes": {str(value): name for value, name in labels.classes.items()},
        "labels": [[int(r), int(labels.read(int(r)).sum())] for r in labels.index.index],
        "with_flow": flow.index.index.tolist(),
        "flow": spread(flow.read(row)),
        "slabs": {name: spread(slab) for name, slab in flow.read_slabs(row).items()},
    }


def numbers_of_embed() -> dict[str, Any]:
    """Pooled features of every volume."""
    assert embed.main(["--checkpoint", CHECKPOINT, "--store", "store", "--out", "features"]) == 0
    table = pd.read_parquet("features/features.parquet")
    return {"mean": table["mean"][0][:8].tolist(), "std": [float(np.sum(std)) for std in table["std"]]}


def numbers_of_head(name: str) -> dict[str, Any]:
    """Scores of the first volumes of the store."""
    head, store = open_head(name, encoder_url=CHECKPOINT), PreparedStore.open("store")
    return {"names": list(head.names), "scores": predict_rows(head, store, store.kept[:3], RUNTIME).tolist()}


def numbers_of_predict(name: str) -> dict[str, Any]:
    """What the command says of a DICOM file."""
    scan = write_opt(Path("scans"), speckle(16, 200, 48), name="scan.dcm", spacing=(0.4, 0.011, 0.12))
    assert predict.main(["--checkpoint", name, "--out", "answers", MOVED, "--dicom", scan]) == 0
    (line,) = map(json.loads, Path("answers/predictions.jsonl").read_text().splitlines())
    if line["task"] != "layers":
        return {"scores": line["scores"], "distance": line["feature_distance_percentile"]}
    with np.load(f"answers/{line['arrays']}") as arrays:
        um = arrays["um"]
    return {"um": [[name, spread(one)] for name, one in zip(line["surfaces"], um, strict=True)]}


@torch.no_grad()
def numbers_of_dense(kind: str) -> dict[str, Any]:
    """What each decoder, on its encoder, makes of a volume that is a function of its place."""
    head = KINDS[kind].open_head(kind, StorageOptions(), CHECKPOINT)
    size, (gd, gh, gw) = head.cfg.spatial.image_size, head.cfg.grid
    view_DHW = torch.sin(torch.arange(float(np.prod(size))) / 7).reshape(size)
    outputs = {}
    for arm in head.arms:
        tokens_hwE = arm.encoder(view_DHW[None, None])[0].reshape(gd, gh, gw, -1)
        output: Tensor = arm.decoder(tokens_hwE, view_DHW.reshape(gd, -1, *size[1:]))
        outputs[arm.name] = [list(output.shape), output.flatten()[:: output.numel() // 12].tolist()]
    return {"names": list(head.names), "outputs": outputs}


def numbers_of_portable() -> dict[str, Any]:
    """The program by itself; then all programs, weights and digests of the folder."""
    program = torch.export.load("portable/program.pt2").module()
    spacing = torch.tensor([0.4, 0.02, 0.06], dtype=torch.float64)
    with torch.no_grad():
        tokens, valid, pooled = program(torch.from_numpy(speckle(12, 90, 70)), spacing, torch.tensor(True))
    assert weights.main(["selftest", "portable"]) == 0
    return {"pooled": pooled.tolist(), "tokens": tokens.sum(dim=1).tolist(), "valid": int(valid.sum())}


def numbers_of_report() -> dict[str, Any]:
    """What the report reads of the run."""
    report.main(["run"])
    results = json.loads(Path("run/results.json").read_text())
    learned = {
        key: results["pretraining"][key] for key in ("loss_first", "loss_last", "rankme_last", "alarms")
    }
    return {"data": results["data"], "learned": learned}


def spread(values: np.ndarray) -> list[float]:
    """Mean, standard deviation and the number of those that are known."""
    return [float(np.nanmean(values)), float(np.nanstd(values)), int(np.isfinite(values).sum())]


NUMBERS: dict[str, Callable[[], dict[str, Any]]] = {
    "store": numbers_of_store,
    "report": numbers_of_report,
    "embed": numbers_of_embed,
    "linear": lambda: numbers_of_head("linear"),
    "trained": lambda: numbers_of_head("trained"),
    "predicted labels": lambda: numbers_of_predict("linear"),
    "predicted surfaces": lambda: numbers_of_predict("layers"),
    **{kind: lambda kind=kind: numbers_of_dense(kind) for kind in KINDS},
    "portable": numbers_of_portable,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_format_gives_the_numbers_that_it_gave(name: str, formats: Path) -> None:
    assert_same(NUMBERS[name](), json.loads((formats / "expected.json").read_text())[name], name)


UNFINISHED = {  # folder -> command of today, its files, a file a line or row; their number in the end
    "answers": (predict, "pictures/*", 2, f"--checkpoint linear {MOVED} --dicom scans"),
    "masks": (predict, "**/*.nii.gz", 2, f"--checkpoint segmentation --format nifti {MOVED} --files {SCANS}"),
    "features": (embed, "rows/*", 35, f"--checkpoint {CHECKPOINT} --store store"),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_command_goes_on_and_repeats_nothing(
    name: str, formats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack("unfinished.tar.xz", formats, monkeypatch, ENCODER)
    shutil.copy("scans/one.dcm", "scans/two.dcm")
    about = Path("features/embed.json")
    about.write_text(about.read_text().replace("FOLDER", str(formats)))
    command, pattern, total, words = UNFINISHED[name]
    done = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(name).glob(pattern)}
    lines = [path.read_text() for path in Path(name).glob("*.jsonl")]
    assert command.main([*words.split(), "--out", name]) == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in done} == done
    for before, path in zip(lines, Path(name).glob("*.jsonl"), strict=True):
        assert path.read_text().startswith(before)
        assert len(path.read_text().splitlines()) == total
    assert len([*Path(name).glob(pattern)]) == total


def assert_same(given: Any, expected: Any, where: str) -> None:
    """Equal, numbers to 1e-4; a place is named where they differ."""
    if isinstance(expected, dict):
        assert given.keys() == expected.keys(), where
        for key in expected:
            assert_same(given[key], expected[key], f"{where}: {key}")
    elif isinstance(expected, list):
        assert len(given) == len(expected), where
        for place, value in enumerate(expected):
            assert_same(given[place], value, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert given == pytest.approx(expected, rel=1e-4, abs=1e-6), where
    else:
        assert given == expected, where
