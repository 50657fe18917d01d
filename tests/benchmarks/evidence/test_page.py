"""Tables: what wins, above which controls, and what other people say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import cli as evidence
from benchmarks.evidence import differences
from benchmarks.evidence.arms import (
    ABLATIONS,
    CONTROLS,
    MAIN,
    RANDOM_ARM,
    arm_by_name,
    arm_config,
    run_dir,
)
from benchmarks.evidence.differences import (
    BASELINE_LABELS,
    Draws,
    commits_of_runs,
    difference,
    read_arm,
    training_facts,
)
from benchmarks.evidence.page import BEGIN, END, write_results
from benchmarks.evidence.queue import (
    BASELINES,
    Plan,
    confirmation_jobs,
)
from benchmarks.evidence.scores import load_scores, save_scores, score
from benchmarks.evidence.words import signed
from tests.support.evidence_factory import small_truth
from utils.errors import UserError

ALL = (*MAIN, *ABLATIONS)


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough resamples for an interval to be on a side of zero; the tables have three times as many."""
    monkeypatch.setattr(differences, "BOOTSTRAP_SAMPLES", 600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of three seeds: vjepa2 good, the other recipes noise, ablations partly run."""
    root = tmp_path_factory.mktemp("finished")
    truth, rng = small_truth(), np.random.default_rng(3)
    known = np.concatenate([np.eye(4)[truth.label], truth.thickness_um], axis=1)
    good = score(truth, lambda _: known, lambda _: truth.occupancy, (2, 2, 2))
    guesses = [(rng.normal(size=known.shape), rng.normal(size=(80, 8, 3))) for _ in range(3)]
    noise = [score(truth, lambda _, x=x: x, lambda _, dense=dense: dense, (2, 2, 2)) for x, dense in guesses]
    Plan(root, 60.0, 3, {a.name: 7 for a in ALL}).save()
    (root / "calibration.json").write_text(json.dumps({"seconds_per_step": {"methods": 1.25}}))
    some = [arm_by_name(name) for name in ("reg_none", "context_dense", "predictor_mlp")]
    for arm in (RANDOM_ARM, *MAIN, *some):
        for seed in range(3):
            scores = good if arm.name in ("vjepa2", "reg_none", "context_dense") else noise[seed]
            facts = {"name": arm.name, "seed": seed, "rankme": 50.0 + seed, "steps": 7, "alarms": seed}
            save_scores(run_dir(root, arm, seed), scores, facts)
    for name in BASELINE_LABELS:
        scores = replace(noise[0], classes=None, thickness=None) if name == "position" else noise[0]
        save_scores(root / BASELINES / name, scores, {"name": name})
    return root


def test_saved_scores_come_back(finished: Path) -> None:
    folder = run_dir(finished, arm_by_name("vjepa2"), 1)
    scores, facts = load_scores(folder)
    assert facts["rankme"] == 51.0
    assert facts["scores"] == {task: scores.of(task) for task in ("classes", "thickness", "occupancy")}
    only, _ = load_scores(finished / BASELINES / "position")
    assert only.classes is None
    assert only.of("thickness") is None


def test_the_table_says_what_wins_and_what_does_not(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    text = write_results(finished, out)
    table = json.loads((finished / "table.json").read_text())
    rows = {r["name"]: r for r in table["rows"]}
    value, (low, high) = rows["vjepa2"]["tasks"]["classes"]["against"]["random"]
    assert 0.3 < low < value < high
    assert value == pytest.approx(1 - rows["random"]["tasks"]["classes"]["score"])
    by_seed = rows["methods"]["tasks"]["classes"]["by_seed"]
    assert rows["methods"]["tasks"]["classes"]["score"] == pytest.approx(np.mean(by_seed))
    assert f"| {min(by_seed):.3f} to {max(by_seed):.3f} |" in text
    assert min(by_seed) < max(by_seed)
    assert (rows["methods"]["seconds_per_step"], rows["vjepa2"]["seconds_per_step"]) == (1.25, None)
    assert "| 1.25 | 7 |" in text
    assert rows["reg_none"]["tasks"]["classes"]["against"]["vjepa2"][1] == [0.0, 0.0]
    assert (rows["vjepa2"]["rankme"], rows["vjepa2"]["alarms"]) == (51.0, 1.0)
    assert (
        "Compared with random initialisation:\n\n* 4 classes, balanced accuracy. Higher: vjepa2, vic" in text
    )
    assert re.search(r"No difference shown: [^\n]*; methods, as its text says \(", text)
    assert ", vicreg 0.02, " in text.partition("Not run: ")[2]
    against = rows["predictor_mlp"]["tasks"]["thickness"]["against"]
    assert against["context_dense"] == against["vjepa2"]  # both are the good scores
    assert set(rows["context_dense"]["tasks"]["thickness"]["against"]) == {*CONTROLS, "vjepa2"}
    named_part = text.partition("Compared with dense context:")[2]
    assert "* layer thickness, R2. Lower: dense context, MLP predictor (" in named_part
    assert f"**{value:+.3f} ({low:+.3f} to {high:+.3f})**" in text


def test_a_claim_is_above_every_control(finished: Path, tmp_path: Path) -> None:
    """One control that does as well takes the claim away, and the page names it."""
    before = write_results(finished, tmp_path / "results.md").partition("Above all controls")[2]
    shown = before.partition("Compared with")[0].splitlines()
    assert all(
        "Shown: vjepa2, vicreg 0.05, neighbours 1 (as shipped) (at least +" in line for line in shown[2:5]
    )
    root = tmp_path / "level"
    shutil.copytree(finished, root)
    for seed in range(3):
        good, facts = load_scores(run_dir(root, arm_by_name("vjepa2"), seed))
        save_scores(run_dir(root, arm_by_name("mismatched_targets"), seed), good, facts)
    shutil.rmtree(root / "runs" / "penalty_only")
    after = write_results(root, tmp_path / "level.md").partition("Above all controls")[2]
    lines = after.partition("Compared with")[0].splitlines()[2:5]
    assert all("Shown: none." in line for line in lines)
    short = "as shipped): not above penalty_only not run, mismatched_targets +0.000 (+0.000 to +0.000)"
    assert all(short in line for line in lines)
    # another arm's controls are its own, of which this one's penalty alone cannot be
    own = "no regulariser: not above reg_none+mismatched_targets not run."
    assert all(own in line for line in shown[2:5])
    for seed in range(3):
        worst, facts = load_scores(run_dir(root, RANDOM_ARM, seed))
        save_scores(run_dir(root, arm_by_name("reg_none+mismatched_targets"), seed), worst, facts)
    again = write_results(root, tmp_path / "level.md").partition("Above all controls")[2]
    assert all("Shown: no regulariser (at least +" in line for line in again.splitlines()[2:5])


def test_one_lucky_seed_of_three_is_no_claim(finished: Path) -> None:
    """Without drawing seeds, its participants alone would make it one."""
    plan = Plan.load(finished)
    random, good = (read_arm(plan, a, finished) for a in (RANDOM_ARM, arm_by_name("vjepa2")))
    lucky = replace(random, seeds=[good.seeds[0], *random.seeds[1:]])
    draws = Draws.of(len(random.seeds[0][0].classes.participants), seeds=3)
    value, (low, high) = difference(lucky, random, "classes", draws)
    assert low <= 0 < value < high
    fixed = replace(draws, seeds_SN=np.tile(np.arange(3), (len(draws.seeds_SN), 1)))
    again, (low, _) = difference(lucky, random, "classes", fixed)
    assert again == value
    assert low > 0
    assert difference(good, random, "classes", draws)[1][0] > 0


@pytest.fixture
def confirmed(finished: Path, tmp_path: Path) -> Path:
    """The same, and people on whom `vjepa2` and no regulariser are as good as random initialisation, and the
    device tells all.
    """
    root = tmp_path / "evidence"
    shutil.copytree(finished, root)
    failed = run_dir(root, arm_by_name("ema_1"), 0)  # of an arm that has nothing to confirm
    failed.mkdir(parents=True)
    (failed / "failed.json").write_text("{}")
    people = root / "people_1003_40"
    for part in ("runs", BASELINES):
        shutil.copytree(finished / part, people / part)
    for seed in range(3):
        for name in ("vjepa2", "reg_none"):
            _, facts = load_scores(run_dir(finished, arm_by_name(name), seed))
            noise, _ = load_scores(run_dir(finished, RANDOM_ARM, seed))
            save_scores(run_dir(people, arm_by_name(name), seed), noise, facts)
    good, _ = load_scores(run_dir(finished, arm_by_name("vjepa2"), 0))
    save_scores(people / BASELINES / "device", good, {"name": "device"})
    return root


def test_a_confirmation_stands_beside_the_first_differences(confirmed: Path, tmp_path: Path) -> None:
    text = write_results(confirmed, tmp_path / "results.md")
    again = text.partition("### On other people (phantom of seed 1003, 40 participants)")[2]
    assert "`python -m benchmarks.evidence confirm --people-seed 1003 --count 40`" in again
    table = json.loads((confirmed / "table.json").read_text())
    first = {r["name"]: r["tasks"] for r in table["rows"]}
    other = {r["name"]: r["tasks"] for r in table["people_1003_40"]}
    for task in ("classes", "thickness", "occupancy"):
        assert first["vjepa2"][task]["against"]["random"][1][0] > 0
        assert other["vjepa2"][task]["against"]["random"] == [0.0, [0.0, 0.0]]
        assert signed(first["vjepa2"][task]["against"]["random"]) in again
    assert first["device"]["classes"]["score"] < 0.6 < other["device"]["classes"]["score"] == 1
    parts = again.split("| minus ")[1:]
    assert [part.split(" |")[0] for part in parts] == [
        *(arm_by_name(name).label for name in CONTROLS), "`vjepa2`", "dense context",
    ]  # fmt: skip
    names = [
        [line.split(" | ")[0][2:] for line in p.splitlines()[2:] if line.startswith("| ")] for p in parts
    ]
    recipes = [arm.label for arm in MAIN]
    assert names[0] == [*recipes, *BASELINE_LABELS.values()]
    ablations = ["no regulariser", "dense context", "dense context, MLP predictor"]
    for part in names[1:4]:
        assert part == [*(label for label in recipes if "control" not in label), *ablations]
    assert names[4] == [*recipes[1:], *ablations]
    assert names[5] == ["dense context, MLP predictor"]
    line = next(line for line in parts[0].splitlines() if line.startswith("| vjepa2, vicreg 0.05"))
    assert [cell.startswith(" **") for cell in line.split("|")[2:-1]] == [True, False] * 3
    # vjepa2 has lost all three; dense context, which is what it was, is above it now
    assert "Shown first: 3; shown again with the same sign: 0; shown only here: 0." not in parts[1]
    assert "shown again with the same sign: 0; shown only here: 3." in parts[4]
    assert "Shown first: 3; shown again with the same sign: 3; shown only here: 0." in parts[5]


def test_half_a_confirmation_and_one_of_other_runs_are_refused(confirmed: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    (confirmed / "people_1003_40_old").mkdir()  # nobody's
    write_results(confirmed, out)
    before = out.read_text()
    one = run_dir(confirmed / "people_1003_40", arm_by_name("mae_plain"), 2) / "scores.json"
    kept = one.read_text()
    one.unlink()
    message = "found none of mae_plain, seed 2; `evidence confirm --people-seed 1003 --count 40` goes on"
    with pytest.raises(UserError, match=re.escape(message)):
        write_results(confirmed, out)
    one.write_text(kept.replace('"steps": 7', '"steps": 8'))
    with pytest.raises(UserError, match=r"runs/mae_plain: steps: expected 7 of the run as it is, found 7\.3"):
        write_results(confirmed, out)
    assert out.read_text() == before


def test_all_commits_of_the_runs_are_named(finished: Path, tmp_path: Path) -> None:
    plan = replace(Plan.load(finished), root=tmp_path)
    for arm, commit in (("vjepa2", "b"), ("control", "a"), ("methods", "b+changes")):
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
        (["run", "--minutes", "-1"], "--minutes: expected a number from 0 on, found -1"),
        (["run", "--steps", "1"], "--steps: expected 2 or more, found 1"),
        (["run", "--steps", "2", "--only", "foo"], "--only: expected some of vjepa2, "),
        (["calibrate", "--jobs", "-1"], "--jobs: expected 1 or more, found -1"),
        (["data", "--evaluation", "0"], "--evaluation: expected 1 or more, found 0"),
        (["confirm", "--count", "0"], "--count: expected 1 or more, found 0"),
        (["confirm", "--people-seed", "1002"], "expected people that no run knows, found 1002"),
        (["confirm"], "expected the plan of a run, found none"),
        (["data", "--real-eyes", "nowhere"], "found no retinal_oct/manifest.tsv in nowhere"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        evidence.main([words[0], "--root", str(tmp_path / "root"), *words[1:]])
    assert not (tmp_path / "root").exists()


def test_a_second_table_keeps_what_was_written_around_it(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    out.write_text(f"my words\n{BEGIN}\nold\n{END}\nmore words\n")
    write_results(finished, out)
    page = out.read_text()
    assert page.startswith("my words\n")
    assert page.endswith("\nmore words\n")
    assert "old" not in page
    out.write_text("no markers")
    with pytest.raises(UserError, match="found a page without them"):
        write_results(finished, out)


def test_without_scores_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json: expected the plan of a run"):
        write_results(tmp_path, tmp_path / "results.md")
    Plan(tmp_path, 60.0, 3, {}).save()
    with pytest.raises(UserError, match=r"found none of random, vjepa2, control$"):
        write_results(tmp_path, tmp_path / "results.md")


def test_a_confirmation_scores_every_run_that_is_scored_and_trains_none(
    finished: Path, tmp_path: Path
) -> None:
    plan = Plan.load(finished)
    jobs = confirmation_jobs(plan, tmp_path / "people_1003_40")
    some = ("random", *(arm.name for arm in MAIN), "reg_none", "context_dense", "predictor_mlp")
    assert [j.name for j in jobs] == [
        BASELINES,
        *(f"{name}, seed {seed}" for name in some for seed in range(3)),
    ]
    assert not any(j.is_done for j in jobs)
    for job in jobs:
        ((_python, _m, module, verb, *arguments),) = job.commands(plan)  # one command: nothing is trained
        assert (module, verb) == ("benchmarks.evidence", "score")
        assert job.folder.is_relative_to(tmp_path)
        flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert (flags["--root"], flags["--people"]) == (str(finished), str(tmp_path / "people_1003_40"))
    with pytest.raises(UserError, match="expected scored runs, found none"):
        confirmation_jobs(replace(plan, root=tmp_path), tmp_path / "people_1003_40")


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
