"""Tables of cohorts as AI-READI writes them, a configuration that reads them, an audit of their files."""

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_setup.check import audit_files, list_tree
from data_setup.manifest import Record, load_labels, read_records, select_wanted
from data_setup.phantom.files import MANIFEST_COLUMNS
from data_setup.tables.splits import pretraining_split, seeded_split, stratified_choice
from tests.support.pipeline_factory import ROOT
from utils import storage
from utils.config.load import load_config
from utils.config.schema import Config, StorageOptions
from utils.errors import ConfigError, UserError
from utils.storage import write_text

NOTHING: dict[str, list[str]] = {"missing": [], "orphans": [], "unused_missing": []}
TREE = "retinal_oct/structural_oct"
COLUMNS = list(MANIFEST_COLUMNS)  # in the order of version 3
PEOPLE = ["person_id", "clinical_site", "study_group", "age", "study_visit_date", "recommended_split"]
GROUPS = ("healthy", "pre_diabetes_lifestyle_controlled", "insulin_dependent")
SITES = ("UW", "UCSD", "UAB")
NAMES = {  # device folder: file-name part, version 3
    "topcon_triton": "triton_macula_6x6_octa_oct",
    "zeiss_cirrus": "cirrus_mac_oct_oct",
    "heidelberg_spectralis": "spectralis_ppol_mac_hr_oct_oct",
}


def row(
    person: str, device: str = "topcon_triton", uid: str = "1.1", side: str = "r", **changes: str
) -> dict[str, str]:
    """One manifest row; a `name` argument replaces the protocol part of the file name."""
    name = changes.pop("name", NAMES[device])
    path = f"/retinal_oct/structural_oct/{device}/{person}/{person}_{name}_{side}_{uid}.dcm"
    values = dict.fromkeys(COLUMNS, "x") | {
        "person_id": person,
        "anatomic_region": "Macula, 6 x 6",
        "laterality": side.upper(),
        "height": "992",
        "width": "320",
        "number_of_frames": "320",
        "pixel_spacing": "[0.0026, 0.01875]",
        "slice_thickness": "0.01875",
        "sop_instance_uid": uid,
        "filepath": path,
        "reference_filepath": "",
    }
    return values | changes


def person(index: int, split: str | None = None, **changes: str) -> dict[str, str]:
    """One row of participants.tsv."""
    values = {
        "person_id": str(1000 + index),
        "clinical_site": SITES[index % 3],
        "study_group": GROUPS[index // 3 % 3],
        "age": str(40 + index % 50),
        "study_visit_date": "2024-01-01",
        "recommended_split": split or ("train", "val", "test")[index % 3],
    }
    return values | changes


def table(rows: list[dict[str, str]], columns: list[str]) -> str:
    lines = ["\t".join(columns)] + ["\t".join(r[c] for c in columns) for r in rows]
    return "\n".join(lines) + "\n"


def write_tree(
    root: Path | str,
    rows: list[dict[str, str]],
    people: list[dict[str, str]],
    columns: list[str] = COLUMNS,
    people_columns: list[str] = PEOPLE,
) -> None:
    """The two tables of a cohort, without its image files."""
    write_text(f"{root}/retinal_oct/manifest.tsv", table(rows, columns))
    write_text(f"{root}/participants.tsv", table(people, people_columns))


def config(root: Path | str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "smoke_test.yaml", [f"data.gcs_root={root}", *overrides])


def audit_of(cfg: Config) -> dict[str, list[str]]:
    listing = read_records(cfg)
    return audit_files(listing, list_tree(listing, cfg.data.storage_options))


def people_of(*ids: str) -> list[dict[str, str]]:
    return [person(i, person_id=p) for i, p in enumerate(ids)]


# ---- rows become records: ids, versions, paths of every form, sides; a damaged table is named by its line
REAL = ROOT.parent / "shared" / "data" / "real_oct"


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared sample files are not here")
def test_real_eyes() -> None:
    listing = read_records(config(REAL))
    assert [(r.person_id, r.device, r.split, r.shape) for r in listing.records] == [
        ("9001", "heidelberg_spectralis", "train", (145, 496, 512)),
        ("9002", "topcon_triton", "val", (49, 200, 200)),
    ]
    assert listing.skipped == {}
    assert all(Path(r.url).is_file() for r in listing.records)
    assert pretraining_split(listing.records, 0.1, 0) == (["9001"], ["9002"], "recommended_val")
    assert audit_of(config(REAL)) == NOTHING


def test_ids_of_every_site_in_order(tmp_path: Path) -> None:
    ids = ["9001", "1001", "7001", "4001"]
    rows = [row(p, uid=f"1.{n}.{i}") for n, p in enumerate(ids) for i in (2, 1)]
    write_tree(tmp_path, rows, people_of(*ids))
    records = read_records(config(tmp_path)).records
    assert [r.person_id for r in records] == [p for p in sorted(ids) for _ in (1, 2)]
    assert [r.path for r in records] == sorted(r.path for r in records)
    assert all(not r.path.startswith("/") for r in records)
    assert all(r.url == f"{tmp_path}/{r.path}" for r in records)


def test_versions_2_and_3_read_alike(tmp_path: Path) -> None:
    rows = [row("1001", name="triton_macula_6x6_oct"), row("4001", name="triton_macula_6x6_oct", uid="1.2")]
    people = people_of("1001", "4001")
    names = {"person_id": "participant_id"}
    old_rows, old_people = ([r | {"participant_id": r["person_id"]} for r in some] for some in (rows, people))
    columns = ([names.get(c, c) for c in some] for some in (COLUMNS, PEOPLE))
    write_tree(tmp_path, old_rows, old_people, *columns)
    old = read_records(config(tmp_path)).records
    assert [r.protocol for r in old] == ["triton_macula_6x6_octa_oct"] * 2
    write_tree(tmp_path, rows, people)
    assert read_records(config(tmp_path)).records == old
    assert load_labels(config(tmp_path)) == {p["person_id"]: p["study_group"] for p in people}


def test_byte_order_mark(tmp_path: Path) -> None:
    write_tree(tmp_path, [row("1001")], people_of("1001"))
    for name in ("participants.tsv", "retinal_oct/manifest.tsv"):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_records(config(tmp_path)).records) == 1


def test_facts_come_from_the_path_and_sentinels_are_none(tmp_path: Path) -> None:
    rows = [
        row("1001", "zeiss_cirrus", side="l", manufacturer="Topcon", anatomic_region="Optic Disc"),
        row("1001", uid="1.2", laterality="unknown_laterality", height="Not reported")
        | {"pixel_spacing": "Varies by frame", "slice_thickness": "None"},
    ]
    write_tree(tmp_path, rows, [person(0, person_id="1001", age="None", clinical_site="")])
    triton, cirrus = read_records(config(tmp_path)).records
    assert (cirrus.device, cirrus.protocol, cirrus.region) == ("zeiss_cirrus", "cirrus_mac_oct_oct", "Macula")
    assert (cirrus.laterality, cirrus.shape) == ("L", (320, 992, 320))
    assert (triton.laterality, triton.shape) == ("R", None)
    assert (triton.age, triton.clinical_site) == (None, None)
    assert triton.study_group == "healthy"


@pytest.mark.parametrize(
    ("word", "side"),
    [
        *(("OD", "R"), ("os", "L"), ("Right", "R"), ("left", "L"), ("L", "L")),
        *(("unknown", "unknown"), ("", "unknown")),
    ],
)
def test_words_for_the_side_of_an_eye(tmp_path: Path, word: str, side: str) -> None:
    one = row("1001", laterality=word, filepath=f"{TREE}/zeiss_cirrus/1001/1001_cirrus_mac_oct_oct_1.dcm")
    write_tree(tmp_path, [one], people_of("1001"))
    assert [r.laterality for r in read_records(config(tmp_path)).records] == [side]


def test_a_word_that_is_no_side_is_an_error(tmp_path: Path) -> None:
    write_tree(tmp_path, [row("1001"), row("1001", uid="1.2", laterality="rechts")], people_of("1001"))
    expected = (
        r"manifest\.tsv: line 3: laterality: expected L, R, OS, OD, left, right or nothing, found 'rechts'"
    )
    with pytest.raises(UserError, match=expected):
        read_records(config(tmp_path))


def test_columns_of_participants_that_may_be_empty_are_optional(tmp_path: Path) -> None:
    write_tree(tmp_path, [row("1001")], people_of("1001"), people_columns=["person_id"])
    (record,) = read_records(config(tmp_path)).records
    assert (record.study_group, record.clinical_site, record.age) == (None, None, None)
    assert load_labels(config(tmp_path)) == {}
    with pytest.raises(UserError, match="expected a column study_gruop, found person_id"):
        load_labels(config(tmp_path, "task.label_column=study_gruop"))


@pytest.mark.parametrize("root_inside", ["", "dataset", "retinal_oct", "dataset/retinal_oct"])
@pytest.mark.parametrize("prefix", ["/", "", "/dataset/", "dataset/"])
def test_prefixes_and_nested_folders(tmp_path: Path, prefix: str, root_inside: str) -> None:
    """dataset/ may be in the manifest's paths, on disk, both or neither; retinal_oct may be nested twice."""
    one = row("1001")
    relative = one["filepath"].lstrip("/")
    write_tree(tmp_path, [one | {"filepath": prefix + relative}], people_of("1001"))
    manifest = tmp_path / "retinal_oct" / "manifest.tsv"
    manifest.rename(tmp_path / "manifest.tsv")
    manifest.parent.rmdir()
    file = tmp_path / root_inside / relative
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    cfg = config(tmp_path, f"data.manifest_path={tmp_path}/manifest.tsv")
    (record,) = read_records(cfg).records
    assert record.path == relative
    assert record.url == str(file)
    assert audit_of(cfg) == NOTHING


def test_rows_that_are_not_used_are_counted(tmp_path: Path) -> None:
    rows = [
        row("1001"),
        row("1001"),  # the same row again
        row("1001", name="triton_macula_6x6_oct", uid="1.1"),  # the same file under its version 2 name
        row("1001", "heidelberg_spectralis", uid="2", name="spectralis_onh_rc_hr_oct_oct"),
        row("1001", uid="3", name="triton_of_tomorrow"),
        row("1001", uid="4", filepath="/retinal_oct/structural_oct/optovue/1001/1001_x_r_4.dcm"),
        row("1001", uid="5", filepath=""),
        row("1001", uid="6", filepath="/retinal_oct/../../etc/passwd"),
        row("None", uid="7"),
        row("4242", uid="8"),
        row("4001", uid="9"),
    ]
    rows[1:1] = [row("1001", uid=u, sop_instance_uid="Varies by frame") for u in ("1.8", "1.9")]  # no UID
    people = [*people_of("1001"), person(1, person_id="4001", recommended_split="")]
    write_tree(tmp_path, rows, people)
    listing = read_records(config(tmp_path))
    assert len(listing.records) == 4  # no file is there: prepare names each
    assert listing.skipped == {
        "duplicate_row": 1,
        "not_a_volume": 1,
        "participant_unknown": 1,
        "participant_without_split": 1,
        "row_without_path": 2,
        "row_without_person": 1,
        "unknown_device": 1,
        "unknown_protocol": 1,
    }


@pytest.mark.parametrize(
    ("people", "there", "height", "dropped"),
    [
        ("aa", "1", "992", "0"),  # moved
        ("aaa", "2", "992", "01"),  # moved twice
        ("ab", "1", "992", "0"),  # to another person
        ("aa", "1", "100", "0"),  # the table is wrong about the shape
        ("ab", "1", "100", ""),
        ("abc", "2", "992", ""),  # a constant UID
        ("aac", "12", "992", ""),
        ("abcdefgh", "0134567", "992", ""),
        ("aab", "", "992", ""),
    ],
)
def test_a_row_without_its_file_is_another_only_where_that_is_sure(
    tmp_path: Path, people: str, there: str, height: str, dropped: str
) -> None:
    ids = [f"100{'abcdefgh'.index(letter)}" for letter in people]
    rows = [row(p, uid=f"1.{n}", sop_instance_uid="1") for n, p in enumerate(ids)]
    rows[0]["height"] = height
    write_tree(tmp_path, rows, people_of(*sorted(set(ids))))
    for n in there:
        write_text(f"{tmp_path}{rows[int(n)]['filepath']}", "")
    listing = read_records(config(tmp_path))
    assert {r.path for r in listing.filtered} == {rows[int(n)]["filepath"][1:] for n in dropped}
    assert listing.copies == {
        rows[int(n)]["filepath"][1:]: rows[int(t)]["filepath"][1:] for n in dropped for t in there
    }
    assert len(listing.records) == len(rows) - len(dropped)


def test_a_bucket_reads_like_a_folder() -> None:
    root = "memory://manifest-bucket/root"
    write_tree(root, [row("1001")], people_of("1001"))
    (record,) = read_records(config(root)).records
    assert record.url == f"{root}/{record.path}"
    write_text(record.url, "x")
    assert audit_of(config(root)) == NOTHING


def test_errors_name_file_column_and_header(tmp_path: Path) -> None:
    people = people_of("1001")
    write_tree(tmp_path, [row("1001")], people, [c for c in COLUMNS if c != "filepath"])
    with pytest.raises(UserError, match=r"manifest\.tsv: expected a column filepath, found person_id, manu"):
        read_records(config(tmp_path))
    write_tree(tmp_path, [row("1001")], people, people_columns=PEOPLE[1:])
    with pytest.raises(UserError, match=r"participants\.tsv: expected a column person_id or participant_id"):
        read_records(config(tmp_path))
    write_tree(tmp_path, [row("1001")], [person(0, "validation", person_id="1001")])
    with pytest.raises(UserError, match=r"split of 1001: expected train \| val \| test, found 'validation'"):
        read_records(config(tmp_path))
    write_tree(tmp_path, [row("1001")], [*people, person(0, "test", person_id="1001")])
    with pytest.raises(UserError, match="participant 1001: expected one row, found two that differ"):
        read_records(config(tmp_path))
    write_tree(tmp_path, [row("7001")], people)
    with pytest.raises(UserError, match=r"at least one usable row, found none \(participant_unknown 1\)"):
        read_records(config(tmp_path))
    write_text(f"{tmp_path}/retinal_oct/manifest.tsv", "")
    with pytest.raises(UserError, match=r"manifest\.tsv: expected a table with a header line"):
        read_records(config(tmp_path))
    with pytest.raises(UserError, match=r"nowhere.*not found"):
        read_records(config(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("patient,grade,grade\n1001,a,b\n", "column grade: expected it once, found 2 times"),
        ("patient,grade\n1001,mild,\n", r"line 2: expected 2 fields, as in the header, found 3"),
        ("patient,grade\n1001,mild\n1002\n", r"line 3: expected 2 fields, as in the header, found 1"),
        ('patient,grade\n1001,"mild\n', "expected a table with a header line, found: unexpected end of data"),
    ],
)
def test_tables_whose_columns_cannot_be_told_apart_are_errors(
    tmp_path: Path, text: str, problem: str
) -> None:
    write_tree(tmp_path, [row("1001")], people_of("1001"))
    write_text(f"{tmp_path}/own.csv", text)
    own = (f"task.labels_path={tmp_path}/own.csv", "task.id_column=patient", "task.label_column=grade")
    with pytest.raises(UserError, match=rf"own\.csv: {problem}"):
        load_labels(config(tmp_path, *own))


def test_empty_lines_carriage_returns_and_quotes_are_read(tmp_path: Path) -> None:
    write_tree(tmp_path, [row("1001")], people_of("1001"))
    own = (f"task.labels_path={tmp_path}/own.csv", "task.id_column=patient", "task.label_column=grade")
    for end in ("\n", "\r\n", "\r"):
        write_text(
            f"{tmp_path}/own.csv", end.join(["patient,grade", "", '1001,"mild, left"', "4001,none", ""])
        )
        assert load_labels(config(tmp_path, *own)) == {"1001": "mild, left", "4001": "none"}


def test_labels(tmp_path: Path) -> None:
    people = [*people_of("1001", "4001"), person(2, person_id="7001", study_group="")]
    write_tree(tmp_path, [row("1001")], people)
    assert load_labels(config(tmp_path)) == {"1001": "healthy", "4001": "healthy"}
    write_text(f"{tmp_path}/own.csv", "patient,grade\n1001,mild\n4001,severe\n7001,none\n9001,\n1001,mild\n")
    own = (f"task.labels_path={tmp_path}/own.csv", "task.id_column=patient", "task.label_column=grade")
    grades = {"1001": "mild", "4001": "severe", "7001": "none"}  # none is a class
    assert load_labels(config(tmp_path, *own)) == grades
    with pytest.raises(UserError, match=r"own\.csv: expected a column eye, found patient, grade"):
        load_labels(config(tmp_path, *own[:2], "task.label_column=eye"))
    write_text(f"{tmp_path}/own.csv", "patient,grade\n1001,mild\n1001,severe\n")
    with pytest.raises(UserError, match="grade of 1001: expected one label, found 'mild' and 'severe'"):
        load_labels(config(tmp_path, *own))


# ---- filters, one domain, and a share of every site, device and group; unknown values are errors


def mixed_tree(root: Path) -> None:
    rows = [row("1001", device, uid=f"{i}.{s}", side=s) for i, device in enumerate(NAMES) for s in ("l", "r")]
    write_tree(root, rows, people_of("1001"))


@pytest.mark.parametrize(
    ("override", "count"),
    [
        ("data.device_filter=[topcon_triton,zeiss_cirrus]", 4),
        ("data.protocol_filter=[cirrus_mac_oct_oct]", 2),
        ("data.protocol_filter=[triton_macula_6x6_oct]", 2),  # the version 2 name
        ("data.laterality_filter=[L]", 3),
    ],
)
def test_filters(tmp_path: Path, override: str, count: int) -> None:
    mixed_tree(tmp_path)
    listing = read_records(config(tmp_path, override))
    assert len(listing.records) == count
    key = override.split("=")[0].removeprefix("data.")
    assert listing.skipped == {f"filtered_by_{key}": 6 - count}


def test_single_domain_is_one_device(tmp_path: Path) -> None:
    mixed_tree(tmp_path)
    one = ("data.list_strategy=single_domain", "data.device_filter=[zeiss_cirrus]")
    records = read_records(config(tmp_path, *one)).records
    assert {r.device for r in records} == {"zeiss_cirrus"}
    assert len({r.device for r in read_records(config(tmp_path)).records}) == 3


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.device_filter=[topcon_tritan]", "topcon_triton"),
        ("data.protocol_filter=[spectralis_onh_rc_hr_oct_oct]", "cirrus_disc_oct_oct"),  # no volume
        ("data.laterality_filter=[both]", "L, R"),
        ("data.device_filter=[]", "topcon_triton"),
    ],
)
def test_unknown_filter_values_name_the_allowed_ones(tmp_path: Path, override: str, names: str) -> None:
    mixed_tree(tmp_path)
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=f"{key}: expected some of .*{names}"):
        read_records(config(tmp_path, override))


def test_max_samples_takes_its_share_of_every_site_device_and_group(tmp_path: Path) -> None:
    """In AI-READI the first digit of an id is the site: the lowest ids would be one site."""
    people = [person(n, person_id=str(n % 3 * 3000 + 1000 + n)) for n in range(90)]
    rows = [
        row(p["person_id"], device, uid=f"1.{p['person_id']}.{device}")
        for p in people
        for device in ("topcon_triton", "zeiss_cirrus")
    ]
    write_tree(tmp_path, rows, people)
    every = read_records(config(tmp_path)).records
    listing = read_records(config(tmp_path, "data.max_samples=36"))
    assert listing.skipped == {"beyond_max_samples": 180 - 36}
    assert Counter((r.clinical_site, r.study_group, r.device) for r in listing.records) == Counter(
        dict.fromkeys({(r.clinical_site, r.study_group, r.device) for r in every}, 2)
    )
    assert listing.records == [r for r in every if r in listing.records]  # in the order of the list
    write_tree(tmp_path, rows[::-1], people[::-1])
    assert read_records(config(tmp_path, "data.max_samples=36")).records == listing.records
    assert read_records(config(tmp_path, "data.max_samples=36", "seed=1")).records != listing.records


# ---- files that the manifest names and that are not there, and the other way round, by one listing


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


# ---- cohorts of one's own: own names, no participants.tsv, a row for each eye, facts in the manifest


def own_tree(root: Path, rows: list[str], columns: str = "person_id\tfilepath\tdevice\tprotocol") -> None:
    """A manifest at its own place, without participants.tsv."""
    root.mkdir(exist_ok=True)
    (root / "manifest.tsv").write_text("\n".join([columns, *rows]) + "\n")


def own_config(root: Path, *overrides: str) -> Config:
    return config(root, f"data.manifest_path={root}/manifest.tsv", *overrides)


def test_names_of_ones_own_are_allowed_in_filters(tmp_path: Path) -> None:
    columns = "person_id\tfilepath\tdevice\tprotocol\tanatomic_region\tlaterality"
    lines = ["1\ta.nii\tbioptigen\tradial_x\tFovea\tRight", "2\tb.nii\toptovue\tcube\tPeriphery\tOS"]
    own_tree(tmp_path, lines, columns)
    for override in (
        "data.device_filter=[bioptigen]",
        "data.protocol_filter=[radial_x]",
        "data.laterality_filter=[OD]",
    ):
        listing = read_records(own_config(tmp_path, override))
        assert [r.path for r in listing.records] == ["a.nii"], override
    one = ("data.list_strategy=single_domain", "data.device_filter=[optovue]")
    assert [r.path for r in read_records(own_config(tmp_path, *one)).records] == ["b.nii"]
    with pytest.raises(ConfigError, match=r"device_filter: expected some of bioptigen, optovue, .*'optovu'"):
        read_records(own_config(tmp_path, "data.device_filter=[optovu]"))


def test_a_store_takes_the_names_that_it_has(tmp_path: Path) -> None:
    columns = ["device", "protocol", "laterality"]
    index = pd.DataFrame([["bioptigen", "p", "L"], ["optovue", None, "R"]], columns=columns)
    chosen = select_wanted(config(tmp_path, "data.device_filter=[optovue]"), index)
    assert chosen.laterality.tolist() == ["R"]
    with pytest.raises(ConfigError, match=r"expected some of p, .*found 'P'"):
        select_wanted(config(tmp_path, "data.protocol_filter=[P]"), index)


def test_only_a_manifest_at_its_own_place_may_lack_participants(tmp_path: Path) -> None:
    own_tree(tmp_path, [f"{n}\t{n}.nii\td\tp" for n in range(40)])
    listing = read_records(own_config(tmp_path))
    assert (len(listing.records), listing.split_source) == (40, "seeded_70_10_20")
    assert {r.person_id: r.split for r in listing.records} == seeded_split(
        dict.fromkeys(map(str, range(40))), 0
    )
    own_tree(tmp_path, [f"{n}\t{n}.nii\td\tp" for n in range(60)])
    listing = read_records(own_config(tmp_path))
    own_tree(tmp_path, [f"{n}\t{n}.nii\td\tp" for n in range(80)])  # who is new moves nobody, without a store
    grown = {r.person_id: r.split for r in read_records(own_config(tmp_path)).records}
    assert {r.person_id: r.split for r in listing.records}.items() <= grown.items()
    assert load_labels(own_config(tmp_path)) == {}
    with pytest.raises(UserError, match=r"participants\.tsv"):
        load_labels(own_config(tmp_path, "task.label_column=grade"))
    with pytest.raises(UserError, match=r"people\.tsv"):
        read_records(own_config(tmp_path, f"data.participants_path={tmp_path}/people.tsv"))
    os.mkfifo(tmp_path / "participants.tsv")  # nobody's labels would be read
    for read in (read_records, load_labels):
        with pytest.raises(UserError, match=r"participants\.tsv: expected a file, found a named pipe"):
            read(own_config(tmp_path))
    (tmp_path / "participants.tsv").unlink()
    write_tree(tmp_path, [row("1001")], people_of("1001"))
    (tmp_path / "participants.tsv").unlink()
    for read in (read_records, load_labels):
        with pytest.raises(UserError, match=r"participants\.tsv"):
            read(config(tmp_path))


def test_one_path_of_two_people_is_an_error(tmp_path: Path) -> None:
    own_tree(tmp_path, ["1\ta.nii\td\tp", "1\ta.nii\td\tp", "2\t./a.nii\td\tp"])
    expected = r"line 4: expected 'a\.nii' in the rows of one person, found '1' and '2'"
    with pytest.raises(UserError, match=expected):
        read_records(own_config(tmp_path))


def test_participants_may_have_a_row_for_each_eye(tmp_path: Path) -> None:
    columns = "person_id\tfilepath\tdevice\tprotocol\tlaterality"
    own_tree(tmp_path, [f"1\t{n}.nii\td\tp\t{side}" for n, side in enumerate(["R", "left", ""])], columns)
    people = tmp_path / "participants.tsv"
    people.write_text("person_id\teye\tstudy_group\tage\n1\tOD\tAMD\t70\n1\tLeft\thealthy\t70\n")
    records = read_records(own_config(tmp_path)).records
    assert [(r.laterality, r.study_group, r.age) for r in records] == [
        ("R", "AMD", 70),
        ("L", "healthy", 70),
        ("unknown", None, 70),  # what both eyes share
    ]
    assert load_labels(own_config(tmp_path, "task.unit=eye")) == {"1_R": "AMD", "1_L": "healthy"}
    with pytest.raises(UserError, match="study_group of 1: expected one label, found 'AMD' and 'healthy'"):
        load_labels(own_config(tmp_path))
    people.write_text("person_id\teye\trecommended_split\n1\tOD\ttrain\n1\tOS\ttest\n")
    with pytest.raises(UserError, match="participant 1: expected one recommended_split for both eyes"):
        read_records(own_config(tmp_path))
    people.write_text("person_id\teye\tage\n1\tOD\t70\n1\tR\t71\n")
    with pytest.raises(UserError, match="participant 1: expected one row of the R eye, found two"):
        read_records(own_config(tmp_path))
    people.write_text("person_id\teye\n1\tboth\n")
    with pytest.raises(
        UserError, match="line 2: expected an eye as OD, OS, L, R, left or right, found 'both'"
    ):
        read_records(own_config(tmp_path))


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("spacing_mm", "0.1 0.2", "line 2: spacing_mm: expected three lengths in mm above 0, D, H, W"),
        ("spacing_mm", "0.1, 0, 0.1", "line 2: spacing_mm: expected three lengths"),
        ("spacing_mm", "0.1; nan; 0.1", "line 2: spacing_mm: expected three lengths"),
        ("d_order", "down", "line 2: d_order: expected superior_to_inferior"),
    ],
)
def test_a_wrong_fact_of_the_manifest_names_its_line(
    tmp_path: Path, column: str, cell: str, message: str
) -> None:
    own_tree(tmp_path, [f"1\ta.nii\td\tp\t{cell}"], f"person_id\tfilepath\tdevice\tprotocol\t{column}")
    with pytest.raises(UserError, match=message):
        read_records(own_config(tmp_path))


# ---- splits by participant: the recommended one, or seeded ones that a growing cohort does not change


def cohort(count: int = 200, files: int = 2) -> list[Record]:
    """Records of `count` participants, 70 % of them train, in uneven strata."""
    rng = random.Random(0)
    records = []
    for index in range(count):
        about = {
            "person_id": str(1000 + index),
            "split": ("train" if index % 10 < 7 else "val" if index % 10 == 7 else "test"),
            "study_group": rng.choice(GROUPS + GROUPS[:1]),
            "clinical_site": rng.choice(SITES + SITES[:2]),
            "age": 50,
        }
        for file in range(files):
            path = f"{index}/{file}.dcm"
            records.append(Record(path=path, url=path, device="topcon_triton", **about))
    return records


def test_pretraining_split_is_inside_train_disjoint_and_of_its_size() -> None:
    records = cohort(2000, files=1)
    train, val, source = pretraining_split(records, 0.1, seed=0)
    official = {r.person_id for r in records if r.split == "train"}
    assert source == "train_participants"
    assert not set(train) & set(val)
    assert set(train) | set(val) == official
    assert abs(len(val) / len(official) - 0.1) < 0.025  # three standard errors
    site = {r.person_id: r.clinical_site for r in records}
    everyone, chosen = Counter(site[p] for p in official), Counter(site[p] for p in val)
    for key, number in everyone.items():
        assert abs(chosen[key] / number - 0.1) < 0.045, key


def test_a_cohort_that_grows_moves_nobody() -> None:
    records = cohort(600, files=1)
    for count in (200, 400):
        (train, val, _), (all_train, all_val, _) = (
            pretraining_split(part, 0.1, seed=0) for part in (records[:count], records)
        )
        assert set(train) <= set(all_train)
        assert set(val) <= set(all_val)
    ids = [str(n) for n in range(2280 + 228)]
    before, after = (seeded_split(dict.fromkeys(part), 0) for part in (ids[:2280], ids))
    assert {p: after[p] for p in before} == before
    shares = Counter(after.values())
    for name, share in {"train": 0.7, "val": 0.1, "test": 0.2}.items():
        assert abs(shares[name] / len(ids) - share) < 0.03, name


@pytest.mark.parametrize("seed", range(20))
def test_every_side_of_a_small_cohort_has_somebody(seed: int) -> None:
    sides = {1: (1, 0, 0), 2: (1, 0, 1), 3: (1, 1, 1), 5: (3, 1, 1)}
    sides |= {6: (2, 2, 2), 10: (6, 2, 2), 24: (17, 3, 4), 49: (35, 5, 9)}
    for count, (train, val, test) in sides.items():
        split = Counter(seeded_split(dict.fromkeys(map(str, range(count))), seed).values())
        assert (split["train"], split["val"], split["test"]) == (train, val, test)


@pytest.mark.parametrize("seed", range(5))
def test_a_small_cohort_is_stratified_by_what_is_known_of_people(seed: int) -> None:
    group = {f"p{n}": "rare" if n < 10 else "usual" for n in range(40)}
    counts = Counter((side, group[p]) for p, side in seeded_split(group, seed).items())
    assert [counts[side, "rare"] for side in ("train", "val", "test")] == [7, 1, 2]


def test_people_without_scans_take_no_place_in_a_small_cohort(tmp_path: Path) -> None:
    people = [person(i) for i in range(90)]
    rows = [row(p["person_id"], uid=p["person_id"]) for p in people[::5]]
    write_tree(tmp_path, rows, people, people_columns=PEOPLE[:-1])
    listing = read_records(config(tmp_path))
    assert Counter(r.split for r in listing.records) == {"train": 13, "val": 2, "test": 3}
    group = {r.person_id: r.study_group for r in listing.records}
    assert {r.person_id: r.split for r in listing.records} == seeded_split(group, 0)


def test_a_store_from_before_the_hash_keeps_its_exact_and_stratified_choice() -> None:
    records = cohort()
    train, val, source = pretraining_split(records, 0.1, seed=0, rule="exact")
    official = {r.person_id for r in records if r.split == "train"}
    assert source == "train_participants"
    assert set(train) | set(val) == official
    assert len(val) == round(0.1 * len(official)) == 14
    stratum = {r.person_id: (r.study_group, r.clinical_site) for r in records}
    everyone, chosen = Counter(stratum[p] for p in official), Counter(stratum[p] for p in val)
    for key, number in everyone.items():
        assert abs(chosen[key] - 0.1 * number) < 1, key
    with pytest.raises(UserError, match="splits: expected exact or hash, found 'other'"):
        pretraining_split(records, 0.1, 0, rule="other")


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_rounded_by_largest_remainder(seed: int) -> None:
    strata = {f"{key}{i}": key for key, number in (("a", 19), ("b", 8), ("c", 3)) for i in range(number)}
    chosen = stratified_choice(strata, 3, seed, "test")  # shares 1.9, 0.8, 0.3
    assert Counter(strata[p] for p in chosen) == {"a": 2, "b": 1}


def test_pretraining_split_depends_on_the_seed_and_on_nothing_else() -> None:
    records = [replace(r, study_group=None) if r.person_id < "1050" else r for r in cohort()]
    split = pretraining_split(records, 0.1, seed=0)
    shuffled = records[:]
    random.Random(1).shuffle(shuffled)
    assert pretraining_split(shuffled, 0.1, seed=0) == split
    rows = pd.DataFrame([vars(r) for r in shuffled]).itertuples()  # the store's index has the same columns
    assert pretraining_split(rows, 0.1, seed=0) == split
    gaps = [r if r.study_group else replace(r, study_group=float("nan")) for r in records]
    assert pretraining_split(gaps, 0.1, seed=0) == split
    assert pretraining_split(records, 0.1, seed=1) != split


def test_pretraining_split_of_small_cohorts() -> None:
    records = cohort(10, files=1)
    two = [replace(r, split="train") for r in records[:2]]
    train, val, source = pretraining_split(two, 0.1, seed=0)
    assert (len(train), len(val), source) == (1, 1, "train_participants")
    one = [replace(records[0], split="train"), *(replace(r, split="val") for r in records[1:3])]
    assert pretraining_split(one, 0.1, 0) == (["1000"], ["1001", "1002"], "recommended_val")
    assert pretraining_split(one[:1], 0.1, 0) == (["1000"], [], "recommended_val")


def test_cohort_without_recommended_split_is_cut_70_10_20(tmp_path: Path) -> None:
    people = [person(i) for i in range(150)]
    rows = [row(p["person_id"], uid=f"1.{p['person_id']}.{i}") for p in people for i in (1, 2)]
    write_tree(tmp_path, rows, people, people_columns=PEOPLE[:-1])
    listing = read_records(config(tmp_path))
    assert listing.split_source == "seeded_70_10_20"
    split = {r.person_id: r.split for r in listing.records}
    assert all(split[r.person_id] == r.split for r in listing.records)  # by participant
    shares = Counter(split.values())
    for name, share in {"train": 0.7, "val": 0.1, "test": 0.2}.items():
        assert abs(shares[name] / 150 - share) < 0.1, name
    write_tree(tmp_path, rows[::-1], people[::-1], people_columns=PEOPLE[:-1])
    assert read_records(config(tmp_path)).records == listing.records
    other = read_records(config(tmp_path, "seed=1")).records
    assert {r.person_id: r.split for r in other} != split


def test_recommended_split_is_used_as_it_is(tmp_path: Path) -> None:
    people = [person(i) for i in range(9)]
    write_tree(tmp_path, [row(p["person_id"], uid=p["person_id"]) for p in people], people)
    listing = read_records(config(tmp_path))
    assert listing.split_source == "recommended_split"
    assert {r.person_id: r.split for r in listing.records} == {
        p["person_id"]: p["recommended_split"] for p in people
    }
