"""What a YAML says of a file, and how stored values become grey values."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from data_setup.readers.dicom import read_volume
from data_setup.readers.faults import RejectReason
from data_setup.readers.sidecar import sidecar_url
from tests.data_setup.importers.reading import SPACING, folder_of, read, refused, reject
from tests.support.dicom_factory import speckle, write_opt
from tests.support.import_factory import (
    anatomical_affine,
    write_folder,
    write_images,
    write_nifti,
    write_tiff,
    write_yaml,
)


@pytest.mark.parametrize(
    "sidecar",
    [
        {"spacing": [1, 1, 1]},
        {"spacing_mm": [0.1, 0.1]},
        {"spacing_mm": [0.1, 0.0, 0.1]},
        {"spacing_mm": [0.1, float("nan"), 0.1]},
        {"spacing_mm": "0.1"},
        {"laterality": "both"},
        {"axes": ["D", "H", "H"]},
        {"d_order": "down"},
        {"d_order": ["unknown"]},
        {"bits_stored": 17},
        {"num_frames": True},
        {"value_range": [1, 1]},
        {"files": ""},
    ],
    ids=str,
)
def test_a_wrong_yaml_is_named(tmp_path: Path, sidecar: dict[str, Any]) -> None:
    refused(reject(folder_of(tmp_path, **sidecar)), RejectReason.BAD_SIDECAR, "volume.yaml")


@pytest.mark.parametrize(
    "text",
    [
        *("", "- 1", "a: [", "\x00", "!!python/object/apply:os.system [ls]", "{1: 2}"),
        *("bits_stored: 014", "spacing_mm: [0.1, 0:30, 0.1]", "bits_stored: 12\nbits_stored: 13"),
    ],
)
def test_a_yaml_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    folder = folder_of(tmp_path)
    (folder / "volume.yaml").write_text(text)
    assert reject(folder)[0] == RejectReason.BAD_SIDECAR


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_yaml_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The one above it would count in its place."""
    write_yaml(tmp_path / "volume.yaml", spacing_mm=list(SPACING))
    folder = folder_of(tmp_path)
    (folder / "volume.yaml").unlink()
    make(folder / "volume.yaml")
    refused(reject(folder), RejectReason.BAD_SIDECAR, "expected a file, found a pipe or a link")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("spacing_mm: [0.12, 0.0039, 0.03]", "spacing_mm twice"),
        ("laterality: R\nlaterality: L", "laterality twice"),
        ("num_frames: 014", "octal"),
        ("value_range: [0, 1:30]", "sexagesimal"),
        ("a: &a [1]\nb: &b [*a, *a]\nfiles: [*b, *b]", "alias"),
    ],
)
def test_a_yaml_that_two_readers_read_as_two_is_named(tmp_path: Path, line: str, words: str) -> None:
    folder = folder_of(tmp_path)
    with (folder / "volume.yaml").open("a") as file:
        file.write(f"{line}\n")
    refused(reject(folder), RejectReason.BAD_SIDECAR, words)


def test_what_yaml_and_manifest_say_must_agree(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, laterality="R", device="heidelberg_spectralis", protocol="own", num_frames=12
    )
    read(folder, laterality="R")
    for wrong in ({"laterality": "L"}, {"device": "other"}, {"protocol": "other"}):
        assert reject(folder, **wrong)[0] == RejectReason.HEADER_MISMATCH
    write_yaml(folder / "volume.yaml", spacing_mm=list(SPACING), num_frames=13)
    assert reject(folder)[0] == RejectReason.FRAME_COUNT_MISMATCH
    write_yaml(folder / "volume.yaml", laterality="R")
    assert reject(folder)[0] == RejectReason.MISSING_SPACING
    write_yaml(folder / "volume.yaml", spacing_mm=[1, 1, 1])
    assert reject(folder)[0] == RejectReason.IMPLAUSIBLE_SPACING
    write_folder(folder, speckle(60), spacing_mm=[0.5, 0.0039, 0.03])
    refused(reject(folder), RejectReason.IMPLAUSIBLE_SPACING, "60 x 0.5 mm = 30 mm (sidecar)")


@pytest.mark.parametrize("values", [2, 8])
def test_a_label_map_is_no_scan(tmp_path: Path, values: int) -> None:
    labels = speckle() // (256 // values)
    write_yaml(tmp_path / "volume.yaml", spacing_mm=list(SPACING), axes=["W", "H", "D"])
    paths = [write_nifti(tmp_path / "eye.nii.gz", labels, SPACING), write_tiff(tmp_path / "eye.tif", labels)]
    for path in [*paths, write_folder(tmp_path / "eye", labels, spacing_mm=list(SPACING))]:
        refused(reject(path), RejectReason.FEW_GREY_LEVELS, "label_volume")


def test_names_of_sidecars() -> None:
    assert {sidecar_url(f"gs://b/v1.2/eye{s}") for s in (".nii", ".nii.gz", ".tif", ".ome.tif", ".TIFF")} == {
        "gs://b/v1.2/eye.yaml"
    }


@pytest.mark.parametrize("bits", [12, 16])
def test_sixteen_bits_become_eight_as_in_dicom(tmp_path: Path, bits: int) -> None:
    voxels = speckle(bits=bits)
    expected = read_volume(write_opt(tmp_path, voxels, spacing=SPACING, bits_stored=bits)).voxels
    says = {} if bits == 16 else {"bits_stored": bits}
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING), axes=["W", "H", "D"], **says)
    files = [
        write_nifti(tmp_path / "eye.nii", voxels, SPACING),
        write_nifti(tmp_path / "eye.nii.gz", voxels.astype(">u2"), SPACING),
        write_tiff(tmp_path / "eye.tif", voxels),
        write_tiff(tmp_path / "eye.tiff", voxels, byteorder=">", compression="zlib", predictor=True),
        write_folder(tmp_path / "folder", voxels, spacing_mm=list(SPACING), **says),
    ]
    for path in files:
        header, volume = read(path)
        assert np.array_equal(volume, expected), path
        assert header.bits_stored == bits


def test_float_and_signed_values_need_a_range(tmp_path: Path) -> None:
    voxels = speckle()
    unit = voxels.astype(np.float32) / 255 * 3 - 1
    path = write_tiff(tmp_path / "eye.tif", unit)
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert reject(path)[0] == RejectReason.UNSUPPORTED_PIXELS
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING), value_range=[-1, 2], axes=["W", "H", "D"])
    assert np.array_equal(read(path)[1], voxels)
    assert np.array_equal(
        read(write_nifti(tmp_path / "eye.nii", unit.astype(np.float64), SPACING))[1], voxels
    )
    unit[2, 3, 4] = np.nan
    assert reject(write_tiff(path, unit))[0] == RejectReason.NOT_FINITE
    assert reject(write_nifti(tmp_path / "eye.nii", unit, SPACING))[0] == RejectReason.NOT_FINITE
    unit[2, 3, 4] = 5
    assert reject(write_tiff(path, unit))[0] == RejectReason.HEADER_MISMATCH
    write_yaml(
        tmp_path / "eye.yaml", spacing_mm=list(SPACING), value_range=[-1000, 1550], axes=["W", "H", "D"]
    )
    signed = voxels.astype(np.int16) * 10 - 1000
    assert np.array_equal(read(write_nifti(tmp_path / "eye.nii", signed, SPACING))[1], voxels)


def test_a_nifti_scale_needs_a_range(tmp_path: Path) -> None:
    image = nib.Nifti1Image(speckle().transpose(2, 1, 0), anatomical_affine(SPACING))
    image.header.set_xyzt_units("mm")
    image.header.set_slope_inter(0.5, 3)
    nib.save(image, tmp_path / "eye.nii")
    raw = bytearray((tmp_path / "eye.nii").read_bytes())
    raw[352:] = speckle().transpose(2, 1, 0).tobytes(order="F")  # nibabel stored round((value - 3) / 0.5)
    (tmp_path / "eye.nii").write_bytes(raw)
    assert nib.load(tmp_path / "eye.nii").dataobj.slope == 0.5
    assert reject(tmp_path / "eye.nii")[0] == RejectReason.UNSUPPORTED_PIXELS
    write_yaml(tmp_path / "eye.yaml", value_range=[3, 130.5])
    assert np.array_equal(read(tmp_path / "eye.nii")[1], speckle())


def test_grey_stored_as_colour_is_grey_and_colour_is_a_reject(tmp_path: Path) -> None:
    voxels = speckle()
    grey = np.repeat(voxels[..., None], 3, axis=-1)
    write_folder(tmp_path / "folder", grey, spacing_mm=list(SPACING))
    assert np.array_equal(read(tmp_path / "folder")[1], voxels)
    grey[3, 4, 5, 1] ^= 1
    write_images(tmp_path / "folder", grey)
    refused(reject(tmp_path / "folder"), RejectReason.UNSUPPORTED_PIXELS, "colour in image 4 of 6")
    write_tiff(tmp_path / "eye.tif", grey, photometric="rgb")
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert reject(tmp_path / "eye.tif")[0] == RejectReason.UNSUPPORTED_PIXELS
