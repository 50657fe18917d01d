"""Heidelberg's XML: distance, direction and order by its lines; exports with a fault are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from defusedxml import ElementTree

from data_setup.readers.faults import RejectReason
from tests.data_setup.importers.reading import SPACING, read, reject
from tests.support.dicom_factory import speckle
from tests.support.import_factory import raster, write_heidelberg


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
