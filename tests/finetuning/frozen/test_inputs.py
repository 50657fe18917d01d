"""What a grid is given: standardised on train alone, of every kind of task, however it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.heads.frozen import train_grid
from models.heads import build_head
from tests.finetuning.frozen.probing import CPU, WIDTH, classes, learning, made_up, pooled
from utils.errors import UserError


def test_evaluated_participants_change_nothing(world: Path) -> None:
    """Other targets and other features of theirs, and the head is the same bit for bit."""
    cohort, features = made_up("classification", classes(3))
    cfg = learning(world)
    first = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)
    evaluated = cohort.fold == EVALUATED
    target = np.where(evaluated[:, None], (cohort.target + 1) % 3, cohort.target)
    other = np.where(evaluated[:, None], np.float32(np.nan), features)
    second = train_grid(cfg, replace(cohort, target=target), pooled(cohort, other), WIDTH, CPU)
    assert first[1] == second[1]
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_features_are_standardised_on_train_alone(world: Path) -> None:
    cohort, features = made_up("classification", classes(3))
    features[cohort.fold == VAL] += 100
    features[:, 5] = 7.0  # a constant has no spread
    inputs = pooled(cohort, features)
    train = np.flatnonzero(cohort.fold == TRAIN)
    (x,) = inputs.read(train)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0, correction=0)[np.arange(12) != 5], 1, atol=1e-4)
    assert not x[:, 5].any()
    np.testing.assert_allclose(inputs.read(train[[7, 2]])[0], x[[7, 2]])


def test_regression_predicts_in_the_labels_unit(world: Path) -> None:
    """Thickness in micrometres: far from 0, and with a spread that is not 1."""
    thickness = 280 + 25 * np.random.default_rng(3).normal(size=(90, 1))
    cohort, features = made_up("regression", thickness)
    inputs = pooled(cohort, features)
    cfg = learning(world, "head.learning_rates=[3e-2]", "train.epochs=40")
    trained = train_grid(cfg, cohort, inputs, WIDTH, CPU)
    val = np.flatnonzero(cohort.fold == VAL)
    predicted = trained[0](*inputs.read(val))[:, 0].detach().numpy()
    by_person = (predicted[0::2] + predicted[1::2]) / 2
    truth = cohort.target[val[::2], 0]
    assert trained[1]["score"] == pytest.approx(-np.mean((by_person - truth) ** 2), rel=1e-4)
    assert np.mean((by_person - truth) ** 2) < 0.2 * truth.var()
    constant = replace(cohort, target=np.full_like(cohort.target, 5))
    with pytest.raises(UserError, match="value: expected a value that varies on split train, found 5 alone"):
        train_grid(cfg, constant, inputs, WIDTH, CPU)


class Tokens:
    """Tokens in memory, so many at a time."""

    def __init__(self, tokens: Tensor, at_once: int) -> None:
        self.tokens, self.at_once = tokens, at_once

    def read(self, places: np.ndarray) -> tuple[Tensor, ...]:
        assert len(places) <= self.at_once
        tokens = self.tokens[torch.from_numpy(places)]
        return tokens, torch.ones(tokens.shape[:2])


def test_what_is_read_at_once_changes_nothing(world: Path) -> None:
    """Tokens of a batch need not fit into memory together."""
    cohort, features = made_up("classification", classes(2), people=30)
    tokens = torch.from_numpy(features).reshape(len(features), 2, WIDTH)
    cfg = learning(world, "head.kind=attentive", "train.epochs=2", "head.learning_rates=[1e-3]")
    whole, parts = (train_grid(cfg, cohort, Tokens(tokens, size), WIDTH, CPU)[0] for size in (100, 5))
    torch.manual_seed(0)
    start = build_head("attentive", WIDTH, 2, 8, 0.0)
    seen = tokens, torch.ones(tokens.shape[:2])
    assert (whole(*seen) - start(*seen)).abs().max() > 1e-2
    torch.testing.assert_close(parts(*seen), whole(*seen), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["ordinal", "multilabel"])
def test_other_kinds_learn(world: Path, kind: str) -> None:
    target = classes(4)
    if kind == "multilabel":
        target = np.concatenate([target % 2, target // 2], axis=1)
    cohort, features = made_up(kind, target)
    cfg = learning(world, "head.learning_rates=[3e-2]", "train.epochs=30")
    trained = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)
    assert trained[1]["score"] > 0.7
    assert trained[0].last.out_features == (2 if kind == "multilabel" else 4)
