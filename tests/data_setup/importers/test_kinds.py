"""The content has to be of the kind that the name says; damaged bytes are rejects or volumes."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import identify
from tests.data_setup.importers.reading import SPACING, read, reject, vendor_files
from tests.support.dicom_factory import speckle, write_opt
from tests.support.import_factory import (
    write_folder,
    write_heidelberg,
    write_nifti,
    write_ome,
    write_tiff,
    write_yaml,
)


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
