"""data_setup/readers/makers/: makers' own files against the libraries that know them, and own numbers."""

import hashlib
import io
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from data_setup.attach.jobs import edge_step
from data_setup.index.cli import main as index
from data_setup.readers.faults import RejectReason
from data_setup.readers.makers import e2e, kinds, topcon
from data_setup.readers.open_record import open_record, source_stat
from tests.data_setup.importers.reading import GRID, read, record, refused, reject, run_prepare
from tests.data_setup.importers.test_heidelberg import VENDOR
from tests.data_setup.index.trees import table
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_yaml
from tests.support.makers_factory import LARGEST, write_e2e, write_topcon, write_vol

SPACING = (0.12, 0.0039, 0.0117)
needs_files = pytest.mark.skipif(not VENDOR.is_dir(), reason="the vendors' files are not part of the project")


def intensities(frames: int = 6) -> np.ndarray:
    values = np.random.default_rng(3).random((frames, 40, 36), np.float32) ** 4
    values[:, :3] = LARGEST  # HEYEX where nothing was measured
    return values


def e2e_values(seed: int) -> np.ndarray:
    """Codes of E2E's 16-bit floats in 0..1: 6 bits of exponent, 10 of mantissa."""
    return np.random.default_rng(seed).integers(40 << 10, 63 << 10, (4, 40, 36)).astype(np.uint16)


# VOL


def test_a_vol_reads_as_eyepy_reads_it(tmp_path: Path) -> None:
    eyepy = pytest.importorskip("eyepy")
    layers = np.random.default_rng(1).uniform(5, 30, (6, 3, 36)).astype(np.float32)
    layers[:, 1] = 0  # not drawn
    layers[2, 0, 7] = LARGEST
    path = write_vol(tmp_path / "eye.vol", intensities(), SPACING, layers=layers)
    header, voxels = read(path)
    oracle = eyepy.import_heyex_vol(path)
    assert np.array_equal(voxels[::-1], oracle.data)  # y falls: the first B-scan of the file is the lowest
    assert header.spacing_mm == pytest.approx((oracle.scale_z, oracle.scale_y, oracle.scale_x))
    assert (header.laterality, header.flip_d) == ("L", True)
    assert header.orientation_source == "reference_coordinates"
    with path.open("rb") as file:
        drawn = kinds.surfaces(kinds.VOL, file, str(path))
        assert kinds.patient_id(kinds.VOL, file, str(path)) == "P-77"
    assert drawn is not None
    assert drawn.names == ("ILM", "RNFL")  # the second, BM, is 0 everywhere
    assert np.isnan(drawn.heights[0, 2, 7])
    for name, heights in zip(drawn.names, drawn.heights, strict=True):  # in the file's order, as the frames
        np.testing.assert_array_equal(heights, oracle.layers[name].data)


def test_a_vol_whose_b_scans_lie_in_another_order(tmp_path: Path) -> None:
    values, turned = intensities(), [3, 0, 1, 5, 2, 4]
    plain = write_vol(tmp_path / "plain.vol", values, SPACING)
    places = [5.0 - i * SPACING[0] for i in turned]
    path = write_vol(tmp_path / "eye.vol", values[turned], SPACING, places=places)
    assert np.array_equal(read(path)[1], read(plain)[1])


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"scan_pattern": 2}, RejectReason.NOT_A_VOLUME, "a circle"),
        ({"scan_pattern": 5}, RejectReason.NOT_A_VOLUME, "a star"),
        ({"distance": 0.2}, RejectReason.HEADER_MISMATCH, "0.2 mm"),
        ({"scale_x": 0.02}, RejectReason.HEADER_MISMATCH, "as long as Width x ScaleX"),
        ({"places": [0.0] * 6}, RejectReason.NOT_A_VOLUME, "one place"),
    ],
)
def test_a_vol_that_contradicts_itself(
    tmp_path: Path, changes: dict[str, Any], reason: RejectReason, words: str
) -> None:
    refused(reject(write_vol(tmp_path / "eye.vol", intensities(), SPACING, **changes)), reason, words)


def test_a_vol_that_is_cut_or_holds_other_values(tmp_path: Path) -> None:
    path = write_vol(tmp_path / "eye.vol", intensities(), SPACING)
    data = path.read_bytes()
    (tmp_path / "cut.vol").write_bytes(data[:-1])
    assert reject(tmp_path / "cut.vol")[0] == RejectReason.TRUNCATED_PIXEL_DATA
    other = write_vol(tmp_path / "other.vol", np.minimum(intensities(), 1.5) + 0.01, SPACING)
    assert reject(other)[0] == RejectReason.UNSUPPORTED_PIXELS
    named = tmp_path / "named.vol"  # a person's id that is no ASCII, which eyepy does not open
    named.write_bytes(data.replace(b"P-77", "P-é7".encode("latin-1")))
    assert np.array_equal(read(named)[1], read(path)[1])


@needs_files
def test_real_vol_files(tmp_path: Path) -> None:
    for name in ("one_line.vol", "circle_scan.vol"):
        refused(reject(VENDOR / name), RejectReason.NOT_A_VOLUME, "found 1, scan pattern 2: a circle")
    # eyepy's own test file is cut to 50 columns, and its lines are not
    eyepys = VENDOR / "test_volume_eyepy.vol"
    assert reject(eyepys)[0] == RejectReason.HEADER_MISMATCH
    data = bytearray(eyepys.read_bytes())
    struct.pack_into("<d", data, 24, (7.564 - 1.513) / 50)
    (tmp_path / "eye.vol").write_bytes(data)
    header, voxels = read(tmp_path / "eye.vol")
    reader = pytest.importorskip("eyepy.io.he.vol_reader")
    values = np.stack([one.data for one in reader.HeVolReader(eyepys).parsed_file.bscans])
    assert np.array_equal(voxels[::-1], values)  # grey values, of which eyepy's volume keeps two levels
    assert (header.shape, header.laterality) == ((10, 40, 50), "R")


# E2E


def lines(*heights: float) -> list[tuple[float, ...]]:
    """Places of B-scans from left to right, in degrees."""
    return [(-15, y, 15, y) for y in heights]


@pytest.mark.parametrize("places", [lines(8.5, 9, 9.5, 10), lines(0, 0, 0, 0), [(0, 0, 0, 0)] * 4])
def test_an_e2e_without_places_or_with_even_ones_opens(
    tmp_path: Path, places: list[tuple[float, ...]]
) -> None:
    series = {"id": 12, "side": "R", "values": e2e_values(1), "axial": 0.0039, "places": places}
    assert read(str(write_e2e(tmp_path / "eye.E2E", [series])), spacing_mm=SPACING)[0].shape[0] == 4


def test_each_series_of_an_e2e_with_its_own_eye(tmp_path: Path) -> None:
    values = {12: e2e_values(1), 15: e2e_values(2)}
    series = [{"id": k, "side": s, "values": values[k], "axial": 0.0039} for k, s in ((12, "R"), (15, "L"))]
    path = write_e2e(tmp_path / "eyes.E2E", [*series, {**series[0], "id": 9, "values": e2e_values(3)[:1]}])
    eyepy_utils = pytest.importorskip("eyepy.core.utils")
    for number, side in ((12, "R"), (15, "L")):
        header, voxels = read(f"{path}#{number}", spacing_mm=SPACING)
        codes = values[number].astype(np.float64)
        floats = (1 + codes % 1024 / 1024) * 2.0 ** (codes // 1024 - 63)  # uocte's wiki
        assert np.array_equal(voxels, eyepy_utils.from_e2e_intensity(floats.astype(np.float32)))
        assert (header.laterality, header.orientation_source) == (side, "unknown")
    refused(reject(path, spacing_mm=SPACING), RejectReason.NOT_A_VOLUME, "(#12, #15)")
    assert reject(f"{path}#9", spacing_mm=SPACING)[0] == RejectReason.NOT_A_VOLUME
    reason, text = reject(f"{path}#12")
    assert reason == RejectReason.MISSING_SPACING
    assert "1.5 x 30 degrees; in a medium eye [0.1448, 0.0039, 0.2413]" in text
    assert reject(f"{path}#12", spacing_mm=(0.12, 0.003, 0.0117))[0] == RejectReason.HEADER_MISMATCH
    assert source_stat(record(f"{path}#12", spacing_mm=SPACING)).size == path.stat().st_size


def test_the_layers_of_a_series_are_those_that_eyepy_reads(tmp_path: Path) -> None:
    reader = pytest.importorskip("eyepy.io.he.e2e_reader")
    rows = np.random.default_rng(5).uniform(3, 30, (2, 4, 36)).astype(np.float32)
    rows[0, 1, 3] = LARGEST
    layers = {5: rows[0], 1: rows[1], 7: np.zeros((4, 36)), 99: rows[0]}  # INL, BM, one not drawn, no name
    series = [
        {"id": k, "side": "R", "values": e2e_values(k), "axial": 0.0039, "layers": part}
        for k, part in ((12, layers), (15, {}))
    ]
    path = write_e2e(tmp_path / "eyes.E2E", series)
    with reader.HeE2eReader(path) as opened:
        theirs = next(one for one in opened.series if one.id == 12).get_layers()
    with path.open("rb") as file:
        assert kinds.surfaces(kinds.E2E, file, f"{path}#15") is None
        drawn = kinds.surfaces(kinds.E2E, file, f"{path}#12")
    assert drawn is not None
    assert drawn.names == ("BM", "INL")
    for heights, number in zip(drawn.heights, (1, 5), strict=True):
        np.testing.assert_array_equal(heights, theirs[number])
    assert np.isnan(drawn.heights).sum() == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"count": 5}, RejectReason.FRAME_COUNT_MISMATCH),
        ({"pattern": 2}, RejectReason.NOT_A_VOLUME),
        ({"values": e2e_values(1)[:1]}, RejectReason.NOT_A_VOLUME),
        ({"places": lines(10, 9.5, 9, 7)}, RejectReason.FRAME_COUNT_MISMATCH),
        ({"places": lines(10, 9, 9.5, 8.5)}, RejectReason.HEADER_MISMATCH),
        ({"places": lines(10, 9.5, 9.5, 9)}, RejectReason.NOT_A_VOLUME),
        ({"places": [*lines(10, 9.5, 9), (15, 8.5, -15, 8.5)]}, RejectReason.NOT_A_VOLUME),
        ({"places": [*lines(10, 9.5, 9), (-10, 18.5, 10, -1.5)]}, RejectReason.NOT_A_VOLUME),
    ],
)
def test_an_e2e_that_is_no_whole_raster(tmp_path: Path, change: dict[str, Any], reason: RejectReason) -> None:
    series = {"id": 12, "side": "R", "values": e2e_values(1), "axial": 0.0039, **change}
    assert reject(write_e2e(tmp_path / "eye.E2E", [series]), spacing_mm=SPACING)[0] == reason


@needs_files
def test_a_real_e2e_without_its_directory() -> None:
    path = VENDOR / "e2e_minimized.E2E"
    refused(reject(path), RejectReason.CORRUPT_FILE, "a directory with series")
    # its one B-scan is there: 253952 codes of 16 bits, 80 bytes after the mark of the image's container
    data = path.read_bytes()
    marks = (match.start() for match in re.finditer(b"MDbData", data))
    place = next(m for m in marks if struct.unpack_from("<I", data, m + 64)[0] == 35652097)
    codes = np.frombuffer(data, "<u2", 496 * 512, place + 80).reshape(496, 512)
    digits = sum(((codes >> bit) & 1) << (9 - bit) for bit in range(10))  # reversed, as the libraries have it
    ours, theirs = (np.log(e2e.intensities(c) + 2.44e-4) for c in (codes, codes & 0xFC00 | digits))
    for axis in (0, 1):
        steps = [np.abs(np.diff(values, axis=axis)).mean() for values in (ours, theirs)]
        assert steps[0] < 0.99 * steps[1]


def test_without_eyepy_a_reject_has_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vol = write_vol(tmp_path / "eye.vol", intensities(), SPACING)
    series = {"id": 1, "side": "R", "values": e2e_values(1), "axial": 0.0039}
    exchange = write_e2e(tmp_path / "eye.E2E", [series])
    for module in ("eyepy.io.he.vol_reader", "eyepy.io.he.e2e_reader"):
        monkeypatch.setitem(sys.modules, module, None)
    for path in (vol, exchange):
        refused(reject(path, spacing_mm=SPACING), RejectReason.MISSING_LIBRARY, "pip install eyepy==0.21.0")


# Topcon


def test_fda_and_fds_with_eye_device_and_spacing(tmp_path: Path) -> None:
    for name, voxels in (("eye.fda", speckle(8)), ("eye.fds", speckle(8).astype(np.uint16) * 257)):
        path = write_topcon(tmp_path / name, voxels, (0.36, 0.7), 2.6)
        header, actual = read(path, device="topcon_maestro2", laterality="L")
        assert np.array_equal(actual, speckle(8))
        assert header.spacing_mm == pytest.approx((0.7 / 7, 0.0026, 0.01))
        assert (header.laterality, header.device) == ("L", "topcon_maestro2")
        assert header.orientation_source == "unknown"
        with path.open("rb") as file:
            assert kinds.patient_id(header.transfer_syntax, file, str(path)) == "P-79 Ä"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": 3}, RejectReason.NOT_A_VOLUME),
        ({"without": ["IMG_JPEG"]}, RejectReason.MISSING_PIXEL_DATA),
        ({"without": ["PARAM_SCAN_04"]}, RejectReason.MISSING_SPACING),
        ({"eye": 0}, RejectReason.HEADER_MISMATCH),
    ],
)
def test_an_fda_that_is_refused(tmp_path: Path, changes: dict[str, Any], reason: RejectReason) -> None:
    path = write_topcon(tmp_path / "eye.fda", speckle(8), (0.36, 0.7), 2.6, **changes)
    assert reject(path, device="unknown", laterality="L")[0] == reason


def test_topcon_files_that_are_damaged(tmp_path: Path) -> None:
    whole = write_topcon(tmp_path / "eye.fda", speckle(8), (0.36, 0.7), 2.6).read_bytes()
    (tmp_path / "cut.fda").write_bytes(whole[:-30])
    assert reject(tmp_path / "cut.fda")[0] == RejectReason.TRUNCATED_PIXEL_DATA
    damaged = whole.replace(b"\xff\x4f\xff\x51", bytes(4))
    (tmp_path / "eye.fda").write_bytes(damaged)
    assert reject(tmp_path / "eye.fda", device="unknown")[0] == RejectReason.CORRUPT_PIXEL_DATA
    sizes = struct.Struct("<4I")  # width, height, B-scans of @IMG_JPEG, 0
    for size, reason in (
        ((36, 40, 7, 0), RejectReason.FRAME_COUNT_MISMATCH),  # one less than there are
        ((36, 40, 9, 0), RejectReason.CORRUPT_PIXEL_DATA),
        ((40, 36, 8, 0), RejectReason.FRAME_SIZE_MISMATCH),  # swapped
    ):
        changed = whole.replace(sizes.pack(36, 40, 8, 0), sizes.pack(*size))
        assert changed != whole
        (tmp_path / "eye.fda").write_bytes(changed)
        assert reject(tmp_path / "eye.fda", device="unknown")[0] == reason
    raw = write_topcon(tmp_path / "eye.fds", speckle(8).astype(np.uint16), (0.36, 0.7), 2.6).read_bytes()
    (tmp_path / "eye.fds").write_bytes(raw.replace(struct.pack("<2I", 36, 40), struct.pack("<2I", 36, 41)))
    assert reject(tmp_path / "eye.fds")[0] == RejectReason.HEADER_MISMATCH


def two_of(data: bytes) -> bytes:
    """The real FDA with its one B-scan of 128 twice."""
    start, count = 920, 33200  # of @IMG_JPEG
    twice = data[start : start + count] + data[start + 25 : start + count]
    twice = twice[:17] + struct.pack("<I", 2) + twice[21:]
    return data[: start - 4] + struct.pack("<I", len(twice)) + twice + data[start + count :]


def slanted(frames: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Voxels that are bright below a surface that falls from the first B-scan to the last, and its rows."""
    rows = np.broadcast_to(np.arange(10, 10 + 2 * frames, 2)[:, None], (frames, 36))
    noise = np.random.default_rng(7).integers(0, 30, (frames, 40, 36))
    return (noise + 150 * (np.arange(40)[:, None] >= rows[:, None])).astype(np.uint8), rows


@pytest.mark.parametrize("step", [1, -1])
def test_the_boundaries_of_an_fda_are_laid_on_the_b_scans_that_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    """From the bottom of the image, whichever way its lines run; without an edge they are left out."""
    voxels, rows = slanted()
    stored = (39 - rows)[::step]  # the bottom row is 0
    unknown = np.full_like(stored, 60000)
    contours = {"MULTILAYERS_7": stored - 4, "MULTILAYERS_1": stored, "RETINA_3": unknown}
    root = tmp_path / "tree"
    write_topcon(root / "eye.fda", voxels, (0.36, 0.7), 9.0, contours=contours)
    write_topcon(root / "flat.fda", voxels[:, ::-1].copy(), (0.36, 0.7), 9.0, contours=contours)
    short = {"MULTILAYERS_1": stored[:5]}
    write_topcon(root / "short.fda", voxels, (0.36, 0.7), 9.0, contours=short)
    assert index([str(root)]) == 0
    assert "labels not used: 2 (flat.fda, short.fda): no_edge: " in capsys.readouterr().out
    with np.load(root / "surfaces" / "eye.fda.surfaces.npz") as file:
        assert file["names"].tolist() == ["ILM", "BM"]
        np.testing.assert_array_equal(file["surfaces"], [rows, rows + 4])
    cells = {path: row["label_surfaces"] for path, row in table(root / "manifest.tsv").items()}
    assert cells == {"eye.fda": "./surfaces/eye.fda.surfaces.npz", "flat.fda": "", "short.fda": ""}


@needs_files
def test_the_boundaries_of_a_real_fda_are_one_row_and_an_order_from_oct_converters() -> None:
    """The digest is of oct-converter 0.7.0's array under numpy 1.26, as docs/guides/importers.md says."""
    path = VENDOR / "fda_minimized.fda"
    with path.open("rb") as file:
        drawn = topcon.contours(file, str(path), 650)
    frame = next(topcon.stored_frames(io.BytesIO(two_of(path.read_bytes())), str(path), {0}))
    assert list(drawn) == ["ILM", "RETINA_2", "RETINA_3", "BM"]
    theirs = (drawn["ILM"][::-1] + 1).astype("<i4")
    assert hashlib.sha256(theirs.tobytes()).hexdigest()[:16] == "ffff97049d6c933f"
    steps = [edge_step(frame[None], drawn["ILM"][[line]], 0.0035) for line in (0, -1)]
    assert steps[0] > 1.4 * steps[1]  # its one B-scan, the first, is that of the first line


@needs_files
def test_real_topcon_files_read_as_panimg_reads_them(tmp_path: Path) -> None:
    """The digests are of panimg 0.18.2's volumes, which pulls in GPL and SimpleITK and is no requirement."""
    fds = tmp_path / "eye.fds"
    fds.write_bytes((VENDOR / "fds_minimized.fds").read_bytes())
    assert reject(fds)[0] == RejectReason.IMPLAUSIBLE_SPACING  # 6 mm over four B-scans
    write_yaml(tmp_path / "eye.yaml", spacing_mm=[0.05, 0.0035, 0.01])
    with fds.open("rb") as file:
        frames = np.stack(list(topcon.stored_frames(file, str(fds))))
    assert hashlib.sha256(frames.tobytes()).hexdigest()[:16] == "8bf7886ef9a927ed"
    header, _ = open_record(record(fds, device="unknown"))  # 24 voxels have few grey levels
    assert (header.shape, header.laterality, header.device) == ((4, 3, 2), "L", "topcon_3doct_1000mk2")
    fda = VENDOR / "fda_minimized.fda"
    assert reject(fda)[0] == RejectReason.NOT_A_VOLUME
    path = tmp_path / "two.fda"
    path.write_bytes(two_of(fda.read_bytes()))
    write_yaml(tmp_path / "two.yaml", spacing_mm=[0.047, 0.0035, 0.0117])
    header, voxels = read(path, device="unknown")
    assert hashlib.sha256(voxels[0].astype("<u2").tobytes()).hexdigest()[:16] == "3c853644af5ecb20"
    assert np.array_equal(voxels[0], voxels[1])
    assert header.laterality == "L"


# Zeiss IMG


def test_an_img_with_the_shape_of_manifest_or_yaml(tmp_path: Path) -> None:
    path = tmp_path / "eye.img"
    path.write_bytes(speckle(8).tobytes())
    shape = speckle(8).shape
    reason, text = reject(path, spacing_mm=SPACING)
    assert reason == RejectReason.MISSING_SHAPE
    assert "number_of_frames, height and width in the manifest" in text
    assert np.array_equal(read(path, spacing_mm=SPACING, shape=shape)[1], speckle(8))
    assert reject(path, shape=shape)[0] == RejectReason.MISSING_SPACING
    assert reject(path, spacing_mm=SPACING, shape=(8, 40, 37))[0] == RejectReason.HEADER_MISMATCH
    write_yaml(tmp_path / "volume.yaml", shape=list(shape), spacing_mm=list(SPACING), axes=["D", "W", "-H"])
    path.write_bytes(np.ascontiguousarray(speckle(8)[:, ::-1].transpose(0, 2, 1)).tobytes())
    assert np.array_equal(read(path)[1], speckle(8))
    write_yaml(tmp_path / "volume.yaml", shape=[8, 40])
    assert reject(path)[0] == RejectReason.BAD_SIDECAR


# The commands


def test_index_and_prepare_take_a_folder_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "tree"
    layers = np.full((6, 3, 36), 12.0, np.float32) + np.arange(6, dtype=np.float32)[:, None, None]
    write_vol(root / "a" / "eye.vol", intensities(), SPACING, layers=layers)
    series = [{"id": k, "side": s, "values": e2e_values(k), "axial": 0.0039} for k, s in ((1, "R"), (2, "L"))]
    write_e2e(root / "b" / "eyes.E2E", series)
    write_topcon(root / "c" / "eye.fda", speckle(8), (0.36, 0.7), 2.6)
    (root / "d").mkdir()
    (root / "d" / "P5_OS_cube.img").write_bytes(speckle(8)[::-1].tobytes())
    (root / "d" / "slit.oct").write_bytes(bytes(5000))
    assert index([str(root)]) == 0
    text = capsys.readouterr().out
    assert "missing: no shape: 1 (d/P5_OS_cube.img)" in text
    assert "in a medium eye [0.1448, 0.0039, 0.2413]" in text
    assert "left out: Optovue or Bioptigen OCT 1: unsupported_format (d/slit.oct)" in text
    write_yaml(root / "b" / "volume.yaml", spacing_mm=[0.145, 0.0039, 0.0117])
    write_yaml(root / "d" / "volume.yaml", spacing_mm=list(SPACING), shape=[8, 40, 36], device="zeiss_cirrus")
    assert index([str(root)]) == 0
    rows = table(root / "manifest.tsv")
    assert {path: (row["laterality"], row["number_of_frames"]) for path, row in rows.items()} == {
        "a/eye.vol": ("L", "6"),
        "b/eyes.E2E#1": ("R", "4"),
        "b/eyes.E2E#2": ("L", "4"),
        "c/eye.fda": ("L", "8"),
        "d/P5_OS_cube.img": ("L", "8"),
    }
    people = {row["person_id"] for row in rows.values()}
    assert len(people) == 4  # of their ids in the files; both eyes of the E2E are one person's
    store = run_prepare(root, tmp_path / "store", *GRID)
    made = [*root.glob("*.tsv"), *(tmp_path / "store").rglob("*")]
    for path in filter(Path.is_file, made):  # ids and names of the files' headers
        assert not re.search(rb"P-7|Given", path.read_bytes()), path
    with np.load(root / rows["a/eye.vol"]["label_surfaces"]) as file:
        assert file["names"].tolist() == ["ILM", "BM", "RNFL"]
        assert np.array_equal(file["surfaces"], layers.transpose(1, 0, 2))
    tables = tmp_path / "tables"  # where the tree may not be written
    assert index([str(root), "--out", str(tables)]) == 0
    assert (tables / table(tables / "manifest.tsv")["a/eye.vol"]["label_surfaces"]).is_file()
    assert not (root / "tables").exists()
    run_prepare(root, tmp_path / "store", *GRID, "--labels")
    drawn = pd.read_parquet(tmp_path / "store" / "heights.parquet").set_index("path")
    assert drawn.status.to_dict() == {"./surfaces/a/eye.vol.surfaces.npz": "kept"}
    assert set(store.index.status) == {"kept"}
    assert store.index.set_index("path").laterality.to_dict()["b/eyes.E2E#2"] == "L"
