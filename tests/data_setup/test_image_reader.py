"""The reader inside MONAI: LoadImage gives the volume, its affine and its facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from monai.transforms import Compose, LoadImage, LoadImaged, Spacing

from data_setup.readers.dicom import OCTReadError
from data_setup.readers.monai_reader import OCTReader
from tests.support.dicom_factory import rows_down, speckle, write_opt

# LoadImage builds all of MONAI's own readers too, and one of them looks for a GPU library.
pytestmark = pytest.mark.filterwarnings("ignore:NvImgCodecPydicomReader:UserWarning")


def test_load_image(tmp_path: Path) -> None:
    voxels = speckle()
    path = write_opt(tmp_path, voxels, references=rows_down(6)[::-1])
    image = LoadImage(reader=OCTReader(), ensure_channel_first=True, dtype=np.uint8)(path)
    assert image.shape == (1, 6, 40, 36)
    np.testing.assert_array_equal(image[0].numpy(), voxels[::-1])  # superior first
    np.testing.assert_allclose(image.affine.numpy(), np.diag([0.12, 0.0026, 0.03, 1]))
    assert image.meta["orientation_source"] == "reference_coordinates"
    assert image.meta["filename_or_obj"] == path


def test_several_files_become_channels(tmp_path: Path) -> None:
    paths = [write_opt(tmp_path, speckle(seed=s), name=f"{s}.dcm") for s in (0, 1)]
    sample = LoadImaged("image", reader=OCTReader(), ensure_channel_first=True)({"image": paths})
    assert sample["image"].shape == (2, 6, 40, 36)
    np.testing.assert_array_equal(sample["image"][1].numpy(), speckle(seed=1))
    paths[1] = write_opt(tmp_path, speckle(), name="1.dcm", spacing=(0.2, 0.0026, 0.03))
    reader = OCTReader()
    with pytest.raises(ValueError, match=r"1\.dcm: expected shape and spacing"):
        reader.get_data(reader.read(paths))


def test_spacing_transform_uses_the_affine(tmp_path: Path) -> None:
    path = write_opt(tmp_path, speckle())
    load = LoadImage(reader=OCTReader(), ensure_channel_first=True)
    image = Compose([load, Spacing(pixdim=(0.06, 0.0026, 0.03))])(path)
    assert image.shape == (1, 11, 40, 36)


def test_names_and_faults(tmp_path: Path) -> None:
    reader = OCTReader()
    assert reader.verify_suffix("gs://bucket/a.DCM")
    assert not reader.verify_suffix(["a.dcm", "b.png"])
    with pytest.raises(OCTReadError, match="missing_file"):
        reader.read(str(tmp_path / "none.dcm"))
