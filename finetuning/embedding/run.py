"""Embed every volume of a collection: reading overlaps with the encoder, each row is kept as it is done.

In: the words of the command line. Out: the folder of folder.py and the exit code. A volume goes through the
encoder alone, so its features depend on nothing but itself and the weights: not on its neighbours, on a
restart, or on how many processes share the rows (row i of those still to do belongs to process i % n).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from data_setup.resample import rule_of
from data_setup.store.format import KEPT, NORMALISATION, geometry_of
from data_setup.store.reader import PreparedStore
from finetuning.cohort.source import (
    check_fit,
    find_checkpoint,
    on_own_endpoint,
    overridden,
    require_pretraining,
)
from finetuning.embedding.folder import Embedded, Folder
from finetuning.embedding.scans import Places, find_scans
from finetuning.embedding.stream import Fault, NoFeaturesError, read_ahead, rejected, tokens_of
from finetuning.embedding.volumes import FileVolumes, Reject, StoreVolumes, Volume, Volumes
from finetuning.features.kept import weights_digest
from finetuning.features.pooled import pretrained_encoder
from models.probes.features import pool_tokens
from models.vit3d import VisionTransformer3D
from utils.checkpoint import load_checkpoint
from utils.config.load import config_of_yaml, storage_options_of
from utils.config.schema import Config
from utils.errors import EXIT_FAILURE, EXIT_FINISHED, UserError
from utils.log import setup_logging
from utils.run.lease import Work, hold
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.terminal import say, track

FORMAT_VERSION = 1
EMBEDDING = Work("finetuning.embed into this folder", "another --out")
# of the checkpoint's configuration; the rest is what the encoder is
MAY_CHANGE = ("data.", "train.use_bf16", "model.feature_blocks")
END_PATIENCE_S = 24 * 3600.0  # the first process done waits for the last; torchrun ends all when one fails
log = logging.getLogger(__name__)


def embed(
    checkpoint: str, store: str | None, places: Places, out: str, patches: bool, overrides: Sequence[str]
) -> int:
    """Write the folder `out`; returns the exit code: EXIT_FAILURE where a volume has no features."""
    setup_logging(int(os.environ.get("RANK", "0")))
    options = storage_options_of(overrides)
    url = find_checkpoint(checkpoint, options)
    state = load_checkpoint(url, options)
    require_pretraining(state, url)
    cfg = _config(state, url, store, overrides)
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


def _config(state: dict[str, Any], url: str, store: str | None, overrides: Sequence[str]) -> Config:
    """The checkpoint's configuration with the store and the overrides; raises ConfigError."""
    words = [*overrides, *([f"data.store={store}"] if store else [])]
    return on_own_endpoint(
        overridden(config_of_yaml(state["config"], url), url, words, MAY_CHANGE), overrides
    )


def _volumes(
    cfg: Config, state: dict[str, Any], url: str, store: str | None, places: Places, out: str
) -> Volumes:
    """What is to be embedded; raises UserError where it does not fit the checkpoint."""
    options = cfg.data.storage_options
    if store is not None:
        opened = PreparedStore.open(store, options, cfg.data.cache_dir)
        check_fit(cfg, opened, state, url)
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
    """Read, embed and write these rows."""
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
    """Mean and standard deviation over valid tokens [E], and the tokens [N, E]; a reject where there are
    none, or where they are not finite.
    """
    try:
        tokens_BNE, valid_BN = tokens_of(encoder, cfg, volume, runtime)
    except NoFeaturesError as error:
        return Embedded(volume.fields | {"status": error.status, "message": str(error)})
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
