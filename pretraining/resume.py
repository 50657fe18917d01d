"""What a run keeps between processes: its directory, its checkpoints, and which of them are the best.

A run directory belongs to one configuration. A checkpoint holds everything that the next step depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from data_setup.store.reader import PreparedStore
from models.vjepa3d import VJEPA3D
from models.weights.load import start_from
from pretraining.gauges.monitor import Gauges
from pretraining.rows import Rows
from utils import storage
from utils.checkpoint import CheckpointError, CheckpointWriter, list_steps, load_newest, to_host
from utils.config.load import changed_keys, config_of_yaml, load_config, to_yaml
from utils.config.schema import Config
from utils.errors import UserError
from utils.provenance import provenance
from utils.runtime.processes import ALONE, Group
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
INIT_WEIGHT_LIMIT = 0.1  # a target with more of its random initialisation is no candidate for the best


def check_run_dir(cfg: Config) -> None:
    """Where a run has begun, its configuration must be this one, but for what a resumed run may change."""
    path = Path(cfg.run.dir) / "config.yaml"
    if path.exists():
        refuse_changes(load_config(path), cfg, str(path))


def refuse_changes(old: Config, new: Config, where: str, moved: tuple[str, ...] = ()) -> None:
    """Raise UserError for the first key that a resumed run may not change; `moved` keys may."""
    changes = [change for change in changed_keys(old, new) if change[0] not in moved]
    if changes:
        key, was, now = changes[0]
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise UserError(
            f"{where}: {key}: expected {was!r} as the run began, found {now!r}{more}; "
            "use another run.dir, or the same values"
        )


def claim_run_dir(cfg: Config, runtime: Runtime) -> None:
    """Write the configuration, the versions and the store's report, once everything has proved to work."""
    run_dir = Path(cfg.run.dir)
    report = storage.read_text(storage.join(cfg.data.store, "prepare_report.json"), cfg.data.storage_options)
    files = {
        "prepare_report.json": report,
        "provenance.json": json.dumps(provenance(runtime), indent=1),
        "config.yaml": to_yaml(cfg),
    }
    with suppress(storage.StorageNotFoundError):  # what prepare --check-only may have left there
        checked = storage.join(cfg.data.store, "check_report.json")
        files["check_report.json"] = storage.read_text(checked, cfg.data.storage_options)
    for name, text in files.items():
        storage.write_text(str(run_dir / name), text)


def checkpoint_writer(cfg: Config) -> CheckpointWriter | None:
    """The run's writer; None where train.ckpt_dir is null."""
    if cfg.train.ckpt_dir is None:
        return None
    return CheckpointWriter(cfg.train.ckpt_dir, cfg.train.keep_last, cfg.data.storage_options)


def checkpoint_state(
    cfg: Config,
    store: PreparedStore,
    rows: Rows,
    model: VJEPA3D,
    optimizer: torch.optim.Optimizer,
    gauges: Gauges,
    progress: dict[str, Any],
) -> dict[str, Any]:
    """Everything that the next step, and an evaluation, depend on."""
    return {
        "step": progress["step"],
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "gauge": gauges.state_dict(),
        "progress": progress,
        "config": to_yaml(cfg),
        "recipe": cfg.method.recipe,
        "normalisation": store.attrs["normalisation"],
        "synthetic": bool(store.attrs["synthetic"]),
        "participants": sorted(set(progress["inherited"]) | rows.participants),
        "rows_sha256": rows_checksum(rows, store),
    }


def rows_checksum(rows: Rows, store: PreparedStore) -> str:
    """The data order rests on which volumes are trained on, in which order; this names them."""
    checksums = store.index.loc[rows.train, "checksum"]
    return hashlib.sha256(repr([*zip(rows.train.tolist(), checksums, strict=True)]).encode()).hexdigest()


def restore(
    cfg: Config,
    store: PreparedStore,
    rows: Rows,
    model: VJEPA3D,
    optimizer: torch.optim.Optimizer,
    gauges: Gauges,
    group: Group = ALONE,
) -> dict[str, Any]:
    """Load this run's newest intact checkpoint, else method.init_from, else nothing; returns the progress.

    The first process of the group reads, and the others take over what it has: checkpoints may be on its disk
    alone, and all must start from one of them.
    """
    progress = _load(cfg, store, rows, model, optimizer, gauges) if group.is_first else {}
    if group.size == 1:
        return progress
    checksums = group.collect(rows_checksum(rows, store))
    if len(set(checksums)) > 1:
        raise UserError(
            f"{cfg.data.store}: expected the same training volumes on every process, found others"
        )
    parts = (model.state_dict(), optimizer.state_dict(), gauges.state_dict(), progress)
    own_parts = to_host(parts) if group.is_first else None
    of_model, of_optimizer, of_gauges, progress = group.broadcast(own_parts)
    if not group.is_first:
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        gauges.load_state_dict(of_gauges)
    return progress


def _load(
    cfg: Config,
    store: PreparedStore,
    rows: Rows,
    model: VJEPA3D,
    optimizer: torch.optim.Optimizer,
    gauges: Gauges,
) -> dict[str, Any]:
    progress: dict[str, Any] = {
        "step": 0,
        "bad_run": 0,
        "bad_total": 0,
        "init_weight": 1.0,  # share of the random initialisation in the target
        "best": {},
        "inherited": [],  # participants that the weights of method.init_from saw
    }
    state = None
    if cfg.train.ckpt_dir is not None:
        state = load_newest(cfg.train.ckpt_dir, cfg.data.storage_options)
    if state is not None:
        where = str(cfg.train.ckpt_dir)
        began_as = config_of_yaml(state["config"], where)
        refuse_changes(began_as, cfg, where, moved=("run.dir", "train.ckpt_dir"))
        if state["rows_sha256"] != rows_checksum(rows, store):
            raise UserError(
                f"{cfg.train.ckpt_dir}: expected the training volumes of {cfg.data.store} as the run began, "
                f"found others ({len(rows.train)}); a store that changed needs another run.dir with "
                "method.init_from"
            )
        load_weights(model, state, store, cfg.train.ckpt_dir or "")
        optimizer.load_state_dict(state["optimizer"])
        gauges.load_state_dict(state["gauge"])
        log.info("resuming from step %d of %s", state["step"], cfg.train.ckpt_dir)
        return state["progress"]
    if cfg.method.init_from is not None:
        start = start_from(model, cfg, store.attrs["normalisation"])
        progress["inherited"] = start.participants
        progress["init_weight"] = start.init_weight
    return progress


def load_weights(model: VJEPA3D, state: dict[str, Any], store: PreparedStore, where: str) -> None:
    """Every key, no more and no less, and one normalisation; raises CheckpointError that names what
    differs.
    """
    expected = store.attrs["normalisation"]
    if state["normalisation"] != expected:
        raise CheckpointError(
            f"{where}: normalisation: expected {expected} of {store.url}, found {state['normalisation']}"
        )
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise CheckpointError(f"{where}: the weights do not fit the configuration: {lines[0]}") from error


def best_names(
    progress: dict[str, Any],
    measured: dict[str, float | None],
    *,
    skill_position: float | None,
    is_warm: bool,
) -> list[str]:
    """Names under which this checkpoint is to be kept, because a measure is the best so far after warm-up.

    best_probe: highest val/probe. Without labels best_rankme: highest val/rankme with init_weight < 0.1 and
    skill_position > 0. best_val_loss: lowest val/loss; for the record, not for choosing.
    """
    if not is_warm:
        return []
    scores: dict[str, float] = {}
    if measured["val/probe"] is not None:
        scores["best_probe"] = measured["val/probe"]
    elif progress["init_weight"] < INIT_WEIGHT_LIMIT and (skill_position or 0.0) > 0:
        scores |= {} if measured["val/rankme"] is None else {"best_rankme": measured["val/rankme"]}
    if measured["val/loss"] is not None and math.isfinite(measured["val/loss"]):
        scores["best_val_loss"] = -measured["val/loss"]
    best = progress["best"]
    names = [name for name, score in scores.items() if name not in best or score >= best[name]]
    best.update({name: scores[name] for name in names})
    return names


class NotFiniteError(RuntimeError):
    """Too many updates in a row had a loss or a gradient that is not finite."""


def report_bad_steps(
    cfg: Config,
    longest_bad_run: int,
    recent: list[tuple[int, torch.Tensor]],
    rows_of_step: Callable[[int], list[int]],
) -> None:
    """Name the skipped updates since the last log line; NotFiniteError after max_bad_steps in a row."""
    skipped = [f"step {step}: rows {rows_of_step(step)}" for step, ok in recent if not bool(ok)]
    for text in skipped:
        log.warning("update skipped, loss or gradient not finite: %s of the store", text)
    if longest_bad_run >= cfg.train.max_bad_steps:
        raise NotFiniteError(
            f"loss or gradient not finite in {longest_bad_run} updates in a row (train.max_bad_steps "
            f"{cfg.train.max_bad_steps}); last: {'; '.join(skipped[-3:])}"
        )


def last_good(cfg: Config) -> str:
    """A sentence that names the checkpoint to go back to."""
    if cfg.train.ckpt_dir is None:
        return "No checkpoint was kept (train.ckpt_dir is null)"
    try:
        steps = list_steps(cfg.train.ckpt_dir, cfg.data.storage_options)
    except storage.StorageError as error:  # what the run ends of is to be read, not this
        return f"The checkpoints cannot be listed now ({error})"
    if not steps:
        return f"No checkpoint was written to {cfg.train.ckpt_dir} yet"
    return f"The last good checkpoint is {storage.join(cfg.train.ckpt_dir, f'step_{steps[-1]:08d}.pt')}"
