"""data_setup/index: a tree of any files becomes a store in two commands, and what is missing is said."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydicom.dataset import FileDataset

from data_setup import prepare
from data_setup.index import cli
from data_setup.index.candidates import find_candidates
from data_setup.index.people import person_of_path, side_of_path
from data_setup.splits import seeded_split
from data_setup.store.reader import PreparedStore
from pretraining.rows import open_rows
from tests.support.cloud_servers import BUCKET, gcs_server
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import (
    write_heyex_body,
    write_heyex_series,
    write_images,
    write_nifti,
    write_ome,
    write_yaml,
)
from tests.support.pipeline_factory import ROOT, SMOKE
from tests.support.vendor_factory import write_vol
from utils import storage
from utils.config.load import load_config
from utils.config.schema import StorageOptions
from utils.errors import UserError

SPACING = (0.12, 0.0026, 0.03)
GRID = ["spatial.target_spacing=[0.1,0.01,0.1]", "spatial.image_size=[8,16,16]", "spatial.patch_size=[2,4,4]"]
Table = dict[str, dict[str, str]]


def maker(patient: str, side: str) -> Callable[[FileDataset], None]:
    """A header of a device that no table knows."""

    def edit(ds: FileDataset) -> None:
        ds.PatientID, ds.ImageLaterality, ds.PatientAge = patient, side, "061Y"
        ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "Optovue", "Avanti", ""
        ds.SOPInstanceUID = f"1.2.{int.from_bytes(f'{patient}{side}'.encode())}"

    return edit


def write_dicoms(root: Path, people: range) -> None:
    """Both eyes of each person, in files without an ending, two people in a folder."""
    for n in people:
        for seed, side in enumerate("LR", start=2 * n):
            write_opt(
                root / f"export{n // 2}",
                speckle(seed=seed),
                name=f"IM{n:03d}{side}",
                spacing=SPACING,
                references=rows_down(6),
                edit=maker(f"MRN-{n}", side),
            )


def write_image_folders(root: Path, people: range) -> None:
    for n in people:
        for seed, side in enumerate(("OD", "OS"), start=100 + 2 * n):
            write_images(root / f"{n}" / "visit1" / side, speckle(seed=seed), first=1)


def table(path: Path, key: str = "filepath") -> Table:
    with path.open() as file:
        return {row[key]: row for row in csv.DictReader(file, delimiter="\t")}


def index(root: Path | str, *more: str) -> int:
    return cli.main([str(root), "--workers", "0", *more])


def run_prepare(root: Path, store: Path, *more: str) -> PreparedStore:
    places = [
        f"data.gcs_root={root}",
        f"data.manifest_path={root}/manifest.tsv",
        f"data.store={store}",
        *GRID,
        *more,
    ]
    assert prepare.main(["--config", str(SMOKE), "--workers", "0", *places]) == 0
    return PreparedStore.open(str(store))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with every kind, some that cannot be opened, and files that are none."""
    root = tmp_path_factory.mktemp("mixed")
    write_dicoms(root / "dicom", range(4))
    write_heyex_series(root / "heyex" / "ann" / "5DD3.xml", speckle(seed=50), SPACING)
    write_heyex_body(root / "heyex" / "bob" / "a.xml", speckle(seed=51), SPACING)
    write_image_folders(root / "images", range(3))
    write_nifti(root / "nifti" / "2001_r.nii.gz", speckle(seed=52), SPACING)
    write_ome(root / "tiff" / "3001_l.tif", speckle(seed=53), SPACING)
    (root / "eye.e2e").write_bytes(b"CMDb\0\0\0\0\0\0\0\0" + (100).to_bytes(4, "little") + bytes(64))
    for name in ("README", "notes.txt", "more.zip", "volume.txt", ".hidden"):
        (root / name).write_text("no OCT")
    return root


@pytest.fixture
def tree(mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixed, tmp_path / "tree"))


def test_any_tree_becomes_a_store_in_two_commands(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line of YAML above all folders of images says their spacing."""
    write_yaml(tree / "images" / "volume.yaml", spacing_mm=list(SPACING), device="bioptigen")
    assert index(tree) == 0
    rows = table(tree / "manifest.tsv")
    counts = pd.Series([row["kind"] for row in rows.values()]).value_counts().to_dict()
    assert counts == {"DICOM": 8, "images": 6, "Heidelberg XML": 2, "NIfTI": 1, "TIFF": 1}
    one = rows["images/2/visit1/OS"]
    assert (one["person_id"], one["laterality"], one["device"]) == ("2", "L", "bioptigen")
    assert (one["number_of_frames"], one["height"], one["width"]) == ("6", "40", "36")
    assert rows["dicom/export1/IM003L"]["device"] == "optovue_avanti"
    assert {row["spacing_mm"] for row in rows.values()} == {"0.12, 0.0026, 0.03"}
    left_out = table(tree / "left_out.tsv")
    assert {path: row["reason"] for path, row in left_out.items()} == {"eye.e2e": "corrupt_file"}
    text = capsys.readouterr().out
    assert f"{tree}: 18 volumes of 11 people" in text
    assert "missing: no spacing" not in text
    assert "python -m data_setup.prepare --config" in text
    store = run_prepare(tree, tmp_path / "store")
    assert store.index.status.tolist() == ["kept"] * 18
    assert store.index.groupby("person_id").split.nunique().max() == 1
    assert set(store.index.split) == {"train", "val", "test"}
    sources = store.index.set_index("path").spacing_source
    assert sources["images/0/visit1/OD"] == "sidecar"
    assert sources["heyex/bob/a.xml"] == "frame_positions"
    ages = dict(zip(store.index.path, store.index.age, strict=True))
    assert ages["dicom/export0/IM000L"] == 61
    assert np.isnan(ages["images/0/visit1/OD"])


def test_a_tree_in_a_bucket_gets_the_tables_of_the_disk_and_the_printed_command_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcsfs over HTTP; the words after `next:` as they stand, but for the grid and STORE."""
    for name in [n for n in os.environ if n.startswith(("GOOGLE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    bucket, tree = f"gs://{BUCKET}/scans", tmp_path / "tree"
    write_dicoms(tree / "dicom", range(1))
    write_heyex_series(tree / "heyex" / "ann" / "5DD3.xml", speckle(4, 12, 16, seed=50), SPACING)
    write_images(tree / "images" / "2001" / "OS", speckle(4, 12, 16, seed=51))
    write_yaml(tree / "images" / "volume.yaml", spacing_mm=list(SPACING), device="bioptigen")
    write_vol(tree / "vol" / "3001" / "eye.vol", speckle(4, 12, 16, seed=52) / np.float32(255), SPACING)
    (tree / "eye.e2e").write_bytes(b"CMDb" + bytes(80))
    with gcs_server() as endpoint:
        options = StorageOptions(endpoint_url=endpoint)
        for path in (p for p in tree.rglob("*") if p.is_file()):
            storage.write_bytes(f"{bucket}/{path.relative_to(tree)}", path.read_bytes(), options)
        assert index(tree) == 0
        on_disk = capsys.readouterr().out
        assert index(bucket, "--endpoint-url", endpoint) == 0
        in_bucket = capsys.readouterr().out
        for name in ("manifest.tsv", "participants.tsv", "left_out.tsv"):
            copy = storage.read_bytes(f"{bucket}/{name}", options)
            assert copy.replace(bucket.encode(), str(tree).encode()) == (tree / name).read_bytes()
        labels = io.BytesIO(storage.read_bytes(f"{bucket}/labels.parquet", options))
        pd.testing.assert_frame_equal(pd.read_parquet(labels), pd.read_parquet(tree / "labels.parquet"))
        *same, line = in_bucket.replace(bucket, str(tree)).splitlines()
        assert same == on_disk.splitlines()[:-1]
        words = shlex.split(line.replace(str(tree), bucket).replace("STORE", str(tmp_path / "store")))
        assert words[:4] == ["next:", "python", "-m", "data_setup.prepare"]
        assert prepare.main([*words[4:], "--workers", "0", *GRID]) == 0
    store, disk = PreparedStore.open(str(tmp_path / "store")), run_prepare(tree, tmp_path / "disk")
    assert store.index.status.tolist() == ["kept"] * 5
    columns = ["path", "spacing_source", "checksum"]
    pd.testing.assert_frame_equal(store.index[columns], disk.index[columns])


@pytest.mark.parametrize("kind", ["DICOM", "Heidelberg XML", "images"])
def test_the_commands_of_the_page_make_a_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/start/folder.md as it stands, on a tree of one kind; the folder and the grid are the test's."""
    root, store = tmp_path / "own", tmp_path / "store"
    if kind == "DICOM":
        write_dicoms(root, range(3))
    elif kind == "images":
        write_image_folders(root, range(3))
        write_yaml(root / "volume.yaml", spacing_mm=list(SPACING))
    else:
        for n, write in enumerate((write_heyex_series, write_heyex_body) * 2):
            write(root / f"patient{n}" / "eye.xml", speckle(seed=n), SPACING)
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "start" / "folder.md").read_text()
    block = re.search(r"```\n(python -m data_setup\.index .*?)```", page, re.DOTALL)
    assert block
    assert block[0] in (ROOT / "README.md").read_text().split("## Start here")[1].split("\n## ")[0]
    commands = (
        re.sub(r"\\\n\s*", "", block[1]).replace("/data/own", str(root)).replace("/data/store", str(store))
    )
    words = [shlex.split(line)[2:] for line in commands.splitlines()]
    assert [line[0] for line in words] == ["data_setup.index", "data_setup.prepare"]
    assert cli.main([*words[0][1:], "--workers", "0"]) == 0
    assert prepare.main([*words[1][1:], "--workers", "0", *GRID]) == 0
    kept = PreparedStore.open(str(store)).index
    assert set(kept.status) == {"kept"}
    assert len(kept) == {"DICOM": 6, "images": 6, "Heidelberg XML": 4}[kind]


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


def test_what_is_missing_is_said_with_the_place_to_write_it(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index(tree)
    text = capsys.readouterr().out
    assert "missing: no spacing: 6 (images/0/visit1/OD, images/0/visit1/OS, images/1/visit1/OD, ...)" in text
    assert f"write `spacing_mm: [D, H, W]` into {tree}/images/volume.yaml, once for all below it" in text
    assert "missing: order of B-scans unknown: 7" in text
    assert "left out: Heidelberg E2E 1: corrupt_file (eye.e2e)" in text
    assert "archives 1" in text
    # the same cells in the manifest, for one folder, make a volume of it
    manifest = tree / "manifest.tsv"
    rows = list(table(manifest).values())
    for row in rows:
        if row["filepath"] == "images/1/visit1/OD":
            row |= {
                "spacing_mm": "[0.12; 0.0026; 0.03]",
                "d_order": "inferior_to_superior",
                "files": "oct_*.png",
            }
    pd.DataFrame(rows).to_csv(manifest, sep="\t", index=False)
    store = run_prepare(tree, tmp_path / "store", "data.max_reject_fraction=0.9")
    status = store.index.set_index("path").status
    assert status["images/1/visit1/OD"] == "kept"
    assert status.value_counts().to_dict() == {"kept": 13, "missing_spacing": 5}
    row = store.index[store.index.path == "images/1/visit1/OD"].iloc[0]
    assert (row.spacing_source, row.orientation_source, row.flipped_d) == ("manifest", "manifest", True)
    # another value there is another volume
    text = manifest.read_text().replace("[0.12; 0.0026; 0.03]", "0.24 0.0026 0.03")
    manifest.write_text(text)
    again = run_prepare(tree, tmp_path / "store", "data.max_reject_fraction=0.9").index
    assert again[again.path == "images/1/visit1/OD"].spacing_before_d.tolist() == [0.24]


def no_distance(ds: FileDataset) -> None:
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness


def no_pixel_spacing(ds: FileDataset) -> None:
    """The distance between B-scans stays; the other two are the row's, so it is the source."""
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing


def no_measures(ds: FileDataset) -> None:
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence


@pytest.mark.parametrize("take", [no_distance, no_pixel_spacing, no_measures])
def test_a_dicom_without_a_spacing_takes_that_of_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], take: Callable[[FileDataset], None]
) -> None:
    def edit(ds: FileDataset) -> None:
        maker("MRN-0", "R")(ds)
        ds.SOPInstanceUID = "1.2.3"
        take(ds)

    root = tmp_path / "tree"
    write_dicoms(root, range(1))
    write_opt(
        root / "export0", speckle(seed=7), name="one", spacing=SPACING, references=rows_down(6), edit=edit
    )
    index(root)
    text = capsys.readouterr().out
    assert "missing: no spacing: 1 (export0/one): write the column spacing_mm of manifest.tsv" in text
    manifest = root / "manifest.tsv"
    rows = table(manifest)
    one = rows["export0/one"]
    assert (one["spacing_mm"], one["number_of_frames"], one["laterality"]) == ("", "6", "R")
    assert one["person_id"] == rows["export0/IM000L"]["person_id"]  # of PatientID, as of the person's others
    index(root)
    assert "missing: no spacing: 1" in capsys.readouterr().out  # a row without it is there
    one["spacing_mm"] = "0.12 0.0026 0.03"
    pd.DataFrame(rows.values()).to_csv(manifest, sep="\t", index=False)
    index(root)
    text = capsys.readouterr().out
    assert "missing: no spacing" not in text  # the table has it now
    store = run_prepare(root, tmp_path / "store").index.set_index("path")
    assert store.status.tolist() == ["kept"] * 3
    assert store.spacing_source["export0/one"] == "manifest"
    assert store.spacing_source["export0/IM000L"] != "manifest"


def test_an_export_without_a_spacing_is_left_out(tmp_path: Path) -> None:
    path = write_heyex_body(tmp_path / "ann" / "eye.xml", speckle(), SPACING)
    path.write_text(re.sub("<ScaleX>[^<]*</ScaleX>", "", path.read_text()))
    write_dicoms(tmp_path, range(1))
    index(tmp_path)
    assert table(tmp_path / "left_out.tsv")["ann/eye.xml"]["reason"] == "missing_spacing"


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


def test_headers_are_read_and_no_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a bucket, where each byte is a request's: a small share of large files."""
    voxels = speckle(60, 200, 200)
    write_opt(tmp_path, voxels, name="eye.dcm", spacing=SPACING, references=rows_down(60))
    write_nifti(tmp_path / "1_l.nii", voxels, SPACING)
    write_images(tmp_path / "2_r", voxels)
    write_yaml(tmp_path / "volume.yaml", spacing_mm=list(SPACING))
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        storage.write_bytes(f"memory://index/{file.relative_to(tmp_path)}", file.read_bytes())
    fetched = []
    whole, part = storage.read_bytes, storage.read_range

    def read_range(url: str, start: int, end: int, options: object = None) -> bytes:
        fetched.append(min(end, 10**9) - start)
        return part(url, start, end, options)

    def read_bytes(url: str, options: object = None) -> bytes:
        data = whole(url, options)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(storage, "read_range", read_range)
    for module in ("images", "sidecar", "heidelberg", "dicom"):
        monkeypatch.setattr(f"data_setup.readers.{module}.read_bytes", read_bytes)
    index("memory://index", "--endpoint-url", "http://127.0.0.1:1", "--profile", "lab")
    monkeypatch.undo()
    (last,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert "data.storage_options.endpoint_url=http://127.0.0.1:1" in last
    assert "data.storage_options.profile=lab" in last
    assert 0 < sum(fetched) < 0.1 * sum(storage.find_sizes("memory://index").values())
    rows = storage.read_text("memory://index/manifest.tsv").splitlines()
    assert [line.split("\t")[1] for line in rows[1:]] == ["1_l.nii", "2_r", "eye.dcm"]
    storage.remove("memory://index", recursive=True)


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


def test_an_eye_of_the_path_is_not_replaced_by_a_yaml_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "own scans"
    write_image_folders(root, range(1))
    write_images(root / "1", speckle(), first=1)
    write_yaml(root / "volume.yaml", spacing_mm=list(SPACING))
    index(root)
    text = capsys.readouterr().out
    assert "missing: eye unknown: 1 (1): write the column laterality of manifest.tsv" in text
    words = shlex.split(text.rpartition("next: ")[2])
    assert f"data.gcs_root={root}" in words
    (root / "manifest.tsv").unlink()
    write_yaml(root / "volume.yaml", spacing_mm=list(SPACING), laterality="R")
    index(root)
    sides = {path: row["laterality"] for path, row in table(root / "manifest.tsv").items()}
    assert sides == {"0/visit1/OD": "R", "0/visit1/OS": "L", "1": "R"}
    assert "a YAML names the other eye than the path: 1 (0/visit1/OS)" in capsys.readouterr().out


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


def test_mistakes_are_one_line(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected one group, found 0"):
        index(tree, "--person", "images")
    with pytest.raises(UserError, match=r"expected 'images/\(\.\*\)' in every path, found none in dicom/"):
        index(tree, "--person", "images/(.*)")
    with pytest.raises(UserError, match="expected a folder with files in it, found none"):
        index(tmp_path / "absent")
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.e2e").write_bytes((tree / "eye.e2e").read_bytes())
    with pytest.raises(UserError, match=r"expected an OCT volume, found none .*expected the directory"):
        index(tmp_path / "few")
    (tree / "dataset").mkdir()
    shutil.move(tree / "tiff", tree / "dataset" / "tiff")
    with pytest.raises(UserError, match="expected no folder dataset beside others"):
        index(tree)
    assert not (tree / "manifest.tsv").exists()
    assert index(tree / "images", "--person", r"^(\d+)/") == 0
    assert {row["person_id"] for row in table(tree / "images" / "manifest.tsv").values()} == {"0", "1", "2"}


def test_tiff_pages_of_a_folder_and_tiff_volumes(tmp_path: Path) -> None:
    """Files of one page are the B-scans of a folder; files of several pages are volumes."""
    for n in range(3):
        write_ome(tmp_path / "volumes" / f"{1001 + n}_r.tif", speckle(seed=n), SPACING)
    write_images(tmp_path / "pages" / "1004_l", speckle(seed=9), suffix="tif", first=1)
    index(tmp_path)
    assert list(table(tmp_path / "manifest.tsv")) == [
        "pages/1004_l",
        "volumes/1001_r.tif",
        "volumes/1002_r.tif",
        "volumes/1003_r.tif",
    ]


def test_other_images_and_another_xml_in_a_folder_of_b_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only numbered set is taken, and written down; two sets are left to the user."""
    write_yaml(tmp_path / "volume.yaml", spacing_mm=list(SPACING))
    for name in ("1_l", "2_l", "3_l"):
        write_images(tmp_path / name, speckle(12), first=1)
        write_images(tmp_path / name, speckle(1), suffix="bmp")[0].rename(tmp_path / name / "slo.bmp")
        (tmp_path / name / "notes.xml").write_text("<annotation/>")
    write_images(tmp_path / "2_l", speckle(12), suffix="bmp")
    write_yaml(tmp_path / "3_l" / "volume.yaml", files="oct_1*.png")
    index(tmp_path)
    rows = table(tmp_path / "manifest.tsv")
    assert {path: row["files"] for path, row in rows.items()} == {"1_l": "oct_*.png"}
    assert rows["1_l"]["number_of_frames"] == "12"
    assert "taken of folders with other images: 1 (1_l/oct_*.png): column files" in capsys.readouterr().out
    reasons = {path: row["reason"] for path, row in table(tmp_path / "left_out.tsv").items()}
    assert reasons.pop("2_l") == "not_a_volume"
    assert reasons.pop("3_l") == "frame_count_mismatch"  # what somebody wrote is not replaced: 1, 10, 11, 12
    assert reasons == {f"{n}_l/notes.xml": "wrong_kind" for n in (1, 2, 3)}
    store = run_prepare(tmp_path, tmp_path.parent / "store")
    assert store.index.status.tolist() == ["kept"]


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


def test_a_name_that_no_table_can_hold_is_counted() -> None:
    candidates, others = find_candidates("nowhere", {"\udcff.dcm": 3, "eye.dcm": 3}, StorageOptions())
    assert [candidate.path for candidate in candidates] == ["eye.dcm"]
    assert others == {"names that are no UTF-8": 1}


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


def test_a_folder_that_nobody_may_write_is_said_before_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nifti(tmp_path / "in" / "1001_OD.nii.gz", speckle(), SPACING)
    monkeypatch.setattr(cli, "look", lambda *_, **__: pytest.fail("a header was read"))
    monkeypatch.setattr(cli.os, "access", lambda *_: False)
    with pytest.raises(UserError, match="expected a folder that can be written, found none; give --out DIR"):
        index(tmp_path / "in")
