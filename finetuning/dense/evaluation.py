"""What trained decoders are worth: `python -m finetuning.evaluate --head RUN` of a head of finetuning.dense.

In: a `Kind`, a head's file, a store with the labels of its task. Out: `${run.dir}/KIND.json` and KIND.md,
written last, so that where they are the other files of the answer are. An existing answer to the same
question is reused; a look at test participants is counted. Arms: the pre-trained encoder, a randomly
initialised one and yardsticks in an encoder's place (finetuning.features.yardsticks) where
finetune.against_random trained them, and what a kind compares them with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from data_setup.store.reader import PreparedStore
from finetuning.answers.answer import Answer, looks
from finetuning.answers.evaluation import few_people
from finetuning.cohort.cohort import EVALUATED, count_seen, seen_by_head
from finetuning.cohort.ledger import digest
from finetuning.cohort.source import encoder_place, evaluated_config, require_known_place
from finetuning.dense.examined import Examined
from finetuning.dense.folds import DenseVolumes, count_look
from finetuning.dense.head import DenseHead
from finetuning.dense.kind import Content, Kind, Volumes
from finetuning.dense.on_scan import OnScan
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.yardsticks import LocalTokens
from finetuning.heads.head_file import require_same_grid
from utils.config.load import flatten, storage_options_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.tables import Table, page

FORMAT_VERSION = 3  # 2 measured on the grid of the store
ON_SCAN = (
    "Measured at the scans' own B-scans, rows and A-scans, against the labels of the files; of what the grid "
    "does not reach nothing is measured."
)
ON_GRID = "Measured on the grid of the store, against labels laid on it, not at the scans' own voxels: {}"
# its name, what predicts a row, and a decoder's outputs of it
Arm = tuple[str, Callable[[int], np.ndarray], Callable[[int], Iterator[Tensor]] | None]


def evaluate(kind: Kind[Volumes], wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    head = kind.open_head(wanted, storage_options_of(overrides), encoder_place(overrides))
    cfg = evaluated_config(head.cfg, head.url, overrides)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    require_same_grid(head, store)
    volumes = kind.read_volumes(cfg, store)
    if volumes.names != head.names:
        expected = f"the {kind.names} {list(head.names)}"
        raise UserError(f"{head.url}: expected {expected}, found {list(volumes.names)}")
    overlap = count_seen(cfg, volumes.people(EVALUATED), seen_by_head(cfg, head.state), head.url)
    own = open_originals(cfg, volumes, head.url, overrides)
    place = Answer(cfg.run.dir, kind.name, _fingerprint(cfg, volumes, head, own))
    known = place.known()
    if known is not None:
        return markdown(kind, known)
    examined = examine(kind, cfg, volumes, head, open_runtime(cfg.train.use_bf16), own)
    content = answer(kind, examined)
    look = count_look(cfg, volumes, head.checksum, examined.arms)
    content |= {"overlap": overlap, "look": look}
    kind.write(examined, content)
    text = markdown(kind, content)
    place.write(content, text + "\n")
    return text


def open_originals(
    cfg: Config, volumes: Volumes, url: str, overrides: Sequence[str]
) -> OnScan[Volumes] | str:
    """The evaluated volumes with the labels of their files; where these cannot be reached, why, in a line."""
    try:
        for key in ("manifest_path", "octa_manifest_path"):
            require_known_place(str(getattr(cfg.data, key)), url, f"data.{key}", overrides)
        return OnScan.open(cfg, volumes)
    except UserError as error:
        return str(error)


def _fingerprint(cfg: Config, volumes: DenseVolumes, head: DenseHead, own: OnScan[Any] | str) -> str:
    """A hash of all that the answer depends on."""
    asked = {k: v for k, v in flatten(cfg) if k.startswith(("eval.", "probe.", "task."))}
    return digest(
        [
            FORMAT_VERSION,
            isinstance(own, OnScan),
            head.checksum,
            asked,
            volumes.facts().loc[np.unique(volumes.rows)].to_numpy(str).tolist(),
            volumes.fold.tolist(),
            volumes.person.tolist(),
        ]
    )


def examine(
    kind: Kind[Volumes],
    cfg: Config,
    volumes: Volumes,
    head: DenseHead,
    runtime: Runtime,
    own: OnScan[Volumes] | str,
    arms: Iterable[Arm] | None = None,
) -> Examined[Volumes]:
    """Predict the evaluated volumes by every arm, and measure that on the scans' own voxels, or on the grid
    where `own` says why not. Arms are those of the head unless `arms` are given.
    """
    why = own if isinstance(own, str) else None
    lines: list[dict[str, Any]] = []
    drawn: dict[int, dict[str, np.ndarray]] = {row: {} for row in kind.drawn(volumes)}
    for arm, predict, outputs in arms or _arms(kind, cfg, volumes, head, runtime):
        for row in map(int, volumes.of(EVALUATED)):
            predicted = predict(row)
            judged, measured = volumes, predicted
            if isinstance(own, OnScan):
                judged, is_truth = own.volumes, predict == volumes.read
                measured = judged.read(row) if is_truth else own.bring(row, predicted, outputs)
            record = volumes.store.index.loc[row]
            facts = {"arm": arm, "row": row, "person_id": str(record.person_id), "device": record.device}
            facts |= {"protocol": record.protocol}
            lines += [facts | line for line in kind.measure(judged, row, measured, arm)]
            if row in drawn:
                drawn[row][arm] = predicted
    return Examined(cfg, volumes, head, pd.DataFrame(lines), drawn, why)


def _arms(
    kind: Kind[Volumes], cfg: Config, volumes: Volumes, head: DenseHead, runtime: Runtime
) -> Iterator[Arm]:
    """Names, what predicts a row, and a decoder's outputs of it."""
    for name, predict in kind.baselines(volumes, head).items():
        yield name, predict, None
    for arm in head.arms:
        if isinstance(arm.encoder, LocalTokens):
            planes = kind.planes(cfg, arm.encoder.to(runtime.device), volumes, runtime.device)
        else:
            kept = KeptFeatures(arm.encoder, cfg, volumes.store, runtime, features_folder(cfg))
            kept.keep_tokens(np.unique(volumes.of(EVALUATED)))
            planes = kind.planes(cfg, kept, volumes, runtime.device)
        decoder = arm.decoder.to(runtime.device)
        yield arm.name, partial(planes.predict, decoder), partial(planes.outputs, decoder)


def answer(kind: Kind[Volumes], examined: Examined[Volumes]) -> Content:
    """The content of KIND.json: tables with intervals, paired differences and their verdicts."""
    volumes, head = examined.volumes, examined.head
    moved, answered = head.cfg.finetune.encoder == "trained", kind.answer(examined)
    return {
        "format_version": FORMAT_VERSION,
        "head": {"url": head.url, "sha256": head.checksum, "kind": head.state["head_kind"]},
        "encoder": dict(head.state["encoder"]),
        "voxels": head.state["voxels"],
        "n_participants": len(examined.people),
        "n_volumes": len(volumes.of(EVALUATED)),
        "names": list(volumes.names),
        "title": f"{kind.title}, split {examined.cfg.eval.split}",
        "measured_on": "scan" if examined.on_grid is None else "grid",
        "notes": [
            *([ON_SCAN] if examined.on_grid is None else []),
            *kind.notes,
            *(["The encoder of each arm was trained with its decoder."] if moved else []),
        ],
        "cautions": [
            *few_people([min(_people_of(answered), default=len(examined.people))]),
            *([] if examined.on_grid is None else [ON_GRID.format(examined.on_grid)]),
        ],
        **answered,
    }


def _people_of(part: Any) -> Iterator[int]:
    """On how many people each estimate of an answer rests; an estimate of nobody is none."""
    if isinstance(part, dict) and part.get("people"):
        yield part["people"]
    elif isinstance(part, dict):
        for inner in part.values():
            yield from _people_of(inner)


def markdown(kind: Kind[Any], content: Content, first: Sequence[Table] = ()) -> str:
    """The page: verdicts first, who was seen in training, which look this is, the notes, the tables, of which
    `first` come before those of the kind.
    """
    points = [f"{content['n_volumes']} volumes of {content['n_participants']} participants."]
    points += [*(f"**{line}**" for line in content["cautions"]), *kind.points(content)]
    verdicts = content["verdicts"] if "verdicts" in content else [content["verdict"]]
    tables = [*first, *kind.tables(content)]
    return page(
        content["title"], verdicts, [*points, *looks(content), *content["notes"]], tables
    ).removesuffix("\n")
