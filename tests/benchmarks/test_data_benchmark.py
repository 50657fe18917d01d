"""The data benchmark on tiny volumes: it compares the same work, and its numbers have their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import cli as data
from benchmarks.data import files as data_files
from benchmarks.data import prepare as data_prepare
from benchmarks.data import read as data_read
from data_setup.jobs import prepare_row
from data_setup.readers.dicom import open_volume
from data_setup.store.writer import StoreWriter
from utils import storage

SHAPES = dict(zip(data_files.PROTOCOLS, ((12, 96, 64), (24, 100, 64)), strict=True))
GRIDS = {(8, 24, 40): (0.75, 0.096, 0.15), (8, 24, 24): (0.75, 0.096, 0.25)}
PREPARE = {"plain_s", "one_worker_s", "two_workers_s", "speedup_1", "speedup_2"}
READ = {"store_s", "dicom_s", "ratio", "fraction_of_codec_rate"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data_bench")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmark at a size that takes no time, without processes of its own."""
    monkeypatch.setattr(data_files, "WRITERS", 0)
    monkeypatch.setattr(data, "FULL_SIZE", SHAPES)
    monkeypatch.setattr(data, "VOLUMES", 2)
    for module in (data_read, data_prepare):
        monkeypatch.setattr(module, "GRIDS", GRIDS)
    monkeypatch.setattr(data_prepare, "run_jobs", lambda jobs, workers: map(prepare_row, jobs))
    monkeypatch.setattr(data_read, "from_bucket", lambda *_: {})


@pytest.mark.usefixtures("tiny")
def test_the_whole_command_writes_its_numbers(work: Path) -> None:
    path = work / "numbers.json"
    assert data.main(["--repeats", "1", "--work", str(work), "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    prepare, read = result["prepare"], result["read"]
    assert prepare.keys() >= PREPARE
    assert prepare["speedup_2"] == pytest.approx(prepare["plain_s"] / prepare["two_workers_s"])
    turns = prepare["seconds_each"]["jpeg2000"]["plain"]
    assert prepare["plain_s"] == pytest.approx(np.mean([np.median(v) for v in turns.values()]))
    assert set(turns) == set(SHAPES)
    assert read.keys() >= READ
    assert read["ratio"] == pytest.approx(read["dicom_s"] / read["store_s"])
    assert 0 < read["fraction_of_codec_rate"] < 1


@pytest.mark.usefixtures("tiny")
def test_the_plain_loop_makes_the_same_volume(work: Path) -> None:
    """Or its seconds would be those of another task. On a grid as fine as the file: theirs would alias."""
    size = (8, 64, 48)
    cfg = data_files.configure(size, (0.5, 0.02, 0.09))
    for by_name in data_files.dicom_files(work, SHAPES).values():
        for path in by_name.values():
            ours = data_prepare.decode_and_resample(path, cfg)
            theirs = data_prepare.plain_loop(path, cfg)
            if open_volume(str(path))[0].flip_d:  # which the plain loop does not know
                theirs = theirs[::-1]
            assert theirs.shape == size
            assert theirs.dtype == np.uint8
            d0, d1, h0, h1, w0, w1 = ours.valid_box
            inside = np.s_[d0 + 1 : d1 - 1, h0 + 1 : h1 - 1, w0 + 1 : w1 - 1]
            a, b = ours.voxels[inside].astype(float).ravel(), theirs[inside].astype(float).ravel()
            assert np.corrcoef(a, b)[0, 1] > 0.95


@pytest.mark.usefixtures("tiny")
def test_a_file_that_is_rejected_ends_the_measurement(tmp_path: Path) -> None:
    (size, spacing), *_ = GRIDS.items()
    path = tmp_path / f"9001_{data_files.PROTOCOLS[0]}_l_1.dcm"
    path.write_bytes(b"no DICOM at all")
    with pytest.raises(storage.StorageError, match="not_dicom"):
        data_prepare.seconds_by_workers(path, data_files.configure(size, spacing), 1, 1)


def test_a_row_costs_one_request_for_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zarr_format Zarr asks for the files of version 2 as well, for every row of a bucket."""
    size, spacing = (4, 6, 8), (1.0, 1.0, 1.0)
    cfg = data_files.configure(size, spacing)
    writer = StoreWriter("memory://one-request")
    writer.create(cfg.spatial, str(tmp_path), synthetic=True)
    (row,) = writer.append_records([{"path": "a", "sop_instance_uid": "b"}])
    asked: list[str] = []
    real = storage.read_bytes

    def read_bytes(url: str, *arguments: object) -> bytes:
        asked.append(url.rsplit("/", 1)[1])
        return real(url, *arguments)

    monkeypatch.setattr(storage, "read_bytes", read_bytes)
    writer.write_row(row, np.ones(size, np.uint8), {"status": "kept"})
    assert [name for name in asked if name != f"c.{row}.0.0.0"] == ["zarr.json"]
