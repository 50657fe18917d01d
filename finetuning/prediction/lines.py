"""A line a scan, written as the scan is done, so that the same command goes on after a kill; and study.csv.

In: the file, the scans that are asked about, what is common to all lines. Out: what is done, and the file. A
line is done when versions, format, precision, anonymity and fovea are those of now, and what it names is
there. Lines of rejects are made again; those of other scans and formats stay; a half line does not count. A
line that cannot be written ends the command: here the lines are what was asked for.

A line's warnings say what weakens a prediction, from what was measured of its volume: the fields of the
store's index, and how far its features lie from those of training. A volume without one is not thereby good.

study.csv has a row for each number that a head gave of each scan, those of earlier starts among them, sorted
by person, eye and scan. Columns: person, eye, visit_date (where asked for), scan; then
    layers        layer, sector (`scan`: mean over the scan; nine of ETDRS), um
    segmentation  class, nl, lesions
    translation   slab, mean
    labels        predicted, label, score, probability
and note: why a number is absent, or why none is to be relied on.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from data_setup.index.visit import visit_date_of
from data_setup.protocols import OTHER_RASTERS_MM, PROTOCOLS
from data_setup.store.format import KEPT
from data_setup.store.summary import LOW_VALID_FRACTION
from finetuning.embedding.scans import Scan, is_of
from finetuning.heads.confidence import FAR_PERCENTILE
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError, shown
from utils.storage.errors import named_errors, split_scheme
from utils.terminal import say

AT_ONCE = 20  # lines that a bucket gets together: an object cannot grow
SAME = ("format", "precision", "anonymous", "fovea_option")  # of a line that is done
NEEDED = ("path", "version", "status", "precision", "head_sha256")
PLACES = ("file", "picture", "arrays")
Line = dict[str, Any]
WHOLE = "scan"  # the sector of a mean over the whole scan
COLUMNS = {
    "layers": ("layer", "sector", "um"),
    "segmentation": ("class", "nl", "lesions"),
    "translation": ("slab", "mean"),
}
OF_LABELS = ("predicted", "label", "score", "probability")
Row = dict[str, Any]
HIGH_LOST_FRACTION = 0.25  # of the scan, outside the grid
LOW_SIGNAL_DB = 6.0  # half of what quality asks for
HIGH_CLIPPED_SHARE = 0.1
FAULTS = {  # column of the index -> (value that is warned of, the line)
    "motion_um": (30.0, "B-scans jump by {:.0f} um axially on average"),
    "missing_share": (0.05, "{:.0%} of the B-scans are blank or repeated"),
    "saturated_share": (0.05, "{:.0%} of the grey values are saturated"),
}
SPACING_MARGIN = 1.1  # beyond the protocols' own extremes
FAR_SPACING = 1.5  # times the nearest one of training
COMMONEST_MM = {"d": (0.238, 0.252), "h": (0.0038, 0.004)}  # Heidelberg's commonest raster is no other pitch
NOTHING: Mapping[str, Sequence[float]] = {}
AXES = {"d": "between B-scans", "h": "axial", "w": "between A-scans"}
# what no eye of those that were measured shows (finetuning/embedding/volumes.py)
UPRIGHT_SHARE, UPSIDE_DOWN_SHARE = 0.85, 0.15
INVERTED_SKEW = -0.25
DARK_GREY = 80.0
UNORDERED_SHARE = 0.75
FIELD_MM = {"d": (2.5, 16.0), "h": (1.0, 7.0), "w": (2.5, 24.0)}  # of 15 x 10 degrees to ultra-wide
ACROSS_SHARE = (0.55, 1.6)  # of a field across its B-scans, to that along them
HALF_AS_HIGH_MM = (8.0, 9.5)  # along B-scans of 30 by 15 degrees, a raster that Spectralis has
FIELDS = {"d": "across B-scans", "h": "in depth", "w": "along B-scans"}
NO_ANSWER = "NO ANSWER: too far from what the head was trained on"


class Lines:
    """The lines of a file, those of earlier starts among them."""

    def __init__(
        self,
        url: str,
        versions: Mapping[str, str],
        common: Line,
        has_files: Callable[[Line], bool],
        options: StorageOptions,
    ) -> None:
        """`versions`: path -> version of the scans that are asked about; `common`: to the lines of this
        start; `has_files`: whether what a line names is there.

        Raises UserError for lines of another head, or a file that is none of this command's.
        """
        self.url, self._versions, self._common, self._options = url, versions, common, options
        earlier = self._earlier()
        form = common.get("format")
        self.done = {
            line["path"]: line
            for line in earlier
            if line["status"] == KEPT
            and all(line.get(name) == common.get(name) for name in SAME)
            and line.get("schema_version", 2) == common["schema_version"]  # the first ones lack it
            and line["version"]
            and is_of(line["version"], versions.get(line["path"]))
            and has_files(line)
        }
        self.others = [x for x in earlier if x["path"] not in versions or x.get("format") != form]
        self._lines = [*self.others, *self.done.values()]
        self._file: IO[bytes] | None = None
        self._write_all()
        if not storage.is_remote(url):
            with named_errors(url):
                self._file = open(split_scheme(url)[1], "ab", buffering=0)  # noqa: SIM115

    @property
    def all(self) -> list[Line]:
        return list(self._lines)

    def add(self, line: Line) -> None:
        """Write the line of a scan; raises StorageError."""
        whole = line | self._common | {"version": self._versions[line["path"]]}
        self._lines.append(whole)
        if self._file is not None:
            with named_errors(self.url):
                _append(self._file, json.dumps(whole).encode() + b"\n")
        elif len(self._lines) % AT_ONCE == 0:
            self._write_all()

    def close(self) -> None:
        if self._file is not None:
            with named_errors(self.url), self._file:
                os.fsync(self._file.fileno())  # some disks say only now that they are full
        else:
            self._write_all()

    def _write_all(self) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self._lines)
        storage.write_text(self.url, text, self._options)

    def _earlier(self) -> list[Line]:
        if not storage.exists(self.url, self._options):
            return []
        lines, checksum = [], self._common["head_sha256"]
        for text in storage.read_text(self.url, self._options).splitlines(keepends=True):
            if not text.endswith("\n"):
                continue
            try:
                line = json.loads(text)
                of_head, places = line["head_sha256"], (line.get(name) or "" for name in PLACES)
                "".join([*(line[name] for name in NEEDED), *places])  # are texts
                list(rows_of(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self.url}: expected lines of finetuning.predict, found another one ({error})"
                ) from error
            if of_head != checksum:
                raise UserError(
                    f"{self.url}: expected lines of the head with sha256 {checksum[:12]}, found one of "
                    f"{str(of_head)[:12]}; give another --out"
                )
            lines.append(line)
        return lines


def _append(file: IO[bytes], line: bytes) -> None:
    """Write a whole line, or none of it; raises OSError."""
    size, data = file.seek(0, 2), memoryview(line)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(size)
        raise


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
    far = {"note": NO_ANSWER} if is_far(percentile) else {}
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


def cautions_of(
    fields: Mapping[str, Any], percentile: float | None, trained_mm: Mapping[str, Sequence[float]] = NOTHING
) -> list[str]:
    """Warnings of one volume; `percentile` of its feature distance, None where the head knows none;
    `trained_mm`: spacings of the head's training volumes by axis, none of older heads.
    """
    texts = [*_looks(fields), *_spacing(fields, trained_mm)]
    if fields["valid_fraction"] < LOW_VALID_FRACTION:
        texts.append(f"{fields['valid_fraction']:.0%} of the grid lies inside the scan")
    if fields["lost_fraction"] > HIGH_LOST_FRACTION:
        texts.append(f"{fields['lost_fraction']:.0%} of the scan lies outside the grid")
    if fields["orientation_source"] in ("assumed", "unknown"):
        texts.append(f"direction of the B-scans: {fields['orientation_source']}")
    if fields["signal_db"] < LOW_SIGNAL_DB:
        texts.append(f"weak signal: {fields['signal_db']:.1f} dB over the background")
    if fields["clipped_share"] > HIGH_CLIPPED_SHARE:
        texts.append(f"the retina touches the scan's edge in {fields['clipped_share']:.0%} of the A-scans")
    for name, (limit, text) in FAULTS.items():
        if fields[name] > limit:
            texts.append(text.format(fields[name]))
    if is_far(percentile):
        texts.append(
            f"features farther from the training set than {percentile:.0f} % of its held-out volumes"
        )
    return texts


def is_far(percentile: float | None) -> bool:
    """Whether a head has no answer for a volume; one that knows no distance has."""
    return percentile is not None and percentile >= FAR_PERCENTILE


def _looks(fields: Mapping[str, Any]) -> list[str]:
    """Signs against a retina as devices write one; none for a volume whose frames were not looked at."""
    if "upright_share" not in fields:
        return []
    texts, upright = [], fields["upright_share"]
    if fields["grey_skew"] < INVERTED_SKEW:
        texts.append("grey values seem inverted: most of the scan is bright")
        upright = 1 - upright
    if upright <= UPSIDE_DOWN_SHARE:
        texts.append("the retina seems upside down: brightness rises sharply upwards, not downwards")
    elif not upright >= UPRIGHT_SHARE:
        texts.append("no layers as a retina has them: another body part, another axis, or noise")
    if fields["brightest_grey"] < DARK_GREY:
        texts.append(f"dark: 99.9 % of the grey values are {fields['brightest_grey']:.0f} of 255 or less")
    if fields["step_share"] > UNORDERED_SHARE:
        texts.append("neighbouring B-scans are as unlike as any two: they seem to be in another order")
    return [*texts, *_field(fields)]


def _field(fields: Mapping[str, Any]) -> list[str]:
    """Lengths that no raster has: another pitch than the header says, or a part of a scan."""
    texts = []
    for axis, (low, high) in FIELD_MM.items():
        if not low <= fields[f"field_{axis}"] <= high:
            texts.append(
                f"field {FIELDS[axis]}: {fields[f'field_{axis}']:.1f} mm, expected {low:g} to {high:g} mm: "
                "another spacing than the file says, or part of a scan"
            )
    across, along = fields["field_d"], fields["field_w"]
    least, most = ACROSS_SHARE
    if HALF_AS_HIGH_MM[0] <= along <= HALF_AS_HIGH_MM[1]:
        least = 0.45
    if not least * along <= across <= most * along:
        texts.append(
            f"field {across:.1f} mm across B-scans and {along:.1f} mm along them: another spacing than the "
            "file says, or a strip"
        )
    return texts


def _spacing(fields: Mapping[str, Any], trained_mm: Mapping[str, Sequence[float]]) -> list[str]:
    """Axes whose acquired spacing lies outside that of all known protocols, or far from training's."""
    texts = []
    for place, (axis, what) in enumerate(AXES.items()):
        known = [protocol.spacing_mm[place] for protocol in PROTOCOLS if protocol.is_volume]
        known += OTHER_RASTERS_MM[place]
        low, high = min(known) / SPACING_MARGIN, max(known) * SPACING_MARGIN
        value = float(fields[f"spacing_before_{axis}"])
        trained = trained_mm.get(axis, ())
        is_far = min((max(mm / value, value / mm) for mm in trained), default=1.0) > FAR_SPACING
        least, most = COMMONEST_MM.get(axis, (0.0, 0.0))
        if not low <= value <= high:
            where = f"outside {1000 * low:.1f} to {1000 * high:.1f} um, the range of known protocols"
        elif is_far and not least <= value <= most:
            ends = f"{1000 * min(trained):.1f} to {1000 * max(trained):.1f} um"
            where = f"far from all that the head was trained on, {ends}"
        else:
            continue
        texts.append(f"spacing {what}: {1000 * value:.1f} um, {where}")
    return texts
