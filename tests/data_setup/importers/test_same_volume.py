"""Every kind gives the volume that DICOM gives, into the same row of the store; from a bucket, too."""

from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset

from data_setup import prepare
from data_setup.readers.dicom import read_volume
from data_setup.readers.open_record import source_stat
from data_setup.store.reader import PreparedStore
from tests.data_setup.importers.reading import (
    EYES,
    GRID,
    SPACING,
    read,
    record,
    run_prepare,
    write_every_kind,
    write_lists,
)
from tests.support.dicom_factory import TRITON, rows_down, speckle, write_opt
from tests.support.pipeline_factory import SMOKE
from utils import storage


def check_equal_rows(store: PreparedStore, reference: int) -> None:
    """Every row holds what the row made from DICOM holds; what may differ says where things come from."""
    index = store.index
    assert (index.status == "kept").all(), index[["path", "status", "message"]].to_string()
    exact = ["checksum", "intensity_mean", "intensity_std", "valid_fraction", "flipped_d", "bits_stored"]
    exact += ["laterality"]
    exact += [c for c in index.columns if c.startswith(("valid_", "shape_before"))]
    for column in exact:
        assert index[column].nunique() == 1, index[["path", column]].to_string()
    volume = store.read(reference)
    for row in store.kept:
        assert np.array_equal(store.read(row), volume)
        for axis in "dhw":
            for when in ("before", "after"):
                column = f"spacing_{when}_{axis}"
                assert index.loc[row, column] == pytest.approx(index.loc[reference, column], rel=1e-7)
    assert set(index.orientation_source) == {"reference_coordinates", "nifti_affine", "sidecar"}


def test_every_kind_gives_the_same_row_as_dicom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    voxels, root = speckle(), tmp_path / "tree"
    dicom = write_opt(root / "dicom", voxels, spacing=SPACING, references=rows_down(len(voxels)))
    paths = [str(Path(dicom).relative_to(root)), *write_every_kind(root, voxels, SPACING, "R")]
    write_lists(root, paths, "topcon_triton", "own_raster")
    # The Heidelberg export says which device made it; the row that says another one is a reject.
    manifest, own = root / "manifest.tsv", "xml/eye.xml\theidelberg_spectralis"
    manifest.write_text(manifest.read_text().replace("xml/eye.xml\ttopcon_triton", own))
    store = run_prepare(root, tmp_path / "store", *GRID)
    by_path = dict(zip(store.index.path, store.index.row, strict=True))
    assert len(by_path) == 8
    check_equal_rows(store, by_path[paths[0]])
    sources = store.index.set_index("path").spacing_source.to_dict()
    assert [sources[p.strip("/")] for p in paths] == [
        "shared", "nifti_header", "nifti_header", "ome_xml", "imagej", "sidecar",
        "sidecar", "frame_positions",
    ]  # fmt: skip
    assert "0 of the manifest missing" in capsys.readouterr().out
    again = run_prepare(root, tmp_path / "store", *GRID)
    assert "0 prepared, 8 reused" in capsys.readouterr().out
    assert again.index.equals(store.index)


@pytest.mark.slow
@pytest.mark.skipif(not EYES.is_dir(), reason="the two real eyes are not part of the project")
def test_a_real_eye_gives_the_same_row_from_every_kind(tmp_path: Path) -> None:
    source = next((EYES / "retinal_oct" / "structural_oct" / "topcon_triton").rglob("*.dcm"))
    volume, root = read_volume(str(source)), tmp_path / "tree"
    paths = write_every_kind(root, volume.voxels, volume.header.spacing_mm, volume.header.laterality or "")
    name = TRITON.replace("_r_", "_l_")

    def edit(ds: FileDataset) -> None:
        ds.ImageLaterality, ds.ManufacturerModelName = "L", "Spectralis"

    write_opt(
        root / "dicom", volume.voxels, name=name, spacing=volume.header.spacing_mm,
        references=rows_down(len(volume.voxels)), edit=edit,
    )  # fmt: skip
    paths.append(f"dicom/{name}")
    write_lists(root, paths, "heidelberg_spectralis", "own_raster")
    store = run_prepare(root, tmp_path / "store")
    check_equal_rows(store, int(store.index.index[store.index.path == paths[-1]][0]))
    direct = tmp_path / "direct"
    run = ["--config", str(SMOKE), "--workers", "0", f"data.gcs_root={EYES}", f"data.store={direct}"]
    assert prepare.main(run) == 0
    eyes = PreparedStore.open(str(direct)).index
    assert store.index.checksum[0] in set(eyes.checksum)


def test_every_kind_from_a_bucket(tmp_path: Path) -> None:
    voxels = speckle()
    paths = write_every_kind(tmp_path, voxels, SPACING, "L")
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        storage.write_bytes(f"memory://import/{file.relative_to(tmp_path)}", file.read_bytes())
    for path in paths:
        url = f"memory://import/{path.strip('/')}"
        header, volume = read(url)
        assert np.array_equal(volume, voxels)
        assert header.laterality == "L"
        assert source_stat(record(url)).size > voxels.size / 10
    storage.remove("memory://import", recursive=True)
