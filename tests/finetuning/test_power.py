"""What a cohort can show: the formula holds in simulated cohorts, which are judged as tables judge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import norm

from finetuning import power
from models.probes.intervals import balanced_accuracy_draws, interval95, participant_draws
from models.probes.participants import Prediction
from utils.cli import run_cli
from utils.errors import UserError

UNEVEN = [40, 160, 70, 82]


def simulate(
    counts_per_class: Sequence[int],
    disagreement: float,
    difference: float,
    cohorts: int,
    seed: int,
    draw: str = "participants",
    resamples: int = 2000,
) -> tuple[float, float]:
    """How often the 95 % interval lies above zero, and below, in cohorts drawn with this true difference.

    Each resample draws participants as models.probes.intervals does, or within each class. What a class adds
    depends on how many of its participants are +1 and -1, so those are drawn, not persons.
    """
    rng, counts_K = np.random.default_rng(seed), np.asarray(counts_per_class)
    better, worse = (disagreement + difference) / 2, (disagreement - difference) / 2
    better_CK, worse_CK = _two_of_three(
        rng, np.broadcast_to(counts_K, (cohorts, len(counts_K))), better, worse
    )
    shape = (cohorts, resamples)
    total_CS, present_CS = np.zeros(shape), np.zeros(shape, int)
    undrawn_CS = np.full(shape, counts_K.sum())
    for place, count in enumerate(counts_K):
        if draw == "within classes":
            drawn_CS = np.full(shape, count)
        else:  # a multinomial over the classes, one class after the other
            drawn_CS = rng.binomial(undrawn_CS, count / counts_K[place:].sum())
            undrawn_CS = undrawn_CS - drawn_CS
        shares = (part[:, place, None] / count for part in (better_CK, worse_CK))
        plus_CS, minus_CS = _two_of_three(rng, drawn_CS, *shares)
        total_CS += (plus_CS - minus_CS) / np.maximum(drawn_CS, 1)
        present_CS += drawn_CS > 0
    low_C, high_C = np.quantile(total_CS / present_CS, [0.025, 0.975], axis=1)
    return float((low_C > 0).mean()), float((high_C < 0).mean())


def _two_of_three(
    rng: np.random.Generator, total: np.ndarray, first: float | np.ndarray, second: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first two counts of multinomial draws of three kinds, of shares first, second and the rest."""
    drawn = rng.binomial(total, first)
    rest = 1 - np.asarray(first)
    share = np.divide(second, rest, out=np.zeros(np.shape(rest)), where=rest > 0)
    return drawn, rng.binomial(total - drawn, np.clip(share, 0, 1))


@pytest.mark.parametrize("draw", ["participants", "within classes"])
def test_planned_differences_are_shown_as_often_as_promised(draw: str) -> None:
    """200 cohorts: three standard errors are 9 points at 80 %, 5 points at 5 %."""
    planned = power.smallest_difference(UNEVEN, 0.3)
    assert 0.71 <= simulate(UNEVEN, 0.3, planned, 200, 0, draw, 400)[0] <= 0.89
    null = simulate(UNEVEN, 0.3, 0.0, 200, 1, draw, 400)
    assert sum(null) <= 0.10
    half = simulate(UNEVEN, 0.3, planned / 2, 200, 2, draw, 400)[0]
    assert half < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[88] * 4, [130, 60, 100, 62]])
def test_500_cohorts_of_the_official_size(counts: list[int]) -> None:
    """Planned differences are shown in 80 +- 5 %, none in at most 5 + 2 %."""
    planned = power.smallest_difference(counts, 0.3)
    assert 0.75 <= simulate(counts, 0.3, planned, 500, 0)[0] <= 0.85
    assert sum(simulate(counts, 0.3, 0.0, 500, 1)) <= 0.07


def test_simulated_cohorts_are_judged_as_tables_judge() -> None:
    """The same share of shown differences as with persons and predictions."""
    counts, q, difference, cohorts = [12, 30, 18], 0.4, 0.2, 200
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), counts)
    ids = np.arange(len(labels)).astype(str)
    shown = 0
    for number in range(cohorts):
        kind = rng.choice(4, size=len(labels), p=[(q + difference) / 2, (q - difference) / 2, 0.3, 0.3])
        rows = []
        for right in (np.isin(kind, [0, 2]), np.isin(kind, [1, 2])):
            rows.append(Prediction(ids, labels, np.eye(3)[np.where(right, labels, (labels + 1) % 3)]))
        draws = participant_draws(len(labels), 300, number)
        first, second = (balanced_accuracy_draws(row, draws) for row in rows)
        shown += interval95(first - second)[0] > 0
    simulated = simulate(counts, q, difference, 1000, 1, "participants", 300)[0]
    assert abs(shown / cohorts - simulated) < 0.1
    assert 0.4 < simulated < 0.9  # neither end hides a difference


def test_one_class_is_the_paired_test_of_two_shares() -> None:
    """One class of many participants: the difference of two dependent shares, by its textbook power."""
    size, q = 2000, 0.2
    difference = power.smallest_difference([size], q)
    error = np.sqrt((q - difference**2) / size)
    assert norm.sf(norm.ppf(0.975) - difference / error) == pytest.approx(0.8, abs=1e-6)


def test_more_participants_less_disagreement_and_balance_show_more() -> None:
    base = power.smallest_difference([50] * 4, 0.3)
    assert power.smallest_difference([100] * 4, 0.3) < base
    assert power.smallest_difference([50] * 4, 0.2) < base
    assert power.smallest_difference([20, 60, 60, 60], 0.3) > base
    assert power.effective_size([50] * 4) == pytest.approx(200)


def test_rows_that_never_disagree_still_need_a_difference() -> None:
    """Identical pilots do not mean that anything can be shown."""
    smallest = power.smallest_difference([20, 20], 0.0)
    assert smallest > 0.1
    assert smallest == power.smallest_difference([20, 20], smallest / 2)


def test_the_official_test_split() -> None:
    """352 participants of four classes show nothing under .08 to .11 at usual disagreements."""
    assert 0.075 < power.smallest_difference([88] * 4, 0.3) < power.smallest_difference([88] * 4, 0.5) < 0.115


@pytest.mark.parametrize(("q", "effect"), [(0.3, 0.05), (0.1, 0.08), (0.02, 0.05)])
def test_the_needed_participants_are_the_fewest_that_show_the_effect(q: float, effect: float) -> None:
    counts = [10, 30]
    people = power.participants_needed(counts, q, effect)
    assert power.smallest_difference([people / 4, people * 3 / 4], q) <= effect
    assert power.smallest_difference([(people - 1) / 4, (people - 1) * 3 / 4], q) > effect


def test_pilot_disagreement_by_hand() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1])
    first = np.array([0, 0, 1, 1, 1, 2])
    second = np.array([0, 1, 1, 2, 0, 0])
    # class 0: one of four (both wrong on the last two); class 1: one of two
    assert power.pilot_disagreement(labels, first == labels, second == labels) == pytest.approx(
        (1 / 4 + 1 / 2) / 2
    )


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    power.main(["--participants", "352", "--classes", "4", "--effect", "0.05"])
    out = capsys.readouterr().out
    assert "could show a difference of 0.081" in out
    assert f"needs {power.participants_needed([88] * 4, 0.3, 0.05)} participants" in out
    assert "assumed" in out
    assert "WARNING" not in out
    power.main(["--counts", f"{power.MIN_PER_CLASS - 1},40", "--disagreement", "0.1"])
    out = capsys.readouterr().out
    assert out.count("WARNING: ") >= 2
    assert "of a pilot" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--participants N and --classes K"),
        (["--participants", "3", "--classes", "4"], "--classes: expected 1 to 3"),
        (["--counts", "3,x"], "--counts: expected numbers above 0"),
        (["--counts", "3,4", "--participants", "8"], "--participants: expected 7 .* found 8"),
        (["--counts", "30,40", "--disagreement", "1.5"], "disagreement: expected a share"),
        (["--counts", "30,40", "--effect", "0"], "effect: expected a number in"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        power.main(words)
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: power.main(words))
    assert stop.value.code == 2


def test_counts_of_participants() -> None:
    assert power.counts_of(10, 4, None) == [3, 3, 2, 2]
    assert power.counts_of(7, 2, "3, 4") == [3, 4]
