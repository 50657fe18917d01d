"""Read the records of a .wandb file: a 7-byte header, then LevelDB log blocks of 32 KiB."""

import json
import struct
import time
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
FIRST, LAST, FULL = 2, 4, 1
SETTLED_S = 3.0


def records(path: Path) -> list[Record]:
    data, offset, parts, decoded = path.read_bytes(), 7, b"", []
    while offset + 7 <= len(data):
        room = BLOCK - offset % BLOCK
        if room < 7:
            offset += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        chunk = data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            decoded.append(Record.FromString(parts))
    return decoded


def written(run_dir: Path) -> list[list[Record]]:
    """The records of every file, once each has its end: W&B may write after `finish` has returned.

    A killed run has no end; its file is taken once nothing came for SETTLED_S.
    """
    everything = []
    for path in sorted(run_dir.glob("wandb/*run-*/*.wandb")):
        while time.time() - path.stat().st_mtime < SETTLED_S:
            if any(r.HasField("exit") for r in records(path)):
                break
            time.sleep(0.05)
        everything.append(records(path))
    return everything


def history(run_dir: Path) -> list[dict[str, float]]:
    """Every logged row of every .wandb file under a run directory, in order of writing."""
    rows = []
    for one in written(run_dir):
        for record in one:
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def run_ids(run_dir: Path) -> set[str]:
    return {r.run.run_id for one in written(run_dir) for r in one if r.HasField("run")}
