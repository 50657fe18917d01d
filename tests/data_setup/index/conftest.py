"""A tree with every kind, for the tests of this folder."""

import shutil
from pathlib import Path

import pytest

from tests.data_setup.importers.reading import SPACING
from tests.data_setup.index.trees import write_dicoms, write_image_folders
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_heyex_body, write_heyex_series, write_nifti, write_ome


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
