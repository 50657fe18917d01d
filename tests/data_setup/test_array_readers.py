"""MATLAB, NumPy and MetaImage: the same voxels as other libraries write them, and damaged files."""

import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.io import savemat

from data_setup.manifest import Record
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import open_record, peek_record, source_stat
from tests.data_setup.importers import reading
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_images, write_metaimage
from utils.config.schema import StorageOptions

SPACING = (0.12, 0.0026, 0.03)
VOXELS = speckle(6, 20, 16)  # [D, H, W]


def record(path: Path, yaml: str = "", **more: Any) -> Record:
    return reading.record(path, **{"spacing_mm": SPACING, "volume_yaml": yaml or None} | more)


def read(path: Path, yaml: str = "", **more: Any) -> tuple[OCTHeader, np.ndarray]:
    row = record(path, yaml, **more)
    header, frames = open_record(row, StorageOptions())
    peeked = peek_record(row, path.stat().st_size if path.is_file() else 0, StorageOptions())
    assert peeked.shape == header.shape
    return header, np.stack(list(frames))


def reject(path: Path, yaml: str = "", **more: Any) -> OCTReadError:
    with pytest.raises(OCTReadError) as error:
        read(path, yaml, **more)
    return error.value


def write_mat73(path: Path, name: str, array: np.ndarray) -> Path:
    """As MATLAB does: a text of 512 bytes first, and the axes in reverse order."""
    with h5py.File(path, "w", userblock_size=512) as file:
        file[name] = array.T
    data = path.read_bytes()
    path.write_bytes(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(512) + data[512:])
    return path


@pytest.mark.parametrize("kind", ["v5", "v5_compressed", "v5_double", "v7.3", "npz", "npy"])
def test_arrays_open_with_their_axes(tmp_path: Path, kind: str) -> None:
    array = VOXELS.transpose(1, 2, 0)  # [H, W, D], as Duke has them
    path, yaml = tmp_path / "eye.mat", "{axes: [H, W, D], array: images}"
    if kind == "v7.3":
        write_mat73(path, "images", array)
    elif kind == "npz":
        path = tmp_path / "eye.npz"
        np.savez_compressed(path, images=array, other=array)
    elif kind == "npy":
        path, yaml = tmp_path / "eye.npy", "{axes: [H, W, D]}"
        np.save(path, array)
    else:
        values = array.astype(float) if kind == "v5_double" else array
        savemat(path, {"images": values, "other": array, "Age": 61}, do_compression=kind == "v5_compressed")
        yaml = "{axes: [H, W, D], array: images, value_range: [0, 255]}"
    header, voxels = read(path, yaml)
    np.testing.assert_array_equal(voxels, VOXELS)
    assert (header.spacing_mm, header.spacing_source) == (SPACING, "manifest")


def test_axes_may_grow_the_other_way(tmp_path: Path) -> None:
    np.save(tmp_path / "eye.npy", VOXELS[:, ::-1])
    np.testing.assert_array_equal(read(tmp_path / "eye.npy", "{axes: [D, -H, W]}")[1], VOXELS)


def test_nothing_is_guessed_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "eye.mat"
    savemat(path, {"images": VOXELS, "fluid": VOXELS, "Age": 61})
    error = reject(path, "{axes: [D, H, W]}")
    assert error.reason == RejectReason.NOT_A_VOLUME
    assert "array: NAME" in error.detail
    assert "fluid 6 x 20 x 16, images 6 x 20 x 16" in error.detail
    assert reject(path, "{array: images}").reason == RejectReason.UNKNOWN_AXES
    assert reject(path, "{array: absent, axes: [D, H, W]}").reason == RejectReason.NOT_A_VOLUME
    yaml = "{array: images, axes: [D, H, W]}"
    assert reject(path, yaml, spacing_mm=None).reason == RejectReason.MISSING_SPACING
    assert reject(path, "{arrray: images}").reason == RejectReason.BAD_SIDECAR
    savemat(path, {"images": VOXELS.astype(float)})
    assert reject(path, "{axes: [D, H, W]}").reason == RejectReason.UNSUPPORTED_PIXELS  # no value_range


@pytest.mark.parametrize("name", ["eye.mat", "eye73.mat", "eye.npz", "eye.npy", "eye.mha"])
def test_cut_files_are_rejects(tmp_path: Path, name: str) -> None:
    """At every eighth of the file; never the error of a library, never a volume."""
    path = tmp_path / name
    if name == "eye.mat":
        savemat(path, {"images": VOXELS}, do_compression=True)
    elif name == "eye73.mat":
        write_mat73(path, "images", VOXELS)
    elif name == "eye.npz":
        np.savez_compressed(path, images=VOXELS)
    elif name == "eye.npy":
        np.save(path, VOXELS)
    else:
        write_metaimage(path, VOXELS, SPACING, is_compressed=True)
    data = path.read_bytes()
    for eighth in range(8):
        path.write_bytes(data[: len(data) * eighth // 8])
        assert reject(path, "{axes: [D, H, W], spacing_mm: [0.12, 0.0026, 0.03]}").reason in (
            RejectReason.CORRUPT_FILE,
            RejectReason.TRUNCATED_PIXEL_DATA,
            RejectReason.WRONG_KIND,
            RejectReason.NOT_A_VOLUME,
        )


def test_an_npz_that_claims_too_much_is_not_read(tmp_path: Path) -> None:
    """A member's header says more than its bytes, and objects are never unpickled."""
    path = tmp_path / "eye.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as member:
        header = {"descr": "|u1", "fortran_order": False, "shape": (2**13, 2**13, 2**13)}
        np.lib.format.write_array_header_1_0(member, header)
    error = reject(path, "{axes: [D, H, W]}")
    assert (error.reason, str(2**39) in error.detail) == (RejectReason.HEADER_MISMATCH, True)
    np.savez(path, images=np.array([[[{}]]], dtype=object))
    assert reject(path, "{axes: [D, H, W]}").reason == RejectReason.NOT_A_VOLUME


def external(file: h5py.File, other: Path) -> None:
    file.create_dataset("images", VOXELS.shape, "u1", external=[(str(other), 0, VOXELS.size)])


def linked(file: h5py.File, other: Path) -> None:
    with h5py.File(other, "w") as another:
        another["images"] = VOXELS
    file["images"] = h5py.ExternalLink(str(other), "images")


def soft(file: h5py.File, other: Path) -> None:
    file["group/images"] = VOXELS
    file["images"] = h5py.SoftLink("/group/images")


def virtual(file: h5py.File, other: Path) -> None:
    with h5py.File(other, "w") as another:
        another["images"] = VOXELS
    layout = h5py.VirtualLayout(VOXELS.shape, "u1")
    layout[:] = h5py.VirtualSource(str(other), "images", VOXELS.shape)
    file.create_virtual_dataset("images", layout)


def unwritten(file: h5py.File, other: Path) -> None:
    one = file.create_dataset("images", VOXELS.shape, "u1", chunks=(1, 20, 16), compression="gzip")
    one[:5] = VOXELS[:5]


def enormous(file: h5py.File, other: Path) -> None:
    file.create_dataset("images", (2**9, 2**10, 2**10), "u1", chunks=(2**9, 2**10, 2**10))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (external, RejectReason.UNSUPPORTED_FORMAT),
        (linked, RejectReason.UNSUPPORTED_FORMAT),
        (soft, RejectReason.UNSUPPORTED_FORMAT),
        (virtual, RejectReason.UNSUPPORTED_FORMAT),
        (unwritten, RejectReason.TRUNCATED_PIXEL_DATA),
        (enormous, RejectReason.HEADER_MISMATCH),
    ],
)
def test_an_hdf5_reads_only_itself(
    tmp_path: Path, make: Callable[[h5py.File, Path], None], reason: RejectReason
) -> None:
    """What it names elsewhere is not opened, and what it lacks is no zeros."""
    other = tmp_path / "other.h5"
    other.write_bytes(VOXELS.tobytes())
    with h5py.File(tmp_path / "eye.mat", "w") as file:
        make(file, other)
    error = reject(tmp_path / "eye.mat", "{axes: [D, H, W], array: images}")
    assert error.reason == reason
    assert str(tmp_path / "other") not in error.detail


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("ending", ["mat", "npz"])
def test_an_array_stands_once(tmp_path: Path, ending: str) -> None:
    """Libraries give the last of two."""
    path, voxels = tmp_path / f"eye.{ending}", io.BytesIO()
    if ending == "mat":
        savemat(path, {"v": VOXELS})
        path.write_bytes(path.read_bytes() + path.read_bytes()[128:])
    else:
        np.save(voxels, VOXELS)
        with zipfile.ZipFile(path, "w") as file:
            for _ in range(2):
                file.writestr("v.npy", voxels.getvalue())
    assert reject(path, "{axes: [D, H, W]}").reason == RejectReason.HEADER_MISMATCH


@pytest.mark.parametrize(
    ("lines", "reason", "words"),
    [
        ("ElementSpacing = 0.03 0.0026 0.2", "header_mismatch", "each key once"),
        ("ElementSize = 0.03 0.0026 0.2", "header_mismatch", "ElementSpacing and ElementSize"),
        ("ElementByteOrderMSB = True", "header_mismatch", "BinaryDataByteOrderMSB and ElementByteOrderMSB"),
        ("ElementByteOrderMSB = 1", "header_mismatch", "BinaryDataByteOrderMSB"),
        ("ElementSize = 0.030 2.6e-3 0.12\nElementByteOrderMSB = False", None, ""),
        ("BinaryData = False", "header_mismatch", "each key once"),
        ("ElementToIntensityFunctionSlope = 2", "unsupported_format", "another MetaImage"),
        ("ElementToIntensityFunctionOffset = 0", None, ""),
    ],
)
def test_a_fact_of_a_metaimage_stands_once(tmp_path: Path, lines: str, reason: str, words: str) -> None:
    path, axes = tmp_path / "eye.mha", "{axes: [W, H, D]}"
    write_metaimage(path, VOXELS, SPACING)
    path.write_bytes(path.read_bytes().replace(b"DimSize", f"{lines}\nDimSize".encode(), 1))
    if reason is None:
        np.testing.assert_array_equal(read(path, axes, spacing_mm=None)[1], VOXELS)
        return
    error = reject(path, axes)
    assert (error.reason, words in error.detail) == (reason, True), error.detail


@pytest.mark.parametrize(
    ("old", "new"), [("BinaryData = True", "BinaryData = False"), ("NDims = 3", "NDims = 4")]
)
def test_a_metaimage_of_text_or_of_four_axes_is_a_reject(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "eye.mha"
    write_metaimage(path, VOXELS, SPACING)
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode(), 1))
    assert reject(path, "{axes: [W, H, D]}").reason == RejectReason.UNSUPPORTED_FORMAT


def write_by_itk(path: Path, values: np.ndarray, spacing: Sequence[float], *, is_compressed: bool) -> None:
    """`make soak` installs it."""
    itk = pytest.importorskip("SimpleITK")
    image = itk.GetImageFromArray(values)
    image.SetSpacing(spacing[::-1])
    itk.WriteImage(image, str(path), useCompression=is_compressed)


@pytest.mark.parametrize("write", [write_metaimage, pytest.param(write_by_itk, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["eye.mhd", "eye.mha"])
@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_metaimage_as_itk_writes_it(
    tmp_path: Path, write: Callable[..., None], name: str, is_compressed: bool, dtype: str
) -> None:
    values = VOXELS.astype(dtype) * (257 if dtype == "uint16" else 1)
    write(tmp_path / name, values, SPACING, is_compressed=is_compressed)
    header, voxels = read(tmp_path / name, "{axes: [W, H, D]}", spacing_mm=None)
    np.testing.assert_array_equal(voxels, VOXELS)
    np.testing.assert_allclose(header.spacing_mm, SPACING)
    assert header.spacing_source == "metaimage_header"
    assert reject(tmp_path / name).reason == RejectReason.UNKNOWN_AXES


def test_metaimage_of_another_folder_is_not_opened(tmp_path: Path) -> None:
    head = "NDims = 3\nDimSize = 16 20 6\nElementType = MET_UCHAR\nElementDataFile = "
    for name in ("../eye.raw", "/etc/passwd", "LIST", ".hidden", "https://host/eye.raw"):
        (tmp_path / "eye.mhd").write_text(f"{head}{name}\n")
        assert reject(tmp_path / "eye.mhd", "{axes: [W, H, D]}").reason == RejectReason.UNSUPPORTED_FORMAT
    (tmp_path / "eye.mhd").write_text(f"{head}eye.raw\n")
    assert reject(tmp_path / "eye.mhd", "{axes: [W, H, D]}").reason == RejectReason.MISSING_FILE


def test_a_changed_raw_file_or_row_is_another_source(tmp_path: Path) -> None:
    path = tmp_path / "eye.mhd"
    write_metaimage(path, VOXELS, SPACING)
    row = record(path, "{axes: [W, H, D]}")
    first = source_stat(row, StorageOptions())
    assert first == source_stat(row, StorageOptions())
    assert first != source_stat(record(path, "{axes: [-W, H, D]}"), StorageOptions())
    (tmp_path / "eye.raw").write_bytes(bytes(VOXELS.size + 1))
    assert first != source_stat(row, StorageOptions())


def test_a_share_of_the_width_is_the_bscan(tmp_path: Path) -> None:
    """OIMHS has the mask beside the image, in colour."""
    pairs = np.zeros((6, 20, 32, 3), np.uint8)
    pairs[:, :, :16] = VOXELS[..., None]
    pairs[:, :, 16:] = (255, 0, 0)
    write_images(tmp_path / "eye", pairs)
    np.testing.assert_array_equal(read(tmp_path / "eye", "{columns: [0, 0.5]}")[1], VOXELS)
    assert reject(tmp_path / "eye").reason == RejectReason.UNSUPPORTED_PIXELS
    assert reject(tmp_path / "eye", "{columns: [0.5, 0.5]}").reason == RejectReason.BAD_SIDECAR


def test_a_yaml_file_goes_before_the_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "eye.npy", VOXELS)
    (tmp_path / "eye.yaml").write_text("axes: [D, H, W]\n")
    np.testing.assert_array_equal(read(tmp_path / "eye.npy", "{axes: [W, H, D]}")[1], VOXELS)
