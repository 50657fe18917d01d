"""data_setup/readers/open_record.py: every kind gives the same volume into the same store, or a named
reject.
"""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from defusedxml import ElementTree
from PIL import Image
from pydicom.dataset import FileDataset

from data_setup import prepare
from data_setup.manifest import Record, read_records
from data_setup.readers.dicom import read_volume
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import identify, open_record, source_stat
from data_setup.readers.sidecar import sidecar_url
from data_setup.store.reader import PreparedStore
from tests.support.dicom_factory import TRITON, rows_down, speckle, write_opt
from tests.support.import_factory import (
    anatomical_affine,
    raster,
    write_folder,
    write_heidelberg,
    write_imagej,
    write_images,
    write_nifti,
    write_ome,
    write_tiff,
    write_yaml,
)
from tests.support.pipeline_factory import ROOT, SMOKE
from utils import storage
from utils.config.load import load_config
from utils.errors import UserError

SPACING = (0.12, 0.0026, 0.03)
DOWN = "superior_to_inferior"
EYES = ROOT.parent / "shared" / "data" / "real_oct"
GRID = ["spatial.target_spacing=[0.1,0.01,0.1]", "spatial.image_size=[8,16,16]", "spatial.patch_size=[2,4,4]"]


def record(url: Path | str, **changes: Any) -> Record:
    plain = Record(
        person_id="1",
        device="heidelberg_spectralis",
        protocol="own",
        region="Macula",
        laterality="unknown",
        path=Path(url).name,
        url=str(url),
        sop_instance_uid="",
        shape=None,
        split="train",
        study_group=None,
        clinical_site=None,
        age=None,
    )
    return replace(plain, **changes)


def read(url: Path | str, **changes: Any) -> tuple[Any, np.ndarray]:
    """(header, voxels superior -> inferior) as prepare takes them."""
    header, frames = open_record(record(url, **changes))
    voxels = np.stack(list(frames))
    assert voxels.dtype == np.uint8
    return header, voxels[::-1] if header.flip_d else voxels


def reject(path: Path | str, **changes: Any) -> tuple[RejectReason, str]:
    with pytest.raises(OCTReadError) as caught:
        read(path, **changes)
    return caught.value.reason, str(caught.value)


def write_every_kind(
    root: Path, voxels: np.ndarray, spacing: tuple[float, float, float], side: str
) -> list[str]:
    """The volume as all kinds, B-scans from superior; returns their paths below the root."""
    says = {"d_order": DOWN, "laterality": side}
    down = anatomical_affine(spacing)
    write_nifti(root / "n" / "eye.nii", voxels, spacing, affine=down)
    write_yaml(root / "n" / "eye.yaml", laterality=side)
    micron = np.asarray(spacing) * 1000
    write_nifti(root / "z" / "eye.nii.gz", voxels, tuple(micron), unit="micron", affine=down * 1000)
    write_yaml(root / "z" / "eye.yaml", laterality=side)
    write_ome(root / "o" / "eye.ome.tif", voxels, spacing)
    write_yaml(root / "o" / "eye.yaml", **says)
    write_imagej(root / "j" / "eye.tif", voxels, spacing)
    write_yaml(root / "j" / "eye.yaml", **says)
    write_tiff(root / "t" / "eye.tiff", voxels, compression="zlib")
    write_yaml(root / "t" / "eye.yaml", spacing_mm=list(spacing), num_frames=len(voxels), **says)
    write_folder(root / "images" / "eye", voxels, spacing_mm=list(spacing), **says)
    write_heidelberg(root / "xml" / "eye.xml", voxels, spacing, laterality=side)
    return [
        "n/eye.nii",
        "z/eye.nii.gz",
        "o/eye.ome.tif",
        "j/eye.tif",
        "t/eye.tiff",
        "images/eye/",
        "xml/eye.xml",
    ]


def write_lists(root: Path, paths: list[str], device: str, protocol: str, side: str = "") -> None:
    """A manifest and participants of two columns more than needed."""
    rows = [f"1\t/{path}\t{device}\t{protocol}\t{side}" for path in paths]
    header = "person_id\tfilepath\tdevice\tprotocol\tlaterality"
    (root / "manifest.tsv").write_text("\n".join([header, *rows]) + "\n")
    (root / "participants.tsv").write_text("person_id\tstudy_group\tclinical_site\tage\n1\t\t\t\n2\t\t\t\n")


def run_prepare(root: Path, store: Path, *more: str) -> PreparedStore:
    arguments = ["--config", str(SMOKE), "--workers", "0", f"data.gcs_root={root}", f"data.store={store}"]
    arguments += [f"data.manifest_path={root}/manifest.tsv", *more]
    assert prepare.main(arguments) == 0
    return PreparedStore.open(str(store))


def check_equal_rows(store: PreparedStore, reference: int) -> None:
    """Every row holds what the row made from DICOM holds; what may differ says where things come from."""
    index = store.index
    assert (index.status == "kept").all(), index[["path", "status", "message"]].to_string()
    exact = [
        "checksum",
        "intensity_mean",
        "intensity_std",
        "valid_fraction",
        "flipped_d",
        "bits_stored",
        "laterality",
    ]
    exact += [c for c in index.columns if c.startswith(("valid_", "shape_before"))]
    for column in exact:
        assert index[column].nunique() == 1, index[["path", column]].to_string()
    volume = store.read(reference)
    for row in store.kept:
        assert np.array_equal(store.read(row), volume)
        for axis in "dhw":
            for when in ("before", "after"):
                column = f"spacing_{when}_{axis}"
                assert index.loc[row, column] == pytest.approx(index.loc[reference, column], rel=1e-7)
    assert set(index.orientation_source) == {"reference_coordinates", "nifti_affine", "sidecar"}


def test_every_kind_gives_the_same_row_as_dicom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    voxels, root = speckle(), tmp_path / "tree"
    dicom = write_opt(root / "dicom", voxels, spacing=SPACING, references=rows_down(len(voxels)))
    paths = [str(Path(dicom).relative_to(root)), *write_every_kind(root, voxels, SPACING, "R")]
    write_lists(root, paths, "topcon_triton", "own_raster")
    # The Heidelberg export says which device made it; the row that says another one is a reject.
    lines = (
        (root / "manifest.tsv")
        .read_text()
        .replace("xml/eye.xml\ttopcon_triton", "xml/eye.xml\theidelberg_spectralis")
    )
    (root / "manifest.tsv").write_text(lines)
    store = run_prepare(root, tmp_path / "store", *GRID)
    by_path = dict(zip(store.index.path, store.index.row, strict=True))
    assert len(by_path) == 8
    check_equal_rows(store, by_path[paths[0]])
    sources = store.index.set_index("path").spacing_source.to_dict()
    assert [sources[p.strip("/")] for p in paths] == [
        "shared", "nifti_header", "nifti_header", "ome_xml", "imagej", "sidecar",
        "sidecar", "frame_positions",
    ]  # fmt: skip
    assert "0 of the manifest missing" in capsys.readouterr().out
    again = run_prepare(root, tmp_path / "store", *GRID)
    assert "0 prepared, 8 reused" in capsys.readouterr().out
    assert again.index.equals(store.index)


@pytest.mark.slow
@pytest.mark.skipif(not EYES.is_dir(), reason="the two real eyes are not part of the project")
def test_a_real_eye_gives_the_same_row_from_every_kind(tmp_path: Path) -> None:
    source = next((EYES / "retinal_oct" / "structural_oct" / "topcon_triton").rglob("*.dcm"))
    volume, root = read_volume(str(source)), tmp_path / "tree"
    paths = write_every_kind(root, volume.voxels, volume.header.spacing_mm, volume.header.laterality or "")
    name = TRITON.replace("_r_", "_l_")

    def edit(ds: FileDataset) -> None:
        ds.ImageLaterality, ds.ManufacturerModelName = "L", "Spectralis"

    write_opt(
        root / "dicom", volume.voxels, name=name, spacing=volume.header.spacing_mm,
        references=rows_down(len(volume.voxels)), edit=edit,
    )  # fmt: skip
    paths.append(f"dicom/{name}")
    write_lists(root, paths, "heidelberg_spectralis", "own_raster")
    store = run_prepare(root, tmp_path / "store")
    check_equal_rows(store, int(store.index.index[store.index.path == paths[-1]][0]))
    direct = tmp_path / "direct"
    run = ["--config", str(SMOKE), "--workers", "0", f"data.gcs_root={EYES}", f"data.store={direct}"]
    assert prepare.main(run) == 0
    eyes = PreparedStore.open(str(direct)).index
    assert store.index.checksum[0] in set(eyes.checksum)


# Geometry


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
    reason, text = reject(tmp_path / "eye.nii")
    assert reason == RejectReason.UNKNOWN_AXES
    assert "axes in the YAML" in text
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
    reason, text = reject(path)
    assert reason == RejectReason.MISSING_SPACING
    assert "spacing_mm: [D, H, W]" in text
    write_yaml(tmp_path / "eye.yaml", spacing_mm=[0.2, 0.003, 0.02])
    header, _ = read(path)
    assert (header.spacing_mm, header.spacing_source) == ((0.2, 0.003, 0.02), "sidecar")
    (tmp_path / "eye.yaml").unlink()
    write_nifti(path, voxels, tuple(10 * s for s in SPACING), affine=anatomical_affine(SPACING))
    assert reject(path)[0] == RejectReason.HEADER_MISMATCH  # set_zooms rescales no sform
    write_nifti(path, voxels, SPACING, unit="meter", affine=anatomical_affine(SPACING))
    assert reject(path)[0] == RejectReason.IMPLAUSIBLE_SPACING


@pytest.mark.parametrize("write", [write_ome, write_imagej])
def test_tiff_metadata_give_the_spacing(tmp_path: Path, write: Callable[..., Path]) -> None:
    header, volume = read(write(tmp_path / "eye.ome.tif", speckle(), SPACING))
    assert np.array_equal(volume, speckle())
    assert header.spacing_mm == pytest.approx(SPACING, rel=1e-6)
    assert header.orientation_source == "unknown"


def test_tiff_metadata_count_the_pages(tmp_path: Path) -> None:
    for write, written, other in (
        (write_ome, b'SizeZ="6"', b'SizeZ="7"'),
        (write_imagej, b"images=6", b"images=7"),
    ):
        path = write(tmp_path / "eye.tif", speckle(), SPACING)
        path.write_bytes(path.read_bytes().replace(written, other))
        assert reject(path)[0] == RejectReason.FRAME_COUNT_MISMATCH


TIFFS: dict[str, dict[str, Any]] = {
    "big": {"bigtiff": True},
    "motorola": {"byteorder": ">"},
    "tiles": {"tile": (16, 16)},
    "deflate": {"compression": "zlib", "predictor": True},
    "white is zero": {"photometric": "miniswhite"},
}


@pytest.mark.parametrize("name", TIFFS)
def test_tiff_as_programs_write_it(tmp_path: Path, name: str) -> None:
    voxels = speckle()
    stored = 255 - voxels if "white" in name else voxels
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert np.array_equal(read(write_tiff(tmp_path / "eye.tif", stored, **TIFFS[name]))[1], voxels)


def test_a_tiff_that_pillow_cannot_open_is_named(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle(), bigtiff=True, byteorder=">")
    reason, text = reject(path)
    assert reason == RejectReason.UNSUPPORTED_FORMAT
    assert "BigTIFF with big-endian numbers" in text


def test_tiff_with_lzw_as_pillow_writes_it(tmp_path: Path) -> None:
    planes = [Image.fromarray(p) for p in speckle()]
    planes[0].save(tmp_path / "eye.tif", save_all=True, append_images=planes[1:], compression="tiff_lzw")
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert np.array_equal(read(tmp_path / "eye.tif")[1], speckle())


@pytest.mark.parametrize("options", [{"compression": "zlib"}, {"bigtiff": True}], ids=str)
def test_a_cut_tiff_is_never_a_shorter_volume(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle(), **options)
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    whole, outcomes = path.read_bytes(), set()
    for end in range(1, len(whole) - 64, 53):
        path.write_bytes(whole[:end])
        outcomes.add(reject(path)[0])
    assert outcomes <= {RejectReason.CORRUPT_FILE, RejectReason.CORRUPT_PIXEL_DATA, RejectReason.WRONG_KIND}


def links_of(path: Path) -> list[int]:
    """The places of the offsets of all pages in a little-endian TIFF, and of the 0 after the last page."""
    data, links = path.read_bytes(), [4]
    while offset := int.from_bytes(data[links[-1] :][:4], "little"):
        links.append(offset + 2 + 12 * int.from_bytes(data[offset:][:2], "little"))
    return links


@pytest.mark.parametrize("count", [6, 150])  # tifffile itself sees loops among the first 100 pages alone
@pytest.mark.parametrize(("link", "target"), [(-1, "first"), (-1, "past the end"), (3, "past the end")])
def test_a_broken_chain_of_tiff_pages_is_a_reject(
    tmp_path: Path, count: int, link: int, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle(count, 8, 8))
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    links, data = links_of(path), bytearray(path.read_bytes())
    offset = int.from_bytes(data[4:8], "little") if target == "first" else len(data) + 9
    data[links[link] : links[link] + 4] = offset.to_bytes(4, "little")
    path.write_bytes(data)
    assert reject(path)[0] == RejectReason.CORRUPT_FILE
    assert not caplog.records  # tifffile's remarks quote the file


@pytest.mark.parametrize("start", [0, 2**31])
def test_a_tiff_without_pages_is_a_reject(tmp_path: Path, start: int) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle())
    data = path.read_bytes()
    path.write_bytes(data[:4] + start.to_bytes(4, "little") + data[8:])
    assert reject(path)[0] == RejectReason.CORRUPT_FILE


@pytest.mark.parametrize("tag", [256, 257, 270, 273, 279])  # width, length, description, strips
def test_a_tiff_tag_that_claims_too_much_allocates_nothing(tmp_path: Path, tag: int) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle(), description="a text")
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    data = bytearray(path.read_bytes())
    entry = data.index(tag.to_bytes(2, "little"), int.from_bytes(data[4:8], "little"))
    field = slice(entry + 8, entry + 12) if tag in (256, 257) else slice(entry + 4, entry + 8)
    data[field] = (2**30).to_bytes(4, "little")
    path.write_bytes(data)
    tracemalloc.start()
    with suppress(OCTReadError):  # a description is not needed
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ome": True, "metadata": {"axes": "ZYX"}},
        {"imagej": True, "resolution": (30, 400), "metadata": {"axes": "ZYX"}},
    ],
    ids=str,
)
def test_a_tiff_without_a_full_spacing_is_a_reject(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle(), **options)
    assert reject(path)[0] == RejectReason.MISSING_SPACING


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
    assert [e.text for e in ElementTree.parse(path).iter("ImageNumber")] == [
        "6",
        "5",
        "4",
        "3",
        "2",
        "1",
        "0",
    ]
    assert np.array_equal(read(path)[1], speckle())


# Grey values


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
    assert reject(write_tiff(path, unit)) == (RejectReason.NOT_FINITE, reject(path)[1])
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
    reason, text = reject(tmp_path / "folder")
    assert reason == RejectReason.UNSUPPORTED_PIXELS
    assert "colour in image 4 of 6" in text
    write_tiff(tmp_path / "eye.tif", grey, photometric="rgb")
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert reject(tmp_path / "eye.tif")[0] == RejectReason.UNSUPPORTED_PIXELS


# Folders and exports with something wrong


def folder_of(root: Path, **sidecar: Any) -> Path:
    return write_folder(root / "folder", speckle(12), **({"spacing_mm": list(SPACING)} | sidecar))


def remove_one(folder: Path) -> None:
    (folder / "oct_7.png").unlink()


def resize_one(folder: Path) -> None:
    Image.new("L", (36, 41)).save(folder / "oct_7.png")


def deepen_one(folder: Path) -> None:
    Image.fromarray(np.zeros((40, 36), np.uint16)).save(folder / "oct_7.png")


def add_another(folder: Path) -> None:
    Image.new("L", (36, 40)).save(folder / "slo_1.png")


def repeat_one(folder: Path) -> None:
    (folder / "oct_07.png").write_bytes((folder / "oct_7.png").read_bytes())


def disguise_one(folder: Path) -> None:
    Image.new("L", (36, 40)).save(folder / "oct_7.png", format="BMP")


def cut_one(folder: Path) -> None:
    path = folder / "oct_7.png"
    path.write_bytes(path.read_bytes()[:-300])


def animate_one(folder: Path) -> None:
    planes = [Image.new("L", (36, 40), i) for i in range(2)]
    planes[0].save(folder / "oct_7.png", save_all=True, append_images=planes[1:])


def claim_pixels(folder: Path, side: int) -> None:
    """A PNG of a few bytes whose header claims side x side pixels."""
    data = bytearray((folder / "oct_0.png").read_bytes())
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    (folder / "oct_0.png").write_bytes(data)


def make_huge(folder: Path) -> None:
    claim_pixels(folder, 9000)


def make_bomb(folder: Path) -> None:
    claim_pixels(folder, 60000)


def make_constant(folder: Path) -> None:
    write_images(folder, np.full((12, 40, 36), 7, np.uint8))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (remove_one, RejectReason.FRAME_COUNT_MISMATCH),
        (resize_one, RejectReason.FRAME_SIZE_MISMATCH),
        (deepen_one, RejectReason.FRAME_SIZE_MISMATCH),
        (add_another, RejectReason.NOT_A_VOLUME),
        (repeat_one, RejectReason.FRAME_COUNT_MISMATCH),
        (disguise_one, RejectReason.WRONG_KIND),
        (cut_one, RejectReason.CORRUPT_PIXEL_DATA),
        (animate_one, RejectReason.FRAME_COUNT_MISMATCH),
        (make_huge, RejectReason.UNSUPPORTED_PIXELS),
        (make_bomb, RejectReason.CORRUPT_FILE),
        (make_constant, RejectReason.CONSTANT_VOLUME),
    ],
)
def test_folders_with_a_fault_are_named(
    tmp_path: Path, spoil: Callable[[Path], None], reason: RejectReason
) -> None:
    folder = folder_of(tmp_path)
    assert np.array_equal(read(folder)[1], speckle(12))  # ten comes after nine, not after one
    spoil(folder)
    assert reject(folder)[0] == reason


def test_a_pattern_picks_the_b_scans_of_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, files="oct_*.png")
    add_another(folder)
    assert np.array_equal(read(folder)[1], speckle(12))


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
    reason, text = reject(folder_of(tmp_path, **sidecar))
    assert reason == RejectReason.BAD_SIDECAR
    assert "volume.yaml" in text


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "\x00", "!!python/object/apply:os.system [ls]", "{1: 2}"]
)
def test_a_yaml_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    folder = folder_of(tmp_path)
    (folder / "volume.yaml").write_text(text)
    assert reject(folder)[0] == RejectReason.BAD_SIDECAR


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


# Kinds


def vendor_files() -> dict[str, tuple[bytes, RejectReason]]:
    """Files that hold no more than their mark."""
    e2e = b"CMDb\0\0\0\0\0\0\0\0" + (100).to_bytes(4, "little") + bytes(64)
    fda = b"FOCTFDA" + (2).to_bytes(4, "little") + (1000).to_bytes(4, "little") + bytes(64)
    return {
        "eye.e2e": (e2e, RejectReason.CORRUPT_FILE),
        "eye.vol": (b"HSF-OCT-103\0" + bytes(2036), RejectReason.NOT_A_VOLUME),
        "eye.fda": (fda, RejectReason.MISSING_PIXEL_DATA),
        "eye.fds": (fda.replace(b"FDA", b"FDS"), RejectReason.MISSING_PIXEL_DATA),
        "eye.img": (bytes(range(256)) * 16, RejectReason.MISSING_SHAPE),
    }


@pytest.mark.parametrize("name", vendor_files())
def test_a_makers_file_without_content_is_refused(tmp_path: Path, name: str) -> None:
    data, expected = vendor_files()[name]
    (tmp_path / name).write_bytes(data)
    assert reject(tmp_path / name)[0] == expected
    other = tmp_path / "eye.nii"
    other.write_bytes(data)
    assert reject(other)[0] == RejectReason.WRONG_KIND


def test_the_content_has_to_be_what_the_name_says(tmp_path: Path) -> None:
    nifti = write_nifti(tmp_path / "eye.nii", speckle(), SPACING)
    tiff = write_tiff(tmp_path / "eye.tif", speckle())
    dicom = Path(write_opt(tmp_path, speckle()))
    for source, kind in ((nifti, "NIfTI"), (tiff, "TIFF"), (dicom, "DICOM")):
        assert identify(source.read_bytes()[:1024])[0] == kind
        for suffix in (".nii", ".tif", ".xml", ".e2e", ".vol", ".nii.gz"):
            path = tmp_path / f"copy{suffix}"
            path.write_bytes(source.read_bytes())
            if suffix != source.suffix:
                assert reject(path)[0] == RejectReason.WRONG_KIND, (source, suffix)
    (tmp_path / "copy.nii.gz").write_bytes(gzip.compress(tiff.read_bytes()))
    assert reject(tmp_path / "copy.nii.gz")[0] == RejectReason.WRONG_KIND
    nib.save(nib.Nifti1Pair(speckle(), np.eye(4)), tmp_path / "pair.img")
    (tmp_path / "pair.nii").write_bytes((tmp_path / "pair.hdr").read_bytes())
    assert reject(tmp_path / "pair.nii")[0] == RejectReason.UNSUPPORTED_FORMAT


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


def test_bytes_cut_and_changed_anywhere_are_rejects_or_volumes(tmp_path: Path) -> None:
    """Never another exception, and no warning."""
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING), axes=["W", "H", "D"])
    files = [
        write_nifti(tmp_path / "eye.nii", speckle(), SPACING),
        write_nifti(tmp_path / "eye.nii.gz", speckle(), SPACING),
        write_ome(tmp_path / "eye.tif", speckle(), SPACING),
        write_tiff(tmp_path / "eye.tiff", speckle(), compression="zlib"),
        write_heidelberg(tmp_path / "eye.xml", speckle(), SPACING),
        write_folder(tmp_path / "folder", speckle(), spacing_mm=list(SPACING)) / "oct_3.png",
    ]
    rng = random.Random(1)
    outcomes = set()
    for path in files:
        good = path.read_bytes()
        for turn in range(60):
            data = bytearray(good)
            if turn % 2:
                data = data[: rng.randrange(len(data))]
            else:
                for _ in range(rng.choice((1, 4, 30))):
                    data[rng.randrange(min(len(data), rng.choice((600, len(data)))))] = rng.randrange(256)
            path.write_bytes(data)
            try:
                header, _ = read(path if path.suffix != ".png" else path.parent)
            except OCTReadError as error:
                outcomes.add(error.reason)
            else:  # a cut file is never a shorter volume
                assert turn % 2 == 0 or header.shape == (6, 40, 36)
        path.write_bytes(good)
    assert len(outcomes) >= 5


# Records


def test_a_changed_file_of_a_volume_is_seen(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    export = write_heidelberg(tmp_path / "xml" / "eye.xml", speckle(), SPACING)
    tiff = write_tiff(tmp_path / "eye.tif", speckle())
    touched = [
        (folder, folder / "oct_3.png"),
        (folder, folder / "volume.yaml"),
        (export, export.parent / "eye_002.tif"),
        (tiff, tmp_path / "eye.yaml"),
    ]
    for path, changed in touched:
        before = source_stat(record(path))
        assert before == source_stat(record(path))
        changed.write_bytes((changed.read_bytes() if changed.exists() else b"") + b"\n")
        assert before != source_stat(record(path)), changed
    bystander = export.parent / "other.tif"
    before = source_stat(record(export))
    bystander.write_bytes(b"x")
    assert before == source_stat(record(export))


def test_every_kind_from_a_bucket(tmp_path: Path) -> None:
    voxels = speckle()
    paths = write_every_kind(tmp_path, voxels, SPACING, "L")
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        storage.write_bytes(f"memory://import/{file.relative_to(tmp_path)}", file.read_bytes())
    for path in paths:
        url = f"memory://import/{path.strip('/')}"
        header, volume = read(url)
        assert np.array_equal(volume, voxels)
        assert header.laterality == "L"
        assert source_stat(record(url)).size > voxels.size / 10
    storage.remove("memory://import", recursive=True)


def test_names_of_sidecars() -> None:
    assert {sidecar_url(f"gs://b/v1.2/eye{s}") for s in (".nii", ".nii.gz", ".tif", ".ome.tif", ".TIFF")} == {
        "gs://b/v1.2/eye.yaml"
    }


def test_the_manifest_needs_few_columns(tmp_path: Path) -> None:
    write_lists(tmp_path, ["a/eye.nii", "b/", "a/eye.nii", "c/eye.tif"], "bioptigen", "raster")
    arguments = [
        f"data.gcs_root={tmp_path}",
        f"data.manifest_path={tmp_path}/manifest.tsv",
        "data.store=unused",
    ]
    listing = read_records(load_config(SMOKE, arguments))
    assert [(r.path, r.device, r.protocol, r.region, r.shape) for r in listing.records] == [
        (p, "bioptigen", "raster", "unknown", None) for p in ("a/eye.nii", "b", "c/eye.tif")
    ]
    assert listing.skipped == {"duplicate_row": 1}
    assert listing.records[1].url == f"{tmp_path}/b"
    (tmp_path / "manifest.tsv").write_text("person_id\tfilepath\tdevice\n1\ta.nii\tx\n")
    with pytest.raises(UserError, match="expected a column sop_instance_uid"):
        read_records(load_config(SMOKE, arguments))


def test_faults_are_rows_with_reasons_and_the_run_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    paths = ["n/eye.nii", "n/none.nii", "folder", "e/eye.e2e", "gone/"]
    write_nifti(root / "n" / "eye.nii", speckle(), SPACING)
    remove_one(folder_of(root))
    (root / "e").mkdir()
    (root / "e" / "eye.e2e").write_bytes(vendor_files()["eye.e2e"][0])
    write_lists(root, paths, "heidelberg_spectralis", "own", "L")
    store = run_prepare(root, tmp_path / "store", *GRID, "data.max_reject_fraction=0.9")
    assert store.index.set_index("path").status.to_dict() == {
        "n/eye.nii": "kept",
        "n/none.nii": "missing_file",
        "folder": "frame_count_mismatch",
        "e/eye.e2e": "corrupt_file",
        "gone": "missing_file",
    }
    report = json.loads((tmp_path / "store" / "prepare_report.json").read_text())
    assert report["run"]["audit"]["missing"]["first"] == ["gone", "n/none.nii"]
