"""The predictors: a narrow transformer with mask tokens (V-JEPA), an MLP of each token (the Methods text), a
linear layer of each token.

In: context features [B, K, E] with their token ids, and the ids of the target tokens. Out: predictions [B,
M, E].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import RopeForm, rotary_tables
from models.batch_norm import WeightedBatchNorm
from models.vit3d import NORM_EPS, Block, Recompute, initialise, run_blocks

HEAD_DIM = 32  # V-JEPA's predictor: 384 wide, 12 heads


class Predictor3D(nn.Module):
    """Narrow ViT: context tokens and mask tokens attend to each other; the mask tokens' outputs are the
    predictions.

    No sorting by raster order: rotary positions come from the ids, so the order of tokens means nothing.
    Of several mask tokens number 0 is used, which the published recipe trains with clips of one length;
    Hugging Face's predictor, called by itself, uses 1 (modulo their number).
    """

    def __init__(
        self,
        encoder_width: int,
        width: int,
        depth: int,
        grid: tuple[int, int, int],
        rope: RopeForm = "interleaved",
        num_mask_tokens: int = 1,
        heads: int | None = None,
        out_width: int | None = None,
    ) -> None:
        super().__init__()
        self.grid, self.rope = grid, rope
        self.heads = heads or width // HEAD_DIM
        self.head_dim = width // self.heads
        self.predictor_embed = nn.Linear(encoder_width, width)
        self.mask_tokens = nn.ParameterList(
            nn.Parameter(torch.zeros(1, 1, width)) for _ in range(num_mask_tokens)
        )
        self.predictor_blocks = nn.ModuleList(Block(width, self.heads) for _ in range(depth))
        self.recompute: Recompute | None = None
        self.predictor_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.predictor_proj = nn.Linear(width, out_width or encoder_width)
        initialise(self, self.predictor_blocks)

    def forward(self, ctx_BKE: Tensor, keep_BK: Tensor, target_BM: Tensor) -> Tensor:
        ctx_BKP = self.predictor_embed(ctx_BKE)
        num_context = ctx_BKP.shape[1]
        mask_BMP = self.mask_tokens[0].to(ctx_BKP.dtype).expand(*target_BM.shape, -1)
        x = torch.cat((ctx_BKP, mask_BMP), dim=1)
        ids = torch.cat((keep_BK, target_BM), dim=1)
        rotary = rotary_tables(ids, self.grid, self.head_dim, self.rope)
        x = run_blocks(self.predictor_blocks, x, rotary, recompute=self.recompute)
        return self.predictor_proj(self.predictor_norm(x[:, num_context:]))


class MlpPredictor(nn.Module):
    """Per-token MLP E-E-E with batch normalisation and GELU over the valid target tokens of one micro-
    batch.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.norm = WeightedBatchNorm(width)
        self.fc2 = nn.Linear(width, width)
        for layer in (self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x_BME: Tensor, weight_BM: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.norm(self.fc1(x_BME), weight_BM)))


class LinearPredictor(nn.Module):
    """Linear layer behind batch normalisation over the valid tokens of one micro-batch of all processes."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        # no scale, which the layer has, and no bias: its targets have mean 0
        self.norm = WeightedBatchNorm(width).requires_grad_(False)
        self.fc = nn.Linear(width, out_width, bias=False)
        nn.init.trunc_normal_(self.fc.weight, std=0.02)

    def forward(self, x_BME: Tensor, weight_BM: Tensor) -> Tensor:
        return self.fc(self.norm(x_BME, weight_BM))
