"""NIfTI: axes and directions by its affine, spacing by its units; a header that says too little, or lies."""

import gzip
import tracemalloc
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from data_setup.readers.faults import RejectReason
from tests.data_setup.importers.reading import SPACING, read, refused, reject
from tests.support.dicom_factory import speckle
from tests.support.import_factory import anatomical_affine, write_nifti, write_yaml


@pytest.mark.parametrize("downwards", [True, False])
@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_nifti_affine_decides_axes_and_directions(
    tmp_path: Path, order: tuple[int, int, int], signs: tuple[int, int], downwards: bool
) -> None:
    """The same eye, stored with its axes in any order and turned round, reads the same."""
    voxels = speckle(5, 30, 20)
    array = voxels.transpose(2, 1, 0)[:: signs[0], :: signs[1], :: 1 if downwards else -1]
    affine = anatomical_affine(SPACING, downwards) @ np.diag([*signs, 1, 1])
    image = nib.Nifti1Image(np.ascontiguousarray(array.transpose(order)), affine[:, [*order, 3]])
    image.header.set_xyzt_units("mm")
    nib.save(image, tmp_path / "eye.nii")
    header, volume = read(tmp_path / "eye.nii")
    assert np.array_equal(volume, voxels)
    assert header.spacing_mm == SPACING  # as decimals, not as single precision has them
    assert (header.flip_d, header.orientation_source) == (not downwards, "nifti_affine")


def test_nifti_against_nibabel(tmp_path: Path) -> None:
    """Another library's canonical orientation: RAS to our inferior, posterior, left."""
    write_nifti(tmp_path / "eye.nii.gz", speckle(), SPACING, affine=anatomical_affine(SPACING, False))
    canonical = nib.as_closest_canonical(nib.load(tmp_path / "eye.nii.gz"))
    expected = np.asarray(canonical.dataobj)[::-1, ::-1, ::-1].transpose(2, 1, 0)
    assert np.array_equal(read(tmp_path / "eye.nii.gz")[1], expected)


def test_a_yaml_says_what_a_nifti_header_does_not(tmp_path: Path) -> None:
    path, voxels = write_nifti(tmp_path / "eye.nii", speckle()[:, ::-1], SPACING, affine=None), speckle()
    assert reject(path)[0] == RejectReason.UNKNOWN_AXES
    write_yaml(tmp_path / "eye.yaml", axes=["W", "-H", "D"])
    header, volume = read(path)
    assert np.array_equal(volume, voxels)
    assert (header.orientation_source, header.spacing_source) == ("unknown", "nifti_header")
    write_yaml(tmp_path / "eye.yaml", axes=["W", "-H", "D"], d_order="inferior_to_superior")
    header, volume = read(path)
    assert np.array_equal(volume, voxels[::-1])
    assert (header.orientation_source, header.flip_d) == ("sidecar", True)


def test_an_affine_of_another_world_is_not_believed(tmp_path: Path) -> None:
    """Axial along z, B-scans along y, as files made from OCT DICOM have it."""
    d, h, w = SPACING
    image = nib.Nifti1Image(speckle().transpose(2, 0, 1), np.diag([w, d, h, 1]))
    image.header.set_xyzt_units("mm")
    nib.save(image, tmp_path / "eye.nii")
    refused(reject(tmp_path / "eye.nii"), RejectReason.UNKNOWN_AXES, "axes in the YAML")
    write_yaml(tmp_path / "eye.yaml", axes=["W", "D", "H"])
    header, volume = read(tmp_path / "eye.nii")
    assert np.array_equal(volume, speckle())
    assert header.spacing_mm == pytest.approx(SPACING)


def test_affines_that_say_nothing(tmp_path: Path) -> None:
    turn = np.eye(4)
    turn[:2, :2] = [[0.7071, -0.7071], [0.7071, 0.7071]]
    path = write_nifti(tmp_path / "eye.nii", speckle(), SPACING, affine=turn @ anatomical_affine(SPACING))
    assert reject(path)[0] == RejectReason.UNKNOWN_AXES
    image = nib.Nifti1Image(speckle().transpose(2, 1, 0), anatomical_affine(SPACING))
    image.header.set_xyzt_units("mm")
    image.set_qform(anatomical_affine(SPACING, False), code=1)
    nib.save(image, path)
    assert "two that differ" in reject(path)[1]


def test_nifti_spacing_is_never_invented(tmp_path: Path) -> None:
    path, voxels = tmp_path / "eye.nii", speckle()
    write_nifti(path, voxels, SPACING, unit="unknown")
    refused(reject(path), RejectReason.MISSING_SPACING, "spacing_mm: [D, H, W]")
    write_yaml(tmp_path / "eye.yaml", spacing_mm=[0.2, 0.003, 0.02])
    header, _ = read(path)
    assert (header.spacing_mm, header.spacing_source) == ((0.2, 0.003, 0.02), "sidecar")
    (tmp_path / "eye.yaml").unlink()
    write_nifti(path, voxels, tuple(10 * s for s in SPACING), affine=anatomical_affine(SPACING))
    assert reject(path)[0] == RejectReason.HEADER_MISMATCH  # set_zooms rescales no sform
    write_yaml(tmp_path / "eye.yaml", axes=["W", "H", "D"])  # says which axis, and not how long a step is
    assert reject(path)[0] == RejectReason.HEADER_MISMATCH
    write_yaml(tmp_path / "eye.yaml", axes=["W", "H", "D"], spacing_mm=list(SPACING))
    assert read(path)[0].spacing_mm == SPACING
    (tmp_path / "eye.yaml").unlink()
    write_nifti(path, voxels, SPACING, unit="meter", affine=anatomical_affine(SPACING))
    assert reject(path)[0] == RejectReason.IMPLAUSIBLE_SPACING


def test_nifti_2_and_odd_shapes(tmp_path: Path) -> None:
    path = write_nifti(tmp_path / "eye.nii", speckle(), SPACING, kind=nib.Nifti2Image)
    assert np.array_equal(read(path)[1], speckle())
    image = nib.Nifti1Image(speckle().transpose(2, 1, 0)[..., None], anatomical_affine(SPACING))
    image.header.set_xyzt_units("mm")
    nib.save(image, path)
    assert np.array_equal(read(path)[1], speckle())
    nib.save(nib.Nifti1Image(np.zeros((3, 4, 5, 6), np.uint8), anatomical_affine(SPACING)), path)
    assert reject(path)[0] == RejectReason.NOT_A_VOLUME
    rgb = np.zeros((3, 4, 5), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    nib.save(nib.Nifti1Image(rgb, anatomical_affine(SPACING)), path)
    assert reject(path)[0] == RejectReason.UNSUPPORTED_PIXELS


def test_headers_that_claim_too_much_allocate_nothing(tmp_path: Path) -> None:
    path = write_nifti(tmp_path / "eye.nii", speckle(), SPACING)
    data = bytearray(path.read_bytes())
    data[42:48] = np.array([32000, 32000, 32000], "<i2").tobytes()
    path.write_bytes(data)
    assert reject(path)[0] == RejectReason.HEADER_MISMATCH
    data[42:48] = np.array([1000, 1000, 1000], "<i2").tobytes()
    path.write_bytes(data)
    assert reject(path)[0] == RejectReason.TRUNCATED_PIXEL_DATA
    (tmp_path / "eye.nii.gz").write_bytes(gzip.compress(bytes(data)))
    tracemalloc.start()
    assert reject(tmp_path / "eye.nii.gz")[0] == RejectReason.TRUNCATED_PIXEL_DATA
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_a_gzipped_file_far_larger_than_itself_is_read_no_further(tmp_path: Path) -> None:
    data = bytearray(write_nifti(tmp_path / "eye.nii", speckle(), SPACING).read_bytes()[:352])
    data[42:48] = np.array([1000, 1000, 400], "<i2").tobytes()
    with gzip.open(tmp_path / "eye.nii.gz", "wb", 1) as file:
        file.write(data)
        for _ in range(400):
            file.write(bytes(10**6))
    refused(reject(tmp_path / "eye.nii.gz"), RejectReason.HEADER_MISMATCH, "bytes of voxels, found 400000000")
