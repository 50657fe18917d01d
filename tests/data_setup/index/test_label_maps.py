"""Masks and label maps in a tree: no eyes, and paired with the scans that they are of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data_setup.importers.reading import SPACING
from tests.data_setup.index.trees import index, table
from tests.support.dicom_factory import speckle
from tests.support.import_factory import write_images, write_nifti, write_yaml

LABELS = speckle() // 64


def nnunet(root: Path) -> dict[str, str]:
    for n in range(3):
        write_nifti(root / f"imagesTr/case_{n:03d}_0000.nii.gz", speckle(seed=n), SPACING)
        write_nifti(root / f"labelsTr/case_{n:03d}.nii.gz", LABELS, SPACING)
    return {f"imagesTr/case_{n:03d}_0000.nii.gz": f"labelsTr/case_{n:03d}.nii.gz" for n in range(3)}


def folders_of_images(root: Path) -> dict[str, str]:
    for n in range(2):
        write_images(root / f"P{n}/images", speckle(seed=n))
        write_images(root / f"P{n}/masks", LABELS * 80)
    return {f"P{n}/images": f"P{n}/masks" for n in range(2)}


def folders_of_eyes(root: Path) -> dict[str, str]:
    for n in range(2):
        write_images(root / f"images/eye_{n}", speckle(seed=n))
        write_images(root / f"masks/eye_{n}", LABELS)
    return {f"images/eye_{n}": f"masks/eye_{n}" for n in range(2)}


def beside_each_other(root: Path) -> dict[str, str]:
    write_nifti(root / "1001/OD.nii.gz", speckle(), SPACING)
    write_nifti(root / "1001/OD_seg.nii.gz", (LABELS > 1).astype(np.int16), SPACING)
    return {"1001/OD.nii.gz": "1001/OD_seg.nii.gz"}


def without_a_scan(root: Path) -> dict[str, str]:
    """Packed very small, by no name: a question of its voxels; of another size it is of no scan here."""
    write_nifti(root / "1001/OD.nii.gz", speckle(), SPACING)
    write_nifti(root / "1002/OD.nii.gz", np.repeat(np.repeat(LABELS[:, :4, :4], 40, 1), 40, 2), SPACING)
    return {"1001/OD.nii.gz": ""}


def scans_in_a_folder_of_masks(root: Path) -> dict[str, str]:
    write_nifti(root / "masks/1001_OD.nii.gz", speckle(), SPACING)
    return {"masks/1001_OD.nii.gz": ""}


@pytest.mark.parametrize(
    ("before", "behind", "key"),
    [(0.4, 0, "columns: [0.4, 1]"), (0, 0.4, "columns: [0, 0.6]"), (0, 0, None), ("black", 0, None)],
)
def test_a_localizer_beside_every_b_scan_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: float | str, behind: float, key: str | None
) -> None:
    voxels, picture = speckle(6, 40, 60), speckle(1, 40, 40, seed=9)[0]
    parts = [voxels[:, :, :60]]
    if before:
        parts.insert(0, np.broadcast_to(picture * (before != "black"), (6, 40, 40)))
    if behind:
        parts.append(np.broadcast_to(picture, (6, 40, 40)))
    images = np.concatenate(parts, axis=2)
    images[2, 5:7, :40] = images[2, 5:7, :40] // 2  # a line on it says where the B-scan is
    write_images(tmp_path / "1001" / "OD", images)
    index(tmp_path)
    text = capsys.readouterr().out
    assert (f"1001/OD: a localizer beside every B-scan? `{key}`" in text) == (key is not None), text
    assert ("a localizer beside" in text) == (key is not None)
    write_yaml(tmp_path / "1001" / "OD" / "volume.yaml", columns=[0.4, 1.0])
    index(tmp_path)
    assert "a localizer beside" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "write",
    [
        nnunet,
        folders_of_images,
        folders_of_eyes,
        beside_each_other,
        without_a_scan,
        scans_in_a_folder_of_masks,
    ],
)
def test_label_maps_are_no_eyes(tmp_path: Path, write: Callable[[Path], dict[str, str]]) -> None:
    pairs = write(tmp_path)
    write_yaml(tmp_path / "volume.yaml", spacing_mm=list(SPACING))
    assert index(tmp_path) == 0
    rows = table(tmp_path / "manifest.tsv")
    assert {path: row.get("label_volume", "") for path, row in rows.items()} == pairs
    left_out = table(tmp_path / "left_out.tsv") if (tmp_path / "left_out.tsv").exists() else {}
    assert {v for v in pairs.values() if v} <= set(left_out)
    assert {row["reason"] for row in left_out.values()} <= {"few_grey_levels", "unsupported_pixels"}
    assert not {"masks", "labelsTr"} & {row["person_id"] for row in rows.values()} or not left_out
