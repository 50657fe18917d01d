"""Heads on frozen features: all pairs of learning rate and weight decay, trained together.

In: features of the training and validation volumes (finetuning.features) and their cohort. Out: the one head
that is best on validation, as it was after its best epoch. Every member of the grid starts from the same
weights, sees the same batches in the same order and has its own AdamW; the parameters of all members are
stacked, and each batch goes through them once. Evaluated volumes are not looked at: no feature of theirs is
even read. The log has the numbers of the pair that leads on validation, which another may take over.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.func import functional_call

from data_setup.loader import EVALUATION_BATCH
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.source import Source
from finetuning.features.kept import KeptFeatures, pooled_of_tokens, pretrained_encoder
from finetuning.heads.confidence import calibrate, fit_familiarity
from finetuning.heads.epochs import Best, Epochs
from finetuning.heads.head_file import Standardise, head_state, write_head
from finetuning.heads.objective import METRICS, Task, judge, metric_name, row_losses, to_scores
from models.heads import build_head, reads_tokens, rescale_output
from models.optimizer import warmup_cosine
from utils.config.schema import Config
from utils.errors import UserError
from utils.run.folder import NO_CHECKPOINT_YET, claim_run_dir
from utils.run.log import AnyLog, NoLog, log_anew
from utils.runtime.single import Runtime

Member = dict[str, Tensor]  # parameters of a head by name


class PooledInputs:
    """Pooled features of the training and validation volumes, standardised on the training ones."""

    def __init__(
        self, features: np.ndarray, cohort: Cohort, places: np.ndarray, device: torch.device
    ) -> None:
        """`features` [m, 2E] are those of the cohort's rows at `places` [m]."""
        scaler = StandardScaler().fit(features[cohort.fold[places] == TRAIN].astype(np.float64))
        self.standardise = Standardise(scaler.mean_, scaler.scale_)
        self.at_once = len(places)  # volumes that fit into memory together
        self._place_of = np.full(len(cohort.rows), -1)
        self._place_of[places] = np.arange(len(places))
        self._features = self.standardise(torch.from_numpy(features).to(device))

    def read(self, places: np.ndarray) -> tuple[Tensor, ...]:
        """The head's arguments for the volumes at these places of the cohort's rows."""
        return (self._features[torch.from_numpy(self._place_of[places]).to(self._features.device)],)


@dataclass(frozen=True)
class TokenInputs:
    kept: KeptFeatures
    cohort: Cohort
    device: torch.device
    at_once: int

    def read(self, places: np.ndarray) -> tuple[Tensor, ...]:
        rows = self.cohort.rows[places]
        tokens = torch.from_numpy(self.kept.tokens(rows)).to(self.device).float()
        return tokens, torch.from_numpy(self.kept.valid(rows)).to(self.device)


Inputs = PooledInputs | TokenInputs  # what a head reads of some volumes


class Grid:
    """Members of a head: separate parameters, one AdamW whose groups have the members' rates."""

    def __init__(
        self, head: nn.Module, pairs: Sequence[tuple[float, float]], cfg: Config, together: bool
    ) -> None:
        """`pairs` of learning rate and weight decay; only matrices decay. `together`: one forward pass for
        all members, whose activations must fit into memory; else one member after the other.
        """
        self.head, self.pairs = head, pairs
        self.members = [
            {name: p.detach().clone().requires_grad_() for name, p in head.named_parameters()} for _ in pairs
        ]
        groups = [
            {"params": chosen, "lr": rate, "weight_decay": decay if is_matrix else 0.0, "peak": rate}
            for (rate, decay), member in zip(pairs, self.members, strict=True)
            for is_matrix in (True, False)
            if (chosen := [p for p in member.values() if (p.ndim > 1) == is_matrix])
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=cfg.optim.betas, eps=cfg.optim.eps)
        everyone = range(len(pairs))
        self.parts = [list(everyone)] if together else [[number] for number in everyone]

    def outputs(self, part: list[int], inputs: tuple[Tensor, ...]) -> Tensor:
        """[G, B, C] of the G members of a part."""
        if len(part) == 1:
            return functional_call(self.head, self.members[part[0]], inputs)[None]
        stacked = {name: torch.stack([self.members[g][name] for g in part]) for name in self.members[0]}

        def one(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.head, parameters, inputs)

        return torch.vmap(one, randomness="same")(stacked)

    def step(self, inputs: Inputs, places: np.ndarray, task: Task, scale: float) -> Tensor:
        """One update of all members with the volumes at these places, `inputs.at_once` of them at a time;
        `scale`: the schedule's share of each learning rate. Returns the members' losses [G].
        """
        loss_G = torch.zeros(len(self.pairs), device=task.target.device)
        self.head.train()
        self.optimizer.zero_grad()
        for start in range(0, len(places), inputs.at_once):
            some = places[start : start + inputs.at_once]
            batch = inputs.read(some)
            for part in self.parts:
                losses_GBT = row_losses(task.kind, self.outputs(part, batch), task.target[some])
                mean_G = (losses_GBT * task.weight[some]).mean(dim=2).sum(dim=1) / len(places)
                mean_G.sum().backward()  # no member's gradient reaches another
                loss_G[part] += mean_G.detach()
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        self.optimizer.step()
        return loss_G

    @torch.no_grad()
    def predict(self, inputs: Inputs, places: np.ndarray) -> Tensor:
        """Outputs of all members [G, n, C] at these places, on the host."""
        self.head.eval()
        batches = []
        for start in range(0, len(places), inputs.at_once):
            batch = inputs.read(places[start : start + inputs.at_once])
            batches.append(torch.cat([self.outputs(part, batch) for part in self.parts]).cpu())
        return torch.cat(batches, dim=1)


def train_grid(
    cfg: Config,
    cohort: Cohort,
    inputs: Inputs,
    width: int,
    device: torch.device,
    run_log: AnyLog | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train all pairs of head.learning_rates x head.weight_decays; the best on VAL, and how it was chosen.

    The score is that of finetuning.heads.objective.METRICS on units, a tie goes to the smaller loss, then to
    the first pair. Ends after train.epochs (or max_steps), or when for finetune.patience epochs no member
    became better. Raises UserError where every member's outputs stopped being numbers.
    """
    train = np.flatnonzero(cohort.fold == TRAIN)
    task, run_log = Task.of(cfg, cohort, device), run_log or NoLog()
    epochs = epochs_of(cfg, cohort)
    calendar = epochs.calendar
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(cfg.seed)
        head = build_head(cfg.head.kind, width, cohort.num_outputs, cfg.head.hidden).to(device)
        pairs = list(product(cfg.head.learning_rates, cfg.head.weight_decays))
        grid = Grid(head, pairs, cfg, together=not reads_tokens(cfg.head.kind))
        bests = [Best[Member]() for _ in pairs]
        for step, chosen in epochs.batches():
            share, done = warmup_cosine(cfg.optim, step, calendar.total, peak=1.0), step + 1
            loss_G = grid.step(inputs, train[chosen], task, share)
            run_log.advance()
            if calendar.logs(done):
                leader = _leader(bests)
                rate = pairs[leader][0] * share
                run_log.metrics(done, {"train/loss": float(loss_G[leader]), "train/lr": rate})
            if calendar.validates(done):
                latest = _update_bests(bests, grid, cohort, inputs, task.scale, done, epochs.number(done))
                score, loss = latest[_leader(bests)]
                run_log.metrics(done, {"val/loss": loss, metric_name(METRICS[cohort.kind]): score})
                if epochs.is_over(done, bests):
                    break
    return _chosen(grid, bests, task)


def epochs_of(cfg: Config, cohort: Cohort) -> Epochs:
    return Epochs.of(cfg, int((cohort.fold == TRAIN).sum()))


def _update_bests(
    bests: list[Best[Member]],
    grid: Grid,
    cohort: Cohort,
    inputs: Inputs,
    scale: tuple[float, float],
    done: int,
    epoch: int,
) -> list[tuple[float, float]]:
    """Score every member on VAL, and keep those that became better; returns all scores and losses."""
    outputs_GnC = grid.predict(inputs, np.flatnonzero(cohort.fold == VAL)).double()
    latest = []
    for best, member, outputs_nC in zip(bests, grid.members, outputs_GnC, strict=True):
        score, loss = math.nan, math.nan
        if bool(outputs_nC.isfinite().all()):  # else its rate is too high
            score, loss = judge(cohort, outputs_nC, scale)
        best.offer((score, -loss), epoch, done, partial(_copy, member))
        latest.append((score, loss))
    return latest


def _copy(member: Member) -> Member:
    return {name: p.detach().clone() for name, p in member.items()}


def _leader(bests: Sequence[Best[Member]]) -> int:
    """The member that has been best on validation, the first of several; the first where none has been."""
    return max(range(len(bests)), key=lambda g: bests[g].rank)


def _chosen(grid: Grid, bests: list[Best[Member]], task: Task) -> tuple[nn.Module, dict[str, Any]]:
    """The best member as a head that predicts in the label's own unit."""
    number = _leader(bests)
    best = bests[number]
    if best.weights is None:
        raise UserError(
            "head.learning_rates: expected one that trains, found outputs that are no numbers with each of "
            f"{sorted({rate for rate, _ in grid.pairs})}"
        )
    head = copy.deepcopy(grid.head).eval()
    head.load_state_dict(best.weights)
    if task.kind == "regression":
        rescale_output(head, *task.scale)
    lines = [
        {"learning_rate": rate, "weight_decay": decay}
        | {"epoch": b.epoch, "score": b.rank[0], "loss": -b.rank[1]}
        for (rate, decay), b in zip(grid.pairs, bests, strict=True)
    ]
    return head, {"metric": METRICS[task.kind], **lines[number], "grid": lines}


@torch.no_grad()
def head_outputs(head: nn.Module, inputs: Inputs, places: np.ndarray) -> Tensor:
    """Outputs of a head [n, C] at these places, on the host."""
    head.eval()
    starts = range(0, len(places), inputs.at_once)
    return torch.cat([head(*inputs.read(places[s : s + inputs.at_once])).cpu() for s in starts])


def head_inputs(
    kept: KeptFeatures, cohort: Cohort, folds: tuple[int, ...] = (TRAIN, VAL)
) -> tuple[Inputs, Standardise | None]:
    """What a head reads of these folds, computed where it is not kept, and how it is standardised."""
    places = np.flatnonzero(np.isin(cohort.fold, folds))
    device = kept.runtime.device
    if reads_tokens(kept.cfg.head.kind):
        kept.keep_tokens(cohort.rows[places])
        return TokenInputs(kept, cohort, device, EVALUATION_BATCH), None
    inputs = PooledInputs(kept.pooled(cohort.rows[places]), cohort, places, device)
    return inputs, inputs.standardise


def scores_of_fold(kept: KeptFeatures, cohort: Cohort) -> tuple[np.ndarray, float]:
    """Scores of all volumes [n, C] by the head that this cohort trains and chooses, and its score on VAL."""
    inputs, _ = head_inputs(kept, cohort, (TRAIN, VAL, EVALUATED))
    head, validation = train_grid(kept.cfg, cohort, inputs, kept.feature_width, kept.runtime.device)
    outputs = head_outputs(head.to(kept.runtime.device), inputs, np.arange(len(cohort.rows)))
    return to_scores(cohort.kind, outputs.double()).numpy(), float(validation["score"])


def train_frozen(
    source: Source, store: PreparedStore, cohort: Cohort, runtime: Runtime
) -> tuple[str, dict[str, Any]]:
    """Train a head on a checkpoint's features, with the log of a run; returns its file's URL and content."""
    cfg = source.cfg
    encoder = pretrained_encoder(cfg, source.state, source.url)
    kept = KeptFeatures(encoder, cfg, store, runtime)
    inputs, standardise = head_inputs(kept, cohort)
    (Path(cfg.run.dir) / "evaluation.json").unlink(missing_ok=True)  # the verdict of an earlier head
    total = epochs_of(cfg, cohort).calendar.total
    with log_anew(cfg, total, synthetic=bool(store.attrs["synthetic"])) as run_log:
        head, validation = train_grid(cfg, cohort, inputs, kept.feature_width, runtime.device, run_log)
        is_val, is_train = cohort.fold == VAL, cohort.fold == TRAIN
        outputs = head_outputs(head, inputs, np.flatnonzero(is_val))
        pooled_of = partial(pooled_of_tokens, kept) if reads_tokens(cfg.head.kind) else kept.pooled
        features = pooled_of(cohort.rows[is_train])
        state = head_state(
            source,
            store,
            cohort,
            head,
            standardise,
            validation,
            calibration=calibrate(cohort.kind, outputs, cohort.target[is_val], cohort.person[is_val]),
            familiarity=fit_familiarity(features, cohort.person[is_train]),
        )
        url = write_head(cfg, state)
        claim_run_dir(cfg, runtime)
        (Path(cfg.run.dir) / NO_CHECKPOINT_YET).unlink(missing_ok=True)
        run_log.artifact("head", url)
    return url, state
