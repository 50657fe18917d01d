"""What is asked of a checkpoint or a head, and the content of evaluation.json that answers it.

In: a configuration, the store, the cohorts that are evaluated, the `Scored` of every row of the table. Out: a
dictionary: rows with metrics and intervals, the difference between two rows with its verdict and what the
cohort could have shown, subgroups, cautions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_setup.store.reader import PreparedStore
from finetuning.answers.scorecard import (
    COLUMNS,
    Answer,
    difference,
    people_of_classes,
    protocol_of,
    scorecard,
    subgroups,
)
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.ledger import cohort_facts, digest, look_at
from finetuning.cohort.metrics import PRIMARY, Scored
from models.probes import intervals
from models.probes.intervals import MIN_PER_CLASS, too_few, verdict
from utils.config.schema import Config
from utils.report.tables import CLASSES, TITLES

FORMAT_VERSION = 4


@dataclass(frozen=True)
class Asked:
    """Who is evaluated, and by whom it is asked."""

    cfg: Config
    store: PreparedStore
    cohorts: tuple[Cohort, ...]  # one with the official splits, one a fold with crossfit
    overlap: int  # evaluated participants that training saw
    checksum: str  # of the checkpoint or head
    seen_by: str = "pre-training"  # which training the overlap is with

    @property
    def cohort(self) -> Cohort:
        """The first; kind, names and people's targets are those of all."""
        return self.cohorts[0]

    @property
    def chosen(self) -> str:
        return "C" if self.seen_by == "pre-training" else "The head"

    @property
    def rows(self) -> np.ndarray:
        """The store rows of all cohorts, ascending."""
        return np.unique(np.concatenate([cohort.rows for cohort in self.cohorts]))

    def people(self, fold: int) -> int:
        """Participants of a fold: evaluated in all cohorts together, of the others the fewest in one."""
        counts = [np.unique(c.person[c.fold == fold]) for c in self.cohorts]
        return len(np.unique(np.concatenate(counts))) if fold == EVALUATED else min(map(len, counts))

    def answer(self) -> Answer:
        """evaluation.json: it depends on checkpoint, protocol, volumes, groups, targets and folds."""
        columns = ("checksum", *COLUMNS.values())
        table = [cohort_facts(self.store, c, columns) for c in self.cohorts]
        fingerprint = digest([FORMAT_VERSION, self.checksum, protocol_of(self.cfg), table])
        return Answer(self.cfg.run.dir, "evaluation", fingerprint)

    def look(self, what: str) -> int | None:
        """Count this look in the ledger of the store; None where no test participant is evaluated."""
        if self.cfg.eval.split != "test" and self.cfg.eval.protocol == "official":
            return None
        return look_at(self.store, self.cohorts, self.checksum, protocol_of(self.cfg), what)


@dataclass(frozen=True)
class Row:
    name: str
    label: str
    scored: Scored
    facts: Mapping[str, Any]  # plain values that evaluation.json repeats: chosen C, validation score, ...


def answer(
    asked: Asked,
    rows: Sequence[Row],
    words: tuple[str, str],
    subject: Mapping[str, Any],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The content of evaluation.json; the verdict is about the first row against the second, by `words`."""
    cfg, samples, seed = asked.cfg, intervals.BOOTSTRAP_SAMPLES, asked.cfg.seed
    first = rows[0].scored.evaluated()
    look = asked.look(f"{subject['name']}: {', '.join(row.name for row in rows)}")
    table = [
        {"name": r.name, "label": r.label, **scorecard(r.scored, samples, seed), **r.facts} for r in rows
    ]
    mean, ci95, shown, doubt = difference(first, rows[1].scored.evaluated(), samples, seed)
    metric = TITLES[PRIMARY[first.kind]]
    is_class = first.kind in CLASSES
    counts = [int((first.truth[:, 0] == c).sum()) for c in range(len(first.names))] if is_class else None
    strata = "stratified by class, " if is_class else ""
    return {
        "format_version": FORMAT_VERSION,
        "title": title(asked, look),
        "subject": dict(subject),
        "kind": first.kind,
        "names": list(first.names),
        "label_column": cfg.task.label_column,
        "unit": cfg.task.unit,
        "protocol": cfg.eval.protocol,
        "split": cfg.eval.split,
        "n_participants": asked.people(EVALUATED),
        "n_participants_train": asked.people(TRAIN),
        "n_participants_val": asked.people(VAL),
        "n_units": len(first.unit),
        "n_per_class": counts,
        "overlap": asked.overlap,
        "look": look,
        "rows": table,
        "difference": {
            "rows": [row.name for row in rows[:2]],
            "metric": PRIMARY[first.kind],
            "mean": mean,
            "ci95": list(ci95),
            "could_have_shown": shown,
            "doubt": doubt,
        },
        "subgroups": subgroups(rows[0].scored, asked.store.index, samples, seed),
        "verdict": f"{verdict(mean, ci95, *words, metric, doubt)} This cohort could have shown {shown:.2f}.",
        "cautions": cautions_of(asked, people_of_classes(first)),
        "notes": [
            *notes,
            f"Intervals: participant bootstrap, {strata}all units of a person drawn together; "
            f"{samples} resamples, the same for both sides of the difference. A difference that the cohort "
            "could have shown: one of this size is shown in 80 % of such cohorts.",
        ],
    }


def title(asked: Asked, look: int | None) -> str:
    """What the table is about, the protocol, and how often these people have been looked at."""
    cfg, cohort = asked.cfg, asked.cohort
    what = {"regression": "a value", "multilabel": f"{len(cohort.names)} labels"}
    column = cfg.task.label_column if cohort.kind != "multilabel" else "labels"
    protocol = (
        f"split {cfg.eval.split} of the official splits"
        if cfg.eval.protocol == "official"
        else f"{len(asked.cohorts)} folds over all labelled participants"
        f"{'' if cfg.eval.allow_overlap else ' that training did not see'} (crossfit)"
    )
    looks = "validation, not counted as a look" if look is None else f"look {look} of this split"
    kind = what.get(cohort.kind, f"{len(cohort.names)} classes")
    return f"{column}: {kind}, {asked.people(EVALUATED)} participants; {protocol}; {looks}"


def cautions_of(asked: Asked, people: Sequence[int]) -> list[str]:
    """What weakens the verdict; shown wherever the verdict is."""
    cfg, lines = asked.cfg, []
    if asked.overlap:
        lines.append(
            f"OVERLAP: {asked.seen_by} saw {asked.overlap} of the evaluated participants "
            "(eval.allow_overlap=true)."
        )
    if cfg.eval.split == "val" and cfg.eval.protocol == "official":
        lines.append(
            f"{asked.chosen} was chosen on the evaluated participants (eval.split=val): the numbers are "
            "optimistic."
        )
    return lines + few_people(people)


def few_people(people: Sequence[int]) -> list[str]:
    """The caution of a table where a class, or all, has too few people; empty else."""
    if not (few := too_few(people)):
        return []
    return [
        f"{few}: below {MIN_PER_CLASS} intervals are too narrow (some have no width), and nothing should be "
        "concluded from them."
    ]
