"""Classes of voxels and slabs of flow are learnt from tokens, kept, measured, drawn, and refuse what does not
fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import highdicom
import numpy as np
import pandas as pd
import pydicom
import pytest
import torch
import yaml
import zarr
from monai.losses import DiceCELoss
from monai.metrics import compute_dice
from PIL import Image
from scipy.ndimage import uniform_filter

from data_setup import prepare
from data_setup.attach.grid import nearest_voxels
from data_setup.attach.stored import StoredFlow, StoredHeights
from data_setup.phantom.beside import write_labels
from data_setup.readers.labels import read_label_volume
from data_setup.store.reader import PreparedStore
from finetuning import evaluate as command
from finetuning import predict as predict_command
from finetuning import train as train_command
from finetuning.cohort.cohort import EVALUATED, TRAIN
from finetuning.dense import segmentation, translation
from finetuning.dense.evaluation import evaluate
from finetuning.dense.head import ALONE, PRETRAINED, PROJECTION, RANDOM
from finetuning.dense.kind import Kind
from finetuning.dense.kinds import KINDS
from finetuning.dense.training import format_arms
from finetuning.features.kept import KeptFeatures
from tests.finetuning.test_scans import interleaved
from tests.support.finetune_factory import RUNTIME, save_checkpoint
from tests.support.heights_factory import (
    config,
    dense_overrides,
    make_flow_tree,
    make_tree,
    prepare_all,
    words,
)
from tests.support.line_fields import documented
from utils.config.schema import StorageOptions
from utils.errors import ConfigError, UserError
from utils.tables import ON_VALIDATION

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "segmentation.yaml"
CLASSES = "task.names=[CHOROID,ONL]"
FLOW_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "translation.yaml"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans whose layers are classes, and a checkpoint of an untrained model."""
    root = tmp_path_factory.mktemp("segmentation")
    make_tree(root / "tree", 14, (), (1, 2), (22, 72, 20))
    write_labels(root / "tree", "layers")
    assert prepare.main([*words(root), "--workers", "0"]) == 0
    assert prepare.main([*words(root), "--workers", "0", "--labels"]) == 0
    save_checkpoint(config(root, f"run.dir={root / 'pretrained'}"))
    return root


def overrides(world: Path, run: Path, *extra: str) -> list[str]:
    return dense_overrides(world, run, CLASSES, "optim.base_lr=0.02", *extra)


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    run = world / "runs" / "segmentation"
    assert train_command.main(["--config", str(CONFIG), *overrides(world, run)]) == 0
    return run


def volumes_of(world: Path, *extra: str) -> segmentation.ClassVolumes:
    cfg = config(world, "task.kind=segmentation", *extra)
    return segmentation.read_volumes(cfg, PreparedStore.open(cfg.data.store))


def test_a_decoder_learns_the_phantoms_layers(trained: Path, tmp_path: Path) -> None:
    """Of people that training did not see; the best epoch is what is kept, and the log has every step."""
    command.main(["--head", str(trained), f"run.dir={tmp_path}"])
    content = json.loads((tmp_path / "segmentation.json").read_text())
    assert content["overall"][PRETRAINED]["value"] > 0.6
    assert content["measured_on"] == "scan"
    assert set(content["overall"]) == {PRETRAINED, RANDOM, ALONE}
    assert set(content["against"]) == {RANDOM, ALONE}
    assert content["names"] == ["CHOROID", "ONL"]
    text = (tmp_path / "segmentation.md").read_text()
    assert "This is look 1 at these test participants" in text
    assert evaluate(segmentation.SEGMENTATION, str(trained), [f"run.dir={tmp_path}"]) + "\n" == text
    head = segmentation.SEGMENTATION.open_head(str(trained), StorageOptions())
    best = head.state["validation"][PRETRAINED]
    assert best["dice"] == max(line["dice"] for line in best["history"])
    assert head.state["classes"] == {"CHOROID": 10, "ONL": 6}
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    own, other = ([s["step"] for s in lines if key in s] for key in ("train/loss", "random_init/train/loss"))
    assert own == [1, 5, 10, 15, 20, 24]
    assert other == [24 + step for step in own]
    logged = [line["val/dice"] for line in lines if "val/dice" in line]
    assert logged == [line["dice"] for line in best["history"]]


@pytest.mark.parametrize(
    ("name", "title", "values"),
    [
        ("layers", "validation boundary error", ("12.35 um", "0.50 um")),
        ("segmentation", "validation Dice", ("12.346", "0.500")),
        ("translation", "validation L1", ("12.3457", "0.5000")),
    ],
)
def test_arms_are_printed_with_their_best_epochs(name: str, title: str, values: tuple[str, str]) -> None:
    kind, width = KINDS[name], len(title)
    best = {PRETRAINED: {"epoch": 12, kind.metric: 12.34567}, RANDOM: {"epoch": 3, kind.metric: 0.5}}
    assert format_arms(best, *kind.shown, kind.metric).splitlines() == [
        f"encoder      epoch  {title}",
        f"pretrained      12  {values[0]:>{width}}",
        f"random_init      3  {values[1]:>{width}}",
        ON_VALIDATION,
    ]


def test_lesions_are_counted_one_by_one() -> None:
    """Two labelled ones, of which one is found twice; a false one; what touches by a corner is one."""
    truth, predicted = np.zeros((2, 4, 6, 12), np.uint8)
    truth[0:2, 1:3, 1:4] = truth[2, 3, 4] = truth[1, 1, 9] = 1
    predicted[0, 1, 1] = predicted[1, 2, 3] = predicted[3, 5, 11] = predicted[0, 5, 8] = 1
    truth[0, 5, 7:10] = segmentation.IGNORED
    truth[3, 0, 0] = 2
    assert np.array(segmentation.count_lesions(predicted, truth, 2)).tolist() == [[2, 1], [1, 0], [1, 0]]


def test_the_command_draws_what_the_head_sees(world: Path, trained: Path, tmp_path: Path) -> None:
    """The mask of the scan, laid on the store's grid again, is what the decoder says of the stored volume."""
    volumes = volumes_of(world, CLASSES)
    row = int(volumes.of(EVALUATED)[0])
    path = str(world / "tree" / volumes.store.index.path[row])
    changes = ["--checkpoint", str(trained), "--files", path, "--format", "nifti", "--out", str(tmp_path)]
    assert predict_command.main(changes) == 0
    line = json.loads((tmp_path / "segments.jsonl").read_text())
    record = volumes.store.index.loc[row]
    shape = tuple(int(record[f"shape_before_{axis}"]) for axis in "dhw")
    read = read_label_volume(line["file"], record.path, shape, (record.path, record.path))
    assert line["classes"]["CHOROID"]["voxels"] == (read.values == 10).sum() > 0
    assert set(line) == documented("files", "classes")
    assert "CHOROID" in (tmp_path / "study.csv").read_text()
    assert yaml.safe_load((tmp_path / "label_classes.yaml").read_text()) == {6: "ONL", 10: "CHOROID"}
    head = segmentation.SEGMENTATION.open_head(str(trained), StorageOptions())
    pitch = volumes.store.index.spacing_before_d[volumes.of(TRAIN)]
    assert head.state["spacings_mm"]["d"] == sorted({float(f"{mm:.2g}") for mm in pitch}) != []
    arm = head.arms[0]
    kept = KeptFeatures(arm.encoder, head.cfg, volumes.store, RUNTIME)
    expected = segmentation.ClassPlanes(head.cfg, kept, volumes, RUNTIME.device).predict(arm.decoder, row)
    values = read.values[::-1] if record.flipped_d else read.values
    drawn, _ = nearest_voxels(values, record, volumes.store.attrs["geometry"])
    box = volumes.field(row)
    assert np.mean(volumes.place_of[drawn][box] == expected[box]) > 0.9
    assert predict_command.main([*changes[:4], str(tmp_path / "no.dcm"), *changes[4:]]) == 1
    first, second = (json.loads(text) for text in (tmp_path / "segments.jsonl").read_text().splitlines())
    assert (first, second["status"]) == (line, "missing_file")


def test_the_command_writes_a_segmentation_object(world: Path, trained: Path, tmp_path: Path) -> None:
    """Of one file; its frames are those of the scan, and both classes are in it."""
    store = PreparedStore.open(config(world).data.store)
    path = world / "tree" / str(store.index.path[int(volumes_of(world, CLASSES).of(EVALUATED)[0])])
    words = ["--checkpoint", str(trained), "--files", str(path), "--format", "seg", "--out", str(tmp_path)]
    assert predict_command.main(words) == 0
    (written,) = tmp_path.glob("*.dcm")
    mask = highdicom.seg.segread(written)
    assert {mask.get_segment_description(n).SegmentLabel for n in mask.segment_numbers} == {"CHOROID", "ONL"}
    scan = pydicom.dcmread(path)
    assert mask.FrameOfReferenceUID == scan.FrameOfReferenceUID
    assert mask.pixel_array.shape[1:] == scan.pixel_array.shape[1:]


def test_masks_of_an_interleaved_scan_are_in_the_order_of_its_file(
    world: Path, trained: Path, tmp_path: Path
) -> None:
    """The same scan with its frames in two orders: the same masks, in these orders; NIfTI in one."""
    volumes = volumes_of(world, CLASSES)
    path = world / "tree" / str(volumes.store.index.path[int(volumes.of(EVALUATED)[0])])
    order = interleaved(path, other := tmp_path / "turned" / path.name)
    for form in ("png", "nifti"):
        for name, file in (("a", path), ("b", other)):
            words = ["--checkpoint", str(trained), "--files", str(file), "--format", form]
            assert predict_command.main([*words, "--out", str(tmp_path / name / form)]) == 0
    shape = pydicom.dcmread(path).pixel_array.shape

    def masks(name: str, form: str) -> np.ndarray:
        line = json.loads((tmp_path / name / form / "segments.jsonl").read_text())
        return read_label_volume(line["file"], "eye", shape, (str(path), "eye.dcm")).values

    assert np.array_equal(masks("b", "png"), masks("a", "png")[order])
    assert np.array_equal(masks("b", "nifti"), masks("a", "nifti"))
    assert not np.array_equal(masks("b", "png"), masks("a", "png"))


def test_dice_is_of_a_volume_and_people_are_resampled(
    world: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The truth laid on the grid has Dice 1 there; random initialisation sees background alone and has 0."""
    head = segmentation.SEGMENTATION.open_head(str(trained), StorageOptions())
    monkeypatch.setattr(Kind, "open_head", lambda *_: head)

    def predict(self: segmentation.ClassPlanes, decoder: torch.nn.Module, row: int) -> np.ndarray:
        truth = self.volumes.read(row)
        return np.where((truth == segmentation.IGNORED) | (decoder is head.arms[1].decoder), 0, truth)

    monkeypatch.setattr(segmentation.ClassPlanes, "predict", predict)
    gone = f"data.manifest_path={tmp_path / 'gone.tsv'}"
    text = evaluate(segmentation.SEGMENTATION, str(trained), [f"run.dir={tmp_path}", gone])
    content = json.loads((tmp_path / "segmentation.json").read_text())
    assert content["overall"][PRETRAINED] == {"value": 1.0, "ci95": [1.0, 1.0], "people": 2}
    assert content["against"][RANDOM]["value"] == 1.0
    layers = content["by_name"][PRETRAINED]["ONL"]
    values = [layers[column]["value"] for column in ("error_nl", "sensitivity", "false_lesions")]
    assert values == [0.0, 1.0, 0.0]
    assert "## Share of lesions found" in text
    assert (
        f"ONL: {content['labelled_volumes']['ONL']} volumes with it, {content['lesions']['ONL']} les" in text
    )
    assert "random initialisation: cannot say, because an exact test by sign flips gives p 0.5, and 2" in text
    assert "**2 participants are too few: below 12 intervals are too narrow (some have no width)" in text
    lines = pd.read_parquet(tmp_path / "volumes.parquet")
    assert len(lines) == 3 * 2 * len(volumes_of(world, CLASSES).of(EVALUATED))
    assert (lines[lines.arm == RANDOM].predicted_mm3 == 0).all()


def test_overlap_is_that_of_monai() -> None:
    """With ignored voxels cut out by hand; a class that the labels lack has no Dice."""
    rng = np.random.default_rng(0)
    truth, predicted = (rng.integers(0, 4, (5, 6, 7)).astype(np.uint8) for _ in range(2))
    truth[truth == 3] = 0
    truth[:, :2] = segmentation.IGNORED

    def hot(some: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.stack([some[:, 2:] == n for n in range(4)])[None].astype(np.float32))

    expected = compute_dice(hot(predicted), hot(truth), include_background=False)[0].numpy()
    own = segmentation.dice(*segmentation.overlap(predicted, truth, 3))
    np.testing.assert_allclose(own, expected, rtol=1e-6)
    assert np.isnan(own[2])


def test_the_loss_is_that_of_monai_on_what_is_known() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 2, 5, 6, generator=generator)
    truth = torch.randint(0, 3, (2, 2, 5, 6), generator=generator)
    weight = torch.tensor([0.5, 1.0, 1.5])
    # MONAI's weights would weigh its Dice as well
    whole = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    plain = whole(logits, truth[:, None])
    torch.testing.assert_close(segmentation.segmentation_loss(logits, truth, torch.ones(3)), plain)
    difference = segmentation.segmentation_loss(logits, truth, weight) - plain
    weighted, even = (torch.nn.functional.cross_entropy(logits, truth, weight=w) for w in (weight, None))
    torch.testing.assert_close(difference, weighted - even)
    wider = torch.cat([logits, torch.randn(2, 3, 2, 5, 3, generator=generator)], dim=4).requires_grad_()
    ignored = torch.cat([truth, torch.full((2, 2, 5, 3), segmentation.IGNORED)], dim=3)
    loss = segmentation.segmentation_loss(wider, ignored, weight)
    torch.testing.assert_close(loss, segmentation.segmentation_loss(logits, truth, weight))
    loss.backward()
    assert wider.grad is not None
    assert bool((wider.grad[..., 6:] == 0).all())
    assert bool((wider.grad[..., :6] != 0).all())


def test_classes_are_places_inside_the_field(world: Path) -> None:
    """A class that is not asked for is background; counts are those of what is read."""
    volumes = volumes_of(world, CLASSES)
    row = int(volumes.of(TRAIN)[0])
    stored, places = volumes.labels.read(row), volumes.read(row)
    box = volumes.field(row)
    inside = np.zeros(stored.shape, bool)
    inside[box] = True
    assert set(np.unique(places[inside])) == {0, 1, 2}
    assert (places[~inside] == segmentation.IGNORED).all()
    np.testing.assert_array_equal(places[inside] == 1, stored[inside] == 10)
    np.testing.assert_array_equal(places[inside] == 2, stored[inside] == 6)
    assert volumes.counts(row).tolist() == np.bincount(places[inside], minlength=3).tolist()
    weights = segmentation.class_weights(volumes, "auto")
    totals = np.sum([volumes.counts(int(r)) for r in volumes.of(TRAIN)], axis=0)
    assert weights.argsort().tolist() == totals.argsort()[::-1].tolist()
    assert segmentation.class_weights(volumes, "none").tolist() == [1, 1, 1]


def test_what_nobody_labelled_is_ignored(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {1: "unlabelled", 2: "GCL", 10: "CHOROID"}
    monkeypatch.setattr("finetuning.dense.segmentation.StoredLabels.classes", names)
    volumes = volumes_of(world)
    assert volumes.names == ("GCL", "CHOROID")
    row = int(volumes.of(TRAIN)[0])
    stored, box = volumes.labels.read(row), volumes.field(row)
    np.testing.assert_array_equal(volumes.read(row)[box] == segmentation.IGNORED, stored[box] == 1)
    counts = np.bincount(volumes.read(row)[box].ravel(), minlength=256)
    assert volumes.counts(row).tolist() == counts[:3].tolist()


def test_surfaces_of_labels_are_read_by_layers(world: Path) -> None:
    """What task.kind=layers reads: the surface between two classes lies between their voxels."""
    heights = StoredHeights.open(str(world / "store"))
    volumes = volumes_of(world)
    assert heights.index.row.tolist() == volumes.labels.index.row.tolist()
    row = int(volumes.of(TRAIN)[0])
    upper = heights.read(row)[heights.names(row).index("ILM")]
    labels, (d, _, w) = volumes.labels.read(row), volumes.field(row)
    first = (labels > 0).argmax(axis=1)[d, w]
    assert np.nanmedian(np.abs(first - upper[d, w])) < 1


def test_classes_that_no_label_has(world: Path) -> None:
    with pytest.raises(UserError, match=r"task\.names: expected some of RNFL, .* found drusen"):
        volumes_of(world, "task.names=[drusen]")


def test_lesions_are_labels_too(tmp_path: Path) -> None:
    """The phantom's other kind: the classes are those of the truth files."""
    make_tree(tmp_path / "tree", 2, (), (1,), (22, 72, 20))
    write_labels(tmp_path / "tree", "lesions")
    folder = tmp_path / "tree" / "retinal_oct"
    classes = yaml.safe_load((folder / "label_classes.yaml").read_text())
    table = pd.read_csv(folder / "manifest.tsv", sep="\t")
    for uid, path in zip(table.sop_instance_uid, table.label_volume, strict=True):
        truth = np.load(tmp_path / "tree" / "truth" / f"{uid}.npz")
        labels = np.load(tmp_path / "tree" / path.lstrip("/"))["labels"]
        np.testing.assert_array_equal(labels, truth["lesions"])
    assert list(classes.values()) == truth["lesion_names"].tolist()[1:]


@pytest.fixture(scope="module")
def flow_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans with flow, one without a deep slab, and a checkpoint of an untrained model."""
    root = tmp_path_factory.mktemp("translation")
    make_flow_tree(root / "tree", 14, ("missing_image",), (1, 2), (14, 60, 18))
    prepare_all(root, mode="flow")
    save_checkpoint(config(root, f"run.dir={root / 'pretrained'}"))
    return root


def flow_overrides(flow_world: Path, run: Path, *extra: str) -> list[str]:
    words = ["train.max_steps=36", "augment.strength=0", "optim.base_lr=0.05"]
    return dense_overrides(flow_world, run, *words, *extra)


@pytest.fixture(scope="module")
def trained_flow(flow_world: Path) -> Path:
    run = flow_world / "runs" / "translation"
    assert train_command.main(["--config", str(FLOW_CONFIG), *flow_overrides(flow_world, run)]) == 0
    return run


def flow_volumes_of(flow_world: Path, *extra: str) -> translation.FlowVolumes:
    cfg = config(flow_world, "task.kind=translation", *extra)
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


def test_a_decoder_learns_the_phantoms_slabs(flow_world: Path, trained_flow: Path, tmp_path: Path) -> None:
    """Each slab at its own brightness, at least; every arm, slab and file is there."""
    command.main(["--head", str(trained_flow), f"run.dir={tmp_path}"])
    content = json.loads((tmp_path / "translation.json").read_text())
    assert list(content["overall"]) == [PRETRAINED, RANDOM, ALONE, PROJECTION]
    assert content["names"] == ["superficial", "deep", "outer_retina", "choriocapillaris"]
    assert set(content["against"]) == {RANDOM, ALONE, PROJECTION}
    volumes = flow_volumes_of(flow_world)
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
    assert evaluate(translation.TRANSLATION, str(trained_flow), [f"run.dir={tmp_path}"]) + "\n" == text
    with Image.open(tmp_path / "translation.png") as picture:
        assert min(picture.size) > 400
    head = translation.TRANSLATION.open_head(str(trained_flow), StorageOptions())
    best = head.state["validation"][PRETRAINED]
    assert best["l1"] == min(line["l1"] for line in best["history"])


def test_the_baseline_is_a_projection_of_structure(flow_world: Path) -> None:
    """It knows where the retina's slabs are dark and bright, and nothing of the evaluated volumes."""
    volumes = flow_volumes_of(flow_world)
    baseline = translation.StructuralProjection(volumes)
    row = int(volumes.of(EVALUATED)[0])
    predicted, truth = baseline.predict(row), volumes.read(row)
    assert predicted.shape == truth.shape
    assert np.nanmean(np.abs(predicted - truth)) < np.nanstd(truth)
    of_train = {n: getattr(volumes, n)[volumes.fold == TRAIN] for n in ("rows", "fold", "person")}
    alone = translation.StructuralProjection(replace(volumes, **of_train))
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


def test_planes_are_put_together_as_they_lie(flow_world: Path) -> None:
    """B-scans and A-scans of what is predicted are those of the volume."""
    volumes = flow_volumes_of(flow_world)
    cfg = config(flow_world, "task.kind=translation")
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


def test_slabs_are_the_rows_own_by_name(flow_world: Path) -> None:
    """Each is the en-face file of its own name and scan, in the order of the names."""
    volumes = flow_volumes_of(flow_world)
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


def test_ssim_is_of_the_scanned_field_alone(flow_world: Path) -> None:
    volumes = flow_volumes_of(flow_world)
    narrow = Narrow(**vars(volumes))
    row = int(volumes.of(TRAIN)[0])
    predicted = np.full_like(volumes.read(row), 0.3)
    box = narrow.field(row)
    lines = translation.measure(narrow, row, predicted, PROJECTION)
    assert [line["name"] for line in lines] == list(volumes.names)
    for line, own, truth in zip(lines, predicted, volumes.read(row), strict=True):
        assert line["ssim"] == pytest.approx(ssim_of(own[box], truth[box]), abs=1e-4)
        assert line["l1"] == pytest.approx(np.abs(own[box] - truth[box]).mean())


def test_slabs_that_a_volume_lacks_are_unknown(flow_world: Path) -> None:
    volumes = flow_volumes_of(flow_world)
    stored = StoredFlow.open(volumes.store.url)
    lacking = int(stored.index.row[stored.index.left_out != ""].item())
    known = ~np.isnan(volumes.read(lacking)).all(axis=(1, 2))
    assert known.tolist() == [True, False, True, True]
    box = (slice(None), *volumes.field(lacking))
    assert not np.isnan(volumes.read(lacking)[known][box]).any()
    assert lacking in flow_volumes_of(flow_world, "task.names=[superficial]").of(EVALUATED)
    with pytest.raises(UserError, match="with the slabs deep, found 1"):  # of two evaluated people
        flow_volumes_of(flow_world, "task.names=[deep]")


def test_what_does_not_fit_is_refused(flow_world: Path, trained_flow: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.names: expected some of superficial, .* found vitreous"):
        flow_volumes_of(flow_world, "task.names=[vitreous]")
    with pytest.raises(ConfigError, match=r"task\.names: expected null with task.kind classification"):
        config(flow_world, "task.names=[deep]")
    with pytest.raises(ConfigError, match=r"task\.names: expected None as in training"):
        evaluate(translation.TRANSLATION, str(trained_flow), [f"run.dir={tmp_path}", "task.names=[deep]"])
    words = ["--checkpoint", str(trained_flow), "--out", str(tmp_path), "--dicom", str(tmp_path)]
    with pytest.raises(UserError, match="a head of layers with --format heightmap, found one of translation"):
        predict_command.main([*words, "--format", "heightmap"])


def test_files_get_the_slabs_of_their_volumes(flow_world: Path, trained_flow: Path, tmp_path: Path) -> None:
    """In the scan's own B-scans and A-scans, in file order: what the decoder says of the volume."""
    volumes = flow_volumes_of(flow_world)
    head, store = translation.TRANSLATION.open_head(str(trained_flow), StorageOptions()), volumes.store
    row = int(next(iter(store.index.index[store.index.flipped_d]), store.kept[0]))
    path = flow_world / "tree" / store.index.path[row]
    words = ["--checkpoint", str(trained_flow), "--out", str(tmp_path), "data.workers=0"]
    words += ["--dicom", str(path)]
    assert predict_command.main(words) == 0
    (line,) = [json.loads(text) for text in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert (line["task"], line["calibrated"], line["slabs"]) == ("translation", False, list(head.names))
    assert set(line) == documented("slabs")
    with np.load(tmp_path / line["arrays"]) as arrays:
        slabs = arrays["slabs"]
    record = store.index.loc[row]
    assert slabs.shape == (len(head.names), record.shape_before_d, record.shape_before_w)
    arm = head.arms[0]
    kept = KeptFeatures(arm.encoder, head.cfg, store, RUNTIME)
    predicted = translation.SlabPlanes(head.cfg, kept, volumes, RUNTIME.device).predict(arm.decoder, row)
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
