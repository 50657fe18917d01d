"""Scans of a command line: which are meant, predictions in their own geometry, windows over large ones, files
that read back as they were; and the tables of a study: thickness, foveas, agreement.
"""

from __future__ import annotations

import csv
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import highdicom
import nibabel as nib
import numpy as np
import pandas as pd
import pydicom
import pytest
import torch
from torch import Tensor, nn

from data_setup.export.predictions import write_height_map, write_nifti, write_png, write_seg
from data_setup.index.cli import main as index_main
from data_setup.index.visit import visit_date_of
from data_setup.manifest import Record, unknown_record
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError
from data_setup.readers.heights import HEIGHT_MAP_CLASS, read_heights, read_stated_heights
from data_setup.readers.labels import read_label_volume
from data_setup.readers.octa import FLOW_CLASS
from data_setup.readers.open_record import open_record
from data_setup.resample import NEAREST
from finetuning.dense import whole
from finetuning.dense.head import Arm
from finetuning.dense.layers import by_eye
from finetuning.dense.surfaces import NOT_GIVEN, SECTORS, layers_of, measured, read_foveas
from finetuning.dense.whole import classes_of_scan, outputs_of, read_whole, surfaces_of_scan
from finetuning.embedding.scans import Places, Scan, find_scans, version_of
from finetuning.embedding.volumes import Reject, Volume, read_scan
from finetuning.prediction.agreement import bland_altman, write_agreement
from finetuning.prediction.files import Files, between, sizes
from finetuning.prediction.lines import NO_ANSWER, Lines, write_study
from finetuning.prediction.predictors import decided
from tests.data_setup.dicom.reading import assign
from tests.support import import_factory
from tests.support.dicom_factory import speckle, write_opt
from tests.support.finetune_factory import RUNTIME
from tests.support.heights_factory import SMOKE, make_tree
from tests.support.import_factory import anatomical_affine, write_folder, write_images, write_tiff, write_yaml
from tests.support.prepare_runs import swap_unseen
from utils.config.load import load_config
from utils.config.schema import Config, StorageOptions
from utils.errors import UserError
from utils.storage import StorageError

OPTIONS = StorageOptions()
PHOTOGRAPH = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
SHAPE, SPACING = (16, 200, 48), (0.12, 0.004, 0.05)
NAMES = {"P01/OD", "P01/OS.nii.gz", "P02/OD.tif", "P02/OS.npy", "P03/scan.dcm"}
SMALL, SMALL_MM = (6, 20, 14), (0.2, 0.01, 0.05)
CLASSES = {2: "fluid", 5: "drusen"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eyes of many kinds; one YAML above says the spacing of all; a label map, and notes."""
    root, voxels = tmp_path_factory.mktemp("tree"), speckle(*SHAPE)
    write_yaml(root / "volume.yaml", spacing_mm=list(SPACING))
    write_images(root / "P01" / "OD", voxels)
    import_factory.write_nifti(root / "P01" / "OS.nii.gz", voxels, SPACING)
    write_tiff(root / "P02" / "OD.tif", voxels)
    np.save(root / "P02" / "OS.npy", voxels)
    write_yaml(root / "P02" / "OS.yaml", axes=["D", "H", "W"])
    write_opt(root / "P03", voxels, name="scan.dcm", spacing=(0.4, 0.011, 0.12))
    import_factory.write_nifti(root / "labels" / "P01" / "OS.nii.gz", voxels // 64, SPACING)
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
        volume = read_scan(row, scan, cfg.spatial, OPTIONS, NEAREST)
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
        (Places(files=["P01/OD/", "P02/OD.tif", "P02/./OD.tif"]), {"OD", "OD.tif"}),
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
    absent = read_scan(0, scan, load_config(SMOKE).spatial, OPTIONS, NEAREST)
    assert isinstance(absent, Reject)
    assert absent.fields["status"] == "missing_file"


def test_a_name_of_no_text_and_a_file_that_was_mended_are_scans(tmp_path: Path) -> None:
    """What an index left out may be whole by now."""
    odd = os.fsdecode(b"\xffeye.nii.gz")
    for name in ("P1/OD.nii.gz", "P1/OS.nii.gz"):
        import_factory.write_nifti(tmp_path / name, speckle(*SHAPE), SPACING)
    whole = (tmp_path / "P1/OS.nii.gz").read_bytes()
    (tmp_path / "P1/OS.nii.gz").write_bytes(whole[:20])
    assert index_main([str(tmp_path)]) == 0
    assert "P1/OS.nii.gz" in (tmp_path / "left_out.tsv").read_text()
    assert set(named(Places(files=[str(tmp_path)]))) == {"P1/OD.nii.gz", "P1/OS.nii.gz"}
    (tmp_path / odd).write_bytes(whole)
    images = f"P3/M{os.fsdecode(bytes([0xFC]))}ller"  # one scan, not one for each image
    write_images(tmp_path / images, speckle(*SHAPE))
    scans = {"P1/OD.nii.gz", "P1/OS.nii.gz", odd, images}
    assert set(named(Places(files=[str(tmp_path)]))) == scans


def test_height_maps_and_the_truth_of_a_phantom_are_no_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole tree in AI-READI's layout: its scans alone, also beside damaged files of other kinds."""
    write_opt(tmp_path / "retinal_oct", speckle(*SHAPE), name="scan.dcm", spacing=(0.4, 0.011, 0.12))
    (tmp_path / "retinal_oct/manifest.tsv").write_text("person_id\tfilepath\tdevice\tprotocol\n")
    for name in ("retinal_octa/segmentation/x/cut.dcm", "retinal_photography/cfp/x/cut.dcm"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(128) + b"DICM")
    for name, uid in {
        "heights.dcm": HEIGHT_MAP_CLASS,
        "photo.dcm": PHOTOGRAPH,
        "cube.dcm": FLOW_CLASS,
    }.items():
        edit = assign(SOPClassUID=uid)
        write_opt(tmp_path / "other", speckle(), name=name, edit=edit)
    (tmp_path / "truth").mkdir()
    truth = {"surfaces": np.zeros((2, 6, 8), np.float32), "lesions": np.zeros(SHAPE, np.uint8)}
    np.savez(tmp_path / "truth" / "1.2.3.npz", **truth)
    for places in (Places(files=[str(tmp_path)]), Places(dicoms=[str(tmp_path)])):
        assert set(named(places)) == {"retinal_oct/scan.dcm"}
        assert (
            "5 DICOM files that are no OCT volume, such as height maps, are left" in capsys.readouterr().out
        )


def test_the_manifest_of_a_folder_says_what_no_file_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the rows whose files are here; a file that it does not list is a scan too."""
    write_images(tmp_path / "a" / "one", speckle(*SHAPE))
    import_factory.write_nifti(tmp_path / "b" / "two_OS.nii.gz", speckle(*SHAPE), SPACING)
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


class Blank(nn.Module):
    """Tokens that say nothing."""

    def forward(self, view_B1DHW: Tensor) -> Tensor:
        return torch.zeros(len(view_B1DHW), 4 * 3 * 1, 3)


class Bright(nn.Module):
    """A class that is a function of the voxel alone."""

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        return 20 * torch.stack([-voxels_BdHW, voxels_BdHW], dim=1)


class Edge(nn.Module):
    """A surface at the voxel that is brightest in its A-scan, and one at the darkest; both are sharp."""

    def forward(self, tokens_BhwE: Tensor, voxels_BdHW: Tensor) -> Tensor:
        return 500 * torch.stack([voxels_BdHW, voxels_BdHW], dim=1)


def arm(decoder: nn.Module) -> Arm:
    return Arm("pretrained", Blank(), decoder)  # type: ignore[arg-type]


def config(root: Path) -> Config:
    """A grid of the scan's own spacing: 8 of its 14 A-scans, and more than its B-scans and rows."""
    changes = ["spatial.image_size=[8,24,8]", "spatial.target_spacing=[0.2,0.01,0.05]"]
    return load_config(SMOKE, [*changes, "spatial.patch_size=[2,8,8]", f"data.gcs_root={root}"])


@pytest.mark.parametrize("order", ["superior_to_inferior", "inferior_to_superior"])
def test_classes_are_those_of_the_scans_own_voxels(tmp_path: Path, order: str) -> None:
    """Beyond the grid too, and in the frame order of the files."""
    voxels = np.random.default_rng(0).integers(0, 256, SMALL).astype(np.uint8)
    write_folder(tmp_path / "eye", voxels, spacing_mm=list(SMALL_MM), d_order=order)
    cfg = config(tmp_path)
    scan = read_whole(unknown_record(str(tmp_path / "eye")), cfg, OPTIONS)
    assert scan.volume.voxels.shape == (8, 24, 14)
    stored = voxels[:, :, 3:11]
    assert scan.mean == pytest.approx(stored.mean())
    outputs = outputs_of(arm(Bright()), scan, cfg, RUNTIME)
    np.testing.assert_array_equal(classes_of_scan(outputs, scan), voxels > stored.mean())


def test_surfaces_are_rows_of_the_scan(tmp_path: Path) -> None:
    voxels = np.random.default_rng(1).integers(0, 40, SMALL).astype(np.uint8)
    rows = np.random.default_rng(2).integers(0, SMALL[1], (SMALL[0], SMALL[2]))
    np.put_along_axis(voxels, rows[:, None], 255, axis=1)
    write_folder(tmp_path / "eye", voxels, spacing_mm=list(SMALL_MM), d_order="inferior_to_superior")
    cfg = config(tmp_path)
    scan = read_whole(unknown_record(str(tmp_path / "eye")), cfg, OPTIONS, "dw")
    surfaces = surfaces_of_scan(outputs_of(arm(Edge()), scan, cfg, RUNTIME), scan)
    np.testing.assert_allclose(surfaces[0], rows, atol=1e-4)


def test_windows_are_of_the_grids_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voxels = np.random.default_rng(0).integers(0, 256, (6, 20, 30)).astype(np.uint8)
    write_folder(tmp_path / "eye", voxels, spacing_mm=list(SMALL_MM), d_order="superior_to_inferior")
    cfg, sizes = config(tmp_path), []
    decode = whole.decode

    def seen(decoder: nn.Module, tokens: Tensor, window: Tensor, cfg: Config) -> Tensor:
        sizes.append(tuple(window.shape))
        return decode(decoder, tokens, window, cfg)

    monkeypatch.setattr(whole, "decode", seen)
    scan = read_whole(unknown_record(str(tmp_path / "eye")), cfg, OPTIONS)
    outputs_of(arm(Bright()), scan, cfg, RUNTIME)
    assert set(sizes) == {(1, 1, 8, 24, 8)}
    assert len(sizes) == 5  # of 30 A-scans, each 2 over the one before


@pytest.fixture(scope="module")
def scan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Cirrus scan of the phantom, whose frames run upwards."""
    root = tmp_path_factory.mktemp("scan")
    make_tree(root / "tree", 1, (), (4,), (22, 40, 16))
    return next((root / "tree" / "retinal_oct").rglob("*.dcm"))


def labels_of(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice(np.array([0, 2, 5], np.uint8), shape)


def record_of(path: Path) -> Record:
    return unknown_record(str(path))


def scan_of(path: str) -> Scan:
    return Scan(unknown_record(path), Path(path).name)


def test_nifti_and_png_read_back(scan_file: Path, tmp_path: Path) -> None:
    """With the shape and spacing of the DICOM scan, and the way its frames run."""
    header, _ = open_record(record_of(scan_file))
    labels = labels_of(header.shape)
    write_nifti(labels, header, "scan.dcm", f"{tmp_path}/a.nii.gz", OPTIONS)
    scan = (str(scan_file), "scan.dcm")
    read = read_label_volume(f"{tmp_path}/a.nii.gz", "a.nii.gz", header.shape, scan)
    np.testing.assert_array_equal(read.values, labels)
    assert read.flip_d is header.flip_d
    image = nib.load(tmp_path / "a.nii.gz")
    np.testing.assert_allclose(image.header.get_zooms(), header.spacing_mm[::-1], rtol=1e-6)
    assert nib.aff2axcodes(image.affine) == ("L", "P", "S" if header.flip_d else "I")
    write_png(labels, f"{tmp_path}/b", OPTIONS)
    np.testing.assert_array_equal(read_label_volume(f"{tmp_path}/b", "b", header.shape, scan).values, labels)


def test_a_nifti_scan_gives_its_own_axes_and_affine(tmp_path: Path) -> None:
    """An array [H, W, D] whose W grows to the right: the mask lies on the scan in any viewer."""
    voxels = np.random.default_rng(0).integers(0, 256, SMALL).astype(np.uint8)
    affine = anatomical_affine(SMALL_MM)[:, [1, 0, 2, 3]] * [1, -1, 1, 1]
    image = nib.Nifti1Image(voxels.transpose(1, 2, 0), affine)
    image.header.set_xyzt_units("mm")
    nib.save(image, tmp_path / "eye.nii")
    header, frames = open_record(record_of(tmp_path / "eye.nii"))
    labels = np.stack(list(frames)) // 100  # in the reader's order
    write_nifti(labels, header, "eye.nii", f"{tmp_path}/mask.nii.gz", OPTIONS)
    written = nib.load(tmp_path / "mask.nii.gz")
    np.testing.assert_allclose(written.affine, affine)
    np.testing.assert_array_equal(np.asarray(written.dataobj), voxels.transpose(1, 2, 0) // 100)


@pytest.mark.parametrize("protocol", [4, 2, 0, 1], ids=["upwards", "downwards", "with positions", "nowhere"])
def test_dicom_seg_reads_back(tmp_path: Path, protocol: int) -> None:
    """By the scan's frames, or as a volume in space with its spacing; an empty class stays a segment."""
    make_tree(tmp_path / "tree", 1, (), (protocol,), (22, 80, 24))
    header, _ = open_record(record_of(next((tmp_path / "tree" / "retinal_oct").rglob("*.dcm"))))
    assert header.flip_d is (protocol != 2)
    labels = labels_of(header.shape)
    labels[3] = 0
    write_seg(labels, CLASSES | {7: "absent"}, header, "abc", f"{tmp_path}/s.dcm", OPTIONS)
    written = highdicom.seg.segread(tmp_path / "s.dcm")
    assert [d.segment_label for d in written.SegmentSequence] == ["fluid", "drusen", "absent"]
    if protocol == 0:  # the scan says where its frames lie: the masks refer to them
        frames = list(range(1, header.shape[0] + 1))
        numbers = written.get_pixels_by_source_frame(header.sop_instance_uid, frames, combine_segments=True)
    else:
        volume = written.get_volume(combine_segments=True)
        np.testing.assert_allclose(volume.spacing, header.spacing_mm, rtol=1e-5)
        upwards = volume.affine[2, 0] > 0  # along the file's frames where they run to superior
        numbers = volume.array if upwards == header.flip_d else volume.array[::-1]
    np.testing.assert_array_equal(np.array([0, 2, 5, 7])[numbers], labels)
    assert written.SOPClassUID == "1.2.840.10008.5.1.4.1.1.66.4"


@pytest.mark.parametrize(("protocol", "form"), [(4, "seg"), (0, "seg"), (0, "heightmap")])
def test_files_of_an_interleaved_scan_are_in_the_order_of_its_frames(
    tmp_path: Path, protocol: int, form: str
) -> None:
    """The same scan with its frames in two orders: each frame has the same masks and the same surfaces."""
    make_tree(tmp_path / "tree", 1, (), (protocol,), (14, 40, 16))
    path = next((tmp_path / "tree" / "retinal_oct").rglob("*.dcm"))
    other = tmp_path / "turned" / path.name
    order = interleaved(path, other)
    decoder = Edge() if form == "heightmap" else Bright()
    head = SimpleNamespace(
        arms=[arm(decoder)], names=["ILM", "BM"][: 2 - (form == "seg")], checksum="abc", state={"classes": {}}
    )
    if form == "seg":
        head.state["classes"] = {"ILM": 5}
    spatial = ["image_size=[8,24,8]", "target_spacing=[0.9,0.1,0.8]", "patch_size=[2,8,8]"]
    cfg = load_config(SMOKE, [f"spatial.{word}" for word in spatial])
    values = []
    for name, file in (("a", path), ("b", other)):
        drawn = Files(head, cfg, [scan_of(str(file))], form, str(tmp_path / name), RUNTIME)  # type: ignore[arg-type]
        (line,) = drawn.lines([str(file)])
        assert line["status"] == "kept", line
        if form == "heightmap":
            values.append(read_heights(line["file"], "zeiss_cirrus").values.swapaxes(0, 1))
            continue
        written = highdicom.seg.segread(line["file"])
        if protocol == 0:
            frames = list(range(1, 15))
            uid = pydicom.dcmread(file).SOPInstanceUID
            values.append(written.get_pixels_by_source_frame(uid, frames, combine_segments=True))
        else:  # laid in space, where the order of the file counts for nothing
            values.append(written.get_volume(combine_segments=True).array)
    expected = values[0] if form == "seg" and protocol == 4 else values[0][order]
    np.testing.assert_array_equal(values[1], expected)
    assert len(np.unique(values[0], axis=0)) >= 13  # hardly two frames are alike
    assert not np.array_equal(values[0], values[0][order])  # so the order shows, whatever the speckle


def interleaved(path: Path, other: Path) -> list[int]:
    """A copy with the even frames first; the order."""
    scan = pydicom.dcmread(path)
    pixels = scan.pixel_array
    order = [*range(0, len(pixels), 2), *range(1, len(pixels), 2)]
    groups = [scan.PerFrameFunctionalGroupsSequence[frame] for frame in order]
    scan.PixelData = pixels[order].tobytes()
    scan.PerFrameFunctionalGroupsSequence = groups
    other.parent.mkdir()
    scan.save_as(other)
    return order


def without_groups(scan: pydicom.FileDataset) -> None:
    measures = scan.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    scan.PixelSpacing, scan.SliceThickness = measures.PixelSpacing, measures.SliceThickness
    scan.SpacingBetweenSlices = measures.SliceThickness
    del scan.SharedFunctionalGroupsSequence, scan.PerFrameFunctionalGroupsSequence


def orientation_by_frame(scan: pydicom.FileDataset) -> None:
    shared = scan.SharedFunctionalGroupsSequence[0]
    for group in scan.PerFrameFunctionalGroupsSequence:
        group.PlaneOrientationSequence = shared.PlaneOrientationSequence
    del shared.PlaneOrientationSequence


def without_orientation(scan: pydicom.FileDataset) -> None:
    del scan.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence


def without_a_patient(scan: pydicom.FileDataset) -> None:
    for keyword in PLANTED:
        delattr(scan, keyword)


PLANTED = {"PatientName": "Secret^Name", "PatientID": "ID-77", "PatientBirthDate": "19500101"}
PLANTED |= {"StudyDate": "20240102", "AccessionNumber": "ACC77", "ReferringPhysicianName": "Doctor^Known"}
PLANTED |= {"PatientComments": "lives alone", "InstitutionName": "Hospital", "StudyDescription": "of him"}
UNWANTED = ("PatientComments", "InstitutionName", "StudyDescription")  # no file needs them


@pytest.mark.parametrize("protocol", [0, 2])
@pytest.mark.parametrize(
    "edit", [without_groups, orientation_by_frame, without_orientation, without_a_patient, lambda scan: None]
)
def test_files_about_any_scan_name_nobody_unless_asked(tmp_path: Path, edit: Any, protocol: int) -> None:
    """Whatever of its geometry or patient a scan lacks; each class is a segment, whatever its name."""
    make_tree(tmp_path / "tree", 1, (), (protocol,), (14, 80, 24))
    scan = pydicom.dcmread(next((tmp_path / "tree" / "retinal_oct").rglob("*.dcm")))
    scan.update(PLANTED)
    edit(scan)
    url = str(tmp_path / "scan.dcm")
    scan.save_as(url)
    header, _ = open_record(record_of(Path(url)))
    labels, names = labels_of(header.shape), {2: "fluid\\sub \u6db2", 5: "d" * 99}
    heights = np.ones((1, header.shape[0], header.shape[2]), np.float32)
    for anonymous in (True, False):
        write_seg(labels, names, header, "abc", f"{tmp_path}/s.dcm", OPTIONS, anonymous)
        write_height_map(heights, ["a\\b \u6db2"], url, "abc", f"{tmp_path}/h.dcm", OPTIONS, anonymous)
        for name in ("s.dcm", "h.dcm"):
            written = pydicom.dcmread(tmp_path / name)
            planted = {key for key, value in PLANTED.items() if value in str(written)}
            asked = {key for key in PLANTED if key in scan and key not in UNWANTED}
            assert planted == (set() if anonymous else asked)
            assert (scan.StudyInstanceUID in str(written)) is not anonymous
            assert header.sop_instance_uid in str(written)
            assert written.PatientIdentityRemoved == ("YES" if anonymous else "NO")
    segments = highdicom.seg.segread(tmp_path / "s.dcm")
    assert [d.segment_label for d in segments.SegmentSequence] == ["fluid/sub \u6db2", "d" * 64]
    frames = list(range(1, header.shape[0] + 1))
    numbers = segments.get_pixels_by_source_frame(header.sop_instance_uid, frames, combine_segments=True)
    np.testing.assert_array_equal(np.array([0, 2, 5])[numbers], labels)


@pytest.mark.parametrize("keyword", ["FrameOfReferenceUID", "SeriesInstanceUID", "StudyInstanceUID"])
def test_a_scan_that_a_file_cannot_refer_to_has_a_reason(
    scan_file: Path, tmp_path: Path, keyword: str
) -> None:
    scan = pydicom.dcmread(scan_file)
    delattr(scan, keyword)
    url, out = str(tmp_path / "scan.dcm"), f"{tmp_path}/s.dcm"
    scan.save_as(url)
    header, _ = open_record(record_of(scan_file))
    labels = labels_of(header.shape)
    with pytest.raises(OCTReadError, match=f"expected a {keyword} for a DICOM SEG"):
        write_seg(labels, CLASSES, replace(header, url=url), "abc", out, OPTIONS)
    if keyword == "SeriesInstanceUID":
        with pytest.raises(OCTReadError, match="expected a SeriesInstanceUID for a Height Map"):
            write_height_map(labels.astype(np.float32), ["a"] * len(labels), url, "abc", out, OPTIONS)


def test_two_scans_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    head: Any = SimpleNamespace(state={"classes": {}})

    def files(*paths: str) -> Files:
        return Files(head, config(tmp_path), [scan_of(p) for p in paths], "png", str(tmp_path), RUNTIME)

    files("/a/eye.dcm", "/b/eye_2.dcm")
    with pytest.raises(UserError, match=r"found /a/eye\.dcm and /b/eye\.dcm; draw them into two"):
        files("/a/eye.dcm", "/b/eye.dcm")


def test_height_maps_read_back(scan_file: Path, tmp_path: Path) -> None:
    header, _ = open_record(record_of(scan_file))
    d, h, w = header.shape
    rng = np.random.default_rng(0)
    upper = rng.uniform(1, h / 2, (d, w)).astype(np.float32)
    heights = np.stack([upper, upper + rng.uniform(1, h / 3, (d, w)).astype(np.float32)])
    heights[:, 2, 3] = np.nan
    write_height_map(heights, ("ILM", "RPE"), str(scan_file), "abc", f"{tmp_path}/h.dcm", OPTIONS)
    read = read_heights(f"{tmp_path}/h.dcm", "zeiss_cirrus")
    np.testing.assert_allclose(read.values, heights, atol=1e-6, equal_nan=True)
    assert (read.names, read.notes) == (("ILM", "RPE"), ())
    assert read.references == {header.sop_instance_uid}


def test_surfaces_of_many_devices_read_back(scan_file: Path, tmp_path: Path) -> None:
    """A head of all devices has more surfaces than this one's maps, two of them at one depth."""
    header, _ = open_record(record_of(scan_file))
    d, _, w = header.shape
    names = ("ILM", "RNFL", "RNFL/GCL", *(f"my surface {n}" for n in range(10)), "CSI")
    heights = np.random.default_rng(0).uniform(-3, 900, (len(names), d, w)).astype(np.float32)
    heights[4], heights[5, 1] = np.nan, np.nan
    write_height_map(heights, names, str(scan_file), "abc", f"{tmp_path}/h.dcm", OPTIONS)
    read = read_stated_heights(f"{tmp_path}/h.dcm", OPTIONS)
    np.testing.assert_array_equal(read.values, heights)
    assert (read.names, read.references) == (names, {header.sop_instance_uid})
    file = pydicom.dcmread(tmp_path / "h.dcm")
    del file.FloatPixelPaddingValue
    file.save_as(tmp_path / "unsaid.dcm")
    with pytest.raises(OCTReadError, match="FloatPixelPaddingValue"):
        read_stated_heights(f"{tmp_path}/unsaid.dcm", OPTIONS)


def test_lines_of_a_killed_command_are_gone_on_with(tmp_path: Path) -> None:
    """A line is there before the next scan; a changed file or format or precision is drawn again."""
    scans = [tmp_path / f"{name}.dcm" for name in "abc"]
    for scan in scans:
        scan.write_bytes(b"1")
    out = str(tmp_path / "out" / "segments.jsonl")

    def start(form: str = "png", **changes: Any) -> Lines:
        common = {"head_sha256": "1" * 64, "precision": "float32", "format": form, "schema_version": 2}
        versions = {str(scan): version_of(record_of(scan), OPTIONS) for scan in scans}
        return Lines(out, versions, common | changes, lambda line: Path(line["file"]).exists(), OPTIONS)

    def done(form: str = "png", **changes: Any) -> set[str]:
        lines = start(form, **changes)
        lines.close()
        return set(lines.done)

    lines = start()
    for scan in scans[:2]:
        lines.add({"path": str(scan), "status": "kept", "file": str(scan)})
    file = tmp_path / "out" / "segments.jsonl"
    written = file.read_text()
    assert len(written.splitlines()) == 2  # nothing is closed
    lines.close()
    file.write_text(written + '{"path": "half')
    assert done() == {str(scan) for scan in scans[:2]}
    assert file.read_text() == written
    assert done("nifti") == set()
    assert done(precision="bfloat16") == done(schema_version=3) == set()
    file.write_text(written.replace(', "schema_version": 2', ""))  # as the first lines were
    assert done() == {str(scan) for scan in scans[:2]}
    file.write_text(written)
    swap_unseen(scans[0])
    assert done() == {str(scans[1])}
    with pytest.raises(UserError, match=r"expected lines of the head with sha256 2222.*give another --out"):
        start(head_sha256="2" * 64)
    assert len(file.read_text().splitlines()) == 1
    lines = start()
    size = file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))  # stands for a full disk
    try:
        with pytest.raises(StorageError, match="File too large"):
            lines.add({"path": str(scans[2]), "status": "kept", "file": str(scans[2])})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.close()
    assert file.stat().st_size == size  # no half line
    line = json.loads(written.splitlines()[0])
    edits = [{"path": [1]}, *({name: 3} for name in ("picture", "file", "scores", "status"))]
    edits += [{"classes": {"fluid": {}}}]
    for text in ("mine\n", *(json.dumps(line | edit) + "\n" for edit in edits)):
        file.write_text(text)
        with pytest.raises(UserError, match=r"expected lines of finetuning\.predict, found another one"):
            start()
