"""Decoders in folds of people: everybody once, beside what they have to beat, nothing twice after a kill."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from data_setup import prepare
from data_setup.phantom.beside import write_labels
from data_setup.store.reader import PreparedStore
from finetuning import evaluate as command
from finetuning import train as train_command
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.dense import crossfit as module
from finetuning.dense import rivals, training
from finetuning.dense.folds import DenseVolumes, crossed
from finetuning.dense.head import GRADER, IMAGE, PRETRAINED, RANDOM, UNET
from finetuning.dense.kind import Kind
from finetuning.dense.layers import read_volumes
from finetuning.dense.rivals import between_surfaces, heights
from models.vit3d import VisionTransformer3D
from tests.finetuning.test_leaderboard import image_encoder
from tests.support.finetune_factory import save_checkpoint
from tests.support.heights_factory import config, dense_overrides, make_tree, words
from utils.errors import ConfigError, UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CROSSED = "eval.protocol=crossfit"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans of four people with surfaces and classes, and a checkpoint of an untrained model."""
    root = tmp_path_factory.mktemp("folds")
    make_tree(root / "tree", 4, (), (1, 2), (22, 72, 20))
    write_labels(root / "tree", "layers")
    for extra in ([], ["--labels"]):
        assert prepare.main([*words(root), "--workers", "0", *extra]) == 0
    save_checkpoint(config(root, f"run.dir={root / 'pretrained'}"))
    add_second_grader(root / "tree")
    return root


def add_second_grader(tree: Path) -> None:
    """Of the first three volumes, one row below the first grader, who has an A-scan more."""
    manifest = tree / "retinal_oct" / "manifest.tsv"
    table = pd.read_csv(manifest, sep="\t", dtype=str, keep_default_na=False)
    table["label_surfaces_2"] = ""
    for number, path in enumerate(table.label_surfaces[:3]):
        with np.load(tree / path.lstrip("/")) as file:
            surfaces, names = file["surfaces"] + 1, file["names"]
        surfaces[:, 0, :2] = np.nan
        np.savez(tree / f"second{number}.npz", surfaces=surfaces, names=names)
        table.loc[number, "label_surfaces_2"] = f"/second{number}.npz"
    table.to_csv(manifest, sep="\t", index=False)


def evaluate(world: Path, task: str, run: Path, *extra: str) -> dict[str, Any]:
    changes = dense_overrides(world, run, CROSSED, "train.max_steps=2", *extra)
    command.main(["--config", str(CONFIGS / f"{task}.yaml"), *changes])
    content: dict[str, Any] = json.loads((run / f"{task}.json").read_text())
    return content


# ---- who is in which fold ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named(DenseVolumes):
    """Volumes whose labels have some of the names."""

    has: tuple[str, ...] = ()

    def names_of(self, row: int) -> frozenset[str]:
        return frozenset(name for name in self.names if name[0] in self.has[row])


def named(*has: str) -> Named:
    """A volume a person, in all folds; `has`: the first letters of its names."""
    rows, store = np.tile(np.arange(len(has)), 3), SimpleNamespace(url="store")
    fold = np.repeat([TRAIN, VAL, EVALUATED], len(has))
    names = tuple(sorted({f"{letter}x" for letter in "".join(has)}))
    return Named(store, rows, fold, rows.astype(str), names, has)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("has", "folds"),
    [
        (["a"] * 5, None),
        (["a"] * 3, None),
        (["a"] * 10, 5),
        (["a"] * 23, 4),
        (["ab", "a", "a", "b", "b", "", "", ""], None),
        (["a", "b", "a", "b", "ab", "ab", "", ""], 4),
    ],
)
def test_everybody_is_evaluated_once(world: Path, has: list[str], folds: int | None) -> None:
    """Whoever chooses neither trains nor is evaluated, and every name has somebody to train on."""
    whole = named(*has)
    cfg = config(world, CROSSED, "task.kind=layers", f"eval.folds={folds or 'null'}")
    parts = crossed(cfg, whole, [])
    assert len(parts) == (folds or len(has))
    assert sorted(p for part in parts for p in part.people(EVALUATED)) == sorted(map(str, range(len(has))))
    for part in parts:
        sides = [part.people(fold) for fold in (TRAIN, VAL, EVALUATED)]
        assert sum(map(len, sides)) == len(set().union(*sides)) == len(has)
        for fold in (TRAIN, VAL):
            trained = set().union(*(part.names_of(row) for row in part.of(fold).tolist()))
            assert trained == set(whole.names) if fold == TRAIN else trained
        assert len(sides[1]) <= max(len(whole.names), round(0.2 * (len(has) - len(sides[2]))))
    seen = crossed(replace(cfg, eval=replace(cfg.eval, folds=None)), named(*["a"] * 5), ["0"])
    assert [len(part.rows) for part in seen] == [4] * 4


@pytest.mark.parametrize(
    ("has", "folds", "problem"),
    [
        (["a", "a"], "null", "expected 3 people with labels or more for 2 folds, found 2"),
        (["a"] * 4, "6", "expected 6 people with labels or more for 6 folds, found 4"),
        (["a", "a", "ab", "a"], "null", "fold . of 4: expected people to train on with bx, found nobody"),
        (["a", "a", "", ""], "null", "expected a person with labels to choose the best epoch, found nobody"),
    ],
)
def test_folds_that_cannot_be_learnt_from(world: Path, has: list[str], folds: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        crossed(config(world, CROSSED, "task.kind=layers", f"eval.folds={folds}"), named(*has), [])


# ---- the plain U-Net --------------------------------------------------------------------------------------


def test_surfaces_are_classes_and_back(world: Path) -> None:
    """A sure network gives the heights to half a voxel; what an unknown height leaves open is not learnt."""
    truth = np.array([[3.2, 7.0], [5.5, np.nan], [9.0, 12.3]], np.float32)[:, None]
    volumes = SimpleNamespace(read=lambda row: truth, store=SimpleNamespace(image_size=(1, 16, 2)))
    classes = between_surfaces(volumes, 0)  # type: ignore[arg-type]
    assert classes[0, :, 0].tolist() == [0] * 4 + [1] * 2 + [2] * 4 + [3] * 6
    assert classes[0, :, 1].tolist() == [0] * 8 + [255] * 5 + [3] * 3
    sure = torch.nn.functional.one_hot(torch.from_numpy(classes[:, :, :1]).long(), 4).movedim(-1, 1).float()
    assert heights(sure)[:, 0, 0].tolist() == [3.5, 5.5, 9.5]


def test_a_unet_learns_and_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second at each look: two looks an update."""
    monkeypatch.setattr(time, "process_time", count().__next__)
    rng = np.random.default_rng(0)
    truth = torch.zeros(8, 40, 32, dtype=torch.uint8)
    for number, first in enumerate(rng.integers(6, 30, 8)):
        truth[number, first:] = 1
    scans = truth + 0.3 * torch.from_numpy(rng.normal(size=truth.shape)).float()
    seconds = 60
    net = rivals.train_unet((scans[:6], truth[:6]), (scans[6:], truth[6:]), 2, seconds, 0, lambda: None)
    assert (net(scans[6:]).argmax(1) == truth[6:]).float().mean() > 0.95
    with pytest.raises(ZeroDivisionError):
        rivals.train_unet((scans, truth), (scans, truth), 2, 60, 0, lambda: 1 // 0)  # type: ignore[arg-type]


# ---- the command ------------------------------------------------------------------------------------------


def test_one_table_over_all_people(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time nothing is trained; a fold that is there is not trained again."""
    content = evaluate(world, "layers", tmp_path, "eval.folds=2", "eval.allow_overlap=true")
    store = PreparedStore.open(config(world).data.store)
    people = sorted(read_volumes(config(world, CROSSED, "task.kind=layers"), store).people(EVALUATED))
    assert sorted(content["by_person"]) == people
    assert set(content["against"]) >= {RANDOM, UNET, GRADER, "mean_heights"}
    row_um = 1000 * store.index.spacing_before_h
    assert row_um.min() * 0.99 < content["overall"][GRADER]["value"] < row_um.max() * 1.01
    assert content["overall"][GRADER]["people"] == 3
    mean = np.mean([of[PRETRAINED] for of in content["by_person"].values()])
    assert content["overall"][PRETRAINED]["value"] == pytest.approx(mean)
    gained = content["against"][UNET]
    assert gained["value"] == pytest.approx(np.mean([o[UNET] for o in content["by_person"].values()]) - mean)
    assert (gained["p"] or 0) >= 0.125
    page = (tmp_path / "layers.md").read_text()
    assert page in capsys.readouterr().out
    assert "4 people can give no p below 0.125." in page
    assert "4 participants could have shown no difference, however large." in page
    assert "beats" not in page
    assert content["n_volumes"] == 4

    def trains(*_: object) -> int:
        raise AssertionError("trained again")

    (tmp_path / "layers.json").unlink()
    (tmp_path / "folds" / "02" / "unet.npz").unlink()
    monkeypatch.setattr(module, "train_head", trains)
    monkeypatch.setattr(
        module, "plain_unet", lambda *_: (UNET, lambda row: np.zeros((len(content["names"]), 8, 32)), None)
    )
    again = evaluate(world, "layers", tmp_path, "eval.folds=2", "eval.allow_overlap=true")
    changed = [p for p in people if again["by_person"][p] != content["by_person"][p]]
    assert len(changed) == 2
    assert all(again["by_person"][p][PRETRAINED] == content["by_person"][p][PRETRAINED] for p in people)


def test_a_unet_has_the_time_of_the_encoders_pass_in_every_fold(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of 100 s a volume of the encoder and 1 s an update; the second fold finds tokens kept."""
    clock, given = [0.0], []
    forward, step = VisionTransformer3D.forward, training.train_step

    def slow_forward(self: VisionTransformer3D, view: torch.Tensor, *more: Any) -> Any:
        clock[0] += 100 * len(view)
        return forward(self, view, *more)

    def slow_step(*parts: Any) -> float:
        clock[0] += 1
        return step(*parts)

    def no_unet(kind: Kind[Any], seed: int, volumes: DenseVolumes, runtime: Any, seconds: float) -> Any:
        given.append((seconds, len({*volumes.of(TRAIN), *volumes.of(VAL)})))
        return UNET, lambda row: np.zeros((len(volumes.names), 8, 32)), None

    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    monkeypatch.setattr(VisionTransformer3D, "forward", slow_forward)
    monkeypatch.setattr(training, "train_step", slow_step)
    monkeypatch.setattr(module, "plain_unet", no_unet)
    evaluate(world, "layers", tmp_path, "eval.folds=null", "finetune.against_random=false")
    assert len(given) == 4
    assert [seconds for seconds, _ in given] == [100 * volumes + 2 for _, volumes in given]
    assert clock[0] < sum(seconds for seconds, _ in given)  # tokens were computed once


def test_a_head_in_folds_beside_an_image_model(world: Path, tmp_path: Path) -> None:
    """The head's own training is no part of it."""
    run, extra = tmp_path / "run", ("task.names=[CHOROID,ONL]", "finetune.against_random=false")
    content = evaluate(world, "segmentation", run, "eval.folds=2", *extra)
    assert set(content["against"]) == {UNET}
    assert set(content["lesions"]) == {"CHOROID", "ONL"}
    head = run / "folds" / "01" / "checkpoints" / "head.pt"
    folder = image_encoder(tmp_path / "vit")
    other = tmp_path / "other"
    command.main(["--head", str(head), f"run.dir={other}", "--image-encoder", folder])
    answered = json.loads((other / "segmentation.json").read_text())
    assert set(answered["against"]) == {IMAGE, UNET}
    assert len(answered["by_person"]) == 4
    assert "| the same decoder on an image model |" in (other / "segmentation.md").read_text()


def test_what_has_no_folds(world: Path, tmp_path: Path) -> None:
    changes = dense_overrides(world, tmp_path, CROSSED)
    with pytest.raises(ConfigError, match="found crossfit: a head has one training set"):
        train_command.train(str(CONFIGS / "layers.yaml"), changes)
    with pytest.raises(ConfigError, match=r"eval\.folds: expected a number with task.kind classification"):
        config(world, "eval.folds=null")
    image = ["--image-encoder", str(tmp_path)]
    with pytest.raises(UserError, match=r"--image-encoder: expected eval\.protocol=crossfit"):
        command.main(["--config", str(CONFIGS / "layers.yaml"), *dense_overrides(world, tmp_path), *image])
