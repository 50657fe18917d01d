"""What a checkpoint's features are worth: probes on them, and on what has learnt nothing.

In: a configuration and its checkpoint. Out: the content of evaluation.json, written into `${run.dir}` with
its tables and figures: probes on the encoder (EMA target), on random initialisation (the seed that is best
on validation, in each fold of crossfit its own) and on three baselines without an encoder; then the paired
difference pre-trained - random initialisation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from data_setup.store.reader import PreparedStore
from finetuning.answers.evaluation import Asked, Row, answer
from finetuning.answers.evaluation_files import write_evaluation
from finetuning.cohort import source as sources
from finetuning.cohort.cohort import EVALUATED, count_overlap, read_cohorts
from finetuning.cohort.source import Source, check_fit
from finetuning.features.entries import Entry, Volumes, best_random, encoder_entry, plain_entries
from finetuning.features.probing import probe
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.schema import Config
from utils.errors import UserError
from utils.report.tables import evaluation_table
from utils.runtime.single import Runtime
from utils.tables import terminal

log = logging.getLogger(__name__)


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
    known = asked.answer().known()
    return _evaluate(asked, state, url, runtime) if known is None else known


def _evaluate(asked: Asked, state: dict[str, Any], url: str, runtime: Runtime) -> dict[str, Any]:
    """Embed, probe, write all files; returns the content of evaluation.json."""
    cfg, store = asked.cfg, asked.store
    log.info(
        "%d volumes, %s of %s, %d evaluated participants",
        len(asked.rows),
        asked.cohort.kind,
        ", ".join(asked.cohort.names),
        asked.people(EVALUATED),
    )
    volumes, source = Volumes(cfg, store, asked.rows, runtime), Source(cfg, url, state)
    first = encoder_entry(volumes, source, "pretrained", "pre-trained encoder (EMA target)")

    def vals_of(entry: Entry) -> list[float]:
        return [probe([cohort], entry.features()).val_score for cohort in asked.cohorts]

    random, note = best_random(volumes, asked.cohorts, source, vals_of)
    entries = [first, replace(random, name="random_init"), *plain_entries(volumes)]
    rows = [_row(asked, entry) for entry in entries]
    content = answer(
        asked,
        rows,
        ("Pre-training", "random initialisation"),
        {"name": "probe", "url": url, "sha256": state["checksum"], "step": state["step"]},
        [note],
    )
    return write_evaluation(asked.answer(), content, {row.name: row.scored for row in rows}, store.index)


def _row(asked: Asked, entry: Entry) -> Row:
    probed = probe(asked.cohorts, entry.features())
    facts = {"chosen_c": probed.chosen_c, "val_score": probed.val_score, "num_features": probed.num_features}
    return Row(entry.name, entry.label, probed.scored, facts)


def printed(content: Mapping[str, Any]) -> str:
    """The short table for a terminal, the verdict last."""
    table = terminal(evaluation_table(content))
    return "\n".join([table, *content["notes"], *content["cautions"], content["verdict"]])
