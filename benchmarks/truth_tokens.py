"""The phantom's truth about a stored volume: which share of each token every layer takes.

In: a phantom's truth file, the volume's row of a prepared store's index, the grid. Out: shares of layers in
tokens, the tokens inside the scan, and a sample of them.

Layer occupancy is the share of each layer in a token of the *stored* volume: each layer's share of every
acquired voxel goes through the resampling that made the store.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
import torch
from einops import reduce
from torch import nn

from data_setup.loader import EVALUATION_BATCH, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.resample import resample_frames
from data_setup.store.reader import PreparedStore
from data_setup.transforms import identity_matrix, token_valid
from finetuning.features.yardsticks import take
from models.probes.features import pool_tokens
from pretraining.gauges.skill import evenly_spaced
from utils import storage
from utils.config.schema import Config, SpatialConfig, StorageOptions
from utils.errors import UserError
from utils.runtime.single import Runtime

TOKENS_PER_VOLUME = 96


def sample_tokens(valid_N: np.ndarray, seed: int, most: int = TOKENS_PER_VOLUME) -> np.ndarray:
    """`most` ids of valid tokens, or all, drawn and sorted, in TOKENS_PER_VOLUME places at least; else -1."""
    places = max(TOKENS_PER_VOLUME, min(len(valid_N), most))
    chosen = np.random.default_rng(seed).permutation(np.flatnonzero(valid_N))[:places]
    return np.concatenate([np.sort(chosen), np.full(places - len(chosen), -1)])


def layer_occupancy(truth: dict[str, np.ndarray], record: pd.Series, spatial: SpatialConfig) -> np.ndarray:
    """Share of every layer in each token of the stored volume, float32 [N, L], to 1/255 of a voxel.

    `truth` is a phantom's truth file, `record` the volume's row of the store's index.
    """
    surfaces = truth["surfaces"]  # [L + 1, D, W]: upper edges, in acquired rows, in file order
    row_h1 = np.arange(int(record["shape_before_h"]))[:, None]

    def frames_of_layer(upper: np.ndarray, lower: np.ndarray) -> Iterator[np.ndarray]:
        for up, low in zip(upper, lower, strict=True):
            # a row covers half a row on both sides of its centre
            inside = np.clip(np.minimum(low, row_h1 + 0.5) - np.maximum(up, row_h1 - 0.5), 0, 1)
            yield np.rint(255 * inside).astype(np.uint8)

    return token_shares((frames_of_layer(*pair) for pair in itertools.pairwise(surfaces)), record, spatial)


def token_shares(
    layers: Iterable[Iterator[np.ndarray]], record: pd.Series, spatial: SpatialConfig
) -> np.ndarray:
    """Share of every layer in each token of the stored volume, float32 [N, L].

    `layers`: for each, its share of every acquired voxel as frames uint8 [H, W] in file order, 255 for all.
    """
    depth, rows, columns = (int(record[f"shape_before_{a}"]) for a in "dhw")
    frame_mm, row_mm, column_mm = (float(record[f"spacing_before_{a}"]) for a in "dhw")
    d, h, w = spatial.patch_size
    shares = []
    for frames in layers:
        stored = resample_frames(
            frames,
            (depth, rows, columns),
            (frame_mm, row_mm, column_mm),
            spatial.image_size,
            spatial.target_spacing,
            spatial.resample,
            bool(record.flipped_d),
        )
        mean = reduce(stored.voxels / 255.0, "(gd d) (gh h) (gw w) -> (gd gh gw)", "mean", d=d, h=h, w=w)
        shares.append(mean)
    return np.stack(shares, axis=1).astype(np.float32)


def valid_tokens(record: pd.Series, spatial: SpatialConfig) -> np.ndarray:
    """bool [N]: the tokens of a stored volume that are inside the acquired field."""
    box = torch.tensor([[float(record[f"valid_{a}{i}"]) for a in "dhw" for i in "01"]])
    matrix = torch.from_numpy(identity_matrix())[None]
    return token_valid(matrix, box, grid_of(spatial), spatial.patch_size)[0].numpy()


@torch.no_grad()
def token_features(
    encoder: nn.Module,
    cfg: Config,
    store: PreparedStore,
    rows: np.ndarray,
    tokens_nT: np.ndarray,
    runtime: Runtime,
    sample: int = 0,
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Mean and std over valid tokens [n, 2E], features of chosen tokens [n, T, E] (of token 0 for -1), and
    `sample` valid tokens of each volume: one pass.
    """
    encoder = encoder.to(runtime.device).eval()
    pooled, dense, seen, start = [], [], [], 0
    for batch in map(runtime.to_device, evaluation_batches(cfg, store, rows, EVALUATION_BATCH)):
        with runtime.autocast():
            tokens_BNE = encoder(plain_view(batch)).float()
        pooled.append(pool_tokens(tokens_BNE, batch["context_valid"]).cpu())
        tokens_BNE = tokens_BNE.cpu()
        dense.append(take(tokens_BNE, tokens_nT[start : start + len(tokens_BNE)]))
        start += len(tokens_BNE)
        for features, valid in zip(tokens_BNE, batch["context_valid"].cpu(), strict=True):
            inside = features[valid > 0]
            seen.append(inside[evenly_spaced(len(inside), sample)] if sample else inside[:0])
    return torch.cat(pooled).numpy(), torch.cat(dense).numpy(), torch.cat(seen)


def grid_of(spatial: SpatialConfig) -> tuple[int, int, int]:
    """Tokens along (D, H, W)."""
    d, h, w = (i // p for i, p in zip(spatial.image_size, spatial.patch_size, strict=True))
    return d, h, w


def read_truth_file(
    tree: str, record: pd.Series, options: StorageOptions | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a volume's truth file (docs/concepts/phantom.md); UserError where there is none."""
    url = storage.join(tree, "truth", f"{record.sop_instance_uid}.npz")
    try:
        data = storage.read_bytes(url, options)
    except storage.StorageNotFoundError as error:
        raise UserError(f"{url}: expected the truth file that the phantom writes, found none") from error
    with np.load(io.BytesIO(data)) as arrays:
        return dict(arrays)
