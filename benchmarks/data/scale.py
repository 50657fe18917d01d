"""What a store of many rows costs to finalise, to open and to hand to loader workers.

In: a number of rows. Out: bytes, requests, seconds and memory of a store of that many row files without
volumes, 4 KB of disk each, made below the work folder and removed. Peak memory is that of the process so far,
so ask for small numbers first.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from data_setup.loader import TrainingSamples
from data_setup.store.format import INDEX_COLUMNS, KEPT, RECORD_COLUMNS
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter
from pretraining.rows import open_rows
from utils import storage
from utils.config.load import load_config
from utils.config.schema import Config

ROOT = Path(__file__).parents[2]
FILES_OF_A_PERSON = 10
PAGE = 1000  # names that a bucket lists in one request
_FILLED = {"int64": 1, "float64": 0.123456789, "bool": False, "str": "1.2.840.10008.1.2.4.90-of-32-chars"}


def run(work: Path, rows: int) -> dict[str, Any]:
    """The numbers of a store of `rows` kept rows."""
    work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=work) as folder:
        cfg = load_config(
            ROOT / "configs" / "smoke_test.yaml",
            [f"data.store={folder}/store", f"data.participants_path={folder}/participants.tsv"],
        )
        writer = _write(cfg, Path(folder), rows)
        numbers: dict[str, Any] = {"records_bytes": (Path(folder) / "store" / "records.jsonl").stat().st_size}
        _, numbers["finalise"] = _cost(lambda: writer.finalise(range(rows)))
        numbers["index_bytes"] = (Path(folder) / "store" / "index.parquet").stat().st_size
        store, numbers["open"] = _cost(lambda: PreparedStore.open(cfg.data.store))
        selection, numbers["open_rows"] = _cost(lambda: open_rows(cfg, store))
        dataset = TrainingSamples(cfg, store, selection.train)
        size = len(pickle.dumps(dataset, protocol=pickle.HIGHEST_PROTOCOL))
        return numbers | {"loader_worker_bytes": size, "bytes_per_training_row": size / len(selection.train)}


def _write(cfg: Config, folder: Path, rows: int) -> StoreWriter:
    """Participants, records and row files; every tenth row another participant, all of them in train."""
    people = [f"{number:08d}" for number in range(math.ceil(rows / FILES_OF_A_PERSON))]
    (folder / "participants.tsv").write_text("person_id\n" + "".join(f"{person}\n" for person in people))
    writer = StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, "nowhere", synthetic=True, num_rows=rows)
    records = [
        {name: _FILLED[INDEX_COLUMNS[name][0]] for name in RECORD_COLUMNS}
        | {"person_id": people[row // FILES_OF_A_PERSON], "path": f"tree/{row:08d}.dcm", "split": "train"}
        for row in range(rows)
    ]
    writer.append_records(records)
    others = {name: kind for name, (kind, _) in INDEX_COLUMNS.items() if name not in RECORD_COLUMNS}
    del others["row"], others["listed"]
    draws = random.Random(0)
    (folder / "store" / "rows").mkdir(exist_ok=True)
    for row, record in enumerate(records):
        measured = {n: draws.random() if kind == "float64" else _FILLED[kind] for n, kind in others.items()}
        fields = measured | {"record": record, "status": KEPT, "message": None, "checksum": f"{row:032x}"}
        text = json.dumps(fields, sort_keys=True, indent=1)
        (folder / "store" / "rows" / f"{row:06d}.json").write_text(text)
    return writer


def _cost(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The function's result, and what it cost."""
    start = time.perf_counter()
    with _counted() as counts:
        result = function()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result, {**counts, "seconds": seconds, "peak_memory_mb": peak}


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Requests and bytes that a bucket would see: objects read and written whole, names in pages."""
    counts = {"requests": 0, "bytes_read": 0, "bytes_written": 0}
    lock = threading.Lock()  # row files are read in threads

    def add(requests: int, name: str = "bytes_read", number: int = 0) -> None:
        with lock:
            counts["requests"] += requests
            counts[name] += number

    read, write, names = storage.read_bytes, storage.write_bytes, storage.list_names

    def read_bytes(*args: Any, **options: Any) -> bytes:
        data = read(*args, **options)
        add(1, "bytes_read", len(data))
        return data

    def write_bytes(url: str, data: bytes, *args: Any, **options: Any) -> None:
        add(1, "bytes_written", len(data))
        write(url, data, *args, **options)

    def list_names(*args: Any, **options: Any) -> list[str]:
        entries = names(*args, **options)
        add(max(1, math.ceil(len(entries) / PAGE)))
        return entries

    with mock.patch.multiple(storage, read_bytes=read_bytes, write_bytes=write_bytes, list_names=list_names):
        yield counts
