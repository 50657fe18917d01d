"""The work that the three modes share: find the scan of each line, lay its file, write the row.

In: the lines of a manifest, a store. Out: jobs, one a row, and their rows in the store. A `Job` of a mode
knows what its file is and how it is laid; what became of it is a row with its status, whatever the file
holds. A row whose files and volume are as they were is not done again.

B-scans of a map or a cube run as its scan's do, or the other way: the way that fits the scan better, where
one does clearly. An unclear row that was laid the other way than the clear ones of its device and protocol is
laid as those are; where these do not decide, in the file's order. A device writes all scans of a protocol
alike, so what many clear scans show is worth more than a symmetric eye. What is laid follows from the table
as it is now: a store that grew has the directions of one made at once.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from data_setup.attach.stored import Kind, SideWriter
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import with_ends
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.store.summary import words
from data_setup.tables.text import clean_path, fact_of, path_of
from utils import storage
from utils.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, UserError, shown
from utils.tables import Table, terminal
from utils.terminal import say, track
from utils.workers import executor_of

STRUCTURAL = "associated_structural_oct"
OF_SCAN = (f"{STRUCTURAL}_sop_instance_uid", f"{STRUCTURAL}_file_path")  # columns of AI-READI's OCTA
LEAST_CLEAR = 3  # rows of a protocol that decide
LEAST_SHARE = 0.8  # of them run one way
STEP_MM = 0.045  # rows above and below the first surface that are compared: a few tissue layers
LEAST_STEP = 0.25  # standard deviations; no first surface of a retina is fainter
CLEARER_STEP = 1.1  # so much better must one direction be, or the scan does not decide
LEAST_FIT = 0.2  # correlation; a cube of the same scan has more
CLEARER_FIT = 1.02


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """One row's file to lay on its volume."""

    KIND: ClassVar[Kind]
    FACTS: ClassVar[tuple[str, ...]] = ("device", "protocol")  # of the volume, that every row repeats
    SCORES: ClassVar[tuple[str, ...]] = ()  # columns: how well the scan fits the file, and it reversed
    CLEARER: ClassVar[float]  # how much better one direction must be

    row: int
    path: str  # relative to the source root
    url: str
    store: PreparedStore
    unclear_is_reversed: bool = False  # what is taken where the scan does not decide

    @property
    def record(self) -> pd.Series:
        """The volume's row of the index."""
        return self.store.index.loc[self.row]

    def source(self) -> dict[str, Any]:
        """Columns that change with the file; raises OCTReadError, StorageError."""
        options = self.store.options
        source = with_ends(storage.stat(self.url, options), [self.url], options)
        return {"source_size": source.size, "source_version": source.etag_or_mtime}

    @abstractmethod
    def of_scan(self, laid: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str, ...]]:
        """What the file says, and its names, not on the grid but over the scan, whose B-scans are in the
        store's order: [S, D, W] or [D, H, W]. `laid`: the row of the kind's table. Raises as `lay`.
        """

    @abstractmethod
    def lay(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The kind's arrays on the grid, and what was measured; raises OCTReadError, StorageError."""

    @classmethod
    def is_unclear(cls, first: Any, second: Any) -> Any:
        """Whether neither direction has a clearly better score; of two numbers, or of a table's columns."""
        return np.maximum(first, second) < cls.CLEARER * np.minimum(first, second)

    def choose(self, scores: Sequence[float]) -> dict[str, Any]:
        """Columns of the direction: the better one, `unclear_is_reversed` where neither is clearly better."""
        is_reversed = self.unclear_is_reversed if self.is_unclear(*scores) else scores[1] > scores[0]
        finite = [score if np.isfinite(score) else None for score in scores]
        return {**dict(zip(self.SCORES, finite, strict=True)), "reversed_d": bool(is_reversed)}

    def outcome(self) -> tuple[list[np.ndarray] | None, dict[str, Any]]:
        """What is written of the row, without arrays where the file is not used; raises StorageError."""
        record = self.record
        fields: dict[str, Any] = {name: record[name] for name in self.FACTS}
        fields |= {"path": self.path, "volume": record.checksum, "message": None}
        try:
            fields |= self.source()
            arrays, measured = self.lay()
            return arrays, fields | measured | {"status": KEPT}
        except storage.StorageNotFoundError as error:
            status, message = RejectReason.MISSING_FILE.value, error.problem
        except OCTReadError as error:
            status, message = error.reason.value, error.detail
        return None, fields | {"status": status, "message": message}

    def is_done(self, written: Mapping[str, Any] | None) -> bool:
        """Whether the row is of this volume and of these files."""
        return self.files_of(written) is not None

    def files_of(self, written: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """What `source` says now, where the row is of this volume and of these files; else None."""
        if written is None or written["status"] != KEPT or written["path"] != self.path:
            return None
        if written["volume"] != self.store.index.checksum[self.row]:
            return None
        try:
            source = self.source()
        except (storage.StorageError, OCTReadError):
            return None  # `write` meets the same error and counts it
        known = {name: written[name] for name in source}
        older = source | {k: v.partition(".")[0] for k, v in source.items() if isinstance(v, str)}
        return source if known in (source, older) else None  # older: a row that knows no digest of the ends


def match_lines(
    store: PreparedStore,
    lines: Mapping[int, Mapping[str, str]],
    cells: Sequence[str],
    of_scan: tuple[str | None, str],
    reasons: tuple[str, str],
    devices: Collection[str] | None = None,
) -> tuple[dict[int, Mapping[str, str]], Counter[str]]:
    """Row -> its line of a manifest, and how many lines have no row, by reason.

    A line has a path in one of `cells`, and the scan's UID or path in the columns `of_scan`. `reasons`: of a
    line without a path, of another line of the same scan. `devices`: those whose files are known.
    """
    listed = store.index[store.index["listed"]]
    by_status = listed.status == KEPT  # a kept row last: it counts before its copies
    listed = pd.concat([listed[~by_status], listed[by_status]])
    by_uid = {uid: row for uid, row in zip(listed.sop_instance_uid, listed.row, strict=True) if uid}
    by_path = dict(zip(listed.path, listed.row, strict=True))
    kept = set(store.kept.tolist())
    of_row: dict[int, Mapping[str, str]] = {}
    counts: Counter[str] = Counter()
    uid_column, path_column = of_scan
    for line in lines.values():
        uid = fact_of(line[uid_column]) if uid_column else None
        rows = {by_uid.get(uid), by_path.get(path_of(line[path_column]))} - {None}
        rows = rows & kept or rows  # one of them may be a copy of the other
        row = rows.pop() if len(rows) == 1 else None
        if all(clean_path(line[cell]) is None for cell in cells):
            counts[reasons[0]] += 1
        elif rows:
            counts["links_disagree"] += 1
        elif row is None:
            counts["scan_not_in_store"] += 1
        elif row not in kept:
            counts["scan_rejected"] += 1
        elif devices is not None and listed.device[row] not in devices:
            counts["unknown_device"] += 1
        elif row in of_row:
            counts[reasons[1]] += 1
        else:
            of_row[int(row)] = line
    return dict(sorted(of_row.items())), counts


def write(job: Job) -> None:
    """Do a job, in any process; raises StorageError."""
    arrays, fields = job.outcome()
    SideWriter(job.KIND, job.store.url, job.store.options).write_row(job.row, arrays, fields)


def run(jobs: Sequence[Job], workers: int, unit: str) -> tuple[pd.DataFrame, list[storage.StorageError]]:
    """Do the jobs of a kind whose rows are not done; (its table, what storage could not do). Then
    those again whose direction the scan does not decide, where the clear ones of the protocol turn them.
    """
    kind, store, rows = jobs[0].KIND, jobs[0].store, [job.row for job in jobs]
    writer = SideWriter(kind, store.url, store.options)
    written = writer.rows.read()
    done = {job.row: files for job in jobs if (files := job.files_of(written.get(job.row))) is not None}
    for row, files in done.items():
        if written[row] | files != written[row]:
            writer.rows.write(row, written[row] | files)
    to_do = [job for job in jobs if job.row not in done]
    away = _write_all(to_do, workers, kind.name, unit)
    index = writer.finalise(rows)
    if scores := jobs[0].SCORES:
        turned = to_turn(index, jobs[0].is_unclear(*(index[name] for name in scores)))
        again = [replace(job, unclear_is_reversed=turned[job.row]) for job in jobs if job.row in turned]
        if again:
            away += _write_all(again, workers, "directions", unit)
            index = writer.finalise(rows)
    return index, away


def _write_all(jobs: Sequence[Job], workers: int, name: str, unit: str) -> list[storage.StorageError]:
    """What storage could not do. Any other error is raised."""
    away: list[storage.StorageError] = []
    with executor_of(workers) as pool:
        futures = [pool.submit(write, job) for job in jobs]
        for future in track(as_completed(futures), len(jobs), name, unit):
            error = future.exception()
            if isinstance(error, storage.StorageError):
                away.append(error)
            elif error is not None:
                raise error
    return away


def require_jobs(jobs: Sequence[Job], counts: Mapping[str, int], url: str, expected: str) -> None:
    """Raise UserError where no line of the manifest at `url` has a row."""
    if not jobs:
        reasons = words(dict(sorted(counts.items())), "an empty table")
        raise UserError(f"{url}: expected {expected}, found none ({reasons})")


def mismatches(index: pd.DataFrame, counts: Mapping[str, int]) -> dict[str, int]:
    """How many lines and files are not used, by reason."""
    return dict(sorted((Counter(counts) + Counter(index.status[index.status != KEPT].tolist())).items()))


def device_table(
    report: Mapping[str, Any], header: Sequence[str], row_of: Callable[[Any], Sequence[Any]], *lines: str
) -> str:
    """A row for each device of a report, with two decimals where a value is a fraction, and lines below."""
    rows = [
        [device, *(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row_of(part))]
        for device, part in report["by_device"].items()
    ]
    return "\n".join([terminal(Table("", ["device", *header], rows, is_text=True)), *map(shown, lines)])


def finish(
    store: PreparedStore,
    mode: str,
    report: Mapping[str, Any],
    text: str,
    away: Sequence[storage.StorageError],
    unit: str,
) -> int:
    """Write the report of a mode and print its text; the exit code."""
    url = storage.join(store.url, f"{mode}_report.json")
    storage.write_text(url, json.dumps(report, indent=1) + "\n", store.options)
    print(text)
    if not away:
        return 0
    problem = f"{len(away)} {unit} could not be read or written, run again; first: {away[0]}"
    say(f"error: {problem}", file=sys.stderr)
    is_away = any(isinstance(error, storage.StorageAwayError) for error in away)
    return EXIT_TRY_AGAIN if is_away else EXIT_USER_ERROR


def edge_step(volume_DHW: np.ndarray, surface_DW: np.ndarray, spacing_h: float) -> float:
    """Mean brightness below a surface less that above, in standard deviations; -inf where none has both."""
    reach = max(1, round(STEP_MM / spacing_h))
    size = volume_DHW.shape[1]
    inside = (surface_DW >= reach) & (surface_DW < size - 1 - reach)  # False for NaN
    d, w = np.nonzero(inside)
    if not len(d):
        return -np.inf
    at = np.ceil(surface_DW[d, w]).astype(int)
    offsets = np.arange(reach)
    below = volume_DHW[d[:, None], at[:, None] + offsets, w[:, None]].mean()
    above = volume_DHW[d[:, None], at[:, None] - 1 - offsets, w[:, None]].mean()
    return float((below - above) / max(float(volume_DHW.std()), 1e-6))


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two arrays of one shape; 0 where one of them is constant."""
    a, b = (part.astype(np.float32).ravel() for part in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else 0.0


def of_protocols(kept: pd.DataFrame, is_unclear: pd.Series) -> dict[tuple[str, str], bool]:
    """Device and protocol -> whether their clear rows are reversed; without those whose rows are few or
    disagree.
    """
    shares = kept[~is_unclear].groupby(["device", "protocol"]).reversed_d.agg(["size", "mean"])
    decided = shares[shares["size"] >= LEAST_CLEAR]
    return {
        key: bool(share > 0.5)
        for key, share in decided["mean"].items()
        if max(share, 1 - share) >= LEAST_SHARE
    }


def to_turn(index: pd.DataFrame, is_unclear: pd.Series) -> dict[int, bool]:
    """Row -> whether it is to be laid reversed: unclear rows that lie the other way than they should."""
    is_kept = index.status == KEPT
    known = of_protocols(index[is_kept], is_unclear[is_kept])
    unclear = index[is_kept & is_unclear]
    keys = zip(unclear.device, unclear.protocol, strict=True)
    wanted = [known.get(key, False) for key in keys]
    return {
        int(row): is_wanted
        for row, is_wanted, is_reversed in zip(unclear.row, wanted, unclear.reversed_d, strict=True)
        if is_wanted != is_reversed
    }
