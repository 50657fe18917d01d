"""Checkpoints: one file of tensors and plain values, and beside it a seal with its checksum.

A checkpoint `NAME.pt` counts only when its seal `NAME.json` exists and matches. The seal is written last, so
an interrupted write leaves no file that looks like a checkpoint. Loading never runs code from the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import TransientError, UserError
from utils.storage import StorageError

FORMAT_VERSION = 1
STEP_NAME = re.compile(r"step_(\d{8})\.json")
log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit; the message names it and what was expected."""


class LastWriteError(CheckpointError, TransientError):
    """The last checkpoint of a run could not be written: the next start goes on from the one before."""


def load_checkpoint(url: str, options: StorageOptions | None = None) -> dict[str, Any]:
    """Read and verify one checkpoint; adds its "checksum". Raises CheckpointError."""
    if not storage.exists(url, options):
        raise CheckpointError(f"{url}: expected a checkpoint, found no such file")
    seal = _read_seal(url, options)
    data = storage.read_bytes(url, options)
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != seal["sha256"]:
        raise CheckpointError(
            f"{url}: expected {seal['size']} bytes with sha256 {seal['sha256'][:12]}, "
            f"found {len(data)} with {checksum[:12]}: the file is damaged"
        )
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise CheckpointError(f"{url}: expected tensors and plain values ({error})") from error
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{url}: expected format_version {FORMAT_VERSION}, found {state.get('format_version')}"
        )
    return {**state, "checksum": checksum}


def _read_seal(url: str, options: StorageOptions | None) -> dict[str, Any]:
    seal_url = _seal_of(url)
    if not storage.exists(seal_url, options):
        raise CheckpointError(f"{url}: expected its seal {seal_url}, found none (the write was cut short?)")
    try:
        seal = json.loads(storage.read_text(seal_url, options))
    except ValueError as error:
        raise CheckpointError(f"{seal_url}: expected JSON, found damage ({error})") from error
    if not isinstance(seal, dict) or not {"sha256", "size", "permanent"} <= set(seal):
        raise CheckpointError(f"{seal_url}: expected sha256, size and permanent, found {seal}")
    return seal


def _seal_of(url: str) -> str:
    return url.removesuffix(".pt") + ".json"


class CheckpointWriter:
    """Writes the checkpoints of one run in the background; keeps the last few and all permanent ones.

    A failed write is a warning and does not stop training. The next save replaces a failed step, and writes a
    failed best checkpoint again from memory. `close` raises LastWriteError when the last save failed.
    """

    def __init__(self, directory: str, keep_last: int, options: StorageOptions | None = None) -> None:
        self.directory, self.keep_last, self.options = directory, keep_last, options
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._failure: str | None = None
        self._owed: dict[str, dict[str, Any]] = {}  # states by name that no later step replaces

    def save(self, state: dict[str, Any], names: list[str], *, permanent: bool = False) -> None:
        """Copy the state to the host and write it under every name; returns before the write is done.

        Names are file names without ending: step_00000100, best_probe. Waits for the previous write.
        """
        self.wait()
        snapshot = to_host({**state, "format_version": FORMAT_VERSION})
        self._pending = self._pool.submit(self._write, snapshot, names, permanent)

    def wait(self) -> None:
        """Wait until the current write is done; a failure is reported once."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
            self._failure = None
        except (StorageError, OSError) as error:
            self._failure = str(error)
            log.warning("checkpoint not written, training goes on: %s", error)

    def close(self) -> None:
        """Finish; raises LastWriteError when the newest checkpoint could not be written."""
        self.wait()
        self._pool.shutdown()
        if self._failure is not None:
            raise LastWriteError(f"{self.directory}: the last checkpoint was not written: {self._failure}")

    def _write(self, state: dict[str, Any], names: list[str], permanent: bool) -> None:
        is_step = {name: STEP_NAME.fullmatch(f"{name}.json") is not None for name in names}
        self._owed.update({name: state for name in names if not is_step[name]})
        data = _encode(state)
        for name, owed in list(self._owed.items()):
            self._write_one(name, owed, data if owed is state else _encode(owed), permanent)
            del self._owed[name]
        for name in names:
            if is_step[name]:
                self._write_one(name, state, data, permanent)
        self._prune()

    def _write_one(self, name: str, state: dict[str, Any], data: memoryview, permanent: bool) -> None:
        seal = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "step": state["step"],
            "permanent": permanent,
        }
        url = storage.join(self.directory, f"{name}.pt")
        seal_url = _seal_of(url)
        storage.remove(seal_url, self.options)  # the old seal must not vouch for new bytes
        storage.write_bytes(url, data, self.options)
        storage.write_text(seal_url, json.dumps(seal), self.options)

    def _prune(self) -> None:
        steps = list_steps(self.directory, self.options)
        for step in steps[: -self.keep_last]:
            url = storage.join(self.directory, f"step_{step:08d}.pt")
            try:
                is_permanent = _read_seal(url, self.options)["permanent"]
            except CheckpointError:
                is_permanent = False  # a damaged seal protects nothing
            if not is_permanent:
                storage.remove(_seal_of(url), self.options)
                storage.remove(url, self.options)


def _encode(state: dict[str, Any]) -> memoryview:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def list_steps(directory: str, options: StorageOptions | None = None) -> list[int]:
    """Steps of the sealed checkpoints in a directory, ascending; empty when there is none."""
    return sorted(int(m[1]) for n in storage.list_names(directory, options) if (m := STEP_NAME.fullmatch(n)))


def load_newest(directory: str, options: StorageOptions | None = None) -> dict[str, Any] | None:
    """The newest intact checkpoint, or None when the directory has no checkpoint at all.

    A damaged one is reported and the one before it is tried; raises CheckpointError when all are damaged.
    """
    steps = list_steps(directory, options)
    for step in reversed(steps):
        url = storage.join(directory, f"step_{step:08d}.pt")
        try:
            return load_checkpoint(url, options)
        except CheckpointError as error:
            log.warning("damaged checkpoint, trying the one before: %s", error)
    if steps:
        raise CheckpointError(f"{directory}: expected an intact checkpoint, found {len(steps)} damaged ones")
    return None


def to_host(value: Any) -> Any:
    """A copy with every tensor on the CPU, which later updates do not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: to_host(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_host(v) for v in value]
    return value
