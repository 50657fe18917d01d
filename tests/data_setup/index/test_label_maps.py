"""Masks and label maps in a tree: no eyes, and paired with the scans that they are of."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.uid import ExplicitVRLittleEndian, RLELossless
from scipy.ndimage import gaussian_filter, median_filter

from data_setup.phantom.cohort import make_participants
from data_setup.phantom.files import scan_volume
from tests.data_setup.importers.reading import SPACING
from tests.data_setup.index.trees import index, table
from tests.support.dicom_factory import speckle, write_opt
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
    pairs = {"1001/OD.nii.gz": "1001/OD_seg.nii.gz"}
    for n, word in enumerate(("lbl", "consensus", "annot", "Grader"), 1002):
        write_nifti(root / f"{n}/OD.nii.gz", speckle(seed=n), SPACING)
        write_nifti(root / f"{n}/OD_{word}.nii.gz", LABELS, SPACING)
        pairs[f"{n}/OD.nii.gz"] = f"{n}/OD_{word}.nii.gz"
    return pairs


def without_a_scan(root: Path) -> dict[str, str]:
    """Packed very small, by no name: a question of its voxels; of another size it is of no scan here."""
    write_nifti(root / "1001/OD.nii.gz", speckle(), SPACING)
    write_nifti(root / "1002/OD.nii.gz", np.repeat(np.repeat(LABELS[:, :4, :4], 40, 1), 40, 2), SPACING)
    return {"1001/OD.nii.gz": ""}


def names_with_words_around(root: Path) -> dict[str, str]:
    write_images(root / "B-scans/eye_1", speckle())
    write_images(root / "annotated_masks/eye_1", LABELS)
    write_images(root / "P2/bscan", speckle(seed=2))
    write_images(root / "P2/annotated_masks", LABELS)
    write_images(root / "images/eye_3", speckle(seed=3))
    write_images(root / "retina_masks/eye_3", LABELS)
    write_nifti(root / "P4/oct.nii", speckle(seed=4), SPACING)
    write_nifti(root / "P4/masks.nii", LABELS, SPACING)
    return {
        "B-scans/eye_1": "annotated_masks/eye_1",
        "P2/bscan": "P2/annotated_masks",
        "images/eye_3": "retina_masks/eye_3",
        "P4/oct.nii": "P4/masks.nii",
    }


def a_smooth_scan(root: Path) -> dict[str, str]:
    """Equal neighbours, as after a median filter, but as many grey levels as a scan has."""
    write_nifti(root / "P1/oct.nii.gz", speckle(), SPACING)
    write_nifti(root / "P1/target.nii.gz", speckle()[:, :, :3].repeat(12, axis=2), SPACING)
    return {"P1/oct.nii.gz": "", "P1/target.nii.gz": ""}


def other_words(root: Path) -> dict[str, str]:
    """And forty classes, which are as many grey levels as a dull scan has."""
    write_images(root / "input/Meier_1", speckle())
    write_images(root / "ManualSegmentation/Meier_1", LABELS)
    write_images(root / "Schulz_scans/1", speckle(seed=2))
    write_images(root / "Weber_contours/1", LABELS)  # of nobody here
    write_nifti(root / "P4/oct.nii.gz", speckle(seed=4), SPACING)
    np.save(root / "P5_manual.npy", speckle())  # axes unknown: no word here says more
    many = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None] * 5, (6, 40, 36))
    write_nifti(root / "P4/oct_layers.nii.gz", many, SPACING)
    return {
        "input/Meier_1": "ManualSegmentation/Meier_1",
        "Schulz_scans/1": "",
        "P4/oct.nii.gz": "P4/oct_layers.nii.gz",
        "P5_manual.npy": "",
    }


def layers() -> np.ndarray:
    below = np.arange(120)[:, None] - 8 * np.sin(np.arange(160) / 12)
    return np.digitize(below, (30, 50, 80)).astype(np.uint8) * np.ones((4, 1, 1), np.uint8)


def of_jpeg(root: Path) -> dict[str, str]:
    """Rings of JPEG make hundreds of grey values of a few: no scan, and no classes to read either."""
    for n, masks in enumerate((layers() // 2 * 255, layers() * 80)):
        write_images(root / f"P{n}/images", speckle(4, 120, 160, seed=n))
        write_images(root / f"P{n}/masks", masks, "jpg")
    return {f"P{n}/images": "" for n in range(2)}


def without_a_name(root: Path) -> dict[str, str]:
    """Exact, in JPEG and as probabilities: what the voxels alone say, of files packed or not."""
    write_nifti(root / "P1/OD.nii", speckle(4, 120, 160), SPACING)
    for name, voxels in {"8bits": layers(), "16bits": layers().astype(np.uint16)}.items():
        write_nifti(root / f"P1/{name}.nii", voxels, SPACING)
        np.save(root / f"P1/{name}.npy", voxels)
    write_images(root / "P1/png", layers() * 80)
    write_images(root / "P1/jpg", layers() // 2 * 255, "jpg")
    soft = gaussian_filter(layers() // 2 * 1.0, (0, 1, 1)).astype(np.float32)
    for name in ("soft.nii", "soft.nii.gz"):
        write_nifti(root / "P2" / name, soft, SPACING)
    write_yaml(root / "P2/volume.yaml", value_range=[0, 1])
    write_opt(root / "P3", 0 * speckle(), name="black.dcm")  # prepare says what it is
    write_nifti(root / "P4/black.nii", 0 * speckle(), SPACING)
    return {"P1/OD.nii": "", "P3/black.dcm": "", "P4/black.nii": ""}


def eyes_of_any_brightness(root: Path) -> dict[str, str]:
    person = make_participants(1, 0)[0]
    voxels = scan_volume(person, person.scans[0], 0, "small")[0].voxels[::8].astype(float)
    smooth, middle = median_filter(voxels, (1, 5, 5)), np.median(voxels)
    changed = {"dark": 0.15 * voxels, "smooth": smooth, "dim": 0.15 * smooth, "saturated": 4 * voxels}
    changed |= {"cut": voxels * (voxels > middle), "steep": 4 * (smooth - middle)}
    for name, values in changed.items():
        write_nifti(root / name / "OD.nii", np.clip(values, 0, 255).astype(np.uint8), SPACING)
        write_images(root / name / "OS", np.clip(values, 0, 255).astype(np.uint8), "jpg")
        write_opt(root / name, np.clip(values, 0, 255).astype(np.uint8), name="OD.dcm", syntax=RLELossless)
    return {f"{name}/{eye}": "" for name in changed for eye in ("OD.nii", "OS", "OD.dcm")}


def of_dicom(root: Path) -> dict[str, str]:
    write_opt(root, speckle())
    mask = (LABELS > 1).astype(np.uint8) * 255
    named = {"labels/eye.dcm": LABELS, "eye_mask.dcm": LABELS, "masks/eye.dcm": mask}
    unnamed = {"eye_2.dcm": layers(), "eye_3": layers() // 2 * 255, "1.2.8": layers().astype(np.uint16)}
    for name, voxels in {**named, **unnamed, "eye_4.ima": layers() * 80}.items():
        (root / name).parent.mkdir(exist_ok=True)
        syntax = RLELossless if name == "eye_4.ima" else ExplicitVRLittleEndian
        Path(write_opt(root / "written", voxels, syntax=syntax)).rename(root / name)
    return {Path(write_opt(root, speckle())).name: ""}


def scans_in_a_folder_of_masks(root: Path) -> dict[str, str]:
    write_nifti(root / "masks/1001_OD.nii.gz", speckle(), SPACING)
    below = speckle() // 2
    below[:, :28] = 0  # black above
    write_images(root / "masks/1002_OD", below, "jpg")
    return {"masks/1001_OD.nii.gz": "", "masks/1002_OD": ""}


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
        *(nnunet, folders_of_images, folders_of_eyes, beside_each_other, without_a_scan),
        *(names_with_words_around, other_words, a_smooth_scan, of_jpeg, of_dicom),
        *(scans_in_a_folder_of_masks, without_a_name, eyes_of_any_brightness),
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
    words = {row["message"].partition("(")[2].split()[0] for row in left_out.values()}
    assert words <= ({"label_volume", "no"} if any(pairs.values()) else {"of", "no", "label"}), words
    assert not {"masks", "labelsTr"} & {row["person_id"] for row in rows.values()} or not left_out
