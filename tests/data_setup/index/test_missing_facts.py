"""What files do not say (spacing, order of B-scans, eye) is said with the place to write it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from pydicom.dataset import FileDataset

from tests.data_setup.importers.reading import SPACING
from tests.data_setup.index.trees import index, maker, run_prepare, table, write_dicoms, write_image_folders
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import write_heyex_body, write_images, write_yaml


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
