"""Features of a frozen encoder, computed once per volume and kept on this machine.

In: an encoder, a prepared store (on a disk or in a bucket), rows. Out: pooled features float32 [n, 2E], or
the tokens float16 [n, N, E] with their validity bool [n, N].

Layout below `${run.dir}/../features`, which the runs beside each other share:
    ENCODER/about.json               what the name is a digest of, for people
    ENCODER/pooled/PART.npz          digest [b] of each volume and its features [b, 2E]: one batch each
    ENCODER/tokens/VOLUME.npz        tokens of one volume

ENCODER is a digest of the encoder's weights, of the configuration they rest on, of geometry, normalisation
and precision; VOLUME is one of the voxels, the valid field and the intensity statistics of a volume. So a
changed checkpoint or a volume prepared again has features of its own, and nothing can be out of date. Every
file is written whole, after its batch: a kill costs one batch. A damaged file (the zip's CRC) is computed
again. The folder may be removed at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from data_setup.transforms import identity_matrix
from data_setup.valid_field import token_valid
from models.probes.features import pool_tokens
from utils import storage
from utils.config.load import flatten
from utils.config.schema import Config, keys_with
from utils.errors import UserError
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
VOLUME_COLUMNS = (
    "checksum",
    *(f"valid_{a}{i}" for a in "dhw" for i in "01"),
    "intensity_mean",
    "intensity_std",
)
log = logging.getLogger(__name__)


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
    cfg: Config  # of the encoder: geometry, model; data.* and eval.batch_size say how rows are read
    store: PreparedStore
    runtime: Runtime
    folder: str  # of all encoders: features_folder

    def pooled(self, rows: np.ndarray) -> np.ndarray:
        """Mean and standard deviation over valid tokens, float32 [n, 2E], in the order of `rows`."""
        wanted = self._volumes(rows)
        kept = self._read_parts(set(wanted))
        missing = _first_rows(rows, wanted, kept)
        for of_batch, tokens, valid in self.compute(missing):
            features = self.runtime.to_torch(pool_tokens(tokens, valid)).cpu().numpy()
            _require_finite(features, self.url)
            names = self._volumes(of_batch)
            self._write(f"pooled/{_digest(sorted(names))}.npz", volume=np.array(names), features=features)
            kept.update(zip(names, features, strict=True))
        return np.stack([kept[name] for name in wanted])

    def keep_tokens(self, rows: np.ndarray) -> None:
        """Compute the tokens of those rows that have none yet."""
        names = self._volumes(rows)
        there = set(storage.list_names(storage.join(self.url, "tokens")))
        missing = _first_rows(rows, names, {name: None for name in names if f"{name}.npz" in there})
        for of_batch, tokens, _ in self.compute(missing):
            whole = self.runtime.to_torch(tokens).to(torch.float16).cpu().numpy()
            _require_finite(whole, self.url)
            for name, one in zip(self._volumes(of_batch), whole, strict=True):
                self._write(f"tokens/{name}.npz", tokens=one)

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Kept tokens float16 [n, N, E] of rows that `keep_tokens` has seen."""
        volumes = []
        for row, name in zip(rows, self._volumes(rows), strict=True):
            content = self._read(f"tokens/{name}.npz")
            if content is None:
                self.keep_tokens(np.array([row]))
                content = self._read(f"tokens/{name}.npz")
            assert content is not None, name
            volumes.append(content["tokens"])
        return np.stack(volumes)

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
            "configuration": {key: values[key] for key in keys_with("identity")},
            "geometry": self.store.attrs["geometry"],
            "normalisation": self.store.attrs["normalisation"],
            "precision": "bfloat16" if self.runtime.use_bf16 else "float32",
        }
        text = json.dumps(about, indent=1, sort_keys=True)
        url = storage.join(self.folder, hashlib.sha256(text.encode()).hexdigest()[:32])
        if not storage.exists(storage.join(url, "about.json")):
            storage.write_text(storage.join(url, "about.json"), text + "\n")
        return url

    def _volumes(self, rows: np.ndarray) -> list[str]:
        """The digest of each row's volume and of what its normalisation rests on."""
        table = self.store.index.loc[rows, list(VOLUME_COLUMNS)].to_numpy(object).tolist()
        return [_digest(values) for values in table]

    @torch.no_grad()
    def compute(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """Compute, not keep: rows of a batch, their tokens float32 [B, N, E], their validity [B, N]."""
        if not len(rows):
            return
        encoder = self.encoder.to(self.runtime.device).eval()
        log.info("features of %d volumes are computed", len(rows))
        size = self.cfg.eval.batch_size
        batches = evaluation_batches(self.cfg, self.store, rows, size)
        hidden = not sys.stderr.isatty()
        for batch in tqdm(batches, total=math.ceil(len(rows) / size), unit="batch", disable=hidden):
            of_batch = batch["row"].numpy().copy()
            on_device = self.runtime.to_device(batch)
            with self.runtime.autocast():
                tokens = encoder(plain_view(on_device))
            yield of_batch, tokens.float(), on_device["context_valid"]

    def _read_parts(self, wanted: set[str]) -> dict[str, np.ndarray]:
        """Kept pooled features of the wanted volumes."""
        kept: dict[str, np.ndarray] = {}
        for name in storage.list_names(storage.join(self.url, "pooled")):
            content = self._read(f"pooled/{name}")
            if content is not None:
                rows = zip(content["volume"].tolist(), content["features"], strict=True)
                kept.update({volume: features for volume, features in rows if volume in wanted})
        return kept

    def _write(self, path: str, **arrays: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy types allow_pickle, and no name else
        storage.write_bytes(storage.join(self.url, path), buffer.getvalue())

    def _read(self, path: str) -> dict[str, np.ndarray] | None:
        """The arrays of a kept file; None, and a warning, for a damaged one, which is removed."""
        url = storage.join(self.url, path)
        if not storage.exists(url):
            return None
        try:
            with np.load(io.BytesIO(storage.read_bytes(url)), allow_pickle=False) as content:
                return dict(content)
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            log.warning("%s: damaged (%s); its features are computed again", url, error)
            storage.remove(url)
            return None


def _first_rows(rows: np.ndarray, names: list[str], kept: dict[str, Any]) -> np.ndarray:
    """One row for each volume that is not kept, ascending."""
    first: dict[str, int] = {}
    for row, name in zip(rows.tolist(), names, strict=True):
        if name not in kept:
            first.setdefault(name, row)
    return np.array(sorted(first.values()), np.int64)


def _digest(values: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def _require_finite(features: np.ndarray, where: str) -> None:
    if not np.isfinite(features).all():
        raise UserError(f"{where}: expected finite features of the encoder, found NaN or infinity")
