"""What a run keeps between processes: its checkpoints. One holds everything that the next step depends on.

Its directory: utils/run/folder.py.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from data_setup.store.reader import PreparedStore
from models.vjepa3d import VJEPA3D
from models.weights.load import start_from
from pretraining.gauges.monitor import Gauges
from pretraining.progress import NEW_RUN, Progress, Schedule
from pretraining.run import Rows, Run
from utils.checkpoint import (
    CheckpointError,
    load_newest,
    to_host,
)
from utils.config.load import config_of_yaml, to_yaml
from utils.config.schema import keys_with
from utils.errors import UserError
from utils.run.calendar import total_steps
from utils.run.folder import refuse_changes, refuse_lost_checkpoints, require_one_run

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
        "planes": run.store.planes,
        "synthetic": run.is_synthetic,
        "participants": sorted(set(progress.inherited) | run.rows.participants),
        "rows_sha256": rows_checksum(run.rows, run.store),
        "imported_from": progress.imported_from,
    }


def restore(run: Run, gauges: Gauges) -> Progress:
    """Load this run's newest intact checkpoint, else method.init_from, else nothing; returns the progress.

    The first process of the group reads, and all of them load what it has: checkpoints may be only on its
    disk, and all must start from one of them. XLA hosts have to run the same programs: what is recorded so
    far runs before, and the first puts nothing on the device that the others do not.
    """
    group = run.runtime.group
    run.runtime.mark_step()
    state, progress = _read(run) if group.is_first else (None, NEW_RUN)
    if group.size > 1:
        require_one_run(run.cfg, group, "training", rows_checksum(run.rows, run.store))
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
        began_as = config_of_yaml(state["config"], where, to_go_on=True)
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
        return None, {
            **NEW_RUN,
            "inherited": start.participants,
            "init_weight": start.init_weight,
            "imported_from": start.imported_from,
        }
    return None, NEW_RUN


def load_weights(model: VJEPA3D, weights: dict[str, Any], where: str) -> None:
    """Every key, no more and no less; raises CheckpointError that names what differs."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise CheckpointError(f"{where}: the weights do not fit the configuration: {lines[0]}") from error
