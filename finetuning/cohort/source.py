"""What a task starts from: a checkpoint of pre-training, and the configuration of the task on top of it.

In: a task file of configs/ and `model.checkpoint`, a file or a run's folder. Out: a `Source`: the weights,
and a whole configuration whose data, geometry, model and method are those of the checkpoint unless the file
or the command line changes them. What the weights rest on may not be changed: check_fit. A key that
the way of training does not read is refused where somebody sets it, since it would do nothing: refuse_unread.
What a checkpoint's configuration brings along is nobody's word. A file may hold a key that has no default,
since it must be there; the command line may not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING as REQUIRED
from omegaconf import OmegaConf

from data_setup.resample import rule_of
from data_setup.store.reader import PreparedStore
from finetuning.cohort.labels import wanted_checkpoint
from utils import storage
from utils.checkpoint import list_steps, load_checkpoint, require_pretraining
from utils.config import load
from utils.config.schema import DENSE_KINDS, Config, StorageOptions, keys_with, leaves
from utils.config.written import read_file, read_words
from utils.errors import ConfigError, UserError
from utils.storage.errors import split_scheme

# sections of the checkpoint's configuration that a task goes on with
INHERITED = ("data", "spatial", "augment", "model", "method")
BEST_FIRST = ("best_probe.pt", "best_rankme.pt")
log = logging.getLogger(__name__)
PLAIN = "features are of plain volumes"
ONE_FILE = "only head.pt is written"
# key, or section with a dot at its end -> what is done instead
NEITHER = {
    "optim.cooldown_ratio": "the rate falls as a cosine",
    "optim.layer_decay": "finetune.layer_decay is that of a trained encoder",
    "val.max_volumes": "validation reads every labelled volume of val",
    "run.profile": "no trace is written",
}
DENSE = {
    **NEITHER,
    "head.learning_rates": "optim.base_lr is the rate",
    "head.weight_decays": "optim.weight_decay is the decay",
    "method.drop_path": PLAIN,
    "method.dropout": PLAIN,
    "data.sampling": "each plane is read once an epoch",
    **dict.fromkeys(
        ("task.labels_path", "task.id_column", "task.label_column", "task.unit"),
        "labels lie on the volumes of the store",
    ),
    "train.ckpt_every_epochs": "a checkpoint is after each validation, or train.ckpt_every_steps",
    "train.keep_epochs": "train.keep_last says how many checkpoints stay",
    "train.compile": "neither encoder nor decoder is compiled",
}
FROZEN_DENSE = {
    "finetune.layer_decay": "the encoder's layers do not move",
    "train.activation_checkpointing": "the encoder is not trained",
}
PLAIN_DENSE = {"augment.": "planes are moved only for head.kind=unetr"}
UNREAD: dict[str, Mapping[str, str]] = {
    "frozen": {
        **NEITHER,
        "optim.base_lr": "head.learning_rates are tried",
        "optim.weight_decay": "head.weight_decays are tried",
        "optim.clip_grad_norm": "gradients of a head are not clipped",
        "finetune.layer_decay": "the encoder's layers do not move",
        "method.drop_path": PLAIN,
        "method.dropout": f"{PLAIN}",
        "augment.": PLAIN,
        "data.sampling": "each volume is read once an epoch",
        **dict.fromkeys(("train.ckpt_every_epochs", "train.ckpt_every_steps"), ONE_FILE),
        **dict.fromkeys(("train.keep_epochs", "train.keep_last"), ONE_FILE),
        "train.per_core_batch_size": "train.global_batch_size is the head's",
        "train.val_every_steps": "validation is after each epoch",
        "train.compile": "the encoder is not trained",
        "train.activation_checkpointing": "the encoder is not trained",
    },
    "layers": {**DENSE, "finetune.class_weights": "there are no classes"},
    "segmentation": DENSE,
    "translation": {**DENSE, "finetune.class_weights": "there are no classes"},
    "trained": {
        **NEITHER,
        "head.learning_rates": "optim.base_lr is the rate",
        "head.weight_decays": "optim.weight_decay is the decay",
    },
}


@dataclass(frozen=True)
class Source:
    """A configuration for a task and the checkpoint that it names."""

    cfg: Config
    url: str
    state: dict[str, Any]  # of utils.checkpoint.load_checkpoint


def open_source(path: str | Path, overrides: Sequence[str]) -> Source:
    """Read a task's file, its overrides and its checkpoint; raises UserError naming what is missing."""
    wanted = wanted_checkpoint(path, overrides)
    written = OmegaConf.merge(read_file(path), read_words(overrides))
    options = StorageOptions(**(OmegaConf.select(written, "data.storage_options") or {}))
    url = find_checkpoint(wanted, options)
    state = load_checkpoint(url, options)
    require_pretraining(state, url)
    saved = asdict(load.config_of_yaml(state["config"], url))
    base = {name: saved[name] for name in INHERITED} | {"seed": saved["seed"]}
    base["model"]["checkpoint"] = None
    base["method"]["init_from"] = None
    cfg = load.load_config(path, [*overrides, f"model.checkpoint={url}"], base)
    return Source(cfg, url, state)


def find_checkpoint(wanted: str, options: StorageOptions) -> str:
    """A file, or of a run's folder the best by probe, else by RankMe, else the newest; raises UserError."""
    if wanted.endswith(".pt"):
        return wanted
    for folder in (storage.join(wanted, "checkpoints"), wanted):
        for name in BEST_FIRST:
            if storage.exists(url := storage.join(folder, name), options):
                return url
        if steps := list_steps(folder, options):
            return storage.join(folder, f"step_{steps[-1]:08d}.pt")
    raise UserError(
        f"model.checkpoint: expected a checkpoint file (.pt) or the folder of a run with one, found {wanted}"
        "; give a run.dir of pretraining.train, which keeps them in its checkpoints/"
    )


def check_fit(cfg: Config, store: PreparedStore, state: dict[str, Any], url: str) -> None:
    """Raise UserError unless checkpoint, configuration and store agree on geometry, model, normalisation."""
    require_pretraining(state, url)
    seen, wanted = dict(load.flatten(load.config_of_yaml(state["config"], url))), dict(load.flatten(cfg))
    for key in keys_with("identity"):
        if seen[key] != wanted[key]:
            expected, value = (list(v) if isinstance(v, tuple) else v for v in (wanted[key], seen[key]))
            raise UserError(f"{url}: {key}: expected {expected} of the configuration, found {value}")
    if state["normalisation"] != store.attrs["normalisation"]:
        raise UserError(
            f"{url}: normalisation: expected {store.attrs['normalisation']} of {store.url}, "
            f"found {state['normalisation']}"
        )
    store.require_geometry(cfg.spatial)
    warn_of_planes(store, rule_of(state), url)


def warn_of_planes(store: PreparedStore, planes: str, url: str) -> None:
    """A line where a store's planes are not what those were that the weights at `url` have learnt from."""
    if store.planes != planes:
        log.warning(
            "%s: planes: expected %s, by which %s was trained, found %s: features may differ a little",
            *(store.url, planes, url, store.planes),
        )


def encoder_place(overrides: Sequence[str]) -> str | None:
    """Where the command line says that a head's encoder lies now; opening the head compares checksums."""
    return OmegaConf.select(read_words(overrides), "model.checkpoint", default=None)


def require_known_place(place: str, url: str, key: str, overrides: Sequence[str] = ()) -> None:
    """Raise UserError for a place beyond this machine that nothing but the file at `url` names, which may be
    a stranger's: neither the command line's `key`, nor the file's own bucket.
    """
    if not storage.is_remote(place):
        return
    buckets = {(scheme, rest.partition("/")[0]) for scheme, rest in map(split_scheme, (place, url))}
    if len(buckets) == 1 or any(word.startswith(f"{key}=") for word in overrides):
        return
    shown = storage.redact(place)
    raise UserError(
        f"{url}: expected files of this machine or of the head's own bucket, found {shown}, which only "
        f"this file names; nothing was asked of it: add {key}={shown} if you trust it, or the place of a copy"
    )


def on_own_endpoint(cfg: Config, overrides: Sequence[str]) -> Config:
    """The configuration of another's file with the command line's endpoint of buckets, never that file's."""
    return replace(cfg, data=replace(cfg.data, storage_options=load.storage_options_of(overrides)))


def overridden(trained: Config, url: str, overrides: Sequence[str], may_change: tuple[str, ...]) -> Config:
    """The configuration of the file at `url` with overrides; ConfigError for a key that may not change."""
    cfg = load.changed_config(trained, overrides, url)
    before = dict(load.flatten(trained))
    for key, value in load.flatten(cfg):
        if value != before[key] and not key.startswith(may_change):
            raise ConfigError(f"{url}: {key}: expected {before[key]} as in training, found {value}")
    return cfg


def evaluated_config(trained: Config, url: str, overrides: Sequence[str]) -> Config:
    """The configuration of the head at `url` with the overrides; ConfigError for those of another head."""
    cfg = overridden(trained, url, overrides, load.MAY_CHANGE["evaluate"])
    has_folds = cfg.task.kind in DENSE_KINDS or cfg.finetune.encoder == "frozen"
    if cfg.eval.protocol == "crossfit" and not has_folds:
        raise ConfigError(
            f"{url}: eval.protocol: expected official, found crossfit, which takes a head of classes or "
            "values on a frozen encoder: that one saw nobody's labels, and a head is trained in each fold"
        )
    return cfg


def refuse_unread(cfg: Config, path: str | Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError for the first key, set to other than its default, that the way of training which
    task.kind and finetune.encoder choose does not read.
    """
    encoder = cfg.finetune.encoder
    way: str = encoder
    words_of_way = f"finetune.encoder={encoder}"
    if cfg.task.kind in DENSE_KINDS:
        way, words_of_way = cfg.task.kind, f"task.kind={cfg.task.kind}"
    unread = dict(UNREAD[way])
    if cfg.task.kind in DENSE_KINDS and encoder == "frozen":
        unread |= FROZEN_DENSE
    if cfg.task.kind in DENSE_KINDS and cfg.head.kind != "unetr":
        unread |= PLAIN_DENSE
    file = OmegaConf.to_container(read_file(path))
    words = OmegaConf.to_container(read_words(overrides))
    for name, part, value in leaves(cfg):
        section = f"{name.partition('.')[0]}."
        instead = unread.get(name, unread.get(section))
        if instead is None:
            continue
        default, has_default = part.default, part.default != REQUIRED
        if part.default_factory is not MISSING:
            default, has_default = part.default_factory(), True
        where = "command line" if _holds(words, name) else str(path)
        is_set = _holds(words, name) or (has_default and _holds(file, name))
        if is_set and not (has_default and value == default):
            expected = f"its default {default}" if has_default else "the file's own"
            raise ConfigError(
                f"{where}: {name}: expected {expected} with {words_of_way}, which does not read "
                f"it ({instead}), found {value}"
            )


def _holds(written: Any, name: str) -> bool:
    for word in name.split("."):
        if not isinstance(written, dict) or word not in written:
            return False
        written = written[word]
    return True
