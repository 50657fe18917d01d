"""The history of a run: what its log has written so far, kept a second time beside its checkpoints.

A machine that is replaced takes its run directory with it. So metrics.jsonl, log.txt and the W&B id are
written to `train.ckpt_dir`/history with every checkpoint, before its seal: a checkpoint that counts has its
history. `bring_back` puts it into a run directory that is new, or older than the checkpoint.

A new run directory also gets the file NO_CHECKPOINT_YET, which its first checkpoint removes. So a run whose
checkpoints are gone differs from one that was killed before it had any.
"""

from __future__ import annotations

import json
import logging
from itertools import takewhile
from pathlib import Path

from utils import storage
from utils.config.schema import Config
from utils.dashboards.writer import WANDB_ID
from utils.errors import UserError

METRICS, LOG = "metrics.jsonl", "log.txt"
NO_CHECKPOINT_YET = "no_checkpoint_yet"
log = logging.getLogger(__name__)


def history_files(run_dir: Path) -> dict[str, bytes]:
    """Content by name of the history that the run directory has now."""
    paths = [run_dir / name for name in (METRICS, LOG, WANDB_ID)]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def history_url(ckpt_dir: str, name: str) -> str:
    """Where a file of the history is kept."""
    return storage.join(ckpt_dir, "history", name)


def _step_of(line: str) -> int:
    """The step of a line of metrics; -1 for what a power cut has made of one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return -1


def refuse_lost_checkpoints(cfg: Config) -> None:
    """For a run that would begin at step 0: raise UserError where its run directory has steps whose
    checkpoints are gone.
    """
    run_dir = Path(cfg.run.dir)
    steps = [_step_of(line) for line in _lines(_bytes_of(run_dir / METRICS))]
    if max(steps, default=0) < 1:
        return
    where = cfg.train.ckpt_dir
    if not (run_dir / NO_CHECKPOINT_YET).exists():
        raise UserError(
            f"{run_dir}: expected checkpoints of this run, which is at step {max(steps)}, found none in "
            f"train.ckpt_dir {where}; bring them back, or begin again with another run.dir"
        )
    why = "train.ckpt_dir is null" if where is None else f"{where} had no checkpoint yet"
    log.warning("the run ended at about step %d and begins again at step 0: %s", max(steps), why)


def bring_back(cfg: Config, start_step: int) -> None:
    """Make the run directory's history that of the checkpoint of `start_step`; 0 begins a new one.

    Lines of metrics after that step are dropped. Those of the run directory and of the checkpoints are the
    same ones, but for their number: a run that went on on another machine has more of them there.
    """
    run_dir, ckpt_dir, options = Path(cfg.run.dir), cfg.train.ckpt_dir, cfg.data.storage_options
    if start_step == 0 or ckpt_dir is None:
        (run_dir / NO_CHECKPOINT_YET).touch()
        storage.write_text(str(run_dir / METRICS), "")
        return
    (run_dir / NO_CHECKPOINT_YET).unlink(missing_ok=True)
    folder = history_url(ckpt_dir, "")
    kept = {
        name: storage.read_bytes(history_url(ckpt_dir, name), options)
        for name in storage.list_names(folder, options)
    }
    candidates = [_lines(data) for data in (_bytes_of(run_dir / METRICS), kept.get(METRICS, b""))]
    lines = max(([ln for ln in some if 0 <= _step_of(ln) <= start_step] for some in candidates), key=len)
    storage.write_text(str(run_dir / METRICS), "".join(lines))  # a whole write: a kill must not destroy it
    if WANDB_ID in kept:
        (run_dir / WANDB_ID).write_bytes(kept[WANDB_ID])
    own, other = (_lines(data) for data in (_bytes_of(run_dir / LOG), kept.get(LOG, b"")))
    # of two logs one is usually longer; what they share is their beginning
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=False)))
    with (run_dir / LOG).open("a") as file:
        file.write("".join(other[shared:]))


def save_last_words(cfg: Config) -> None:
    """Keep the log also of what came after the last checkpoint; a failure is a warning."""
    ckpt_dir, options = cfg.train.ckpt_dir, cfg.data.storage_options
    if ckpt_dir is None or (Path(cfg.run.dir) / NO_CHECKPOINT_YET).exists():
        return
    try:
        log_bytes = _bytes_of(Path(cfg.run.dir) / LOG)
        storage.write_bytes(history_url(ckpt_dir, LOG), log_bytes, options)
    except storage.StorageError as error:
        log.warning("the last lines of the log are not beside the checkpoints: %s", error)


def _bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _lines(data: bytes) -> list[str]:
    """The whole lines of a file, without a last one that a kill cut short."""
    return [line + "\n" for line in data.decode(errors="replace").split("\n")[:-1]]
