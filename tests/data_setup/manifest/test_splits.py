"""Splits by participant: the recommended one, or seeded ones that a growing cohort does not change."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from data_setup.manifest import Record, read_records
from data_setup.tables.splits import pretraining_split, seeded_split, stratified_choice
from tests.data_setup.manifest.cohorts import GROUPS, PEOPLE, SITES, config, person, row, write_tree
from utils.errors import UserError


def cohort(count: int = 200, files: int = 2) -> list[Record]:
    """Records of `count` participants, 70 % of them train, in uneven strata."""
    rng = random.Random(0)
    records = []
    for index in range(count):
        about = {
            "person_id": str(1000 + index),
            "split": ("train" if index % 10 < 7 else "val" if index % 10 == 7 else "test"),
            "study_group": rng.choice(GROUPS + GROUPS[:1]),
            "clinical_site": rng.choice(SITES + SITES[:2]),
            "age": 50,
        }
        for file in range(files):
            path = f"{index}/{file}.dcm"
            records.append(Record(path=path, url=path, device="topcon_triton", **about))
    return records


def test_pretraining_split_is_inside_train_disjoint_and_of_its_size() -> None:
    records = cohort(2000, files=1)
    train, val, source = pretraining_split(records, 0.1, seed=0)
    official = {r.person_id for r in records if r.split == "train"}
    assert source == "train_participants"
    assert not set(train) & set(val)
    assert set(train) | set(val) == official
    assert abs(len(val) / len(official) - 0.1) < 0.025  # three standard errors
    site = {r.person_id: r.clinical_site for r in records}
    everyone, chosen = Counter(site[p] for p in official), Counter(site[p] for p in val)
    for key, number in everyone.items():
        assert abs(chosen[key] / number - 0.1) < 0.045, key


def test_a_cohort_that_grows_moves_nobody() -> None:
    records = cohort(600, files=1)
    for count in (200, 400):
        (train, val, _), (all_train, all_val, _) = (
            pretraining_split(part, 0.1, seed=0) for part in (records[:count], records)
        )
        assert set(train) <= set(all_train)
        assert set(val) <= set(all_val)
    ids = [str(n) for n in range(2280 + 228)]
    before, after = (seeded_split(dict.fromkeys(part), 0) for part in (ids[:2280], ids))
    assert {p: after[p] for p in before} == before
    shares = Counter(after.values())
    for name, share in {"train": 0.7, "val": 0.1, "test": 0.2}.items():
        assert abs(shares[name] / len(ids) - share) < 0.03, name


@pytest.mark.parametrize("seed", range(20))
def test_every_side_of_a_small_cohort_has_somebody(seed: int) -> None:
    sides = {1: (1, 0, 0), 2: (1, 0, 1), 3: (1, 1, 1), 5: (3, 1, 1)}
    sides |= {6: (2, 2, 2), 10: (6, 2, 2), 24: (17, 3, 4), 49: (35, 5, 9)}
    for count, (train, val, test) in sides.items():
        split = Counter(seeded_split(dict.fromkeys(map(str, range(count))), seed).values())
        assert (split["train"], split["val"], split["test"]) == (train, val, test)


@pytest.mark.parametrize("seed", range(5))
def test_a_small_cohort_is_stratified_by_what_is_known_of_people(seed: int) -> None:
    group = {f"p{n}": "rare" if n < 10 else "usual" for n in range(40)}
    counts = Counter((side, group[p]) for p, side in seeded_split(group, seed).items())
    assert [counts[side, "rare"] for side in ("train", "val", "test")] == [7, 1, 2]


def test_people_without_scans_take_no_place_in_a_small_cohort(tmp_path: Path) -> None:
    people = [person(i) for i in range(90)]
    rows = [row(p["person_id"], uid=p["person_id"]) for p in people[::5]]
    write_tree(tmp_path, rows, people, people_columns=PEOPLE[:-1])
    listing = read_records(config(tmp_path))
    assert Counter(r.split for r in listing.records) == {"train": 13, "val": 2, "test": 3}
    group = {r.person_id: r.study_group for r in listing.records}
    assert {r.person_id: r.split for r in listing.records} == seeded_split(group, 0)


def test_a_store_from_before_the_hash_keeps_its_exact_and_stratified_choice() -> None:
    records = cohort()
    train, val, source = pretraining_split(records, 0.1, seed=0, rule="exact")
    official = {r.person_id for r in records if r.split == "train"}
    assert source == "train_participants"
    assert set(train) | set(val) == official
    assert len(val) == round(0.1 * len(official)) == 14
    stratum = {r.person_id: (r.study_group, r.clinical_site) for r in records}
    everyone, chosen = Counter(stratum[p] for p in official), Counter(stratum[p] for p in val)
    for key, number in everyone.items():
        assert abs(chosen[key] - 0.1 * number) < 1, key
    with pytest.raises(UserError, match="splits: expected exact or hash, found 'other'"):
        pretraining_split(records, 0.1, 0, rule="other")


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_rounded_by_largest_remainder(seed: int) -> None:
    strata = {f"{key}{i}": key for key, number in (("a", 19), ("b", 8), ("c", 3)) for i in range(number)}
    chosen = stratified_choice(strata, 3, seed, "test")  # shares 1.9, 0.8, 0.3
    assert Counter(strata[p] for p in chosen) == {"a": 2, "b": 1}


def test_pretraining_split_depends_on_the_seed_and_on_nothing_else() -> None:
    records = [replace(r, study_group=None) if r.person_id < "1050" else r for r in cohort()]
    split = pretraining_split(records, 0.1, seed=0)
    shuffled = records[:]
    random.Random(1).shuffle(shuffled)
    assert pretraining_split(shuffled, 0.1, seed=0) == split
    rows = pd.DataFrame([vars(r) for r in shuffled]).itertuples()  # the store's index has the same columns
    assert pretraining_split(rows, 0.1, seed=0) == split
    gaps = [r if r.study_group else replace(r, study_group=float("nan")) for r in records]
    assert pretraining_split(gaps, 0.1, seed=0) == split
    assert pretraining_split(records, 0.1, seed=1) != split


def test_pretraining_split_of_small_cohorts() -> None:
    records = cohort(10, files=1)
    two = [replace(r, split="train") for r in records[:2]]
    train, val, source = pretraining_split(two, 0.1, seed=0)
    assert (len(train), len(val), source) == (1, 1, "train_participants")
    one = [replace(records[0], split="train"), *(replace(r, split="val") for r in records[1:3])]
    assert pretraining_split(one, 0.1, 0) == (["1000"], ["1001", "1002"], "recommended_val")
    assert pretraining_split(one[:1], 0.1, 0) == (["1000"], [], "recommended_val")


def test_cohort_without_recommended_split_is_cut_70_10_20(tmp_path: Path) -> None:
    people = [person(i) for i in range(150)]
    rows = [row(p["person_id"], uid=f"1.{p['person_id']}.{i}") for p in people for i in (1, 2)]
    write_tree(tmp_path, rows, people, people_columns=PEOPLE[:-1])
    listing = read_records(config(tmp_path))
    assert listing.split_source == "seeded_70_10_20"
    split = {r.person_id: r.split for r in listing.records}
    assert all(split[r.person_id] == r.split for r in listing.records)  # by participant
    shares = Counter(split.values())
    for name, share in {"train": 0.7, "val": 0.1, "test": 0.2}.items():
        assert abs(shares[name] / 150 - share) < 0.1, name
    write_tree(tmp_path, rows[::-1], people[::-1], people_columns=PEOPLE[:-1])
    assert read_records(config(tmp_path)).records == listing.records
    other = read_records(config(tmp_path, "seed=1")).records
    assert {r.person_id: r.split for r in other} != split


def test_recommended_split_is_used_as_it_is(tmp_path: Path) -> None:
    people = [person(i) for i in range(9)]
    write_tree(tmp_path, [row(p["person_id"], uid=p["person_id"]) for p in people], people)
    listing = read_records(config(tmp_path))
    assert listing.split_source == "recommended_split"
    assert {r.person_id: r.split for r in listing.records} == {
        p["person_id"]: p["recommended_split"] for p in people
    }
