"""The leaderboard: answers what is missing of a command's rows and columns, and puts the rows in order.

In: `Words`, what the command line asks for. Out: a `Board`, which page.py writes as files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_setup.store.reader import PreparedStore
from finetuning.answers.columns import (
    BY_FOLD,
    COLUMNS,
    HIDDEN,
    LINEAR,
    NEEDS_ENCODER,
    TUNED,
    Answers,
    Cells,
    Question,
)
from finetuning.answers.page import Board, Row
from finetuning.cohort.cohort import count_overlap, read_cohorts
from finetuning.cohort.ledger import cohort_facts, count_looks, data_digest, digest, look_at
from finetuning.cohort.source import Source
from finetuning.features import entries as features
from finetuning.features.slices import SliceEncoder
from utils import storage
from utils.config.load import flatten
from utils.config.schema import Config
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Words:
    config: str
    overrides: tuple[str, ...]
    checkpoints: tuple[str, ...]
    control: str | None = None
    image_encoder: SliceEncoder | None = None
    supervised: bool = False  # random initialisation is fine-tuned, whatever `columns` says
    columns: tuple[str, ...] = ("low-shot", "devices")  # beside the linear one


@dataclass
class Desk:
    """Where questions are answered: from the folder, or computed, which is a look at the evaluated split."""

    question: Question
    answers: Answers
    protocol: object  # plain values
    about: str
    checksums: str
    look: int | None = None

    def answer(self, entry: features.Entry, column: str) -> Cells:
        if (kept := self.answers.read(entry.identity, column)) is not None:
            return kept
        if self.look is None:  # one line for all that this command computes, before anything is computed
            store, cohorts = self.question.volumes.store, self.question.cohorts
            self.look = look_at(store, cohorts, self.checksums, self.protocol, self.about)
        log.info("%s: %s", entry.label, column)
        answer = COLUMNS[column](entry, self.question)
        self.answers.write(entry.identity, column, answer)
        return answer


def leaderboard(words: Words, runtime: Runtime | None = None) -> Board:
    """Answer what is missing and return the board. Raises UserError."""
    named = [*words.checkpoints, *([words.control] if words.control else [])]
    sources = features.open_sources(words.config, words.overrides, named)
    cfg = sources[0].cfg
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    features.check_sources(sources, store)
    seen = sorted({person for source in sources for person in source.state["participants"]})
    cohorts = read_cohorts(cfg, store, seen)
    overlaps = {
        s.url: sum(count_overlap(cfg, c, s.state["participants"], s.url) for c in cohorts) for s in sources
    }
    rows = np.unique(np.concatenate([cohort.rows for cohort in cohorts]))
    volumes = features.Volumes(cfg, store, rows, runtime or open_runtime(cfg.train.use_bf16))
    seeds = [cfg.seed + number for number in range(features.RANDOM_SEEDS)]
    entries = entries_of(words, volumes, sources)
    folder = storage.join(cfg.run.dir, "leaderboard")
    protocol = protocol_of(cfg, seeds)
    facts = [cohort_facts(store, cohort, ("checksum", "device")) for cohort in cohorts]
    asked = digest([digest(protocol), cohorts[0].kind, facts])
    desk = Desk(
        Question(volumes, cohorts, seeds, storage.join(folder, f"fine-tuned_{asked[:12]}")),
        Answers(folder, asked),
        protocol,
        f"leaderboard of {', '.join(entry.label for entry in entries)}: split {cfg.eval.split}",
        " ".join(source.state["checksum"] for source in sources),
    )
    random, notes = random_entries(desk, sources)
    columns = [LINEAR, HIDDEN, *words.columns]
    answered = [Row(e, {c: desk.answer(e, c) for c in columns_of(e, columns)}) for e in entries]
    if words.supervised:
        columns = [*columns, *({TUNED} - set(columns))]
        notes.append("Fine-tuned from random initialisation: supervised training from scratch.")
    answered += [Row(e, {c: desk.answer(e, c) for c in columns_of(e, columns)}) for e in random]
    notes += [
        f"OVERLAP: pre-training of {url} saw {number} evaluated participants (eval.allow_overlap=true)."
        for url, number in overlaps.items()
        if number
    ]
    look = desk.look or count_looks(cfg.data.store, data_digest(store, *cohorts), cfg.data.storage_options)
    answered.sort(key=lambda row: row.entry.label if cfg.eval.protocol == "crossfit" else -row.val)
    is_new = desk.look is not None
    return Board(cfg, store, cohorts, seeds, columns, answered, notes, look, is_new, folder)


def entries_of(words: Words, volumes: features.Volumes, sources: Sequence[Source]) -> list[features.Entry]:
    """The rows that the command line names, and the baselines; random initialisation is not among them."""
    names = features.short_names(sources)
    entries = []
    for number, (source, name) in enumerate(zip(sources, names, strict=True)):
        is_control = number >= len(words.checkpoints)
        label = f"control: {name}" if is_control else name
        entries.append(features.encoder_entry(volumes, source, f"checkpoint_{number}", label))
    if words.image_encoder:
        entries.append(features.slice_entry(volumes, words.image_encoder))
    return [*entries, *features.plain_entries(volumes), *features.yardstick_entries(volumes)]


def columns_of(entry: features.Entry, columns: Sequence[str]) -> list[str]:
    return [column for column in columns if entry.encoder or column not in NEEDS_ENCODER]


def random_entries(desk: Desk, sources: Sequence[Source]) -> tuple[list[features.Entry], list[str]]:
    """For each architecture the random encoder whose probe is best on validation, and notes of all seeds."""
    volumes, cohorts = desk.question.volumes, desk.question.cohorts
    column = LINEAR if len(cohorts) == 1 else BY_FOLD
    of = {features.architecture(source.cfg): source for source in reversed(sources)}
    is_one_size = len({source.cfg.model.size for source in of.values()}) == 1
    chosen = []
    for source in of.values():
        arm = "random initialisation" + ("" if is_one_size else f" {source.cfg.model.size}")

        def vals_of(entry: features.Entry) -> list[float]:
            return [cell.val for cell in desk.answer(entry, column).values()]

        chosen.append(features.best_random(volumes, cohorts, source, vals_of, arm))
    return [entry for entry, _ in chosen], [note for _, note in chosen]


def protocol_of(cfg: Config, seeds: Sequence[int]) -> list[object]:
    """How rows are judged: all keys that an answer depends on, the data's aside."""
    sections = ("task.", "head.", "finetune.", "eval.", "optim.", "spatial.", "augment.")
    keys = {"train.use_bf16", "train.epochs", "train.max_steps", "train.global_batch_size", "seed"}
    keys |= {"method.dropout", "method.drop_path"}  # of an encoder that is trained
    used = {
        key: value
        for key, value in flatten(cfg)
        if (key.startswith(sections) or key in keys) and key != "eval.allow_overlap"
    }
    if cfg.model.feature_blocks:
        used["model.feature_blocks"] = cfg.model.feature_blocks
    return [used, list(seeds)]
