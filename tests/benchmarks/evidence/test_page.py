"""Tables: what wins, above which controls, and what other people say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import cli as evidence
from benchmarks.evidence import differences, words
from benchmarks.evidence.arms import ARMS, CONTROLS, RANDOM_ARM, arm_by_name, arm_config, run_dir
from benchmarks.evidence.differences import (
    Scored,
    build_table,
    commits_of_runs,
    difference,
    people_draws,
    read_arm,
    training_facts,
)
from benchmarks.evidence.page import page_of, write_results
from benchmarks.evidence.queue import BASELINES, Plan
from benchmarks.evidence.scores import TASKS, load_scores, save_scores, score
from models.probes import hidden
from models.probes.intervals import seeds_and_people
from tests.support.evidence_factory import small_truth
from utils.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def _few_steps() -> Iterator[None]:
    """Of the second readout, enough to find what is linear."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden, "MOST_STEPS", 90)
        yield


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough resamples for a variance over people; the tables have many times as many."""
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 200)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of three seeds: some recipes good, the others noise, ablations partly run."""
    high = "surroundings", "vjepa2", "parity", "no_neighbours"
    root = tmp_path_factory.mktemp("finished")
    truth, rng = small_truth(48), np.random.default_rng(3)
    known = np.concatenate([np.eye(4)[truth.label], truth.thickness_um], axis=1)
    good = score(truth, lambda _: known, lambda _: truth.occupancy, (2, 2, 2))
    guesses = [(rng.normal(size=known.shape), rng.normal(size=(96, 8, 3))) for _ in range(3)]
    noise = [score(truth, lambda _, x=x: x, lambda _, dense=dense: dense, (2, 2, 2)) for x, dense in guesses]
    Plan(root, 60.0, 3, {a.name: 7 for a in ARMS}).save()
    for arm in (RANDOM_ARM, *(arm for arm in ARMS if arm.name != "device_balanced")):
        for seed in range(3):
            scores = good if arm.name in high else noise[seed]
            facts = {"name": arm.name, "seed": seed, "rankme": 50.0 + seed, "steps": 7, "alarms": seed}
            save_scores(run_dir(root, arm, seed), scores, facts)
    for number, name in enumerate(("voxel_pca", "1024_random_of_27", "place")):
        parts = {task: part for task, part in noise[0].parts.items() if name != "place" or "occ" in task}
        facts = {"name": name, "label": f"{name} (no encoder)", "number": number}
        save_scores(root / BASELINES / name, replace(noise[0], parts=parts), facts)
    return root


def test_the_table_says_what_wins_and_what_does_not(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    text = write_results(finished, out)
    assert out.read_text() == text + "\n"
    table = json.loads((finished / "table.json").read_text())
    rows = {r["name"]: r for r in table["rows"]}
    value, (low, high), doubt = rows["surroundings"]["tasks"]["classes"]["against"]["random"]
    assert 0.3 < low < value < high
    assert not doubt
    assert value == pytest.approx(1 - rows["random"]["tasks"]["classes"]["score"])
    by_seed = rows["mae"]["tasks"]["classes"]["by_seed"]
    assert rows["mae"]["tasks"]["classes"]["score"] == pytest.approx(np.mean(by_seed))
    assert f"| {', '.join(f'{score:.3f}' for score in by_seed)} |" in text
    assert min(by_seed) < max(by_seed)
    assert rows["parity"]["tasks"]["classes"]["against"]["vjepa2"][1] == [0.0, 0.0]
    facts = rows["surroundings"]["facts"]
    assert (facts["rankme"], facts["alarms"], facts["seconds_per_step"]) == (51.0, 1.0, None)
    assert "Not run: as many volumes of each device." in text
    assert text.count("| minus vjepa2 |") == 6  # its ablations, each task and readout
    best = table["best_free"]["thickness"]
    against = rows["no_neighbours"]["tasks"]["thickness"]["against"]
    assert set(against) == {*CONTROLS, "surroundings", "vjepa2", best}
    assert [row["name"] for row in table["rows"] if row["factor"] == "baseline"] == [
        "voxel_pca", "1024_random_of_27", "place"
    ]  # fmt: skip
    assert f"**{value:+.3f} ({low:+.3f} to {high:+.3f})**" in text


def test_a_claim_is_above_every_control(finished: Path, tmp_path: Path) -> None:
    """One control that does as well takes the claim away, and the page names it."""
    before = write_results(finished, tmp_path / "results.md").partition("and all controls")[2]
    shown = before.splitlines()
    assert all("Shown: surroundings (as shipped) (at least +" in line for line in shown[2:8])
    root = tmp_path / "level"
    shutil.copytree(finished, root)
    for seed in range(3):
        good, facts = load_scores(run_dir(root, arm_by_name("surroundings"), seed))
        save_scores(run_dir(root, arm_by_name("mismatched_targets"), seed), good, facts)
    after = write_results(root, tmp_path / "level.md").partition("and all controls")[2]
    lines = after.splitlines()[2:8]
    assert all("Shown: none." in line for line in lines)
    short = "as shipped): not above mismatched_targets +0.000 (+0.000 to +0.000)"
    assert all(short in line for line in lines)
    # another arm's controls are its own, of which this one's penalty alone cannot be
    own = (
        "V-JEPA 2 with nothing added: no penalty, no neighbours: not above parity+mismatched_targets not run"
    )
    assert all(own in line for line in shown[2:8])
    for seed in range(3):
        worst, facts = load_scores(run_dir(root, RANDOM_ARM, seed))
        save_scores(run_dir(root, arm_by_name("parity+mismatched_targets"), seed), worst, facts)
    again = write_results(root, tmp_path / "level.md").partition("and all controls")[2]
    assert all(
        "Shown: V-JEPA 2 with nothing added: no penalty, no neighbours (at least +" in line
        for line in again.splitlines()[2:8]
    )


def test_what_an_encoder_free_row_holds_is_no_claim(finished: Path, tmp_path: Path) -> None:
    """A store where local voxels suffice: the row without an encoder is as good as the recipe."""
    root = tmp_path / "local"
    shutil.copytree(finished, root)
    good, _ = load_scores(run_dir(root, arm_by_name("surroundings"), 0))
    row = root / BASELINES / "1024_random_of_27"
    facts = {"name": row.name, "label": "1,024 random features", "number": 1}
    save_scores(row, good, facts)
    lines = write_results(root, tmp_path / "local.md").partition("Above the best row")[2].splitlines()[2:8]
    assert len(lines) == 6
    assert all("Shown: none." in line for line in lines)
    short = "as shipped): not above 1024_random_of_27 +0.000 (+0.000 to +0.000)"
    assert all(short in line for line in lines)


def test_one_lucky_seed_of_three_is_no_claim(finished: Path) -> None:
    """Its participants alone would make it one."""
    plan = Plan.load(finished)
    random, good = (read_arm(plan, a) for a in (RANDOM_ARM, arm_by_name("surroundings")))
    lucky = replace(random, seeds=[good.seeds[0], *random.seeds[1:]])
    draws_SP = people_draws(len(random.seeds[0][0].parts["classes"].participants))
    value, (low, high), _ = difference(lucky, random, "classes", draws_SP)
    assert low <= 0 < value < high
    people = (lucky.draws("classes", draws_SP) - random.draws("classes", draws_SP)).mean(0)
    assert np.quantile(people, 0.025) > 0
    assert difference(good, random, "classes", draws_SP)[1][0] > 0


def test_an_interval_over_few_seeds_is_students(finished: Path) -> None:
    """By hand: three seeds without people's variance have t(2) = 4.303; people add theirs."""
    score = np.array([0.1, 0.2, 0.3])
    low, high = seeds_and_people(score, np.zeros((3, 50)))
    assert (high - low) / 2 == pytest.approx(4.30265 * 0.1 / np.sqrt(3), rel=1e-4)
    draws = np.random.default_rng(0).normal(0, 0.05, (1, 4000))
    low, high = seeds_and_people(score[:1], draws)
    assert (high - low) / 2 == pytest.approx(1.96 * 0.05, rel=0.05)
    wide = seeds_and_people(score, np.repeat(draws * 20, 3, 0))
    assert (wide[1] - wide[0]) / 2 == pytest.approx(1.96 * np.hypot(1.0, 0.1 / np.sqrt(3)), rel=0.05)


def test_eleven_people_a_class_are_no_claim(finished: Path) -> None:
    truth = small_truth(47)
    x = np.concatenate([np.eye(4)[truth.label], truth.thickness_um], axis=1)
    noise = np.random.default_rng(0).normal(size=x.shape)
    good, poor = (
        Scored(name, name, "", [(score(truth, lambda _, f=f: f, lambda _: truth.occupancy, (2, 2, 2)), {})])
        for name, f in (("good", x), ("poor", noise))
    )
    one = difference(good, poor, "classes", people_draws(47))
    assert one[1][0] > 0
    assert one[2].startswith("11 participants in the smallest class are too few")
    assert (words.verdict(one), words.signed(one)[-11:]) == (words.NOT_SHOWN, " cannot say")
    assert words.signed(one, why=True).endswith(f"; cannot say, because {one[2]}")
    for task in TASKS:
        value = difference(good, poor, task, people_draws(47))[0]
        assert (good.gains(task) - poor.gains(task)).sum() == pytest.approx(value)


def test_a_task_that_nothing_has_is_no_column_and_a_row_without_any_no_row(finished: Path) -> None:
    plan = replace(Plan.load(finished), image=("/weights/dinov2s", 448, (3, 6)))
    table = build_table(plan)
    rows = [replace(r, tasks={k: v for k, v in r.tasks.items() if "occ" in k}) for r in table.rows]
    rows = [replace(r, tasks={}) if r.name == "voxel_pca" else r for r in rows]
    page = page_of(replace(table, rows=rows), plan)
    assert "| features | layer occupancy, R2 | minus random |" in page
    tables = page.partition("| features")[2]
    assert all(word not in tables for word in ("classes", "thickness", "voxel_pca"))
    assert "1024_random_of_27 (no" in tables
    assert " --image-encoder dinov2s --image-size 448 --image-blocks 3,6`" in page
    known = [r for r in rows if r.factor == "baseline" or r.name in ("surroundings", *CONTROLS)]
    assert " --only surroundings --image" in page_of(replace(table, rows=known), plan)  # it can be pasted


def test_all_commits_of_the_runs_are_named(finished: Path, tmp_path: Path) -> None:
    plan = replace(Plan.load(finished), root=tmp_path)
    for arm, commit in (("surroundings", "b"), ("control", "a"), ("mae", "b+changes")):
        folder = run_dir(tmp_path, arm_by_name(arm), 0)
        folder.mkdir(parents=True)
        (folder / "provenance.json").write_text(json.dumps({"commit": commit}))
    assert commits_of_runs(plan) == ["a", "b", "b+changes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--jobs", "0"], "--jobs: expected 1 or more, found 0"),
        (["run", "--seeds", "0"], "--seeds: expected 1 or more, found 0"),
        (["run", "--budget", "nan"], "--budget: expected a number above 0, found nan"),
        (["run", "--budget", "inf"], "--budget: expected a number above 0, found inf"),
        (["run", "--steps", "1"], "--steps: expected 2 or more, found 1"),
        (["run", "--steps", "2", "--only", "foo"], "--only: expected some of surroundings, "),
        (["calibrate", "--jobs", "-1"], "--jobs: expected 1 or more, found -1"),
        (["data", "--evaluation", "0"], "--evaluation: expected 1 or more, found 0"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        evidence.main([words[0], "--root", str(tmp_path / "root"), *words[1:]])
    assert not (tmp_path / "root").exists()


def test_without_scores_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json: expected the plan of a run"):
        write_results(tmp_path, tmp_path / "results.md")
    Plan(tmp_path, 60.0, 3, {}).save()
    with pytest.raises(UserError, match=r"found none of random, surroundings, control$"):
        write_results(tmp_path, tmp_path / "results.md")


def test_the_skill_of_a_run_is_that_of_its_last_validation(tmp_path: Path) -> None:
    """Not the moving estimate of training, which no alarm and no checkpoint heeds either."""
    rows = [
        {"step": 0, "val/skill_position": -1.0},
        {"step": 2, "train/skill_position": 0.9, "perf/volumes_per_s": 2.0, "ema/init_weight": 0.5},
        {"step": 2, "val/skill_position": 0.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = arm_config(arm_by_name("vjepa2"), 0, 2, tmp_path)
    for name, text in (("config.yaml", ""), ("provenance.json", "{}"), ("prepare_report.json", "{}")):
        (tmp_path / name).write_text(text)
    assert training_facts(tmp_path, cfg)["skill_position"] == 0.25
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:2]))
    assert training_facts(tmp_path, cfg)["skill_position"] is None
