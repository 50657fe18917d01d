"""The arms of benchmarks.evidence: what is compared, as changes to configs/smoke_test.yaml.

In: an arm, a seed, a number of steps and the evidence folder. Out: its configuration, the same that
`python -m pretraining.train` reads. An ablation changes one thing of the reference arm, or of another named
arm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import UserError

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "smoke_test.yaml"
REFERENCE = "surroundings"  # every other arm is held against it; an ablation also against `compared_with`
RANDOM = "random"
CONTROL = "control"  # the reference arm, hardly trained
MISMATCHED = "mismatched_targets"  # the reference arm with nothing of this volume to tell
SCRATCH = "cnn_from_labels", "vit_from_labels"  # no pre-training: trained on the labels of the probes
CONTROLS = RANDOM, CONTROL, MISMATCHED  # a claim about the reference arm is above all of them
# an arm's own, by name: "vjepa2+penalty_only"; targets where there are no latents beside voxels
OWN_CONTROLS = {
    "mismatched_latents": "latents of another volume, voxels its own (control)",
    "mismatched_targets": "targets of another volume (control)",
    "penalty_only": "nothing predicted (control)",
}
# 4 volumes a step: 0.8 s on one core, so hundreds of updates in minutes
BASE = (
    "train.global_batch_size=4",
    "train.per_core_batch_size=4",
    "train.log_every_steps=10",
    "train.keep_last=1",
    "train.use_bf16=false",
    "val.max_volumes=64",
    "data.workers=0",
    "wandb.mode=disabled",
)
NEIGHBOURS = ("method.neighbour_weight=1",)
PENALTY = ("method.regulariser=vicreg", "method.regulariser_weight=0.05")
SMALL_PREDICTOR = ("method.predictor_depth=2", "method.predictor_width=192")
JEPA = (
    "method.recipe=vjepa2",
    "method.context_ratio=0.4",
    "method.target_ratio=0.3",
    "method.mask_blocks=[{scale: 0.15}, {scale: 0.5}]",
    *SMALL_PREDICTOR,
    "optim.base_lr=1e-3",  # 2e-3 scored less on real eyes
)
VJEPA2 = (*JEPA, *PENALTY, *NEIGHBOURS)  # what configs/pretrain_oct_vjepa2.yaml has, at this size
# as published: 75 % hidden at random, all of it predicted (He et al. 2022); 1e-3 is worse for it
MAE = ("method.recipe=mae", "method.mask_ratio=0.75", *SMALL_PREDICTOR, "optim.base_lr=5e-4")


@dataclass(frozen=True)
class Arm:
    """A configuration to train; not `is_trained`: its encoder is made where it is scored."""

    name: str
    label: str
    factor: str  # "recipe", "labels", or what an ablation changes
    changes: tuple[str, ...] = ()
    compared_with: str = REFERENCE  # an ablation: the arm that it changes one thing of
    is_trained: bool = True
    steps: int | None = None  # fixed; None: as many as fit the budget
    patch: str | None = None  # of benchmarks.evidence.patches, for what no key says

    @property
    def is_control(self) -> bool:
        """Whether claims are held against it and it makes none."""
        return self.name in (RANDOM, CONTROL) or any(c.startswith("method.control=") for c in self.changes)


RANDOM_ARM = Arm(RANDOM, "random initialisation", "recipe", is_trained=False)
SCRATCH_ARMS = tuple(
    Arm(name, f"{label} from scratch, on only the labels", "labels", is_trained=False)
    for name, label in zip(SCRATCH, ("a small 3D CNN", "a ViT of the encoder's size"), strict=True)
)
ARMS = (
    Arm(REFERENCE, "surroundings (as shipped)", "recipe"),
    Arm(CONTROL, "surroundings after 2 steps (control)", "recipe", steps=2),
    Arm(MISMATCHED, OWN_CONTROLS[MISMATCHED], "recipe", ("method.control=mismatched_targets",)),
    Arm("vjepa2", "vjepa2, vicreg 0.05, neighbours 1", "recipe", VJEPA2),
    Arm("mae", "mae, 75 % hidden, normalised patches", "recipe", MAE),
    Arm("mae_plain", "mae, 75 % hidden, plain patches", "recipe", MAE, patch="mae_plain"),
    Arm("mae_neighbours", "mae_plain with neighbours", "recipe", (*MAE, *NEIGHBOURS), patch="mae_plain"),
    Arm("parity", "V-JEPA 2 with nothing added: no penalty, no neighbours", "parity", JEPA, "vjepa2"),
    Arm("device_balanced", "as many volumes of each device", "sampling", ("data.sampling=device_balanced",)),
    Arm("no_neighbours", "vjepa2 without neighbours", "neighbours", (*JEPA, *PENALTY), "vjepa2"),
)


def own_control(arm: Arm, control: str) -> Arm:
    """The arm with nothing, or nothing of its volume, to predict."""
    return replace(
        arm,
        name=f"{arm.name}+{control}",
        label=f"{arm.label}, {OWN_CONTROLS[control]}",
        factor="control",
        changes=(*arm.changes, f"method.control={control}"),
        compared_with=arm.name,
    )


def own_controls(arm: Arm) -> list[Arm]:
    """The arm's own: without its targets, and only its penalty if it has one; none of a control."""
    if arm.is_control:
        return []
    has_both = {JEPA[0], *NEIGHBOURS} <= set(arm.changes)
    only_penalty = ["penalty_only"] if set(PENALTY) <= set(arm.changes) else []
    names = ["mismatched_latents" if has_both else MISMATCHED, *only_penalty]
    return [own_control(arm, name) for name in names]


def controls_of_claims(name: str) -> tuple[str, ...]:
    """The arms that a claim about an arm has to be above: random initialisation, two steps, its own."""
    if name == REFERENCE:
        return CONTROLS
    return RANDOM, CONTROL, *(arm.name for arm in own_controls(arm_by_name(name)))


# everything with a run; own controls are run where they are asked for by name
TRAINED = (*ARMS, *(control for arm in ARMS if arm.name != REFERENCE for control in own_controls(arm)))


def arm_by_name(name: str) -> Arm:
    """The arm of this name, or the own control of one; raises UserError with the names that exist."""
    base, is_control, control = name.partition("+")
    if is_control and control in OWN_CONTROLS:
        arm = arm_by_name(base)
        if arm.is_control:
            raise UserError(
                f"--arm: expected an arm that makes claims before +{control}, found the control {base}"
            )
        return own_control(arm, control)
    arms = {arm.name: arm for arm in (RANDOM_ARM, *SCRATCH_ARMS, *ARMS)}
    if name not in arms:
        raise UserError(f"--arm: expected one of {', '.join(arms)}, found {name}")
    return arms[name]


def run_dir(root: Path, arm: Arm, seed: int) -> Path:
    """Where the arm's run and its scores lie."""
    return root / "runs" / arm.name / f"seed_{seed}"


def overrides(arm: Arm, seed: int, steps: int, root: Path, extra: Iterable[str] = ()) -> list[str]:
    """The arm as changes to CONFIG; `extra` comes last (another geometry, for tests)."""
    places = (
        f"experiment_name=evidence_{arm.name}_{seed}",
        f"seed={seed}",
        f"data.gcs_root={root / 'pretraining'}",
        f"data.participants_path={root / 'pretraining_participants.tsv'}",
        f"data.store={root / 'pretraining_store'}",
        f"run.dir={run_dir(root, arm, seed)}",
        f"train.max_steps={steps}",
        f"train.val_every_steps={steps}",
        f"train.ckpt_every_steps={max(1, -(-steps // 3))}",  # an interrupted arm goes on from there
    )
    return [*BASE, *places, *arm.changes, *extra]


def arm_config(arm: Arm, seed: int, steps: int, root: Path, extra: Iterable[str] = ()) -> Config:
    """The checked configuration of one run."""
    return load_config(CONFIG, overrides(arm, seed, steps, root, extra))
