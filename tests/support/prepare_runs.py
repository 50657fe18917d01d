"""The command on a tree, here or in a process of its own; what its store then holds."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.pipeline_factory import ROOT, SMOKE
from utils import storage

CONFIG = str(SMOKE)


def arguments(tree: Path, store: Path, *more: str) -> list[str]:
    places = [f"data.gcs_root={tree}", f"data.store={store}"]
    workers = [] if "--workers" in more else ["--workers", "0"]
    return ["--config", CONFIG, *workers, *more, *places]


def contents(store: Path) -> dict[str, str]:
    """Digest of every file of a store; the report without what the run measured of itself."""
    digests = {}
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.name == "prepare_report.json":
            report = json.loads(data)
            del report["run"]
            data = json.dumps(report).encode()
        digests[str(path.relative_to(store))] = hashlib.sha256(data).hexdigest()
    return digests


def swap_unseen(path: Path) -> None:
    """Another file of equal size and time in the place of this one."""
    data, info = path.read_bytes(), path.stat()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def unname_planes(store: str) -> None:
    """Make the store one of before, which names no rule of planes."""
    url = storage.join(store, "zarr.json")
    content = json.loads(storage.read_text(url))
    del content["attributes"]["geometry"]["planes"]
    storage.write_text(url, json.dumps(content))


def start(tree: Path, store: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "data_setup.prepare", *arguments(tree, store, "--workers", "2", *more)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def dicoms(tree: Path) -> list[Path]:
    return sorted(tree.rglob("*.dcm"))
