"""A head in a portable folder says what finetuning.predict says of the same scan."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_setup.manifest import unknown_record
from data_setup.readers.open_record import open_record
from finetuning import predict
from models.weights import __main__ as weights
from tests.support.dicom_factory import speckle, write_opt
from tests.whole_runs.test_old_formats import CHECKPOINT, ENCODER, MOVED, unpack
from utils.checkpoint import CheckpointWriter, load_checkpoint
from utils.config.schema import StorageOptions

SPACING = (0.4, 0.011, 0.12)
# a process of its own, in a folder with a utils.py: numpy, torch and the folder's own runner
ASK = """
import sys
sys.path.insert(0, "out")
import numpy as np, oct_portable, utils
first, *runtimes = sys.argv[1:]
volume = np.load("volume.npy")
for runtime in runtimes:
    answer = oct_portable.load_portable("out", runtime)(volume, (0.4, 0.011, 0.12), first == "True")
    np.savez(runtime, **{name: part for name, part in answer._asdict().items() if name != "features"})
ours = {"models", "data_setup", "finetuning", "monai", "pandas", "omegaconf"} & set(sys.modules)
assert not ours and utils.MINE, ours
"""
SLOW = pytest.mark.slow
CALIBRATED = {"temperature": 0.3, "reason": None, "loss_before": 2.0, "loss_after": 1.0}


@pytest.fixture
def formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return unpack("formats.tar.xz", tmp_path, monkeypatch, ENCODER)


def predicted(head: str, *words: str) -> dict[str, Any]:
    """The line that the command writes of scans/scan.dcm."""
    command = ["--checkpoint", head, "--out", "answers", MOVED, *words, "--files", "scans/scan.dcm"]
    assert predict.main(command) == 0
    name = "segments" if words else "predictions"
    (line,) = map(json.loads, Path(f"answers/{name}.jsonl").read_text().splitlines())
    return dict(line)


def export(head: str) -> Path:
    """The head's folder, elsewhere."""
    command = ["export", "--head", head, "--portable", "elsewhere/out", "--checkpoint", CHECKPOINT]
    assert weights.main(command) == 0
    assert weights.main(["selftest", "elsewhere/out"]) == 0
    return Path("elsewhere")


def alone(elsewhere: Path, first_is_superior: bool, *runtimes: str) -> list[dict[str, Any]]:
    """What the folder says of the same frames in a process of its own."""
    (elsewhere / "utils.py").write_text("MINE = True\n")
    np.save(elsewhere / "volume.npy", speckle(16, 200, 48))
    words = [sys.executable, "-c", ASK, str(first_is_superior), *runtimes]
    done = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = []
    for runtime in runtimes:
        with np.load(elsewhere / f"{runtime}.npz", allow_pickle=True) as content:
            answers.append({name: part if part.shape else part.item() for name, part in content.items()})
    return answers


def here(elsewhere: Path, first_is_superior: bool) -> Any:
    """The same in this process."""
    spec = importlib.util.spec_from_file_location("oct_portable", elsewhere / "out" / "oct_portable.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_portable()(speckle(16, 200, 48), SPACING, first_is_superior)


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes seconds to write, and has its own test."""
    monkeypatch.setitem(sys.modules, "onnxscript", None)


@pytest.fixture
def first_is_superior(formats: Path) -> bool:
    """Of scans/scan.dcm, which is written here."""
    path = write_opt(Path("scans"), speckle(16, 200, 48), name="scan.dcm", spacing=SPACING)
    return not open_record(unknown_record(path), StorageOptions())[0].flip_d


def change(head: str, part: str, **values: Any) -> None:
    """Change a part of a head's file: a temperature, as 20 validation people would give it, or its planes."""
    state = load_checkpoint(f"{head}/checkpoints/head.pt")
    state[part] |= values
    del state["checksum"]
    writer = CheckpointWriter(f"{head}/checkpoints", keep_last=None)
    writer.save(state, ["head"])
    writer.close()


def assert_labels(answers: Sequence[dict[str, Any]], line: dict[str, Any]) -> None:
    for answer in answers:
        assert answer["scores"] == pytest.approx(line["scores"], abs=1e-5)
        assert answer["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)
        assert answer["probabilities"] != pytest.approx(line["scores"], abs=1e-3)


@pytest.mark.usefixtures("no_onnx")
def test_labels_are_those_of_predict(first_is_superior: bool) -> None:
    change("linear", "calibration", **CALIBRATED)
    line = predicted("linear")
    assert_labels([here(export("linear"), first_is_superior)._asdict()], line)


@pytest.mark.slow
def test_labels_are_those_of_predict_elsewhere_and_by_onnxruntime(first_is_superior: bool) -> None:
    """Of an encoder that was trained with its head."""
    change("trained", "calibration", **CALIBRATED)
    line = predicted("trained")
    assert_labels(alone(export("trained"), first_is_superior, "torch", "onnxruntime"), line)


@pytest.mark.usefixtures("no_onnx")
@pytest.mark.parametrize(
    ("head", "planes"),
    [
        ("layers", "nearest"),
        pytest.param("layers", None, marks=SLOW),
        pytest.param("translation", "nearest", marks=SLOW),
    ],
)
def test_surfaces_and_slabs_are_those_of_predict(
    head: str, planes: str | None, first_is_superior: bool
) -> None:
    if planes:
        change(head, "geometry", planes=planes)
    line = predicted(head)
    answer = here(export(head), first_is_superior)._asdict()
    with np.load(f"answers/{line['arrays']}") as arrays:
        assert answer["names"] == arrays["names"].tolist()
        for ours, theirs in {"layers": {"rows": "rows", "um": "um"}, "translation": {"values": "slabs"}}[
            head
        ].items():
            np.testing.assert_allclose(answer[ours], arrays[theirs], rtol=1e-4, atol=2e-3)
            assert np.isfinite(answer[ours]).mean() > 0.5


@pytest.mark.usefixtures("no_onnx")
def test_classes_are_those_of_predict(first_is_superior: bool) -> None:
    """The scan is larger than the grid: from windows."""
    change("segmentation", "geometry", planes="nearest")
    decoder = load_checkpoint("segmentation/checkpoints/head.pt")["arms"]["pretrained"]
    # the archive's decoder knows one class: here each has its places
    decoder["last.weight"] = torch.randn(
        decoder["last.weight"].shape, generator=torch.Generator().manual_seed(0)
    )
    decoder["last.bias"] = torch.zeros_like(decoder["last.bias"])
    change("segmentation", "arms", pretrained=decoder)
    line = predicted("segmentation", "--format", "png")
    answer = here(export("segmentation"), first_is_superior)
    images = [np.asarray(Image.open(path)) for path in sorted(Path(line["file"]).glob("*.png"))]
    assert answer.voxels.shape == (16, 200, 48)
    assert (answer.voxels == np.stack(images)).mean() > 0.9999
    assert answer.names == load_checkpoint("segmentation/checkpoints/head.pt")["classes"]
    assert len(np.unique(answer.voxels)) > 2
