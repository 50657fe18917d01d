"""Skill: how much better a prediction is than a baseline that sees nothing of the volume.

`skill_mean` and `skill_position` are 1 - loss / loss of the best constant vector, and of the best vector of
each token position (medians for L1, means for squared errors, estimated from other volumes). Only
skill_position counts as learning: OCT features are mostly position.

`validation_skill` is the measure: one target encoder made all of the targets. `SkillGauge` follows training
between validations and is a moving estimate: its baselines rest on the targets of earlier target encoders,
and where those move fast it may call a prediction good that has learned nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.losses import TOKEN_LOSSES
from models.vit3d import gather_tokens
from models.vjepa3d import VJEPA3D

MIN_SAMPLES = 16  # other volumes that a baseline must rest on
MIN_HALF = 8  # in validation
BASELINE_FLOOR = 1e-6  # under this a baseline loss is no yardstick

Scored = tuple[Tensor, Tensor, Tensor]  # prediction [B, P, E], target [B, P, E], whether it counts [B, P]
Read = Callable[[Tensor], Tensor]  # utils.runtime.single.Runtime.to_torch


def evenly_spaced(count: int, limit: int) -> Tensor:
    """int64 indices of at most `limit` of `count` items, first and last among them; all where that allows."""
    return torch.from_numpy(np.linspace(0, count - 1, min(limit, count)).round().astype(np.int64))


def as_it_is(value: Tensor) -> Tensor:
    return value


def select(
    positions_P: Tensor,
    num_tokens: int,
    prediction_BME: Tensor,
    target_BME: Tensor,
    target_BM: Tensor,
    valid_BM: Tensor,
) -> Scored:
    """Select the tokens at `positions_P`, and mark the valid targets among them."""
    place_BM = torch.arange(target_BM.shape[1], device=target_BM.device).expand_as(target_BM)
    place_BN = torch.full((len(target_BM), num_tokens), -1, device=target_BM.device)
    place_BP = place_BN.scatter(1, target_BM, place_BM)[:, positions_P]
    at_BP = place_BP.clamp(min=0)
    counts_BP = (place_BP >= 0) & (valid_BM.gather(1, at_BP) > 0)
    return gather_tokens(prediction_BME, at_BP).detach(), gather_tokens(target_BME, at_BP), counts_BP


def validation_skill(
    scored: Scored, all_VPE: Tensor, valid_VP: Tensor, quarter_V: Tensor, loss: str
) -> tuple[float | None, float | None]:
    """(skill_mean, skill_position) over volumes whose targets one target encoder made.

    `scored` are the volumes' predictions and targets at P positions, and which of them are targets;
    `all_VPE` the targets there whether predicted or not, `valid_VP` which are no padding. Baselines are
    fitted on two quarters of the participants and scored on the other two, and the other way round. A
    baseline of n participants is worse than the best one by about k / n: its loss L(n) is replaced by
    2 L(n) - L(n / 2), L(n / 2) as a mean over both quarters, so that few volumes do not flatter a
    prediction. None where no position has MIN_HALF valid volumes in a half and one in each quarter, or the
    targets hardly differ.
    """
    prediction_VPE, target_VPE, counts_VP = scored
    totals = torch.zeros(3, dtype=torch.float64)  # of the prediction, the constant, the position
    count = 0
    for half in (0, 1):
        own = [quarter_V == 2 * half, quarter_V == 2 * half + 1]
        is_fit_V = own[0] | own[1]
        numbers = [(valid_VP & part.unsqueeze(1)).sum(0) for part in own]
        known_P = (numbers[0] + numbers[1] >= MIN_HALF) & (numbers[0] > 0) & (numbers[1] > 0)
        use_VP = counts_VP & ~is_fit_V.unsqueeze(1) & known_P
        if not bool(use_VP.any()):
            continue
        target, slot = target_VPE[use_VP].float(), use_VP.nonzero()[:, 1]
        fits = [_baseline_losses(all_VPE, valid_VP, part, target, slot, loss) for part in (is_fit_V, *own)]
        baselines = 2 * fits[0] - (fits[1] + fits[2]) / 2
        predicted = TOKEN_LOSSES[loss].distance(prediction_VPE[use_VP].float(), target).double().sum()
        totals += torch.cat([predicted.unsqueeze(0), baselines])
        count += len(target)
    prediction, constant, position = totals.tolist()
    skills = [
        1 - prediction / baseline if count and baseline > BASELINE_FLOOR * count else None
        for baseline in (constant, position)
    ]
    return skills[0], skills[1]


def _baseline_losses(
    all_VPE: Tensor, valid_VP: Tensor, is_fit_V: Tensor, target: Tensor, slot: Tensor, loss: str
) -> Tensor:
    """Summed losses [2] of the best constant and of the best vector per position of some volumes."""
    distance, centre = TOKEN_LOSSES[loss]
    fitted = all_VPE[is_fit_V].float().masked_fill(~valid_VP[is_fit_V].unsqueeze(-1), math.nan)
    guesses = centre(fitted.flatten(0, 1), 0).expand_as(target), centre(fitted, 0)[slot]
    return torch.stack([distance(guess, target).double().sum() for guess in guesses])


class SkillGauge:
    """A ring of recent targets at fixed token positions, and the losses of baselines made of them. Padding
    tokens are in no baseline.
    """

    def __init__(
        self,
        num_tokens: int,
        width: int,
        loss: str,
        device: torch.device,
        capacity: int = 128,
        positions: int = 64,
    ) -> None:
        chosen = evenly_spaced(num_tokens, positions)
        self.positions_P = chosen.to(device)
        self.num_tokens = num_tokens
        self.ring_RPE = torch.zeros(capacity, len(chosen), width, device=device)
        self.valid_RP = torch.zeros(capacity, len(chosen), dtype=torch.bool, device=device)
        self.row_R = torch.full((capacity,), -1, dtype=torch.long, device=device)
        self.distance, self.centre = TOKEN_LOSSES[loss]
        self.added = 0
        # on the device, since it is another number in every step
        self.next_slot = torch.zeros((), dtype=torch.long, device=device)

    @classmethod
    def of_model(cls, model: VJEPA3D, device: torch.device) -> SkillGauge:
        return cls(model.encoder.num_tokens, model.target_width, model.recipe.loss, device)

    def add(self, targets_BPE: Tensor, valid_BP: Tensor, row_B: Tensor) -> None:
        """Remember targets at `positions_P`; `valid_BP` bool, `row_B` says which volumes they are of."""
        capacity = len(self.row_R)
        count = min(len(row_B), capacity)
        slots = (self.next_slot + torch.arange(count, device=row_B.device)) % capacity
        self.ring_RPE[slots] = targets_BPE[:count].float()
        self.valid_RP[slots] = valid_BP[:count]
        self.row_R[slots] = row_B[:count]
        self.next_slot = (self.next_slot + count) % capacity
        self.added += count

    def select(
        self, prediction_BME: Tensor, target_BME: Tensor, target_BM: Tensor, valid_BM: Tensor
    ) -> Scored:
        """`select` at this gauge's positions."""
        return select(self.positions_P, self.num_tokens, prediction_BME, target_BME, target_BM, valid_BM)

    @torch.no_grad()
    def losses(self, scored: list[Scored], rows: Tensor, read: Read = as_it_is) -> Tensor:
        """Summed losses [4] of the prediction, the constant and the per-position baseline, and the number of
        scored tokens: those whose position is valid in MIN_SAMPLES volumes outside `rows`, each counted once.

        `rows` are the volumes of the whole global batch, so that one baseline serves all of them and
        accumulation changes nothing. `read` brings tensors to where shapes may depend on values.
        """
        at_BPE, to_BPE, counts_BP = (torch.cat([*map(read, parts)]) for parts in zip(*scored, strict=True))
        prediction, target, slot = at_BPE[counts_BP], to_BPE[counts_BP], counts_BP.nonzero()[:, 1]
        row_R = read(self.row_R)
        is_other_R = (row_R >= 0) & ~torch.isin(row_R, read(rows))
        usable_RP = read(self.valid_RP) & is_other_R.unsqueeze(1)
        is_same_RR = (row_R.unsqueeze(1) == row_R).tril(-1)
        # an entry counts at a position unless an earlier slot holds the same volume, valid there too
        is_again_RP = (is_same_RR.float() @ usable_RP.float()) > 0
        is_known_P = (usable_RP & ~is_again_RP).sum(0) >= MIN_SAMPLES
        ring = read(self.ring_RPE).masked_fill(~usable_RP.unsqueeze(-1), math.nan)
        constant = self.centre(ring.flatten(0, 1), 0).expand_as(target)
        per_position = self.centre(ring, 0)[slot]
        use = is_known_P[slot]
        losses = [
            self.distance(guess, target).where(use, 0.0).sum()
            for guess in (prediction, constant, per_position)
        ]
        return torch.stack([*losses, use.sum()])

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self.ring_RPE, "valid": self.valid_RP, "row": self.row_R, "added": self.added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ring_RPE.copy_(state["ring"])
        self.valid_RP.copy_(state["valid"])
        self.row_R.copy_(state["row"])
        self.added = state["added"]
        self.next_slot.fill_(self.added % len(self.row_R))
