"""What trained decoders are worth: `python -m finetuning.evaluate --head RUN` of a head of finetuning.dense.

In: a `Kind`, a head's file, a store with the labels of its task. Out: `${run.dir}/KIND.json` and KIND.md,
written last, so that where they are the other files of the answer are. An existing answer to the same
question is reused; a look at test participants is counted. Arms: the pre-trained encoder, a randomly
initialised one and baselines in an encoder's place (finetuning.features.yardsticks) where
finetune.against_random trained them, and what a kind compares them with. The head is compared with each.

Measured is on the scan's own voxels (`OnScan`): labels are those of the files, over the scan's B-scans, rows
and A-scans, in the store's order, and predictions are brought there. Where the grid does not reach, the
labels are as if unknown. Files that cannot be reached, or have changed since they were laid on the volumes,
are named by UserError: then the grid is what can be measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from data_setup.attach import flow, heights, labels
from data_setup.attach.grid import at_scan, lay_on_scan, means_on_scan
from data_setup.attach.jobs import Job
from data_setup.attach.stored import OF_LABELS, Stored, StoredFlow, StoredHeights, StoredLabels
from data_setup.store.reader import PreparedStore
from finetuning.answers.evaluation import few_people
from finetuning.answers.scorecard import Answer, looks
from finetuning.cohort.cohort import EVALUATED, count_seen, seen_by_head
from finetuning.cohort.ledger import digest
from finetuning.cohort.source import encoder_place, evaluated_config, require_known_place
from finetuning.dense.folds import DenseVolumes, count_look
from finetuning.dense.head import PRETRAINED, RANDOM, TRUTHS, DenseHead, label
from finetuning.dense.kind import HEAD, Content, Examined, Kind, Volumes
from finetuning.dense.whole import Lattice, classes_at
from finetuning.features.kept import KeptFeatures
from finetuning.features.yardsticks import LocalTokens
from finetuning.heads.head_file import require_same_grid
from models.probes.intervals import EXACT_BELOW, smallest_p
from utils import storage
from utils.config.load import flatten, storage_options_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.tables import Table, estimate, number, page, two_cells

FORMAT_VERSION = 4  # 2 measured on the grid of the store, 3 compared with two rows alone
NOT_ASKED = "What pre-training gains is not asked: finetune.against_random=true trains the control."
ALL = "mean"  # of the names of a volume, among them
ON_SCAN = (
    "Measured at the scans' own B-scans, rows and A-scans, against the labels of the files; of what the grid "
    "does not reach nothing is measured."
)
ON_GRID = "Measured on the grid of the store, against labels laid on it, not at the scans' own voxels: {}"
# its name, what predicts a row, and a decoder's outputs of it
Arm = tuple[str, Callable[[int], np.ndarray], Callable[[int], Iterator[Tensor]] | None]


def _jobs(cfg: Config, store: PreparedStore, stored: Stored) -> Sequence[Job]:
    """The files of a kind of labels, as their manifest names them; raises UserError, StorageError."""
    if isinstance(stored, StoredFlow):
        return flow.read_jobs(cfg, store)[0]
    if isinstance(stored, StoredHeights) and stored.source != OF_LABELS:
        return heights.read_jobs(cfg, store)[0]
    kind = labels.VolumeJob if isinstance(stored, StoredLabels) else labels.SurfaceJob
    return [job for job in labels.read_jobs(cfg, store)[0] if isinstance(job, kind)]


@dataclass(frozen=True)
class OnScan(Generic[Volumes]):
    """Evaluated volumes with the labels of their files."""

    on_grid: Volumes
    jobs: Mapping[int, Job]
    laid: Stored

    @classmethod
    def open(cls, cfg: Config, volumes: Volumes) -> OnScan[Volumes]:
        """Raises UserError naming the first file that is not as it was when it was laid on its volume."""
        stored = next(part for part in vars(volumes).values() if isinstance(part, Stored))
        try:
            jobs = {job.row: job for job in _jobs(cfg, volumes.store, stored)}
        except storage.StorageError as error:
            raise UserError(str(error)) from error
        for row in map(int, volumes.of(EVALUATED)):
            path = stored.index.path[row]
            if row not in jobs:
                raise UserError(f"{path}: expected a line of the manifest that names it, found none")
            if not jobs[row].is_done(stored.index.loc[row].to_dict()):
                expected = f"the file as data_setup.prepare --{stored.KIND.name} laid it on its volume"
                raise UserError(f"{path}: expected {expected}, found none or another")
        return cls(volumes, jobs, stored)

    @property
    def volumes(self) -> Volumes:
        return replace(self.on_grid, read_original=self.read)

    def read(self, row: int) -> tuple[np.ndarray, tuple[str, ...]]:
        """Labels at the scan's voxels, and their names; raises OCTReadError, StorageError."""
        values, names = self.jobs[row].of_scan(self.laid.index.loc[row].to_dict())
        is_map = self.on_grid.axes == "dw"
        return at_scan(values, self.on_grid.store.index.loc[row]) if is_map else values, names

    def bring(
        self, row: int, predicted: np.ndarray, outputs: Callable[[int], Iterator[Tensor]] | None
    ) -> np.ndarray:
        """What is predicted on a row's grid, at the scan's voxels; classes from a decoder's `outputs`."""
        store, box = self.on_grid.store, self.on_grid.field(row)
        geometry, record = store.attrs["geometry"], store.index.loc[row].to_dict() | {"flipped_d": False}
        if isinstance(self.laid, StoredHeights):
            return lay_on_scan(_extended(predicted, box), record, geometry)
        if isinstance(self.laid, StoredFlow):
            return means_on_scan(_extended(predicted, box), record, geometry).astype(np.float32)
        if outputs is not None:
            parts = [rearrange(part, "b s d h w -> s (b d) h w").cpu() for part in outputs(row)]
            whole = torch.cat(parts, dim=1)
        else:
            whole = F.one_hot(torch.from_numpy(predicted).long()).movedim(-1, 0).float().log()
        whole = torch.from_numpy(_extended(whole.numpy(), box))
        (d, h, w), spacing, target = (
            tuple(record[f"{name}_{axis}"] for axis in "dhw")
            for name in ("shape_before", "spacing_before", "spacing_after")
        )
        return classes_at(
            whole, Lattice((int(d), int(h), int(w)), spacing, store.image_size, target, store.planes)
        )


def _extended(values: np.ndarray, box: tuple[slice, ...]) -> np.ndarray:
    """Values [S, *axes of the grid] whose last ones in the field go on outside it, where no scan was seen."""
    axes = values.shape[1:]
    around = [(part.start, size - part.stop) for part, size in zip(box, axes, strict=True)]
    return np.pad(values[(slice(None), *box)], [(0, 0), *around], mode="edge")


def evaluate(kind: Kind[Volumes], wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    head = kind.open_head(wanted, storage_options_of(overrides), encoder_place(overrides))
    cfg = evaluated_config(head.cfg, head.url, overrides)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    require_same_grid(head.state, head.url, store)
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
    asked = {k: v for k, v in flatten(cfg) if k.startswith(("eval.", "task."))}
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
    for name, predict in kind.baselines(volumes, head).items():
        yield name, predict, None
    for arm in head.arms:
        if isinstance(arm.encoder, LocalTokens):
            planes = kind.planes(cfg, arm.encoder.to(runtime.device), volumes, runtime.device)
        else:
            kept = KeptFeatures(arm.encoder, cfg, volumes.store, runtime)
            kept.keep_tokens(np.unique(volumes.of(EVALUATED)))
            planes = kind.planes(cfg, kept, volumes, runtime.device)
        decoder = arm.decoder.to(runtime.device)
        yield arm.name, partial(planes.predict, decoder), partial(planes.outputs, decoder)


def answer(kind: Kind[Volumes], examined: Examined[Volumes]) -> Content:
    """KIND.json: estimates with intervals, and what the head gains over every other row, with its verdict."""
    volumes, head, lines = examined.volumes, examined.head, examined.lines
    moved, column = head.cfg.finetune.encoder == "trained", next(iter(kind.columns))
    others = [arm for arm in dict.fromkeys(lines.arm) if arm not in (*examined.arms, *TRUTHS)]
    values = {arm: examined.per_person(lines, arm, column) for arm in (*examined.arms, *others)}
    against, verdicts = {}, []
    for arm in [*values][1:]:
        gained_P = kind.gain[0] * (values[PRETRAINED] - values[arm])
        first = "Pre-training" if arm == RANDOM else HEAD  # an arm without an encoder says nothing of it
        entry, sentence = examined.gain(gained_P, label(arm), kind.gain[1], first)
        against[arm] = entry | {"better": int((gained_P > 0).sum())}
        verdicts.append(sentence)
    overall = {arm: examined.estimate(values_P) for arm, values_P in values.items()}
    named = lines[lines["name"].notna()]
    named_twice = pd.concat([named, named.assign(name=ALL)])
    by_name = examined.by_name(named_twice, [*kind.columns])
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
            *few_people([min(_people_of([overall, by_name, against]), default=len(examined.people))]),
            *([] if examined.on_grid is None else [ON_GRID.format(examined.on_grid)]),
        ],
        "overall": overall,
        "by_name": by_name,
        "against": against,
        "verdicts": [*verdicts, *([] if RANDOM in values else [NOT_ASKED])],
        **kind.more(examined),
    }


def by_person(kind: Kind[Volumes], examined: Examined[Volumes], arms: Iterable[str]) -> Content:
    """person -> arm -> value, None where there is none."""
    column = next(iter(kind.columns))
    values = {arm: examined.per_person(examined.lines, arm, column) for arm in arms}
    return {
        person: {arm: None if np.isnan(of[place]) else float(of[place]) for arm, of in values.items()}
        for place, person in enumerate(examined.people)
    }


def _people_of(part: Any) -> Iterator[int]:
    """On how many people each estimate of an answer rests; an estimate of nobody is none."""
    if isinstance(part, dict) and "people" in part:
        yield from [part["people"]] if part["people"] else []
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _people_of(inner)


def markdown(kind: Kind[Any], content: Content) -> str:
    """The page: verdicts first, who was seen in training, which look this is, the notes, the tables."""
    points = [f"{content['n_volumes']} volumes of {content['n_participants']} participants."]
    points += [*(f"**{line}**" for line in content["cautions"]), *kind.points(content)]
    points += [*looks(content), *content["notes"]]
    tables = [*_tables(kind, content), *kind.tables(content)]
    return page(content["title"], content["verdicts"], points, tables).removesuffix("\n")


def _tables(kind: Kind[Any], content: Content) -> Iterator[Table]:
    """Every row, what the head gains over the others, each person where that is asked, and each name."""
    arms, (title, form) = list(content["overall"]), next(iter(kind.columns.values()))
    means = [[label(arm), *two_cells(entry, form)] for arm, entry in content["overall"].items()]
    yield Table(f"{title}, mean", ["", "mean", "95 % interval"], means)
    people = content["n_participants"]
    least = f"{people} people can give no p below {smallest_p(people):.3g}." if people < EXACT_BELOW else ""
    rows = []
    for arm, entry in content["against"].items():
        rows.append([label(arm), *two_cells(entry, f"+{form}"), f"{entry['better']} of {entry['people']}"])
        rows[-1] += [number(entry.get("p"), ".3g"), number(entry.get("could_have_shown"), form)]
    header = ["against", "gained", "95 % interval", "better in", "exact p", "could have shown"]
    if rows:
        yield Table(f"What the head gains, {kind.gain[1]}", header, rows, least)
    if "by_person" in content:
        rows = [[p, *(number(of[arm], form) for arm in arms)] for p, of in content["by_person"].items()]
        yield Table(f"Each person, {title}", ["", *map(label, arms)], rows)
    for column, (title, form) in kind.columns.items():
        rows = []
        for name in dict.fromkeys(name for of_arm in content["by_name"].values() for name in of_arm):
            cells = [content["by_name"].get(arm, {}).get(name, {}).get(column) for arm in arms]
            if any(cell and cell["value"] is not None for cell in cells):
                rows.append([name, *(estimate(cell, form) for cell in cells)])
        yield Table(title, ["", *map(label, arms)], rows)
