"""What a volume's features rest on, as one short name.

In: a prepared store and rows, or plain values. Out: BLAKE2b digests (16 bytes, hex).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from data_setup.store.reader import PreparedStore

VOLUME_COLUMNS = (
    "checksum",
    *(f"valid_{a}{i}" for a in "dhw" for i in "01"),
    "intensity_mean",
    "intensity_std",
)


def volume_digests(store: PreparedStore, rows: np.ndarray) -> list[str]:
    """The digest of each row's volume and of what its normalisation rests on."""
    table = store.index.loc[rows, list(VOLUME_COLUMNS)].to_numpy(object).tolist()
    return [values_digest(values) for values in table]


def values_digest(values: list[Any]) -> str:
    """The digest of plain values."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()
