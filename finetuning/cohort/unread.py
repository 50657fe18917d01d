"""Keys that a way of training does not read: refused where somebody sets them, since they would do nothing.

In: the configuration of finetuning.train, its file and the words of its command line. Out: a ConfigError that
names the first such key. What a checkpoint's configuration brings along is nobody's word. A file may hold a
key that has no default, since it must be there; the command line may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from omegaconf import MISSING as REQUIRED
from omegaconf import OmegaConf

from utils.config.schema import DENSE_KINDS, Config, leaves
from utils.config.written import read_file, read_words
from utils.errors import ConfigError

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
    "head.dropout": "a decoder of layers, voxels or slabs has none",
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
        "method.dropout": f"{PLAIN}; head.dropout is the head's",
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
        instead = next((text for key, text in unread.items() if _covers(key, name)), None)
        if instead is None:
            continue
        default, has_default = _default(part)
        where = "command line" if _holds(words, name) else str(path)
        is_set = _holds(words, name) or (has_default and _holds(file, name))
        if is_set and not (has_default and value == default):
            expected = f"its default {default}" if has_default else "the file's own"
            raise ConfigError(
                f"{where}: {name}: expected {expected} with {words_of_way}, which does not read "
                f"it ({instead}), found {value}"
            )


def _covers(key: str, name: str) -> bool:
    return name.startswith(key) if key.endswith(".") else name == key


def _default(part: Field[Any]) -> tuple[Any, bool]:
    """The default of a key, and whether it has one."""
    if part.default_factory is not MISSING:
        return part.default_factory(), True
    return part.default, part.default != REQUIRED


def _holds(written: Any, name: str) -> bool:
    """Whether the key stands in what somebody wrote."""
    for word in name.split("."):
        if not isinstance(written, dict) or word not in written:
            return False
        written = written[word]
    return True
