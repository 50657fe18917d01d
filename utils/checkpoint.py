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
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import TransientError, UserError
from utils.runtime.processes import Group
from utils.storage import Chunks, StorageError

FORMAT_VERSION = 1
STEP_NAME = re.compile(r"step_(\d{8})\.json")
STEP_FILE = re.compile(r"step_\d{8}\.pt")
# older seals have no step; that of a head counts epochs, and may have halves
SEAL: dict[str, tuple[type, ...]] = {
    "sha256": (str,),
    "size": (int,),
    "permanent": (bool,),
    "step": (int, float),
}
# what the parts of a checkpoint, or of a head's file, are where they are there
PARTS: dict[str, Any] = {
    "model": dict,
    "head": dict,
    "task": dict,
    "encoder": dict,
    "arms": dict,
    "config": str,
}
PARTS |= {"normalisation": str, "planes": str, "participants": (list, dict), "step": (int, float)}
# what torch.load raises for a cut or changed file, depending on the byte where it ends
DAMAGE: tuple[type[Exception], ...] = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    LookupError,
    OSError,
    ValueError,
    struct.error,
)
DAMAGE += (TypeError, AttributeError, AssertionError, OverflowError, MemoryError)
UNFINISHED = re.compile(r"\.(step|best)_\w+\.(pt|json)\.")
CLOSE_WAIT_S = 30.0  # between two signs of life of the process that writes the last checkpoint
PATIENCE_S = 5.0  # training waits so long for a checkpoint that waits for the one before it
log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit; the message names it and what was expected."""


class LastWriteError(CheckpointError, TransientError):
    """A run's last checkpoint, not taken by storage that is away: the next start goes on before it."""


def require_pretraining(state: dict[str, Any], url: str) -> None:
    """Raise CheckpointError unless a loaded file is a checkpoint of pretraining.train."""
    lost = [key for key in ("model", "config", "normalisation", "participants") if key not in state]
    if lost:
        kind = state.get("kind", "one with " + ", ".join(sorted(state)[:3]))
        raise CheckpointError(
            f"{url}: expected a checkpoint of pretraining.train, found no {', '.join(lost)} ({kind})"
        )


def load_checkpoint(url: str, options: StorageOptions | None = None) -> dict[str, Any]:
    """Read and verify one checkpoint; adds its "checksum". Raises CheckpointError."""
    if not storage.exists(url, options):
        raise CheckpointError(
            f"{url}: expected a checkpoint, found no such file; pretraining.train and finetuning.train write "
            "them in the folder checkpoints/ of their run.dir"
        )
    seal = _read_seal(url, options)
    data = storage.read_bytes(url, options)
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != seal["sha256"] or len(data) != seal["size"]:
        raise CheckpointError(
            f"{url}: expected {seal['size']} bytes with sha256 {seal['sha256'][:12]}, "
            f"found {len(data)} with {checksum[:12]}: the file is damaged"
        )
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{url}: expected tensors and plain values ({reason})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{url}: expected a dictionary of parts, found {type(state).__name__}")
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{url}: expected format_version {FORMAT_VERSION}, found {state.get('format_version')}"
        )
    for name, kind in PARTS.items():
        if name in state and not isinstance(state[name], kind):
            wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise CheckpointError(f"{url}: {name}: expected {wanted}, found {type(state[name]).__name__}")
    if seal.get("step", state.get("step")) != state.get("step"):
        raise CheckpointError(f"{url}: expected step {seal['step']} of its seal, found {state.get('step')}")
    return {**state, "checksum": checksum}


def _read_seal(url: str, options: StorageOptions | None) -> dict[str, Any]:
    seal_url = _seal_of(url)
    if not storage.exists(seal_url, options):
        raise CheckpointError(f"{url}: expected its seal {seal_url}, found none (the write was cut short?)")
    try:
        seal = json.loads(storage.read_bytes(seal_url, options))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{seal_url}: expected JSON, found damage ({error})") from error
    names = set(seal) if isinstance(seal, dict) else set()
    has_names = {"sha256", "size", "permanent"} <= names <= set(SEAL)
    if not has_names or any(type(value) not in SEAL[name] for name, value in seal.items()):
        raise CheckpointError(f"{seal_url}: expected {', '.join(SEAL)}, found {str(seal)[:200]!r}")
    return seal


@contextmanager
def well_formed(url: str, what: str) -> Iterator[None]:
    """Around the reading of a stranger's values; raises CheckpointError where they make no `what`."""
    try:
        yield
    except UserError:
        raise
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(f"{url}: expected {what}, found other values ({reason})") from error


def _seal_of(url: str) -> str:
    return url.removesuffix(".pt") + ".json"


@dataclass(frozen=True)
class _Snapshot:
    """A state on the host, as it was at one step."""

    state: dict[str, Any]
    permanent: bool
    beside: Mapping[str, bytes]  # small files by URL, written before the seal of a step


class CheckpointWriter:
    """Writes the checkpoints of one run in the background; keeps the last few and those of `is_kept` steps.

    A checkpoint goes up once, and gets its other names there (storage.copy). While one is being written, one
    more waits: a newer one takes its place, after PATIENCE_S. Bests and kept steps give up no place. A failed
    write is a warning and does not stop training: the next save replaces a failed step, and writes a failed
    best checkpoint again. `close` raises CheckpointError when the last save failed.

    One copy of the state is in memory, the one that is being written. Those that wait are in files without a
    name below `waiting_dir`; without it, or where it has no room, in memory too.

    keep_last None: nothing in the folder but the names that are written is touched.
    """

    def __init__(
        self,
        directory: str,
        keep_last: int | None,
        options: StorageOptions | None = None,
        is_kept: Callable[[int], bool] = lambda step: False,
        after_step: Callable[[], None] = lambda: None,
        waiting_dir: Path | None = None,
    ) -> None:
        self.directory, self.keep_last, self.options = directory, keep_last, options
        self._waiting_dir = waiting_dir
        self._is_kept, self._after_step = is_kept, after_step
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._task: Future[None] | None = None
        self._is_working = False
        self._changed = threading.Condition()  # guards what follows
        self._waiting: dict[str, _Snapshot] = {}  # by name; a new one, and what could not be written
        self._failure: Exception | None = None

    def save(
        self, state: dict[str, Any], names: list[str], beside: Mapping[str, bytes] | None = None
    ) -> None:
        """Copy the state to the host and write it under every name; returns before the write is done.

        Names are file names without ending: step_00000100, best_probe. `beside` are small files, by URL, that
        are written before a step's seal.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._passing(), PATIENCE_S)
            for name in self._passing() if any(map(_is_step, names)) else []:
                log.warning("%s: not written, since writing is slow; the next one is", name)
                del self._waiting[name]  # before the next one is copied: memory for one of them is enough
            is_first = not self._is_working
        copy = self._copy({**state, "format_version": FORMAT_VERSION}, is_first)
        snapshot = _Snapshot(copy, self._is_kept(state["step"]), beside or {})
        with self._changed:
            self._waiting.update(dict.fromkeys(names, snapshot))
            if not self._is_working:
                self._is_working = True
                self._task = self._pool.submit(self._work)

    def _copy(self, state: dict[str, Any], is_first: bool) -> dict[str, Any]:
        """The state on the host: in memory, or in files while another is there."""
        if self._waiting_dir is not None and not is_first:
            try:
                return to_host(state, self._waiting_dir)
            except OSError as error:
                text = "%s: no room for a checkpoint that waits, it stays in memory: %s"
                log.warning(text, self._waiting_dir, error)
        return to_host(state)

    def _passing(self) -> list[str]:
        """Names of the steps that wait and may be replaced."""
        return [name for name, s in self._waiting.items() if _is_step(name) and not s.permanent]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is written, or for so long; returns whether it is."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._is_working, seconds)
        if is_done and self._task is not None:
            self._task.result()
        return is_done

    def close(self) -> None:
        """Finish; raises CheckpointError when the newest checkpoint could not be written, LastWriteError
        where that may pass by itself: a full disk does not.
        """
        self.wait()
        self._pool.shutdown()
        if self._failure is not None:
            kind = LastWriteError if isinstance(self._failure, TransientError) else CheckpointError
            raise kind(f"{self.directory}: the last checkpoint was not written: {self._failure}")

    def _work(self) -> None:
        """Write what waits until nothing new does."""
        is_ended = False
        try:
            while True:
                with self._changed:
                    batch, self._waiting = self._waiting, {}
                    self._changed.notify_all()
                try:
                    self._write(batch)
                    self._failure = None
                except (StorageError, OSError) as error:
                    self._failure = error
                    log.warning("checkpoint not written, training goes on: %s", error)
                with self._changed:
                    has_new = bool(self._waiting)
                    owed = {name: snapshot for name, snapshot in batch.items() if not _is_step(name)}
                    self._waiting = {**owed, **self._waiting}
                    if not has_new:
                        self._end_work()
                        is_ended = True
                        return
        finally:
            if not is_ended:  # an error that is no write's: who waits must not wait for ever
                with self._changed:
                    self._end_work()

    def _end_work(self) -> None:
        self._is_working = False
        self._changed.notify_all()

    def _write(self, batch: dict[str, _Snapshot]) -> None:
        """Write the snapshots, the step's name last, and remove each name that is done from the batch."""
        self._remove_leftovers()
        while batch:
            first = min(batch, key=lambda name: batch[name].state["step"])
            snapshot, names = batch[first], sorted(_names_of(batch, first), key=_is_step)
            self._write_one(snapshot, names, batch)
        self._prune()

    def _write_one(self, snapshot: _Snapshot, names: list[str], batch: dict[str, _Snapshot]) -> None:
        data = _encode(snapshot.state)
        checksum = hashlib.sha256()
        data.feed(checksum.update)
        seal = {
            "sha256": checksum.hexdigest(),
            "size": len(data),
            "step": snapshot.state["step"],
            "permanent": snapshot.permanent,
        }
        urls = [storage.join(self.directory, f"{name}.pt") for name in names]
        for name, url in zip(names, urls, strict=True):
            storage.remove(_seal_of(url), self.options)  # the old seal must not vouch for new bytes
            if url == urls[0]:
                storage.write_bytes(url, data, self.options)
            else:
                storage.copy(urls[0], url, self.options)
            if _is_step(name):
                for other, content in snapshot.beside.items():
                    storage.write_bytes(other, content, self.options)
            storage.write_text(_seal_of(url), json.dumps(seal), self.options)
            if _is_step(name):
                self._after_step()
            del batch[name]

    def _remove_leftovers(self) -> None:
        """Remove what a kill has left of a write: nothing else writes checkpoints here now."""
        if self.keep_last is None:
            return
        names = set(storage.list_names(self.directory, self.options))
        unsealed = [name for name in names if STEP_FILE.fullmatch(name) and _seal_of(name) not in names]
        partial = [name for name in storage.list_unfinished(self.directory) if UNFINISHED.match(name)]
        for name in (*unsealed, *partial):
            storage.remove(storage.join(self.directory, name), self.options)

    def _prune(self) -> None:
        if self.keep_last is None:
            return
        for step in list_steps(self.directory, self.options)[: -self.keep_last]:
            if not self._is_kept(step):
                url = storage.join(self.directory, f"step_{step:08d}.pt")
                storage.remove(_seal_of(url), self.options)
                storage.remove(url, self.options)


def wait_together(group: Group, writer: CheckpointWriter | None, beat: Callable[[], None]) -> None:
    """Wait until the first process has written its checkpoints. The others are asked again and again, so that
    none gives up on the first one while an upload is slow, and neither does the watchdog, which hears `beat`.
    """
    beat()
    while group.any(writer is not None and not writer.wait(CLOSE_WAIT_S)):
        beat()


def _is_step(name: str) -> bool:
    return STEP_NAME.fullmatch(f"{name}.json") is not None


def _names_of(batch: Mapping[str, _Snapshot], name: str) -> list[str]:
    """All names of the snapshot that has this one."""
    return [other for other, snapshot in batch.items() if snapshot is batch[name]]


def num_bytes(state: Any) -> int:
    """Size of the tensors of a state, which is that of its checkpoint but for some KB."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))


def _encode(state: dict[str, Any]) -> Chunks:
    """What torch.save writes, in parts; those of tensors are the tensors' own memory, not a copy of it."""
    sink = _Sink(state)
    torch.save(state, sink)  # type: ignore[arg-type]  # it needs no more than write and flush
    return Chunks(sink.parts)


class _Sink:
    """Collects what torch.save writes. That it writes each tensor's own memory is promised nowhere: where it
    writes a copy, this keeps one, and a checkpoint takes the state's memory twice while it is written.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.parts: list[bytes | memoryview] = []
        self._memory: dict[int, memoryview] = {}  # address of a storage -> its bytes
        for tensor in _tensors(state):
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if whole.numel():
                self._memory[whole.data_ptr()] = whole.numpy().data

    def write(self, data: Any) -> int:
        """Take the tensor's memory where that is what is written, else a copy."""
        view = memoryview(data).cast("B")
        own = self._memory.get(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else None
        is_whole = own is not None and len(own) == len(view)
        self.parts.append(own if own is not None and is_whole else bytes(view))
        return len(view)

    def flush(self) -> None:
        """Do nothing: all is in memory."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


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


def to_host(value: Any, folder: Path | None = None) -> Any:
    """A copy with every tensor on the CPU, which later updates do not change; in files without a name in the
    folder where one is given. Raises OSError where that has no room.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True) if folder is None else _to_file(value, folder)
    if isinstance(value, dict):
        return {k: to_host(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_host(v, folder) for v in value]
    return value


def _to_file(tensor: Tensor, folder: Path) -> Tensor:
    """The tensor in a mapped file, which is gone with it. The file is written before it is mapped: a disk
    without room is an error then; in a mapping it would end the process.
    """
    flat = tensor.detach().cpu().contiguous().flatten()
    if not flat.numel():
        return torch.empty_like(tensor, device="cpu")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".checkpoint_waits_") as file:
        file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=flat.nbytes, dtype=torch.uint8)
    return mapped.view(tensor.dtype).view(tensor.shape)
