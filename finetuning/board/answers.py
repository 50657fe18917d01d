"""Answers of the leaderboard, kept: what is in the folder is not computed again.

In: an entry's identity, a column, the digest of the question (data and protocol). Out: for each cell of that
column the predictions of every seed, and their score on validation. One file an answer, written whole:
`answers/DIGEST.npz`; a damaged one is computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from finetuning.cohort.predictions import Predictions
from utils import storage

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
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
        text = json.dumps([FORMAT_VERSION, self.question, identity, column])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return storage.join(self.folder, "answers", f"{name}.npz")

    def read(self, identity: str, column: str) -> Cells | None:
        """The kept answer; None where there is none, or a damaged file."""
        url = self.url(identity, column)
        if not storage.exists(url):
            return None
        try:
            with np.load(io.BytesIO(storage.read_bytes(url)), allow_pickle=False) as content:
                return _cells_of(dict(content))
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
            log.warning("%s: damaged (%s); it is computed again", url, error)
            return None

    def write(self, identity: str, column: str, answer: Cells) -> None:
        """Keep an answer."""
        arrays: dict[str, np.ndarray] = {}
        cells = []
        for number, (name, cell) in enumerate(answer.items()):
            of_seeds = [
                {"kind": p.kind, "names": p.names, "val": val}
                for p, val in zip(cell.predictions, cell.val_scores, strict=True)
            ]
            cells.append({"name": name, "seeds": of_seeds, "participants": cell.participants})
            for seed, predictions in enumerate(cell.predictions):
                arrays |= {f"{number}_{seed}_{part}": getattr(predictions, part) for part in PARTS}
        about = {"column": column, "identity": identity, "cells": cells}
        buffer = io.BytesIO()
        # numpy's stub takes the arrays' names for its own keyword allow_pickle
        np.savez_compressed(buffer, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
        storage.write_bytes(self.url(identity, column), buffer.getvalue())


def _cells_of(content: Mapping[str, np.ndarray]) -> Cells:
    about = json.loads(str(content["about"]))
    cells = {}
    for number, cell in enumerate(about["cells"]):
        predictions = [
            Predictions(
                of["kind"], tuple(of["names"]), *(content[f"{number}_{seed}_{part}"] for part in PARTS)
            )
            for seed, of in enumerate(cell["seeds"])
        ]
        vals = tuple(of["val"] for of in cell["seeds"])
        cells[cell["name"]] = Cell(tuple(predictions), vals, cell["participants"])
    return cells
