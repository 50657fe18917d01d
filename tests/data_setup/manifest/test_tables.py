"""Tables that are wrong are named by file, column and line; labels of a table of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_setup.manifest import load_labels, read_records
from tests.data_setup.manifest.cohorts import COLUMNS, PEOPLE, config, people_of, person, row, write_tree
from utils.errors import UserError
from utils.storage import write_text


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
    assert load_labels(config(tmp_path, *own)) == {
        "1001": "mild",
        "4001": "severe",
        "7001": "none",
    }  # none is a class
    with pytest.raises(UserError, match=r"own\.csv: expected a column eye, found patient, grade"):
        load_labels(config(tmp_path, *own[:2], "task.label_column=eye"))
    write_text(f"{tmp_path}/own.csv", "patient,grade\n1001,mild\n1001,severe\n")
    with pytest.raises(UserError, match="grade of 1001: expected one label, found 'mild' and 'severe'"):
        load_labels(config(tmp_path, *own))
