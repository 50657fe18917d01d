"""A frozen encoder of a checkpoint, and its features, computed once per volume and kept on this machine.

In: a checkpoint of pretraining.train, a prepared store (on a disk or in a bucket), rows. Out: an encoder in
evaluation mode; pooled features float32 [n, 2E] (models.probes.features), or the tokens float16 [n, N, E]
with their validity bool [n, N]. Normalisation and pooling are those of pre-training.

Layout below `${run.dir}/../features`, which the runs beside each other share:
    ENCODER/about.json               what the name is a digest of, for people
    ENCODER/pooled/VOLUME.npz        features [2E] of one volume
    ENCODER/tokens/VOLUME.npz        tokens [N, E] of one volume

ENCODER is a digest of the encoder's weights, of the configuration they rest on, of geometry, normalisation
and precision; VOLUME is one of the voxels, the valid field and the intensity statistics of a volume. So a
changed checkpoint or a volume prepared again has separate features, and nothing can be out of date. Only
the files of the rows asked for are read. Every file is written whole, after its batch: a kill costs one
batch. A damaged file (the zip's CRC) is computed again. The folder may be removed at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_setup.loader import EVALUATION_BATCH, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from data_setup.transforms import identity_matrix, token_valid, voxel_valid
from finetuning.cohort.ledger import volume_digests
from models.probes.features import pool_tokens
from models.vit3d import VisionTransformer3D
from models.vjepa3d import build_encoder
from models.weights.shape import num_prefix_of, with_features
from utils import storage
from utils.checkpoint import CheckpointError, require_pretraining
from utils.config.load import flatten, keys_of_features
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime, StopRequested
from utils.terminal import track

BASELINE_VOXELS = (16, 48, 32)  # raw volumes are averaged down to at most this before their PCA
NAMED_KEYS = 3  # of each kind, in the error about weights that do not fit
FORMAT_VERSION = 1
Kind = Literal["pooled", "tokens"]
log = logging.getLogger(__name__)


def pretrained_encoder(cfg: Config, state: dict[str, Any], url: str) -> VisionTransformer3D:
    """The target (EMA) encoder of a loaded checkpoint; raises CheckpointError for weights that do not fit."""
    require_pretraining(state, url)
    prefix = "target_encoder."
    weights = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
    encoder = build_encoder(cfg, num_prefix_of(weights))
    load_strictly(encoder, weights, f"{url}: weights of model.size {cfg.model.size}")
    return with_features(encoder, cfg.model.feature_blocks).eval().requires_grad_(False)


def load_strictly(module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load all weights; raises CheckpointError that names the first keys that differ, and how."""
    own = module.state_dict()
    differences = {
        "lacks": [key for key in own if key not in weights],
        "has in excess": [key for key in weights if key not in own],
        "has in another shape": [
            f"{key} ({list(weights[key].shape)} for {list(value.shape)})"
            for key, value in own.items()
            if key in weights and weights[key].shape != value.shape
        ],
    }
    texts = [
        f"{verb} {len(keys)}: {', '.join(keys[:NAMED_KEYS])}{', ...' if len(keys) > NAMED_KEYS else ''}"
        for verb, keys in differences.items()
        if keys
    ]
    if texts:
        raise CheckpointError(
            f"{where}: expected the {len(own)} tensors of the model; the file {'; '.join(texts)}"
        )
    module.load_state_dict(weights, strict=True)


def random_encoder(cfg: Config, seed: int) -> VisionTransformer3D:
    """A randomly initialised encoder; cfg.seed gives the one that pre-training starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return with_features(build_encoder(cfg), cfg.model.feature_blocks).eval().requires_grad_(False)


def raw_features(
    cfg: Config, store: PreparedStore, rows: np.ndarray, runtime: Runtime
) -> tuple[np.ndarray, np.ndarray]:
    """Baselines without an encoder: averaged voxels [n, V], mean A-scan over valid voxels [n, H]."""
    d, h, w = (min(a, b) for a, b in zip(cfg.spatial.image_size, BASELINE_VOXELS, strict=True))
    voxels, profiles = [], []
    batches = evaluation_batches(cfg, store, rows, EVALUATION_BATCH)
    total = math.ceil(len(rows) / EVALUATION_BATCH)
    for batch in map(runtime.to_device, track(batches, total, "raw voxels", "batches")):
        view = plain_view(batch)
        inside = voxel_valid(batch["matrix"], batch["valid_box"], cfg.spatial.image_size)
        voxels.append(F.adaptive_avg_pool3d(view, (d, h, w)).flatten(1).cpu())
        count_BH = inside.sum(dim=(1, 3)).clamp(min=1)
        profiles.append((view[:, 0].sum(dim=(1, 3)) / count_BH).cpu())
    return torch.cat(voxels).numpy(), torch.cat(profiles).numpy()


def device_features(store: PreparedStore, rows: np.ndarray, known_rows: np.ndarray) -> np.ndarray:
    """One-hot device of every row [n, devices]; a device that is not among `known_rows` is all zeros."""
    device = store.index["device"].fillna("unknown")
    known = sorted(set(device.loc[known_rows]))
    return (device.loc[rows].to_numpy()[:, None] == np.array(known)[None]).astype(np.float32)


def weights_digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        whole = value.detach().cpu().contiguous().flatten()
        digest.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
    return digest.hexdigest()


def features_folder(cfg: Config) -> str:
    """`${run.dir}/../features`: runs in one folder share what they computed."""
    return storage.join(storage.absolute(cfg.run.dir).rpartition("/")[0] or "/", "features")


@dataclass(frozen=True)
class KeptFeatures:
    """The features of one frozen encoder; rows are those of `store`."""

    encoder: nn.Module
    cfg: Config  # of the encoder: geometry, model; data.* says how rows are read
    store: PreparedStore
    runtime: Runtime

    @property
    def feature_width(self) -> int:
        width: Any = self.encoder.feature_width
        return int(width)

    def pooled(self, rows: np.ndarray) -> np.ndarray:
        """Mean and standard deviation over valid tokens, float32 [n, 2E], in the order of `rows`."""
        self._keep("pooled", rows)
        return self._load("pooled", rows)

    def keep_tokens(self, rows: np.ndarray) -> None:
        """Compute the tokens of those rows that have none yet."""
        self._keep("tokens", rows)

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Kept tokens float16 [n, N, E], in the order of `rows`."""
        return self._load("tokens", rows)

    def seconds(self, rows: np.ndarray) -> float:
        """Of the processor, that the tokens of these rows took when they were computed."""
        return float(self._load("tokens", rows, "seconds").sum())

    def valid(self, rows: np.ndarray) -> np.ndarray:
        """Which tokens lie in the acquired field, bool [n, N]; UserError for a volume without any."""
        columns = [f"valid_{axis}{end}" for axis in "dhw" for end in "01"]
        box = torch.from_numpy(np.array(self.store.index.loc[rows, columns], np.float32))
        matrix = torch.from_numpy(np.asarray(identity_matrix())).repeat(len(rows), 1, 1)
        valid = token_valid(matrix, box, self.cfg.grid, self.cfg.spatial.patch_size).numpy()
        if not valid.any(axis=1).all():
            empty = rows[~valid.any(axis=1)][:3].tolist()
            raise UserError(
                f"{self.store.url}: expected a valid token in every volume, found none in rows {empty}"
            )
        return valid

    @cached_property
    def url(self) -> str:
        """The folder of this encoder; made here, with what its name stands for."""
        values = dict(flatten(self.cfg))
        about = {
            "format_version": FORMAT_VERSION,
            "weights": weights_digest(self.encoder),
            "configuration": {key: values[key] for key in keys_of_features(values)},
            "geometry": self.store.attrs["geometry"],
            "normalisation": self.store.attrs["normalisation"],
            "precision": "bfloat16" if self.runtime.use_bf16 else "float32",
        }
        text = json.dumps(about, indent=1, sort_keys=True)
        url = storage.join(features_folder(self.cfg), hashlib.sha256(text.encode()).hexdigest()[:32])
        if not storage.exists(storage.join(url, "about.json")):
            storage.write_text(storage.join(url, "about.json"), text + "\n")
        return url

    @torch.no_grad()
    def compute(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """Compute, not keep: rows of a batch, their tokens float32 [B, N, E], their validity [B, N]."""
        if not len(rows):
            return
        encoder = self.encoder.to(self.runtime.device).eval()
        log.info("features of %d volumes are computed", len(rows))
        size = EVALUATION_BATCH
        batches = evaluation_batches(self.cfg, self.store, rows, size)
        for batch in track(batches, math.ceil(len(rows) / size), "features", "batches"):
            of_batch = batch["row"].numpy().copy()
            on_device = self.runtime.to_device(batch)
            with self.runtime.autocast():
                tokens = encoder(plain_view(on_device))
            yield of_batch, tokens.float(), on_device["context_valid"]
            if self.runtime.stop_requested:  # what is asked after SIGTERM; what is computed is kept
                raise StopRequested

    def _keep(self, kind: Kind, rows: np.ndarray) -> None:
        there = set(storage.list_names(storage.join(self.url, kind)))
        first: dict[str, int] = {}  # one row for each volume that is missing
        for row, name in zip(rows.tolist(), volume_digests(self.store, rows), strict=True):
            if f"{name}.npz" not in there:
                first.setdefault(name, row)
        start = time.process_time()
        for of_batch, tokens, valid in self.compute(np.array(sorted(first.values()), np.int64)):
            if kind == "pooled":
                values = self.runtime.to_torch(pool_tokens(tokens, valid))
            else:
                values = self.runtime.to_torch(tokens).to(torch.float16)
            batch = values.cpu().numpy()
            if not np.isfinite(batch).all():
                raise UserError(f"{self.url}: expected finite features of the encoder, found NaN or infinity")
            start, seconds = (now := time.process_time()), (now - start) / len(batch)
            for name, features in zip(volume_digests(self.store, of_batch), batch, strict=True):
                buffer = io.BytesIO()
                np.savez(buffer, features=features, seconds=np.array(seconds))
                storage.write_bytes(storage.join(self.url, kind, f"{name}.npz"), buffer.getvalue())

    def _load(self, kind: Kind, rows: np.ndarray, part: str = "features") -> np.ndarray:
        """What is kept of these rows, in their order; what is damaged or gone is computed again."""
        volumes = []
        for row, name in zip(rows, volume_digests(self.store, rows), strict=True):
            features = self._read(f"{kind}/{name}.npz", part)
            if features is None:
                self._keep(kind, np.array([row]))
                features = self._read(f"{kind}/{name}.npz", part)
            assert features is not None, name
            volumes.append(features)
        return np.stack(volumes)

    def _read(self, path: str, part: str) -> np.ndarray | None:
        """A part of a kept file; None where there is none, or a file without it, which is removed."""
        url = storage.join(self.url, path)
        if not storage.exists(url):
            return None
        try:
            with np.load(io.BytesIO(storage.read_bytes(url)), allow_pickle=False) as content:
                return np.array(content[part])
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
            is_older = part == "seconds" and isinstance(error, KeyError)
            why = "kept without its processor time" if is_older else f"damaged ({error})"
            log.warning("%s: %s; its features are computed again", url, why)
            storage.remove(url)
            return None


def pooled_of_tokens(kept: KeptFeatures, rows: np.ndarray) -> np.ndarray:
    """Mean and standard deviation float32 [n, 2E] of tokens that are kept, without the encoder."""
    parts, size = [], EVALUATION_BATCH
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        valid = torch.from_numpy(kept.valid(batch))
        parts.append(pool_tokens(torch.from_numpy(kept.tokens(batch)), valid).numpy())
    return np.concatenate(parts)
