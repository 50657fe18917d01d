"""Imitations of public sets in their own layout, with the phantom's eyes, whose layers and lesions are known.

In: what is wrong with an eye, and its number. Out: voxels, surfaces and lesions of the phantom at SHAPE; and
writers of the files that the sets come in; IMITATIONS, a function for each set. An imitation has fewer and
larger voxels than its set: `write_spacing` says so in a volume.yaml.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import yaml
from PIL import Image

from data_setup.index.sets import owners
from data_setup.phantom.anatomy import SURFACES, make_eye
from data_setup.phantom.cohort import draw_factors
from data_setup.phantom.files import write_file
from data_setup.phantom.render import LESIONS, render
from data_setup.protocols import BY_NAME
from data_setup.readers.sidecar import FOLDER_SIDECAR
from tests.support.import_factory import write_metaimage

SHAPE = (5, 44, 32)
SPACING_MM = (0.6, 0.049, 0.19)
_PROTOCOL = BY_NAME["maestro2_macula_6x6_octa_oct"]
_NOTHING: dict[str, Any] = {"drusen_rate": 0.0, "cyst_rate": 0.0, "foci_rate": 0.0, "srf_probability": 0.0}
KINDS: dict[str, dict[str, Any]] = {  # what is wrong -> factors of the phantom's eye
    "normal": {},
    "drusen": {"drusen_rate": 25.0},
    "fluid": {"cyst_rate": 10.0, "srf_probability": 1.0, "drusen_rate": 6.0},
}
# the phantom's surfaces, in the order of the sets'
_OCTA500_SURFACES = ("ILM", "IPL_INL", "OPL_ONL", "EZ", "RPE", "BM")
_DUKE_AMD_SURFACES = ("ILM", "RPE", "BM")
_DUKE_DME_SURFACES = ("ILM", "RNFL_GCL", "IPL_INL", "INL_OPL", "OPL_ONL", "EZ", "RPE", "BM")  # OCTRIMA's too
_OCTAVE_LESIONS = ("drusen", "intraretinal_fluid", "subretinal_fluid")


@dataclass(frozen=True)
class Eye:
    """One eye in file order: superior to inferior."""

    voxels: np.ndarray  # uint8 [D, H, W]
    surfaces: Mapping[str, np.ndarray]  # name of the phantom -> float32 [D, W], rows
    lesions: Mapping[str, np.ndarray]  # name of the phantom -> bool [D, H, W]
    laterality: str
    age: int


@lru_cache(maxsize=64)
def eye(kind: str, number: int) -> Eye:
    """The eye of a kind out of KINDS; a pure function of its arguments."""
    seed = [list(KINDS).index(kind), number]
    rng = np.random.default_rng(seed)
    factors = replace(draw_factors(0, rng), **(_NOTHING | KINDS[kind]))
    side = "RL"[number % 2]
    scan = render(make_eye(factors, rng), _PROTOCOL, SHAPE, SPACING_MM, side, seed)
    surfaces = dict(zip(SURFACES, scan.surfaces, strict=True))
    lesions = {name: scan.lesions == value for value, name in enumerate(LESIONS)}
    return Eye(scan.voxels, surfaces, lesions, side, factors.age)


def layers(one: Eye) -> dict[str, np.ndarray]:
    """{upper surface: bool [D, H, W]} of what lies between neighbouring surfaces, and all of the retina."""
    rows = np.arange(SHAPE[1])[None, :, None]

    def between(upper: str, lower: str) -> np.ndarray:
        return (rows >= one.surfaces[upper][:, None]) & (rows < one.surfaces[lower][:, None])

    names = list(one.surfaces)
    return {"retina": between("ILM", "BM")} | {pair[0]: between(*pair) for pair in pairwise(names)}


def write_spacing(root: Path) -> None:
    """volume.yaml: the spacing of every imitated volume below."""
    text = yaml.safe_dump({"spacing_mm": list(SPACING_MM)}, default_flow_style=None)
    write_file(
        root / FOLDER_SIDECAR, f"# an imitation: fewer and larger voxels than in the set\n{text}".encode()
    )


def write_image(path: Path, pixels: np.ndarray) -> None:
    """uint8 [H, W] or [H, W, 3] in the kind of the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_mat(path: Path, **arrays: Any) -> None:
    """A MATLAB file, version 5."""
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, arrays, do_compression=True)


def write_npz(path: Path, **arrays: Any) -> None:
    """A compressed archive of arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def write_mhd(path: Path, voxels: np.ndarray) -> None:
    """voxels [D, H, W] in a .mhd and its .raw."""
    write_metaimage(path, voxels, SPACING_MM)


def write_xlsx(path: Path, rows: list[dict[str, Any]]) -> None:
    """A sheet with a header line; needs openpyxl."""
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_excel(path, index=False)


def _octa500(root: Path) -> None:
    write_spacing(root)
    rows = []
    for n, number in enumerate([*range(10001, 10007), 10181, 10182, 10201, 10202]):
        kind = ("normal", "drusen")[n % 2]
        one = eye(kind, n)
        for frame, pixels in enumerate(one.voxels, start=1):
            write_image(root / "OCTA_6mm" / "OCT" / str(number) / f"{frame}.bmp", pixels)
        surfaces = np.stack([one.surfaces[name] for name in _OCTA500_SURFACES]) + 1
        write_mat(root / "Label" / "GT_Layers" / f"{number}.mat", Layer=surfaces)
        disease = {"normal": "NORMAL", "drusen": "AMD"}[kind]
        side = {"L": "OS", "R": "OD"}[one.laterality]
        rows.append({"ID": number, "Sex": "F", "OS/OD": side, "Age": one.age, "Disease": disease})
    write_xlsx(root / "Text labels.xlsx", rows)


def _duke_amd(root: Path) -> None:
    write_spacing(root)
    for n in range(10):
        group, kind = (("AMD", "drusen"), ("Control", "normal"))[n % 2]
        one = eye(kind, n)
        maps = np.stack([one.surfaces[name] for name in _DUKE_AMD_SURFACES], axis=-1) + 1
        maps[:, :2] = np.nan  # not graded at the rim
        name = f"Farsiu_Ophthalmology_2013_{group}_Subject_{1001 + n // 2}.mat"
        write_mat(root / group / name, images=one.voxels.transpose(1, 2, 0), layerMaps=maps, Age=one.age)


def _duke_dme(root: Path) -> None:
    write_spacing(root)
    ungraded = [1, SHAPE[0] - 1]
    for n in range(10):
        one = eye("fluid", n)
        layers = np.stack([one.surfaces[name] for name in _DUKE_DME_SURFACES]) + 1
        fluid = one.lesions["intraretinal_fluid"].astype(float)
        layers[:, ungraded], fluid[ungraded] = np.nan, np.nan
        arrays = {f"manualLayers{grader}": layers.transpose(0, 2, 1) for grader in (1, 2)}
        arrays |= {f"manualFluid{grader}": fluid.transpose(1, 2, 0) for grader in (1, 2)}
        write_mat(root / f"Subject_{n + 1:02d}.mat", images=one.voxels.transpose(1, 2, 0), **arrays)


def _srinivasan(root: Path) -> None:
    write_spacing(root)
    for n in range(12):
        kind, name = (("drusen", "AMD"), ("fluid", "DME"), ("normal", "NORMAL"))[n % 3]
        folder = root / "Publication_Dataset" / f"{name}{n // 3 + 1}" / "TIFFs" / "8bitTIFFs"
        for frame, pixels in enumerate(eye(kind, n).voxels, start=1):
            write_image(folder / f"{frame:03d}.tif", pixels)


def _retouch(root: Path) -> None:
    for n in range(9):
        maker = ("Cirrus", "Spectralis", "Topcon")[n % 3]
        one = eye(("normal", "fluid")[n % 2], n)
        folder = root / f"RETOUCH-TrainingSet-{maker}" / f"TRAIN{n + 1:03d}"
        is_wide = maker == "Spectralis"  # which comes in 16 bits
        write_mhd(folder / "oct.mhd", one.voxels.astype(np.uint16) * 257 if is_wide else one.voxels)
        reference = np.zeros_like(one.voxels)
        names = ("intraretinal_fluid", "subretinal_fluid", "drusen")
        for value, name in enumerate(names, start=1):
            reference[one.lesions[name]] = value
        write_mhd(folder / "reference.mhd", reference)


def _olives(root: Path) -> None:
    write_spacing(root)
    rows = []
    for n in range(10):
        trial, kind = (("Prime_FULL", "drusen"), ("TREX DME", "fluid"))[n % 2]
        place = n // 2  # among the trial's volumes: two visits of a person
        one = eye(kind, place + 5 * (n % 2))
        visit, eyes = f"{'WV'[n % 2]}{place % 2 + 1}", {"L": "OS", "R": "OD"}[one.laterality]
        patient = (f"01-{place // 2 + 1:03d}", f"02{place // 2 + 1:02d}GOS")[n % 2]
        folder = f"{trial}/{'GILA/' if n % 2 else ''}{patient}/{visit}/{eyes}"
        for frame, pixels in enumerate(one.voxels):
            name = f"TREX_{patient}_{frame:06d}.tif" if n % 2 else f"{frame}.png"
            write_image(root / "OLIVES" / folder / name, pixels)
            fluid = {name: int(one.lesions[name][frame].any()) for name in one.lesions}
            rows.append(
                {
                    owners.OLIVES_PATH: f"/{folder}/{name}",
                    "Scan (n/49)": frame + 1,
                    "Fluid (IRF)": fluid["intraretinal_fluid"],
                    "Fluid (SRF)": fluid["subretinal_fluid"],
                    "Eye_ID": n,
                    "BCVA": 80 - n,
                    "CST": 250 + 10 * n,
                    "Patient_ID": n,
                }
            )
        if n % 2 == 0:
            write_image(root / "OLIVES" / folder / "fundus.png", one.voxels[:, 0])
    text = io.StringIO()
    table = csv.DictWriter(text, rows[0])
    table.writeheader()
    table.writerows(rows)
    write_file(
        root / "OLIVES_Dataset_Labels" / "full_labels" / "Biomarker_Clinical_Data_Images.csv",
        text.getvalue().encode(),
    )


def _neh_ut(root: Path) -> None:
    write_spacing(root)
    for n in range(12):
        kind, name = (("normal", "NORMAL"), ("drusen", "DRUSEN"), ("fluid", "CNV"))[n % 3]
        one = eye(kind, n)
        folder = root / name / str(n // 3 + 1)
        if n < 3:
            folder /= one.laterality
        for frame, pixels in enumerate(one.voxels, start=1):
            write_image(folder / f"{frame}.png", pixels)


def _oimhs(root: Path) -> None:
    write_spacing(root)
    rows = []
    for n in range(10):
        one = eye(("normal", "fluid")[n % 2], n)
        regions = layers(one)
        values = np.zeros(one.voxels.shape, np.uint8)
        values[regions["retina"]], values[regions["BM"]] = 3, 4
        values[one.lesions["intraretinal_fluid"]] = 2
        values[one.lesions["subretinal_fluid"]] = 1
        colours = np.array([(0, 0, 0), *owners.OIMHS_COLOURS.values()], np.uint8)[values]
        for frame, pixels in enumerate(one.voxels, start=1):
            pair = np.concatenate([np.repeat(pixels[..., None], 3, axis=-1), colours[frame - 1]], axis=1)
            write_image(root / "Images" / str(n + 1) / f"{frame}.png", pair)
        person = 100 + max(n, 1)  # the first two eyes are of one, and of two stages
        row = {"Patient ID": person, "Eye ID": n + 1, "Eye category": "", "Age(years)": one.age, "Sex": "F"}
        rows.append(row | {"Stage": n % 4 + 1})
    write_xlsx(root / "Demographics of the participants.xlsx", rows)


def _octave(root: Path) -> None:
    write_spacing(root)
    top = root / "nnUNet_raw" / "Dataset001_OCTAVE"
    for n in range(10):
        kind, disease = (("normal", "NORMAL"), ("fluid", "DME"))[n % 2]
        one = eye(kind, n)
        masks = {**layers(one), **{name: one.lesions[name] for name in _OCTAVE_LESIONS}}
        masks.pop("retina")
        values = np.zeros(one.voxels.shape, np.uint8)
        for value, mask in enumerate(masks.values(), start=1):
            values[mask] = value
        for folder, name, pages in (("imagesTr", "_0000", one.voxels), ("labelsTr", "", values)):
            data = io.BytesIO()
            tifffile.imwrite(
                data, pages, photometric="minisblack", compression="zlib" if name == "" else None
            )
            write_file(top / folder / f"OCTAVE_{disease}_{n + 1:03d}{name}.tif", data.getvalue())
    names = {"background": 0, **{name: n for n, name in enumerate(masks, start=1)}}
    write_file(top / "dataset.json", json.dumps({"channel_names": {"0": "OCT"}, "labels": names}).encode())


def _fairvision(root: Path) -> None:
    write_spacing(root)
    values = {
        "Glaucoma": (0, 1),
        "AMD": ("not.in.icd.table", "early.dry"),
        "DR": ("not.in.icd.table", "severe.npdr"),
    }
    for place, disease in enumerate(values):
        for n in range(6):
            one = eye(("normal", "drusen")[n % 2], 3 * place + n // 2)  # no eye stands in two
            folder = list(owners.FAIRVISION_SPLITS)[n // 2]
            about = {"age": one.age, "male": n % 2, "race": n % 3, "hispanic": 0, "language": 1}
            label = {owners.FAIRVISION_LABELS[disease]: values[disease][n % 2]}
            path = root / disease / folder / f"data_{n + 1:05d}.npz"
            write_npz(path, oct_bscans=one.voxels, **label, **about)


def _octrima(root: Path) -> None:
    write_spacing(root)
    for n in range(10):
        one = eye("normal", n)
        surfaces = np.stack([one.surfaces[name] for name in _DUKE_DME_SURFACES]).transpose(0, 2, 1) + 1
        arrays = dict.fromkeys(("O1", "O2", "auto"), surfaces)
        write_mat(root / f"Subject {n + 1}.mat", volumedata=one.voxels.transpose(1, 2, 0), **arrays)


IMITATIONS: dict[str, Callable[[Path], None]] = {
    "octa500": _octa500,
    "duke_amd": _duke_amd,
    "duke_dme": _duke_dme,
    "srinivasan": _srinivasan,
    "retouch": _retouch,
    "olives": _olives,
    "neh_ut": _neh_ut,
    "oimhs": _oimhs,
    "octave": _octave,
    "fairvision": _fairvision,
    "octrima": _octrima,
}

if __name__ == "__main__":  # NAME FOLDER
    IMITATIONS[sys.argv[1]](Path(sys.argv[2]))
