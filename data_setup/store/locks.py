"""Locks of the prepared store: who writes the rows of a shard, for as long as that process lives.

One file per (shard, n) under locks/, made only if absent, with pid, host and start of the process and a token
of this acquisition. A lock whose process is gone from this host is taken over; one of another host cannot be
judged and has to be removed by hand when that host is gone. Raises UserError in one line when somebody else
is at work.

Taking over is a compare-and-set: it happens under a second lock, named after the content that is replaced,
and only while that content is still there. So of many that find one dead lock exactly one gets it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

# The setup lock is held for seconds: the record list, the index; every request may be repeated for a minute.
_SETUP_WAIT_S = 600.0  # for one holder, however many take their turns before us
_ORPHANS_WAIT_S = 1.0  # the workers of a killed process notice at once; one may still end a write
_UNWRITTEN_WAIT_S = 5.0  # an empty lock: its owner is writing it this moment, or died just then


@contextmanager
def shard_lock(
    store: str, shard: int, num_shards: int, options: StorageOptions | None = None
) -> Iterator[None]:
    """Hold shard `shard` of `num_shards`; refused while the same shard or another n is being prepared."""
    folder = storage.join(store, "locks")
    url = storage.join(folder, f"shard-{shard}-of-{num_shards}.lock")
    mine = _claim()
    if (owner := _acquire(url, mine, options)) is not None:
        raise UserError(f"{store}: shard {shard}/{num_shards} is being prepared by {_words(owner, url)}")
    try:
        for name in storage.list_names(folder, options):
            match = re.fullmatch(r"shard-(\d+)-of-(\d+)\.lock", name)
            if match is None or int(match[2]) == num_shards:
                continue
            other = storage.join(folder, name)
            if (owner := _acquire(other, mine, options)) is not None:
                raise UserError(
                    f"{store}: expected --shard i/{num_shards}, found shard {match[1]}/{match[2]} at work in "
                    f"{_words(owner, other)}"
                )
            _release(other, mine, options)
        yield
    finally:
        _release(url, mine, options)


@contextmanager
def setup_lock(store: str, options: StorageOptions | None = None) -> Iterator[None]:
    """Hold what all shards share (record list, attributes, index); waits for its turn."""
    url, mine = storage.join(store, "locks", "setup.lock"), _claim()
    waited_for, deadline = None, 0.0
    while (owner := _acquire(url, mine, options)) is not None:
        if owner != waited_for:
            waited_for, deadline = owner, time.monotonic() + _SETUP_WAIT_S
        if time.monotonic() > deadline:
            raise UserError(f"{store}: waited {_SETUP_WAIT_S:.0f} s for {_words(owner, url)}")
        time.sleep(0.2)
    try:
        yield
    finally:
        _release(url, mine, options)


def _claim() -> bytes:
    """What a lock of this process says; no two claims are alike."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "start": _process_start(os.getpid())}
    return json.dumps(who | {"token": uuid.uuid4().hex}).encode()


def _acquire(url: str, mine: bytes, options: StorageOptions | None) -> dict[str, Any] | None:
    """None: the lock is ours. Otherwise its living owner."""
    while True:
        storage.create(url, mine, options)
        # What counts is what is there now: a request that was repeated may have failed at its own success,
        # and a file may have been taken for a dead one before our claim was in it.
        found = _read(url, options)
        if found == mine:
            return None
        if found is None:
            continue
        owner = _owner(found)
        if owner is not None and _is_alive(owner):
            return owner
        patience = _UNWRITTEN_WAIT_S if owner is None else _ORPHANS_WAIT_S
        if _stays(url, found, patience, options) and _replace(url, found, mine, options):
            return None


def _stays(url: str, found: bytes, seconds: float, options: StorageOptions | None) -> bool:
    """True when the lock says the same for so long."""
    deadline = time.monotonic() + seconds
    while _read(url, options) == found:
        if time.monotonic() >= deadline:
            return True
        time.sleep(min(0.1, seconds))
    return False


def _replace(url: str, dead: bytes, mine: bytes, options: StorageOptions | None) -> bool:
    """Put our claim where the dead one is; False when somebody else did, or is at it."""
    turn = f"{url}.{hashlib.blake2b(dead, digest_size=8).hexdigest()}"
    if _acquire(turn, mine, options) is not None:
        return False
    try:
        if _read(url, options) != dead:
            return False
        storage.write_bytes(url, mine, options)
    finally:
        _release(turn, mine, options)
    # Turns of processes killed while they took over; their contents never come back, so nobody needs them.
    folder, _, name = url.rpartition("/")
    for other in storage.list_names(folder, options):
        if other.startswith(f"{name}."):
            storage.remove(storage.join(folder, other), options)
    return True


def _release(url: str, mine: bytes, options: StorageOptions | None) -> None:
    """Remove the lock if it is still ours: somebody may have removed it by hand."""
    if _read(url, options) == mine:
        storage.remove(url, options)


def _read(url: str, options: StorageOptions | None) -> bytes | None:
    try:
        return storage.read_bytes(url, options)
    except storage.StorageNotFoundError:
        return None


def _owner(claim: bytes) -> dict[str, Any] | None:
    """The process in a claim; None for one that was never written whole."""
    try:
        owner = json.loads(claim)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and owner.keys() >= {"pid", "host", "start"} else None


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
    """Who it is and what to do: a process of this host is known to live, so its lock has to stay."""
    who = f"process {owner['pid']} on {owner['host']}"
    if owner["host"] == socket.gethostname():
        return f"{who}, which is alive; wait for its end, or stop it, and run again"
    return f"{who}; look there first: run again after its end; only if that is gone for good, remove {url}"
