"""Labels that come with a tree, laid on the volumes of a store: geometry, kinds of file, named mismatches."""

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import nibabel as nib
import numpy as np
import pandas as pd
import pydicom
import pytest
from PIL import Image

from data_setup import prepare
from data_setup.attach.grid import nearest_voxels
from data_setup.attach.labels import VolumeJob, prepare_labels, read_jobs
from data_setup.attach.stored import OF_LABELS, StoredHeights, StoredLabels
from data_setup.export.predictions import write_height_map
from data_setup.readers.faults import OCTReadError
from data_setup.readers.labels import read_label_volume
from data_setup.store.reader import PreparedStore
from tests.support.dicom_factory import rows_down, write_opt
from tests.support.heights_factory import SMOKE
from tests.support.import_factory import (
    anatomical_affine,
    raster,
    write_folder,
    write_heidelberg,
    write_nifti,
)
from utils import storage
from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import EXIT_TRY_AGAIN, UserError

SHAPE = (6, 20, 14)
SPACING = (0.2, 0.01, 0.05)
CLASSES = {1: "grey", 2: "bright"}
NAMES = ("ILM", "BM")
LIMIT = 128


def make_voxels(seed: int) -> np.ndarray:
    """Blocks of random greys: nothing in it is the same from two sides."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 5, 7), np.uint8)
    return np.kron(coarse, np.ones((2, 4, 2), np.uint8))


def classes_of(voxels: np.ndarray) -> np.ndarray:
    return np.where(voxels >= LIMIT, 2, np.where(voxels >= 60, 1, 0)).astype(np.uint8)


def surfaces_of(voxels: np.ndarray) -> np.ndarray:
    """A surface whose row is a function of the voxels below it, and one 5 rows further down."""
    upper = voxels[:, 0].astype(np.float32) / 20
    upper[0, 0] = np.nan
    return np.stack([upper, upper + 5])


def as_npz(root: Path, name: str, labels: np.ndarray, order: str) -> str:
    np.savez(root / f"{name}.npz", labels=labels)
    return f"{name}.npz"


def as_png(root: Path, name: str, labels: np.ndarray, order: str) -> str:
    (root / name).mkdir()
    for number, plane in enumerate(labels):
        image = Image.fromarray(plane)
        if number % 2:  # a palette: the place in it is the class
            image.putpalette([(7 * value) % 256 for value in range(768)])
        image.save(root / name / f"mask_{number}_of_eye.png")
        Image.fromarray(plane).save(root / name / f"view_{number}.png")
    return f"{name}/mask_*.png"


def as_nifti(root: Path, name: str, labels: np.ndarray, order: str) -> str:
    affine = anatomical_affine(SPACING, downwards=order == "superior_to_inferior")
    write_nifti(root / f"{name}.nii.gz", labels, SPACING, affine=affine)
    return f"{name}.nii.gz"


def write_tree(root: Path, kinds: list[tuple[str, Callable[..., str]]]) -> pd.DataFrame:
    """A folder of images for each (d_order, way to write labels), with labels that are its voxels' own."""
    rows = []
    for number, (order, write) in enumerate(kinds):
        voxels = make_voxels(number)
        write_folder(root / f"eye{number}", voxels, spacing_mm=list(SPACING), d_order=order)
        np.savez(root / f"lines{number}.npz", surfaces=surfaces_of(voxels), names=np.array(NAMES))
        rows.append(
            {
                "person_id": f"p{number}",
                "filepath": f"eye{number}",
                "device": "scanner",
                "protocol": "cube",
                "label_volume": write(root, f"labels{number}", classes_of(voxels), order),
                "label_surfaces": f"lines{number}.npz",
            }
        )
    table = pd.DataFrame(rows)
    save_table(root, table)
    return table


@contextmanager
def restored(*paths: Path) -> Iterator[None]:
    """The files are afterwards what they were."""
    before = {path: path.read_bytes() for path in paths}
    try:
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def save_table(root: Path, table: pd.DataFrame) -> None:
    table.to_csv(root / "manifest.tsv", sep="\t", index=False)
    (root / "label_classes.yaml").write_text("1: grey\n2: bright\n")


def words(root: Path, *more: str, size: str = "[8,24,8]", spacing: str = "[0.2,0.01,0.05]") -> list[str]:
    return [
        *("--config", str(SMOKE), "--workers", "0", f"data.gcs_root={root}", f"data.store={root}/store"),
        f"data.manifest_path={root}/manifest.tsv",
        *(f"spatial.image_size={size}", f"spatial.target_spacing={spacing}", "spatial.patch_size=[2,8,8]"),
        *more,
    ]


def prepare_all(root: Path, *more: str) -> None:
    """The store and its labels."""
    assert prepare.main(words(root, *more)) == 0
    assert prepare.main([*words(root, *more), "--labels"]) == 0


KINDS = [
    (order, write)
    for order in ("superior_to_inferior", "inferior_to_superior")
    for write in (as_npz, as_png, as_nifti)
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of the scans' own spacing, wider than they in D and H and narrower in W."""
    root = tmp_path_factory.mktemp("labels")
    write_tree(root, KINDS)
    prepare_all(root)
    return root


def boxed(store: PreparedStore, row: int, values: np.ndarray) -> np.ndarray:
    """What lies in the acquired field, for the two axes of a map or the three of a volume."""
    axes = "dhw" if values.ndim == 3 else "dw"
    ends = [(int(store.index[f"valid_{a}0"][row]), int(store.index[f"valid_{a}1"][row])) for a in axes]
    return values[tuple(slice(*pair) for pair in ends)]


def require_classes(root: Path) -> None:
    """The labels of the only row are those of its stored voxels."""
    store, labels = PreparedStore.open(f"{root}/store"), StoredLabels.open(f"{root}/store")
    np.testing.assert_array_equal(boxed(store, 0, labels.read(0)), classes_of(boxed(store, 0, store.read(0))))


def test_stored_classes_are_those_of_the_stored_voxels(tree: Path) -> None:
    """Whatever the order of the B-scans and the kind of file; outside the field they are background."""
    store, labels = PreparedStore.open(f"{tree}/store"), StoredLabels.open(f"{tree}/store")
    assert labels.classes == CLASSES
    assert labels.index.row.tolist() == list(range(len(KINDS)))
    for row in range(len(KINDS)):
        voxels, stored = store.read(row), labels.read(row)
        expected = classes_of(boxed(store, row, voxels))
        np.testing.assert_array_equal(boxed(store, row, stored), expected)
        assert np.count_nonzero(stored) == np.count_nonzero(expected)
        assert labels.counts(row) == {value: int((expected == value).sum()) for value in CLASSES}
    assert store.index.flipped_d.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("steps", [(1, -1), (-1, 1), (-1, -1)])
def test_labels_lie_as_the_array_of_the_scan_does(tmp_path: Path, steps: tuple[int, int]) -> None:
    """A NIfTI file whose affine turns H or W when it is read: labels without an affine are turned with it."""
    voxels = make_voxels(7)
    rows, (step_h, step_w) = surfaces_of(voxels), steps
    array = voxels[:, ::step_h, ::step_w]
    write_nifti(
        tmp_path / "eye.nii.gz",
        array,
        SPACING,
        affine=anatomical_affine(SPACING) @ np.diag([step_w, step_h, 1, 1]),
    )
    lines = (rows if step_h > 0 else SHAPE[1] - 1 - rows)[..., ::step_w]
    np.savez(tmp_path / "lines.npz", surfaces=lines, names=np.array(NAMES))
    np.savez(tmp_path / "labels.npz", labels=classes_of(array))
    table = {"person_id": "p0", "filepath": "eye.nii.gz", "device": "scanner", "protocol": "cube"}
    table |= {"label_volume": "labels.npz", "label_surfaces": "lines.npz"}
    save_table(tmp_path, pd.DataFrame([table]))
    prepare_all(tmp_path)
    require_classes(tmp_path)
    store, heights = PreparedStore.open(f"{tmp_path}/store"), StoredHeights.open(f"{tmp_path}/store")
    first = int(store.index.valid_h0[0])
    expected = boxed(store, 0, store.read(0)[:, first].astype(np.float32)) / 20 + first
    stored = boxed(store, 0, heights.read(0)[0])
    np.testing.assert_allclose(stored[1:], expected[1:], atol=0.01)  # the first B-scan has an unknown height


def test_stored_surfaces_are_those_of_the_stored_voxels(tree: Path) -> None:
    store, heights = PreparedStore.open(f"{tree}/store"), StoredHeights.open(f"{tree}/store")
    for row in range(len(KINDS)):
        assert heights.names(row) == NAMES
        upper, lower = heights.read(row)
        first = int(store.index.valid_h0[row])  # of the acquired rows
        expected = boxed(store, row, store.read(row)[:, first].astype(np.float32)) / 20 + first
        is_known = ~np.isnan(boxed(store, row, upper))
        np.testing.assert_allclose(boxed(store, row, upper)[is_known], expected[is_known], atol=1e-4)
        np.testing.assert_allclose((lower - upper)[~np.isnan(upper)], 5, atol=1e-5)
        assert np.isnan(upper).sum() == np.isnan(lower).sum() >= upper.size - is_known.size


def test_the_manifests_order_is_that_of_a_file_without_directions(tmp_path: Path) -> None:
    """A NIfTI with an affine has its own direction, which goes before the order of the images."""
    voxels = make_voxels(0)
    write_folder(tmp_path / "eye0", voxels[::-1], spacing_mm=list(SPACING), d_order="inferior_to_superior")
    write_nifti(tmp_path / "labels.nii.gz", classes_of(voxels), SPACING)  # runs downwards
    row = {"person_id": "p", "filepath": "eye0", "device": "a", "protocol": "b"}
    save_table(tmp_path, pd.DataFrame([{**row, "label_volume": "labels.nii.gz"}]))
    prepare_all(tmp_path)
    require_classes(tmp_path)


ODD_FIRST = [1, 3, 5, 0, 2, 4]  # the lines of an interleaved scan, in the order of its file


def dicom_out_of_order(root: Path, voxels: np.ndarray) -> str:
    lines = [rows_down(6)[line] for line in ODD_FIRST]
    write_opt(
        root,
        voxels[ODD_FIRST],
        name="eye.dcm",
        spacing=SPACING,
        references=lines,
        edit=lambda ds: setattr(ds, "ManufacturerModelName", "Spectralis"),
    )
    return "eye.dcm"


def xml_out_of_order(root: Path, voxels: np.ndarray) -> str:
    lines = raster(6, SPACING[0], SPACING[2] * SHAPE[2])
    write_heidelberg(root / "eye.xml", voxels[ODD_FIRST], SPACING, lines=[lines[line] for line in ODD_FIRST])
    return "eye.xml"


@pytest.mark.parametrize("write_scan", [dicom_out_of_order, xml_out_of_order])
@pytest.mark.parametrize("write_labels", [as_npz, as_png, as_nifti])
def test_labels_follow_the_frames_that_a_reader_sorts(
    tmp_path: Path, write_scan: Callable[..., str], write_labels: Callable[..., str]
) -> None:
    """Those of a file's order; a NIfTI's B-scans lie side by side already."""
    voxels = make_voxels(6)
    path = write_scan(tmp_path, voxels)
    in_file = classes_of(voxels) if write_labels is as_nifti else classes_of(voxels[ODD_FIRST])
    np.savez(tmp_path / "lines.npz", surfaces=surfaces_of(voxels)[:, ODD_FIRST], names=np.array(NAMES))
    row = {"person_id": "p", "filepath": path, "device": "heidelberg_spectralis", "protocol": "cube"}
    cells = {"label_volume": write_labels(tmp_path, "labels", in_file, "superior_to_inferior")}
    save_table(tmp_path, pd.DataFrame([row | cells | {"label_surfaces": "lines.npz"}]))
    prepare_all(tmp_path)
    store = PreparedStore.open(f"{tmp_path}/store")
    stored = boxed(store, 0, store.read(0))
    np.testing.assert_array_equal(stored, voxels[..., 3:11])  # sorted, and cut to the grid
    np.testing.assert_array_equal(boxed(store, 0, StoredLabels.open(store.url).read(0)), classes_of(stored))
    upper = boxed(store, 0, StoredHeights.open(store.url).read(0)[0])
    expected = stored[:, 0].astype(np.float32) / 20 + int(store.index.valid_h0[0])
    is_known = ~np.isnan(upper)
    np.testing.assert_allclose(upper[is_known], expected[is_known], atol=1e-4)


def test_surfaces_are_a_height_map_that_segment_writes(tmp_path: Path) -> None:
    """In the order of the scan's frames; one of another scan is not taken."""
    voxels = make_voxels(6)
    path = dicom_out_of_order(tmp_path, voxels)
    scan = pydicom.dcmread(tmp_path / path)
    scan.SeriesInstanceUID = "2.25.2"
    scan.save_as(tmp_path / path)
    surfaces = surfaces_of(voxels)[:, ODD_FIRST].astype(np.float32)
    options = load_config(SMOKE, []).data.storage_options
    write_height_map(surfaces, NAMES, f"{tmp_path}/{path}", "v", f"{tmp_path}/own.dcm", options)
    other = pydicom.dcmread(tmp_path / "own.dcm")
    item = other.SharedFunctionalGroupsSequence[0].ReferencedImageSequence[0]
    item.ReferencedSOPInstanceUID = "2.25.1"
    other.save_as(tmp_path / "other.dcm")
    np.savez(tmp_path / "lines.npz", surfaces=surfaces, names=np.array(NAMES))
    row = {"person_id": "p", "filepath": path, "device": "heidelberg_spectralis", "protocol": "cube"}
    row["sop_instance_uid"] = str(scan.SOPInstanceUID)
    stored = {}
    for name in ("lines.npz", "own.dcm", "other.dcm"):
        save_table(tmp_path, pd.DataFrame([row | {"label_surfaces": name}]))
        prepare_all(tmp_path, f"data.store={tmp_path}/store_{name}")
        stored[name] = pd.read_parquet(f"{tmp_path}/store_{name}/heights.parquet").iloc[0]
    assert [line.status for line in stored.values()] == ["kept", "kept", "wrong_reference"]
    assert stored["own.dcm"].checksum == stored["lines.npz"].checksum
    assert stored["own.dcm"].surfaces == "|".join(NAMES)


def test_labels_of_a_cirrus_that_the_manifest_names(tmp_path: Path) -> None:
    """Its SliceThickness is the lateral spacing, which alone contradicts its positions."""
    voxels = make_voxels(6)
    write_opt(
        tmp_path,
        voxels,
        name="eye.dcm",
        spacing=(SPACING[2], *SPACING[1:]),
        positions=[[0.0, 0.0, -SPACING[0] * frame] for frame in range(6)],
        edit=lambda ds: setattr(ds, "ManufacturerModelName", "HD-OCT 5000"),
    )
    row = {"person_id": "p", "filepath": "eye.dcm", "device": "zeiss_cirrus", "protocol": "cube"}
    labels = {"label_volume": as_npz(tmp_path, "labels", classes_of(voxels), "superior_to_inferior")}
    save_table(tmp_path, pd.DataFrame([row | labels]))
    prepare_all(tmp_path)
    require_classes(tmp_path)


def test_nearest_is_the_voxel_under_the_centre() -> None:
    """3 voxels of 1 mm into 6 of 0.5 mm and into 1 of 3 mm: by hand."""
    record = pd.Series(
        {f"spacing_before_{a}": 1.0 for a in "dhw"}
        | {"spacing_after_d": 0.5, "spacing_after_h": 3.0, "spacing_after_w": 1.0}
    )
    values = np.zeros((3, 3, 2), np.uint8)
    values[0, 1], values[1, 1], values[2, 1] = 1, 2, 3
    values[:, 0] = 9
    labels, cut = nearest_voxels(values, record, {"image_size": [6, 1, 2]})
    assert labels[:, 0, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert cut == 0
    labels, cut = nearest_voxels(values, record, {"image_size": [2, 1, 2]})
    assert labels[:, 0, 1].tolist() == [2, 2]
    assert cut == pytest.approx(2 / 3)  # the first and the last B-scan


def save_labels(values: np.ndarray, name: str = "labels") -> Callable[[Path], None]:
    """Write other labels of the first scan."""
    return lambda root: np.savez(root / "labels0.npz", **{name: values})


def cut(root: Path) -> None:
    path = root / "labels0.npz"
    path.write_bytes(path.read_bytes()[:200])


def colour(root: Path) -> None:
    Image.new("RGB", (14, 20), (1, 2, 3)).save(root / "labels1" / "mask_0_of_eye.png")


def without_axes(root: Path) -> None:
    nib.save(nib.Nifti1Image(np.zeros(SHAPE[::-1], np.uint8), None), root / "labels2.nii.gz")


def of_jpeg(ending: str) -> Callable[[Path], None]:
    """Values between those of the classes, in JPEG or in PNG that was made of it."""

    def plant(root: Path) -> None:
        for path in sorted((root / "labels1").glob("*.png")):
            blurred = io.BytesIO()
            Image.fromarray(np.asarray(Image.open(path)) * 60).save(blurred, "JPEG")
            path.unlink()
            Image.open(blurred).save(path.with_suffix(ending))

    return plant


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a lost image": (lambda root: (root / "labels1" / "mask_3_of_eye.png").unlink(), "frame_count_mismatch"),
    "other values": (save_labels(np.full(SHAPE, 7, np.uint8)), "unlisted_class"),
    "halves": (save_labels(np.full(SHAPE, 0.5)), "not_labels"),
    "other name": (save_labels(np.zeros(SHAPE, np.uint8), "masks"), "not_labels"),
    "other size": (save_labels(np.zeros((6, 14, 20), np.uint8)), "frame_size_mismatch"),
    "other count": (save_labels(np.zeros((5, 20, 14), np.uint8)), "frame_count_mismatch"),
    "cut": (cut, "corrupt_file"),
    "gone": (lambda root: (root / "labels0.npz").unlink(), "missing_file"),
    "colour": (colour, "unsupported_pixels"),
    "JPEG": (of_jpeg(".jpg"), "not_labels"),
    "PNG of JPEG": (of_jpeg(".png"), "unlisted_class"),
    "without axes": (without_axes, "unknown_axes"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    write_tree(root, KINDS[:3])
    assert prepare.main(words(root)) == 0
    return root


@pytest.fixture(scope="module")
def config(small: Path) -> Config:
    return load_config(SMOKE, words(small)[4:])


@pytest.mark.parametrize(("plant", "reason"), FAULTS.values(), ids=FAULTS)
def test_every_mismatch_is_counted_by_its_reason(
    small: Path, config: Config, plant: Callable[[Path], None], reason: str
) -> None:
    """The files of one scan are wrong: its row has the reason, and the others are kept."""
    with restored(*small.glob("labels*/*.png"), *small.glob("labels*.*z")):
        plant(small)
        assert prepare_labels(config, 0) == 0
        report = json.loads((small / "store" / "labels_report.json").read_text())
        assert report["label_volume"]["mismatches"] == {reason: 1}
        assert report["label_volume"]["kept"] == 2
        assert len(StoredLabels.open(f"{small}/store").index) == 2
        assert report["label_surfaces"]["kept"] == 3
        assert StoredHeights.open(f"{small}/store").source == OF_LABELS


def test_only_storage_that_is_away_is_to_be_tried_again(
    small: Path, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in place of a file, or a full disk, would be tried again for ever."""
    with restored(small / "labels0.npz"):
        (small / "labels0.npz").unlink()
        (small / "labels0.npz").mkdir()
        assert prepare_labels(config, 0) == 2
        (small / "labels0.npz").rmdir()
    assert "1 labels could not be read or written, run again; first: " in capsys.readouterr().err
    monkeypatch.setattr(VolumeJob, "outcome", Mock(side_effect=storage.StorageAwayError("url", "gave up")))
    with restored(*(small / "store" / "label_rows").iterdir()):
        for path in (small / "store" / "label_rows").iterdir():
            path.unlink()
        assert prepare_labels(config, 0) == EXIT_TRY_AGAIN


def test_a_mask_that_its_disk_does_not_give_is_named(tmp_path: Path) -> None:
    (tmp_path / "mask.nii").symlink_to("/proc/self/mem")  # of which the first byte is an error of reading
    scan = f"{tmp_path}/eye.nii", "eye.nii"
    with pytest.raises(storage.StorageError, match=r"mask\.nii: reading failed: .*run again"):
        read_label_volume(f"{tmp_path}/mask.nii", "mask.nii", (2, 3, 4), scan)


def test_surfaces_that_do_not_fit_are_counted_too(small: Path, config: Config) -> None:
    path, whole = small / "lines1.npz", surfaces_of(make_voxels(1))
    wrong = {
        "frame_count_mismatch": (whole[:, :4], NAMES),
        "frame_size_mismatch": (whole[:, :, :9], NAMES),
        "not_labels": (whole, ("ILM", "ILM")),
        "outside_volume": (whole + 400, NAMES),
        "no_valid_heights": (np.full_like(whole, np.nan), NAMES),
        "surface_count": (np.repeat(whole, 6, axis=0), [f"s{n}" for n in range(12)]),
    }
    with restored(path):
        for reason, (surfaces, names) in wrong.items():
            np.savez(path, surfaces=surfaces, names=np.array(names))
            assert prepare_labels(config, 0) == 0
            report = json.loads((small / "store" / "labels_report.json").read_text())
            assert report["label_surfaces"]["mismatches"] == {reason: 1}


def test_lines_without_labels_are_counted(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv(small / "manifest.tsv", sep="\t")
    other = table.copy()
    other.loc[0, ["label_volume", "label_surfaces"]] = ""
    other.loc[1, "label_surfaces"] = ""
    unknown = {**table.iloc[2], "filepath": "nowhere"}
    other = pd.concat([other, pd.DataFrame([unknown, table.iloc[2]])])
    with restored(small / "manifest.tsv"):
        save_table(small, other)
        assert prepare.main([*words(small), "--labels"]) == 0
    report = json.loads((small / "store" / "labels_report.json").read_text())
    assert report["without_labels"] == {"no_labels": 1, "scan_not_in_store": 1, "second_labels": 1}
    assert (report["label_volume"]["kept"], report["label_surfaces"]["kept"]) == (2, 1)
    assert "label_volume: 2 volumes; not used: none" in capsys.readouterr().out


def test_labels_whose_cells_were_emptied_are_in_no_table(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one kind, of both, and back again: nothing trains on labels that the manifest does not name."""
    table = pd.read_csv(small / "manifest.tsv", sep="\t")
    assert prepare.main([*words(small), "--labels"]) == 0
    store, kept = f"{small}/store", StoredLabels.open(f"{small}/store").index
    before = [path.stat().st_mtime_ns for path in sorted((small / "store" / "label_rows").iterdir())]
    with restored(small / "manifest.tsv"):
        save_table(small, table.assign(label_volume=""))
        assert prepare.main([*words(small), "--labels"]) == 0
        assert "labels.parquet of the store: emptied, no line" in capsys.readouterr().out
        assert StoredLabels.open(store).index.empty
        assert len(StoredHeights.open(store).index) == 3
        save_table(small, table.assign(label_volume="", label_surfaces=""))
        with pytest.raises(UserError, match=r"found none \(no_labels 3\)"):
            prepare.main([*words(small), "--labels"])
        assert "heights.parquet of the store: emptied" in capsys.readouterr().out
        assert StoredHeights.open(store).index.empty
    assert prepare.main([*words(small), "--labels"]) == 0
    pd.testing.assert_frame_equal(StoredLabels.open(store).index, kept)
    after = [path.stat().st_mtime_ns for path in sorted((small / "store" / "label_rows").iterdir())]
    assert after == before  # nothing was read again


def test_another_run_does_nothing(tree: Path) -> None:
    rows = [p for folder in ("label_rows", "height_rows") for p in (tree / "store" / folder).iterdir()]
    before = {p: p.stat().st_mtime_ns for p in rows}
    assert prepare.main([*words(tree), "--labels"]) == 0
    assert {p: p.stat().st_mtime_ns for p in rows} == before
    first = rows[0].read_text()
    version = json.loads(first)["source_version"]
    rows[0].write_text(first.replace(version, version.partition(".")[0]))  # as an older program wrote it
    cfg = load_config(SMOKE, words(tree)[4:])
    store = PreparedStore.open(cfg.data.store)
    older = {**json.loads(rows[0].read_text()), "message": np.nan}  # as a table has it
    (job,) = (job for job in read_jobs(cfg, store)[0] if job.path == older["path"])
    assert job.is_done(older)  # and writes nothing
    assert rows[0].read_text() != first
    assert prepare.main([*words(tree), "--labels"]) == 0
    assert rows[0].read_text() == first
    files = [tree / "labels0.npz", tree / "labels1" / "mask_0_of_eye.png", tree / "labels2.nii.gz"]
    before = {p: p.stat().st_mtime_ns for p in rows}
    with restored(*files):
        for file in files:  # another one of the same size and time
            times = file.stat()
            file.write_bytes(file.read_bytes()[:-8] + bytes(8))
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert prepare.main([*words(tree), "--labels"]) == 0
        changed = {p.name for p, time in before.items() if p.stat().st_mtime_ns != time}
    assert changed == {f"{row:06d}.json" for row in range(3)}
    assert prepare.main([*words(tree), "--labels"]) == 0


def test_the_store_refuses_a_mix(tree: Path, tmp_path: Path) -> None:
    """Of two lists of classes, and of a device's maps with foreign surfaces."""
    classes, attributes = tree / "label_classes.yaml", tree / "store" / "heights" / "zarr.json"
    with restored(classes):
        classes.write_text("1: grey\n2: dark\n")
        with pytest.raises(UserError, match=r"expected the classes .*bright.* found .*dark"):
            prepare.main([*words(tree), "--labels"])
    with restored(attributes):
        content = attributes.read_text()
        attributes.write_text(content.replace("label_surfaces of the manifest", "height maps of the device"))
        with pytest.raises(UserError, match="one store has heights of one source"):
            prepare.main([*words(tree), "--labels"])


@pytest.mark.parametrize(
    "text",
    ["", "0: none\n", "1: a\n2: a\n", "a: 1\n", "1: [b]\n", "256: a\n", "[1", "010: a\n", "1: a\n1: b\n"],
)
def test_classes_need_a_name_each(small: Path, config: Config, text: str) -> None:
    classes = small / "label_classes.yaml"
    with restored(classes):
        classes.write_text(text)
        with pytest.raises(UserError, match=r"label_classes\.yaml: expected"):
            prepare_labels(config, 0)
        classes.unlink()
        with pytest.raises(UserError, match="found no file"):
            prepare_labels(config, 0)


def test_a_manifest_without_the_columns_is_an_error(small: Path, tmp_path: Path) -> None:
    table = pd.read_csv(small / "manifest.tsv", sep="\t").drop(columns=["label_volume", "label_surfaces"])
    save_table(tmp_path, table)
    with pytest.raises(UserError, match="expected a column label_volume or label_surfaces"):
        prepare.main([*words(small, f"data.manifest_path={tmp_path}/manifest.tsv"), "--labels"])


def test_a_nifti_is_read_by_its_own_axes(tmp_path: Path) -> None:
    """An array [H, D, W] with an affine that says so gives the same classes."""
    labels = classes_of(make_voxels(3))
    affine = anatomical_affine(SPACING)[:, [1, 2, 0, 3]]
    nib.save(nib.Nifti1Image(labels.transpose(1, 0, 2), affine), tmp_path / "a.nii.gz")
    read = read_label_volume(f"{tmp_path}/a.nii.gz", "a.nii.gz", SHAPE, (f"{tmp_path}/eye", "eye"))
    np.testing.assert_array_equal(read.values, labels)
    assert read.flip_d is False
    with pytest.raises(OCTReadError, match="frame_size_mismatch"):
        read_label_volume(f"{tmp_path}/a.nii.gz", "a.nii.gz", (6, 14, 20), (f"{tmp_path}/eye", "eye"))


def test_the_axes_of_the_scans_row_are_those_of_its_labels(tmp_path: Path) -> None:
    """A manifest's volume_yaml corrects the affine of scan and labels alike."""
    voxels = make_voxels(4)
    write_nifti(tmp_path / "eye.nii", voxels, SPACING)
    write_nifti(tmp_path / "labels.nii.gz", classes_of(voxels), SPACING)
    row = {"person_id": "p", "filepath": "eye.nii", "device": "a", "protocol": "b"}
    cells = {"volume_yaml": "{axes: [-W, -H, D]}", "label_volume": "labels.nii.gz"}
    save_table(tmp_path, pd.DataFrame([row | cells]))
    prepare_all(tmp_path)
    require_classes(tmp_path)


def test_axes_that_are_written_later_count(tmp_path: Path) -> None:
    """Labels that were laid by their affine are laid again where a YAML of theirs says other axes."""
    root = tmp_path / "set"
    voxels = make_voxels(5)
    write_folder(root / "eye0", voxels, spacing_mm=list(SPACING))
    write_nifti(root / "given" / "a.nii.gz", classes_of(voxels)[:, ::-1], SPACING)  # its affine is wrong
    row = {"person_id": "p", "filepath": "eye0", "device": "a", "protocol": "b"}
    save_table(root, pd.DataFrame([row | {"label_volume": "./given/a.nii.gz"}]))
    assert prepare.main(words(root)) == 0
    (tmp_path / "volume.yaml").write_text("axes: no axes\n")  # above the tables: nobody's
    assert prepare.main([*words(root), "--labels"]) == 0
    store = PreparedStore.open(f"{root}/store")
    expected = classes_of(boxed(store, 0, store.read(0)))
    wrong = boxed(store, 0, StoredLabels.open(f"{root}/store").read(0))
    np.testing.assert_array_equal(wrong, expected[:, ::-1])
    (root / "given" / "a.yaml").write_text("axes: [W, -H, D]\n")
    assert prepare.main([*words(root), "--labels"]) == 0
    laid = boxed(store, 0, StoredLabels.open(f"{root}/store").read(0))
    np.testing.assert_array_equal(laid, expected)
