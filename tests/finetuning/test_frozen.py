"""Heads on frozen features: the grid, the choice on validation, the kept features, the head's file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data_setup.store.reader import PreparedStore
from finetuning import frozen
from finetuning.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.features.kept import KeptFeatures, features_folder, weights_digest
from finetuning.frozen import Grid, PooledInputs, schedule, train_grid
from finetuning.head_file import open_head, predict_rows
from finetuning.objective import row_weights
from finetuning.pooled import embed_rows, pretrained_encoder, random_encoder
from finetuning.train import main
from finetuning.unread import UNREAD
from models.heads import build_head
from tests.support.finetune_factory import CONFIG, RUNTIME, config, make_world, save_checkpoint
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.cli import run_cli
from utils.config.load import load_config
from utils.config.schema import Config, leaves
from utils.errors import ConfigError, UserError
from utils.log import NoLog
from utils.report import cli as report

TASK = str(Path(__file__).resolve().parents[2] / "configs" / "cls_linear_probe.yaml")
CPU = torch.device("cpu")
QUICK = ["train.epochs=3", "head.learning_rates=[1e-3,1e-2]", "head.weight_decays=[0.01]", "data.workers=0"]
QUICK += ["train.log_every_steps=2", "wandb.mode=disabled"]
WIDTH = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def checkpoint(world: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(config(world, tmp_path_factory.mktemp("pretrained"), "data.workers=0"))


@pytest.fixture(scope="module")
def probe(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a linear probe, trained by the command."""
    run = tmp_path_factory.mktemp("runs") / "probe"
    assert main(["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", *QUICK]) == 0
    return run


def made_up(kind: str, target: np.ndarray, people: int = 90, seed: int = 0) -> tuple[Cohort, np.ndarray]:
    """Two volumes of each participant, half of them in TRAIN; features that target [people, T] decides."""
    rng = np.random.default_rng(seed)
    number = np.repeat(np.arange(people), 2)
    features = rng.normal(size=(2 * people, 2 * WIDTH)).astype(np.float32)
    features[:, : target.shape[1]] += 6 * (target - target.mean(axis=0))[number] / target.std(axis=0)
    person = np.array([f"p{n:03d}" for n in number])
    names = tuple(f"n{i}" for i in range(target.shape[1] if kind == "multilabel" else int(target.max()) + 1))
    names = ("value",) if kind == "regression" else names
    return Cohort(
        kind,
        names,
        np.arange(2 * people),
        np.array([TRAIN, VAL, EVALUATED, TRAIN])[number % 4],
        target[number],
        person,
        person,
    ), features


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


# ---- the grid


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
    head = build_head(cfg.head.kind, WIDTH, cohort.num_outputs, cfg.head.hidden, 0.0)
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
            share = schedule(
                epoch * per_epoch + place, 8 * per_epoch, cfg.optim.warmup_ratio, cfg.optim.min_lr_ratio
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * share
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


def test_the_kept_head_is_the_best_epoch_of_the_best_member(world: Path) -> None:
    """The participants of VAL have the other class: the less a member has learnt, the better it is there."""
    cohort, features = made_up("classification", classes(2))
    swapped = replace(
        cohort, target=np.where((cohort.fold == VAL)[:, None], 1 - cohort.target, cohort.target)
    )
    cfg = learning(world)
    chosen = train_grid(cfg, swapped, pooled(cohort, features), WIDTH, CPU)
    lines = chosen.validation["grid"]
    assert len(lines) == 4
    ranks = [(line["score"], -line["loss"]) for line in lines]
    best = lines[ranks.index(max(ranks))]
    assert {key: chosen.validation[key] for key in best} == best
    assert best["epoch"] == 1
    expected, _ = alone(cfg, swapped, features, best["learning_rate"], best["weight_decay"], 1)
    for name, value in chosen.head.named_parameters():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)
    normal = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU).validation
    assert normal["learning_rate"] == 3e-2
    assert normal["score"] > 0.8


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
    kept = scored[trained.validation["epoch"] - 1][1]
    assert kept == {
        "val/loss": trained.validation["loss"],
        "val/balanced_accuracy": trained.validation["score"],
    }


def test_evaluated_participants_change_nothing(world: Path) -> None:
    """Other targets and other features of theirs, and the head is the same bit for bit."""
    cohort, features = made_up("classification", classes(3))
    cfg = learning(world)
    first = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)
    evaluated = cohort.fold == EVALUATED
    target = np.where(evaluated[:, None], (cohort.target + 1) % 3, cohort.target)
    other = np.where(evaluated[:, None], np.float32(np.nan), features)
    second = train_grid(cfg, replace(cohort, target=target), pooled(cohort, other), WIDTH, CPU)
    assert first.validation == second.validation
    for a, b in zip(first.head.parameters(), second.head.parameters(), strict=True):
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


def test_training_stops_when_nothing_became_better(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort, features = made_up("classification", classes(2))
    swapped = replace(
        cohort, target=np.where((cohort.fold == VAL)[:, None], 1 - cohort.target, cohort.target)
    )
    epochs: list[int] = []
    update = frozen._update_bests

    def count(*args: Any) -> None:
        epochs.append(args[-1])
        update(*args)

    monkeypatch.setattr(frozen, "_update_bests", count)
    train_grid(learning(world, "finetune.patience=2"), swapped, pooled(cohort, features), WIDTH, CPU)
    assert epochs == [1, 2, 3]
    epochs.clear()
    train_grid(learning(world, "train.max_steps=8"), cohort, pooled(cohort, features), WIDTH, CPU)
    assert epochs == [1, 2]  # six updates an epoch; what was begun is scored too


def test_a_member_that_diverges_is_left_out(world: Path) -> None:
    cohort, features = made_up("regression", np.linspace(0, 1, 90)[:, None])
    cfg = learning(world, "head.learning_rates=[1e-2,1e30]", "head.weight_decays=[0]")
    result = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU).validation
    assert result["learning_rate"] == 1e-2
    cfg = learning(world, "head.learning_rates=[1e30]")
    with pytest.raises(UserError, match=r"head.learning_rates: expected one that trains, .* \[1e\+30\]"):
        train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)


def test_regression_predicts_in_the_labels_unit(world: Path) -> None:
    """Thickness in micrometres: far from 0, and with a spread that is not 1."""
    thickness = 280 + 25 * np.random.default_rng(3).normal(size=(90, 1))
    cohort, features = made_up("regression", thickness)
    inputs = pooled(cohort, features)
    cfg = learning(world, "head.learning_rates=[3e-2]", "train.epochs=40")
    trained = train_grid(cfg, cohort, inputs, WIDTH, CPU)
    val = np.flatnonzero(cohort.fold == VAL)
    predicted = trained.head(*inputs.read(val))[:, 0].detach().numpy()
    by_person = (predicted[0::2] + predicted[1::2]) / 2
    truth = cohort.target[val[::2], 0]
    assert trained.validation["score"] == pytest.approx(-np.mean((by_person - truth) ** 2), rel=1e-4)
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
    whole, parts = (train_grid(cfg, cohort, Tokens(tokens, size), WIDTH, CPU).head for size in (100, 5))
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
    cfg = learning(world, "finetune.label_smoothing=0.1", "head.learning_rates=[3e-2]", "train.epochs=30")
    trained = train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU)
    assert trained.validation["score"] > 0.7
    assert trained.head.last.out_features == (2 if kind == "multilabel" else 4)


def test_the_schedule_warms_up_and_ends(world: Path) -> None:
    shares = [schedule(step, 100, 0.1, 0.2) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == 1
    assert shares[55] == pytest.approx(0.6)
    assert shares[-1] == pytest.approx(0.2, abs=1e-3)
    assert schedule(0, 1, 0.0, 0.0) == 1


def test_without_a_schedule_the_rate_is_constant(world: Path) -> None:
    """optim.use_scheduler=false: the warm-up has nothing to say."""
    cohort, features = made_up("classification", classes(3))
    heads = []
    for ratio in (0.0, 0.9):
        cfg = learning(
            world, "optim.use_scheduler=false", f"optim.warmup_ratio={ratio}", "optim.cooldown_ratio=0"
        )
        heads.append(train_grid(cfg, cohort, pooled(cohort, features), WIDTH, CPU).head.state_dict())
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


# ---- kept features


class Counted(nn.Module):
    """An encoder that counts the volumes that go through it, and dies after so many batches."""

    def __init__(self, encoder: nn.Module, dies_after: int | None = None) -> None:
        super().__init__()
        self.encoder, self.dies_after = encoder, dies_after
        self.batches: list[int] = []

    def forward(self, volume: Tensor) -> Tensor:
        if len(self.batches) == self.dies_after:
            raise KeyboardInterrupt
        self.batches.append(len(volume))
        return self.encoder(volume)


@pytest.fixture
def kept(world: Path, tmp_path: Path) -> KeptFeatures:
    cfg = config(world, tmp_path / "runs" / "a", "data.workers=0", "eval.batch_size=4")
    store = PreparedStore.open(cfg.data.store)
    return KeptFeatures(Counted(random_encoder(cfg, 0)), cfg, store, RUNTIME, features_folder(cfg))


def batches(kept: KeptFeatures) -> list[int]:
    """Sizes of the batches computed since the last call."""
    assert isinstance(kept.encoder, Counted)
    computed, kept.encoder.batches = kept.encoder.batches, []
    return computed


def test_features_are_computed_once(kept: KeptFeatures, tmp_path: Path) -> None:
    rows = np.array([9, 2, 30, 5, 2, 11])
    first = kept.pooled(rows)
    assert batches(kept) == [4, 1]
    assert first.shape == (6, 96)
    assert first.dtype == np.float32
    assert isinstance(kept.encoder, Counted)
    expected = embed_rows(kept.encoder.encoder, kept.cfg, kept.store, rows, RUNTIME)
    np.testing.assert_allclose(first, expected, atol=1e-5)
    again = replace(kept)
    np.testing.assert_array_equal(again.pooled(rows[::-1]), first[::-1])
    assert batches(kept) == []
    again.pooled(np.array([9, 12]))
    assert batches(kept) == [1]
    assert Path(features_folder(kept.cfg)) == tmp_path / "runs" / "features"


def test_tokens_are_computed_once_and_in_half_precision(kept: KeptFeatures) -> None:
    rows = np.array([3, 0, 7, 8, 1])
    kept.keep_tokens(rows)
    assert batches(kept) == [4, 1]
    tokens, valid = kept.tokens(rows), kept.valid(rows)
    kept.keep_tokens(rows[:3])
    assert batches(kept) == []
    assert tokens.shape == (5, 24, 48)
    assert tokens.dtype == np.float16
    computed = {
        int(r): (t, v) for of, ts, vs in kept.compute(rows) for r, t, v in zip(of, ts, vs, strict=True)
    }
    for row, one, seen in zip(rows, tokens, valid, strict=True):
        np.testing.assert_allclose(one, computed[row][0], atol=2e-3)
        np.testing.assert_array_equal(seen, computed[row][1].bool())


def test_another_encoder_precision_or_volume_has_features_of_its_own(kept: KeptFeatures) -> None:
    rows = np.arange(4)
    first = kept.pooled(rows)
    with torch.no_grad():
        next(kept.encoder.parameters()).view(-1)[0] += 1.0
    changed = replace(kept).pooled(rows)
    assert np.abs(changed - first).max() > 1e-4
    assert batches(kept) == [4, 4]
    other = replace(kept, runtime=replace(RUNTIME, use_bf16=True))
    other.pooled(rows)
    assert batches(kept) == [4]
    for column, value in (("checksum", "00" * 16), ("valid_h1", 16.0), ("intensity_mean", 1.0)):
        store = PreparedStore.open(kept.store.url)
        store.index.loc[2, column] = value
        replace(kept, store=store).pooled(rows)
        assert batches(kept) == [1], column
    replace(kept).pooled(rows)
    assert batches(kept) == []


def test_a_kill_costs_one_batch(kept: KeptFeatures) -> None:
    assert isinstance(kept.encoder, Counted)
    rows = np.arange(12)
    for compute in (kept.pooled, kept.keep_tokens):
        kept.encoder.dies_after = 2
        with pytest.raises(KeyboardInterrupt):
            compute(rows)
        assert batches(kept) == [4, 4]
        kept.encoder.dies_after = None
        compute(rows)
        assert batches(kept) == [4]


def test_a_damaged_file_is_computed_again(kept: KeptFeatures, caplog: pytest.LogCaptureFixture) -> None:
    rows = np.arange(8)
    kept.keep_tokens(rows)
    first, tokens = kept.pooled(rows), kept.tokens(rows)
    batches(kept)
    for kind in ("pooled", "tokens"):
        file = sorted(Path(kept.url, kind).iterdir())[0]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    np.testing.assert_allclose(kept.pooled(rows), first, atol=1e-5)
    assert batches(kept) == [1]
    np.testing.assert_allclose(kept.tokens(rows), tokens, atol=2e-3)
    assert batches(kept) == [1]
    assert len(caplog.records) >= 2
    assert "its features are computed again" in caplog.text


def test_features_that_are_no_numbers_are_refused(kept: KeptFeatures) -> None:
    with torch.no_grad():
        for p in kept.encoder.parameters():
            p.fill_(np.nan)
    for compute in (kept.pooled, kept.keep_tokens):
        with pytest.raises(UserError, match="expected finite features of the encoder, found NaN"):
            compute(np.arange(2))


# ---- the command and the head's file


def test_the_command_trains_and_says_what_is_next(
    probe: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again with other rates: nothing is computed, and no evaluated row is asked for."""
    asked: list[np.ndarray] = []
    compute = KeptFeatures.pooled

    def spy(self: KeptFeatures, rows: np.ndarray) -> np.ndarray:
        asked.append(rows)
        return compute(self, rows)

    def forbidden(*_: object) -> Iterator[None]:
        raise AssertionError("computed again")

    monkeypatch.setattr(KeptFeatures, "pooled", spy)
    monkeypatch.setattr(KeptFeatures, "compute", forbidden)
    with pytest.raises(AssertionError, match="computed again"):
        main(["--config", TASK, f"model.checkpoint={checkpoint}", f"run.dir={probe}/far/off", *QUICK])
    monkeypatch.setattr(KeptFeatures, "compute", lambda self, rows: forbidden() if len(rows) else iter(()))
    run = probe.parent / "again"
    assert main(["--config", TASK, f"model.checkpoint={checkpoint}", f"run.dir={run}", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.count("kept") == 1
    assert f"next: python -m finetuning.evaluate --head {run}/checkpoints/head.pt" in out
    assert "Chosen on validation alone" in out
    store = PreparedStore.open(load_checkpoint_config(checkpoint).data.store)
    splits = [set(store.index.loc[rows, "split"]) for rows in asked]
    assert set.union(*splits) == {"train", "val"}  # the distance of features reads those of train alone


def test_a_probe_has_the_log_and_the_report_of_a_run(
    probe: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """metrics.jsonl, log.txt, the same rows to W&B, and a page; a second training begins them anew."""
    sent: list[tuple[int, dict[str, float]]] = []

    class Service:
        offline = True
        dir = "wandb/run/files"

        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((step, values))

        def finish(self, exit_code: int) -> None:
            sent.append((-1, {"failed": exit_code}))

    def start(cfg: Config, run_dir: Path) -> Service:
        (run_dir / "wandb_id.txt").touch(exist_ok=False)
        return Service()

    monkeypatch.setattr("utils.log.start_wandb", start)
    run = probe.parent / "logged"
    for _ in range(2):
        sent.clear()
        assert main(["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", *QUICK]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sent == [
        *((row["step"], {k: row[k] for k in row if k != "step"}) for row in rows),
        (-1, {"failed": 0}),
    ]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert [row["step"] for row in rows if "val/balanced_accuracy" in row] == [1, 2, 3]
    assert "step 3: " in (run / "log.txt").read_text()
    assert not (run / "no_checkpoint_yet").exists()
    counts = {"kept": 72, "rejected": {}, "synthetic": True, "run": {"audit": None}}
    counts |= {"by_device": {}, "by_protocol": {}}
    (run / "prepare_report.json").write_text(json.dumps(counts))
    report.main([str(run)])
    page = (run / "report.html").read_text()
    assert "Fine-tuning on 3D retinal OCT" in page
    assert "Score of the task" in page


def test_a_folder_of_another_run_keeps_its_files(
    probe: Path, checkpoint: str, world: Path, tmp_path: Path
) -> None:
    """Of a pre-training, of the same probe with other settings, of the same probe on another encoder."""
    before = {path: path.read_bytes() for path in probe.rglob("*") if path.is_file()}
    assert (probe / "config.yaml").is_file()
    assert (probe / "provenance.json").is_file()
    command = ["--config", TASK, f"run.dir={probe}"]
    with pytest.raises(UserError, match=r"head.hidden: expected 256 as the run began, found 16"):
        main([*command, "--checkpoint", checkpoint, *QUICK, "head.hidden=16"])
    other = save_checkpoint(config(world, tmp_path / "other", "data.workers=0", "seed=7"))
    with pytest.raises(UserError, match=r"expected a head of .*other.*, found one of .*use another run.dir"):
        main([*command, "--checkpoint", other, *QUICK, "seed=0"])
    assert {path: path.read_bytes() for path in probe.rglob("*") if path.is_file()} == before


def test_the_head_names_its_encoder_from_any_folder(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(checkpoint).parent)
    changes = [f"run.dir={tmp_path / 'relative'}", *QUICK]
    assert main(["--config", TASK, "--checkpoint", Path(checkpoint).name, *changes]) == 0
    monkeypatch.chdir(tmp_path)
    assert open_head(str(tmp_path / "relative")).state["encoder"]["url"] == checkpoint


def load_checkpoint_config(url: str) -> Config:
    from utils.config.load import config_of_yaml

    return config_of_yaml(load_checkpoint(url)["config"], url)


def test_the_head_loads_by_itself_and_predicts(probe: Path, checkpoint: str) -> None:
    head = open_head(str(probe))
    store = PreparedStore.open(head.cfg.data.store)
    rows = np.array([70, 3, 50, 51])
    scores = predict_rows(head, store, rows, RUNTIME)
    features = torch.from_numpy(embed_rows(head.encoder, head.cfg, store, rows, RUNTIME))
    scale = head.state["standardise"]
    weights = head.state["head"]
    outputs = ((features - scale["mean"]) / scale["std"]) @ weights["last.weight"].T + weights["last.bias"]
    np.testing.assert_allclose(scores, outputs.softmax(1), atol=1e-4)
    assert (head.kind, head.names) == ("classification", ("a", "b"))
    state = head.state
    assert state["task"] == {
        "kind": "classification",
        "names": ["a", "b"],
        "label_column": "study_group",
        "unit": "participant",
    }
    assert state["encoder"] == {"url": checkpoint, "checksum": load_checkpoint(checkpoint)["checksum"]}
    assert state["participants"]["train"] == [f"train{n:02d}" for n in range(16)]
    assert state["participants"]["val"] == [f"val{n:02d}" for n in range(8)]
    assert state["pretraining_participants"] == state["participants"]["train"]
    assert state["geometry"] == store.attrs["geometry"]
    assert state["normalisation"] == "zscore_valid"


def test_attentive_heads_go_the_same_way(checkpoint: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "attentive"
    words = [*QUICK, "head.kind=attentive", "train.epochs=2", f"run.dir={run}"]
    assert main(["--config", TASK, "--checkpoint", checkpoint, *words]) == 0
    head = open_head(str(run / "checkpoints" / "head.pt"))
    assert head.standardise is None
    store = PreparedStore.open(head.cfg.data.store)
    rows = np.array([60, 8, 61])
    scores = predict_rows(head, store, rows, RUNTIME)
    tokens, valid = next(
        (t, v)
        for _, t, v in KeptFeatures(head.encoder, head.cfg, store, RUNTIME, str(tmp_path / "none")).compute(
            rows
        )
    )
    np.testing.assert_allclose(scores, head.module(tokens, valid).softmax(1), atol=1e-3)


def test_a_fine_tuned_encoder_is_that_of_the_head(probe: Path, world: Path, tmp_path: Path) -> None:
    """The file has encoder weights: they are used, and the checkpoint that it came from is not needed."""
    from utils.checkpoint import CheckpointWriter

    head = open_head(str(probe))
    encoder = random_encoder(head.cfg, 5)
    state = {k: v for k, v in head.state.items() if k not in ("checksum", "format_version")}
    state |= {"encoder_weights": encoder.state_dict(), "encoder": {"url": "gone.pt", "checksum": "0"}}
    writer = CheckpointWriter(str(tmp_path), keep_last=None)
    writer.save(state | {"standardise": None}, ["head"])
    writer.close()
    tuned = open_head(str(tmp_path / "head.pt"))
    assert not tuned.is_frozen
    store = PreparedStore.open(head.cfg.data.store)
    rows = np.arange(3)
    features = torch.from_numpy(embed_rows(encoder, head.cfg, store, rows, RUNTIME))
    expected = tuned.module(features).softmax(1)
    before = set(Path(features_folder(head.cfg)).rglob("*"))
    np.testing.assert_allclose(predict_rows(tuned, store, rows, RUNTIME), expected, atol=1e-4)
    assert set(Path(features_folder(head.cfg)).rglob("*")) == before


def test_a_head_refuses_what_it_was_not_trained_on(probe: Path, world: Path, tmp_path: Path) -> None:
    other = save_checkpoint(config(world, tmp_path / "other"), step=41, participants=["val01", "test03"])
    with pytest.raises(CheckpointError, match=r"best_probe.pt: expected the encoder of .*head.pt, sha256"):
        open_head(str(probe), encoder_url=other)  # the same weights, another run
    with pytest.raises(UserError, match=r"split test in its pre-training, found 1 \(test03\)"):
        main(["--config", TASK, "--checkpoint", other, f"run.dir={tmp_path / 'run'}", *QUICK])
    head = open_head(str(probe))
    store = PreparedStore.open(head.cfg.data.store)
    for key, value in (("normalisation", "minmax"), ("geometry", {"image_size": [1, 2, 3]})):
        store.attrs = {**head.state, key: value}
        with pytest.raises(UserError, match=rf"{key}: expected .* of .*head.pt, found .*(minmax|1, 2, 3)"):
            predict_rows(head, store, np.arange(2), RUNTIME)


def test_a_changed_head_is_detected(probe: Path, tmp_path: Path) -> None:
    shutil.copytree(probe / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "head.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"head.pt: expected .* bytes with sha256 .*: the file is damaged"
    ):
        open_head(str(tmp_path))
    (tmp_path / "checkpoints" / "head.json").unlink()
    with pytest.raises(CheckpointError, match="expected its seal"):
        open_head(str(tmp_path))


def test_a_head_is_no_encoder_and_an_encoder_no_head(probe: Path, checkpoint: str) -> None:
    with pytest.raises(CheckpointError, match=r"best_probe.pt: expected the file of a head"):
        open_head(checkpoint)
    head = str(probe / "checkpoints" / "head.pt")
    with pytest.raises(
        CheckpointError, match=r"head.pt: expected a checkpoint of pretraining.train, found no"
    ):
        main(["--config", TASK, "--checkpoint", head])


def test_the_encoder_is_bit_identical_after_probing(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[nn.Module, str]] = []

    def remember(*args: Any) -> nn.Module:
        encoder = pretrained_encoder(*args)
        seen.append((encoder, weights_digest(encoder)))
        return encoder

    monkeypatch.setattr(frozen, "pretrained_encoder", remember)
    before = load_checkpoint(checkpoint)["checksum"]
    words = [*QUICK, "head.kind=attentive", "train.epochs=1", f"run.dir={tmp_path / 'runs' / 'a'}"]
    assert main(["--config", TASK, "--checkpoint", checkpoint, *words]) == 0
    ((encoder, digest),) = seen
    assert weights_digest(encoder) == digest
    assert not any(p.requires_grad for p in encoder.parameters())
    assert load_checkpoint(checkpoint)["checksum"] == before


def test_weights_that_do_not_fit_are_named(world: Path, checkpoint: str) -> None:
    state = load_checkpoint(checkpoint)
    cfg = load_checkpoint_config(checkpoint)
    partial = {k: v for k, v in state["model"].items() if ".blocks.1." not in k}
    with pytest.raises(
        CheckpointError,
        match=r"x.pt: weights of model.size ti: expected the \d+ tensors of the model; the file lacks 12: "
        r"blocks.1.norm1.weight, blocks.1.norm1.bias, blocks.1.attn.qkv.weight, ...$",
    ):
        pretrained_encoder(cfg, {**state, "model": partial}, "x.pt")
    foreign = {**state["model"], "target_encoder.cls_token": torch.zeros(1)}
    foreign["target_encoder.norm.weight"] = torch.zeros(7)
    with pytest.raises(
        CheckpointError,
        match=r"has in excess 1: cls_token; has in another shape 1: norm.weight \(\[7\] for \[48\]\)$",
    ):
        pretrained_encoder(cfg, {**state, "model": foreign}, "x.pt")
    with pytest.raises(CheckpointError, match="found no model"):
        pretrained_encoder(cfg, {"config": "", "normalisation": "", "participants": []}, "x.pt")


def test_mistakes_are_one_line(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            run_cli(lambda: main(["--config", TASK, *words]))
        assert stop.value.code == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    assert "model.checkpoint: expected a checkpoint or a run's folder, found null" in fails()
    assert "found no such file" in fails("--checkpoint", str(tmp_path / "absent.pt"))
    use = ("--checkpoint", checkpoint)
    assert "train.ckpt_dir: expected a folder for the head" in fails(*use, "train.ckpt_dir=null")
    assert "model.size: expected s of the configuration, found ti" in fails(*use, "model.size=s")
    assert "eval.protocol: expected official, found crossfit" in fails(*use, "eval.protocol=crossfit")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "expected one process" in fails(*use, "data.workers=0")


def test_a_key_that_does_nothing_is_refused(checkpoint: str, tmp_path: Path) -> None:
    """On the command line and in a file; what a file must hold, and what is as it would be, is not."""

    def refused(file: Path | str, *words: str) -> str:
        with pytest.raises(ConfigError) as error:
            main(["--config", str(file), "--checkpoint", checkpoint, f"run.dir={tmp_path / 'run'}", *words])
        assert not (tmp_path / "run").exists()
        return str(error.value)

    def passes(file: Path | str, *words: str) -> None:
        """As far as the next mistake."""
        assert "train.ckpt_dir: expected a folder" in refused(file, *words, "train.ckpt_dir=null")

    assert refused(TASK, "optim.base_lr=0.5") == (
        "command line: optim.base_lr: expected the file's own with finetune.encoder=frozen, which does not "
        "read it (head.learning_rates are tried), found 0.5"
    )
    assert "augment.gamma: expected its default 0.3" in refused(TASK, "augment.gamma=0.1")
    assert "method.drop_path" in refused(TASK, "method.drop_path=0.2")
    assert "train.keep_last: expected its default 2" in refused(TASK, "train.keep_last=9")
    assert "optim.cooldown_ratio" in refused(TASK, "optim.cooldown_ratio=0.1")
    passes(TASK, "train.keep_last=2", "train.log_every_steps=1", "head.learning_rates=[1]")
    tuned = str(Path(TASK).with_name("cls_finetune.yaml"))
    assert "found [0.1]" in refused(tuned, "head.learning_rates=[0.1]")
    assert "(no pictures are sent), found 5" in refused(tuned, "wandb.images_every_steps=5")
    assert "head.weight_decays: expected its default [0.0001, 0.01, 0.1]" in refused(
        tuned, "head.weight_decays=[0.5]"
    )
    passes(tuned, "optim.base_lr=0.5", "train.keep_last=9", "augment.gamma=0.1", "finetune.layer_decay=0.5")
    layers = str(Path(TASK).with_name("layers.yaml"))
    assert "with task.kind=layers, which does not" in refused(layers, "head.learning_rates=[0.1]")
    passes(layers, "optim.base_lr=0.5", "optim.clip_grad_norm=2", "train.per_core_batch_size=4")
    own = tmp_path / "own.yaml"
    own.write_text(Path(TASK).read_text().replace("finetune:\n", "finetune:\n  layer_decay: 0.5\n"))
    assert refused(own).startswith(f"{own}: finetune.layer_decay: expected its default 0.75 with")
    assert not {key for table in UNREAD.values() for key in table} - {
        *(name for name, _, _ in leaves(Config())), "augment.",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.learning_rates=[]", "head.learning_rates: expected one number above 0 or more"),
        ("head.learning_rates=[0.1,-1]", "head.learning_rates"),
        ("head.weight_decays=[-1]", "head.weight_decays: expected one number of 0 or more"),
        (
            "head.learning_rates=[1e-3,0.001]",
            "head.learning_rates: expected different numbers, found .*0.001",
        ),
        ("head.weight_decays=[0.1,0,0.10]", "head.weight_decays: expected different numbers"),
        ("finetune.mixup=0.2", "finetune.mixup: expected 0 with finetune.encoder=frozen"),
        ("finetune.unfreeze_at_epoch=2", "finetune.unfreeze_at_epoch: expected 0"),
    ],
)
def test_rules_of_the_head(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, [override])


def test_a_value_has_no_labels_to_smooth() -> None:
    with pytest.raises(ConfigError, match=r"finetune.label_smoothing: expected 0 with a regression"):
        load_config(CONFIG, ["task.kind=regression", "finetune.label_smoothing=0.1"])
