"""Arms that differ in one thing, timed for one budget; their plan."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import calibration as evidence_calibration
from benchmarks.evidence import cli as evidence
from benchmarks.evidence.arms import (
    ARMS,
    REFERENCE,
    TRAINED,
    arm_by_name,
    arm_config,
    own_control,
    own_controls,
)
from benchmarks.evidence.calibration import STEPS, calibrate, steps_of_budget
from benchmarks.evidence.cohorts import DATA
from benchmarks.evidence.differences import read_arm
from benchmarks.evidence.patches import PATCHES
from benchmarks.evidence.queue import Job, Plan, jobs_of
from data_setup.masks import MaskPlan
from models import vjepa3d
from models.vjepa3d import VJEPA3D
from utils.config.load import flatten
from utils.config.schema import MethodConfig
from utils.errors import UserError

KEYS_OF_FACTOR = {
    "parity": {"method.regulariser", "method.regulariser_weight", "method.neighbour_weight"},
    "neighbours": {"method.neighbour_weight"},
    "sampling": {"data.sampling"},
}


def test_an_ablation_changes_its_factor_and_nothing_else(tmp_path: Path) -> None:
    own = {"experiment_name", "run.dir", "train.ckpt_dir"}
    for arm in (arm for arm in ARMS if arm.factor != "recipe"):
        reference = dict(flatten(arm_config(arm_by_name(arm.compared_with), 0, 400, tmp_path)))
        ablated = dict(flatten(arm_config(arm, 0, 400, tmp_path)))
        changed = {k for k in ablated if ablated[k] != reference[k]} - own
        assert changed or arm.patch, arm.name
        assert changed <= KEYS_OF_FACTOR[arm.factor], arm.name
    assert len({a.name for a in ARMS}) == len(ARMS)


def test_recipes_share_data_patch_batch_and_model(tmp_path: Path) -> None:
    shared = ("data.", "spatial.", "augment.", "model.", "train.global", "train.max_steps", "train.val")
    tables = []
    for arm in (arm for arm in ARMS if arm.factor == "recipe"):
        cfg = arm_config(arm, 1, 50, tmp_path)
        tables.append({k: v for k, v in flatten(cfg) if k.startswith(shared)})
        assert (cfg.seed, cfg.train.max_steps) == (1, 50)
    assert all(t == tables[0] for t in tables)
    recipes = [arm_config(a, 0, 50, tmp_path).method.recipe for a in ARMS if a.factor == "recipe"]
    assert recipes == ["vjepa2"] * 4 + ["mae"] * 3  # with three controls


def test_an_arms_patch_is_there_and_trains_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {arm.patch for arm in TRAINED if arm.patch is not None} == set(PATCHES)
    monkeypatch.setattr(VJEPA3D, "pixel_norm", "normalised")
    seen = []

    def train(cfg) -> int:
        seen.append((cfg.experiment_name, cfg.train.max_steps, VJEPA3D.pixel_norm))
        return 0

    monkeypatch.setattr(evidence, "train", train)
    Plan(tmp_path, None, 1, {"mae": 7, "mae_plain": 8}).save()
    for name in ("mae", "mae_plain"):
        assert evidence.main(["train", "--root", str(tmp_path), "--arm", name, "--seed", "2"]) == 0
    assert seen == [("evidence_mae_2", 7, "normalised"), ("evidence_mae_plain_2", 8, "plain")]


def test_mean_ascans_stand_at_every_voxel_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = vjepa3d.pixel_targets
    monkeypatch.setattr(vjepa3d, "pixel_targets", real)  # put back at the end
    PATCHES["mean_ascans"]()
    view, patch = torch.randn(2, 1, 4, 6, 8), (2, 3, 4)
    means = real(view, patch, "plain").view(2, 8, 2, 3, 4).mean((2, 4), keepdim=True)
    asked = vjepa3d.pixel_targets(view, patch, "plain").view(2, 8, 2, 3, 4)
    torch.testing.assert_close(asked, means.expand_as(asked))
    assert torch.equal(vjepa3d.pixel_targets(view, patch, "normalised"), real(view, patch, "normalised"))


def test_an_own_control_differs_in_nothing_else(tmp_path: Path) -> None:
    arm = arm_by_name("device_balanced")
    control = arm_by_name("device_balanced+penalty_only")
    assert control == own_control(arm, "penalty_only")
    own = {"experiment_name", "run.dir", "train.ckpt_dir"}
    before, after = (dict(flatten(arm_config(a, 0, 50, tmp_path))) for a in (arm, control))
    assert {key for key in after if after[key] != before[key]} - own == {"method.control"}
    with pytest.raises(UserError, match="expected one of"):
        arm_by_name("device_balanced+nothing")
    with pytest.raises(
        UserError, match=r"expected an arm that makes claims .*found the control mismatched_lat"
    ):
        arm_by_name("mismatched_latents+penalty_only")
    assert not any(arm.name.startswith(("mismatched_latents+", "control+")) for arm in TRAINED)
    names = {arm: [control.name for control in own_controls(arm_by_name(arm))] for arm in ("mae", "parity")}
    assert names == {arm: [f"{arm}+mismatched_targets"] for arm in names}  # no latents beside voxels
    assert own_controls(arm_by_name("device_balanced"))[0].name == "device_balanced+mismatched_latents"


@pytest.mark.parametrize(("name", "weight"), [("mae", 0), ("mae_plain", 0), ("mae_neighbours", 1)])
def test_a_masked_autoencoder_is_one_as_published(tmp_path: Path, name: str, weight: float) -> None:
    """Three quarters are hidden at random and all of them predicted; as many steps fit as for all."""
    cfg = arm_config(arm_by_name(name), 0, 50, tmp_path)
    plan = MaskPlan.from_config(cfg)
    assert (cfg.method.recipe, cfg.method.mask_ratio, cfg.method.mask_blocks) == ("mae", 0.75, None)
    assert cfg.method.neighbour_weight == weight
    count = math.prod(cfg.grid)
    assert (plan.num_context, plan.num_target) == (count // 4, 3 * count // 4)


def test_own_controls_are_run_and_tabled_by_name(tmp_path: Path) -> None:
    name = "no_neighbours+mismatched_targets"
    plan = Plan(tmp_path, 1.0, 2, {})
    ran = [job.name for job in jobs_of(plan, ["no_neighbours", name])]
    assert {f"{name}, seed {seed}" for seed in range(2)} <= set(ran)
    assert not any("+" in job.name for job in jobs_of(plan))
    seconds = {arm.name: 0.5 for arm in ARMS}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": seconds}))
    assert steps_of_budget(tmp_path, 10.0)[name] == 20
    assert read_arm(plan, arm_by_name(name)).compared_with == "no_neighbours"


def test_arms_are_timed_by_short_runs_and_those_that_are_known_keep_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DATA:
        (tmp_path / name).touch()
    ran: list[str] = []

    class FakeQueue:
        def __init__(self, plan: Plan, jobs: int) -> None:
            self.plan = plan

        def run(self, jobs: Iterable[Job]) -> None:
            for job in jobs:
                assert job.arm is not None
                assert [command[3] for command in job.commands(self.plan)] == ["train"]
                assert self.plan.steps[job.arm.name] == STEPS
                ran.append(job.arm.name)
                if job.arm.name == "parity":
                    continue
                (job.folder / "checkpoints").mkdir(parents=True)
                (job.folder / "checkpoints" / f"step_{STEPS:08d}.pt").touch()

    monkeypatch.setattr(evidence_calibration, "Queue", FakeQueue)
    monkeypatch.setattr(evidence_calibration, "training_facts", lambda *_: {"seconds_per_step": 0.25})
    assert calibrate(tmp_path, 2, (), [REFERENCE, "mae", "control"]) == {REFERENCE: 0.25, "mae": 0.25}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": {REFERENCE: 2.0, "mae": 1.0}}))
    known = calibrate(tmp_path, 2, (), [REFERENCE, "mae_plain"])
    assert known == {REFERENCE: 2.0, "mae": 1.0, "mae_plain": 0.25}
    assert ran == [REFERENCE, "mae", "mae_plain"]
    with pytest.raises(UserError, match=r"parity.*: expected a run of 50 steps; see its evidence\.log"):
        calibrate(tmp_path, 2, (), ["parity"])


def test_steps_fill_the_budget_and_a_plan_does_not_change_under_its_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `evidence calibrate` first"):
        steps_of_budget(tmp_path, 100.0)
    seconds = {arm.name: 0.3 for arm in ARMS} | {"mae": 70.0}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": seconds}))
    steps = steps_of_budget(tmp_path, 100.0)
    assert (steps["vjepa2"], steps["mae"], steps["control"]) == (333, 2, 2)
    known = {"vjepa2": 0.3, "no_neighbours": 0.5}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": known}))
    some = steps_of_budget(tmp_path, 10.0, list(known))
    assert (some["control"], "mae_plain" in some) == (2, False)
    with pytest.raises(UserError, match="expected seconds per step of mae_plain"):
        steps_of_budget(tmp_path, 10.0, ["vjepa2", "mae_plain"])
    plan = Plan(tmp_path, 100.0, 3, {"a": 333})
    plan.save()
    replace(plan, budget_s=200.0).save()  # nothing has run yet
    (tmp_path / "runs").mkdir()
    replace(plan, budget_s=200.0, seeds=4).save()
    with pytest.raises(UserError, match="budget_s: expected 200"):
        plan.save()
    longer = replace(plan, budget_s=200.0, steps={"a": 333, "new": 5})
    longer.save()
    assert Plan.load(tmp_path) == longer
    with pytest.raises(
        UserError, match=r"steps: expected .*'new': 5} as the runs here began, found .*'new': 6}"
    ):
        replace(longer, steps={"a": 333, "new": 6}).save()
    replace(longer, steps={"a": 333}).save()  # fewer arms than before: the other keeps its steps
    assert Plan.load(tmp_path) == longer


def test_parity_is_what_a_file_that_says_nothing_has(tmp_path: Path) -> None:
    """All but the masks and sizes of the evidence's arm is the schema's default."""
    parity = arm_config(arm_by_name("parity"), 0, 2, tmp_path).method
    own = {"recipe", "context_ratio", "target_ratio", "mask_blocks", "predictor_depth", "predictor_width"}
    defaults = MethodConfig(recipe="vjepa2")
    changed = {f.name for f in fields(MethodConfig) if getattr(parity, f.name) != getattr(defaults, f.name)}
    assert changed <= own
    assert parity.mask_blocks
