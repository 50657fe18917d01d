"""`data_setup.prepare`: good trees, runs again, changed manifests, rejects, workers that die.

First: a run again reuses what is there, and loses no volume whose source moved or is gone.
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import map_coordinates

from data_setup.jobs import Job, Outcome, prepare_row, read_volume, run_jobs
from data_setup.manifest import read_records, unknown_record
from data_setup.prepare import Tally, main, work
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.resample import BLENDED, NEAREST, plane_weights, resample_frames
from data_setup.store.format import checksum
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import summarise, table
from data_setup.store.writer import StoreWriter
from tests.support.dicom_factory import speckle, write_opt
from tests.support.pipeline_factory import ROOT
from tests.support.prepare_runs import CONFIG, arguments, contents, dicoms, start, swap_unseen, unname_planes
from utils import storage
from utils.cli import run_cli
from utils.config.load import load_config
from utils.errors import UserError


@pytest.fixture
def own_tree(tree: Path, tmp_path: Path) -> Path:
    """A copy of the tree for tests that damage it."""
    return Path(shutil.copytree(tree, tmp_path / "tree"))


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
    swap_unseen(dicoms(own_tree)[1])
    main(arguments(own_tree, store))
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 1
    row = store / "rows" / "000000.json"
    written = json.loads(row.read_text())
    older = {name: v for name, v in written.items() if name != "source_digest"}
    for without in (older, older | {"source_digest": ""}):  # "": of a bucket; it counts, and gets one
        row.write_text(json.dumps(without))
        main(arguments(own_tree, store))
        assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 0
        assert json.loads(row.read_text()) == written


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


# ---- a manifest or a participant that changes updates the rows and moves no volume


def test_a_manifest_that_grows_appends_and_one_that_shrinks_keeps(
    own_tree: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, store = own_tree / "retinal_oct" / "manifest.tsv", tmp_path / "store"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join([lines[0], *lines[4:]]))
    main(arguments(own_tree, store))
    first = PreparedStore.open(str(store)).index
    manifest.write_text("".join([lines[0], *lines[1:-1]]))
    main(arguments(own_tree, store))
    second = PreparedStore.open(str(store)).index
    assert second.path.to_list()[: len(first)] == first.path.to_list()
    assert second.checksum.to_list()[: len(first)] == first.checksum.to_list()
    assert len(second) == len(first) + 3
    assert (~second.listed).sum() == 1
    assert (second.status == "kept").all()
    assert "no longer in the manifest, kept in their rows: 1" in capsys.readouterr().out
    wanted = PreparedStore.open(str(clean)).index.set_index("path").checksum
    assert second.set_index("path").checksum.sort_index().to_list() == wanted.sort_index().to_list()


def test_another_filter_takes_nothing_off_the_list(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Device by device into one store: training sees all of them."""
    store, people = tmp_path / "store", own_tree / "participants.tsv"
    assert main(arguments(own_tree, store, "data.laterality_filter=[L]")) == 0
    first = PreparedStore.open(str(store)).index
    people.write_text(people.read_text().replace("\ttrain\t", "\tval\t"))  # holds for the left eyes too
    assert main(arguments(own_tree, store, "data.laterality_filter=[R]")) == 0
    both = PreparedStore.open(str(store)).index
    assert 0 < len(first) < len(both) == len(dicoms(own_tree))
    assert both.listed.all()
    assert "train" not in set(both.split)
    assert main(arguments(own_tree, store, "data.max_samples=1")) == 0
    assert PreparedStore.open(str(store)).index.listed.all()
    assert "no longer in the manifest" not in capsys.readouterr().out
    people.write_text("".join(people.read_text().splitlines(keepends=True)[:-1]))  # somebody withdraws
    assert main(arguments(own_tree, store)) == 0
    last = PreparedStore.open(str(store)).index
    assert set(last.person_id[~last.listed]) == {both.person_id.max()}
    assert "no longer in the manifest, kept in their rows: " in capsys.readouterr().out


def test_a_split_of_our_own_stays_what_the_store_says(own_tree: Path, tmp_path: Path) -> None:
    """Whatever rule cut it once; a recommended split comes first."""
    people, store = own_tree / "participants.tsv", tmp_path / "store"
    official = people.read_text()
    people.write_text(official.replace("recommended_split", "no_split"))
    main(arguments(own_tree, store))
    records = (store / "records.jsonl").read_text()
    person = PreparedStore.open(str(store)).index.person_id[0]
    moved = [json.loads(line) for line in records.splitlines()]
    for record in moved:
        if record["person_id"] == person:
            record["split"] = "val" if record["split"] == "test" else "test"
    (store / "records.jsonl").write_text("".join(json.dumps(r, sort_keys=True) + "\n" for r in moved))
    main(arguments(own_tree, store, "seed=3"))
    assert PreparedStore.open(str(store)).index.split.to_list() == [r["split"] for r in moved]
    people.write_text(official)
    main(arguments(own_tree, store))
    index = PreparedStore.open(str(store)).index
    listing = read_records(load_config(CONFIG, [f"data.gcs_root={own_tree}"]))
    assert index.split.to_list() == [r.split for r in listing.records]


def test_one_volume_under_two_participants_is_named_and_across_splits_an_error(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, people = own_tree / "retinal_oct" / "manifest.tsv", own_tree / "participants.tsv"
    cfg = load_config(CONFIG, [f"data.gcs_root={own_tree}"])
    records = read_records(cfg).records
    pairs = itertools.combinations(records, 2)
    first, second = next(
        (a, b)
        for a, b in pairs
        if (a.protocol, a.shape) == (b.protocol, b.shape) and a.person_id != b.person_id
    )
    shutil.copy(first.url, second.url)
    lines = manifest.read_text().replace(second.sop_instance_uid + "\t", "\t").splitlines(keepends=True)
    sides = (
        f"\t{second.laterality}\t",
        f"\t{first.laterality}\t",
    )  # the file's own, which the manifest repeats
    manifest.write_text("".join(x.replace(*sides) if second.path in x else x for x in lines))
    for name in ("train", "val", "test"):
        people.write_text(re.sub(rf"\t{name}\b", "\ttrain", people.read_text()))
    assert main(arguments(own_tree, tmp_path / "store")) == 0
    listed = [line.split("\t") for line in manifest.read_text().splitlines()]
    of_path = {cell: n for n, cells in enumerate(listed, 1) for cell in cells}
    places = [f"'{r.path}' (SPLIT, line {of_path['/' + r.path]})" for r in (first, second)]
    line = f"the same volume under several participants: {' and '.join(places).replace('SPLIT', 'train')}"
    assert line in capsys.readouterr().out
    lines = people.read_text().splitlines(keepends=True)
    other = [x.replace("\ttrain", "\ttest") if x.startswith(second.person_id) else x for x in lines]
    people.write_text("".join(other))
    places[0], places[1] = places[0].replace("SPLIT", "train"), places[1].replace("SPLIT", "test")
    expected = f"expected no volume in two splits, found {' and '.join(places)} with the same voxels"
    with pytest.raises(UserError, match=re.escape(expected)):
        main(arguments(own_tree, tmp_path / "store"))


def test_a_changed_participant_updates_the_row_without_reading_the_volume(
    own_tree: Path, tmp_path: Path
) -> None:
    table, store = own_tree / "participants.tsv", tmp_path / "store"
    main(arguments(own_tree, store))
    table.write_text(table.read_text().replace("\ttrain\t", "\tval\t"))
    main(arguments(own_tree, store))
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 0
    assert "train" not in set(PreparedStore.open(str(store)).index.split)
    assert all(json.loads(p.read_text())["record"]["split"] != "train" for p in (store / "rows").iterdir())


# ---- a good tree is kept whole: its volumes, their statistics, eyes and spacings


def test_a_good_tree_is_kept_whole(tree: Path, clean: Path) -> None:
    store = PreparedStore.open(str(clean))
    assert len(store.kept) == len(dicoms(tree)) == len(store.index)
    assert store.attrs["synthetic"] is True
    assert store.attrs["source_root"] == str(tree)
    assert all(checksum(store.read(row)) == store.index.checksum[row] for row in store.kept)
    assert store.index.person_id.is_monotonic_increasing
    report = json.loads((clean / "prepare_report.json").read_text())
    assert report["kept"] == len(store.kept)
    assert report["rejected"] == {}
    assert sum(report["spacing_source"].values()) == len(store.kept)
    assert sum(report["orientation_source"].values()) == len(store.kept)
    assert report["run"]["prepared"] == len(store.kept)
    assert {p["kept"] for p in report["by_protocol"].values()} <= set(range(1, 20))
    assert sum(d["kept"] for d in report["by_device"].values()) == len(store.kept)


def test_the_voxels_outside_the_box_are_zero_and_statistics_are_of_those_inside(clean: Path) -> None:
    store = PreparedStore.open(str(clean))
    padded = [r for r in store.kept if store.index.valid_fraction[r] < 1]
    assert padded
    for row in padded:
        voxels = store.read(row)
        box = store.index.loc[row, [f"valid_{a}{i}" for a in "dhw" for i in "01"]].to_numpy(int)
        inside = np.zeros(voxels.shape, bool)
        inside[tuple(slice(*pair) for pair in box.reshape(3, 2))] = True
        assert not voxels[~inside].any()
        assert store.index.intensity_mean[row] == pytest.approx(voxels[inside].mean(dtype=np.float64))
        assert store.index.intensity_std[row] == pytest.approx(voxels[inside].std(dtype=np.float64))
        assert store.index.valid_fraction[row] == pytest.approx(inside.mean())


def test_laterality_comes_from_the_header_when_the_manifest_has_none(own_tree: Path, tmp_path: Path) -> None:
    manifest, store = own_tree / "retinal_oct" / "manifest.tsv", tmp_path / "store"
    header, line, *_ = [line.split("\t") for line in manifest.read_text().splitlines()]
    side, path = line[header.index("laterality")], line[header.index("filepath")]
    assert f"_{side.lower()}_" in path
    line[header.index("laterality")] = "Not reported"
    line[header.index("filepath")] = path.replace(f"_{side.lower()}_", "_unknown_laterality_")
    (own_tree / path.lstrip("/")).rename(own_tree / line[header.index("filepath")].lstrip("/"))
    manifest.write_text("\t".join(header) + "\n" + "\t".join(line) + "\n")
    main(arguments(own_tree, store))
    assert StoreWriter(str(store)).read_records()[0]["laterality"] == "unknown"
    assert PreparedStore.open(str(store)).index.laterality.to_list() == [side]


def test_the_report_tells_spacing_and_warns_of_an_empty_grid(clean: Path) -> None:
    store = PreparedStore.open(str(clean))
    protocol = store.index.protocol[0]
    report = json.loads((clean / "prepare_report.json").read_text())
    of_protocol = [json.loads(p.read_text()) for p in sorted((clean / "rows").iterdir())]
    of_protocol = [f for f in of_protocol if f["record"]["protocol"] == protocol]
    for when in ("before", "after"):
        columns = [[f[f"spacing_{when}_{a}"] for f in of_protocol] for a in "dhw"]
        expected = [round(float(np.median(c)), 6) for c in columns]
        assert report["by_protocol"][protocol][f"spacing_{when}"] == expected
    assert (
        report["by_protocol"][protocol]["spacing_before"] != report["by_protocol"][protocol]["spacing_after"]
    )

    def warnings(fraction: float) -> list[str]:
        index = store.index.copy()
        index.loc[index.protocol == protocol, "valid_fraction"] = fraction
        index.loc[index.protocol != protocol, "valid_fraction"] = 1.0
        index["lost_fraction"] = 0.5  # not more than half
        changed = summarise(index, store.attrs, {}, report["run"])
        return [
            line
            for line in table(changed).splitlines()
            if line.startswith("warning: ") and ": left out, " not in line
        ]

    assert warnings(0.6) == []
    (line,) = warnings(0.59)
    assert line.startswith(f"warning: {protocol}: only 59% of the grid lies inside the scan")


# ---- files that cannot be used, runs that are refused, files that are missing or in no row


def test_bad_files_are_named_and_repaired_ones_taken_up(
    own_tree: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, store = dicoms(own_tree), tmp_path / "store"
    whole = [f.read_bytes() for f in files[:3]]
    files[0].write_bytes(whole[0][: len(whole[0]) * 2 // 3])
    files[1].unlink()
    files[2].write_bytes(b"not a DICOM file at all")
    assert main(arguments(own_tree, store, "data.max_reject_fraction=0.9")) == 0
    index = PreparedStore.open(str(store)).index.set_index("path")
    reasons = [index.status[str(f.relative_to(own_tree))] for f in files[:3]]
    assert reasons == ["truncated_pixel_data", "missing_file", "not_dicom"]
    assert (index.status == "kept").sum() == len(files) - 3
    assert index.message[str(files[2].relative_to(own_tree))].startswith("expected")
    report = json.loads((store / "prepare_report.json").read_text())
    assert report["rejected"] == {"missing_file": 1, "not_dicom": 1, "truncated_pixel_data": 1}
    named = {reason: [str(files[i].relative_to(own_tree))] for i, reason in enumerate(reasons)}
    assert report["rejected_files"] == named
    assert "rejected: missing_file 1, not_dicom 1, truncated_pixel_data 1" in capsys.readouterr().out
    for file, data in zip(files[:3], whole, strict=True):
        file.write_bytes(data)
    assert main(arguments(own_tree, store, "data.max_reject_fraction=0.9")) == 0
    fixed = PreparedStore.open(str(store))
    assert fixed.index.checksum.to_list() == PreparedStore.open(str(clean)).index.checksum.to_list()
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 3


def test_too_many_rejects_stop_with_the_table(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, store = dicoms(own_tree), tmp_path / "store"
    for file in files[: len(files) // 2]:
        file.write_bytes(b"junk")
    with pytest.raises(
        UserError, match=r"expected at most 10% of \d+ records rejected .*found \d+: not_dicom"
    ):
        main(arguments(own_tree, store, "data.max_reject_fraction=0.1"))
    out, err = capsys.readouterr()
    assert "not_dicom" in out
    rejects = [line for line in err.splitlines() if line.startswith("rejected: ")]
    assert len(rejects) == 3
    for line in rejects:
        match = re.fullmatch(r"rejected: (\S+): not_dicom: expected .*, found .*; next: .*export.*", line)
        assert match, line
        assert (own_tree / match[1]).read_bytes() == b"junk"
    statuses = PreparedStore.open(str(store)).index.status
    assert (statuses == "not_dicom").sum() == len(files) // 2, "a small set is looked at to its end"
    assert (statuses == "kept").sum() == len(files) - len(files) // 2
    assert main(arguments(own_tree, store, "data.max_reject_fraction=0.9")) == 0
    assert (PreparedStore.open(str(store)).index.status == "kept").sum() == len(files) - len(files) // 2


def test_a_large_set_stops_once_it_is_clear(tmp_path: Path, tree: Path) -> None:
    cfg = load_config(CONFIG, [f"data.gcs_root={tree}", f"data.store={tmp_path / 'store'}"])
    record = dataclasses.replace(read_records(cfg).records[0], url=str(tmp_path / "absent.dcm"))
    writer = StoreWriter(cfg.data.store)
    jobs = [Job(row, record, writer, cfg.spatial, cfg.data.storage_options) for row in range(130)]
    tally = Tally(num_rows=130)
    work(jobs, 0, 6.5, tally)
    assert tally.rejected == {"missing_file": 100}


@pytest.mark.parametrize(
    ("shape", "spacing"),
    [
        ((36, 100, 300), (0.0298, 0.024, 0.03)),  # two of sixteen planes of the grid
        ((12, 100, 2), (0.375, 0.024, 0.094)),
        ((2, 3, 300), (0.02, 0.003, 0.03)),
        ((12, 8, 64), (0.375, 0.004, 0.094)),  # no voxel's centre
    ],
)
def test_a_scan_without_a_token_is_a_reject_that_names_the_spacing_that_would_do(
    tmp_path: Path, shape: tuple[int, int, int], spacing: tuple[float, float, float]
) -> None:
    path = write_opt(tmp_path, speckle(*shape), spacing=spacing)
    cfg = load_config(CONFIG, [])
    with pytest.raises(OCTReadError, match="none: the scan has ") as caught:
        read_volume(unknown_record(path), cfg.spatial, cfg.data.storage_options)
    assert caught.value.reason == RejectReason.OUTSIDE_GRID
    setting = re.search(r"spatial.target_spacing=\S+(?= would do)", caught.value.detail)
    assert setting, caught.value.detail
    cfg = load_config(CONFIG, [setting[0]])
    _, volume, _ = read_volume(unknown_record(path), cfg.spatial, cfg.data.storage_options)
    assert volume.valid_fraction > 0.9


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("sop_instance_uid", "2.25.1", "expected SOPInstanceUID 2.25.1 as in the manifest, found another"),
        ("height", "7", "expected frames x height x width ("),
        ("number_of_frames", "7", "expected frames x height x width (7, "),
    ],
)
def test_a_file_that_is_not_the_one_of_its_row_is_a_reject(
    own_tree: Path, tmp_path: Path, column: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = own_tree / "retinal_oct" / "manifest.tsv", tmp_path / "store"
    header, *lines = [line.split("\t") for line in manifest.read_text().splitlines()]
    lines[0][header.index(column)] = text
    manifest.write_text("\n".join("\t".join(line) for line in (header, *lines[:2])) + "\n")
    resampled: list[Any] = []

    def count(frames: Any, *grid: Any) -> Any:
        resampled.append(grid)
        return resample_frames(frames, *grid)

    monkeypatch.setattr("data_setup.jobs.resample_frames", count)
    main(arguments(own_tree, store, "data.max_reject_fraction=0.9"))
    index = PreparedStore.open(str(store)).index
    assert sorted(index.status) == ["header_mismatch", "kept"]
    assert index.message.dropna().iloc[0].startswith(message)
    assert len(resampled) == 1  # the other file is refused by its header


def test_another_geometry_is_refused(tree: Path, clean: Path) -> None:
    before = contents(clean)
    with pytest.raises(UserError, match=r"geometry: expected .*found .*another data\.store"):
        main(arguments(tree, clean, "spatial.image_size=[16, 96, 72]"))
    assert contents(clean) == before


def test_another_source_is_refused_and_the_same_one_spelt_differently_is_not(
    tree: Path, own_tree: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative paths below another root would be taken for the same files."""
    store = Path(shutil.copytree(clean, tmp_path / "store"))
    with pytest.raises(UserError, match=rf"source_root: expected {own_tree}, found {tree}; .*data\.store"):
        main(arguments(own_tree, store))
    assert contents(store) == contents(clean)
    monkeypatch.chdir(tree.parent)
    assert main(arguments(Path("tree/"), store)) == 0
    assert json.loads((store / "prepare_report.json").read_text())["run"]["reused"] > 0
    assert contents(store) == contents(clean)
    row = json.loads((store / "rows" / "000000.json").read_text())
    assert row["source_url"] == str(tree / row["record"]["path"])


def test_user_errors_are_one_line_with_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: main(arguments(tmp_path, tmp_path / "store")))
    out, err = capsys.readouterr()
    assert (stop.value.code, out.count("\n"), err.count("\n")) == (2, 1, 1)  # out: what is begun
    assert re.match(r"error: .*manifest\.tsv: not found", err)


def test_missing_files_and_orphans_are_counted(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, first = tmp_path / "store", dicoms(own_tree)[0]
    orphans = [first.with_name(f"left_over_{n:02d}.dcm") for n in range(21)]
    for orphan in orphans:
        shutil.copy(dicoms(own_tree)[-1], orphan)
    first.unlink()
    main(arguments(own_tree, store, "data.max_reject_fraction=0.9"))
    assert "files: 1 of the manifest missing, 21 in no manifest row" in capsys.readouterr().out
    audit = json.loads((store / "prepare_report.json").read_text())["run"]["audit"]
    assert audit["missing"] == {"count": 1, "first": [str(first.relative_to(own_tree))]}
    assert audit["orphans"]["count"] == 21
    assert audit["orphans"]["first"] == [str(o.relative_to(own_tree)) for o in orphans[:20]]


def test_a_remote_tree_is_listed_on_request_only(tree: Path, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}/tree"
    for file in (p for p in tree.rglob("*") if p.is_file() and p.suffix != ".npz"):
        storage.write_bytes(storage.join(root, str(file.relative_to(tree))), file.read_bytes())
    places = [f"data.gcs_root={root}", f"data.store={tmp_path / 'store'}"]
    for more, audit in (
        ([], None),
        (["--audit"], {k: {"count": 0, "first": []} for k in ("missing", "orphans", "unused_missing")}),
    ):
        assert main(["--config", CONFIG, "--workers", "0", *places, *more]) == 0
        assert json.loads((tmp_path / "store" / "prepare_report.json").read_text())["run"]["audit"] == audit


# ---- a kill, a worker that dies and an error of ours cost a file at most, with every kind of worker


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.002)


def num_rows(store: Path) -> int:
    return len(list((store / "rows").glob("*.json"))) if (store / "rows").is_dir() else 0


def test_kill_in_the_middle_then_again_gives_the_same_bytes(
    tree: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    with start(tree, store) as process:
        wait_until(lambda: num_rows(store) >= 2, "two rows")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert main(arguments(tree, store)) == 0
    assert "kept by device" in capsys.readouterr().out
    assert contents(store) == contents(clean)


def test_runs_that_work_at_once_are_harmless(tree: Path, clean: Path, tmp_path: Path) -> None:
    """Two of them, started together in an empty store."""
    store = tmp_path / "store"
    runs = [start(tree, store, "--workers", "1") for _ in range(2)]
    errors = [process.communicate(timeout=240)[1] for process in runs]
    assert [process.returncode for process in runs] == [0, 0], errors
    assert contents(store) == contents(clean)
    assert set(PreparedStore.open(str(store)).index.status) == {"kept"}


@contextmanager
def documented_worker(address: str, folder: Path) -> Iterator[None]:
    """A worker of the scheduler at `address`, by the guide's command, started in another folder."""
    page = (ROOT / "docs/guides/prepare.md").read_text()
    (line,) = re.findall(r"^ +(.*dask worker .*) &", page, re.MULTILINE)
    line = line.replace("CLONE", str(ROOT)).replace("tcp://HOST:8786", address).replace("16", "1")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(["env", *line.split()], cwd=folder, env=os.environ | {"PATH": path}) as worker:
        try:
            yield
        finally:
            worker.terminate()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of dask and its event loop
def test_a_cluster_that_loses_a_worker_makes_the_same_store(tree: Path, clean: Path, tmp_path: Path) -> None:
    import dask  # here, since prepare does without
    from distributed import LocalCluster

    store, total = tmp_path / "store", len(dicoms(tree))
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        documented_worker(address := cluster.scheduler_address, tmp_path),
    ):
        wait_until(lambda: len(cluster.scheduler.workers) == 3, "three workers")
        with start(tree, store, "--dask", address) as process:
            wait_until(lambda: num_rows(store) >= 2, "two rows")
            workers = cluster.scheduler.workers.values()
            busy = next(w for w in workers if w.processing and w.name in cluster.workers)
            os.kill(cluster.workers[busy.name].pid, signal.SIGKILL)
            assert num_rows(store) < total, "the kill has to come in the middle"
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert {w.name for w in workers} - {*cluster.workers}, "the guide's worker met an error and ended"
        assert contents(store) == contents(clean)
        run = json.loads((store / "prepare_report.json").read_text())["run"]
        assert (run["prepared"], run["reused"], run["rejected"], run["workers"]) == (total, 0, {}, "dask")
        assert f"{total} prepared, 0 reused" in out
        assert main(arguments(tree, store, "--verify", "--dask", address)) == 0
        cfg = load_config(CONFIG, [f"data.gcs_root={tree}", f"data.store={tmp_path / 'other'}"])
        writer = StoreWriter(cfg.data.store)
        job = Job(2, read_records(cfg).records[0], writer, cfg.spatial, cfg.data.storage_options)
        (outcome,) = run_jobs([job], 0, _die_at_row_two, cluster=address)
        assert (outcome.status, outcome.message) == ("worker_died", "every worker that ran it was lost")
        assert writer.rows.read()[2]["status"] == "worker_died"


def test_a_cluster_that_is_not_there_is_named(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.workers.CONNECT_SECONDS", 0.2)
    with pytest.raises(
        UserError, match=r"--dask tcp://127\.0\.0\.1:9: expected a dask scheduler, found none: "
    ):
        main(arguments(tree, tmp_path / "store", "--dask", "tcp://127.0.0.1:9"))


@pytest.fixture
def jobs(tree: Path, tmp_path: Path) -> list[Job]:
    """Six rows of an empty store, each of the first file."""
    cfg = load_config(CONFIG, [f"data.gcs_root={tree}", f"data.store={tmp_path / 'store'}"])
    record, writer = read_records(cfg).records[0], StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, "source", synthetic=True)
    return [Job(row, record, writer, cfg.spatial, cfg.data.storage_options) for row in range(6)]


def _die_at_row_two(job: Job) -> Outcome:
    if job.row == 2:
        os._exit(9)
    if job.row == 4:
        raise ArithmeticError("a fault\nof ours")
    time.sleep(0.05)
    return Outcome(job.row, "kept")


def test_a_dying_worker_costs_its_file_only(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {o.row: o.status for o in run_jobs(jobs, 2, _die_at_row_two)}
    assert outcomes == dict.fromkeys(range(6), "kept") | {2: "worker_died", 4: "internal_error"}
    rows = jobs[0].writer.rows.read()
    assert rows[2]["message"].startswith("its worker process was lost twice")
    assert re.fullmatch(r"ArithmeticError at test_prepare\.py:\d+", rows[4]["message"])
    err = capsys.readouterr().err
    assert re.search(r": ArithmeticError\n(  .*\n)*  .*test_prepare\.py:\d+ _die_at_row_two\n", err)
    assert "a fault" not in err  # the text of an error may quote the file


def _run_out_at_row_two(job: Job) -> Outcome:
    if job.row == 2:
        raise MemoryError
    if job.row == 4:
        raise ArithmeticError("a fault\nof ours") from ValueError("another")
    return Outcome(job.row, "kept")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_ours_costs_its_file_only_with_and_without_processes(
    jobs: list[Job], capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    outcomes = {o.row: o.status for o in run_jobs(jobs, workers, _run_out_at_row_two)}
    assert outcomes == dict.fromkeys(range(6), "kept") | {2: "internal_error", 4: "internal_error"}
    rows = jobs[0].writer.rows.read()
    assert re.fullmatch(r"MemoryError at test_prepare\.py:\d+", rows[2]["message"])
    assert re.fullmatch(r"ArithmeticError at test_prepare\.py:\d+", rows[4]["message"])
    err = capsys.readouterr().err
    assert re.search(r": MemoryError\n(  .*\n)*  .*test_prepare\.py:\d+ _run_out_at_row_two\n", err)
    assert "a fault" not in err


def test_without_processes_one_file_at_a_time_is_in_work(jobs: list[Job]) -> None:
    """So the run stops at the first reject too many, no file later."""
    begun = []

    def work(job: Job) -> Outcome:
        begun.append(job.row)
        return Outcome(job.row, "kept")

    outcomes = run_jobs(jobs, 0, work)
    assert [next(outcomes).row for _ in range(3)] == [0, 1, 2]
    outcomes.close()
    assert begun == [0, 1, 2]


# ---- a phantom surface lands in the volume where the geometry says: centres aligned, D superior to inferior
OFFSETS = np.arange(-6, 6.01, 0.25)  # voxels around the expected surface
COLUMNS = 16  # A-scans averaged against speckle


def prepared(tree: Path, store: Path, *changes: str) -> PreparedStore:
    assert main(arguments(tree, store, *changes)) == 0
    return PreparedStore.open(str(store))


def surface_in_store(
    surface: np.ndarray, row: pd.Series, size: tuple[int, int, int]
) -> tuple[np.ndarray, ...]:
    """A surface [frames, A-scans], superior first, in stored voxels: (d, w, h [d, w]) of valid A-scans."""
    stored = dict(zip("dhw", size, strict=True))

    def to_source(axis: str, index: np.ndarray) -> np.ndarray:
        mm = (index + 0.5 - stored[axis] / 2) * row[f"spacing_after_{axis}"]
        return mm / row[f"spacing_before_{axis}"] + row[f"shape_before_{axis}"] / 2 - 0.5

    d, w = (np.arange(int(row[f"valid_{a}0"]), int(row[f"valid_{a}1"])) for a in "dw")
    along_d = int(row.shape_before_d), row.spacing_before_d, stored["d"], row.spacing_after_d
    b_scan = plane_weights(*along_d, NEAREST).weights[d].argmax(axis=1)
    at = np.meshgrid(b_scan, to_source("w", w), indexing="ij")
    source_rows = map_coordinates(surface, at, order=1, mode="nearest")
    mm = (source_rows + 0.5 - row.shape_before_h / 2) * row.spacing_before_h
    return d, w, mm / row.spacing_after_h + stored["h"] / 2 - 0.5


def offsets_of_ilm(surface: np.ndarray, row: pd.Series, voxels: np.ndarray) -> np.ndarray:
    """Steepest rise from vitreous to retina in voxels from the mapped truth; one per group of A-scans."""
    d, w, h = surface_in_store(surface, row, voxels.shape)
    at_h = h[:, :, None] + OFFSETS
    at = [np.broadcast_to(d[:, None, None], at_h.shape), at_h, np.broadcast_to(w[None, :, None], at_h.shape)]
    profiles = map_coordinates(voxels.astype(np.float32), at, order=1, mode="nearest")
    whole = profiles.shape[1] // COLUMNS * COLUMNS
    profiles = profiles[:, :whole].reshape(len(d), -1, COLUMNS, len(OFFSETS)).mean(axis=2)
    rise = profiles[..., 4:] - profiles[..., :-4]  # over one voxel
    return OFFSETS[2:-2][rise.argmax(axis=-1)]


FINE = ("spatial.target_spacing=[0.1875,0.015,0.046875]", "spatial.image_size=[32,160,128]")
RESIZED = ("spatial.resample=resize", "spatial.image_size=[32,160,128]")


@pytest.mark.parametrize("changes", [FINE, RESIZED], ids=["spacing", "resize"])
def test_the_ilm_lands_within_a_voxel(tree: Path, tmp_path: Path, changes: tuple[str, ...]) -> None:
    store = prepared(tree, tmp_path / "store", *changes)
    devices, directions = set(), set()
    if_d_were_reversed, if_w_were_reversed = [], []
    for number in store.kept:
        row, voxels = store.index.loc[number], store.read(number)
        with np.load(tree / "truth" / f"{row.sop_instance_uid}.npz") as truth:
            surface = truth["surfaces"][truth["surface_names"].tolist().index("ILM")]
        surface = surface[::-1] if row.flipped_d else surface
        error = np.abs(offsets_of_ilm(surface, row, voxels))
        assert np.median(error) <= 0.5, row.path
        assert (error <= 1).mean() >= 0.93, row.path
        if_d_were_reversed.append((np.abs(offsets_of_ilm(surface[::-1], row, voxels)) <= 1).mean())
        if_w_were_reversed.append((np.abs(offsets_of_ilm(surface[:, ::-1], row, voxels)) <= 1).mean())
        devices.add(row.device)
        directions.add(bool(row.flipped_d))
    assert devices == {"heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus"}
    assert directions == {True, False}
    # The check would notice a reversed axis: most surfaces are not symmetric.
    assert np.mean(if_d_were_reversed) < 0.6
    assert np.mean(if_w_were_reversed) < 0.6


def test_the_default_grid_holds_the_same_surface(tree: Path, tmp_path: Path) -> None:
    """On the coarse grid of the smoke test too, though it leaves B-scans out."""
    store = prepared(tree, tmp_path / "store")
    for number in store.kept:
        row, voxels = store.index.loc[number], store.read(number)
        with np.load(tree / "truth" / f"{row.sop_instance_uid}.npz") as truth:
            surface = truth["surfaces"][0, ::-1] if row.flipped_d else truth["surfaces"][0]
        error = np.abs(offsets_of_ilm(surface, row, voxels))
        assert np.median(error) <= 0.75, row.path
        assert (error <= 1).mean() >= 0.8, row.path
