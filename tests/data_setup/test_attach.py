"""Height maps and flow on volumes. First both: done once, damaged, absent, which way unclear B-scans run."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
import pytest
from scipy.ndimage import zoom

from data_setup import prepare
from data_setup.attach import flow as attach_flow
from data_setup.attach import heights as attach_heights
from data_setup.attach.flow import CubeJob
from data_setup.attach.grid import along_d
from data_setup.attach.heights import MapJob
from data_setup.attach.jobs import Job, correlation, edge_step, of_protocols, to_turn
from data_setup.attach.stored import Stored, StoredFlow, StoredHeights, StoredLabels
from data_setup.index import cli as index_command
from data_setup.phantom.beside import SURFACES_OF
from data_setup.phantom.cohort import Scan, make_participants
from data_setup.phantom.files import make_spec, scan_volume, truth_arrays
from data_setup.phantom.flow import SLABS as PHANTOM_SLABS
from data_setup.phantom.flow import flow_of
from data_setup.readers.faults import OCTReadError
from data_setup.readers.heights import DEPTH_OF_LABEL, NUM_SURFACES, read_heights
from data_setup.readers.octa import EN_FACE, FLOW_CUBE, SLABS, read_octa, slab_of
from data_setup.resample import plane_weights
from data_setup.store.reader import PreparedStore
from tests.support.heights_factory import OCTA, config, make_flow_tree, make_tree, prepare_all, rows_of, words
from tests.support.octa_faults import (
    CUBE_FAULTS,
    FLOW_FAULTS,
    FLOW_HABITS,
    FLOW_QUIRKS,
    HEIGHT_FAULTS,
    HEIGHT_HABITS,
    HEIGHT_QUIRKS,
    IMAGE_FAULTS,
    write_heights,
)
from utils import storage
from utils.errors import UserError

SHAPE = (14, 60, 18)
STORED: dict[str, type[Stored]] = {"heights": StoredHeights, "labels": StoredLabels, "flow": StoredFlow}
MODES = ["heights", "flow"]
FILE = {"heights": "associated_segmentation_file_path", "flow": "associated_enface_1_file_path"}
LINK = {"heights": "associated_segmentation_file_path", "flow": "flow_cube_file_path"}
NOTHING = {"heights": "no_segmentation 3", "flow": "no_flow_cube 3"}
REMARK = {"heights": "labels of a machine, not truth", "flow": "no measure of speed, and no truth"}
UNCLEAR = {"heights": (MapJob, "edge", 0), "flow": (CubeJob, "fit", 0)}  # scans that do not decide


def lay(root: Path, mode: str, *overrides: str) -> int:
    return prepare.main([*words(root, *overrides), "--workers", "0", f"--{mode}"])


def rows_at(root: Path, mode: str) -> dict[Path, int]:
    """The rows' JSON -> when it was written."""
    return {path: path.stat().st_mtime_ns for path in (root / "store" / STORED[mode].KIND.rows).iterdir()}


def table_of(root: Path, mode: str) -> pd.DataFrame:
    return pd.read_parquet(root / "store" / f"{mode}.parquet")


def unclear(job: type[Job], index: pd.DataFrame) -> pd.Series:
    return job.is_unclear(*(index[name] for name in job.SCORES))


def contents(stored: Stored, row: int) -> list[np.ndarray]:
    images = list(stored.read_slabs(row).values()) if isinstance(stored, StoredFlow) else []
    return [stored.read(row), *images]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    make_flow_tree(root / "tree", 3, (), (0, 2, 5), SHAPE)
    prepare_all(root, mode="flow")
    assert lay(root, "heights") == 0
    return root


@pytest.mark.parametrize("mode", MODES)
def test_another_run_does_nothing_and_a_changed_file_is_done_again(
    plain: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    before = rows_at(plain, mode)
    line = rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv")[1]
    file = plain / "tree" / str(line[FILE[mode]]).strip("/")
    times = file.stat()
    file.write_bytes(file.read_bytes()[:-4] + np.float32(40).tobytes())
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as cp -p of another file leaves it
    assert lay(plain, mode) == 0
    (changed,) = (path for path, time in rows_at(plain, mode).items() if before[path] != time)
    assert f"/{json.loads(changed.read_text())['path']}" == line[LINK[mode]]
    assert REMARK[mode] in capsys.readouterr().out


@pytest.mark.parametrize("mode", MODES)
def test_an_unclear_file_runs_as_the_clear_ones_of_its_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Five Spectralis scans, all reversed: that whose scan says least of it does not keep its file's order.

    The images of a cube follow it. What the clear ones show is kept when the command runs again.
    """
    make_flow_tree(tmp_path / "tree", 5, ("reversed",), (0,), SHAPE, ("reversed",))
    assert prepare.main([*words(tmp_path), "--workers", "0"]) == 0
    assert lay(tmp_path, mode) == 0
    stored = STORED[mode].open(str(tmp_path / "store"))
    before = {row: contents(stored, row) for row in stored.index.row}
    assert stored.index.reversed_d.all()
    job, score, count = UNCLEAR[mode]
    assert unclear(job, stored.index).sum() == count
    ratios = stored.index[f"{score}_reversed"] / stored.index[score].clip(lower=1e-6)
    monkeypatch.setattr(job, "CLEARER", float(ratios.nsmallest(2).mean()))
    for path in rows_at(tmp_path, mode):
        path.unlink()
    for _ in range(2):
        assert lay(tmp_path, mode) == 0
        stored = STORED[mode].open(str(tmp_path / "store"))
        assert unclear(job, stored.index).sum() == 1
        assert stored.index.reversed_d.all()
        for row, values in before.items():
            for again, value in zip(contents(stored, row), values, strict=True):
                np.testing.assert_array_equal(again, value)
    report = json.loads((tmp_path / "store" / f"{mode}_report.json").read_text())
    of_device = report["by_device"]["heidelberg_spectralis"]
    assert (report["notes"]["direction_unclear"] if mode == "heights" else of_device["unclear"]) == 1


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("heights", lambda url: StoredHeights.open(url).read(1)),
        ("flow", lambda url: StoredFlow.open(url).read(1)),
        ("enface", lambda url: StoredFlow.open(url).read_slabs(1)),
    ],
)
def test_a_damaged_chunk_is_an_error(plain: Path, name: str, read: Callable[[str], object]) -> None:
    url, chunk = str(plain / "store"), plain / "store" / name / "c.1.0.0.0"
    content = chunk.read_bytes()
    try:
        chunk.write_bytes((plain / "store" / name / "c.2.0.0.0").read_bytes())
        with pytest.raises(storage.StorageError, match=f"{name} of row 1, found others"):
            read(url)
        chunk.unlink()
        with pytest.raises(storage.StorageError, match=f"{name} of row 1"):
            read(url)
    finally:
        chunk.write_bytes(content)


@pytest.mark.parametrize("mode", STORED)
def test_a_store_without_it_says_how_to_get_it(tmp_path: Path, mode: str) -> None:
    with pytest.raises(UserError, match=rf"run data_setup\.prepare --{mode}"):
        STORED[mode].open(str(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_a_manifest_that_links_nothing_is_an_error(plain: Path, tmp_path: Path, mode: str) -> None:
    before = table_of(plain, mode)
    lines = pd.DataFrame(rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv"))
    lines.assign(**{LINK[mode]: "Not reported"}).to_csv(tmp_path / "m.tsv", sep="\t", index=False)
    with pytest.raises(UserError, match=NOTHING[mode]):
        lay(plain, mode, f"data.octa_manifest_path={tmp_path / 'm.tsv'}")
    assert lay(plain, mode) == 0
    pd.testing.assert_frame_equal(table_of(plain, mode), before)


def test_a_protocol_decides_where_its_clear_rows_agree() -> None:
    def table(*reversed_d: bool, status: str = "kept", devices: str = "aaaaaaaaa") -> pd.DataFrame:
        columns = {"row": range(len(reversed_d)), "status": status, "protocol": "p", "reversed_d": reversed_d}
        return pd.DataFrame({**columns, "device": list(devices[: len(reversed_d)])})

    def last(index: pd.DataFrame) -> dict[int, bool]:
        return to_turn(index, index.row == index.row.max())

    assert last(table(True, True, True, False)) == {3: True}
    assert last(table(False, False, False, True)) == {3: False}
    assert last(table(True, True, True, True)) == {}  # lies there
    assert last(table(True, True, False)) == {}  # of two
    assert last(table(True, True, True, False, False)) == {}  # they disagree
    # what was turned when the others agreed lies as in the file again
    assert last(table(True, True, True, False, True)) == {4: False}
    assert last(table(True, True, True, False, devices="aaab")) == {}  # another scanner's habit
    assert last(table(True, True, True, False, status="no_edge")) == {}
    assert of_protocols(table(True, True, True), pd.Series([False] * 3)) == {("a", "p"): True}


def test_edge_step_of_a_step() -> None:
    volume = np.zeros((2, 20, 3), np.uint8)
    volume[:, 10:] = 100
    assert edge_step(volume, np.full((2, 3), 9.5), 0.02) == pytest.approx(2)
    assert edge_step(volume, np.full((2, 3), 3.0), 0.02) == 0
    assert edge_step(volume, np.full((2, 3), np.nan), 0.02) == -np.inf


# ---- flow cubes and en-face images: read, listed, paired, laid on the grid, mismatches counted
FLOW_PEOPLE = 16
OF_MANIFEST = {"no_flow_cube", "scan_not_in_store", "links_disagree"}


@pytest.fixture(scope="module")
def quirky_flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every habit in every file, and one scan of each fault."""
    root = tmp_path_factory.mktemp("quirky")
    make_flow_tree(root / "tree", FLOW_PEOPLE, FLOW_QUIRKS, (0, 1, 2, 4, 5), SHAPE)
    prepare_all(root, mode="flow")
    return root


def expected(root: Path, row: int) -> np.ndarray:
    """The flow of a row's file in the store's order, by pydicom alone."""
    record = PreparedStore.open(str(root / "store")).index.loc[row]
    cube = pydicom.dcmread(root / "tree" / table_of(root, "flow").set_index("row").path[row]).pixel_array
    return cube[::-1] if record.flipped_d else cube


def inside(root: Path, row: int, values: np.ndarray, axes: str) -> np.ndarray:
    record = PreparedStore.open(str(root / "store")).index.loc[row]
    return values[tuple(slice(int(record[f"valid_{a}0"]), int(record[f"valid_{a}1"])) for a in axes)]


def test_flow_lies_where_the_file_has_it(plain: Path) -> None:
    """Each stored cube is most like its own file's, resized by SciPy, in the order of the store."""
    flow = StoredFlow.open(str(plain / "store"))
    assert table_of(plain, "flow").status.tolist() == ["kept"] * 3
    assert not table_of(plain, "flow").reversed_d.any()
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


def test_quirks_change_no_flow(quirky_flow: Path) -> None:
    """Reversed B-scans, images on another grid and 16 bits: the direction is found, and images follow."""
    flow = StoredFlow.open(str(quirky_flow / "store"))
    index = flow.index
    spectralis = index[index.device == "heidelberg_spectralis"]
    assert len(spectralis)
    assert spectralis.reversed_d.all()
    assert not index[index.device != "heidelberg_spectralis"].reversed_d.any()
    for row in index.row:
        cube = inside(quirky_flow, row, flow.read(row).astype(float), "dhw")
        volume = inside(quirky_flow, row, PreparedStore.open(str(quirky_flow / "store")).read(row), "dhw")
        assert correlation(cube, volume) >= 0.98 * correlation(cube[::-1], volume)
        require_images(quirky_flow, row, bool(index.reversed_d[row]))


def test_every_fault_of_flow_is_counted_by_its_reason(quirky_flow: Path) -> None:
    planted = json.loads((quirky_flow / "tree" / "synthetic.json").read_text())["flow_faults"]
    assert [one["kind"] for one in planted] == list(FLOW_FAULTS)
    report = json.loads((quirky_flow / "store" / "flow_report.json").read_text())
    assert report["mismatches"] == dict(sorted((reason, 1) for _, _, reason in CUBE_FAULTS.values()))
    assert report["enface_mismatches"] == dict(sorted((reason, 1) for _, _, reason in IMAGE_FAULTS.values()))
    assert report["kept"] == FLOW_PEOPLE - len(CUBE_FAULTS)
    by_path = table_of(quirky_flow, "flow").set_index("path")
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
    job = attach_flow.read_jobs(config(plain), store)[0][0]
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


def test_a_slab_that_is_not_there_is_not_named(quirky_flow: Path) -> None:
    flow = StoredFlow.open(str(quirky_flow / "store"))
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
        paths = [c for c in row if c.startswith(("flow_cube", "associated_enface")) and "type" not in c]
        for column in paths:
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
    kept, made = table_of(plain, "flow"), rows_at(plain, "flow")
    command = [*words(plain), "--workers", "0", "--flow"]
    try:
        with pytest.raises(UserError, match=r"found none \(no_flow_cube 3\)"):
            prepare.main([*command, f"data.octa_manifest_path={tmp_path / 'octa.tsv'}"])
        assert "flow.parquet of the store: emptied" in capsys.readouterr().out
        assert table_of(plain, "flow").empty
    finally:
        assert prepare.main(command) == 0
    pd.testing.assert_frame_equal(table_of(plain, "flow"), kept)
    assert made == rows_at(plain, "flow")


def test_a_cube_without_its_scan_has_a_row_without_it(plain: Path, tmp_path: Path) -> None:
    line, other, _ = rows_of(plain / "tree" / "retinal_octa" / "manifest.tsv")
    files = {"c.dcm": line["flow_cube_file_path"], "s.dcm": other["associated_structural_oct_file_path"]}
    for name, path in files.items():
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
    for column in (*LINK.values(), "associated_enface_4_file_path"):
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


def test_values_of_16_bits_are_those_of_8(plain: Path, quirky_flow: Path) -> None:
    """`bits16` writes value x 257; the reader gives the value."""
    assert "bits16" in FLOW_HABITS
    path = table_of(quirky_flow, "flow")[lambda t: t.status == "kept"].path.iloc[0]
    _, frames = read_octa(str(quirky_flow / "tree" / path), FLOW_CUBE)
    stored = pydicom.dcmread(quirky_flow / "tree" / path).pixel_array
    assert stored.dtype == np.uint16
    assert np.array_equal(stored, frames.astype(int) * 257)
    structural = rows_of(plain / "tree" / "retinal_oct" / "manifest.tsv")[0]["filepath"]
    with pytest.raises(OCTReadError, match="not_flow_cube"):
        read_octa(str(plain / "tree" / str(structural).strip("/")), FLOW_CUBE)


# ---- height maps: read, linked, laid on the grid, every mismatch counted by reason
MAP_PEOPLE = 20
FURTHEST_UM = 150  # at the rim of a cup, where the grid's A-scans average over a cliff


@pytest.fixture(scope="module")
def quirky_maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every habit in every file, and one file of each fault."""
    root = tmp_path_factory.mktemp("quirky")
    make_tree(root / "tree", MAP_PEOPLE, HEIGHT_QUIRKS)
    prepare_all(root)
    return root


@pytest.fixture(scope="module")
def every_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    make_tree(root / "tree", len(OCTA))
    prepare_all(root)
    return root


def expected_um(root: Path, record: pd.Series, surface: str) -> np.ndarray:
    """Depth of a surface below the field's middle in um [D, W]: truth of the planes' own B-scans where these
    lie apart, else at the stored A-scans' places, by plain linear interpolation.
    """
    with np.load(root / "tree" / "truth" / f"{record.sop_instance_uid}.npz") as arrays:
        (rows,) = arrays["surfaces"][arrays["surface_names"] == surface].astype(float)  # in file order
        axial_mm = float(arrays["spacing_mm"][1])
    rows = rows[::-1] if record.flipped_d else rows
    for axis, name, target in ((0, "d", 8), (1, "w", 32)):
        count = rows.shape[axis]
        pitch, step = (float(record[f"spacing_{when}_{name}"]) for when in ("before", "after"))
        if name == "d" and pitch > step / 2:
            rows = plane_weights(count, pitch, target, step).weights @ rows
            continue
        own = (np.arange(count) + 0.5 - count / 2) * record[f"spacing_before_{name}"]
        wanted = (np.arange(target) + 0.5 - target / 2) * record[f"spacing_after_{name}"]
        rows = np.apply_along_axis(
            lambda line, own=own, wanted=wanted: np.interp(wanted, own, line), axis, rows
        )
    return (rows + 0.5 - record.shape_before_h / 2) * axial_mm * 1000


def errors_um(root: Path, row: int, label: str) -> np.ndarray:
    """|stored - truth| of one surface where there is a height, inside the field's rim."""
    heights = StoredHeights.open(str(root / "store"))
    record = PreparedStore.open(str(root / "store")).index.loc[row]
    surface = heights.read(row)[heights.names(row).index(label)]
    stored = (surface + 0.5 - 48 / 2) * record.spacing_after_h * 1000
    d0, d1, w0, w1 = (int(record[f"valid_{e}"]) for e in ("d0", "d1", "w0", "w1"))
    difference = stored - expected_um(root, record, SURFACES_OF[record.device][label])
    inner = difference[d0 + 1 : d1 - 1, w0 + 1 : w1 - 1]
    return np.abs(inner[~np.isnan(inner)])


def test_heights_lie_where_the_truth_does(every_map: Path) -> None:
    """Of every protocol, whatever the order of its B-scans; what is left is the smoothing of the grid."""
    index = table_of(every_map, "heights")
    assert index.status.tolist() == ["kept"] * len(OCTA)
    for row in index.row:
        errors = errors_um(every_map, row, "ILM")
        assert len(errors) > 100
        assert np.median(errors) < 4, index.protocol[row]
        assert errors.max() < FURTHEST_UM, index.protocol[row]


def test_quirky_heights_lie_there_too(quirky_maps: Path) -> None:
    """Another grid, holes, permuted labels and reversed B-scans change no surface of the store."""
    index = table_of(quirky_maps, "heights")
    kept = index[index.status == "kept"]
    assert set(kept.device) == set(NUM_SURFACES)
    for row, names in zip(kept.row, kept.surfaces, strict=True):
        for label in ("ILM", "RPE", "BM"):
            if label in names.split("|"):
                errors = errors_um(quirky_maps, row, label)
                assert np.median(errors) < 6, (row, label)
                assert errors.max() < FURTHEST_UM, (row, label)


def test_every_fault_of_a_map_is_counted_by_its_reason(quirky_maps: Path) -> None:
    planted = json.loads((quirky_maps / "tree" / "synthetic.json").read_text())["height_faults"]
    assert [one["kind"] for one in planted] == list(HEIGHT_FAULTS)
    report = json.loads((quirky_maps / "store" / "heights_report.json").read_text())
    reasons = [one["expected_reason"] for one in planted if one["expected_reason"]]
    assert report["mismatches"] == {reason: reasons.count(reason) for reason in sorted(reasons)}
    assert report["kept"] == MAP_PEOPLE - len(reasons)
    status = table_of(quirky_maps, "heights").set_index("path").status.to_dict()
    of_manifest = {"no_segmentation", "scan_not_in_store", "links_disagree"}
    for one in planted:
        if one["expected_reason"] not in of_manifest:
            assert status[one["path"]] == (one["expected_reason"] or "kept"), one


def test_lines_whose_scan_takes_no_map_are_counted(every_map: Path, tmp_path: Path) -> None:
    """A second map of a scan, a scan that was rejected, and a device whose maps nobody knows."""
    lines = (every_map / "tree" / "retinal_octa" / "manifest.tsv").read_text().splitlines()
    (tmp_path / "m.tsv").write_text("\n".join([*lines, lines[1].replace("_heightmap_", "_other_")]) + "\n")
    store = PreparedStore.open(str(every_map / "store"))
    rejected, foreign = store.index.row.tolist()[-2:]
    store.kept = store.kept[store.kept != rejected]
    store.index.loc[foreign, "device"] = "optovue_avanti"
    cfg = config(every_map, f"data.octa_manifest_path={tmp_path / 'm.tsv'}")
    jobs, reasons = attach_heights.read_jobs(cfg, store)
    assert reasons == {"second_map": 1, "scan_rejected": 1, "unknown_device": 1}
    assert [job.row for job in jobs] == store.index.row.tolist()[:-2]
    assert not any("_other_" in job.path for job in jobs)


def test_habits_are_noted(quirky_maps: Path) -> None:
    report = json.loads((quirky_maps / "store" / "heights_report.json").read_text())
    index = table_of(quirky_maps, "heights")
    kept = index[index.status == "kept"]
    assert report["notes"]["placeholder_class"] == len(kept)
    is_topcon = kept.device.str.startswith("topcon")
    has_labels = ~kept.notes.str.contains("no_labels")
    assert report["notes"]["labels_in_another_order"] == (is_topcon & has_labels).sum()
    spectralis = kept[kept.device == "heidelberg_spectralis"]
    assert len(spectralis)
    assert spectralis.reversed_d.all()
    assert not kept[kept.device != "heidelberg_spectralis"].reversed_d.any()
    assert (kept.map_d < 22).all()


def test_names_follow_depth(quirky_maps: Path) -> None:
    """Surfaces of the store run from the vitreous down, and so do their names."""
    heights = StoredHeights.open(str(quirky_maps / "store"))
    for row in heights.index.row:
        names = heights.names(row)
        assert (np.diff(np.nanmedian(heights.read(row), axis=(1, 2))) > 0).all()
        if names[0] != "surface_01":
            assert [DEPTH_OF_LABEL[n] for n in names] == sorted(DEPTH_OF_LABEL[n] for n in names)


def test_the_attributes_name_surfaces_of_devices(every_map: Path) -> None:
    attributes = json.loads((every_map / "store" / "heights" / "zarr.json").read_text())["attributes"]
    assert attributes["surfaces"] == {device: [list(labels)] for device, labels in SURFACES_OF.items()}
    assert attributes["invalid"] == "NaN"


def test_invalid_values_follow_the_device(quirky_maps: Path, every_map: Path, tmp_path: Path) -> None:
    """Cirrus has no height up to 0.5, the others up to -0.5; these numbers themselves are none."""
    last = np.array([-0.5, -0.4, 0.5, 0.6, np.inf], "<f4")
    for path, device in table_of(every_map, "heights")[["path", "device"]].itertuples(index=False):
        content = (every_map / "tree" / path).read_bytes()
        (tmp_path / "map.dcm").write_bytes(content[: -last.nbytes] + last.tobytes())
        values = read_heights(str(tmp_path / "map.dcm"), device).values
        is_cirrus = device == "zeiss_cirrus"
        assert np.isnan(values[-1, -1, -5:]).tolist() == [True, is_cirrus, is_cirrus, False, True]
        assert np.isnan(values).sum() == (4 if is_cirrus else 2)
    kept = table_of(quirky_maps, "heights")[lambda t: t.status == "kept"]
    assert "invalid" in HEIGHT_HABITS
    for path, device in kept[["path", "device"]].itertuples(index=False):
        assert np.isnan(read_heights(str(quirky_maps / "tree" / path), device).values[0]).mean() > 0.01


def test_tables_of_flow_and_of_maps_have_a_row_for_each_device(
    quirky_flow: Path, quirky_maps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are printed, with a bar between columns."""
    assert lay(quirky_flow, "flow") == lay(quirky_maps, "heights") == 0
    text = re.sub("  +", "|", capsys.readouterr().out)
    assert [line for line in text.splitlines() if "|" in line] == [
        "device|cubes|fit|reversed|unclear|en-face images",
        "heidelberg_spectralis|1|0.78|1|0|superficial 1, deep 1, outer_retina 1, choriocapillaris 1",
        "topcon_maestro2|1|0.77|0|1|superficial 1, deep 0, outer_retina 1, choriocapillaris 1",
        "topcon_triton|1|0.73|0|0|superficial 0, deep 1, outer_retina 1, choriocapillaris 1",
        "zeiss_cirrus|2|0.76|0|1|superficial 1, deep 2, outer_retina 1, choriocapillaris 2",
        "device|maps|valid|reversed|surfaces, from the vitreous down",
        "heidelberg_spectralis|1|0.98|1|ILM RNFL GCL IPL INL OPL ELM PR1 PR2 RPE BM",
        "topcon_maestro2|1|0.98|0|ILM RNFL/GCL GCL IPL/INL OPL ELM IS/OS OS/RPE BM",
        "topcon_triton|2|0.99|0|ILM RNFL/GCL GCL IPL/INL OPL ELM IS/OS OS/RPE BM CSI; "
        + " ".join(f"surface_{number:02d}" for number in range(1, 11)),
        "zeiss_cirrus|2|0.97|0|ILM RPE",
    ]
    assert "\nen-face images that are not used: missing_file 1, not_en_face 1, other_field 1" in text
    assert "\nnoted: frames_not_by_depth 1, labels_in_another_order 2, no_labels 1" in text
