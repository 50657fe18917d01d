"""Which scans a command line means, and the tables of a study: thickness, foveas, agreement."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pydicom
import pytest

from data_setup.index.visit import visit_date_of
from data_setup.manifest import unknown_record
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.heights import HEIGHT_MAP_CLASS
from data_setup.readers.octa import FLOW_CLASS
from data_setup.resample import NEAREST
from finetuning.dense.layers.etdrs import SECTORS
from finetuning.dense.layers.kind import by_eye
from finetuning.dense.layers.volumes import layers_of
from finetuning.embedding.scans import Places, Scan, find_scans, version_of
from finetuning.embedding.volumes import Reject, ScanFile, Volume
from finetuning.prediction.agreement import bland_altman, write_agreement
from finetuning.prediction.cautions import NO_ANSWER
from finetuning.prediction.files import between, sizes
from finetuning.prediction.labels import decided
from finetuning.prediction.study import write_study
from finetuning.prediction.thickness import NOT_GIVEN, measured, read_foveas
from tests.data_setup.dicom.reading import assign
from tests.support.dicom_factory import speckle, write_opt
from tests.support.heights_factory import SMOKE
from tests.support.import_factory import write_images, write_nifti, write_tiff, write_yaml
from utils.config.load import load_config
from utils.config.schema import StorageOptions
from utils.errors import UserError

OPTIONS = StorageOptions()
PHOTOGRAPH = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
SHAPE, SPACING = (16, 200, 48), (0.12, 0.004, 0.05)
NAMES = {"P01/OD", "P01/OS.nii.gz", "P02/OD.tif", "P02/OS.npy", "P03/scan.dcm"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eyes of many kinds; one YAML above says the spacing of all; a label map, and notes."""
    root, voxels = tmp_path_factory.mktemp("tree"), speckle(*SHAPE)
    write_yaml(root / "volume.yaml", spacing_mm=list(SPACING))
    write_images(root / "P01" / "OD", voxels)
    write_nifti(root / "P01" / "OS.nii.gz", voxels, SPACING)
    write_tiff(root / "P02" / "OD.tif", voxels)
    np.save(root / "P02" / "OS.npy", voxels)
    write_yaml(root / "P02" / "OS.yaml", axes=["D", "H", "W"])
    write_opt(root / "P03", voxels, name="scan.dcm", spacing=(0.4, 0.011, 0.12))
    write_nifti(root / "labels" / "P01" / "OS.nii.gz", voxels // 64, SPACING)
    (root / "notes.txt").write_text("nothing")
    return root


def named(places: Places, out: str = "") -> dict[str, Scan]:
    return {scan.name: scan for scan in find_scans(places, OPTIONS, 0, out)}


def test_a_folder_means_all_that_prepare_opens(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scans = named(Places(files=[str(tree)]))
    assert set(scans) == NAMES
    assert "1 label maps are no scans and are left out: labels/P01/OS.nii.gz" in capsys.readouterr().out
    assert {name: (scan.person, scan.laterality) for name, scan in scans.items() if "P03" not in name} == {
        "P01/OD": ("P01", "R"),
        "P01/OS.nii.gz": ("P01", "L"),
        "P02/OD.tif": ("P02", "R"),
        "P02/OS.npy": ("P02", "L"),
    }
    spatial = ["image_size=[8,24,32]", "target_spacing=[0.24,0.04,0.08]", "patch_size=[4,8,8]"]
    cfg = load_config(SMOKE, [f"spatial.{word}" for word in spatial])
    sides = []
    for row, scan in enumerate(scans.values()):
        volume = ScanFile(row, scan, cfg.spatial, OPTIONS, NEAREST)()
        assert isinstance(volume, Volume), volume
        assert volume.fields["path"] == f"{tree}/{scan.name}"
        assert version_of(scan.record, OPTIONS)
        sides.append(volume.fields["laterality"])
    assert sides[:4] == ["R", "L", "R", "L"]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (Places(dicoms=["."]), {"P03/scan.dcm"}),
        (Places(files=["P01"]), {"OD", "OS.nii.gz"}),
        (Places(files=["P01/OD"]), {"OD"}),  # the folder is the volume
        (Places(files=["P01/OD/", "P02/OD.tif", "P02/OD.tif"]), {"OD", "OD.tif"}),
        (Places(files=["absent.nii"]), {"absent.nii"}),  # its line says that it is missing
    ],
)
def test_places(tree: Path, places: Places, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert set(named(places)) == expected


def test_what_is_no_scan(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for places, message in (
        (Places(files=[str(tmp_path)]), r"--files: expected scans below .*, found none in 1 files"),
        (Places(dicoms=[str(tmp_path)]), r"--dicom: expected DICOM files below .*, found none in 1 files"),
        (Places(dicoms=[str(tmp_path / "no")]), r"--dicom: expected a DICOM file or a folder, found none at"),
    ):
        with pytest.raises(UserError, match=message):
            named(places)
    assert set(named(Places(files=[str(tree)]), str(tree / "P02"))) == {n for n in NAMES if "P02" not in n}
    scan = Scan(unknown_record("/no.nii"), "no.nii")
    absent = ScanFile(0, scan, load_config(SMOKE).spatial, OPTIONS, NEAREST)()
    assert isinstance(absent, Reject)
    assert absent.fields["status"] == "missing_file"


def test_height_maps_and_the_truth_of_a_phantom_are_no_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole tree in AI-READI's layout: its scans alone."""
    write_opt(tmp_path / "retinal_oct", speckle(*SHAPE), name="scan.dcm", spacing=(0.4, 0.011, 0.12))
    for name, uid in {
        "heights.dcm": HEIGHT_MAP_CLASS,
        "photo.dcm": PHOTOGRAPH,
        "cube.dcm": FLOW_CLASS,
    }.items():
        edit = assign(SOPClassUID=uid)
        write_opt(tmp_path / "other", speckle(), name=name, edit=edit)
    (tmp_path / "truth").mkdir()
    np.savez(tmp_path / "truth" / "1.2.3.npz", layers=speckle())
    for places in (Places(files=[str(tmp_path)]), Places(dicoms=[str(tmp_path)])):
        assert set(named(places)) == {"retinal_oct/scan.dcm"}
        assert (
            "3 DICOM files that are no OCT volume, such as height maps, are left" in capsys.readouterr().out
        )


def test_the_manifest_of_a_folder_says_what_no_file_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the rows whose files are here; a file that it does not list is a scan too."""
    write_images(tmp_path / "a" / "one", speckle(*SHAPE))
    write_nifti(tmp_path / "b" / "two_OS.nii.gz", speckle(*SHAPE), SPACING)
    header = "person_id\tfilepath\tdevice\tprotocol\tlaterality\tspacing_mm\tlabel_surfaces"
    rows = ["Anna\ta/one\tx\tmacula_raster\tL\t0.12, 0.004, 0.05\t./drawn/one.npz"]
    rows += ["Otto\ta/gone\tx\tmacula_raster\tR\t\t"]
    (tmp_path / "manifest.tsv").write_text("\n".join([header, *rows]) + "\n")
    scans = named(Places(files=[str(tmp_path)]))
    assert set(scans) == {"a/one", "b/two_OS.nii.gz"}
    one = scans["a/one"]
    assert (one.person, one.laterality, one.protocol) == ("Anna", "L", "macula_raster")
    assert one.surfaces == f"{tmp_path}/drawn/one.npz"
    assert one.record.spacing_mm == SPACING
    assert one.record.path == f"{tmp_path}/a/one"
    assert "manifest.tsv: 1 of 2 rows have no file here: left out" in capsys.readouterr().out


def pit(shape: tuple[int, int] = (61, 121), depth: float = 100.0) -> np.ndarray:
    """Rows of three surfaces over 6 x 6 mm, of 4 um each: the retina is 320 um less a pit off the middle."""
    d, w = np.indices(shape)
    away = np.hypot((d - 33) * 0.1, (w - 58) * 0.05)
    retina = 320 - depth * np.exp(-((away / 0.5) ** 2))
    return np.stack([np.full(shape, 50.0), 50 + retina / 8, 50 + retina / 4]).astype(np.float32)


RASTER: dict[str, Any] = {"spacing_before_d": 0.1, "spacing_before_h": 0.004, "spacing_before_w": 0.05}
RASTER |= {"flipped_d": False, "path": "x/eye.nii", "laterality": "R", "region": None, "protocol": None}
SURFACES = ("ILM", "IPL", "BM")
HEADER = OCTHeader(
    *(
        "x/eye.nii",
        (61, 200, 121),
        (0.1, 0.004, 0.05),
        "root",
        False,
        "assumed",
        None,
        None,
        "R",
        "",
        "NIfTI",
    ),
    *(8, False, (1.0, 0.0)),
)


@pytest.mark.parametrize(
    ("facts", "depth", "outcome"),
    [
        ({"region": "Macula, 6 x 6"}, 5, "raster"),
        ({"protocol": "macula_raster"}, 5, "raster"),
        ({"protocol": "ppol_hr"}, 5, "raster"),
        ({}, 100, "pit"),
        ({"region": "Wide Field", "flipped_d": True}, 100, "pit"),
        ({"protocol": "raster_25x512"}, 5, "a pit of 20 um in its middle, found raster_25x512 and 4 um"),
        ({"region": "Optic Disc"}, 100, "expected a raster of the macula, found Optic Disc"),
        ({"protocol": "onh_cube"}, 100, "expected a raster of the macula, found onh_cube"),
        ({"laterality": "unknown"}, 100, "expected the side of the eye"),
    ],
)
def test_sectors_of_any_raster_whose_fovea_is_known(
    facts: dict[str, Any], depth: float, outcome: str
) -> None:
    """And the reason where there are none."""
    fields, rows = RASTER | facts, pit(depth=depth)
    line = measured(rows[:, ::-1] if fields["flipped_d"] else rows, SURFACES, HEADER, fields)
    assert line["thickness_um"]["retina"] == pytest.approx(
        4 * float((rows[2] - rows[0]).mean(dtype=float)), rel=1e-4
    )
    if line["etdrs_um"] is None:
        assert outcome in line["etdrs_message"]
        return
    assert line["fovea_source"] == outcome
    assert set(line["etdrs_um"]) == {"ILM to IPL", "IPL to BM", "retina"}
    if depth == 100:
        place = (27, 58) if fields["flipped_d"] else (33, 58)
        assert line["fovea"] == pytest.approx(place, abs=0.5)
        assert 225 < line["etdrs_um"]["retina"]["centre"] < 280 < line["etdrs_um"]["retina"]["inner_nasal"]


def test_a_fovea_that_somebody_gives(tmp_path: Path) -> None:
    table = tmp_path / "foveas.csv"
    table.write_text("scan,b_scan,a_scan\neye.nii,33,58\n")
    disc = RASTER | {"region": "Optic Disc"}
    for word, place in (("33,58", [33, 58]), (str(table), [33, 58]), ("centre", [30, 60])):
        line = measured(pit(), SURFACES, HEADER, disc, read_foveas(word, 1, OPTIONS))
        assert (line["fovea"], line["fovea_source"]) == (place, "given")
        assert set(line["etdrs_um"]["retina"]) == set(SECTORS)
    # frames of which the even ones come first, and A-scans from the other side
    order = (*range(0, 61, 2), *range(1, 61, 2))
    turned = replace(HEADER, order=tuple(np.argsort(order).tolist()), steps_hw=(1, -1))
    own = measured(pit()[:, order, ::-1], SURFACES, turned, disc, read_foveas("47,62", 1, OPTIONS))
    assert own == measured(pit(), SURFACES, HEADER, disc, read_foveas("33,58", 1, OPTIONS)) | {
        "fovea": [47, 62]
    }
    outside = measured(pit(), SURFACES, HEADER, disc, read_foveas("99,1", 1, OPTIONS))
    assert outside["etdrs_message"] == "expected a fovea inside the scan, found it outside"
    assert (
        measured(pit(), SURFACES, HEADER, disc | {"path": "z"}, read_foveas(str(table), 9, OPTIONS))["fovea"]
        is None
    )
    table.write_text("scan,b_scan,a_scan\neye.nii,33,-1\n")
    for word, message in (
        ("1,2", "--fovea 1,2: expected one scan, found 2; give a table"),
        ("middle", "--fovea: expected centre, B-SCAN,A-SCAN of one scan, or a table"),
        (str(table), "expected two numbers from 0, B-scan and A-scan, found others of eye.nii"),
    ):
        with pytest.raises(UserError, match=message):
            read_foveas(word, 2, OPTIONS)


def test_an_eye_without_sectors_says_why_in_the_table_of_an_evaluation() -> None:
    facts = {"what": "sector", "person_id": "1", "arm": "device", "orientation": "position"}
    lines = [facts | {"laterality": "R", "layer": "", "message": "expected a pit"}]
    lines += [facts | {"laterality": "L", "layer": "retina", "scanned_share": 1.0, "centre": 250.0}]
    for chosen in (lines, lines[:1]):
        table = by_eye(pd.DataFrame(chosen)).set_index("laterality")
        assert (table.message["R"], table.source["R"], table.volumes["R"]) == ("expected a pit", "device", 1)
    assert (table.message.tolist(), len(by_eye(pd.DataFrame(lines)))) == (["expected a pit"], 2)


FAR = {"feature_distance_percentile": 99.9}
LINES: dict[str, list[dict[str, Any]]] = {
    "layers": [
        {
            "path": "b.dcm",
            "status": "kept",
            "laterality": "L",
            "person": "P2",
            "thickness_um": {"retina": 300.0},
        }
        | {"etdrs_um": None, "etdrs_message": "expected a pit"},
        {"path": "a.dcm", "status": "kept", "laterality": "R", "thickness_um": {"retina": 310.0}, **FAR}
        | {"etdrs_um": {"retina": {"centre": 250.0, "outer_nasal": None}}, "etdrs_message": None},
        {"path": "c.dcm", "status": "not_dicom", "message": "expected a DICOM file"},
    ],
    "segmentation": [
        {"path": "a.dcm", "status": "kept", "classes": {"irf": {"voxels": 9, "mm3": 0.02, "lesions": 3}}},
        {"path": "old.dcm", "status": "kept", "classes": {"irf": {"voxels": 9, "mm3": 0.01}}},
    ],
    "translation": [{"path": "a.dcm", "status": "kept", "mean": {"deep": 0.25}}],
    "head": [
        {"path": "a.dcm", "status": "kept", "predicted": "dme", "scores": {"dme": 0.75, "none": 0.25}}
        | {"probabilities": {"dme": 0.5, "none": 0.5}},
        {"path": "old.dcm", "status": "kept", "scores": {"dme": 0.75}, "probabilities": None},
    ],
}
TABLES = {
    "layers": [
        "person,eye,scan,layer,sector,um,note",
        "P1,,c.dcm,,,,not measured: not_dicom: expected a DICOM file",
        f"P1,R,a.dcm,retina,scan,310,{NO_ANSWER}",
        f"P1,R,a.dcm,retina,centre,250,{NO_ANSWER}",
        f"P1,R,a.dcm,retina,outer_nasal,,{NO_ANSWER}",
        "P2,L,b.dcm,retina,scan,300,",
        "P2,L,b.dcm,,ETDRS,,no sectors: expected a pit",
    ],
    "segmentation": ["person,eye,scan,class,nl,lesions,note", "P1,,a.dcm,irf,20,3,", "P1,,old.dcm,irf,10,,"],
    "translation": ["person,eye,scan,slab,mean,note", "P1,,a.dcm,deep,0.25,"],
    "head": [
        "person,eye,scan,predicted,label,score,probability,note",
        "P1,,a.dcm,dme,dme,0.75,0.5,",
        "P1,,a.dcm,dme,none,0.25,0.5,",
        "P1,,old.dcm,,dme,0.75,,",
    ],
}


@pytest.mark.parametrize("kind", LINES)
def test_one_table_of_a_study(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path / "study.csv")
    names = ("a.dcm", "c.dcm", "old.dcm")
    scans = {name: Scan(unknown_record(name), name, person="P1") for name in names}
    write_study(url, kind, LINES[kind], scans, False, OPTIONS)
    written = [",".join(row) for row in csv.reader(Path(url).read_text().splitlines())]
    assert written == TABLES[kind]


def test_a_visit_has_its_date_only_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def dated(scan: pydicom.FileDataset) -> None:
        scan.StudyDate, scan.AcquisitionDateTime = "20200102", "20240131101500"

    with_date = write_opt(tmp_path, speckle(6, 40, 24), name="a.dcm", edit=dated)
    (tmp_path / "b.xml").write_text(
        "<HEDX><StudyDate><Date><Year>2023</Year><Month>3</Month><Day>9</Day></Date></StudyDate></HEDX>"
    )
    urls = [with_date, str(tmp_path / "b.xml"), str(tmp_path / "no.nii"), str(tmp_path / "no.dcm")]
    assert [visit_date_of(url, OPTIONS) for url in urls] == ["2024-01-31", "2023-03-09", "", ""]
    lines = [{"path": url, "status": "kept", "mean": {"deep": 0.5}} for url in urls[:1]]
    scans = {url: Scan(unknown_record(url), url) for url in urls}
    for asked in (True, False):
        write_study(str(tmp_path / "study.csv"), "translation", lines, scans, asked, OPTIONS)
        assert ("2024-01-31" in (tmp_path / "study.csv").read_text()) is asked


def test_agreement_with_drawn_surfaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predicted 8 um thicker in each of four eyes: a bias of 8, limits on it, and an ICC below 1."""
    lines, scans, given = [], {}, pit()
    for number in range(4):
        drawn = given.copy()
        drawn[2] += number
        folder = tmp_path / f"P{number}" / "OD"
        write_images(folder, speckle(61, 160, 121, seed=number))
        write_yaml(folder / "volume.yaml", spacing_mm=[0.1, 0.004, 0.05])
        np.savez(tmp_path / f"{number}.npz", surfaces=drawn, names=np.array(SURFACES))
        drawn = drawn.copy()
        drawn[2] += 2
        path = str(folder)
        scans[path] = Scan(
            unknown_record(path),
            path,
            f"P{number // 2}",
            "LR"[number % 2],
            surfaces=f"{tmp_path}/{number}.npz",
        )
        lines.append({"path": path, "status": "kept", "surfaces": list(SURFACES)})
        lines[-1] |= measured(drawn, SURFACES, HEADER, RASTER | {"path": path})
    lines.append({"path": "other", "status": "kept", "surfaces": list(SURFACES)})
    write_agreement(str(tmp_path), lines, scans, NOT_GIVEN, OPTIONS)
    table = pd.read_csv(tmp_path / "agreement.csv")
    retina = table[(table.layer == "retina") & (table.sector == "scan")]
    np.testing.assert_allclose(retina.predicted_um - retina.given_um, 8, atol=0.01)
    assert set(table.sector) == {"scan", *SECTORS}
    text = (tmp_path / "agreement.md").read_text()
    assert "| retina | 4 | 2 | +8.0 | 8.0 to 8.0 | 8.0 | 0.455 |" in text
    assert (tmp_path / "agreement.png").read_bytes().startswith(b"\x89PNG")
    assert "agreement.md: 4 eyes with given surfaces" in capsys.readouterr().out
    (tmp_path / "0.npz").write_bytes(b"no")
    (tmp_path / "alone").mkdir()
    write_agreement(str(tmp_path / "alone"), lines[:1], scans, NOT_GIVEN, OPTIONS)
    assert not list((tmp_path / "alone").iterdir())
    assert "0.npz: given surfaces are not used: " in capsys.readouterr().out


def test_bland_and_altman_of_few_eyes() -> None:
    few = bland_altman(np.array([301.0, 299.0]), np.array([300.0, 300.0]))
    assert (few["bias"], few["mad"]) == (0, 1)
    assert np.isnan([few["low"], few["high"], few["icc"]]).all()
    more = bland_altman(np.array([1.0, 3.0, 2.0]), np.zeros(3))
    assert (more["low"], more["high"]) == pytest.approx((2 - 1.96, 2 + 1.96))


def test_layers_between_surfaces_are_classes() -> None:
    """A voxel belongs to the layer in which its centre lies; an unknown border bounds none."""
    rows = np.array([[[1.0, 0.5]], [[2.5, 3.0]], [[4.0, np.nan]]], np.float32)
    labels = between(rows, 6)
    assert labels[0].T.tolist() == [[0, 1, 1, 2, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert [*layers_of(SURFACES)] == ["ILM to IPL", "IPL to BM", "retina"]


def test_lesions_are_parts_that_do_not_touch() -> None:
    labels = np.zeros((4, 5, 6), np.uint8)
    labels[0, 0, 0] = labels[1, 1, 1] = labels[3, 4, 5] = 2  # the first two by a corner
    measured_sizes = sizes(labels, {"fluid": 2, "ped": 3}, (0.1, 0.01, 0.1))
    assert measured_sizes["fluid"]["lesions"] == 2
    assert measured_sizes["fluid"]["nl"] == pytest.approx(0.3)
    assert measured_sizes["ped"] == {"voxels": 0, "mm3": 0.0, "nl": 0.0, "lesions": 0}


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [
        ("classification", [0.2, 0.5, 0.3], "b"),
        ("multilabel", [0.5, 0.49, 0.9], ["a", "c"]),
        ("multilabel", [0.1, 0.2, 0.3], []),
        ("regression", [61.5], 61.5),
    ],
)
def test_what_scores_decide(kind: str, scores: list[float], expected: Any) -> None:
    assert decided(kind, ("a", "b", "c"), scores) == expected
