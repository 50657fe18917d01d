"""Rows become records: ids, versions, paths of every form, sides; a damaged table is named by its line."""

from pathlib import Path

import pytest

from data_setup.manifest import load_labels, read_records
from data_setup.tables.splits import pretraining_split
from tests.data_setup.manifest.cohorts import (
    COLUMNS,
    NOTHING,
    PEOPLE,
    TREE,
    audit_of,
    config,
    people_of,
    person,
    row,
    write_tree,
)
from tests.support.pipeline_factory import ROOT
from utils.errors import UserError
from utils.storage import write_text

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
