"""The schema of a configuration: one frozen dataclass per section.

Lengths are mm, sizes voxels, and every triple is in (D, H, W) order: B-scan, axial, A-scan. A field without
a default must be in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING


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
    max_samples: int | None = None  # prepare only the first so many records after the filters; null: all
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
    rope: Literal["interleaved", "tiled"] = "interleaved"  # tiled: what released V-JEPA 2.0 weights need
    # on a TPU (other devices have one kernel): flash never holds the tokens x tokens matrix
    tpu_attention: Literal["plain", "flash"] = "plain"
    checkpoint: str | None = None  # what finetuning reads; null: best_probe.pt of this run


@dataclass(frozen=True)
class MaskFamily:
    scale: float = MISSING  # share of the plane (tube) or of the grid (box) that one block covers
    tube: bool = True  # true: the block runs through all of D
    aspect: tuple[float, float] = (0.75, 1.5)  # height / width of the block in tokens


@dataclass(frozen=True)
class MethodConfig:
    recipe: Literal["methods", "vjepa2", "mae"] = MISSING
    # methods: share of tokens replaced by the mask token and predicted; mae, in place of the next three:
    # share of tokens predicted from all others
    mask_ratio: float | None = None
    context_ratio: float | None = None  # vjepa2, mae: share of tokens that the context encoder sees
    target_ratio: float | None = None  # vjepa2, mae: share of tokens that are predicted
    mask_blocks: list[MaskFamily] | None = None  # vjepa2, mae: one family is drawn per sample
    mae_target: Literal["normalised", "plain"] | None = None  # mae: of each patch, or as they are
    # vjepa2 with a part of another recipe, for comparisons; null: its own (visible tokens, transformer, L1)
    context: Literal["dense"] | None = None  # all positions, hidden ones replaced by a mask token
    predictor: Literal["mlp"] | None = None  # per target token, of a dense context; batch norm as in methods
    loss: Literal["l2", "normalised_l2"] | None = None  # scale regulariser_weight with its gradient
    predictor_depth: int = 6
    predictor_width: int = 384
    ema_base: float | None = None  # null (vjepa2, mae): a half-life of 5 % of the run, at most 0.9995
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
    cooldown_ratio: float = 0.0  # vjepa2, mae: linear decay over the last share of the run
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
    # true: only the blocks' inputs are kept for the backward pass, the rest is computed again; same numbers
    activation_checkpointing: bool = False
    # true: torch.compile of every transformer block, in training, not on XLA; equal but for rounding
    compile: bool = False
    # true: each device holds its part of weights, target and moments (PyTorch/XLA alone); same numbers
    shard_parameters: bool = False
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
    profile: bool = False  # true: a trace of the 6th to 8th step after each start, in run.dir/profile


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
