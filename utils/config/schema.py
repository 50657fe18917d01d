"""The schema of a configuration: one frozen dataclass per section.

Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan. A field without a
default must be in the file. What else is known of a key stands beside it: its bound, whether a resumed run
may change it (`may_change`), whether weights and features of a checkpoint rest on it (`identity`), and
whether it names a place to which a run may have been moved (`is_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from omegaconf import MISSING


@dataclass(frozen=True)
class Bound:
    """What a number must be; of a tuple each value."""

    text: str
    holds: Callable[[float], bool]


AT_LEAST_1 = Bound("1 or more", lambda value: value >= 1)
AT_LEAST_0 = Bound("0 or more", lambda value: value >= 0)
ABOVE_0 = Bound("a number above 0", lambda value: value > 0)
SHARE = Bound("a number in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_1 = Bound("a number in [0, 1)", lambda value: 0 <= value < 1)
WHOLE_HEADS = Bound(
    "a multiple of 32, the width of an attention head", lambda value: value >= 32 and value % 32 == 0
)
INNER_SHARE = Bound("a number in (0, 1)", lambda value: 0 < value < 1)


def key(
    default: Any,
    bound: Bound | None = None,
    *,
    may_change: bool = False,
    identity: bool = False,
    is_place: bool = False,
) -> Any:
    """A field with what else is known of it; null passes its bound where the type allows null."""
    return field(
        default=default,
        metadata={"bound": bound, "may_change": may_change, "identity": identity, "is_place": is_place},
    )


@dataclass(frozen=True)
class StorageOptions:
    endpoint_url: str | None = None  # an S3-compatible or emulated server; null: the provider's own
    profile: str | None = None  # named credentials of the environment (s3 only)


@dataclass(frozen=True)
class DataConfig:
    gcs_root: str = MISSING  # the AI-READI root: a bucket URL or a folder
    manifest_path: str = "${data.gcs_root}/retinal_oct/manifest.tsv"
    participants_path: str = "${data.gcs_root}/participants.tsv"
    # links height maps to scans; data_setup.prepare --heights alone reads it
    heights_manifest_path: str = "${data.gcs_root}/retinal_octa/manifest.tsv"
    # links flow cubes and en-face images to scans; data_setup.prepare --flow alone reads it
    flow_manifest_path: str = "${data.gcs_root}/retinal_octa/manifest.tsv"
    store: str = MISSING  # the prepared store that this configuration makes and reads
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    list_strategy: Literal["single_domain", "multi_domain"] = MISSING  # one device, or several
    device_filter: list[str] | None = None  # names of devices; null: all
    protocol_filter: list[str] | None = None  # names of protocols; null: all volumes
    region_filter: list[str] | None = None  # texts of anatomic_region; null: all
    laterality_filter: list[str] | None = None  # [L], [R]; null: both
    # leave out volumes whose `quality` in the store's index is below; null: none. prepare keeps them all
    min_quality: float | None = key(None, SHARE)
    sampling: Literal["natural", "device_balanced"] = "natural"
    # local read-through cache of a remote store; null: none
    cache_dir: str | None = key(None, may_change=True)
    # prepare so many records, of all sites, devices and groups in turn; null: all. Training takes what the
    # store has
    max_samples: int | None = key(None, AT_LEAST_1)
    # loader processes per rank; 0: in the training process; null: by the CPUs of its machine, up to 32
    workers: int | None = key(1, AT_LEAST_0, may_change=True)
    max_reject_fraction: float = key(0.05, SHARE)  # prepare stops above this share of rejected records


@dataclass(frozen=True)
class SpatialConfig:
    target_spacing: tuple[float, float, float] = key(MISSING, ABOVE_0, identity=True)  # mm
    image_size: tuple[int, int, int] = key(MISSING, identity=True)  # voxels
    patch_size: tuple[int, int, int] = key(MISSING, identity=True)  # voxels
    # resize: the whole scan into image_size, spacing ignored
    resample: Literal["spacing", "resize"] = key("spacing", identity=True)


@dataclass(frozen=True)
class AugmentConfig:
    # of all ranges of data_setup/transforms.py together: 1 as they stand there, 0 none
    strength: float = key(1.0, SHARE)


@dataclass(frozen=True)
class ModelConfig:
    size: Literal["ti", "s", "b", "l", "h"] = key(MISSING, identity=True)
    # tiled: what released V-JEPA 2.0 weights need; interpolated: what those of 2.1 need
    rope: Literal["interleaved", "tiled", "interpolated"] = key("interleaved", identity=True)
    # on a TPU (other devices have one kernel): flash never holds the tokens x tokens matrix
    tpu_attention: Literal["plain", "flash"] = key("plain", may_change=True)
    # what finetuning reads; null: best_probe.pt of this run
    checkpoint: str | None = key(None, may_change=True)


@dataclass(frozen=True)
class MaskFamily:
    scale: float = MISSING  # share of the plane (tube) or of the grid (box) that one block covers
    tube: bool = True  # true: the block runs through all of D
    aspect: tuple[float, float] = (0.75, 1.5)  # height / width of the block in tokens


MISMATCHED = "mismatched_targets", "mismatched_latents"  # of method.control: need another volume in a batch


@dataclass(frozen=True)
class MethodConfig:
    recipe: str = key(MISSING, identity=True)  # a name of utils/config/recipes.py
    # methods: share of tokens replaced by the mask token and predicted; mae, in place of the next three:
    # share of tokens predicted from all others
    mask_ratio: float | None = key(None, INNER_SHARE)
    # vjepa2, mae: share of tokens that the context encoder sees
    context_ratio: float | None = key(None, INNER_SHARE)
    target_ratio: float | None = key(None, INNER_SHARE)  # vjepa2, mae: share of tokens that are predicted
    mask_blocks: list[MaskFamily] | None = None  # vjepa2, mae: one family is drawn per sample
    predictor_depth: int = key(6, AT_LEAST_1)
    predictor_width: int = key(384, WHOLE_HEADS)
    # null (vjepa2, mae): a half-life of 5 % of the run, at most 0.9995
    ema_base: float | None = key(None, SHARE)
    regulariser: Literal["none", "vicreg", "sigreg"] = "none"
    regulariser_weight: float = key(0.0, AT_LEAST_0)
    covariance_weight: float = key(0.1, AT_LEAST_0)  # vicreg: of the off-diagonal part, the hinge has 1
    # vjepa2, mae: of a second loss, the squared error of the voxels at and beside each visible token, read
    # linearly from its feature; 0: none
    neighbour_weight: float = key(0.0, AT_LEAST_0)
    # a control for claims, no way to train: the prediction's loss times 0, or, in training, the targets of
    # another volume of the batch: all of them, or the target encoder's features alone and no voxels
    control: Literal["penalty_only", "mismatched_targets", "mismatched_latents"] | None = None
    init_from: str | None = None  # a checkpoint whose weights start this run; null: random
    dropout: float = key(0.0, BELOW_1)
    drop_path: float = key(0.0, BELOW_1)


@dataclass(frozen=True)
class OptimConfig:
    base_lr: float = key(MISSING, ABOVE_0)
    weight_decay: float = key(MISSING, AT_LEAST_0)
    betas: tuple[float, float] = key(MISSING, BELOW_1)
    warmup_ratio: float = key(MISSING, SHARE)  # share of the run
    cooldown_ratio: float = key(0.0, SHARE)  # vjepa2, mae: linear decay over the last share of the run
    min_lr_ratio: float = key(MISSING, SHARE)  # end of the schedule as a share of base_lr
    clip_grad_norm: float = key(MISSING, ABOVE_0)
    # AdamW's; far below the gradients (`methods` has some of 1e-9), or the smallest of them move nothing
    eps: float = key(1e-8, ABOVE_0)


@dataclass(frozen=True)
class TrainConfig:
    global_batch_size: int = key(MISSING, AT_LEAST_1)
    per_core_batch_size: int = key(MISSING, AT_LEAST_1, may_change=True)
    epochs: int | None = key(None, AT_LEAST_1, may_change=True)
    max_steps: int | None = key(None, AT_LEAST_1, may_change=True)  # wins over epochs when both are given
    val_fraction: float = key(0.1, INNER_SHARE)  # of the training participants
    use_bf16: bool = MISSING
    # true: only the blocks' inputs are kept for the backward pass, the rest is computed again; same numbers
    activation_checkpointing: bool = key(False, may_change=True)
    # true: torch.compile of every transformer block, in training, not on XLA; equal but for rounding
    compile: bool = key(False, may_change=True)
    ckpt_dir: str | None = key("${run.dir}/checkpoints", is_place=True)  # null: no checkpoints
    ckpt_every_epochs: int = key(5, AT_LEAST_1, may_change=True)
    # of the checkpoints of epochs so many stay at most, evenly over the run
    keep_epochs: int = key(10, AT_LEAST_1, may_change=True)
    ckpt_every_steps: int | None = key(None, AT_LEAST_1, may_change=True)  # null: only by epochs
    keep_last: int = key(2, AT_LEAST_1, may_change=True)
    log_every_steps: int = key(10, AT_LEAST_1, may_change=True)
    # null: every epoch, or every few, so that validations read at most 2.5 % of what training reads
    val_every_steps: int | None = key(None, AT_LEAST_1)


@dataclass(frozen=True)
class ValConfig:
    # cap on the volumes of a validation: the same at each, participants in turn; a quarter before step 1
    max_volumes: int = key(256, AT_LEAST_1, may_change=True)


@dataclass(frozen=True)
class RunConfig:
    dir: str = key("runs/${experiment_name}", is_place=True)
    # true: a trace of the 6th to 8th step after each start, in run.dir/profile
    profile: bool = key(False, may_change=True)


@dataclass(frozen=True)
class WandbConfig:
    mode: Literal["online", "offline", "disabled"] = key("offline", may_change=True)
    log_images: bool | None = key(None, may_change=True)  # null: only for synthetic stores
    log_artifacts: bool | None = key(None, may_change=True)  # null: only for synthetic stores


@dataclass(frozen=True)
class LogConfig:
    # true: TensorBoard files in run.dir/tensorboard too (pip install tensorboard)
    tensorboard: bool = key(False, may_change=True)


DENSE_KINDS = ("layers", "segmentation", "translation")  # of task.kind: decoders of whole volumes


@dataclass(frozen=True)
class TaskConfig:
    labels_path: str | None = None  # a table with an id and a label; null: participants.tsv
    id_column: str | None = None  # null: the column of the unit (person_id or participant_id, ...)
    label_column: str = "study_group"
    label_columns: list[str] | None = None  # multilabel: a column of 0 and 1 for each label
    # what the label is; `ordinal` needs class_order. `layers`: surfaces, of the store's height maps;
    # `segmentation`: classes of voxels, of its label volumes; `translation`: en-face slabs of OCTA, of its
    # flow
    kind: Literal[
        "classification",
        "ordinal",
        "regression",
        "multilabel",
        "layers",
        "segmentation",
        "translation",
    ] = "classification"
    surfaces: list[str] | None = None  # layers: from the vitreous down; null: all that the maps name
    classes: list[str] | None = None  # segmentation: those to learn, the others are background; null: all
    slabs: list[str] | None = None  # translation: superficial, deep, ...; null: all that the flow has
    class_order: list[str] | None = None  # ordinal: all classes, lowest first
    # what a row of the table, and a prediction, is about; predictions of its volumes are averaged
    unit: Literal["volume", "eye", "participant"] = "participant"


@dataclass(frozen=True)
class HeadConfig:
    # linear and mlp read mean and standard deviation over valid tokens, attentive the tokens themselves;
    # of task.kind layers, segmentation and translation: linear or upsampling, each of all tokens
    kind: Literal["linear", "mlp", "attentive", "upsampling"] = "linear"
    hidden: int = key(256, AT_LEAST_1)  # width of the mlp, or channels of the upsampling decoder
    voxels: bool = False  # upsampling: beside the tokens it reads the voxels
    dropout: float = key(0.0, BELOW_1)
    # all pairs are trained together on frozen features; the one that is best on validation is kept
    learning_rates: list[float] = field(default_factory=lambda: [1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
    weight_decays: list[float] = field(default_factory=lambda: [1e-4, 1e-2, 1e-1])


@dataclass(frozen=True)
class FinetuneConfig:
    encoder: Literal["frozen", "trained"] = "frozen"
    # layers, segmentation, translation: a second decoder on a randomly initialised encoder: what pre-training
    # gained
    against_random: bool = False
    # learning rate of a block is this to the power of the number of blocks above it
    layer_decay: float = key(0.75, Bound("a number in (0, 1]", lambda value: 0 < value <= 1))
    unfreeze_at_epoch: int = key(0, AT_LEAST_0)  # until then the head alone is trained
    # auto: every class has the same weight in the loss; segmentation: the root of its rarity
    class_weights: Literal["auto", "none"] = "auto"
    label_smoothing: float = key(0.0, BELOW_1)
    patience: int | None = key(10, AT_LEAST_1)  # epochs without a better validation; null: to the end


@dataclass(frozen=True)
class ProbeConfig:
    # cap on the volumes of each side that are embedded for the probes during pre-training
    max_volumes: int = key(256, AT_LEAST_1, may_change=True)
    bootstrap_samples: int = key(2000, AT_LEAST_1, may_change=True)


@dataclass(frozen=True)
class EvalConfig:
    split: Literal["val", "test"] = key("test", may_change=True)
    # official: the splits of the table; crossfit: folds over all labelled participants that pre-training did
    # not see
    protocol: Literal["official", "crossfit"] = key("official", may_change=True)
    folds: int = key(5, Bound("3 or more", lambda value: value >= 3), may_change=True)  # of crossfit
    batch_size: int = key(16, AT_LEAST_1, may_change=True)
    # true: participants seen in pre-training may be evaluated; tables say so
    allow_overlap: bool = key(False, may_change=True)


@dataclass(frozen=True)
class Config:
    experiment_name: str = MISSING
    seed: int = key(MISSING, AT_LEAST_0)
    data: DataConfig = field(default_factory=DataConfig)
    spatial: SpatialConfig = field(default_factory=SpatialConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    val: ValConfig = field(default_factory=ValConfig)
    run: RunConfig = field(default_factory=RunConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    log: LogConfig = field(default_factory=LogConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along (D, H, W)."""
        d, h, w = (i // p for i, p in zip(self.spatial.image_size, self.spatial.patch_size, strict=True))
        return d, h, w


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """('section.key', its field, its value) for every key of a configuration."""
    for part in fields(section):
        value = getattr(section, part.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{part.name}.")
        else:
            yield f"{prefix}{part.name}", part, value


def keys_with(mark: Literal["may_change", "identity", "is_place"]) -> list[str]:
    """The keys that bear a mark."""
    return [name for name, part, _ in leaves(Config()) if part.metadata.get(mark)]
