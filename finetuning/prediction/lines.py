"""A line a scan, written as the scan is done, so that the same command goes on after a kill; and study.csv.

In: the file, the scans that are asked about, what is common to all lines. Out: what is done, and the file. A
line is done when versions, format, precision, anonymity and fovea are those of now, and what it names is
there. Lines of rejects are made again; those of other scans and formats stay; a half line does not count. A
line that cannot be written ends the command: here the lines are what was asked for.

study.csv has a row for each number that a head gave of each scan, those of earlier starts among them, sorted
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
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from data_setup.index.visit import visit_date_of
from data_setup.store.format import KEPT
from finetuning.embedding.scans import Scan
from finetuning.heads.confidence import FAR_PERCENTILE
from finetuning.prediction.cautions import NO_ANSWER
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError, shown
from utils.storage.errors import named_errors, split_scheme
from utils.terminal import say

AT_ONCE = 20  # lines that a bucket gets together: an object cannot grow
SAME = ("format", "precision", "anonymous", "fovea_option")  # of a line that is done
NEEDED = ("path", "version", "status", "precision", "head_sha256")
Line = dict[str, Any]
WHOLE = "scan"  # the sector of a mean over the whole scan
COLUMNS = {
    "layers": ("layer", "sector", "um"),
    "segmentation": ("class", "nl", "lesions"),
    "translation": ("slab", "mean"),
}
OF_LABELS = ("predicted", "label", "score", "probability")
Row = dict[str, Any]


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
            and line["version"] == versions.get(line["path"])
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
                of_head = {key: line[key] for key in NEEDED}["head_sha256"]
            except (ValueError, KeyError, TypeError) as error:
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
