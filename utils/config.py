"""The configuration: a schema of frozen dataclasses, one YAML file, and `section.key=value` overrides.

`load_config(path, overrides)` returns a checked `Config` or raises `ConfigError`: one line that names the key.
Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

EXIT_USER_ERROR = 2


class ConfigError(ValueError):
    """A configuration that cannot be run; one line with the key, what was expected and what was found."""


@dataclass(frozen=True)
class StorageOptions:
    endpoint_url: str | None = None  # an S3-compatible or emulated server; null: the provider's own
    profile: str | None = None  # named credentials of the environment (s3 only)


@dataclass(frozen=True)
class DataConfig:
    gcs_root: str = MISSING  # the AI-READI root: a bucket URL or a folder
    manifest_path: str = "${data.gcs_root}/retinal_oct/manifest.tsv"
    participants_path: str = "${data.gcs_root}/participants.tsv"
    store: str = MISSING  # the prepared store that this configuration makes and reads
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    list_strategy: Literal["single_domain", "multi_domain"] = MISSING  # one device, or several
    device_filter: list[str] | None = None  # device folders; null: all
    protocol_filter: list[str] | None = None  # protocol names of data_setup/protocols.py; null: all volumes
    region_filter: list[str] | None = None  # the manifest's anatomic_region texts; null: all
    laterality_filter: list[str] | None = None  # [L], [R]; null: both
    sampling: Literal["natural", "device_balanced"] = "natural"
    cache_dir: str | None = None  # local read-through cache of a remote store; null: none
    max_samples: int | None = None  # the first so many records after the filters; null: all
    workers: int = 1  # loader processes per rank; 0: in the training process
    prefetch_factor: int = 2  # batches ahead per worker
    pin_memory: bool = False
    persistent_workers: bool = True
    drop_last: bool = True  # only true: batches have one size, and a batch may span epochs
    max_reject_fraction: float = 0.05  # prepare stops above this share of rejected records
    data_timeout_s: float = 600.0  # a loader worker silent for longer is named, and the run stops


@dataclass(frozen=True)
class SpatialConfig:
    target_spacing: tuple[float, float, float] = MISSING  # mm
    image_size: tuple[int, int, int] = MISSING  # voxels
    patch_size: tuple[int, int, int] = MISSING  # voxels
    resample: Literal["spacing", "resize"] = (
        "spacing"  # resize: the whole scan into image_size, spacing ignored
    )


@dataclass(frozen=True)
class AugmentConfig:
    flip_w_prob: float = 0.5
    rotate_dw_deg: float = 10.0  # en face rotation, uniform in +-
    rotate_hw_deg: float = 3.0  # tilt of the B-scan, uniform in +-
    scale_range: tuple[float, float] = (0.9, 1.1)
    shift_fraction: float = 0.05  # of each axis, uniform in +-
    intensity_prob: float = 0.8  # per view: gain, gamma and noise
    gain: float = 0.2  # log-uniform in 1 / (1 + gain) .. 1 + gain
    gamma: float = 0.3  # likewise
    noise_std: float = 0.1  # upper end of a uniform draw, in units of the volume's standard deviation


@dataclass(frozen=True)
class ModelConfig:
    size: Literal["ti", "s", "b", "l", "h"] = MISSING
    checkpoint: str | None = None  # what finetuning reads; null: best_probe.pt of this run


@dataclass(frozen=True)
class MaskFamily:
    scale: float = MISSING  # share of the plane (tube) or of the grid (box) that one block covers
    tube: bool = True  # true: the block runs through all of D
    aspect: tuple[float, float] = (0.75, 1.5)  # height / width of the block in tokens


@dataclass(frozen=True)
class MethodConfig:
    recipe: Literal["methods", "vjepa2"] = MISSING
    mask_ratio: float | None = (
        None  # recipe methods: share of tokens replaced by the mask token and predicted
    )
    context_ratio: float | None = None  # recipe vjepa2: share of tokens that the context encoder sees
    target_ratio: float | None = None  # recipe vjepa2: share of tokens that are predicted
    mask_blocks: list[MaskFamily] | None = None  # recipe vjepa2: one family is drawn per sample
    predictor_depth: int = 6
    predictor_width: int = 384
    ema_base: float | None = None  # null (vjepa2): a half-life of 5 % of the run, at most 0.9995
    regulariser: Literal["none", "vicreg", "sigreg"] = "none"
    regulariser_weight: float = 0.0
    init_from: str | None = None  # a checkpoint whose weights start this run; null: random
    dropout: float = 0.0
    drop_path: float = 0.0


@dataclass(frozen=True)
class OptimConfig:
    base_lr: float = MISSING
    weight_decay: float = MISSING
    betas: tuple[float, float] = MISSING
    warmup_ratio: float = MISSING  # share of the run
    cooldown_ratio: float = 0.0  # recipe vjepa2: linear decay over the last share of the run
    min_lr_ratio: float = MISSING  # end of the schedule as a share of base_lr
    clip_grad_norm: float = MISSING
    use_scheduler: bool = True  # false: base_lr throughout


@dataclass(frozen=True)
class TrainConfig:
    global_batch_size: int = MISSING
    per_core_batch_size: int = MISSING
    grad_accum_steps: int | None = None  # null: derived from the other two and the world size
    epochs: int | None = None
    max_steps: int | None = None  # wins over epochs when both are given
    val_fraction: float = 0.1  # of the training participants
    use_bf16: bool = MISSING
    compile: bool = False
    ckpt_dir: str | None = "${run.dir}/checkpoints"  # null: no checkpoints
    ckpt_every_epochs: int = 5
    ckpt_every_steps: int | None = None  # null: only by epochs
    keep_last: int = 2
    log_every_steps: int = 10
    val_every_steps: int | None = None  # null: once per epoch
    max_bad_steps: int = 10  # so many non-finite updates in a row stop the run


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/${experiment_name}"


@dataclass(frozen=True)
class WandbConfig:
    project: str = "oct-foundation"
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] = "offline"
    log_images: bool | None = None  # null: only for synthetic stores
    log_artifacts: bool | None = None  # null: only for synthetic stores


@dataclass(frozen=True)
class TaskConfig:
    labels_path: str | None = None  # a table with an id and a label; null: participants.tsv
    id_column: str | None = None  # null: person_id or participant_id
    label_column: str = "study_group"


@dataclass(frozen=True)
class ProbeConfig:
    max_volumes: int = 2000  # cap on the volumes embedded by the probe during pre-training
    bootstrap_samples: int = 2000
    random_init_seeds: int = 3


@dataclass(frozen=True)
class EvalConfig:
    split: Literal["val", "test"] = "test"
    batch_size: int = 16
    allow_overlap: bool = False  # true: participants seen in pre-training may be evaluated; tables say so


@dataclass(frozen=True)
class Config:
    experiment_name: str = MISSING
    seed: int = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    spatial: SpatialConfig = field(default_factory=SpatialConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along (D, H, W)."""
        d, h, w = (i // p for i, p in zip(self.spatial.image_size, self.spatial.patch_size, strict=True))
        return d, h, w


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
            raise ConfigError(f"{where}: {prefix}{name}: expected {len(get_args(hint))} values, found {found}")


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
