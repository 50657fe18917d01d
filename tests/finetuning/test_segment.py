"""Predictions in the scan's own geometry: windows over large scans, files that read back as they were."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import highdicom
import nibabel as nib
import numpy as np
import pydicom
import pytest
import torch
from torch import Tensor, nn

from data_setup.export.predictions import write_height_map, write_nifti, write_png, write_seg
from data_setup.manifest import Record, unknown_record
from data_setup.readers.faults import OCTReadError
from data_setup.readers.heights import read_heights, read_stated_heights
from data_setup.readers.labels import read_label_volume
from data_setup.readers.open_record import open_record
from finetuning.dense import whole
from finetuning.dense.head import Arm
from finetuning.dense.whole import classes_of_scan, outputs_of, read_whole, surfaces_of_scan
from finetuning.embedding.scans import Scan, version_of
from finetuning.prediction.files import Files
from finetuning.prediction.lines import Lines
from tests.support.finetune_factory import RUNTIME
from tests.support.heights_factory import SMOKE, make_tree
from tests.support.import_factory import anatomical_affine, write_folder
from utils.config.load import load_config
from utils.config.schema import Config, StorageOptions
from utils.errors import UserError
from utils.storage import StorageError

SHAPE, SPACING = (6, 20, 14), (0.2, 0.01, 0.05)
OPTIONS = StorageOptions()
CLASSES = {2: "fluid", 5: "drusen"}


class Blank(nn.Module):
    """Tokens that say nothing."""

    def forward(self, view_B1DHW: Tensor) -> Tensor:
        return torch.zeros(len(view_B1DHW), 4 * 3 * 1, 3)


class Bright(nn.Module):
    """A class that is a function of the voxel alone."""

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        return 20 * torch.stack([-voxels_BdHW, voxels_BdHW], dim=1)


class Edge(nn.Module):
    """A surface at the voxel that is brightest in its A-scan, and one at the darkest; both are sharp."""

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        return 500 * torch.stack([voxels_BdHW, voxels_BdHW], dim=1)


def arm(decoder: nn.Module) -> Arm:
    return Arm("pretrained", Blank(), decoder)  # type: ignore[arg-type]


def config(root: Path) -> Config:
    """A grid of the scan's own spacing: 8 of its 14 A-scans, and more than its B-scans and rows."""
    changes = ["spatial.image_size=[8,24,8]", "spatial.target_spacing=[0.2,0.01,0.05]"]
    return load_config(SMOKE, [*changes, "spatial.patch_size=[2,8,8]", f"data.gcs_root={root}"])


@pytest.mark.parametrize("order", ["superior_to_inferior", "inferior_to_superior"])
def test_classes_are_those_of_the_scans_own_voxels(tmp_path: Path, order: str) -> None:
    """Beyond the grid too, and in the frame order of the files."""
    voxels = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
    write_folder(tmp_path / "eye", voxels, spacing_mm=list(SPACING), d_order=order)
    cfg = config(tmp_path)
    scan = read_whole(unknown_record(str(tmp_path / "eye")), cfg, OPTIONS)
    assert scan.volume.voxels.shape == (8, 24, 14)
    stored = voxels[:, :, 3:11]
    assert scan.mean == pytest.approx(stored.mean())
    outputs = outputs_of(arm(Bright()), scan, cfg, RUNTIME)
    np.testing.assert_array_equal(classes_of_scan(outputs, scan), voxels > stored.mean())


def test_surfaces_are_rows_of_the_scan(tmp_path: Path) -> None:
    voxels = np.random.default_rng(1).integers(0, 40, SHAPE).astype(np.uint8)
    rows = np.random.default_rng(2).integers(0, SHAPE[1], (SHAPE[0], SHAPE[2]))
    np.put_along_axis(voxels, rows[:, None], 255, axis=1)
    write_folder(tmp_path / "eye", voxels, spacing_mm=list(SPACING), d_order="inferior_to_superior")
    cfg = config(tmp_path)
    scan = read_whole(unknown_record(str(tmp_path / "eye")), cfg, OPTIONS, "dw")
    surfaces = surfaces_of_scan(outputs_of(arm(Edge()), scan, cfg, RUNTIME), scan)
    np.testing.assert_allclose(surfaces[0], rows, atol=1e-4)


def test_windows_are_of_the_grids_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voxels = np.random.default_rng(0).integers(0, 256, (6, 20, 30)).astype(np.uint8)
    write_folder(tmp_path / "eye", voxels, spacing_mm=list(SPACING), d_order="superior_to_inferior")
    cfg, sizes = config(tmp_path), []
    decode = whole.decode

    def seen(decoder: nn.Module, tokens: Tensor, window: Tensor, cfg: Config) -> Tensor:
        sizes.append(tuple(window.shape))
        return decode(decoder, tokens, window, cfg)

    monkeypatch.setattr(whole, "decode", seen)
    scan = read_whole(unknown_record(str(tmp_path / "eye")), cfg, OPTIONS)
    outputs_of(arm(Bright()), scan, cfg, RUNTIME)
    assert set(sizes) == {(1, 1, 8, 24, 8)}
    assert len(sizes) == 5  # of 30 A-scans, each 2 over the one before


@pytest.fixture(scope="module")
def scan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Cirrus scan of the phantom, whose frames run upwards."""
    root = tmp_path_factory.mktemp("scan")
    make_tree(root / "tree", 1, (), (4,), (22, 40, 16))
    return next((root / "tree" / "retinal_oct").rglob("*.dcm"))


def labels_of(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice(np.array([0, 2, 5], np.uint8), shape)


def record_of(path: Path) -> Record:
    return unknown_record(str(path))


def scan_of(path: str) -> Scan:
    return Scan(unknown_record(path), Path(path).name)


def test_nifti_and_png_read_back(scan_file: Path, tmp_path: Path) -> None:
    """With the shape and spacing of the DICOM scan, and the way its frames run."""
    header, _ = open_record(record_of(scan_file))
    labels = labels_of(header.shape)
    write_nifti(labels, header, "scan.dcm", f"{tmp_path}/a.nii.gz", OPTIONS)
    scan = (str(scan_file), "scan.dcm")
    read = read_label_volume(f"{tmp_path}/a.nii.gz", "a.nii.gz", header.shape, scan)
    np.testing.assert_array_equal(read.values, labels)
    assert read.flip_d is header.flip_d
    image = nib.load(tmp_path / "a.nii.gz")
    np.testing.assert_allclose(image.header.get_zooms(), header.spacing_mm[::-1], rtol=1e-6)
    assert nib.aff2axcodes(image.affine) == ("L", "P", "S" if header.flip_d else "I")
    write_png(labels, f"{tmp_path}/b", OPTIONS)
    np.testing.assert_array_equal(read_label_volume(f"{tmp_path}/b", "b", header.shape, scan).values, labels)


def test_a_nifti_scan_gives_its_own_axes_and_affine(tmp_path: Path) -> None:
    """An array [H, W, D] whose W grows to the right: the mask lies on the scan in any viewer."""
    voxels = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
    affine = anatomical_affine(SPACING)[:, [1, 0, 2, 3]] * [1, -1, 1, 1]
    image = nib.Nifti1Image(voxels.transpose(1, 2, 0), affine)
    image.header.set_xyzt_units("mm")
    nib.save(image, tmp_path / "eye.nii")
    header, frames = open_record(record_of(tmp_path / "eye.nii"))
    labels = np.stack(list(frames)) // 100  # in the reader's order
    write_nifti(labels, header, "eye.nii", f"{tmp_path}/mask.nii.gz", OPTIONS)
    written = nib.load(tmp_path / "mask.nii.gz")
    np.testing.assert_allclose(written.affine, affine)
    np.testing.assert_array_equal(np.asarray(written.dataobj), voxels.transpose(1, 2, 0) // 100)


@pytest.mark.parametrize("protocol", [4, 2, 0, 1], ids=["upwards", "downwards", "with positions", "nowhere"])
def test_dicom_seg_reads_back(tmp_path: Path, protocol: int) -> None:
    """By the scan's frames, or as a volume in space with its spacing; an empty class stays a segment."""
    make_tree(tmp_path / "tree", 1, (), (protocol,), (22, 80, 24))
    header, _ = open_record(record_of(next((tmp_path / "tree" / "retinal_oct").rglob("*.dcm"))))
    assert header.flip_d is (protocol != 2)
    labels = labels_of(header.shape)
    labels[3] = 0
    write_seg(labels, CLASSES | {7: "absent"}, header, "abc", f"{tmp_path}/s.dcm", OPTIONS)
    written = highdicom.seg.segread(tmp_path / "s.dcm")
    assert [d.segment_label for d in written.SegmentSequence] == ["fluid", "drusen", "absent"]
    if protocol == 0:  # the scan says where its frames lie: the masks refer to them
        frames = list(range(1, header.shape[0] + 1))
        numbers = written.get_pixels_by_source_frame(header.sop_instance_uid, frames, combine_segments=True)
    else:
        volume = written.get_volume(combine_segments=True)
        np.testing.assert_allclose(volume.spacing, header.spacing_mm, rtol=1e-5)
        upwards = volume.affine[2, 0] > 0  # along the file's frames where they run to superior
        numbers = volume.array if upwards == header.flip_d else volume.array[::-1]
    np.testing.assert_array_equal(np.array([0, 2, 5, 7])[numbers], labels)
    assert written.SOPClassUID == "1.2.840.10008.5.1.4.1.1.66.4"


@pytest.mark.parametrize(("protocol", "form"), [(4, "seg"), (0, "seg"), (0, "heightmap")])
def test_files_of_an_interleaved_scan_are_in_the_order_of_its_frames(
    tmp_path: Path, protocol: int, form: str
) -> None:
    """The same scan with its frames in two orders: each frame has the same masks and the same surfaces."""
    make_tree(tmp_path / "tree", 1, (), (protocol,), (14, 40, 16))
    path = next((tmp_path / "tree" / "retinal_oct").rglob("*.dcm"))
    other = tmp_path / "turned" / path.name
    order = interleaved(path, other)
    decoder = Edge() if form == "heightmap" else Bright()
    head = SimpleNamespace(
        arms=[arm(decoder)], names=["ILM", "BM"][: 2 - (form == "seg")], checksum="abc", state={"classes": {}}
    )
    if form == "seg":
        head.state["classes"] = {"ILM": 5}
    spatial = ["image_size=[8,24,8]", "target_spacing=[0.9,0.1,0.8]", "patch_size=[2,8,8]"]
    cfg = load_config(SMOKE, [f"spatial.{word}" for word in spatial])
    values = []
    for name, file in (("a", path), ("b", other)):
        drawn = Files(head, cfg, [scan_of(str(file))], form, str(tmp_path / name), RUNTIME)  # type: ignore[arg-type]
        (line,) = drawn.lines([str(file)])
        assert line["status"] == "kept", line
        if form == "heightmap":
            values.append(read_heights(line["file"], "zeiss_cirrus").values.swapaxes(0, 1))
            continue
        written = highdicom.seg.segread(line["file"])
        if protocol == 0:
            frames = list(range(1, 15))
            uid = pydicom.dcmread(file).SOPInstanceUID
            values.append(written.get_pixels_by_source_frame(uid, frames, combine_segments=True))
        else:  # laid in space, where the order of the file counts for nothing
            values.append(written.get_volume(combine_segments=True).array)
    expected = values[0] if form == "seg" and protocol == 4 else values[0][order]
    np.testing.assert_array_equal(values[1], expected)
    assert len(np.unique(values[0], axis=0)) >= 13  # hardly two frames are alike
    assert not np.array_equal(values[0], values[0][order])  # so the order shows, whatever the speckle


def interleaved(path: Path, other: Path) -> list[int]:
    """A copy with the even frames first, whose numbers say nothing of it; the order."""
    scan = pydicom.dcmread(path)
    pixels = scan.pixel_array
    order = [*range(0, len(pixels), 2), *range(1, len(pixels), 2)]
    groups = [scan.PerFrameFunctionalGroupsSequence[frame] for frame in order]
    scan.PixelData = pixels[order].tobytes()
    scan.PerFrameFunctionalGroupsSequence = groups
    for number, group in enumerate(groups, start=1):
        group.FrameContentSequence[0].InStackPositionNumber = number
    other.parent.mkdir()
    scan.save_as(other)
    return order


def without_groups(scan: pydicom.FileDataset) -> None:
    measures = scan.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    scan.PixelSpacing, scan.SliceThickness = measures.PixelSpacing, measures.SliceThickness
    scan.SpacingBetweenSlices = measures.SliceThickness
    del scan.SharedFunctionalGroupsSequence, scan.PerFrameFunctionalGroupsSequence


def orientation_by_frame(scan: pydicom.FileDataset) -> None:
    shared = scan.SharedFunctionalGroupsSequence[0]
    for group in scan.PerFrameFunctionalGroupsSequence:
        group.PlaneOrientationSequence = shared.PlaneOrientationSequence
    del shared.PlaneOrientationSequence


def without_orientation(scan: pydicom.FileDataset) -> None:
    del scan.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence


def without_a_patient(scan: pydicom.FileDataset) -> None:
    for keyword in PLANTED:
        delattr(scan, keyword)


PLANTED = {"PatientName": "Secret^Name", "PatientID": "ID-77", "PatientBirthDate": "19500101"}
PLANTED |= {"StudyDate": "20240102", "AccessionNumber": "ACC77", "ReferringPhysicianName": "Doctor^Known"}
PLANTED |= {"PatientComments": "lives alone", "InstitutionName": "Hospital", "StudyDescription": "of him"}
UNWANTED = ("PatientComments", "InstitutionName", "StudyDescription")  # no file needs them


@pytest.mark.parametrize("protocol", [0, 2])
@pytest.mark.parametrize(
    "edit",
    [without_groups, orientation_by_frame, without_orientation, without_a_patient, lambda scan: None],
)
def test_files_about_any_scan_name_nobody_unless_asked(tmp_path: Path, edit: Any, protocol: int) -> None:
    """Whatever of its geometry or patient a scan lacks; each class is a segment, whatever its name."""
    make_tree(tmp_path / "tree", 1, (), (protocol,), (14, 80, 24))
    scan = pydicom.dcmread(next((tmp_path / "tree" / "retinal_oct").rglob("*.dcm")))
    scan.update(PLANTED)
    edit(scan)
    url = str(tmp_path / "scan.dcm")
    scan.save_as(url)
    header, _ = open_record(record_of(Path(url)))
    labels, names = labels_of(header.shape), {2: "fluid\\sub \u6db2", 5: "d" * 99}
    heights = np.ones((1, header.shape[0], header.shape[2]), np.float32)
    for anonymous in (True, False):
        write_seg(labels, names, header, "abc", f"{tmp_path}/s.dcm", OPTIONS, anonymous)
        write_height_map(heights, ["a\\b \u6db2"], url, "abc", f"{tmp_path}/h.dcm", OPTIONS, anonymous)
        for name in ("s.dcm", "h.dcm"):
            written = pydicom.dcmread(tmp_path / name)
            planted = {key for key, value in PLANTED.items() if value in str(written)}
            asked = {key for key in PLANTED if key in scan and key not in UNWANTED}
            assert planted == (set() if anonymous else asked)
            assert (scan.StudyInstanceUID in str(written)) is not anonymous
            assert header.sop_instance_uid in str(written)
            assert written.PatientIdentityRemoved == ("YES" if anonymous else "NO")
    segments = highdicom.seg.segread(tmp_path / "s.dcm")
    assert [d.segment_label for d in segments.SegmentSequence] == ["fluid/sub \u6db2", "d" * 64]
    frames = list(range(1, header.shape[0] + 1))
    numbers = segments.get_pixels_by_source_frame(header.sop_instance_uid, frames, combine_segments=True)
    np.testing.assert_array_equal(np.array([0, 2, 5])[numbers], labels)


@pytest.mark.parametrize("keyword", ["FrameOfReferenceUID", "SeriesInstanceUID", "StudyInstanceUID"])
def test_a_scan_that_a_file_cannot_refer_to_has_a_reason(
    scan_file: Path, tmp_path: Path, keyword: str
) -> None:
    scan = pydicom.dcmread(scan_file)
    delattr(scan, keyword)
    url, out = str(tmp_path / "scan.dcm"), f"{tmp_path}/s.dcm"
    scan.save_as(url)
    header, _ = open_record(record_of(scan_file))
    labels = labels_of(header.shape)
    with pytest.raises(OCTReadError, match=f"expected a {keyword} for a DICOM SEG"):
        write_seg(labels, CLASSES, replace(header, url=url), "abc", out, OPTIONS)
    if keyword == "SeriesInstanceUID":
        with pytest.raises(OCTReadError, match="expected a SeriesInstanceUID for a Height Map"):
            write_height_map(labels.astype(np.float32), ["a"] * len(labels), url, "abc", out, OPTIONS)


def test_two_scans_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    head: Any = SimpleNamespace(state={"classes": {}})

    def files(*paths: str) -> Files:
        return Files(head, config(tmp_path), [scan_of(p) for p in paths], "png", str(tmp_path), RUNTIME)

    files("/a/eye.dcm", "/b/eye_2.dcm")
    with pytest.raises(UserError, match=r"found /a/eye\.dcm and /b/eye\.dcm; draw them into two"):
        files("/a/eye.dcm", "/b/eye.dcm")


def test_height_maps_read_back(scan_file: Path, tmp_path: Path) -> None:
    header, _ = open_record(record_of(scan_file))
    d, h, w = header.shape
    rng = np.random.default_rng(0)
    upper = rng.uniform(1, h / 2, (d, w)).astype(np.float32)
    heights = np.stack([upper, upper + rng.uniform(1, h / 3, (d, w)).astype(np.float32)])
    heights[:, 2, 3] = np.nan
    write_height_map(heights, ("ILM", "RPE"), str(scan_file), "abc", f"{tmp_path}/h.dcm", OPTIONS)
    read = read_heights(f"{tmp_path}/h.dcm", "zeiss_cirrus")
    np.testing.assert_allclose(read.values, heights, atol=1e-6, equal_nan=True)
    assert (read.names, read.notes) == (("ILM", "RPE"), ())
    assert read.references == {header.sop_instance_uid}


def test_surfaces_of_many_devices_read_back(scan_file: Path, tmp_path: Path) -> None:
    """A head of all devices has more surfaces than this one's maps, two of them at one depth."""
    header, _ = open_record(record_of(scan_file))
    d, _, w = header.shape
    names = ("ILM", "RNFL", "RNFL/GCL", *(f"my surface {n}" for n in range(10)), "CSI")
    heights = np.random.default_rng(0).uniform(-3, 900, (len(names), d, w)).astype(np.float32)
    heights[4], heights[5, 1] = np.nan, np.nan
    write_height_map(heights, names, str(scan_file), "abc", f"{tmp_path}/h.dcm", OPTIONS)
    read = read_stated_heights(f"{tmp_path}/h.dcm", OPTIONS)
    np.testing.assert_array_equal(read.values, heights)
    assert (read.names, read.references) == (names, {header.sop_instance_uid})
    file = pydicom.dcmread(tmp_path / "h.dcm")
    del file.FloatPixelPaddingValue
    file.save_as(tmp_path / "unsaid.dcm")
    with pytest.raises(OCTReadError, match="FloatPixelPaddingValue"):
        read_stated_heights(f"{tmp_path}/unsaid.dcm", OPTIONS)


def test_lines_of_a_killed_command_are_gone_on_with(tmp_path: Path) -> None:
    """A line is there before the next scan; a changed file or format or precision is drawn again."""
    scans = [tmp_path / f"{name}.dcm" for name in "abc"]
    for scan in scans:
        scan.write_bytes(b"1")
    out = str(tmp_path / "out" / "segments.jsonl")

    def start(form: str = "png", **changes: Any) -> Lines:
        common = {"head_sha256": "1" * 64, "precision": "float32", "format": form, "schema_version": 2}
        versions = {str(scan): version_of(record_of(scan), OPTIONS) for scan in scans}
        return Lines(out, versions, common | changes, lambda line: Path(line["file"]).exists(), OPTIONS)

    def done(form: str = "png", **changes: Any) -> set[str]:
        lines = start(form, **changes)
        lines.close()
        return set(lines.done)

    lines = start()
    for scan in scans[:2]:
        lines.add({"path": str(scan), "status": "kept", "file": str(scan)})
    file = tmp_path / "out" / "segments.jsonl"
    written = file.read_text()
    assert len(written.splitlines()) == 2  # nothing is closed
    lines.close()
    file.write_text(written + '{"path": "half')
    assert done() == {str(scan) for scan in scans[:2]}
    assert file.read_text() == written
    assert done("nifti") == set()
    assert done(precision="bfloat16") == done(schema_version=3) == set()
    file.write_text(written.replace(', "schema_version": 2', ""))  # as the first lines were
    assert done() == {str(scan) for scan in scans[:2]}
    file.write_text(written)
    scans[0].write_bytes(b"another")
    assert done() == {str(scans[1])}
    with pytest.raises(UserError, match=r"expected lines of the head with sha256 2222.*give another --out"):
        start(head_sha256="2" * 64)
    assert len(file.read_text().splitlines()) == 1
    lines = start()
    size = file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))  # stands for a full disk
    try:
        with pytest.raises(StorageError, match="File too large"):
            lines.add({"path": str(scans[2]), "status": "kept", "file": str(scans[2])})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.close()
    assert file.stat().st_size == size  # no half line
    file.write_text("mine\n")
    with pytest.raises(UserError, match=r"expected lines of finetuning\.predict, found another one"):
        start()
