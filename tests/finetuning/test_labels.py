"""Labels and cohorts: any table, kind and unit; folds that share nobody; what is refused, and why."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from data_setup.manifest import load_labels
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import (
    EVALUATED,
    TRAIN,
    VAL,
    Cohort,
    count_overlap,
    low_shot,
    read_cohort,
    read_cohorts,
)
from finetuning.cohort.labels import Labels, check_table, read_labels
from finetuning.cohort.metrics import pool
from tests.support.cloud_servers import BUCKET, s3_server
from tests.support.finetune_factory import DEVICES, config, index_store
from utils import storage
from utils.config.schema import Config, StorageOptions
from utils.errors import ConfigError, UserError

EYES = [  # of two people and a third with one volume of an unknown eye
    {"person_id": "1001", "laterality": "L"},
    {"person_id": "1001", "laterality": "R"},
    {"person_id": "1001", "laterality": "R", "device": DEVICES[1]},
    {"person_id": "4001", "laterality": "L"},
    {"person_id": "4001", "laterality": "R"},
    {"person_id": "7001", "laterality": "unknown"},
]
STORE = index_store(EYES)


def labels_of(folder: Path, text: str, *overrides: str, name: str = "own.csv") -> Labels:
    """The labels that the table says of STORE."""
    (folder / name).write_text(text)
    cfg = config(folder, folder, f"task.labels_path={folder / name}", "task.label_column=grade", *overrides)
    return read_labels(cfg, STORE.index)


def problem_of(folder: Path, text: str, *overrides: str) -> str:
    """The error's line, without the folder."""
    with pytest.raises(UserError) as error:
        labels_of(folder, text, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


# ---- before anything is loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (None, [], "not found"),
        ("person_id,grade\n1001,1\n", ["task.label_column=stage"], "expected a column stage"),
        (
            "who,grade\n1001,1\n",
            ["task.label_column=grade"],
            "expected a column person_id or participant_id, found who, grade; task.id_column=COLUMN names",
        ),
        ("who,grade\n1001,1\n", ["task.label_column=grade", "task.id_column=who"], None),
        ("person_id,grade\n1001,1\n", ["task.label_column=grade", "task.unit=eye"], "column laterality"),
        ("nothing", ["task.kind=layers"], None),  # its labels are in the store
    ],
)
def test_a_table_is_refused_before_a_checkpoint_is_asked_for(
    tmp_path: Path, text: str | None, words: list[str], expected: str | None
) -> None:
    table = tmp_path / "own.csv"
    if text is not None:
        table.write_text(text)
    arguments = ("configs/cls_linear_probe.yaml", [f"task.labels_path={table}", *words])
    if expected is None:
        check_table(*arguments)
        return
    with pytest.raises(UserError, match=expected):
        check_table(*arguments)


def test_a_table_is_refused_before_torch_is_imported() -> None:
    code = "import sys, finetuning.cohort.labels; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---- tables and units -------------------------------------------------------------------------------------


@pytest.mark.parametrize("id_column", ["person_id", "participant_id"])
def test_participants_tsv_of_both_versions(tmp_path: Path, id_column: str) -> None:
    lines = [
        f"{id_column}\tclinical_site\tstudy_group\tage\tstudy_visit_date\trecommended_split",
        "1001\tUW\thealthy\t50\t2024-01-02\ttrain",
        "4001\tUAB\tnone\t60\t2024-01-03\tval",
        "7001\tUCSD\t\t61\t2024-01-04\ttest",
    ]
    (tmp_path / "participants.tsv").write_text("\n".join(lines) + "\n")
    cfg = config(tmp_path, tmp_path)
    labels = read_labels(cfg, STORE.index)
    assert labels == Labels(("healthy", "none"), {"1001": (0.0,), "4001": (1.0,)}, ())
    # the probes of pre-training read the same
    assert load_labels(cfg) == {p: labels.names[int(v[0])] for p, v in labels.target.items()}
    ages = read_labels(
        config(tmp_path, tmp_path, "task.kind=regression", "task.label_column=age"), STORE.index
    )
    assert ages.target == {"1001": (50.0,), "4001": (60.0,), "7001": (61.0,)}


GRADES = pd.DataFrame(
    {
        "person_id": [1001, 4001, 7001, 9001],
        "grade": ["none", "mild", None, "mild"],
        "value": [1.5, 2, None, 4],
    }
)
EXPECTED = Labels(("mild", "none"), {"1001": (1.0,), "4001": (0.0,)}, ("9001",))


def write_grades(folder: Path) -> dict[str, bytes]:
    """The same table as every format, by name."""
    GRADES.to_csv(folder / "grades.csv", index=False)
    GRADES.to_csv(folder / "grades.tsv", index=False, sep="\t")
    GRADES.to_parquet(folder / "grades.parquet", index=False)
    GRADES.set_index("person_id").to_parquet(folder / "indexed.parquet")
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.*")) if path.stem != "own"}


def test_every_format_says_the_same(tmp_path: Path) -> None:
    for name in write_grades(tmp_path):
        own = f"task.labels_path={tmp_path / name}"
        cfg = config(tmp_path, tmp_path, own, "task.label_column=grade")
        assert read_labels(cfg, STORE.index) == EXPECTED
        cfg = config(tmp_path, tmp_path, own, "task.label_column=value", "task.kind=regression")
        assert read_labels(cfg, STORE.index).target == {"1001": (1.5,), "4001": (2.0,)}
    cut = (tmp_path / "grades.parquet").read_bytes()[:-20]
    (tmp_path / "cut.parquet").write_bytes(cut)
    with pytest.raises(UserError, match=r"cut\.parquet: expected a Parquet table, found: "):
        read_labels(config(tmp_path, tmp_path, f"task.labels_path={tmp_path / 'cut.parquet'}"), STORE.index)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with s3_server() as endpoint:
        yield endpoint


def test_labels_on_an_s3_server(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server on loopback, named by data.storage_options, then by the environment."""

    def read(name: str, *overrides: str) -> Labels:
        own = (f"task.labels_path=s3://{BUCKET}/cohort/{name}", "task.label_column=grade")
        return read_labels(config(tmp_path, tmp_path, *own, *overrides), STORE.index)

    endpoint = f"data.storage_options.endpoint_url={s3}"
    tables = write_grades(tmp_path)
    for name, data in tables.items():
        storage.write_bytes(f"s3://{BUCKET}/cohort/{name}", data, StorageOptions(endpoint_url=s3))
        assert read(name, endpoint) == EXPECTED
    with pytest.raises(UserError, match=r"cohort/absent\.csv"):
        read("absent.csv", endpoint)
    # for a store on gs:// and labels on a server that speaks S3
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)
    assert read("grades.parquet") == EXPECTED


def test_volumes_are_named_by_instance_or_path(tmp_path: Path) -> None:
    of_volumes = "task.unit=volume"
    labels = labels_of(tmp_path, "sop_instance_uid,grade\n1.2.0,a\n1.2.3,b\n", of_volumes)
    assert labels.target == {"1.2.0": (0.0,), "1.2.3": (1.0,)}
    assert (
        labels_of(tmp_path, "filepath,grade\n/scans/0.dcm,a\ndataset/scans/3.dcm,b\n", of_volumes) == labels
    )
    text = "scan,grade\n/scans/0.dcm,a\n1.2.3,b\n1.2.0,a\n"
    assert labels_of(tmp_path, text, of_volumes, "task.id_column=scan") == labels
    assert "line 4: grade of 1.2.0: expected one label, found 'a' and 'b'" in problem_of(
        tmp_path, "path,grade\nscans/0.dcm,a\n1.2.3,b\n1.2.0,b\n", of_volumes
    )
    unnamed = index_store([{"person_id": "1", "sop_instance_uid": ""}])
    cfg = config(tmp_path, tmp_path, of_volumes, f"task.labels_path={tmp_path / 'own.csv'}")
    (tmp_path / "own.csv").write_text("path,study_group\nscans/0.dcm,a\n")
    assert read_labels(cfg, unnamed.index).target == {"scans/0.dcm": (0.0,)}


def test_eyes_by_any_word(tmp_path: Path) -> None:
    for os, od in [("OS", "OD"), ("os", "od"), ("L", "R"), ("Left", "RIGHT"), ("l", " right ")]:
        text = f"person_id,eye,grade\n1001,{os},a\n1001,{od},b\n4001,{od},a\n"
        labels = labels_of(tmp_path, text, "task.unit=eye")
        assert labels.target == {"1001_L": (0.0,), "1001_R": (1.0,), "4001_R": (0.0,)}
    for word in ("OU", "", "lefty"):
        problem = problem_of(tmp_path, f"person_id,laterality,grade\n1001,{word},a\n", "task.unit=eye")
        assert problem == (
            f"own.csv: line 2: 1001: expected an eye as OD, OS, L, R, left or right, found {word!r}"
        )
    problem = problem_of(tmp_path, "person_id,grade\n1001,a\n", "task.unit=eye")
    assert problem.endswith("task.unit=eye: expected a column laterality or eye, found person_id, grade")


# ---- kinds ------------------------------------------------------------------------------------------------


def test_ordinal_classes_are_in_their_order(tmp_path: Path) -> None:
    ordinal = ("task.kind=ordinal", "task.names=[none,mild,bad]")
    text = "person_id,grade\n1001,bad\n4001,none\n7001,mild\n"
    labels = labels_of(tmp_path, text, *ordinal)
    assert labels.names == ("none", "mild", "bad")
    assert labels.target == {"1001": (2.0,), "4001": (0.0,), "7001": (1.0,)}
    assert problem_of(tmp_path, text.replace("mild", "worse"), *ordinal) == (
        "own.csv: line 4: 7001: grade: expected a class of task.names (none, mild, bad), found 'worse'"
    )


def test_values_are_numbers(tmp_path: Path) -> None:
    numbers = "task.kind=regression"
    labels = labels_of(tmp_path, "person_id,grade\n1001,-1.5e2\n4001,\n7001, 7 \n", numbers)
    assert labels == Labels(("grade",), {"1001": (-150.0,), "7001": (7.0,)}, ())
    for text in ("high", "1_000", "inf", '"1,5"', "none"):
        problem = problem_of(tmp_path, f"person_id,grade\n1001,1\n4001,{text}\n", numbers)
        expected = text.strip('"')
        assert problem == f"own.csv: line 3: 4001: grade: expected a number, found {expected!r}"


def test_multilabel_columns_are_zero_or_one(tmp_path: Path) -> None:
    several = ("task.kind=multilabel", "task.names=[drusen,fluid]")
    labels = labels_of(tmp_path, "person_id,fluid,drusen\n1001,1,0\n4001,1.0,1\n7001,,1\n", *several)
    assert labels == Labels(("drusen", "fluid"), {"1001": (0.0, 1.0), "4001": (1.0, 1.0)}, ())
    problem = problem_of(tmp_path, "person_id,fluid,drusen\n1001,1,0\n4001,2,1\n", *several)
    assert problem == "own.csv: line 3: 4001: fluid: expected 0 or 1, found '2'"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (["task.kind=ordinal"], "task.names: expected 2 or more different names with task.kind ordinal"),
        (["task.kind=ordinal", "task.names=[a]"], "task.names: expected 2 or more"),
        (["task.kind=ordinal", "task.names=[a,b,a]"], "task.names: expected 2 or more different"),
        (["task.names=[a,b]"], "task.names: expected null with task.kind classification"),
        (["task.kind=multilabel"], "task.names: expected 1 or more different names"),
        (["task.kind=multilabel", "task.names=[]"], "task.names: expected 1 or more"),
        (["task.kind=regression", "task.names=[a]"], "task.names: expected null with task"),
    ],
)
def test_each_kind_has_its_own_keys(tmp_path: Path, override: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, tmp_path, *override)
    assert problem in str(error.value)


def test_classes_that_are_whole_numbers(tmp_path: Path) -> None:
    """An integer column with a gap, as pandas writes it, has the classes of the column without it."""
    text = "person_id,grade\n1001,1.0\n4001,\n7001,0.0\n"
    assert labels_of(tmp_path, text).names == ("0", "1")
    ordinal = labels_of(tmp_path, text, "task.kind=ordinal", "task.names=[1,0]")
    assert ordinal.target == {"1001": (0.0,), "7001": (1.0,)}
    written = labels_of(tmp_path, text, "task.kind=ordinal", "task.names=['1.0','0.0']")
    assert (written.names, written.target) == (("1.0", "0.0"), ordinal.target)
    pd.DataFrame({"person_id": [1001, 4001, 7001], "grade": [1, None, 0]}).to_parquet(
        tmp_path / "own.parquet"
    )
    cfg = config(
        tmp_path, tmp_path, f"task.labels_path={tmp_path / 'own.parquet'}", "task.label_column=grade"
    )
    assert read_labels(cfg, STORE.index) == labels_of(tmp_path, text)


# ---- what is refused --------------------------------------------------------------------------------------


def test_two_rows_that_differ_are_an_error(tmp_path: Path) -> None:
    assert labels_of(tmp_path, "person_id,grade\n1001,a\n4001,b\n1001,a\n").target["1001"] == (0.0,)
    problem = problem_of(tmp_path, "person_id,grade\n1001,a\n4001,b\n1001,b\n")
    assert problem == "own.csv: line 4: grade of 1001: expected one label, found 'a' and 'b'"


@pytest.mark.parametrize(
    "word",
    ["nan", "NaN", "NA", "N/A", "#N/A", "n/a", "NULL", "null", "<NA>", "NaT", " ", "N.A.", "#REF!", ".", "?"],
)
def test_words_for_no_value_are_missing_and_none_is_a_class(
    tmp_path: Path, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    text = f"person_id,grade\n1001,none\n4001,mild\n7001,{word}\n"
    assert labels_of(tmp_path, text) == Labels(("mild", "none"), {"1001": (1.0,), "4001": (0.0,)}, ())
    assert "own.csv: 1 rows without an id or a label are left out" in caplog.text
    numbers = labels_of(tmp_path, text.replace("none", "1").replace("mild", "2"), "task.kind=regression")
    assert numbers.target == {"1001": (1.0,), "4001": (2.0,)}
    if word.strip():  # a class that somebody names is one
        named = labels_of(tmp_path, text, "task.kind=ordinal", f"task.names=[none,mild,'{word}']")
        assert named.target["7001"] == (2.0,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("Mild", "mild"), ("mild", "MILD"), ("very mild", "very  mild"), ("very_mild", "very-mild")),
        *(("01", "1"), ("1.50", "1.5"), ("\uff11", "1"), ("straße", "STRASSE"), ("e\u0301", "\xe9")),
    ],
)
def test_a_class_in_two_spellings_is_a_question(tmp_path: Path, one: str, other: str) -> None:
    problem = problem_of(tmp_path, f"person_id,grade\n1001,{one}\n4001,{other}\n7001,severe\n")
    assert problem == (
        f"own.csv: grade: expected one spelling of a class, found {one!r} in line 2 and {other!r} in line 3; "
        "write it one way where they are one class, else in words that differ in more"
    )


def test_classes_that_differ_are_no_question(tmp_path: Path) -> None:
    text = "person_id,grade\n1001,-1\n4001,1\n7001,1a\n"
    assert labels_of(tmp_path, text).names == ("-1", "1", "1a")


def test_unmatched_ids_are_counted_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strangers = [f"9{n:03}" for n in range(12)]
    text = "person_id,grade\n1001,a\n" + "".join(f"{p},b\n" for p in reversed(strangers))
    labels = labels_of(tmp_path, text)
    assert labels.unmatched == tuple(strangers)
    assert labels.names == ("a",)  # a class of nobody in the store is none
    assert f"12 labelled ids are not in the store: {', '.join(strangers[:10])}, ..." in caplog.text
    assert problem_of(tmp_path, "person_id,grade\nP-1,a\n") == (
        "own.csv: expected ids of the store in column person_id, found none among 1: the table has 'P-1', "
        "the store has '1001'"
    )
    assert "expected labels, found none (1 rows without" in problem_of(tmp_path, "person_id,grade\n1001,\n")


@pytest.mark.parametrize(
    "column",
    ["PatientSex", "sex", "Gender", "patient_sex", "patientsex", "SEX", "sex_at_birth", "isMale.sex"],
)
def test_sex_is_refused_with_the_reason(tmp_path: Path, column: str) -> None:
    text = f"person_id,{column}\n1001,M\n4001,F\n"
    problem = problem_of(tmp_path, text, f"task.label_column={column}")
    assert problem.startswith(f"own.csv: column {column}: expected another label: AI-READI does not release")
    assert "same dummy, M, for everybody" in problem


@pytest.mark.parametrize(
    "column",
    ["study_visit_date", "StudyDate", "AcquisitionDateTime", "StudyTime", "studytime", "dob", "DATE"],
)
def test_dates_and_times_are_refused_by_name(tmp_path: Path, column: str) -> None:
    problem = problem_of(tmp_path, f"person_id,{column}\n1001,1\n4001,2\n", f"task.label_column={column}")
    assert problem.startswith(f"own.csv: column {column}: expected another label: dates and times identify")


@pytest.mark.parametrize(
    "text",
    ["2024-01-31", "31.01.2024", "1/31/2024", "2024-01-31T10:30:00", "31-Jan-2024", "20240131", "10:30"],
)
def test_dates_and_times_are_refused_by_their_values(tmp_path: Path, text: str) -> None:
    problem = problem_of(tmp_path, f"person_id,grade\n1001,{text}\n4001,\n")
    assert problem.startswith(f"own.csv: column grade: expected a label, found {text!r}: dates and times")
    several = ("task.kind=multilabel", "task.names=[fluid,grade]")
    assert "column grade" in problem_of(tmp_path, f"person_id,fluid,grade\n1001,1,{text}\n", *several)


def test_a_column_of_timestamps_is_refused(tmp_path: Path) -> None:
    table = pd.DataFrame({"person_id": ["1001"], "grade": [pd.Timestamp("2024-01-31 10:30")]})
    table.to_parquet(tmp_path / "own.parquet")
    cfg = config(
        tmp_path, tmp_path, f"task.labels_path={tmp_path / 'own.parquet'}", "task.label_column=grade"
    )
    with pytest.raises(UserError, match=r"column grade: expected a label, found '2024-01-31T10:30"):
        read_labels(cfg, STORE.index)


@pytest.mark.parametrize("text", ["type 2", "1.2.3", "20249999", "3/4", "12.5", "2024", "1-2"])
def test_what_is_no_date_is_a_label(tmp_path: Path, text: str) -> None:
    assert labels_of(tmp_path, f"person_id,grade\n1001,{text}\n").names == (text,)
    column = "candidate_time_s"
    assert labels_of(tmp_path, f"person_id,{column}\n1001,{text}\n", f"task.label_column={column}").names


# ---- the cohort -------------------------------------------------------------------------------------------

SPLITS = ("train", "train", "train", "train", "val", "val", "test", "test")


def people(count: int, split: Callable[[int], str] = lambda number: "test") -> list[dict[str, Any]]:
    """Two volumes of each of `count` people: left, then right."""
    return [
        {"person_id": f"P{number:03}", "laterality": eye, "split": split(number)}
        for number in range(count)
        for eye in "LR"
    ]


def open_task(
    folder: Path, records: Sequence[Mapping[str, Any]], rows: Sequence[str], *overrides: str
) -> tuple[Config, PreparedStore]:
    """A configuration whose labels are `rows` (header first), and a store of the records."""
    path = folder / "task.csv"
    path.write_text("\n".join(rows) + "\n")
    cfg = config(folder, folder, f"task.labels_path={path}", "task.label_column=grade", *overrides)
    return cfg, index_store(records)


def grades(count: int, classes: str = "ab") -> list[str]:
    return ["person_id,grade", *(f"P{n:03},{classes[n % len(classes)]}" for n in range(count))]


def people_of(cohort: Cohort, fold: int) -> set[str]:
    return set(cohort.person[cohort.fold == fold].tolist())


def test_the_official_folds_are_the_splits(tmp_path: Path) -> None:
    records = [*people(8, SPLITS.__getitem__), {"person_id": "P000", "status": "constant", "split": "train"}]
    records[3] |= {"listed": False}  # left the manifest
    cfg, store = open_task(tmp_path, records, [*grades(8), "P900,a"])
    cohort = read_cohort(cfg, store)
    assert (cohort.kind, cohort.names, cohort.num_outputs) == ("classification", ("a", "b"), 2)
    assert cohort.rows.tolist() == [n for n in range(16) if n != 3]
    assert cohort.fold.tolist() == [TRAIN] * 7 + [VAL] * 4 + [EVALUATED] * 4
    assert cohort.target.tolist() == [[n // 2 % 2] for n in range(16) if n != 3]
    assert cohort.unit.tolist() == cohort.person.tolist() == [f"P{n // 2:03}" for n in range(16) if n != 3]
    assert cohort.unmatched == ("P900",)
    on_val = read_cohort(config_with(cfg, tmp_path, "eval.split=val"), store)
    assert people_of(on_val, VAL) == people_of(on_val, EVALUATED) == {"P004", "P005"}
    on_left = read_cohort(config_with(cfg, tmp_path, "data.laterality_filter=[L]"), store)
    assert on_left.rows.tolist() == list(range(0, 16, 2))
    assert [len(c.rows) for c in read_cohorts(cfg, store, {"P006"})] == [15]  # official: nobody is left out
    with pytest.raises(UserError, match=r"x\.pt: expected no participant of split test .* found 1 \(P006\)"):
        count_overlap(cfg, cohort, {"P006", "P000"}, "x.pt")
    assert count_overlap(cfg, cohort, {"P000", "P004"}, "x.pt") == 0


def config_with(cfg: Config, folder: Path, *overrides: str) -> Config:
    """The same task with more overrides."""
    own = (f"task.labels_path={cfg.task.labels_path}", f"task.label_column={cfg.task.label_column}")
    return config(folder, folder, *own, *overrides)


def test_an_eye_has_its_own_label(tmp_path: Path) -> None:
    """The volumes of an eye are pooled, and not with those of the other eye or of another person."""
    records = [*people(8, SPLITS.__getitem__)]
    records += [dict(records[13]) | {"device": DEVICES[1]}, dict(records[12]) | {"laterality": "unknown"}]
    rows = ["person_id,laterality,grade"]
    rows += [f"P{n:03},{eye},{'ab'[(n + (eye == 'OD')) % 2]}" for n in range(8) for eye in ("OS", "OD")]
    cfg, store = open_task(tmp_path, records, rows, "task.unit=eye")
    cohort = read_cohort(cfg, store)
    scores = np.array([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75], [0.5, 0.5], [0.2, 0.8]])  # rows 12..16
    assert cohort.rows[cohort.fold == EVALUATED].tolist() == [12, 13, 14, 15, 16]
    result = pool(cohort, EVALUATED, scores)
    assert result.unit.tolist() == ["P006_L", "P006_R", "P007_L", "P007_R"]
    assert result.person.tolist() == ["P006", "P006", "P007", "P007"]
    assert result.truth.tolist() == [[0], [1], [1], [0]]
    np.testing.assert_allclose(result.scores, [[1, 0], [0.1, 0.9], [0.25, 0.75], [0.5, 0.5]])


def test_an_unlabelled_eye_is_left_out_and_volumes_are_units(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [
        *people(8, SPLITS.__getitem__),
        {"person_id": "P007", "laterality": "unknown", "split": "test"},
    ]
    rows = ["person_id,laterality,grade", *(f"P{n:03},R,{'ab'[n % 2]}" for n in range(8))]
    cfg, store = open_task(tmp_path, records, rows, "task.unit=eye")
    assert (read_cohort(cfg, store).rows % 2 == 1).all()
    assert "1 volumes of an unknown eye are left out" in caplog.text
    rows = ["sop_instance_uid,grade", *(f"1.2.{n},{'ab'[n % 2]}" for n in range(16))]
    cohort = read_cohort(*open_task(tmp_path, records, rows, "task.unit=volume"))
    assert cohort.unit.tolist() == [f"1.2.{n}" for n in range(16)]
    assert cohort.target[:, 0].tolist() == [n % 2 for n in range(16)]


def test_what_no_probe_can_learn_is_refused(tmp_path: Path) -> None:
    def problem(records: list[dict[str, Any]], rows: list[str], *overrides: str) -> str:
        with pytest.raises(UserError) as error:
            read_cohort(*open_task(tmp_path, records, rows, *overrides))
        return str(error.value)

    eight = people(8, SPLITS.__getitem__)
    ordinal = ("task.kind=ordinal", "task.names=[a,b,c]")
    assert "task.names: expected classes of split train, found nobody of ['c']" in problem(
        eight, grades(8), *ordinal
    )
    numbers = ["person_id,grade", *(f"P{n:03},{n if n < 6 else 1}" for n in range(8))]
    assert "split test: expected 2 participants or more, of two grade values, found 2 of 1" in problem(
        eight, numbers, "task.kind=regression"
    )
    labels = ["person_id,grade,x,y", *(f"P{n:03},,{n % 2},{int(n > 3)}" for n in range(8))]
    several = ("task.kind=multilabel", "task.names=[x,y]")
    assert "split train: expected 2 participants or more, of two y values, found 4 of 1" in problem(
        eight, labels, *several
    )


# ---- crossfit ---------------------------------------------------------------------------------------------


def crossfit(
    folder: Path, rows: list[str], *overrides: str, count: int = 60, seen: Sequence[str] = ()
) -> list[Cohort]:
    cfg, store = open_task(folder, people(count), rows, "eval.protocol=crossfit", *overrides)
    return read_cohorts(cfg, store, seen)


def test_crossfit_evaluates_everybody_unseen_once(tmp_path: Path) -> None:
    """Two volumes of each of 60 people, of whom pre-training saw 7; 4 classes of uneven size."""
    rows = grades(60, "aaaaabbbccd")
    seen = [f"P{n:03}" for n in range(0, 42, 6)]
    cohorts = crossfit(tmp_path, rows, seen=seen)
    assert len(cohorts) == 5
    evaluated = Counter(person for cohort in cohorts for person in people_of(cohort, EVALUATED))
    assert evaluated == Counter(f"P{n:03}" for n in range(60) if f"P{n:03}" not in seen)
    truth = {line.split(",")[0]: "abcd".index(line.split(",")[1]) for line in rows[1:]}
    for cohort in cohorts:
        sides = [people_of(cohort, fold) for fold in (TRAIN, VAL, EVALUATED)]
        assert sum(map(len, sides)) == len(set.union(*sides)) == 53
        assert all((cohort.person == p).sum() == 2 for p in sides[EVALUATED])
        assert [truth[p] for p in cohort.person.tolist()] == cohort.target[:, 0].tolist()
    for number in range(4):
        counts = [sum(truth[p] == number for p in people_of(c, EVALUATED)) for c in cohorts]
        assert max(counts) - min(counts) <= 1, counts
    for cohort, following in zip(cohorts, [*cohorts[1:], cohorts[0]], strict=True):
        assert people_of(cohort, VAL) == people_of(following, EVALUATED)


def test_crossfit_follows_from_the_seed(tmp_path: Path) -> None:
    def folds(*overrides: str) -> list[set[str]]:
        return [people_of(c, EVALUATED) for c in crossfit(tmp_path, grades(60), *overrides)]

    assert folds() == folds()
    assert folds() != folds("seed=1")
    assert len(folds()) == 5


def test_crossfit_spreads_a_value_over_the_folds(tmp_path: Path) -> None:
    """Of any five people next to each other in the value, each fold evaluates one."""
    rows = ["person_id,grade", *(f"P{n:03},{1000 - n * n / 10}" for n in range(60))]
    cohorts = crossfit(tmp_path, rows, "task.kind=regression")
    fold_of = {p: k for k, cohort in enumerate(cohorts) for p in people_of(cohort, EVALUATED)}
    for block in range(12):
        assert {fold_of[f"P{59 - (5 * block + n):03}"] for n in range(5)} == set(range(5))


def test_crossfit_keeps_the_eyes_of_a_person_together(tmp_path: Path) -> None:
    rows = ["person_id,eye,grade"]
    rows += [
        f"P{n:03},{eye},{'abc'[(n + (eye == 'R' and n % 4 == 0)) % 3]}" for n in range(60) for eye in "LR"
    ]
    for cohort in crossfit(tmp_path, rows, "task.unit=eye"):
        sides = [people_of(cohort, fold) for fold in (TRAIN, VAL, EVALUATED)]
        assert sum(map(len, sides)) == len(set.union(*sides)) == 60
        assert len(set(cohort.unit.tolist())) == 120


def test_too_few_people_for_crossfit(tmp_path: Path) -> None:
    def problem(rows: list[str], *overrides: str, seen: Sequence[str] = ()) -> str:
        with pytest.raises(UserError) as error:
            crossfit(tmp_path, rows, *overrides, seen=seen)
        return str(error.value)

    rows = ["person_id,grade", *(f"P{n:03},{'b' if n < 4 else 'a'}" for n in range(60))]
    assert "labelled people: expected 5 people of b or more for 5 folds, found 4" in problem(rows)
    unseen = problem(rows, seen=[f"P{n:03}" for n in range(5)])
    assert "of two grade classes, found 55 of 1" in unseen
    assert "did not see (eval.allow_overlap=true takes in the 5 others, of whom it saw images" in unseen
    everybody = [f"P{n:03}" for n in range(60)]
    assert "expected 2 participants or more, of two grade classes, found 0 of 0" in problem(
        rows, seen=everybody
    )
    numbers = ["person_id,grade", *(f"P{n:03},{n}" for n in range(9))]
    assert "expected 10 people with grade or more for 5 folds, found 9" in problem(
        numbers, "task.kind=regression"
    )
    labels = ["person_id,x,y", *(f"P{n:03},{n % 2},{int(n > 56)}" for n in range(60))]
    several = ("task.kind=multilabel", "task.names=[x,y]")
    assert "expected 5 people with y 1 or more for 5 folds, found 3" in problem(labels, *several)


# ---- low-shot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel"])
def test_low_shot_shares_are_nested_and_stratified(tmp_path: Path, kind: str) -> None:
    header = "person_id,grade,x,y"
    columns = {
        "classification": [f"{'aaaaaaabbc'[n % 10]},," for n in range(240)],
        "regression": [f"{n * n},," for n in range(240)],
        "multilabel": [f",{n % 2},{int(n % 20 == 0)}" for n in range(240)],
    }
    rows = [header, *(f"P{n:03},{text}" for n, text in enumerate(columns[kind]))]
    own = ["task.names=[x,y]"] if kind == "multilabel" else []
    records = people(240, lambda n: "val" if n >= 220 else "test" if n >= 200 else "train")
    cohort = read_cohort(*open_task(tmp_path, records, rows, f"task.kind={kind}", *own))
    shares = {share: low_shot(cohort, share, 0) for share in (0.005, 0.01, 0.05, 0.1, 0.25, 1.0)}
    before: set[str] = set()
    for share, part in shares.items():
        chosen = people_of(part, TRAIN)
        assert before <= chosen <= people_of(cohort, TRAIN)
        before = chosen
        for fold in (VAL, EVALUATED):
            np.testing.assert_array_equal(part.rows[part.fold == fold], cohort.rows[cohort.fold == fold])
            np.testing.assert_array_equal(part.target[part.fold == fold], cohort.target[cohort.fold == fold])
        at = part.fold == TRAIN
        assert at.sum() == 2 * len(chosen)  # all volumes of a person
        if share >= 0.05:
            assert len(chosen) == round(200 * share)
        if kind != "regression":
            assert all(
                set(np.unique(part.target[at, t])) == set(np.unique(cohort.target[:, t]))
                for t in range(cohort.target.shape[1])
            )
    assert len(people_of(shares[0.005], TRAIN)) < 5
    np.testing.assert_array_equal(shares[1.0].rows, cohort.rows)
    quarter = shares[0.25]
    if kind == "classification":
        first = quarter.target[quarter.fold == TRAIN, 0]
        np.testing.assert_allclose(np.bincount(first.astype(int)) / 2, [35, 10, 5], atol=1)
    if kind == "regression":
        quarters = np.sqrt(quarter.target[quarter.fold == TRAIN, 0]) // 50
        np.testing.assert_allclose(np.bincount(quarters.astype(int)) / 2, [12.5] * 4, atol=1)


def test_low_shot_follows_from_the_seed(tmp_path: Path) -> None:
    records = people(60, lambda n: ("train", "train", "train", "val", "test")[n // 2 % 5])
    cohort = read_cohort(*open_task(tmp_path, records, grades(60)))
    assert people_of(low_shot(cohort, 0.2, 3), TRAIN) == people_of(low_shot(cohort, 0.2, 3), TRAIN)
    assert people_of(low_shot(cohort, 0.2, 3), TRAIN) != people_of(low_shot(cohort, 0.2, 4), TRAIN)
    for fraction in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match=r"expected a number in \(0, 1\]"):
            low_shot(cohort, fraction, 0)
