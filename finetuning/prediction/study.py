"""One table of a study: study.csv, a line for each number that a head gave of each scan.

In: the lines of a folder, those of earlier starts among them, and the scans of this start. Out: rows sorted
by person, eye and scan. Columns: person, eye, visit_date (where asked for), scan; then
    layers        layer, sector (`scan`: mean over the scan; nine of ETDRS), um
    segmentation  class, nl, lesions
    translation   slab, mean
    labels        predicted, label, score, probability
and note: why there is no number, or why none is to be relied on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_setup.index.visit import visit_date_of
from data_setup.store.format import KEPT
from finetuning.embedding.scans import Scan
from finetuning.features.familiarity import FAR_PERCENTILE
from finetuning.prediction.cautions import NO_ANSWER
from finetuning.prediction.lines import Line
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import shown
from utils.terminal import say

WHOLE = "scan"  # the sector of a mean over the whole scan
COLUMNS = {
    "layers": ("layer", "sector", "um"),
    "segmentation": ("class", "nl", "lesions"),
    "translation": ("slab", "mean"),
}
OF_LABELS = ("predicted", "label", "score", "probability")
Row = dict[str, Any]


def write_study(
    url: str,
    kind: str,
    lines: Sequence[Line],
    scans: Mapping[str, Scan],
    with_dates: bool,
    options: StorageOptions,
) -> None:
    """Write the table and say what it holds, in a line; raises StorageError."""
    rows, dates = list[Row](), dict[str, str]()
    for line in lines:
        scan = scans.get(line["path"])
        person = line.get("person") or (scan.person if scan else "")
        facts: Row = {"person": person, "eye": _eye(line, scan), "scan": line["path"]}
        if with_dates and scan is not None:
            facts["visit_date"] = dates[line["path"]] = visit_date_of(scan.record.url, options)
        rows += [facts | row for row in rows_of(line)]
    rows.sort(key=lambda row: (str(row["person"]), row["eye"], str(row["scan"])))
    names = ["person", "eye", *(["visit_date"] if with_dates else []), "scan"]
    names += [*COLUMNS.get(kind, OF_LABELS), "note"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    storage.write_text(url, buffer.getvalue(), options)
    eyes = {(row["person"], row["eye"]) for row in rows}
    say(f"{url}: {len(rows)} lines, {len(eyes)} eyes of {len({person for person, _ in eyes})} people")
    if without := [path for path, date in dates.items() if not date]:
        say(f"--visit-date: {len(without)} of {len(dates)} scans say none, the first {shown(without[0])}")


def _eye(line: Line, scan: Scan | None) -> str:
    side = str(line.get("laterality") or (scan.laterality if scan else ""))
    return side if side in ("L", "R") else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def rows_of(line: Line) -> Iterator[Row]:
    """The rows of a line; one with its reason where it has no number."""
    if line["status"] != KEPT:
        yield {"note": f"not measured: {line['status']}: {line.get('message') or ''}"}
        return
    percentile = line.get("feature_distance_percentile")
    far = {"note": NO_ANSWER} if percentile is not None and percentile >= FAR_PERCENTILE else {}
    for layer, um in line.get("thickness_um", {}).items():
        sectors = (line.get("etdrs_um") or {}).get(layer, {})
        for sector, value in {WHOLE: um, **sectors}.items():
            unknown = {} if value is not None else {"note": "too little of it is in the scan"}
            yield {"layer": layer, "sector": sector, "um": value} | unknown | far
    if line.get("etdrs_message"):
        yield {"sector": "ETDRS", "note": f"no sectors: {line['etdrs_message']}"}
    for name, size in line.get("classes", {}).items():
        yield {"class": name, "nl": 1000 * size["mm3"], "lesions": size.get("lesions")} | far
    for name, value in line.get("mean", {}).items():
        yield {"slab": name, "mean": value} | far
    predicted = line.get("predicted")
    text = "; ".join(predicted) if isinstance(predicted, list) else predicted
    for name, score in line.get("scores", {}).items():
        probability = (line.get("probabilities") or {}).get(name)
        yield {"predicted": text, "label": name, "score": score, "probability": probability} | far
