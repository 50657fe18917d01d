"""Predictions of a head for DICOM files, a line each: what `python -m finetuning.predict` does.

In: a head and files. Out: predictions.jsonl of one head, pictures/, and of surfaces surfaces/. A line is done
when the version of its file and the precision are those of now, and what it names is there; lines of rejects
are made again, lines of files that are not asked about stay, and a half line of a killed process does not
count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from data_setup.store.format import KEPT, NORMALISATION, QUALITY_COLUMNS
from finetuning.dense.head import head_kind
from finetuning.dense.layers.head import KIND as LAYERS
from finetuning.dense.layers.head import LayersHead, open_layers_head
from finetuning.embedding.run import MAY_CHANGE, overridden
from finetuning.embedding.stream import NoFeaturesError, read_ahead
from finetuning.embedding.volumes import DicomVolumes, Reject, Volume, find_dicoms
from finetuning.features.digests import values_digest
from finetuning.heads.head_file import Head, open_head
from finetuning.prediction.labels import Answer, LabelPredictor
from finetuning.prediction.picture import draw
from finetuning.prediction.surfaces import SurfacePredictor
from utils.config.load import storage_options_of
from utils.config.schema import Config
from utils.errors import EXIT_FAILURE, EXIT_FINISHED, UserError
from utils.log import LineFile, setup_logging
from utils.provenance import provenance
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.terminal import track

NAME = "predictions.jsonl"
ENCODER = "model.checkpoint"
SEGMENTATION, TRANSLATION = "segmentation", "translation"  # of task.kind
DPI = 100
FILES = {"picture": "pictures", "arrays": "surfaces"}  # field of a line -> the folder of its file


class Predictor(Protocol):
    """What answers for a kind of head."""

    @property
    def about(self) -> dict[str, Any]:
        """What every line says of the head."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person reads of the head before its predictions."""

    def is_current(self, line: Mapping[str, Any]) -> bool:
        """Whether an earlier line of this head has what it would have now."""

    def answer(self, volume: Volume) -> Answer:
        """Raises NoFeaturesError."""


@dataclass(frozen=True)
class Work:
    """What a start has to do: rows of `volumes`, and the lines that stay."""

    todo: list[int]
    done: list[dict[str, Any]]  # of files that are asked about
    others: list[dict[str, Any]]


def predict(wanted: str, dicoms: Sequence[str], out: str, occlusion: bool, overrides: Sequence[str]) -> int:
    """Write DIR/predictions.jsonl; returns EXIT_FAILURE where a file has no prediction. Raises UserError."""
    setup_logging()
    head = _open(wanted, overrides)
    cfg = overridden(head.cfg, head.url, overrides, (*MAY_CHANGE, ENCODER))
    if head.state["normalisation"] != NORMALISATION:
        raise UserError(
            f"{head.url}: normalisation: expected {NORMALISATION}, found {head.state['normalisation']}"
        )
    options = cfg.data.storage_options
    volumes = DicomVolumes(find_dicoms(dicoms, options), cfg.spatial, options)
    runtime = open_runtime(cfg.train.use_bf16)
    predictor = _predictor(head, cfg, runtime, occlusion)
    common = {
        "head_sha256": head.checksum,
        "encoder_sha256": head.state["encoder"]["checksum"],
        "commit": provenance(runtime)["commit"],
        "precision": "bfloat16" if runtime.use_bf16 else "float32",
        **predictor.about,
    }
    folder = Path(out)
    path = folder / NAME
    work = _work(folder, volumes, head.checksum, str(common["precision"]), predictor)
    for note in predictor.notes:
        print(note)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in [*work.others, *work.done]))
    partial.replace(path)
    version = dict(zip(volumes.rows, volumes.versions, strict=True))
    file, num_rejects = LineFile(path), 0
    for row, volume in track(read_ahead(cfg, volumes, work.todo), len(work.todo), "predict", "volumes"):
        line = predict_volume(predictor, volume, folder) | common | {"version": version[row]}
        file.append(json.dumps(line))
        if line["status"] != KEPT:
            num_rejects += 1
            print(f"rejected: {line['path']}: {line['status']}: {line['message']}", file=sys.stderr)
    file.close()
    num_new = len(work.todo) - num_rejects
    print(
        f"{path}: {len(work.done) + num_new} predictions, {num_rejects} files without; "
        f"now {num_new}, before {len(work.done)}; lines of other files, kept: {len(work.others)}"
    )
    return EXIT_FAILURE if num_rejects else EXIT_FINISHED


def _open(wanted: str, overrides: Sequence[str]) -> Head | LayersHead:
    """The head, its encoder from the override's place."""
    options = storage_options_of(overrides)
    prefix = f"{ENCODER}="  # the same encoder in another place; open_head compares checksums
    places = [word.removeprefix(prefix) for word in overrides if word.startswith(prefix)]
    place = places[-1] if places else None
    kind = head_kind(wanted, options)
    if kind == SEGMENTATION:
        raise UserError(
            f"{wanted}: expected a head of labels or layers, found one of segmentation: "
            "python -m finetuning.segment draws its classes"
        )
    if kind == TRANSLATION:
        raise UserError(
            f"{wanted}: expected a head of labels or layers, found one of translation: "
            "python -m finetuning.evaluate --head draws its slabs"
        )
    if kind == LAYERS:
        return open_layers_head(wanted, options, place)
    return open_head(wanted, options, place)


def _predictor(head: Head | LayersHead, cfg: Config, runtime: Runtime, occlusion: bool) -> Predictor:
    if not isinstance(head, LayersHead):
        return LabelPredictor(head, cfg, runtime, occlusion)
    if occlusion:
        raise UserError(f"--occlusion: expected a head of labels, found one of layers: {head.url}")
    return SurfacePredictor(head, cfg, runtime)


def predict_volume(predictor: Predictor, volume: Volume | Reject, folder: Path) -> dict[str, Any]:
    """The line of a volume, or why it has none; its picture and arrays are written into `folder` first."""
    fields = volume.fields
    line = {"path": fields["path"], "status": fields["status"], "message": fields.get("message")}
    if isinstance(volume, Reject):
        return line
    try:
        answer = predictor.answer(volume)
    except NoFeaturesError as error:
        return line | {"status": error.status, "message": str(error)}
    stem = f"{PurePosixPath(fields['path']).stem}-{values_digest([fields['path']])[:8]}"
    places = {"picture": f"{FILES['picture']}/{stem}.png", "arrays": None}
    target = folder / str(places["picture"])
    target.parent.mkdir(parents=True, exist_ok=True)
    draw(answer.page).savefig(target, dpi=DPI)
    if answer.arrays:
        places["arrays"] = f"{FILES['arrays']}/{stem}.npz"
        (folder / FILES["arrays"]).mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / str(places["arrays"]), allow_pickle=False, **answer.arrays)
    facts = {name: fields[name] for name in ("laterality", "device", "protocol")}
    quality = {name: fields[name] for name in QUALITY_COLUMNS}
    return line | answer.line | places | facts | {"quality": quality, "volume": fields["checksum"]}


def _work(folder: Path, volumes: DicomVolumes, checksum: str, precision: str, predictor: Predictor) -> Work:
    """What earlier starts with this head have done of these files. Raises UserError."""
    earlier = _earlier_lines(folder / NAME, checksum)
    version = dict(zip(volumes.rows, volumes.versions, strict=True))
    done = {
        (line["path"], line["version"]): line
        for line in earlier
        if (line["status"], line["precision"]) == (KEPT, precision)
        and _has_files(folder, line)
        and predictor.is_current(line)
    }
    asked = {(volumes.urls[row], version[row]): row for row in volumes.rows}
    paths = set(volumes.urls)
    return Work(
        todo=[row for key, row in asked.items() if key not in done],
        done=[done[key] for key in asked if key in done],
        others=[line for line in earlier if line["path"] not in paths],
    )


def _has_files(folder: Path, line: dict[str, Any]) -> bool:
    """Whether the picture and the arrays that a line names are there."""
    return all(line[name] is None or (folder / line[name]).is_file() for name in FILES)


def _earlier_lines(path: Path, checksum: str) -> list[dict[str, Any]]:
    """The lines of earlier starts with this head; a half line at the end does not count.

    Raises UserError for lines of another head, and for a file that is none of this command's.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines(keepends=True):
        if not text.endswith("\n"):
            continue
        try:
            line = json.loads(text)
            of_head = line["head_sha256"]
            needed = ["path", "version", "status", "precision"]
            needed += list(FILES) if line["status"] == KEPT else []
            lines.append({key: line[key] for key in needed} | line)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: expected lines of finetuning.predict, found another one ({error})"
            ) from error
        if of_head != checksum:
            raise UserError(
                f"{path}: expected lines of the head with sha256 {checksum[:12]}, found one of "
                f"{str(of_head)[:12]}; give another --out"
            )
    return lines
