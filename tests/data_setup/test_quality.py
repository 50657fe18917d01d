"""Each fault of a scan, planted in phantom eyes of four devices at known strength, moves its own number."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
import pytest
from scipy.stats import spearmanr

from data_setup.jobs import read_volume
from data_setup.manifest import select_wanted, unknown_record
from data_setup.phantom.cohort import make_participants
from data_setup.phantom.files import scan_volume
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.store.format import QUALITY_COLUMNS
from data_setup.store.quality import LIMITS, Meter
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import repeats, summarise, table
from tests.support.dicom_factory import write_opt
from tests.support.finetune_factory import config, index_store, make_world
from tests.support.import_factory import write_folder
from utils.errors import ConfigError, UserError

Spacing = tuple[float, float, float]
Plant = Callable[[np.ndarray, float, Spacing, np.random.Generator], np.ndarray]
SHAPE = (20, 96, 64)
STRENGTHS = np.linspace(0, 1, 4)
RUN = {"prepared": 1, "reused": 0, "seconds": 1.0, "volumes_per_s": 1.0, "workers": 0}
RUN |= {"peak_memory_mb": None, "audit": None, "source_missing": 0}
RANGE_DB = 34.0  # of the display of a phantom device


def darker(volume: np.ndarray, strength: float, _: Spacing, rng: np.random.Generator) -> np.ndarray:
    """A signal that is up to 20 dB weaker over the same noise."""
    power = 10 ** (volume / 255 * RANGE_DB / 10) * 10 ** (-2.0 * strength)
    level = 10 * np.log10(power + rng.standard_exponential(volume.shape) * strength) / RANGE_DB
    return np.rint(255 * np.clip(level + 0.2 * strength, 0, 1)).astype(np.uint8)


def cut(volume: np.ndarray, strength: float, _: Spacing, rng: np.random.Generator) -> np.ndarray:
    """In a share of the B-scans the upper third of the retina lies above the scan."""
    result = volume.copy()
    chosen = rng.permutation(len(volume))[: round(strength * len(volume))]
    for d in chosen:
        bright = volume[d].mean(axis=1) > volume[d].mean()
        up = int(np.argmax(bright)) + 12
        result[d, : volume.shape[1] - up] = volume[d, up:]
        result[d, volume.shape[1] - up :] = volume[d, :1].mean()
    return result


def shaken(volume: np.ndarray, strength: float, spacing: Spacing, rng: np.random.Generator) -> np.ndarray:
    """Every B-scan lies up to 60 um off, axially."""
    rows = np.rint(rng.normal(size=len(volume)) * 0.03 * strength / spacing[1]).astype(int)
    return np.stack([np.roll(frame, n, axis=0) for frame, n in zip(volume, rows, strict=True)])


def without(volume: np.ndarray, strength: float, _: Spacing, rng: np.random.Generator) -> np.ndarray:
    """Up to half of the B-scans are black, or repeat the one before."""
    result = volume.copy()
    chosen = sorted((1 + rng.permutation(len(volume) - 1))[: round(0.5 * strength * len(volume))].tolist())
    for number, d in enumerate(chosen):
        result[d] = result[d - 1] if number % 2 else 7
    return result


def glaring(volume: np.ndarray, strength: float, *_: object) -> np.ndarray:
    """Grey values up to four times as bright, cut at 255."""
    return np.clip(volume * (1 + 3 * strength), 0, 255).astype(np.uint8)


def measured(volume: np.ndarray, spacing: Spacing) -> dict[str, float]:
    meter = Meter()
    passed = list(meter.watch(iter(volume)))
    assert all(a is b or np.array_equal(a, b) for a, b in zip(passed, volume, strict=True))
    return meter.columns(spacing)


@pytest.fixture(scope="module")
def eyes() -> list[tuple[np.ndarray, Spacing]]:
    """Macular scans, one a device."""
    chosen: dict[str, tuple[np.ndarray, Spacing]] = {}
    for person in make_participants(8, 3):
        for scan in person.scans:
            if scan.protocol.region == "Macula" and scan.protocol.device not in chosen:
                volume, spacing = scan_volume(person, scan, 3, "small", SHAPE)
                chosen[scan.protocol.device] = (volume.voxels, spacing)
    assert len(chosen) >= 3
    return list(chosen.values())


@pytest.mark.parametrize(
    ("column", "plant", "sign"),
    [
        ("signal_db", darker, -1),
        ("clipped_share", cut, 1),
        ("motion_um", shaken, 1),
        ("missing_share", without, 1),
        ("saturated_share", glaring, 1),
    ],
)
def test_a_fault_moves_its_number(
    column: str, plant: Plant, sign: int, eyes: list[tuple[np.ndarray, Spacing]]
) -> None:
    strengths, values, whole = [], [], []
    for number, (volume, spacing) in enumerate(eyes):
        for strength in STRENGTHS:
            rng = np.random.default_rng([number, 7])
            columns = measured(plant(volume, float(strength), spacing, rng), spacing)
            strengths.append(strength)
            values.append(columns[column])
            whole.append(columns["quality"])
    assert sign * spearmanr(strengths, values).statistic > 0.9, (column, np.reshape(values, (len(eyes), -1)))
    of_eye = np.reshape(whole, (len(eyes), -1))
    assert (of_eye[:, -1] < 0.75 * of_eye[:, 0]).all(), of_eye
    assert (of_eye[:, 0] > 0.8).all(), of_eye
    assert set(LIMITS) < set(columns)


def test_a_store_of_before_opens_and_asks_for_another_one(tmp_path: Path) -> None:
    """Without the columns nothing is filtered, and data.min_quality says what to do."""
    root = make_world(tmp_path, {"train": 2, "val": 2, "test": 2})
    path = root / "store" / "index.parquet"
    pd.read_parquet(path).drop(columns=list(QUALITY_COLUMNS)).to_parquet(path)
    store = PreparedStore.open(str(root / "store"))
    assert store.index["quality"].isna().all()
    assert len(select_wanted(config(root, root / "run"), store.index)) == 12
    with pytest.raises(ConfigError, match=r"data\.min_quality: .* found 12 of 12 without"):
        select_wanted(config(root, root / "run", "data.min_quality=0.5"), store.index)
    path.unlink()
    pd.DataFrame({"row": [0]}).to_parquet(path)
    with pytest.raises(UserError, match="found a damaged one"):
        PreparedStore.open(str(root / "store"))


def test_volumes_of_too_little_quality_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = index_store([{"quality": value} for value in (0.1, 0.4, 0.5, 0.9)])
    with caplog.at_level(logging.INFO):
        chosen = select_wanted(config(tmp_path, tmp_path / "run", "data.min_quality=0.5"), store.index)
    assert chosen["row"].tolist() == [2, 3]
    assert "data.min_quality 0.5: 2 of 4 volumes are left out" in caplog.text


def test_prepare_measures_what_it_reads(tmp_path: Path, eyes: list[tuple[np.ndarray, Spacing]]) -> None:
    """The row of a file has the numbers of its frames, and the table of the store says them."""
    volume, _ = eyes[0]
    path = write_opt(tmp_path, without(volume, 1.0, (1, 1, 1), np.random.default_rng(0)))
    cfg = config(tmp_path, tmp_path / "run")
    header, _, columns = read_volume(unknown_record(path), cfg.spatial, cfg.data.storage_options)
    expected = measured(pydicom.dcmread(path).pixel_array, header.spacing_mm)
    assert {name: columns[name] for name in QUALITY_COLUMNS} == expected
    assert expected["missing_share"] == pytest.approx(0.5)
    index = index_store([{**expected, "protocol": "p", "split": "train"}]).index
    report = summarise(index, {"synthetic": True, "geometry": {}}, {}, RUN)
    assert report["quality"]["worst"] == {"missing_share": 1}
    assert "quality of 1: median 0.00" in table(report)


def test_pictures_of_strangers_are_no_volume(tmp_path: Path, eyes: list[tuple[np.ndarray, Spacing]]) -> None:
    """A scan in order is kept as images too; B-scans, or threes in a row, that are shifted are strangers'."""
    cfg = config(tmp_path, tmp_path / "run")
    for number, (volume, spacing) in enumerate(eyes):
        places = (np.arange(len(volume)) * 0.618 % 1 - 0.5) * 0.6 * volume.shape[1]  # neighbours far apart
        in_threes = np.repeat(places, 3)[: len(volume)]
        others, in_order = (
            np.stack([np.roll(frame, round(by), 0) for frame, by in zip(volume, by_frame, strict=True)])
            for by_frame in (places, in_threes)
        )
        for name, voxels in (("eye", volume), ("others", others), ("sorted", in_order)):
            folder = write_folder(tmp_path / f"{number}" / name, voxels, spacing_mm=list(spacing))
            record = unknown_record(str(folder), f"{number}/{name}")
            if name == "eye":
                assert "message" not in read_volume(record, cfg.spatial, cfg.data.storage_options)[2]
                continue
            with pytest.raises(OCTReadError, match="pictures of different scans") as caught:
                read_volume(record, cfg.spatial, cfg.data.storage_options)
            assert caught.value.reason == RejectReason.NOT_A_VOLUME


def test_two_eyes_numbered_on_in_one_folder_are_said(
    tmp_path: Path, eyes: list[tuple[np.ndarray, Spacing]]
) -> None:
    """The place is not the middle."""
    cfg = config(tmp_path, tmp_path / "run")
    for number, (volume, spacing) in enumerate(eyes[1:]):
        voxels = np.concatenate([volume[:14], eyes[0][0]])
        folder = write_folder(tmp_path / f"{number}", voxels, spacing_mm=list(spacing))
        record = unknown_record(str(folder), f"{number}")
        message = str(read_volume(record, cfg.spatial, cfg.data.storage_options)[2]["message"])
        assert message.startswith("nothing goes on from B-scan 14 to 15 of 34: two eyes numbered on")
        rows = [{"path": "1/OD", "message": message}, {"path": "2/OD", "message": None}]
        texts = repeats(index_store(rows).index, {}, {})
        assert texts == [f"warning: 1/OD: {message}"]


def test_what_is_worth_nothing_and_what_lies_outside_is_said(tmp_path: Path) -> None:
    rows = [{"quality": 0.0, "path": f"{n}.dcm", "protocol": "p", "split": "train"} for n in range(7)]
    rows[3]["quality"], rows[6]["quality"] = 0.004, 0.009  # as good as 0
    rows.append({"quality": 0.5, "path": "good.dcm", "lost_fraction": 0.6, "protocol": "wide"})
    report = summarise(index_store(rows).index, {"synthetic": True, "geometry": {}}, {}, RUN)
    quality = [0, 0, 0, 0.004, 0, 0, 0.009]
    assert report["worthless_files"] == {f"{n}.dcm": pytest.approx(q) for n, q in enumerate(quality)}
    text = table(report)
    lines = [f"quality {q:g}: {n}.dcm; next: look at it" for n, q in enumerate(quality)]
    assert [line in text for line in lines] == [True] * 5 + [False] * 2
    assert "quality below 0.01: 2 more, in prepare_report.json" in text
    assert "warning: wide: 60% of the scan lies outside the grid" in text
    assert text.count("of the scan lies outside") == 1


def test_b_scans_that_no_plane_is_are_said() -> None:
    """B-scans closer than planes, and further apart than half of that; a mixed store leaves none out."""
    apart = {"shape_before_d": 25.0, "spacing_before_d": 0.1, "spacing_after_d": 0.12, "quality": 1.0}
    index = index_store([{**apart, "protocol": "p", "split": "train"}]).index
    geometry = {"image_size": [32, 8, 8], "planes": "nearest"}
    text = table(summarise(index, {"synthetic": True, "geometry": geometry}, {}, RUN))
    assert re.search(r"warning: p: left out, .* apart: B-scans \d+, \d+, \d+ and \d+ more of 25;", text)
    assert "0.1 mm along D (spatial.target_spacing) has a plane for each" in text
    assert "planes: mixed" not in text
    del geometry["planes"]
    text = table(summarise(index, {"synthetic": True, "geometry": geometry}, {}, RUN))
    assert "left out" not in text
    assert "planes: mixed of neighbouring B-scans, as an older version began this store" in text
