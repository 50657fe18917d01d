"""What a run keeps between processes: its checkpoints. One holds everything that the next step depends on.

Its directory: utils/run_dir.py.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from data_setup.store.reader import PreparedStore
from models.vjepa3d import VJEPA3D
from models.weights.load import start_from
from pretraining.gauges.monitor import Gauges
from pretraining.progress import NEW_RUN, Progress
from pretraining.rows import Rows
from pretraining.run import Run
from pretraining.schedules import Schedule, total_steps
from utils import storage
from utils.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    load_newest,
    num_bytes,
    to_host,
    wait_together,
)
from utils.config.load import config_of_yaml, to_yaml
from utils.config.schema import keys_with
from utils.errors import UserError
from utils.history import NO_CHECKPOINT_YET, history_files, history_url, refuse_lost_checkpoints
from utils.lease import Lease
from utils.run_dir import refuse_changes, require_one_configuration, shared_settings

log = logging.getLogger(__name__)


def rows_checksum(rows: Rows, store: PreparedStore) -> str:
    """The data order rests on which volumes are trained on, in which order; this names them."""
    checksums = store.index.loc[rows.train, "checksum"]
    return hashlib.sha256(repr([*zip(rows.train.tolist(), checksums, strict=True)]).encode()).hexdigest()


def checkpoint_state(run: Run, gauges: Gauges, progress: Progress) -> dict[str, Any]:
    """Everything that the next step, and an evaluation, depend on."""
    return {
        "step": progress.step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "gauge": gauges.state_dict(),
        "progress": progress.state_dict(),
        "config": to_yaml(run.cfg),
        "recipe": run.cfg.method.recipe,
        "normalisation": run.store.attrs["normalisation"],
        "synthetic": bool(run.store.attrs["synthetic"]),
        "participants": sorted(set(progress.inherited) | run.rows.participants),
        "rows_sha256": rows_checksum(run.rows, run.store),
    }


class Checkpoints:
    """Writes a run's checkpoints, under the names that the loop asks for. Every process calls the same
    methods; the first one writes, and only where train.ckpt_dir is set.
    """

    def __init__(
        self, run: Run, gauges: Gauges, progress: Progress, keep_every: int, lease: Lease | None
    ) -> None:
        self.parts = run, gauges, progress
        self.lease = lease
        self.keep_every = keep_every
        self.saved = progress.step
        self.writer: CheckpointWriter | None = None
        cfg = run.cfg
        if run.runtime.group.is_first and cfg.train.ckpt_dir is not None:
            drop_mark = partial((Path(cfg.run.dir) / NO_CHECKPOINT_YET).unlink, missing_ok=True)
            self.writer = CheckpointWriter(
                cfg.train.ckpt_dir,
                cfg.train.keep_last,
                cfg.data.storage_options,
                is_kept=lambda step: step % keep_every == 0,
                after_step=drop_mark,
            )

    def log_need(self) -> None:
        """Log what the checkpoints of the run will take at most; a warning where a disk has less."""
        if self.writer is None:
            return
        run, gauges, _ = self.parts
        each = num_bytes((run.model.state_dict(), run.optimizer.state_dict(), gauges.state_dict()))
        last, kept, bests = run.cfg.train.keep_last, run.total_steps // self.keep_every, 2
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
        run, gauges, progress = self.parts
        if with_step:
            names = [*names, f"step_{progress.step:08d}"]
            self.saved = progress.step
        if not names or (self.writer is None and not run.runtime.is_sharded):
            return
        run.runtime.watchdog.beat(f"checkpoint of step {progress.step}")
        state = run.runtime.full_state(checkpoint_state(run, gauges, progress))
        if self.lease is not None:
            self.lease.check()
        if self.writer is not None:
            files = history_files(Path(run.cfg.run.dir)) if with_step else {}
            beside = {history_url(self.writer.directory, name): data for name, data in files.items()}
            self.writer.save(state, names, beside)

    def wait(self) -> None:
        """Let the checkpoint under way be written, so that it can be named."""
        if self.writer is not None:
            self.writer.wait()

    def close(self) -> None:
        """Write what has not been written, where the run was stopped, and end."""
        if self.parts[2].step > self.saved:
            self.save([], with_step=True)
        runtime = self.parts[0].runtime
        wait_together(runtime.group, self.writer, partial(runtime.watchdog.beat, "last checkpoint"))
        if self.writer is not None:
            self.writer.close()


def restore(run: Run, gauges: Gauges) -> Progress:
    """Load this run's newest intact checkpoint, else method.init_from, else nothing; returns the progress.

    The first process of the group reads, and all of them load what it has: checkpoints may be on its disk
    alone, and all must start from one of them. XLA hosts have to run the same programs: what is recorded so
    far runs before, and the first puts nothing on the device that the others do not.
    """
    group = run.runtime.group
    run.runtime.mark_step()
    state, progress = _read(run) if group.is_first else (None, NEW_RUN)
    if group.size > 1:
        require_one_configuration(group.gather_objects(shared_settings(run.cfg)))
        checksums = group.gather_objects(rows_checksum(run.rows, run.store))
        if len(set(checksums)) > 1:
            raise UserError(
                f"{run.cfg.data.store}: expected the same training volumes on every process, found others"
            )
        if group.is_first and state is None:
            states = run.model.state_dict(), run.optimizer.state_dict(), gauges.state_dict()
            state = dict(zip(("model", "optimizer", "gauge"), to_host(states), strict=True))
        state, progress = group.broadcast((state, progress))
    if state is not None:
        load_weights(run.model, state["model"], str(run.cfg.train.ckpt_dir))
        run.optimizer.load_state_dict(state["optimizer"])
        gauges.load_state_dict(state["gauge"])
    schedule = Schedule(run.cfg, run.total_steps)
    if "schedule" in progress:
        schedule = Schedule.of_state(run.cfg, progress["schedule"])
    return Progress(run.runtime, schedule.resumed(progress["step"], run.total_steps), progress)


def _read(run: Run) -> tuple[dict[str, Any] | None, Mapping[str, Any]]:
    """The state of the newest intact checkpoint, None where there is none, and the progress. The weights of
    method.init_from go into the model.
    """
    cfg, store = run.cfg, run.store
    state = None
    if cfg.train.ckpt_dir is not None:
        state = load_newest(cfg.train.ckpt_dir, cfg.data.storage_options)
    if state is not None:
        where = str(cfg.train.ckpt_dir)
        began_as = config_of_yaml(state["config"], where)
        refuse_changes(began_as, cfg, where, moved=keys_with("is_place"))
        if state["rows_sha256"] != rows_checksum(run.rows, store):
            raise UserError(
                f"{where}: expected the training volumes of {cfg.data.store} as the run began, "
                f"found others ({len(run.rows.train)}); a store that changed needs another run.dir with "
                "method.init_from"
            )
        expected = store.attrs["normalisation"]
        if state["normalisation"] != expected:
            raise CheckpointError(
                f"{where}: normalisation: expected {expected} of {store.url}, found {state['normalisation']}"
            )
        log.info("resuming from step %d of %s", state["step"], where)
        # an older checkpoint has no schedule: its run had the length of its configuration
        began = Schedule(cfg, total_steps(began_as, len(run.rows.train)))
        progress = {"schedule": began.state_dict(), **state["progress"]}
        return {name: state[name] for name in ("model", "optimizer", "gauge")}, progress
    refuse_lost_checkpoints(cfg)
    if cfg.method.init_from is not None:
        start = start_from(run.model, cfg, store.attrs["normalisation"])
        return None, {**NEW_RUN, "inherited": start.participants, "init_weight": start.init_weight}
    return None, NEW_RUN


def load_weights(model: VJEPA3D, weights: dict[str, Any], where: str) -> None:
    """Every key, no more and no less; raises CheckpointError that names what differs."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise CheckpointError(f"{where}: the weights do not fit the configuration: {lines[0]}") from error
