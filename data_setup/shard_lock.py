"""Locks of the prepared store: who writes the rows of a shard, for as long as that process lives.

One file per (shard, n) under locks/, made only if absent, with pid, host and the start of the process. A lock
whose process is gone from this host is taken over; one of another host cannot be judged and has to be removed
by hand when that host is gone. Raises UserError in one line when somebody else is at work.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utils import storage
from utils.config import StorageOptions, UserError

_SETUP_WAIT_S = 120.0  # the setup lock is held for seconds: the record list, the index
_ORPHANS_WAIT_S = 1.0  # the workers of a killed process notice at once; one may still end a write


@contextmanager
def shard_lock(
    store: str, shard: int, num_shards: int, options: StorageOptions | None = None
) -> Iterator[None]:
    """Hold shard `shard` of `num_shards`; refused while the same shard or another n is being prepared."""
    folder = storage.join(store, "locks")
    url = storage.join(folder, f"shard-{shard}-of-{num_shards}.lock")
    if (owner := _acquire(url, options)) is not None:
        raise UserError(f"{store}: shard {shard}/{num_shards} is being prepared by {_words(owner, url)}")
    try:
        for name in storage.list_names(folder, options):
            match = re.fullmatch(r"shard-(\d+)-of-(\d+)\.lock", name)
            if match is None or int(match[2]) == num_shards:
                continue
            other = _read(storage.join(folder, name), options)
            if other is not None and _is_alive(other):
                raise UserError(
                    f"{store}: expected --shard i/{num_shards}, found shard {match[1]}/{match[2]} at work in "
                    f"{_words(other, storage.join(folder, name))}"
                )
            storage.remove(storage.join(folder, name), options)
        yield
    finally:
        storage.remove(url, options)


@contextmanager
def setup_lock(store: str, options: StorageOptions | None = None) -> Iterator[None]:
    """Hold what all shards share (record list, attributes, index); waits for its turn."""
    url = storage.join(store, "locks", "setup.lock")
    deadline = time.monotonic() + _SETUP_WAIT_S
    while (owner := _acquire(url, options)) is not None:
        if time.monotonic() > deadline:
            raise UserError(f"{store}: waited {_SETUP_WAIT_S:.0f} s for {_words(owner, url)}")
        time.sleep(0.2)
    try:
        yield
    finally:
        storage.remove(url, options)


def _acquire(url: str, options: StorageOptions | None) -> dict[str, Any] | None:
    """None: the lock is ours. Otherwise its living owner."""
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "start": _process_start(os.getpid())}
    while not storage.create(url, json.dumps(mine).encode(), options):
        owner = _read(url, options)
        if owner is not None and _is_alive(owner):
            return owner
        time.sleep(_ORPHANS_WAIT_S)
        storage.remove(url, options)
    return None


def _read(url: str, options: StorageOptions | None) -> dict[str, Any] | None:
    try:
        return json.loads(storage.read_text(url, options))
    except storage.StorageNotFoundError:
        return None
    except json.JSONDecodeError:
        time.sleep(1.0)  # its owner is writing it, or died while it did
        text = storage.read_text(url, options) if storage.exists(url, options) else ""
        return json.loads(text) if text.endswith("}") else None


def _process_start(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None when it is gone, "" where /proc is absent."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return ""
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie is gone


def _is_alive(owner: dict[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True
    return _process_start(owner["pid"]) == owner["start"]


def _words(owner: dict[str, Any], url: str) -> str:
    return f"process {owner['pid']} on {owner['host']}; if that is gone for good, remove {url}"
