"""Which files are taken for volumes, by their headers, and where to write what they do not say."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from pydicom.dataset import FileDataset
from tifffile import imwrite

from data_setup.index import cli
from data_setup.index.candidates import find_candidates
from data_setup.index.people import matched_person
from tests.data_setup.dicom.reading import assign
from tests.data_setup.importers.reading import SPACING
from tests.data_setup.index.trees import index, maker, run_prepare, table, write_dicoms, write_image_folders
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import write_heyex_body, write_images, write_nifti, write_ome, write_yaml
from tests.support.pipeline_factory import ROOT
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

Capture = pytest.CaptureFixture[str]


def test_headers_are_read_and_no_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """From a bucket, where each byte is a request's: a small share of large files."""
    voxels = speckle(60, 200, 200)
    edit = assign(BurnedInAnnotation="YES")
    write_opt(tmp_path, voxels, name="eye.dcm", spacing=SPACING, references=rows_down(60), edit=edit)
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
    index("memory://index", "--endpoint-url", "http://127.0.0.1:1")
    monkeypatch.undo()
    text = capsys.readouterr().out
    assert "warning: BurnedInAnnotation is YES: 1 (eye.dcm): their text goes into the store" in text
    (last,) = [line for line in text.splitlines() if line.startswith("next: ")]
    assert "data.storage_options.endpoint_url=http://127.0.0.1:1" in last
    assert 0 < sum(fetched) < 0.1 * sum(storage.find_sizes("memory://index").values())
    rows = storage.read_text("memory://index/manifest.tsv").splitlines()
    assert [line.split("\t")[1] for line in rows[1:]] == ["1_l.nii", "2_r", "eye.dcm"]
    storage.remove("memory://index", recursive=True)


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
    (tmp_path / "few" / "dataset").mkdir()
    write_nifti(tmp_path / "few" / "eye.nii", speckle(seed=1), SPACING)
    (tmp_path / "few" / "dataset" / "notes.txt").write_text("")  # prepare looks for eye.nii in here
    with pytest.raises(UserError, match=r"folder dataset beside others, found eye\.nii beside it: move it"):
        index(tmp_path / "few")
    assert not list(tmp_path.rglob("manifest.tsv"))
    assert matched_person(re.compile("(.*)/"), "Mu\u0308ller/x.dcm") == "M\u00fcller"  # as of a path
    assert index(tree / "images", "--person", r"^(\d+)/") == 0
    assert {row["person_id"] for row in table(tree / "images" / "manifest.tsv").values()} == {"0", "1", "2"}


def test_tiff_pages_of_a_folder_and_tiff_volumes(tmp_path: Path) -> None:
    """Files of one page are the B-scans of a folder; files of several pages are volumes."""
    for n in range(3):
        write_ome(tmp_path / "volumes" / f"{1001 + n}_r.tif", speckle(seed=n), SPACING)
    for path in write_images(tmp_path / "pages" / "1004_l", speckle(seed=9), suffix="tif", first=1):
        imwrite(path, speckle()[0, ::4, ::4], append=True, subfiletype=1)  # a thumbnail
    index(tmp_path)
    volumes = [f"volumes/{number}_r.tif" for number in (1001, 1002, 1003)]
    assert list(table(tmp_path / "manifest.tsv")) == ["pages/1004_l", *volumes]


def test_other_images_and_another_xml_in_a_folder_of_b_scans(tmp_path: Path, capsys: Capture) -> None:
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


def test_a_name_that_no_table_can_hold_and_half_a_pair_are_counted() -> None:
    sizes = dict.fromkeys(("\udcff.dcm", "eye.dcm", "a.img", "pair.img", "pair.hdr"), 3)
    candidates, others = find_candidates("nowhere", sizes, StorageOptions())
    assert [candidate.path for candidate in candidates] == ["a.img", "eye.dcm"]
    pair = "NIfTI voxels with a .hdr beside them, which are read from one .nii"
    assert others == {"names that are no UTF-8": 1, pair: 1, "*.hdr": 1}


def test_files_that_were_not_fetched_and_names_that_are_no_text_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run as a command, on a terminal that has ASCII alone."""
    root = tmp_path / "Z\u00fcrich"
    write_dicoms(root, range(2))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 58000000\n"
    for name in ("lfs.dcm", "lfs.nii.gz", "lfs.vol", "IM0009", "b/b_1.png", "b/b_2.png", "t/1.tif"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(pointer)
    (root / "annexed.nii").write_text("/annex/objects/MD5E-s120--0123456789abcdef.nii\n")
    (root / "annex.dcm").symlink_to("../.git/annex/objects/abc.dcm")
    bad = os.fsencode(root) + b"/M\xfcller.dcm"
    Path(os.fsdecode(bad)).write_bytes(b"DICM")
    command = [sys.executable, "-m", "data_setup.index", str(root), "--workers", "0"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    text = capfd.readouterr()
    assert "Z\\xfcrich: 4 volumes of 2 people" in text.out
    assert "skipped: a link to nowhere, not fetched perhaps (git annex get): 1" in text.err
    rows = table(root / "left_out.tsv")
    assert rows.pop("M\\xfcller.dcm")["reason"] == "bad_name"
    assert (
        "a pointer of git-annex in its place; next: git annex get (annexed" in rows["annexed.nii"]["message"]
    )
    assert rows.pop("annexed.nii")["reason"] == "missing_file"
    assert set(rows) == {"lfs.dcm", "lfs.nii.gz", "lfs.vol", "IM0009", "b", "t/1.tif"}
    assert {row["reason"] for row in rows.values()} == {"missing_file"}
    assert all("a pointer of git-lfs in its place; next: git lfs pull" in r["message"] for r in rows.values())


def test_a_folder_that_nobody_may_write_is_said_before_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nifti(tmp_path / "in" / "1001_OD.nii.gz", speckle(), SPACING)
    monkeypatch.setattr(cli, "look", lambda *_, **__: pytest.fail("a header was read"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="expected a folder that can be written, found one without"):
        index(tmp_path / "in")


def test_what_is_missing_is_said_with_the_place_to_write_it(
    tree: Path, tmp_path: Path, capsys: Capture
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
            row |= {"spacing_mm": "[0.12; 0.0026; 0.03]", "d_order": "inferior_to_superior"}
            row |= {"files": "oct_*.png"}
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


def test_each_device_and_folder_has_its_own_line(tmp_path: Path, capsys: Capture) -> None:
    """One YAML above them all would give three devices one spacing."""
    for folder, shape in {"erm": (6, 40, 36), "octa": (6, 30, 36), "hole": (6, 50, 50)}.items():
        write_images(tmp_path / folder / "1001" / "OD", speckle(*shape))
        write_images(tmp_path / folder / "1002" / "OD", speckle(*shape))
    write_images(tmp_path / "octa" / "1003" / "OD", speckle(6, 20, 20))
    index(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("missing: no spacing: 7 (erm/1001/OD,"))
    places = [f"{tmp_path}/erm/volume.yaml, once", f"{tmp_path}/hole/volume.yaml, once"]
    places += ["a YAML beside each of them", f"{tmp_path}/octa/1003/OD/volume.yaml, once"]
    wanted = lines[first + 1 : first + 5]
    assert [place for line, place in zip(wanted, places, strict=True) if place not in line] == []
    assert "  unknown, images of 40 x 36: 2 (erm/1001/OD, erm/1002/OD): write `spacing_mm" in wanted[0]
    assert not any("once for all" in line and f"{tmp_path}/volume.yaml" in line for line in lines)
    assert "d_order: superior_to_inferior, inferior_to_superior or unknown" in "\n".join(lines)
    device, order, after = lines[first + 5 : first + 8]  # of the same groups, which stand above
    same = "write `device: NAME` into the same files, or the column device of manifest.tsv"
    assert device.startswith("missing: device unknown: 7 (")
    assert device.endswith(same)
    assert order.startswith("missing: order of B-scans unknown: 7 (")
    assert after.startswith("manifest.tsv: ")


def no_distance(ds: FileDataset) -> None:
    """The thickness of a B-scan stays, which is no distance."""
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SpacingBetweenSlices


def no_pixel_spacing(ds: FileDataset) -> None:
    """The distance between B-scans stays; the other two are the row's, so it is the source."""
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing


def no_measures(ds: FileDataset) -> None:
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence


@pytest.mark.parametrize("take", [no_distance, no_pixel_spacing, no_measures])
def test_a_dicom_without_a_spacing_takes_that_of_its_row(
    tmp_path: Path, capsys: Capture, take: Callable[[FileDataset], None]
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


def test_an_eye_of_the_path_is_not_replaced_by_a_yaml_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("data_setup.index.summary.ACCELERATORS", (os.devnull,))
    root = tmp_path / "own scans"
    write_image_folders(root, range(1))
    write_images(root / "1", speckle(), first=1)
    write_yaml(root / "volume.yaml", spacing_mm=list(SPACING))
    index(root)
    text = capsys.readouterr().out
    assert "missing: eye unknown: 1 (1): write the column laterality of manifest.tsv" in text
    words = shlex.split(text.rpartition("next: ")[2])
    assert f"data.gcs_root={root}" in words
    assert (ROOT / words[words.index("--config") + 1]).is_file()  # where there is an accelerator, a large one
    (root / "manifest.tsv").unlink()
    write_yaml(root / "volume.yaml", spacing_mm=list(SPACING), laterality="R")
    index(root)
    sides = {path: row["laterality"] for path, row in table(root / "manifest.tsv").items()}
    assert sides == {"0/visit1/OD": "R", "0/visit1/OS": "L", "1": "R"}
    assert "a YAML names the other eye than the path: 1 (0/visit1/OS)" in capsys.readouterr().out
    (root / "0" / "meta.yml").write_text("spacing_mm: [1, 1, 1]")
    index(root)
    assert (
        "YAML that nothing reads (a folder's is volume.yaml, a file's has its name) 1"
        in capsys.readouterr().out
    )
