"""The same arms at several budgets: what is run, and the table of differences."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import cli as evidence
from benchmarks.evidence import compute, differences
from benchmarks.evidence.arms import ARMS
from benchmarks.evidence.cohorts import DATA
from benchmarks.evidence.queue import Job, Plan
from benchmarks.evidence.scores import Scores, save_scores, score
from tests.support.evidence_factory import small_truth
from utils.errors import UserError

QUALITY = {"no_neighbours": 0.7, "vjepa2": 0.4}  # how much of the truth an arm's features hold, 1 all
GROWTH = {"no_neighbours": 0.2}  # what four times the compute adds


@cache
def scores_of(share: float, seed: int) -> Scores:
    truth = small_truth(people=20)
    noise = np.random.default_rng([seed, 5]).normal(size=truth.occupancy.shape)
    dense = share * truth.occupancy + (1 - share) * noise
    return score(truth, None, lambda _: dense, (2, 2, 2))


class FakeQueue:
    """Writes the scores that training would have given, and remembers the jobs."""

    ran: list[tuple[str, str]]  # folder of the budget, job
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
            save_scores(job.folder, scores_of(share, job.seed), {"name": job.arm.name})


def test_the_table_of_budgets_has_the_differences_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {arm.name: 1.0 if arm.name == "vjepa2" else 0.5 for arm in ARMS}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": seconds}))
    FakeQueue.ran, FakeQueue.failing = [], set()
    monkeypatch.setattr(compute, "Queue", FakeQueue)
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 300)
    words = "compute", "--root", str(tmp_path), "--jobs", "1", "--budgets", "10,40", "--seeds", "2"
    with pytest.raises(UserError, match="pretraining: expected the data, found none; run `evidence data`"):
        evidence.main([*words, "--only", "no_neighbours,vjepa2"])
    for name in DATA:
        (tmp_path / name).touch()
    assert evidence.main([*words, "--only", "no_neighbours,vjepa2"]) == 0
    ran = FakeQueue.ran.copy()
    # neither of the controls that all share is run for a second budget
    assert len(ran) == len(set(ran)) == 2 * (2 + 2 + 2)
    assert {job for budget, job in ran if budget == "40"} == {
        f"{name}, seed {seed}" for name in ("no_neighbours", "vjepa2") for seed in range(2)
    }
    page = (tmp_path / "compute" / "compute.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    assert ["without the neighbours' voxels", "20", "80"] in rows
    assert next(row[1:] for row in rows if row[0].startswith("vjepa2 after")) == ["2", "2"]
    # of one task alone there are scores: its values, then the differences, which grow
    assert page.count("## ") == 1
    assert [row[0] for row in rows].count("random initialisation") == 2
    apart = [float(cell.strip("*").split()[0]) for cell in rows[-1][1:]]
    assert apart[1] > apart[0] + 0.05 > 0.05
    evidence.main([*words, "--only", "no_neighbours,vjepa2"])
    assert FakeQueue.ran == ran

    FakeQueue.failing = {"mae_plain"}
    with pytest.raises(UserError, match="expected scores of mae_plain, all seeds, found failures"):
        evidence.main([*words, "--only", "no_neighbours,mae_plain"])
    with pytest.raises(SystemExit):
        evidence.main([*words[:-4], "--budgets", "40,10"])
