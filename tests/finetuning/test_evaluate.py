"""The probe table: right encoder, right folds, refusals, reuse, a verdict that follows from the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.answers import evaluation as module
from finetuning.answers import evaluation_files
from finetuning.answers.evaluation import evaluate, find_checkpoint, printed
from finetuning.evaluate import main
from finetuning.features import entries
from finetuning.features.entries import probe
from finetuning.features.kept import (
    KeptFeatures,
    device_features,
    pretrained_encoder,
    random_encoder,
    raw_features,
)
from models.vjepa3d import VJEPA3D
from tests.support.finetune_factory import (
    CONFIG,
    PREPARED,
    RUNTIME,
    SIZE,
    config,
    embed_rows,
    save_checkpoint,
    silence,
    write_labels,
)
from utils import terminal
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.cli import run_cli
from utils.config.load import to_yaml
from utils.config.schema import Config
from utils.errors import UserError
from utils.report import cli as report


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the rest; test_evaluate_head.py sees the figures."""
    monkeypatch.setattr(evaluation_files, "figures", lambda predictions: {})


def accuracy(row: dict[str, Any]) -> float:
    """The balanced accuracy of a row of the table."""
    return row["metrics"]["balanced_accuracy"]["value"]


def test_table_file_and_verdict(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(world, tmp_path)
    save_checkpoint(cfg)
    result = evaluate(cfg, RUNTIME)
    assert result == json.loads((tmp_path / "evaluation.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["pretrained", "random_init", "voxel_pca", "ascan_profile", "device"]
    for row in rows.values():
        low, high = row["metrics"]["balanced_accuracy"]["ci95"]
        assert 0 <= low <= accuracy(row) <= high <= 1
    assert accuracy(rows["voxel_pca"]) == accuracy(rows["ascan_profile"]) == 1.0
    assert rows["ascan_profile"]["metrics"]["macro_auroc"]["value"] == 1.0
    assert accuracy(rows["device"]) == 0.5  # devices are balanced over the classes
    assert rows["device"]["num_features"] == 2
    assert rows["pretrained"]["num_features"] == 2 * 48
    assert rows["random_init"]["label"] in [f"random initialisation (seed {cfg.seed + n})" for n in range(3)]
    assert result["notes"][0].startswith("Random initialisation is the seed that is best on validation")
    assert (result["names"], result["n_participants"], result["overlap"]) == (["a", "b"], 12, 0)
    difference = accuracy(rows["pretrained"]) - accuracy(rows["random_init"])
    assert result["difference"]["mean"] == pytest.approx(difference)
    assert [text.partition(":")[0] for text in result["cautions"]] == [
        "6 participants in the smallest class are too few"
    ]
    print(printed(result))
    assert capsys.readouterr().out.splitlines()[-1] == result["verdict"]
    low, high = result["difference"]["ci95"]
    assert ("cannot say, because 6 participants" in result["verdict"]) == (low > 0 or high < 0)


@pytest.mark.parametrize("is_silent", ["pre-training", "random initialisation"])
def test_the_verdict_follows_what_the_features_say(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: str
) -> None:
    """One of the two sides has features that are all equal."""

    def silent(cfg: Config, seed: int) -> nn.Module:
        encoder = random_encoder(cfg, seed)
        silence(encoder)
        return encoder

    cfg = config(world, tmp_path)
    if is_silent == "pre-training":
        save_checkpoint(cfg, lambda model: silence(model.target_encoder))
    else:
        save_checkpoint(cfg)
        monkeypatch.setattr(entries, "random_encoder", silent)
    result = evaluate(cfg, RUNTIME)
    low, high = result["difference"]["ci95"]
    assert high < 0 if is_silent == "pre-training" else low > 0
    assert accuracy(result["rows"][is_silent != "pre-training"]) == 0.5
    assert result["verdict"].startswith("Pre-training against random initialisation: cannot say, because 6 ")


def test_validation_chooses_the_random_seed(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three probes are those of seeds 0, 1 and 2 on validation."""
    cfg, planted = config(world, tmp_path), iter([0.1, 0.9, 0.2])
    save_checkpoint(cfg)
    monkeypatch.setattr(module, "probe", lambda *asked: replace(probe(*asked), val_score=next(planted, 0.0)))
    assert evaluate(cfg, RUNTIME)["rows"][1]["label"] == "random initialisation (seed 1)"


def test_the_report_reads_what_evaluate_writes(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    save_checkpoint(cfg)
    result = evaluate(cfg, RUNTIME)
    for name, content in {
        "metrics.jsonl": '{"step": 1, "train/loss": 1.0}\n',
        "config.yaml": to_yaml(cfg),
        "provenance.json": "{}",
        "prepare_report.json": json.dumps(PREPARED),
    }.items():
        (tmp_path / name).write_text(content)
    report.main([str(tmp_path)])
    out = json.loads((tmp_path / "results.json").read_text())["probe"]
    assert out["verdict"] == result["verdict"]
    assert out["n_participants"] == 12
    assert "mean A-scan profile" in (tmp_path / "report.html").read_text()


def test_the_same_question_is_answered_once(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(world, tmp_path)
    save_checkpoint(cfg)
    first = evaluate(cfg, RUNTIME)

    def forbidden(*_: object) -> None:
        raise AssertionError("probed again")

    with monkeypatch.context() as patch:
        patch.setattr(module, "probe", forbidden)
        assert evaluate(cfg, RUNTIME) == first
        with pytest.raises(AssertionError, match="probed again"):
            evaluate(config(world, tmp_path, "eval.split=val"), RUNTIME)
        save_checkpoint(cfg, lambda model: silence(model.target_encoder))
        with pytest.raises(AssertionError, match="probed again"):
            evaluate(cfg, RUNTIME)


def test_overlap_is_refused_or_told(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    save_checkpoint(cfg, participants=["train00", "test03", "test05"])
    with pytest.raises(UserError, match=r"split test in its pre-training, found 2 \(test03, test05\)"):
        evaluate(cfg, RUNTIME)
    assert not (tmp_path / "evaluation.json").exists()
    result = evaluate(config(world, tmp_path, "eval.allow_overlap=true"), RUNTIME)
    assert result["overlap"] == 2
    assert "OVERLAP: pre-training saw 2" in result["cautions"][0]
    assert "OVERLAP" in printed(result)


def test_scoring_on_val_and_few_participants_are_told(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path, "eval.split=val")
    save_checkpoint(cfg)
    result = evaluate(cfg, RUNTIME)
    assert result["n_participants"] == 8
    assert "C was chosen on the evaluated participants" in result["cautions"][0]
    assert "4 participants in the smallest class are too few" in result["cautions"][1]


def test_folds_too_small_are_named(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path, f"task.labels_path={tmp_path / 'labels.tsv'}")
    save_checkpoint(cfg)
    write_labels(tmp_path / "labels.tsv", lambda split, number: "a" if split == "test" else "ab"[number % 2])
    with pytest.raises(UserError, match=r"split test: expected 2 .* study_group .*fill recommended_split"):
        evaluate(cfg, RUNTIME)
    write_labels(tmp_path / "labels.tsv", lambda split, number: "ab"[number % 2] if split != "val" else "")
    with pytest.raises(UserError, match=r"split val: .* found 0"):
        evaluate(cfg, RUNTIME)
    write_labels(
        tmp_path / "labels.tsv", lambda split, number: "c" if split == "test" and number else "ab"[number % 2]
    )
    with pytest.raises(UserError, match=r"found \['c'\] only in val or test"):
        evaluate(cfg, RUNTIME)


def test_a_missing_checkpoint_is_named(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"checkpoints/best_probe.pt: expected the checkpoint"):
        find_checkpoint(config(world, tmp_path))
    with pytest.raises(UserError, match=r"train.ckpt_dir is null too"):
        find_checkpoint(config(world, tmp_path, "train.ckpt_dir=null"))
    assert find_checkpoint(config(world, tmp_path, "model.checkpoint=x.pt")) == "x.pt"
    overrides = [f"data.gcs_root={world}", f"data.store={world / 'store'}", f"run.dir={tmp_path}"]
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: main(["--config", str(CONFIG), *overrides]))
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_tasks_file_and_the_folder_of_a_run_are_evaluated(world: Path, tmp_path: Path) -> None:
    """As finetuning.train takes them; one task's table does not outlive another in the same folder."""
    save_checkpoint(config(world, tmp_path / "run"))
    task = str(CONFIG.with_name("cls_linear_probe.yaml"))
    command = ["--config", task, "--checkpoint", str(tmp_path / "run"), "data.workers=0"]
    command.append(f"run.dir={tmp_path / 'task'}")
    main(command)
    assert json.loads((tmp_path / "task" / "evaluation.json").read_text())["names"] == ["a", "b"]
    main([*command, "task.kind=regression", "task.label_column=band_rows"])
    assert json.loads((tmp_path / "task" / "evaluation.json").read_text())["kind"] == "regression"


def test_what_does_not_fit_is_refused(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    save_checkpoint(cfg)
    for override, message in [
        ("model.size=s", "model.size: expected s of the configuration, found ti"),
        ("model.rope=interleaved", "model.rope: expected interleaved of the configuration, found tiled"),
        ("spatial.patch_size=[4,8,16]", r"spatial.patch_size: expected \[4, 8, 16\]"),
    ]:
        with pytest.raises(UserError, match=message):
            evaluate(config(world, tmp_path, override), RUNTIME)
    save_checkpoint(cfg, normalisation="minmax")
    with pytest.raises(UserError, match=r"normalisation: expected zscore_valid of .*store, found minmax"):
        evaluate(cfg, RUNTIME)
    other = config(world, tmp_path, "spatial.image_size=[8,24,64]")
    save_checkpoint(other)
    with pytest.raises(UserError, match=r"store: image_size: expected \[8, 24, 64\]"):
        evaluate(other, RUNTIME)


def test_weights_are_those_of_the_target_and_complete(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    url = save_checkpoint(cfg, lambda model: silence(model.encoder))
    state = load_checkpoint(url)
    for name, parameter in pretrained_encoder(cfg, state, url).state_dict().items():
        assert torch.equal(parameter, state["model"][f"target_encoder.{name}"])
        assert not torch.equal(parameter, state["model"][f"encoder.{name}"]) or not parameter.any()
    lost = next(key for key in state["model"] if key.startswith("target_encoder."))
    del state["model"][lost]
    with pytest.raises(CheckpointError, match=lost.removeprefix("target_encoder.")):
        pretrained_encoder(cfg, state, url)


def test_random_initialisation_is_that_of_pretraining(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    torch.manual_seed(cfg.seed)
    began = VJEPA3D(cfg).encoder.state_dict()
    torch.manual_seed(99)
    expected = torch.rand(1)
    torch.manual_seed(99)
    drawn = random_encoder(cfg, cfg.seed).state_dict()
    assert torch.equal(torch.rand(1), expected)  # nobody else's random numbers change
    assert all(torch.equal(drawn[name], began[name]) for name in began)
    other = random_encoder(cfg, cfg.seed + 1).state_dict()
    assert any(not torch.equal(other[name], began[name]) for name in began)


def test_features_say_how_many_are_done_and_when_the_last_is_expected(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetuning.features.kept.EVALUATION_BATCH", 2)
    cfg = config(world, tmp_path / "run")
    store = PreparedStore.open(cfg.data.store)
    monkeypatch.setattr(terminal, "PLAIN_FIRST_S", 0.0)
    KeptFeatures(random_encoder(cfg, 0), cfg, store, RUNTIME).pooled(np.arange(5))
    raw_features(cfg, store, np.arange(3), RUNTIME)
    lines = [re.sub(r", .* left$", "", line) for line in capfd.readouterr().err.splitlines()]
    assert [line for line in lines if line.startswith("features:")] == [
        f"features: {done} of 3 batches" for done in (1, 2, 3)
    ]
    assert "raw voxels: 2 of 2 batches" in lines


def test_embedding_keeps_the_order_of_rows_and_ignores_padding(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    encoder, rows = random_encoder(cfg, 0), np.array([5, 0, 40, 7, 2])
    together = embed_rows(encoder, cfg, store, rows, RUNTIME)
    one_by_one = np.concatenate([embed_rows(encoder, cfg, store, rows[i : i + 1], RUNTIME) for i in range(5)])
    np.testing.assert_allclose(together, one_by_one, atol=1e-4)
    # by hand, one volume: z-score over valid voxels, mean and std of the tokens whose voxels are valid
    voxels = store.read(5).astype(np.float32)
    inside = voxels[:, :20]
    z = np.zeros(SIZE, np.float32)
    z[:, :20] = (inside - inside.mean()) / inside.std()
    with torch.no_grad():
        tokens = encoder(torch.from_numpy(z)[None, None])[0].reshape(2, 3, 4, -1)
    share = torch.tensor([1.0, 1.0, 0.5])  # the third axial token row is half outside
    weights = (share[None, :, None, None] >= 0.5).float() * torch.ones(2, 1, 4, 1)
    mean = (tokens * weights).sum((0, 1, 2)) / weights.sum()
    std = (((tokens - mean).square() * weights).sum((0, 1, 2)) / weights.sum()).sqrt()
    np.testing.assert_allclose(together[0], torch.cat([mean, std]).numpy(), atol=1e-3)


def test_raw_features_by_hand(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    voxels, profile = raw_features(cfg, store, np.array([3, 8]), RUNTIME)
    inside = store.read(8)[:, :20].astype(np.float64)
    expected = (inside.mean(axis=(0, 2)) - inside.mean()) / inside.std()
    np.testing.assert_allclose(profile[1, :20], expected, atol=1e-4)
    np.testing.assert_array_equal(profile[:, 20:], 0)
    assert voxels.shape == (2, 8 * 24 * 32)
    np.testing.assert_allclose(voxels[1].reshape(SIZE).mean(axis=(0, 2)), profile[1], atol=1e-4)


def test_device_one_hot_knows_only_the_training_devices(world: Path, tmp_path: Path) -> None:
    store = PreparedStore.open(config(world, tmp_path).data.store)
    rows = np.array([0, 4, 5])  # participants 0 (Cirrus) and 2 (Triton)
    np.testing.assert_array_equal(device_features(store, rows, rows), [[0, 1], [1, 0], [1, 0]])
    np.testing.assert_array_equal(device_features(store, rows, rows[:1]), [[1], [0], [0]])
