"""One row of the store from one file, and many of them by worker processes.

In: jobs, each a manifest record with its row. Out: the row's volume and JSON in the store, and an outcome. A
job depends only on its own file, so it may run anywhere, in any order, and again.
"""

import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from data_setup.manifest import Record
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import open_record, source_digest, source_stat
from data_setup.resample import NEAREST, Resampled, resample_frames, valid_tokens
from data_setup.store.format import KEPT, UNREAD
from data_setup.store.quality import Meter
from data_setup.store.writer import StoreWriter, measure, record_fields
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.errors import TransientError
from utils.terminal import say
from utils.workers import executor_of, is_lost_worker

WORKER_DIED = "worker_died"  # the process died twice at this file, most often for lack of memory
INTERNAL_ERROR = "internal_error"  # a fault of this program; its place goes to stderr
DONE, TO_DO = "done", "to_do"  # states of rows before the run
IMAGES = "images"  # the kind of a folder of pictures, which nothing but its names makes a volume
SOURCE_MISSING = "source_missing"  # a kept row whose file is missing now: row and volume stay
_IN_FLIGHT = 3  # jobs per worker that are submitted ahead
_ON_CLUSTER = 1000  # jobs that a cluster has at a time: its workers may come and go


@dataclass(frozen=True)
class Job:
    """One row to prepare."""

    row: int
    record: Record
    writer: StoreWriter
    spatial: SpatialConfig
    options: StorageOptions
    planes: str = NEAREST  # of the store: data_setup/resample.py
    was_kept: bool = False  # the row holds a volume of an earlier run


@dataclass(frozen=True)
class Outcome:
    """What became of a row; the measurements are in its JSON."""

    row: int
    status: str
    message: str | None = None
    is_away: bool = False  # storage did not answer, but may later


def prepare_row(job: Job) -> Outcome:
    """Write one row: its volume and its JSON, or a JSON with the reason why it has none.

    Reads the header, checks it against the manifest, decodes and resamples the frames, measures the result.
    Storage that does not answer leaves the row as it was, and so does a missing file whose volume is here.
    """
    fields: dict[str, Any] = _identity(job) | {"message": None}
    voxels = None
    try:
        source = source_stat(job.record, job.options)
        fields |= {"source_size": source.size, "source_version": source.etag_or_mtime}
        fields["source_digest"] = source_digest(job.record, job.options)
        header, volume, measured = read_volume(job.record, job.spatial, job.options, planes=job.planes)
    except storage.StorageNotFoundError as error:
        fields |= {"status": RejectReason.MISSING_FILE.value, "message": error.problem}
    except storage.StorageError as error:
        return Outcome(job.row, UNREAD, str(error), isinstance(error, storage.StorageAwayError))
    except OCTReadError as error:
        fields |= {"status": error.reason.value, "message": error.detail}
    else:
        voxels = volume.voxels
        fields |= {"status": KEPT} | measured | acquisition(header)
    if fields["status"] != RejectReason.MISSING_FILE:
        job.writer.write_row(job.row, voxels, fields)
    elif job.was_kept:
        return Outcome(job.row, SOURCE_MISSING)
    else:
        job.writer.rows.write(job.row, fields)
    return Outcome(job.row, fields["status"], fields["message"])


def read_volume(
    record: Record,
    spatial: SpatialConfig,
    options: StorageOptions,
    new_meter: type[Meter] = Meter,
    planes: str = NEAREST,
) -> tuple[OCTHeader, Resampled, dict[str, float | str]]:
    """The header of a record's file, its volume on the grid, and what the index says of the volume, or what
    another meter measures. `planes`: the rule of data_setup/resample.py.

    Raises OCTReadError for a file that cannot be used, StorageError.
    """
    header, frames = open_record(record, options)
    meter, size, spacing = new_meter(), spatial.image_size, spatial.target_spacing
    grid = (header.shape, header.spacing_mm, size, spacing, spatial.resample, header.flip_d, planes)
    try:
        volume = resample_frames(meter.watch(frames), *grid)
    except ValueError as error:  # no voxel of the grid lies in the field
        raise _outside_grid(record.url, spatial, header) from error
    if not valid_tokens(volume.valid_box, size, spatial.patch_size):
        raise _outside_grid(record.url, spatial, header)
    if header.transfer_syntax == IMAGES and (likeness := meter.strangers()):
        actual = "correlations of {:.2f} and {:.2f}: pictures of different scans?".format(*likeness)
        expected = "neighbouring B-scans that are more alike than distant ones"
        raise OCTReadError(record.url, RejectReason.NOT_A_VOLUME, expected, actual)
    measured = measure(volume) | meter.columns(header.spacing_mm)
    if header.transfer_syntax == IMAGES and (last := meter.seam()):
        seam = f"nothing goes on from B-scan {last} to {last + 1} of {header.shape[0]}"
        advice = "give each its own, or name one by `files` in a volume.yaml"
        measured["message"] = f"{seam}: two eyes numbered on in one folder? {advice}"
    if measured["intensity_std"] == 0:
        raise OCTReadError(record.url, RejectReason.CONSTANT_VOLUME, "an image on the grid", "one grey value")
    return header, volume, measured


def _outside_grid(url: str, grid: SpatialConfig, header: OCTHeader) -> OCTReadError:
    """The reject of a scan too small for the grid, with the spacing of a grid that it fills."""
    field = [n * mm for n, mm in zip(header.shape, header.spacing_mm, strict=True)]
    sizes = zip(field, grid.image_size, grid.target_spacing, strict=True)
    fitting = (min(target, math.floor(1e5 * mm / count) / 1e5) for mm, count, target in sizes)
    expected = f"a token of {' x '.join(map(str, grid.patch_size))} voxels, half of which lie in the scan"
    actual = f"none: the scan has {' x '.join(f'{mm:.3g}' for mm in field)} mm"
    wanted = f"; spatial.target_spacing=[{','.join(f'{mm:g}' for mm in fitting)}] would do"
    return OCTReadError(url, RejectReason.OUTSIDE_GRID, expected, actual + wanted)


def _identity(job: Job) -> dict[str, Any]:
    """The fields of a row's JSON that say where the row comes from."""
    return {"record": record_fields(job.record), "source_url": storage.absolute(job.record.url)}


def acquisition(header: OCTHeader) -> dict[str, Any]:
    """The fields of a row's JSON that the header gives; columns of the index, but for header_laterality."""
    return {
        **{f"shape_before_{a}": n for a, n in zip("dhw", header.shape, strict=True)},
        **{f"spacing_before_{a}": s for a, s in zip("dhw", header.spacing_mm, strict=True)},
        "spacing_source": header.spacing_source,
        "orientation_source": header.orientation_source,
        "flipped_d": header.flip_d,
        "bits_stored": header.bits_stored,
        "transfer_syntax": header.transfer_syntax,
        "header_laterality": header.laterality,
    }


def state_of(job: Job, written: dict[str, Any] | None, rebase: bool = False) -> str:
    """DONE, SOURCE_MISSING or TO_DO, by the row's JSON and the source file.

    A row is DONE when its volume was made from the file as it is now; a changed record (a split, an age) is
    then written into the JSON. With `rebase`, a file of the same size in another place is the same file.
    """
    if written is None or written["status"] != KEPT or written["record"]["path"] != job.record.path:
        return TO_DO
    try:
        source, digest = source_stat(job.record, job.options), source_digest(job.record, job.options)
    except storage.StorageNotFoundError:
        return SOURCE_MISSING
    except storage.StorageError:
        return TO_DO  # prepare_row meets the same error and counts it, for this row alone
    fields = _identity(job) | ({"source_digest": digest} if digest else {})  # older rows have none
    if rebase and written["source_url"] != fields["source_url"]:
        fields["source_version"] = source.etag_or_mtime
    version = fields.get("source_version", written["source_version"])
    if (written["source_size"], version) != (source.size, source.etag_or_mtime):
        return TO_DO
    if digest and (written.get("source_digest") or digest) != digest:
        return TO_DO
    if not fields.items() <= written.items():
        job.writer.rows.write(job.row, written | fields)
    return DONE


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    work: Callable[[Job], Outcome] = prepare_row,
    cluster: str | None = None,
) -> Generator[Outcome, None, None]:
    """Yield outcomes as they come from `workers` processes (0: one thread of this process) or a cluster.

    When a process dies, its pool's jobs run again one by one; a job whose process dies again is a reject. A
    dask cluster (the address of its scheduler) runs jobs of a lost worker again itself, some times.
    Closing the generator ends the processes. Raises StorageError when a row cannot be written.
    """
    waiting, suspects = list(reversed(jobs)), list[Job]()
    while waiting or suspects:
        alone = bool(suspects)
        todo, lost = suspects if alone else waiting, list[Job]()
        size = 1 if alone else workers
        ahead = 1 if alone else _ON_CLUSTER if cluster else _IN_FLIGHT * size or 1
        with executor_of(size, cluster) as pool:
            running: dict[Future[Outcome], Job] = {}
            while (todo or running) and not lost:
                while todo and len(running) < ahead:
                    job = todo.pop()
                    try:
                        running[pool.submit(work, job)] = job
                    except BrokenProcessPool:
                        lost.append(job)
                        break
                done, _ = wait(running, return_when=FIRST_COMPLETED) if running else (set(), None)
                for future in done:
                    if future.cancelled():
                        why = "expected the scheduler until the end, found it gone"
                        raise TransientError(f"--dask {cluster}: {why}; finished rows are kept, run again")
                    job, error = running.pop(future), future.exception()
                    if isinstance(error, BrokenProcessPool):
                        lost.append(job)
                    elif isinstance(error, storage.StorageError):
                        raise error
                    elif error is not None and is_lost_worker(error):
                        yield _reject(job, WORKER_DIED, "every worker that ran it was lost")
                    elif error is not None:
                        yield _reject(job, INTERNAL_ERROR, internal_error(job.record.path, error))
                    else:
                        yield future.result()
            lost += running.values()
        if alone and lost:
            job = lost.pop()
            yield _reject(job, WORKER_DIED, "its worker process was lost twice, for lack of memory perhaps")
        suspects = suspects + lost if alone else lost


def internal_error(path: str, error: BaseException) -> str:
    """The kind and place of an unexpected error, not its text, which may quote the file; stderr has all."""
    if error.__traceback__ is None:  # the error of another process has its traceback as text
        places = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', str(error.__cause__), re.MULTILINE)
    else:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, str(frame.lineno), frame.name) for frame in frames]
    trace = [f"  {path}:{line} {function}" for path, line, function in places]
    say(f"{path}: {type(error).__name__}", *trace, file=sys.stderr)
    where = f" at {os.path.basename(places[-1][0])}:{places[-1][1]}" if places else ""
    return f"{type(error).__name__}{where}"


def _reject(job: Job, status: str, message: str) -> Outcome:
    fields = _identity(job) | {"status": status, "message": message}
    job.writer.write_row(job.row, None, fields)
    return Outcome(job.row, status, message)
