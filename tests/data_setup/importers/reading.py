"""What the tests of the importers share: a record, its volume or its reject; one volume as every kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup import prepare
from data_setup.manifest import Record
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import open_record
from data_setup.store.reader import PreparedStore
from tests.support.dicom_factory import speckle
from tests.support.import_factory import (
    anatomical_affine,
    write_folder,
    write_heidelberg,
    write_imagej,
    write_nifti,
    write_ome,
    write_tiff,
    write_yaml,
)
from tests.support.pipeline_factory import ROOT, SMOKE

SPACING = (0.12, 0.0026, 0.03)
DOWN = "superior_to_inferior"
EYES = ROOT.parent / "shared" / "data" / "real_oct"
GRID = ["spatial.target_spacing=[0.1,0.01,0.1]", "spatial.image_size=[8,16,16]", "spatial.patch_size=[2,4,4]"]


def record(url: Path | str, **changes: Any) -> Record:
    whose = {"person_id": "1", "device": "heidelberg_spectralis", "protocol": "own", "region": "Macula"}
    return Record(**{"path": Path(url).name, "url": str(url), "split": "train", **whose, **changes})


def read(url: Path | str, **changes: Any) -> tuple[Any, np.ndarray]:
    """(header, voxels superior -> inferior) as prepare takes them."""
    header, frames = open_record(record(url, **changes))
    voxels = np.stack(list(frames))
    assert voxels.dtype == np.uint8
    return header, voxels[::-1] if header.flip_d else voxels


def reject(path: Path | str, **changes: Any) -> tuple[RejectReason, str]:
    with pytest.raises(OCTReadError) as caught:
        read(path, **changes)
    return caught.value.reason, str(caught.value)


def refused(outcome: tuple[RejectReason, str], reason: str, *words: str) -> None:
    """Check what `reject` gave."""
    assert outcome[0] == reason, outcome[1]
    assert [word for word in words if word not in outcome[1]] == [], outcome[1]


def write_every_kind(
    root: Path, voxels: np.ndarray, spacing: tuple[float, float, float], side: str
) -> list[str]:
    """The volume as all kinds, B-scans from superior; returns their paths below the root."""
    says = {"d_order": DOWN, "laterality": side}
    down = anatomical_affine(spacing)
    write_nifti(root / "n" / "eye.nii", voxels, spacing, affine=down)
    write_yaml(root / "n" / "eye.yaml", laterality=side)
    micron = np.asarray(spacing) * 1000
    write_nifti(root / "z" / "eye.nii.gz", voxels, tuple(micron), unit="micron", affine=down * 1000)
    write_yaml(root / "z" / "eye.yaml", laterality=side)
    write_ome(root / "o" / "eye.ome.tif", voxels, spacing)
    write_yaml(root / "o" / "eye.yaml", **says)
    write_imagej(root / "j" / "eye.tif", voxels, spacing)
    write_yaml(root / "j" / "eye.yaml", **says)
    write_tiff(root / "t" / "eye.tiff", voxels, compression="zlib")
    write_yaml(root / "t" / "eye.yaml", spacing_mm=list(spacing), num_frames=len(voxels), **says)
    write_folder(root / "images" / "eye", voxels, spacing_mm=list(spacing), **says)
    write_heidelberg(root / "xml" / "eye.xml", voxels, spacing, laterality=side)
    names = "n/eye.nii z/eye.nii.gz o/eye.ome.tif j/eye.tif t/eye.tiff images/eye/ xml/eye.xml"
    return names.split()


def write_lists(root: Path, paths: list[str], device: str, protocol: str, side: str = "") -> None:
    """A manifest and participants of two columns more than needed."""
    rows = [f"1\t/{path}\t{device}\t{protocol}\t{side}" for path in paths]
    header = "person_id\tfilepath\tdevice\tprotocol\tlaterality"
    (root / "manifest.tsv").write_text("\n".join([header, *rows]) + "\n")
    (root / "participants.tsv").write_text("person_id\tstudy_group\tclinical_site\tage\n1\t\t\t\n2\t\t\t\n")


def run_prepare(root: Path, store: Path, *more: str) -> PreparedStore:
    arguments = ["--config", str(SMOKE), "--workers", "0", f"data.gcs_root={root}", f"data.store={store}"]
    arguments += [f"data.manifest_path={root}/manifest.tsv", *more]
    assert prepare.main(arguments) == 0
    return PreparedStore.open(str(store))


def folder_of(root: Path, **sidecar: Any) -> Path:
    return write_folder(root / "folder", speckle(12), **({"spacing_mm": list(SPACING)} | sidecar))


def remove_one(folder: Path) -> None:
    (folder / "oct_7.png").unlink()


def vendor_files() -> dict[str, tuple[bytes, RejectReason]]:
    """Files that hold no more than their mark."""
    e2e = b"CMDb\0\0\0\0\0\0\0\0" + (100).to_bytes(4, "little") + bytes(64)
    fda = b"FOCTFDA" + (2).to_bytes(4, "little") + (1000).to_bytes(4, "little") + bytes(64)
    return {
        "eye.e2e": (e2e, RejectReason.CORRUPT_FILE),
        "eye.vol": (b"HSF-OCT-103\0" + bytes(2036), RejectReason.NOT_A_VOLUME),
        "eye.fda": (fda, RejectReason.MISSING_PIXEL_DATA),
        "eye.fds": (fda.replace(b"FDA", b"FDS"), RejectReason.MISSING_PIXEL_DATA),
        "eye.img": (bytes(range(256)) * 16, RejectReason.MISSING_SHAPE),
    }
