"""What lies on volumes, whatever it is: done once, damaged, absent, and which way unclear B-scans run."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from data_setup import prepare
from data_setup.attach.flow import CubeJob
from data_setup.attach.heights import MapJob
from data_setup.attach.jobs import Job, edge_step, of_protocols, to_turn
from data_setup.attach.stored import Stored, StoredFlow, StoredHeights, StoredLabels
from tests.support.flow_factory import make_flow_tree, prepare_flow, rows_of
from tests.support.heights_factory import words
from utils import storage
from utils.errors import UserError

SHAPE = (14, 60, 18)
STORED: dict[str, type[Stored]] = {"heights": StoredHeights, "labels": StoredLabels, "flow": StoredFlow}
MODES = ["heights", "flow"]
FILE = {"heights": "associated_segmentation_file_path", "flow": "associated_enface_1_file_path"}
LINK = {"heights": "associated_segmentation_file_path", "flow": "flow_cube_file_path"}
NOTHING = {"heights": "no_segmentation 3", "flow": "no_flow_cube 3"}
REMARK = {"heights": "labels of a machine, not truth", "flow": "no measure of speed, and no truth"}
UNCLEAR = {"heights": (MapJob, "edge", 0), "flow": (CubeJob, "fit", 0)}  # scans that do not decide


def lay(root: Path, mode: str, *overrides: str) -> int:
    return prepare.main([*words(root, *overrides), "--workers", "0", f"--{mode}"])


def rows_at(root: Path, mode: str) -> dict[Path, int]:
    """The rows' JSON -> when it was written."""
    return {path: path.stat().st_mtime_ns for path in (root / "store" / STORED[mode].KIND.rows).iterdir()}


def table_of(root: Path, mode: str) -> pd.DataFrame:
    return pd.read_parquet(root / "store" / f"{mode}.parquet")


def unclear(job: type[Job], index: pd.DataFrame) -> pd.Series:
    return job.is_unclear(*(index[name] for name in job.SCORES))


def contents(stored: Stored, row: int) -> list[np.ndarray]:
    images = list(stored.read_slabs(row).values()) if isinstance(stored, StoredFlow) else []
    return [stored.read(row), *images]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    make_flow_tree(root / "tree", 3, (), (0, 2, 5), SHAPE)
    prepare_flow(root)
    assert lay(root, "heights") == 0
    return root


@pytest.mark.parametrize("mode", MODES)
def test_another_run_does_nothing_and_a_changed_file_is_done_again(
    plain: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    before = rows_at(plain, mode)
    line = rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv")[1]
    file = plain / "tree" / str(line[FILE[mode]]).strip("/")
    file.write_bytes(file.read_bytes()[:-4] + np.float32(40).tobytes())
    assert lay(plain, mode) == 0
    (changed,) = (path for path, time in rows_at(plain, mode).items() if before[path] != time)
    assert f"/{json.loads(changed.read_text())['path']}" == line[LINK[mode]]
    assert REMARK[mode] in capsys.readouterr().out


@pytest.mark.parametrize("mode", MODES)
def test_an_unclear_file_runs_as_the_clear_ones_of_its_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Five Spectralis scans, all reversed: that whose scan says least of it does not keep its file's order.

    The images of a cube follow it. What the clear ones show is kept when the command runs again.
    """
    make_flow_tree(tmp_path / "tree", 5, ("reversed",), (0,), SHAPE, ("reversed",))
    assert prepare.main([*words(tmp_path), "--workers", "0"]) == 0
    assert lay(tmp_path, mode) == 0
    stored = STORED[mode].open(str(tmp_path / "store"))
    before = {row: contents(stored, row) for row in stored.index.row}
    assert stored.index.reversed_d.all()
    job, score, count = UNCLEAR[mode]
    assert unclear(job, stored.index).sum() == count
    ratios = stored.index[f"{score}_reversed"] / stored.index[score].clip(lower=1e-6)
    monkeypatch.setattr(job, "CLEARER", float(ratios.nsmallest(2).mean()))
    for path in rows_at(tmp_path, mode):
        path.unlink()
    for _ in range(2):
        assert lay(tmp_path, mode) == 0
        stored = STORED[mode].open(str(tmp_path / "store"))
        assert unclear(job, stored.index).sum() == 1
        assert stored.index.reversed_d.all()
        for row, values in before.items():
            for again, value in zip(contents(stored, row), values, strict=True):
                np.testing.assert_array_equal(again, value)
    report = json.loads((tmp_path / "store" / f"{mode}_report.json").read_text())
    of_device = report["by_device"]["heidelberg_spectralis"]
    assert (report["notes"]["direction_unclear"] if mode == "heights" else of_device["unclear"]) == 1


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("heights", lambda url: StoredHeights.open(url).read(1)),
        ("flow", lambda url: StoredFlow.open(url).read(1)),
        ("enface", lambda url: StoredFlow.open(url).read_slabs(1)),
    ],
)
def test_a_damaged_chunk_is_an_error(plain: Path, name: str, read: Callable[[str], object]) -> None:
    url, chunk = str(plain / "store"), plain / "store" / name / "c.1.0.0.0"
    content = chunk.read_bytes()
    try:
        chunk.write_bytes((plain / "store" / name / "c.2.0.0.0").read_bytes())
        with pytest.raises(storage.StorageError, match=f"{name} of row 1, found others"):
            read(url)
        chunk.unlink()
        with pytest.raises(storage.StorageError, match=f"{name} of row 1"):
            read(url)
    finally:
        chunk.write_bytes(content)


@pytest.mark.parametrize("mode", STORED)
def test_a_store_without_it_says_how_to_get_it(tmp_path: Path, mode: str) -> None:
    with pytest.raises(UserError, match=rf"run data_setup\.prepare --{mode}"):
        STORED[mode].open(str(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_a_manifest_that_links_nothing_is_an_error(plain: Path, tmp_path: Path, mode: str) -> None:
    before = table_of(plain, mode)
    lines = pd.DataFrame(rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv"))
    lines.assign(**{LINK[mode]: "Not reported"}).to_csv(tmp_path / "m.tsv", sep="\t", index=False)
    with pytest.raises(UserError, match=NOTHING[mode]):
        lay(plain, mode, f"data.octa_manifest_path={tmp_path / 'm.tsv'}")
    assert lay(plain, mode) == 0
    pd.testing.assert_frame_equal(table_of(plain, mode), before)


def test_a_protocol_decides_where_its_clear_rows_agree() -> None:
    def table(*reversed_d: bool, status: str = "kept", devices: str = "aaaaaaaaa") -> pd.DataFrame:
        columns = {"row": range(len(reversed_d)), "status": status, "protocol": "p", "reversed_d": reversed_d}
        return pd.DataFrame({**columns, "device": list(devices[: len(reversed_d)])})

    def last(index: pd.DataFrame) -> dict[int, bool]:
        return to_turn(index, index.row == index.row.max())

    assert last(table(True, True, True, False)) == {3: True}
    assert last(table(False, False, False, True)) == {3: False}
    assert last(table(True, True, True, True)) == {}  # lies there
    assert last(table(True, True, False)) == {}  # of two
    assert last(table(True, True, True, False, False)) == {}  # they disagree
    # what was turned when the others agreed lies as in the file again
    assert last(table(True, True, True, False, True)) == {4: False}
    assert last(table(True, True, True, False, devices="aaab")) == {}  # another scanner's habit
    assert last(table(True, True, True, False, status="no_edge")) == {}
    assert of_protocols(table(True, True, True), pd.Series([False] * 3)) == {("a", "p"): True}


def test_edge_step_of_a_step() -> None:
    volume = np.zeros((2, 20, 3), np.uint8)
    volume[:, 10:] = 100
    assert edge_step(volume, np.full((2, 3), 9.5), 0.02) == pytest.approx(2)
    assert edge_step(volume, np.full((2, 3), 3.0), 0.02) == 0
    assert edge_step(volume, np.full((2, 3), np.nan), 0.02) == -np.inf
