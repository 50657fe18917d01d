"""Participant-level splits: stratified, exact in size, and the same whatever order the records come in.

In: participants with study group and clinical site, and a seed. Out: sets of participant ids. The choice
depends on a hash of (seed, purpose, id), not on an order or a random state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any


def pretraining_split(records: Iterable[Any], fraction: float, seed: int) -> tuple[list[str], list[str], str]:
    """(training ids, validation ids, source): `fraction` of the recommended train participants validate.

    Stratified by study_group x clinical_site. Records are `Record`s, or rows with the same attributes.
    Sources: train_participants; recommended_val when train has fewer than two participants.
    """
    people = {str(r.person_id): (r.split, _label(r.study_group), _label(r.clinical_site)) for r in records}
    train = {p: (group, site) for p, (split, group, site) in people.items() if split == "train"}
    if len(train) < 2:
        official = sorted(p for p, (split, _, _) in people.items() if split == "val")
        return sorted(train), official, "recommended_val"
    count = min(max(1, round(fraction * len(train))), len(train) - 1)
    val = stratified_choice(train, count, seed, "pretraining")
    return sorted(set(train) - val), sorted(val), "train_participants"


def seeded_split(strata: Mapping[str, Hashable], seed: int) -> dict[str, str]:
    """{id: train | val | test}, 70/10/20 %: for cohorts that come without a recommended split."""
    test = stratified_choice(strata, round(0.2 * len(strata)), seed, "test")
    rest = {p: s for p, s in strata.items() if p not in test}
    val = stratified_choice(rest, round(0.1 * len(strata)), seed, "val")
    return {p: "test" if p in test else "val" if p in val else "train" for p in strata}


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


def _label(value: Any) -> str:
    return value if isinstance(value, str) else ""  # a table has NaN where a record has None
