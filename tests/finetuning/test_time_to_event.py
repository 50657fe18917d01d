"""Time to an event: the fit is a ridge Cox regression, C finds what was planted and nothing in noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sksurv.linear_model import CoxPHSurvivalAnalysis

from data_setup.store.reader import PreparedStore
from finetuning import time_to_event as module
from finetuning.cohort import read_cohort, read_cohorts
from finetuning.evaluate import main
from finetuning.labels import read_labels
from finetuning.time_to_event import Outcomes, brier, concordance, concordance_draws, dynamic_auc, fit_cox
from models import vit3d
from tests.support.finetune_factory import (
    CONFIG,
    band_rows,
    config,
    index_store,
    make_world,
    person,
    save_checkpoint,
)
from utils.errors import ConfigError, UserError

PEOPLE = {"train": 24, "val": 16, "test": 20}
TIME, EVENT = "task.time_column=onset_days", "task.event_column=onset"
KIND = ["task.kind=survival", TIME, EVENT]


def outcomes(seed: int, people: int, noise: float = 0.0) -> Outcomes:
    """A risk in the first of 4 features, exponential times, a third of them censored."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(people, 4))
    time = rng.exponential(np.exp(-2 * features[:, 0]))
    censored = rng.exponential(2.0, people)
    names = np.array([f"p{number:03d}" for number in range(people)])
    return Outcomes(
        names, np.minimum(time, censored), time <= censored, features + noise * rng.normal(size=(people, 4))
    )


def test_the_fit_is_the_librarys_in_the_features_own_axes() -> None:
    train, val, test = outcomes(0, 60), outcomes(1, 40), outcomes(2, 50)
    fit = fit_cox(train, val, test)
    plain = CoxPHSurvivalAnalysis(alpha=fit.penalty, ties="efron").fit(train.features, train.known())
    own = plain.predict(test.features)
    np.testing.assert_allclose(fit.risk - fit.risk.mean(), own - own.mean(), atol=1e-6)
    times = np.array([0.2, 0.7])
    expected = np.stack([curve(times) for curve in plain.predict_survival_function(test.features)])
    np.testing.assert_allclose(fit.curves(times), expected, atol=1e-6)
    assert fit.val_score == max(
        concordance(
            val,
            CoxPHSurvivalAnalysis(alpha=p, ties="efron")
            .fit(train.features, train.known())
            .predict(val.features),
        )
        for p in module.PENALTIES
    )
    assert concordance(test, fit.risk) > 0.75
    wide = [
        Outcomes(part.person, part.time, part.event, np.concatenate([part.features] * 20, axis=1))
        for part in (train, val, test)
    ]
    # 80 features of 60 people: no direction is lost
    assert concordance(test, fit_cox(*wide).risk) > 0.75


def test_a_penalty_whose_fit_overflows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,536 features of 60 people: Newton's steps overflow with the smallest."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 1536))
    time = rng.exponential(np.exp(-features[:, 0])) + 0.01
    part = Outcomes(np.arange(60).astype(str), time, rng.random(60) > 0.3, features)
    wide = (part, part, part)
    monkeypatch.setattr(module, "PENALTIES", (1e-3, 10.0, 1e4))
    assert fit_cox(*wide).penalty in (10.0, 1e4)
    monkeypatch.setattr(module, "PENALTIES", (1e-3,))
    with pytest.raises(UserError, match=r"that can be fitted with a penalty of 0\.001 to 0\.001, found none"):
        fit_cox(*wide)


def test_concordance_by_hand_and_under_resamples() -> None:
    """Times 1, 2, 3 with events at 1 and 3: the pairs are (1, 2) and (1, 3)."""
    names = np.array(["a", "b", "c"])
    part = Outcomes(names, np.array([1.0, 2.0, 3.0]), np.array([True, False, True]), np.zeros((3, 1)))
    assert concordance(part, np.array([3.0, 2.0, 1.0])) == 1.0
    assert concordance(part, np.array([2.0, 3.0, 1.0])) == 0.5
    draws = np.array([[1, 1, 1], [0, 2, 1], [2, 0, 1]])
    values = concordance_draws(part, [np.array([2.0, 3.0, 1.0]), np.array([1.0, 0, 2])], draws)
    np.testing.assert_array_equal(values, [[0.5, 0.5], [np.nan, np.nan], [1.0, 0.0]])


def test_dynamic_auc_knows_the_order_and_no_time_past_the_follow_up() -> None:
    train, test = outcomes(0, 80), outcomes(1, 60)
    known = dynamic_auc(train, test, -test.time)
    assert known["mean"] == pytest.approx(1.0)
    assert dynamic_auc(train, test, test.time)["mean"] == pytest.approx(0.0)
    assert len(known["times"]) == 3
    early = Outcomes(train.person, train.time / 1e6, train.event, train.features)
    assert dynamic_auc(early, test, -test.time) == {"times": [], "auc": [], "mean": None}


def test_the_brier_score_is_that_of_the_curves() -> None:
    """Nobody censored: the mean squared error of "still without the event", over the times, by hand."""
    names = np.array([f"p{number:02d}" for number in range(30)])
    times, everybody = np.arange(1.0, 31.0), np.ones(30, bool)
    train = Outcomes(names, times + 10.0, everybody, np.zeros((30, 1)))
    test = Outcomes(names, times, everybody, np.zeros((30, 1)))
    assert brier(train, test, lambda at: (test.time[:, None] > at).astype(float)) == pytest.approx(0.0)
    assert brier(train, test, lambda at: (test.time[:, None] <= at).astype(float)) == pytest.approx(1.0)
    assert brier(train, test, lambda at: np.full((30, len(at)), 0.5)) == pytest.approx(0.25)
    # one curve for all: nobody of the training fold before 11, then a thirtieth a day
    at = np.unique(np.quantile(times, module.BRIER_QUANTILES))
    alive = 1 - np.clip(np.floor(at) - 10, 0, 30) / 30
    errors = [np.mean(((times > t) - share) ** 2) for t, share in zip(at, alive, strict=True)]
    assert brier(train, test) == pytest.approx(np.trapezoid(errors, at) / (at[-1] - at[0]))
    at_once = Outcomes(names, np.full(30, 5.0), everybody, np.zeros((30, 1)))
    assert brier(train, at_once) is None
    one_time = Outcomes(names, np.array([5.0, *[6.0] * 28, 7.0]), everybody, np.zeros((30, 1)))
    assert brier(train, one_time) is None  # nothing to integrate over
    # features that say the risk: nearer to the truth than one curve for all
    planted = [outcomes(seed, 80) for seed in range(3)]
    good, one_curve = brier(planted[0], planted[2], fit_cox(*planted).curves), brier(planted[0], planted[2])
    assert good is not None
    assert one_curve is not None
    assert good < 0.8 * one_curve


@pytest.fixture(scope="module", autouse=True)
def _as_wide_as_it_is(_two_blocks: None) -> Iterator[None]:
    """48 random features say too little of an event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 192, 3))
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The class of everybody decides how thick a band is, and the thicker it is the earlier the event."""
    root = make_world(tmp_path_factory.mktemp("world"), PEOPLE, "abcd")
    rng, lines = np.random.default_rng(0), ["person_id\tonset_days\tonset"]
    for split, count in PEOPLE.items():
        for number in range(count):
            time = rng.exponential(1000 / band_rows(number % 4, 4) ** 3)
            censored = rng.exponential(20)
            lines.append(f"{person(split, number)}\t{min(time, censored):.4f}\t{int(time <= censored)}")
    (root / "onset.tsv").write_text("\n".join(lines) + "\n")
    return root


def words(world: Path, run: Path, *overrides: str) -> list[str]:
    small = [
        "spatial.image_size=[8,24,32]",
        "eval.batch_size=16",
        "probe.bootstrap_samples=100",
        "data.workers=0",
    ]
    place = [f"data.gcs_root={world}", f"data.store={world / 'store'}", f"run.dir={run}"]
    return [*small, *place, f"task.labels_path={world / 'onset.tsv'}", *KIND, *overrides]


def test_a_planted_event_is_read_from_features(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["method.predictor_depth=2", "method.predictor_width=64"]
    url = save_checkpoint(config(world, tmp_path, *small), participants=["train00"])
    command = ["--config", str(CONFIG), "--checkpoint", url, *words(world, tmp_path, *small)]
    main(command)
    assert (tmp_path / "survival.md").read_text() in capsys.readouterr().out
    result = json.loads((tmp_path / "survival.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["pretrained", "random_init", "device", "permuted"]
    assert (result["n_participants"], result["n_units"], result["look"]) == (20, 20, 1)
    for row in rows.values():
        assert 0 <= row["ci95"][0] <= row["c_index"] <= row["ci95"][1] <= 1
        assert f"| {row['brier']:.3f} |" in (tmp_path / "survival.md").read_text()
    page = (tmp_path / "survival.md").read_text()
    assert f"one Kaplan-Meier curve for all has {result['brier_of_one_curve']:.3f}." in page
    assert rows["pretrained"]["c_index"] > 0.65
    assert rows["pretrained"]["ci95"][0] > 0.5
    assert rows["device"]["ci95"][0] < 0.55
    mean = rows["pretrained"]["c_index"] - rows["random_init"]["c_index"]
    assert result["difference"]["mean"] == pytest.approx(mean)
    assert "Harrell's C" in result["verdict"]
    saw = save_checkpoint(config(world, tmp_path / "saw", *small), participants=["test03", "train00"])
    with pytest.raises(UserError, match=r"found 1 \(test03\)"):
        main(["--config", str(CONFIG), "--checkpoint", saw, *words(world, tmp_path / "saw", *small)])


def test_what_is_no_time_or_no_event_is_refused(world: Path, tmp_path: Path) -> None:
    store = index_store([{"person_id": "1001"}, {"person_id": "1002"}])
    table = tmp_path / "onset.tsv"
    cfg = config(world, tmp_path, f"task.labels_path={table}", *KIND)

    def read(*cells: str) -> dict[str, tuple[float, ...]]:
        table.write_text("person_id\tonset_days\tonset\n1001\t" + "\t".join(cells) + "\n1002\t3\t1\n")
        return read_labels(cfg, store.index).target

    assert read("12.5", "0") == {"1001": (12.5, 0.0), "1002": (3.0, 1.0)}
    assert read("", "0") == {"1002": (3.0, 1.0)}
    for cells, message in {
        ("0", "1"): "onset_days: expected a number above 0, found '0'",
        ("-1", "1"): "expected a number above 0",
        ("soon", "1"): "expected a number above 0, found 'soon'",
        ("4", "2"): "onset: expected 0 or 1, found '2'",
        ("2023-07-19", "1"): "column onset_days: expected a label, found '2023-07-19': dates and times",
    }.items():
        with pytest.raises(UserError, match=message):
            read(*cells)
    dated = config(
        world,
        tmp_path,
        f"task.labels_path={table}",
        "task.kind=survival",
        "task.time_column=event_date",
        EVENT,
    )
    with pytest.raises(UserError, match="column event_date: expected another label"):
        read_labels(dated, store.index)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.kind=survival", EVENT],
            "task.time_column: expected a column with task.kind survival, found None",
        ),
        (["task.kind=survival", TIME], "task.event_column: expected a column"),
        ([EVENT], "task.event_column: expected null with task.kind classification"),
        ([*KIND[:2], "task.event_column=onset_days"], "another column than task.time_column"),
        ([*KIND, "eval.protocol=crossfit"], "eval.protocol: expected official with task.kind survival"),
    ],
)
def test_keys_that_do_not_fit_are_named(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, tmp_path, *overrides)


def test_without_the_package_or_without_events_it_says_so(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, *lines = (world / "onset.tsv").read_text().splitlines()
    few = [line[:-1] + str(int(number < 3)) for number, line in enumerate(lines)]
    (tmp_path / "few.tsv").write_text("\n".join([header, *few]) + "\n")
    cfg = config(world, tmp_path, f"task.labels_path={tmp_path / 'few.tsv'}", *KIND)
    store = PreparedStore.open(cfg.data.store)
    cohort = read_cohort(cfg, store)
    assert (cohort.target.shape[1], cohort.num_outputs) == (2, 1)
    with pytest.raises(UserError, match=r"split train: expected 5 events of onset or more, found 3"):
        module._require_events(cfg, cohort, store.url)
    at_once = [line.replace(line.split("\t")[1], "7") if line.startswith("val") else line for line in lines]
    (tmp_path / "few.tsv").write_text("\n".join([header, *at_once]).replace("\t0", "\t1") + "\n")
    with pytest.raises(UserError, match=r"split val: expected an event of onset before"):
        module._require_events(cfg, read_cohort(cfg, store), store.url)
    with pytest.raises(ConfigError, match=r"found survival: finetuning\.evaluate takes it"):
        read_cohorts(cfg, store, [])
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-survival"):
        module.require_library()
