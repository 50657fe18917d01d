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
REFERENCE = "vjepa2"  # every ablation changes one thing of this arm
RANDOM = "random"
CONTROL = "control"  # the reference arm, hardly trained
# the reference arm without what a JEPA is about: nothing to predict, and nothing of this volume to predict
PENALTY_ONLY, MISMATCHED = "penalty_only", "mismatched_targets"
SUPERVISED = "supervised"  # no pre-training: what the images allow
CONTROLS = RANDOM, CONTROL, PENALTY_ONLY, MISMATCHED  # a claim about the reference arm is above all of them
# an arm's own two, by name: "lr_2e-3+mismatched_targets"
OWN_CONTROLS = {
    "mismatched_targets": "targets of another volume (control)",
    "penalty_only": "nothing predicted (control)",
}
# 4 volumes a step: 0.8 s on one core, so hundreds of updates in minutes
BASE = (
    "train.global_batch_size=4",
    "train.per_core_batch_size=4",
    "train.val_fraction=0.05",  # validation is for the run's log; nothing is chosen by it
    "train.log_every_steps=10",
    "train.keep_last=1",
    "train.use_bf16=false",
    "val.max_volumes=256",
    "probe.max_volumes=64",
    "data.workers=0",
    "wandb.mode=disabled",
)
NO_NEIGHBOURS = ("method.neighbour_weight=0",)
# as in the Methods text, except the patch, which all arms share
METHODS = (
    "method.recipe=methods",
    "method.mask_ratio=0.6",
    "method.context_ratio=null",
    "method.target_ratio=null",
    "method.mask_blocks=null",
    "method.ema_base=0.996",
    "method.dropout=0.1",
    "method.drop_path=0.1",
    "method.regulariser=none",
    "method.regulariser_weight=0",
    *NO_NEIGHBOURS,
    "optim.base_lr=1e-4",
    "optim.weight_decay=0.05",
    "optim.betas=[0.9,0.95]",
    "optim.warmup_ratio=0.03",
    "optim.cooldown_ratio=0",
    "optim.min_lr_ratio=0.1",
    "optim.clip_grad_norm=0.01",
    "optim.eps=1e-12",
)
NO_REGULARISER = ("method.regulariser=none", "method.regulariser_weight=0")
MAE = (
    "method.recipe=mae",
    *NO_REGULARISER,
    *NO_NEIGHBOURS,
    "optim.base_lr=5e-4",
)  # its own: 1e-3 is worse for it
DENSE = ("method.context=dense",)


@dataclass(frozen=True)
class Arm:
    """A configuration to train; not `is_trained`: its encoder is made where it is scored."""

    name: str
    label: str
    factor: str  # "recipe", "ceiling", or what an ablation changes
    changes: tuple[str, ...] = ()
    ema_half_life: float | None = None  # share of the run; None: as in the recipe and the changes
    compared_with: str = REFERENCE  # an ablation: the arm that it changes one thing of
    is_trained: bool = True
    steps: int | None = None  # fixed; None: as many as fit the budget

    @property
    def is_control(self) -> bool:
        """Whether claims are held against it and it makes none."""
        return self.name in (RANDOM, CONTROL) or any(c.startswith("method.control=") for c in self.changes)


def _weight(kind: str, weight: float) -> tuple[str, ...]:
    return (f"method.regulariser={kind}", f"method.regulariser_weight={weight}")


def _masks(*families: str) -> tuple[str, ...]:
    return (f"method.mask_blocks=[{','.join(families)}]",)


def _batch(volumes: int) -> tuple[str, ...]:
    return f"train.global_batch_size={volumes}", f"train.per_core_batch_size={volumes}"


LIGHTER = ("method.covariance_weight=0.01",)
SLOWER = ("optim.base_lr=5e-4",)  # the recipe's until 2026-11-23
HARDER = ("method.context_ratio=0.25", "method.target_ratio=0.55")

RANDOM_ARM = Arm(RANDOM, "random initialisation", "recipe", is_trained=False)
SUPERVISED_ARM = Arm(
    SUPERVISED, "ceiling: the encoder trained on the truth of layer occupancy", "ceiling", is_trained=False
)
MAIN = (
    Arm("vjepa2", "vjepa2, vicreg 0.05, neighbours 1 (as shipped)", "recipe"),
    Arm(CONTROL, "vjepa2 after 2 steps (control)", "recipe", steps=2),
    Arm(
        PENALTY_ONLY, "penalty alone, nothing predicted (control)", "recipe", ("method.control=penalty_only",)
    ),
    Arm(MISMATCHED, "targets of another volume (control)", "recipe", ("method.control=mismatched_targets",)),
    Arm("methods", "methods, as its text says", "recipe", METHODS),
    Arm("mae_normalised", "mae, normalised patches", "recipe", (*MAE, "method.mae_target=normalised")),
    Arm("mae_plain", "mae, plain patches", "recipe", (*MAE, "method.mae_target=plain")),
)
ABLATIONS = (
    Arm(
        "parity",
        "V-JEPA 2 with nothing added: no penalty, no neighbours",
        "parity",
        (*NO_REGULARISER, *NO_NEIGHBOURS),
    ),
    Arm("reg_none", "no regulariser", "regulariser", NO_REGULARISER),
    Arm("reg_vicreg_0.02", "vicreg 0.02", "regulariser", _weight("vicreg", 0.02)),
    Arm("reg_vicreg_0.2", "vicreg 0.2", "regulariser", _weight("vicreg", 0.2)),
    Arm("reg_vicreg_0.005", "vicreg 0.005", "regulariser", _weight("vicreg", 0.005)),
    Arm("cov_0", "vicreg without covariance", "regulariser", ("method.covariance_weight=0",)),
    Arm("cov_0.01", "covariance 0.01 of the hinge", "regulariser", LIGHTER),
    Arm(
        "cov_ramp",
        "covariance rises over 40 % of the run after the warm-up",
        "regulariser",
        ("method.covariance_ramp=0.4",),
    ),
    Arm("reg_sigreg_0.05", "sigreg 0.05", "regulariser", _weight("sigreg", 0.05)),
    Arm("reg_sigreg_0.5", "sigreg 0.5", "regulariser", _weight("sigreg", 0.5)),
    Arm(
        "sigreg_no_ema",
        "sigreg 0.05, target the encoder itself, without gradient",
        "regulariser and EMA",
        (*_weight("sigreg", 0.05), "method.ema_base=0"),
    ),
    Arm(
        "reg_none_ema_20",
        "no regulariser, EMA half-life 20 % of the run",
        "regulariser and EMA",
        NO_REGULARISER,
        ema_half_life=0.2,
    ),
    Arm("ema_1", "EMA half-life 1 % of the run", "EMA", ema_half_life=0.01),
    Arm("ema_20", "EMA half-life 20 % of the run", "EMA", ema_half_life=0.2),
    Arm("patch_4x16x16", "patch 4 x 16 x 16", "patch", ("spatial.patch_size=[4,16,16]",)),
    Arm("context_dense", "dense context", "context", DENSE),
    Arm(
        "predictor_mlp",
        "dense context, MLP predictor",
        "predictor",
        (*DENSE, "method.predictor=mlp"),
        compared_with="context_dense",
    ),
    Arm("predictor_4", "predictor 4 x 192", "predictor", ("method.predictor_depth=4",)),
    Arm("predictor_96", "predictor 2 x 96", "predictor", ("method.predictor_width=96",)),
    Arm("mask_short", "short-range tubes only", "mask", _masks("{scale: 0.15, tube: true}")),
    Arm("mask_long", "long-range tubes only", "mask", _masks("{scale: 0.5, tube: true}")),
    Arm("mask_boxes", "boxes", "mask", _masks("{scale: 0.15, tube: false}")),
    # At initialisation the encoder's gradient is 2.1 to 2.6 and .031 to .039 times that of L1 (3 seeds); the
    # penalty is scaled by 2.3 and .035, or its share would change more than the loss.
    Arm("loss_l2", "squared error", "loss", ("method.loss=l2", *_weight("vicreg", 0.115))),
    Arm(
        "loss_normalised_l2",
        "squared error of unit vectors",
        "loss",
        ("method.loss=normalised_l2", *_weight("vicreg", 0.00175)),
    ),
    Arm("lr_2e-4", "peak learning rate 2e-4", "learning rate", ("optim.base_lr=2e-4",)),
    Arm("lr_5e-4", "peak learning rate 5e-4", "learning rate", SLOWER),
    Arm("lr_2e-3", "peak learning rate 2e-3", "learning rate", ("optim.base_lr=2e-3",)),
    Arm("batch_2", "2 volumes a step", "batch", _batch(2)),
    Arm("batch_8", "8 volumes a step", "batch", _batch(8)),
    Arm(
        "slower_cov_0.01",
        "learning rate 5e-4, covariance 0.01",
        "regulariser",
        (*SLOWER, *LIGHTER),
        compared_with="lr_5e-4",
    ),
    Arm(
        "device_balanced",
        "as many volumes of each device",
        "sampling",
        ("data.sampling=device_balanced",),
    ),
    Arm("context_loss", "context loss 0.5", "context loss", ("method.context_weight=0.5",)),
    Arm(
        "dense_loss",
        "context loss 0.5, targets of blocks 3, 6, 9, 12",
        "context loss",
        ("method.context_weight=0.5", "method.target_layers=[3,6,9,12]"),
    ),
    Arm("no_neighbours", "without the neighbours' voxels", "neighbours", NO_NEIGHBOURS),
    Arm(
        "neighbours_only",
        "neighbours' voxels alone, the predictor's loss times 0",
        "neighbours",
        ("method.predictor_weight=0",),
    ),
    Arm(
        "mismatched_latents",
        "latents of another volume, voxels its own (control)",
        "control",
        ("method.control=mismatched_latents",),
    ),
    Arm("neighbours_0.3", "neighbours 0.3", "neighbours", ("method.neighbour_weight=0.3",)),
    Arm("neighbours_3", "neighbours 3", "neighbours", ("method.neighbour_weight=3",)),
    Arm("own_place", "voxels of the token's own place alone", "neighbours", ("method.neighbour_places=own",)),
    Arm(
        "hidden_neighbours",
        "voxels of hidden neighbours alone",
        "neighbours",
        ("method.neighbour_places=hidden",),
    ),
    Arm(
        "mae_neighbours",
        "mae, plain patches, voxels at and beside each visible token",
        "neighbours",
        (*MAE, "method.mae_target=plain", "method.neighbour_weight=1"),
        compared_with="mae_plain",
    ),
    Arm("pixel", "pixel head", "second target", ("method.pixel_weight=1",)),
    Arm("ascan", "A-scan head", "A-scan head", ("method.ascan_weight=1",)),
    Arm("centred", "penalty less the mean of each place", "penalty", ("method.centre_places=true",)),
    Arm("context_0.25", "context .25", "task", HARDER[:1]),
    Arm("target_0.55", "target .55", "task", HARDER[1:]),
    Arm("harder", "context .25, target .55", "task", HARDER),
    Arm(
        "harder_cov_0.01",
        "context .25, target .55, covariance 0.01",
        "task",
        (*HARDER, *LIGHTER),
        compared_with="harder",
    ),
    Arm(
        "methods_eps_1e-8",
        "methods with AdamW's default eps",
        "methods, not as its text says",
        (*METHODS, "optim.eps=1e-8"),
        compared_with="methods",
    ),
    Arm(
        "methods_scaled",
        "methods with lr 5e-4, clip 1, EMA from 0.97",
        "methods, not as its text says",
        (*METHODS, "optim.base_lr=5e-4", "optim.clip_grad_norm=1.0", "method.ema_base=0.97"),
    ),
)


def own_control(arm: Arm, control: str) -> Arm:
    """The arm with nothing, or nothing of its own volume, to predict."""
    return replace(
        arm,
        name=f"{arm.name}+{control}",
        label=f"{arm.label}, {OWN_CONTROLS[control]}",
        factor="control",
        changes=(*arm.changes, f"method.control={control}"),
        compared_with=arm.name,
    )


def own_controls(arm: Arm) -> list[Arm]:
    """The arm's own two; one where there is no penalty, so that nothing would be left to train on; none where
    the arm is a control itself.
    """
    if arm.is_control:
        return []
    without_penalty = set(NO_REGULARISER) & set(arm.changes)
    return [own_control(arm, name) for name in OWN_CONTROLS if name != PENALTY_ONLY or not without_penalty]


def controls_of_claims(name: str) -> tuple[str, ...]:
    """The arms that a claim about an arm has to be above: random initialisation, two steps, its own two."""
    if name == REFERENCE:
        return CONTROLS
    return RANDOM, CONTROL, *(arm.name for arm in own_controls(arm_by_name(name)))


# everything with a run; an ablation's own controls are run where they are asked for by name
TRAINED = (
    *MAIN,
    *ABLATIONS,
    *(control for arm in (*MAIN, *ABLATIONS) if arm.name != REFERENCE for control in own_controls(arm)),
)


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
    arms = {arm.name: arm for arm in (RANDOM_ARM, SUPERVISED_ARM, *MAIN, *ABLATIONS)}
    if name not in arms:
        raise UserError(f"--arm: expected one of {', '.join(arms)}, found {name}")
    return arms[name]


def run_dir(root: Path, arm: Arm, seed: int) -> Path:
    """Where the arm's run and its scores lie."""
    return root / "runs" / arm.name / f"seed_{seed}"


def overrides(arm: Arm, seed: int, steps: int, root: Path, extra: Iterable[str] = ()) -> list[str]:
    """The arm as changes to CONFIG; `extra` comes last (another geometry, for tests)."""
    half_life: tuple[str, ...] = ()
    if arm.ema_half_life is not None:
        half_life = (f"method.ema_base={0.5 ** (1 / max(1.0, arm.ema_half_life * steps)):.6f}",)
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
    return [*BASE, *places, *arm.changes, *half_life, *extra]


def arm_config(arm: Arm, seed: int, steps: int, root: Path, extra: Iterable[str] = ()) -> Config:
    """The checked configuration of one run."""
    return load_config(CONFIG, overrides(arm, seed, steps, root, extra))


def cost_key(cfg: Config) -> str:
    """Arms with one key take one time per step."""
    m = cfg.method
    shape = (
        m.ascan_weight > 0,
        m.pixel_weight > 0,
        m.context_weight > 0,
        m.neighbour_weight > 0 and m.neighbour_places,
        m.target_layers,
        m.recipe,
        m.mae_target,
        m.context_ratio,
        m.target_ratio,
        m.predictor_depth,
        m.predictor_width,
    )
    parts = m.context, m.predictor, m.loss, cfg.train.global_batch_size
    return repr((shape, parts, m.regulariser, m.dropout, m.drop_path, cfg.spatial.patch_size))
