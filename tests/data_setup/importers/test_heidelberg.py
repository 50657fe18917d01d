"""Heidelberg's XML: lines, and exports as clinics have them; those with a fault are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from defusedxml import ElementTree

from data_setup.readers.dicom import read_volume
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.heidelberg import read_export
from data_setup.readers.images import ordered_images
from data_setup.readers.open_record import source_stat
from data_setup.readers.sidecar import Sidecar
from tests.data_setup.importers.reading import EYES, SPACING, read, record, refused, reject
from tests.support.dicom_factory import speckle
from tests.support.import_factory import (
    raster,
    write_heidelberg,
    write_heyex_body,
    write_heyex_series,
    write_images,
)


@pytest.mark.parametrize("angle", [0, 12])
@pytest.mark.parametrize("upwards", [False, True])
def test_heidelberg_lines_give_distance_and_direction(tmp_path: Path, angle: float, upwards: bool) -> None:
    voxels = speckle()
    lines = raster(len(voxels), SPACING[0], SPACING[2] * voxels.shape[2], angle)[:: -1 if upwards else 1]
    stored = voxels[::-1] if upwards else voxels
    header, volume = read(
        write_heidelberg(tmp_path / "eye.xml", stored, SPACING, lines=lines, laterality="L")
    )
    assert np.array_equal(volume, voxels)
    assert header.spacing_mm == pytest.approx(SPACING)
    assert (header.flip_d, header.orientation_source) == (upwards, "reference_coordinates")
    assert (header.laterality, header.device) == ("L", "heidelberg_spectralis")


def test_heidelberg_order_is_that_of_image_number(tmp_path: Path) -> None:
    path = write_heidelberg(tmp_path / "eye.xml", speckle(), SPACING)
    head, *images = path.read_text().split("<Image>")
    last, tail = images.pop().split("</Series>")
    path.write_text("<Image>".join([head, last, *reversed(images)]) + "</Series>" + tail)
    assert [e.text for e in ElementTree.parse(path).iter("ImageNumber")] == list("6543210")
    assert np.array_equal(read(path)[1], speckle())


BOMB = '<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY a "lol">' + "".join(
    f'<!ENTITY {chr(98 + i)} "{10 * f"&{chr(97 + i)};"}">' for i in range(9)
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("<HEDX>", f"{BOMB}]><HEDX>&j;"), RejectReason.CORRUPT_FILE),
        (
            ("<HEDX>", '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/hostname">]><HEDX>&e;'),
            RejectReason.CORRUPT_FILE,
        ),
        (("<HEDX>", '<!DOCTYPE x [<!ENTITY e "R">]><HEDX>'), RejectReason.CORRUPT_FILE),
        (("HEDX", "OTHER"), RejectReason.WRONG_KIND),
        (("</HEDX>", ""), RejectReason.CORRUPT_FILE),
        (("eye_003.tif", "eye_033.tif"), RejectReason.FRAME_COUNT_MISMATCH),
        (("<ScaleX>0.03</ScaleX>", ""), RejectReason.MISSING_SPACING),
        (("<ScaleX>0.03</ScaleX>", "<ScaleX>nan</ScaleX>"), RejectReason.CORRUPT_FILE),
        (("<ScaleY>0.0026</ScaleY>", "<ScaleY>1</ScaleY>"), RejectReason.IMPLAUSIBLE_SPACING),
        (("<Height>40</Height>", "<Height>41</Height>"), RejectReason.FRAME_SIZE_MISMATCH),
        (("<ImageNumber>3<", "<ImageNumber>4<"), RejectReason.FRAME_COUNT_MISMATCH),
        (("<Type>OCT</Type>", "<Type>ANGIO</Type>"), RejectReason.NOT_A_VOLUME),
    ],
    ids=lambda v: v[1][:20] if isinstance(v, tuple) else v,
)
def test_heidelberg_exports_with_a_fault_are_named(
    tmp_path: Path, change: tuple[str, str], reason: RejectReason
) -> None:
    path = write_heidelberg(tmp_path / "eye.xml", speckle(), SPACING, prolog="")
    path.write_text(path.read_text().replace(*change))
    actual, text = reject(path)
    assert actual == reason
    assert "Secret" not in text


def test_heidelberg_rasters_that_are_no_volume(tmp_path: Path) -> None:
    voxels, path = speckle(), tmp_path / "eye.xml"
    lines = raster(6, 0.12, 1.0)
    gap = [*lines[:3], *raster(7, 0.12, 1.0)[4:]]
    assert reject(write_heidelberg(path, voxels, SPACING, lines=gap))[0] == RejectReason.FRAME_COUNT_MISMATCH
    star = [raster(1, 0.12, 1.0, angle)[0] for angle in range(0, 180, 30)]
    assert reject(write_heidelberg(path, voxels, SPACING, lines=star))[0] == RejectReason.NOT_A_VOLUME
    repeated = [lines[0]] * 6
    assert reject(write_heidelberg(path, voxels, SPACING, lines=repeated))[0] == RejectReason.NOT_A_VOLUME


VENDOR = EYES.parent / "vendor"


def blocks(count: int = 6) -> np.ndarray:
    """uint8 [count, 40, 64] of 8 x 8 blocks, which JPEG keeps to a grey level or two."""
    return np.kron(speckle(count, 5, 8), np.ones((1, 8, 8), np.uint8))


def test_a_series_as_the_root_with_names_in_brackets(tmp_path: Path) -> None:
    path = write_heyex_series(tmp_path / "eye.xml", blocks(), SPACING)
    assert path.read_bytes().startswith(b"\xef\xbb\xbf<Series>")
    assert (tmp_path / "OCT R 1 [5DD30001.jpg].jpg").is_file()
    header, volume = read(path)
    assert np.abs(volume[::-1].astype(int) - blocks()).max() <= 3  # y falls: the first B-scan is the lowest
    assert (header.laterality, header.flip_d, header.orientation_source) == (
        "R",
        True,
        "reference_coordinates",
    )
    assert header.spacing_mm == pytest.approx(SPACING)
    export = read_export(str(path), None)
    assert export.patient_id is None
    assert export.etdrs == {
        "etdrs_total_volume_mm3": 8.729,
        "etdrs_c0_thickness_mm": 0.319,
        "etdrs_c0_volume_mm3": 0.251,
        "etdrs_c0_valid_percent": 100.0,
        "etdrs_s2_thickness_mm": 0.305,
        "etdrs_s2_volume_mm3": 1.617,
        "etdrs_s2_valid_percent": 65.119,
    }


def test_a_body_without_types_and_names_and_its_images_in_a_folder_below(tmp_path: Path) -> None:
    path = write_heyex_body(tmp_path / "eye.xml", speckle(12), SPACING)
    header, volume = read(path)
    assert np.array_equal(volume[::-1], speckle(12))  # ten comes after nine
    assert (header.laterality, header.shape, header.flip_d) == ("L", (12, 40, 36), True)
    assert read_export(str(path), None).patient_id == "7"
    before = source_stat(record(path))
    image = tmp_path / "volume1" / "7-Input.tif"
    image.write_bytes(image.read_bytes() + b"\n")
    assert source_stat(record(path)) != before


def remove_image(path: Path) -> None:
    next(path.parent.rglob("*Input.tif")).unlink()


def add_second_set(path: Path) -> None:
    for image in list((path.parent / "volume1").iterdir()):
        image.with_name(image.name.replace("Input", "Seg")).write_bytes(image.read_bytes())


def add_one_more(path: Path) -> None:
    image = path.parent / "volume1" / "5-Input.tif"
    image.with_name("7777-Input.tif").write_bytes(image.read_bytes())


def add_second_xml(path: Path) -> None:
    path.with_name("other.xml").write_bytes(path.read_bytes())


def cut_the_list(path: Path) -> None:
    head, _, tail = path.read_text().rpartition("<Image>")
    path.write_text(head + tail.partition("</Image>")[2])
    (path.parent / "volume1" / "6-Input.tif").unlink()


def say_both_eyes(path: Path) -> None:
    text = path.read_text().replace("<ImageNumber>3<", "<Laterality>R</Laterality><ImageNumber>3<")
    path.write_text(text)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (remove_image, RejectReason.FRAME_COUNT_MISMATCH),
        (add_second_set, RejectReason.NOT_A_VOLUME),
        (add_one_more, RejectReason.FRAME_COUNT_MISMATCH),
        (add_second_xml, RejectReason.NOT_A_VOLUME),
        (cut_the_list, RejectReason.FRAME_COUNT_MISMATCH),
        (say_both_eyes, RejectReason.HEADER_MISMATCH),
    ],
)
def test_exports_with_a_fault_are_named(tmp_path: Path, spoil: Any, reason: RejectReason) -> None:
    path = write_heyex_body(tmp_path / "eye.xml", speckle(), SPACING)
    spoil(path)
    actual, text = reject(path)
    assert actual == reason
    assert "Secret" not in text


def test_two_files_with_one_name_in_brackets_are_not_taken(tmp_path: Path) -> None:
    path = write_heyex_series(tmp_path / "eye.xml", blocks(), SPACING)
    image = tmp_path / "OCT R 3 [5DD30003.jpg].jpg"
    image.with_name("OCT R 3 copy [5DD30003.jpg].jpg").write_bytes(image.read_bytes())
    assert reject(path) == (RejectReason.FRAME_COUNT_MISMATCH, reject(path)[1])
    assert "1 missing, the first of B-scan 3" in reject(path)[1]


@pytest.mark.parametrize(
    "names",
    [
        ["9-Input.tif", "10-Input.tif", "11-Input.tif"],
        ["bscan_009_crop.png", "bscan_010_crop.png", "bscan_011_crop.png"],
        ["v2_9_of_11.bmp", "v2_10_of_11.bmp", "v2_11_of_11.bmp"],
        ["OCT R 9 [5DD37430.jpg].jpg", "OCT R 10 [1AF0.jpg].JPG", "OCT R 11 [00FF11.jpg].jpg"],
    ],
    ids=lambda names: names[0],
)
def test_the_one_number_that_differs_is_the_order(names: list[str]) -> None:
    assert ordered_images(sorted(names), Sidecar(), "folder") == names
    with pytest.raises(OCTReadError, match="B-scans 9 to 11 without a gap, found 2 numbers"):
        ordered_images([names[2], names[0]], Sidecar(), "folder")


def test_names_that_differ_in_two_numbers_have_no_order(tmp_path: Path) -> None:
    for path in write_images(tmp_path / "folder", speckle()):
        path.rename(path.with_name(f"{path.stem}_t{len(path.stem) + int(path.stem[-1]):03d}.png"))
    refused(reject(tmp_path / "folder"), RejectReason.NOT_A_VOLUME, "names that differ in one number")


@pytest.mark.skipif(not VENDOR.is_dir(), reason="the vendors' files are not part of the project")
def test_the_hand_made_export_of_another_library() -> None:
    """Its images are cut to 50 columns, and its lines are not: named, and its grid is read."""
    path = VENDOR / "heyex_xml_eyepy" / "test_dummy.xml"
    assert reject(path)[0] == RejectReason.HEADER_MISMATCH
    export = read_export(str(path), None)
    assert (len(export.scans), export.laterality, len(export.etdrs)) == (10, "R", 28)
    assert export.etdrs["etdrs_i2_valid_percent"] == 60.742


@pytest.mark.slow
@pytest.mark.skipif(not EYES.is_dir(), reason="the two real eyes are not part of the project")
def test_a_real_eye_in_the_shape_of_an_older_export(tmp_path: Path) -> None:
    source = next((EYES / "retinal_oct" / "structural_oct" / "heidelberg_spectralis").rglob("*.dcm"))
    volume = read_volume(str(source))
    path = write_heyex_body(tmp_path / "eye.xml", volume.voxels[::-1], volume.header.spacing_mm)
    header, voxels = read(path)
    assert np.array_equal(voxels, volume.voxels)
    assert header.spacing_mm == pytest.approx(volume.header.spacing_mm)
