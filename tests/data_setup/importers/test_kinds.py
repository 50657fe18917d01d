"""The content has to be what the name says; few columns are enough, faults are rows and the run goes on."""

import gzip
import json
import random
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from data_setup.manifest import read_records
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import identify, source_stat
from tests.data_setup.importers.reading import (
    GRID,
    SPACING,
    folder_of,
    read,
    record,
    reject,
    remove_one,
    run_prepare,
    vendor_files,
    write_lists,
)
from tests.support.dicom_factory import speckle, write_opt
from tests.support.import_factory import (
    write_folder,
    write_heidelberg,
    write_nifti,
    write_ome,
    write_tiff,
    write_yaml,
)
from tests.support.pipeline_factory import SMOKE
from utils.config.load import load_config
from utils.errors import UserError


@pytest.mark.parametrize("name", vendor_files())
def test_a_makers_file_without_content_is_refused(tmp_path: Path, name: str) -> None:
    data, expected = vendor_files()[name]
    (tmp_path / name).write_bytes(data)
    assert reject(tmp_path / name)[0] == expected
    other = tmp_path / "eye.nii"
    other.write_bytes(data)
    assert reject(other)[0] == RejectReason.WRONG_KIND


def test_the_content_has_to_be_what_the_name_says(tmp_path: Path) -> None:
    nifti = write_nifti(tmp_path / "eye.nii", speckle(), SPACING)
    tiff = write_tiff(tmp_path / "eye.tif", speckle())
    dicom = Path(write_opt(tmp_path, speckle()))
    for source, kind in ((nifti, "NIfTI"), (tiff, "TIFF"), (dicom, "DICOM")):
        assert identify(source.read_bytes()[:1024])[0] == kind
        for suffix in (".nii", ".tif", ".xml", ".e2e", ".vol", ".nii.gz"):
            path = tmp_path / f"copy{suffix}"
            path.write_bytes(source.read_bytes())
            if suffix != source.suffix:
                assert reject(path)[0] == RejectReason.WRONG_KIND, (source, suffix)
    (tmp_path / "copy.nii.gz").write_bytes(gzip.compress(tiff.read_bytes()))
    assert reject(tmp_path / "copy.nii.gz")[0] == RejectReason.WRONG_KIND
    nib.save(nib.Nifti1Pair(speckle(), np.eye(4)), tmp_path / "pair.img")
    (tmp_path / "pair.nii").write_bytes((tmp_path / "pair.hdr").read_bytes())
    assert reject(tmp_path / "pair.nii")[0] == RejectReason.UNSUPPORTED_FORMAT


def test_bytes_cut_and_changed_anywhere_are_rejects_or_volumes(tmp_path: Path) -> None:
    """Never another exception, and no warning."""
    write_yaml(tmp_path / "eye.yaml", spacing_mm=list(SPACING), axes=["W", "H", "D"])
    files = [
        write_nifti(tmp_path / "eye.nii", speckle(), SPACING),
        write_nifti(tmp_path / "eye.nii.gz", speckle(), SPACING),
        write_ome(tmp_path / "eye.tif", speckle(), SPACING),
        write_tiff(tmp_path / "eye.tiff", speckle(), compression="zlib"),
        write_heidelberg(tmp_path / "eye.xml", speckle(), SPACING),
        write_folder(tmp_path / "folder", speckle(), spacing_mm=list(SPACING)) / "oct_3.png",
    ]
    rng = random.Random(1)
    outcomes = set()
    for path in files:
        good = path.read_bytes()
        for turn in range(60):
            data = bytearray(good)
            if turn % 2:
                data = data[: rng.randrange(len(data))]
            else:
                for _ in range(rng.choice((1, 4, 30))):
                    data[rng.randrange(min(len(data), rng.choice((600, len(data)))))] = rng.randrange(256)
            path.write_bytes(data)
            try:
                header, _ = read(path if path.suffix != ".png" else path.parent)
            except OCTReadError as error:
                outcomes.add(error.reason)
            else:  # a cut file is never a shorter volume
                assert turn % 2 == 0 or header.shape == (6, 40, 36)
        path.write_bytes(good)
    assert len(outcomes) >= 5


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
