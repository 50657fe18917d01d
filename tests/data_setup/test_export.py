"""data_setup/export: what is written is read back by this project's own readers as it was."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import tifffile

from data_setup.export.__main__ import main as export
from data_setup.store.reader import PreparedStore
from tests.data_setup.importers.reading import GRID, SPACING, read, run_prepare
from tests.support.dicom_factory import speckle
from tests.support.import_factory import anatomical_affine, write_nifti, write_yaml
from utils.errors import UserError

ENDINGS = {"nifti": ".nii.gz", "ome-tiff": ".ome.tif"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three originals (frames downwards, upwards, unknown which) and a store of them."""
    root = tmp_path_factory.mktemp("export") / "tree"
    for name, affine, facts in (
        ("down", anatomical_affine(SPACING), {"laterality": "R"}),
        ("up", anatomical_affine(SPACING, downwards=False), {"laterality": "L"}),
        ("either", anatomical_affine(SPACING), {"d_order": "unknown"}),
    ):
        write_nifti(root / "n" / f"{name}.nii.gz", speckle(8), SPACING, affine=affine)
        write_yaml(root / "n" / f"{name}.yaml", **facts)
    rows = [f"1\tn/{n}.nii.gz\tbioptigen\tcube\t" for n in ("down", "up", "either")]
    lines = ["person_id\tfilepath\tdevice\tprotocol\tlaterality", *rows]
    (root / "manifest.tsv").write_text("\n".join(lines) + "\n")
    run_prepare(root, root.parent / "store", *GRID)
    return root


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("name", ["down", "up", "either"])
def test_an_original_comes_back_equal(tree: Path, tmp_path: Path, name: str, kind: str) -> None:
    source = tree / "n" / f"{name}.nii.gz"
    expected, voxels = read(source)
    arguments = [
        "--source",
        f"{tree}/manifest.tsv",
        f"n/{name}.nii.gz",
        "--format",
        kind,
        "--out",
        str(tmp_path),
    ]
    assert export(arguments) == 0
    header, actual = read(tmp_path / f"n__{name}{ENDINGS[kind]}", device="bioptigen", protocol="cube")
    assert np.array_equal(actual, voxels)
    assert header.spacing_mm == pytest.approx(expected.spacing_mm, rel=1e-6)
    assert header.laterality == expected.laterality
    is_known = [h.orientation_source != "unknown" for h in (expected, header)]
    assert is_known == [name != "either"] * 2


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_row_of_a_store_comes_back_equal(tree: Path, tmp_path: Path, kind: str) -> None:
    url = str(tree.parent / "store")
    store = PreparedStore.open(url)
    assert export([url, "0", "2", "--format", kind, "--out", str(tmp_path)]) == 0
    for row in (0, 2):
        header, actual = read(
            tmp_path / f"row_{row:06d}{ENDINGS[kind]}", device="unknown", protocol="unknown"
        )
        assert np.array_equal(actual, store.read(row))
        assert header.spacing_mm == pytest.approx((0.1, 0.01, 0.1), rel=1e-6)
        assert header.laterality == store.index.laterality[row]


def test_other_libraries_see_the_same_axes(tree: Path, tmp_path: Path) -> None:
    voxels = read(tree / "n" / "up.nii.gz")[1]
    for kind in ENDINGS:
        export(["--source", f"{tree}/manifest.tsv", "n/up.nii.gz", "--format", kind, "--out", str(tmp_path)])
    image = nib.as_closest_canonical(
        nib.load(tmp_path / "n__up.nii.gz")
    )  # grows to right, anterior, superior
    assert np.array_equal(np.asarray(image.dataobj)[::-1, ::-1, ::-1].transpose(2, 1, 0), voxels)
    with tifffile.TiffFile(tmp_path / "n__up.ome.tif") as tiff:
        assert tiff.is_ome
        assert np.array_equal(tiff.asarray(), voxels)


def test_the_same_volume_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    for kind, ending in ENDINGS.items():
        for out in ("a", "b"):
            export([str(tree.parent / "store"), "0", "--format", kind, "--out", str(tmp_path / out)])
        assert (tmp_path / "a" / f"row_000000{ending}").read_bytes() == (
            tmp_path / "b" / f"row_000000{ending}"
        ).read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["STORE", "9"], r"expected a row out of 0\.\.2, found 9"),
        (["STORE", "one"], "expected rows as whole numbers, found 'one'"),
        (["STORE"], "found no row"),
        (["STORE", "0", "--root", "x"], "expected it with --source"),
        (["--source", "MANIFEST", "n/none.nii"], "expected a filepath of the table, found 'n/none.nii'"),
    ],
)
def test_mistakes_are_one_line(tree: Path, tmp_path: Path, words: list[str], message: str) -> None:
    places = {"STORE": str(tree.parent / "store"), "MANIFEST": f"{tree}/manifest.tsv"}
    arguments = [places.get(word, word) for word in words]
    with pytest.raises(UserError, match=message):
        export([*arguments, "--format", "nifti", "--out", str(tmp_path)])


def test_no_file_is_written_over(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "row_000000.yaml").write_text("mine")
    with pytest.raises(UserError, match="expected no other file, found one"):
        export([str(tree.parent / "store"), "0", "--format", "nifti", "--out", str(tmp_path)])
    assert [p.name for p in tmp_path.iterdir()] == ["row_000000.yaml"]
