"""Members of a grid train as each would alone, and validation alone chooses among them.

What it is given is standardised on train alone, of every kind of task, however it is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.heads import frozen
from finetuning.heads.frozen import Grid, PooledInputs, train_grid
from finetuning.heads.objective import row_weights
from finetuning.train import format_grid
from models.heads import build_head
from models.optimizer import warmup_cosine
from tests.support.finetune_factory import config
from utils.config.schema import Config
from utils.errors import UserError
from utils.run.log import NoLog
from utils.tables import ON_VALIDATION

CPU = torch.device("cpu")
WIDTH = 6


def made_up(kind: str, target: np.ndarray, people: int = 90, seed: int = 0) -> tuple[Cohort, np.ndarray]:
    """Two volumes of each participant, half of them in TRAIN; features that target [people, T] decides."""
    rng = np.random.default_rng(seed)
    number = np.repeat(np.arange(people), 2)
    features = rng.normal(size=(2 * people, 2 * WIDTH)).astype(np.float32)
    features[:, : target.shape[1]] += 6 * (target - target.mean(axis=0))[number] / target.std(axis=0)
    person = np.array([f"p{n:03d}" for n in number])
    names = tuple(f"n{i}" for i in range(target.shape[1] if kind == "multilabel" else int(target.max()) + 1))
    names = ("value",) if kind == "regression" else names
    fold = np.array([TRAIN, VAL, EVALUATED, TRAIN])[number % 4]
    return Cohort(kind, names, np.arange(2 * people), fold, target[number], person, person), features


def learning(world: Path, *overrides: str) -> Config:
    """A small grid and many small steps; nothing is read from disk."""
    grid = ["head.learning_rates=[1e-3,3e-2]", "head.weight_decays=[0,0.3]", "finetune.patience=null"]
    steps = ["train.global_batch_size=16", "train.per_core_batch_size=16"]
    steps += ["train.max_steps=null", "train.epochs=8"]
    return config(world, world / "unused", *grid, *steps, "head.hidden=8", *overrides)


def pooled(cohort: Cohort, features: np.ndarray) -> PooledInputs:
    places = np.flatnonzero(cohort.fold != EVALUATED)
    return PooledInputs(features[places], cohort, places, CPU)


def classes(count: int, people: int = 90) -> np.ndarray:
    return (np.arange(people) // 4 % count).astype(np.float64)[:, None]


def alone(
    cfg: Config, cohort: Cohort, features: np.ndarray, rate: float, decay: float, epochs: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of one member in a plain loop: its own model, torch's AdamW."""
    losses = []
    train = np.flatnonzero(cohort.fold == TRAIN)
    x = torch.from_numpy((features - features[train].mean(0)) / features[train].std(0)).float()
    weight = torch.from_numpy(
        row_weights(cohort.kind, cohort.target[train], cohort.person[train], "auto")[:, 0]
    ).float()
    torch.manual_seed(cfg.seed)
    head = build_head(cfg.head.kind, WIDTH, cohort.num_outputs, cfg.head.hidden)
    matrices = [p for p in head.parameters() if p.ndim > 1]
    others = [p for p in head.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
        lr=rate,
        betas=cfg.optim.betas,
        eps=cfg.optim.eps,
    )
    size, per_epoch = 16, -(-len(train) // 16)
    for epoch in range(epochs):
        order = np.random.default_rng([cfg.seed, epoch]).permutation(len(train))
        for place in range(per_epoch):
            chosen = order[place * size : (place + 1) * size]
            step = epoch * per_epoch + place
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(cfg.optim, step, 8 * per_epoch, rate)
            labels = torch.from_numpy(cohort.target[train[chosen], 0]).long()
            loss = nn.functional.cross_entropy(head(x[train[chosen]]), labels, reduction="none")
            optimizer.zero_grad()
            mean = (loss * weight[chosen]).mean()
            losses.append(float(mean.detach()))
            mean.backward()
            optimizer.step()
    return {name: p.detach() for name, p in head.named_parameters()}, losses


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_member_is_what_it_would_be_alone(world: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort, features = made_up("classification", classes(3))
    cfg = learning(world, f"head.kind={kind}")
    grids: list[Grid] = []
    build = Grid.__init__

    def remember(self: Grid, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        grids.append(self)

    monkeypatch.setattr(Grid, "__init__", remember)
    train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)
    (grid,) = grids
    assert [round(rate, 6) for rate, _ in grid.pairs] == [0.001, 0.001, 0.03, 0.03]
    for (rate, decay), member in zip(grid.pairs, grid.members, strict=True):
        for name, value in alone(cfg, cohort, features, rate, decay, 8)[0].items():
            torch.testing.assert_close(member[name].detach(), value, atol=1e-5, rtol=1e-5)


def swapped(cohort: Cohort) -> Cohort:
    """The participants of VAL have the other class."""
    return replace(cohort, target=np.where((cohort.fold == VAL)[:, None], 1 - cohort.target, cohort.target))


def test_the_kept_head_is_the_best_epoch_of_the_best_member(world: Path) -> None:
    """With the other class for VAL: the less a member has learnt, the better it is there."""
    cohort, features = made_up("classification", classes(2))
    cfg = learning(world)
    chosen = train_grid(cfg, swapped(cohort), pooled(cohort, features), WIDTH, CPU)
    lines = chosen[1]["grid"]
    assert len(lines) == 4
    ranks = [(line["score"], -line["loss"]) for line in lines]
    best = lines[ranks.index(max(ranks))]
    assert {key: chosen[1][key] for key in best} == best
    assert best["epoch"] == 1
    expected, _ = alone(cfg, swapped(cohort), features, best["learning_rate"], best["weight_decay"], 1)
    for name, value in chosen[0].named_parameters():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)
    normal = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)[1]
    assert normal["learning_rate"] == 3e-2
    assert normal["score"] > 0.8


def test_the_grid_is_printed_a_row_for_each_pair(world: Path) -> None:
    cohort, features = made_up("classification", classes(2))
    cfg = learning(world, "train.epochs=1")
    trained = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)[1]
    grid = [line | {"epoch": 12, "score": 0.98765, "loss": 0.123456} for line in trained["grid"]]
    chosen = {"learning_rate": 0.03, "weight_decay": 0}
    assert format_grid(trained | chosen | {"grid": grid}).splitlines() == [
        "learning rate  weight decay  epoch  balanced accuracy    loss",
        "0.001                     0     12             0.9877  0.1235",
        "0.001                   0.3     12             0.9877  0.1235",
        "0.03                      0     12             0.9877  0.1235  kept",
        "0.03                    0.3     12             0.9877  0.1235",
        ON_VALIDATION,
    ]


class Rows(NoLog):
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float | None]]] = []

    def metrics(self, step: int, values: dict[str, float | None]) -> None:
        self.rows.append((step, values))


def test_the_log_follows_the_pair_that_leads(world: Path) -> None:
    """With one pair, the losses of a plain loop; with two, those of the one that is better on validation."""
    cohort, features = made_up("classification", classes(3))
    logs = {}
    for rates in ("[3e-2]", "[1e-5]", "[1e-5,3e-2]"):
        changes = f"head.learning_rates={rates}", "head.weight_decays=[0.3]", "train.log_every_steps=4"
        logs[rates] = run_log = Rows()
        cfg = learning(world, *changes)
        trained = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU, run_log)
    good, bad, both = ([row for row in logs[rates].rows if "train/loss" in row[1]] for rates in logs)
    _, losses = alone(cfg, cohort, features, 3e-2, 0.3, 8)
    total = len(losses)
    assert [step for step, _ in good] == [1, *range(4, total + 1, 4)]
    assert [row["train/loss"] for _, row in good] == pytest.approx([losses[s - 1] for s, _ in good], rel=1e-4)
    per_epoch = total // 8
    led = [(good if step > per_epoch else bad)[n][1] for n, (step, _) in enumerate(both)]
    assert [row["train/loss"] for _, row in both] == pytest.approx([row["train/loss"] for row in led])
    assert [row["train/lr"] for _, row in both] == [row["train/lr"] for row in led]
    alone_scored, scored = (
        [row for row in logs[rates].rows if "val/loss" in row[1]] for rates in ("[3e-2]", "[1e-5,3e-2]")
    )
    for (_, one), (_, other) in zip(alone_scored, scored, strict=True):
        assert other == pytest.approx(one)
    assert [step for step, _ in scored] == [per_epoch * n for n in range(1, 9)]
    kept = scored[trained[1]["epoch"] - 1][1]
    assert kept == {"val/loss": trained[1]["loss"], "val/balanced_accuracy": trained[1]["score"]}


def test_training_stops_when_nothing_became_better(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort, features = made_up("classification", classes(2))
    epochs: list[int] = []
    update = frozen._update_bests

    def count(*args: Any) -> Any:
        epochs.append(args[-1])
        return update(*args)

    monkeypatch.setattr(frozen, "_update_bests", count)
    train_grid(learning(world, "finetune.patience=2"), swapped(cohort), pooled(cohort, features), WIDTH, CPU)
    assert epochs == [1, 2, 3]
    epochs.clear()
    train_grid(learning(world, "train.max_steps=8"), cohort, pooled(cohort, features), WIDTH, CPU)
    assert epochs == [1, 2]  # six updates an epoch; what was begun is scored too


def test_a_member_that_diverges_is_left_out(world: Path) -> None:
    cohort, features = made_up("regression", np.linspace(0, 1, 90)[:, None])
    cfg = learning(world, "head.learning_rates=[1e-2,1e30]", "head.weight_decays=[0]")
    result = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)[1]
    assert result["learning_rate"] == 1e-2
    cfg = learning(world, "head.learning_rates=[1e30]")
    with pytest.raises(UserError, match=r"head.learning_rates: expected one that trains, .* \[1e\+30\]"):
        train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_the_last_update_has_the_least_rate(world: Path, floor: float) -> None:
    cohort, features = made_up("classification", classes(2))
    changes = "train.max_steps=10", f"optim.min_lr_ratio={floor}", "head.learning_rates=[3e-2]"
    run_log = Rows()
    train_grid(learning(world, *changes), cohort, pooled(cohort, features), WIDTH, CPU, run_log)
    rates = {step: row["train/lr"] for step, row in run_log.rows if "train/lr" in row}
    assert rates[10] == pytest.approx(floor * 3e-2)


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
    start = build_head("attentive", WIDTH, 2, 8)
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
