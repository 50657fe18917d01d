"""Joint-embedding prediction on volumes: context encoder, EMA target encoder, predictor, and the recipes'
losses.

In: two normalised views [B, 1, D, H, W] of one geometry, context and target token ids. Out: per-sample
losses and features. What differs between recipes is read from utils/config/recipes.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.losses import (
    TOKEN_LOSSES,
    PixelNorm,
    ids_beside,
    mean_ascans,
    per_token_l2,
    pixel_targets,
    places_beside,
    weighted_mean,
)
from models.predictor import MlpPredictor, Predictor3D
from models.stochastic import Stochastic
from models.vit3d import NORM_EPS, Gather, Recompute, VisionTransformer3D, recompute_block
from utils.config.recipes import recipe_of
from utils.config.schema import MISMATCHED, Config
from utils.errors import UserError

# linear heads beside the predictor's own, which predict the context view at each target token
HEADS = "ascan", "pixel"
# losses beside the prediction's, each with a weight in `method`; context: features at the context tokens;
# neighbour: voxels at and beside each context token, from its feature alone
SECOND_LOSSES = *HEADS, "context", "neighbour"


@dataclass
class Output:
    """What one forward pass leaves for the loss, the regulariser and the gauges."""

    loss_B: Tensor  # mean over the valid target tokens of each sample
    prediction_BME: Tensor
    target_BME: Tensor  # what the prediction is compared with
    context_BKE: Tensor  # context encoder output at the context tokens, the regulariser's input
    target_all_BNE: Tensor  # comparable targets [B, N, target_width] of all tokens, for the gauges
    features_all_BNE: Tensor | None  # normalised target encoder features of all tokens; mae in training: None
    second_B: dict[str, Tensor] = field(default_factory=dict)  # of SECOND_LOSSES with a weight, as loss_B


def build_encoder(cfg: Config) -> VisionTransformer3D:
    """A randomly initialised encoder of this configuration (torch's global generator)."""
    recipe = recipe_of(cfg.method)
    return VisionTransformer3D(
        cfg.model.size,
        cfg.grid,
        cfg.spatial.patch_size,
        positions=recipe.positions,
        rope=cfg.model.rope,
        has_mask_token=recipe.context == "dense",
    )


class VJEPA3D(nn.Module):
    """Encoder, predictor and the target encoder, which no gradient reaches and only `update_target` moves."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.recipe = recipe_of(cfg.method)
        self.is_dense = self.recipe.context == "dense"
        self.dropout, self.drop_path = cfg.method.dropout, cfg.method.drop_path
        self.has_other_latents = cfg.method.control in MISMATCHED
        self.has_other_voxels = cfg.method.control == "mismatched_targets"
        self.encoder = build_encoder(cfg)
        self.target_width = self.encoder.width
        if self.recipe.target == "pixels":
            self.target_width = self.encoder.patch_embed.proj.weight[0].numel()
        self.target_layers = tuple(cfg.method.target_layers or ())
        if self.target_layers:
            if self.target_layers[-1] != self.encoder.depth:
                raise UserError(
                    f"method.target_layers: expected {self.encoder.depth}, the last block of model.size "
                    f"{cfg.model.size}, at the end, found {list(self.target_layers)}"
                )
            self.target_width = len(self.target_layers) * self.encoder.width
        self.has_context_loss = cfg.method.context_weight > 0
        self.predictor: Predictor3D | MlpPredictor
        if self.recipe.predictor == "mlp":
            self.predictor = MlpPredictor(self.encoder.width)
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
        patch = self.encoder.patch_embed
        self.ascan_head: nn.Linear | None = None
        if cfg.method.ascan_weight > 0:
            self.ascan_head = nn.Linear(cfg.method.predictor_width, patch.proj.in_channels * patch.patch[1])
        self.pixel_head: nn.Linear | None = None
        if cfg.method.pixel_weight > 0:
            self.pixel_head = nn.Linear(cfg.method.predictor_width, patch.proj.weight[0].numel())
        self.neighbour_places = cfg.method.neighbour_places
        self.neighbour_head: nn.Linear | None = None
        if cfg.method.neighbour_weight > 0:
            voxels = patch.proj.weight[0].numel()
            places = len(places_beside(self.neighbour_places))
            self.neighbour_head = nn.Linear(self.encoder.width, places * voxels)
        # running means of the context tokens at every place, for the penalty
        self.centres: nn.Module | None = None
        if cfg.method.centre_places:
            self.centres = nn.Module()
            self.centres.register_buffer("mean", torch.zeros(self.encoder.num_tokens, self.encoder.width))
            self.centres.register_buffer("seen", torch.zeros(self.encoder.num_tokens))
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

    @property
    def heads(self) -> dict[str, nn.Linear]:
        """The heads beside the predictor's own that this configuration has, by their name in HEADS."""
        heads = {"ascan": self.ascan_head, "pixel": self.pixel_head}
        return {name: head for name, head in heads.items() if head is not None}

    def head_targets(self, name: str, context_view: Tensor) -> Tensor:
        """What a head predicts of all tokens, float32 [B, N, its width]; nothing of them is learned."""
        patch = self.encoder.patch_embed.patch
        if name == "ascan":
            return mean_ascans(context_view, patch)
        return pixel_targets(context_view, patch, "plain")

    def encode_context(
        self, view_BCDHW: Tensor, context_BK: Tensor, target_BM: Tensor, seed_B: Tensor | None
    ) -> Tensor:
        """What the context encoder computes: [B, K, E] of the visible tokens, or, dense, [B, N, E] with the
        hidden ones replaced.
        """
        noise = None
        if seed_B is not None and (self.dropout > 0 or self.drop_path > 0):
            noise = Stochastic(seed_B, self.dropout, self.drop_path)
        if not self.is_dense:
            return self.encoder(view_BCDHW, context_BK, noise=noise)
        are_targets = self.recipe.hidden == "targets"
        shape = len(view_BCDHW), self.encoder.num_tokens
        masked_BN = torch.full(shape, not are_targets, device=view_BCDHW.device)
        masked_BN = masked_BN.scatter(1, target_BM if are_targets else context_BK, are_targets)
        return self.encoder(view_BCDHW, masked_BN=masked_BN, noise=noise)

    def context_tokens(self, encoded: Tensor, context_BK: Tensor) -> Tensor:
        """[B, K, E] of the context tokens alone, from what `encode_context` returned."""
        # where only targets are hidden, the context is all tokens in order
        is_gathered = not self.is_dense or self.recipe.hidden == "targets"
        return encoded if is_gathered else self.gather(encoded, context_BK)

    @property
    def reads_target_view(self) -> bool:
        """Whether a forward pass needs the target view: pixel targets are those of the context view."""
        return self.recipe.target == "features" or not self.training

    @torch.no_grad()
    def compute_targets(
        self, context_view: Tensor, target_view: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Targets [B, N, target_width] and normalised target encoder features [B, N, E] of all tokens; no
        features where the target view is not read.
        """
        features_BNE = None
        if self.reads_target_view:
            assert target_view is not None, "only pixel targets in training do without the target view"
            raw_BNE = self.target_encoder(target_view, layers=self.target_layers).float()
            if self.recipe.target_norm == "unit":
                features_BNE = F.normalize(raw_BNE, dim=-1)
            else:
                width = self.encoder.width
                layers = raw_BNE.unflatten(-1, (-1, width))
                normalised_BNE = F.layer_norm(layers, (width,), eps=NORM_EPS).flatten(-2)
                if self.target_layers:
                    return normalised_BNE, normalised_BNE[..., -width:]
                features_BNE = normalised_BNE
        if self.recipe.target == "pixels":
            kind: PixelNorm = "plain" if self.recipe.target_norm == "plain" else "normalised"
            return pixel_targets(context_view, self.encoder.patch_embed.patch, kind), features_BNE
        assert features_BNE is not None
        return features_BNE, features_BNE

    def forward(
        self,
        context_view: Tensor,
        target_view: Tensor | None,
        context_BK: Tensor,
        target_BM: Tensor,
        target_valid_BM: Tensor,
        seed_B: Tensor | None = None,
        context_valid_BK: Tensor | None = None,
        valid_BN: Tensor | None = None,
    ) -> Output:
        """One prediction; `seed_B` (int64) turns the stochastic layers on. `target_view` may be None where
        `reads_target_view` is false; `context_valid_BK` and `valid_BN`, which the losses of visible tokens
        read, where all are valid.
        """
        targets_BNE, features_BNE = self.compute_targets(context_view, target_view)
        target_BME = self.gather(self._of_volume(targets_BNE, self.has_other_latents), target_BM)
        encoded = self.encode_context(context_view, context_BK, target_BM, seed_B)
        ctx_BKE = self.context_tokens(encoded, context_BK)
        second_B: dict[str, Tensor] = {}
        if isinstance(self.predictor, MlpPredictor):
            prediction_BME = self.predictor(self.gather(encoded, target_BM), target_valid_BM).float()
        elif not self.heads and not self.has_context_loss:
            prediction_BME = self.predictor(ctx_BKE, context_BK, target_BM).float()
        else:
            trunk = self.predictor.trunk(ctx_BKE, context_BK, target_BM, with_context=self.has_context_loss)
            trunk_BMP = trunk[:, -target_BM.shape[1] :]
            predictions = self.predictor.predictor_proj(trunk).float()
            prediction_BME = predictions[:, -target_BM.shape[1] :]
            for name, head in self.heads.items():
                truth_BNV = self._of_volume(self.head_targets(name, context_view), self.has_other_voxels)
                truth = self.gather(truth_BNV, target_BM)
                second_B[name] = weighted_mean(per_token_l2(head(trunk_BMP).float(), truth), target_valid_BM)
            if self.has_context_loss:
                if context_valid_BK is None:
                    context_valid_BK = torch.ones_like(context_BK, dtype=torch.float32)
                truth = self.gather(self._of_volume(targets_BNE, self.has_other_latents), context_BK)
                guess = predictions[:, : context_BK.shape[1]]
                distance = TOKEN_LOSSES[self.recipe.loss].distance(guess, truth)
                second_B["context"] = weighted_mean(distance, context_valid_BK)
        if self.neighbour_head is not None and self.training:  # validation reads the prediction alone
            if valid_BN is None:
                valid_BN = torch.ones(targets_BNE.shape[:2], device=targets_BNE.device)
            second_B["neighbour"] = self.neighbour_loss(ctx_BKE, context_view, context_BK, valid_BN.float())
        loss_BM = TOKEN_LOSSES[self.recipe.loss].distance(prediction_BME, target_BME)
        if self.recipe.loss == "normalised_l2":
            prediction_BME = F.normalize(prediction_BME, dim=-1)
        loss_B = weighted_mean(loss_BM, target_valid_BM)
        return Output(loss_B, prediction_BME, target_BME, ctx_BKE, targets_BNE, features_BNE, second_B)

    def neighbour_loss(
        self, ctx_BKE: Tensor, context_view: Tensor, context_BK: Tensor, weight_BN: Tensor
    ) -> Tensor:
        """Mean squared error [B] of the voxels at and beside each context token, read linearly from its
        feature; the mean over the places of the mean over the tokens that have such a neighbour. A place
        that no token has, as on a grid of one B-scan, does not count.
        `weight_BN`: 1 at valid tokens, else 0.

        One matrix for each place, as in van den Oord et al. 2018, arXiv:1807.03748.
        """
        assert self.neighbour_head is not None
        grid = self.encoder.grid
        voxels_BNV = pixel_targets(context_view, self.encoder.patch_embed.patch, "plain")
        truth_BNV = self._of_volume(voxels_BNV, self.has_other_voxels)
        offsets = places_beside(self.neighbour_places)
        guesses = self.neighbour_head(ctx_BKE).float().chunk(len(offsets), dim=-1)
        own_BK = weight_BN.gather(1, context_BK)
        if self.neighbour_places == "hidden":
            weight_BN = weight_BN.scatter(1, context_BK, 0.0)
        means, is_there = [], []
        for offset, guess in zip(offsets, guesses, strict=True):
            near_BK, is_near_BK = ids_beside(context_BK, grid, offset)
            error_BK = per_token_l2(guess, self.gather(truth_BNV, near_BK))
            weight_BK = weight_BN.gather(1, near_BK) * own_BK * is_near_BK
            means.append(weighted_mean(error_BK, weight_BK))
            is_there.append((weight_BK.sum(1) > 0).float())
        places_B = torch.stack(is_there).sum(0).clamp(min=1.0)
        return torch.stack(means).sum(0) / places_B

    def _of_volume(self, targets: Tensor, is_other: bool) -> Tensor:
        """The targets [B, ...]; of another volume of the batch where a control asks for it, in training."""
        return targets.roll(1, 0) if is_other and self.training else targets

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters of everything but the target encoder."""
        return [(n, p) for n, p in self.named_parameters() if not n.startswith("target_encoder.")]

    def update_target(self, momentum: float | Tensor, enabled: Tensor | None = None) -> None:
        """target <- momentum * target + (1 - momentum) * encoder; nothing moves where `enabled` is false."""
        target, source = (list(module.parameters()) for module in (self.target_encoder, self.encoder))
        update_ema(target, source, momentum, enabled)


@torch.no_grad()
def update_ema(
    target: Sequence[Tensor],
    source: Sequence[Tensor],
    momentum: float | Tensor,
    enabled: Tensor | None = None,
) -> None:
    """target <- target + (1 - momentum) * (source - target), in place; `enabled` is a bool on the device."""
    if enabled is None and not isinstance(momentum, Tensor):
        torch._foreach_lerp_(list(target), list(source), 1.0 - momentum)
        return
    # the source is finite: a skipped update left it alone
    weight = torch.as_tensor(1.0 - momentum, dtype=torch.float32)
    if enabled is not None:
        weight = torch.where(enabled, 1.0 - momentum, 0.0).float()
    for average, latest in zip(target, source, strict=True):
        average.lerp_(latest, weight)


def parameter_groups(model: VJEPA3D, weight_decay: float) -> list[dict]:
    """AdamW groups: weight decay on matrices only; mask tokens, positions, norms and biases have none."""
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.trained_parameters():
        is_table = name.endswith(("pos_embed", "mask_token")) or ".mask_tokens." in name
        (plain if parameter.ndim < 2 or is_table else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
