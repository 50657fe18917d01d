"""A good tree is kept whole: its volumes, their statistics, eyes and spacings."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_setup.prepare import main
from data_setup.store.format import checksum
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import summarise, table
from data_setup.store.writer import StoreWriter
from tests.data_setup.prepare.runs import arguments, dicoms
from tests.support.pipeline_factory import ROOT

REAL = ROOT.parent / "shared" / "data" / "real_oct"


def test_a_good_tree_is_kept_whole(tree: Path, clean: Path) -> None:
    store = PreparedStore.open(str(clean))
    assert len(store.kept) == len(dicoms(tree)) == len(store.index)
    assert store.attrs["synthetic"] is True
    assert store.attrs["source_root"] == str(tree)
    assert all(checksum(store.read(row)) == store.index.checksum[row] for row in store.kept)
    assert store.index.person_id.is_monotonic_increasing
    report = json.loads((clean / "prepare_report.json").read_text())
    assert report["kept"] == len(store.kept)
    assert report["rejected"] == {}
    assert sum(report["spacing_source"].values()) == len(store.kept)
    assert sum(report["orientation_source"].values()) == len(store.kept)
    assert report["run"]["prepared"] == len(store.kept)
    assert {p["kept"] for p in report["by_protocol"].values()} <= set(range(1, 20))
    assert sum(d["kept"] for d in report["by_device"].values()) == len(store.kept)


def test_the_voxels_outside_the_box_are_zero_and_statistics_are_of_those_inside(clean: Path) -> None:
    store = PreparedStore.open(str(clean))
    padded = [r for r in store.kept if store.index.valid_fraction[r] < 1]
    assert padded
    for row in padded:
        voxels = store.read(row)
        box = store.index.loc[row, [f"valid_{a}{i}" for a in "dhw" for i in "01"]].to_numpy(int)
        inside = np.zeros(voxels.shape, bool)
        inside[tuple(slice(*pair) for pair in box.reshape(3, 2))] = True
        assert not voxels[~inside].any()
        assert store.index.intensity_mean[row] == pytest.approx(voxels[inside].mean(dtype=np.float64))
        assert store.index.intensity_std[row] == pytest.approx(voxels[inside].std(dtype=np.float64))
        assert store.index.valid_fraction[row] == pytest.approx(inside.mean())


def test_laterality_comes_from_the_header_when_the_manifest_has_none(own_tree: Path, tmp_path: Path) -> None:
    manifest, store = own_tree / "retinal_oct" / "manifest.tsv", tmp_path / "store"
    header, line, *_ = [line.split("\t") for line in manifest.read_text().splitlines()]
    side, path = line[header.index("laterality")], line[header.index("filepath")]
    assert f"_{side.lower()}_" in path
    line[header.index("laterality")] = "Not reported"
    line[header.index("filepath")] = path.replace(f"_{side.lower()}_", "_unknown_laterality_")
    (own_tree / path.lstrip("/")).rename(own_tree / line[header.index("filepath")].lstrip("/"))
    manifest.write_text("\t".join(header) + "\n" + "\t".join(line) + "\n")
    main(arguments(own_tree, store))
    assert StoreWriter(str(store)).read_records()[0]["laterality"] == "unknown"
    assert PreparedStore.open(str(store)).index.laterality.to_list() == [side]


def test_the_report_tells_spacing_and_warns_of_an_empty_grid(clean: Path) -> None:
    store = PreparedStore.open(str(clean))
    protocol = store.index.protocol[0]
    report = json.loads((clean / "prepare_report.json").read_text())
    of_protocol = [json.loads(p.read_text()) for p in sorted((clean / "rows").iterdir())]
    of_protocol = [f for f in of_protocol if f["record"]["protocol"] == protocol]
    for when in ("before", "after"):
        columns = [[f[f"spacing_{when}_{a}"] for f in of_protocol] for a in "dhw"]
        expected = [round(float(np.median(c)), 6) for c in columns]
        assert report["by_protocol"][protocol][f"spacing_{when}"] == expected
    assert (
        report["by_protocol"][protocol]["spacing_before"] != report["by_protocol"][protocol]["spacing_after"]
    )

    def warnings(fraction: float) -> list[str]:
        index = store.index.copy()
        index.loc[index.protocol == protocol, "valid_fraction"] = fraction
        index.loc[index.protocol != protocol, "valid_fraction"] = 1.0
        index["lost_fraction"] = 0.5  # not more than half
        changed = summarise(index, store.attrs, {}, report["run"])
        return [
            line
            for line in table(changed).splitlines()
            if line.startswith("warning: ") and ": left out, " not in line
        ]

    assert warnings(0.6) == []
    (line,) = warnings(0.59)
    assert line.startswith(f"warning: {protocol}: only 59% of the grid lies inside the scan")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real eyes are not on this machine")
def test_the_real_eyes(tmp_path: Path) -> None:
    store = tmp_path / "store"
    manifest = f"data.manifest_path={REAL / 'retinal_oct' / 'manifest.tsv'}"
    assert main(arguments(REAL, store, manifest)) == 0
    prepared = PreparedStore.open(str(store))
    assert prepared.kept.tolist() == [0, 1]
    assert prepared.attrs["synthetic"] is False
    assert prepared.index.device.to_list() == ["heidelberg_spectralis", "topcon_triton"]
    assert prepared.index.split.to_list() == ["train", "val"]
    assert (prepared.index.intensity_std > 10).all()
    field = [145 * 0.0298, 496 * 0.003872, 512 * 0.011182]
    valid = [prepared.index[f"valid_{a}1"][0] - prepared.index[f"valid_{a}0"][0] for a in "dhw"]
    expected = [f / s for f, s in zip(field, (0.375, 0.024, 0.09375), strict=True)]
    assert np.abs(np.array(valid) - expected).max() <= 1
