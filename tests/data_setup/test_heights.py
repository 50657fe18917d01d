"""Height maps of the data set: read, linked, laid on the volumes' grid, every mismatch counted by reason."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from data_setup.attach.heights import read_jobs
from data_setup.attach.stored import StoredHeights
from data_setup.phantom.beside import SURFACES_OF
from data_setup.readers.heights import DEPTH_OF_LABEL, NUM_SURFACES, read_heights
from data_setup.resample import plane_weights
from data_setup.store.reader import PreparedStore
from tests.support.heights_factory import OCTA, config, make_tree, prepare_all
from tests.support.octa_faults import HEIGHT_FAULTS, HEIGHT_HABITS, HEIGHT_QUIRKS

PEOPLE = 20
FURTHEST_UM = 150  # at the rim of a cup, where the grid's A-scans average over a cliff


@pytest.fixture(scope="module")
def quirky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every habit in every file, and one file of each fault."""
    root = tmp_path_factory.mktemp("quirky")
    make_tree(root / "tree", PEOPLE, HEIGHT_QUIRKS)
    prepare_all(root)
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    make_tree(root / "tree", len(OCTA))
    prepare_all(root)
    return root


def index_of(root: Path) -> pd.DataFrame:
    return pd.read_parquet(root / "store" / "heights.parquet")


def truth_of(root: Path, uid: str) -> tuple[dict[str, np.ndarray], float]:
    """(surface name -> rows [D, W] in file order, axial mm) of a scan."""
    with np.load(root / "tree" / "truth" / f"{uid}.npz") as arrays:
        names = [str(n) for n in arrays["surface_names"]]
        return dict(zip(names, arrays["surfaces"], strict=True)), float(arrays["spacing_mm"][1])


def in_store(root: Path, row: int) -> tuple[PreparedStore, np.ndarray, tuple[str, ...], pd.Series]:
    store = PreparedStore.open(str(root / "store"))
    heights = StoredHeights.open(str(root / "store"))
    return store, heights.read(row), heights.names(row), store.index.loc[row]


def expected_um(root: Path, record: pd.Series, surface: str) -> np.ndarray:
    """Depth of a surface below the field's middle in um [D, W]: truth of the planes' own B-scans where these
    lie apart, else at the stored A-scans' places, by plain linear interpolation.
    """
    surfaces, axial_mm = truth_of(root, record.sop_instance_uid)
    rows = surfaces[surface][::-1] if record.flipped_d else surfaces[surface]
    rows = rows.astype(float)
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
    _, heights, names, record = in_store(root, row)
    stored = (heights[names.index(label)] + 0.5 - 48 / 2) * record.spacing_after_h * 1000
    d0, d1, w0, w1 = (int(record[f"valid_{e}"]) for e in ("d0", "d1", "w0", "w1"))
    difference = stored - expected_um(root, record, SURFACES_OF[record.device][label])
    inner = difference[d0 + 1 : d1 - 1, w0 + 1 : w1 - 1]
    return np.abs(inner[~np.isnan(inner)])


def test_heights_lie_where_the_truth_does(plain: Path) -> None:
    """Of every protocol, whatever the order of its B-scans; what is left is the smoothing of the grid."""
    index = index_of(plain)
    assert index.status.tolist() == ["kept"] * len(OCTA)
    for row in index.row:
        errors = errors_um(plain, row, "ILM")
        assert len(errors) > 100
        assert np.median(errors) < 4, index.protocol[row]
        assert errors.max() < FURTHEST_UM, index.protocol[row]


def test_quirky_heights_lie_there_too(quirky: Path) -> None:
    """Another grid, holes, permuted labels and reversed B-scans change no surface of the store."""
    index = index_of(quirky)
    kept = index[index.status == "kept"]
    assert set(kept.device) == set(NUM_SURFACES)
    for row, names in zip(kept.row, kept.surfaces, strict=True):
        for label in ("ILM", "RPE", "BM"):
            if label in names.split("|"):
                errors = errors_um(quirky, row, label)
                assert np.median(errors) < 6, (row, label)
                assert errors.max() < FURTHEST_UM, (row, label)


def test_every_fault_is_counted_by_its_reason(quirky: Path) -> None:
    planted = json.loads((quirky / "tree" / "synthetic.json").read_text())["height_faults"]
    assert [one["kind"] for one in planted] == list(HEIGHT_FAULTS)
    report = json.loads((quirky / "store" / "heights_report.json").read_text())
    reasons = [one["expected_reason"] for one in planted if one["expected_reason"]]
    assert report["mismatches"] == {reason: reasons.count(reason) for reason in sorted(reasons)}
    assert report["kept"] == PEOPLE - len(reasons)
    status = index_of(quirky).set_index("path").status.to_dict()
    of_manifest = {"no_segmentation", "scan_not_in_store", "links_disagree"}
    for one in planted:
        if one["expected_reason"] not in of_manifest:
            assert status[one["path"]] == (one["expected_reason"] or "kept"), one


def test_lines_whose_scan_takes_no_map_are_counted(plain: Path, tmp_path: Path) -> None:
    """A second map of a scan, a scan that was rejected, and a device whose maps nobody knows."""
    lines = (plain / "tree" / "retinal_octa" / "manifest.tsv").read_text().splitlines()
    (tmp_path / "m.tsv").write_text("\n".join([*lines, lines[1].replace("_heightmap_", "_other_")]) + "\n")
    store = PreparedStore.open(str(plain / "store"))
    rejected, foreign = store.index.row.tolist()[-2:]
    store.kept = store.kept[store.kept != rejected]
    store.index.loc[foreign, "device"] = "optovue_avanti"
    jobs, reasons = read_jobs(config(plain, f"data.octa_manifest_path={tmp_path / 'm.tsv'}"), store)
    assert reasons == {"second_map": 1, "scan_rejected": 1, "unknown_device": 1}
    assert [job.row for job in jobs] == store.index.row.tolist()[:-2]
    assert not any("_other_" in job.path for job in jobs)


def test_habits_are_noted(quirky: Path) -> None:
    report = json.loads((quirky / "store" / "heights_report.json").read_text())
    index = index_of(quirky)
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


def test_names_follow_depth(quirky: Path) -> None:
    """Surfaces of the store run from the vitreous down, and so do their names."""
    index = index_of(quirky)
    for row in index.row[index.status == "kept"]:
        _, heights, names, _ = in_store(quirky, row)
        assert (np.diff(np.nanmedian(heights, axis=(1, 2))) > 0).all()
        if names[0] != "surface_01":
            assert [DEPTH_OF_LABEL[n] for n in names] == sorted(DEPTH_OF_LABEL[n] for n in names)


def test_the_attributes_name_surfaces_of_devices(plain: Path) -> None:
    attributes = json.loads((plain / "store" / "heights" / "zarr.json").read_text())["attributes"]
    assert attributes["surfaces"] == {device: [list(labels)] for device, labels in SURFACES_OF.items()}
    assert attributes["invalid"] == "NaN"


def test_invalid_values_follow_the_device(quirky: Path, plain: Path, tmp_path: Path) -> None:
    """Cirrus has no height up to 0.5, the others up to -0.5; these numbers themselves are none."""
    last = np.array([-0.5, -0.4, 0.5, 0.6, np.inf], "<f4")
    for path, device in index_of(plain)[["path", "device"]].itertuples(index=False):
        content = (plain / "tree" / path).read_bytes()
        (tmp_path / "map.dcm").write_bytes(content[: -last.nbytes] + last.tobytes())
        values = read_heights(str(tmp_path / "map.dcm"), device).values
        is_cirrus = device == "zeiss_cirrus"
        assert np.isnan(values[-1, -1, -5:]).tolist() == [True, is_cirrus, is_cirrus, False, True]
        assert np.isnan(values).sum() == (4 if is_cirrus else 2)
    kept = index_of(quirky)[lambda t: t.status == "kept"]
    assert "invalid" in HEIGHT_HABITS
    for path, device in kept[["path", "device"]].itertuples(index=False):
        assert np.isnan(read_heights(str(quirky / "tree" / path), device).values[0]).mean() > 0.01


def test_the_config_names_the_manifest(plain: Path) -> None:
    assert config(plain).data.octa_manifest_path == f"{plain / 'tree'}/retinal_octa/manifest.tsv"
