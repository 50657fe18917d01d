"""What a run keeps between processes: its directory, its checkpoints, and which of them are the best.

A run directory belongs to one configuration. A checkpoint holds everything that the next step depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from data_setup.store import PreparedStore
from models.vjepa3d import VJEPA3D
from pretraining.data import Rows
from pretraining.monitor import SkillGauge
from utils import storage
from utils.checkpoint import CheckpointError, CheckpointWriter, load_checkpoint, load_newest
from utils.config import Config, UserError, changed_keys, load_config, to_yaml
from utils.runtime import Runtime, provenance

log = logging.getLogger(__name__)
INIT_WEIGHT_LIMIT = 0.1  # a target with more of its random initialisation is no candidate for the best


def claim_run_dir(cfg: Config, store: PreparedStore, runtime: Runtime) -> None:
    """Write the configuration, versions and the store's report, or check that a resumed run changed
    nothing.
    """
    run_dir = Path(cfg.run.dir)
    path = run_dir / "config.yaml"
    if path.exists():
        changes = changed_keys(load_config(path), cfg)
        if changes:
            key, old, new = changes[0]
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise UserError(
                f"{path}: {key}: expected {old!r} as the run began, found {new!r}{more}; "
                "use another run.dir, or the same values"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_whole(path, to_yaml(cfg))
    _write_whole(run_dir / "provenance.json", json.dumps(provenance(runtime), indent=1))
    report = storage.join(cfg.data.store, "prepare_report.json")
    _write_whole(run_dir / "prepare_report.json", storage.read_text(report, cfg.data.storage_options))


def _write_whole(path: Path, text: str) -> None:
    storage.write_text(str(path), text)


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
    gauge: SkillGauge,
    progress: dict[str, Any],
) -> dict[str, Any]:
    """Everything that the next step, and an evaluation, depend on."""
    return {
        "step": progress["step"],
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "gauge": gauge.state_dict(),
        "progress": progress,
        "config": to_yaml(cfg),
        "recipe": cfg.method.recipe,
        "normalisation": store.attrs["normalisation"],
        "participants": sorted({rows.person_of_row[int(r)] for r in [*rows.train, *rows.val]}),
        "rows_sha256": rows_checksum(rows),
    }


def rows_checksum(rows: Rows) -> str:
    """The data order rests on which rows are trained on; this names them."""
    return hashlib.sha256(rows.train.astype("<i8").tobytes()).hexdigest()


def restore(
    cfg: Config, rows: Rows, model: VJEPA3D, optimizer: torch.optim.Optimizer, gauge: SkillGauge
) -> dict[str, Any]:
    """Load this run's newest intact checkpoint, else method.init_from, else nothing; returns the progress."""
    fresh: dict[str, Any] = {"step": 0, "bad_run": 0, "bad_total": 0, "best": {}}
    state = None
    if cfg.train.ckpt_dir is not None:
        state = load_newest(cfg.train.ckpt_dir, cfg.data.storage_options)
    if state is not None:
        if state["rows_sha256"] != rows_checksum(rows):
            raise UserError(
                f"{cfg.train.ckpt_dir}: expected the training rows of {cfg.data.store} as the run began, "
                f"found others ({len(rows.train)}); a store that grew needs another run.dir with "
                "method.init_from"
            )
        load_weights(model, state, cfg.train.ckpt_dir or "")
        optimizer.load_state_dict(state["optimizer"])
        gauge.load_state_dict(state["gauge"])
        log.info("resuming from step %d of %s", state["step"], cfg.train.ckpt_dir)
        return state["progress"]
    if cfg.method.init_from is not None:
        state = load_checkpoint(cfg.method.init_from, cfg.data.storage_options)
        load_weights(model, state, cfg.method.init_from)
        log.info("weights start from %s", cfg.method.init_from)
    return fresh


def load_weights(model: VJEPA3D, state: dict[str, Any], where: str) -> None:
    """Every key, no more and no less; raises CheckpointError that names the first that does not fit."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise CheckpointError(f"{where}: the weights do not fit the configuration: {lines[0]}") from error


def best_names(
    progress: dict[str, Any],
    measured: dict[str, float | None],
    *,
    init_weight: float,
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
    elif init_weight < INIT_WEIGHT_LIMIT and skill_position is not None and skill_position > 0:
        scores["best_rankme"] = measured["val/rankme"] or 0.0
    if measured["val/loss"] is not None:
        scores["best_val_loss"] = -measured["val/loss"]
    best = progress["best"]
    names = [name for name, score in scores.items() if name not in best or score >= best[name]]
    best.update({name: scores[name] for name in names})
    return names


def report_bad_steps(cfg: Config, bad_run: int, recent: list[tuple[int, list[int], torch.Tensor]]) -> None:
    """Name the skipped updates since the last log line; raises UserError after max_bad_steps in a row."""
    skipped = [f"step {step}: rows {rows}" for step, rows, is_finite in recent if not bool(is_finite)]
    for text in skipped:
        log.warning("update skipped, loss or gradient not finite: %s of the store", text)
    if bad_run >= cfg.train.max_bad_steps:
        raise UserError(
            f"loss or gradient not finite in {bad_run} updates in a row (train.max_bad_steps "
            f"{cfg.train.max_bad_steps}); last: {'; '.join(skipped[-3:])}. The last good weights "
            f"are kept: newest checkpoint in {cfg.train.ckpt_dir}"
        )
