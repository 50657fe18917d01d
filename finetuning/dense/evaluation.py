"""What evaluating a head of finetuning.dense has in common, whatever its decoders predict.

In: a `Question`, a head's file, a store with the labels of its task. Out: `${run.dir}/STEM.json` and STEM.md,
written last, so that where they are the other files of the answer are. An existing answer to the same
question is reused; a look at test participants is counted. Layers, segmentation and translation ask.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED
from finetuning.cohort.source import evaluated_config
from finetuning.dense.folds import DenseVolumes, count_look, refuse_seen
from finetuning.dense.head import DenseHead
from finetuning.heads.head_file import require_same_grid
from utils import storage
from utils.config.load import flatten, storage_options_of
from utils.config.schema import Config, StorageOptions
from utils.errors import UserError
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

Content = dict[str, Any]  # of STEM.json
Volumes = TypeVar("Volumes", bound=DenseVolumes)


@dataclass(frozen=True)
class Question(Generic[Volumes]):
    """What is asked of a head, and how its answer is found and shown."""

    stem: str  # of the answer's files
    names: str  # what a head's names are: surfaces, classes, ...
    version: int  # of the answer's format
    open_head: Callable[[str, StorageOptions, str | None], DenseHead]
    read_volumes: Callable[[Config, PreparedStore], Volumes]
    labels: Callable[[Volumes], tuple[pd.DataFrame, list[str]]]  # their index, its columns that matter
    # the content, and what writes the other files
    answer: Callable[[Config, Volumes, DenseHead, Runtime], tuple[Content, Callable[[], None]]]
    markdown: Callable[[Mapping[str, Any]], str]


def ask(question: Question[Volumes], wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    prefix = "model.checkpoint="
    places = [word.removeprefix(prefix) for word in overrides if word.startswith(prefix)]
    head = question.open_head(wanted, storage_options_of(overrides), places[-1] if places else None)
    cfg = evaluated_config(head.cfg, head.url, overrides)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    require_same_grid(head, store)
    volumes = question.read_volumes(cfg, store)
    if volumes.names != head.names:
        expected = f"the {question.names} {list(head.names)}"
        raise UserError(f"{head.url}: expected {expected}, found {list(volumes.names)}")
    overlap = refuse_seen(cfg, volumes, head.state, head.url)
    fingerprint = _fingerprint(question, cfg, volumes, head)
    url = storage.join(cfg.run.dir, f"{question.stem}.json")
    if storage.exists(url):
        known = json.loads(storage.read_text(url))
        if known.get("fingerprint") == fingerprint:
            return question.markdown(known)
    content, write_others = question.answer(cfg, volumes, head, open_runtime(cfg.train.use_bf16))
    look = count_look(cfg, volumes, head.checksum, [arm.name for arm in head.arms], cfg.task.kind)
    content |= {"fingerprint": fingerprint, "overlap": overlap, "look": look}
    write_others()
    text = question.markdown(content)
    storage.write_text(storage.join(cfg.run.dir, f"{question.stem}.md"), text + "\n")
    storage.write_text(url, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return text


def _fingerprint(question: Question[Volumes], cfg: Config, volumes: Volumes, head: DenseHead) -> str:
    """A hash of all that the answer depends on."""
    asked = {k: v for k, v in flatten(cfg) if k.startswith(("eval.", "probe.", "task."))}
    index, columns = question.labels(volumes)
    facts = [
        question.version,
        head.checksum,
        asked,
        index.loc[np.unique(volumes.rows), columns].to_numpy(str).tolist(),
        volumes.fold.tolist(),
        volumes.person.tolist(),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def facts_of_answer(volumes: DenseVolumes, head: DenseHead, version: int) -> Content:
    """What every answer says of its head and volumes."""
    return {
        "format_version": version,
        "head": {"url": head.url, "sha256": head.checksum, "kind": head.state["head_kind"]},
        "encoder": dict(head.state["encoder"]),
        "voxels": head.state["voxels"],
        "n_participants": len(volumes.people(EVALUATED)),
        "n_volumes": len(volumes.of(EVALUATED)),
        "names": list(volumes.names),
    }


def notes_of(head: DenseHead, notes: Sequence[str]) -> list[str]:
    """The notes of an answer, and whether its encoders moved."""
    moved = head.cfg.finetune.encoder == "trained"
    return [*notes, *(["The encoder of each arm was trained with its decoder."] if moved else [])]


def looks(content: Mapping[str, Any]) -> list[str]:
    """Lines of the page: who was seen in training, which look this is, the notes."""
    lines = []
    if content["overlap"]:
        lines.append(f"- **{content['overlap']} evaluated participants were seen in training.**")
    if content["look"] is not None:
        lines.append(f"- This is look {content['look']} at these test participants.")
    return lines + [f"- {note}" for note in content["notes"]]
