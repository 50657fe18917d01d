"""The configuration: a schema of frozen dataclasses, one YAML file, and `section.key=value` overrides.

`load_config(path, overrides)` returns a checked `Config` or raises `ConfigError`: one line that names the
key. Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from utils.config.schema import Config, TrainConfig
from utils.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, check everything; raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a YAML configuration, found no such file")
    try:
        loaded = OmegaConf.load(path)
        changes = OmegaConf.from_dotlist([_checked_override(o) for o in overrides])
        written = [OmegaConf.to_container(part) for part in (loaded, changes)]
        for part in written:
            _check_shapes(Config, part, str(path))
        merged = OmegaConf.merge(OmegaConf.structured(Config), loaded, changes)
        for part in written:
            _check_interpolations(part, merged, str(path))
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    except UnicodeDecodeError as error:
        found = f"{error.object[error.start]:#04x} at byte {error.start}"
        raise ConfigError(f"{path}: expected UTF-8 text, found {found}") from error
    assert isinstance(config, Config)
    for key, value in flatten(config):
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.strip() in ("", "None"):
                raise ConfigError(f"{path}: {key}: expected a value or null, found {text!r}; write null")
    check_rules(config, str(path))
    return config


def config_of_yaml(text: str, where: str) -> Config:
    """The configuration that `to_yaml` wrote; raises ConfigError."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text)))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from error
    assert isinstance(config, Config)
    return config


def _check_shapes(hint: Any, value: Any, where: str, key: str = "") -> None:
    """Lists, sections and lengths: OmegaConf's own errors for these do not name the key."""
    if isinstance(value, str) and "${" in value:
        return

    def refuse(expected: str) -> NoReturn:
        raise ConfigError(f"{where}: {key or 'top level'}: expected {expected}, found {value}")

    if get_origin(hint) is UnionType:
        hint = next(h for h in get_args(hint) if h is not NoneType)
        if value is None:
            return
    choices = get_args(hint)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            refuse("a section of keys")
        for name, inner in get_type_hints(hint).items():
            if name in value:
                _check_shapes(inner, value[name], where, f"{key}.{name}" if key else name)
    elif get_origin(hint) is tuple:
        if not isinstance(value, list) or len(value) != len(choices) or None in value:
            refuse(f"{len(choices)} values")
    elif get_origin(hint) is list:
        if not isinstance(value, list):
            refuse("a list")
        for number, item in enumerate(value):
            _check_shapes(choices[0], item, where, f"{key}[{number}]")
    elif get_origin(hint) is Literal and value is False and "disabled" in choices:
        refuse(f"one of {', '.join(choices)} (YAML reads off as false: write disabled)")


def _check_interpolations(written: Any, merged: Any, where: str, key: str = "") -> None:
    """OmegaConf's own error for a reference to nothing or to itself does not name the key that makes it."""
    if isinstance(written, dict):
        for name, value in written.items():
            _check_interpolations(value, merged, where, f"{key}.{name}" if key else str(name))
    elif isinstance(written, list):
        for number, value in enumerate(written):
            _check_interpolations(value, merged, where, f"{key}[{number}]")
    elif isinstance(written, str) and "${" in written:
        try:
            OmegaConf.select(merged, key)
        except InterpolationToMissingValueError:
            pass  # the key that is missing is what to name, and to_object does
        except OmegaConfBaseException as error:
            raise ConfigError(f"{where}: {_one_line(error, key)}") from error


def _checked_override(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected section.key=value")
    if value.strip() in ("", "None"):
        raise ConfigError(f"override {text!r}: expected a value or null, found {value!r}; write {key}=null")
    return text


def _one_line(error: Exception, key: str | None = None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = key or getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: expected a value, found none (the key is missing)"
    text = re.sub(r"\s*(object_type|reference_type|full_key)[=:]\s*\S+", "", " ".join(lines)).strip()
    if isinstance(error, ConfigKeyError):
        return f"{key}: unknown key. {text}"
    return f"{key}: {text}" if key else text


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """('section.key', value) for every leaf of a configuration dataclass."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


# Bounds of single keys, of each value where a key holds several; null passes where the schema allows it.
BOUNDS: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "1 or more": (
        lambda v: v >= 1,
        (
            *("data.max_samples", "data.prefetch_factor", "method.predictor_depth", "eval.batch_size"),
            *("train.global_batch_size", "train.per_core_batch_size", "train.grad_accum_steps"),
            *("train.epochs", "train.max_steps", "train.ckpt_every_epochs", "train.ckpt_every_steps"),
            *("train.keep_last", "train.log_every_steps", "train.val_every_steps", "train.max_bad_steps"),
            *("probe.max_volumes", "probe.bootstrap_samples", "probe.random_init_seeds"),
        ),
    ),
    "0 or more": (
        lambda v: v >= 0,
        (
            *("seed", "data.workers", "augment.rotate_dw_deg", "augment.rotate_hw_deg", "augment.gain"),
            *("augment.shift_fraction", "augment.gamma", "augment.noise_std", "optim.weight_decay"),
            "method.regulariser_weight",
        ),
    ),
    "a number above 0": (
        lambda v: v > 0,
        ("spatial.target_spacing", "data.data_timeout_s", "optim.base_lr", "optim.clip_grad_norm"),
    ),
    "a number in [0, 1]": (
        lambda v: 0 <= v <= 1,
        (
            *("data.max_reject_fraction", "augment.flip_w_prob", "augment.intensity_prob", "method.ema_base"),
            *("optim.warmup_ratio", "optim.cooldown_ratio", "optim.min_lr_ratio"),
        ),
    ),
    "a number in [0, 1)": (lambda v: 0 <= v < 1, ("method.dropout", "method.drop_path", "optim.betas")),
    "a number in (0, 1)": (
        lambda v: 0 < v < 1,
        ("method.mask_ratio", "method.context_ratio", "method.target_ratio", "train.val_fraction"),
    ),
}


def check_rules(config: Config, where: str) -> None:
    """Raise ConfigError for the first value out of bounds, or the first broken rule that joins keys."""
    c, s, m, o, t = config, config.spatial, config.method, config.optim, config.train

    def require(condition: bool, key: str, expected: str, found: object) -> None:
        if not condition:
            raise ConfigError(f"{where}: {key}: expected {expected}, found {found}")

    leaves = dict(flatten(config))
    numbers = {key: value if isinstance(value, tuple) else (value,) for key, value in leaves.items()}
    for key, values in numbers.items():
        finite = all(math.isfinite(v) for v in values if isinstance(v, float))
        require(finite, key, "finite numbers", leaves[key])
    for expected, (is_inside, keys) in BOUNDS.items():
        for key in keys:
            require(all(is_inside(v) for v in numbers[key] if v is not None), key, expected, leaves[key])
    for image, patch in zip(s.image_size, s.patch_size, strict=True):
        require(
            patch > 0 and image > 0 and image % patch == 0,
            "spatial.image_size",
            f"positive multiples of spatial.patch_size {list(s.patch_size)}",
            list(s.image_size),
        )
    low, high = c.augment.scale_range
    require(0 < low <= high, "augment.scale_range", "0 < low <= high", c.augment.scale_range)
    require("://" not in c.run.dir, "run.dir", "a local folder (checkpoints may be in a bucket)", c.run.dir)
    require(
        c.data.list_strategy == "multi_domain" or len(c.data.device_filter or []) == 1,
        "data.device_filter",
        "exactly one device with data.list_strategy single_domain",
        c.data.device_filter,
    )
    require(
        c.data.drop_last, "data.drop_last", "true (batches have one size; a batch may span epochs)", False
    )
    blocks = ("context_ratio", "target_ratio", "mask_blocks")
    needed: tuple[str, ...] = blocks
    if m.recipe == "methods":
        needed = ("mask_ratio", "ema_base")
    elif m.recipe == "mae" and m.mask_ratio is not None:
        needed = ("mask_ratio",)
        for name in blocks:
            value = getattr(m, name)
            require(value is None, f"method.{name}", "null with recipe mae and mask_ratio", value)
    for name in needed:
        kind = "at least one family" if name == "mask_blocks" else "a number"
        value = getattr(m, name)
        require(value not in (None, []), f"method.{name}", f"{kind} with recipe {m.recipe}", value)
    if needed == blocks:
        require(m.mask_ratio is None, "method.mask_ratio", f"null with recipe {m.recipe}", m.mask_ratio)
        total = (m.context_ratio or 0) + (m.target_ratio or 0)
        require(total <= 1, "method.context_ratio", "context_ratio + target_ratio <= 1", round(total, 6))
    require(
        (m.mae_target is not None) == (m.recipe == "mae"),
        "method.mae_target",
        "normalised or plain with recipe mae, null with the others",
        f"{m.mae_target} with {m.recipe}",
    )
    for name in ("context", "predictor", "loss"):
        value = getattr(m, name)
        is_fitting = value is None or m.recipe == "vjepa2"
        require(is_fitting, f"method.{name}", f"null with recipe {m.recipe}", value)
    require(
        m.predictor != "mlp" or m.context == "dense",
        "method.context",
        "dense with method.predictor=mlp, which reads target positions",
        m.context,
    )
    for number, family in enumerate(m.mask_blocks or []):
        key, (low, high) = f"method.mask_blocks[{number}]", family.aspect
        require(0 < family.scale <= 1, f"{key}.scale", "a number in (0, 1]", family.scale)
        require(0 < low <= high < math.inf, f"{key}.aspect", "0 < low <= high", family.aspect)
        room = 1 - (m.context_ratio or 0)
        require(family.scale <= room, f"{key}.scale", f"at most 1 - context_ratio = {room:g}", family.scale)
    width = m.predictor_width
    is_whole = width >= 32 and width % 32 == 0
    require(is_whole, "method.predictor_width", "a multiple of 32, the width of an attention head", width)
    require(
        (m.regulariser_weight > 0) == (m.regulariser != "none"),
        "method.regulariser_weight",
        "above 0 exactly when method.regulariser is not none",
        f"{m.regulariser_weight} with {m.regulariser}",
    )
    span = o.warmup_ratio + o.cooldown_ratio
    require(span <= 1, "optim.cooldown_ratio", "warmup_ratio + cooldown_ratio <= 1", span)
    require(t.epochs is not None or t.max_steps is not None, "train.epochs", "epochs or max_steps", None)


def accumulation_steps(train: TrainConfig, world_size: int) -> int:
    """Accumulation with global = per core x world x accumulation; a ConfigError states all four."""
    per_step = train.per_core_batch_size * world_size
    steps = train.grad_accum_steps or max(1, train.global_batch_size // per_step)
    if steps * per_step != train.global_batch_size:
        raise ConfigError(
            "train.global_batch_size: expected per_core_batch_size x world size x grad_accum_steps, found "
            f"global {train.global_batch_size} != per core {train.per_core_batch_size} x world {world_size} "
            f"x accumulation {steps}"
        )
    return steps


def to_yaml(config: Config) -> str:
    """The whole resolved configuration as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


# A run directory may be continued with other values of these; any other change is an error. The second line
# is what only finetuning reads.
RESUMABLE_KEYS = re.compile(
    r"train\.(max_steps|epochs|log_\w+|per_core_batch_size|grad_accum_steps|activation_checkpointing|compile"
    r"|shard_\w+|max_bad_steps|ckpt_every_\w+|keep_last)"
    r"|wandb\..*|data\.(workers|prefetch_factor|data_timeout_s|cache_dir)|run\.profile|model\.(checkpoint|tpu_attention)"
    r"|eval\..*|probe\.(bootstrap_samples|random_init_seeds)"
)


def changed_keys(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) for every change that a resumed run may not make."""
    before, after = dict(flatten(old)), dict(flatten(new))
    return [
        (k, before[k], after[k]) for k in after if before[k] != after[k] and not RESUMABLE_KEYS.fullmatch(k)
    ]
