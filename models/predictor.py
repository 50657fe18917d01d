"""The two predictors: a narrow transformer with mask tokens (V-JEPA) and a per-token MLP (the Methods text).

In: context features [B, K, E] with their token ids, and the ids of the target tokens. Out: predictions [B,
M, E].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.vit3d import NORM_EPS, Block, Recompute, RopeForm, initialise, rotary_tables, run_blocks

HEAD_DIM = 32  # V-JEPA's predictor: 384 wide, 12 heads


class Predictor3D(nn.Module):
    """Narrow ViT: context tokens and mask tokens attend to each other; the mask tokens' outputs are the
    predictions.

    No sorting by raster order: rotary positions come from the ids, so the order of tokens means nothing.
    `mask_token`: which of several is used. 0 is the one that the published recipe trains with clips of one
    length; Hugging Face's predictor, called by itself, uses 1 (modulo their number). Raises ValueError for
    one that is not there.
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
        rope_grid: tuple[int, int, int] | None = None,
        out_width: int | None = None,
        mask_token: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= mask_token < num_mask_tokens:
            raise ValueError(f"mask_token: expected 0 to {num_mask_tokens - 1}, found {mask_token}")
        self.mask_token = mask_token
        self.grid, self.rope, self.rope_grid = grid, rope, rope_grid
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
        return self.predictor_proj(self.trunk(ctx_BKE, keep_BK, target_BM))

    def trunk(
        self, ctx_BKE: Tensor, keep_BK: Tensor, target_BM: Tensor, *, with_context: bool = False
    ) -> Tensor:
        """What predictions are read from: normalised features [B, M, width] of the mask tokens; with the
        context tokens before them [B, K + M, width].
        """
        ctx_BKP = self.predictor_embed(ctx_BKE)
        num_context = ctx_BKP.shape[1]
        mask_BMP = self.mask_tokens[self.mask_token].to(ctx_BKP.dtype).expand(*target_BM.shape, -1)
        x = torch.cat((ctx_BKP, mask_BMP), dim=1)
        ids = torch.cat((keep_BK, target_BM), dim=1)
        rotary = rotary_tables(ids, self.grid, self.head_dim, self.rope, self.rope_grid)
        x = run_blocks(self.predictor_blocks, x, rotary, recompute=self.recompute)
        return self.predictor_norm(x if with_context else x[:, num_context:])


def _as_it_is(value: Tensor) -> Tensor:
    return value


class WeightedBatchNorm(nn.Module):
    """BatchNorm1d over the tokens [B, M] with weight above 0; shapes stay static, padding moves no
    statistic. `total` sums over the processes that share a batch, with gradient; the runtime may set it.
    """

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.momentum, self.eps = momentum, eps
        self.total: Callable[[Tensor], Tensor] = _as_it_is
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x_BME: Tensor, weight_BM: Tensor) -> Tensor:
        x = x_BME.float()
        if self.training:
            weight = weight_BM.unsqueeze(-1).float()
            count, first = self.total(
                torch.cat((weight.sum().view(1), (x * weight).sum((0, 1))))
            ).tensor_split([1])
            count = count.clamp(min=1.0)
            mean = first / count
            var = self.total(((x - mean).square() * weight).sum((0, 1))) / count
            with torch.no_grad():
                unbiased = var * count / (count - 1).clamp(min=1.0)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(unbiased, self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return ((x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x_BME.dtype)


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
