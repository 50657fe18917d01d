"""Probes: numbers known by hand, pooling by participant, paired intervals and the sentence they allow."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import balanced_accuracy_score, r2_score
from sklearn.preprocessing import StandardScaler

from models.probes.features import lidar, pool_tokens, rankme
from models.probes.intervals import (
    balanced_accuracy_draws,
    could_show,
    doubt,
    interval95,
    participant_draws,
    recall_parts,
    side,
    sign_flip_p,
    smallest_p,
    verdict,
)
from models.probes.participants import (
    Fold,
    Prediction,
    balanced_accuracy,
    fit_ridge,
    knn_probe,
    logistic_probe,
    ridge_classifier_probe,
)
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


def prediction(labels: list[int], predicted: list[int], num_classes: int = 2) -> Prediction:
    ids = np.array([f"{i:03d}" for i in range(len(labels))])
    return Prediction(ids, np.array(labels), np.eye(num_classes)[predicted])


def blobs(rng: np.random.Generator, prefix: str, people: int, volumes: int, gap: float) -> Fold:
    """Two classes, `gap` standard deviations apart in feature 0; feature 1 is noise on a scale of 1000."""
    labels = np.repeat(np.arange(people) % 2, volumes)
    features = rng.normal(size=(people * volumes, 2))
    features[:, 0] += gap * labels
    features[:, 1] *= 1000
    return Fold(features, labels, np.repeat([f"{prefix}{i}" for i in range(people)], volumes))


# --- pooling and rank ---


def test_pooling_is_mean_and_std_over_valid_tokens_only() -> None:
    tokens = torch.tensor([[[1.0, 10.0], [3.0, 10.0], [999.0, -999.0]]])
    pooled = pool_tokens(tokens, torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(pooled, torch.tensor([[2.0, 10.0, 1.0, 0.0]]))
    pooled = pool_tokens(torch.tensor([[[0.0], [4.0]]]), torch.tensor([[0.75, 0.25]]))  # partly valid
    torch.testing.assert_close(pooled, torch.tensor([[1.0, 3.0**0.5]]))
    with pytest.raises(ValueError, match=r"found none in \[1\]"):
        pool_tokens(torch.ones(2, 3, 4), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))


def test_rankme_counts_equal_directions_and_ignores_the_mean() -> None:
    corners = torch.cat([torch.eye(4), -torch.eye(4)])  # centred, four equal singular values
    assert rankme(corners) == pytest.approx(4.0)
    assert rankme(corners + 1000.0) == pytest.approx(4.0, rel=1e-3)
    assert rankme(torch.outer(torch.arange(8.0), torch.ones(4))) == pytest.approx(1.0, abs=1e-4)
    assert rankme(torch.full((8, 4), 3.7)) == 0.0


# --- probes ---


def test_logistic_separates_what_is_separable_and_standardises_on_train() -> None:
    rng = np.random.default_rng(0)
    train, val, test = (blobs(rng, p, n, 2, 8.0) for p, n in (("a", 20), ("b", 10), ("c", 12)))
    result = logistic_probe(train, val, test)
    assert balanced_accuracy(result) == 1.0
    assert len(result.participants) == 12
    assert result.chosen_c is not None
    # a change of units in one feature changes nothing
    units = np.array([1e-3, 50.0])
    scaled = [Fold(f.features * units, f.labels, f.participants) for f in (train, val, test)]
    np.testing.assert_allclose(logistic_probe(*scaled).scores, result.scores, atol=1e-6)


def test_c_is_chosen_on_validation() -> None:
    """A feature that leads in train and misleads in val: val must push C to the strongest penalty."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    shortcut = labels * 6.0 - 3.0
    weak = labels * 1.0 + rng.normal(size=40) * 0.3

    def fold(prefix: str, sign: float) -> Fold:
        return Fold(
            np.stack([sign * shortcut, weak], axis=1), labels, np.array([f"{prefix}{i}" for i in range(40)])
        )

    honest = logistic_probe(fold("a", 1.0), fold("b", 1.0), fold("c", 1.0), c_grid=(1e-4, 1e4))
    misled = logistic_probe(fold("a", 1.0), fold("b", -1.0), fold("c", -1.0), c_grid=(1e-4, 1e4))
    assert honest.chosen_c == 1e4  # both are right about everyone; the lower log loss decides
    assert misled.chosen_c == 1e-4


def test_a_participant_is_the_mean_of_its_volumes() -> None:
    rng = np.random.default_rng(1)
    train, val = blobs(rng, "a", 20, 1, 4.0), blobs(rng, "b", 10, 1, 4.0)
    features = np.array([[0.1, 0.0], [3.0, 0.0], [3.5, 0.0]])
    together = Fold(features, np.array([1, 1, 1]), np.array(["x", "x", "x"]))
    apart = Fold(features, np.array([1, 1, 1]), np.array(["x", "y", "z"]))
    one, three = logistic_probe(train, val, together), logistic_probe(train, val, apart)
    np.testing.assert_allclose(one.scores[0], three.scores.mean(axis=0))
    assert three.scores[0].argmax() == 0  # alone, the first volume is on the other side


def test_a_participant_with_many_volumes_weighs_no_more() -> None:
    rng = np.random.default_rng(2)
    train, val, test = (blobs(rng, p, 20, 1, 1.0) for p in "abc")
    mirrored = Fold(*(np.concatenate([x, x]) for x in (train.features, train.labels, train.participants)))
    once, twice = logistic_probe(train, val, test, (1.0,)), logistic_probe(mirrored, val, test, (0.5,))
    np.testing.assert_allclose(once.scores, twice.scores, atol=1e-4)  # twice the rows, half of C: the same
    uneven_rows = np.r_[np.arange(20), np.zeros(30, int)]  # participant 0 has 31 volumes
    uneven = Fold(train.features[uneven_rows], train.labels[uneven_rows], train.participants[uneven_rows])
    many, few = (fit_ridge(part, val, (1e4,)).score(test.features) for part in (uneven, train))
    np.testing.assert_allclose(many, few, atol=1e-3)  # (almost) no penalty: weights alone decide


def test_a_person_on_both_sides_is_refused() -> None:
    rng = np.random.default_rng(0)
    train, val = blobs(rng, "a", 10, 1, 1.0), blobs(rng, "b", 10, 1, 1.0)
    with pytest.raises(ValueError, match="training and the evaluated fold, found 10"):
        logistic_probe(train, val, train)
    with pytest.raises(ValueError, match="training and the validation fold"):
        logistic_probe(train, train, val)
    with pytest.raises(ValueError, match="several for \\['x'\\]"):
        knn_probe(train, Fold(np.ones((2, 2)), np.array([0, 1]), np.array(["x", "x"])))


def test_knn_votes_by_angle() -> None:
    angles = np.deg2rad([0, 10, 20, 180, 190])
    train = Fold(
        np.stack([np.cos(angles), np.sin(angles)], 1), np.array([0, 0, 0, 1, 1]), np.array(list("abcde"))
    )
    direction = train.features.mean(axis=0) + train.features.std(axis=0) * 9.0 * np.array([1.0, 0.3])
    test = Fold(direction[None], np.array([0]), np.array(["z"]))
    np.testing.assert_allclose(knn_probe(train, test, k=3).scores, [[1.0, 0.0]])
    np.testing.assert_allclose(knn_probe(train, test).scores, [[0.6, 0.4]])  # k = 20, five there are


def test_ridge_recovers_a_linear_law() -> None:
    rng = np.random.default_rng(0)

    def fold(prefix: str, n: int) -> Fold:
        x = rng.normal(size=(n, 3)) * [1, 10, 100]
        return Fold(x, 50 + x @ [2.0, 0.3, 0.0], np.array([f"{prefix}{i}" for i in range(n)]))

    fitted, test = fit_ridge(fold("a", 50), fold("b", 20)), fold("c", 20)
    assert r2_score(test.labels, fitted.score(test.features)) > 0.9999
    assert fitted.chosen_c == 1e4


# --- metrics and intervals ---


def test_balanced_accuracy_by_hand() -> None:
    p = prediction([0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0])  # recalls 3/4 and 1/2
    assert balanced_accuracy(p) == pytest.approx(0.625)
    assert balanced_accuracy(prediction([0, 0], [0, 1])) == pytest.approx(0.5)  # class 1 has nobody


def test_draws_resample_participants_and_follow_the_seed() -> None:
    draws = participant_draws(7, 100, seed=3)
    assert draws.shape == (100, 7)
    assert (draws.sum(axis=1) == 7).all()
    assert np.array_equal(draws, participant_draws(7, 100, seed=3))
    assert not np.array_equal(draws, participant_draws(7, 100, seed=4))


def test_resampled_accuracy_equals_that_of_the_repeated_participants() -> None:
    rng = np.random.default_rng(0)
    p = prediction(rng.integers(0, 3, 40).tolist(), rng.integers(0, 3, 40).tolist(), 3)
    draws = participant_draws(40, 20, seed=0)
    repeated = [
        balanced_accuracy_score(np.repeat(p.labels, times), np.repeat(p.classes, times)) for times in draws
    ]
    np.testing.assert_allclose(balanced_accuracy_draws(p, draws), repeated)
    np.testing.assert_allclose(balanced_accuracy_draws(p, np.ones((1, 40), int)), [balanced_accuracy(p)])
    assert recall_parts(p.labels, p.classes).sum() == pytest.approx(balanced_accuracy(p))
    two = prediction([0, 1], [0, 0])
    np.testing.assert_array_equal(
        balanced_accuracy_draws(two, np.array([[2, 0], [0, 2], [1, 1]])), [1, 0, 0.5]
    )


def test_interval_of_a_fair_coin() -> None:
    """One class, half of 400 right: the binomial standard error is .025."""
    p = prediction([0] * 400, [0] * 200 + [1] * 200)
    low, high = interval95(balanced_accuracy_draws(p, participant_draws(400, 4000, seed=0)))
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.005)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.005)


# --- the sentence ---


def test_verdict_follows_the_interval_on_both_sides() -> None:
    assert verdict(0.12, (0.05, 0.2)).startswith("Pre-training beats random initialisation: ")
    assert verdict(-0.12, (-0.2, -0.05)).startswith("Pre-training is worse than random initialisation: ")
    for mean, *interval in (
        (0.1, -0.01, 0.2),
        (-0.1, -0.2, 0.01),
        (0.1, 0.0, 0.3),
        (-0.1, -0.3, 0.0),
        (0, 0, 0),
    ):
        assert verdict(mean, interval).startswith("No difference shown: the interval includes zero")


def test_verdict_states_the_numbers_and_never_rounds_a_bound_to_zero() -> None:
    sentence = verdict(0.1234, (0.00004, 0.3))
    assert "+0.123" in sentence
    assert "+4.0e-05 to +0.300" in sentence
    for bad in ((0.2, 0.1), (float("nan"), 0.1)):
        with pytest.raises(ValueError, match="ordered interval"):
            verdict(0.1, bad)


# --- who claims a difference: the one rule of all tables ---


def claims(differences_P: np.ndarray, people: list[int]) -> bool:
    """Whether a table claims a difference of these people, of a metric that is a mean over them."""
    draws_SP = participant_draws(len(differences_P), 300, seed=1)
    ci95 = interval95(draws_SP @ differences_P / len(differences_P))
    sentence = verdict(differences_P.mean(), ci95, doubt=doubt(ci95, people, differences_P))
    return "beats" in sentence or "is worse" in sentence


@pytest.mark.parametrize("people", [*range(2, 12), 15, 19, 20])
def test_a_cohort_without_a_difference_claims_none(people: int) -> None:
    """The percentile interval alone claims one in 50 % of cohorts of 2, 26 % of 3, 14 % of 5, 11 % of 10."""
    rng = np.random.default_rng(people)
    cohorts = [*rng.normal(size=(600, people)), *rng.standard_t(3, (600, people))]
    assert np.mean([claims(cohort, [people]) for cohort in cohorts]) < 0.07
    assert not claims(np.full(people, 0.5), [people])  # no variance


@pytest.mark.parametrize(
    ("people", "gains", "because"),
    [
        ([6, 40], None, "6 participants in the smallest class are too few: 12 are needed"),
        ([11, 30], np.ones(11), "11 participants .* are too few: 12 .*; an exact test .* gives p 0.000977"),
        ([11], np.ones(11), ""),
        ([5], np.ones(5), "an exact test .* gives p 0.0625, and 5 participants can give none below 0.0625"),
        ([11], None, "11 participants are too few: 12 are needed"),  # no exact test
        ([30, 30], np.ones(60), ""),
        ([14], np.r_[np.ones(10), -np.ones(4)], "an exact test by sign flips gives p 0.18"),
        ([14], np.r_[np.ones(13), -1], ""),
        ([20], np.r_[np.ones(12), -np.ones(8)], "an exact test by sign flips gives p 0.503"),
        ([21], np.r_[np.ones(12), -np.ones(9)], ""),  # the interval decides from 21 people on
    ],
)
def test_why_a_difference_says_nothing(people: list[int], gains: np.ndarray | None, because: str) -> None:
    words = doubt((0.1, 0.2), people, gains)
    assert re.fullmatch(because, words)
    assert side((0.1, 0.2), words) == (0 if words else 1)
    sentence = verdict(0.15, (0.1, 0.2), doubt=words)
    start = f"against random initialisation: cannot say, because {words} (paired" if words else "beats random"
    assert sentence.startswith(f"Pre-training {start}")
    assert re.search("every resample gives the same", doubt((0.5, 0.5), [30, 30]))
    assert not doubt((0.0, 0.0), [30, 30])  # the same predictions: no difference is shown


def test_sign_flips_are_all_choices_of_signs() -> None:
    gains = np.random.default_rng(0).normal(0.3, 1, 9)
    sums = [abs(np.dot(signs, gains)) for signs in itertools.product((1, -1), repeat=9)]
    assert sign_flip_p(gains) == np.mean([total >= abs(gains.sum()) - 1e-12 for total in sums])
    assert [sign_flip_p(gains) for gains in (np.ones(6), np.zeros(3), np.ones(21))] == [2 / 64, 1.0, None]


@pytest.mark.parametrize("people", [6, 8, 12, 20])
def test_what_a_cohort_could_have_shown_is_mostly_shown(people: int) -> None:
    """As far as the exact test of so few has the power of Student's; of 5 people it shows nothing."""
    rng = np.random.default_rng(people)
    gains_P = rng.normal(size=people)
    shown = could_show(gains_P)
    assert shown is not None
    cohorts = rng.normal(shown / gains_P.std(ddof=1), 1, (200, people))
    assert np.mean([claims(cohort, [people]) for cohort in cohorts]) > 0.65
    assert [smallest_p(n) for n in (1, 2, 5, 6)] == [1, 0.5, 0.0625, 0.03125]
    assert could_show(np.arange(5.0)) is None


def test_rankme_equals_the_svd_either_way_round() -> None:
    for shape in ((40, 12), (12, 40)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -4, shape[1])
        share = np.linalg.svd((x - x.mean(0)).double().numpy(), compute_uv=False)
        share = share[share > 1e-12] / share.sum()
        assert rankme(x) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-5)


def test_lidar_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Volumes on a cross, views on a cross around each: within diag(a^2/2, b^2/2, 0) + floor."""
    monkeypatch.setattr("models.probes.features.LIDAR_FLOOR", 0.1)
    means = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])

    def lidar_of(a: float, b: float) -> float:
        offsets = torch.tensor([[a, 0, 0], [-a, 0, 0], [0, b, 0], [0, -b, 0]])
        return lidar(means[:, None] + offsets)

    assert lidar_of(1.0, 1.0) == pytest.approx(2.0)  # both directions equally clear
    assert lidar_of(1.0, math.sqrt(0.2)) == pytest.approx(1.7547654)  # clear as 1 to 3: 4 / 3**0.75
    assert lidar_of(1e4, 1e-4) == pytest.approx(1.0, abs=1e-4)  # one direction drowns


def test_lidar_equals_the_generalised_eigenvalue_problem() -> None:
    features = torch.randn(20, 5, 8, generator=torch.Generator().manual_seed(1))
    features = features + torch.randn(20, 1, 8, generator=torch.Generator().manual_seed(2))
    means, flat = features.mean(1).double().numpy(), features.double().numpy()
    within = np.cov((flat - means[:, None]).reshape(100, 8).T, bias=True) + 1e-4 * np.eye(8)
    values = scipy.linalg.eigh(np.cov(means.T, bias=True), within, eigvals_only=True)
    assert lidar(features) == pytest.approx(np.exp(scipy.stats.entropy(values)), rel=1e-6)


def test_lidar_of_one_point_is_zero_and_of_too_little_an_error() -> None:
    assert lidar(torch.ones(5, 3, 4)) == 0.0
    for shape in ((1, 3, 4), (3, 1, 4)):
        with pytest.raises(ValueError, match="two volumes or more and two views or more"):
            lidar(torch.ones(*shape))


def test_ridge_classifier_separates_and_weighs_participants() -> None:
    rng = np.random.default_rng(0)

    def fold(people: range, num_classes: int) -> Fold:
        labels = np.array([p % num_classes for p in people])
        features = np.eye(num_classes)[labels] + 0.1 * rng.standard_normal((len(labels), num_classes))
        return Fold(features, labels, np.array([f"p{p}" for p in people]))

    for num_classes in (2, 3):
        result = ridge_classifier_probe(fold(range(30), num_classes), fold(range(30, 60), num_classes))
        assert balanced_accuracy(result) == 1.0
        assert result.scores.shape == (30, num_classes)
    # one participant with 60 mislabelled volumes has one vote among eight
    features = np.array([[-1.0]] * 4 + [[1.0]] * 4 + [[1.0]] * 60)
    labels = np.array([0] * 4 + [1] * 4 + [0] * 60)
    train = Fold(features, labels, np.array([*(f"a{i}" for i in range(8)), *["b"] * 60]))
    test = Fold(np.array([[-1.0], [1.0]]), np.array([0, 1]), np.array(["c", "d"]))
    assert ridge_classifier_probe(train, test).classes.tolist() == [0, 1]


def test_ridge_classifier_refuses_shared_participants_and_one_class() -> None:
    train = Fold(np.eye(2), np.array([0, 1]), np.array(["a", "b"]))
    with pytest.raises(ValueError, match="no participant in both"):
        ridge_classifier_probe(train, train)
    other = replace(train, participants=np.array(["c", "d"]))
    with pytest.raises(ValueError, match="two classes or more"):
        ridge_classifier_probe(replace(train, labels=np.zeros(2, dtype=int)), other)


# ---- dense ridge against scikit-learn, its folds, and R2 with participant resampling against plain sums


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
