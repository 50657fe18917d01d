"""Predictions on files: the head's own scores, warnings, and no file predicted twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup.jobs import Job, prepare_row
from data_setup.manifest import unknown_record
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, record_fields
from finetuning.explain import main as explain
from finetuning.explanations import eyes as eyes_module
from finetuning.explanations import measure as explanations
from finetuning.explanations import run as explain_module
from finetuning.explanations.arms import LABELS as ARMS
from finetuning.explanations.arms import RANDOM_HEAD, TRAINED
from finetuning.explanations.measure import BRIGHTNESS, PLACE, RANDOM_ORDER, TRUTH_ORDER, control_order
from finetuning.explanations.table import markdown
from finetuning.head_file import open_head, predict_rows
from finetuning.predict import main
from finetuning.prediction import run as run_module
from finetuning.prediction.evidence import CONTRIBUTIONS, OCCLUSION
from finetuning.prediction.judgement import NOT_JUDGED, judgement_of, score_text
from finetuning.train import main as train
from tests.support.dicom_factory import speckle, write_opt
from tests.support.finetune_factory import RUNTIME, config, make_world, save_checkpoint
from utils.config.schema import StorageOptions
from utils.errors import ConfigError, UserError

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
        with pytest.raises(ConfigError, match=r"eval\.split: expected test as in training, found val"):
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


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth of make_world for finetuning.explain: in class b the middle third of the rows has changed."""
    share = np.zeros((2, 3, 4))
    share[:, 1] = 5 / 8

    def read(tree: str, record: Any, options: Any) -> dict[str, np.ndarray]:
        is_planted = int(record.sop_instance_uid[4:6]) % 2
        return {"untouched_surfaces": np.zeros(1)} if is_planted else {}

    monkeypatch.setattr(eyes_module, "read_truth_file", read)
    monkeypatch.setattr(eyes_module, "changed_shares", lambda *_: share.ravel())
    monkeypatch.setattr(eyes_module, "MIN_PEOPLE", 2)
    monkeypatch.setattr(explain_module, "DRAWN_EYES", 1)
    monkeypatch.setattr(explain_module, "DPI", 10)


def test_a_head_is_explained_and_predictions_show_its_best_map(
    root: Path,
    heads: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # the process of wandb may still move its files
    run = shutil.copytree(heads["linear"], tmp_path / "head", ignore=shutil.ignore_patterns("wandb"))
    words = ["--head", str(run), "--eyes", "3", f"run.dir={run}"]
    plant(monkeypatch)
    assert judgement_of(open_head(str(run)), StorageOptions()).text == NOT_JUDGED
    with pytest.raises(UserError, match=r"synthetic\.json: expected a phantom of data_setup\.phantom --thin"):
        explain(words)
    (root / "synthetic.json").write_text('{"thin": "ONL"}')
    with pytest.raises(UserError, match=r"expected 2 people .* in 1 eyes \(--eyes\), found 1"):
        explain([*words[:3], "1", *words[4:]])
    ranked: list[dict[str, np.ndarray]] = []
    measured: list[explanations.Measured] = []
    order_tokens, measure = explanations._orders, explain_module.measure
    with monkeypatch.context() as watched:
        watched.setattr(
            explanations, "_orders", lambda maps, *rest: ranked.append(maps) or order_tokens(maps, *rest)
        )
        watched.setattr(
            explain_module, "measure", lambda *words: measured.append(measure(*words)) or measured[0]
        )
        assert explain(words) == 0
    for name in (CONTRIBUTIONS, OCCLUSION):  # the head's own map, and that of a head of random weights
        for arm, order in ((TRAINED, name), (RANDOM_HEAD, control_order(name))):
            np.testing.assert_array_equal([maps[order] for maps in ranked], measured[0].maps[arm, name])
    beside = run / "checkpoints" / "explanations.json"
    content = json.loads(beside.read_text())
    assert (content["target"], content["layer"], content["n_others"]) == ("b", "ONL", 4)
    ledger = Path(open_head(str(run)).cfg.data.store, "ledger.jsonl")
    looks = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert looks[-1]["checkpoint"] == content["head_sha256"]
    assert looks[-1]["look"] == content["look"]
    assert looks[-1]["what"] == "explain: token contributions, occlusion of the linear head"
    assert content["score"]["n_eyes"] == 3
    assert content["score"]["chance"] == pytest.approx(1 / 3)
    maps = {(arm, method) for arm in ARMS for method in (CONTRIBUTIONS, OCCLUSION)}
    of = {(row["arm"], row["method"]): row for row in content["rows"]}
    assert set(of) == maps | {(BRIGHTNESS, ""), (PLACE, "")}
    assert of[PLACE, ""]["auprc"]["mean"] == 1.0  # the change of every eye is in the same tokens
    own = [CONTRIBUTIONS, OCCLUSION]
    orders = {row["order"]: row for row in content["deletion"]}
    assert set(orders) == {*own, *map(control_order, own), RANDOM_ORDER, TRUTH_ORDER}
    assert all((row["above_control"] is None) == (name not in own) for name, row in orders.items())
    assert (run / "explanations.md").read_text() == markdown(content)
    assert (run / "explanations.png").read_bytes().startswith(b"\x89PNG")
    assert f"AUPRC {content['score']['auprc']:.3f}" in capsys.readouterr().out

    assert explain([*words, "--quick"]) == 0
    quick = json.loads(beside.read_text())
    assert (quick["deletion"], quick["method"]) == ([], CONTRIBUTIONS)
    assert {row["method"] for row in quick["rows"]} == {CONTRIBUTIONS, ""}
    assert all(row in quick["rows"] for row in content["rows"] if row["method"] == CONTRIBUTIONS)
    capsys.readouterr()
    beside.write_text(json.dumps(content | {"method": OCCLUSION}))
    path = write_opt(tmp_path, speckle(16, 200, 48, seed=1))
    assert main(["--checkpoint", str(run), "--out", str(tmp_path / "out"), "--dicom", path]) == 0
    assert f"map: {score_text(OCCLUSION, content['score'])}" in capsys.readouterr().out
    evidence = lines(tmp_path / "out")[0]["evidence"]
    assert (evidence["method"], evidence["validated"]) == (OCCLUSION, content["score"]["beats_chance"])
    beside.unlink()  # what is shown is another map from now on: no folder has both
    assert main(["--checkpoint", str(run), "--out", str(tmp_path / "out"), "--dicom", path]) == 0
    (line,) = lines(tmp_path / "out")
    assert (line["evidence"]["method"], line["evidence"]["judgement"]) == (CONTRIBUTIONS, NOT_JUDGED)


def test_a_head_of_segmentation_is_for_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "head_kind", lambda *_: "segmentation")
    with pytest.raises(UserError, match=r"found one of segmentation: python -m finetuning\.segment draws"):
        main(["--checkpoint", "h.pt", "--out", str(tmp_path), "--dicom", str(tmp_path)])
