"""Answers of the leaderboard, kept: what is in the folder is not computed again.

In: an entry's identity, a column, the digest of the question (data and protocol). Out: for each cell of that
column the predictions of every seed, and their score on validation. One file an answer, written whole:
`answers/NAME.json` with a digest of its content; a damaged one is computed again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetuning.cohort.ledger import digest
from finetuning.cohort.predictions import Predictions
from utils import storage

log = logging.getLogger(__name__)
FORMAT_VERSION = 3
PARTS = ("unit", "person", "truth", "scores")


@dataclass(frozen=True)
class Cell:
    """Predictions of the evaluated units, one for each seed, and the scores on validation [seeds]."""

    predictions: tuple[Predictions, ...]
    val_scores: tuple[float, ...]
    participants: int  # of the training fold, largest over seeds

    @property
    def val(self) -> float:
        return float(np.mean(self.val_scores))


Cells = Mapping[str, Cell]  # of a column of one row


@dataclass(frozen=True)
class Answers:
    """The kept answers to one question; `question` is a digest of data and protocol."""

    folder: str
    question: str

    def url(self, identity: str, column: str) -> str:
        name = digest([FORMAT_VERSION, self.question, identity, column])[:32]
        return storage.join(self.folder, "answers", f"{name}.json")

    def read(self, identity: str, column: str) -> Cells | None:
        """The kept answer; None where there is none, or a damaged file."""
        url = self.url(identity, column)
        if not storage.exists(url):
            return None
        try:
            kept = json.loads(storage.read_bytes(url))
            cells = kept["cells"]
            if kept["digest"] != digest([identity, column, cells]):
                raise ValueError("expected the content that its digest names, found another")
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s: damaged (%s); it is computed again", url, error)
            return None
        return {
            name: Cell(tuple(map(_predictions, one["seeds"])), tuple(one["val"]), one["participants"])
            for name, one in cells.items()
        }

    def write(self, identity: str, column: str, answer: Cells) -> None:
        """Keep an answer."""
        cells = {
            name: {
                "participants": cell.participants,
                "val": cell.val_scores,
                "seeds": [
                    {"kind": p.kind, "names": p.names} | {part: getattr(p, part).tolist() for part in PARTS}
                    for p in cell.predictions
                ],
            }
            for name, cell in answer.items()
        }
        content = {"column": column, "identity": identity, "cells": cells}
        text = json.dumps(content | {"digest": digest([identity, column, cells])})
        storage.write_text(self.url(identity, column), text)


def _predictions(one: Mapping[str, Any]) -> Predictions:
    unit, person = (np.array(one[part], str) for part in PARTS[:2])
    truth, scores = (np.array(one[part], float) for part in PARTS[2:])
    return Predictions(str(one["kind"]), tuple(one["names"]), unit, person, truth, scores)
