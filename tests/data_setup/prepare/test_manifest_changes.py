"""A manifest or a participant that changes updates the rows and moves no volume."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from data_setup.manifest import read_records
from data_setup.prepare import main
from data_setup.store.reader import PreparedStore
from tests.data_setup.prepare.runs import CONFIG, arguments, dicoms
from utils.config.load import load_config
from utils.errors import UserError


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
