"""Write a synthetic AI-READI tree: valid OPT DICOMs with knowable anatomy and labels, and faults on request.

    python -m data_setup.phantom --out runs/phantom --participants 120 --seed 0 --faults

In: a number of participants, a seed, a size. Out, under --out: participants.tsv, participants.json,
retinal_oct/manifest.tsv, retinal_oct/structural_oct/<device>/<person>/<file>.dcm, truth/<sop uid>.npz for
every good volume, and synthetic.json (the arguments and the planted faults), which marks the tree as
synthetic. The same arguments give a byte-identical tree, for any number of workers. The tree is written to
DIR.partial and renamed when it is complete; the remains of a killed run are deleted. With --heights also
retinal_octa/manifest.tsv and retinal_octa/segmentation: height maps of the OCTA-type scans, with --flow
their flow cubes and en-face images (retinal_octa/flow_cube, retinal_octa/enface). With
--every-device both eyes of each participant are scanned once by each of the four devices. With --labels
also labels of voxels (data_setup/phantom/beside.py), which `data_setup.prepare --labels` reads.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from data_setup.phantom.beside import LABEL_KINDS, write_flow, write_heights, write_labels
from data_setup.phantom.cohort import MAX_PARTICIPANTS, Participant, make_participants
from data_setup.phantom.dicom import SYNTAXES
from data_setup.phantom.faults import plant_faults
from data_setup.phantom.files import MANIFEST_COLUMNS, write_person
from data_setup.tables.text import table_text
from utils.cli import announce, run_cli
from utils.errors import UserError
from utils.help_pages import PeopleParser
from utils.terminal import track
from utils.workers import pool_of

FORMAT_VERSION = 1
_KINDS: tuple[str, ...] = ("cardiac_ecg", "clinical_data", "environment", "retinal_flio", "retinal_oct")
_KINDS += ("retinal_octa", "retinal_photography", "wearable_activity_monitor", "wearable_blood_glucose")
PARTICIPANT_COLUMNS = {
    "person_id": "Identifier of the participant",
    "clinical_site": "Site of the study visit",
    "study_group": "Diabetes status and treatment",
    "age": "Age in years at the study visit",
    "study_visit_date": "Date of the study visit",
    "recommended_split": "Recommended data split by participant: train, val or test",
    **dict.fromkeys(_KINDS, "Data of this kind present"),
}


def write_tables(out: Path, people: list[Participant], rows: list[dict[str, object]], naming: str) -> None:
    """participants.tsv, participants.json and retinal_oct/manifest.tsv."""
    id_column = "participant_id" if naming == "v2" else "person_id"
    absent = dict.fromkeys(PARTICIPANT_COLUMNS, "FALSE")
    table = []
    for p in people:
        known = {
            id_column: p.person_id,
            "clinical_site": p.clinical_site,
            "study_group": p.study_group,
            "age": p.age,
            "study_visit_date": p.study_visit_date,
            "recommended_split": p.split,
        }
        table.append(absent | known | {"clinical_data": "TRUE", "retinal_oct": "TRUE"})
    columns = [id_column, *list(PARTICIPANT_COLUMNS)[1:]]
    (out / "participants.tsv").write_text(table_text(columns, table), encoding="utf-8")
    described = dict(zip(columns, PARTICIPANT_COLUMNS.values(), strict=True))
    text = json.dumps({c: {"Description": d} for c, d in described.items()}, indent=2) + "\n"
    (out / "participants.json").write_text(text, encoding="utf-8")
    ordered = sorted(rows, key=lambda r: (str(r["person_id"]), str(r["manufacturer"]), str(r["filepath"])))
    renamed = [{id_column: row["person_id"], **row} for row in ordered]
    text = table_text([id_column, *MANIFEST_COLUMNS[1:]], renamed)
    (out / "retinal_oct" / "manifest.tsv").write_text(text, encoding="utf-8")


def write_tree(
    out: Path,
    participants: int,
    seed: int,
    size: str = "small",
    faults: bool = False,
    naming: str = "v3",
    transfer_syntax: str = "mixed",
    workers: int | None = None,
    heights: bool = False,
    every_device: bool = False,
    labels: str | None = None,
    flow: bool = False,
) -> dict[str, object]:
    """Write the tree to `out` (new or empty) and return the content of synthetic.json; raises UserError.

    workers: processes; None: one per CPU, 0 or 1: this one. heights, flow: of the OCTA-type
    scans. every_device: each eye once on each device, in place of 2-4 scans a person. labels: one of
    LABEL_KINDS.
    """
    if not 1 <= participants <= MAX_PARTICIPANTS:
        raise UserError(f"--participants: expected 1..{MAX_PARTICIPANTS} (4-digit ids), found {participants}")
    for name, number in (("--seed", seed), ("--workers", workers)):
        if number is not None and number < 0:
            raise UserError(f"{name}: expected 0 or more, found {number}")
    with _whole_directory(out) as partial_out:
        (partial_out / "truth").mkdir()
        (partial_out / "retinal_oct").mkdir()
        people = make_participants(participants, seed, every_device)
        job = partial(
            write_person,
            out=partial_out,
            seed=seed,
            size=size,
            naming=naming,
            transfer_syntax=transfer_syntax,
        )
        processes = min((os.cpu_count() or 1) if workers is None else workers, len(people))
        with pool_of(processes if processes > 1 else 0) as pool:
            parts = track(pool.map(job, people), len(people), "phantom", "participants")
            rows = [row for part in parts for row in part]
        marker: dict[str, object] = {
            "synthetic": True,
            "format_version": FORMAT_VERSION,
            "arguments": {"participants": participants, "seed": seed, "size": size, "faults": faults}
            | {"naming": naming, "transfer_syntax": transfer_syntax},
            "volumes": len(rows),
            "faults": plant_faults(partial_out, people, rows, seed, size, naming) if faults else [],
        }
        write_tables(partial_out, people, rows, naming)
        if every_device:
            marker["every_device"] = True
        if heights:
            write_heights(partial_out, rows)
        if flow:
            write_flow(partial_out, rows, seed)
        if labels is not None:
            marker["labels"] = labels
            write_labels(partial_out, labels)
        text = json.dumps(marker, indent=2) + "\n"
        (partial_out / "synthetic.json").write_text(text, encoding="utf-8")
        return marker


@contextmanager
def _whole_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its place when the block ends well; raises UserError."""
    out = out.resolve()
    partial_out = out.with_name(f".{out.name}.phantom-partial")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: expected a new or empty directory, found a file")
    try:
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out}: expected a new or empty directory, found files in it")
        if partial_out.exists():
            shutil.rmtree(partial_out)
        partial_out.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out}: expected a place to write to, found: {error}") from error
    yield partial_out
    try:
        os.replace(partial_out, out)
    except OSError as error:
        raise UserError(f"{out}: expected {partial_out} to move here, found: {error}") from error


def main(argv: list[str] | None = None) -> None:
    """Command line: see the module's docstring."""
    parser = PeopleParser("data_setup.phantom", __doc__ or "")
    parser.add_argument("--out", type=Path, required=True, help="new or empty directory")
    parser.add_argument("--participants", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--faults", action="store_true", help="plant one bad file of each kind")
    parser.add_argument("--naming", choices=("v3", "v2"), default="v3")
    parser.add_argument("--transfer-syntax", choices=("mixed", *SYNTAXES), default="mixed")
    parser.add_argument("--heights", action="store_true", help="write height maps of OCTA-type scans")
    parser.add_argument(
        "--flow", action="store_true", help="write flow cubes and en-face images of OCTA-type scans"
    )
    parser.add_argument(
        "--every-device", action="store_true", help="each eye once on each device, for benchmarks.same_eye"
    )
    parser.add_argument("--labels", choices=LABEL_KINDS, help="write labels of voxels beside the scans")
    parser.add_argument("--workers", type=int, help="processes (default: one per CPU); 0: in this one")
    args = parser.parse_args(argv)
    announce(f"phantom: {args.participants} synthetic participants are drawn into {args.out}")
    marker = write_tree(**vars(args))
    print(f"{marker['volumes']} volumes of {args.participants} participants in {args.out}")
    where = shlex.quote(f"data.gcs_root={args.out}")
    print(f"next: python -m data_setup.prepare --config configs/smoke_test.yaml {where}")


if __name__ == "__main__":
    run_cli(main)
