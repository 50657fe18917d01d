"""The leaderboard: right rows in the right order, looks recorded, answers kept, comparisons corrected."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data_setup.store.reader import PreparedStore
from finetuning.answers import columns
from finetuning.answers.columns import Answers, Cell, Question, device_tables, low_shots
from finetuning.answers.leaderboard import Words, leaderboard, protocol_of
from finetuning.answers.page import Board, cautions, verdicts, write_pages
from finetuning.answers.scorecard import bootstrap_p, compare, estimate, gains, holm
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort, read_cohort
from finetuning.cohort.metrics import Predictions, bootstrap_counts, measure, pool
from finetuning.compare import parse
from finetuning.features import entries
from finetuning.features.entries import Entry, Features, Probed, Volumes
from finetuning.features.slices import SliceEncoder
from models.probes import hidden
from models.probes.intervals import EXACT_BELOW, balanced_accuracy_draws, interval95
from models.probes.participants import Prediction, balanced_accuracy, fit_logistic
from tests.support.finetune_factory import (
    DEVICES,
    PEOPLE,
    RUNTIME,
    config,
    image_encoder,
    predictions,
    save_checkpoint,
    silence,
)
from utils.errors import UserError

LINEAR_PROBE = Path(__file__).resolve().parents[2] / "configs" / "cls_linear_probe.yaml"
YARDSTICKS = ["voxels of the token", "voxels of 27 tokens, averaged"]
YARDSTICKS += [f"{width} random ReLU features of 27 tokens" for width in ("48", "1,024")]
BASELINES = ["raw-voxel PCA", "mean A-scan profile", "device one-hot", *YARDSTICKS]


@pytest.fixture(scope="module", autouse=True)
def _one_penalty() -> Iterator[None]:
    """Probes choose among one C: nothing here is about that choice, and nine fits a probe are slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "fit_logistic", partial(fit_logistic, c_grid=(1.0,)))
        patch.setattr(hidden, "MOST_STEPS", 15)
        yield


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `good` of random weights, `silent` of another seed, whose features are all equal."""
    root = tmp_path_factory.mktemp("runs")
    save_checkpoint(config(world, root / "good"))
    save_checkpoint(config(world, root / "silent", "seed=1"), lambda model: silence(model.target_encoder))
    return root


def words(world: Path, runs: Path, run_dir: Path, *overrides: str, **changes: object) -> Words:
    """The command line for the two runs."""
    small = ("data.workers=0", f"run.dir={run_dir}", f"train.ckpt_dir={run_dir / 'checkpoints'}")
    base = Words(str(LINEAR_PROBE), (*small, *overrides), (str(runs / "good"), str(runs / "silent")))
    return replace(base, **changes)  # type: ignore[arg-type]  # a test's keywords: any field of Words


@pytest.fixture(scope="module")
def board(world: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Board:
    (world / "store" / "ledger.jsonl").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "FRACTIONS", (0.25,))
        return leaderboard(words(world, runs, tmp_path_factory.mktemp("board")), RUNTIME)


def test_rows_and_their_order(board: Board) -> None:
    labels = [row.entry.label for row in board.rows]
    random = [label for label in labels if label.startswith("random initialisation")]
    assert sorted(labels) == sorted([*BASELINES, "good", "silent", *random])
    assert len(random) == 1
    assert [row.val for row in board.rows] == sorted((row.val for row in board.rows), reverse=True)
    scores = {
        row.entry.label: estimate(row.answers["linear"]["linear"].predictions, 50, 0)["value"]
        for row in board.rows
    }
    assert scores["mean A-scan profile"] == 1.0
    assert scores["silent"] == scores["device one-hot"] == 0.5


def test_pages(board: Board) -> None:
    printed = write_pages(board)
    folder = Path(board.folder)
    text = (folder / "leaderboard.md").read_text()
    assert text in printed
    assert "Look 1 of this split" in text
    assert "25 % (" in text
    assert f"without {DEVICES[0]}" in text
    assert "p (Holm)" in text
    assert "no difference shown (Holm's p below 0.05 over all of them; of " in text
    assert "| cannot say, because 6 participants in the smallest class are too few: 12 are needed; " in text
    assert "| shown |" not in text
    assert "**" not in text.partition("## Differences of all pairs")[2].partition("##")[0]
    assert "On synthetic data" in text
    with (folder / "leaderboard.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["row"] for line in lines} == {row.entry.label for row in board.rows}
    assert (folder / "leaderboard.png").stat().st_size > 10_000


def test_the_caution_counts_people(board: Board) -> None:
    """Six people a class with three volumes each are six, not eighteen."""
    truth = np.repeat(np.arange(12) % 2, 3)
    volumes = replace(units(truth.tolist(), truth), person=np.repeat([f"p{n:02d}" for n in range(12)], 3))
    linear = {"linear": Cell((volumes,), (0.5,), 4)}
    (line,) = cautions(replace(board, rows=[replace(board.rows[0], answers={"linear": linear})]))
    assert line.startswith("6 participants in the smallest class are too few: below 12 intervals are too")


def test_a_score_of_zero_is_better_than_one_below(board: Board) -> None:
    """R2 may be negative: the best row without an encoder is then one that has 0."""
    free = [row.entry.label for row in board.rows if row.entry.is_free]
    values = {(label, "linear"): -0.5 for label in free} | {(free[-1], "linear"): 0.0}
    other = replace(board)
    other.__dict__["estimates"] = {
        key: one | {"value": values.get(key, one["value"])} for key, one in board.estimates.items()
    }
    lines = verdicts(other)
    assert any(f" - {free[-1]}, the best row without an encoder, linear: " in line for line in lines)


def kept_answers(board: Board) -> set[str]:
    return {path.name for path in (Path(board.folder) / "answers").iterdir()}


def looks(world: Path) -> list[dict[str, object]]:
    path = world / "store" / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_kept_and_each_new_one_is_a_look(
    world: Path, runs: Path, board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command asks nothing anew; what is missing is computed, and the ledger says so."""
    before, asked = len(looks(world)), []
    for name, column in columns.COLUMNS.items():

        def counted(entry: Entry, question: Question, name: str = name, column=column) -> dict[str, Cell]:  # type: ignore[no-untyped-def]
            asked.append((entry.label, name))
            return column(entry, question)

        monkeypatch.setitem(columns.COLUMNS, name, counted)
    run_dir = Path(board.folder).parent
    again = leaderboard(words(world, runs, run_dir), RUNTIME)
    assert asked == []
    assert (again.is_new_look, again.look, len(looks(world))) == (False, board.look, before)
    assert (
        write_pages(again).splitlines()[2:]
        == write_pages(board)
        .replace("this command added it", "all answers were kept, this was no new one")
        .splitlines()[2:]
    )
    next((Path(board.folder) / "answers").iterdir()).write_bytes(b"damaged")
    third = leaderboard(words(world, runs, run_dir), RUNTIME)
    assert len(asked) == 1
    assert (third.is_new_look, third.look, len(looks(world))) == (True, board.look + 1, before + 1)
    assert len(str(looks(world)[-1]["checkpoint"]).split()) == 2
    assert kept_answers(third) == kept_answers(board)


def test_a_damaged_answer_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed digit, a lost row of scores, JSON of another form; and an answer under another's name."""
    kept = Answers(str(tmp_path), "question")
    scored = predictions("classification", [0, 1], [[0.81, 0.19], [0.25, 0.75]])
    kept.write("row", "linear", {"linear": Cell((scored,), (0.5,), 4)})
    file = Path(kept.url("row", "linear"))
    text = file.read_text()
    assert kept.read("row", "linear")
    for damaged in (
        text.replace("0.81", "0.31"),
        text.replace("[0.81, 0.19], ", ""),
        *("null", "[]", "3", '{"cells": []}', '{"cells": {}, "digest": null}', text[:-9]),
    ):
        file.write_text(damaged)
        caplog.clear()
        assert kept.read("row", "linear") is None, damaged
        assert "it is computed again" in caplog.text
    Path(kept.url("other", "linear")).write_text(text)
    assert kept.read("other", "linear") is None


def test_another_split_is_another_question(world: Path, runs: Path, board: Board) -> None:
    other = leaderboard(words(world, runs, Path(board.folder).parent, "eval.split=val", columns=()), RUNTIME)
    assert (other.look, other.is_new_look) == (1, True)  # the first look at val
    assert other.columns == ["linear", "hidden"]


def test_crossfit_evaluates_everybody_that_pretraining_did_not_see(
    world: Path, runs: Path, tmp_path: Path
) -> None:
    overrides = ("eval.protocol=crossfit",)
    crossed = leaderboard(words(world, runs, tmp_path, *overrides, columns=()), RUNTIME)
    (predictions,) = crossed.rows[0].answers["linear"]["linear"].predictions
    assert len(predictions.person) == PEOPLE["val"] + PEOPLE["test"]
    assert not any(name.startswith("train") for name in predictions.person)
    text = write_pages(crossed)
    labels = [row.entry.label for row in crossed.rows]
    assert labels == sorted(labels)
    assert "Ordered by name" in text
    assert "## Rows by name" in text
    assert "20 evaluated participants, 5 folds of people that pre-training did not see" in text
    random = next(row.entry.label for row in crossed.rows if row.entry.name.startswith("random"))
    assert f"silent - {random}: -0.500 (-0.500 to -0.500), cannot say, because" in text


def units(labels: Sequence[int], chosen: Sequence[int] | np.ndarray) -> Predictions:
    """Predictions of two classes, one unit a person."""
    return predictions("classification", labels, np.eye(2)[list(chosen)])


def test_order_is_that_of_validation(
    world: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row worst on validation and best on the evaluated split is last; validation chooses the seed."""
    cohort = question_of(world, tmp_path).cohorts[0]
    right = np.eye(2)[cohort.target[cohort.fold == EVALUATED, 0].astype(int)]

    vals = {"ascan_profile": 0.1, "random_0": 0.2, "random_1": 0.3, "random_2": 0.2}

    def column(entry: Entry, question: Question) -> dict[str, Cell]:
        is_right = entry.name in ("ascan_profile", "random_0")
        predictions = pool(cohort, EVALUATED, right if is_right else 1 - right)
        return {"linear": Cell((predictions,), (vals.get(entry.name, 0.9),), 4)}

    monkeypatch.setitem(columns.COLUMNS, "linear", column)
    ordered = leaderboard(words(world, runs, tmp_path, columns=()), RUNTIME)
    assert ordered.rows[-1].entry.name == "ascan_profile"
    table = write_pages(ordered).split("## Rows by validation")[1].split("##")[0].strip().splitlines()
    assert "good | 0.900 | 0.000" in table[2]
    assert "random initialisation (seed 1) | 0.300 | 0.000" in table[-2]
    assert "mean A-scan profile | 0.100 | 1.000" in table[-1]


def test_one_checkpoint_more_asks_for_its_own_answers_alone(
    world: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def column(entry: Entry, question: Question) -> dict[str, Cell]:
        asked.append(entry.label)
        return {"linear": Cell((units([0, 1, 0, 1], [0, 1, 0, 1]),), (0.5,), 4)}

    monkeypatch.setitem(columns.COLUMNS, "linear", column)
    leaderboard(words(world, runs, tmp_path, columns=(), checkpoints=(str(runs / "good"),)), RUNTIME)
    assert sorted(asked) == sorted(
        ["good", *BASELINES, *(f"random initialisation (seed {seed})" for seed in range(3))]
    )
    asked.clear()
    leaderboard(words(world, runs, tmp_path, columns=()), RUNTIME)
    assert asked == ["silent"]
    other = words(world, runs, tmp_path, "seed=7", columns=())
    leaderboard(other, RUNTIME)
    assert len(asked) == 6 + len(BASELINES)  # another question: everything


def test_holm_by_hand() -> None:
    """Five tests; the second's 4 x .011 is above the third's 3 x .013, which therefore rises to it."""
    assert holm([0.5, 0.011, 0.001, 0.03, 0.013]) == pytest.approx([0.5, 0.044, 0.005, 0.06, 0.044])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_agrees_with_the_interval() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(0.2, 0.1, 4001)
    low = np.quantile(draws, 0.025)
    for shift, expected in ((-low + 0.01, True), (-low - 0.01, False)):
        assert (bootstrap_p(draws + shift) < 0.05) is expected
    assert bootstrap_p(np.zeros(100)) == 1.0
    assert 0 < bootstrap_p(np.r_[2, np.ones(1999)]) == pytest.approx(0.001, rel=1e-3)
    assert bootstrap_p(np.ones(1999)) is None  # no variance
    # a resample in which the metric does not exist is on neither side
    some = draws - low - 0.01
    assert bootstrap_p(np.concatenate([some, np.full(4000, np.nan)])) == bootstrap_p(some)


def test_pairs_are_those_of_the_probe_table() -> None:
    """One seed: the difference and interval of models.probes.intervals under the same draws."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 60).tolist()
    rows = {
        name: [units(labels, np.where(rng.random(60) < right, labels, 1 - np.array(labels)))]
        for name, right in (("x", 0.9), ("y", 0.5), ("z", 0.9))
    }
    pairs = {(c.first, c.second): c for c in compare({"linear": rows}, 500, 3)}
    assert list(pairs) == [("x", "y"), ("x", "z"), ("y", "z")]
    one = pairs["x", "y"]
    counts = bootstrap_counts(rows["x"][0], 500, 3)
    first, second = (
        Prediction(p.unit, p.truth[:, 0].astype(int), p.scores) for p in (rows["x"][0], rows["y"][0])
    )
    assert one.value == pytest.approx(balanced_accuracy(first) - balanced_accuracy(second))
    draws = balanced_accuracy_draws(first, counts) - balanced_accuracy_draws(second, counts)
    assert one.ci95 == pytest.approx(interval95(draws))
    assert one.shown
    assert not pairs["x", "z"].shown
    assert one.p_holm >= one.p
    # at the floor of the resamples the p is no measurement, and says so
    assert one.p_texts == [f"<= {one.p:.4f}", "<= 0.0120"]
    assert pairs["x", "z"].p_texts[1] == f"{pairs['x', 'z'].p_holm:.4f}"
    free = [(c.first, c.second) for c in compare({"linear": rows}, 500, 3, {"y", "z"})]
    assert free == [("x", "y"), ("x", "z")]
    with pytest.raises(ValueError, match="units of all rows"):
        compare({"linear": rows | {"w": [units(labels[1:], labels[1:])]}}, 100, 0)


def regression(offset_P: np.ndarray) -> Predictions:
    truth_P = np.arange(len(offset_P))
    return predictions("regression", truth_P, (truth_P + offset_P)[:, None])


def multilabel(people: int, right: bool) -> Predictions:
    truth_P2 = np.stack([np.arange(people) % 2, np.arange(people) < 5], axis=1)
    noise = np.random.default_rng(0).random((people, 2))
    return predictions("multilabel", truth_P2, truth_P2 if right else noise)


@pytest.mark.parametrize(
    ("first", "second", "because"),
    [  # a perfect row against one that knows nothing
        (units([0, 0, 1, 1], [0, 0, 1, 1]), units([0, 0, 1, 1], [0] * 4), "2 participants in the smallest"),
        (units([0, 1] * 12, [0, 1] * 12), units([0, 1] * 12, [0] * 24), "every resample gives the same"),
        (regression(np.zeros(5)), regression(np.arange(5.0)), "an exact test by sign flips gives p 0."),
        (regression(np.arange(13) % 3 - 1.0), regression((np.arange(13) + 1) % 3 - 1.0), ""),
        (multilabel(40, True), multilabel(40, False), "5 participants in the smallest class are too few"),
    ],
    ids=["classes", "no variance", "a value", "signs", "labels"],
)
def test_no_kind_claims_a_difference_that_cannot_be_said(
    first: Predictions, second: Predictions, because: str
) -> None:
    (one,) = compare({"linear": {"x": [first], "y": [second]}}, 500, 0)
    assert one.doubt.startswith(because)
    assert bool(one.doubt) == bool(because)
    assert not one.shown
    assert one.p_texts == ["not computable"] * 2 if one.p is None else f"{one.p:.4f}" in one.p_texts[0]
    assert one.p_texts[0].startswith("<= ") == (one.is_floor and one.p is not None)
    assert not (one.is_floor and len(first.person) < EXACT_BELOW)
    parts = gains([first], [second])
    assert parts is None or parts.sum() == pytest.approx(one.value)


def test_means_over_seeds_are_resampled_together() -> None:
    seeds = [units([0, 0, 1, 1, 1], chosen) for chosen in ([0, 1, 1, 1, 0], [0, 0, 1, 0, 0])]
    counts = bootstrap_counts(seeds[0], 100, 0)
    parts = [measure(p, counts).overall["balanced_accuracy"] for p in seeds]
    expected = np.quantile((parts[0] + parts[1]) / 2, [0.025, 0.975])
    result = estimate(seeds, 100, 0)
    assert result["ci95"] == pytest.approx(expected)
    assert result["value"] == pytest.approx(((1 / 2 + 2 / 3) + (1 + 1 / 3)) / 2 / 2)


def question_of(world: Path, tmp_path: Path) -> Question:
    cfg = config(world, tmp_path, "data.workers=0")
    store = PreparedStore.open(cfg.data.store)
    cohort = read_cohort(cfg, store)
    return Question(Volumes(cfg, store, np.unique(cohort.rows), RUNTIME), [cohort], [0, 1], str(tmp_path))


def planted(features: np.ndarray, rows: np.ndarray) -> Entry:
    """A row whose features are known."""
    return Entry("x", "x", "x", lambda: lambda cohort: features[np.searchsorted(rows, cohort.rows)])


def test_low_shot_learns_from_training_participants_alone(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = question_of(world, tmp_path)
    asked: list[Cohort] = []
    real = columns.probe

    def watched(cohorts: Sequence[Cohort], features: Features) -> Probed:
        asked.extend(cohorts)
        return real(cohorts, features)

    monkeypatch.setattr(columns, "probe", watched)
    monkeypatch.setattr(columns, "FRACTIONS", (0.25, 0.5))
    rng = np.random.default_rng(0)
    cells = low_shots(planted(rng.normal(size=(72, 3)), question.volumes.rows), question)
    whole = question.cohorts[0]
    people = {fold: set(whole.person[whole.fold == fold]) for fold in (TRAIN, VAL, EVALUATED)}
    assert [len(set(c.person[c.fold == TRAIN])) for c in asked] == [4, 4, 8, 8]
    for cohort in asked:
        assert set(cohort.person[cohort.fold == TRAIN]) < people[TRAIN]
        for fold in (VAL, EVALUATED):
            assert set(cohort.person[cohort.fold == fold]) == people[fold]
    assert [cells[name].participants for name in ("25 %", "50 %")] == [4, 8]
    assert all(len(cell.predictions) == len(cell.val_scores) == 2 for cell in cells.values())


def test_a_device_left_out_is_not_learnt_from(world: Path, tmp_path: Path) -> None:
    """Features say the class by a sign that differs by device: right within a device, wrong across."""
    question = question_of(world, tmp_path)
    cohort, store = question.cohorts[0], question.volumes.store
    rows = question.volumes.rows
    label = dict(zip(cohort.rows.tolist(), cohort.target[:, 0].tolist(), strict=True))
    sign = np.where(store.index.loc[rows, "device"] == DEVICES[0], 1.0, -1.0)
    features = sign * np.array([2 * label[row] - 1 for row in rows.tolist()])
    cells = device_tables(planted(features[:, None], rows), question)
    values = {name: estimate(cell.predictions, 20, 0)["value"] for name, cell in cells.items()}
    one, other = DEVICES
    assert values == {
        f"without {one}": 0.0,
        f"without {other}": 0.0,
        f"{one} on {one}": 1.0,
        f"{other} on {other}": 1.0,
        f"{one} on {other}": 0.0,
        f"{other} on {one}": 0.0,
    }
    assert cells[f"without {one}"].participants < len(set(cohort.person[cohort.fold == TRAIN]))


def test_command_line() -> None:
    asked = parse(
        ["--config", "x.yaml", "--checkpoints", "runs/a", "gs://b/c=1/d.pt", "seed=3", "task.unit=eye"]
    )
    assert asked.checkpoints == ["runs/a", "gs://b/c=1/d.pt"]
    assert asked.overrides == ["seed=3", "task.unit=eye"]
    assert asked.columns == ["low-shot", "devices"]
    with pytest.raises(UserError, match=r"--checkpoints: expected one or more"):
        parse(["--config", "x.yaml", "--checkpoints", "seed=3"])
    with pytest.raises(UserError, match=r"--columns: expected some of low-shot, devices, attentive"):
        parse(["--config", "x.yaml", "--checkpoints", "a", "--columns", "linear,best"])


def test_mistakes_are_named(world: Path, runs: Path, tmp_path: Path) -> None:
    same = (str(runs / "good"), str(runs / "good" / "checkpoints" / "best_probe.pt"))
    with pytest.raises(UserError, match="--checkpoints: expected different checkpoints"):
        leaderboard(words(world, runs, tmp_path, checkpoints=same), RUNTIME)
    save_checkpoint(config(world, tmp_path / "seen"), participants=["test03"])
    with pytest.raises(UserError, match=r"split test in its pre-training, found 1 \(test03\)"):
        leaderboard(words(world, runs, tmp_path, checkpoints=(str(tmp_path / "seen"),)), RUNTIME)
    assert not (tmp_path / "leaderboard").exists()


def test_all_rows_and_columns_together(world: Path, runs: Path, tmp_path: Path) -> None:
    """The control and the 2D encoder are rows; rows without a 3D encoder have no attentive head."""
    quick = ("head.learning_rates=[0.01]", "head.weight_decays=[0.01]", "train.epochs=1")
    good, image = str(runs / "good"), SliceEncoder(image_encoder(tmp_path / "vit"))
    asked = words(world, runs, tmp_path / "all", *quick, checkpoints=(good,), control=str(runs / "silent"))
    asked = replace(asked, image_encoder=image, columns=("attentive",), supervised=True)
    result = leaderboard(asked, RUNTIME)
    rows = {row.entry.label: row for row in result.rows}
    assert {"good", "control: silent", "2d: vit", *BASELINES} < set(rows)
    with_head = {label for label, row in rows.items() if "attentive" in row.answers}
    assert with_head == set(rows) - {"2d: vit", *BASELINES}
    cell = rows["good"].answers["attentive"]["attentive"]
    assert len(cell.predictions) == len(cell.val_scores) == 3
    assert not np.array_equal(cell.predictions[0].scores, cell.predictions[1].scores)  # seeds of their own
    tuned = {label: row.answers["fine-tuned"] for label, row in rows.items() if "fine-tuned" in row.answers}
    assert [label.split(" (")[0] for label in tuned] == ["random initialisation"]
    (answer,) = tuned.values()
    assert len(answer["fine-tuned"].predictions) == 3
    table = write_pages(result).split("## Rows by validation")[1]
    assert "attentive, val" in table
    assert "- | - | -" in table


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ("augment.strength=0", True),
        ("method.drop_path=0.3", True),
        ("method.dropout=0.2", True),
        ("finetune.layer_decay=0.5", True),
        ("eval.allow_overlap=true", False),
    ],
)
def test_what_training_rests_on_is_part_of_the_question(
    world: Path, tmp_path: Path, change: str, is_another: bool
) -> None:
    """Or fine-tuned answers with another augmentation would be reused."""
    of = [protocol_of(config(world, tmp_path, *words), [0]) for words in ((), (change,))]
    assert (of[0] != of[1]) is is_another


def test_a_device_may_lack_a_class_that_validation_has() -> None:
    """Trained on two classes of three: the third is never predicted, and that is no error."""
    fold = np.repeat([TRAIN, VAL, EVALUATED], [8, 6, 6])
    label = np.array([0, 1] * 4 + [0, 1, 2] * 4, float)
    person = np.array([f"p{number:02d}" for number in range(20)])
    cohort = Cohort("classification", ("a", "b", "c"), np.arange(20), fold, label[:, None], person, person)
    probed = entries.probe([cohort], lambda of: label[:, None] + 0.1)
    scores = probed.scored.evaluated().scores
    assert scores.shape == (6, 3)
    assert not scores[:, 2].any()
