"""Predictions on files: the head's own scores, warnings, and no file predicted twice."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup.jobs import Job, prepare_row
from data_setup.manifest import unknown_record
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, record_fields
from finetuning.heads.head_file import open_head, predict_rows
from finetuning.predict import main
from finetuning.prediction import run as run_module
from finetuning.prediction.evidence import CONTRIBUTIONS, OCCLUSION
from finetuning.prediction.predictors import LabelPredictor
from finetuning.train import main as train
from tests.support.dicom_factory import speckle, write_opt
from tests.support.finetune_factory import RUNTIME, config, make_world, save_checkpoint
from tests.support.line_fields import documented
from utils import storage
from utils.errors import ConfigError, UserError
from utils.run.lease import hold

TASK = str(Path(__file__).resolve().parents[2] / "configs" / "cls_linear_probe.yaml")
QUICK = ["train.epochs=1", "head.learning_rates=[1e-2]", "head.weight_decays=[0.01]", "data.workers=0"]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), {"train": 4, "val": 4, "test": 4})


@pytest.fixture(scope="module")
def checkpoint(root: Path) -> str:
    small = ["method.predictor_depth=2", "method.predictor_width=64"]
    return save_checkpoint(config(root, root / "pretrained", *small), participants=[])


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "DPI", 15)


@pytest.fixture(scope="module")
def heads(root: Path, checkpoint: str) -> dict[str, Path]:
    """Kind -> the run of a trained head."""
    runs = {kind: root / kind for kind in ("linear", "attentive")}
    for kind, run in runs.items():
        words = ["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", f"head.kind={kind}"]
        assert train([*words, *QUICK]) == 0
    return runs


@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_files_get_the_scores_of_their_volumes_in_the_store(
    kind: str,
    root: Path,
    checkpoint: str,
    heads: dict[str, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, files, out = heads[kind], tmp_path / "files", tmp_path / "out"
    paths = [write_opt(files, speckle(16, 200, 48, seed=n), name=f"{n}.dcm") for n in range(2)]
    bad = files / "bad.dcm"
    bad.write_bytes(b"no DICOM")
    capfd.readouterr()
    command = ["--checkpoint", str(run), "--out", str(out), "--dicom", str(files)]
    assert main(command) == 1
    assert "2 predictions, 1 files without; now 2, before 0" in capfd.readouterr().out
    by_path = {line["path"]: line for line in lines(out)}
    assert by_path[str(bad)]["status"] == "not_dicom"

    cfg = config(root, tmp_path / "unused")
    writer = StoreWriter(str(tmp_path / "prepared"))
    writer.create(cfg.spatial, str(files), synthetic=True)
    rows = writer.append_records([record_fields(unknown_record(path)) for path in paths])
    for row, path in zip(rows, paths, strict=True):
        prepare_row(Job(row, unknown_record(path), writer, cfg.spatial, cfg.data.storage_options))
    writer.finalise(rows)
    head, store = open_head(str(run)), PreparedStore.open(str(tmp_path / "prepared"))
    expected = predict_rows(head, store, store.kept, RUNTIME)
    scores = np.array([list(by_path[path]["scores"].values()) for path in paths])
    # kept tokens of attentive heads are in half precision
    np.testing.assert_allclose(scores, expected, atol=1e-5 if kind == "linear" else 2e-3)
    one = by_path[paths[0]]
    assert set(one) == documented("labels")
    assert one["predicted"] == max(one["scores"], key=one["scores"].__getitem__)
    assert len((out / "study.csv").read_text().splitlines()) == 2 + 2 * len(head.names)
    assert list(one["scores"]) == list(head.names)
    assert (one["head_sha256"], one["calibrated"]) == (head.checksum, False)
    assert one["calibration"] == "uncalibrated: expected 20 validation participants, found 4"
    assert (out / one["picture"]).read_bytes().startswith(b"\x89PNG")
    assert one["volume"] == store.index["checksum"][0]
    share = store.index["valid_fraction"][0]
    assert f"{share:.0%} of the grid lies inside the scan" in one["warnings"]

    first = (out / "predictions.jsonl").read_text()
    cut = first[: first.index("\n") + 40]  # killed in its second line
    (out / "predictions.jsonl").write_text(cut)
    bad.unlink()
    assert main(command) == 0
    assert "now 1, before 1" in capfd.readouterr().out
    assert {line["path"]: line["scores"] for line in lines(out)} == {p: by_path[p]["scores"] for p in paths}
    (out / one["picture"]).unlink()
    assert main(command) == 0
    assert "now 1, before 1" in capfd.readouterr().out
    assert (out / one["picture"]).read_bytes().startswith(b"\x89PNG")
    assert main([*command[:-1], paths[1]]) == 0
    assert "now 0, before 1; lines of other files, kept: 1" in capfd.readouterr().out
    assert {line["path"]: line["scores"] for line in lines(out)} == {p: by_path[p]["scores"] for p in paths}
    if kind == "linear":
        moved = tmp_path / "moved"
        shutil.copytree(Path(checkpoint).parent, moved)
        same = ["--checkpoint", str(run), "--out", str(tmp_path / "bf16"), "train.use_bf16=true"]
        assert main([*same, f"model.checkpoint={moved / Path(checkpoint).name}", "--dicom", paths[0]]) == 0
        assert lines(tmp_path / "bf16")[0]["precision"] == "bfloat16"
        with pytest.raises(UserError, match="absent"):
            main([*same, f"model.checkpoint={tmp_path / 'absent.pt'}", "--dicom", paths[0]])
        with pytest.raises(ConfigError, match=r"eval\.split=val.: expected only changes of data\., train"):
            main([*same, "eval.split=val", "--dicom", paths[0]])
    other = (out / "predictions.jsonl").read_text().replace(head.checksum, "0" * 64)
    (out / "predictions.jsonl").write_text(other)
    with pytest.raises(UserError, match=r"jsonl: expected lines of the head with .* give another --out"):
        main(command)
    assert (out / "predictions.jsonl").read_text() == other
    (out / "predictions.jsonl").write_text("a line of mine\n")
    with pytest.raises(UserError, match=r"expected lines of finetuning\.predict, found another one"):
        main(command)
    assert (out / "predictions.jsonl").read_text() == "a line of mine\n"


ODD_NAMES = ("a$\\frac{$b$^$.dcm", f"{'x' * 245}.dcm", os.fsdecode(b"\xffbytes.dcm"))
ODD_NAMES += ("esc\x1b]0;\x07\n\u4e2d.dcm",)


def test_no_files_name_or_fault_ends_the_others(
    heads: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text from outside is text in a picture, a pipe is not waited for, a fault of ours is one file's."""
    files, out = tmp_path / "files", tmp_path / "out\x1b\nforged\r"
    for name in (*ODD_NAMES, "good.dcm", "faulty.dcm"):
        write_opt(files, speckle(16, 200, 48), name=name)
    for name in ("pipe.dcm", "pipe"):
        os.mkfifo(files / name)
    answer = LabelPredictor.answer

    def faulty(self: LabelPredictor, volume: Any) -> Any:
        return 1 / 0 if "faulty" in volume.fields["path"] else answer(self, volume)

    monkeypatch.setattr(LabelPredictor, "answer", faulty)
    command = ["--checkpoint", str(heads["linear"]), "--out", str(out), "--dicom"]
    assert main([*command, str(files), str(files / "pipe.dcm")]) == 1
    by_name = {Path(line["path"]).name: line for line in lines(out)}
    assert {name for name, line in by_name.items() if line["status"] == "kept"} == {*ODD_NAMES, "good.dcm"}
    assert by_name["faulty.dcm"]["status"] == "internal_error"
    assert by_name["faulty.dcm"]["message"].startswith("ZeroDivisionError at test_predict.py")
    assert by_name["pipe.dcm"]["message"] == "expected a file or a folder, found a pipe or a device"
    pictures = {(out / line["picture"]).read_bytes()[:4] for line in by_name.values() if "picture" in line}
    assert pictures == {b"\x89PNG"}
    (files / "faulty.dcm").unlink()
    captured = capfd.readouterr()
    assert "5 predictions, 2 files without" in captured.out
    text = captured.out + captured.err
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    assert [line for line in text.splitlines() if line.startswith("forged")] == []
    assert main([*command, *(str(files / name) for name in ODD_NAMES)]) == 0
    assert "now 0, before 4" in capfd.readouterr().out


def test_an_output_that_cannot_be_written_is_one_line(heads: dict[str, Path], tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    path, out = write_opt(tmp_path, speckle(16, 200, 48)), tmp_path / "out"
    command = ["--checkpoint", str(heads["linear"]), "--dicom", path, "--out"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))  # a lease, and no picture
    try:
        with pytest.raises(storage.StorageError, match=r"pictures/.*File too large"):
            main([*command, str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lines(out) == []
    with hold(str(out)), pytest.raises(UserError, match=r"finetuning\.predict into this .* another --out"):
        main([*command, str(out)])
    assert main([*command, str(out)]) == 0
    assert len(lines(out)) == 1
    assert not list(out.glob("lease_*"))


def test_occlusion_takes_the_place_of_the_map(
    heads: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_opt(tmp_path, speckle(16, 200, 48, seed=1))
    command = ["--checkpoint", str(heads["linear"]), "--out", str(tmp_path / "out"), "--dicom", path]
    for words, method in (["--occlusion"], OCCLUSION), ([], CONTRIBUTIONS):  # no folder has both
        assert main([*command, *words]) == 0
        assert f"map: {method}\n" in capsys.readouterr().out
        (line,) = lines(tmp_path / "out")
        assert line["evidence"]["method"] == method


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (
            "head",
            ["--format", "png"],
            "a head of segmentation or layers with --format png, found one of head",
        ),
        ("layers", ["--occlusion"], "--occlusion: expected a head of labels, found one of layers"),
    ],
)
def test_options_that_a_head_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: list[str], message: str
) -> None:
    monkeypatch.setattr(run_module, "head_kind", lambda *_: kind)
    with pytest.raises(UserError, match=message):
        main(["--checkpoint", str(tmp_path), "--files", TASK, "--out", str(tmp_path), *words])
