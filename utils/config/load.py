"""The configuration: a schema of frozen dataclasses, one YAML file, and `section.key=value` overrides.

`load_config(path, overrides)` returns a checked `Config` or raises `ConfigError`: one line that names the
key. Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from utils.config.rules import check_recipe, check_rules
from utils.config.schema import Config, StorageOptions, TrainConfig, keys_with, leaves
from utils.config.written import one_line, read_file, read_words
from utils.errors import ConfigError


def _gone(section: str, **same: Any) -> dict[str, tuple[Any, ...]]:
    """Keys of a section that went, with the value of each with which a run is the same without it."""
    return {f"{section}.{name}": (value,) for name, value in same.items()}


# Keys that went, which configurations of older runs still have.
GONE_KEYS: dict[str, tuple[Any, ...]] = {
    **_gone("augment", flip_w_prob=0.5, gain=0.2, gamma=0.3, intensity_prob=0.8, noise_std=0.1),
    **_gone("augment", rotate_dw_deg=10.0, rotate_hw_deg=3.0, scale_range=[0.9, 1.1], shift_fraction=0.05),
    **_gone("data", data_timeout_s=600.0, drop_last=True, persistent_workers=True, pin_memory=False),
    **_gone("data", prefetch_factor=2, region_filter=None),
    **_gone("data.storage_options", profile=None),
    **_gone("eval", batch_size=16),
    **_gone("finetune", label_smoothing=0.0, lora_rank=None, mixup=0.0, unfreeze_at_epoch=0),
    **_gone("head", dropout=0.0),
    **_gone("method", ascan_weight=0.0, centre_places=False, context=None, context_weight=0.0, loss=None),
    **_gone("method", covariance_ramp=0.0, covariance_weight=0.1, neighbour_places="all", pixel_weight=0.0),
    **_gone("method", predictor=None, predictor_weight=1.0, target_layers=None),
    "method.mae_target": (None, "normalised"),
    **_gone("method.mask_blocks", aspect=[0.75, 1.5]),
    **_gone("optim", extend=None, use_scheduler=True),
    **_gone("probe", bootstrap_samples=2000, max_volumes=256, random_init_seeds=3),
    **_gone("run", stall_timeout_s=1800.0),
    **_gone("task", event_column=None, time_column=None),
    **_gone("train", grad_accum_steps=None, max_bad_steps=10, shard_parameters=False, val_fraction=0.1),
    **_gone("wandb", artifacts="best", entity=None, group=None, images_every_steps=1000, log_artifacts=None),
    **_gone("wandb", log_images=None, name=None, tags=None),
}
# Of these what to write in their place.
IN_PLACE = {
    "data.region_filter": "data.protocol_filter",
    **dict.fromkeys(("probe", "probe.max_volumes"), "val.max_volumes"),
    "wandb.entity": "wandb.project=ENTITY/PROJECT",
    "wandb.log_artifacts": "wandb.send",
    "wandb.log_images": "wandb.send",
}
# Keys that went, and the key that has their value now: several where they never had different ones.
RENAMED_KEYS = {
    "data.heights_manifest_path": "data.octa_manifest_path",
    "data.flow_manifest_path": "data.octa_manifest_path",
    "task.surfaces": "task.names",
    "task.classes": "task.names",
    "task.slabs": "task.names",
    "task.class_order": "task.names",
    "task.label_columns": "task.names",
}
# Of GONE_KEYS: with any value what a checkpoint or a head holds can be read.
CHANGES_WHAT_IS_READ = ("method.", "task.", "optim.use_scheduler")
READ_WITH_ANY_VALUE = {name for name in GONE_KEYS if not name.startswith(CHANGES_WHAT_IS_READ)}
READ_WITH_ANY_VALUE |= {"method.covariance_weight", "method.mask_blocks.aspect", *RENAMED_KEYS}
# And of these, less data.region_filter: a run begun with another value goes on to the same numbers.
CHANGES_NO_NUMBER = (
    *("data.", "eval.", "probe.", "run.", "wandb."),
    *("optim.extend", "train.grad_accum_steps", "train.max_bad_steps", "train.shard_parameters"),
)
# What may differ from the configuration that a head or a checkpoint was trained with, of each command
MAY_CHANGE: dict[str, tuple[str, ...]] = {
    "predict": ("data.", "train.use_bf16", "model.checkpoint"),
    "embed": ("data.", "train.use_bf16", "model.feature_blocks"),
    "evaluate": ("data.", "eval.", "run.", "task.labels_path", "task.id_column", "model.checkpoint"),
}
_SCHEMA = OmegaConf.structured(Config)  # once: it takes longer than a file does
log = logging.getLogger(__name__)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, check everything; raises ConfigError.

    `base` holds plain values of sections that lie below those of the file, as a checkpoint's configuration.
    """
    return _checked(_without_gone_keys(read_file(path), str(path)), overrides, base, str(path))


def changed_config(cfg: Config, overrides: Sequence[str], where: str) -> Config:
    """A configuration with `section.key=value` overrides on top, checked as load_config does."""
    return _checked(OmegaConf.create({}), overrides, asdict(cfg), where)


def storage_options_of(overrides: Sequence[str]) -> StorageOptions:
    """data.storage_options of a command line, before its configuration is known; raises ConfigError for words
    that no configuration takes.
    """
    try:
        words = read_words(overrides)
        _check_shapes(Config, OmegaConf.to_container(words), "command line")
        cfg = OmegaConf.merge(OmegaConf.structured(Config), words)
        options = OmegaConf.to_object(cfg.data.storage_options)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"command line: {_one_line(error)}") from error
    assert isinstance(options, StorageOptions)
    return options


def require_changes(command: str, overrides: Sequence[str]) -> StorageOptions:
    """data.storage_options of the words; raises ConfigError for one that is no key, or may not change."""
    options, names = storage_options_of(overrides), MAY_CHANGE[command]
    for word in overrides:
        part: Any = OmegaConf.to_container(read_words([word]))
        written = [
            f"{name}.{key}."
            for name, keys in part.items()
            for key in (keys if isinstance(keys, dict) else [""])
        ]
        if not all(key.startswith(names) for key in written):
            expected = f"expected only changes of {', '.join(names)}, found another"
            raise ConfigError(f"override {word!r}: {expected}; leave it out: the rest is as in training")
    return options


def _checked(loaded: Any, overrides: Sequence[str], base: Mapping[str, Any] | None, where: str) -> Config:
    """`loaded` over `base`, the overrides on top of both; raises ConfigError."""
    try:
        changes = read_words(overrides)
        written = [OmegaConf.to_container(part) for part in (loaded, changes)]
        for part in written:
            _check_shapes(Config, part, where)
        references = [reference for part in written for reference in _references(part)]
        _refuse_resolvers(references, where)
        merged = OmegaConf.merge(_SCHEMA, dict(base or {}), loaded, changes)
        _check_references(references, merged, where)
        cfg = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from error
    assert isinstance(cfg, Config)
    for key, value in flatten(cfg):
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.strip() in ("", "None"):
                raise ConfigError(f"{where}: {key}: expected a value or null, found {text!r}; write null")
    check_rules(cfg, where)
    return cfg


def config_of_yaml(text: str, where: str, *, to_go_on: bool = False) -> Config:
    """The configuration that `to_yaml` wrote; raises ConfigError. The text may be a stranger's, so nothing is
    looked up for it. `to_go_on`: of a run that is resumed, not only read.
    """
    kept = READ_WITH_ANY_VALUE
    if to_go_on:
        kept = {name for name in kept if name.startswith(CHANGES_NO_NUMBER)} - {"data.region_filter"}
    try:
        saved = _without_gone_keys(OmegaConf.create(text), where, kept)
        for key, reference in _references(OmegaConf.to_container(saved)):
            raise ConfigError(f"{where}: {key}: expected a plain value, found the reference {reference}")
        if OmegaConf.select(saved, "method.regulariser") == "sigreg":
            if to_go_on:
                raise ConfigError(f"{where}: method.regulariser: expected vicreg or none, sigreg is gone")
            log.warning("%s: the penalty method.regulariser=sigreg is gone; it is read as vicreg", where)
            saved.method.regulariser = "vicreg"
        cfg = OmegaConf.to_object(OmegaConf.merge(_SCHEMA, saved))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from error
    assert isinstance(cfg, Config)
    check_recipe(cfg.method, where)
    return cfg


def _without_gone_keys(
    written: Any, where: str, with_any_value: Collection[str] = ("probe.max_volumes",)
) -> Any:
    """A configuration of a file, or one stored with weights, less GONE_KEYS, and with RENAMED_KEYS by their
    current names; raises ConfigError where a key that went has a value that changed the run, and is not of
    `with_any_value`.
    """
    if not isinstance(written, DictConfig):
        return written
    parts = ((key, part) for key in (*RENAMED_KEYS, *GONE_KEYS) for part in _sections_of(written, key))
    for key, part in parts:
        name = key.rpartition(".")[2]
        values = OmegaConf.to_container(part)  # references as they are written
        assert isinstance(values, dict)
        value, today = values[name], RENAMED_KEYS.get(key, "").rpartition(".")[2]
        same = (None, values.get(today)) if today else GONE_KEYS[key]
        if today and values.get(today) is None:
            part[today] = value
        elif value not in same:
            now = f" (now {IN_PLACE[key]})" if key in IN_PLACE else ""
            if key not in with_any_value:
                words = " or ".join("null" if value is None else str(value).lower() for value in same)
                raise ConfigError(f"{where}: {key}: expected {words}, the key is gone{now}, found {value}")
            log.warning("%s: the key %s=%s is gone%s and is left out", where, key, value, now)
        del part[name]
    if written.get("probe") == {}:  # all of its keys went
        del written["probe"]
    return written


def _sections_of(written: DictConfig, key: str) -> list[DictConfig]:
    """The sections, of a list of them each, that have the key."""
    section, _, name = key.rpartition(".")
    part = OmegaConf.select(written, section)
    parts = part if isinstance(part, ListConfig) else [part]
    return [part for part in parts if isinstance(part, DictConfig) and name in part]


def _check_shapes(hint: Any, value: Any, where: str, key: str = "") -> None:
    """Lists, sections and lengths: OmegaConf's own errors for these do not name the key."""
    if isinstance(value, str) and "${" in value:
        return

    def refuse(expected: str) -> NoReturn:
        raise ConfigError(f"{where}: {key or 'top level'}: expected {expected}, found {value}")

    if get_origin(hint) in (Union, UnionType):
        hint, *words = (h for h in get_args(hint) if h is not NoneType)
        if words and type(value) is not hint and value not in get_args(words[0]):
            refuse(f"{'true, false' if hint is bool else 'a whole number'} or {get_args(words[0])[0]}")
        if value is None or words:
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
    elif get_origin(hint) is Literal and value not in choices:
        refuse(f"one of {', '.join(choices)}")


def _references(written: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every value that names another one."""
    if isinstance(written, dict):
        for name, value in written.items():
            yield from _references(value, f"{key}.{name}" if key else str(name))
    elif isinstance(written, list):
        for number, value in enumerate(written):
            yield from _references(value, f"{key}[{number}]")
    elif isinstance(written, str) and "${" in written:
        yield key, written


def _refuse_resolvers(references: list[tuple[str, str]], where: str) -> None:
    """Functions like ${oc.env:NAME}: their result, a secret perhaps, would be saved and sent with the run."""
    for key, text in references:
        rest, before = text, ""
        while rest != before:  # from the inside out, take away references like ${run.dir}
            rest, before = re.sub(r"\$\{[^{}:]*\}", "_", rest), rest
        if "${" in rest:
            raise ConfigError(
                f"{where}: {key}: expected a value or a reference like ${{run.dir}}, found {text}; nothing "
                f"is read from the environment here, but on the command line the shell fills in {key}=$NAME"
            )


def _check_references(references: list[tuple[str, str]], merged: Any, where: str) -> None:
    """OmegaConf's own error for a reference to nothing or to itself does not name the key that makes it."""
    for key, _ in references:
        try:
            OmegaConf.select(merged, key)
        except InterpolationToMissingValueError:
            pass  # the key that is missing is what to name, and to_object does
        except OmegaConfBaseException as error:
            raise ConfigError(f"{where}: {_one_line(error, key)}") from error


def _one_line(error: Exception, key: str | None = None) -> str:
    key = key or getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: expected a value, found none (the key is missing)"
    text = one_line(error)
    if isinstance(error, ConfigKeyError):
        if today := (RENAMED_KEYS | IN_PLACE).get(key or ""):
            return f"{key}: unknown key: now {today}"
        return f"{key}: unknown key: the key is gone" if key in GONE_KEYS else f"{key}: unknown key. {text}"
    return f"{key}: {text}" if key else text


def keys_of_features(values: Mapping[str, Any]) -> list[str]:
    """Keys that the features of given weights rest on; model.feature_blocks where it has a value."""
    return [*keys_with("identity"), *(key for key in ("model.feature_blocks",) if values[key])]


def flatten(section: Any) -> Iterator[tuple[str, Any]]:
    """('section.key', value) for every key of a configuration."""
    return ((name, value) for name, _, value in leaves(section))


def accumulation_steps(train: TrainConfig, world_size: int) -> int:
    """Accumulation with global = per core x world x accumulation; a ConfigError states all four."""
    per_step = train.at_once * world_size
    steps = max(1, train.global_batch_size // per_step)
    if steps * per_step != train.global_batch_size:
        fits, rest = divmod(train.global_batch_size, world_size)
        hint = "" if rest else f"; train.per_core_batch_size={fits} fits"
        raise ConfigError(
            "train.global_batch_size: expected per_core_batch_size x world size x accumulation, found "
            f"global {train.global_batch_size} != per core {train.at_once} x world {world_size} "
            f"x accumulation {steps}{hint}"
        )
    return steps


def to_yaml(cfg: Config) -> str:
    """The whole resolved configuration as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(cfg)), resolve=True)


def changed_keys(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) for every change that a resumed run may not make."""
    before = dict(flatten(old))
    return [
        (name, before[name], value)
        for name, part, value in leaves(new)
        if before[name] != value and not part.metadata.get("may_change")
    ]
