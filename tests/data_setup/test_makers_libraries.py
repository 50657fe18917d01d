"""data_setup/readers/makers/ beside oct-converter on the same files: equal, or a difference by name."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup.readers.makers import topcon
from tests.data_setup.importers.reading import read
from tests.data_setup.importers.test_heidelberg import VENDOR
from tests.data_setup.test_makers import two_of
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_yaml
from tests.support.makers_factory import write_e2e, write_topcon

SPACING = (0.12, 0.0039, 0.0117)
pytestmark = pytest.mark.soak  # `make soak` installs it
# it imports OpenCV, which wants libGL
READERS = pytest.importorskip("oct_converter.readers", exc_type=ImportError)


@pytest.fixture(autouse=True)
def old_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """oct-converter 0.7.0 calls np.fromstring on bytes, which numpy 2.3 took away for frombuffer."""

    def fromstring(data: bytes, dtype: Any) -> np.ndarray:
        return np.frombuffer(data, dtype).copy()

    monkeypatch.setattr(np, "fromstring", fromstring)


def theirs(kind: str, path: Path, *shape: int) -> Any:
    """Their volume, or the list of an E2E."""
    return getattr(READERS, kind)(path).read_oct_volume(*shape)


def test_voxels_eye_spacing_and_boundaries_of_an_fda(tmp_path: Path) -> None:
    """They divide the field by the B-scans, count rows from 1 and take the lines from the last on."""
    stored = np.random.default_rng(0).integers(5, 30, (2, 8, 36))
    lines = {"MULTILAYERS_1": stored[0], "MULTILAYERS_7": stored[1]}
    path = write_topcon(
        tmp_path / "eye.fda", speckle(8), (0.36, 0.7), 2.6, contours=lines, patient="P-1", date=(2020, 1, 2)
    )
    other = theirs("FDA", path)
    header, voxels = read(path, device="topcon_maestro2")
    np.testing.assert_array_equal(voxels, np.stack(other.volume))
    assert header.laterality == other.laterality == "L"
    lateral, distance, axial = other.pixel_spacing
    assert header.spacing_mm == pytest.approx((distance * 8 / 7, axial, lateral))
    with path.open("rb") as file:
        drawn = topcon.contours(file, str(path), 40)
    assert set(drawn) == set(other.contours) == {"ILM", "BM"}
    for name, rows in drawn.items():
        np.testing.assert_array_equal(rows, other.contours[name][::-1] - 1)


def test_voxels_and_eye_of_an_fds(tmp_path: Path) -> None:
    values = speckle(8, bits=16)
    path = write_topcon(
        tmp_path / "eye.fds", values, (0.36, 0.7), 2.6, eye=0, patient="P-1", date=(2020, 1, 2)
    )
    other = theirs("FDS", path)
    with path.open("rb") as file:
        np.testing.assert_array_equal(np.stack(list(topcon.stored_frames(file, str(path)))), other.volume)
    header, _ = read(path, device="topcon_maestro2")
    assert (
        (header.laterality, header.shape) == (other.laterality, np.shape(other.volume)) == ("R", (8, 40, 36))
    )


def test_voxels_of_each_series_of_an_e2e(tmp_path: Path) -> None:
    """They reverse the mantissa, so these codes' reads the same from both ends. The eyes they do not have."""
    mantissas = np.array([m for m in range(1024) if f"{m:010b}" == f"{m:010b}"[::-1]])
    rng = np.random.default_rng(0)
    series = []
    for number, side in ((12, "R"), (15, "L")):
        codes = rng.integers(48, 63, (4, 40, 36)) * 1024 + rng.choice(mantissas, (4, 40, 36))
        series.append({"id": number, "side": side, "values": codes.astype(np.uint16), "axial": 0.0039})
    path = write_e2e(tmp_path / "eyes.e2e", series)
    every = theirs("E2E", path)
    assert [one.volume_id.rpartition("_")[2] for one in every] == ["12", "15"]
    assert [one.laterality for one in every] == [None, None]
    for one, other in zip(series, every, strict=True):
        header, voxels = read(f"{path}#{one['id']}", spacing_mm=SPACING)
        assert header.laterality == one["side"]
        assert np.abs(voxels - 255 * np.stack(other.volume)).max() <= 1.0
        assert other.pixel_spacing[1] == pytest.approx(0.0039)


def test_voxels_of_an_img(tmp_path: Path) -> None:
    """They take the shape from the caller, as here, and the axial axis as the fastest."""
    path = tmp_path / "P1_Macular Cube 512x128_1-2-2020_3-4-5_OD_sn1_cube_raw.img"
    path.write_bytes(speckle(8).tobytes())
    write_yaml(tmp_path / "volume.yaml", shape=[8, 45, 32], spacing_mm=list(SPACING), axes=["D", "W", "H"])
    header, voxels = read(path)
    other = theirs("IMG", path, 45, 32)
    np.testing.assert_array_equal(voxels, np.stack(other.volume))
    assert header.laterality in (None, other.laterality)


@pytest.mark.skipif(not VENDOR.is_dir(), reason="the vendors' files are not part of the project")
def test_the_real_files_that_are_cut() -> None:
    """One B-scan of 650 x 512, which is no volume, and four of 3 x 2."""
    fda, fds = VENDOR / "fda_minimized.fda", VENDOR / "fds_minimized.fds"
    other = theirs("FDA", fda)
    with fda.open("rb") as file:
        drawn = topcon.contours(file, str(fda), 650)
    names = {"ILM": "RETINA_1", "RETINA_2": "RETINA_2", "RETINA_3": "RETINA_3", "BM": "RETINA_4"}
    for name, rows in drawn.items():
        np.testing.assert_array_equal(rows, other.contours[names[name]][::-1] - 1)
    frame = next(topcon.stored_frames(io.BytesIO(two_of(fda.read_bytes())), str(fda), {0}))
    np.testing.assert_array_equal(frame, other.volume[0])
    assert np.allclose(np.delete(other.pixel_spacing, 1), (6 / 512, 0.0035), rtol=1e-3)
    other = theirs("FDS", fds)
    with fds.open("rb") as file:
        np.testing.assert_array_equal(np.stack(list(topcon.stored_frames(file, str(fds)))), other.volume)
