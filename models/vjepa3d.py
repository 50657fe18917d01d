"""Joint-embedding prediction on volumes: context encoder, EMA target encoder, predictor, and the loss.

In: two normalised views [B, 1, D, H, W] of one geometry, context and target token ids. Out: per-sample
losses and features. What differs between recipes is read from utils/config/recipes.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels.squared_errors import SquaredErrors
from models.losses import (
    NEIGHBOURS,
    TOKEN_LOSSES,
    PixelNorm,
    ids_beside,
    pixel_targets,
    weighted_mean,
)
from models.predictor import LinearPredictor, MlpPredictor, Predictor3D
from models.stochastic import Stochastic
from models.surroundings import SurroundingTargets
from models.vit3d import NORM_EPS, Gather, Recompute, VisionTransformer3D, recompute_block
from utils.config.recipes import recipe_of
from utils.config.schema import MISMATCHED, Config


@dataclass
class Output:
    """What one forward pass leaves for the loss, the penalty and the gauges."""

    loss_B: Tensor  # mean over the valid target tokens of each sample
    prediction_BME: Tensor
    target_BME: Tensor  # what the prediction is compared with
    context_BKE: Tensor  # context encoder output at the context tokens, the input of the penalty
    target_all_BNE: Tensor  # comparable targets [B, N, target_width] of all tokens, for the gauges
    # normalised target encoder features of all tokens; None in training with fixed targets
    features_all_BNE: Tensor | None
    neighbour_B: Tensor | None = None  # loss of what lies beside visible tokens, in training with a weight


def build_encoder(cfg: Config, num_prefix: int = 0) -> VisionTransformer3D:
    """A randomly initialised encoder of this configuration (torch's global generator); with `num_prefix` it
    has the positions of an image model, and so many tokens of no place.
    """
    # The first to draw of all modules: what drew before it would give every seed other weights.
    recipe = recipe_of(cfg.method)
    return VisionTransformer3D(
        cfg.model.size,
        cfg.grid,
        cfg.spatial.patch_size,
        positions="image" if num_prefix else recipe.positions,
        rope=cfg.model.rope,
        has_mask_token=recipe.hidden == "targets",
        num_prefix=num_prefix,
    )


class VJEPA3D(nn.Module):
    """Encoder, predictor and the target encoder, which no gradient reaches and only `update_target` moves."""

    pixel_norm: PixelNorm = "normalised"  # of pixel targets, as the published norm_pix_loss

    def __init__(self, cfg: Config, num_prefix: int = 0) -> None:
        super().__init__()
        self.recipe = recipe_of(cfg.method)
        self.is_dense = self.recipe.hidden != "all_but_context"  # all tokens are encoded
        self.dropout, self.drop_path = cfg.method.dropout, cfg.method.drop_path
        self.has_other_latents = cfg.method.control in MISMATCHED
        self.has_other_voxels = cfg.method.control == "mismatched_targets"

        # The order of these modules is the order in which the generator draws their weights: golden losses
        # and every seed rest on it. The target encoder is a copy, so it draws nothing.
        self.encoder = build_encoder(cfg, num_prefix)
        num_voxels = self.encoder.patch_embed.proj.weight[0].numel()
        self.target_width = num_voxels if self.recipe.target == "pixels" else self.encoder.width
        self.random_targets: SurroundingTargets | None = None
        if self.recipe.target == "random_features":
            self.random_targets = SurroundingTargets(cfg.spatial.patch_size)
            self.target_width = self.random_targets.width
        self.predictor: Predictor3D | MlpPredictor | LinearPredictor
        if self.recipe.predictor == "mlp":
            self.predictor = MlpPredictor(self.encoder.width)
        elif self.recipe.predictor == "linear":
            self.predictor = LinearPredictor(self.encoder.width, self.target_width)
        else:
            self.predictor = Predictor3D(
                self.encoder.width,
                cfg.method.predictor_width,
                cfg.method.predictor_depth,
                cfg.grid,
                cfg.model.rope,
                out_width=self.target_width,
            )
        # beside the predictor, whose tensors are those of public weights
        self.neighbour_head: nn.Linear | None = None
        if cfg.method.neighbour_weight > 0:
            self.neighbour_head = nn.Linear(self.encoder.width, len(NEIGHBOURS) * num_voxels)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        if cfg.train.activation_checkpointing:
            self.checkpoint_activations(recompute_block)

    @property
    def gather(self) -> Gather:
        """Rows of tokens by id, as the engine does it."""
        return self.encoder.patch_embed.gather

    def checkpoint_activations(self, recompute: Recompute) -> None:
        """Keep only the blocks' inputs for the backward pass; an engine may bring its own `recompute`."""
        self.encoder.recompute = recompute
        if isinstance(self.predictor, Predictor3D):
            self.predictor.recompute = recompute

    def forward(
        self,
        context_view: Tensor,
        target_view: Tensor | None,
        context_BK: Tensor,
        target_BM: Tensor,
        valid_BN: Tensor,
        seed_B: Tensor | None = None,
    ) -> Output:
        """One prediction. `target_view` may be None where `reads_target_view` is false; `valid_BN`: which
        tokens lie in the scan; `seed_B` (int64) turns the stochastic layers on.
        """
        # What is to be predicted. It comes first: without gradients, its activations are gone again before
        # those of the context encoder are kept for the backward pass.
        targets_BNE, features_BNE = self.compute_targets(context_view, target_view, valid_BN)
        target_BME = self.gather(self._of_volume(targets_BNE, self.has_other_latents), target_BM)
        target_valid_BM = valid_BN.float().gather(1, target_BM)

        # What is seen: nothing of the hidden tokens' voxels goes into the context encoder.
        encoded = self.encode_context(context_view, context_BK, target_BM, seed_B)

        # The prediction, from visible features and the places of the targets; or, where the context encoder
        # computes all tokens, from what it made of the targets' own, which a mask token may have replaced.
        if isinstance(self.predictor, Predictor3D):
            prediction_BME = self.predictor(encoded, context_BK, target_BM).float()
        else:
            prediction_BME = self.predictor(self.gather(encoded, target_BM), target_valid_BM).float()

        # The losses. A token outside the scan has weight 0 in each.
        loss_BM = TOKEN_LOSSES[self.recipe.loss].distance(prediction_BME, target_BME)
        loss_B = weighted_mean(loss_BM, target_valid_BM)
        neighbour_B = None
        if self.neighbour_head is not None and self.training:  # validation reads the prediction alone
            neighbour_B = self.neighbour_loss(encoded, context_view, context_BK, valid_BN.float())
        if self.recipe.loss == "normalised_l2":
            prediction_BME = F.normalize(prediction_BME, dim=-1)  # for the gauges: as the loss compares it
        return Output(loss_B, prediction_BME, target_BME, encoded, targets_BNE, features_BNE, neighbour_B)

    @property
    def reads_target_view(self) -> bool:
        """Whether a forward pass needs the target view: fixed targets are those of the context view."""
        return not (self.recipe.has_fixed_targets and self.training)

    @torch.no_grad()
    def compute_targets(
        self, context_view: Tensor, target_view: Tensor | None, valid_BN: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Targets [B, N, target_width] and normalised target encoder features [B, N, E] of all tokens; no
        features where the target view is not read.
        """
        # Features come first even where the target is another: rank and probes of a validation read them.
        features_BNE = None
        if self.reads_target_view:
            assert target_view is not None, "only fixed targets in training do without the target view"
            features_BNE = self.target_encoder(target_view).float()
            if self.recipe.target_norm == "unit":
                features_BNE = F.normalize(features_BNE, dim=-1)
            else:
                features_BNE = F.layer_norm(features_BNE, (self.encoder.width,), eps=NORM_EPS)
        if self.recipe.target == "pixels":
            patch = self.encoder.patch_embed.patch
            return pixel_targets(context_view, patch, self.pixel_norm), features_BNE
        if self.random_targets is not None:
            return self.random_targets(context_view, valid_BN.float()), features_BNE
        assert features_BNE is not None
        return features_BNE, features_BNE

    def encode_context(
        self, view_BCDHW: Tensor, context_BK: Tensor, target_BM: Tensor, seed_B: Tensor | None
    ) -> Tensor:
        """Context encoder output [B, K, E] at the context tokens. Dense: the context is all tokens in order,
        and the targets among them are replaced, but where nothing is hidden.
        """
        # Dense: hidden voxels stop at the patch embedding, whose output mask tokens replace. Otherwise they
        # never reach it, since only the context's patches are embedded.
        noise = None
        if seed_B is not None and (self.dropout > 0 or self.drop_path > 0):
            noise = Stochastic(seed_B, self.dropout, self.drop_path)
        if not self.is_dense:
            return self.encoder(view_BCDHW, context_BK, noise=noise)
        if self.recipe.hidden == "nothing":
            return self.encoder(view_BCDHW, noise=noise)
        shape = len(view_BCDHW), self.encoder.num_tokens
        masked_BN = torch.zeros(shape, dtype=torch.bool, device=view_BCDHW.device)
        return self.encoder(view_BCDHW, masked_BN=masked_BN.scatter(1, target_BM, True), noise=noise)

    def neighbour_loss(
        self, ctx_BKE: Tensor, context_view: Tensor, context_BK: Tensor, weight_BN: Tensor
    ) -> Tensor:
        """Mean squared error [B] of the voxels at and beside each context token, read linearly from its
        feature; the mean over the places of the mean over the tokens that have this neighbour. A place
        that no token has, as on a grid of one B-scan, does not count.
        `weight_BN`: 1 at valid tokens, else 0.

        One matrix for each place, as in van den Oord et al. 2018, arXiv:1807.03748.
        """
        assert self.neighbour_head is not None
        voxels_BNV = pixel_targets(context_view, self.encoder.patch_embed.patch, "plain")
        truth_BNV = self._of_volume(voxels_BNV, self.has_other_voxels)
        # One product for all places; then a place at a time: each lacks other tokens at the grid's edge.
        beside = [ids_beside(context_BK, self.encoder.grid, offset) for offset in NEIGHBOURS]
        near_PBK, is_near_PBK = (torch.stack(part) for part in zip(*beside, strict=True))
        guesses = self.neighbour_head(ctx_BKE)
        errors_PBK = SquaredErrors.apply(guesses, truth_BNV, near_PBK, self.gather)
        own_BK = weight_BN.gather(1, context_BK)
        weights_PBK = torch.stack([weight_BN.gather(1, ids) for ids in near_PBK]) * own_BK * is_near_PBK
        means_PB = weighted_mean(errors_PBK.flatten(0, 1), weights_PBK.flatten(0, 1)).view(len(beside), -1)
        return means_PB.sum(0) / (weights_PBK.sum(2) > 0).sum(0).clamp(min=1)

    def _of_volume(self, targets: Tensor, is_other: bool) -> Tensor:
        """The targets [B, ...]; of another volume of the batch where a control asks for it, in training."""
        return targets.roll(1, 0) if is_other and self.training else targets

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that a gradient reaches: not those of the target encoder."""
        return [(n, p) for n, p in self.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def update_target(self, momentum: float | Tensor, enabled: Tensor) -> None:
        """target <- target + (1 - momentum) * (encoder - target), in place; nothing moves where `enabled`, a
        bool on the device, is false.
        """
        # no branch on `enabled`: a skipped update left the encoder finite, so a weight of 0 moves nothing
        weight = torch.where(enabled, 1.0 - momentum, 0.0).float()
        averages: list[Tensor] = list(self.target_encoder.parameters())
        latest: list[Tensor] = list(self.encoder.parameters())
        # few calls for all tensors; lerp_ would take one a tensor, since the weight is on the device
        moves = torch._foreach_sub(latest, averages)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(averages, moves)
