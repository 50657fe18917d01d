"""Trees of files of any kind, the command that indexes them, the tables it writes and the store of them."""

import csv
from collections.abc import Callable
from pathlib import Path

from pydicom.dataset import FileDataset

from data_setup.index import cli
from data_setup.store.reader import PreparedStore
from tests.data_setup.importers import reading
from tests.data_setup.importers.reading import GRID, SPACING
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import write_images

Table = dict[str, dict[str, str]]


def maker(patient: str, side: str) -> Callable[[FileDataset], None]:
    """A header of a device that no table knows."""

    def edit(ds: FileDataset) -> None:
        ds.PatientID, ds.ImageLaterality, ds.PatientAge = patient, side, "061Y"
        ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "Optovue", "Avanti", ""
        distance = ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        distance.SpacingBetweenSlices = distance.SliceThickness
        ds.SOPInstanceUID = f"1.2.{int.from_bytes(f'{patient}{side}'.encode())}"

    return edit


def write_dicoms(root: Path, people: range) -> None:
    """Both eyes of each person, in files without an ending, two people in a folder."""
    for n in people:
        for seed, side in enumerate("LR", start=2 * n):
            about = {"spacing": SPACING, "references": rows_down(6), "edit": maker(f"MRN-{n}", side)}
            write_opt(root / f"export{n // 2}", speckle(seed=seed), name=f"IM{n:03d}{side}", **about)


def write_image_folders(root: Path, people: range) -> None:
    for n in people:
        for seed, side in enumerate(("OD", "OS"), start=100 + 2 * n):
            write_images(root / f"{n}" / "visit1" / side, speckle(seed=seed), first=1)


def table(path: Path, key: str = "filepath") -> Table:
    with path.open() as file:
        return {row[key]: row for row in csv.DictReader(file, delimiter="\t")}


def index(root: Path | str, *more: str) -> int:
    return cli.main([str(root), "--workers", "0", *more])


def run_prepare(root: Path, store: Path, *more: str) -> PreparedStore:
    """The store of an indexed tree, on a small grid."""
    return reading.run_prepare(root, store, *GRID, *more)
