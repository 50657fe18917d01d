"""A run again reuses what is there, and loses no volume whose source moved or is gone."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_setup.jobs import Job, prepare_row, read_volume
from data_setup.manifest import read_records
from data_setup.prepare import main
from data_setup.resample import BLENDED, NEAREST
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter
from tests.data_setup.prepare.runs import CONFIG, arguments, contents, dicoms, unname_planes
from utils import storage
from utils.config.load import load_config
from utils.errors import UserError


def test_verify_names_a_chunk_in_the_wrong_place(
    tree: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each chunk is whole by itself, so only the volume's checksum tells."""
    store = Path(shutil.copytree(clean, tmp_path / "store"))
    assert main(arguments(tree, store, "--verify")) == 0
    count = len(dicoms(tree))
    assert f"{count} volumes are what the index says" in capsys.readouterr().out
    first, second = (store / "volumes" / f"c.{row}.0.0.0" for row in (0, 3))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    before = contents(store)
    assert main(arguments(tree, store, "--verify")) == 2
    err = capsys.readouterr().err
    assert re.findall(r"expected the volume of row (\d+), .*another one.*; remove .*\.json", err) == [
        "0",
        "3",
    ]
    assert f"expected {count} volumes as in the index, found 2 that differ" in err
    assert contents(store) == before


def test_a_tree_that_moved_is_taken_up_on_request(own_tree: Path, tmp_path: Path) -> None:
    """A copy in another place has other modification times; its files are not read again."""
    store, place = tmp_path / "store", tmp_path / "elsewhere"
    assert main(arguments(own_tree, store)) == 0
    checksums = PreparedStore.open(str(store)).index.checksum.to_list()
    own_tree.rename(place)
    for number, file in enumerate(dicoms(place)):
        os.utime(file, ns=(number, number))
    with pytest.raises(UserError, match=r"source_root: expected .*elsewhere, found .*; .*--rebase"):
        main(arguments(place, store))
    for rebase in (["--rebase"], []):
        assert main(arguments(place, store, *rebase)) == 0
        run = json.loads((store / "prepare_report.json").read_text())["run"]
        assert (run["prepared"], run["reused"]) == (0, len(checksums))
    again = PreparedStore.open(str(store))
    assert again.attrs["source_root"] == str(place)
    assert again.index.checksum.to_list() == checksums
    dicoms(place)[0].write_bytes(dicoms(place)[0].read_bytes() + b"x")
    with pytest.raises(UserError, match=r"geometry: expected"):
        main(arguments(place, store, "--rebase", "spatial.image_size=[16, 96, 72]"))
    other = Path(shutil.copytree(place, tmp_path / "changed"))
    assert main(arguments(other, store, "--rebase", "data.max_reject_fraction=0.9")) == 0
    run = json.loads((store / "prepare_report.json").read_text())["run"]
    assert run["reused"] == len(checksums) - 1, "a file of another size is read"


def test_a_rerun_reuses_and_a_changed_source_is_read_again(own_tree: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    main(arguments(own_tree, store))
    before = contents(store)
    chunks = {p: p.stat().st_mtime_ns for p in (store / "volumes").iterdir()}
    main(arguments(own_tree, store))
    assert contents(store) == before
    assert {p: p.stat().st_mtime_ns for p in (store / "volumes").iterdir()} == chunks
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 0
    os.utime(dicoms(own_tree)[0], ns=(1, 1))
    main(arguments(own_tree, store))
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 1


def test_an_older_store_is_gone_on_with_by_its_own_rule(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its store names no rule of planes: rows are read again as they were, and the table says so."""
    store, spacing = tmp_path / "store", "spatial.target_spacing=[0.2,0.048,0.09375]"
    assert main(arguments(own_tree, store, spacing)) == 0
    assert "mixed" not in capsys.readouterr().out
    unname_planes(str(store))
    shutil.rmtree(store / "rows")
    assert main(arguments(own_tree, store, spacing)) == 0
    assert "planes: mixed of neighbouring B-scans, as an older version began" in capsys.readouterr().out
    opened, cfg = PreparedStore.open(str(store)), load_config(CONFIG, [f"data.gcs_root={own_tree}", spacing])
    row, record = 0, read_records(cfg).records[0]
    for planes, is_same in ((BLENDED, True), (NEAREST, False)):
        volume = read_volume(record, cfg.spatial, cfg.data.storage_options, planes=planes)[1]
        assert np.array_equal(volume.voxels, opened.read(row)) is is_same


def test_rows_whose_source_is_gone_are_kept(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sources out of reach (an unmounted disk, an offline bucket) cost no volume; back, it is reused."""
    store, images = tmp_path / "store", own_tree / "retinal_oct" / "structural_oct"
    main(arguments(own_tree, store))
    before = contents(store)
    count = len(PreparedStore.open(str(store)).kept)
    images.rename(own_tree / "away")
    assert main(arguments(own_tree, store)) == 0
    assert contents(store) == before
    assert f"source missing now, row kept: {count}" in capsys.readouterr().out
    run = json.loads((store / "prepare_report.json").read_text())["run"]
    assert (run["reused"], run["source_missing"], run["rejected"]) == (0, count, {})
    (own_tree / "away").rename(images)
    dicoms(own_tree)[0].unlink()
    main(arguments(own_tree, store))
    assert contents(store) == before
    run = json.loads((store / "prepare_report.json").read_text())["run"]
    assert (run["prepared"], run["reused"], run["source_missing"]) == (0, count - 1, 1)


def test_a_source_that_vanishes_before_it_is_read_again_costs_no_volume(
    own_tree: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    main(arguments(own_tree, store))
    before = contents(store)
    cfg = load_config(CONFIG, [f"data.gcs_root={own_tree}", f"data.store={store}"])
    record = read_records(cfg).records[0]
    Path(record.url).unlink()
    job = Job(0, record, StoreWriter(str(store)), cfg.spatial, cfg.data.storage_options, was_kept=True)
    assert prepare_row(job).status == "source_missing"
    assert contents(store) == before


def test_a_damaged_row_is_prepared_again(tree: Path, clean: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(clean, tmp_path / "store"))
    row = store / "rows" / "000001.json"
    row.write_bytes(row.read_bytes()[:-30])
    assert main(arguments(tree, store)) == 0
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 1
    assert contents(store) == contents(clean)


@pytest.mark.parametrize(("kind", "code"), [(storage.StorageError, 2), (storage.StorageAwayError, 75)])
def test_a_storage_error_at_a_finished_row_concerns_that_row_alone(
    kind: type[storage.StorageError],
    code: int,
    tree: Path,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = Path(shutil.copytree(clean, tmp_path / "store"))
    real = storage.stat
    blocked = json.loads((store / "rows" / "000000.json").read_text())["record"]["path"]

    def stat(url: str, options: object = None) -> storage.ObjectStat:
        if url.endswith(blocked):
            raise kind(f"{url}: expected access, found 403")
        return real(url, options)

    monkeypatch.setattr(storage, "stat", stat)
    assert main([*arguments(tree, store), "--workers", "0"]) == code
    assert "1 files could not be read, run again" in capsys.readouterr().err
    assert json.loads((store / "rows" / "000000.json").read_text())["status"] == "kept"
    assert (store / "volumes" / "c.0.0.0.0").exists()
