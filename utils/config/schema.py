"""The schema of a configuration: one frozen dataclass per section.

Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan. Each key is a
field with its type, default, meaning, bound, unit and marks (fields.py); one whose default is MISSING must be
in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from omegaconf import MISSING

from utils.config.fields import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_2,
    BELOW_1,
    CHECKPOINTS,
    EPOCHS,
    INNER_SHARE,
    SHARE,
    UP_TO_1,
    UPDATES,
    VOLUMES,
    WHOLE_HEADS,
    key,
)


@dataclass(frozen=True)
class StorageOptions:
    endpoint_url: str | None = key(
        None, "an S3-compatible or emulated server; null: the provider's own", per_machine=True
    )


@dataclass(frozen=True)
class DataConfig:
    gcs_root: str = key(MISSING, "the AI-READI root: a bucket URL or a folder", per_machine=True)
    manifest_path: str = key(
        "${data.gcs_root}/retinal_oct/manifest.tsv",
        "the table of volumes: docs/start/dicoms.md",
        per_machine=True,
    )
    participants_path: str = key(
        "${data.gcs_root}/participants.tsv", "the table of people, with labels and splits", per_machine=True
    )
    octa_manifest_path: str = key(
        "${data.gcs_root}/retinal_octa/manifest.tsv",
        "links height maps, flow cubes and en-face images to scans; of data_setup.prepare --heights, --flow",
        per_machine=True,
    )
    store: str = key(MISSING, "the prepared store that this configuration makes and reads", per_machine=True)
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    list_strategy: Literal["single_domain", "multi_domain"] = key(MISSING, "one device, or several")
    device_filter: list[str] | None = key(None, "names of devices; null: all")
    protocol_filter: list[str] | None = key(None, "names of protocols; null: all volumes")
    laterality_filter: list[str] | None = key(None, "[L], [R]; null: both")
    min_quality: float | None = key(
        None,
        "leave out volumes whose `quality` in the store's index is below; null: none. prepare keeps them all",
        SHARE,
    )
    sampling: Literal["natural", "device_balanced"] = key(
        "natural",
        "natural: every volume once in an epoch; device_balanced: every device equally often, but no volume "
        "more than twice as often as on the mean",
    )
    cache_dir: str | None = key(
        None, "local read-through cache of a remote store; null: none", may_change=True, per_machine=True
    )
    max_samples: int | None = key(
        None,
        "prepare so many records, of all sites, devices and groups in turn; null: all. Training takes "
        "what the store has",
        AT_LEAST_1,
        unit="records",
    )
    workers: int | None = key(
        1,
        "loader processes per rank; 0: in the training process; null: by the CPUs of its machine, up to 32",
        AT_LEAST_0,
        unit="processes",
        may_change=True,
        per_machine=True,
    )
    max_reject_fraction: float = key(0.05, "prepare stops above this share of rejected records", SHARE)


@dataclass(frozen=True)
class SpatialConfig:
    target_spacing: tuple[float, float, float] = key(
        MISSING, "distance of voxels in the store", ABOVE_0, unit="mm", identity=True
    )
    image_size: tuple[int, int, int] = key(
        MISSING, "size of a volume in the store", unit="voxels", identity=True
    )
    patch_size: tuple[int, int, int] = key(
        MISSING, "size of a token; image_size is a multiple of it", unit="voxels", identity=True
    )
    resample: Literal["spacing", "resize"] = key(
        "spacing", "resize: the whole scan into image_size, spacing ignored", identity=True
    )


@dataclass(frozen=True)
class AugmentConfig:
    strength: float = key(
        1.0, "of all ranges of data_setup/transforms.py together: 1 as they stand there, 0 none", SHARE
    )


@dataclass(frozen=True)
class ModelConfig:
    size: Literal["ti", "s", "b", "l", "h"] = key(MISSING, "encoder: ViT-Ti, S, B, L or H", identity=True)
    rope: Literal["interleaved", "tiled", "interpolated"] = key(
        "interleaved",
        "tiled: what released V-JEPA 2.0 weights need; interpolated: what those of 2.1 need",
        identity=True,
    )
    tpu_attention: Literal["plain", "flash"] = key(
        "plain",
        "on a TPU (other devices have one kernel): flash never holds the tokens x tokens matrix",
        may_change=True,
    )
    feature_blocks: list[int] | None = key(
        None,
        "blocks, counted from 1, whose normalised outputs are joined: the features of every probe, head, "
        "embed and export; null: only the last",
    )
    checkpoint: str | None = key(
        None, "what finetuning reads; null: best_probe.pt of this run", may_change=True, per_machine=True
    )


@dataclass(frozen=True)
class MaskFamily:
    scale: float = key(MISSING, "share of the plane (tube) or of the grid (box) that one block covers")
    tube: bool = key(True, "true: the block runs through all of D")


MISMATCHED = "mismatched_targets", "mismatched_latents"  # of method.control: need another volume in a batch


@dataclass(frozen=True)
class MethodConfig:
    recipe: str = key(MISSING, "a name of utils/config/recipes.py", identity=True)
    mask_ratio: float | None = key(
        None,
        "methods: share of tokens replaced by the mask token and predicted; mae, in place of the next "
        "three: share of tokens predicted from all others",
        INNER_SHARE,
    )
    context_ratio: float | None = key(
        None, "vjepa2, mae: share of tokens that the context encoder sees", INNER_SHARE
    )
    target_ratio: float | None = key(None, "vjepa2, mae: share of tokens that are predicted", INNER_SHARE)
    mask_blocks: list[MaskFamily] | None = key(None, "vjepa2, mae: one family is drawn per sample")
    predictor_depth: int = key(6, "blocks of the transformer predictor", AT_LEAST_1)
    predictor_width: int = key(384, "width of the transformer predictor", WHOLE_HEADS)
    ema_base: float | None = key(
        None, "null (not methods): a half-life of 5 % of the run, at most 0.9995", SHARE
    )
    regulariser: Literal["none", "vicreg"] = key("none", "penalty against collapse, on the context tokens")
    regulariser_weight: float = key(0.0, "of the penalty, beside the prediction's loss", AT_LEAST_0)
    neighbour_weight: float = key(
        0.0,
        "vjepa2, mae: of a second loss, the squared error of the voxels at and beside each visible token, "
        "read linearly from its feature; 0: none",
        AT_LEAST_0,
    )
    control: Literal["penalty_only", "mismatched_targets", "mismatched_latents"] | None = key(
        None,
        "a control for claims, no way to train: the prediction's loss times 0, or, in training, the "
        "targets of another volume of the batch: all of them, or only the target encoder's features and "
        "no voxels",
    )
    init_from: str | None = key(
        None,
        "weights that start this run: a checkpoint, public V-JEPA weights, or a folder of a 2D image model; "
        "null: random",
        per_machine=True,
    )
    dropout: float = key(0.0, "probability", BELOW_1)
    drop_path: float = key(
        0.0, "probability that a block is skipped, at the last block; less before", BELOW_1
    )


@dataclass(frozen=True)
class OptimConfig:
    base_lr: float = key(MISSING, "peak learning rate", ABOVE_0)
    weight_decay: float = key(MISSING, "of matrices only", AT_LEAST_0)
    betas: tuple[float, float] = key(MISSING, "of AdamW", BELOW_1)
    warmup_ratio: float = key(MISSING, "share of the run", SHARE)
    cooldown_ratio: float = key(0.0, "all but methods: linear decay over the last share of the run", SHARE)
    min_lr_ratio: float = key(MISSING, "end of the schedule as a share of base_lr", SHARE)
    clip_grad_norm: float = key(MISSING, "largest norm of the gradient", ABOVE_0)
    layer_decay: float = key(
        1.0,
        "pre-training: the rate of an encoder's block is this to the power of the blocks above it",
        UP_TO_1,
    )
    eps: float = key(
        1e-8,
        "AdamW's; far below the gradients (`methods` has some of 1e-9), or the smallest of them move nothing",
        ABOVE_0,
    )


@dataclass(frozen=True)
class TrainConfig:
    global_batch_size: int = key(MISSING, "volumes of an update, of all devices together", VOLUMES)
    per_core_batch_size: int | Literal["auto"] = key(
        MISSING,
        "volumes that a device computes at once; auto: the most that fit, found at start, on XLA 1",
        VOLUMES,
        may_change=True,
    )
    epochs: int | None = key(
        None, "length of the run in passes over the training volumes", EPOCHS, may_change=True
    )
    max_steps: int | None = key(
        None, "length of the run in updates; wins over epochs when both are given", UPDATES, may_change=True
    )
    use_bf16: bool | Literal["auto"] = key(
        MISSING,
        "true: bfloat16 where it is safe, weights stay float32; false: float32; auto: true where the device "
        "has instructions for it",
    )
    activation_checkpointing: bool = key(
        False,
        "true: only the blocks' inputs are kept for the backward pass, the rest is computed again; same "
        "numbers",
        may_change=True,
    )
    compile: bool = key(
        False,
        "true: torch.compile of every transformer block, in training, not on XLA; equal but for rounding",
        may_change=True,
    )
    ckpt_dir: str | None = key("${run.dir}/checkpoints", "null: no checkpoints", is_place=True)
    ckpt_every_epochs: int = key(5, "a checkpoint each so many epochs", EPOCHS, may_change=True)
    keep_epochs: int = key(
        10,
        "of the checkpoints of epochs so many stay at most, evenly over the run",
        CHECKPOINTS,
        may_change=True,
    )
    ckpt_every_steps: int | None = key(
        None, "a checkpoint each so many updates; null: only by epochs", UPDATES, may_change=True
    )
    keep_last: int = key(2, "newest checkpoints that stay", CHECKPOINTS, may_change=True)
    log_every_steps: int = key(10, "a line of metrics each so many updates", UPDATES, may_change=True)
    val_every_steps: int | None = key(
        None,
        "null: every epoch, or every few, so that validations read at most 2.5 % of what training reads",
        UPDATES,
    )

    @property
    def at_once(self) -> int:
        """per_core_batch_size as a number; of `auto` that from which it is looked for."""
        return 1 if self.per_core_batch_size == "auto" else self.per_core_batch_size


@dataclass(frozen=True)
class ValConfig:
    max_volumes: int = key(
        256,
        "cap on the volumes of a validation and of each side of its probes: the same at each, participants "
        "in turn; a quarter before step 1",
        VOLUMES,
        may_change=True,
    )


@dataclass(frozen=True)
class RunConfig:
    dir: str = key(
        "runs/${experiment_name}", "configuration, log, metrics and report of the run", is_place=True
    )
    profile: bool = key(
        False, "true: a trace of the 6th to 8th step after each start, in run.dir/profile", may_change=True
    )


@dataclass(frozen=True)
class WandbConfig:
    project: str = key(
        "oct-foundation",
        "PROJECT or ENTITY/PROJECT, the entity a user or a team; WANDB_PROJECT and WANDB_ENTITY win",
        may_change=True,
    )
    mode: Literal["online", "offline", "disabled"] = key(
        "offline", "offline: files below run.dir, for wandb sync", may_change=True
    )
    send: Literal["nothing", "images", "artifacts", "both"] | None = key(
        None,
        "pictures of volumes, checkpoints; null: both of synthetic stores, else nothing",
        may_change=True,
    )


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = key(
        False, "true: TensorBoard files in run.dir/tensorboard too (pip install tensorboard)", may_change=True
    )


DENSE_KINDS = ("layers", "segmentation", "translation")  # of task.kind: decoders of whole volumes


@dataclass(frozen=True)
class TaskConfig:
    labels_path: str | None = key(
        None, "a table with an id and a label; null: participants.tsv", per_machine=True
    )
    id_column: str | None = key(None, "null: the column of the unit (person_id or participant_id, ...)")
    label_column: str = key("study_group", "column of the label")
    kind: Literal[
        "classification", "ordinal", "regression", "multilabel", "layers", "segmentation", "translation"
    ] = key(
        "classification",
        "what the label is; `layers`: surfaces, of the store's height maps; "
        "`segmentation`: classes of voxels, of its label volumes; `translation`: en-face slabs of OCTA, "
        "of its flow",
    )
    names: list[str] | None = key(
        None,
        "what is learnt; null where a decoder learns all that the store has. ordinal: all classes, lowest "
        "first; multilabel: a column of 0 and 1 for each label; layers: surfaces, from the vitreous down; "
        "segmentation: classes of voxels, the others are background; translation: slabs, as superficial",
    )
    unit: Literal["volume", "eye", "participant"] = key(
        "participant",
        "what a row of the table, and a prediction, is about; predictions of its volumes are averaged",
    )


@dataclass(frozen=True)
class HeadConfig:
    kind: Literal["linear", "mlp", "attentive", "upsampling", "unetr"] = key(
        "linear",
        "linear and mlp read mean and standard deviation over valid tokens, attentive the tokens "
        "themselves; of task.kind layers, segmentation and translation, of all tokens: linear, upsampling "
        "or unetr, a U-Net on the voxels of a B-scan that tokens of several blocks join",
    )
    hidden: int = key(256, "width of the mlp, or channels of a decoder at full size", AT_LEAST_1)
    voxels: bool = key(False, "upsampling: beside the tokens it reads the voxels; true with unetr")
    learning_rates: list[float] = key(
        [0.0001, 0.0003, 0.001, 0.003, 0.01],
        "all pairs are trained together on frozen features; the one that is best on validation is kept",
    )
    weight_decays: list[float] = key([0.0001, 0.01, 0.1], "see learning_rates")


@dataclass(frozen=True)
class FinetuneConfig:
    encoder: Literal["frozen", "trained"] = key(
        "frozen", "frozen: only a head is trained; trained: the encoder too"
    )
    against_random: bool = key(
        False,
        "layers, segmentation, translation: a decoder on a randomly initialised encoder, too, and on two "
        "rows without an encoder where it is frozen: what pre-training gained",
    )
    layer_decay: float = key(
        0.75, "learning rate of a block is this to the power of the number of blocks above it", UP_TO_1
    )
    class_weights: Literal["auto", "none"] = key(
        "auto", "auto: every class has the same weight in the loss; segmentation: the root of its rarity"
    )
    patience: int | None = key(
        10, "epochs (of a decoder: validations) without a better validation; null: to the end", EPOCHS
    )


@dataclass(frozen=True)
class EvalConfig:
    split: Literal["val", "test"] = key("test", "which people are scored", may_change=True)
    protocol: Literal["official", "crossfit"] = key(
        "official",
        "official: the splits of the table; crossfit: folds over all labelled participants that "
        "pre-training did not see",
        may_change=True,
    )
    folds: int | None = key(
        5,
        "parts of the people with crossfit, each of which is evaluated once; null: every person is one "
        "(layers, segmentation, translation)",
        AT_LEAST_2,
        may_change=True,
    )
    allow_overlap: bool = key(
        False, "true: participants seen in pre-training may be evaluated; tables say so", may_change=True
    )


@dataclass(frozen=True)
class Config:
    experiment_name: str = key(MISSING, "name of the run, in run.dir and in Weights & Biases")
    seed: int = key(
        MISSING, "of initialisation, data order, masks and noise: the same seed, the same run", AT_LEAST_0
    )
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


def keys_with(mark: Literal["may_change", "identity", "is_place", "per_machine"]) -> list[str]:
    """The keys that bear a mark."""
    return [name for name, part, _ in leaves(Config()) if part.metadata.get(mark)]
