"""Digests, and the ledger of looks at evaluated participants: `ledger.jsonl` in the folder of the prepared
store.

In: who looked (checkpoint), at what (data digest) and how (protocol digest). Out: a line for each look, never
changed, and how many looks there have been at this split of this data. A split that many looks have chosen
among is no test any more, so tables print the number. On a bucket ledger.jsonl is a folder with an object a
line (utils.storage.line_files). A cached answer is no look: its numbers are known already.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, Cohort
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.storage.line_files import append_line, read_lines

VOLUME_COLUMNS = (
    "checksum",
    *(f"valid_{a}{i}" for a in "dhw" for i in "01"),
    "intensity_mean",
    "intensity_std",
)
NAME = "ledger.jsonl"
FIELDS = {"time", "look", "checkpoint", "data", "protocol", "what"}


def volume_digests(store: PreparedStore, rows: np.ndarray) -> list[str]:
    """The digest of each row's volume and of what its normalisation rests on."""
    table = store.index.loc[rows, list(VOLUME_COLUMNS)].to_numpy(object).tolist()
    return [values_digest(values) for values in table]


def values_digest(values: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def record_look(
    folder: str,
    checkpoint_checksum: str,
    data_digest: str,
    protocol_digest: str,
    what: str,
    options: StorageOptions | None = None,
) -> int:
    """Append a look, and return its number among those at the same data digest, 1 for the first.

    `folder`: the store's, on a disk or in a bucket. `what`: words for a reader. The same question asked again
    is a look too. Raises UserError naming the first damaged line; nothing is recorded then.
    """
    path = storage.join(folder, NAME)

    def next_line(lines: Sequence[str]) -> str:
        look = {
            "time": datetime.now(UTC).isoformat(),
            "look": 1 + sum(one["data"] == data_digest for one in _looks(path, lines)),
            "checkpoint": checkpoint_checksum,
            "data": data_digest,
            "protocol": protocol_digest,
            "what": what,
        }
        return json.dumps(look)

    return int(json.loads(append_line(path, next_line, options))["look"])


def count_looks(folder: str, data_digest: str, options: StorageOptions | None = None) -> int:
    """How many looks at this data the ledger holds; UserError names a damaged line."""
    path = storage.join(folder, NAME)
    return sum(one["data"] == data_digest for one in _looks(path, read_lines(path, options)))


def look_at(
    store: PreparedStore, cohorts: Sequence[Cohort], checkpoint_checksum: str, protocol: object, what: str
) -> int:
    """Record a look at the evaluated folds of the cohorts, judged by `protocol`, plain values."""
    data = data_digest(store, *cohorts)
    return record_look(store.url, checkpoint_checksum, data, digest(protocol), what, store.options)


def digest(value: object) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def cohort_facts(store: PreparedStore, cohort: Cohort, columns: Sequence[str]) -> list[object]:
    """Plain values of a cohort: these columns of its volumes, folds, targets, units, people, names."""
    volumes = store.index.loc[cohort.rows, list(columns)].astype(str).to_numpy().tolist()
    parts = (cohort.fold, cohort.target, cohort.unit, cohort.person)
    return [volumes, *(part.tolist() for part in parts), cohort.names]


def data_digest(store: PreparedStore, *cohorts: Cohort) -> str:
    """What the evaluated folds of the cohorts are: a hash of their volumes, targets and persons."""
    volumes: list[tuple[str, str, list[float]]] = []
    for cohort in cohorts:
        chosen = cohort.fold == EVALUATED
        checksums = store.index.loc[cohort.rows[chosen], "checksum"].tolist()
        people, targets = cohort.person[chosen].tolist(), cohort.target[chosen].tolist()
        volumes += zip(checksums, people, targets, strict=True)
    return digest([cohorts[0].kind, cohorts[0].names, sorted(volumes)])


def _looks(path: str, lines: Sequence[str]) -> list[dict[str, str | int]]:
    """The looks of a ledger's lines; UserError names the first damaged one."""
    looks = []
    for number, line in enumerate(lines, start=1):
        try:
            look = json.loads(line)
        except json.JSONDecodeError:
            look = None
        if not isinstance(look, dict) or set(look) != FIELDS:
            raise UserError(
                f"{path}: line {number}: expected a look with {', '.join(sorted(FIELDS))}, found "
                f"{line[:60]!r}; mend or remove that line by hand"
            )
        looks.append(look)
    return looks
