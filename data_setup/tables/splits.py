"""Participants: what participants.tsv says of them, and splits that are the same in any order of the records.

In: a `Config` (data.participants_path, seed), or participants and a seed. Out: a `Participant` for each
person, or for each eye where the table has a column of eyes; sets of participant ids. Who is where follows
from a hash of (seed, purpose, id), not from an order or a random state; so a cohort of FEW_PEOPLE or more
that grows moves nobody. Its shares are those of the hash, not exact: 10 % of 200 participants are 20 give or
take 4. Below, only the hash would leave sides with too few to learn from or to judge (0.9^n of the cohorts of
n have no validation, 4 % at 30): shares are exact and stratified by group, and a growing cohort is cut again.
Whoever is in a store keeps the side (data_setup.prepare).
"""

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

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
from utils.storage import StorageNotFoundError, is_vacant

SPLITS = ("train", "val", "test")
FACTS = ("study_group", "clinical_site", "age")  # of a person
RECOMMENDED, SEEDED = "recommended_split", "seeded_70_10_20"  # where the splits come from
TREE = ("retinal_oct", "structural_oct")  # the folders of AI-READI
TEST_SHARE, VAL_SHARE = 0.2, 0.1
FEW_PEOPLE = 50  # below: exact shares; a public set without splits of its owners gets some
VAL_FRACTION = 0.1  # of the training participants validate a pre-training
SKILL_VOLUMES, SKILL_PEOPLE = 16, 4  # of validation, for a skill (pretraining/gauges/skill.py)
DEALT_SHARE, LEAST_PEOPLE = 0.2, 2  # of a public set: who validates, and who is tested
HASH, EXACT = "hash", "exact"  # how validation participants are cut inside train; EXACT: stores before HASH


def pretraining_split(
    records: Iterable[Any], fraction: float, seed: int, rule: str = HASH
) -> tuple[list[str], list[str], str]:
    """(training ids, validation ids, source): `fraction` of the recommended train participants validate.

    Records are `Record`s, or rows with the same attributes. `rule` EXACT cuts the exact number, stratified by
    study_group x clinical_site, and moves people when the cohort grows. Raises UserError for another rule.
    Sources: train_participants; recommended_val when train has fewer than two participants.
    """
    if rule not in (HASH, EXACT):
        expected = f"expected {EXACT} or {HASH}, found {rule!r}"
        raise UserError(f"splits: {expected}; the store is of a newer version")
    people = {str(r.person_id): (r.split, _label(r.study_group), _label(r.clinical_site)) for r in records}
    train = {p: (group, site) for p, (split, group, site) in people.items() if split == "train"}
    if len(train) < 2:
        official = sorted(p for p, (split, _, _) in people.items() if split == "val")
        return sorted(train), official, "recommended_val"
    if rule == EXACT:
        count = min(max(1, round(fraction * len(train))), len(train) - 1)
        val = stratified_choice(train, count, seed, "pretraining")
    else:
        order, places = _in_order(train, seed, "pretraining")
        val = set(order[: min(max(1, _num_below(places, fraction)), len(train) - 1)])
    return sorted(set(train) - val), sorted(val), "train_participants"


def seeded_split(group_of: Mapping[str, Hashable], seed: int) -> dict[str, str]:
    """{id: train | val | test}, 70/10/20 %: for cohorts that come without a recommended split.

    `group_of`: id -> its label, or whatever stands for none. Fewer than FEW_PEOPLE are cut exactly: a tenth,
    rounded up, validates, a fifth is tested, and each at least LEAST_PEOPLE of six or more people, without
    whom nothing is chosen or judged. Stratified by group; see above.
    """
    total = len(group_of)
    if total >= FEW_PEOPLE:
        order, places = _in_order(group_of, seed, "split")
        num_test = max(1, _num_below(places, TEST_SHARE))
        end_val = max(num_test + 1, _num_below(places, TEST_SHARE + VAL_SHARE))
        return {p: "test" if i < num_test else "val" if i < end_val else "train" for i, p in enumerate(order)}
    least = LEAST_PEOPLE if total >= 3 * LEAST_PEOPLE else int(total > 1)
    num_val = max(least, -(-total // 10)) if total > 2 else 0
    return _dealt(group_of, num_val, max(least, total // 5), seed, "split")


def seeded_order(ids: Collection[str], seed: int, purpose: str) -> list[str]:
    """The ids in an order that follows from the hash of (seed, purpose, id)."""
    return _in_order(ids, seed, purpose)[0]


def _in_order(ids: Collection[str], seed: int, purpose: str) -> tuple[list[str], list[float]]:
    """The ids by their places in 0..1, and the places: the hash of (seed, purpose, id)."""

    def place(person_id: str) -> float:
        digest = hashlib.sha256(f"{seed}/{purpose}/{person_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    order = sorted(ids, key=lambda p: (place(p), p))
    return order, [place(p) for p in order]


def _num_below(places: Iterable[float], limit: float) -> int:
    return sum(place < limit for place in places)


def stratified_choice(strata: Mapping[str, Hashable], count: int, seed: int, purpose: str) -> set[str]:
    """`count` of the ids: each stratum gives its share (largest remainder), by a seeded hash of the id."""

    def rank(text: str) -> str:
        return hashlib.sha256(f"{seed}/{purpose}/{text}".encode()).hexdigest()

    groups: dict[Hashable, list[str]] = {}
    for person_id in sorted(strata, key=rank):
        groups.setdefault(strata[person_id], []).append(person_id)
    total = max(1, len(strata))
    quota = {key: count * len(ids) // total for key, ids in groups.items()}
    by_remainder = sorted(groups, key=lambda k: (-(count * len(groups[k]) % total), rank(repr(k))))
    for key in by_remainder[: count - sum(quota.values())]:
        quota[key] += 1
    return {person_id for key, ids in groups.items() for person_id in ids[: quota[key]]}


def shortfalls(volumes: Iterable[tuple[str, str]], seed: int = 0) -> list[str]:
    """What a cohort is too small for, in lines, from (person, split) of each volume; empty for enough."""
    pairs = list(volumes)
    people = [SimpleNamespace(person_id=p, split=s, study_group="", clinical_site="") for p, s in set(pairs)]
    val = set(pretraining_split(people, VAL_FRACTION, seed)[1])
    num_volumes = sum(person in val for person, _ in pairs)
    lines = []
    if num_volumes < SKILL_VOLUMES or len(val) < SKILL_PEOPLE:
        lines.append(
            f"too few: no skill, so no verdict on a pre-training: it validates on {num_volumes} volumes of "
            f"{len(val)} people, and {SKILL_VOLUMES} of {SKILL_PEOPLE} are needed"
        )
    sides = {side: sum(one.split == side for one in people) for side in ("train", "val", "test")}
    if few := [f"{side} has {n}" for side, n in sides.items() if n < LEAST_PEOPLE]:
        needed = f"{LEAST_PEOPLE} people or more, with labels of two classes, are needed in each split"
        lines.append(f"too few: no probe and no head: {', '.join(few)}, and {needed}")
    if lines:
        lines.append(
            "  three ways out, before you train: recommended_split of participants.tsv says who is in train, "
            "val and test; eval.protocol=crossfit evaluates an encoder in folds; or more people"
        )
    return lines


def needs_splits(splits: Mapping[str, str]) -> bool:
    """Whether a public set of these people, with the splits of its owners, gets some here."""
    return not any(splits.values()) and 3 * LEAST_PEOPLE <= len(splits) < FEW_PEOPLE


def dealt_splits(group_of: Mapping[str, Hashable]) -> dict[str, str]:
    """person -> train | val | test for a set without splits: a fifth each validates and tests, at least two.

    By labels, then by a hash of the ids. By only the hash a set of ten may have one person to validate on,
    with which no head is trained.
    """
    count = max(LEAST_PEOPLE, round(DEALT_SHARE * len(group_of)))  # of each side
    return _dealt(group_of, count, count, 0, "plug")


def _dealt(
    group_of: Mapping[str, Hashable], num_val: int, num_test: int, seed: int, purpose: str
) -> dict[str, str]:
    """person -> train | val | test with these numbers of people, by their groups, then by the hash."""
    test = stratified_choice(group_of, num_test, seed, f"{purpose} test")
    rest = {person: group for person, group in group_of.items() if person not in test}
    val = stratified_choice(rest, num_val, seed, f"{purpose} val")
    return {p: "test" if p in test else "val" if p in val else "train" for p in group_of}


def _label(value: Any) -> str:
    return value if isinstance(value, str) else ""  # a table has NaN where a record has None


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
            what = f"expected {' | '.join(SPLITS)}, found {split!r}"
            raise UserError(f"{url}: recommended_split of {person_id}: {what}")
        eye = eye_of(row, f"{url}: line {line}")
        group, site = label_of(row.get("study_group")), label_of(row.get("clinical_site"))
        person = Participant(split, group, site, integer_of(row.get("age")))
        eyes = people.setdefault(person_id, {})
        if eyes.setdefault(eye, person) != person:
            what = f"row of the {eye} eye" if eye else "row"
            raise UserError(f"{url}: participant {person_id}: expected one {what}, found two that differ")
        if len(splits := {p.split for p in eyes.values()}) > 1:
            what = f"recommended_split for both eyes, found {', '.join(sorted(splits))}"
            raise UserError(f"{url}: participant {person_id}: expected one {what}")
    if "recommended_split" in columns:
        return people, RECOMMENDED
    groups = {p: _only({e.study_group for e in eyes.values()}) for p, eyes in people.items() if p in listed}
    seeded = seeded_split(groups, cfg.seed)
    for p, eyes in people.items():
        people[p] = {eye: replace(person, split=seeded.get(p, "")) for eye, person in eyes.items()}
    return people, SEEDED


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
    """Whether the manifest is at another place, and nothing at all at the participants' usual one."""
    root, url = cfg.data.gcs_root, cfg.data.participants_path
    is_own = cfg.data.manifest_path != f"{root}/{TREE[0]}/manifest.tsv"
    return is_own and url == f"{root}/participants.tsv" and is_vacant(url, cfg.data.storage_options)
