"""Dense ridge against scikit-learn, its folds, and R2 with participant resampling against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

from models.probes.intervals import participant_draws
from models.probes.tokens import (
    Rows,
    errors_by_participant,
    join_errors,
    mean_r2,
    mean_r2_draws,
    position_columns,
    r2_parts,
    ridge_rows,
)


def make_rows(first_person: int, num_people: int, seed: int, noise: float = 0.3) -> Rows:
    """People with 1, 2, 3, ... rows; two values that are linear in the features, with noise."""
    rng = np.random.default_rng(seed)
    people = np.repeat(np.arange(first_person, first_person + num_people), 1 + np.arange(num_people) % 5)
    features = rng.normal(size=(len(people), 6)) * [1, 5, 0.1, 1, 1, 1] + 3
    slopes = np.random.default_rng(99).normal(size=(6, 2)) / [[1], [5], [0.1], [1], [1], [1]]
    targets = features @ slopes + noise * rng.normal(size=(len(people), 2)) + [0, 40]
    return Rows(features, targets, people)


def test_it_is_the_weighted_ridge_of_scikit_learn() -> None:
    train, val, test = make_rows(0, 30, 1), make_rows(100, 12, 2), make_rows(200, 12, 3)
    people, count = np.unique(train.participants, return_counts=True)
    weight = np.array([1 / count[people == p][0] for p in train.participants])
    weight *= len(weight) / weight.sum()
    scaler = StandardScaler().fit(train.features)
    for c in (1e-3, 0.1, 10.0):
        expected = Ridge(alpha=1 / c).fit(scaler.transform(train.features), train.targets, weight)
        result = ridge_rows(train, val, test, [c])
        np.testing.assert_allclose(
            result.predicted, expected.predict(scaler.transform(test.features)), rtol=1e-8
        )
        assert result.chosen_c == c


def test_c_is_the_best_on_validation() -> None:
    train, val, test = make_rows(0, 4, 1, noise=3.0), make_rows(100, 30, 2), make_rows(200, 12, 3)
    grid = [1e-4, 1e-2, 1.0, 1e4]
    scores = {c: ridge_rows(train, val, test, [c]).val_score for c in grid}
    chosen = ridge_rows(train, val, test, grid)
    assert chosen.val_score == max(scores.values()) == scores[chosen.chosen_c]
    assert len(set(scores.values())) == len(grid)


def test_r2_is_that_of_scikit_learn_when_everybody_has_one_row() -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(20, 3)) + np.array([5, 0, -2])
    predicted = targets + 0.5 * rng.normal(size=(20, 3))
    errors = errors_by_participant(Rows(np.zeros((20, 1)), targets, np.arange(20)), predicted)
    assert mean_r2(errors) == pytest.approx(r2_score(targets, predicted))
    assert r2_parts(errors).sum() == pytest.approx(mean_r2(errors) - 1)
    draws = participant_draws(20, 5, seed=1)
    expected = [r2_score(np.repeat(targets, d, axis=0), np.repeat(predicted, d, axis=0)) for d in draws]
    np.testing.assert_allclose(mean_r2_draws(errors, draws), expected)


def test_a_person_with_many_rows_weighs_as_much_as_one_with_few() -> None:
    rows = make_rows(0, 10, 4)
    predicted = rows.targets + np.random.default_rng(5).normal(size=rows.targets.shape)
    thrice = np.repeat(np.arange(len(rows.participants)), np.where(rows.participants == 3, 3, 1))
    repeated = Rows(rows.features[thrice], rows.targets[thrice], rows.participants[thrice])
    assert mean_r2(errors_by_participant(repeated, predicted[thrice])) == pytest.approx(
        mean_r2(errors_by_participant(rows, predicted))
    )


def test_folds_are_joined_by_id_and_share_nobody() -> None:
    rows = make_rows(0, 8, 6)
    predicted = rows.targets + 1.0
    late = rows.participants >= 3
    parts = [
        errors_by_participant(
            Rows(rows.features[keep], rows.targets[keep], rows.participants[keep]), predicted[keep]
        )
        for keep in (late, ~late)
    ]
    whole = errors_by_participant(rows, predicted)
    joined = join_errors(parts)
    np.testing.assert_array_equal(joined.participants, whole.participants)
    np.testing.assert_allclose(joined.error, whole.error)
    with pytest.raises(ValueError, match="found some in several"):
        join_errors([whole, whole])
    train, test = make_rows(0, 8, 1), make_rows(7, 4, 2)
    with pytest.raises(ValueError, match="evaluated fold, found 1"):
        ridge_rows(train, make_rows(100, 4, 3), test)


def test_a_constant_value_is_left_out_and_constants_alone_are_an_error() -> None:
    targets = np.array([[0.0, 1.0], [0.0, 2.0], [0.0, 4.0]])
    rows = Rows(np.zeros((3, 1)), targets, np.arange(3))
    predicted = targets + np.array([[0.1, 0.5]])
    assert mean_r2(errors_by_participant(rows, predicted)) == pytest.approx(
        r2_score(targets[:, 1], predicted[:, 1])
    )
    constant = Rows(np.zeros((3, 1)), np.ones((3, 1)), np.arange(3))
    with pytest.raises(ValueError, match="constants only"):
        mean_r2(errors_by_participant(constant, np.ones((3, 1))))


def test_positions_are_the_centres_of_tokens() -> None:
    columns = position_columns(np.array([0, 1, 5, 23]), (2, 3, 4))
    np.testing.assert_allclose(columns[0, :3], [-0.5, -2 / 3, -0.75])
    np.testing.assert_allclose(columns[3, :3], [0.5, 2 / 3, 0.75])
    np.testing.assert_allclose(columns[2, :3], [-0.5, 0.0, -0.25])
    np.testing.assert_allclose(columns[:, 3:], columns[:, :3] ** 2)


def test_rows_refuse_what_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="found \\(3, 1\\), \\(2, 1\\), \\(3,\\)"):
        Rows(np.zeros((3, 1)), np.zeros((2, 1)), np.arange(3))
    with pytest.raises(ValueError, match="finite"):
        Rows(np.full((3, 1), np.nan), np.zeros((3, 1)), np.arange(3))
