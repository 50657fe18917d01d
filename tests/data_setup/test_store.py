"""data_setup/store: rows never move, statuses are kept, volumes come back, bit for bit."""

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup.resample import BLENDED, NEAREST, Resampled, rule_of
from data_setup.store.format import FORMAT_VERSION, INDEX_COLUMNS, RECORD_COLUMNS, checksum, chunk_key
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, measure
from tests.support.prepare_runs import unname_planes
from utils import storage
from utils.config.schema import SpatialConfig
from utils.errors import UserError

SIZE = (4, 6, 5)
SPATIAL = SpatialConfig(target_spacing=(0.1, 0.02, 0.02), image_size=SIZE, patch_size=(2, 2, 5))
BOX = (0, 4, 1, 5, 0, 5)


def record(number: int, **changes: Any) -> dict[str, Any]:
    fields = dict.fromkeys(RECORD_COLUMNS) | {
        "person_id": f"9{number:03d}",
        "device": "topcon_triton",
        "path": f"retinal_oct/{number}.dcm",
        "sop_instance_uid": f"2.25.{number}",
        "split": "train",
    }
    return fields | changes


def store_of(url: str, count: int = 1) -> StoreWriter:
    """A finished store of so many volumes."""
    writer = StoreWriter(url)
    writer.create(SPATIAL, "gs://source", synthetic=False)
    rows = writer.append_records([record(number) for number in range(count)])
    for row in rows:
        write(writer, row, volume(row))
    writer.finalise(rows)
    return writer


def volume(seed: int) -> np.ndarray:
    voxels = np.zeros(SIZE, np.uint8)
    d0, d1, h0, h1, w0, w1 = BOX
    inside = np.random.default_rng(seed).integers(1, 255, (d1 - d0, h1 - h0, w1 - w0))
    voxels[d0:d1, h0:h1, w0:w1] = inside
    return voxels


def write(writer: StoreWriter, row: int, voxels: np.ndarray) -> dict[str, Any]:
    fields = measure(Resampled(voxels, BOX, (0.1, 0.02, 0.02), 0.25)) | {"status": "kept"}
    writer.write_row(row, voxels, fields)
    return fields


@pytest.fixture(params=["disk", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else f"memory://{tmp_path.name}/store"


@pytest.fixture
def filled(url: str) -> StoreWriter:
    """Row 0 kept, row 1 rejected, row 2 kept, row 3 pending."""
    writer = StoreWriter(url)
    writer.create(SPATIAL, "gs://source", synthetic=True)
    rows = writer.append_records([record(n, age=50 + n if n else None) for n in range(4)])
    assert rows == [0, 1, 2, 3]
    write(writer, 0, volume(0))
    writer.write_row(1, None, {"status": "missing_file", "message": "no such file"})
    write(writer, 2, volume(2))
    writer.finalise(rows)
    return writer


def test_volumes_and_index_come_back(filled: StoreWriter) -> None:
    store = PreparedStore.open(filled.url)
    assert list(store.index.columns) == list(INDEX_COLUMNS)
    assert store.index.status.to_list() == ["kept", "missing_file", "kept", "pending"]
    assert store.index.message.to_list()[1] == "no such file"
    assert store.kept.tolist() == [0, 2]
    assert store.image_size == SIZE
    assert store.attrs["synthetic"] is True
    assert store.attrs["source_root"] == "gs://source"
    assert store.attrs["normalisation"] == "zscore_valid"
    assert store.index.age.isna().to_list() == [True, False, False, False]
    for row in (0, 2):
        voxels = store.read(row)
        assert voxels.dtype == np.uint8
        assert voxels.flags.writeable
        assert voxels.flags.c_contiguous
        np.testing.assert_array_equal(voxels, volume(row))
        assert checksum(voxels) == store.index.checksum[row]
        inside = volume(row)[:, 1:5].astype(np.float64)
        assert store.index.intensity_mean[row] == pytest.approx(inside.mean(), rel=1e-12)
        assert store.index.intensity_std[row] == pytest.approx(inside.std(), rel=1e-12)
    box = store.index.loc[2, [f"valid_{a}{i}" for a in "dhw" for i in "01"]].to_numpy(float)
    assert box.tolist() == list(BOX)
    assert store.index.valid_fraction[0] == pytest.approx(4 / 6)


@pytest.mark.parametrize(("row", "status"), [(1, "missing_file"), (3, "pending"), (9, "no such row")])
def test_only_kept_rows_can_be_read(filled: StoreWriter, row: int, status: str) -> None:
    with pytest.raises(ValueError, match=f"row {row}: expected a kept row, found {status}"):
        PreparedStore.open(filled.url).read(row)


def test_rows_never_move(filled: StoreWriter) -> None:
    """New records are appended wherever they stand in the manifest; a vanished one keeps its row."""
    rows = filled.append_records([record(9), record(2, split="val"), record(0)])
    assert rows == [4, 2, 0]
    index = filled.finalise(rows)
    assert index.person_id.to_list() == ["9000", "9001", "9002", "9003", "9009"]
    assert index.listed.to_list() == [True, False, True, False, True]
    assert index.split[2] == "val"
    store = PreparedStore.open(filled.url)
    assert store.kept.tolist() == [0, 2]
    np.testing.assert_array_equal(store.read(2), volume(2))


def test_another_geometry_is_refused(filled: StoreWriter) -> None:
    filled.create(SPATIAL, "gs://source", synthetic=True)
    other = dataclasses.replace(SPATIAL, target_spacing=(0.2, 0.02, 0.02))
    with pytest.raises(UserError, match=r"geometry: expected .*0\.2.*found .*0\.1.*another data\.store"):
        filled.create(other, "gs://source", synthetic=True)
    with pytest.raises(UserError, match="synthetic: expected False, found True"):
        filled.create(SPATIAL, "gs://source", synthetic=False)
    with pytest.raises(UserError, match="source_root: expected gs://other, found gs://source"):
        filled.create(SPATIAL, "gs://other", synthetic=True)


def test_a_store_keeps_the_rule_of_planes_by_which_it_was_begun(filled: StoreWriter) -> None:
    """A store of before names none: it goes on as it was, and is never half of each."""
    assert filled.planes == PreparedStore.open(filled.url).planes == NEAREST
    unname_planes(filled.url)
    filled.create(SPATIAL, "gs://source", synthetic=True)
    assert filled.planes == PreparedStore.open(filled.url).planes == BLENDED
    PreparedStore.open(filled.url).require_geometry(SPATIAL)
    with pytest.raises(UserError, match="planes: expected nearest or blended, found mean; another version"):
        rule_of({"planes": "mean"})


def test_another_version_is_refused_and_not_touched(filled: StoreWriter) -> None:
    url = storage.join(filled.url, "zarr.json")
    text = storage.read_text(url).replace(
        f'"format_version": {FORMAT_VERSION}', f'"format_version": {FORMAT_VERSION + 1}'
    )
    storage.write_text(url, text)
    before = {
        name: storage.read_bytes(storage.join(filled.url, name)) for name in storage.find_names(filled.url)
    }
    message = f"^{filled.url}: format_version: expected {FORMAT_VERSION}, found {FORMAT_VERSION + 1}[^\n]*$"
    with pytest.raises(UserError, match=message):
        filled.create(SPATIAL, "gs://source", synthetic=True)
    with pytest.raises(UserError, match=message):
        PreparedStore.open(filled.url)
    assert before == {name: storage.read_bytes(storage.join(filled.url, name)) for name in before}


def test_a_row_that_turns_bad_loses_its_chunk(filled: StoreWriter) -> None:
    filled.write_row(0, None, {"status": "corrupt_pixel_data"})
    filled.finalise(range(4))
    assert not storage.exists(storage.join(filled.url, "volumes", chunk_key(0)))
    assert PreparedStore.open(filled.url).kept.tolist() == [2]


@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_a_lost_or_damaged_chunk_is_an_error_not_zeros(filled: StoreWriter, damage: str) -> None:
    chunk = storage.join(filled.url, "volumes", chunk_key(0))
    if damage == "lost":
        storage.remove(chunk)
    else:
        data = bytearray(storage.read_bytes(chunk))
        data[60] ^= 1
        storage.write_bytes(chunk, data if damage == "changed" else data[:-20])
    store = PreparedStore.open(filled.url)
    with pytest.raises(
        storage.StorageError, match=r"c\.0\.0\.0\.0: expected the volume of row 0, .*000000\.json"
    ):
        store.read(0)
    np.testing.assert_array_equal(store.read(2), volume(2))


def prepare_again(writer: StoreWriter) -> None:
    writer.create(SPATIAL, "gs://source", synthetic=True)
    writer.append_records([record(n) for n in range(9)])


@pytest.mark.parametrize("name", ["zarr.json", "volumes/zarr.json", "index.parquet"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_a_cut_file_is_named(filled: StoreWriter, name: str, kept: float) -> None:
    file = storage.join(filled.url, name)
    data = storage.read_bytes(file)
    storage.write_bytes(file, data[: int(len(data) * kept)])
    with pytest.raises(
        UserError, match=rf"{name}: expected a whole file .*, found a damaged one \(.*prepare"
    ):
        PreparedStore.open(filled.url).read(0)
    if name != "index.parquet":
        with pytest.raises(UserError, match=f"{name}: expected a whole file"):
            prepare_again(filled)


def test_a_cut_record_list_is_named_and_a_cut_row_is_pending(filled: StoreWriter) -> None:
    """A row can be prepared again; which record has which row cannot be guessed."""
    row, records = (storage.join(filled.url, n) for n in ("rows/000002.json", "records.jsonl"))
    whole = json.loads(storage.read_bytes(row))
    for damaged in (json.dumps(whole)[:-20], *(json.dumps(whole | {"record": part}) for part in (3, {}))):
        storage.write_text(row, damaged)
        assert filled.rows.read().keys() == {0, 1}
    assert filled.finalise(range(4)).status.to_list() == ["kept", "missing_file", "pending", "pending"]
    for damaged in (storage.read_text(records)[:-20], "3\n", "{}\n"):
        storage.write_text(records, damaged)
        with pytest.raises(UserError, match=r"records\.jsonl: expected a whole file"):
            filled.read_records()


def test_a_chunk_comes_before_its_row(filled: StoreWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's JSON says that its chunk is there; so when writing the chunk fails, there is no JSON."""
    write_bytes = storage.write_bytes

    def full_for_chunks(url: str, *arguments: Any) -> None:
        if "/volumes/c." in url:
            raise storage.StorageError(url, "no space left")
        write_bytes(url, *arguments)

    monkeypatch.setattr(storage, "write_bytes", full_for_chunks)
    with pytest.raises(storage.StorageError, match="no space left"):
        write(filled, 3, volume(3))
    assert not storage.exists(storage.join(filled.url, "rows", "000003.json"))


def test_a_row_file_of_another_record_is_pending(filled: StoreWriter) -> None:
    """Two runs with two manifests at once may give one row to two records."""
    measured = filled.rows.read()[0]
    filled.rows.write(0, measured | {"record": record(0)})
    assert filled.finalise(range(4)).status[0] == "kept"
    filled.rows.write(0, measured | {"record": record(7)})
    assert filled.finalise(range(4)).status.to_list() == ["pending", "missing_file", "kept", "pending"]


def test_a_record_that_has_lost_its_row_is_an_error(filled: StoreWriter) -> None:
    records = [record(9), record(2)]
    rows = filled.append_records(records)
    filled.append_records([record(10)])
    filled.check_rows(records, rows)
    url = storage.join(filled.url, "records.jsonl")
    lines = storage.read_text(url).splitlines(keepends=True)
    for other in ([*lines[:4], lines[5]], lines[:4]):
        storage.write_text(url, "".join(other))
        with pytest.raises(UserError, match=r"records\.jsonl: expected every record in the row .* at once"):
            filled.check_rows(records, rows)


def _write_again_and_again(url: str, seed: int) -> None:
    writer = StoreWriter(url)
    for _ in range(60):
        write(writer, seed, volume(seed))


def test_two_writers_of_one_row_leave_it_whole(tmp_path: Path) -> None:
    writer = store_of(str(tmp_path / "store"))
    context = multiprocessing.get_context("spawn")
    rivals = [context.Process(target=_write_again_and_again, args=(writer.url, 0)) for _ in range(2)]
    for rival in rivals:
        rival.start()
    store, reads = PreparedStore.open(writer.url), 0
    while any(rival.is_alive() for rival in rivals):
        np.testing.assert_array_equal(store.read(0), volume(0))
        assert writer.rows.read().keys() == {0}
        reads += 1
    for rival in rivals:
        rival.join()
    assert [rival.exitcode for rival in rivals] == [0, 0]
    assert reads > 10
    assert [p.name for p in (tmp_path / "store").rglob(".*")] == []


def test_a_write_goes_on_while_another_process_is_stopped_in_its_own(tmp_path: Path) -> None:
    target, partial = tmp_path / "one.json", tmp_path / f".one.json{storage.PARTIAL_SUFFIX}"
    with open(partial, "wb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        stopped.write(b"half")
        storage.write_bytes(str(target), b"whole")
        assert target.read_bytes() == b"whole"
        assert sorted(p.name for p in tmp_path.iterdir()) == [partial.name, target.name]
    storage.write_bytes(str(target), b"again")  # the other was killed: its part is replaced
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"again"]


def test_not_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a prepared store, found no index\.parquet; run"):
        PreparedStore.open(str(tmp_path / "absent"))


def test_cache_follows_the_content(tmp_path: Path) -> None:
    """A cached volume is read without the remote; a row that was prepared again is fetched again."""
    writer = store_of(f"memory://{tmp_path.name}/remote")
    cache = str(tmp_path / "cache")
    store = PreparedStore.open(writer.url, cache_dir=cache)
    store.read(0)
    storage.remove(storage.join(writer.url, "volumes", chunk_key(0)))
    np.testing.assert_array_equal(store.read(0), volume(0))
    write(writer, 0, volume(5))
    writer.finalise([0])
    np.testing.assert_array_equal(PreparedStore.open(writer.url, cache_dir=cache).read(0), volume(5))


@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
@pytest.mark.parametrize("removable", [True, False])
def test_a_damaged_local_copy_is_fetched_again(
    tmp_path: Path, damage: str, removable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store_of(f"memory://{tmp_path.name}/remote")
    cache = tmp_path / "cache"
    store = PreparedStore.open(writer.url, cache_dir=str(cache))
    store.read(0)
    (copy,) = cache.iterdir()
    whole = copy.read_bytes()
    damaged = {"empty": b"", "cut": whole[:-20], "changed": whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]}
    copy.write_bytes(damaged[damage])
    if not removable:

        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise OSError(errno.EROFS, "read-only", str(path))

        monkeypatch.setattr(Path, "unlink", refuse)
    np.testing.assert_array_equal(store.read(0), volume(0))
    np.testing.assert_array_equal(store.read(0), volume(0))
    if removable:
        assert copy.read_bytes() == whole
    chunk = storage.join(writer.url, "volumes", chunk_key(0))
    storage.write_bytes(chunk, damaged[damage])
    copy.write_bytes(damaged[damage])
    with pytest.raises(storage.StorageError, match=r"expected the volume of row 0, .*000000\.json"):
        store.read(0)
    storage.write_bytes(chunk, whole)  # mended as the error says: the bad copy of it is no obstacle
    np.testing.assert_array_equal(store.read(0), volume(0))


def test_a_local_copy_of_another_volume_is_fetched_again(tmp_path: Path) -> None:
    """Whole by itself, so the codec reads it; the first read of a process compares the volume's checksum."""
    writer = store_of(f"memory://{tmp_path.name}/remote", 2)
    cache = tmp_path / "cache"
    store = PreparedStore.open(writer.url, cache_dir=str(cache))
    for row in (0, 1):
        store.read(row)
    first, second = sorted(cache.iterdir())
    right, wrong = first.read_bytes(), second.read_bytes()
    first.write_bytes(wrong)
    again = PreparedStore.open(writer.url, cache_dir=str(cache))
    np.testing.assert_array_equal(again.read(0), volume(0))
    np.testing.assert_array_equal(again.read(0), volume(0))
    assert first.read_bytes() == right
    storage.write_bytes(storage.join(writer.url, "volumes", chunk_key(0)), wrong)
    first.unlink()
    with pytest.raises(storage.StorageError, match=r"expected the volume of row 0, .*another one"):
        PreparedStore.open(writer.url, cache_dir=str(cache)).read(0)


def _read_in_worker(store: PreparedStore, row: int) -> np.ndarray:
    return store.read(row)


def test_a_worker_process_can_read(tmp_path: Path) -> None:
    writer = store_of(str(tmp_path / "store"))
    store = PreparedStore.open(writer.url)
    store.read(0)  # opens the array, which must not travel
    assert len(pickle.dumps(store)) < 100_000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(_read_in_worker, (store, 0)), volume(0))
