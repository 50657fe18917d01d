"""Metrics against scikit-learn, the bootstrap against a plain loop over the same draws."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from finetuning.cohort import metrics
from tests.support.finetune_factory import predictions

CLOSE = {"rtol": 0, "atol": 1e-9}


def case(seed: int, num_classes: int, num_units: int, *, ties: bool, missing: bool) -> metrics.Predictions:
    """Random probabilities; with ties of few distinct values; with a class that has no unit."""
    rng = np.random.default_rng(seed)
    scores = rng.dirichlet(np.ones(num_classes), num_units)
    if ties:
        scores = rng.multinomial(4, scores) / 4
    classes = np.delete(np.arange(num_classes), seed % num_classes) if missing else np.arange(num_classes)
    truth = np.concatenate([classes, rng.choice(classes, num_units - len(classes))])
    return predictions("ordinal", truth, scores)


def expected(p: metrics.Predictions) -> tuple[dict[str, float], dict[str, list[float]]]:
    """What scikit-learn says of classes; NaN where a class has no unit."""
    truth, num_classes = p.truth[:, 0].astype(int), p.scores.shape[1]
    given, labels = p.scores.argmax(axis=1), np.arange(num_classes)
    is_class = truth[:, None] == labels
    positives = is_class.sum(axis=0)
    is_mixed = (positives > 0) & (positives < len(truth))

    def each(metric: Callable[[np.ndarray, np.ndarray], float], exists: np.ndarray) -> list[float]:
        return [metric(is_class[:, c], p.scores[:, c]) if exists[c] else np.nan for c in labels]

    by_class = {
        "sensitivity": sk.recall_score(truth, given, labels=labels, average=None, zero_division=np.nan),
        "specificity": [
            sk.recall_score(~is_class[:, c], given != c, zero_division=np.nan)  # recall of "the rest"
            for c in labels
        ],
        "f1": sk.f1_score(truth, given, labels=labels, average=None, zero_division=np.nan),
        "auroc": each(sk.roc_auc_score, is_mixed),
        "auprc": each(sk.average_precision_score, positives > 0),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
        balanced = sk.balanced_accuracy_score(truth, given)
    overall = {
        "accuracy": sk.accuracy_score(truth, given),
        "balanced_accuracy": balanced,
        "macro_f1": sk.f1_score(truth, given, average="macro", zero_division=0),
        "macro_auroc": float(np.mean(by_class["auroc"])),
        "macro_auprc": float(np.mean(by_class["auprc"])),
        "quadratic_kappa": sk.cohen_kappa_score(truth, given, labels=labels, weights="quadratic"),
        "brier": sk.brier_score_loss(truth, p.scores[:, 1] if num_classes == 2 else p.scores, labels=labels),
    }
    return overall, by_class


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("num_classes", [2, 3, 4])
def test_classes_equal_scikit_learn(num_classes: int, ties: bool, missing: bool) -> None:
    for seed in range(4):
        p = case(seed, num_classes, 12 + 30 * seed, ties=ties, missing=missing)
        if missing and num_classes == 2:
            continue  # one class: the test after this one
        overall, by_class = expected(p)
        result = metrics.observed(p)
        assert set(result.overall) - {"ece"} == set(overall)
        for name, value in overall.items():
            np.testing.assert_allclose(result.overall[name], [value], err_msg=name, **CLOSE)
        for name, values in by_class.items():
            np.testing.assert_allclose(result.by_class[name][0], values, err_msg=name, **CLOSE)
        assert np.isnan(result.overall["macro_auroc"][0]) == missing


def test_one_class_alone_has_no_ranking() -> None:
    p = predictions("classification", np.ones(5), np.tile([0.4, 0.6], (5, 1)))
    result = metrics.observed(p)
    assert result.overall["accuracy"] == result.overall["balanced_accuracy"] == 1
    assert np.isnan(result.overall["macro_auroc"][0])
    assert np.isnan(result.overall["macro_auprc"][0])
    np.testing.assert_array_equal(result.by_class["sensitivity"], [[np.nan, 1]])
    np.testing.assert_array_equal(result.by_class["specificity"], [[1, np.nan]])
    np.testing.assert_array_equal(result.by_class["auroc"], [[np.nan, np.nan]])
    assert "quadratic_kappa" not in result.overall
    assert metrics.interval(np.array([np.nan, np.nan])) is None


def test_regression_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    truth = 1e6 + rng.normal(size=50)
    value = truth + rng.normal(size=50)
    result = metrics.observed(predictions("regression", truth, value[:, None]))
    np.testing.assert_allclose(result.overall["mae"], sk.mean_absolute_error(truth, value), **CLOSE)
    np.testing.assert_allclose(result.overall["r2"], sk.r2_score(truth, value), **CLOSE)
    constant = metrics.observed(predictions("regression", np.full(4, 0.1), rng.normal(size=(4, 1))))
    assert np.isnan(constant.overall["r2"][0])
    assert result.by_class == {}


def test_multilabel_is_the_mean_over_labels() -> None:
    rng = np.random.default_rng(1)
    truth, yes = rng.integers(0, 2, (40, 3)), rng.multinomial(8, np.ones(3) / 3, 40) / 8
    result = metrics.observed(predictions("multilabel", truth, yes))
    columns = [(truth[:, i], yes[:, i], yes[:, i] > 0.5) for i in range(3)]
    for name, values in {
        "accuracy": [sk.accuracy_score(t, d) for t, _, d in columns],
        "balanced_accuracy": [sk.balanced_accuracy_score(t, d) for t, _, d in columns],
        "macro_auroc": [sk.roc_auc_score(t, s) for t, s, _ in columns],
        "brier": [sk.brier_score_loss(t, s) for t, s, _ in columns],
    }.items():
        np.testing.assert_allclose(result.overall[name], [np.mean(values)], err_msg=name, **CLOSE)
    recall = [sk.recall_score(t, d) for t, _, d in columns]
    np.testing.assert_allclose(result.by_class["sensitivity"], [recall], **CLOSE)
    without = metrics.observed(predictions("multilabel", truth * [1, 1, 0], yes))
    assert np.isnan(without.overall["macro_auroc"][0])
    assert np.isnan(without.by_class["auroc"][0]).tolist() == [False, False, True]


@pytest.mark.parametrize("ties", [False, True])
def test_calibration_equals_scikit_learn(ties: bool) -> None:
    p = case(3, 3, 200, ties=ties, missing=False)
    confidence, right = p.scores.max(axis=1), metrics.decided(p.scores) == p.truth[:, 0]
    accuracy, mean = calibration_curve(right, confidence, n_bins=metrics.NUM_BINS, strategy="uniform")
    points = metrics.reliability(p)
    np.testing.assert_allclose(points["accuracy"], accuracy, **CLOSE)
    np.testing.assert_allclose(points["confidence"], mean, **CLOSE)
    assert points["count"].sum() == 200
    error = np.average(np.abs(accuracy - mean), weights=points["count"])
    np.testing.assert_allclose(metrics.observed(p).overall["ece"], [error], **CLOSE)


def test_the_threshold_has_the_highest_youden_index() -> None:
    for seed in range(20):
        p = case(seed, 2, 40, ties=True, missing=False)
        truth, score = p.truth[:, 0], p.scores[:, 1]
        threshold = metrics.youden_threshold(truth, score)
        assert threshold is not None
        false_rate, true_rate, thresholds = sk.roc_curve(truth, score, drop_intermediate=False)
        best = (true_rate - false_rate).max()
        is_best = np.isclose(true_rate - false_rate, best)
        highest = thresholds[is_best & np.isfinite(thresholds)].max()
        assert max(score[score < highest], default=-1) < threshold <= highest
        result = metrics.at_threshold(p, np.full(40, threshold), np.ones((1, 40)))
        sensitivity, specificity = result.by_class["sensitivity"][0, 1], result.by_class["specificity"][0, 1]
        assert sensitivity + specificity - 1 == pytest.approx(best)
    assert metrics.youden_threshold(np.ones(3), np.arange(3.0)) is None


@pytest.mark.parametrize("kind", ["ordinal", "multilabel", "regression"])
def test_the_bootstrap_equals_a_loop_over_the_same_draws(kind: str) -> None:
    """Each resample written out unit by unit and given to scikit-learn."""
    p = case(5, 3, 60, ties=True, missing=False)
    if kind == "multilabel":
        p = predictions(kind, p.truth == np.arange(3), p.scores)
    if kind == "regression":
        p = predictions(kind, p.truth + p.scores[:, [1]], p.scores[:, [0]])
    counts = metrics.bootstrap_counts(p, 12, seed=0)
    together = metrics.measure(p, counts)
    for number, count in enumerate(counts):
        drawn = np.repeat(np.arange(60), count)
        truth, scores = p.truth[drawn], p.scores[drawn]
        if kind == "regression":
            values = {"r2": sk.r2_score(truth, scores), "mae": sk.mean_absolute_error(truth, scores)}
        elif kind == "multilabel":
            values = {
                "macro_auroc": sk.roc_auc_score(truth, scores, average="macro"),
                "macro_auprc": sk.average_precision_score(truth, scores, average="macro"),
            }
        else:
            values, _ = expected(predictions(kind, truth, scores))
        for name, value in values.items():
            np.testing.assert_allclose(together.overall[name][number], value, err_msg=name, **CLOSE)


def test_resamples_are_of_people_and_keep_the_classes() -> None:
    """Two eyes each; class a has 5 people, class b 15, in every resample."""
    person = np.repeat([f"p{number:02d}" for number in range(20)], 2)
    truth = np.repeat([0] * 5 + [1] * 15, 2)
    p = predictions("classification", truth, np.full((40, 2), 0.5), person)
    counts = metrics.bootstrap_counts(p, 200, seed=0)
    np.testing.assert_array_equal(counts[:, ::2], counts[:, 1::2])
    assert (counts[:, truth == 0].sum(axis=1) == 10).all()
    assert (counts[:, truth == 1].sum(axis=1) == 30).all()
    assert len(np.unique(counts, axis=0)) > 190


def test_2000_resamples_of_all_metrics_take_seconds() -> None:
    p = case(0, 4, 352, ties=False, missing=False)
    began = time.process_time()
    metrics.measure(p, metrics.bootstrap_counts(p, 2000, seed=0))
    assert time.process_time() - began < 5
