"""What is asked of a checkpoint or a head, and the content of evaluation.json that answers it.

In: a configuration and its checkpoint. Rows: probes on the encoder (EMA target), on random initialisation
(the seed that is best on validation, in each fold of crossfit its own) and on three baselines without an
encoder; then the paired difference pre-trained - random initialisation.

Or in: `head.pt` of finetuning.train (or its run's folder) and overrides of the configuration in it. Rows: the
head, on people that neither it nor its encoder has seen, and a constant prediction that knows nothing. With
eval.protocol=crossfit, of a frozen encoder, a head of the same configuration is trained in each fold: what is
evaluated is the recipe, not the head of the file.

Out: rows with metrics and intervals, the difference between two rows with its verdict and what the cohort
could have shown, subgroups, cautions; tables and figures beside it in `${run.dir}`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_setup.store.reader import PreparedStore
from finetuning.answers import scorecard
from finetuning.answers.evaluation_files import write_evaluation
from finetuning.cohort import source as sources
from finetuning.cohort.cohort import (
    EVALUATED,
    TRAIN,
    VAL,
    Cohort,
    count_overlap,
    count_seen,
    read_cohorts,
    seen_by_head,
)
from finetuning.cohort.ledger import cohort_facts, digest, look_at
from finetuning.cohort.metrics import PRIMARY, Scored
from finetuning.cohort.source import Source, check_fit, encoder_place, evaluated_config
from finetuning.features.entries import Entry, Volumes, best_random, encoder_entry, plain_entries, probe
from finetuning.features.kept import KeptFeatures
from finetuning.heads.frozen import scores_of_fold
from finetuning.heads.head_file import Head, open_head, predict_rows
from models.probes import intervals
from models.probes.intervals import MIN_PER_CLASS, too_few, verdict
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.load import storage_options_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.report.tables import CLASSES, TITLES, evaluation_table
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.tables import terminal

FORMAT_VERSION = 4
log = logging.getLogger(__name__)


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
    def rows(self) -> np.ndarray:
        """The store rows of all cohorts, ascending."""
        return np.unique(np.concatenate([cohort.rows for cohort in self.cohorts]))

    def people(self, fold: int) -> int:
        """Participants of a fold: evaluated in all cohorts together, of the others the fewest in one."""
        counts = [np.unique(c.person[c.fold == fold]) for c in self.cohorts]
        return len(np.unique(np.concatenate(counts))) if fold == EVALUATED else min(map(len, counts))

    def answer(self) -> scorecard.Answer:
        """evaluation.json: it depends on checkpoint, protocol, volumes, groups, targets and folds."""
        columns = ("checksum", *scorecard.COLUMNS.values())
        table = [cohort_facts(self.store, c, columns) for c in self.cohorts]
        fingerprint = digest([FORMAT_VERSION, self.checksum, scorecard.protocol_of(self.cfg), table])
        return scorecard.Answer(self.cfg.run.dir, "evaluation", fingerprint)

    def look(self, what: str) -> int | None:
        """Count this look in the ledger of the store; None where no test participant is evaluated."""
        if self.cfg.eval.split != "test" and self.cfg.eval.protocol == "official":
            return None
        return look_at(self.store, self.cohorts, self.checksum, scorecard.protocol_of(self.cfg), what)


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
        {"name": r.name, "label": r.label, **scorecard.scorecard(r.scored, samples, seed), **r.facts}
        for r in rows
    ]
    primary, sides = PRIMARY[first.kind], {row.name: [row.scored.evaluated()] for row in rows[:2]}
    (gain,) = scorecard.compare({primary: sides}, samples, seed)
    words_of_gain = verdict(gain.value, gain.ci95, *words, TITLES[primary], gain.doubt)
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
            "rows": list(sides),
            "metric": primary,
            "mean": gain.value,
            "ci95": list(gain.ci95),
            "could_have_shown": gain.could_have_shown,
            "doubt": gain.doubt,
        },
        "subgroups": scorecard.subgroups(rows[0].scored, asked.store.index, samples, seed),
        "verdict": f"{words_of_gain} This cohort could have shown {gain.could_have_shown:.2f}.",
        "cautions": cautions_of(asked, scorecard.people_of_classes(first)),
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
        chosen = "C" if asked.seen_by == "pre-training" else "The head"
        lines.append(
            f"{chosen} was chosen on the evaluated participants (eval.split=val): the numbers are optimistic."
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


def find_checkpoint(cfg: Config) -> str:
    """model.checkpoint, else best_probe.pt of this run; UserError names the missing file."""
    if cfg.model.checkpoint is not None:
        return sources.find_checkpoint(cfg.model.checkpoint, cfg.data.storage_options)
    if cfg.train.ckpt_dir is None:
        raise UserError("model.checkpoint: expected a checkpoint, found null, and train.ckpt_dir is null too")
    url = storage.join(cfg.train.ckpt_dir, "best_probe.pt")
    if not storage.exists(url, cfg.data.storage_options):
        raise UserError(
            f"{url}: expected the checkpoint with the best validation probe, found none; pretraining.train "
            "writes it where val participants have labels; name another one with --checkpoint URL"
        )
    return url


def evaluate(cfg: Config, runtime: Runtime) -> dict[str, Any]:
    """The content of evaluation.json of a checkpoint; an existing one of the same question is reused."""
    url = find_checkpoint(cfg)
    state = load_checkpoint(url, cfg.data.storage_options)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, state, url)
    cohorts = tuple(read_cohorts(cfg, store, state["participants"]))
    overlap = sum(count_overlap(cfg, cohort, state["participants"], url) for cohort in cohorts)
    asked = Asked(cfg, store, cohorts, overlap, state["checksum"])
    if (known := asked.answer().known()) is not None:
        return known
    names, people = ", ".join(asked.cohort.names), asked.people(EVALUATED)
    log.info(
        "%d volumes, %s of %s, %d evaluated participants", len(asked.rows), asked.cohort.kind, names, people
    )
    volumes, source = Volumes(cfg, store, asked.rows, runtime), Source(cfg, url, state)
    first = encoder_entry(volumes, source, "pretrained", "pre-trained encoder (EMA target)")

    def vals_of(entry: Entry) -> list[float]:
        return [probe([cohort], entry.features()).val_score for cohort in asked.cohorts]

    random, note = best_random(volumes, asked.cohorts, source, vals_of)
    entries = [first, replace(random, name="random_init"), *plain_entries(volumes)]
    rows = []
    for entry in entries:
        probed = probe(asked.cohorts, entry.features())
        facts = {"chosen_c": probed.chosen_c, "val_score": probed.val_score}
        facts |= {"num_features": probed.num_features}
        rows.append(Row(entry.name, entry.label, probed.scored, facts))
    content = answer(
        asked,
        rows,
        ("Pre-training", "random initialisation"),
        {"name": "probe", "url": url, "sha256": state["checksum"], "step": state["step"]},
        [note],
    )
    return write_evaluation(asked.answer(), content, {row.name: row.scored for row in rows}, store.index)


def printed(content: Mapping[str, Any]) -> str:
    """The short table for a terminal, the verdict last."""
    table = terminal(evaluation_table(content))
    return "\n".join([table, *content["notes"], *content["cautions"], content["verdict"]])


def _asked(head: Head, cfg: Config, store: PreparedStore) -> Asked:
    """Labels and folds; raises UserError for other classes, or for participants that were seen."""
    is_crossed = cfg.eval.protocol == "crossfit"  # then the head's own training is no part of the answer
    seen = {"encoder's pre-training": head.state["pretraining_participants"]}
    cohorts = tuple(read_cohorts(cfg, store, *seen.values()))
    if cohorts[0].names != head.names:
        expected = f"the labels {list(head.names)}, found {list(cohorts[0].names)}"
        raise UserError(f"{head.url}: expected {expected}")
    people = np.concatenate([c.person[c.fold == EVALUATED] for c in cohorts]).tolist()
    overlap = count_seen(cfg, people, seen if is_crossed else seen_by_head(cfg, head.state), head.url)
    seen_by = "the encoder's pre-training" if is_crossed else "training"
    return Asked(cfg, store, cohorts, overlap, head.checksum, seen_by)


def evaluate_head(wanted: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The content of evaluation.json of a head; one of the same question is reused. Raises UserError."""
    head = open_head(wanted, storage_options_of(overrides), encoder_place(overrides))
    cfg = evaluated_config(head.cfg, head.url, overrides)
    head = replace(head, cfg=cfg)
    runtime = open_runtime(cfg.train.use_bf16)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    asked = _asked(head, cfg, store)
    if (known := asked.answer().known()) is not None:
        return known
    cohorts = asked.cohorts
    if cfg.eval.protocol == "crossfit":
        kept = KeptFeatures(head.encoder, cfg, store, runtime)
        scores, of_val = zip(*(scores_of_fold(kept, cohort) for cohort in cohorts), strict=True)
        facts = {"validation": float(np.mean(of_val))}
        how = [
            "In each fold a head of this configuration was trained and chosen on the others. The encoder saw "
            f"nobody's labels, and in pre-training the images of {asked.overlap} of the "
            f"{asked.people(EVALUATED)} evaluated participants."
        ]
    else:
        of_head = np.full((len(cohorts[0].rows), cohorts[0].num_outputs), np.nan)
        is_wanted = cohorts[0].fold != TRAIN  # nobody asks for those that trained it
        of_head[is_wanted] = predict_rows(head, store, cohorts[0].rows[is_wanted], runtime)
        scores, how = (of_head,), []
        facts = {"validation": head.state["validation"]["score"]}
    first = Row("head", f"{head.state['head_kind']} head", Scored(cohorts, scores), facts)
    constant = Row("constant", "one prediction for all", Scored(cohorts, tuple(map(_constant, cohorts))), {})
    kind = f"{head.state['head_kind']} head on a {'frozen' if head.is_frozen else 'fine-tuned'} encoder"
    content = answer(
        asked,
        [first, constant],
        ("The head", "one prediction for all"),
        {"name": "head", "url": head.url, "sha256": head.checksum, "encoder": dict(head.state["encoder"])},
        [f"The head: {kind} {head.state['encoder']['url']}.", *how],
    )
    scores_of_rows = {row.name: row.scored for row in (first, constant)}
    return write_evaluation(asked.answer(), content, scores_of_rows, store.index)


def _constant(cohort: Cohort) -> np.ndarray:
    """The mean target over training units for every volume [n, C]: shares of classes, or a mean value."""
    _, first = np.unique(cohort.unit[cohort.fold == TRAIN], return_index=True)
    target = cohort.target[cohort.fold == TRAIN][first]
    if cohort.kind in ("classification", "ordinal"):
        target = np.eye(cohort.num_outputs)[target[:, 0].astype(int)]
    return np.tile(target.mean(axis=0), (len(cohort.rows), 1))
