"""Arms that differ in one thing, timed for one budget; their plan."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from benchmarks.evidence import calibration as evidence_calibration
from benchmarks.evidence.arms import (
    ABLATIONS,
    CONFIG,
    MAIN,
    REFERENCE,
    arm_by_name,
    arm_config,
    cost_key,
)
from benchmarks.evidence.calibration import calibrate, steps_of_budget
from benchmarks.evidence.queue import (
    Plan,
)
from pretraining.schedules import init_weight
from utils.config.load import flatten, load_config
from utils.config.schema import MethodConfig
from utils.errors import UserError

ALL = (*MAIN, *ABLATIONS)
KEYS_OF_FACTOR = {
    "control": {"method.control"},
    "regulariser": {
        "method.regulariser",
        "method.regulariser_weight",
        "method.covariance_weight",
        "method.covariance_ramp",
    },
    "EMA": {"method.ema_base"},
    "regulariser and EMA": {"method.regulariser", "method.regulariser_weight", "method.ema_base"},
    "batch": {"train.global_batch_size", "train.per_core_batch_size"},
    "task": {"method.context_ratio", "method.target_ratio", "method.covariance_weight"},
    "patch": {"spatial.patch_size"},
    "predictor": {"method.predictor_depth", "method.predictor_width", "method.predictor"},
    "context": {"method.context"},
    "parity": {"method.regulariser", "method.regulariser_weight", "method.neighbour_weight"},
    "neighbours": {"method.neighbour_weight", "method.neighbour_places", "method.predictor_weight"},
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


def test_parity_is_what_a_file_that_says_nothing_has(tmp_path: Path) -> None:
    """All but the masks and sizes of the evidence's arm is the schema's default."""
    parity = arm_config(arm_by_name("parity"), 0, 2, tmp_path).method
    own = {"recipe", "context_ratio", "target_ratio", "mask_blocks", "predictor_depth", "predictor_width"}
    defaults = MethodConfig(recipe="vjepa2")
    changed = {f.name for f in fields(MethodConfig) if getattr(parity, f.name) != getattr(defaults, f.name)}
    assert changed <= own
    assert parity.mask_blocks
