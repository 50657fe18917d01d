"""Shards, one after the other or at once, and --finalise make the same store."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_setup.prepare import main, parse_shard
from data_setup.store.reader import PreparedStore
from tests.data_setup.prepare.runs import arguments, contents, start
from utils.errors import UserError


def test_shards_and_finalise_make_the_same_store(
    tree: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert main(arguments(tree, store, "--shard", "1/2")) == 0
    assert "prepared, 0 reused" in capsys.readouterr().out
    assert {p.name for p in store.iterdir()} == {"zarr.json", "records.jsonl", "volumes", "rows"}
    assert all(int(p.stem) % 2 == 1 for p in (store / "rows").iterdir())
    with pytest.raises(UserError, match=r"expected a finalised store, found no index\.parquet; .*--finalise"):
        PreparedStore.open(str(store))
    assert main(arguments(tree, store, "--finalise")) == 2, "training must not begin on half of a store"
    assert re.search(r"expected all \d+ records prepared, found \d+ pending", capsys.readouterr().err)
    pending = PreparedStore.open(str(store)).index.status == "pending"
    assert pending.to_list() == [row % 2 == 0 for row in range(len(pending))]
    assert main(arguments(tree, store, "--shard", "0/2")) == 0
    assert main(arguments(tree, store, "--finalise")) == 0
    assert contents(store) == contents(clean)
    run = json.loads((store / "prepare_report.json").read_text())["run"]
    assert run["audit"]["missing"]["count"] == run["prepared"] == run["reused"] == 0


def test_shards_that_work_at_once_are_harmless(tree: Path, clean: Path, tmp_path: Path) -> None:
    """One shard twice, and one of another n, all started together in an empty store."""
    store = tmp_path / "store"
    shards = [start(tree, store, "--shard", shard) for shard in ("0/2", "0/2", "0/1")]
    errors = [process.communicate(timeout=240)[1] for process in shards]
    assert [process.returncode for process in shards] == [0] * 3, errors
    assert not (store / "index.parquet").exists()
    assert main(arguments(tree, store, "--finalise")) == 0
    assert contents(store) == contents(clean)
    assert set(PreparedStore.open(str(store)).index.status) == {"kept"}


def test_a_shard_whose_manifest_differs_is_refused_until_finalise_takes_it_up(
    own_tree: Path, tmp_path: Path
) -> None:
    manifest, store = own_tree / "retinal_oct" / "manifest.tsv", tmp_path / "store"
    whole = manifest.read_text()
    manifest.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    assert main(arguments(own_tree, store, "--shard", "0/2")) == 0
    before = contents(store)
    manifest.write_text(whole)
    with pytest.raises(UserError, match=r"records\.jsonl: expected the records of this .*--finalise"):
        main(arguments(own_tree, store, "--shard", "1/2"))
    assert contents(store) == before
    assert main(arguments(own_tree, store, "--finalise")) == 2, "rows are pending"
    for shard in ("0/2", "1/2"):
        assert main(arguments(own_tree, store, "--shard", shard)) == 0
    assert main(arguments(own_tree, store, "--finalise")) == 0
    assert set(PreparedStore.open(str(store)).index.status) == {"kept"}


def test_finalise_holds_the_reject_limit_over_all_shards(own_tree: Path, tmp_path: Path) -> None:
    """A shard checks its own rows alone."""
    store = tmp_path / "store"
    next(own_tree.rglob("*.dcm")).write_bytes(b"junk")
    for shard in ("0/2", "1/2"):
        assert main(arguments(own_tree, store, "--shard", shard, "data.max_reject_fraction=0.9")) == 0
    assert main(arguments(own_tree, store, "--finalise", "data.max_reject_fraction=0.9")) == 0
    with pytest.raises(
        UserError, match=r"expected at most 0% of \d+ records rejected .*, found 1: not_dicom 1"
    ):
        main(arguments(own_tree, store, "--finalise", "data.max_reject_fraction=0"))


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "a/b", "0/0"])
def test_a_wrong_shard_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"--shard: expected i/n with 0 <= i < n, found"):
        parse_shard(text)
