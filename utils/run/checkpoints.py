"""The checkpoints that a training writes: when, under which names, and with its history beside them.

In: a configuration, the engine, and a function that gives the state of now. Out: files in train.ckpt_dir.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from utils import storage
from utils.checkpoint import CheckpointWriter, num_bytes, wait_together
from utils.config.schema import Config
from utils.run.folder import NO_CHECKPOINT_YET, history_files, history_url
from utils.run.lease import Lease
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)


class Clock(Protocol):
    """What counts the updates of a run."""

    step: int  # updates made


class Checkpoints:
    """Writes a run's checkpoints, under the names that the loop asks for. Every process calls the same
    methods; the first one writes, and only where train.ckpt_dir is set.
    """

    def __init__(
        self,
        cfg: Config,
        runtime: Runtime,
        clock: Clock,
        state: Callable[[], dict[str, Any]],
        keep_every: int,
        leases: list[Lease],
    ) -> None:
        self.cfg, self.runtime, self.clock, self.state = cfg, runtime, clock, state
        self.leases = leases
        self.keep_every = keep_every
        self.saved = clock.step
        self.writer: CheckpointWriter | None = None
        if runtime.group.is_first and cfg.train.ckpt_dir is not None:
            drop_mark = partial((Path(cfg.run.dir) / NO_CHECKPOINT_YET).unlink, missing_ok=True)
            self.writer = CheckpointWriter(
                cfg.train.ckpt_dir,
                cfg.train.keep_last,
                cfg.data.storage_options,
                is_kept=lambda step: step % keep_every == 0,
                after_step=drop_mark,
                waiting_dir=Path(cfg.run.dir),
            )

    def log_need(self, tensors: Any, total_steps: int, bests: int) -> None:
        """Log what the run's checkpoints of these tensors take at most; a warning where a disk has less."""
        if self.writer is None:
            return
        each = num_bytes(tensors)
        last, kept = self.cfg.train.keep_last, total_steps // self.keep_every
        at_most = last + kept + bests + 1
        log.info(
            "checkpoints: %.1f MB each, at most %d of them (the last %d, %d of epochs, %d bests, 1 being "
            "written): %.3g GB in %s",
            each / 1e6, at_most, last, kept, bests, at_most * each / 1e9, self.writer.directory,
        )  # fmt: skip
        storage.make_dirs(self.writer.directory)
        free = storage.free_bytes(self.writer.directory)
        there = sum(storage.find_sizes(self.writer.directory).values()) if free is not None else 0
        if free is not None and free + there < at_most * each:
            text = "%s: %.2f GB free, less than that; train.keep_epochs and train.keep_last say how many stay"
            log.warning(text, self.writer.directory, free / 1e9)

    def save(self, names: list[str], *, with_step: bool) -> None:
        """Write the present state under these names and, last, the step's: with it, the others are there."""
        if with_step:
            names = [*names, f"step_{self.clock.step:08d}"]
            self.saved = self.clock.step
        if not names or self.writer is None:
            return
        self.runtime.watchdog.beat(f"checkpoint of step {self.clock.step}")
        for lease in self.leases:
            lease.check()
        files = history_files(Path(self.cfg.run.dir)) if with_step else {}
        beside = {history_url(self.writer.directory, name): data for name, data in files.items()}
        self.writer.save(self.state(), names, beside)

    def wait(self) -> None:
        """Let the checkpoint under way be written, so that it can be named."""
        if self.writer is not None:
            self.writer.wait()

    def close(self) -> None:
        """Write what has not been written, where the run was stopped, and end."""
        if self.clock.step > self.saved:
            self.save([], with_step=True)
        wait_together(self.runtime.group, self.writer, partial(self.runtime.watchdog.beat, "last checkpoint"))
        if self.writer is not None:
            self.writer.close()
