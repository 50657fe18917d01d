"""The file of a trained head: all that a prediction needs but the frozen encoder, which it names by checksum.

In: a head of finetuning.heads.frozen or finetuning.heads.finetune. Out: `head.pt` and its seal
(utils.checkpoint); `open_head` loads it with its encoder, and refuses another one; `predict_rows` gives
scores of volumes.

The file holds tensors and plain values: kind ("head"), head (its weights), head_kind, hidden,
num_outputs; task {kind, names, label_column, unit}; encoder {url, checksum}; encoder_weights (None: frozen);
standardise {mean [F], std [F]} or None; normalisation and geometry of the store; config (YAML);
participants {train, val}; pretraining_participants; validation (score, loss, chosen rates and epoch);
calibration and familiarity (finetuning/heads/confidence.py) or None, spacings_mm {d, h} of the training
volumes, to two digits: older files have none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_setup.loader import EVALUATION_BATCH
from data_setup.resample import rule_of
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import TRAIN, VAL, Cohort
from finetuning.cohort.source import Source, find_checkpoint, require_known_place, warn_of_planes
from finetuning.features.kept import KeptFeatures, load_strictly, pretrained_encoder
from finetuning.heads.confidence import Calibration, Familiarity
from finetuning.heads.objective import to_scores
from models.heads import build_head, reads_tokens
from models.probes.features import pool_tokens
from models.vit3d import VisionTransformer3D
from models.vjepa3d import build_encoder
from models.weights.shape import num_prefix_of, with_features
from utils import storage
from utils.checkpoint import CheckpointError, CheckpointWriter, load_checkpoint, well_formed
from utils.config.load import config_of_yaml, to_yaml
from utils.config.schema import Config, StorageOptions
from utils.errors import UserError
from utils.runtime.single import Runtime

NAME = "head"
KEYS = {"head", "head_kind", "hidden", "num_outputs", "task", "encoder", "encoder_weights"}
KEYS |= {"normalisation", "geometry", "config", "standardise", "participants", "pretraining_participants"}
KEYS |= {"validation"}
WIDEST = 2**16  # hidden units of any head


class Standardise:
    """(features - mean) / std, mean and std [F] of the training volumes."""

    def __init__(self, mean: np.ndarray, std: np.ndarray) -> None:
        self.mean, self.std = (torch.as_tensor(v, dtype=torch.float32) for v in (mean, std))

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean.to(features.device)) / self.std.to(features.device)


@dataclass(frozen=True)
class Head:
    """A trained head with its encoder, both in evaluation mode."""

    url: str
    checksum: str  # of the head's file
    module: nn.Module
    encoder: VisionTransformer3D
    is_frozen: bool  # whether the encoder is that of its checkpoint
    standardise: Standardise | None
    cfg: Config
    kind: str  # of cfg.task.kind
    names: tuple[str, ...]
    state: dict[str, Any]  # the file's content


def head_state(
    source: Source,
    store: PreparedStore,
    cohort: Cohort,
    head: nn.Module,
    standardise: Standardise | None,
    validation: dict[str, Any],
    encoder_weights: dict[str, Tensor] | None = None,
    *,
    calibration: Calibration,
    familiarity: Familiarity | None,
) -> dict[str, Any]:
    """The content of a head's file; `validation` holds the chosen `epoch`, which is the file's step."""
    cfg = source.cfg
    people = {
        name: sorted(set(cohort.person[cohort.fold == fold].tolist()))
        for name, fold in (("train", TRAIN), ("val", VAL))
    }
    column = cfg.task.label_column if cohort.kind != "multilabel" else ", ".join(cohort.names)
    return common_state(source, store, people) | {
        "kind": "head",
        "step": validation["epoch"],
        "head": head.state_dict(),
        "num_outputs": cohort.num_outputs,
        "task": {
            "kind": cohort.kind,
            "names": list(cohort.names),
            "label_column": column,
            "unit": cfg.task.unit,
        },
        "encoder_weights": encoder_weights,
        "standardise": None if standardise is None else {"mean": standardise.mean, "std": standardise.std},
        "validation": validation,
        "calibration": calibration.state(),
        "familiarity": None if familiarity is None else familiarity.state(),
    }


def common_state(source: Source, store: PreparedStore, people: dict[str, list[str]]) -> dict[str, Any]:
    """What the file of every head holds, of labels or of what lies on volumes; `people`: train and val."""
    cfg, index = source.cfg, store.index
    used = index[(index.status == KEPT) & index.person_id.isin(people["train"])]
    return {
        "spacings_mm": {
            axis: sorted({float(f"{mm:.2g}") for mm in used[f"spacing_before_{axis}"].dropna()})
            for axis in "dh"
        },
        "head_kind": cfg.head.kind,
        "hidden": cfg.head.hidden,
        "encoder": {"url": storage.absolute(source.url), "checksum": source.state["checksum"]},
        "normalisation": store.attrs["normalisation"],
        "geometry": store.attrs["geometry"],
        "config": to_yaml(cfg),
        "participants": people,
        "pretraining_participants": sorted(source.state["participants"]),
    }


def write_head(cfg: Config, state: dict[str, Any]) -> str:
    """Write `head.pt` and its seal into train.ckpt_dir, which may be in a bucket; returns its URL."""
    assert cfg.train.ckpt_dir is not None  # finetuning.train has asked for one
    writer = CheckpointWriter(cfg.train.ckpt_dir, keep_last=None, options=cfg.data.storage_options)
    writer.save(state, [NAME])
    writer.close()
    return storage.join(cfg.train.ckpt_dir, f"{NAME}.pt")


def head_url(wanted: str) -> str:
    """The file of a head that is named by itself or by its run's folder."""
    return wanted if wanted.endswith(".pt") else storage.join(wanted, "checkpoints", f"{NAME}.pt")


def open_head(wanted: str, options: StorageOptions | None = None, encoder_url: str | None = None) -> Head:
    """A head from its file or its run's folder, with its encoder: from `encoder_url`, a file or a run's
    folder, else from where it was.

    Raises CheckpointError for a damaged file, one that is no head's, or another encoder's checkpoint.
    """
    url = head_url(wanted)
    state = load_checkpoint(url, options)
    if state.get("kind") != "head":
        raise CheckpointError(
            f"{url}: expected the file of a head, which finetuning.train writes, found a checkpoint with "
            f"{', '.join(sorted(state)[:5])}"
        )
    if lost := sorted(KEYS - set(state)):
        raise CheckpointError(f"{url}: expected the file of a head, found no {', '.join(lost[:3])}")
    with well_formed(url, "the file of a head"):
        require_size(state, url, len(state["task"]["names"]))
        cfg = config_of_yaml(state["config"], url)
        if state["encoder_weights"] is None:
            encoder = pretrained_encoder(cfg, *checkpoint_of(state, url, options, encoder_url))
        else:
            encoder = trained_encoder(cfg, state["encoder_weights"], f"{url}: encoder_weights")
        module = build_head(state["head_kind"], encoder.feature_width, state["num_outputs"], state["hidden"])
        load_strictly(module, state["head"], f"{url}: head")
        scale = state["standardise"]
        return Head(
            url,
            state["checksum"],
            module.eval().requires_grad_(False),
            encoder,
            state["encoder_weights"] is None,
            None if scale is None else Standardise(scale["mean"], scale["std"]),
            cfg,
            state["task"]["kind"],
            tuple(state["task"]["names"]),
            state,
        )


def require_size(state: dict[str, Any], url: str, most: int) -> None:
    """Raise CheckpointError for sizes that a head of so many outputs has not, before memory is asked for."""
    for name, highest in (("num_outputs", max(1, most)), ("hidden", WIDEST)):
        if name in state and not 1 <= state[name] <= highest:
            raise CheckpointError(f"{url}: {name}: expected 1 to {highest}, found {state[name]}")


def trained_encoder(cfg: Config, weights: dict[str, Tensor], where: str) -> VisionTransformer3D:
    """The encoder that was trained with a head, in evaluation mode; raises CheckpointError."""
    encoder = build_encoder(cfg, num_prefix_of(weights))
    load_strictly(encoder, weights, where)
    return with_features(encoder, cfg.model.feature_blocks).eval().requires_grad_(False)


def checkpoint_of(
    state: dict[str, Any], url: str, options: StorageOptions | None, encoder_url: str | None
) -> tuple[dict[str, Any], str]:
    """The checkpoint, perhaps moved, that a head was trained on, and its URL; else CheckpointError."""
    if encoder_url is None:
        require_known_place(state["encoder"]["url"], url, "model.checkpoint")
    source = find_checkpoint(encoder_url or state["encoder"]["url"], options or StorageOptions())
    checkpoint = load_checkpoint(source, options)
    if checkpoint["checksum"] != state["encoder"]["checksum"]:
        raise CheckpointError(
            f"{source}: expected the encoder of {url}, sha256 {state['encoder']['checksum'][:12]}, found "
            f"{checkpoint['checksum'][:12]}: the head was trained on another checkpoint"
        )
    return checkpoint, source


def require_same_grid(state: dict[str, Any], url: str, store: PreparedStore) -> None:
    """Raise UserError unless the store's volumes are on the grid of the head at `url`. Planes of
    another rule are a warning: an earlier head can ask a current store.
    """
    for key in ("normalisation", "geometry"):
        expected, actual = state[key], store.attrs[key]
        if key == "geometry":
            warn_of_planes(store, rule_of(expected), url)
            expected, actual = ({**part, "planes": store.planes} for part in (expected, actual))
        if actual != expected:
            raise UserError(f"{store.url}: {key}: expected {state[key]} of {url}, found {store.attrs[key]}")


def predict_rows(head: Head, store: PreparedStore, rows: np.ndarray, runtime: Runtime) -> np.ndarray:
    """Scores of volumes float64 [n, C], in the order of `rows`: probabilities, or values in the label's unit.

    Features of a frozen encoder are kept (finetuning.features). Raises UserError where the store's geometry
    or normalisation is not what the head was trained on.
    """
    require_same_grid(head.state, head.url, store)
    module = head.module.to(runtime.device)
    with torch.no_grad():
        outputs = [module(*arguments).cpu() for arguments in _arguments(head, store, rows, runtime)]
    return to_scores(head.kind, torch.cat(outputs).double()).numpy()


def _arguments(
    head: Head, store: PreparedStore, rows: np.ndarray, runtime: Runtime
) -> Iterator[tuple[Tensor, ...]]:
    """What the head reads, batch by batch, on the device."""
    kept = KeptFeatures(head.encoder, head.cfg, store, runtime)
    of_tokens, size = reads_tokens(head.state["head_kind"]), EVALUATION_BATCH
    scale = head.standardise or (lambda features: features)
    if not head.is_frozen:
        for _, tokens, valid in kept.compute(rows):
            yield (tokens, valid) if of_tokens else (scale(pool_tokens(tokens, valid)),)
    elif of_tokens:
        kept.keep_tokens(rows)
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            arrays = kept.tokens(batch), kept.valid(batch)
            yield tuple(torch.from_numpy(array).to(runtime.device) for array in arrays)
    else:
        yield (scale(torch.from_numpy(kept.pooled(rows)).to(runtime.device)),)
