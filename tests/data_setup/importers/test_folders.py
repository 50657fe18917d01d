"""Folders of images: every fault by its name, and a pattern that picks the B-scans."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_setup.readers.faults import RejectReason
from tests.data_setup.importers.reading import folder_of, read, reject, remove_one
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_images

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
