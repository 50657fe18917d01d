"""What a head of surfaces or slabs says of one volume, in the scan's own B-scans and A-scans.

In: a head of finetuning.dense (its decoder on the pre-trained encoder) and a volume. Out: a `FileAnswer`. Of
surfaces heights in the scan's rows, thickness in um, ETDRS sectors. Arrays lie as the file does, NaN where
the grid does not reach.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from data_setup.attach.grid import lay_on_scan, means_on_scan
from data_setup.normalisation import plain_view
from finetuning.dense.head import PRETRAINED, DenseHead
from finetuning.dense.kinds import KINDS
from finetuning.dense.surfaces import RETINA, Foveas, layers_of, mean_or_none, measured
from finetuning.dense.translation import draw_slabs
from finetuning.dense.whole import decode
from finetuning.embedding.stream import batch_of, tokens_of
from finetuning.embedding.volumes import Volume
from finetuning.features.familiarity import Familiarity, stored_familiarity
from finetuning.prediction.cautions import NO_ANSWER, cautions_of, is_far
from finetuning.prediction.labels import (
    FileAnswer,
    describe,
    distance_percentile,
    distance_text,
    short_name,
    spacing_of,
)
from finetuning.prediction.picture import NOTICE, WRAP, Page, draw
from models.probes.features import pool_tokens
from utils.config.schema import Config
from utils.runtime.single import Runtime

TITLE_INCH = 10 * 1.2 / 72  # of a line of a title
FOOTERS = {  # by who drew the heights that the head learnt from
    "device": "Lines: surfaces that the head learnt from a device's software, labels of a machine, not "
    "truth. Where the device of this scan marks no such surface, nobody has measured the line.",
    "labels": "Lines: surfaces that the head learnt from the files of label_surfaces.",
}


class DensePredictor:
    """The pre-trained arm of a head of layers or translation."""

    folder = ""  # of arrays
    notes = ()  # what is predicted is measured by finetuning.evaluate, and no map is drawn

    def __init__(self, head: DenseHead, cfg: Config, runtime: Runtime) -> None:
        self.head, self.cfg, self.runtime = head, cfg, runtime
        self.kind, self.arm = KINDS[head.state["kind"]], head.arms[0]
        self.familiarity: Familiarity | None = stored_familiarity(head.state)
        self.arm.encoder.to(runtime.device)
        self.arm.decoder.to(runtime.device)

    @property
    def about(self) -> dict[str, Any]:
        """What every line says of the head."""
        reason = f"uncalibrated: {self.kind.names} carry no probability"
        return {"task": self.kind.name, "calibrated": False, "calibration": reason}

    def is_current(self, line: Mapping[str, Any]) -> bool:
        """The head has nothing beside its file."""
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
            "warnings": cautions_of(volume.fields, percentile),
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
