"""What trained surfaces are worth: `python -m finetuning.evaluate --head RUN` of a task.kind=layers head.

In: `head.pt` of finetuning.dense.layers.train, the store with its height maps. Out, in `${run.dir}`:
layers.json, layers.md, surfaces.parquet (a line for every arm, volume and surface or layer), layers/ (a
volume of each device with its surfaces, which the report draws) and etdrs.csv (mean thickness in um in nine
sectors, a line for every eye, layer and source). Arms: the pre-trained encoder, a randomly initialised one
where finetune.against_random trained it, and mean heights, which know no image. What they are compared with
is what the device's own software drew.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from finetuning.cohort.cohort import EVALUATED
from finetuning.dense.evaluation import Question, ask, facts_of_answer, looks, notes_of
from finetuning.dense.head import LABELS as ARM_LABELS
from finetuning.dense.head import DenseHead
from finetuning.dense.layers.etdrs import SECTORS, etdrs, find_fovea
from finetuning.dense.layers.head import PRETRAINED, RANDOM, open_layers_head
from finetuning.dense.layers.metrics import boundary_error_um, hausdorff95_um, layer_overlap
from finetuning.dense.layers.planes import Planes
from finetuning.dense.layers.train import OF_ALL
from finetuning.dense.layers.volumes import RETINA, LayerVolumes, read_volumes
from finetuning.dense.tables import by_name, cell, estimate, per_person
from finetuning.features.kept import KeptFeatures, features_folder
from models.probes import intervals
from models.probes.intervals import participant_draws, verdict
from utils import storage
from utils.config.schema import Config
from utils.report.volumes import LayersPicture, save_layers
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
MEAN, DEVICE = "mean_heights", "device"
LABELS = {**ARM_LABELS, MEAN: "mean heights of the training volumes"}
NOTES = (
    "Heights are what a device's software drew: labels of a machine, not truth.",
    "Errors are means over A-scans, then over a participant's volumes, then over participants; intervals "
    "resample participants.",
)


def evaluate_layers(wanted: str, overrides: Sequence[str]) -> str:
    """The tables of a head as text; an existing answer to the same question is reused. Raises UserError."""
    question = Question(
        stem="layers",
        names="surfaces",
        version=FORMAT_VERSION,
        open_head=open_layers_head,
        read_volumes=read_volumes,
        labels=lambda volumes: (volumes.heights.index, ["row", "checksum", "volume", "surfaces"]),
        answer=_answer,
        markdown=markdown,
    )
    return ask(question, wanted, overrides)


def _answer(
    cfg: Config, volumes: LayerVolumes, head: DenseHead, runtime: Runtime
) -> tuple[dict[str, Any], Callable[[], None]]:
    tables = measure(cfg, volumes, head, runtime)
    return answer(cfg, volumes, head, *tables), lambda: _write(cfg.run.dir, *tables)


def measure(
    cfg: Config, volumes: LayerVolumes, head: DenseHead, runtime: Runtime
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(a line for every arm, volume and surface or layer, a line for every eye, layer and source)."""
    rows = volumes.of(EVALUATED)
    lines: list[dict[str, Any]] = []
    sectors: list[dict[str, Any]] = []
    for row in map(int, rows):
        truth = volumes.read(row)
        sectors += _sectors(volumes, row, truth, DEVICE)
        lines += _measure_one(volumes, row, truth, _mean_heights(volumes, head, row), MEAN)
    shown = set(volumes.store.index.loc[rows].groupby("device").row.first())
    storage.remove(storage.join(cfg.run.dir, "layers"), recursive=True)  # of an earlier split
    for arm in head.arms:
        kept = KeptFeatures(arm.encoder, cfg, volumes.store, runtime, features_folder(cfg))
        kept.keep_tokens(np.unique(rows))
        planes = Planes(cfg, kept, volumes, runtime.device)
        decoder = arm.decoder.to(runtime.device)
        for row in map(int, rows):
            predicted = planes.predict(decoder, row)
            if arm.name == PRETRAINED and row in shown:
                _write_picture(cfg, volumes, row, predicted)
            lines += _measure_one(volumes, row, volumes.read(row), predicted, arm.name)
            sectors += _sectors(volumes, row, _inside(volumes, row, predicted), arm.name)
    return pd.DataFrame(lines), _by_eye(pd.DataFrame(sectors))


def _write_picture(cfg: Config, volumes: LayerVolumes, row: int, predicted: np.ndarray) -> None:
    """A volume with its surfaces, for the report to draw."""
    record = volumes.store.index.loc[row]
    picture = LayersPicture(
        volume=volumes.store.read(row),
        spacing=volumes.spacing_mm(row),
        names=volumes.names,
        predicted=predicted,
        truth=volumes.read(row),
        title=f"{record.device} {record.protocol} {record.laterality}, layers",
    )
    save_layers(storage.join(cfg.run.dir, "layers", f"row_{row:06d}.npz"), picture)


def _mean_heights(volumes: LayerVolumes, head: DenseHead, row: int) -> np.ndarray:
    """The training volumes' mean heights of the row's protocol at every A-scan [S, D, W]."""
    means = head.state["mean_heights"]
    of_protocol = means.get(str(volumes.store.index.protocol[row]), means[OF_ALL])
    of_all = means[OF_ALL]
    values = [a if a is not None else b for a, b in zip(of_protocol, of_all, strict=True)]
    flat = np.array([np.nan if v is None else v for v in values], np.float32)
    d, _, w = volumes.store.image_size
    return np.broadcast_to(flat[:, None, None], (len(flat), d, w))


def _measure_one(
    volumes: LayerVolumes, row: int, truth: np.ndarray, predicted: np.ndarray, arm: str
) -> list[dict[str, Any]]:
    """The lines of one volume and arm."""
    record = volumes.store.index.loc[row]
    spacing = volumes.spacing_mm(row)
    facts = {"arm": arm, "row": row, "person_id": str(record.person_id), "device": record.device}
    facts |= {"protocol": record.protocol}
    error = boundary_error_um(predicted, truth, spacing[1])
    lines = [
        facts
        | {"what": "surface", "name": volumes.names[place], "error_um": float(error[place])}
        | {"hd95_um": hausdorff95_um(predicted[place], truth[place], spacing)}
        for place in volumes.marked(row)
    ]
    for name, pair in volumes.layers(row).items():
        dice, iou = layer_overlap(predicted[list(pair)], truth[list(pair)])
        lines.append(facts | {"what": "layer", "name": name, "dice": float(dice[0]), "iou": float(iou[0])})
    return lines


def _inside(volumes: LayerVolumes, row: int, predicted: np.ndarray) -> np.ndarray:
    """The surfaces in the acquired field, NaN outside."""
    record = volumes.store.index.loc[row]
    d0, d1, w0, w1 = (int(record[f"valid_{edge}"]) for edge in ("d0", "d1", "w0", "w1"))
    result = np.full_like(predicted, np.nan)
    result[:, d0:d1, w0:w1] = predicted[:, d0:d1, w0:w1]
    return result


def _sectors(volumes: LayerVolumes, row: int, surfaces: np.ndarray, source: str) -> list[dict[str, Any]]:
    """ETDRS lines of a macular volume, one a layer and one for the whole retina; none of another volume."""
    record = volumes.store.index.loc[row]
    retina = volumes.retina(row)
    if not str(record.region).startswith("Macula") or record.laterality not in ("L", "R") or retina is None:
        return []
    d_mm, h_mm, w_mm = volumes.spacing_mm(row)
    um = {
        name: (surfaces[lower] - surfaces[upper]) * h_mm * 1000
        for name, (upper, lower) in {**volumes.layers(row), RETINA: retina}.items()
    }
    try:
        fovea = find_fovea(um[RETINA], (d_mm, w_mm))
    except ValueError:  # the device drew nothing in the middle
        return []
    lines = []
    for name, thickness in um.items():
        table = etdrs(thickness, (d_mm, w_mm), fovea, str(record.laterality))
        facts = {"person_id": str(record.person_id), "laterality": record.laterality, "source": source}
        facts |= {"layer": name, "orientation": record.orientation_source}
        facts |= {"scanned_share": min(sector.share for sector in table.values())}
        lines.append(facts | {name: sector.um for name, sector in table.items()})
    return lines


def _by_eye(sectors: pd.DataFrame) -> pd.DataFrame:
    """Means over the volumes of an eye; `volumes` says how many."""
    keys = ["person_id", "laterality", "layer", "source"]
    if sectors.empty:
        return pd.DataFrame(columns=[*keys, "volumes", "orientation", "scanned_share", *SECTORS])
    groups = sectors.groupby(keys, sort=True)
    means = groups[[*SECTORS]].mean()
    means.insert(0, "scanned_share", groups["scanned_share"].min())
    means.insert(0, "orientation", groups["orientation"].agg(lambda values: "+".join(sorted(set(values)))))
    means.insert(0, "volumes", groups.size())
    return means.reset_index()


def answer(
    cfg: Config, volumes: LayerVolumes, head: DenseHead, lines: pd.DataFrame, sectors: pd.DataFrame
) -> dict[str, Any]:
    """The content of layers.json: tables with intervals, the paired difference and its verdict."""
    people = volumes.people(EVALUATED)
    draws = participant_draws(len(people), intervals.BOOTSTRAP_SAMPLES, cfg.seed)
    surfaces, layers = (lines[lines.what == what] for what in ("surface", "layer"))
    arms = [arm.name for arm in head.arms]
    overall = {name: per_person(surfaces[surfaces.arm == name], "error_um", people) for name in [*arms, MEAN]}
    content: dict[str, Any] = {
        **facts_of_answer(volumes, head, FORMAT_VERSION),
        "title": f"Surfaces of the retina, split {cfg.eval.split}",
        "overall": {name: estimate(values, draws) for name, values in overall.items()},
        "surfaces": by_name(surfaces, ("error_um", "hd95_um"), people, draws),
        "layers": by_name(layers, ("dice", "iou"), people, draws),
        "etdrs": _agreement(sectors, arms),
        "notes": notes_of(head, NOTES),
    }
    against = RANDOM if RANDOM in overall else MEAN
    gain = overall[against] - overall[PRETRAINED]
    gained = estimate(gain, draws)
    both = ~np.isnan(gain)  # mean heights know no surface that no training volume has
    ratio = float(overall[PRETRAINED][both].mean() / overall[against][both].mean()) if both.any() else None
    content["difference"] = {"against": against, **gained, "ratio": ratio}
    content["verdict"] = (
        f"No difference can be shown: no participant has an error of both {LABELS[PRETRAINED]} and "
        f"{LABELS[against]}."
        if ratio is None
        else verdict(
            gained["value"], gained["ci95"], "Pre-training", LABELS[against], "boundary error saved in um"
        )
    )
    return content


def _agreement(sectors: pd.DataFrame, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """arm -> mean absolute difference from the device's sectors in um, over eyes and sectors, by layer."""
    keys = ["person_id", "laterality", "layer"]
    device = sectors[sectors.source == DEVICE].set_index(keys)[[*SECTORS]]
    result: dict[str, dict[str, Any]] = {}
    for arm in arms:
        own = sectors[sectors.source == arm].set_index(keys)[[*SECTORS]]
        difference = (own - device).abs()
        by_layer = difference.groupby("layer").mean().mean(axis=1)
        result[arm] = {str(k): None if np.isnan(v) else float(v) for k, v in by_layer.items()}
    return result


def _write(folder: str, lines: pd.DataFrame, sectors: pd.DataFrame) -> None:
    """surfaces.parquet and etdrs.csv."""
    buffer = io.BytesIO()
    lines.to_parquet(buffer, index=False)
    storage.write_bytes(storage.join(folder, "surfaces.parquet"), buffer.getvalue())
    text = sectors.to_csv(index=False, float_format="%.2f")
    storage.write_text(storage.join(folder, "etdrs.csv"), text)


def markdown(content: Mapping[str, Any]) -> str:
    """The tables as text, the verdict first."""
    difference = content["difference"]
    lines = [f"# {content['title']}", "", content["verdict"], ""]
    size = f"{content['n_volumes']} volumes of {content['n_participants']} participants."
    if difference["ratio"] is None:
        lines.append(f"- {size}")
    else:
        lines.append(
            f"- Boundary error is {difference['ratio']:.2f} of that of {LABELS[difference['against']]} in "
            f"the {difference['people']} participants who have both; {size}"
        )
    lines += looks(content)
    arms = list(content["overall"])
    lines += ["", "## Mean boundary error, um", "", "| | error | 95 % interval |", "|---|---|---|"]
    for arm in arms:
        lines.append(f"| {LABELS[arm]} | {cell(content['overall'][arm])} |")
    header = "| | " + " | ".join(f"{LABELS[arm]}" for arm in arms) + " |"
    rule = "|---" * (len(arms) + 1) + "|"
    for title, part, column, digits in (
        ("Boundary error by surface, um", "surfaces", "error_um", 2),
        ("HD95 by surface, um", "surfaces", "hd95_um", 1),
        ("Dice by layer", "layers", "dice", 3),
        ("IoU by layer", "layers", "iou", 3),
    ):
        lines += ["", f"## {title}", "", header, rule]
        for name in content[part][arms[0]]:
            values = [content[part].get(arm, {}).get(name, {}).get(column) for arm in arms]
            cells = ["-" if v is None or v["value"] is None else f"{v['value']:.{digits}f}" for v in values]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## ETDRS sectors: mean difference from the device's, um", ""]
    own = list(content["etdrs"])
    lines += ["| | " + " | ".join(LABELS[arm] for arm in own) + " |", "|---" * (len(own) + 1) + "|"]
    for name in content["etdrs"][own[0]]:
        values = [content["etdrs"][arm][name] for arm in own]
        lines.append(f"| {name} | " + " | ".join("-" if v is None else f"{v:.1f}" for v in values) + " |")
    return "\n".join(lines)
