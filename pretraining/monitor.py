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
    """A ring of recent targets at fixed token positions, and the skill of predictions against its
    baselines.
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
        self.row_R = torch.full((capacity,), -1, dtype=torch.long, device=device)
        self.distance: Callable[[Tensor, Tensor], Tensor]
        if recipe == "methods":
            self.distance, self.centre = per_token_normalised_l2, lambda x: x.mean(0)
        else:
            self.distance, self.centre = per_token_l1, lambda x: x.median(0).values
        self.added = 0

    def add(self, targets_BNE: Tensor, row_B: Tensor) -> None:
        """Remember the targets of a batch; `row_B` says which volumes they are of."""
        capacity = len(self.row_R)
        count = min(len(row_B), capacity)
        slots = torch.arange(self.added, self.added + count, device=row_B.device) % capacity
        self.ring_RPE[slots] = targets_BNE[:count, self.positions_P].float()
        self.row_R[slots] = row_B[:count]
        self.added += count

    @torch.no_grad()
    def skill(
        self, out: Output, target_BM: Tensor, valid_BM: Tensor, row_B: Tensor
    ) -> dict[str, float | None]:
        """train/skill_mean and train/skill_position of one batch; null until the baselines rest on enough
        samples.

        Call it before `add` of the same batch. Synchronises with the device.
        """
        losses = {"prediction": 0.0, "mean": 0.0, "position": 0.0}
        for b in range(len(row_B)):
            others = (self.row_R >= 0) & (self.row_R != row_B[b])
            slot_M = self.slot_of_token_N[target_BM[b]]
            use = (slot_M >= 0) & (valid_BM[b] > 0)
            if int(others.sum()) < MIN_SAMPLES or not bool(use.any()):
                continue
            ring = self.ring_RPE[others]
            target = out.target_BME[b, use]
            constant = self.centre(ring.flatten(0, 1)).expand_as(target)
            per_position = self.centre(ring[:, slot_M[use]])
            losses["prediction"] += float(self.distance(out.prediction_BME[b, use], target).sum())
            losses["mean"] += float(self.distance(constant, target).sum())
            losses["position"] += float(self.distance(per_position, target).sum())
        return {
            f"train/skill_{name}": 1 - losses["prediction"] / losses[name]
            if losses[name] > BASELINE_FLOOR
            else None
            for name in ("mean", "position")
        }

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self.ring_RPE, "row": self.row_R, "added": self.added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ring_RPE.copy_(state["ring"])
        self.row_R.copy_(state["row"])
        self.added = state["added"]


@torch.no_grad()
def feature_spread(tokens_BKE: Tensor, valid_BK: Tensor) -> dict[str, float]:
    """train/feature_std: std over all valid tokens of L2-normalised features, times sqrt(E); near 1 is
    healthy.

    train/feature_cosine: mean cosine between the mean features of different samples; near 1 is collapsed.
    """
    tokens = F.normalize(tokens_BKE.float(), dim=-1)
    std = tokens[valid_BK > 0].std(dim=0, correction=0).mean() * math.sqrt(tokens.shape[-1])
    result = {"train/feature_std": float(std)}
    if len(tokens) > 1:
        weight = (valid_BK / valid_BK.sum(1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        pooled = F.normalize((tokens_BKE.float() * weight).sum(1), dim=-1)
        cosine = pooled @ pooled.T
        off_diagonal = cosine.sum() - cosine.diagonal().sum()
        result["train/feature_cosine"] = float(off_diagonal / (len(tokens) * (len(tokens) - 1)))
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
        """Raises FrozenTargetError when nothing moved over the updates since the last call."""
        now = self._probe(model)
        if updates > 0 and torch.equal(now, self._before):
            raise FrozenTargetError(
                f"target is not moving: {updates} updates left the target encoder bit-identical, expected it "
                "to follow the encoder; check train/ema_momentum and that update_target is called"
            )
        self._before = now
