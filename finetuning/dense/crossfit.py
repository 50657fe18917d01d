"""Decoders in folds of people, beside what they have to beat: `python -m finetuning.evaluate` of a task's
file or a head with eval.protocol=crossfit.

In: a checkpoint, a store with labels, eval.folds. Out: one table over all people, and a row for every person,
in `${run.dir}/KIND.json` and KIND.md. In each fold (`${run.dir}/folds/01`, ...) a head is trained on the
other people, of whom a share chooses its best epoch, and beside it, for as much processor time, a 2D U-Net,
and the head's decoder on an image model where one is named. What is finished is not computed again after a
kill.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import numpy as np
import pandas as pd

from data_setup.store.reader import PreparedStore
from finetuning.answers.scorecard import Answer
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, count_seen, summary
from finetuning.cohort.ledger import digest
from finetuning.cohort.source import Source, check_fit, encoder_place, evaluated_config
from finetuning.dense.decoder import reads_blocks
from finetuning.dense.evaluation import Arm, OnScan, answer, by_person, examine, markdown, open_originals
from finetuning.dense.folds import count_look, crossed
from finetuning.dense.head import GRADER, IMAGE, PRETRAINED, UNET, DenseHead
from finetuning.dense.kind import Examined, Kind, Volumes
from finetuning.dense.resume import volumes_checksum
from finetuning.dense.rivals import CLASSES, graded_rows, on_image_model, plain_unet, second_grader
from finetuning.dense.training import learnt_from, train_head
from finetuning.features.kept import KeptFeatures
from finetuning.features.slices import SliceEncoder
from finetuning.heads.head_file import checkpoint_of, head_url
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.load import flatten
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED, ConfigError
from utils.run.folder import check_run_dir
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime, StopRequested

FORMAT_VERSION = 2
ELSEWHERE = ("run.", "data.", "wandb.", "log.", "train.ckpt")  # keys that say where, not what
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fold(Generic[Volumes]):
    """One fold, with what is trained and measured in it."""

    kind: Kind[Volumes]
    source: Source  # whose folders are those of the fold
    volumes: Volumes
    runtime: Runtime
    fingerprint: str  # of all that its results depend on
    image: SliceEncoder | None
    own: OnScan[Volumes] | str  # what is measured on, or why that is the grid

    def head(self) -> DenseHead:
        """The fold's head, trained unless it is there; raises StopRequested, UserError."""
        cfg, folder = self.source.cfg, self.source.cfg.run.dir
        check_run_dir(cfg)
        people = {"train": self.volumes.people(TRAIN), "val": self.volumes.people(VAL)}
        options, url = cfg.data.storage_options, head_url(folder)
        if storage.exists(url, options):
            state = load_checkpoint(url, options)
            labels = state.get("volumes_sha256")  # of labels that changed another head is trained, or refused
            is_own = state["participants"] == people and labels == volumes_checksum(self.volumes)
            if is_own and state["encoder"]["checksum"] == self.source.state["checksum"]:
                return self.kind.open_head(folder, options, self.source.url)
        if train_head(self.kind, self.source, self.volumes, self.runtime) != EXIT_FINISHED:
            raise StopRequested
        return self.kind.open_head(folder, options, self.source.url)

    def results(self) -> list[Examined[Volumes]]:
        """What was measured of every arm, of the head's first."""
        head = self.head()
        makers: dict[str, Callable[[], Arm]] = {}
        if self.image is not None:
            makers[IMAGE] = partial(
                on_image_model, self.kind, self.source, self.volumes, self.runtime, self.image
            )
        if self.kind.name in CLASSES:
            seed, seconds = self.source.cfg.seed, self._seconds(head)
            makers[UNET] = partial(plain_unet, self.kind, seed, self.volumes, self.runtime, seconds)
        results = [self._kept("head", head), *(self._kept(name, head, makers[name]) for name in makers)]
        if (grader := second_grader(self.source.cfg, self.volumes)) is not None:
            results.append(
                examine(self.kind, self.source.cfg, self.volumes, head, self.runtime, self.own, [grader])
            )
        return results

    def _seconds(self, head: DenseHead) -> float:
        """Processor seconds of the head's training and the frozen encoder's pass, whichever fold made it."""
        cfg = self.source.cfg
        seconds = float(head.state["validation"][PRETRAINED]["history"][-1]["processor_seconds"])
        if cfg.finetune.encoder != "frozen":
            return seconds
        kept = KeptFeatures(head.arms[0].encoder, cfg, self.volumes.store, self.runtime)
        return seconds + kept.seconds(learnt_from(self.volumes))

    def _kept(self, name: str, head: DenseHead, make: Callable[[], Arm] | None = None) -> Examined[Volumes]:
        """Of the head, or of one that is made for it; read where it was measured before."""
        cfg = self.source.cfg
        url = storage.join(cfg.run.dir, f"{name}.npz")
        asked = digest([self.fingerprint, head.checksum, isinstance(self.own, str)])
        if storage.exists(url):
            with np.load(io.BytesIO(storage.read_bytes(url)), allow_pickle=False) as content:
                if str(content["asked"]) == asked:
                    drawn: dict[int, dict[str, np.ndarray]] = {}
                    for key in set(content.files) - {"asked", "lines"}:
                        row, _, arm = key.partition("/")
                        drawn.setdefault(int(row), {})[arm] = content[key]
                    lines = pd.DataFrame(json.loads(str(content["lines"])))
                    why = self.own if isinstance(self.own, str) else None
                    return Examined(cfg, self.volumes, head, lines, drawn, why)
        arms = None if make is None else [make()]
        examined = examine(self.kind, cfg, self.volumes, head, self.runtime, self.own, arms)
        text = json.dumps(examined.lines.to_dict("records"), default=float)
        pictures = {f"{row}/{arm}": v for row, of in examined.drawn.items() for arm, v in of.items()}
        buffer = io.BytesIO()
        np.savez(buffer, asked=np.array(asked), lines=np.array(text), **pictures)  # type: ignore[arg-type]
        storage.write_bytes(url, buffer.getvalue())
        return examined


def source_of_head(head: DenseHead, overrides: Sequence[str]) -> Source:
    """A head's configuration with overrides, and the checkpoint that it started from; raises UserError."""
    cfg = evaluated_config(head.cfg, head.url, overrides)
    options = cfg.data.storage_options
    state, url = checkpoint_of(head.state, head.url, options, encoder_place(overrides))
    return Source(cfg, url, state)


def crossfit(
    kind: Kind[Volumes], source: Source, image: SliceEncoder | None = None, overrides: Sequence[str] = ()
) -> str | None:
    """The page of all folds; an existing answer to the same question is reused. None where a signal stopped
    it: the same command goes on. Raises UserError.
    """
    source = replace(source, cfg=reads_blocks(source.cfg))
    cfg = source.cfg
    if cfg.train.ckpt_dir is None:
        raise ConfigError("train.ckpt_dir: expected a folder for the heads of the folds, found null")
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, source.state, source.url)
    whole = kind.read_volumes(cfg, store)
    folds = crossed(cfg, whole, source.state["participants"])
    people = sorted({person for volumes in folds for person in volumes.people(EVALUATED)})
    overlap = count_seen(cfg, people, {"pre-training": source.state["participants"]}, source.url)
    owns = [open_originals(cfg, volumes, source.url, overrides) for volumes in folds]
    if (why := next((own for own in owns if isinstance(own, str)), None)) is not None:
        owns = [why] * len(folds)  # one measure for the whole table
    fingerprint = _fingerprint(source, folds, image, why is None)
    place = Answer(cfg.run.dir, kind.name, fingerprint)
    known = place.known()
    if known is not None:
        return markdown(kind, known)
    runtime = open_runtime(cfg.train.use_bf16)
    results: list[Examined[Volumes]] = []
    try:
        for count, (volumes, measured) in enumerate(zip(folds, owns, strict=True), start=1):
            log.info("fold %d of %d: %s", count, len(folds), summary(volumes.fold, volumes.person))
            folder = storage.join(cfg.run.dir, "folds", f"{count:02d}")
            train = replace(cfg.train, ckpt_dir=storage.join(folder, "checkpoints"))
            own = replace(source, cfg=replace(cfg, run=replace(cfg.run, dir=folder), train=train))
            results += Fold(kind, own, volumes, runtime, fingerprint, image, measured).results()
    except StopRequested:
        log.info("stopped by %s; run the same command again to go on", runtime.stopped_by)
        return None
    examined = _joined(cfg, whole, people, results)
    content = answer(kind, examined) | {"overlap": overlap, "folds": len(folds)}
    content["by_person"] = by_person(kind, examined, content["overall"])
    content["title"] = f"{kind.title}, {len(folds)} folds of people (crossfit)"
    content["head"]["url"] = storage.join(cfg.run.dir, "folds")
    content["notes"] += [
        "In each fold a head was trained on the other people, of whom a share chose its best epoch; each "
        "person is evaluated once. Arms of one fold learnt from the same people."
    ]
    content["look"] = count_look(cfg, examined.volumes, source.state["checksum"], examined.arms)
    kind.write(examined, content)
    text = markdown(kind, content)
    place.write(content, text + "\n")
    return text


def _fingerprint(source: Source, folds: Sequence[Any], image: SliceEncoder | None, on_scan: bool) -> str:
    return digest(
        [
            FORMAT_VERSION,
            on_scan,
            graded_rows(source.cfg, folds[0].store),
            source.state["checksum"],
            {key: value for key, value in flatten(source.cfg) if not key.startswith(ELSEWHERE)},
            None if image is None else image.digest(),
            [[v.rows.tolist(), v.fold.tolist(), v.person.tolist(), list(v.names)] for v in folds],
            folds[0].facts().loc[np.unique(np.concatenate([v.rows for v in folds]))].to_numpy(str).tolist(),
        ]
    )


def _joined(
    cfg: Config, whole: Volumes, people: Sequence[str], results: Sequence[Examined[Volumes]]
) -> Examined[Volumes]:
    lines = pd.concat([examined.lines for examined in results], ignore_index=True)
    drawn: dict[int, dict[str, np.ndarray]] = {}
    for examined in results:
        for row, arms in examined.drawn.items():
            drawn.setdefault(row, {}).update(arms)
    is_in = (whole.fold == EVALUATED) & np.isin(whole.person, people)
    cut = {key: getattr(whole, key)[is_in] for key in ("rows", "fold", "person")}
    beside = tuple(name for name in (IMAGE, UNET, GRADER) if name in set(lines.arm))
    return Examined(cfg, replace(whole, **cut), results[0].head, lines, drawn, results[0].on_grid, beside)
