"""Flow cubes and en-face images: read, listed, paired, laid on the volumes' grid, mismatches counted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
import pytest
from scipy.ndimage import zoom

from data_setup import prepare
from data_setup.attach.flow import read_jobs
from data_setup.attach.grid import along_d
from data_setup.attach.jobs import correlation
from data_setup.attach.stored import StoredFlow
from data_setup.index import cli as index_command
from data_setup.phantom.cohort import Scan, make_participants
from data_setup.phantom.files import make_spec, scan_volume, truth_arrays
from data_setup.phantom.flow import SLABS as PHANTOM_SLABS
from data_setup.phantom.flow import flow_of
from data_setup.readers.faults import OCTReadError
from data_setup.readers.octa import EN_FACE, FLOW_CUBE, SLABS, read_octa, slab_of
from data_setup.store.reader import PreparedStore
from tests.support.flow_factory import make_flow_tree, prepare_flow, rows_of
from tests.support.heights_factory import OCTA, words
from tests.support.octa_faults import (
    CUBE_FAULTS,
    FLOW_FAULTS,
    FLOW_HABITS,
    FLOW_QUIRKS,
    IMAGE_FAULTS,
    write_heights,
)
from tests.support.pipeline_factory import SMOKE
from utils.config.load import load_config
from utils.errors import UserError

PEOPLE = 16
SHAPE = (14, 60, 18)
OF_MANIFEST = {"no_flow_cube", "scan_not_in_store", "links_disagree"}


@pytest.fixture(scope="module")
def quirky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every habit in every file, and one scan of each fault."""
    root = tmp_path_factory.mktemp("quirky")
    make_flow_tree(root / "tree", PEOPLE, FLOW_QUIRKS, (0, 1, 2, 4, 5), SHAPE)
    prepare_flow(root)
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scan of a device whose B-scans run from the bottom, and two others."""
    root = tmp_path_factory.mktemp("plain")
    make_flow_tree(root / "tree", 3, (), (0, 2, 5), SHAPE)
    prepare_flow(root)
    return root


def index_of(root: Path) -> pd.DataFrame:
    return pd.read_parquet(root / "store" / "flow.parquet")


def expected(root: Path, row: int) -> np.ndarray:
    """The flow of a row's file in the store's order, by pydicom alone."""
    record = PreparedStore.open(str(root / "store")).index.loc[row]
    cube = pydicom.dcmread(root / "tree" / index_of(root).set_index("row").path[row]).pixel_array
    return cube[::-1] if record.flipped_d else cube


def inside(root: Path, row: int, values: np.ndarray, axes: str) -> np.ndarray:
    record = PreparedStore.open(str(root / "store")).index.loc[row]
    return values[tuple(slice(int(record[f"valid_{a}0"]), int(record[f"valid_{a}1"])) for a in axes)]


def test_flow_lies_where_the_file_has_it(plain: Path) -> None:
    """Each stored cube is most like its own file's, resized by SciPy, in the order of the store."""
    flow = StoredFlow.open(str(plain / "store"))
    assert index_of(plain).status.tolist() == ["kept"] * 3
    assert not index_of(plain).reversed_d.any()
    for row in flow.index.row:
        cube = expected(plain, row)
        own = inside(plain, row, flow.read(row), "dhw").astype(float)
        resized = zoom(
            cube.astype(float), np.array(own.shape) / cube.shape, order=1, grid_mode=True, mode="nearest"
        )
        alike = np.corrcoef(own.mean(axis=2).ravel(), resized.mean(axis=2).ravel())[0, 1]
        other = np.corrcoef(own.mean(axis=2).ravel(), resized[::-1].mean(axis=2).ravel())[0, 1]
        assert alike > 0.95, row
        assert alike > other, row


def require_images(root: Path, row: int, is_reversed: bool = False) -> None:
    """Each stored slab is its file's image, resized by SciPy, in the order of the store."""
    flow, store = StoredFlow.open(str(root / "store")), PreparedStore.open(str(root / "store"))
    record, geometry = store.index.loc[row], store.attrs["geometry"]
    manifest = rows_of(root / "tree" / "retinal_octa" / "manifest.tsv")
    line = next(r for r in manifest if str(r["flow_cube_file_path"]).strip("/") == flow.index.path[row])
    for number, slab in enumerate(SLABS, start=1):
        if slab not in flow.names(row):
            continue
        path = root / "tree" / str(line[f"associated_enface_{number}_file_path"]).strip("/")
        image = pydicom.dcmread(path).pixel_array.astype(float)
        image = image[::-1] if record.flipped_d != is_reversed else image
        own = inside(root, row, flow.read_slabs(row)[slab].astype(float), "dw")
        if record.spacing_before_d > record.spacing_after_d / 2:  # a plane is a B-scan, and not resized
            image = inside(root, row, along_d(len(image), record, geometry).weights @ image, "d")
        field = [int(record[f"shape_before_{a}"]) * float(record[f"spacing_before_{a}"]) for a in "dw"]
        kept = [
            n * float(record[f"spacing_after_{a}"]) / f
            for n, a, f in zip(own.shape, "dw", field, strict=True)
        ]
        cut = [
            round(n * max(0, 1 - share) / 2) * (n != planes)
            for n, share, planes in zip(image.shape, kept, own.shape, strict=True)
        ]
        image = image[cut[0] : image.shape[0] - cut[0], cut[1] : image.shape[1] - cut[1]]
        resized = zoom(image, np.array(own.shape) / image.shape, order=1, grid_mode=True, mode="nearest")
        alike, other = (np.corrcoef(own.ravel(), part.ravel())[0, 1] for part in (resized, resized[::-1]))
        assert alike > max(0.5, other), (row, slab, alike, other)


def test_slabs_are_the_images_that_the_device_shows(plain: Path) -> None:
    flow = StoredFlow.open(str(plain / "store"))
    for row in flow.index.row:
        slabs = flow.read_slabs(row)
        assert tuple(slabs) == SLABS == tuple(PHANTOM_SLABS)
        assert len({image.tobytes() for image in slabs.values()}) == 4
        require_images(plain, row)


def test_quirks_change_no_flow(quirky: Path) -> None:
    """Reversed B-scans, images on another grid and 16 bits: the direction is found, and images follow."""
    flow = StoredFlow.open(str(quirky / "store"))
    index = flow.index
    spectralis = index[index.device == "heidelberg_spectralis"]
    assert len(spectralis)
    assert spectralis.reversed_d.all()
    assert not index[index.device != "heidelberg_spectralis"].reversed_d.any()
    for row in index.row:
        cube = inside(quirky, row, flow.read(row).astype(float), "dhw")
        volume = inside(quirky, row, PreparedStore.open(str(quirky / "store")).read(row), "dhw")
        assert correlation(cube, volume) >= 0.98 * correlation(cube[::-1], volume)
        require_images(quirky, row, bool(index.reversed_d[row]))


def test_every_fault_is_counted_by_its_reason(quirky: Path) -> None:
    planted = json.loads((quirky / "tree" / "synthetic.json").read_text())["flow_faults"]
    assert [one["kind"] for one in planted] == list(FLOW_FAULTS)
    report = json.loads((quirky / "store" / "flow_report.json").read_text())
    assert report["mismatches"] == dict(sorted((reason, 1) for _, _, reason in CUBE_FAULTS.values()))
    assert report["enface_mismatches"] == dict(sorted((reason, 1) for _, _, reason in IMAGE_FAULTS.values()))
    assert report["kept"] == PEOPLE - len(CUBE_FAULTS)
    by_path = index_of(quirky).set_index("path")
    for one in planted:
        if one["kind"] in IMAGE_FAULTS:
            assert by_path.status[one["path"]] == "kept"
            assert by_path.left_out[one["path"]].split("=")[1] == one["expected_reason"]
        elif one["expected_reason"] not in OF_MANIFEST:
            assert by_path.status[one["path"]] == one["expected_reason"], one


@pytest.mark.parametrize("is_cube", [True, False], ids=["cube", "image"])
def test_a_file_of_the_other_eye_is_not_laid(plain: Path, tmp_path: Path, is_cube: bool) -> None:
    """The cube is left out; of an image the cube and the other images stay."""
    store = PreparedStore.open(str(plain / "store"))
    job = read_jobs(load_config(SMOKE, words(plain)[2:]), store)[0][0]
    changed = job.url if is_cube else job.images[1][1]
    ds = pydicom.dcmread(changed)
    assert ds.ImageLaterality == store.index.laterality[job.row]
    ds.ImageLaterality = "L" if ds.ImageLaterality == "R" else "R"
    path = str(tmp_path / "other.dcm")
    ds.save_as(path)
    images = tuple((n, path if url == changed else url) for n, url in job.images)
    arrays, fields = replace(job, url=path if is_cube else job.url, images=images).outcome()
    assert (arrays is None) == is_cube
    if is_cube:
        assert fields["status"] == "header_mismatch"
        assert f"expected laterality {store.index.laterality[job.row]}" in str(fields["message"])
    else:
        assert (fields["status"], fields["left_out"]) == ("kept", "2=header_mismatch")


def test_a_slab_that_is_not_there_is_not_named(quirky: Path) -> None:
    flow = StoredFlow.open(str(quirky / "store"))
    lacking = flow.index[flow.index.left_out == "2=missing_file"].row.item()
    assert flow.names(lacking) == ("superficial", "outer_retina", "choriocapillaris")
    assert set(flow.read_slabs(lacking)) == set(flow.names(lacking))


def test_the_index_lists_octa_files_as_what_they_are(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No flow cube is taken for a structural volume; its table is one that prepare --flow reads."""
    tree = plain / "tree"
    assert index_command.main([str(tree), "--out", str(tmp_path), "--workers", "0"]) == 0
    text = capsys.readouterr().out
    assert f"{EN_FACE} 12, {FLOW_CUBE} 3: of 3 structural volumes" in text
    assert text.splitlines()[-1].startswith("next: ")
    assert len(rows_of(tmp_path / "manifest.tsv")) == 3
    assert not any("retinal_octa/flow" in str(row["filepath"]) for row in rows_of(tmp_path / "left_out.tsv"))
    ours = {row["associated_structural_oct_sop_instance_uid"]: row for row in rows_of(tmp_path / "octa.tsv")}
    theirs = rows_of(tree / "retinal_octa" / "manifest.tsv")
    assert len(ours) == len(theirs) == 3
    for row in theirs:
        own = ours[row["associated_structural_oct_sop_instance_uid"]]
        assert [own[f"associated_enface_{n}_ophthalmic_image_type"] for n in range(1, 5)] == list(SLABS)
        for column in [
            c for c in row if c.startswith(("flow_cube", "associated_enface")) and "type" not in c
        ]:
            assert str(own[column]).strip("/") == str(row[column]).strip("/"), column
        assert own["kinds"] == f"{FLOW_CUBE}, {EN_FACE} 4"
    before = {p.name: p.read_text() for p in (plain / "store" / "flow_rows").iterdir()}
    table = f"data.octa_manifest_path={tmp_path / 'octa.tsv'}"
    assert prepare.main([*words(plain, table), "--workers", "0", "--flow"]) == 0
    assert before == {p.name: p.read_text() for p in (plain / "store" / "flow_rows").iterdir()}


def test_flow_that_no_table_names_any_more_is_in_no_table(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index without OCTA names the older table; a table without a cube empties the store's."""
    scan = next((plain / "tree" / "retinal_oct").rglob("*.dcm"))
    (tmp_path / "scan.dcm").write_bytes(scan.read_bytes())
    older = rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv")
    pd.DataFrame(older).assign(flow_cube_file_path="").to_csv(tmp_path / "octa.tsv", sep="\t", index=False)
    before = (tmp_path / "octa.tsv").read_bytes()
    assert index_command.main([str(tmp_path), "--workers", "0"]) == 0
    assert f"not written: {tmp_path}/octa.tsv: no file of OCTA" in capsys.readouterr().out
    assert (tmp_path / "octa.tsv").read_bytes() == before
    kept, made = index_of(plain), [p.stat().st_mtime_ns for p in (plain / "store" / "flow_rows").iterdir()]
    command = [*words(plain), "--workers", "0", "--flow"]
    try:
        with pytest.raises(UserError, match=r"found none \(no_flow_cube 3\)"):
            prepare.main([*command, f"data.octa_manifest_path={tmp_path / 'octa.tsv'}"])
        assert "flow.parquet of the store: emptied" in capsys.readouterr().out
        assert index_of(plain).empty
    finally:
        assert prepare.main(command) == 0
    pd.testing.assert_frame_equal(index_of(plain), kept)
    assert made == [p.stat().st_mtime_ns for p in (plain / "store" / "flow_rows").iterdir()]


def test_a_cube_without_its_scan_has_a_row_without_it(plain: Path, tmp_path: Path) -> None:
    line = rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv")[0]
    others = rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv")[1]
    for name, path in (
        ("c.dcm", line["flow_cube_file_path"]),
        ("s.dcm", others["associated_structural_oct_file_path"]),
    ):
        (tmp_path / name).write_bytes((plain / "tree" / str(path).strip("/")).read_bytes())
    assert index_command.main([str(tmp_path), "--workers", "0"]) == 0
    (row,) = rows_of(tmp_path / "octa.tsv")
    assert row["flow_cube_file_path"] == "c.dcm"
    assert row["associated_structural_oct_file_path"] == ""


def test_heights_and_flow_share_their_manifest(tmp_path: Path) -> None:
    """Either order of the phantom's options keeps what the other has written about a scan."""
    make_flow_tree(tmp_path, 1, (), (1,), (6, 40, 8))
    (row,) = rows_of(tmp_path / "retinal_octa" / "manifest.tsv")
    assert row["associated_segmentation_type"] == "Heightmap"
    for column in (
        "associated_segmentation_file_path",
        "flow_cube_file_path",
        "associated_enface_4_file_path",
    ):
        assert (tmp_path / str(row[column]).strip("/")).exists(), column
    assert write_heights(tmp_path, rows_of(tmp_path / "retinal_oct" / "manifest.tsv"), (), 0) == []


def test_vessels_of_the_scan_are_those_of_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the truth has a vessel there is flow, none in the vitreous, and tails only below vessels."""
    (participant,) = make_participants(1, 0)
    volume, spacing = scan_volume(participant, Scan(OCTA[5], "R", 0, 0), 0, "small", (24, 48, 96))
    spec = make_spec(participant, Scan(OCTA[5], "R", 0, 0), spacing, 0, "small", "explicit")
    truth = truth_arrays(volume, spec, participant)
    person, side = int(participant.person_id), "R"
    cube = flow_of(truth, person, side, 0)
    assert np.array_equal(cube, flow_of(truth, person, side, 0))
    assert not np.array_equal(cube, flow_of(truth, person, "L", 0))  # each eye has vessels of its own
    peak = cube.max(axis=1)
    assert peak[truth["vessels"]].mean() > 1.3 * peak[~truth["vessels"] & ~truth["disc"]].mean()
    rows = np.arange(cube.shape[1])[None, :, None]
    above = rows < truth["surfaces"][0][:, None, :] - 1
    assert cube[above].mean() < 0.15 * cube[~above].mean() + 6
    monkeypatch.setattr("data_setup.phantom.flow.TAIL", 0.0)
    clean = flow_of(truth, person, side, 0)
    assert clean.astype(int).sum() < cube.astype(int).sum()
    assert (clean <= cube).all()


def test_image_types_of_makers() -> None:
    assert slab_of("Superficial retina vasculature flow") == "superficial"
    assert slab_of("Superficial vascular plexus flow") == "superficial"
    assert slab_of("Deep vascular plexus flow") == "deep"
    assert slab_of("Outer retina vasculature flow") == "outer_retina"
    assert slab_of("Choriocapillaris vasculature flow") == "choriocapillaris"
    assert slab_of("Superficial retina structural reflectance map") is None
    assert slab_of("") is None


def test_values_of_16_bits_are_those_of_8(plain: Path, quirky: Path) -> None:
    """`bits16` writes value x 257; the reader gives the value."""
    assert "bits16" in FLOW_HABITS
    path = index_of(quirky)[lambda t: t.status == "kept"].path.iloc[0]
    _, frames = read_octa(str(quirky / "tree" / path), FLOW_CUBE)
    stored = pydicom.dcmread(quirky / "tree" / path).pixel_array
    assert stored.dtype == np.uint16
    assert np.array_equal(stored, frames.astype(int) * 257)
    structural = rows_of(plain / "tree" / "retinal_oct" / "manifest.tsv")[0]["filepath"]
    with pytest.raises(OCTReadError, match="not_flow_cube"):
        read_octa(str(plain / "tree" / str(structural).strip("/")), FLOW_CUBE)
