"""Who a file is of, and which eye: by header and path, in splits that stay, in labels of eyes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from data_setup.index.people import person_of_path, side_of_path
from data_setup.tables.splits import seeded_split
from pretraining.rows import open_rows
from tests.data_setup.importers.reading import GRID, SPACING
from tests.data_setup.index.trees import index, maker, run_prepare, table, write_dicoms
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import write_images
from tests.support.pipeline_factory import SMOKE
from utils.config.load import load_config


def test_a_cohort_that_grows_moves_nobody_without_a_table_of_people(tmp_path: Path) -> None:
    """Here the hash alone gives each side of the first five somebody; the limit is tested below."""
    root, before = tmp_path / "tree", pd.Series(dtype=str)
    for people in (range(5), range(5, 12)):
        write_dicoms(root, people)
        index(root)
        (root / "participants.tsv").unlink()
        rows = run_prepare(root, tmp_path / "store").index
        after = rows.drop_duplicates("person_id").set_index("person_id").split
        assert after.loc[before.index].tolist() == before.tolist()
        before = after
    assert len(before) == 12
    assert set(before) == {"train", "val", "test"}


@pytest.mark.parametrize(
    ("path", "by_folder", "person", "side"),
    [
        ("1003/visit2/OD", False, "1003", "R"),
        ("images/1003_l", False, "1003", "L"),
        ("nifti/1001-Right.nii.gz", False, "1001", "R"),
        ("site/1001/20240131/IM0001", True, "1001", None),
        ("export/ann/OS/1.2.840.7.dcm", True, "ann", "L"),
        ("IM0001", True, "IM0001", None),
        ("Subject 12 (2019-01-02)/OD", False, "Subject_12", "R"),
        ("1003_31.12.2019_os.nii", False, "1003", "L"),
        ("eyes/od_os_1.tif", False, "1", None),
        ("left.tif", False, "left", "L"),
        ("L/right_1004.tif", False, "1004", "R"),
        ("1003/visit_1.nii", False, "1003", None),
        ("1003/FU1/OD.tif", False, "1003", "R"),
        ("1003/follow-up 2/BL_3.tif", False, "1003", None),
        ("P001_OD_1.nii", False, "P001", "R"),
        ("1003/OD/T2/vol.nii", False, "1003", "R"),
        ("1003/OD_cube/vol.tif", False, "1003", "R"),
        ("1003/macula_512x128/V02", False, "1003", None),
        ("1003/7.nii", False, "1003", None),
        ("1003/2/OD", False, "1003", "R"),
        ("ann/2.nii", False, "ann", None),
        ("AMD/2/OD", False, "2", "R"),
        ("nifti/OS_2.nii", False, "2", "L"),
        ("study1/12/OD", False, "12", "R"),
        ("cube.nii", False, "cube", None),
        ("S01OD.tif", False, "S01", "R"),
        ("1001L.nii.gz", False, "1001", "L"),
        ("Patient_003_RE/scan.tif", False, "Patient_003", "R"),
        ("Patient1LeftEye.tif", False, "Patient1", "L"),
        ("le/1003.tif", False, "1003", None),
    ],
)
def test_people_and_eyes_by_path(path: str, by_folder: bool, person: str, side: str | None) -> None:
    assert (person_of_path(path, by_folder)[0], side_of_path(path)) == (person, side)


def test_people_that_may_be_several_or_one_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without PatientID is of the only one of its folder; what cannot be decided is warned of."""
    files = {
        "1003/a": "MRN-3",
        "1003/visit_2/b": "",
        "1004/a": "MRN-4",
        "1004/b": " mrn-4 ",
        "1004/c": "",
        "more/a": "MRN-3",
    }
    for seed, (path, patient) in enumerate(files.items()):
        folder, name = path.rsplit("/", 1)
        voxels = speckle(seed=seed)
        write_opt(
            tmp_path / folder,
            voxels,
            name=f"{name}.dcm",
            spacing=SPACING,
            references=rows_down(6),
            edit=maker(patient, "L"),
        )
    index(tmp_path, "--keep-ids")
    text = capsys.readouterr().out
    people = {path: row["person_id"] for path, row in table(tmp_path / "manifest.tsv").items()}
    assert people["1003/visit_2/b.dcm"] == people["1003/a.dcm"] == "MRN-3"
    assert people["1004/c.dcm"] == "1004"
    assert "warning: 1 folders are of several people; are they? 1004 of 1004 and MRN-4" in text
    assert "warning: 1 ids of headers are in several top folders, each taken for one person: MRN-3 in" in text
    assert "differ in case or blanks alone, each taken for another person: MRN-4 and mrn-4" in text
    assert "4 people are few: more of them later may move some to another split" in text


def test_the_limit_of_a_split_that_stays_is_the_one_of_the_page() -> None:
    """200 sets of ids: once the hash alone gives each side somebody nobody moves; 0.9^n lack validation."""
    moves = Counter[int]()
    for cohort in range(200):
        ids = [f"{cohort}-{n}" for n in range(200)]
        final = seeded_split(ids, 0)
        for count in (5, 30, 50):
            split = seeded_split(ids[:count], 0)
            assert set(split.values()) == {"train", "val", "test"}
            moves[count] += any(final[person] != side for person, side in split.items())
            own = {final[person] for person in ids[:count]}  # 200 people: the hash alone
            assert len(own) < 3 or {p: final[p] for p in ids[:count]} == split
    assert moves[5] > 0.55 * 200
    assert moves[30] < 0.08 * 200
    assert moves[50] < 0.02 * 200


def test_one_name_in_several_folders_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for group in ("AMD", "Control"):
        for subject in (1, 2):
            write_images(tmp_path / group / f"subject {subject}" / "OD", speckle(), first=1)
    index(tmp_path)
    text = capsys.readouterr().out
    assert "4 volumes of 2 people" in text
    assert "2 names are in several folders, each taken for one person: subject_1 in AMD and Control" in text
    index(tmp_path, "--out", str(tmp_path / "out"), "--person", "^([^/]+/[^/]+)/")
    assert len(table(tmp_path / "out" / "participants.tsv", "person_id")) == 4


def test_rows_of_eyes_label_the_volumes_of_their_eye(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write_dicoms(root, range(4))
    index(root, "--keep-ids")
    people = [f"MRN-{n}\t{eye}\t{eye}-{n}" for n in range(4) for eye in ("OD", "Left")]
    (root / "participants.tsv").write_text("\n".join(["person_id\teye\tstudy_group", *people]) + "\n")
    store = run_prepare(root, tmp_path / "store")
    sides = store.index.set_index("path").study_group
    assert (sides["export0/IM001L"], sides["export0/IM001R"]) == ("Left-1", "OD-1")
    places = [
        f"data.gcs_root={root}",
        f"data.manifest_path={root}/manifest.tsv",
        f"data.store={tmp_path}/store",
    ]
    rows = open_rows(load_config(SMOKE, [*places, *GRID, "task.unit=eye"]), store)
    assert {store.index.path[row]: label for row, label in rows.label_of_row.items()} == sides.to_dict()
