"""What a head says of one volume: scores, probabilities and evidence of labels; surfaces or slabs.

In: a head and a volume. Out: a `FileAnswer`. The encoder of a head of labels runs once; scores, distance and
evidence all read its tokens. For a map by occlusion it runs again, once a block. Surfaces and slabs are in
the scan's own B-scans and A-scans: heights in the scan's rows, thickness in um, ETDRS sectors. Arrays lie as
the file does, NaN where the grid does not reach.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from data_setup.attach.grid import lay_on_scan, means_on_scan
from data_setup.normalisation import plain_view
from finetuning.dense.head import PRETRAINED, DenseHead
from finetuning.dense.kinds import KINDS
from finetuning.dense.surfaces import RETINA, Foveas, layers_of, mean_or_none, measured
from finetuning.dense.translation import draw_slabs
from finetuning.dense.whole import decode
from finetuning.embedding.stream import batch_of, tokens_of
from finetuning.embedding.volumes import Volume
from finetuning.heads.confidence import Calibration, Familiarity, stored_calibration, stored_familiarity
from finetuning.heads.head_file import Head
from finetuning.heads.objective import to_scores
from finetuning.prediction import evidence as maps
from finetuning.prediction.lines import NO_ANSWER, cautions_of, is_far
from finetuning.prediction.picture import NOTICE, WRAP, Page, draw
from models.probes.features import pool_tokens
from utils.config.schema import Config
from utils.runtime.single import Runtime

LABELLED = 0.5  # the score from which a label counts as predicted
NO_DISTANCE = "unknown: the head's file holds nothing of its training features"
TITLE_INCH = 10 * 1.2 / 72  # of a line of a title
MOST_LETTERS = 70  # of a file's name in a title
FOOTERS = {  # by who drew the heights that the head learnt from
    "device": "Lines: surfaces that the head learnt from a device's software, labels of a machine, not "
    "truth. Where the device of this scan marks no such surface, nobody has measured the line.",
    "labels": "Lines: surfaces that the head learnt from the files of label_surfaces.",
}


@dataclass(frozen=True)
class FileAnswer:
    """A volume's prediction: fields of its line, its picture, and arrays to keep beside it."""

    line: dict[str, Any]
    figure: Figure
    arrays: dict[str, np.ndarray]


class LabelPredictor:
    """A head of classes, labels or a value."""

    folder = ""  # no arrays

    def __init__(self, head: Head, cfg: Config, runtime: Runtime, occlusion: bool) -> None:
        self.head, self.cfg, self.runtime = head, cfg, runtime
        self.calibration: Calibration = stored_calibration(head.state)
        self.familiarity: Familiarity | None = stored_familiarity(head.state)
        self.method = maps.OCCLUSION if occlusion else maps.CHEAP[head.state["head_kind"]]
        self.notes: tuple[str, ...] = (f"map: {self.method}",)  # what a person reads first
        self.about = {  # what every line says of the head
            "task": head.kind,
            "calibrated": self.calibration.temperature is not None,
            "calibration": self.calibration.text(),
        }
        head.encoder.to(runtime.device)
        head.module.to(runtime.device)

    def is_current(self, line: Mapping[str, Any]) -> bool:
        return bool(line["evidence"]["method"] == self.method)

    @torch.no_grad()
    def answer(self, volume: Volume) -> FileAnswer:
        """Raises NoFeaturesError."""
        head = self.head
        tokens_BNE, valid_BN = tokens_of(head.encoder, self.cfg, volume, self.runtime)
        pooled = pool_tokens(tokens_BNE, valid_BN)
        outputs = maps.outputs_of(head, tokens_BNE, valid_BN).cpu().double()
        names = head.names if head.kind != "regression" else (head.state["task"]["label_column"],)
        calibrated = self.calibration.scores(head.kind, outputs)
        percentile = distance_percentile(self.familiarity, pooled)
        evidence = self._evidence(volume, tokens_BNE, valid_BN, outputs[0])
        scores = to_scores(head.kind, outputs)
        line = {
            "predicted": None if is_far(percentile) else decided(head.kind, names, scores[0].tolist()),
            "scores": named(names, scores),
            "probabilities": None if calibrated is None else named(names, calibrated),
            "feature_distance_percentile": percentile,
            "evidence": {"method": evidence.method, "of": evidence.of},
            "warnings": cautions_of(volume.fields, percentile, self.head.state.get("spacings_mm", {})),
        }
        return FileAnswer(line, draw(self._page(volume, line, evidence, valid_BN)), {})

    def _evidence(
        self, volume: Volume, tokens_BNE: torch.Tensor, valid_BN: torch.Tensor, outputs_C: torch.Tensor
    ) -> maps.Evidence:
        if self.method != maps.OCCLUSION:
            return maps.evidence_of(self.head, tokens_BNE, valid_BN, outputs_C)
        weights_C, name = maps.explained_output(self.head, outputs_C)
        view = plain_view(self.runtime.to_device(batch_of(volume)))
        parts = view, valid_BN, weights_C, self.cfg, self.runtime
        return maps.Evidence(maps.occlusion_map(self.head.encoder, self.head, *parts), maps.OCCLUSION, name)

    def _page(
        self, volume: Volume, line: dict[str, Any], evidence: maps.Evidence, valid_BN: torch.Tensor
    ) -> Page:
        head, fields = self.head, volume.fields
        is_value = head.kind == "regression"
        shown = line["probabilities"] or line["scores"]
        lines = [f"Of {describe(fields)}."]
        if is_value:
            value = next(iter(shown.values()))
            lines.insert(0, f"Predicted {evidence.of}: {value:.4g}")
        else:
            lines.append(sureness(self.calibration))
        lines.append(distance_text(line["feature_distance_percentile"]))
        word = "looks at" if evidence.method == maps.ATTENTION else "speak for or against"
        which = f"which it {word}" if evidence.method == maps.ATTENTION else f"which {word} it"
        footer = (
            f"The map: {evidence.method} of the head's output for {evidence.of!r}, block by block: "
            f"{which}, compared with the scan's median block."
        )
        return Page(
            title=short_name(fields["path"]),
            lines=lines,
            bars={} if is_value else shown,
            bars_title="Probability, calibrated" if line["probabilities"] else "Score, not calibrated",
            warnings=line["warnings"],
            footer=footer,
            volume=volume.voxels,
            spacing_mm=spacing_of(fields),
            valid_box=volume.valid_box.astype(int).tolist(),
            patch=self.cfg.spatial.patch_size,
            values=evidence.centred(valid_BN[0].cpu()).reshape(self.cfg.grid).numpy(),
            is_signed=evidence.is_signed,
            has_answer=not is_far(line["feature_distance_percentile"]),
        )


def decided(kind: str, names: Sequence[str], scores: Sequence[float]) -> str | list[str] | float:
    """The class of the highest score; the labels of 1/2 and more; the value."""
    if kind == "regression":
        return scores[0]
    if kind == "multilabel":
        return [name for name, score in zip(names, scores, strict=True) if score >= LABELLED]
    return names[int(np.argmax(scores))]


def sureness(calibration: Calibration) -> str:
    """How far the bars are chances."""
    if calibration.temperature is not None:
        return f"Calibrated: {calibration.text()}."
    return f"Not calibrated: {calibration.reason}. Read the bars as an order, not as chances."


def named(names: tuple[str, ...], scores_BC: torch.Tensor) -> dict[str, float]:
    """Name -> score of the only volume."""
    return dict(zip(names, scores_BC[0].tolist(), strict=True))


def distance_percentile(familiarity: Familiarity | None, pooled_BF: torch.Tensor) -> float | None:
    """How many percent of held-out training volumes are nearer to the training; None: the head knows none."""
    if familiarity is None:
        return None
    return float(familiarity.percentile(pooled_BF.float().cpu().numpy())[0])


def distance_text(percentile: float | None) -> str:
    if percentile is None:
        return f"Distance from the training set {NO_DISTANCE}."
    return f"Features: farther from the training set than {percentile:.0f} % of its held-out volumes."


def short_name(path: str) -> str:
    """The name of a file, its middle left out where it is long; what is no letter or sign is a square."""
    name = "".join(c if c.isprintable() else "\ufffd" for c in PurePosixPath(path).name)
    half = (MOST_LETTERS - 5) // 2
    return name if len(name) <= MOST_LETTERS else f"{name[:half]} ... {name[-half:]}"


def describe(fields: dict[str, Any]) -> str:
    side = {"L": "left eye", "R": "right eye"}.get(str(fields["laterality"]), "side unknown")
    parts = [fields.get("device"), fields.get("protocol"), side]
    return ", ".join(str(part) for part in parts if part)


def spacing_of(fields: dict[str, Any]) -> tuple[float, float, float]:
    d, h, w = (float(fields[f"spacing_after_{axis}"]) for axis in "dhw")
    return d, h, w


class DensePredictor:
    """The pre-trained arm of a head of layers or translation."""

    folder = ""  # of arrays
    notes: tuple[str, ...] = ()  # what is predicted is measured by finetuning.evaluate, and no map is drawn

    def __init__(self, head: DenseHead, cfg: Config, runtime: Runtime) -> None:
        self.head, self.cfg, self.runtime = head, cfg, runtime
        self.kind, self.arm = KINDS[head.state["kind"]], head.arms[0]
        self.familiarity: Familiarity | None = stored_familiarity(head.state)
        reason = f"uncalibrated: {self.kind.names} carry no probability"
        self.about = {"task": self.kind.name, "calibrated": False, "calibration": reason}
        self.arm.encoder.to(runtime.device)
        self.arm.decoder.to(runtime.device)

    def is_current(self, line: Mapping[str, Any]) -> bool:
        return True

    @torch.no_grad()
    def answer(self, volume: Volume) -> FileAnswer:
        """Raises NoFeaturesError."""
        tokens_BNE, valid_BN = tokens_of(self.arm.encoder, self.cfg, volume, self.runtime)
        percentile = distance_percentile(self.familiarity, pool_tokens(tokens_BNE, valid_BN))
        voxels_B1DHW = plain_view(self.runtime.to_device(batch_of(volume))).float()
        outputs = decode(self.arm.decoder, tokens_BNE, voxels_B1DHW, self.cfg)
        predicted_SDW = self.kind.planes.predicted_of(outputs)[0].cpu().numpy()
        d0, d1, _, _, w0, w1 = volume.valid_box.astype(int)
        result = np.full_like(predicted_SDW, np.nan)
        result[:, d0:d1, w0:w1] = predicted_SDW[:, d0:d1, w0:w1]
        line = {
            self.kind.names: list(self.head.names),
            "feature_distance_percentile": percentile,
            "warnings": cautions_of(volume.fields, percentile, self.head.state.get("spacings_mm", {})),
        }
        return self.answer_of(volume, result, line)

    def answer_of(self, volume: Volume, predicted_SDW: np.ndarray, line: dict[str, Any]) -> FileAnswer:
        """What is predicted on the grid, NaN outside the acquired field, as an answer of the scan."""
        raise NotImplementedError


class SlabPredictor(DensePredictor):
    """Slabs of flow; arrays `slabs` float32 [S, B-scans, A-scans] in 0..1, and `names` [S]."""

    folder = "slabs"

    def answer_of(self, volume: Volume, predicted_SDW: np.ndarray, line: dict[str, Any]) -> FileAnswer:
        names = self.head.names
        assert volume.header is not None
        slabs = means_on_scan(predicted_SDW, volume.fields, self.head.state["geometry"]).astype(np.float32)
        # a slab as a scan of one row: there is nothing to turn along H
        slabs = np.stack([volume.header.to_file_order(slab[:, None])[:, 0] for slab in slabs])
        line |= {"mean": {name: mean_or_none(slab) for name, slab in zip(names, slabs, strict=True)}}
        d0, d1, _, _, w0, w1 = volume.valid_box.astype(int)
        texts = [short_name(volume.fields["path"]), NOTICE, *line["warnings"]]
        if is_far(line["feature_distance_percentile"]):
            texts.insert(0, NO_ANSWER)
        rows = [row for text in texts for row in textwrap.wrap(text, WRAP)]
        figure = draw_slabs({PRETRAINED: predicted_SDW[:, d0:d1, w0:w1]}, names, "\n".join(rows))
        figure.set_figheight(figure.get_figheight() + len(rows) * TITLE_INCH)
        return FileAnswer(line, figure, {"slabs": slabs, "names": np.array(names)})


class SurfacePredictor(DensePredictor):
    """Surfaces. Arrays: `rows` float32 [S, B-scans, A-scans], the row of the file, 0 the centre of its first;
    `um`, the same from the edge of that row; `names` [S].
    """

    folder = "surfaces"

    def __init__(self, head: DenseHead, cfg: Config, runtime: Runtime, foveas: Foveas) -> None:
        super().__init__(head, cfg, runtime)
        self.foveas = foveas

    def answer_of(self, volume: Volume, predicted_SDW: np.ndarray, line: dict[str, Any]) -> FileAnswer:
        assert volume.header is not None
        names, fields, header = self.head.names, volume.fields, volume.header
        rows = header.to_file_order(lay_on_scan(predicted_SDW, fields, self.head.state["geometry"]), 1)
        um = (rows + 0.5) * float(fields["spacing_before_h"]) * 1000
        line |= measured(rows, names, header, fields, self.foveas)
        arrays = {"rows": rows, "um": um.astype(np.float32), "names": np.array(names)}
        return FileAnswer(line, draw(self._page(volume, line, predicted_SDW)), arrays)

    def _page(self, volume: Volume, line: dict[str, Any], heights: np.ndarray) -> Page:
        fields, names = volume.fields, self.head.names
        spacing = spacing_of(fields)
        rows = [f"{name}: {um:.0f} um" for name, um in line["thickness_um"].items() if um is not None]
        lines = [f"Of {describe(fields)}.", "\n".join(["Mean thickness over the scan:", *rows])]
        if line["etdrs_um"] is not None:
            centre = line["etdrs_um"].get(RETINA, {}).get("centre")
            if centre is not None:
                lines.append(f"Retina, central ETDRS sector: {centre:.0f} um")
        else:
            lines.append(f"No ETDRS table: {line['etdrs_message']}.")
        lines.append(distance_text(line["feature_distance_percentile"]))
        upper, lower = layers_of(names).get(RETINA, (0, len(names) - 1))
        return Page(
            title=short_name(fields["path"]),
            lines=lines,
            bars={},
            bars_title="",
            warnings=line["warnings"],
            footer=FOOTERS[self.head.state.get("truth", "device")],  # heads of before do not say
            volume=volume.voxels,
            spacing_mm=spacing,
            valid_box=volume.valid_box.astype(int).tolist(),
            surfaces=dict(zip(names, heights, strict=True)),
            thickness_um=(heights[lower] - heights[upper]) * spacing[1] * 1000,
            has_answer=not is_far(line["feature_distance_percentile"]),
        )
