"""The leaderboard once everything is answered.

In: entries and their answers. Out: `Board`, which page.py writes as files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from data_setup.store.reader import PreparedStore
from finetuning.board.answers import Answer
from finetuning.board.columns import LINEAR
from finetuning.board.entries import Entry
from finetuning.cohort.cohort import Cohort
from utils.config.schema import Config


@dataclass(frozen=True)
class Row:
    """A row with its answers by column."""

    entry: Entry
    answers: Mapping[str, Answer]

    @property
    def val(self) -> float:
        """What the table is ordered by with the official splits."""
        return self.answers[LINEAR].cells[LINEAR].val


@dataclass(frozen=True)
class Board:
    """All that the pages are made of; rows are in the order of validation, in crossfit by name."""

    cfg: Config
    store: PreparedStore
    cohorts: list[Cohort]
    seeds: list[int]
    columns: list[str]
    rows: list[Row]
    notes: list[str]
    look: int
    is_new_look: bool  # whether this command computed anything
    folder: str
