"""task.kind=layers: ordered surfaces of the retina, how decoders of them are trained and judged.

In: a store with height maps (data_setup.prepare --heights). Out: `LAYERS`. Names of surfaces are those of
devices or of label files: two share a surface where they call it the same, and a surface that one does not
mark is NaN in its volumes. A head's file has `surfaces`, `truth` (who drew them), `mean_heights` and
`familiarity` (finetuning/heads/confidence.py), which may be None. The boundary error of the validation
volumes decides which weights are kept. An evaluation writes layers.json, layers.md, surfaces.parquet (a line
for every arm, volume and surface or layer), layers/ (a volume of each device with its surfaces, which the
report draws) and etdrs.csv (mean thickness in um in nine sectors, a line for every eye, layer and source).
Beside the encoders it has mean heights, which know no image. What all are compared with is what the device's
own software drew, or the labels of label_surfaces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from data_setup.attach.stored import OF_LABELS, StoredHeights
from data_setup.readers.heights import DEPTH_OF_LABEL
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN
from finetuning.cohort.source import Source
from finetuning.dense import surfaces
from finetuning.dense.decoder import surface_loss
from finetuning.dense.folds import DenseVolumes, in_folds, with_labels
from finetuning.dense.head import DEVICE, DRAWN, MEAN, PRETRAINED, DenseHead, label
from finetuning.dense.kind import Content, Examined, Kind, Line, Predictions
from finetuning.dense.planes import Planes
from finetuning.features.kept import KeptFeatures, pooled_of_tokens
from finetuning.heads.confidence import fit_familiarity
from utils import storage
from utils.config.schema import Config
from utils.errors import UserError
from utils.report.volumes import LayersPicture, save_layers
from utils.runtime.single import Runtime
from utils.tables import Table, number

log = logging.getLogger(__name__)
OF_ALL = ""  # the protocol of mean_heights that stands for every other
SURFACE, LAYER, SECTOR = "surface", "layer", "sector"  # what a line is of
NO_LAYER = ""  # of a line of SECTOR that says why there are no sectors
WHOSE = {  # LayerVolumes.truth -> what the page says of it
    DEVICE: "Heights are what a device's software drew: labels of a machine, not truth.",
    DRAWN: "Heights are the files of label_surfaces, by whoever drew those.",
}
NOTES = (
    "Errors are means over A-scans, then over a participant's volumes, then over participants; intervals "
    "resample participants.",
)


@dataclass(frozen=True)
class LayerVolumes(DenseVolumes):
    """Volumes with the heights of surfaces; `names` are the surfaces from the vitreous down [S]."""

    heights: StoredHeights

    @property
    def truth(self) -> str:
        """What the heights are called in a table: `device` or `labels`."""
        return "labels" if self.heights.source == OF_LABELS else "device"

    def facts(self) -> pd.DataFrame:
        return self.heights.index[["row", "checksum", "volume", "surfaces"]]

    def read(self, row: int) -> np.ndarray:
        """float32 [S, D, W] in voxels, or in rows of the scan, NaN where there is no height."""
        own = self.heights.names(row)
        if self.read_original is not None:
            values, own = self.read_original(row)
            values = self.inside(row, values)
        else:
            values = self.heights.read(row)
        result = np.full((len(self.names), *values.shape[1:]), np.nan, np.float32)
        for place, name in enumerate(self.names):
            if name in own:
                result[place] = values[own.index(name)]
        return result

    def marked(self, row: int) -> list[int]:
        """Places in `names` of the surfaces that are marked in the row."""
        own = set(self.heights.names(row))
        return [place for place, name in enumerate(self.names) if name in own]

    def names_of(self, row: int) -> frozenset[str]:
        return frozenset(self.names[place] for place in self.marked(row))

    def layers(self, row: int) -> dict[str, tuple[int, int]]:
        """As `layers_of`, of the surfaces that are marked in the row."""
        return surfaces.layers_of(self.names, self.marked(row))


def read_volumes(cfg: Config, store: PreparedStore) -> LayerVolumes:
    """The volumes with height maps in the splits train, val and eval.split; raises UserError."""
    heights = StoredHeights.open(store.url, store.options)
    index = with_labels(cfg, store, heights.index, "heights")
    of_rows = {int(row): heights.names(row) for row in index["row"]}
    names = _names(cfg, of_rows, heights.source)
    index = index.loc[[row for row, own in of_rows.items() if set(own) & set(names)]]
    folds = in_folds(cfg, index, store.url, f"the surfaces {', '.join(names)}")
    volumes = LayerVolumes(store=store, names=names, heights=heights, **folds)
    first = {of_rows[row]: row for row in reversed(volumes.of(TRAIN).tolist())}
    for row in first.values():
        _require_depths(volumes, row)
    return volumes


def _names(cfg: Config, of_rows: dict[int, tuple[str, ...]], source: str) -> tuple[str, ...]:
    """task.names, or all that label files name; of a device's maps the known ones. Raises UserError."""
    there = set().union(*of_rows.values()) if of_rows else set()
    wanted = cfg.task.names
    if wanted is None:
        # a device that names nothing has surface_01, ..., which are others in each device
        known = {name for name in there if source == OF_LABELS or name.upper() in DEPTH_OF_LABEL}
        if len(known) < 2:
            raise UserError(
                "task.names: expected two or more named surfaces in the height maps, found "
                f"{_listed(there)}; name them in task.names"
            )
        if known < there:
            log.warning("surfaces without a name that is known are left out: %s", _listed(there - known))
        return _merged(sorted({tuple(n for n in own if n in known) for own in of_rows.values()}))
    lacking = [name for name in wanted if name not in there]
    if lacking:
        raise UserError(f"task.names: expected some of {_listed(there)}, found {_listed(lacking)}")
    return tuple(wanted)


def _merged(orders: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All names in one order that agrees with each of these; names that devices know go by their depth where
    that is free. Raises UserError where two orders disagree.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(n for own in orders for n in own))}
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(places, ()))
    for own in orders:
        for above, below in pairwise(own):
            sorter.add(below, above)
    try:
        sorter.prepare()
    except CycleError as error:
        names = " above ".join(error.args[1])
        raise UserError(
            f"task.names: expected one order of the surfaces in all files, found {names}; give their order, "
            "from the vitreous down, in task.names"
        ) from None
    result: list[str] = []
    ready, depth = set(sorter.get_ready()), 0
    while ready:
        rank = {name: (DEPTH_OF_LABEL.get(name.upper(), depth), places[name]) for name in ready}
        name = min(ready, key=rank.__getitem__)
        depth = rank[name][0]
        result.append(name)
        ready.remove(name)
        sorter.done(name)
        ready |= set(sorter.get_ready())
    return tuple(result)


def _require_depths(volumes: LayerVolumes, row: int) -> None:
    """Raise UserError unless the surfaces of a row lie in the order of their names: decoders order them."""
    values = volumes.read(row)
    for above, below in pairwise(volumes.marked(row)):
        distance = values[below] - values[above]
        if not np.isnan(distance).all() and np.nanmean(distance) < 0:
            upper, lower = volumes.names[above], volumes.names[below]
            raise UserError(
                f"task.names: expected surfaces from the vitreous down, found {lower} above {upper} in "
                f"{volumes.store.index.path[row]}; give their order in task.names"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def validation_error(volumes: LayerVolumes, predicted: Predictions) -> dict[str, float]:
    """Means of the validation volumes: boundary error in um over surfaces, and Dice of the layers between."""
    errors, overlaps = [], []
    for row, heights_SDW in predicted:
        truth, marked = volumes.read(row), volumes.marked(row)
        errors.append(known_mean(surfaces.boundary_error_um(heights_SDW, truth, volumes.spacing_mm(row)[1])))
        overlaps.append(known_mean(surfaces.layer_overlap(heights_SDW[marked], truth[marked])[0]))
    return {"error_um": known_mean(errors), "dice": known_mean(overlaps)}


def known_mean(values: Sequence[float] | np.ndarray) -> float:
    """Mean of those that are no NaN; NaN where there is none."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def state(encoder: nn.Module, source: Source, volumes: LayerVolumes, runtime: Runtime) -> dict[str, Any]:
    """What a head's file says of the training volumes: names, mean heights, and how its pooled features lie;
    a frozen encoder has kept their tokens.
    """
    cfg = source.cfg
    kept = KeptFeatures(encoder.requires_grad_(False), cfg, volumes.store, runtime)
    rows, is_train = volumes.of(TRAIN), volumes.fold == TRAIN
    kept.keep_tokens(np.unique(rows))
    familiarity = fit_familiarity(pooled_of_tokens(kept, rows), volumes.person[is_train])
    return {
        "surfaces": list(volumes.names),
        "truth": volumes.truth,
        "mean_heights": mean_heights(volumes),
        "familiarity": None if familiarity is None else familiarity.state(),
    }


def mean_heights(volumes: LayerVolumes) -> dict[str, list[float | None]]:
    """Protocol -> mean height of each surface over the training volumes: what knows no image. OF_ALL: any."""
    rows = [int(row) for row in volumes.of(TRAIN)]
    means = pd.DataFrame([surfaces.known_means(volumes.read(row)) for row in rows])
    protocols = volumes.store.index.protocol[rows].astype(str).to_numpy()
    tables = dict(iter(means.groupby(protocols).mean().iterrows())) | {OF_ALL: means.mean()}
    return {
        str(protocol): [None if np.isnan(v) else float(v) for v in table]
        for protocol, table in tables.items()
    }


def baselines(volumes: LayerVolumes, head: DenseHead) -> dict[str, Callable[[int], np.ndarray]]:
    """The heights that all are compared with, which have sectors, and mean heights."""
    return {volumes.truth: volumes.read, MEAN: partial(_mean_heights, volumes, head)}


def _mean_heights(volumes: LayerVolumes, head: DenseHead, row: int) -> np.ndarray:
    """The training volumes' mean heights of the row's protocol at every A-scan [S, D, W]."""
    means = head.state["mean_heights"]
    of_protocol = means.get(str(volumes.store.index.protocol[row]), means[OF_ALL])
    of_all = means[OF_ALL]
    values = [a if a is not None else b for a, b in zip(of_protocol, of_all, strict=True)]
    flat = np.array([np.nan if v is None else v for v in values], np.float32)
    d, _, w = volumes.store.image_size
    return np.broadcast_to(flat[:, None, None], (len(flat), d, w))


def measure(volumes: LayerVolumes, row: int, predicted: np.ndarray, arm: str) -> list[Line]:
    """A line for every surface and layer of a volume, and for every sector of the ETDRS grid in a layer."""
    lines = [] if arm == MEAN else _sectors(volumes, row, volumes.inside(row, predicted))
    if arm == volumes.truth:
        return lines
    truth, spacing = volumes.read(row), volumes.spacing_mm(row)
    error = surfaces.boundary_error_um(predicted, truth, spacing[1])
    lines += [
        {"what": SURFACE, "name": volumes.names[place], "error_um": float(error[place])}
        | {"hd95_um": surfaces.hausdorff95_um(predicted[place], truth[place], spacing)}
        for place in volumes.marked(row)
    ]
    for name, pair in volumes.layers(row).items():
        if name != surfaces.RETINA:
            dice, iou = surfaces.layer_overlap(predicted[list(pair)], truth[list(pair)])
            lines.append({"what": LAYER, "name": name, "dice": float(dice[0]), "iou": float(iou[0])})
    return lines


def _sectors(volumes: LayerVolumes, row: int, heights_SDW: np.ndarray) -> list[Line]:
    """ETDRS lines of a volume, one a layer and one for the whole retina; else one that says why not."""
    record, (d_mm, h_mm, w_mm) = volumes.store.index.loc[row], volumes.spacing_mm(row)
    pairs = volumes.layers(row).items()
    um = {name: (heights_SDW[low] - heights_SDW[up]) * h_mm * 1000 for name, (up, low) in pairs}
    facts = {"what": SECTOR, "laterality": record.laterality, "orientation": record.orientation_source}
    try:
        fovea, _ = surfaces.locate(um, record, (d_mm, w_mm))
        tables = surfaces.etdrs_tables(um, record, (d_mm, w_mm), fovea)
    except ValueError as error:  # another region, or nothing is marked in the middle
        return [facts | {"layer": NO_LAYER, "message": str(error)}]
    return [
        facts
        | {"layer": name, "scanned_share": min(sector.share for sector in table.values())}
        | {sector_name: sector.um for sector_name, sector in table.items()}
        for name, table in tables.items()
    ]


def by_eye(lines: pd.DataFrame) -> pd.DataFrame:
    """Sectors of an eye: means over its volumes; `volumes` says how many."""
    keys = ["person_id", "laterality", "layer", "source"]
    sectors = lines[lines.what == SECTOR].rename(columns={"arm": "source"})
    if sectors.empty:
        return pd.DataFrame(
            columns=[*keys, "volumes", "orientation", "scanned_share", *surfaces.SECTORS, "message"]
        )
    sectors = sectors.reindex(columns=[*keys, "orientation", "scanned_share", *surfaces.SECTORS, "message"])
    groups = sectors.groupby(keys, sort=True)
    means = groups[[*surfaces.SECTORS]].mean()
    means.insert(0, "scanned_share", groups["scanned_share"].min())
    means.insert(0, "orientation", groups["orientation"].agg(lambda values: "+".join(sorted(set(values)))))
    means.insert(0, "volumes", groups.size())
    means["message"] = groups["message"].agg(lambda texts: "; ".join(sorted(set(texts.dropna()))))
    return means.reset_index()


def more(examined: Examined[LayerVolumes]) -> Content:
    """Who drew the heights; arm -> mean absolute difference of its sectors in um over eyes, by layer."""
    truth, keys = examined.volumes.truth, ["person_id", "laterality", "layer"]
    sectors = by_eye(examined.lines)
    sectors = sectors[sectors.layer != NO_LAYER]
    theirs = sectors[sectors.source == truth].set_index(keys)[[*surfaces.SECTORS]]
    result: dict[str, dict[str, Any]] = {}
    for arm in examined.arms:
        own = sectors[sectors.source == arm].set_index(keys)[[*surfaces.SECTORS]]
        difference = (own - theirs).abs()
        by_layer = difference.groupby("layer").mean().mean(axis=1)
        result[arm] = {str(k): None if np.isnan(v) else float(v) for k, v in by_layer.items()}
    return {"truth": truth, "etdrs": result}


def write(examined: Examined[LayerVolumes], content: Content) -> None:
    """surfaces.parquet, etdrs.csv, and a volume of each device with its surfaces, for the report to draw."""
    volumes, lines = examined.volumes, examined.lines
    of_sectors = ["laterality", "layer", "orientation", "scanned_share", "message", *surfaces.SECTORS]
    examined.write_lines(
        "surfaces.parquet", lines[lines.what != SECTOR].drop(columns=of_sectors, errors="ignore")
    )
    text = by_eye(lines).to_csv(index=False, float_format="%.2f")
    storage.write_text(storage.join(examined.cfg.run.dir, "etdrs.csv"), text)
    folder = storage.join(examined.cfg.run.dir, "layers")
    storage.remove(folder, recursive=True)  # of an earlier split
    for row, arms in examined.drawn.items():
        record = volumes.store.index.loc[row]
        picture = LayersPicture(
            volume=volumes.store.read(row),
            spacing=volumes.spacing_mm(row),
            names=volumes.names,
            predicted=arms[PRETRAINED],
            truth=volumes.read(row),
            title=f"{record.device} {record.protocol} {record.laterality}, layers",
        )
        save_layers(storage.join(folder, f"row_{row:06d}.npz"), picture)


def drawn(volumes: LayerVolumes) -> list[int]:
    index = volumes.store.index.loc[volumes.of(EVALUATED)]
    return list(map(int, index.groupby("device").row.first()))


def tables(content: Content) -> list[Table]:
    own = content["etdrs"]
    rows = [[name, *(number(own[arm][name], ".1f") for arm in own)] for name in own[PRETRAINED]]
    title = f"ETDRS sectors: mean difference from the {content['truth']}, um"
    return [Table(title, ["", *map(label, own)], rows)]


LAYERS = Kind(
    name="layers",
    names="surfaces",
    read_volumes=read_volumes,
    planes=Planes,
    loss=lambda *_: surface_loss,
    metric="error_um",
    sign=-1,
    score=validation_error,
    shown=("validation boundary error", "{:.2f} um"),
    state=state,
    title="Surfaces of the retina",
    measure=measure,
    columns={
        "error_um": ("Boundary error, um", ".2f"),
        "hd95_um": ("HD95, um", ".1f"),
        "dice": ("Dice of layers", ".3f"),
        "iou": ("IoU of layers", ".3f"),
    },
    gain=(-1, "boundary error saved in um"),
    write=write,
    notes=NOTES,
    baselines=baselines,
    drawn=drawn,
    more=more,
    points=lambda content: [WHOSE[content["truth"]]],
    tables=tables,
    keys=("mean_heights",),
)
