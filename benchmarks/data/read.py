"""Reading prepared volumes; see benchmarks/data/cli.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numcodecs.blosc
import numpy as np

from benchmarks.data.files import GRIDS, Shape, configure, dicom_files, prepared_store
from benchmarks.data.prepare import decode_and_resample, seconds
from data_setup.store.format import chunk_key
from data_setup.store.reader import PreparedStore
from tests.support.cloud_servers import BUCKET, gcs_server
from utils import storage
from utils.config.schema import StorageOptions
from utils.runtime.open import keep_freed_memory

CRC_BYTES = 4  # at the end of a chunk, after what Blosc wrote


def rate(work: Callable[[int], object], rows: np.ndarray) -> float:
    """Median seconds of work(row) over the rows."""
    return median(seconds(partial(work, int(row))) for row in rows)


def chunk_path(store: PreparedStore, row: int) -> Path:
    return Path(store.url, chunk_key(row, "volumes"))


def drop_from_page_cache(path: Path) -> None:
    """The next read of this file comes from the disk (or from the host's own cache)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_seconds(size: Shape, repeats: int) -> float:
    """Seconds of a memcpy of one volume."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return median(seconds(lambda: np.copyto(target, source)) for _ in range(repeats))


def codec_seconds(store: PreparedStore, rows: np.ndarray) -> float:
    """Seconds of only the codec: compressed bytes in memory to voxels in memory."""
    taken = []
    for row in rows:
        data = chunk_path(store, int(row)).read_bytes()[:-CRC_BYTES]
        target = bytearray(int(np.prod(store.image_size)))
        taken.append(seconds(partial(numcodecs.blosc.decompress, data, target)))
    return median(taken)


def from_bucket(store: PreparedStore, rows: np.ndarray) -> dict[str, float]:
    """Seconds a volume from an emulated gs:// bucket: without a cache, filling one, and from it."""
    with gcs_server() as endpoint, tempfile.TemporaryDirectory() as cache:
        options, url = StorageOptions(endpoint_url=endpoint), f"gs://{BUCKET}/store"
        names = ["zarr.json", "volumes/zarr.json", "index.parquet"]
        for name in [*names, *(chunk_key(int(row), "volumes") for row in rows)]:
            storage.write_bytes(storage.join(url, name), Path(store.url, name).read_bytes(), options)
        direct = PreparedStore.open(url, options)
        cached = PreparedStore.open(url, options, cache_dir=cache)
        direct.read(int(rows[0]))  # opens the array
        first = seconds(lambda: cached.read(int(rows[0])))
        return {
            "bucket_s": rate(direct.read, rows),
            "cache_first_read_s": first,
            "cache_miss_s": rate(cached.read, rows[1:]),
            "cache_hit_s": rate(cached.read, rows),
        }


def read(work: Path, shapes: dict[str, Shape], repeats: int, volumes: int, bucket: bool) -> dict[str, Any]:
    """The part `read` of the benchmark: seconds a volume of the recommended store in one process."""
    size, spacing_mm = next(iter(GRIDS.items()))
    cfg = configure(size, spacing_mm)
    files = dicom_files(work, shapes)
    store = prepared_store(work, list(files["uncompressed"].values()), cfg, volumes)
    rows = store.kept
    keep_freed_memory()  # as the loader's workers do
    store.read(int(rows[0]))  # opens the array
    warm, cold, codec, copy = [], [], [], []
    dicom: dict[str, list[float]] = {syntax: [] for syntax in files}
    for _ in range(repeats):
        warm.append(rate(store.read, rows))
        for row in rows:
            drop_from_page_cache(chunk_path(store, int(row)))
        cold.append(rate(store.read, rows))
        codec.append(codec_seconds(store, rows))
        copy.append(copy_seconds(size, volumes))
        for syntax, by_name in files.items():
            dicom[syntax].append(
                mean(seconds(partial(decode_and_resample, path, cfg)) for path in by_name.values())
            )
    store_s, dicom_s = median(warm), median(dicom["jpeg2000"])
    plain_s = median(dicom["uncompressed"])
    return {
        "store_s": store_s,
        "dicom_s": dicom_s,
        "ratio": dicom_s / store_s,
        "fraction_of_codec_rate": median(codec) / store_s,
        "volumes_per_s": 1 / store_s,
        "cold_s": median(cold),
        "codec_s": median(codec),
        "memcpy_s": median(copy),
        "fraction_of_memcpy_rate": median(copy) / store_s,
        "uncompressed_dicom_s": plain_s,
        "uncompressed_ratio": plain_s / store_s,
        "compressed_over_raw": mean(chunk_path(store, int(r)).stat().st_size for r in rows) / np.prod(size),
        **(from_bucket(store, rows) if bucket else {}),
    }
