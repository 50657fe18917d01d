"""What `python -m finetuning.predict` does: predictions of a head for scans, a line each.

In: a head and scans. Out: of labels, surfaces and slabs predictions.jsonl with pictures/, and of the latter
surfaces/ or slabs/; of classes, or with a format, files in the scan's own geometry with segments.jsonl
(finetuning/prediction/files.py). Of all study.csv (lines.py), and where the scans have drawn surfaces how
well the thickness agrees (agreement.py).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from data_setup.resample import rule_of
from data_setup.store.format import KEPT, NORMALISATION, QUALITY_COLUMNS
from finetuning.cohort.ledger import values_digest
from finetuning.cohort.source import encoder_place, on_own_endpoint, overridden
from finetuning.dense.head import DenseHead, head_kind
from finetuning.dense.kinds import KINDS
from finetuning.dense.surfaces import read_foveas
from finetuning.embedding.scans import Places as Places  # for the command
from finetuning.embedding.scans import Scan, find_scans
from finetuning.embedding.stream import Fault, read_ahead, rejected
from finetuning.embedding.volumes import FileVolumes, Reject, Volume
from finetuning.heads.head_file import Head, open_head
from finetuning.prediction.agreement import write_agreement
from finetuning.prediction.files import HEIGHTMAP, LAYERS, NPZ, OF_A_SCAN, Files, bounded
from finetuning.prediction.lines import Line, Lines, write_study
from finetuning.prediction.picture import plain_text
from finetuning.prediction.predictors import DensePredictor, LabelPredictor, SlabPredictor, SurfacePredictor
from utils import storage
from utils.config.load import MAY_CHANGE, storage_options_of
from utils.config.schema import Config
from utils.errors import EXIT_FAILURE, EXIT_FINISHED, UserError
from utils.log import setup_logging
from utils.provenance import provenance
from utils.report.pictures import png
from utils.run.lease import Lease, Work, hold
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.terminal import say, track

SEGMENTATION = "segmentation"  # of task.kind
FORMATS = dict.fromkeys(("nifti", NPZ, "png", "seg"), (SEGMENTATION, LAYERS)) | {HEIGHTMAP: (LAYERS,)}
SCHEMA_VERSION = 2, 3  # of a line; 3: of surfaces or slabs, which before lay as the reader turns the file
DPI = 100
PREDICTING = Work("finetuning.predict into this folder", "another --out")
Predictor = LabelPredictor | DensePredictor


class Asked(NamedTuple):
    places: Places
    form: str | None = None  # of FORMATS; None: of a head of classes nifti, else answers with pictures
    occlusion: bool = False
    anonymous: bool = True
    fovea: str | None = None  # as dense/surfaces.py reads it
    visit_date: bool = False  # in study.csv


def predict(wanted: str, asked: Asked, out: str, overrides: Sequence[str]) -> int:
    """Write the lines and what they name; returns EXIT_FAILURE where a scan has no prediction.

    Raises UserError.
    """
    setup_logging()
    kind = head_kind(wanted, storage_options_of(overrides))
    form = "nifti" if asked.form is None and kind == SEGMENTATION else asked.form
    _check(wanted, kind, asked._replace(form=form))
    opened = KINDS[kind].open_head if kind in KINDS else open_head
    head: Head | DenseHead = opened(wanted, storage_options_of(overrides), encoder_place(overrides))
    cfg = on_own_endpoint(overridden(head.cfg, head.url, overrides, MAY_CHANGE["predict"]), overrides)
    if head.state["normalisation"] != NORMALISATION:
        raise UserError(
            f"{head.url}: normalisation: expected {NORMALISATION}, found {head.state['normalisation']}"
        )
    options, runtime = cfg.data.storage_options, open_runtime(cfg.train.use_bf16)
    scans = find_scans(asked.places, options, cfg.data.workers, out)
    foveas = read_foveas(asked.fovea, len(scans), options)
    with hold(out, options, work=PREDICTING) as lease:
        work: Files | Answers
        if isinstance(head, DenseHead) and form is not None:
            work = Files(head, cfg, scans, form, out, runtime, asked.anonymous, foveas)
        else:
            predictor: Predictor
            if not isinstance(head, DenseHead):
                predictor = LabelPredictor(head, cfg, runtime, asked.occlusion)
            elif kind == LAYERS:
                predictor = SurfacePredictor(head, cfg, runtime, foveas)
            else:
                predictor = SlabPredictor(head, cfg, runtime)
            work = Answers(predictor, cfg, scans, out, rule_of(head.state.get("geometry", {})))
        lines, code = _write(work, head, cfg, runtime, asked, out, lease)
        lines = [*{line["path"]: line for line in lines}.values()]  # of a scan in two forms the newer
        by_path = {scan.record.path: scan for scan in scans}
        write_study(storage.join(out, "study.csv"), kind, lines, by_path, asked.visit_date, options)
        if kind == LAYERS:
            write_agreement(out, lines, by_path, foveas, options)
        return code


def _check(wanted: str, kind: str, asked: Asked) -> None:
    """Raise UserError for options that do not go with the kind of head, or with each other."""
    form, fitting = asked.form, FORMATS.get(asked.form or "", ())
    if form is not None and kind not in fitting:
        expected = f"a head of {' or '.join(fitting)} with --format {form}"
        raise UserError(f"{wanted}: expected {expected}, found one of {kind}")
    if asked.occlusion and kind in KINDS:
        raise UserError(f"--occlusion: expected a head of labels, found one of {kind}: {wanted}")
    if asked.fovea is not None and kind != LAYERS:
        raise UserError(f"--fovea: expected a head of layers, found one of {kind}: {wanted}")
    if not asked.anonymous and form not in OF_A_SCAN:
        expected = f"--format {' or '.join(OF_A_SCAN)}"
        raise UserError(f"--no-anonymous: expected it with {expected}, found {form or 'none'}")


def _write(
    work: Files | Answers,
    head: Head | DenseHead,
    cfg: Config,
    runtime: Runtime,
    asked: Asked,
    out: str,
    lease: Lease,
) -> tuple[list[Line], int]:
    """The lines that are not done; (all lines, EXIT_FAILURE where a scan has no prediction)."""
    common = {
        "schema_version": SCHEMA_VERSION[isinstance(head, DenseHead) and head.state["kind"] != SEGMENTATION],
        "head_sha256": head.checksum,
        "encoder_sha256": head.state["encoder"]["checksum"],
        "commit": provenance(runtime)["commit"],
        "precision": "bfloat16" if runtime.use_bf16 else "float32",
        **work.about,
    }
    if asked.fovea is not None:
        common["fovea_option"] = asked.fovea
    versions, num_rejects, num_warned = work.versions, 0, 0
    url = storage.join(out, work.name)
    with closing(Lines(url, versions, common, work.has_files, cfg.data.storage_options)) as lines:
        say(*work.notes)
        todo = [path for path in versions if path not in lines.done]
        for line in track(work.lines(todo), len(todo), "predict", "volumes"):
            lease.check()
            lines.add(line)
            num_warned += bool(line.get("warnings"))
            if line["status"] != KEPT:
                num_rejects += 1
                say(f"rejected: {line['path']}: {line['status']}: {line['message']}", file=sys.stderr)
    num_new = len(todo) - num_rejects
    say(
        f"{url}: {len(lines.done) + num_new} predictions, {num_rejects} files without; "
        f"now {num_new}, before {len(lines.done)}; lines of other files, kept: {len(lines.others)}; "
        f"warned of now: {num_warned}"
    )
    return lines.all, EXIT_FAILURE if num_rejects else EXIT_FINISHED


class Answers:
    """A line with its picture, and the arrays of a prediction, for volumes on the grid; as Files."""

    name = "predictions.jsonl"  # of the lines

    def __init__(
        self, predictor: Predictor, cfg: Config, scans: Sequence[Scan], folder: str, planes: str
    ) -> None:
        """`planes`: the rule of the store that the head was trained on."""
        self.predictor, self.cfg, self.folder = predictor, cfg, folder
        self.options = cfg.data.storage_options
        self.volumes = FileVolumes(scans, cfg.spatial, cfg.data.storage_options, planes)
        self.person = {scan.record.path: scan.person or None for scan in scans}
        self.about: Line = predictor.about
        self.notes = predictor.notes
        self.versions = dict(zip(self.volumes.paths, self.volumes.versions, strict=True))

    def has_files(self, line: Line) -> bool:
        """Whether the picture and the arrays that a line names are there, and of what is asked for now."""
        for place in (line.get("picture", ""), line.get("arrays", "")):
            if place is None:
                continue
            if not place or not storage.exists(storage.join(self.folder, place), self.options):
                return False
        return self.predictor.is_current(line)

    def lines(self, paths: Sequence[str]) -> Iterator[Line]:
        row_of = dict(zip(self.volumes.paths, self.volumes.rows, strict=True))
        for _, volume in read_ahead(self.cfg, self.volumes, [row_of[path] for path in paths]):
            yield self.line(volume)

    def line(self, volume: Volume | Reject) -> Line:
        """The line of a volume, or why it has none; its picture and arrays are written first."""
        fields = volume.fields
        line = {"path": fields["path"], "person": self.person[fields["path"]]}
        line |= {"status": fields["status"], "message": fields.get("message")}
        if isinstance(volume, Reject):
            return line
        with Fault() as fault:
            return line | self._answered(volume)
        assert fault.error is not None
        return rejected(line, fault.error).fields

    def _answered(self, volume: Volume) -> Line:
        """Write a volume's picture and arrays; what is predicted. Raises NoFeaturesError, StorageError."""
        fields, content = volume.fields, dict[str, bytes]()
        stem = f"{bounded(PurePosixPath(fields['path']).stem)}-{values_digest([fields['path']])[:8]}"
        picture, arrays = f"pictures/{stem}.png", None
        with plain_text():
            answer = self.predictor.answer(volume)
            content[picture] = png(answer.figure, DPI)
        if answer.arrays:
            arrays = f"{self.predictor.folder}/{stem}.npz"
            np.savez_compressed(buffer := io.BytesIO(), allow_pickle=False, **answer.arrays)
            content[arrays] = buffer.getvalue()
        for place, data in content.items():
            storage.write_bytes(storage.join(self.folder, place), data, self.options)
        facts = {name: fields[name] for name in ("laterality", "device", "protocol")}
        quality = {name: fields[name] for name in QUALITY_COLUMNS}
        return (
            answer.line
            | {"picture": picture, "arrays": arrays}
            | facts
            | {"quality": quality, "volume": fields["checksum"]}
        )
