"""Files that contradict themselves, hold several volumes, or that only another export replaces: named."""

import re
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate
from pydicom.uid import JPEG2000Lossless
from tifffile import TiffFile

from data_setup.readers.faults import RejectReason
from data_setup.readers.open_record import peek_record, source_digest, source_stat
from tests.data_setup.dicom.reading import assign
from tests.data_setup.importers.reading import DOWN, SPACING, read, record, refused, reject
from tests.support.dicom_factory import rows_down, speckle, write_opt
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
from utils import storage
from utils.config.schema import StorageOptions

WIDTH = SPACING[2] * 36  # of the B-scans of speckle(), mm


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("axes", ["ZCYX", "TZYX"])
def test_imagej_channels_and_times_are_no_b_scans(tmp_path: Path, axes: str, sidecar: bool) -> None:
    metadata = {"spacing": SPACING[0], "unit": "mm", "axes": axes}
    voxels = speckle(8).reshape(4, 2, 40, 36)
    path = tmp_path / "eye.tif"
    write_tiff(path, voxels, imagej=True, resolution=(1 / SPACING[2], 1 / SPACING[1]), metadata=metadata)
    if sidecar:
        write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    refused(reject(path), RejectReason.NOT_A_VOLUME, "channel")


def test_imagej_slices_are_the_images(tmp_path: Path) -> None:
    path = write_imagej(tmp_path / "eye.tif", speckle(), SPACING)
    path.write_bytes(path.read_bytes().replace(b"slices=6", b"slices=3"))
    assert reject(path)[0] == RejectReason.FRAME_COUNT_MISMATCH


@pytest.mark.parametrize(
    ("line", "words"),
    [("spacing=0.3", "one spacing"), ("yunit=um", "one unit"), ("slices=6", None), ("info=a\ninfo=b", None)],
)
def test_imagej_says_a_thing_once(tmp_path: Path, line: str, words: str | None) -> None:
    path = write_imagej(tmp_path / "eye.tif", speckle(), SPACING)
    with TiffFile(path) as tiff:
        text = f"{tiff.pages.first.description}\n{line}\n"
    pages = [Image.fromarray(p) for p in speckle()]
    tags = {270: text, 282: 1 / SPACING[2], 283: 1 / SPACING[1]}
    pages[0].save(path, save_all=True, append_images=pages[1:], tiffinfo=tags)
    if words is None:
        assert np.array_equal(read(path)[1], speckle())
    else:
        refused(reject(path), RejectReason.HEADER_MISMATCH, words)


def edit_ome(path: Path, old: str, new: str) -> Path:
    """The description of an OME-TIFF with one text replaced, written again by Pillow."""
    with Image.open(path) as image:
        text = image.tag_v2[270]
    changed = re.sub(old, new, text)
    pages = [Image.fromarray(p) for p in speckle()]
    pages[0].save(path, save_all=True, append_images=pages[1:], tiffinfo={270: changed.encode("latin-1")})
    return path


def planes(order: list[int], more: str = "") -> str:
    items = (f'<TiffData FirstZ="{z}" IFD="{i}"{more} PlaneCount="1"/>' for i, z in enumerate(order))
    return "".join(items)


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("<TiffData[^>]*/>", planes([5, 4, 3, 2, 1, 0]), RejectReason.HEADER_MISMATCH),
        ("<TiffData[^>]*/>", planes([0, 1, 2, 3, 4, 4]), RejectReason.HEADER_MISMATCH),
        ("<TiffData[^>]*/>", planes([0, 1, 2]), RejectReason.HEADER_MISMATCH),
        ("<TiffData[^>]*/>", planes(list(range(6)), ' FirstT="1"'), RejectReason.HEADER_MISMATCH),
        ('SizeX="36"', 'SizeX="40"', RejectReason.FRAME_SIZE_MISMATCH),
        ('SizeY="40"', 'SizeY="36"', RejectReason.FRAME_SIZE_MISMATCH),
        ('SizeZ="6"', 'SizeZ="3"', RejectReason.FRAME_COUNT_MISMATCH),
        ('SizeC="1"([^>]*)SizeZ="6"|SizeZ="6"([^>]*)SizeC="1"', r'SizeC="2"\1\2SizeZ="3"', "not_a_volume"),
        ("(<Image .*</Image>)", r"\1\1", RejectReason.NOT_A_VOLUME),
    ],
    ids=["reversed", "twice", "too few", "another time", "width", "height", "count", "channels", "images"],
)
def test_ome_that_describes_other_pages_is_a_reject(
    tmp_path: Path, old: str, new: str, reason: str, sidecar: bool
) -> None:
    path = edit_ome(write_ome(tmp_path / "eye.ome.tif", speckle(), SPACING), old, new)
    if sidecar:
        write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert reject(path)[0] == reason


@pytest.mark.parametrize("new", ["<TiffData/>", '<TiffData IFD="0" PlaneCount="6"/>', planes(list(range(6)))])
def test_ome_planes_in_the_order_of_the_pages_open(tmp_path: Path, new: str) -> None:
    path = write_ome(tmp_path / "eye.ome.tif", speckle(), SPACING)
    edit_ome(path, "<TiffData[^>]*/>", new)
    assert np.array_equal(read(path)[1], speckle())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_tiff_is_a_reject_and_a_mirrored_one_is_shown(tmp_path: Path, orientation: int) -> None:
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    path = write_tiff(tmp_path / "eye.tif", speckle(), extratags=[(274, "H", 1, orientation, True)])
    if orientation > 4:
        assert reject(path)[0] == RejectReason.UNSUPPORTED_PIXELS
        return
    rows, columns = [(1, 1), (1, -1), (-1, -1), (-1, 1)][orientation - 1]
    first = read(path)[1][0]
    assert np.array_equal(first, speckle()[0, ::rows, ::columns])


def test_a_page_turned_among_others_is_a_reject(tmp_path: Path) -> None:
    pages = [Image.fromarray(p) for p in np.resize(speckle(), (4, 40, 40))]
    pages[2].info["tiffinfo"] = None
    path = tmp_path / "eye.tif"
    pages[0].save(path, save_all=True, append_images=pages[1:], tiffinfo={274: 1})
    data = bytearray(path.read_bytes())
    entry = (274).to_bytes(2, "little") + (3).to_bytes(2, "little") + (1).to_bytes(4, "little")
    places = [m.start() for m in re.finditer(re.escape(entry), bytes(data))]
    data[places[-1] + 8] = 6
    path.write_bytes(data)
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING))
    assert reject(path)[0] == RejectReason.UNSUPPORTED_PIXELS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<ScaleX>", "<ScaleX>0.5</ScaleX><ScaleX>"),
        ("<Laterality>", "<Laterality>L</Laterality><Laterality>"),
        ("<ImageNumber>", "<ImageNumber>99</ImageNumber><ImageNumber>"),
        ("<Y>", "<Y>99</Y><Y>"),
        ("<Width>36", "<Width>36</Width><Width>36"),
    ],
)
def test_a_fact_of_a_heidelberg_export_stands_once(tmp_path: Path, old: str, new: str) -> None:
    path = heidelberg(tmp_path, raster(6, SPACING[0], WIDTH))
    path.write_text(path.read_text().replace(old, new))
    if old == "<Width>36":  # twice the same
        read(path)
    else:
        refused(reject(path), RejectReason.HEADER_MISMATCH, f"one {old[1:-1]} in a part")


def heidelberg(root: Path, lines: list[tuple[float, ...]]) -> Path:
    return write_heidelberg(root / "eye.xml", speckle(len(lines)), SPACING, lines=lines)


def swap(line: tuple[float, ...]) -> tuple[float, ...]:
    return (*line[2:], *line[:2])


@pytest.mark.parametrize("factor", [10.0, 1.2, 0.8, 0.1])
def test_heidelberg_lines_are_as_long_as_the_images_are_wide(tmp_path: Path, factor: float) -> None:
    reason, text = reject(heidelberg(tmp_path, raster(6, SPACING[0], WIDTH * factor)))
    assert reason == RejectReason.HEADER_MISMATCH
    assert "ScaleX" in text
    read(heidelberg(tmp_path, raster(6, SPACING[0], WIDTH * 35 / 36)))  # from centre to centre


def test_heidelberg_lines_of_other_directions_are_rejects(tmp_path: Path) -> None:
    lines: list[Any] = raster(6, SPACING[0], WIDTH)
    every_second = [swap(x) if i % 2 else x for i, x in enumerate(lines)]
    refused(reject(heidelberg(tmp_path, every_second)), RejectReason.NOT_A_VOLUME, "B-scan 2")
    assert reject(heidelberg(tmp_path, [swap(x) for x in lines]))[0] == RejectReason.HEADER_MISMATCH


def test_a_vertical_heidelberg_raster_is_of_unknown_order_as_in_dicom(tmp_path: Path) -> None:
    lines: list[Any] = raster(6, SPACING[0], WIDTH, 90)
    header, volume = read(heidelberg(tmp_path, lines))
    assert (header.orientation_source, header.flip_d) == ("unknown", False)
    assert np.array_equal(volume, speckle())
    every_second = [swap(x) if i % 2 else x for i, x in enumerate(lines)]
    assert reject(heidelberg(tmp_path, every_second))[0] == RejectReason.NOT_A_VOLUME


def test_heidelberg_lines_order_the_images_whatever_their_numbers(tmp_path: Path) -> None:
    mixed, lines = [0, 2, 4, 1, 3, 5], raster(6, SPACING[0], WIDTH)
    interleaved = [lines[i] for i in mixed]
    write_heidelberg(tmp_path / "eye.xml", speckle()[mixed], SPACING, lines=interleaved)
    assert np.array_equal(read(tmp_path / "eye.xml")[1], speckle())


def test_a_gap_in_heidelberg_numbers_is_a_reject(tmp_path: Path) -> None:
    path = heidelberg(tmp_path, raster(6, SPACING[0], WIDTH))
    text = path.read_text()
    for number in (6, 5, 4):
        text = text.replace(f"<ImageNumber>{number}<", f"<ImageNumber>{number + 1}<")
    path.write_text(text)
    refused(reject(path), RejectReason.FRAME_COUNT_MISMATCH, "ImageNumber")
    path.write_text(text.replace("<ImageNumber>0<", "<ImageNumber>4<"))  # the localizer in between
    assert np.array_equal(read(path)[1], speckle())


@pytest.mark.parametrize(("degrees", "opens"), [(0.5, True), (2, False), (23, False), (-23, False)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_sheared_nifti_is_a_reject(tmp_path: Path, axis: int, degrees: float, opens: bool) -> None:
    affine = anatomical_affine(SPACING)
    affine[axis, 2] = np.tan(np.deg2rad(degrees)) * affine[2, 2]
    slanted = (float(np.linalg.norm(affine[:3, 2])), *SPACING[1:])
    path = write_nifti(tmp_path / "eye.nii", speckle(), slanted, affine=affine)
    if opens:
        assert np.array_equal(read(path)[1], speckle())
        return
    assert nib.load(path).header.get_sform(coded=True)[1] > 0
    refused(reject(path), RejectReason.UNKNOWN_AXES, "sheared")
    write_yaml(tmp_path / "eye.yaml", axes=["W", "H", "D"])  # the spacing would be the slanted one
    assert reject(path)[0] == RejectReason.UNKNOWN_AXES
    write_yaml(tmp_path / "eye.yaml", axes=["W", "H", "D"], spacing_mm=list(SPACING))
    assert read(path)[0].spacing_mm == SPACING


# DICOM files under a manifest's own names

CIRRUS = {"device": "zeiss_cirrus", "protocol": "cirrus_mac_oct_oct"}
LATERAL = (0.06, 0.00195, 0.06)  # Cirrus writes the lateral spacing into SliceThickness


def plain_dicom(root: Path, spacing: tuple[float, float, float] = SPACING, **values: Any) -> str:
    """A DICOM file whose name says nothing."""

    def edit(ds: FileDataset) -> None:
        for keyword, value in values.items():
            setattr(ds, keyword, value)

    return write_opt(root, speckle(16), name="eye.dcm", spacing=spacing, edit=edit)


@pytest.mark.parametrize("model", ["HD-OCT 5000", "CIRRUS HD-OCT 5000", None])
def test_the_manifest_tells_the_cirrus_distance(tmp_path: Path, model: str | None) -> None:
    path = plain_dicom(tmp_path, LATERAL, ManufacturerModelName=model)
    header, volume = read(path, **CIRRUS)
    assert (header.spacing_mm[0], header.spacing_source) == (pytest.approx(6 / 15), "protocol")
    assert np.array_equal(volume, speckle(16))
    if model != "CIRRUS HD-OCT 5000":  # of no known device, so its SliceThickness is none either
        own = reject(path, device="cirrus_of_clinic_a", protocol="cube")
        assert (own[0], "only the thickness" in own[1]) == (RejectReason.MISSING_SPACING, True)
    reason, text = reject(path, device="zeiss_cirrus", protocol="cube")  # the device alone, without a field
    assert reason == RejectReason.MISSING_SPACING
    assert "which Cirrus fills with the lateral" in text
    listed = {"device": "zeiss_cirrus", "protocol": "cube"}
    header = read(path, **listed, spacing_mm=(0.4, *LATERAL[1:]))[0]
    assert (header.spacing_mm[0], header.spacing_source) == (0.4, "manifest")
    assert reject(path, **listed, spacing_mm=(0.4, 0.00195, 0.03))[0] == RejectReason.HEADER_MISMATCH


@pytest.mark.parametrize(
    ("row", "values", "word"),
    [
        ({"laterality": "L"}, {}, "laterality"),
        (CIRRUS, {}, "device"),
        ({"device": "topcon_maestro2"}, {}, "device"),
        (
            {"protocol": "triton_macula_12x12_octa_oct"},
            {"ProtocolName": "triton macula 6x6 octa"},
            "protocol",
        ),
        (
            {"device": "zeiss_cirrus"},
            {"ManufacturerModelName": None, "ProtocolName": "triton macula 6x6 octa"},
            "device",
        ),
    ],
)
def test_a_dicom_header_that_contradicts_the_manifest_is_a_reject(
    tmp_path: Path, row: dict[str, str], values: dict[str, str], word: str
) -> None:
    reason, text = reject(plain_dicom(tmp_path, **values), **{"device": "topcon_triton"} | row)
    assert reason == RejectReason.HEADER_MISMATCH
    assert f"{word} {row[word]} as in the manifest" in text


def test_names_of_the_manifest_that_agree_with_the_header_or_are_its_own_open(tmp_path: Path) -> None:
    path = plain_dicom(tmp_path, ProtocolName="triton macula 6x6 octa")
    for row in (
        {"laterality": "R", "device": "topcon_triton", "protocol": "triton_macula_6x6_oct"},
        {"device": "triton_of_clinic_a", "protocol": "macula_raster"},
        {"device": "unknown", "protocol": "unknown"},
    ):
        assert np.array_equal(read(path, **row)[1], speckle(16))


@pytest.mark.parametrize(("name", "advice"), [("eye.jpeg", "folder"), ("EYE.PNG", "folder")])
def test_kinds_that_nothing_opens_say_what_to_do(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_bytes(b"MATLAB 5.0 MAT-file" * 20)
    refused(reject(tmp_path / name), RejectReason.UNSUPPORTED_FORMAT, advice)


# One YAML for many files, and columns of the manifest


def test_the_nearest_yaml_counts_key_by_key(tmp_path: Path) -> None:
    """In any folder above, up to the root of the record's path and no further."""
    folder = write_folder(tmp_path / "a" / "b" / "eye", speckle(), laterality="Left")
    write_yaml(tmp_path / "a" / "volume.yaml", spacing_mm=[0.2, 0.003, 0.02], laterality="R")
    write_yaml(tmp_path / "volume.yaml", spacing_mm=[0.1, 0.003, 0.02], d_order=DOWN)
    header, _ = read(folder, path="a/b/eye")
    assert (header.spacing_mm, header.laterality) == ((0.2, 0.003, 0.02), "L")
    assert header.orientation_source == "sidecar"
    assert read(folder, path="b/eye")[0].orientation_source == "unknown"
    tiff = write_tiff(tmp_path / "a" / "eye.tif", speckle())
    write_yaml(tmp_path / "a" / "eye.yaml", d_order="unknown")
    header, _ = read(tiff, path="a/eye.tif")
    assert (header.laterality, header.orientation_source) == ("R", "unknown")
    digest = source_digest(record(folder, path="a/b/eye"))
    (folder / "@eaDir").mkdir()  # of a network drive
    assert source_digest(record(folder, path="a/b/eye")) == digest
    before = source_stat(record(folder, path="a/b/eye"))
    write_yaml(tmp_path / "volume.yaml", spacing_mm=[0.15, 0.003, 0.02], d_order=DOWN)
    assert source_stat(record(folder, path="a/b/eye")) != before


def test_columns_of_the_manifest_fill_and_never_replace(tmp_path: Path) -> None:
    listed = (0.2, 0.003, 0.02)
    folder = write_folder(tmp_path / "eye", speckle(), num_frames=6)
    write_images(folder, speckle(), suffix="bmp")
    header, volume = read(folder, spacing_mm=listed, d_order="inferior_to_superior", files="*.png")
    assert (header.spacing_mm, header.spacing_source) == (listed, "manifest")
    assert (header.flip_d, header.orientation_source) == (True, "manifest")
    assert np.array_equal(volume, speckle()[::-1])
    dicom = Path(write_opt(tmp_path, speckle(), spacing=SPACING, references=rows_down(6)))
    for good in ({"spacing_mm": (0.1205, 0.0026, 0.03)}, {"d_order": DOWN}, {"d_order": "unknown"}):
        assert read(dicom, device="unknown", **good)[0].spacing_source == "shared"
    write_yaml(folder / "volume.yaml", spacing_mm=list(listed), d_order=DOWN, files="*.bmp")
    wrong: list[tuple[Path, dict[str, Any]]] = [
        (dicom, {"spacing_mm": (0.123, 0.0026, 0.03)}),
        (dicom, {"d_order": "inferior_to_superior"}),
        (folder, {"spacing_mm": (0.21, 0.003, 0.02)}),
        (folder, {"d_order": "inferior_to_superior"}),
        (folder, {"files": "*.png"}),
    ]
    for path, facts in wrong:
        assert reject(path, device="unknown", **facts)[0] == RejectReason.HEADER_MISMATCH, facts
    facts = [{}, {"d_order": DOWN}, {"d_order": "unknown"}, {"spacing_mm": listed}, {"files": "*.png"}]
    assert len({source_stat(record(dicom, **some)) for some in facts}) == len(facts)


def scrambled(length: int) -> bytes:
    """Bytes as others describe Zeiss' frames: JP2 at three fifths, each seventh byte changed by 0x5A."""
    frame = bytearray(range(1, 251)) * (length // 250)
    start = len(frame) * 3 // 5
    frame[start : start + 12] = b"\0\0\0\x0cjP  \r\n\x87\n"
    frame[::7] = bytes(byte ^ 0x5A for byte in frame[::7])
    return bytes(frame)


def scramble_pixels(ds: FileDataset) -> None:
    ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
    ds.PixelData = encapsulate([scrambled(5000 + 250 * n) for n in range(6)])
    ds["PixelData"].is_undefined_length = True


def hide_in_private_tag(ds: FileDataset) -> None:
    """Each phase of seven: the frame starts anywhere in the file."""
    ds.SOPClassUID = "1.2.840.10008.5.1.4.1.1.66"
    ds.private_block(0x0407, "CARL ZEISS MEDITEC", create=True).add_new(0x06, "OB", scrambled(4000))
    del ds.PixelData


@pytest.mark.parametrize(
    ("edit", "reason", "text"),
    [
        (scramble_pixels, RejectReason.SCRAMBLED_PIXELS, "ask Zeiss for an export as standard OPT DICOM"),
        (hide_in_private_tag, RejectReason.SCRAMBLED_PIXELS, "ask Zeiss"),
        (assign(SOPClassUID="1.2.840.10008.5.1.4.1.1.66"), RejectReason.MAKERS_RAW_DATA, "export the scan"),
        (assign(SOPClassUID="1.2.276.0.75.2.2.70.0.9.9"), RejectReason.MAKERS_RAW_DATA, "export the scan"),
        (assign(SOPClassUID=""), RejectReason.NOT_OPT, "no SOPClassUID"),
        (assign(SOPClassUID="1.2.840.10008.5.1.4.1.1.104.1"), RejectReason.NOT_OPT, r"a report \(PDF\)"),
    ],
)
def test_a_dead_end_says_what_to_export(
    tmp_path: Path, edit: object, reason: RejectReason, text: str
) -> None:
    path = write_opt(tmp_path, speckle(), spacing=SPACING, references=rows_down(6), edit=edit)
    actual, message = reject(path, device="unknown")
    assert actual == reason
    assert re.search(text, message), message
    assert "Secret" not in message


def test_a_sound_file_and_a_damaged_one_keep_their_reasons(tmp_path: Path) -> None:
    path = Path(
        write_opt(tmp_path, speckle(), syntax=JPEG2000Lossless, spacing=SPACING, references=rows_down(6))
    )
    assert read(path, device="unknown")[0].transfer_syntax == JPEG2000Lossless
    data = path.read_bytes()
    start = data.index(b"\xff\x4f\xff\x51")
    path.write_bytes(data[:start] + b"\0" * 60 + data[start + 60 :])
    assert reject(path, device="unknown")[0] == RejectReason.CORRUPT_PIXEL_DATA
    size = storage.stat(str(path)).size
    assert peek_record(record(path), size, StorageOptions()).shape == (6, 40, 36)
