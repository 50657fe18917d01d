"""Tables of cohorts as AI-READI writes them, a configuration that reads them, an audit of their files."""

from pathlib import Path

from data_setup.check import audit_files, list_tree
from data_setup.manifest import read_records
from data_setup.phantom.files import MANIFEST_COLUMNS
from tests.support.pipeline_factory import ROOT
from utils.config.load import load_config
from utils.config.schema import Config
from utils.storage import write_text

NOTHING: dict[str, list[str]] = {"missing": [], "orphans": [], "unused_missing": []}
TREE = "retinal_oct/structural_oct"
COLUMNS = list(MANIFEST_COLUMNS)  # in the order of version 3
PEOPLE = ["person_id", "clinical_site", "study_group", "age", "study_visit_date", "recommended_split"]
GROUPS = ("healthy", "pre_diabetes_lifestyle_controlled", "insulin_dependent")
SITES = ("UW", "UCSD", "UAB")
NAMES = {  # device folder: file-name part, version 3
    "topcon_triton": "triton_macula_6x6_octa_oct",
    "zeiss_cirrus": "cirrus_mac_oct_oct",
    "heidelberg_spectralis": "spectralis_ppol_mac_hr_oct_oct",
}


def row(
    person: str, device: str = "topcon_triton", uid: str = "1.1", side: str = "r", **changes: str
) -> dict[str, str]:
    """One manifest row; a `name` argument replaces the protocol part of the file name."""
    name = changes.pop("name", NAMES[device])
    path = f"/retinal_oct/structural_oct/{device}/{person}/{person}_{name}_{side}_{uid}.dcm"
    values = dict.fromkeys(COLUMNS, "x") | {
        "person_id": person,
        "anatomic_region": "Macula, 6 x 6",
        "laterality": side.upper(),
        "height": "992",
        "width": "320",
        "number_of_frames": "320",
        "pixel_spacing": "[0.0026, 0.01875]",
        "slice_thickness": "0.01875",
        "sop_instance_uid": uid,
        "filepath": path,
        "reference_filepath": "",
    }
    return values | changes


def person(index: int, split: str | None = None, **changes: str) -> dict[str, str]:
    """One row of participants.tsv."""
    values = {
        "person_id": str(1000 + index),
        "clinical_site": SITES[index % 3],
        "study_group": GROUPS[index // 3 % 3],
        "age": str(40 + index % 50),
        "study_visit_date": "2024-01-01",
        "recommended_split": split or ("train", "val", "test")[index % 3],
    }
    return values | changes


def table(rows: list[dict[str, str]], columns: list[str]) -> str:
    lines = ["\t".join(columns)] + ["\t".join(r[c] for c in columns) for r in rows]
    return "\n".join(lines) + "\n"


def write_tree(
    root: Path | str,
    rows: list[dict[str, str]],
    people: list[dict[str, str]],
    columns: list[str] = COLUMNS,
    people_columns: list[str] = PEOPLE,
) -> None:
    """The two tables of a cohort, without its image files."""
    write_text(f"{root}/retinal_oct/manifest.tsv", table(rows, columns))
    write_text(f"{root}/participants.tsv", table(people, people_columns))


def config(root: Path | str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "smoke_test.yaml", [f"data.gcs_root={root}", *overrides])


def audit_of(cfg: Config) -> dict[str, list[str]]:
    listing = read_records(cfg)
    return audit_files(listing, list_tree(listing, cfg.data.storage_options))


def people_of(*ids: str) -> list[dict[str, str]]:
    return [person(i, person_id=p) for i, p in enumerate(ids)]
