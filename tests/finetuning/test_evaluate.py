"""A checkpoint and a head are evaluated: numbers, files, subgroups, thresholds, verdicts, refusals."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.answers import evaluation as module
from finetuning.answers import evaluation_files, scorecard
from finetuning.answers.evaluation import Asked, evaluate, evaluate_head, find_checkpoint, printed
from finetuning.answers.evaluation_files import predictions_table
from finetuning.cohort.cohort import EVALUATED, VAL, Cohort, crossfit_cohorts, read_cohort
from finetuning.cohort.ledger import count_looks, data_digest
from finetuning.cohort.metrics import Predictions, Scored
from finetuning.cohort.source import Source, evaluated_config
from finetuning.evaluate import main
from finetuning.features import entries, kept
from finetuning.features.entries import of_rows, probe
from finetuning.heads.confidence import Calibration
from finetuning.heads.head_file import Standardise, head_state, open_head, predict_rows, write_head
from models.heads import build_head
from models.vjepa3d import VJEPA3D
from tests.support.finetune_factory import (
    CONFIG,
    PEOPLE,
    PREPARED,
    RUNTIME,
    SIZE,
    config,
    embed_rows,
    predictions,
    save_checkpoint,
    silence,
    write_labels,
)
from utils import terminal
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.cli import run_cli
from utils.config.load import to_yaml
from utils.config.schema import Config
from utils.errors import ConfigError, UserError
from utils.report import cli as report


def save_head(world: Path, run: Path, *words: str, seed: int = 0, **change: Any) -> str:
    """A linear head of random weights, in the run's folder; `change` replaces parts of its file."""
    cfg = config(world, run, *words)
    url = save_checkpoint(cfg)
    cfg = replace(cfg, model=replace(cfg.model, checkpoint=url))
    store = PreparedStore.open(cfg.data.store)
    torch.manual_seed(seed)
    head = build_head("linear", 48, 2, 8)
    features = embed_rows(kept.random_encoder(cfg, 123), cfg, store, np.arange(16), RUNTIME)
    scale = Standardise(features.mean(axis=0), features.std(axis=0))
    source = Source(cfg, url, load_checkpoint(url))
    validation = {"epoch": 3, "score": 0.5}
    unknown = {"calibration": Calibration(None, "a test's"), "familiarity": None}
    state = head_state(source, store, read_cohort(cfg, store), head, scale, validation, **unknown)
    return write_head(cfg, state | change)


@pytest.fixture(scope="module")
def evaluated_head(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run of a head and its evaluation.json."""
    run = tmp_path_factory.mktemp("runs") / "head"
    save_head(world, run)
    return run, evaluate_head(str(run), [])


def test_the_numbers_are_those_of_its_predictions(
    world: Path, evaluated_head: tuple[Path, dict[str, Any]]
) -> None:
    run, content = evaluated_head
    assert json.loads((run / "evaluation.json").read_text()) == content
    table = pd.read_parquet(run / "predictions.parquet")
    head = table[table["row"] == "head"]
    assert list(head["unit"]) == [f"test{n:02d}" for n in range(PEOPLE["test"])]
    assert list(head["truth"]) == ["a", "b"] * (PEOPLE["test"] // 2)
    metrics = content["rows"][0]["metrics"]
    given = np.where(head["score_b"] > head["score_a"], "b", "a")
    assert metrics["accuracy"]["value"] == pytest.approx(sk.accuracy_score(head["truth"], given))
    area = sk.roc_auc_score(head["truth"] == "b", head["score_b"])
    assert metrics["macro_auroc"]["value"] == pytest.approx(area)
    opened, store = open_head(str(run)), PreparedStore.open(str(world / "store"))
    rows = np.flatnonzero((store.index["person_id"] == "test03").to_numpy())
    one = predict_rows(opened, store, rows, RUNTIME).mean(axis=0)
    np.testing.assert_allclose(head.set_index("unit").loc["test03", ["score_a", "score_b"]].tolist(), one)


def test_rows_beside_the_head_and_the_verdict(evaluated_head: tuple[Path, dict[str, Any]]) -> None:
    run, content = evaluated_head
    rows = {row["name"]: row["metrics"] for row in content["rows"]}
    assert list(rows) == ["head", "constant"]
    assert rows["constant"]["balanced_accuracy"]["value"] == 0.5
    shown = content["difference"]["could_have_shown"]
    assert content["verdict"].endswith(f"This cohort could have shown {shown:.2f}.")
    text = (run / "evaluation.md").read_text()
    assert content["verdict"] in text
    assert "12 participants; split test of the official splits" in text
    assert "**6 participants in the smallest class are too few: below 12 intervals are too narrow" in text
    assert " | 12 (too few) | 12 | " in text
    for name in ("confusion", "roc", "precision_recall", "reliability"):
        assert (run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_new_question_is_a_look(world: Path, tmp_path: Path) -> None:
    save_head(world, tmp_path / "a")
    first = evaluate_head(str(tmp_path / "a"), [])
    assert evaluate_head(str(tmp_path / "a"), [])["look"] == first["look"]  # answered before
    save_head(world, tmp_path / "b", seed=1)
    second = evaluate_head(str(tmp_path / "b"), [])
    assert second["look"] == first["look"] + 1
    assert f"look {second['look']} of this split" in second["title"]
    on_val = evaluate_head(str(tmp_path / "b"), ["eval.split=val", f"run.dir={tmp_path / 'c'}"])
    assert on_val["look"] is None
    assert "The head was chosen on the evaluated participants (eval.split=val)" in on_val["cautions"][0]


def test_people_that_were_seen_are_refused(world: Path, tmp_path: Path) -> None:
    for name, seen in {
        "training": {"participants": {"train": ["test01"], "val": ["val00"]}},
        "validation": {"participants": {"train": ["train01"], "val": ["test01"]}},
        "encoder's pre-training": {"pretraining_participants": ["test01"]},
    }.items():
        run = tmp_path / name[:5]
        save_head(world, run, **seen)
        with pytest.raises(UserError, match=rf"split test in its {name}, found 1 \(test01\)"):
            evaluate_head(str(run), [])
        assert not (run / "evaluation.json").exists()
    content = evaluate_head(str(run), ["eval.allow_overlap=true"])
    assert "OVERLAP: training saw 1 of" in (run / "evaluation.md").read_text()
    assert content["overlap"] == 1


def test_what_is_no_evaluation_of_this_head_is_refused(
    world: Path, evaluated_head: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(evaluated_head[0])
    tuned = config(world, Path(run), "finetune.encoder=trained")
    with pytest.raises(ConfigError, match=r"found crossfit, which takes a head of .* on a frozen encoder"):
        evaluated_config(tuned, run, ["eval.protocol=crossfit"])
    with pytest.raises(ConfigError, match=r"head.hidden: expected 256 as in training, found 8"):
        evaluate_head(run, ["head.hidden=8"])
    with pytest.raises(ConfigError, match=r"eval.splits?: unknown key|eval.splt"):
        evaluate_head(run, ["eval.splt=val"])
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: main(["--head", f"{run}/checkpoints/best_probe.pt"]))
    assert stop.value.code == 2
    assert "expected the file of a head" in capsys.readouterr().err
    with pytest.raises(
        UserError, match=r"head.kind: expected linear of a checkpoint, .* found attentive; train"
    ):
        main(["--config", str(CONFIG), "head.kind=attentive"])
    for words, number in (
        ([], "neither"),
        (["--config", ""], "neither"),
        (["--head", run, "--config", "x.yaml"], "both"),
    ):
        with pytest.raises(UserError, match=f"--config, --head: expected one of them, found {number}"):
            main(words)
    main(["--head", run])
    assert "look" in capsys.readouterr().out.splitlines()[2]  # the first two announce


def test_a_head_on_a_frozen_encoder_is_trained_in_each_fold(world: Path, tmp_path: Path) -> None:
    """Whom the head's own training saw is no question then; what the encoder saw is said."""
    words = "head.learning_rates=[0.01]", "head.weight_decays=[0]"
    save_head(world, tmp_path, *words, participants={"train": ["test01"], "val": ["val00"]})
    content = evaluate_head(str(tmp_path), ["eval.protocol=crossfit"])
    count = PEOPLE["val"] + PEOPLE["test"]
    assert (content["n_participants"], content["overlap"]) == (count, 0)
    table = pd.read_parquet(tmp_path / "predictions.parquet")
    head = table[table["row"] == "head"]
    assert (len(head), sorted(set(head["fold"]))) == (count, [0, 1, 2, 3, 4])
    assert content["rows"][0]["metrics"]["balanced_accuracy"]["value"] > 0.8  # the file's head is random
    assert f"pre-training the images of 0 of the {count} evaluated" in " ".join(content["notes"])
    everybody = evaluate_head(str(tmp_path), ["eval.protocol=crossfit", "eval.allow_overlap=true"])
    assert (everybody["n_participants"], everybody["overlap"]) == (sum(PEOPLE.values()), PEOPLE["train"])
    assert "5 folds over all labelled participants (crossfit)" in everybody["title"]
    assert f"images of {PEOPLE['train']} of the {sum(PEOPLE.values())} eval" in " ".join(everybody["notes"])
    assert f"OVERLAP: the encoder's pre-training saw {PEOPLE['train']} of" in everybody["cautions"][0]


def test_crossfit_evaluates_everybody_whom_pretraining_did_not_see(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path, "eval.protocol=crossfit")
    save_checkpoint(cfg)
    result = evaluate(cfg, RUNTIME)
    assert result["n_participants"] == PEOPLE["val"] + PEOPLE["test"]
    assert "5 folds over all labelled participants that training did not see (crossfit)" in result["title"]
    table = pd.read_parquet(tmp_path / "predictions.parquet").query("row == 'ascan_profile'")
    assert table["unit"].is_unique
    assert not table["unit"].str.startswith("train").any()
    assert table.groupby("fold")["unit"].count().tolist() == [4, 4, 4, 4, 4]
    assert result["rows"][3]["metrics"]["balanced_accuracy"]["value"] == 1.0


def test_a_value_is_evaluated_too(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # its figures are drawn
    task = ["task.kind=regression", "task.label_column=band_rows", f"run.dir={tmp_path / 'value'}"]
    cfg = config(world, tmp_path / "value", *task)
    save_checkpoint(cfg)
    result = evaluate(cfg, RUNTIME)
    assert result["difference"]["metric"] == "r2"
    assert result["rows"][3]["metrics"]["r2"]["value"] > 0.9  # the mean A-scan shows the band
    assert result == json.loads((tmp_path / "value" / "evaluation.json").read_text())
    assert set(result["rows"][0]["metrics"]) == {"mae", "r2"}
    assert result["difference"]["could_have_shown"] >= 0


# hand-made scores: no store, no encoder


def cohort_of(truth: np.ndarray, fold: np.ndarray, person: np.ndarray) -> Cohort:
    return Cohort(
        "classification",
        ("a", "b"),
        np.arange(len(truth)),
        fold,
        truth[:, None].astype(float),
        person,
        person,
    )


def index_of(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def people(count: int, volumes: int) -> np.ndarray:
    return np.repeat([f"p{n:02d}" for n in range(count)], volumes)


def test_a_group_pools_its_own_volumes() -> None:
    """24 people with a volume of each device: right on one device, wrong on the other, right when pooled."""
    person, device = people(24, 2), np.tile(["good", "poor"], 24)
    truth = np.repeat(np.arange(24) % 2, 2)
    right = np.where(device == "good", 0.95, 0.2)
    yes = np.where(truth == 1, right, 1 - right)
    scored = Scored((cohort_of(truth, np.full(48, EVALUATED), person),), (np.stack([1 - yes, yes], 1),))
    index = index_of(
        device=device,
        laterality=np.tile(["L", "L", "R", "R"], 12),
        clinical_site=np.repeat(["east", None], 24),
        age=np.repeat([45.0, 55.0, np.nan], 16),
    )
    assert scorecard.scorecard(scored, 50, 0)["metrics"]["accuracy"]["value"] == 1.0
    tables = scorecard.subgroups(scored, index, 50, 0)
    by_device = {g["group"]: g for g in tables["device"]}
    assert by_device["good"]["metrics"]["accuracy"]["value"] == 1.0
    assert by_device["poor"]["metrics"]["accuracy"]["value"] == 0.0
    assert {g["group"]: g["n_participants"] for g in tables["site"]} == {"east": 12, "unknown": 12}
    assert {g["few"] for g in tables["site"]} == {"6 participants in the smallest class are too few"}
    assert by_device["good"]["few"] == ""
    assert [g["group"] for g in tables["age"]] == ["under 50", "50-59", "unknown"]
    assert tables["age"][0]["n_participants"] == 8
    assert tables["age"][0]["metrics"] is None  # too few
    assert all(g["metrics"] is None for g in tables["laterality"])  # one class each
    assert [g["n_units"] for g in tables["laterality"]] == [12, 12]


def test_bands_of_age() -> None:
    ages = {49.9: "under 50", 50.0: "50-59", 59.9: "50-59", 60.0: "60-69", 79.0: "70-79", 80.0: "80 and over"}
    index = index_of(age=[*ages, np.nan])
    assert scorecard.group_of_volumes(index, np.arange(7), "age").tolist() == [*ages.values(), "unknown"]


def test_the_threshold_comes_from_validation() -> None:
    """On validation positives begin at .7, among the evaluated at .3."""
    truth = np.tile([0, 1], 40)
    fold = np.repeat([VAL, EVALUATED], 40)
    yes = np.where(truth == 1, np.where(fold == VAL, 0.8, 0.4), np.where(fold == VAL, 0.6, 0.2))
    scored = Scored((cohort_of(truth, fold, people(80, 1)),), (np.stack([1 - yes, yes], 1),))
    chosen = scorecard.scorecard(scored, 50, 0)["threshold"]
    assert chosen["values"] == [pytest.approx(0.7)]
    assert [entry["value"] for entry in chosen["by_class"]["sensitivity"]] == [1.0, 0.0]
    assert chosen["metrics"]["balanced_accuracy"]["value"] == 0.5


def random_scored(seed: int, shift: float) -> Scored:
    rng = np.random.default_rng(seed)
    truth = np.arange(200) % 2
    yes = np.clip(rng.uniform(size=200) * (1 - shift) + shift * truth, 0, 1)
    cohort = cohort_of(truth, np.full(200, EVALUATED), people(200, 1))
    return Scored((cohort,), (np.stack([1 - yes, yes], 1),))


def pair(first: Predictions, second: Predictions, samples: int) -> scorecard.Comparison:
    (one,) = scorecard.compare({"linear": {"first": [first], "second": [second]}}, samples, 0)
    return one


def test_the_difference_is_paired() -> None:
    good, poor = random_scored(0, 0.6).evaluated(), random_scored(1, 0.0).evaluated()
    same, other = pair(good, good, 200), pair(good, poor, 200)
    assert (same.value, same.ci95) == (0.0, (0.0, 0.0))
    assert 0 < other.ci95[0] < other.value < other.ci95[1]
    assert 0 < other.could_have_shown < other.value
    assert not other.doubt
    fewer = poor.where(np.arange(100))
    with pytest.raises(ValueError, match="units of all rows to be the same"):
        pair(good, fewer, 200)


def test_units_of_several_devices_name_them_all() -> None:
    scored = random_scored(0, 0.5)
    twice = replace(scored.cohorts[0], unit=people(100, 2), person=people(100, 2))
    index = index_of(
        device=np.tile(["x", "y"], 100),
        laterality="L",
        clinical_site=None,
        age=np.repeat(np.arange(100.0), 2),
    )
    twice = replace(twice, target=np.repeat(np.arange(100) % 2, 2)[:, None].astype(float))
    table = predictions_table({"head": Scored((twice,), scored.scores)}, index)
    assert set(table["device"]) == {"x+y"}
    assert table["site"].isna().all()
    assert table["age"].tolist() == list(range(100))


@pytest.mark.parametrize("kind", ["multilabel", "classification"])
def test_probes_of_labels_and_of_eyes(kind: str) -> None:
    """Two eyes each, of two volumes; an eye's target decides its features, so every eye is predicted."""
    rng = np.random.default_rng(0)
    eye = np.repeat(np.arange(90), 2)
    target = rng.integers(0, 2, (90, 3 if kind == "multilabel" else 1)).astype(float)[eye]
    cohort = Cohort(
        kind,
        ("x", "y", "z") if kind == "multilabel" else ("x", "y"),
        np.arange(180),
        np.repeat([0, 1, 2], 60),
        target,
        np.array([f"p{n // 2:02d}_{'LR'[n % 2]}" for n in eye]),
        np.array([f"p{n // 2:02d}" for n in eye]),
    )
    features = 3 * (target - 0.5) + rng.normal(0, 0.3, target.shape)
    probed = probe([cohort], of_rows(cohort.rows, features.astype(np.float32)))
    result = probed.scored.evaluated()
    assert (len(result.unit), len(np.unique(result.person))) == (30, 15)
    assert scorecard.scorecard(probed.scored, 50, 0)["metrics"]["macro_auroc"]["value"] == 1.0
    one_class = replace(cohort, target=np.where(cohort.fold[:, None] == 0, 0.0, target))
    with pytest.raises(UserError, match="expected two classes among the training participants, found one"):
        probe([one_class], of_rows(cohort.rows, features.astype(np.float32)))


def test_a_look_at_all_folds_counts_with_those_of_the_leaderboard(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path, "eval.protocol=crossfit")
    store = PreparedStore.open(cfg.data.store)
    cohorts = crossfit_cohorts(cfg, store, [])
    of_leaderboard = data_digest(store, *cohorts)
    before = count_looks(store.url, of_leaderboard)
    assert Asked(cfg, store, tuple(cohorts), 0, "checksum").look("a probe") == before + 1
    assert count_looks(store.url, of_leaderboard) == before + 1


def test_a_second_eye_like_the_first_shows_nothing_more() -> None:
    """What a cohort could have shown, and how small its classes are, goes by people, not by units."""
    rng = np.random.default_rng(0)
    person, truth = np.array([f"p{n:03d}" for n in range(400)]), np.arange(400) % 2
    first, second = (np.where(rng.random(400) < 0.7, truth, 1 - truth) for _ in range(2))

    def of(copies: int) -> list[Predictions]:
        labels, people_ = np.repeat(truth, copies), np.repeat(person, copies)
        chosen = (np.eye(2)[np.repeat(part, copies)] for part in (first, second))
        return [predictions("classification", labels, scores, people_) for scores in chosen]

    one_eye, two_eyes = of(1), of(2)
    of_one, of_two = (pair(*sides, 2000) for sides in (one_eye, two_eyes))
    assert of_two.value == of_one.value
    assert of_two.could_have_shown == pytest.approx(of_one.could_have_shown, rel=0.1)
    assert scorecard.people_of_classes(two_eyes[0]) == scorecard.people_of_classes(one_eye[0]) == [200, 200]


def test_the_encoder_may_be_named_by_its_run(world: Path, tmp_path: Path) -> None:
    save_head(world, tmp_path / "head")
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "head" / "checkpoints", moved / "checkpoints")
    (tmp_path / "head" / "checkpoints" / "best_probe.pt").unlink()
    content = evaluate_head(str(tmp_path / "head"), [f"model.checkpoint={moved}"])
    assert content["subject"]["name"] == "head"


@pytest.mark.parametrize("column", ["device", "laterality", "clinical_site", "age"])
def test_a_corrected_index_is_another_question(world: Path, tmp_path: Path, column: str) -> None:
    """Subgroups rest on the index; its voxels are the same."""
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    cohort = read_cohort(cfg, store)
    index = store.index.copy()
    first = cohort.rows[cohort.fold == EVALUATED][0]
    index.loc[first, column] = 99 if column == "age" else "another"
    corrected = PreparedStore("memory://store", None, None, store.attrs, index)
    of = [Asked(cfg, s, (cohort,), 0, "checksum").answer().fingerprint for s in (store, corrected)]
    assert of[0] != of[1]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the rest; those of `evaluated_head`, of the whole module, are drawn."""
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
        encoder = kept.random_encoder(cfg, seed)
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
    for name, parameter in kept.pretrained_encoder(cfg, state, url).state_dict().items():
        assert torch.equal(parameter, state["model"][f"target_encoder.{name}"])
        assert not torch.equal(parameter, state["model"][f"encoder.{name}"]) or not parameter.any()
    lost = next(key for key in state["model"] if key.startswith("target_encoder."))
    del state["model"][lost]
    with pytest.raises(CheckpointError, match=lost.removeprefix("target_encoder.")):
        kept.pretrained_encoder(cfg, state, url)


def test_random_initialisation_is_that_of_pretraining(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    torch.manual_seed(cfg.seed)
    began = VJEPA3D(cfg).encoder.state_dict()
    torch.manual_seed(99)
    expected = torch.rand(1)
    torch.manual_seed(99)
    drawn = kept.random_encoder(cfg, cfg.seed).state_dict()
    assert torch.equal(torch.rand(1), expected)  # nobody else's random numbers change
    assert all(torch.equal(drawn[name], began[name]) for name in began)
    other = kept.random_encoder(cfg, cfg.seed + 1).state_dict()
    assert any(not torch.equal(other[name], began[name]) for name in began)


def test_features_say_how_many_are_done_and_when_the_last_is_expected(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetuning.features.kept.EVALUATION_BATCH", 2)
    cfg = config(world, tmp_path / "run")
    store = PreparedStore.open(cfg.data.store)
    monkeypatch.setattr(terminal, "PLAIN_FIRST_S", 0.0)
    kept.KeptFeatures(kept.random_encoder(cfg, 0), cfg, store, RUNTIME).pooled(np.arange(5))
    kept.raw_features(cfg, store, np.arange(3), RUNTIME)
    lines = [re.sub(r", .* left$", "", line) for line in capfd.readouterr().err.splitlines()]
    assert [line for line in lines if line.startswith("features:")] == [
        f"features: {done} of 3 batches" for done in (1, 2, 3)
    ]
    assert "raw voxels: 2 of 2 batches" in lines


def test_embedding_keeps_the_order_of_rows_and_ignores_padding(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    encoder, rows = kept.random_encoder(cfg, 0), np.array([5, 0, 40, 7, 2])
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
    voxels, profile = kept.raw_features(cfg, store, np.array([3, 8]), RUNTIME)
    inside = store.read(8)[:, :20].astype(np.float64)
    expected = (inside.mean(axis=(0, 2)) - inside.mean()) / inside.std()
    np.testing.assert_allclose(profile[1, :20], expected, atol=1e-4)
    np.testing.assert_array_equal(profile[:, 20:], 0)
    assert voxels.shape == (2, 8 * 24 * 32)
    np.testing.assert_allclose(voxels[1].reshape(SIZE).mean(axis=(0, 2)), profile[1], atol=1e-4)


def test_device_one_hot_knows_only_the_training_devices(world: Path, tmp_path: Path) -> None:
    store = PreparedStore.open(config(world, tmp_path).data.store)
    rows = np.array([0, 4, 5])  # participants 0 (Cirrus) and 2 (Triton)
    np.testing.assert_array_equal(kept.device_features(store, rows, rows), [[0, 1], [1, 0], [1, 0]])
    np.testing.assert_array_equal(kept.device_features(store, rows, rows[:1]), [[1], [0], [0]])
