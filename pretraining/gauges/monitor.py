"""Gauges: numbers that tell learning from collapse, where the loss cannot, and two checks of the machinery.

In: what a training step computed anyway. Out: the metrics of one log line. pretraining.gauges.skill compares
the prediction with baselines, pretraining.gauges.alarms reads the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from models.probes.features import rankme
from models.vjepa3d import VJEPA3D, Output
from pretraining.gauges.alarms import Alarms
from pretraining.gauges.skill import BASELINE_FLOOR, Read, Scored, SkillGauge, as_it_is, evenly_spaced
from utils.errors import UserError
from utils.runtime.processes import ALONE, Group

RANK_TOKENS = 512  # of a global batch; the rank is at most one less


class LeakError(UserError):
    """The context encoder's output depends on voxels that it must not see. Another start would meet it again,
    so a person has to look: it ends with the code of a user's mistake.
    """


class FrozenTargetError(UserError):
    """The target encoder did not move although its momentum is below 1; see LeakError."""


class Gauges:
    """The training gauges of one global batch, whatever its micro-batches: `observe` each, then `finish`.

    `global_batch_size` shares RANK_TOKENS out among the samples. The processes of `group` share the batch,
    and all of them get the same gauges; `to_torch` is the runtime's. `has_fixed_targets`: of no weights;
    `has_neighbours`: the loss of method.neighbour_weight is trained; `has_hidden`: something is.
    """

    def __init__(
        self,
        skill: SkillGauge,
        global_batch_size: int,
        group: Group = ALONE,
        to_torch: Read = as_it_is,
        *,
        has_fixed_targets: bool,
        has_neighbours: bool = False,
        has_hidden: bool = True,
    ) -> None:
        self.skill, self.group, self.to_torch = skill, group, to_torch
        self.alarms = Alarms(has_fixed_targets, has_neighbours, has_hidden)
        self.tokens_per_sample = -(-RANK_TOKENS // global_batch_size)
        self._begin(measure=False)

    def _begin(self, measure: bool) -> None:
        self.measure = measure
        self._remember: list[tuple[Tensor, Tensor, Tensor]] = []
        self._scored: list[Scored] = []
        self._sums: list[tuple[Tensor, Tensor, Tensor]] = []  # count, sum, sum of squares
        self._pooled: list[Tensor] = []
        self._tokens: list[tuple[Tensor, Tensor]] = []  # some context tokens, and which are valid

    def begin(self, *, measure: bool) -> None:
        """Start a step; without `measure` the targets are remembered and nothing else is computed."""
        self._begin(measure)

    @torch.no_grad()
    def observe(self, out: Output, batch: dict[str, Tensor]) -> None:
        """One micro-batch after its forward pass."""
        positions = self.skill.positions_P
        local = (out.target_all_BNE[:, positions], batch["token_valid"][:, positions], batch["row"])
        targets, valid, row = map(self.group.gather, local)
        self._remember.append((targets, valid, row))
        if not self.measure:
            return
        self._scored.append(
            self.skill.select(out.prediction_BME, out.target_BME, batch["target"], batch["target_valid"])
        )
        features = out.context_BKE.float()
        is_valid_BK = batch["context_valid"] > 0
        weight_BK1 = is_valid_BK.float().unsqueeze(-1)
        unit = F.normalize(features, dim=-1) * weight_BK1
        self._sums.append((weight_BK1.sum(), unit.sum((0, 1)), unit.square().sum((0, 1))))
        total = (features * weight_BK1).sum(1)
        self._pooled.append(F.normalize(total / weight_BK1.sum(1).clamp(min=1), dim=-1))
        chosen = evenly_spaced(features.shape[1], self.tokens_per_sample).to(features.device)
        self._tokens.append((features[:, chosen].flatten(0, 1), is_valid_BK[:, chosen].flatten()))

    def finish(self) -> dict[str, float | None]:
        """End the step; with `measure` its gauges:

        train/skill_mean, train/skill_position: null until the baselines rest on enough samples.
        train/volume_share: loss of the best vector per position / loss of the best constant, both over the
        targets: what a position does not tell about them. 0: the targets hold nothing of the volume.
        train/rankme: effective rank of about RANK_TOKENS context tokens; null when one is not finite.
        train/feature_std: std over all valid tokens of L2-normalised features, times sqrt(E); near 1 is
        healthy. train/feature_cosine: mean cosine between different samples' mean features; near 1 is
        collapsed.
        """
        result: dict[str, float | None] = {}
        if self.measure:
            to_torch = self.to_torch
            rows = torch.cat([to_torch(row) for _, _, row in self._remember])
            losses = self.group.sum(self.skill.losses(self._scored, rows, to_torch))
            prediction, constant, position, tokens = losses.tolist()
            is_yardstick = {
                name: loss > BASELINE_FLOOR * tokens
                for name, loss in (("mean", constant), ("position", position))
            }
            result["train/skill_mean"] = 1 - prediction / constant if is_yardstick["mean"] else None
            result["train/skill_position"] = 1 - prediction / position if is_yardstick["position"] else None
            result["train/volume_share"] = position / constant if is_yardstick["mean"] else None
            result["train/rankme"] = self._rank()
            sums = (torch.stack([*map(to_torch, part)]).sum(0) for part in zip(*self._sums, strict=True))
            count, first, second = map(self.group.sum, sums)
            variance = (second / count - (first / count).square()).clamp(min=0)
            result["train/feature_std"] = float(variance.sqrt().mean() * math.sqrt(len(first)))
            pooled = self.group.gather(torch.cat([*map(to_torch, self._pooled)]))
            if len(pooled) > 1:
                cosine = pooled @ pooled.T
                pairs = len(pooled) * (len(pooled) - 1)
                result["train/feature_cosine"] = float((cosine.sum() - cosine.diagonal().sum()) / pairs)
        for targets, valid, row in self._remember:
            self.skill.add(targets, valid, row)
        self._begin(measure=False)
        return result

    def _rank(self) -> float | None:
        features, is_valid = (
            self.group.gather(torch.cat([*map(self.to_torch, parts)])).cpu()
            for parts in zip(*self._tokens, strict=True)
        )
        features = features[is_valid]
        return rankme(features) if bool(torch.isfinite(features).all()) else None

    def state_dict(self) -> dict[str, Any]:
        return {"skill": self.skill.state_dict(), "alarms": self.alarms.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skill.load_state_dict(state["skill"])
        self.alarms.load_state_dict(state["alarms"])


@torch.no_grad()
def target_drift(model: VJEPA3D) -> Tensor:
    """||encoder - target|| / ||target|| over all parameters: how far the target lags behind."""
    squares = [
        ((e - t).float().square().sum(), t.float().square().sum())
        for e, t in zip(model.encoder.parameters(), model.target_encoder.parameters(), strict=True)
    ]
    apart, size = (torch.stack(values).sum() for values in zip(*squares, strict=True))
    return (apart / size).sqrt()


@torch.no_grad()
def update_ratio(optimizer: torch.optim.AdamW) -> Tensor:
    """||last update|| / ||weights|| over the matrices of the full rate, read from AdamW's moments; weight
    decay left out.

    Around 1e-2 at the start of a run and less later; a skipped update leaves that of the one before, and
    counts 0 where there was none.
    """
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    update, size = [], []
    for weight in group["params"]:
        state = optimizer.state[weight]
        count = state["step"].clamp(min=1)
        first = state["exp_avg"] / (1 - beta1**count)
        second = state["exp_avg_sq"] / (1 - beta2**count)
        update.append((first / (second.sqrt() + group["eps"])).square().sum())
        size.append(weight.square().sum())
    moved, whole = (torch.stack(values).sum() for values in (update, size))
    return group["lr"] * (moved / whole).sqrt()


def voxels_of_tokens(is_token_BN: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """A mask over tokens [B, N] as a mask over voxels [B, 1, D, H, W]."""
    d, h, w = patch
    tokens = rearrange(is_token_BN, "b (gd gh gw) -> b 1 gd gh gw", gd=grid[0], gh=grid[1])
    return tokens.repeat_interleave(d, 2).repeat_interleave(h, 3).repeat_interleave(w, 4)


def check_disjoint(batch: dict[str, Tensor]) -> None:
    """Raise LeakError for the first volume of a batch on the host that has a token in context and target."""
    for row, context, target in zip(batch["row"], batch["context"], batch["target"], strict=True):
        shared = np.intersect1d(context, target)
        if len(shared):
            raise LeakError(
                f"context sees targets: row {int(row)}: expected disjoint context and target tokens, found "
                f"{len(shared)} in both (the first: {int(shared[0])}); check data_setup/masks.py"
            )


@torch.no_grad()
def check_no_leak(
    model: VJEPA3D,
    view_BCDHW: Tensor,
    context_BK: Tensor,
    target_BM: Tensor,
    mark_step: Callable[[], None] = lambda: None,
) -> None:
    """Change every voxel that the context encoder must not see; raises LeakError unless its output is bit-
    identical.

    Which voxels: `Recipe.hidden`. `mark_step` is the runtime's:
    two compiled programs may round differently, so both outputs come from one.
    """
    is_hidden = torch.zeros(
        len(view_BCDHW), model.encoder.num_tokens, dtype=torch.bool, device=view_BCDHW.device
    )
    if model.recipe.hidden == "targets":
        is_hidden = is_hidden.scatter(1, target_BM, True)
    else:
        is_hidden = ~is_hidden.scatter(1, context_BK, True)
    hidden = voxels_of_tokens(is_hidden, model.encoder.grid, model.encoder.patch_embed.patch)
    changed = torch.where(hidden, view_BCDHW + 1.0 + view_BCDHW.square(), view_BCDHW)
    mark_step()
    before = model.encode_context(view_BCDHW, context_BK, target_BM, None)
    mark_step()
    after = model.encode_context(changed, context_BK, target_BM, None)
    mark_step()
    if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
        difference = float((before - after).abs().nan_to_num().max())
        raise LeakError(
            "context sees targets: only hidden voxels changed, expected a bit-identical context output, "
            f"found a difference of {difference:.3g}; check how models/vit3d.py drops hidden tokens"
        )


class TargetMotion:
    """Alarm 'target is not moving': compares a target parameter between two calls."""

    def __init__(self, model: VJEPA3D, to_torch: Read = as_it_is) -> None:
        self.to_torch = to_torch
        self._before = self._probe(model)

    def _probe(self, model: VJEPA3D) -> Tensor:
        encoder = model.target_encoder
        weight = encoder.get_parameter(f"blocks.{encoder.depth - 1}.mlp.fc2.weight")
        return self.to_torch(weight.detach()).to("cpu", copy=True)

    def check(self, model: VJEPA3D, updates: int) -> None:
        """Raises FrozenTargetError when nothing moved although `updates` should have moved the target
        since the last call: updates that were not skipped, with a momentum below 1.
        """
        now = self._probe(model)
        if updates > 0 and torch.equal(now, self._before):
            raise FrozenTargetError(
                f"target is not moving: {updates} updates left the target encoder bit-identical, expected it "
                "to follow the encoder; check train/ema_momentum and that update_target is called"
            )
        self._before = now
