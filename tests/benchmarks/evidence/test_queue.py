"""The queue of runs, and the whole command on a tiny budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.evidence.arms import ARMS, CONTROLS, REFERENCE, SCRATCH, arm_by_name, arm_config, run_dir
from benchmarks.evidence.queue import BASELINES, LAST_BASELINE, Job, Plan, Queue, jobs_of
from tests.support.pipeline_factory import ROOT
from utils.config.load import to_yaml
from utils.errors import UserError


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
    plan = Plan(tmp_path, 1.0, 1, {REFERENCE: 7})
    job = Job(arm_by_name(REFERENCE), 0, run_dir(tmp_path, arm_by_name(REFERENCE), 0))
    job.folder.mkdir(parents=True)
    (job.folder / "scores.json").write_text("{}")
    text = to_yaml(arm_config(arm_by_name(REFERENCE), 0, 7, Path("/another/place")))
    (job.folder / "config.yaml").write_text(text)
    Queue(plan, 1).run([job])  # nothing to do: other places are no other recipe
    (job.folder / "config.yaml").write_text(
        text.replace("  neighbour_weight: 1.0\n", "")
    )  # before there was one
    with pytest.raises(
        UserError, match=r"method\.neighbour_weight: expected 1\.0 of the arm vjepa2, found 0\.0"
    ):
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

    assert names(["mae_plain"]) == [BASELINES, "random", "vjepa2", *CONTROLS[1:], "mae_plain"]
    assert names([]) == [BASELINES, "random", "vjepa2", *CONTROLS[1:]]
    assert names([SCRATCH[0]]) == [BASELINES, "random", SCRATCH[0], "vjepa2", *CONTROLS[1:]]
    assert names(None) == [BASELINES, "random", *SCRATCH, *(arm.name for arm in ARMS)]
    # an image model that is asked for later makes the baselines' job one that is not done
    (tmp_path / BASELINES / LAST_BASELINE).mkdir(parents=True)
    (tmp_path / BASELINES / LAST_BASELINE / "scores.json").touch()
    assert jobs_of(plan)[0].is_done
    assert not jobs_of(replace(plan, image=("folder", None, ())))[0].is_done


@pytest.mark.filterwarnings("ignore:The least populated class")  # 24 people
@pytest.mark.slow
def test_the_whole_command_on_a_tiny_budget(tmp_path: Path) -> None:
    """Data, two steps of a recipe beside the reference, scores, and the table."""
    words = "spatial.target_spacing=[0.75,0.072,0.1875]", "spatial.image_size=[8,32,32]"
    changes = [word for change in words for word in ("--change", change)]

    def evidence_command(*words: str) -> None:  # a process of its own: calibration sets thread variables
        command = [sys.executable, "-m", "benchmarks.evidence", words[0], "--root", str(tmp_path), *words[1:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    out = tmp_path / "results.md"
    evidence_command("data", "--pretraining", "8", "--evaluation", "24", *changes)
    only = ("--only", f"penalty_only,{SCRATCH[0]}")  # the reference and the other controls come along
    evidence_command("run", "--steps", "2", "--seeds", "1", *only, *changes)
    evidence_command("table", "--out", str(out))
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    trained = {"vjepa2", *CONTROLS[1:]}
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
