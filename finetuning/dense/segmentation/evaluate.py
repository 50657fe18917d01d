"""What trained classes of voxels are worth: `python -m finetuning.evaluate --head RUN`, task segmentation.

In: `head.pt` of finetuning.dense.segmentation.train, the store with its label volumes. Out, in `${run.dir}`:
segmentation.json, segmentation.md and volumes.parquet (a line for every arm, volume and class). Arms: the
pre-trained encoder, and a randomly initialised one where finetune.against_random trained it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from finetuning.cohort.cohort import EVALUATED
from finetuning.dense.evaluation import Question, ask, facts_of_answer, looks, notes_of
from finetuning.dense.head import LABELS, PRETRAINED, RANDOM, DenseHead
from finetuning.dense.segmentation.metrics import dice, overlap
from finetuning.dense.segmentation.planes import ClassPlanes
from finetuning.dense.segmentation.train import open_segmentation_head
from finetuning.dense.segmentation.volumes import ClassVolumes, read_volumes
from finetuning.dense.tables import by_name, cell, estimate, per_person
from finetuning.features.kept import KeptFeatures, features_folder
from models.probes import intervals
from models.probes.intervals import participant_draws, verdict
from utils import storage
from utils.config.schema import Config
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
NOTES = (
    "Dice is of one volume, on the grid of the store. A volume whose labels have none of a class has no Dice "
    "of it; what is seen of it there stands beside, in mm3.",
    "Means are over a participant's volumes, then over participants; intervals resample participants.",
)


def evaluate_segmentation(wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    question = Question(
        stem="segmentation",
        names="classes",
        version=FORMAT_VERSION,
        open_head=open_segmentation_head,
        read_volumes=read_volumes,
        labels=lambda volumes: (volumes.labels.index, ["row", "checksum", "volume"]),
        answer=_answer,
        markdown=markdown,
    )
    return ask(question, wanted, overrides)


def _answer(
    cfg: Config, volumes: ClassVolumes, head: DenseHead, runtime: Runtime
) -> tuple[dict[str, Any], Callable[[], None]]:
    lines = measure(cfg, volumes, head, runtime)
    return answer(cfg, volumes, head, lines), lambda: _write(cfg.run.dir, lines)


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
    draws = participant_draws(len(people), intervals.BOOTSTRAP_SAMPLES, cfg.seed)
    overall = {arm.name: per_person(lines[lines.arm == arm.name], "dice", people) for arm in head.arms}
    content: dict[str, Any] = {
        **facts_of_answer(volumes, head, FORMAT_VERSION),
        "title": f"Classes of voxels, split {cfg.eval.split}",
        "labelled_volumes": {
            str(name): int((part.labelled_mm3 > 0).sum())
            for name, part in lines[lines.arm == PRETRAINED].groupby("name")
        },
        "overall": {name: estimate(values, draws) for name, values in overall.items()},
        "classes": by_name(lines, ("dice", "absent_mm3"), people, draws),
        "difference": None,
        "notes": notes_of(head, NOTES),
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


def _write(folder: str, lines: pd.DataFrame) -> None:
    """volumes.parquet."""
    buffer = io.BytesIO()
    lines.to_parquet(buffer, index=False)
    storage.write_bytes(storage.join(folder, "volumes.parquet"), buffer.getvalue())


def markdown(content: Mapping[str, Any]) -> str:
    """The tables as text, the verdict first."""
    lines = [f"# {content['title']}", "", content["verdict"], ""]
    lines.append(f"- {content['n_volumes']} volumes of {content['n_participants']} participants.")
    lines += looks(content)
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
