"""The configuration: a schema of frozen dataclasses, one YAML file, and `section.key=value` overrides.

`load_config(path, overrides)` returns a checked `Config` or raises `ConfigError`: one line that names the
key. Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from utils.schema import AugmentConfig, Config, MaskFamily, SpatialConfig, StorageOptions, TrainConfig

__all__ = [
    "AugmentConfig",
    "Config",
    "ConfigError",
    "MaskFamily",
    "SpatialConfig",
    "StorageOptions",
    "UserError",
]
EXIT_USER_ERROR = 2


class ConfigError(ValueError):
    """A configuration that cannot be run; one line with the key, what was expected and what was found."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, check everything; raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a YAML configuration, found no such file")
    try:
        loaded = OmegaConf.load(path)
        changes = OmegaConf.from_dotlist([_checked_override(o) for o in overrides])
        _check_tuple_lengths(Config, OmegaConf.merge(loaded, changes), str(path))
        merged = OmegaConf.merge(OmegaConf.structured(Config), loaded, changes)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    assert isinstance(config, Config)
    for key, value in flatten(config):
        if isinstance(value, str) and value.strip() == "None":
            raise ConfigError(
                f"{path}: {key}: expected a value or null, found the text {value!r}; write null"
            )
    check_rules(config, str(path))
    return config


def _check_tuple_lengths(schema: type, values: Any, where: str, prefix: str = "") -> None:
    """OmegaConf's own error for a wrong length does not name the key."""
    for name, hint in get_type_hints(schema).items():
        value = values.get(name) if OmegaConf.is_dict(values) else None
        if is_dataclass(hint):
            _check_tuple_lengths(hint, value, where, f"{prefix}{name}.")
        elif get_origin(hint) is tuple and OmegaConf.is_list(value) and len(value) != len(get_args(hint)):
            found = OmegaConf.to_container(value)
            raise ConfigError(
                f"{where}: {prefix}{name}: expected {len(get_args(hint))} values, found {found}"
            )


def _checked_override(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected section.key=value")
    if value.strip() == "None":
        raise ConfigError(f"override {text!r}: expected a value or null, found {value!r}; write {key}=null")
    return text


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
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


def check_rules(config: Config, where: str) -> None:
    """Raise ConfigError for the first broken rule that joins several keys."""
    c, s, m, o, t = config, config.spatial, config.method, config.optim, config.train

    def require(condition: bool, key: str, expected: str, found: object) -> None:
        if not condition:
            raise ConfigError(f"{where}: {key}: expected {expected}, found {found}")

    def require_share(key: str, value: float | None, *, low: bool = False, high: bool = False) -> None:
        ok = (
            value is not None and (value > 0 or (low and value == 0)) and (value < 1 or (high and value == 1))
        )
        require(ok, key, f"a number in {'[' if low else '('}0, 1{']' if high else ')'}", value)

    require(min(s.target_spacing) > 0, "spatial.target_spacing", "three lengths above 0 mm", s.target_spacing)
    for image, patch in zip(s.image_size, s.patch_size, strict=True):
        require(
            patch > 0 and image > 0 and image % patch == 0,
            "spatial.image_size",
            f"positive multiples of spatial.patch_size {list(s.patch_size)}",
            list(s.image_size),
        )
    require(
        c.data.list_strategy == "multi_domain" or len(c.data.device_filter or []) == 1,
        "data.device_filter",
        "exactly one device with data.list_strategy single_domain",
        c.data.device_filter,
    )
    require(
        c.data.drop_last, "data.drop_last", "true (batches have one size; a batch may span epochs)", False
    )
    require_share("data.max_reject_fraction", c.data.max_reject_fraction, low=True, high=True)
    require(c.data.workers >= 0, "data.workers", "0 or more", c.data.workers)
    require(c.data.prefetch_factor >= 1, "data.prefetch_factor", "1 or more", c.data.prefetch_factor)
    require(c.data.data_timeout_s > 0, "data.data_timeout_s", "seconds above 0", c.data.data_timeout_s)
    if m.recipe == "methods":
        require_share("method.mask_ratio", m.mask_ratio)
    else:
        require_share("method.context_ratio", m.context_ratio)
        require_share("method.target_ratio", m.target_ratio)
        total = (m.context_ratio or 0) + (m.target_ratio or 0)
        require(total <= 1, "method.context_ratio", "context_ratio + target_ratio <= 1", round(total, 6))
        require(
            bool(m.mask_blocks), "method.mask_blocks", "at least one family with recipe vjepa2", m.mask_blocks
        )
        require(
            m.predictor_width % 64 == 0 or m.predictor_width % 32 == 0,
            "method.predictor_width",
            "a multiple of 32 (the width of one attention head)",
            m.predictor_width,
        )
    if m.recipe == "methods" or m.ema_base is not None:
        require_share("method.ema_base", m.ema_base, low=True, high=True)
    has_weight = m.regulariser_weight > 0
    require(
        has_weight == (m.regulariser != "none"),
        "method.regulariser_weight",
        "above 0 exactly when method.regulariser is not none",
        f"{m.regulariser_weight} with {m.regulariser}",
    )
    require_share("method.dropout", m.dropout, low=True)
    require_share("method.drop_path", m.drop_path, low=True)
    require(o.base_lr > 0, "optim.base_lr", "a number above 0", o.base_lr)
    require(o.weight_decay >= 0, "optim.weight_decay", "0 or more", o.weight_decay)
    for beta in o.betas:
        require_share("optim.betas", beta, low=True)
    for key in ("warmup_ratio", "cooldown_ratio", "min_lr_ratio"):
        require_share(f"optim.{key}", getattr(o, key), low=True, high=True)
    span = o.warmup_ratio + o.cooldown_ratio
    require(span <= 1, "optim.cooldown_ratio", "warmup_ratio + cooldown_ratio <= 1", span)
    require(o.clip_grad_norm > 0, "optim.clip_grad_norm", "a number above 0", o.clip_grad_norm)
    for key in (
        "global_batch_size",
        "per_core_batch_size",
        "log_every_steps",
        "ckpt_every_epochs",
        "keep_last",
    ):
        require(getattr(t, key) >= 1, f"train.{key}", "1 or more", getattr(t, key))
    for key in ("grad_accum_steps", "epochs", "max_steps", "ckpt_every_steps", "val_every_steps"):
        value = getattr(t, key)
        require(value is None or value >= 1, f"train.{key}", "null, or 1 or more", value)
    require(t.epochs is not None or t.max_steps is not None, "train.epochs", "epochs or max_steps", None)
    require_share("train.val_fraction", t.val_fraction)
    a = c.augment
    require(0 < a.scale_range[0] <= a.scale_range[1], "augment.scale_range", "0 < low <= high", a.scale_range)


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


# A run directory may be continued with other values of these; any other change is an error.
RESUMABLE_KEYS = re.compile(
    r"train\.(max_steps|epochs|log_\w+|per_core_batch_size|grad_accum_steps)|wandb\..*|data\.workers|probe\..*|eval\..*|task\..*|model\.checkpoint"
)


def changed_keys(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) for every change that a resumed run may not make."""
    before, after = dict(flatten(old)), dict(flatten(new))
    return [
        (k, before[k], after[k]) for k in after if before[k] != after[k] and not RESUMABLE_KEYS.fullmatch(k)
    ]


def parse_cli(
    description: str,
    argv: Sequence[str] | None,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Config, argparse.Namespace]:
    """`--config FILE [--checkpoint X] [section.key=value ...]`, the command line that every stage shares."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file of configs/")
    parser.add_argument("--checkpoint", metavar="URL", help="the same as model.checkpoint=URL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    if add_arguments:
        add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    overrides = list(args.overrides) + ([f"model.checkpoint={args.checkpoint}"] if args.checkpoint else [])
    return load_config(args.config, overrides), args


class UserError(RuntimeError):
    """The user's mistake, told in one line; a CLI ends with exit code 2."""


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a stage's main(): a ConfigError or UserError becomes one line on stderr and exit code 2."""
    try:
        code = main()
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    sys.exit(code or 0)
