"""Read participants.tsv: whose eyes they are, in which split, and what is known of them.

In: a `Config` (data.participants_path, seed). Out: a `Participant` for each person, or for each eye where the
table has a column of eyes. Without recommended_split the split is 70/10/20 % by a hash of the id; fewer than
50 people of the manifest are cut exactly, stratified by study_group.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from data_setup.tables.splits import seeded_split
from data_setup.tables.text import (
    SIDE_COLUMNS,
    SIDES,
    fact_of,
    integer_of,
    label_of,
    person_id_of,
    read_table,
    twin_ids,
)
from utils.config.schema import Config
from utils.errors import UserError
from utils.storage import StorageNotFoundError

SPLITS = ("train", "val", "test")
FACTS = ("study_group", "clinical_site", "age")  # of a person
RECOMMENDED, SEEDED = "recommended_split", "seeded_70_10_20"  # where the splits come from
TREE = ("retinal_oct", "structural_oct")  # the folders of AI-READI


@dataclass(frozen=True)
class Participant:
    """What participants.tsv says of a person; the names are those of `Record`."""

    split: str  # train | val | test; empty where the table leaves it so
    study_group: str | None
    clinical_site: str | None
    age: int | None


def read_participants(cfg: Config, listed: Collection[str]) -> tuple[dict[str, dict[str, Participant]], str]:
    """({person_id: {eye: participant}}, where the split comes from); raises UserError.

    The eye is L or R where the table has a column laterality or eye, else empty. Without a table at its usual
    place, beside a manifest at another place, the people are those `listed`.
    """
    url, people = cfg.data.participants_path, dict[str, dict[str, Participant]]()
    try:
        table, columns, id_column = read_table(url, cfg.data.storage_options, ())
    except StorageNotFoundError:
        if not may_lack_participants(cfg):
            raise
        table, columns, id_column = {}, [], ""
        people = {person_id: {"": Participant("", None, None, None)} for person_id in listed}
    known = {*listed, *twin_ids(row[id_column] for row in table.values())}
    for line, row in table.items():
        person_id = person_id_of(row[id_column], known)
        if person_id is None:
            continue
        split = fact_of(row.get("recommended_split")) or ""
        if split and split not in SPLITS:
            raise UserError(
                f"{url}: recommended_split of {person_id}: expected {' | '.join(SPLITS)}, found {split!r}"
            )
        eye = eye_of(row, f"{url}: line {line}")
        group, site = label_of(row.get("study_group")), label_of(row.get("clinical_site"))
        person = Participant(split, group, site, integer_of(row.get("age")))
        eyes = people.setdefault(person_id, {})
        if eyes.setdefault(eye, person) != person:
            what = f"row of the {eye} eye" if eye else "row"
            raise UserError(f"{url}: participant {person_id}: expected one {what}, found two that differ")
        if len(splits := {p.split for p in eyes.values()}) > 1:
            raise UserError(
                f"{url}: participant {person_id}: expected one recommended_split for both eyes, found "
                f"{', '.join(sorted(splits))}"
            )
    if "recommended_split" in columns:
        return people, RECOMMENDED
    groups = {p: _only({e.study_group for e in eyes.values()}) for p, eyes in people.items() if p in listed}
    seeded = seeded_split(groups, cfg.seed)
    return {
        p: {eye: replace(person, split=seeded.get(p, "")) for eye, person in eyes.items()}
        for p, eyes in people.items()
    }, SEEDED


def of_eye(eyes: Mapping[str, Participant], side: str) -> Participant | None:
    """What is known of one eye of a person; of an unknown eye what all rows agree on; None: no row."""
    known = eyes.get(side) or eyes.get("")
    if known or not eyes:
        return known
    rows = list(eyes.values())
    facts = {name: _only({getattr(row, name) for row in rows}) for name in FACTS}
    return Participant(rows[0].split, **facts)


def _only(values: Collection[Any]) -> Any:
    """The value that all share; None where they differ."""
    return next(iter(values)) if len(values) == 1 else None


def eye_of(row: Mapping[str, str], where: str) -> str:
    """L | R by the table's column of eyes, empty where it has none; raises UserError for another word."""
    text = next((fact_of(row[name]) for name in SIDE_COLUMNS if name in row), None)
    if text is None:
        return ""
    if text.lower() not in SIDES:
        raise UserError(f"{where}: expected an eye as OD, OS, L, R, left or right, found {text!r}")
    return SIDES[text.lower()]


def may_lack_participants(cfg: Config) -> bool:
    """Whether the manifest is at another place and the participants would be at their usual one."""
    root = cfg.data.gcs_root
    is_own = cfg.data.manifest_path != f"{root}/{TREE[0]}/manifest.tsv"
    return is_own and cfg.data.participants_path == f"{root}/participants.tsv"
