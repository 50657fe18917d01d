"""Folders of images: every fault by its name, and a pattern that picks the B-scans."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_setup.readers.faults import RejectReason
from tests.data_setup.importers.reading import folder_of, read, reject, remove_one
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_images


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
