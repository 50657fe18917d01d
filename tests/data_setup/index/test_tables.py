"""The tables: what a table has stays, and who a file is of, by header and path."""

import re
import shlex
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from openpyxl import load_workbook
from pydicom.dataset import FileDataset

from data_setup.index.people import people_of_paths, person_of_path, side_of_path
from data_setup.manifest import load_labels, read_records
from data_setup.tables.splits import seeded_split
from pretraining.run import open_rows
from tests.data_setup.importers.reading import GRID, SPACING
from tests.data_setup.index.trees import index, maker, run_prepare, table, write_dicoms
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import write_images, write_nifti, write_tiff, write_yaml
from tests.support.pipeline_factory import SMOKE
from utils.config.load import load_config
from utils.errors import UserError

Capture = pytest.CaptureFixture[str]


def test_a_second_run_adds_and_fills_and_changes_nothing(tree: Path, capsys: Capture) -> None:
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


def test_no_id_and_no_name_of_a_patient_is_written(tree: Path, capsys: Capture) -> None:
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


def test_a_table_of_grids_that_no_export_has_any_more_is_named(tmp_path: Path, capsys: Capture) -> None:
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


ODD_NAMES = {  # file -> PatientID
    "none": "None",
    "1/NaN": "null",
    "2/ lead": "nan",
    "3/trail ": "N/A",
    " 4 /x.dcm": "1003.0",
    "5/tab\there.dcm": "1003",
    "6/new\nline.dcm": "1004.0",
    "7/carriage\rreturn.dcm": 'quo"te',
    "8/both\r\nends.dcm": "0012",
    "9/#1?*[1]%25;,'.dcm": "12",
    "10/u\u0308ber/\u00fcber.dcm": "Zo\u00eb",
    "11/unknown": "unknown",
    "12/dots..dcm": "v1.0",
    "13/blank.dcm ": "blank",
}


def test_what_the_index_writes_prepare_reads_back(tmp_path: Path) -> None:
    """Names and ids that a table may take for no value, for a number or for the end of a line."""
    root, voxels = tmp_path / "tree", speckle(4, 12, 16)

    def edit(ds: FileDataset, seed: int, patient: str) -> None:
        maker(patient, "L")(ds)
        ds.SOPInstanceUID, ds.Manufacturer, ds.ManufacturerModelName = f"1.2.{seed}", "None", ""
        ds.ProtocolName = "N/A"

    for seed, (path, patient) in enumerate(ODD_NAMES.items()):
        folder, _, name = path.rpartition("/")
        references, one = rows_down(4), partial(edit, seed=seed, patient=patient)
        write_opt(root / folder, voxels, name=name, spacing=SPACING, references=references, edit=one)
    own = [f"data.gcs_root={root}", f"data.manifest_path={root}/manifest.tsv"]
    for _ in range(2):  # a second run finds each row again
        assert index(root, "--keep-ids") == 0
        listing = read_records(load_config(SMOKE, own))
        assert listing.skipped == {}
        whole = ODD_NAMES | {"6/new\nline.dcm": "1004"}  # no other 1004: a column of numbers with a gap
        assert {record.path: record.person_id for record in listing.records} == whole
        assert all(Path(record.url).is_file() for record in listing.records)
    people = root / "participants.tsv"
    people.write_text(people.read_text().replace("1004\t", "1004.0\t"))
    assert index(root, "--keep-ids") == 0
    assert people.read_text().count("1004") == 1


def test_a_row_follows_its_file_and_what_is_gone_is_forgotten_on_request(
    tmp_path: Path, capsys: Capture
) -> None:
    """A renamed folder keeps its people and edits; of files with one UID, or of another shape, none is."""
    root = tmp_path / "tree"
    write_dicoms(root, range(4))
    for name in ("a", "b"):  # one UID for two scans
        options = {"spacing": SPACING, "references": rows_down(6), "edit": maker("same", "L")}
        write_opt(root / "same", speckle(seed=9), name=name, **options)
    index(root)
    manifest, people = root / "manifest.tsv", root / "participants.tsv"
    frame = pd.read_csv(manifest, sep="\t", dtype=str, keep_default_na=False)
    frame["grade"] = frame.filepath
    frame.loc[frame.filepath == "export0/IM000L", ["person_id", "d_order"]] = ["eve", "unknown"]
    frame.loc[frame.filepath == "export0/IM000R", "person_id"] = "eve"
    frame.to_csv(manifest, sep="\t", index=False)
    before = table(manifest)
    (root / "export0").rename(root / "patients")
    (root / "same" / "a").rename(root / "same" / "c")
    (root / "export1" / "IM002L").unlink()
    capsys.readouterr()
    index(root)
    text, rows = capsys.readouterr().out, table(manifest)
    assert "4 rows follow their file to another path: export0/IM000L -> patients/IM000L" in text
    assert "2 rows name what is no longer there, and stay: export1/IM002L, same/a; --forget-missing" in text
    assert rows["patients/IM000L"]["person_id"] == rows["patients/IM000R"]["person_id"] == "eve"
    assert rows["patients/IM001L"]["grade"] == "export0/IM001L"
    assert set(rows) == {path.replace("export0", "patients") for path in before} | {"same/c"}
    (root / "export1" / "IM003L").write_bytes(b"no longer whole")  # it is there: a copy may mend it
    index(root, "--forget-missing")
    text, rows = capsys.readouterr().out, table(manifest)
    assert "2 rows name what is no longer there, and are taken out: export1/IM002L, same/a\n" in text
    listed = set(rows) & {"export1/IM002L", "export1/IM003L", "same/a", "same/c"}
    assert listed == {"export1/IM003L", "same/c"}
    assert "eve" in table(people, "person_id")


@pytest.mark.parametrize("kind", ["nii", "tif", "images"])
def test_a_row_without_a_uid_follows_its_file_by_its_name(kind: str, tmp_path: Path, capsys: Capture) -> None:
    """Edits go with it, a filled spacing too; a name that two files or rows have tells nothing."""
    root, ending = tmp_path / "tree", "" if kind == "images" else f".{kind}"

    def write(path: Path, seed: int) -> None:
        if kind == "nii":
            write_nifti(path, speckle(seed=seed), SPACING)
        else:
            {"tif": write_tiff, "images": write_images}[kind](path, speckle(seed=seed))

    names = ["1/one", "2/two", "3/scan", "4/scan", "5/five"]
    for seed, name in enumerate(names):
        write(root / f"{name}{ending}", seed)
    index(root)
    manifest = root / "manifest.tsv"
    frame = pd.read_csv(manifest, sep="\t", dtype=str, keep_default_na=False)
    frame["grade"] = frame.filepath
    frame["spacing_mm"] = "0.1, 0.2, 0.3" if kind != "nii" else frame.spacing_mm
    frame.loc[frame.filepath == f"1/one{ending}", "person_id"] = "eve"
    frame.to_csv(manifest, sep="\t", index=False)
    (root / "1").rename(root / "8")
    (root / "3").rename(root / "9")
    shutil.rmtree(root / "5")
    write(root / "6" / f"new{ending}", 6)
    capsys.readouterr()
    index(root)
    text, rows = capsys.readouterr().out, table(manifest)
    assert f"1 rows follow their file to another path: 1/one{ending} -> 8/one{ending}\n" in text
    assert f"1 rows may be another path's, and stay: 3/scan{ending} -> 9/scan{ending}?\n" in text
    moved, other = rows[f"8/one{ending}"], rows[f"9/scan{ending}"]
    assert (moved["person_id"], moved["grade"], other["grade"]) == ("eve", f"1/one{ending}", "")
    assert len(rows) == 7
    assert rows[f"6/new{ending}"]["grade"] == ""


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
        ("export/10585581/OS", False, "10585581", "L"),
        ("export/20241301/OD", False, "20241301", "R"),
        ("1003/20240131/OD", False, "1003", "R"),
        ("1003/31012024/OD", False, "1003", "R"),
        ("export/20240131/OD", False, "20240131", "R"),
        ("ERM_study/Patient1/SD_OCT/Horizontal", False, "Patient1", None),
        ("DICOM/subject-07/Fovea/scan.vol", True, "subject_07", None),
        ("Patient1/1003/OD", False, "1003", "R"),
        ("Kopie von 100049/OD", False, "100049", "R"),
        ("100049 - Copy (2)/OD", False, "100049", "R"),
        ("P4/masks", False, "P4", None),
        ("1003/V1", False, "1003", None),
        ("Meier/OD1.tif", False, "Meier", "R"),
        ("Meier/L2.tif", False, "Meier", "L"),
        ("Meier/right3/scan.tif", False, "Meier", "R"),
        ("Meier/O.D./1.tif", False, "Meier", "R"),
        ("Meier/o. s..tif", False, "Meier", "L"),
        ("Meier_L.E.tif", False, "Meier", "L"),
        ("Meier/gauche.tif", False, "Meier", "L"),
        ("Meier/Rechtes Auge/1.tif", False, "Meier", "R"),
        ("Perez/ojo izquierdo/1.tif", False, "Perez", "L"),
        ("Meier/OG.nii.gz", False, "Meier", "L"),
        ("OD12.tif", False, "12", "R"),
        ("Rossi1/1.tif", False, "Rossi1", None),
        ("1003/20240131_101500/OD", False, "1003", "R"),
        ("1003/2024-01-31 10.15/OD", False, "1003", "R"),
        ("20240131_1003_OD.nii", False, "1003", "R"),
        ("scans/20240131_101500.nii", False, "20240131_101500", None),  # better than all of a day in one
        ("1003/31-Jan-2024/OS", False, "1003", "L"),
        ("1003/2024_mars_5/OS", False, "1003", "L"),
        ("1003/Besuch1/OD", False, "1003", "R"),
        ("CH01/OD.nii", False, "CH01", "R"),
        ("AMD/CH02_OS.nii", False, "CH02", "L"),
        ("Kontrolle02/OD", False, "Kontrolle02", "R"),
        ("Mu\u0308ller/OS", False, "M\u00fcller", "L"),  # as macOS writes it
        ("Kontrolle_01_OD.nii", False, "Kontrolle_01", "R"),
        ("CH01/X8F2.vol", True, "CH01", None),
        ("imgs/S003_ch1.nii", False, "S003", None),
        ("1003/240131/OD", False, "240131", "R"),  # of one path nobody knows
    ],
)
def test_people_and_eyes_by_path(path: str, by_folder: bool, person: str, side: str | None) -> None:
    assert (person_of_path(path, by_folder)[0], side_of_path(path)) == (person, side)


@pytest.mark.parametrize(
    ("paths", "people"),
    [
        ("imagesTr/OCT_1_0000.nii.gz imagesTr/OCT_1_0001.nii.gz imagesTr/OCT_2_0000.nii.gz", "1 1 2"),
        ("case_001_0000.nii case_001_0001.nii case_002_0000.nii", "case_001 case_001 case_002"),
        ("1003_0001.nii 1003_0002.nii", "1003_0001 1003_0002"),  # no 0000: not numbered as channels are
        ("mrn/10585581/OS mrn/20101213/OS mrn/30999999/OD", "10585581 20101213 30999999"),
        ("1003/20240131/OD 1003/20240228/OD", "1003 1003"),
        ("1001/Lens 1001/Disc 1002/Lens 1002/Disc", "1001 1001 1002 1002"),
        ("bonn/ann/OD koeln/ann/OD", "ann ann"),
        ("Meier/OD1 Meier/OS1 Schulz/OD1 Schulz/OS1", "Meier Meier Schulz Schulz"),
        ("1001/Fovea1 1001/Fovea2 1002/Fovea1", "1001 1001 1002"),
        ("A2/P1 A2/P2 B3/P1", "P1 P2 P1"),
        ("AMD/1/OD Control/1/OD", "1 1"),
        ("P101/240131/OD P101/240502/OD P102/230115/OD", "P101 P101 P102"),
        ("P101/240131/OD P102/983255/OD", "240131 983255"),  # one is no date
        ("P01/M0/OD P01/M6/OD P02/M0/OD P02/M12/OD", "P01 P01 P02 P02"),
        ("S1/M1/OD S1/M2/OD S2/M1/OD", "M1 M2 M1"),  # no months of a trial
        ("anna/stack.nii berta/stack.nii Smith_John/OD/stack.nii", "anna berta Smith_John"),
        ("anna/IM01.dcm anna/IM02.dcm berta/OD/IM01.dcm", "anna anna berta"),
        ("anna/1.2.8.1/IM01.dcm anna/1.2.8.1/IM02.dcm berta/1.2.8.2/IM01.dcm", "anna anna berta"),
        ("anna/1.dcm anna/2.dcm berta/1.dcm", "anna anna berta"),
        ("Glaucoma/1001_OD.dcm Glaucoma/1002_OD.dcm dry/1003_OD.dcm dry/1004_OS.dcm", "1001 1002 1003 1004"),
        ("AMD/1001.dcm AMD/1002_OS.dcm test/normal/1003.dcm test/normal/1004.dcm", "1001 1002 1003 1004"),
        ("patients/101_OD.dcm patients/102_OS.dcm patients/103_OS.dcm", "101 102 103"),
        ("001/AMD/OD/OCT.dcm 002/DME/OD/OCT.dcm 003/AMD/OD/OCT.dcm", "001 002 003"),
        ("AMD1/stack.dcm AMD2/stack.dcm AMD3/stack.dcm", "AMD1 AMD2 AMD3"),
        ("2019/AMD1/stack.dcm 2019/AMD1/OS.dcm 2020/AMD2/stack.dcm", "AMD1 AMD1 AMD2"),
        ("Topcon/1/V1/OD/1 Topcon/1/V2/OD/1 Topcon/2/V1/OD/1", "1 1 2"),
        ("2001/Before/OD 2001/After/OD 2002/Before/OD 2003/After/OD", "2001 2001 2002 2003"),
        ("2011/Depth/OD 2011/Depth/OS 2012/Depth/OD 2013/Depth/OS", "2011 2011 2012 2013"),
        ("Anna/OD/1.2.8.1/a.dcm Anna/OD/1.2.8.2/a.dcm Berta/OD/1.2.8.3/a.dcm", "Anna Anna Berta"),
        ("DME/OD/1.2.8.1/a.dcm DME/OD/1.2.8.2/a.dcm Glaucoma/OS/1.2.8.3/a.dcm", "1_2_8_1 1_2_8_2 1_2_8_3"),
        ("AMD/anna/IM1.dcm AMD/anna/IM2.dcm normal/berta/IM1.dcm", "anna anna berta"),
        ("anna/Tag1/IM01.dcm anna/Tag2/IM01.dcm berta/Tag1/IM01.dcm", "anna anna berta"),
        ("2019/anna/OD 2020/anna/OD 2020/berta/OD", "anna anna berta"),
        ("2019-03/anna/OD 2019-04/anna/OD 2019-04/berta/OD", "anna anna berta"),
        ("1001/Cirrus/OD 1001/Spectralis/OD 1002/Cirrus/OD", "1001 1001 1002"),
        ("anna/Cirrus/OD anna/Topcon_Triton/OD berta/Cirrus/OD", "anna anna berta"),
        ("anna/Papille/OD anna/Fovea/OD berta/Papille/OD", "anna anna berta"),
    ],
)
def test_people_by_all_paths_of_a_tree(paths: str, people: str) -> None:
    read = people_of_paths([(path, path.endswith(".dcm")) for path in paths.split()])
    assert [person for person, _ in read] == people.split()


@pytest.mark.parametrize(
    ("paths", "counts"),
    [
        ("g0/0/OD g0/1/OD g1/0/OD g1/1/OD", "2 2"),
        ("DME/001/OD DME/002/OD Normal/001/OD Normal/003/OD", "3 4"),
        ("DME/001_OD DME/001_OS Normal/001_OS Normal/002_OS", "2 3"),
        ("Anna/Lens/1 Anna/Disc/1 Berta/Lens/1 Berta/Disc/1", "3 2"),
        ("Bonn/Anna/OD Bonn/Berta/OD Ulm/Anna/OD Ulm/Carl/OD", "3 4 2"),
        ("1.2.8.1/1.2.8.1.1/a 1.2.8.1/1.2.8.1.1/b 1.2.8.1/1.2.8.1.2/a 1.2.8.2/1.2.8.2.1/a", "2 3"),
        ("data/1.2.8.1/a data/1.2.8.2/a", "2"),
        ("Meier/1.2.8.1/a Meier/1.2.8.2/a Schulz/1.2.8.3/a", "3 2"),
        ("1003/1.2.8.1/a 1003/1.2.8.2/a 1004/1.2.8.3/a", "2"),
        ("Meier/1.2.8.1 Meier/1.2.8.2 Schulz/1.2.8.3 Schulz/1.2.8.4", "4 2"),
        ("2019/1.2.8.1 2019/1.2.8.2 2020/1.2.8.3 2020/1.2.8.4", "4 2"),
        ("Meier/1.2.8.1/1.2.8.7/a Meier/1.2.8.1/1.2.8.7/b Meier/1.2.8.2/1.2.8.9/a Eva/1.2.8.3/a", "3 2"),
        ("Meier/OD/1.2.8.1 Meier/OD/1.2.8.2 Meier/OS/1.2.8.3 Eva/visit1/OD/1.2.8.4", "2"),
        ("Eva/OD/1.2.8.1/a Eva/OS/1.2.8.2/a Schulz/OD/1.2.8.3/a", "2"),
    ],
)
def test_the_readings_of_the_paths_are_shown_and_each_pattern_works(
    tmp_path: Path, capsys: Capture, paths: str, counts: str
) -> None:
    root = tmp_path / "tree"
    for folder, _, name in (path.rpartition("/") for path in paths.split()):
        if "1.2.8" in paths:
            write_opt(root / folder, speckle(4, 12, 16), name=f"{name}.dcm", edit=maker("", "L"))
        else:
            write_nifti(root / folder / f"{name}.nii", speckle(4, 12, 16), SPACING)
    index(root)
    people = len(table(root / "participants.tsv", "person_id"))
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "the paths can be read in" in line]
    in_folders = "1 names are in several folders, each taken for one person: 001 in DME"
    assert (in_folders in text) == ("DME" in paths)
    is_doubtful = "1.2.8" in paths and bool(re.match(r"Meier/1|2019/", paths))
    assert bool(re.search("folders are of several people; are they?.* of 1_2_8", text)) == is_doubtful
    ways = re.findall(r"(\d+) people(?: by --person ('[^']+'))?(?:, as it is)?(?:;|$)", "".join(lines))
    assert " ".join(number for number, _ in ways or [(str(people), "")]) == counts
    for nth, (number, way) in enumerate(ways):
        more = ["--person", *shlex.split(way)] if way else []
        index(root, "--out", str(tmp_path / str(nth)), *more)
        assert len(table(tmp_path / str(nth) / "participants.tsv", "person_id")) == int(number)


@pytest.mark.parametrize(("num_ids", "words"), [(1, "; --person replaces 1 ids of headers too"), (3, "")])
def test_ids_of_headers_are_not_replaced_unsaid(
    tmp_path: Path, capsys: Capture, num_ids: int, words: str
) -> None:
    for n, folder in enumerate(("Meier", "Meier", "Schulz", "Schulz")):
        edit = maker(f"MRN{n}" if n < num_ids else "", "L")
        write_opt(tmp_path / folder, speckle(4, 12, 16), name=f"1.2.8.{n}.dcm", edit=edit)
    index(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "the paths can be read in" in line]
    assert [line.endswith(words) for line in lines] == [True] * bool(words)


def test_nobody_is_an_eye(tmp_path: Path) -> None:
    for name in ("OD", "OS", "V1", "Horizontal"):
        write_nifti(tmp_path / name / "L.nii", speckle(4, 12, 16), SPACING)
    with pytest.raises(
        UserError, match=r"'Horizontal/L.nii': expected the name of a person .*found 'L', as in 4"
    ):
        index(tmp_path)
    assert not (tmp_path / "manifest.tsv").exists()


@pytest.mark.parametrize(
    "name", ["l.csv", "german.csv", "sep.csv", "title.csv", "l.tsv", "l.xlsx", "title.xlsx", "l.parquet"]
)
def test_ids_of_a_label_table_are_compared_at_once(tmp_path: Path, capsys: Capture, name: str) -> None:
    root, url = tmp_path / "tree", tmp_path / name
    for person in ("Bauer_Zoe", "1003", "ann"):
        write_nifti(root / person / "OD.nii", speckle(4, 12, 16), SPACING)
    frame = pd.DataFrame({"Patient": ["1003", "Bauer, Zoe", "ann"], "Diagnosis": ["AMD", "DME", ""]})
    if name.endswith(".xlsx"):
        frame.to_excel(url, index=False, startrow=2 * name.startswith("title"))
        if name == "title.xlsx":
            book = load_workbook(url)
            book.active["A1"] = "Study of the macula"
            book.save(url)
    elif name == "l.parquet":
        frame.to_parquet(url)
    else:
        separators = {"l.csv": ",", "german.csv": ";", "sep.csv": ";", "title.csv": ";", "l.tsv": "\t"}
        above = {"sep.csv": "sep=;\n", "title.csv": "Study of the macula\n\n"}.get(name, "")
        url.write_text(above + frame.to_csv(index=False, sep=separators[name]))
    index(root, "--labels", str(url))
    text = capsys.readouterr().out
    assert "2 of 3 ids of column Patient are in the tree; task.id_column=Patient" in text
    assert "1 are not: 'Bauer, Zoe' (near 'Bauer_Zoe')" in text
    assert "1 people of the tree have no line: Bauer_Zoe" in text
    assert "too few: no skill, so no verdict on a pre-training" in text
    assert "too few: no probe and no head: train has 1, val has 1, test has 1" in text
    assert "three ways out, before you train: recommended_split" in text
    own = ("task.id_column=Patient", "task.label_column=Diagnosis", f"task.labels_path={url}")
    assert load_labels(load_config(SMOKE, [f"data.gcs_root={root}", *own]))["1003"] == "AMD"
    (root / "manifest.tsv").unlink()
    other = tmp_path / "other.csv"
    other.write_text("Patient,Diagnosis\n9,AMD\n")
    with pytest.raises(UserError, match=r"other\.csv: expected ids of the tree, such as '1003'"):
        index(root, "--labels", str(other))
    other.write_text('Patient,Diagnosis\n"Bauer, Zoe",AMD\n')
    with pytest.raises(UserError, match=r"near 'Bauer_Zoe'\); an id from a path has _ for blanks, commas"):
        index(root, "--labels", str(other))
    (tmp_path / "no_oct").mkdir()
    (tmp_path / "no_oct" / "notes.docx").touch()
    with pytest.raises(UserError, match=r"no\.csv"):  # before any file is read
        index(tmp_path / "no_oct", "--labels", str(tmp_path / "no.csv"))
    other.write_text("Patient,Diagnosis,Patient\n1003,AMD,9\n")
    with pytest.raises(UserError, match=r"other\.csv: column Patient: expected it once, found 2 times"):
        index(root, "--labels", str(other))
    assert not (root / "manifest.tsv").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("1,AMD 2,AMD 3,", "Grade is 'AMD' in every line: a label needs two classes"),
        ("1,Mild 2,mild 3,x", "Grade is 'Mild' in line 2 and 'mild' in line 3: write one class one way"),
        ("1,a 2,b 1,b", "Grade is 'a' in line 2 and 'b' in line 4: both of one id: correct one, or give"),
        ("1,a 2,b 3,b", ""),
        ("1,1 2,0 1,1.0", "Grade is '1' in line 2 and '1.0' in line 4: write one class one way"),
        *((f"Patient,{n} 1,a 2,b 1,b", "4: both of one id") for n in ("dr_stage", "hemorrhage", "leakage")),
        *((f"Patient,{n} 1,a 2,b 1,b", "") for n in ("age", "VisitDate", "scan_id", "filepath")),
        (
            "Patient,visit,iop,country 1,1,14,DE 1,2,15,DE 2,1,14,DE",
            "  no labels by Patient: country (one value in every line); iop (several values an id)",
        ),
    ],
)
def test_classes_that_nothing_can_be_learned_from_are_said(
    tmp_path: Path, capsys: Capture, lines: str, words: str
) -> None:
    for person in "123":
        write_nifti(tmp_path / "tree" / person / "OD.nii", speckle(4, 12, 16), SPACING)
    table_of = tmp_path / "l.csv"
    header, *cells = lines.split() if lines[0] == "P" else ["Patient,Grade", *lines.split()]
    table_of.write_text("\n".join([header, *cells]))
    index(tmp_path / "tree", "--labels", str(table_of))
    warnings = re.findall("  warning: .* in .*line.*|.*no labels by.*", capsys.readouterr().out)
    assert [words in line for line in warnings] == [True] * bool(words), warnings
    eyes = [f"{line},{'OD' if n < 2 else 'OS'}" for n, line in enumerate(cells)]
    table_of.write_text("\n".join([f"{header},eye", *eyes]))
    index(tmp_path / "tree", "--labels", str(table_of))
    assert ("of one id" in capsys.readouterr().out) is False


@pytest.mark.parametrize("name", ["utf16.csv", "latin1.csv", "second.xlsx", "legend.xlsx"])
def test_a_label_table_that_is_not_read_says_the_next_step(tmp_path: Path, name: str) -> None:
    root, url = tmp_path / "tree", tmp_path / name
    write_nifti(root / "M\xfcller" / "OD.nii", speckle(4, 12, 16), SPACING)
    frame = pd.DataFrame({"Patient": ["M\xfcller"], "Grade": ["AMD"]})
    if name.endswith(".csv"):
        frame.to_csv(url, index=False, encoding=name.removesuffix(".csv"))
    else:
        above = pd.DataFrame({"code": ["a", "b"], "meaning": ["mild", "severe"]} if name[0] == "l" else [])
        with pd.ExcelWriter(url) as book:
            above.to_excel(book, sheet_name="Info", index=False)
            pd.concat([frame, frame]).to_excel(book, sheet_name="Data", index=False)
    problem = {
        "utf16.csv": "text, found UTF-16; save it as CSV UTF-8",
        "latin1.csv": "found byte 0xfc in line 2, of Latin-1 perhaps; save it as CSV UTF-8",
        "second.xlsx": "on the first sheet, 'Info', found it on 'Data'; move that sheet to the front",
        "legend.xlsx": "expected ids of the tree, such as .*; of an Excel file the first sheet is read",
    }[name]
    with pytest.raises(UserError, match=rf"{name}: .*{problem}"):
        index(root, "--labels", str(url))


def test_people_that_may_be_several_or_one_are_said(tmp_path: Path, capsys: Capture) -> None:
    """A file without PatientID is of the only one of its folder; what cannot be decided is warned of."""
    files = {"1003/a": "MRN-3", "1003/visit_2/b": "", "more/a": "MRN-3", "1004/a": "MRN-4"}
    files |= {"1004/b": " mrn-4 ", "1004/c": "", "1005/a": "Anonymous", "1006/a": "ANONYMOUS"}
    for seed, (path, patient) in enumerate(files.items()):
        place, edit = tmp_path / f"{path}.dcm", maker(patient, "L")
        options = {"name": place.name, "spacing": SPACING, "references": rows_down(6), "edit": edit}
        write_opt(place.parent, speckle(seed=seed), **options)
    index(tmp_path, "--keep-ids")
    text = capsys.readouterr().out
    people = {path: row["person_id"] for path, row in table(tmp_path / "manifest.tsv").items()}
    assert people["1003/visit_2/b.dcm"] == people["1003/a.dcm"] == "MRN-3"
    assert [people[f"{n}.dcm"] for n in ("1004/c", "1005/a", "1006/a")] == ["1004", "1005", "1006"]
    assert "warning: 1 folders are of several people; are they? 1004 of 1004 and MRN-4" in text
    assert "warning: 1 ids of headers are in several top folders, each taken for one person: MRN-3 in" in text
    assert "differ only in case or blanks, each taken for another person: MRN-4 and mrn-4" in text
    assert "6 people are few: more of them later may move some to another split" in text


def test_the_limit_of_a_split_that_stays_is_the_one_of_the_page() -> None:
    """200 sets of ids: from 50 people on the hash alone decides; 0.9^50 of them lack validation by it."""
    moves = Counter[int]()
    for cohort in range(200):
        ids = [f"{cohort}-{n}" for n in range(200)]
        final = seeded_split(dict.fromkeys(ids), 0)
        for count in (49, 50):
            split = seeded_split(dict.fromkeys(ids[:count]), 0)
            assert set(split.values()) == {"train", "val", "test"}
            moves[count] += any(final[person] != side for person, side in split.items())
    assert moves[49] == 200
    assert moves[50] < 0.02 * 200


def test_rows_of_eyes_label_the_volumes_of_their_eye(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write_dicoms(root, range(4))
    index(root, "--keep-ids")
    people = [f"MRN-{n}\t{eye}\t{eye}-{n}" for n in range(4) for eye in ("OD", "Left")]
    (root / "participants.tsv").write_text("\n".join(["person_id\teye\tstudy_group", *people]) + "\n")
    store = run_prepare(root, tmp_path / "store")
    sides = store.index.set_index("path").study_group
    assert (sides["export0/IM001L"], sides["export0/IM001R"]) == ("Left-1", "OD-1")
    places = [f"data.gcs_root={root}", f"data.manifest_path={root}/manifest.tsv"]
    own = [*places, f"data.store={tmp_path}/store", "task.unit=eye"]
    rows = open_rows(load_config(SMOKE, [*own, *GRID]), store)
    assert {store.index.path[row]: label for row, label in rows.label_of_row.items()} == sides.to_dict()
