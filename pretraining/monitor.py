"""Gauges: numbers that tell learning from collapse, where the loss cannot.

`skill_mean` and `skill_position` are 1 - loss / loss of a baseline that sees nothing of the volume: the
best constant vector, and the best vector of each token position (medians for L1, means for the normalised
squared error, estimated from other samples). Only skill_position counts as learning: OCT features are
mostly position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from models.vjepa3d import VJEPA3D, Output, per_token_l1, per_token_normalised_l2

BASELINE_FLOOR = 1e-6  # under this a baseline loss is no yardstick
MIN_SAMPLES = 16  # other samples that a baseline must rest on


class LeakError(RuntimeError):
    """The context encoder's output depends on voxels that it must not see."""


class FrozenTargetError(RuntimeError):
    """The target encoder did not move although its momentum is below 1."""


class SkillGauge:
    """A ring of recent targets at fixed token positions, and the skill of predictions against baselines
    made of them. Padding tokens are in no baseline.
    """

    def __init__(
        self,
        num_tokens: int,
        width: int,
        recipe: str,
        device: torch.device,
        capacity: int = 128,
        positions: int = 64,
    ) -> None:
        spread = torch.linspace(0, num_tokens - 1, min(positions, num_tokens)).round().long().unique()
        self.positions_P = spread.to(device)
        self.slot_of_token_N = torch.full((num_tokens,), -1, dtype=torch.long, device=device)
        self.slot_of_token_N[self.positions_P] = torch.arange(len(spread), device=device)
        self.ring_RPE = torch.zeros(capacity, len(spread), width, device=device)
        self.valid_RP = torch.zeros(capacity, len(spread), dtype=torch.bool, device=device)
        self.row_R = torch.full((capacity,), -1, dtype=torch.long, device=device)
        self.distance: Callable[[Tensor, Tensor], Tensor]
        if recipe == "methods":
            self.distance, self.centre = per_token_normalised_l2, torch.nanmean
        else:
            self.distance, self.centre = per_token_l1, lambda x, dim: x.nanmedian(dim).values
        self.added = 0

    def add(self, targets_BPE: Tensor, valid_BP: Tensor, row_B: Tensor) -> None:
        """Remember targets at `positions_P`; `valid_BP` bool, `row_B` says which volumes they are of."""
        capacity = len(self.row_R)
        count = min(len(row_B), capacity)
        slots = torch.arange(self.added, self.added + count, device=row_B.device) % capacity
        self.ring_RPE[slots] = targets_BPE[:count].float()
        self.valid_RP[slots] = valid_BP[:count]
        self.row_R[slots] = row_B[:count]
        self.added += count

    @torch.no_grad()
    def losses(
        self, prediction_BME: Tensor, target_BME: Tensor, target_BM: Tensor, valid_BM: Tensor, row_B: Tensor
    ) -> Tensor:
        """Summed losses [4] of the prediction, the constant and the per-position baseline, over the valid
        target tokens whose position has MIN_SAMPLES valid entries of other volumes.
        """
        total = torch.zeros(4, device=row_B.device)
        for b in range(len(row_B)):
            others = (self.row_R >= 0) & (self.row_R != row_B[b])
            known_P = self.valid_RP[others].sum(0) >= MIN_SAMPLES
            slot_M = self.slot_of_token_N[target_BM[b]]
            use = (slot_M >= 0) & (valid_BM[b] > 0) & known_P[slot_M.clamp(min=0)]
            if not bool(use.any()):
                continue
            ring = self.ring_RPE[others].masked_fill(~self.valid_RP[others].unsqueeze(-1), math.nan)
            target = target_BME[b, use]
            constant = self.centre(ring.flatten(0, 1), dim=0).expand_as(target)
            per_position = self.centre(ring[:, slot_M[use]], dim=0)
            for i, guess in enumerate((prediction_BME[b, use], constant, per_position)):
                total[i] += self.distance(guess, target).sum()
            total[3] += len(target)
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self.ring_RPE, "valid": self.valid_RP, "row": self.row_R, "added": self.added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ring_RPE.copy_(state["ring"])
        self.valid_RP.copy_(state["valid"])
        self.row_R.copy_(state["row"])
        self.added = state["added"]


class Gauges:
    """The training gauges of one global batch, whatever its micro-batches: `observe` each, then `finish`."""

    def __init__(self, skill: SkillGauge) -> None:
        self.skill = skill
        self._begin(measure=False)

    def _begin(self, measure: bool) -> None:
        self.measure = measure
        self._remember: list[tuple[Tensor, Tensor, Tensor]] = []
        self._observed: list[tuple[Tensor, ...]] = []
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # count, sum, sum of squares
        self._pooled: list[Tensor] = []

    def begin(self, *, measure: bool) -> None:
        """Start a step; without `measure` the targets are remembered and nothing else is computed."""
        self._begin(measure)

    @torch.no_grad()
    def observe(self, out: Output, batch: dict[str, Tensor]) -> None:
        """One micro-batch after its forward pass."""
        positions = self.skill.positions_P
        self._remember.append(
            (out.target_all_BNE[:, positions], batch["token_valid"][:, positions], batch["row"])
        )
        if not self.measure:
            return
        kept = (out.prediction_BME.detach(), out.target_BME)
        self._observed.append((*kept, batch["target"], batch["target_valid"], batch["row"]))
        weight_BK1 = (batch["context_valid"] > 0).float().unsqueeze(-1)
        unit = F.normalize(out.context_BKE.float(), dim=-1) * weight_BK1
        self._tokens.append((weight_BK1.sum(), unit.sum((0, 1)), unit.square().sum((0, 1))))
        total = (out.context_BKE.float() * weight_BK1).sum(1)
        self._pooled.append(F.normalize(total / weight_BK1.sum(1).clamp(min=1), dim=-1))

    def finish(self) -> dict[str, float | None]:
        """End the step; with `measure` its gauges:

        train/skill_mean, train/skill_position: null until the baselines rest on enough samples.
        train/feature_std: std over all valid tokens of L2-normalised features, times sqrt(E); near 1 is
        healthy. train/feature_cosine: mean cosine between different samples' mean features; near 1 is
        collapsed.
        """
        result: dict[str, float | None] = {}
        if self.measure:
            losses = [self.skill.losses(*observed) for observed in self._observed]
            prediction, *baselines, tokens = torch.stack(losses).sum(0).tolist()
            for name, loss in zip(("mean", "position"), baselines, strict=True):
                is_yardstick = loss > BASELINE_FLOOR * tokens
                result[f"train/skill_{name}"] = 1 - prediction / loss if is_yardstick else None
            count, first, second = (sum(part) for part in zip(*self._tokens, strict=True))
            variance = (second / count - (first / count).square()).clamp(min=0)
            result["train/feature_std"] = float(variance.sqrt().mean() * math.sqrt(len(first)))
            pooled = torch.cat(self._pooled)
            if len(pooled) > 1:
                cosine = pooled @ pooled.T
                pairs = len(pooled) * (len(pooled) - 1)
                result["train/feature_cosine"] = float((cosine.sum() - cosine.diagonal().sum()) / pairs)
        for targets, valid, row in self._remember:
            self.skill.add(targets, valid, row)
        self._begin(measure=False)
        return result


def voxels_of_tokens(is_token_BN: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """A mask over tokens [B, N] as a mask over voxels [B, 1, D, H, W]."""
    d, h, w = patch
    tokens = rearrange(is_token_BN, "b (gd gh gw) -> b 1 gd gh gw", gd=grid[0], gh=grid[1])
    return tokens.repeat_interleave(d, 2).repeat_interleave(h, 3).repeat_interleave(w, 4)


@torch.no_grad()
def check_no_leak(model: VJEPA3D, view_BCDHW: Tensor, context_BK: Tensor, target_BM: Tensor) -> None:
    """Change every voxel that the context encoder must not see; raises LeakError unless its output is bit-
    identical.

    vjepa2: everything outside the context tokens. methods: the masked tokens.
    """
    is_hidden = torch.zeros(
        len(view_BCDHW), model.encoder.num_tokens, dtype=torch.bool, device=view_BCDHW.device
    )
    if model.recipe == "methods":
        is_hidden = is_hidden.scatter(1, target_BM, True)
    else:
        is_hidden = ~is_hidden.scatter(1, context_BK, True)
    hidden = voxels_of_tokens(is_hidden, model.encoder.grid, model.encoder.patch_embed.patch)
    changed = torch.where(hidden, view_BCDHW + 1.0 + view_BCDHW.square(), view_BCDHW)
    before = model.encode_context(view_BCDHW, context_BK, target_BM, None)
    after = model.encode_context(changed, context_BK, target_BM, None)
    if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
        difference = float((before - after).abs().nan_to_num().max())
        raise LeakError(
            "context sees targets: only hidden voxels changed, expected a bit-identical context output, "
            f"found a difference of {difference:.3g}; check how models/vit3d.py drops hidden tokens"
        )


class TargetMotion:
    """Alarm 'target is not moving': compares a target parameter between two calls."""

    def __init__(self, model: VJEPA3D) -> None:
        self._before = self._probe(model)

    @staticmethod
    def _probe(model: VJEPA3D) -> Tensor:
        return model.target_encoder.blocks[-1].mlp.fc2.weight.detach().clone()

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
