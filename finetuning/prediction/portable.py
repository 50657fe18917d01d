"""A trained head as a program for a folder of `models.weights export --portable DIR --head HEAD`.

In: a head of finetuning.train. Out: its `HeadProgram`: the encoder's weights, and the module that makes
scores and calibrated probabilities of what the encoder's program gives.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from finetuning.heads.calibration import Calibration, stored_calibration
from finetuning.heads.head_file import Head, checkpoint_of, open_head
from finetuning.heads.objective import to_scores
from models.heads import AttentiveHead
from models.weights.files import own_weights
from models.weights.portable.write import HeadProgram
from models.weights.shape import Weights


class LabelProgram(nn.Module):
    """Tokens [N, E], their validity [N] and pooled features [2E] of a volume -> scores and probabilities [C],
    float64; the latter are the scores where nothing is calibrated.
    """

    mean: Tensor  # [2E], as std
    std: Tensor

    def __init__(self, head: Head, calibration: Calibration) -> None:
        super().__init__()
        self.module, self.kind, self.calibration = head.module, head.kind, calibration
        scale, width = head.standardise, 2 * head.encoder.feature_width
        self.register_buffer("mean", torch.zeros(width) if scale is None else scale.mean)
        self.register_buffer("std", torch.ones(width) if scale is None else scale.std)

    def forward(self, tokens_NE: Tensor, valid_N: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.module, AttentiveHead):
            outputs_BC = self.module(tokens_NE[None], valid_N[None])
        else:
            outputs_BC = self.module(((pooled - self.mean) / self.std)[None])
        scores_BC = to_scores(self.kind, outputs_BC.double())
        calibrated_BC = self.calibration.scores(self.kind, outputs_BC.double())
        return scores_BC[0], (scores_BC.clone() if calibrated_BC is None else calibrated_BC)[0]


def head_program(wanted: str, encoder_url: str | None = None) -> HeadProgram:
    """Of a head's file or its run's folder, whose encoder may have moved to `encoder_url`; raises
    CheckpointError as opening a head does.
    """
    head = open_head(wanted, encoder_url=encoder_url)
    calibration = stored_calibration(head.state)
    is_value = head.kind == "regression"
    facts = {
        "task": head.kind,
        "names": [head.state["task"]["label_column"]] if is_value else list(head.names),
        "calibrated": calibration.temperature is not None,
        "calibration": calibration.text(),
    }
    module = LabelProgram(head, calibration).eval().requires_grad_(False)
    people = head.state["participants"]
    facts |= {"num_people": len({*people["train"], *people["val"]}), "sha256": head.checksum}
    return HeadProgram(weights_of(head, encoder_url), module, facts)


def weights_of(head: Head, encoder_url: str | None) -> Weights:
    """Of the head's encoder: its checkpoint's, or, where it was trained with the head, the head's own."""
    state, model = head.state, head.cfg.model
    if head.is_frozen:
        checkpoint, url = checkpoint_of(state, head.url, None, encoder_url)
        weights = own_weights(url, checkpoint)
        assert weights.cfg is not None
        blocks = replace(weights.cfg.model, feature_blocks=model.feature_blocks)
        return replace(weights, cfg=replace(weights.cfg, model=blocks))
    people = state["participants"]
    tensors = head.encoder.state_dict().items()
    return own_weights(
        head.url,
        {
            "config": state["config"],
            "model": {f"{role}.{k}": v for role in ("encoder", "target_encoder") for k, v in tensors},
            "step": state["step"],
            "normalisation": state["normalisation"],
            "participants": sorted({*state["pretraining_participants"], *people["train"], *people["val"]}),
            "progress": {"init_weight": None},  # the head's file does not hold it
            "checksum": head.checksum,
        },
    )
