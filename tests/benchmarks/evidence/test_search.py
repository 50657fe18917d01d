"""Sequential halving: what decides is the margin over an arm's own controls, and the winner is shown anew.

And the same arms at several budgets, which are stages as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import cli as evidence
from benchmarks.evidence import compute, differences, search
from benchmarks.evidence.arms import ABLATIONS, MAIN, TRAINED, arm_by_name, arm_config, own_control, run_dir
from benchmarks.evidence.calibration import steps_of_budget
from benchmarks.evidence.differences import read_arm
from benchmarks.evidence.queue import Job, Plan, ablation_jobs
from benchmarks.evidence.scores import Scores, save_scores, score
from tests.support.evidence_factory import small_truth
from utils.config.load import flatten
from utils.errors import UserError

# how much of the truth an arm's features hold, 1 all; lr_2e-3 is the best arm, and so is its own control
QUALITY = {
    "lr_2e-3": 1.0,
    "lr_2e-3+mismatched_targets": 1.0,
    "cov_0.01": 0.7,
    "ema_1": 0.5,
    "vjepa2": 0.4,
}
# what four times the compute adds
GROWTH = {"cov_0.01": 0.2}


@cache
def scores_of(share: float, seed: int) -> Scores:
    truth = small_truth(people=20)
    noise = np.random.default_rng([seed, 5]).normal(size=truth.occupancy.shape)
    dense = share * truth.occupancy + (1 - share) * noise
    return score(truth, None, lambda _: dense, (2, 2, 2))


class FakeQueue:
    """Writes the scores that training would have given, and remembers the jobs."""

    ran: list[tuple[str, str]]  # folder of the stage, job
    failing: set[str]

    def __init__(self, plan: Plan, jobs: int) -> None:
        self.plan = plan

    def run(self, jobs: Iterable[Job]) -> None:
        for job in (job for job in jobs if not job.is_done):
            assert job.arm is not None
            self.ran.append((self.plan.root.name, job.name))
            if job.arm.name in self.failing:
                continue
            share = QUALITY.get(job.arm.name, 0.2)
            if self.plan.steps.get(job.arm.name, 0) > 20:
                share += GROWTH.get(job.arm.name, 0.0)
            save_scores(
                job.folder, scores_of(share, job.seed), {"name": job.arm.name, "skill_position": share}
            )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data that nothing reads, a calibration, and a queue that does not train."""
    for name in search.DATA:
        (tmp_path / name).touch()
    seconds = {arm.name: 1.0 if arm.name == "vjepa2" else 0.5 for arm in (*MAIN, *ABLATIONS)}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": seconds}))
    FakeQueue.ran, FakeQueue.failing = [], set()

    def people(folder: Path, *_: object) -> None:
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr(search, "Queue", FakeQueue)
    monkeypatch.setattr(compute, "Queue", FakeQueue)
    monkeypatch.setattr(search, "make_people", people)
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 300)
    return tmp_path


def command(root: Path, *words: str) -> int:
    return evidence.main(["search", "--root", str(root), "--jobs", "1", "--budgets", "10,40", *words])


def test_an_own_control_differs_in_nothing_else(tmp_path: Path) -> None:
    arm = arm_by_name("lr_2e-3")
    control = arm_by_name("lr_2e-3+penalty_only")
    assert control == own_control(arm, "penalty_only")
    own = {"experiment_name", "run.dir", "train.ckpt_dir"}
    before, after = (dict(flatten(arm_config(a, 0, 50, tmp_path))) for a in (arm, control))
    assert {key for key in after if after[key] != before[key]} - own == {"method.control"}
    with pytest.raises(UserError, match="expected one of"):
        arm_by_name("lr_2e-3+nothing")
    with pytest.raises(
        UserError, match=r"expected an arm that makes claims .*found the control mismatched_lat"
    ):
        arm_by_name("mismatched_latents+penalty_only")
    assert not any(arm.name.startswith(("mismatched_latents+", "control+")) for arm in TRAINED)


def test_own_controls_are_run_and_tabled_by_name(tmp_path: Path) -> None:
    names = "lr_2e-3", "lr_2e-3+mismatched_targets"
    plan = Plan(tmp_path, 1.0, 2, {})
    assert [[job.name for job in jobs] for jobs in ablation_jobs(plan, names)] == [
        [f"{name}, seed {seed}" for seed in range(2)] for name in names
    ]
    assert not any("+" in job.name for jobs in ablation_jobs(plan) for job in jobs)
    assert steps_of(tmp_path)["lr_2e-3+mismatched_targets"] == 20
    assert read_arm(plan, arm_by_name(names[1]), tmp_path).compared_with == "lr_2e-3"


def steps_of(root: Path) -> dict[str, int]:
    """Steps of 10 s at half a second each."""
    seconds = {arm.name: 0.5 for arm in (*MAIN, *ABLATIONS)}
    (root / "calibration.json").write_text(json.dumps({"seconds_per_step": seconds}))
    return steps_of_budget(root, 10.0)


def test_the_best_score_loses_where_its_own_control_has_it_too(root: Path) -> None:
    race = "lr_2e-3,cov_0.01,ema_1,vjepa2"
    assert command(root, "--only", race, "--beside", "mae_plain", "--seeds", "2", "--count", "30") == 0
    by_stage = {stage: {job for s, job in FakeQueue.ran if s == stage} for stage, _ in FakeQueue.ran}
    first, second, last = by_stage["round_1"], by_stage["round_2"], by_stage["confirmation"]
    # one seed first: four arms, two controls each, the two of all, and mae
    assert len(first) == 4 * 3 + 2 + 1
    assert {job.split(", ")[0] for job in second} == {
        "random",
        "control",
        "mae_plain",
        *(
            f"{arm}{of}"
            for arm in ("cov_0.01", "ema_1")
            for of in ("", "+mismatched_targets", "+penalty_only")
        ),
    }
    assert {job.rsplit(" ", 1)[1] for job in second} == {"0", "1"}
    # new seeds for the winner and its controls
    assert {job.rsplit(" ", 1)[1] for job in last} == {"2", "3"}
    assert "cov_0.01, seed 2" in last
    assert not any(job.startswith("ema_1") for job in last)
    plan = Plan.load(root / "search" / "round_2")
    assert plan.steps["cov_0.01+penalty_only"] == plan.steps["cov_0.01"] == 80
    assert plan.steps["control"] == 2


def test_the_share_of_a_round_that_goes_on_can_be_asked_for(root: Path) -> None:
    race = "lr_2e-3,cov_0.01,ema_1,vjepa2"
    assert (
        command(root, "--only", race, "--beside", "", "--seeds", "1", "--count", "30", "--keep", "0.25") == 0
    )
    stages = {stage for stage, _ in FakeQueue.ran}
    assert stages == {"round_1", "confirmation"}  # one arm is left, so the second round has nothing to decide
    last = {
        job.partition(",")[0].partition("+")[0] for stage, job in FakeQueue.ran if stage == "confirmation"
    }
    assert last == {"random", "control", "cov_0.01"}
    with pytest.raises(UserError, match="--keep: expected a share between 0 and 1, found 1"):
        command(root, "--only", race, "--keep", "1")


def test_the_page_shows_margins_and_the_winner_on_other_people(root: Path) -> None:
    command(root, "--only", "lr_2e-3,cov_0.01", "--beside", "", "--seeds", "3", "--count", "30")
    text = (root / "search" / "search.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    beaten = next(row for row in rows if row[0] == "peak learning rate 2e-3")
    assert beaten[5:] == ["+0.000", "peak learning rate 2e-3, targets of another volume (control)", "no"]
    kept = next(row for row in rows if row[0] == "covariance 0.01 of the hinge")
    assert float(kept[5]) > 0.1
    assert kept[-1] == "yes"
    confirmed = text[text.index("## Confirmation: covariance 0.01 of the hinge, 40 s, seeds 3 to 5") :]
    against = next(line for line in confirmed.splitlines() if line.startswith("| random initialisation"))
    cells = [cell.strip() for cell in against.split("|")[1:-1]]
    assert cells[5].startswith("**+")
    # four comparisons of one task: the smallest p of 300 resamples, 2 / 301, times four
    assert cells[6] == f"{4 * 2 / 301:.3f}"
    people = root / "search" / "confirmation" / "people_1003_30"
    assert (run_dir(people, arm_by_name("cov_0.01"), 3) / "scores.json").exists()


def test_a_second_call_runs_nothing_again(root: Path) -> None:
    words = "--only", "cov_0.01,vjepa2", "--seeds", "1", "--count", "30"
    command(root, *words)
    first = (root / "search" / "search.md").read_text()
    FakeQueue.ran.clear()
    command(root, *words)
    assert FakeQueue.ran == []
    assert (root / "search" / "search.md").read_text() == first


def test_an_arm_that_fails_leaves_the_race(root: Path) -> None:
    FakeQueue.failing = {"cov_0.01+mismatched_targets"}
    command(root, "--only", "cov_0.01,ema_1", "--beside", "", "--seeds", "1", "--count", "30")
    text = (root / "search" / "search.md").read_text()
    assert "| covariance 0.01 of the hinge, targets of another volume (control) | failed |" in text
    assert "## Confirmation: EMA half-life 1 % of the run" in text


def test_without_what_all_are_compared_with_there_is_no_margin(root: Path) -> None:
    FakeQueue.failing = {"random"}
    with pytest.raises(UserError, match="expected scores of random, found none"):
        command(root, "--only", "vjepa2,ema_1")


def test_a_race_of_one_goes_straight_to_new_runs(root: Path) -> None:
    FakeQueue.failing = {"cov_0.01+penalty_only"}
    assert command(root, "--only", "cov_0.01", "--beside", "ema_1", "--seeds", "2", "--count", "30") == 0
    assert {stage for stage, _ in FakeQueue.ran} == {"confirmation"}
    assert {job.rsplit(" ", 1)[1] for _, job in FakeQueue.ran} == {"2", "3"}
    text = (root / "search" / "search.md").read_text()
    assert "Round" not in text
    # what failed is in the table, and not left out of it
    assert "| covariance 0.01 of the hinge, nothing predicted (control) | failed |" in text
    assert "| EMA half-life 1 % of the run | - | - |" in text


def test_an_arm_without_a_penalty_has_one_control_of_its_own(root: Path) -> None:
    command(root, "--only", "mae_plain", "--beside", "", "--seeds", "1", "--count", "30")
    assert {name.partition("+")[2] for _, job in FakeQueue.ran if (name := job.split(",")[0]).count("+")} == {
        "mismatched_targets"
    }


def test_what_cannot_race_is_refused_before_a_run(root: Path) -> None:
    with pytest.raises(UserError, match="--beside: expected some of"):
        command(root, "--only", "vjepa2", "--beside", "nobody")
    with pytest.raises(
        UserError, match="--only: expected arms that make claims, found the control mismatched_lat"
    ):
        command(root, "--only", "vjepa2,mismatched_latents")
    with pytest.raises(SystemExit):
        command(root, "--only", "vjepa2", "--budgets", "40,10")
    assert FakeQueue.ran == []


def test_the_table_of_budgets_has_the_differences_of_each(root: Path) -> None:
    words = "compute", "--root", str(root), "--jobs", "1", "--budgets", "10,40", "--seeds", "2"
    assert evidence.main([*words, "--only", "cov_0.01,vjepa2"]) == 0
    ran = FakeQueue.ran.copy()
    # neither of the controls that all share is run for a second budget
    assert len(ran) == len(set(ran)) == 2 * (2 + 2 + 2)
    assert {job for stage, job in ran if stage == "40"} == {
        f"{name}, seed {seed}" for name in ("cov_0.01", "vjepa2") for seed in range(2)
    }
    page = (root / "compute" / "compute.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    assert ["covariance 0.01 of the hinge", "20", "80"] in rows
    assert next(row[1:] for row in rows if row[0].startswith("vjepa2 after")) == ["2", "2"]
    # of one task alone there are scores: its values, then the differences, which grow
    assert page.count("## ") == 1
    assert [row[0] for row in rows].count("random initialisation") == 2
    apart = [float(cell.strip("*").split()[0]) for cell in rows[-1][1:]]
    assert apart[1] > apart[0] + 0.05 > 0.05
    evidence.main([*words, "--only", "cov_0.01,vjepa2"])
    assert FakeQueue.ran == ran

    FakeQueue.failing = {"mae_plain"}
    with pytest.raises(UserError, match="expected scores of mae_plain, all seeds, found failures"):
        evidence.main([*words, "--only", "cov_0.01,mae_plain"])
