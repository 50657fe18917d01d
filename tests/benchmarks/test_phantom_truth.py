"""The phantom's truth: right people, right volumes, right encoders, and a verdict for either side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import phantom_truth as module
from benchmarks.evidence.scores import Scores, score, score_occupancy, score_thickness
from data_setup.resample import resample_frames
from data_setup.store.format import RECORD_COLUMNS
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, measure
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.features import yardsticks
from finetuning.features.kept import random_encoder
from finetuning.features.yardsticks import Yardstick
from models import vit3d
from models.probes import hidden
from models.probes.intervals import participant_draws
from models.probes.tokens import Errors, Rows, errors_by_participant, mean_r2
from tests.support.finetune_factory import RUNTIME, config, person, save_checkpoint, silence
from tests.support.pipeline_factory import SMOKE
from utils.cli import run_cli
from utils.config.schema import Config
from utils.errors import UserError

SIZE, SPACING = (8, 24, 32), (0.375, 0.024, 0.09375)
PEOPLE = {"train": 24, "val": 8, "test": 12}


def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A bright layer on a grey one, each as thick as its volume draws: voxels and surfaces [3, D, W]."""
    top, first, second = rng.uniform(2, 10), rng.uniform(2, 6), rng.uniform(2, 6)
    tilt = rng.uniform(-0.1, 0.1) * np.arange(SIZE[2])
    surfaces = np.cumsum([top, first, second])[:, None, None] + np.zeros((3, SIZE[0], 1)) + tilt
    height = np.arange(SIZE[1])[None, :, None]
    volume = rng.uniform(10, 40, SIZE)
    for surface, upper, grey in zip(surfaces[1:], surfaces[:2], (180, 90), strict=True):
        volume += grey * ((height >= upper[:, None]) & (height < surface[:, None]))
    return volume.astype(np.uint8), surfaces.astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _six_blocks() -> Iterator[None]:
    """The real width and half the depth: two random blocks say too little of a thickness."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(6, 192, 3))
        patch.setattr(hidden, "MOST_STEPS", 60)
        patch.setattr(yardsticks, "WIDE", 64)
        yield


def place_alone(cfg: Config, store: PreparedStore, rows: np.ndarray, *others: Any) -> list[Yardstick]:
    """A yardstick that knows nothing of a volume."""
    tokens, volumes = np.zeros((*others[1].shape, 0)), np.zeros((len(rows), 1))
    return [Yardstick("place", "place", lambda _: volumes, lambda _: tokens)]


@pytest.fixture(autouse=True)
def _without_local_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer what is asked here, and take seconds: two tests have them."""
    monkeypatch.setattr(module, "yardsticks", place_alone)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two volumes per participant and the truth files of a tree: two layers."""
    root = tmp_path_factory.mktemp("world")
    (root / "truth").mkdir()
    cfg = config(root, root / "unused")
    rng = np.random.default_rng(0)
    records, volumes = [], []
    for split, count in PEOPLE.items():
        for number in range(count):
            for eye in "LR":
                name = f"{person(split, number)}_{eye}"
                records.append(
                    dict.fromkeys(RECORD_COLUMNS)
                    | {"person_id": person(split, number), "split": split, "laterality": eye}
                    | {"path": f"{name}.dcm", "sop_instance_uid": name, "protocol": f"p{number % 2}"}
                )
                voxels, surfaces = draw(rng)
                volumes.append(resample_frames(iter(voxels), SIZE, SPACING, SIZE, SPACING))
                np.savez(
                    root / "truth" / f"{name}.npz",
                    surfaces=surfaces,
                    layer_names=np.array(["bright", "grey"]),
                    layer_thickness_um=np.diff(surfaces, axis=0).mean(axis=(1, 2)) * SPACING[1] * 1000,
                )
    writer = StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, str(root), synthetic=True)
    before = {f"shape_before_{a}": n for a, n in zip("dhw", SIZE, strict=True)}
    before |= {f"spacing_before_{a}": mm for a, mm in zip("dhw", SPACING, strict=True)}
    rows = writer.append_records(records)
    for row, volume in zip(rows, volumes, strict=True):
        facts = {**measure(volume), **before, "flipped_d": False, "status": "kept"}
        writer.write_row(row, volume.voxels, facts)
    writer.finalise(rows)
    return root


def save(
    cfg: Config, step: int, change: Callable[[nn.Module], None] = lambda part: None, **state: Any
) -> str:
    """A checkpoint with the part that is read: the target encoder of cfg.seed after `change`."""
    encoder = random_encoder(cfg, cfg.seed)
    change(encoder)
    model = {f"target_encoder.{name}": value for name, value in encoder.state_dict().items()}
    people = [person("train", n) for n in range(PEOPLE["train"])]
    return save_checkpoint(cfg, **{"step": step, "model": model, "participants": people} | state)


def measured(
    world: Path,
    folder: Path,
    trained: Callable[[nn.Module], None] = lambda part: None,
    control: Callable[[nn.Module], None] = lambda part: None,
) -> dict[str, Any]:
    """truth.json of two checkpoints, whose target encoders were changed so."""
    cfg = config(world, folder / "run")
    save(cfg, 160, trained)
    save(config(world, folder / "control"), 2, control)
    return module.measure(cfg, str(folder / "control"), RUNTIME)


def looks(world: Path) -> list[dict[str, Any]]:
    """Lines of the store's ledger: every answer is a look at split test."""
    return [json.loads(line) for line in (world / "store" / "ledger.jsonl").read_text().splitlines()]


def test_worse_than_both_is_told(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "yardsticks", yardsticks.yardsticks)
    result = measured(world, tmp_path, trained=silence)
    assert result == json.loads((tmp_path / "run" / "truth.json").read_text())
    assert (result["n_participants"], result["n_volumes"], result["n_tokens"]) == (12, 24, 24 * 24)
    for question in result["questions"]:
        rows = {row["name"]: row["r2"] for row in question["rows"]}
        local = ["own_voxels", "27_patches", "192_random_of_27", "384_random_of_27"]
        place = ["place"] if question["name"] == "occupancy" else []
        assert list(rows) == ["pretrained", "random_init", "control", *place, *local]
        both = {"linear": question["rows"], "hidden": [row["hidden"] for row in question["rows"]]}
        for readout, of in both.items():
            r2 = [row["r2"] for row in of]
            best = list(rows)[3 + int(np.argmax(r2[3:]))]
            assert question["compared"][readout] == ["random_init", "control", best]
        for arm in ("random_init", "control"):
            difference = question["differences"][arm]
            assert difference["mean"] == pytest.approx(rows["pretrained"] - rows[arm])
            assert difference["ci95"][1] < 0
        assert "no gain shown" in question["verdict"]
        assert "worse than random initialisation, the control and " in question["verdict"]
    text = module.format_table(result)
    assert text.splitlines()[-2:] == [question["verdict"] for question in result["questions"]]
    look = looks(world)[-1]
    assert look["what"] == "truth: pretrained, random_init, control"
    assert (result["look"], look["look"]) == (len(looks(world)), len(looks(world)))
    assert look["checkpoint"] == f"{result['checkpoint_sha256']} {result['control_sha256']}"
    assert f"of split test, look {result['look']} at them" in text.splitlines()[0]


@pytest.mark.parametrize("is_local", [True, False])
def test_better_than_both_is_told_where_local_voxels_do_not_suffice(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """Here they do: a claim needs a store whose yardsticks are taken away."""

    def silent(cfg: Config, seed: int) -> nn.Module:
        encoder = random_encoder(cfg, seed)
        silence(encoder)
        return encoder

    monkeypatch.setattr(module, "random_encoder", silent)
    if is_local:
        monkeypatch.setattr(module, "yardsticks", yardsticks.yardsticks)
    result = measured(world, tmp_path, control=silence)
    for question in result["questions"]:
        assert question["rows"][0]["r2"] > 0.3
        both = [question["differences"], question["hidden"]["differences"]]
        assert all(of[arm]["ci95"][0] > 0 for of in both for arm in ("random_init", "control"))
        better = "Pre-training is better than random initialisation, the control and place."
        gained = f": gained by training. {better}"
        linear, _, with_layer = question["verdict"].partition(" With one hidden layer")
        if not is_local:
            assert linear.endswith(gained)
            assert with_layer == gained
        elif question["name"] == "occupancy":
            for text in (linear, with_layer):
                assert re.search(
                    r": no gain shown. Pre-training is better than random initialisation and the control, "
                    r"(worse than|not shown to differ from) .* of 27 tokens", text
                )  # fmt: skip


def test_level_and_a_difference_to_one_alone_are_no_learning(world: Path, tmp_path: Path) -> None:
    """The pre-trained weights are those that it began with; the control has lost them."""
    result = measured(world, tmp_path, control=silence)
    for question in result["questions"]:
        assert question["differences"]["random_init"] == {"mean": 0.0, "ci95": [0.0, 0.0], "doubt": ""}
        assert question["differences"]["control"]["ci95"][0] > 0
        assert "no gain shown. Pre-training is better than the control" in question["verdict"]
        assert "not shown to differ from random initialisation" in question["verdict"]


def test_a_readout_of_too_few_people_cannot_say() -> None:
    """The other one says what it can."""
    sure = {"mean": 0.2, "ci95": [0.1, 0.3], "doubt": ""}
    apart = {"linear": {"control": sure}, "hidden": {"control": sure | {"doubt": "11 participants are few"}}}
    assert module.verdict("occupancy", apart, {key: ["control"] for key in apart}, {}) == (
        "Layer occupancy of a token: gained by training. Pre-training is better than the control. With one "
        "hidden layer: no gain shown. Pre-training is not shown to differ from the control. Cannot say, "
        "because 11 participants are few."
    )


def test_differences_have_their_doubt() -> None:
    """Of every arm and readout, over people and not classes."""
    rng = np.random.default_rng(0)
    people, truth = np.array([f"{n:02d}" for n in range(5)]), rng.normal(size=(5, 2))
    rows = Rows(np.zeros((5, 1)), truth, people)

    def scores(noise: np.ndarray | float) -> Scores:
        tasks = ("occupancy", "occupancy_hidden")
        errors = errors_by_participant(rows, truth + noise)
        return Scores(dict.fromkeys(tasks, errors), dict.fromkeys(tasks, 0.0), {t: [1.0] for t in tasks})

    others = ("random_init", "control", "place")
    scored = {"pretrained": scores(0.01)} | {n: scores(rng.normal(size=truth.shape)) for n in others}
    result = module.compare("occupancy", scored, participant_draws(5, 300, 0), {"place": "place"})
    for differences in (result["differences"], result["hidden"]["differences"]):
        assert all("5 participants can give none below 0.0625" in d["doubt"] for d in differences.values())
    assert result["verdict"].count("Cannot say, because an exact test by sign flips gives p 0.0625") == 2
    assert "better than" not in result["verdict"]


def test_each_encoder_is_its_own(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three rows come from the checkpoint, the seed's weights and the control."""
    seen = []
    real = module.token_features

    def listening(encoder: nn.Module, *rest: Any) -> Any:
        seen.append({name: value.clone() for name, value in encoder.state_dict().items()})
        return real(encoder, *rest)

    def scale(factor: float) -> Callable[[nn.Module], None]:
        @torch.no_grad()
        def change(part: nn.Module) -> None:
            for parameter in part.parameters():
                parameter.mul_(factor)

        return change

    monkeypatch.setattr(module, "token_features", listening)
    measured(world, tmp_path, scale(1.5), scale(0.5))
    began = random_encoder(config(world, tmp_path / "run"), 0).state_dict()
    for state, factor in zip(seen, (1.5, 1.0, 0.5), strict=True):
        assert all(torch.equal(state[name], factor * value) for name, value in began.items())


def test_only_people_of_test_are_scored(world: Path, tmp_path: Path) -> None:
    cfg = config(world, tmp_path / "run")
    cohort = module.read_truth(cfg, PreparedStore.open(cfg.data.store))
    for fold, split in ((TRAIN, "train"), (VAL, "val"), (EVALUATED, "test")):
        people = set(cohort.person[cohort.fold == fold])
        assert people == {person(split, n) for n in range(PEOPLE[split])}
    features = np.random.default_rng(0).normal(size=(*cohort.tokens.shape, 5)).astype(np.float32)
    scores = score(cohort, lambda _: features[:, 0], lambda _: features, cfg.grid)
    assert set(scores.parts) == {f"{task}{end}" for task in module.QUESTIONS for end in ("", "_hidden")}
    for part in scores.parts.values():
        assert set(part.participants) == {person("test", n) for n in range(PEOPLE["test"])}


def test_training_volumes_are_bounded_and_all_of_test_is_scored(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRAIN_VOLUMES", 10)
    monkeypatch.setattr(module, "VAL_VOLUMES", 6)
    cfg = config(world, tmp_path)
    store = PreparedStore.open(cfg.data.store)
    rows, fold = module.choose_rows(cfg, store)
    assert [int((fold == f).sum()) for f in (TRAIN, VAL, EVALUATED)] == [10, 6, 24]
    assert store.index.loc[rows[fold == TRAIN], "person_id"].nunique() == 10
    assert len(set(rows.tolist())) == len(rows)


def test_the_truth_is_that_of_its_volume(world: Path, tmp_path: Path) -> None:
    """Features that hold the truth explain it; those of another volume do not."""
    cfg = config(world, tmp_path)
    cohort = module.read_truth(cfg, PreparedStore.open(cfg.data.store))
    noise = np.random.default_rng(0).normal(size=cohort.occupancy.shape) * 0.01
    known = (cohort.occupancy + noise).astype(np.float32)
    other = np.random.default_rng(1).permutation(len(known))

    def r2(task: str, features: np.ndarray) -> float:
        both = (None, lambda _: features) if task == "occupancy" else (lambda _: features, None)
        return mean_r2(cast(Errors, score(cohort, *both, cfg.grid).parts[task]))

    assert r2("occupancy", known) > 0.95
    assert abs(r2("occupancy", known[other]) - r2("occupancy", 0 * known)) < 0.1
    assert r2("thickness", cohort.thickness_um) > 0.95
    assert r2("thickness", cohort.thickness_um[other]) < 0.15
    # the first surface is flat but for its tilt: what lies in a token is known without the code
    store = PreparedStore.open(cfg.data.store)
    row = cohort.rows[3]
    with np.load(world / "truth" / f"{store.index.loc[row, 'sop_instance_uid']}.npz") as arrays:
        upper, lower = arrays["surfaces"][:2]
    height = np.linspace(-0.5, 23.5, 24 * 50, endpoint=False)[None, :, None] + 0.01
    fine = (height >= upper[:, None]) & (height < lower[:, None])
    share = fine.reshape(2, 4, 3, 8 * 50, 4, 8).mean(axis=(1, 3, 5)).ravel()
    np.testing.assert_allclose(cohort.occupancy[3, : len(share), 0], share, atol=0.01)


def test_numbers_agree_with_the_folds_of_the_evidence(world: Path, tmp_path: Path) -> None:
    """One fold of those: split test is evaluated, split val chooses."""
    cfg = config(world, tmp_path)
    cohort = module.read_truth(cfg, PreparedStore.open(cfg.data.store))
    training = 2 + np.unique(cohort.person, return_inverse=True)[1] % 3
    fold = np.select([cohort.fold == EVALUATED, cohort.fold == VAL], [0, 1], training)
    dense = np.random.default_rng(0).normal(size=(*cohort.tokens.shape, 5)).astype(np.float32)
    folds = replace(cohort, fold=fold, is_split=False)
    for (joined, _), (_, parts) in (
        [score_occupancy(of, lambda _: dense, cfg.grid) for of in (cohort, folds)],
        [score_thickness(of, lambda _: dense[:, 0]) for of in (cohort, folds)],
    ):
        np.testing.assert_array_equal(joined.error, parts[0].errors.error)


def test_a_store_without_truth_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(world, tmp_path / "run")
    store = PreparedStore.open(cfg.data.store)
    store.attrs = store.attrs | {"synthetic": False}
    with pytest.raises(UserError, match="expected the store of a phantom, whose truth is known"):
        module.read_truth(cfg, store)
    save(cfg, 160)
    save(config(world, tmp_path / "control"), 2)
    places = [
        f"data.gcs_root={tmp_path / 'elsewhere'}",
        f"data.store={world / 'store'}",
        f"run.dir={tmp_path / 'run'}",
        "spatial.image_size=[8,24,32]",
    ]
    with pytest.raises(SystemExit) as stop:
        run_cli(
            lambda: module.main(["--config", str(SMOKE), "--control", str(tmp_path / "control"), *places])
        )
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "elsewhere/truth/train00_L.npz: expected the truth file that the phantom writes" in line
    assert not (tmp_path / "run" / "truth.json").exists()


def test_seen_people_and_what_is_no_control_are_refused(world: Path, tmp_path: Path) -> None:
    cfg, control = config(world, tmp_path / "run"), config(world, tmp_path / "control")
    save(cfg, 160)
    save(control, 2, participants=["train00", "test03"])
    with pytest.raises(UserError, match=r"control.*split val or test in its .*, found 1 \(test03\)"):
        module.measure(cfg, str(tmp_path / "control"), RUNTIME)
    save(control, 2)
    save(cfg, 160, participants=["val01"])
    with pytest.raises(UserError, match=r"run.*found 1 \(val01\)"):
        module.measure(cfg, str(tmp_path / "control"), RUNTIME)
    save(cfg, 160)
    with pytest.raises(UserError, match=r"expected a control of fewer steps than .* has 160, found 160"):
        module.measure(cfg, str(tmp_path / "run"), RUNTIME)
    save(config(world, tmp_path / "control", "optim.base_lr=1e-3"), 2)
    with pytest.raises(UserError, match=r"optim.base_lr: expected 0.002 as in .*, found 0.001"):
        module.measure(cfg, str(tmp_path / "control"), RUNTIME)


def test_the_same_question_is_answered_once(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(world, tmp_path)
    before = len(looks(world))

    def forbidden(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(module, "token_features", forbidden)
    assert module.measure(config(world, tmp_path / "run"), str(tmp_path / "control"), RUNTIME) == first
    assert len(looks(world)) == before
    save(config(world, tmp_path / "control"), 2, silence)
    with pytest.raises(AssertionError, match="computed again"):
        module.measure(config(world, tmp_path / "run"), str(tmp_path / "control"), RUNTIME)
