"""The head and its controls: what a map shows of training, and what any weights would show.

In: a head with its configuration, store and cohort. Out: an `Arm` each: the head; the same encoder under a
head of random weights; a head of the same kind, trained in the same manner on an encoder of random weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort import Cohort
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.frozen import head_inputs, train_grid
from finetuning.head_file import Head, Standardise
from finetuning.pooled import random_encoder
from models.heads import build_head
from models.vit3d import VisionTransformer3D
from utils.runtime.single import Runtime

TRAINED, RANDOM_HEAD, RANDOM_ENCODER = "trained", "random_head", "random_encoder"
LABELS = {
    TRAINED: "the head",
    RANDOM_HEAD: "control: head of random weights",
    RANDOM_ENCODER: "control: head trained on an encoder of random weights",
}


@dataclass(frozen=True)
class Arm:
    """A head on an encoder, both in evaluation mode and on the device."""

    name: str  # of LABELS
    encoder: VisionTransformer3D
    module: nn.Module
    standardise: Standardise | None


def build_arms(head: Head, store: PreparedStore, cohort: Cohort, runtime: Runtime) -> tuple[Arm, ...]:
    """The head first. Trains the control on the features of the random encoder, which are kept."""
    cfg = head.cfg
    device = runtime.device
    unknowing = random_encoder(cfg, cfg.seed)
    kept = KeptFeatures(unknowing, cfg, store, runtime, features_folder(cfg))
    inputs, standardise = head_inputs(kept, cohort)
    control = train_grid(cfg, cohort, inputs, unknowing.width, device).head
    encoder = head.encoder.to(device)
    return (
        Arm(TRAINED, encoder, head.module.to(device), head.standardise),
        Arm(RANDOM_HEAD, encoder, random_module(head).to(device), head.standardise),
        Arm(RANDOM_ENCODER, unknowing.to(device), control.to(device).eval(), standardise),
    )


def random_module(head: Head) -> nn.Module:
    """A head of the same kind whose weights cfg.seed draws; each tensor as large as the trained one: a linear
    layer starts near 0.
    """
    state = head.state
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(head.cfg.seed)
        module = build_head(
            state["head_kind"], head.encoder.width, state["num_outputs"], state["hidden"], state["dropout"]
        )
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                trained = head.module.get_parameter(name).cpu()
                parameter.copy_(torch.randn_like(parameter) * trained.std(unbiased=False))
                if name.startswith("norm"):
                    parameter.copy_(trained)
    return module.eval().requires_grad_(False)


def by_encoder(arms: tuple[Arm, ...]) -> list[list[Arm]]:
    """Arms that share an encoder together: it runs once for them."""
    order = np.unique([id(arm.encoder) for arm in arms], return_index=True)[1]
    return [[arm for arm in arms if arm.encoder is arms[first].encoder] for first in sorted(order)]
