"""Records: few columns are enough, a changed file is seen, faults are rows and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_setup.manifest import read_records
from data_setup.readers.open_record import source_stat
from tests.data_setup.importers.reading import (
    GRID,
    SPACING,
    folder_of,
    record,
    remove_one,
    run_prepare,
    vendor_files,
    write_lists,
)
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_heidelberg, write_nifti, write_tiff
from tests.support.pipeline_factory import SMOKE
from utils.config.load import load_config
from utils.errors import UserError


def test_a_changed_file_of_a_volume_is_seen(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    export = write_heidelberg(tmp_path / "xml" / "eye.xml", speckle(), SPACING)
    tiff = write_tiff(tmp_path / "eye.tif", speckle())
    touched = [
        (folder, folder / "oct_3.png"),
        (folder, folder / "volume.yaml"),
        (export, export.parent / "eye_002.tif"),
        (tiff, tmp_path / "eye.yaml"),
    ]
    for path, changed in touched:
        before = source_stat(record(path))
        assert before == source_stat(record(path))
        changed.write_bytes((changed.read_bytes() if changed.exists() else b"") + b"\n")
        assert before != source_stat(record(path)), changed
    bystander = export.parent / "other.tif"
    before = source_stat(record(export))
    bystander.write_bytes(b"x")
    assert before == source_stat(record(export))


def test_the_manifest_needs_few_columns(tmp_path: Path) -> None:
    write_lists(tmp_path, ["a/eye.nii", "b/", "a/eye.nii", "c/eye.tif"], "bioptigen", "raster")
    arguments = [
        f"data.gcs_root={tmp_path}",
        f"data.manifest_path={tmp_path}/manifest.tsv",
        "data.store=unused",
    ]
    listing = read_records(load_config(SMOKE, arguments))
    assert [(r.path, r.device, r.protocol, r.region, r.shape) for r in listing.records] == [
        (p, "bioptigen", "raster", "unknown", None) for p in ("a/eye.nii", "b", "c/eye.tif")
    ]
    assert listing.skipped == {"duplicate_row": 1}
    assert listing.records[1].url == f"{tmp_path}/b"
    (tmp_path / "manifest.tsv").write_text("person_id\tfilepath\tdevice\n1\ta.nii\tx\n")
    with pytest.raises(UserError, match="expected a column sop_instance_uid"):
        read_records(load_config(SMOKE, arguments))


def test_faults_are_rows_with_reasons_and_the_run_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    paths = ["n/eye.nii", "n/none.nii", "folder", "e/eye.e2e", "gone/"]
    write_nifti(root / "n" / "eye.nii", speckle(), SPACING)
    remove_one(folder_of(root))
    (root / "e").mkdir()
    (root / "e" / "eye.e2e").write_bytes(vendor_files()["eye.e2e"][0])
    write_lists(root, paths, "heidelberg_spectralis", "own", "L")
    store = run_prepare(root, tmp_path / "store", *GRID, "data.max_reject_fraction=0.9")
    assert store.index.set_index("path").status.to_dict() == {
        "n/eye.nii": "kept",
        "n/none.nii": "missing_file",
        "folder": "frame_count_mismatch",
        "e/eye.e2e": "corrupt_file",
        "gone": "missing_file",
    }
    report = json.loads((tmp_path / "store" / "prepare_report.json").read_text())
    assert report["run"]["audit"]["missing"]["first"] == ["gone", "n/none.nii"]
