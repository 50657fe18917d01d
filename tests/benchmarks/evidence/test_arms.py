"""Arms that differ in one thing, timed for one budget; the queue of their runs, and the whole command."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.evidence import calibration as evidence_calibration
from benchmarks.evidence import cli as evidence
from benchmarks.evidence import cohorts
from benchmarks.evidence.arms import (
    ARMS,
    CONTROLS,
    REFERENCE,
    SCRATCH,
    TRAINED,
    arm_by_name,
    arm_config,
    own_control,
    own_controls,
    run_dir,
)
from benchmarks.evidence.calibration import STEPS, calibrate, steps_of_budget
from benchmarks.evidence.cohorts import DATA
from benchmarks.evidence.differences import read_arm
from benchmarks.evidence.patches import PATCHES
from benchmarks.evidence.queue import BASELINES, LAST_BASELINE, Job, Plan, Queue, jobs_of
from data_setup.masks import MaskPlan
from models.vjepa3d import VJEPA3D
from tests.support.process_factory import copies_of_jobs
from utils.config.load import flatten, to_yaml
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
    assert recipes == ["surroundings"] * 3 + ["vjepa2"] + ["mae"] * 3  # with two controls


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


def test_an_own_control_differs_in_nothing_else(tmp_path: Path) -> None:
    arm = arm_by_name("device_balanced")
    control = arm_by_name("device_balanced+mismatched_targets")
    assert control == own_control(arm, "mismatched_targets")
    own = {"experiment_name", "run.dir", "train.ckpt_dir"}
    before, after = (dict(flatten(arm_config(a, 0, 50, tmp_path))) for a in (arm, control))
    assert {key for key in after if after[key] != before[key]} - own == {"method.control"}
    with pytest.raises(UserError, match="expected one of"):
        arm_by_name("device_balanced+nothing")
    with pytest.raises(
        UserError, match=r"expected an arm that makes claims .*found the control mismatched_tar"
    ):
        arm_by_name("mismatched_targets+penalty_only")
    assert not any(arm.name.startswith(("mismatched_targets+", "control+")) for arm in TRAINED)
    names = {arm: [control.name for control in own_controls(arm_by_name(arm))] for arm in ("mae", "parity")}
    assert names == {arm: [f"{arm}+mismatched_targets"] for arm in names}  # no latents beside voxels
    own_two = ["vjepa2+mismatched_latents", "vjepa2+penalty_only"]
    assert [control.name for control in own_controls(arm_by_name("vjepa2"))] == own_two


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
    assert (steps["surroundings"], steps["mae"], steps["control"]) == (333, 2, 2)
    known = {"surroundings": 0.3, "no_neighbours": 0.5}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": known}))
    some = steps_of_budget(tmp_path, 10.0, list(known))
    assert (some["control"], "mae_plain" in some) == (2, False)
    with pytest.raises(UserError, match="expected seconds per step of mae_plain"):
        steps_of_budget(tmp_path, 10.0, ["surroundings", "mae_plain"])
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
    for _ in range(2):  # the same command again, with an image model
        replace(longer, image=("dinov2s", None, (3, 6))).save()
    with pytest.raises(UserError, match=r"image: expected \['dinov2s', None, \[3, 6\]\] as the runs"):
        replace(longer, image=("dinov2s", None, (3,))).save()


def test_parity_is_what_a_file_that_says_nothing_has(tmp_path: Path) -> None:
    """All but the masks and sizes of the evidence's arm is the schema's default."""
    parity = arm_config(arm_by_name("parity"), 0, 2, tmp_path).method
    own = {"recipe", "context_ratio", "target_ratio", "mask_blocks", "predictor_depth", "predictor_width"}
    defaults = MethodConfig(recipe="vjepa2")
    changed = {f.name for f in fields(MethodConfig) if getattr(parity, f.name) != getattr(defaults, f.name)}
    assert changed <= own
    assert parity.mask_blocks


# --- the queue of runs ---


@dataclass(frozen=True)
class Fake(Job):
    """A job of two small programs."""

    programs: tuple[str, ...] = ()

    def commands(self, plan: Plan) -> list[list[str]]:
        return [[sys.executable, "-c", f"import os, pathlib; {p}"] for p in self.programs]


def fake(root: Path, number: int, *programs: str) -> Fake:
    return Fake(arm_by_name(REFERENCE), number, root / str(number), programs=programs)


def test_the_queue_runs_in_order_pins_and_records_failures(tmp_path: Path) -> None:
    done = f"pathlib.Path({str(tmp_path)!r}, '{{}}', 'scores.json').write_text('{{{{}}}}')"
    pinned = "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    jobs = [
        fake(tmp_path, 0, pinned, done.format(0)),
        fake(tmp_path, 1, "raise SystemExit('no memory')", done.format(1)),
        fake(tmp_path, 2, "pass", done.format(2)),
    ]
    plan = Plan(tmp_path, 1.0, 1, {})
    Queue(plan, 1).run(jobs)
    assert [j.is_done for j in jobs] == [True, False, True]
    core = min(os.sched_getaffinity(0))
    assert (tmp_path / "0" / "evidence.log").read_text() == f"[{core}] 1\n"
    failed = json.loads((tmp_path / "1" / "failed.json").read_text())
    assert (failed["returncode"], failed["log"]) == (1, ["no memory"])
    assert float((tmp_path / "2" / "seconds.txt").read_text()) >= 0
    again = [fake(tmp_path, 0, "raise SystemExit('ran twice')"), fake(tmp_path, 1, done.format(1))]
    Queue(plan, 1).run(again)
    assert all(j.is_done for j in again)
    assert not (tmp_path / "1" / "failed.json").exists()
    assert not (tmp_path / "0" / "failed.json").exists()


def test_a_run_of_another_recipe_is_not_taken_for_its_arm(tmp_path: Path) -> None:
    """Arms keep their names when the shipped recipe changes; a run's own file says what it was."""
    arm = arm_by_name("vjepa2")
    plan, job = Plan(tmp_path, 1.0, 1, {"vjepa2": 7}), Job(arm, 0, run_dir(tmp_path, arm, 0))
    job.folder.mkdir(parents=True)
    (job.folder / "scores.json").write_text("{}")
    text = to_yaml(arm_config(arm, 0, 7, Path("/another/place")))
    (job.folder / "config.yaml").write_text(text)
    Queue(plan, 1).run([job])  # nothing to do: other places are no other recipe
    (job.folder / "config.yaml").write_text(text.replace("  neighbour_weight: 1.0\n", ""))  # of earlier
    words = r"method\.neighbour_weight: expected 1\.0 of the arm vjepa2, found 0\.0"
    with pytest.raises(UserError, match=words):
        Queue(plan, 1).run([job])


def test_an_interrupted_queue_ends_its_children(tmp_path: Path) -> None:
    wait = f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid())); import time; time.sleep(60)"

    def jobs():
        yield fake(tmp_path, 0, wait)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            os.sched_yield()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Queue(Plan(tmp_path, 1.0, 1, {}), 1).run(jobs())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not (tmp_path / "0" / "failed.json").exists()


def test_only_some_arms_run_with_what_they_are_compared_with(tmp_path: Path) -> None:
    plan = Plan(tmp_path, 60.0, 1, {})

    def names(only: list[str] | None) -> list[str]:
        return [job.arm.name if job.arm else BASELINES for job in jobs_of(plan, only)]

    assert names(["mae_plain"]) == [BASELINES, "random", REFERENCE, *CONTROLS[1:], "mae_plain"]
    assert names([]) == [BASELINES, "random", REFERENCE, *CONTROLS[1:]]
    assert names(["no_neighbours"])[-2:] == ["vjepa2", "no_neighbours"]  # it changes one thing of the first
    assert names([SCRATCH[0]]) == [BASELINES, "random", SCRATCH[0], REFERENCE, *CONTROLS[1:]]
    assert names(None) == [BASELINES, "random", *SCRATCH, *(arm.name for arm in ARMS)]
    # an image model that is asked for later makes the baselines' job one that is not done
    (tmp_path / BASELINES / LAST_BASELINE).mkdir(parents=True)
    (tmp_path / BASELINES / LAST_BASELINE / "scores.json").touch()
    assert jobs_of(plan)[0].is_done
    assert not jobs_of(replace(plan, image=("folder", None, ())))[0].is_done


@pytest.mark.filterwarnings("ignore:The least populated class")  # 24 people
@pytest.mark.slow
def test_the_whole_command_on_a_tiny_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, two steps of a recipe beside the reference, scores, and the table; few updates of what learns."""
    words = "spatial.target_spacing=[0.75,0.072,0.1875]", "spatial.image_size=[8,32,32]"
    changes = [word for change in words for word in ("--change", change)]
    copies_of_jobs(monkeypatch)
    for module in (cohorts.phantom, cohorts.prepare):
        here = partial(lambda main, words: main([*words, "--workers", "0"]), module.main)
        monkeypatch.setattr(module, "main", here)

    def evidence_command(*words: str) -> None:
        assert evidence.main([words[0], "--root", str(tmp_path), *words[1:]]) == 0

    out = tmp_path / "results.md"
    evidence_command("data", "--pretraining", "4", "--evaluation", "15", *changes)
    only = ("--only", SCRATCH[0])  # the reference and the other controls come along
    evidence_command("run", "--steps", "2", "--seeds", "1", *only, *changes)
    evidence_command("table", "--out", str(out))
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    trained = {REFERENCE, *CONTROLS[1:]}
    free = {"voxel_pca", "ascan_profile", "device", "place", "own_voxels", "27_patches"}
    free |= {f"{width}_random_of_27" for width in (192, 1024)}
    assert {r["name"] for r in rows} == {"random", SCRATCH[0], *trained, *free}
    assert all(r["facts"]["steps"] == 2 and r["failed"] == 0 for r in rows if r["name"] in trained)
    assert "Above the best row without an encoder and all controls" in out.read_text()
    taught = next(r for r in rows if r["name"] == SCRATCH[0])["tasks"]
    assert set(taught) == {"classes", "thickness", "occupancy"} | {
        f"{task}_hidden" for task in ("classes", "thickness", "occupancy")
    }
    place = next(r for r in rows if r["name"] == "place")["tasks"]["occupancy"]["score"]
    assert taught["occupancy"]["score"] > place + 0.1
