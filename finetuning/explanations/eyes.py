"""The eyes that maps are scored on: a volume of each, and where its change was planted.

In: a head's configuration, the store of a phantom with thinned eyes, its cohort. Out: `Eyes`, of the
evaluated people alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_setup.phantom.truth_tokens import changed_shares, read_truth_file, valid_tokens
from data_setup.store.reader import PreparedStore
from finetuning.cohort import CLASS_KINDS, EVALUATED, Cohort
from utils.config.schema import Config
from utils.errors import UserError
from utils.indices import evenly_spaced

MIN_SHARE = 0.1  # of a token's voxels whose tissue is another: from here on the token is planted
MIN_PEOPLE = 5  # with planted eyes; fewer have no interval that is worth its name


@dataclass(frozen=True)
class Eyes:
    """Planted eyes, and evaluated eyes without a change."""

    rows: np.ndarray  # store rows of planted eyes [n]
    person: np.ndarray  # str [n]
    truth: np.ndarray  # bool [n, N]: tokens that hold the change, all valid
    valid: np.ndarray  # bool [n, N]
    others: np.ndarray  # store rows of eyes without a change
    target: int  # the class of the planted eyes
    num_without: int  # planted eyes whose change the grid does not hold, left out


def find_eyes(cfg: Config, store: PreparedStore, cohort: Cohort, limit: int) -> Eyes:
    """At most `limit` planted eyes, evenly over the evaluated people, and all others. Raises UserError."""
    if cohort.kind not in CLASS_KINDS:
        raise UserError(f"task.kind: expected one of {', '.join(CLASS_KINDS)}, found {cohort.kind}")
    planted, others = [], []
    for place in _first_of_each_eye(store, cohort).tolist():
        record = store.index.loc[cohort.rows[place]]
        truth = read_truth_file(cfg.data.gcs_root, record, cfg.data.storage_options)
        if "untouched_surfaces" not in truth:
            others.append(place)
            continue
        valid = valid_tokens(record, cfg.spatial)
        planted.append((place, (changed_shares(truth, record, cfg.spatial) >= MIN_SHARE) & valid, valid))
    seen = [eye for eye in planted if eye[1].any()]
    chosen = [seen[number] for number in evenly_spaced(len(seen), limit).tolist()]
    places = np.array([place for place, _, _ in chosen], int)
    people = len(np.unique(cohort.person[places]))
    if people < MIN_PEOPLE:
        raise UserError(
            f"{cfg.data.gcs_root}: expected {MIN_PEOPLE} people of split {cfg.eval.split} or more with a "
            f"planted change (data_setup.phantom --thin) in {limit} eyes (--eyes), found {people}"
        )
    return Eyes(
        cohort.rows[places],
        cohort.person[places],
        np.array([truth for _, truth, _ in chosen]),
        np.array([valid for _, _, valid in chosen]),
        cohort.rows[np.array(others, int)],
        _target(cohort, places),
        len(planted) - len(seen),
    )


def _first_of_each_eye(store: PreparedStore, cohort: Cohort) -> np.ndarray:
    """Places in the cohort of one evaluated volume of each eye."""
    places = np.flatnonzero(cohort.fold == EVALUATED)
    side = store.index.loc[cohort.rows[places], "laterality"].to_numpy(str)
    eyes = [f"{person}_{eye}" for person, eye in zip(cohort.person[places], side, strict=True)]
    return places[np.sort(np.unique(eyes, return_index=True)[1])]


def _target(cohort: Cohort, places: np.ndarray) -> int:
    """The class that all planted eyes have; raises UserError where they have several."""
    classes = np.unique(cohort.target[places, 0]).astype(int).tolist()
    if len(classes) != 1:
        names = ", ".join(cohort.names[number] for number in classes)
        raise UserError(
            f"task.label_column: expected one class of all planted eyes, found {names}; the label of a "
            "planted change is column thinned of thinned.tsv"
        )
    return int(classes[0])
