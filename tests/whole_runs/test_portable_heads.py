"""A head in a portable folder says what finetuning.predict says of the same scan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup.manifest import unknown_record
from data_setup.readers.open_record import open_record
from finetuning import predict
from models.weights import cli as weights
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


def portable_answers(head: str, first_is_superior: bool, *runtimes: str) -> list[dict[str, Any]]:
    """What the head's folder says of the same frames, elsewhere."""
    command = ["export", "--head", head, "--portable", "elsewhere/out", "--checkpoint", CHECKPOINT]
    assert weights.main(command) == 0
    assert weights.main(["selftest", "elsewhere/out"]) == 0
    elsewhere = Path("elsewhere")
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


@pytest.fixture
def first_is_superior(formats: Path) -> bool:
    """Of scans/scan.dcm, which is written here."""
    path = write_opt(Path("scans"), speckle(16, 200, 48), name="scan.dcm", spacing=SPACING)
    return not open_record(unknown_record(path), StorageOptions())[0].flip_d


def calibrate(head: str) -> None:
    """Give a head a temperature, as 20 validation people and more would."""
    state = load_checkpoint(f"{head}/checkpoints/head.pt")
    state["calibration"] |= {"temperature": 0.3, "reason": None, "loss_before": 2.0, "loss_after": 1.0}
    del state["checksum"]
    writer = CheckpointWriter(f"{head}/checkpoints", keep_last=None)
    writer.save(state, ["head"])
    writer.close()


@pytest.mark.parametrize("head", ["linear", "trained"])
def test_labels_are_those_of_predict(head: str, first_is_superior: bool) -> None:
    calibrate(head)
    line = predicted(head)
    for answer in portable_answers(head, first_is_superior, "torch", "onnxruntime"):
        assert answer["scores"] == pytest.approx(line["scores"], abs=1e-5)
        assert answer["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)
        assert answer["probabilities"] != pytest.approx(line["scores"], abs=1e-3)
