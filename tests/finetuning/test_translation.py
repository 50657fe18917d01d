"""Slabs of flow are learnt from tokens, kept, judged against two controls, and refuse what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from PIL import Image
from scipy.ndimage import uniform_filter

from data_setup.attach.stored import StoredFlow
from data_setup.store.reader import PreparedStore
from finetuning import evaluate as command
from finetuning import predict as predict_command
from finetuning import train as train_command
from finetuning.cohort.cohort import EVALUATED, TRAIN
from finetuning.dense import translation
from finetuning.dense.evaluation import evaluate
from finetuning.dense.head import ALONE, PRETRAINED, PROJECTION, RANDOM
from finetuning.features.kept import KeptFeatures
from tests.finetuning.test_segment import interleaved
from tests.support.finetune_factory import RUNTIME, save_checkpoint
from tests.support.flow_factory import make_flow_tree, prepare_flow
from tests.support.heights_factory import config, dense_overrides
from tests.support.line_fields import documented
from utils.config.schema import StorageOptions
from utils.errors import ConfigError, UserError

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "translation.yaml"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans with flow, one without a deep slab, and a checkpoint of an untrained model."""
    root = tmp_path_factory.mktemp("translation")
    make_flow_tree(root / "tree", 14, ("missing_image",), (1, 2), (14, 60, 18))
    prepare_flow(root)
    save_checkpoint(config(root, f"run.dir={root / 'pretrained'}"))
    return root


def overrides(world: Path, run: Path, *extra: str) -> list[str]:
    words = ["train.max_steps=50", "augment.strength=0", "optim.base_lr=0.02"]
    return dense_overrides(world, run, *words, *extra)


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    run = world / "runs" / "translation"
    assert train_command.main(["--config", str(CONFIG), *overrides(world, run)]) == 0
    return run


def volumes_of(world: Path, *extra: str) -> translation.FlowVolumes:
    cfg = config(world, "task.kind=translation", *extra)
    return translation.read_volumes(cfg, PreparedStore.open(cfg.data.store))


def mean_greys(volumes: translation.FlowVolumes, fold: int) -> list[float]:
    """Mean value of each slab over the volumes of a fold that have it."""
    slabs = np.stack([volumes.read(int(row)) for row in volumes.of(fold)])
    return [float(np.nanmean(slabs[:, place])) for place in range(len(volumes.names))]


def ssim_of(first: np.ndarray, second: np.ndarray) -> float:
    """Structural similarity of values from 0 to 1 by its formula, over windows of 7 x 7 inside the images."""
    a, b = first.astype(float), second.astype(float)
    mean_a, mean_b, aa, bb, ab = (uniform_filter(part, 7)[3:-3, 3:-3] for part in (a, b, a * a, b * b, a * b))
    var_a, var_b, cov = aa - mean_a**2, bb - mean_b**2, ab - mean_a * mean_b
    same = (2 * mean_a * mean_b + 1e-4) * (2 * cov + 9e-4)
    return float((same / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))).mean())


def test_a_decoder_learns_the_phantoms_slabs(world: Path, trained: Path, tmp_path: Path) -> None:
    """Each slab at its own brightness, at least; every arm, slab and file is there."""
    command.main(["--head", str(trained), f"run.dir={tmp_path}"])
    content = json.loads((tmp_path / "translation.json").read_text())
    assert list(content["overall"]) == [PRETRAINED, RANDOM, ALONE, PROJECTION]
    assert content["names"] == ["superficial", "deep", "outer_retina", "choriocapillaris"]
    assert set(content["against"]) == {RANDOM, ALONE, PROJECTION}
    volumes = volumes_of(world)
    for name, grey in zip(volumes.names, mean_greys(volumes, TRAIN), strict=True):
        images = [volumes.read(int(r))[volumes.names.index(name)] for r in volumes.of(EVALUATED)]
        constant = np.mean([np.abs(image - grey).mean() for image in images if not np.isnan(image).all()])
        assert content["by_name"][PRETRAINED][name]["l1"]["value"] < 1.3 * constant, name
    lines = pd.read_parquet(tmp_path / "slabs.parquet")
    by_person = lines.groupby(["arm", "person_id", "row"]).ssim.mean().groupby(["arm", "person_id"]).mean()
    of_arm = by_person.groupby("arm").mean()
    for other, gained in content["against"].items():
        assert gained["value"] == pytest.approx(of_arm[PRETRAINED] - of_arm[other])
    assert len(lines) == 4 * sum(len(volumes.flow.names(int(row))) for row in volumes.of(EVALUATED))
    text = (tmp_path / "translation.md").read_text()
    assert "This is look 1 at these test participants" in text
    assert evaluate(translation.TRANSLATION, str(trained), [f"run.dir={tmp_path}"]) + "\n" == text
    with Image.open(tmp_path / "translation.png") as picture:
        assert min(picture.size) > 400
    head = translation.TRANSLATION.open_head(str(trained), StorageOptions())
    best = head.state["validation"][PRETRAINED]
    assert best["l1"] == min(line["l1"] for line in best["history"])


def test_the_baseline_is_a_projection_of_structure(world: Path) -> None:
    """It knows where the retina's slabs are dark and bright, and nothing of the evaluated volumes."""
    volumes = volumes_of(world)
    baseline = translation.StructuralProjection(volumes)
    row = int(volumes.of(EVALUATED)[0])
    predicted, truth = baseline.predict(row), volumes.read(row)
    assert predicted.shape == truth.shape
    assert np.nanmean(np.abs(predicted - truth)) < np.nanstd(truth)
    alone = translation.StructuralProjection(
        translation.FlowVolumes(
            volumes.store,
            volumes.of(TRAIN),
            volumes.fold[volumes.fold == TRAIN],
            volumes.person[volumes.fold == TRAIN],
            volumes.names,
            volumes.flow,
        )
    )
    assert np.array_equal(alone.predict(row), predicted)


def test_first_bright_row_of_a_step() -> None:
    volume = np.zeros((2, 40, 3))
    volume[:, 25:, :] = 2.0
    assert np.abs(translation.first_bright_row(volume, 0.05) - 25).max() <= 1


def test_ssim_is_that_of_monai() -> None:
    """On a field inside a larger image, with the window's border cut off as there."""
    rng = np.random.default_rng(0)
    truth = rng.random((20, 30)).astype(np.float32)
    predicted = np.clip(truth + 0.2 * rng.standard_normal(truth.shape), 0, 1).astype(np.float32)
    field = (slice(2, 18), slice(3, 27))
    known = np.full_like(truth, np.nan)
    known[field] = truth[field]
    assert translation.ssim(predicted, known, field) == pytest.approx(
        ssim_of(predicted[field], truth[field]), abs=1e-4
    )
    assert translation.ssim(known, known, field) == pytest.approx(1)
    assert np.isnan(translation.ssim(predicted, known, (slice(0, 18), slice(3, 27))))
    assert translation.l1(predicted, known) == pytest.approx(np.abs(predicted - truth)[field].mean())
    assert np.isnan(translation.l1(predicted, np.full_like(truth, np.nan)))


def test_a_slab_is_what_its_weights_look_at() -> None:
    """All weight on one row gives that row's value; a place without truth has no gradient."""
    outputs = torch.zeros(1, 4, 2, 6, 3)
    outputs[:, 0, :, 4], outputs[:, 1, :, 1] = 0.7, 0.3  # values of two slabs
    outputs[:, 2, :, 4], outputs[:, 3, :, 1] = 100.0, 100.0  # their weights
    slabs = translation.slabs_of(outputs)
    assert slabs.shape == (1, 2, 2, 3)
    assert torch.allclose(slabs[0, 0], torch.tensor(0.7))
    assert torch.allclose(slabs[0, 1], torch.tensor(0.3))
    truth = torch.full((1, 2, 2, 3), float("nan"))
    truth[0, 0, 0, 0] = 0.2
    outputs.requires_grad_()
    loss = translation.slab_loss(outputs, truth)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5)
    assert outputs.grad is not None
    assert (outputs.grad.abs().sum(dim=3)[0, 0] > 0).tolist() == [[True, False, False], [False] * 3]
    assert not outputs.grad[0, 1].any()


class Mean(torch.nn.Module):
    """Looks at every row alike: a slab is the mean of its A-scan, its second one half of it."""

    def forward(self, tokens_BhwE: torch.Tensor, voxels_BdHW: torch.Tensor) -> torch.Tensor:
        weights = torch.zeros_like(voxels_BdHW)
        return torch.stack([voxels_BdHW, 0.5 * voxels_BdHW, weights, weights], dim=1)


def test_planes_are_put_together_as_they_lie(world: Path) -> None:
    """B-scans and A-scans of what is predicted are those of the volume."""
    volumes = volumes_of(world)
    cfg = config(world, "task.kind=translation")
    row, num_tokens = int(volumes.of(TRAIN)[0]), int(np.prod(cfg.grid))
    kept: Any = SimpleNamespace(tokens=lambda rows: np.zeros((len(rows), num_tokens, 2), np.float16))
    predicted = translation.SlabPlanes(cfg, kept, volumes, torch.device("cpu")).predict(Mean(), row)
    record = volumes.store.index.loc[row]
    voxels = (volumes.store.read(row) - record.intensity_mean) / record.intensity_std
    means = np.where(volumes.store.read(row).any(axis=1), voxels.mean(axis=1), np.nan)
    box = volumes.field(row)
    known = ~np.isnan(means)[box]
    assert predicted.shape == (2, *means.shape)
    for slab, factor in zip(predicted, (1.0, 0.5), strict=True):
        expected = np.clip(factor * means, 0, 1)[box]
        np.testing.assert_allclose(slab[box][known], expected[known], atol=5e-3)


def test_slabs_are_the_rows_own_by_name(world: Path) -> None:
    """Each is the en-face file of its own name and scan, in the order of the names."""
    volumes = volumes_of(world)
    images = zarr.open_array(volumes.store.url + "/enface", mode="r")
    assert images.attrs["slabs"] == list(volumes.names)
    rows = [int(row) for row in volumes.rows if len(volumes.flow.names(int(row))) == len(volumes.names)]
    for row in rows:
        box = (slice(None), *volumes.field(row))
        assert np.array_equal(np.rint(255 * volumes.read(row)[box]), images[row][box])
    first, second = (images[row] for row in rows[:2])
    assert not np.array_equal(first, second)


class Narrow(translation.FlowVolumes):
    """A scan that does not fill its grid."""

    def field(self, row: int) -> tuple[slice, slice]:
        return slice(0, 7), slice(3, 14)


def test_ssim_is_of_the_scanned_field_alone(world: Path) -> None:
    volumes = volumes_of(world)
    narrow = Narrow(**vars(volumes))
    row = int(volumes.of(TRAIN)[0])
    predicted = np.full_like(volumes.read(row), 0.3)
    box = narrow.field(row)
    lines = translation.measure(narrow, row, predicted, PROJECTION)
    assert [line["name"] for line in lines] == list(volumes.names)
    for line, own, truth in zip(lines, predicted, volumes.read(row), strict=True):
        assert line["ssim"] == pytest.approx(ssim_of(own[box], truth[box]), abs=1e-4)
        assert line["l1"] == pytest.approx(np.abs(own[box] - truth[box]).mean())


def test_slabs_that_a_volume_lacks_are_unknown(world: Path) -> None:
    volumes = volumes_of(world)
    stored = StoredFlow.open(volumes.store.url)
    lacking = int(stored.index.row[stored.index.left_out != ""].item())
    known = ~np.isnan(volumes.read(lacking)).all(axis=(1, 2))
    assert known.tolist() == [True, False, True, True]
    box = (slice(None), *volumes.field(lacking))
    assert not np.isnan(volumes.read(lacking)[known][box]).any()
    assert lacking in volumes_of(world, "task.names=[superficial]").of(EVALUATED)
    with pytest.raises(
        UserError, match="with the slabs deep, found 1"
    ):  # two people are evaluated, one has it
        volumes_of(world, "task.names=[deep]")


def test_what_does_not_fit_is_refused(world: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.names: expected some of superficial, .* found vitreous"):
        volumes_of(world, "task.names=[vitreous]")
    with pytest.raises(ConfigError, match=r"task\.names: expected null with task.kind classification"):
        config(world, "task.names=[deep]")
    with pytest.raises(ConfigError, match=r"task\.names: expected None as in training"):
        evaluate(translation.TRANSLATION, str(trained), [f"run.dir={tmp_path}", "task.names=[deep]"])
    words = ["--checkpoint", str(trained), "--out", str(tmp_path), "--dicom", "scan.dcm"]
    with pytest.raises(UserError, match="a head of layers with --format heightmap, found one of translation"):
        predict_command.main([*words, "--format", "heightmap"])


def test_files_get_the_slabs_of_their_volumes(world: Path, trained: Path, tmp_path: Path) -> None:
    """In the scan's own B-scans and A-scans, in the order of the file: what the decoder says of the store's
    volume.
    """
    volumes = volumes_of(world)
    head, store = translation.TRANSLATION.open_head(str(trained), StorageOptions()), volumes.store
    row = int(next(iter(store.index.index[store.index.flipped_d]), store.kept[0]))
    path = world / "tree" / store.index.path[row]
    words = ["--checkpoint", str(trained), "--out", str(tmp_path), "data.workers=0", "--dicom", str(path)]
    assert predict_command.main(words) == 0
    (line,) = [json.loads(text) for text in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert (line["task"], line["calibrated"], line["slabs"]) == ("translation", False, list(head.names))
    assert set(line) == documented("slabs")
    with np.load(tmp_path / line["arrays"]) as arrays:
        slabs = arrays["slabs"]
    record = store.index.loc[row]
    assert slabs.shape == (len(head.names), record.shape_before_d, record.shape_before_w)
    kept = KeptFeatures(head.arms[0].encoder, head.cfg, store, RUNTIME)
    predicted = translation.SlabPlanes(head.cfg, kept, volumes, RUNTIME.device).predict(
        head.arms[0].decoder, row
    )
    for name, slab, own in zip(head.names, slabs, volumes.cropped(row, predicted), strict=True):
        assert line["mean"][name] == pytest.approx(own.mean(), abs=0.02)
        assert np.nanmin(slab) >= 0
        assert np.nanmax(slab) <= 1
    assert (tmp_path / line["picture"]).read_bytes().startswith(b"\x89PNG")
    order = interleaved(path, other := tmp_path / "turned" / path.name)
    assert predict_command.main([*words[:2], "--out", str(tmp_path / "b"), *words[4:6], str(other)]) == 0
    second = json.loads((tmp_path / "b" / "predictions.jsonl").read_text())
    with np.load(tmp_path / "b" / second["arrays"]) as arrays:
        np.testing.assert_array_equal(arrays["slabs"], slabs[:, order])
