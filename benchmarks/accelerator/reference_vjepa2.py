"""The loop that our step is compared with: Hugging Face's V-JEPA 2 modules, used as well as they allow.

SDPA attention, visible tokens gathered before the layers, target encoder without gradient, fused AdamW,
foreach EMA, autocast: everything that needs no change of the modules themselves. Its predictor sorts tokens
into raster order and back, as published.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import VJEPA2Config
from transformers.models.vjepa2.modeling_vjepa2 import VJEPA2Encoder, VJEPA2Predictor

from models.predictor import Predictor3D
from models.vit3d import gather_tokens
from models.vjepa3d import VJEPA3D
from models.weights.layouts import to_hf


class ReferenceVJEPA2(nn.Module):
    """Encoder, predictor and target encoder with the weights of one of our models (rope `tiled`)."""

    def __init__(self, ours: VJEPA3D) -> None:
        super().__init__()
        encoder, predictor = ours.encoder, ours.predictor
        assert isinstance(predictor, Predictor3D)
        d, h, w = encoder.grid
        patch = encoder.patch_embed.patch
        assert (h, patch[1]) == (w, patch[2]), "the reference knows only square grids"
        shape = {
            "patch_size": patch[1],
            "crop_size": h * patch[1],
            "frames_per_clip": d * patch[0],
            "tubelet_size": patch[0],
            "in_chans": 1,
            "hidden_size": encoder.width,
            "num_attention_heads": encoder.heads,
            "num_hidden_layers": encoder.depth,
            "pred_hidden_size": predictor.predictor_embed.out_features,
            "pred_num_attention_heads": predictor.heads,
            "pred_num_hidden_layers": len(predictor.predictor_blocks),
            "pred_num_mask_tokens": 1,
        }
        config = VJEPA2Config.from_dict(shape, attn_implementation="sdpa")
        self.encoder = VJEPA2Encoder(config)
        self.predictor = VJEPA2Predictor(config)
        weights = to_hf(encoder.state_dict(), predictor.state_dict())
        for name, module in (("encoder.", self.encoder), ("predictor.", self.predictor)):
            own = {key.removeprefix(name): value for key, value in weights.items() if key.startswith(name)}
            module.load_state_dict(own)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)

    def encode(self, volume_BCDHW: Tensor, keep_BK: Tensor) -> Tensor:
        """Features [B, K, E] of only the visible tokens."""
        x = self.encoder.embeddings(volume_BCDHW.transpose(1, 2))
        x = gather_tokens(x, keep_BK)
        for layer in self.encoder.layer:
            x = layer(x, keep_BK)[0]
        return self.encoder.layernorm(x)

    def predict(self, ctx_BKE: Tensor, keep_BK: Tensor, target_BM: Tensor) -> Tensor:
        """Predictions [B, M, E]."""
        module = self.predictor
        x, positions = module.embeddings(ctx_BKE, [keep_BK], [target_BM])
        order = torch.argsort(positions, dim=1)
        x, positions = module.sort_tokens(x, positions, order)
        for layer in module.layer:
            x = layer(x, positions)[0]
        x = module.unsort_tokens(module.layernorm(x), order)
        return module.proj(x[:, keep_BK.shape[1] :])

    def forward(
        self, context_view: Tensor, target_view: Tensor, context_BK: Tensor, target_BM: Tensor
    ) -> Tensor:
        """The loss: L1 to the target encoder's features, normalised without parameters."""
        with torch.no_grad():
            features = self.target_encoder(target_view.transpose(1, 2)).last_hidden_state.float()
            target = gather_tokens(F.layer_norm(features, features.shape[-1:], eps=1e-6), target_BM)
        prediction = self.predict(self.encode(context_view, context_BK), context_BK, target_BM)
        return (prediction.float() - target).abs().mean()

    def trained_parameters(self) -> list[nn.Parameter]:
        return [*self.encoder.parameters(), *self.predictor.parameters()]

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        targets, sources = self.target_encoder.parameters(), self.encoder.parameters()
        torch._foreach_lerp_(list(targets), list(sources), 1.0 - momentum)
