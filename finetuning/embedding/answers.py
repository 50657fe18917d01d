"""Predictions of a head for DICOM files, a line each: what `python -m finetuning.predict` does.

In: a head and files. Out: predictions.jsonl of one head. A line is done when the version of its file and the
precision are those of now; lines of rejects are made again, lines of files that are not asked about stay, and
a half line of a killed process does not count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data_setup.store.format import KEPT, NORMALISATION
from data_setup.store.summary import LOW_VALID_FRACTION
from finetuning.embedding.run import MAY_CHANGE, overridden
from finetuning.embedding.stream import NoFeaturesError, read_ahead, tokens_of
from finetuning.embedding.volumes import DicomVolumes, Reject, Volume, find_dicoms
from finetuning.head_file import Head, open_head
from finetuning.layers.head import is_layers_head
from finetuning.objective import to_scores
from models.heads import reads_tokens
from models.probes.features import pool_tokens
from utils.config.load import storage_options_of
from utils.errors import EXIT_FAILURE, EXIT_FINISHED, UserError
from utils.log import LineFile, setup_logging
from utils.provenance import provenance
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.terminal import track

NAME = "predictions.jsonl"
ENCODER = "model.checkpoint"
HIGH_LOST_FRACTION = 0.25  # of the scan, outside the grid


def predict(wanted: str, dicoms: Sequence[str], out: str, overrides: Sequence[str]) -> int:
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
    head.encoder.to(runtime.device)
    head.module.to(runtime.device)
    common = {
        "head_sha256": head.checksum,
        "encoder_sha256": head.state["encoder"]["checksum"],
        "commit": provenance(runtime)["commit"],
        "calibrated": False,
        "precision": "bfloat16" if runtime.use_bf16 else "float32",
    }
    path = Path(out) / NAME
    earlier = _earlier_lines(path, head.checksum)
    version = dict(zip(volumes.rows, volumes.versions, strict=True))
    done = {
        (line["path"], line["version"]): line
        for line in earlier
        if line["status"] == KEPT and line["precision"] == common["precision"]
    }
    asked = {(volumes.urls[row], version[row]): row for row in volumes.rows}
    paths = set(volumes.urls)
    others = [line for line in earlier if line["path"] not in paths]
    lines = [done[key] for key in asked if key in done]
    todo = [row for key, row in asked.items() if key not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in [*others, *lines]))
    partial.replace(path)
    file, num_rejects = LineFile(path), 0
    for row, volume in track(read_ahead(cfg, volumes, todo), len(todo), "predict", "volumes"):
        line = predict_volume(head, volume, runtime) | common | {"version": version[row]}
        file.append(json.dumps(line))
        if line["status"] != KEPT:
            num_rejects += 1
            print(f"rejected: {line['path']}: {line['status']}: {line['message']}", file=sys.stderr)
    file.close()
    num_new = len(todo) - num_rejects
    print(
        f"{path}: {len(lines) + num_new} predictions, {num_rejects} files without; "
        f"now {num_new}, before {len(lines)}; lines of other files, kept: {len(others)}"
    )
    return EXIT_FAILURE if num_rejects else EXIT_FINISHED


def _open(wanted: str, overrides: Sequence[str]) -> Head:
    """The head, its encoder from the override's place; raises UserError for one that draws surfaces."""
    options = storage_options_of(overrides)
    if is_layers_head(wanted, options):
        raise UserError(
            f"{wanted}: expected a head of labels, found one of layers: finetuning.evaluate measures it, no "
            "command here draws surfaces in files"
        )
    prefix = f"{ENCODER}="  # the same encoder in another place; open_head compares checksums
    places = [word.removeprefix(prefix) for word in overrides if word.startswith(prefix)]
    return open_head(wanted, options, places[-1] if places else None)


@torch.no_grad()
def predict_volume(head: Head, volume: Volume | Reject, runtime: Runtime) -> dict[str, Any]:
    """The line of a volume: its scores by name, or why it has none."""
    fields = volume.fields
    line = {"path": fields["path"], "status": fields["status"], "message": fields.get("message")}
    if isinstance(volume, Reject):
        return line
    try:
        tokens_BNE, valid_BN = tokens_of(head.encoder, head.cfg, volume, runtime)
    except NoFeaturesError as error:
        return line | {"status": error.status, "message": str(error)}
    arguments: tuple[torch.Tensor, ...] = (tokens_BNE, valid_BN)
    if not reads_tokens(head.state["head_kind"]):
        pooled = pool_tokens(tokens_BNE, valid_BN)
        arguments = (pooled if head.standardise is None else head.standardise(pooled),)
    outputs = head.module(*arguments).cpu().double()
    scores = to_scores(head.kind, outputs)[0].tolist()
    names = head.names if head.kind != "regression" else (head.state["task"]["label_column"],)
    return line | {
        "task": head.kind,
        "scores": dict(zip(names, scores, strict=True)),
        "warnings": warnings_of(fields),
        "laterality": fields["laterality"],
        "device": fields["device"],
        "protocol": fields["protocol"],
        "volume": fields["checksum"],
    }


def warnings_of(fields: dict[str, Any]) -> list[str]:
    """What weakens a prediction, from what was measured of the volume."""
    texts = []
    if fields["valid_fraction"] < LOW_VALID_FRACTION:
        texts.append(f"{fields['valid_fraction']:.0%} of the grid lies inside the scan")
    if fields["lost_fraction"] > HIGH_LOST_FRACTION:
        texts.append(f"{fields['lost_fraction']:.0%} of the scan lies outside the grid")
    if fields["orientation_source"] in ("assumed", "unknown"):
        texts.append(f"direction of the B-scans: {fields['orientation_source']}")
    return texts


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
            lines.append({key: line[key] for key in ("path", "version", "status", "precision")} | line)
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
