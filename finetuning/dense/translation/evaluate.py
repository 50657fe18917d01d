"""What translated slabs are worth: `python -m finetuning.evaluate --head RUN`, task translation.

In: `head.pt` of finetuning.dense.translation.train, the store with its flow. Out, in `${run.dir}`:
translation.json, translation.md, slabs.parquet (a line for every arm, volume and slab) and translation.png (a
volume of the evaluated ones: the device's images and every arm's). Arms: the pre-trained encoder, a randomly
initialised one where finetune.against_random trained it, and a projection of the structural scan, which has
no encoder.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from finetuning.cohort.cohort import EVALUATED
from finetuning.dense.evaluation import Question, ask, facts_of_answer, looks, notes_of
from finetuning.dense.head import LABELS as ARM_LABELS
from finetuning.dense.head import PRETRAINED, RANDOM, DenseHead
from finetuning.dense.tables import by_name, cell, estimate, per_person
from finetuning.dense.translation.baseline import StructuralProjection
from finetuning.dense.translation.decoder import SlabPlanes
from finetuning.dense.translation.metrics import l1, ssim
from finetuning.dense.translation.train import open_translation_head
from finetuning.dense.translation.volumes import FlowVolumes, read_volumes
from finetuning.features.kept import KeptFeatures, features_folder
from models.probes import intervals
from models.probes.intervals import participant_draws, verdict
from utils import storage
from utils.config.schema import Config
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
PROJECTION, DEVICE = "structural_projection", "device"
LABELS = {**ARM_LABELS, PROJECTION: "projection of the structural scan", DEVICE: "device"}
NOTES = (
    "Slabs are what a device's software projected: images of a machine, not truth. Capillaries that the "
    "structural scan does not show cannot be predicted from it.",
    "L1 is of values from 0 to 1; SSIM is of the slab's field. Means are over a participant's volumes, then "
    "over participants; intervals resample participants.",
)


def evaluate_translation(wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    question = Question(
        stem="translation",
        names="slabs",
        version=FORMAT_VERSION,
        open_head=open_translation_head,
        read_volumes=read_volumes,
        labels=lambda volumes: (volumes.flow.index, ["row", "enface_checksum", "volume", "slabs"]),
        answer=_answer,
        markdown=markdown,
    )
    return ask(question, wanted, overrides)


def _answer(
    cfg: Config, volumes: FlowVolumes, head: DenseHead, runtime: Runtime
) -> tuple[dict[str, Any], Callable[[], None]]:
    lines, shown = measure(cfg, volumes, head, runtime)
    content = answer(cfg, volumes, head, lines)
    title = f"{content['title']}: volume {content['shown']}"
    return content, lambda: _write(cfg.run.dir, lines, draw(shown, volumes.names, title))


def measure(
    cfg: Config, volumes: FlowVolumes, head: DenseHead, runtime: Runtime
) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """(a line for every arm, volume and slab; arm -> slabs [S, D, W] of the first evaluated volume)."""
    rows = list(map(int, volumes.of(EVALUATED)))
    shown = {DEVICE: _cropped(volumes, rows[0], volumes.read(rows[0]))}
    lines: list[dict[str, Any]] = []

    def add(name: str, predict: Callable[[int], np.ndarray]) -> None:
        for row in rows:
            predicted = predict(row)
            lines.extend(_measure_one(volumes, row, predicted, name))
            if row == rows[0]:
                shown[name] = _cropped(volumes, row, predicted)

    add(PROJECTION, StructuralProjection(volumes).predict)
    for arm in reversed(head.arms):
        kept = KeptFeatures(arm.encoder, cfg, volumes.store, runtime, features_folder(cfg))
        kept.keep_tokens(np.unique(volumes.of(EVALUATED)))
        planes = SlabPlanes(cfg, kept, volumes, runtime.device)
        add(arm.name, partial(planes.predict, arm.decoder.to(runtime.device)))
    return pd.DataFrame(lines), shown


def _cropped(volumes: FlowVolumes, row: int, slabs: np.ndarray) -> np.ndarray:
    return slabs[(slice(None), *volumes.field(row))]


def _measure_one(volumes: FlowVolumes, row: int, predicted: np.ndarray, arm: str) -> list[dict[str, Any]]:
    """The lines of one volume and arm; a slab that the volume lacks has none."""
    record, field = volumes.store.index.loc[row], volumes.field(row)
    facts = {"arm": arm, "row": row, "person_id": str(record.person_id), "device": record.device}
    facts |= {"protocol": record.protocol}
    return [
        facts | {"name": name, "l1": l1(own, truth), "ssim": ssim(own, truth, field)}
        for name, own, truth in zip(volumes.names, predicted, volumes.read(row), strict=True)
        if not np.isnan(truth).all()
    ]


def answer(cfg: Config, volumes: FlowVolumes, head: DenseHead, lines: pd.DataFrame) -> dict[str, Any]:
    """The content of translation.json: tables with intervals, paired differences and their verdicts."""
    people = volumes.people(EVALUATED)
    draws = participant_draws(len(people), intervals.BOOTSTRAP_SAMPLES, cfg.seed)
    arms = [*(arm.name for arm in head.arms), PROJECTION]
    of_arm = {name: lines[lines.arm == name] for name in arms}
    content: dict[str, Any] = {
        **facts_of_answer(volumes, head, FORMAT_VERSION),
        "title": f"Slabs of flow, split {cfg.eval.split}",
        "shown": int(volumes.of(EVALUATED)[0]),
        "overall": {
            name: {m: estimate(per_person(part, m, people), draws) for m in ("l1", "ssim")}
            for name, part in of_arm.items()
        },
        "slabs": by_name(lines, ("l1", "ssim"), people, draws),
        "notes": notes_of(head, NOTES),
        "differences": {},
        "verdicts": [],
    }
    own = per_person(of_arm[PRETRAINED], "ssim", people)
    for against in arms[1:]:
        gained = estimate(own - per_person(of_arm[against], "ssim", people), draws)
        content["differences"][against] = gained
        content["verdicts"].append(
            f"No difference from {LABELS[against]} can be shown: no participant has an SSIM of both."
            if gained["value"] is None
            else verdict(gained["value"], gained["ci95"], "Pre-training", LABELS[against], "mean SSIM")
        )
    if RANDOM not in arms:
        words = "What pre-training gains is not asked: finetune.against_random=true trains the control."
        content["verdicts"].append(words)
    return content


def draw(shown: Mapping[str, np.ndarray], names: Sequence[str], title: str) -> Figure:
    """A row for every slab, a column for the device and every arm; the device's grey scale in a row."""
    figure = Figure(figsize=(3.1 * len(shown) + 0.6, 2.6 * len(names) + 0.8), layout="constrained")
    axes = figure.subplots(len(names), len(shown), squeeze=False)
    for place, (row, name) in enumerate(zip(axes, names, strict=True)):
        truth = shown[DEVICE][place]
        known = truth[~np.isnan(truth)]
        low, high = np.percentile(known, [1, 99]) if len(known) else (0.0, 1.0)
        for axis, (arm, slabs) in zip(row, shown.items(), strict=True):
            axis.imshow(slabs[place], cmap="gray", vmin=low, vmax=max(high, low + 1e-3), aspect="auto")
            axis.set(xticks=[], yticks=[])
            if place == 0:
                axis.set_title(LABELS[arm], fontsize=9)
        row[0].set_ylabel(name.replace("_", " "), fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def _write(folder: str, lines: pd.DataFrame, figure: Figure) -> None:
    """slabs.parquet and translation.png."""
    table, picture = io.BytesIO(), io.BytesIO()
    lines.to_parquet(table, index=False)
    figure.savefig(picture, format="png", dpi=110)
    storage.write_bytes(storage.join(folder, "slabs.parquet"), table.getvalue())
    storage.write_bytes(storage.join(folder, "translation.png"), picture.getvalue())


def markdown(content: Mapping[str, Any]) -> str:
    """The tables as text, the verdicts first."""
    lines = [f"# {content['title']}", "", *content["verdicts"], ""]
    lines.append(f"- {content['n_volumes']} volumes of {content['n_participants']} participants.")
    lines += looks(content)
    overall, slabs = content["overall"], content["slabs"]
    header = ["", "| | L1 | 95 % interval | SSIM | 95 % interval |", "|---|---|---|---|---|"]
    lines += ["", "## Mean of the slabs", *header]
    for arm, means in overall.items():
        lines.append(f"| {LABELS[arm]} | {cell(means['l1'], 4)} | {cell(means['ssim'], 3)} |")
    for name in content["names"]:
        lines += ["", f"## {name.replace('_', ' ')}", *header]
        for arm in overall:
            of_slab = slabs[arm].get(name)
            if of_slab is not None:
                lines.append(f"| {LABELS[arm]} | {cell(of_slab['l1'], 4)} | {cell(of_slab['ssim'], 3)} |")
    lines += ["", f"translation.png shows volume {content['shown']}, the first of the evaluated ones."]
    return "\n".join(lines)
