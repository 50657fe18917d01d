"""Files that the manifest names and that are not there, and the other way round, by one listing."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_setup.check import list_tree
from data_setup.manifest import read_records
from tests.data_setup.manifest.cohorts import TREE, audit_of, config, people_of, row, write_tree
from utils import storage
from utils.config.schema import StorageOptions
from utils.storage import write_text


def test_missing_files_and_orphans(tmp_path: Path) -> None:
    rows = [row("1001"), row("1001", uid="1.2"), row("4001", "zeiss_cirrus", uid="1.3")]
    rows.append(row("1001", "heidelberg_spectralis", uid="1.4", name="spectralis_onh_rc_hr_oct_oct"))
    rows.append(row("1001", "heidelberg_spectralis", uid="1.5"))
    rows.append(row("1001", uid="1.5", name="triton_no_such_protocol"))
    write_tree(tmp_path, rows, people_of("1001", "4001"))
    orphan = rows[0]["filepath"].replace("_1.1.dcm", "_9.9.dcm").lstrip("/")
    (tmp_path / orphan).parents[1].mkdir(parents=True)
    ((tmp_path / orphan).parents[1] / "notes.txt").write_text("no folder of a person")
    for path in [*(r["filepath"] for r in rows[1:]), orphan]:
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    cfg = config(tmp_path, "data.laterality_filter=[R]")
    device = orphan.rpartition("/")[0].rpartition("/")[0]
    lost = rows[-1]["filepath"].lstrip("/")  # of a row that is not used
    (tmp_path / lost).unlink()
    others = [f"{device}/beside.dcm", f"{device}/1001/deeper/down/a.DCM", f"{TREE}/optovue/1001/b.dcm"]
    for path in [*others, f"{device}/1001/deeper/notes.txt", "retinal_octa/flow_cube/1001/no_oct.dcm"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    assert audit_of(cfg) == {
        "missing": [rows[0]["filepath"].lstrip("/")],
        "orphans": sorted([orphan, *others]),
        "unused_missing": [lost],
    }


def test_one_listing_whatever_the_number_of_people(monkeypatch: pytest.MonkeyPatch) -> None:
    root = "memory://audit-bucket/root"
    people = [str(1000 + n) for n in range(40)]
    rows = [row(person, uid=f"1.{person}") for person in people]
    write_tree(root, rows, people_of(*people))
    for one in rows:
        write_text(root + one["filepath"], "x")
    asked = []
    for name in ("find", "ls", "info"):
        real = getattr(MemoryFileSystem, name)

        def count(fs: object, *a: object, name: str = name, real: Callable = real, **k: object) -> object:
            asked.append(name)
            return real(fs, *a, **k)

        monkeypatch.setattr(MemoryFileSystem, name, count)
    listing = read_records(config(root))
    monkeypatch.setattr(storage, "list_names", None)
    asked.clear()
    assert len(list_tree(listing, StorageOptions()).sizes) == 41  # the manifest too
    assert asked.count("find") == 1


def test_files_of_ones_own_anywhere_below_the_root(tmp_path: Path) -> None:
    """Files directly in the root, folders and names without an ending are found; links are followed."""
    (tmp_path / "elsewhere/inner").mkdir(parents=True)
    root = tmp_path / "root"
    (root / "imgs").mkdir(parents=True)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/inner/back").symlink_to(tmp_path / "elsewhere")
    (root / "nowhere.dcm").symlink_to(tmp_path / "absent")
    for path in ("r.nii.gz", "IM0002", "imgs/1.png", "linked/a.dcm", "linked/inner/b.dcm", "beside.dcm"):
        (root / path).write_bytes(b"x")
    paths = ("r.nii.gz", "IM0002", "imgs", "linked/a.dcm", "IM0003")
    lines = [f"{1001 + n}\t{path}\tx\ty\tR\n" for n, path in enumerate(paths)]
    (root / "manifest.tsv").write_text("person_id\tfilepath\tdevice\tprotocol\tlaterality\n" + "".join(lines))
    people = "".join(f"{1001 + n}\t\t\t\n" for n in range(len(paths)))
    (root / "participants.tsv").write_text("person_id\tstudy_group\tclinical_site\tage\n" + people)
    cfg = config(root, f"data.manifest_path={root / 'manifest.tsv'}")
    orphans = ["beside.dcm", "linked/inner/b.dcm"]
    assert audit_of(cfg) == {"missing": ["IM0003"], "orphans": orphans, "unused_missing": []}
