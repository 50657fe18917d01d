"""What trained classes of voxels are worth: `python -m finetuning.evaluate --head RUN`, task segmentation.

In: `head.pt` of finetuning.segmentation.train, the store with its label volumes. Out, in `${run.dir}`:
segmentation.json, segmentation.md and volumes.parquet (a line for every arm, volume and class). Arms: the
pre-trained encoder, and a randomly initialised one where finetune.against_random trained it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from data_setup.store.reader import PreparedStore
from finetuning.cohort import EVALUATED
from finetuning.dense.folds import count_look, refuse_seen
from finetuning.dense.head import LABELS, PRETRAINED, RANDOM, DenseHead, require_same_grid
from finetuning.dense.tables import by_name, cell, estimate, per_person
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.head_evaluation import evaluated_config
from finetuning.segmentation.metrics import dice, overlap
from finetuning.segmentation.planes import ClassPlanes
from finetuning.segmentation.train import open_segmentation_head
from finetuning.segmentation.volumes import ClassVolumes, read_volumes
from models.probes.intervals import participant_draws, verdict
from utils import storage
from utils.config.load import flatten, storage_options_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
NOTES = (
    "Dice is of one volume, on the grid of the store. A volume whose labels have none of a class has no Dice "
    "of it; what is seen of it there stands beside, in mm3.",
    "Means are over a participant's volumes, then over participants; intervals resample participants.",
)


def evaluate_segmentation(wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    prefix = "model.checkpoint="
    places = [word.removeprefix(prefix) for word in overrides if word.startswith(prefix)]
    head = open_segmentation_head(wanted, storage_options_of(overrides), places[-1] if places else None)
    cfg = evaluated_config(head.cfg, head.url, overrides)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    require_same_grid(head, store)
    volumes = read_volumes(cfg, store)
    if volumes.names != head.names:
        raise UserError(f"{head.url}: expected the classes {list(head.names)}, found {list(volumes.names)}")
    overlap_of_people = refuse_seen(cfg, volumes, head.state, head.url)
    fingerprint = _fingerprint(cfg, volumes, head)
    url = storage.join(cfg.run.dir, "segmentation.json")
    if storage.exists(url):
        known = json.loads(storage.read_text(url))
        if known.get("fingerprint") == fingerprint:
            return markdown(known)
    lines = measure(cfg, volumes, head, open_runtime(cfg.train.use_bf16))
    content = answer(cfg, volumes, head, lines)
    look = count_look(cfg, volumes, head.checksum, [arm.name for arm in head.arms], cfg.task.kind)
    content |= {"fingerprint": fingerprint, "overlap": overlap_of_people, "look": look}
    _write(cfg.run.dir, content, lines)
    return markdown(content)


def _fingerprint(cfg: Config, volumes: ClassVolumes, head: DenseHead) -> str:
    """A hash of all that the answer depends on."""
    rows = np.unique(volumes.rows)
    asked = {k: v for k, v in flatten(cfg) if k.startswith(("eval.", "probe.", "task."))}
    facts = [
        FORMAT_VERSION,
        head.checksum,
        asked,
        volumes.labels.index.loc[rows, ["row", "checksum", "volume"]].to_numpy(str).tolist(),
        volumes.fold.tolist(),
        volumes.person.tolist(),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def measure(cfg: Config, volumes: ClassVolumes, head: DenseHead, runtime: Runtime) -> pd.DataFrame:
    """A line for every arm, volume and class."""
    rows = volumes.of(EVALUATED)
    lines: list[dict[str, Any]] = []
    for arm in head.arms:
        kept = KeptFeatures(arm.encoder, cfg, volumes.store, runtime, features_folder(cfg))
        kept.keep_tokens(np.unique(rows))
        planes = ClassPlanes(cfg, kept, volumes, runtime.device)
        decoder = arm.decoder.to(runtime.device)
        for row in map(int, rows):
            lines += _measure_one(volumes, row, planes.predict(decoder, row), arm.name)
    return pd.DataFrame(lines)


def _measure_one(volumes: ClassVolumes, row: int, predicted: np.ndarray, arm: str) -> list[dict[str, Any]]:
    """The lines of one volume and arm."""
    record = volumes.store.index.loc[row]
    facts = {"arm": arm, "row": row, "person_id": str(record.person_id), "device": record.device}
    facts |= {"protocol": record.protocol}
    counts = overlap(predicted, volumes.read(row), len(volumes.names))
    of_volume, voxel = dice(*counts), volumes.voxel_mm3(row)
    lines = []
    for name, value, seen, labelled in zip(volumes.names, of_volume, *counts[1:], strict=True):
        line = {"name": name, "dice": float(value)}
        line |= {"predicted_mm3": float(seen * voxel), "labelled_mm3": float(labelled * voxel)}
        line["absent_mm3"] = float(seen * voxel) if labelled == 0 else float("nan")
        lines.append(facts | line)
    return lines


def answer(cfg: Config, volumes: ClassVolumes, head: DenseHead, lines: pd.DataFrame) -> dict[str, Any]:
    """The content of segmentation.json: tables with intervals, the paired difference and its verdict."""
    people = volumes.people(EVALUATED)
    draws = participant_draws(len(people), cfg.probe.bootstrap_samples, cfg.seed)
    overall = {arm.name: per_person(lines[lines.arm == arm.name], "dice", people) for arm in head.arms}
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "title": f"Classes of voxels, split {cfg.eval.split}",
        "head": {"url": head.url, "sha256": head.checksum, "kind": head.state["head_kind"]},
        "encoder": dict(head.state["encoder"]),
        "voxels": head.state["voxels"],
        "n_participants": len(people),
        "n_volumes": len(volumes.of(EVALUATED)),
        "names": list(volumes.names),
        "labelled_volumes": {
            str(name): int((part.labelled_mm3 > 0).sum())
            for name, part in lines[lines.arm == PRETRAINED].groupby("name")
        },
        "overall": {name: estimate(values, draws) for name, values in overall.items()},
        "classes": by_name(lines, ("dice", "absent_mm3"), people, draws),
        "difference": None,
        "notes": list(NOTES),
        "verdict": "What pre-training gains is not asked: finetune.against_random=true trains the control.",
    }
    if RANDOM in overall:
        gained = estimate(overall[PRETRAINED] - overall[RANDOM], draws)
        content["difference"] = {"against": RANDOM, **gained}
        content["verdict"] = (
            "No difference can be shown: no participant has a Dice."
            if gained["value"] is None
            else verdict(gained["value"], gained["ci95"], "Pre-training", LABELS[RANDOM], "mean Dice")
        )
    return content


def _write(folder: str, content: Mapping[str, Any], lines: pd.DataFrame) -> None:
    """All files; segmentation.json last, so that where it is the others are."""
    buffer = io.BytesIO()
    lines.to_parquet(buffer, index=False)
    storage.write_bytes(storage.join(folder, "volumes.parquet"), buffer.getvalue())
    storage.write_text(storage.join(folder, "segmentation.md"), markdown(content) + "\n")
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    storage.write_text(storage.join(folder, "segmentation.json"), text)


def markdown(content: Mapping[str, Any]) -> str:
    """The tables as text, the verdict first."""
    lines = [f"# {content['title']}", "", content["verdict"], ""]
    lines.append(f"- {content['n_volumes']} volumes of {content['n_participants']} participants.")
    if content["overlap"]:
        lines.append(f"- **{content['overlap']} evaluated participants were seen in training.**")
    if content["look"] is not None:
        lines.append(f"- This is look {content['look']} at these test participants.")
    lines += [f"- {note}" for note in content["notes"]]
    arms = list(content["overall"])
    lines += ["", "## Mean Dice", "", "| | Dice | 95 % interval |", "|---|---|---|"]
    for arm in arms:
        lines.append(f"| {LABELS[arm]} | {cell(content['overall'][arm], 3)} |")
    head = " | ".join(f"{LABELS[arm]}: Dice | 95 % interval | mm3 where there is none" for arm in arms)
    lines += ["", "## By class", "", f"| | volumes with it | {head} |", "|---" * (2 + 3 * len(arms)) + "|"]
    for name in content["names"]:
        cells = []
        for arm in arms:
            of_class = content["classes"][arm][name]
            absent = of_class["absent_mm3"]["value"]
            cells += [cell(of_class["dice"], 3), "-" if absent is None else f"{absent:.4f}"]
        lines.append(f"| {name} | {content['labelled_volumes'][name]} | {' | '.join(cells)} |")
    return "\n".join(lines)
