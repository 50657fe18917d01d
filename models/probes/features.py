"""Features of volumes from token features, and how many directions the features use.

In: an encoder and normalised views with the validity of their tokens. Out: mean + std over valid tokens
`[n, 2E]`, the same for every probe, table and checkpoint selection. RankMe: Garrido et al. 2023, on centred
features. LiDAR: Thilak et al. 2023 (arXiv:2312.04000).
"""

from __future__ import annotations

import torch
from torch import Tensor

LIDAR_FLOOR = 1e-4  # added to the diagonal of the within-volume covariance, as in the paper


def pool_tokens(tokens_BNE: Tensor, valid_BN: Tensor) -> Tensor:
    """Mean and standard deviation over valid tokens, [B, 2E] float32; valid_BN are weights in [0, 1].

    Raises ValueError for a volume without a valid token.
    """
    total_B = valid_BN.float().sum(dim=1)
    if not bool((total_B > 0).all()):
        empty = torch.nonzero(total_B <= 0).flatten().tolist()
        raise ValueError(f"pooling: expected at least one valid token per volume, found none in {empty}")
    mean_BE, variance_BE = token_moments(tokens_BNE, valid_BN)
    return torch.cat([mean_BE, variance_BE.sqrt()], dim=1)


def token_moments(tokens_BNE: Tensor, valid_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [B, E] float32 over valid tokens; NaN for a volume without one. Nothing is read back
    to the host.
    """
    tokens_BNE = tokens_BNE.float()
    weight_BN1 = valid_BN.to(tokens_BNE).unsqueeze(-1)
    total_B1 = weight_BN1.sum(dim=1)
    mean_BE = (tokens_BNE * weight_BN1).sum(dim=1) / total_B1
    squares_BNE = (tokens_BNE - mean_BE.unsqueeze(1)).square() * weight_BN1
    return mean_BE, squares_BNE.sum(dim=1) / total_B1


def rankme(features_NE: Tensor) -> float:
    """Effective rank: exp of the entropy of the centred features' singular value shares; 0 if constant."""
    centred = features_NE.detach().cpu().double()
    centred = centred - centred.mean(dim=0)
    n, width = centred.shape
    gram = centred @ centred.T if n < width else centred.T @ centred  # in float64 as exact as an SVD here
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    total = values.sum()
    if total <= 1e-12 * max(1.0, float(features_NE.abs().max())):
        return 0.0
    return _effective_number(values / total)


def lidar(features_NQE: Tensor) -> float:
    """LDA rank of Q views [N, Q, E] of each of N volumes: effective rank of their means, whitened by the
    spread of views around them; between 1 and N - 1, 0 if all means are equal.

    Raises ValueError for fewer than two volumes or two views.
    """
    features = features_NQE.detach().cpu().double()
    n, q, width = features.shape
    if n < 2 or q < 2:
        raise ValueError(
            f"LiDAR: expected two volumes or more and two views or more of each, found {n} and {q}"
        )
    means_NE = features.mean(dim=1)
    residual = (features - means_NE[:, None]).flatten(0, 1)
    within_EE = residual.T @ residual / (n * q) + LIDAR_FLOOR * torch.eye(width, dtype=torch.float64)
    apart_NE = means_NE - means_NE.mean(dim=0)
    # W^-1/2 B W^-1/2 and the smaller Y W^-1 Y^T / N have the same eigenvalues above 0
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(within_EE), apart_NE.T, upper=False)
    values = torch.linalg.eigvalsh(whitened.T @ whitened / n).clamp(min=0)
    if values.sum() <= 1e-20 * max(1.0, float(features.square().max())):
        return 0.0
    return _effective_number(values / values.sum())


def _effective_number(share: Tensor) -> float:
    return float(torch.exp(-torch.xlogy(share, share).sum()))
