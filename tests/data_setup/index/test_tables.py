"""The tables: a second run keeps what stands there, no id of a patient, others' tables left alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.data_setup.importers.reading import SPACING
from tests.data_setup.index.trees import index, table, write_dicoms
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_images, write_nifti, write_yaml
from utils.errors import UserError


def test_a_second_run_adds_and_fills_and_changes_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index(tree)
    manifest = tree / "manifest.tsv"
    frame = pd.read_csv(manifest, sep="\t", dtype=str, keep_default_na=False)
    frame["grade"] = "mild"
    frame.loc[frame.filepath == "tiff/3001_l.tif", ["laterality", "spacing_mm"]] = ["OS", "0.12 0.0026 0.030"]
    frame.loc[frame.filepath == "nifti/2001_r.nii.gz", ["person_id", "laterality"]] = ["joe", "L"]
    frame.to_csv(manifest, sep="\t", index=False)
    people = tree / "participants.tsv"
    people.write_text(people.read_text().replace("3001\t\t\t", "3001\tcase\tnorth\t70"))
    write_yaml(tree / "images" / "volume.yaml", spacing_mm=list(SPACING))
    write_images(tree / "images" / "9" / "OD", speckle(seed=99), first=1)
    shutil.rmtree(tree / "images" / "0")
    capsys.readouterr()
    index(tree)
    text = capsys.readouterr().out
    rows = table(manifest)
    assert "manifest.tsv: 1 rows added, 16 kept as they were" in text
    assert "2 cells are not what the files say, and stay: nifti/2001_r.nii.gz: person_id" in text
    assert "2 rows name what is no longer there, and stay: images/0/visit1/OD" in text
    assert rows["nifti/2001_r.nii.gz"]["person_id"] == "joe"
    assert rows["images/1/visit1/OD"]["spacing_mm"] == "0.12, 0.0026, 0.03"
    assert rows["images/1/visit1/OD"]["grade"] == "mild"
    assert rows["images/9/OD"] | {"person_id": "9", "laterality": "R", "grade": ""} == rows["images/9/OD"]
    ids = table(people, "person_id")
    assert ids["3001"] == {"person_id": "3001", "study_group": "case", "clinical_site": "north", "age": "70"}
    assert {"joe", "9"} <= set(ids)
    before = manifest.read_bytes(), people.read_bytes()
    index(tree)
    assert (manifest.read_bytes(), people.read_bytes()) == before


def test_no_id_and_no_name_of_a_patient_is_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(tree)
    written = [*tree.glob("*.tsv"), tree / "labels.parquet"]
    text = capsys.readouterr().out + "".join(path.read_text(errors="replace") for path in written)
    assert "MRN" not in text
    assert "Secret" not in text
    people = {row["person_id"] for path, row in table(tree / "manifest.tsv").items() if "export0" in path}
    assert all(re.fullmatch(r"p[0-9a-f]{12}", person) for person in people)
    assert len(people) == 2
    index(tree, "--out", str(tree.parent / "ids"), "--keep-ids")
    rows = table(tree.parent / "ids" / "manifest.tsv")
    assert {row["person_id"] for path, row in rows.items() if "export0" in path} == {"MRN-0", "MRN-1"}


def test_grids_of_exports_become_labels(tree: Path) -> None:
    index(tree)
    (row,) = pd.read_parquet(tree / "labels.parquet").to_dict("records")
    assert (row["path"], row["person_id"], row["laterality"]) == ("heyex/ann/5DD3.xml", "ann", "R")
    assert row["etdrs_c0_thickness_mm"] == 0.319


def test_a_table_of_grids_that_no_export_has_any_more_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_nifti(tmp_path / "1_l.nii", speckle(8), SPACING)
    older = pd.DataFrame([{"path": "gone.xml", "etdrs_c0_thickness_mm": 0.3}])
    older.to_parquet(tmp_path / "labels.parquet")
    before = (tmp_path / "labels.parquet").read_bytes()
    index(tmp_path)
    assert f"not written: {tmp_path}/labels.parquet: no file has a thickness grid" in capsys.readouterr().out
    assert (tmp_path / "labels.parquet").read_bytes() == before  # it may be somebody's own


def test_a_new_scan_of_a_known_person_needs_the_id_of_the_table(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write_dicoms(root, range(2))
    index(root)
    before = {path: path.read_bytes() for path in root.glob("*.tsv")}
    shutil.copy(root / "export0" / "IM000L", root / "export0" / "IM000N")
    for rules in (["--keep-ids"], ["--person", "IM(...)"]):
        with pytest.raises(UserError, match=r"expected ids as in the table, .*for the new export0/IM000N"):
            index(root, *rules)
        assert {path: path.read_bytes() for path in root.glob("*.tsv")} == before
    assert index(root) == 0
    manifest = root / "manifest.tsv"
    one = table(manifest)["export0/IM001L"]["person_id"]
    manifest.write_text(manifest.read_text().replace(f"{one}\texport0/IM001L", "eve\texport0/IM001L"))
    assert index(root) == 0  # a corrected cell alone is no mistake
    shutil.copy(root / "export0" / "IM001L", root / "export0" / "IM001N")
    with pytest.raises(UserError, match="'eve' of export0/IM001L"):
        index(root)


def test_tables_of_others_are_left_alone(tree: Path) -> None:
    people = tree / "participants.tsv"
    people.write_text("person_id\trecommended_split\n9001\ttrain\n")
    before = people.read_bytes()
    with pytest.raises(UserError, match=r"expected people of the files, found '9001' and others"):
        index(tree)
    assert (people.read_bytes(), (tree / "manifest.tsv").exists()) == (before, False)
    (tree / "retinal_oct").mkdir()
    (tree / "retinal_oct" / "manifest.tsv").write_text("person_id\n")
    with pytest.raises(UserError, match=r"found retinal_oct/manifest\.tsv, so AI-READI's layout"):
        index(tree)
