"""How well predicted thickness agrees with that of surfaces which somebody drew on the same scans.

In: lines of a head of surfaces, and scans with drawn surfaces: those that the manifest names
(label_surfaces), else those in a maker's own file (.vol, .E2E, .fda). Out: agreement.csv (a line for each
scan, layer and sector with both), agreement.md (for each layer and sector the bias with limits of agreement,
Bland and Altman 1986, the mean absolute difference and ICC(2,1) of eyes) and agreement.png (Bland and
Altman's plot of the retina). Both are measured by the same rules, each around its own fovea; several scans of
an eye are averaged. Fellow eyes are not independent: limits and correlation take eyes as if they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from data_setup.index.label_maps import layers_in
from data_setup.jobs import acquisition
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError
from data_setup.readers.labels import read_label_surfaces
from data_setup.readers.makers import kinds
from data_setup.readers.open_record import kind_by_name, peek_record
from data_setup.store.format import KEPT
from finetuning.cohort.metrics import icc
from finetuning.dense.surfaces import RETINA, Foveas, measured
from finetuning.embedding.scans import Scan
from finetuning.prediction.lines import WHOLE, Line, rows_of
from finetuning.prediction.picture import NOTICE, plain_text
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import shown
from utils.report.pictures import png
from utils.tables import NONE, Table, interval, number, page
from utils.terminal import say

LEAST_EYES = 3  # of a bias with limits
LEAST_DRAWN = 0.95  # share of the A-scans that a grader drew, for a mean over the scan
LIMIT = 1.96  # standard deviations of differences
COLUMNS = ["person", "eye", "scan", "layer", "sector", "predicted_um", "given_um"]
HEADER = ["", "eyes", "people", "bias, um", "limits of agreement", "mean |difference|", "ICC(2,1)"]


def write_agreement(
    folder: str, lines: Sequence[Line], scans: Mapping[str, Scan], foveas: Foveas, options: StorageOptions
) -> None:
    """Write the three files where a scan has drawn surfaces, else nothing; raises StorageError."""
    asked = [(line, scans[line["path"]]) for line in lines if line["path"] in scans]
    drawn = [
        (line, scan)
        for line, scan in asked
        if scan.surfaces or kind_by_name(scan.record.url) in kinds.LAYERED
    ]
    rows = [row for line, scan in drawn for row in _pairs(line, scan, foveas, options)]
    if not rows:
        return
    table = pd.DataFrame(rows, columns=COLUMNS)
    text = table.to_csv(index=False, float_format="%.3f", lineterminator="\n")
    storage.write_text(storage.join(folder, "agreement.csv"), text, options)
    keys = ["person", "eye", "layer", "sector"]
    eyes = table.groupby(keys, sort=False)[["predicted_um", "given_um"]].mean().reset_index()
    layers = list(dict.fromkeys(eyes.layer))
    first = RETINA if RETINA in layers else layers[0]
    titles = {"Mean thickness over the scan": eyes[eyes.sector == WHOLE]}
    of_sectors = eyes[(eyes.layer == first) & (eyes.sector != WHOLE)]
    tables = [_table(title, part, "layer") for title, part in titles.items()]
    tables += [_table(f"ETDRS sectors: {first}", of_sectors, "sector")] if len(of_sectors) else []
    points = [
        "Differences are predicted less given; limits of agreement: bias and 1.96 standard deviations.",
        "Eyes count as if they were independent, which the two of a person are not.",
        NOTICE,
    ]
    content = page("Predicted against given thickness", [], points, tables)
    storage.write_text(storage.join(folder, "agreement.md"), content, options)
    with plain_text():
        drawing = png(_drawn(eyes[(eyes.layer == first) & (eyes.sector == WHOLE)], first), 100)
    storage.write_bytes(storage.join(folder, "agreement.png"), drawing, options)
    num_eyes = len(eyes[keys[:2]].drop_duplicates())
    say(f"{storage.join(folder, 'agreement.md')}: {num_eyes} eyes with given surfaces")


def _pairs(line: Line, scan: Scan, foveas: Foveas, options: StorageOptions) -> list[dict[str, Any]]:
    """What is known of both; nothing, with a line for people, where the given surfaces cannot be read."""
    if line["status"] != KEPT:
        return []
    record = scan.record
    try:
        is_folder = bool(storage.list_names(record.url, options))
        size = 0 if is_folder else storage.stat(kinds.split_part(record.url)[0], options).size
        header = peek_record(record, size, options)
        given_surfaces = _given(scan, header, options)
    except (OCTReadError, storage.StorageError) as error:
        say(f"{shown(scan.surfaces or record.url)}: given surfaces are not used: {error}")
        return []
    if given_surfaces is None:
        return []
    values, own = given_surfaces
    nothing = np.full(values.shape[1:], np.nan, np.float32)
    rows = [values[own.index(name)] if name in own else nothing for name in line["surfaces"]]
    fields = acquisition(header) | scan.facts(header) | {"path": record.path}
    given = measured(np.stack(rows), line["surfaces"], header, fields, foveas)
    number_of = [
        {(row["layer"], row["sector"]): row["um"] for row in rows_of(line | part) if row.get("layer")}
        for part in ({}, given)
    ]
    side = fields["laterality"] if fields["laterality"] in ("L", "R") else record.path
    facts = {"person": scan.person or record.path, "eye": side, "scan": record.path}
    is_whole = bool((np.isfinite(np.stack(rows)).mean(axis=(1, 2)) >= LEAST_DRAWN).all())
    return [
        facts
        | {"layer": layer, "sector": sector, "predicted_um": um, "given_um": number_of[1][layer, sector]}
        for (layer, sector), um in number_of[0].items()
        if um is not None and number_of[1].get((layer, sector)) is not None
        if is_whole or sector != WHOLE  # or two means are of other A-scans
    ]


def _given(
    scan: Scan, header: OCTHeader, options: StorageOptions
) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """(rows [S, D, W], names) of label_surfaces, else of the maker's file itself; None without any."""
    if scan.surfaces:
        return read_label_surfaces(scan.surfaces, header.shape, options, header.sop_instance_uid)
    layers = layers_in(scan.record.url, kind_by_name(scan.record.url) or "", header.spacing_mm, options)
    return None if layers is None else (layers.heights, layers.names)


def bland_altman(predicted_N: np.ndarray, given_N: np.ndarray) -> dict[str, float]:
    """bias, low, high (limits of agreement), mad, icc of N eyes; below LEAST_EYES only bias and mad."""
    difference = predicted_N - given_N
    result = {"bias": float(difference.mean()), "mad": float(np.abs(difference).mean())}
    if len(difference) < LEAST_EYES:
        return result | dict.fromkeys(("low", "high", "icc"), float("nan"))
    wide = LIMIT * float(difference.std(ddof=1))
    agreement, _ = icc(np.stack([predicted_N, given_N], axis=1), np.ones((1, len(difference))))
    low, high = result["bias"] - wide, result["bias"] + wide
    return result | {"low": low, "high": high, "icc": float(agreement[0])}


def _table(title: str, eyes: pd.DataFrame, by: str) -> Table:
    rows = []
    for name, part in eyes.groupby(by, sort=False):
        cells = bland_altman(part.predicted_um.to_numpy(float), part.given_um.to_numpy(float))
        known = {key: None if np.isnan(value) else value for key, value in cells.items()}
        limits = interval((cells["low"], cells["high"]), ".1f") if known["low"] is not None else NONE
        rows.append([str(name), str(len(part)), str(part.person.nunique()), number(known["bias"], "+.1f")])
        rows[-1] += [limits, number(known["mad"], ".1f"), number(known["icc"], ".3f")]
    return Table(title, HEADER, rows)


def _drawn(eyes: pd.DataFrame, layer: str) -> Figure:
    """Predicted by given thickness, and their difference by their mean."""
    predicted, given = eyes.predicted_um.to_numpy(float), eyes.given_um.to_numpy(float)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    first, second = figure.subplots(1, 2)
    first.plot(given, predicted, "o", color="#2b6cb0")
    first.axline((float(given.mean()),) * 2, slope=1, color="black", linewidth=0.8)
    first.set(
        xlabel="given, um", ylabel="predicted, um", title=f"{layer}, mean over the scan, {len(eyes)} eyes"
    )
    second.plot((predicted + given) / 2, predicted - given, "o", color="#2b6cb0")
    cells = bland_altman(predicted, given)
    for name, style in (("bias", "-"), ("low", "--"), ("high", "--")):
        if not np.isnan(cells[name]):
            second.axhline(cells[name], color="#c53030", linestyle=style, linewidth=1)
    second.set(xlabel="mean of both, um", ylabel="predicted less given, um", title="Bland and Altman")
    return figure
