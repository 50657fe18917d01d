"""A trained head as a program for a folder of `models.weights export --portable DIR --head HEAD`.

In: a head of finetuning.train. Out: its `HeadProgram`: the encoder's weights, and a module. That of a head of
labels makes scores and calibrated probabilities of what the encoder's program gives; that of layers,
segmentation and translation is its own decoder on its encoder, for a window of the grid.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_setup import resample
from finetuning.dense.head import DenseHead, head_kind
from finetuning.dense.kinds import KINDS
from finetuning.dense.whole import OVERLAP, decode
from finetuning.heads.confidence import Calibration, stored_calibration
from finetuning.heads.head_file import Head, checkpoint_of, open_head
from finetuning.heads.objective import to_scores
from models.heads import AttentiveHead
from models.vit3d import VisionTransformer3D
from models.weights.files import own_weights
from models.weights.portable.standalone import FEATURES, VIEW
from models.weights.portable.write import HeadProgram
from models.weights.shape import Weights
from utils.config.schema import StorageOptions

SIGMA = 0.125  # of a window's weights, of its size: monai's


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


class DenseProgram(nn.Module):
    """A normalised window [1, 1, D, H, W] of the grid -> surfaces in voxels or slabs [S, D, W], or logits of
    classes [S, D, H, W].
    """

    def __init__(self, head: DenseHead) -> None:
        super().__init__()
        arm, self.cfg = head.arms[0], head.cfg
        self.encoder, self.decoder = arm.encoder, arm.decoder
        kind = KINDS[head.state["kind"]]
        self.predicted_of = None if kind.name == "segmentation" else kind.planes.predicted_of

    def forward(self, view_B1DHW: Tensor) -> tuple[Tensor]:
        outputs = decode(self.decoder, self.encoder(view_B1DHW).float(), view_B1DHW, self.cfg)
        predicted = outputs if self.predicted_of is None else self.predicted_of(outputs)
        return (predicted[0].float(),)


def head_program(wanted: str, encoder_url: str | None = None) -> HeadProgram:
    """Of a head's file or run, with its encoder at `encoder_url`; raises CheckpointError as opening it."""
    kind = head_kind(wanted)
    if kind in KINDS:
        return _of_dense(KINDS[kind].open_head(wanted, StorageOptions(), encoder_url), encoder_url)
    return _of_labels(open_head(wanted, encoder_url=encoder_url), encoder_url)


def _of_dense(head: DenseHead, encoder_url: str | None) -> HeadProgram:
    facts = {
        "reads": VIEW,
        "task": head.state["kind"],
        "names": list(head.names),
        "calibration": "not calibrated",
        "classes": head.state.get("classes"),
        "overlap": OVERLAP,
        "sigma": SIGMA,
    }
    encoder = head.arms[0].encoder
    assert isinstance(encoder, VisionTransformer3D)
    weights = weights_of(head, encoder, head.cfg.finetune.encoder == "frozen", encoder_url)
    module = DenseProgram(head).eval().requires_grad_(False)
    return HeadProgram(weights, module, facts | _common(head), Path(resample.__file__).read_bytes())


def _of_labels(head: Head, encoder_url: str | None) -> HeadProgram:
    calibration = stored_calibration(head.state)
    is_value = head.kind == "regression"
    facts = {
        "reads": FEATURES,
        "task": head.kind,
        "names": [head.state["task"]["label_column"]] if is_value else list(head.names),
        "calibrated": calibration.temperature is not None,
        "calibration": calibration.text(),
    }
    module = LabelProgram(head, calibration).eval().requires_grad_(False)
    weights = weights_of(head, head.encoder, head.is_frozen, encoder_url)
    return HeadProgram(weights, module, facts | _common(head))


def _common(head: Head | DenseHead) -> dict[str, Any]:
    people = head.state["participants"]
    return {"num_people": len({*people["train"], *people["val"]}), "sha256": head.checksum}


def weights_of(
    head: Head | DenseHead, encoder: VisionTransformer3D, is_frozen: bool, encoder_url: str | None
) -> Weights:
    """Of a head's encoder: its checkpoint's, or, where it was trained with the head, the head's own."""
    state, model = head.state, head.cfg.model
    planes = state["geometry"].get("planes", "blended")  # what a plane of its volumes is
    if is_frozen:
        checkpoint, url = checkpoint_of(state, head.url, None, encoder_url)
        weights = own_weights(url, checkpoint)
        assert weights.cfg is not None
        blocks = replace(weights.cfg.model, feature_blocks=model.feature_blocks)
        facts = weights.facts | {"planes": planes}
        return replace(weights, cfg=replace(weights.cfg, model=blocks), facts=facts)
    people = state["participants"]
    tensors = encoder.state_dict().items()
    return own_weights(
        head.url,
        {
            "config": state["config"],
            "model": {f"{role}.{k}": v for role in ("encoder", "target_encoder") for k, v in tensors},
            "step": state["step"],
            "normalisation": state["normalisation"],
            "planes": planes,
            "participants": sorted({*state["pretraining_participants"], *people["train"], *people["val"]}),
            "progress": {"init_weight": None},  # the head's file does not hold it
            "checksum": head.checksum,
        },
    )
