"""What an update of a decoder's training moves: the decoder, and its encoder where that is trained too.

In: both, and the configuration. Out: `Moving`: AdamW on them, the weights that are judged, and what a
checkpoint has of these.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from finetuning.dense.decoder import UNETR
from finetuning.features.yardsticks import LocalTokens
from finetuning.heads.tuned import layer_groups
from models.vit3d import VisionTransformer3D
from utils.config.schema import Config

LONGEST_AVERAGE = 0.99  # of the weights that are judged: the share of what was before
Encoder = VisionTransformer3D | LocalTokens


@dataclass
class Moving:
    """What an update moves. With a frozen encoder a running mean of the decoder's weights is judged."""

    encoder: Encoder
    decoder: nn.Module
    optimizer: torch.optim.AdamW
    average: AveragedModel | None
    is_trained: bool  # the encoder

    @classmethod
    def of(cls, cfg: Config, encoder: Encoder, decoder: nn.Module) -> Moving:
        """AdamW whose weight decay is of matrices alone; the decoder, and the last block of an encoder that
        is trained, have the full rate.
        """
        is_trained, optim = cfg.finetune.encoder == "trained", cfg.optim
        body = encoder if is_trained and isinstance(encoder, VisionTransformer3D) else None
        groups = layer_groups(body, decoder, optim.weight_decay, cfg.finetune.layer_decay)
        optimizer = torch.optim.AdamW(groups, lr=optim.base_lr, betas=optim.betas, eps=optim.eps)
        has_mean = cfg.head.kind == UNETR and not is_trained
        average = AveragedModel(decoder, avg_fn=_averaged) if has_mean else None
        return cls(encoder, decoder, optimizer, average, is_trained)

    @property
    def judged(self) -> nn.Module:
        return self.decoder if self.average is None else self.average.module

    def copies(self) -> tuple[nn.Module, nn.Module]:
        """Encoder and decoder as they are now."""
        return copy.deepcopy(self.encoder) if self.is_trained else self.encoder, copy.deepcopy(self.judged)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        values = {"decoder": self.decoder, "optimizer": self.optimizer, "average": self.average}
        values |= {"encoder": self.encoder if self.is_trained else None}
        return {name: value for name, value in values.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.parts().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, value in self.parts().items():
            value.load_state_dict(state[name])

    def update(self, rate: float, clip: float) -> None:
        """Move by the gradients."""
        moved = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(moved, clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_share"]
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.decoder)


def _averaged(average: Tensor, value: Tensor, count: Tensor | int) -> Tensor:
    """Weights averaged over the last updates: over all of them at first, over about a hundred later."""
    return torch.lerp(value, average, min(LONGEST_AVERAGE, float(count / (count + 10))))
