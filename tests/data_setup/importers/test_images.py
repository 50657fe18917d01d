"""Folders of images and TIFF files as programs write them: every fault by its name."""

import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import count_pages
from tests.data_setup.importers.reading import SPACING, folder_of, read, refused, reject, remove_one
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_imagej, write_images, write_ome, write_tiff, write_yaml

Spoil = Callable[[Path], object]


def image(shape: tuple[int, int] = (40, 36), name: str = "oct_7.png", **more: Any) -> Spoil:
    """Write another image of zeros into the folder."""
    values = np.zeros(shape, more.pop("dtype", np.uint8))
    return lambda folder: Image.fromarray(values).save(folder / name, **more)


def change(name: str, edit: Callable[[bytes], bytes], source: str = "oct_7.png") -> Spoil:
    return lambda folder: (folder / name).write_bytes(edit((folder / source).read_bytes()))


def animate_one(folder: Path) -> None:
    planes = [Image.new("L", (36, 40), i) for i in range(2)]
    planes[0].save(folder / "oct_7.png", save_all=True, append_images=planes[1:])


def claiming(side: int) -> Callable[[bytes], bytes]:
    """A PNG of a few bytes whose header claims side x side pixels."""

    def edit(content: bytes) -> bytes:
        data = bytearray(content)
        data[16:24] = side.to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
        return bytes(data)

    return edit


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (remove_one, RejectReason.FRAME_COUNT_MISMATCH),
        (image((41, 36)), RejectReason.FRAME_SIZE_MISMATCH),
        (image(dtype=np.uint16), RejectReason.FRAME_SIZE_MISMATCH),
        (image(name="slo_1.png"), RejectReason.NOT_A_VOLUME),
        (change("oct_07.png", bytes), RejectReason.FRAME_COUNT_MISMATCH),
        (image(format="BMP"), RejectReason.WRONG_KIND),
        (change("oct_7.png", lambda data: data[:-300]), RejectReason.CORRUPT_PIXEL_DATA),
        (animate_one, RejectReason.FRAME_COUNT_MISMATCH),
        (change("oct_0.png", claiming(9000), "oct_0.png"), RejectReason.UNSUPPORTED_PIXELS),
        (change("oct_0.png", claiming(60000), "oct_0.png"), RejectReason.CORRUPT_FILE),
        (
            lambda folder: write_images(folder, np.full((12, 40, 36), 7, np.uint8)),
            RejectReason.CONSTANT_VOLUME,
        ),
    ],
)
def test_folders_with_a_fault_are_named(tmp_path: Path, spoil: Spoil, reason: RejectReason) -> None:
    folder = folder_of(tmp_path)
    assert np.array_equal(read(folder)[1], speckle(12))  # ten comes after nine, not after one
    spoil(folder)
    assert reject(folder)[0] == reason


def test_a_pattern_picks_the_b_scans_of_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, files="oct_*.png")
    image(name="slo_1.png")(folder)
    assert np.array_equal(read(folder)[1], speckle(12))


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


@pytest.mark.parametrize("place", [0, 6])
def test_a_thumbnail_is_no_b_scan(tmp_path: Path, place: int) -> None:
    write_yaml(tmp_path / "volume.yaml", spacing_mm=list(SPACING))
    planes, small = list(speckle()), {"subfiletype": 1, "append": True}
    for n, plane in enumerate([*planes[:place], planes[0][::4, ::4], *planes[place:]]):
        write_tiff(tmp_path / "eye.tif", plane, **(small if n == place else {"append": True}))
    for n, plane in enumerate(planes):
        for image in (plane[::4, ::4], plane)[:: 1 if place == 0 else -1]:
            write_tiff(tmp_path / f"eye/{n}.tif", image, **(small if len(image) == 10 else {"append": True}))
    for name in ("eye.tif", "eye"):
        assert np.array_equal(read(tmp_path / name)[1], speckle())


def test_a_tiff_that_pillow_cannot_open_is_named(tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "eye.tif", speckle(), bigtiff=True, byteorder=">")
    refused(reject(path), RejectReason.UNSUPPORTED_FORMAT, "BigTIFF with big-endian numbers")


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


def with_exif(folder: Path, voxels: np.ndarray, turns: Sequence[int], ending: str) -> Path:
    """Images stored so that a viewer, which obeys the tag, shows `voxels`."""
    folder.mkdir()
    undo = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
    for index, (frame, turn) in enumerate(zip(voxels, turns, strict=True)):
        image = Image.fromarray(frame)
        image.getexif()[274] = undo[turn]
        stored, exif = ImageOps.exif_transpose(image), Image.Exif()
        exif[274] = turn
        stored.save(folder / f"oct_{index}.{ending}", exif=exif, quality=100)
    write_yaml(folder / "volume.yaml", spacing_mm=list(SPACING))
    return folder


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_images_are_read_as_a_viewer_shows_them(tmp_path: Path, ending: str) -> None:
    for turn in range(1, 9):
        folder = with_exif(tmp_path / f"{turn}", speckle(), [turn] * 6, ending)
        np.testing.assert_allclose(read(folder)[1], speckle(), atol=3)  # JPEG rounds


@pytest.mark.parametrize("ending", ["png", "jpg", "tif"])
def test_one_b_scan_of_another_orientation_is_a_reject(tmp_path: Path, ending: str) -> None:
    folder = with_exif(tmp_path / "eye", speckle(), [1, 1, 1, 3, 1, 1], ending)
    refused(reject(folder), RejectReason.HEADER_MISMATCH, "3 in image 4 of 6")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
@pytest.mark.parametrize("fault", ["", "transparent", "coloured"])
def test_equal_channels_are_grey(tmp_path: Path, mode: str, fault: str) -> None:
    (tmp_path / "eye").mkdir()
    write_yaml(tmp_path / "eye" / "volume.yaml", spacing_mm=list(SPACING))
    for index, frame in enumerate(speckle()):
        image = Image.fromarray(frame).convert(mode)
        if index == 3 and fault == "transparent" and mode != "RGB":
            image.putpixel((5, 5), (*image.getpixel((5, 5))[:-1], 254))
        if index == 3 and fault == "coloured" and mode != "LA":
            image.putpixel((5, 5), (1, 2, 3, 255)[: len(mode)])
        image.save(tmp_path / "eye" / f"oct_{index}.png")
    if fault and (fault, mode) not in (("transparent", "RGB"), ("coloured", "LA")):
        assert reject(tmp_path / "eye")[0] == RejectReason.UNSUPPORTED_PIXELS
    else:
        assert np.array_equal(read(tmp_path / "eye")[1], speckle())


@pytest.mark.parametrize("bits", [8, 12])
def test_an_imagej_stack_of_one_directory(tmp_path: Path, bits: int) -> None:
    """Fiji writes one above 4 GB: a directory, and all slices behind the first."""
    whole = write_imagej(tmp_path / "whole.tif", speckle(bits=bits), SPACING)
    path = write_imagej(tmp_path / "eye.tif", speckle(bits=bits), SPACING, truncate=True)
    for name in ("whole", "eye"):
        write_yaml(tmp_path / f"{name}.yaml", bits_stored=bits)
    (header, voxels), (_, expected) = read(path), read(whole)
    assert np.array_equal(voxels, expected)
    assert header.spacing_mm == pytest.approx(SPACING, rel=1e-6)
    with path.open("rb") as file:
        assert count_pages(file, "eye.tif") == 6
    path.write_bytes(path.read_bytes()[:-9])
    assert reject(path)[0] == RejectReason.TRUNCATED_PIXEL_DATA
