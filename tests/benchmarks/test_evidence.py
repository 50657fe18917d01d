"""The evidence command: arms that differ in one thing, truth where the pixels are, folds, queue, tables."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from benchmarks.evidence import calibration as evidence_calibration
from benchmarks.evidence import cli as evidence
from benchmarks.evidence import differences
from benchmarks.evidence.arms import (
    ABLATIONS,
    CONFIG,
    CONTROLS,
    MAIN,
    RANDOM_ARM,
    REFERENCE,
    arm_by_name,
    arm_config,
    cost_key,
    run_dir,
)
from benchmarks.evidence.calibration import calibrate, steps_of_budget
from benchmarks.evidence.cohorts import (
    FOLDS,
    read_truth,
    tokens_of_another_grid,
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
    Job,
    Plan,
    Queue,
    confirmation_jobs,
    fitting_ablations,
    main_jobs,
)
from benchmarks.evidence.scores import encoder_features, load_scores, masks_of_folds, save_scores, score
from benchmarks.evidence.supervised import supervised_encoder
from benchmarks.evidence.words import signed
from data_setup.phantom.cli import write_tree
from data_setup.phantom.truth_tokens import layer_occupancy, valid_tokens
from data_setup.prepare import main as prepare
from data_setup.store.reader import PreparedStore
from finetuning.pooled import random_encoder
from models.probes.tokens import less_protocol_mean, position_columns
from pretraining.schedules import init_weight
from tests.support.evidence_factory import small_truth
from tests.support.pipeline_factory import ROOT
from utils.config.load import flatten, load_config
from utils.config.schema import MethodConfig, SpatialConfig
from utils.errors import UserError

ALL = (*MAIN, *ABLATIONS)
KEYS_OF_FACTOR = {
    "control": {"method.control"},
    "regulariser": {"method.regulariser", "method.regulariser_weight", "method.covariance_weight"},
    "EMA": {"method.ema_base"},
    "regulariser and EMA": {"method.regulariser", "method.regulariser_weight", "method.ema_base"},
    "batch": {"train.global_batch_size", "train.per_core_batch_size"},
    "task": {"method.context_ratio", "method.target_ratio", "method.covariance_weight"},
    "patch": {"spatial.patch_size"},
    "predictor": {"method.predictor_depth", "method.predictor_width", "method.predictor"},
    "context": {"method.context"},
    "parity": {"method.regulariser", "method.regulariser_weight", "method.neighbour_weight"},
    "neighbours": {"method.neighbour_weight", "method.neighbour_places"},
    "context loss": {"method.context_weight", "method.target_layers"},
    "loss": {"method.loss", "method.regulariser_weight"},
    "mask": {"method.mask_blocks"},
    "learning rate": {"optim.base_lr"},
}


def test_an_ablation_changes_its_factor_and_nothing_else(tmp_path: Path) -> None:
    own = {"experiment_name", "run.dir", "train.ckpt_dir"}
    for arm in ABLATIONS:
        if arm.factor in KEYS_OF_FACTOR:
            reference = dict(flatten(arm_config(arm_by_name(arm.compared_with), 0, 400, tmp_path)))
            ablated = dict(flatten(arm_config(arm, 0, 400, tmp_path)))
            changed = {k for k in ablated if ablated[k] != reference[k]} - own
            assert changed, arm.name
            assert changed <= KEYS_OF_FACTOR[arm.factor], arm.name
    assert len({a.name for a in ALL}) == len(ALL)


def test_recipes_share_data_patch_batch_and_model(tmp_path: Path) -> None:
    shared = ("data.", "spatial.", "augment.", "model.", "train.global", "train.max_steps", "train.val")
    tables = []
    for arm in MAIN:
        cfg = arm_config(arm, 1, 50, tmp_path)
        tables.append({k: v for k, v in flatten(cfg) if k.startswith(shared)})
        assert (cfg.seed, cfg.train.max_steps) == (1, 50)
    assert all(t == tables[0] for t in tables)
    recipes = [arm_config(a, 0, 50, tmp_path).method for a in MAIN]
    expected = [
        *[("vjepa2", None)] * 4,  # with three controls
        ("methods", None),
        ("mae", "normalised"),
        ("mae", "plain"),
    ]
    assert [(m.recipe, m.mae_target) for m in recipes] == expected


def test_the_methods_arm_is_the_shipped_methods_configuration(tmp_path: Path) -> None:
    shipped = dict(flatten(load_config(CONFIG.parent / "pretrain_vjepa_multi_domain.yaml")))
    ours = dict(flatten(arm_config(arm_by_name("methods"), 0, 50, tmp_path)))
    # a part that its MLP predictor does not have, and so does not read
    unread = {"method.predictor_depth", "method.predictor_width"}
    keys = {k for k in shipped if k.startswith(("method.", "optim."))} - unread
    assert {k: ours[k] for k in keys} == {k: shipped[k] for k in keys}


@pytest.mark.parametrize(("name", "share"), [("ema_1", 0.01), ("ema_20", 0.2)])
def test_half_lives_are_shares_of_the_run(name: str, share: float, tmp_path: Path) -> None:
    cfg = arm_config(arm_by_name(name), 0, 500, tmp_path)
    assert init_weight(cfg, int(share * 500), 500) == pytest.approx(0.5, abs=1e-3)


def test_arms_of_one_cost_are_timed_once(tmp_path: Path) -> None:
    key = {a.name: cost_key(arm_config(a, 0, 9, tmp_path)) for a in ALL}
    assert key["ema_1"] == key["lr_2e-3"] == key["reg_vicreg_0.2"] == key[REFERENCE]
    for other in ("methods", "mae_plain", "reg_none", "reg_sigreg_0.5", "patch_4x16x16", "predictor_4"):
        assert key[other] != key[REFERENCE], other
    assert len({key[REFERENCE], key["context_dense"], key["predictor_mlp"]}) == 3


def test_arms_that_are_new_are_timed_beside_the_reference_and_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    known = {arm.name: 2.0 for arm in ALL if arm.name != "context_dense"}
    monkeypatch.setattr(evidence_calibration, "_time_on_cores", lambda *_: [{arm.name: [2.0] for arm in ALL}])
    first = calibrate(tmp_path, 2, ())
    path.write_text(json.dumps(first | {"seconds_per_step": known}))
    asked = []

    def timed(root: Path, jobs: int, extra: object, names: list[str]) -> list[dict[str, list[float]]]:
        asked.append(names)
        return [
            {REFERENCE: [1.0, 1.0], "context_dense": [1.5, 1.7]},
            {REFERENCE: [1.0], "context_dense": [1.6]},
        ]

    monkeypatch.setattr(evidence_calibration, "_time_on_cores", timed)
    calibration = calibrate(tmp_path, 2, ())
    assert calibration["seconds_per_step"] == known | {"context_dense": 3.2}
    assert calibrate(tmp_path, 2, ()) == calibration == json.loads(path.read_text())
    assert asked == [[REFERENCE, "context_dense"]]
    with pytest.raises(UserError, match="jobs: expected 1 as now, found 2; remove the file"):
        calibrate(tmp_path, 1, ())
    with pytest.raises(UserError, match="extra: expected"):
        calibrate(tmp_path, 2, ("seed=1",))


def test_tokens_of_a_coarser_patch_hold_the_finer_ones() -> None:
    fine, coarse, size = (4, 12, 8), (4, 6, 4), (16, 96, 64)
    voxel_of_fine = np.arange(4 * 12 * 8).reshape(fine)
    voxel_of_coarse = np.arange(4 * 6 * 4).reshape(coarse)
    for axis, n in enumerate(size):
        voxel_of_fine = voxel_of_fine.repeat(n // fine[axis], axis)
        voxel_of_coarse = voxel_of_coarse.repeat(n // coarse[axis], axis)
    token_of_coarse = tokens_of_another_grid(np.arange(4 * 12 * 8), fine, coarse)
    np.testing.assert_array_equal(token_of_coarse[voxel_of_fine], voxel_of_coarse)
    np.testing.assert_array_equal(tokens_of_another_grid(np.arange(384), fine, fine), np.arange(384))
    assert tokens_of_another_grid(np.array([1]), (1, 1, 2), (1, 1, 6)) == 4  # a finer one: that of the centre


SPATIAL = SpatialConfig((0.375, 0.024, 0.09375), (16, 96, 64), (4, 8, 8))


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedStore]:
    folder = tmp_path_factory.mktemp("evidence")
    write_tree(folder / "tree", participants=3, seed=5, workers=1)
    places = [f"data.gcs_root={folder / 'tree'}", f"data.store={folder / 'store'}"]
    assert prepare(["--config", str(CONFIG), "--workers", "0", *places]) == 0
    return folder / "tree", PreparedStore.open(str(folder / "store"))


def explained(shares_NL: np.ndarray, grey_N: np.ndarray) -> float:
    """R2 of a token's mean grey value from its layer occupancy."""
    x = np.concatenate([shares_NL, np.ones((len(shares_NL), 1))], axis=1)
    residual = grey_N - x @ np.linalg.lstsq(x, grey_N, rcond=None)[0]
    return 1 - float((residual**2).sum() / ((grey_N - grey_N.mean()) ** 2).sum())


def test_occupancy_lies_where_the_stored_pixels_are(phantom: tuple[Path, PreparedStore]) -> None:
    tree, store = phantom
    directions, straight, turned_d, turned_w = set(), [], [], []
    for number in store.kept:
        record = store.index.loc[number]
        with np.load(tree / "truth" / f"{record.sop_instance_uid}.npz") as arrays:
            truth = dict(arrays)
        shares = layer_occupancy(truth, record, SPATIAL)
        valid = valid_tokens(record, SPATIAL)
        assert shares.min() >= 0
        assert shares[valid].sum(axis=1).max() <= 1.02
        grey = store.read(number).reshape(4, 4, 12, 8, 8, 8).mean(axis=(1, 3, 5)).ravel()
        straight.append(explained(shares[valid], grey[valid]))
        cube = shares.reshape(4, 12, 8, -1)
        turned_d.append(explained(cube[::-1].reshape(384, -1)[valid], grey[valid]))
        turned_w.append(explained(cube[:, :, ::-1].reshape(384, -1)[valid], grey[valid]))
        layers = truth["layer_names"].tolist()
        inside = {name: shares[:, layers.index(name)] for name in ("RNFL", "RPE", "ONL")}
        means = {name: float((grey * s).sum() / s.sum()) for name, s in inside.items()}
        assert means["RNFL"] > grey[valid & (shares.sum(axis=1) == 0)].mean()  # brighter than the vitreous
        assert means["RPE"] > means["ONL"]
        directions.add(bool(record.flipped_d))
    assert directions == {True, False}
    assert np.mean(straight) > 0.85
    # the check would notice a reversed axis
    assert np.mean(straight) > np.mean(turned_d) + 0.03
    assert np.mean(straight) > np.mean(turned_w) + 0.03


def test_a_slab_fills_the_tokens_that_it_should(phantom: tuple[Path, PreparedStore]) -> None:
    """A layer between two flat surfaces, 0.48 mm thick and centred: 2.5 tokens of 0.192 mm."""
    record = phantom[1].index.loc[phantom[1].kept[0]]
    rows, spacing = record.shape_before_h, record.spacing_before_h
    edges = np.array([-0.24, 0.24]) / spacing + rows / 2 - 0.5
    field = (int(record.shape_before_d), int(record.shape_before_w))
    truth = {"surfaces": np.broadcast_to(edges[:, None, None], (2, *field)).astype(np.float32)}
    cube = layer_occupancy(truth, record, SPATIAL).reshape(4, 12, 8)
    middle = cube[1:3, :, 3:5].mean(axis=(0, 2))
    np.testing.assert_allclose(middle[4:8], [0.25, 1.0, 1.0, 0.25], atol=0.02)
    assert middle[:4].max() < 0.01
    assert middle[8:].max() < 0.01


def test_folds_are_by_participant_and_every_class_is_in_each() -> None:
    truth = small_truth()
    for person in np.unique(truth.person):
        assert len(set(truth.fold[truth.person == person])) == 1
    evaluated = np.zeros(len(truth.rows), int)
    for masks in masks_of_folds(truth.fold):
        assert (np.sum(masks, axis=0) == 1).all()
        assert all(set(truth.label[m]) == {0, 1, 2, 3} for m in masks)
        evaluated += masks[2]
    assert (evaluated == 1).all()
    assert set(truth.fold) == set(range(FOLDS))


def test_thickness_is_relative_to_the_training_volumes_of_a_protocol() -> None:
    values = np.array([[1.0], [3.0], [10.0], [20.0], [100.0]])
    protocol = np.array(["a", "a", "a", "b", "c"])
    training = np.array([True, True, False, True, False])
    relative = less_protocol_mean(values, protocol, training)
    np.testing.assert_allclose(relative.ravel(), [-1, 1, 8, 0, 92])  # c: less the mean of 1, 3 and 20


def test_scores_find_what_the_features_hold_and_nothing_in_noise() -> None:
    truth = small_truth()
    rng = np.random.default_rng(1)
    known = np.concatenate([np.eye(4)[truth.label], truth.thickness_um, rng.normal(size=(80, 3))], axis=1)
    good = score(truth, lambda _: known, lambda _: truth.occupancy, (2, 2, 2))
    assert good.of("classes") == 1.0
    assert good.of("thickness") > 0.5
    assert good.of("occupancy") > 0.95
    noise = score(truth, lambda _: rng.normal(size=(80, 5)), lambda _: rng.normal(size=(80, 8, 5)), (2, 2, 2))
    assert noise.of("classes") < 0.5
    assert noise.of("thickness") < 0.15
    assert noise.of("occupancy") < 0.15
    # where a token lies counts among its features
    place = position_columns(np.arange(8), (2, 2, 2))[None, :, :3]
    placed = replace(truth, occupancy=np.broadcast_to(place, (80, 8, 3)))
    assert score(placed, None, lambda _: np.zeros((80, 8, 0)), (2, 2, 2)).of("occupancy") > 0.99


def test_the_fold_that_is_evaluated_does_not_fit_the_features() -> None:
    truth = small_truth()
    seen = []

    def features(is_training: np.ndarray) -> np.ndarray:
        seen.append(is_training)
        return truth.thickness_um

    score(truth, features, None, (2, 2, 2))
    assert len(seen) == 2 * FOLDS
    assert all(not (t & (truth.fold == f)).any() for t, f in zip(seen[:FOLDS], range(FOLDS), strict=True))


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


def test_ablations_stop_when_the_next_would_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(tmp_path, 60.0, 3, {a.name: 7 for a in ALL})
    for job in main_jobs(plan):
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "seconds.txt").write_text("100\n")
    first = run_dir(tmp_path, ABLATIONS[0], 0)
    first.mkdir(parents=True)
    (first / "seconds.txt").write_text("100\n")
    (first / "scores.json").write_text("{}")
    # an ablation takes 3 x 100 s on 2 cores; 50 s are used
    assert list(fitting_ablations(plan, 2, 195)) == []
    assert f"stopped before {ABLATIONS[0].name}: 1 min used" in capsys.readouterr().out
    fitting = list(fitting_ablations(plan, 2, 205))
    assert [j.arm for j in fitting] == [a for a in ABLATIONS for _ in range(3)]


def test_only_some_arms_run_with_what_they_are_compared_with(tmp_path: Path) -> None:
    plan = Plan(tmp_path, 60.0, 1, {})
    names = [job.arm.name if job.arm else BASELINES for job in main_jobs(plan, ["mae_plain", "ema_20"])]
    assert names == [BASELINES, "random", "vjepa2", *CONTROLS[1:], "mae_plain"]
    (tmp_path / "pretraining").mkdir()
    (tmp_path / "pretraining" / "synthetic.json").write_text("{}")  # a phantom knows the truth: a ceiling
    names = [job.arm.name if job.arm else BASELINES for job in main_jobs(plan, [])]
    assert names == [BASELINES, "random", "vjepa2", *CONTROLS[1:]]
    names = [job.arm.name if job.arm else BASELINES for job in main_jobs(plan, ["supervised"])]
    assert names == [BASELINES, "random", "supervised", "vjepa2", *CONTROLS[1:]]
    later = fitting_ablations(plan, 1, 1e9, ["mae_plain", "ema_20"])
    assert [job.arm.name for job in later if job.arm] == ["ema_20"]


@pytest.mark.parametrize("word", ["true", "false"])
def test_steps_are_timed_in_the_arithmetic_of_the_runs(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    monkeypatch.setattr(evidence_calibration, "pin", lambda _: None)
    monkeypatch.setattr(evidence_calibration.PreparedStore, "open", lambda _: None)
    monkeypatch.setattr(evidence_calibration, "open_rows", lambda *_: SimpleNamespace(train=[]))
    monkeypatch.setattr(evidence_calibration, "VJEPA3D", lambda _: nn.Identity())
    monkeypatch.setattr(evidence_calibration, "build_optimizer", lambda *_: None)
    monkeypatch.setattr(evidence_calibration, "Loader", lambda *_, num_steps: [None] * num_steps)
    monkeypatch.setattr(evidence_calibration, "train_step", lambda *words: used.append(words[4].use_bf16))
    evidence_calibration.time_steps(tmp_path, 0, (f"train.use_bf16={word}",), ("vjepa2", "mae_plain"))
    assert set(used) == {word == "true"}


def test_steps_fill_the_budget_and_a_plan_does_not_change_under_its_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `evidence calibrate` first"):
        steps_of_budget(tmp_path, 100.0)
    seconds = {arm.name: 0.3 for arm in ALL} | {"methods": 70.0}
    (tmp_path / "calibration.json").write_text(json.dumps({"seconds_per_step": seconds}))
    steps = steps_of_budget(tmp_path, 100.0)
    assert (steps["vjepa2"], steps["methods"], steps["control"]) == (333, 2, 2)
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


@pytest.mark.filterwarnings("ignore:The least populated class")  # 24 people
@pytest.mark.slow
def test_the_whole_command_on_a_tiny_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, calibration, two steps of a recipe beside the reference, scores, and the table."""
    words = "spatial.target_spacing=[0.75,0.072,0.1875]", "spatial.image_size=[8,32,32]"
    changes = [word for change in words for word in ("--change", change)]

    def evidence_command(*words: str) -> None:  # a process of its own: calibration sets thread variables
        command = [sys.executable, "-m", "benchmarks.evidence", words[0], "--root", str(tmp_path), *words[1:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    out = tmp_path / "results.md"
    evidence_command("data", "--pretraining", "8", "--evaluation", "24", *changes)
    # one arm of each recipe is new; the others have been timed
    monkeypatch.setattr(evidence_calibration, "_time_on_cores", lambda *_: [{arm.name: [1e3] for arm in ALL}])
    timed = calibrate(tmp_path, 1, words)
    new = ("methods", "mae_plain", "context_dense")
    known = {name: seconds for name, seconds in timed["seconds_per_step"].items() if name not in new}
    (tmp_path / "calibration.json").write_text(json.dumps(timed | {"seconds_per_step": known}))
    evidence_command("calibrate", "--jobs", "1", *changes)
    seconds = json.loads((tmp_path / "calibration.json").read_text())["seconds_per_step"]
    assert known.items() < seconds.items()
    assert all(0 < seconds[name] < 1e5 and seconds[name] != 1e3 for name in new)
    only = ("--only", "penalty_only,supervised")  # the reference and the other controls come along
    evidence_command("run", "--steps", "2", "--seeds", "1", "--minutes", "0", *only, *changes)
    evidence_command("table", "--out", str(out))
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    trained = {"vjepa2", *CONTROLS[1:]}
    assert {r["name"] for r in rows} == {"random", "supervised", *trained, *BASELINE_LABELS}
    assert all(r["steps"] == 2 and r["failed"] == 0 for r in rows if r["name"] in trained)
    assert "### What wins" in out.read_text()
    # the ceiling learns layer occupancy from the truth
    cfg = arm_config(arm_by_name("vjepa2"), 0, 40, tmp_path, changes[1::2])
    store, truth = PreparedStore.open(str(tmp_path / "evaluation_store")), read_truth(tmp_path)
    encoders = supervised_encoder(cfg, tmp_path, 0, 40), random_encoder(cfg, 0)
    taught, random = (
        score(truth, None, lambda _, dense=dense: dense, cfg.grid).of("occupancy")
        for dense in (encoder_features(encoder, cfg, store, truth, cfg.grid)[1] for encoder in encoders)
    )
    assert taught is not None
    assert random is not None
    assert taught > random  # the same initialisation
    # a confirmation on the same people: the same scores
    people = tmp_path / "people_7_24"
    people.mkdir()
    for name in ("evaluation_store", "truth.npz"):
        (people / name).symlink_to(tmp_path / name)
    evidence_command("score", "--arm", "penalty_only", "--seed", "0", "--people", str(people))
    first, again = (load_scores(run_dir(root, arm_by_name("penalty_only"), 0)) for root in (tmp_path, people))
    assert again[1]["scores"] == first[1]["scores"]
    assert again[1]["real_rankme"] is None


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


def test_parity_is_what_a_file_that_says_nothing_has(tmp_path: Path) -> None:
    """All but the masks and sizes of the evidence's arm is the schema's default."""
    parity = arm_config(arm_by_name("parity"), 0, 2, tmp_path).method
    own = {"recipe", "context_ratio", "target_ratio", "mask_blocks", "predictor_depth", "predictor_width"}
    defaults = MethodConfig(recipe="vjepa2")
    changed = {f.name for f in fields(MethodConfig) if getattr(parity, f.name) != getattr(defaults, f.name)}
    assert changed <= own
    assert parity.mask_blocks
