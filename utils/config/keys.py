"""Every key of the schema with its type, unit, default and meaning, in words.

In: utils/config/schema.py, its text included: a field's meaning is the comment beside or above it. Out:
`keys`, for --help, for dashboards and for docs/reference/configuration.md (docs/write_pages.py).
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from utils.config import schema
from utils.config.schema import INNER_SHARE, SHARE, Bound, Config

# Of keys whose name says all to their author; the others have a comment in the schema.
MEANINGS = {
    "experiment_name": "name of the run, in run.dir and in Weights & Biases",
    "seed": "of initialisation, data order, masks and noise: the same seed, the same run",
    "spatial.target_spacing": "distance of voxels in the store",
    "spatial.image_size": "size of a volume in the store",
    "spatial.patch_size": "size of a token; image_size is a multiple of it",
    "data.manifest_path": "the table of volumes: docs/start/dicoms.md",
    "data.participants_path": "the table of people, with labels and splits",
    "data.sampling": "natural: every volume once in an epoch; device_balanced: every device equally often",
    "finetune.encoder": "frozen: only a head is trained; trained: the encoder too",
    "model.size": "encoder: ViT-Ti, S, B, L or H",
    "method.predictor_depth": "blocks of the transformer predictor",
    "method.predictor_width": "width of the transformer predictor",
    "method.regulariser": "penalty against collapse, on the context tokens",
    "method.regulariser_weight": "of the penalty, beside the prediction's loss",
    "method.dropout": "probability",
    "method.drop_path": "probability that a block is skipped, at the last block; less before",
    "optim.base_lr": "peak learning rate",
    "optim.weight_decay": "of matrices alone",
    "optim.betas": "of AdamW",
    "optim.clip_grad_norm": "largest norm of the gradient",
    "train.global_batch_size": "volumes of an update, of all devices together",
    "train.per_core_batch_size": "volumes that a device computes at once",
    "train.epochs": "length of the run in passes over the training volumes",
    "train.max_steps": "length of the run in updates",
    "train.use_bf16": "true: bfloat16 where it is safe, weights stay float32; false: float32",
    "train.ckpt_every_epochs": "a checkpoint each so many epochs",
    "train.ckpt_every_steps": "a checkpoint each so many updates",
    "train.keep_last": "newest checkpoints that stay",
    "train.log_every_steps": "a line of metrics each so many updates",
    "run.dir": "configuration, log, metrics and report of the run",
    "wandb.mode": "offline: files below run.dir, for wandb sync",
    "wandb.log_images": "send pictures of volumes",
    "wandb.log_artifacts": "send checkpoints",
    "task.label_column": "column of the label",
    "head.dropout": "probability, before the last layer of the head",
    "head.weight_decays": "see learning_rates",
    "finetune.label_smoothing": "share of the label that is spread over all classes",
    "probe.bootstrap_samples": "of participants, for an interval",
    "eval.split": "which people are scored",
    "eval.batch_size": "volumes that the encoder computes at once",
}
UNITS_BY_END = {
    "_s": "s",
    "_deg": "degrees",
    "_steps": "updates",
    "epochs": "epochs",
    "max_volumes": "volumes",
    "batch_size": "volumes",
    "_samples": "",
    "per_epoch": "",
}
UNITS = {
    "spatial.target_spacing": "mm",
    "spatial.image_size": "voxels",
    "spatial.patch_size": "voxels",
    "data.max_samples": "records",
    "data.workers": "processes",
    "finetune.unfreeze_at_epoch": "epochs",
    "finetune.patience": "epochs",
    "train.keep_last": "checkpoints",
    "train.keep_epochs": "checkpoints",
}


@dataclass(frozen=True)
class Key:
    """One key of the schema, in words."""

    name: str
    type: str
    unit: str
    default: str
    may_change: bool
    meaning: str


def comments(text: str) -> dict[int, tuple[str, bool]]:
    """Line number -> its comment, and whether the line has nothing else."""
    found_comments = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found_comments[token.start[0]] = token.string.lstrip("# ").rstrip(), alone
    return found_comments


def field_comments(text: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the comment lines above the field, else those beside it."""
    of_line = comments(text)
    result = {}
    for body in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        for node in body.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            first = node.lineno
            while of_line.get(first - 1, ("", False))[1]:
                first -= 1
            last = (node.end_lineno or node.lineno) + 1
            words = [of_line[line][0] for line in range(first, last) if line in of_line]
            result[body.name, node.target.id] = " ".join(words)
    return result


def type_text(hint: Any, bound: Bound | None) -> str:
    """A type in words: 'one of a, b', '3 x float, a number above 0', 'int or null'."""
    if get_origin(hint) in (UnionType, Union):
        (inner,) = (part for part in get_args(hint) if part is not NoneType)
        words = type_text(inner, bound)
        return f"{words}; or null" if "," in words else f"{words} or null"
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(f'`{choice}`' for choice in choices)}"
    if get_origin(hint) is tuple:
        words = f"{len(choices)} x {choices[0].__name__}"
    elif get_origin(hint) is list:
        words = "list of sections" if is_dataclass(choices[0]) else f"list of {type_text(choices[0], None)}"
    else:
        words = {"str": "text", "bool": "`true` or `false`"}.get(hint.__name__, hint.__name__)
    return f"{words}, {bound.text}" if bound else words


def unit_text(name: str, bound: Bound | None) -> str:
    """The unit of a key, '' where it has none."""
    if name in UNITS:
        return UNITS[name]
    if bound in (SHARE, INNER_SHARE) and not name.endswith("_prob"):
        return "share"
    return next((unit for end, unit in UNITS_BY_END.items() if name.endswith(end)), "")


def default_text(part: Field[Any]) -> str:
    """What holds where a file has no such key."""
    default = part.default
    if default is NO_DEFAULT:
        assert part.default_factory is not NO_DEFAULT
        default = part.default_factory()
    if default == MISSING:
        return "*required*"
    if default is None or isinstance(default, bool):
        return f"`{str(default).lower().replace('none', 'null')}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def _keys(section: type, prefix: str, of_field: Mapping[tuple[str, str], str]) -> Iterator[Key]:
    hints = get_type_hints(section)
    for part in fields(section):
        name, hint = f"{prefix}{part.name}", hints[part.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _keys(hint, f"{name}.", of_field)
            continue
        bound = part.metadata.get("bound")
        meaning, unit = of_field[section.__name__, part.name], unit_text(name, bound)
        words = [MEANINGS.get(name, ""), "" if meaning == unit else meaning]
        yield Key(
            name=name,
            type=type_text(hint, bound),
            unit=unit,
            default=default_text(part),
            may_change=bool(part.metadata.get("may_change")),
            meaning="; ".join(filter(None, words)),
        )
        inner = next((c for h in (hint, *get_args(hint)) for c in get_args(h) if is_dataclass(c)), None)
        if isinstance(inner, type):  # a list of sections
            yield from _keys(inner, f"{name}[].", of_field)


@cache
def keys() -> dict[str, Key]:
    """Every key of the schema by its name, in its order."""
    text = Path(schema.__file__).read_text()
    return {one.name: one for one in _keys(Config, "", field_comments(text))}
