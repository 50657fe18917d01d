"""Embed every volume of a collection: reading overlaps with the encoder, each row is kept as it is done.

In: the words of the command line. Out: the exit code, and the folder, with which the same command goes on
after a kill. A volume goes through the encoder by itself, so its features depend on nothing but itself and
the weights: not on its neighbours, on a restart, or on how many processes share the rows (row i of those
still to do belongs to process i % n).

    embed.json          what every row rests on; a start with anything else is refused
    rows/{row:06d}.npz  a row: features, status, the version of its volume; written whole, after its patches
    patches.zarr/       with --patches: `tokens` float16 [V, N, E] and `valid` bool [V, N], a chunk a volume;
                        V counts the rows of the store, or the files; NaN: a row without features
    features.parquet    all rows: the store's index columns, mean and std float32 [E], seen_in_pretraining

A row is done when its file has the version that its volume has now; rejects are tried again.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from torch import nn
from zarr.codecs import BloscCodec, Crc32cCodec

from data_setup.resample import rule_of
from data_setup.store.format import INDEX_COLUMNS, KEPT, NORMALISATION, geometry_of
from data_setup.store.reader import PreparedStore
from finetuning.cohort import source
from finetuning.embedding.scans import Places, find_scans, is_of
from finetuning.embedding.stream import Fault, read_ahead, rejected, tokens_of
from finetuning.embedding.volumes import FileVolumes, Reject, StoreVolumes, Volume, Volumes
from finetuning.features.kept import pretrained_encoder, weights_digest
from models.probes.features import pool_tokens
from models.vit3d import VisionTransformer3D
from utils import storage
from utils.checkpoint import load_checkpoint, require_pretraining
from utils.config.load import MAY_CHANGE, config_of_yaml, storage_options_of
from utils.config.schema import Config, StorageOptions
from utils.errors import EXIT_FAILURE, EXIT_FINISHED, UserError
from utils.log import setup_logging
from utils.run.lease import Work, hold
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.storage.zarr_keys import ObjectStore
from utils.terminal import say, track
from utils.workers import in_threads

ABOUT, TABLE, PATCHES = "embed.json", "features.parquet", "patches.zarr"
FORMAT_VERSION = 1
EMBEDDING = Work("finetuning.embed into this folder", "another --out")
END_PATIENCE_S = 24 * 3600.0  # the first process done waits for the last; torchrun ends all when one fails
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Embedded:
    """One row: features float32 [E] each, and tokens float32 [N, E] with their validity; None of a reject."""

    fields: dict[str, Any]  # INDEX_COLUMNS, those that are known
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    tokens: np.ndarray | None = None
    valid: np.ndarray | None = None


@dataclass(frozen=True)
class Folder:
    """Reads and writes the folder; every process of a run has one."""

    url: str
    options: StorageOptions
    with_patches: bool

    def begin(self, about: Mapping[str, Any], num_rows: int, shape: tuple[int, int]) -> None:
        """Make the folder for rows of `shape` (N, E), or check the one here; UserError names a difference."""
        about_url = storage.join(self.url, ABOUT)
        if storage.exists(about_url, self.options):
            try:
                written = dict(json.loads(storage.read_text(about_url, self.options)))
            except (ValueError, TypeError) as error:
                what = f"expected a file of finetuning.embed, found another ({error})"
                raise UserError(f"{about_url}: {what}; give another --out") from error
            for key in sorted({*written, *about}):
                if written.get(key) != about.get(key):
                    raise UserError(
                        f"{about_url}: {key}: expected {_short(about.get(key))} of this command, found "
                        f"{_short(written.get(key))} of an earlier one; give another --out"
                    )
        elif [n for n in storage.list_names(self.url, self.options) if not n.startswith("lease_")]:
            raise UserError(f"--out: expected a new folder or one of this command, found files in {self.url}")
        text = json.dumps(about, indent=1, sort_keys=True) + "\n"
        storage.write_text(about_url, text, self.options)  # first: a start killed after it can go on
        if self.with_patches:
            self._make_patches(num_rows, shape)

    def _make_patches(self, num_rows: int, shape: tuple[int, int]) -> None:
        """The two arrays: those that are here made longer, as a store only grows, the others new."""
        keys = ObjectStore(storage.join(self.url, PATCHES), self.options, read_only=False)
        group = zarr.open_group(keys, mode="a")
        codecs = [BloscCodec(cname="zstd", clevel=3, shuffle="shuffle", typesize=2), Crc32cCodec()]
        kinds: dict[str, Any] = {
            "tokens": {"dtype": "float16", "fill_value": np.nan, "compressors": codecs},
            "valid": {"dtype": "bool", "fill_value": False},
        }
        for name, of_kind in kinds.items():
            inner = shape if name == "tokens" else shape[:1]
            if name not in group:
                names = ("row", "token", "feature")[: 1 + len(inner)]
                whole, chunk = (num_rows, *inner), (1, *inner)
                group.create_array(name, shape=whole, chunks=chunk, dimension_names=names, **of_kind)
            array = group[name]
            assert isinstance(array, zarr.Array)
            if array.shape[0] < num_rows:
                array.resize((num_rows, *inner))

    @cached_property
    def _patches(self) -> dict[str, zarr.Array]:
        keys = ObjectStore(storage.join(self.url, PATCHES), self.options, read_only=False)
        return {
            name: zarr.open_array(keys, path=name, mode="r+", zarr_format=3) for name in ("tokens", "valid")
        }

    def write(self, row: int, version: str, result: Embedded) -> None:
        if result.tokens is not None:
            assert result.valid is not None
            self._patches["tokens"][row] = result.tokens.astype(np.float16)
            self._patches["valid"][row] = result.valid
        elif self.with_patches:  # a reject now, perhaps not before: no patches of another version stay
            self._patches["tokens"][row], self._patches["valid"][row] = np.nan, False
        arrays = {"facts": np.array(json.dumps({"version": version, "fields": result.fields}))}
        if result.mean is not None and result.std is not None:
            arrays |= {"mean": result.mean, "std": result.std}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        storage.write_bytes(self._row_url(row), buffer.getvalue(), self.options)

    def _row_url(self, row: int) -> str:
        return storage.join(self.url, "rows", f"{row:06d}.npz")

    def missing(self, rows: Sequence[int], versions: Sequence[str]) -> list[int]:
        """The rows that are not done, ascending."""
        there = set(storage.list_names(storage.join(self.url, "rows"), self.options))
        kept = in_threads(lambda row: self._read(row) if f"{row:06d}.npz" in there else None, rows)
        return [
            row
            for row, version, content in zip(rows, versions, kept, strict=True)
            if content is None or not is_of(content[1], version) or content[0].mean is None
        ]

    def _read(self, row: int) -> tuple[Embedded, str] | None:
        """A row without its patches and its version; None for a damaged file, so that it is made again."""
        try:
            with np.load(io.BytesIO(storage.read_bytes(self._row_url(row), self.options))) as content:
                facts = json.loads(str(content["facts"]))
                parts = {name: np.array(content[name]) for name in content.files if name != "facts"}
            return Embedded(dict(facts["fields"]), **parts), facts["version"]
        except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError):
            return None

    def finish(
        self, rows: Sequence[int], index: pd.DataFrame | None, about: Mapping[str, Any], seen: Sequence[str]
    ) -> pd.DataFrame:
        """Write features.parquet of these rows; returns its index columns. `index`: what a store says of the
        rows now, which may be more than when they were embedded; `seen`: whom pre-training saw.

        Raises UserError where a row has no file: another start with this folder removed it.
        """
        results = in_threads(self._read, rows)
        lost = [row for row, content in zip(rows, results, strict=True) if content is None]
        if lost:
            raise UserError(f"{self._row_url(lost[0])}: expected the row just written, found none; run again")
        parts = [content[0] for content in results if content is not None]
        types = {name: kind for name, (kind, _) in INDEX_COLUMNS.items()}
        # a path whose name may be no UTF-8 has its odd bytes as \xff: a table holds text
        rows_fields = [
            part.fields | {"path": os.fsencode(part.fields["path"]).decode("utf-8", "backslashreplace")}
            for part in parts
        ]
        own = pd.DataFrame(rows_fields, columns=list(types))
        if index is None:
            index = own.assign(flipped_d=[part.fields.get("flipped_d", False) for part in parts]).astype(
                types
            )
        else:
            index = index.assign(status=own["status"].to_numpy(), message=own["message"].to_numpy())
            index = index.astype(types).reset_index(drop=True)
        people = index["person_id"]
        is_seen = people.isin(list(seen)).astype("boolean").mask(people.isna())
        table = pa.Table.from_pandas(index.assign(seen_in_pretraining=is_seen), preserve_index=False)
        for name in ("mean", "std"):
            lists = pa.array([getattr(part, name) for part in parts], pa.list_(pa.float32(), about["width"]))
            table = table.append_column(name, lists)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), "embed": json.dumps(about)})
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        storage.write_bytes(storage.join(self.url, TABLE), buffer.getvalue(), self.options)
        return index


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:60]} ... {text[-50:]}"


def embed(
    checkpoint: str, store: str | None, places: Places, out: str, patches: bool, overrides: Sequence[str]
) -> int:
    """Write the folder `out`; returns the exit code: EXIT_FAILURE where a volume has no features."""
    setup_logging(int(os.environ.get("RANK", "0")))
    options = storage_options_of(overrides)
    url = source.find_checkpoint(checkpoint, options)
    state = load_checkpoint(url, options)
    require_pretraining(state, url)
    words = [*overrides, *([f"data.store={store}"] if store else [])]
    cfg = source.overridden(config_of_yaml(state["config"], url), url, words, MAY_CHANGE["embed"])
    cfg = source.on_own_endpoint(cfg, overrides)
    volumes = _volumes(cfg, state, url, store, places, out)
    in_group = int(os.environ.get("WORLD_SIZE", "1")) > 1
    runtime = open_runtime(cfg.train.use_bf16, END_PATIENCE_S if in_group else None)
    encoder = pretrained_encoder(cfg, state, url)
    about = {
        "format_version": FORMAT_VERSION,
        "checkpoint_sha256": state["checksum"],
        "weights": weights_digest(encoder),
        "geometry": geometry_of(cfg.spatial, volumes.planes) | {"patch_size": list(cfg.spatial.patch_size)},
        "normalisation": state["normalisation"],
        "precision": "bfloat16" if runtime.use_bf16 else "float32",
        "patches": patches,
        "width": encoder.feature_width,
        **volumes.about,
    }
    if encoder.feature_blocks:
        about["feature_blocks"] = list(encoder.feature_blocks)
    folder = Folder(out, cfg.data.storage_options, patches)
    lease = hold(out, cfg.data.storage_options, work=EMBEDDING) if runtime.group.is_first else nullcontext()
    with lease:
        num_rejects = _fill(folder, about, volumes, encoder, cfg, runtime, state["participants"])
    runtime.group.close()
    return EXIT_FAILURE if num_rejects else EXIT_FINISHED


def _fill(
    folder: Folder,
    about: dict[str, Any],
    volumes: Volumes,
    encoder: VisionTransformer3D,
    cfg: Config,
    runtime: Runtime,
    seen: Sequence[str],
) -> int:
    """What the folder lacks, by all processes; returns how many rows have no features."""
    todo: list[int] = []
    if runtime.group.is_first:
        folder.begin(about, volumes.num_rows, (math.prod(cfg.grid), encoder.feature_width))
        todo = folder.missing(volumes.rows, volumes.versions)
        log.info("%d volumes, %d to do", len(volumes.rows), len(todo))
    todo = runtime.group.broadcast(todo)
    share = todo[runtime.rank :: runtime.world_size]
    embed_rows(encoder.to(runtime.device), cfg, volumes, share, folder, runtime)
    runtime.group.any(False)  # all rows are written
    num_rejects = 0
    if runtime.group.is_first:
        index = folder.finish(volumes.rows, volumes.index, about, seen)
        num_rejects = report(folder.url, index, len(todo))
    return runtime.group.broadcast(num_rejects)


def _volumes(
    cfg: Config, state: dict[str, Any], url: str, store: str | None, places: Places, out: str
) -> Volumes:
    """What is to be embedded; raises UserError where it does not fit the checkpoint."""
    options = cfg.data.storage_options
    if store is not None:
        opened = PreparedStore.open(store, options, cfg.data.cache_dir)
        source.check_fit(cfg, opened, state, url)
        if not len(opened.kept):
            raise UserError(f"{store}: expected a volume to embed, found none that is kept")
        return StoreVolumes(opened)
    if state["normalisation"] != NORMALISATION:
        raise UserError(
            f"{url}: normalisation: expected {NORMALISATION}, which files are given, "
            f"found {state['normalisation']}"
        )
    scans = find_scans(places, options, cfg.data.workers, out)
    return FileVolumes(scans, cfg.spatial, options, rule_of(state))


def embed_rows(
    encoder: nn.Module, cfg: Config, volumes: Volumes, rows: Sequence[int], folder: Folder, runtime: Runtime
) -> None:
    if not rows:
        return
    version = dict(zip(volumes.rows, volumes.versions, strict=True))
    started, in_encoder = time.perf_counter(), 0.0
    coming = read_ahead(cfg, volumes, rows)
    if runtime.group.is_first:
        coming = track(coming, len(rows), "embed", "volumes")
    for row, volume in coming:
        if isinstance(volume, Reject):
            result = Embedded(volume.fields)
        else:
            before = time.perf_counter()
            with Fault() as fault:
                result = embed_volume(encoder, cfg, volume, runtime, folder.with_patches)
            if fault.error is not None:
                result = Embedded(rejected(volume.fields, fault.error).fields)
            in_encoder += time.perf_counter() - before
        folder.write(row, version[row], result)
    share = in_encoder / (time.perf_counter() - started)
    log.info("embedded %d volumes, %.0f %% of the time in the encoder", len(rows), 100 * share)


def embed_volume(
    encoder: nn.Module, cfg: Config, volume: Volume, runtime: Runtime, with_tokens: bool
) -> Embedded:
    """Mean and standard deviation over valid tokens [E], and the tokens [N, E]; raises NoFeaturesError."""
    tokens_BNE, valid_BN = tokens_of(encoder, cfg, volume, runtime)
    mean, std = np.split(pool_tokens(tokens_BNE, valid_BN)[0].cpu().numpy(), 2)
    if not with_tokens:
        return Embedded(volume.fields, mean, std)
    return Embedded(volume.fields, mean, std, tokens_BNE[0].cpu().numpy(), valid_BN[0].bool().cpu().numpy())


def report(url: str, index: pd.DataFrame, num_tried: int) -> int:
    """Print what is in the table and what this start did; returns how many rows have no features."""
    rejects = index[index["status"] != KEPT]
    for fields in rejects.itertuples():
        say(f"rejected: {fields.path}: {fields.status}: {fields.message}", file=sys.stderr)
    done = len(index) - len(rejects)
    say(
        f"{url}: {done} volumes with features, {len(rejects)} without; "
        f"embedded now {num_tried - len(rejects)}, before {len(index) - num_tried}"
    )
    return len(rejects)
