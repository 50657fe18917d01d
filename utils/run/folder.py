"""The run directory: it belongs to one configuration, one training at a time writes its checkpoints, and its
history is kept a second time beside them.

In: the configuration of a training. Out: a UserError where the directory is another run's, or the files that
say what the run is: config.yaml, provenance.json, the store's reports.

A machine that is replaced takes its run directory with it. So metrics.jsonl, log.txt and the W&B id are
written to `train.ckpt_dir`/history with every checkpoint, before its seal: a checkpoint that counts has its
history. `bring_back` puts it into a run directory that is new, or older than the checkpoint. A new run
directory also gets the file NO_CHECKPOINT_YET, which its first checkpoint removes. So a run whose checkpoints
are gone differs from one that was killed before it had any.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from utils import storage
from utils.checkpoint import list_steps
from utils.config.load import changed_keys, config_of_yaml, to_yaml
from utils.config.schema import Config, keys_with, leaves
from utils.dashboards import WANDB_ID
from utils.errors import UserError
from utils.provenance import provenance
from utils.run.lease import Lease, hold
from utils.runtime.processes import Group
from utils.runtime.single import Runtime

METRICS, LOG = "metrics.jsonl", "log.txt"
NO_CHECKPOINT_YET = "no_checkpoint_yet"
log = logging.getLogger(__name__)


def check_run_dir(cfg: Config) -> None:
    """A resumed run must have the same configuration, except for the keys that may change (schema.py)."""
    path = Path(cfg.run.dir) / "config.yaml"
    if path.exists():
        began_as = config_of_yaml(storage.read_text(str(path)), str(path), to_go_on=True)
        refuse_changes(began_as, cfg, str(path), moved=keys_with("is_place"))


@contextmanager
def held_run(cfg: Config, runtime: Runtime) -> Iterator[list[Lease]]:
    """The leases on run.dir and on the run's checkpoints, which the first process holds for all; a changed
    run is refused. After SIGTERM they are not waited for: the phase that comes next (`Runtime.enter`) ends
    the run.
    """
    if not runtime.group.is_first:
        yield []
        return
    check_run_dir(cfg)
    options, is_stopped = cfg.data.storage_options, lambda: runtime.stop_requested
    places = {storage.absolute(url): url for url in (cfg.run.dir, cfg.train.ckpt_dir) if url is not None}
    with ExitStack() as stack:
        yield [stack.enter_context(hold(url, options, is_stopped)) for url in places.values()]


def refuse_changes(old: Config, new: Config, where: str, moved: Sequence[str] = ()) -> None:
    """Raise UserError for the first key that a resumed run may not change; `moved` keys may."""
    changes = [change for change in changed_keys(old, new) if change[0] not in moved]
    if changes:
        key, was, now = changes[0]
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        link = " (a link from the old path to the new one will do)" if key in keys_with("per_machine") else ""
        raise UserError(
            f"{where}: {key}: expected {was!r} as the run began, found {now!r}{more}; "
            f"use another run.dir, or the same values{link}"
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


def shared_settings(cfg: Config) -> dict[str, str]:
    """What all processes of a run must agree on: every key but places and workers."""
    return {name: repr(value) for name, part, value in leaves(cfg) if not part.metadata.get("per_machine")}


def require_one_configuration(settings: Sequence[Mapping[str, str]]) -> None:
    """Raise UserError for the first key of a process that differs from the first one's: they would wait."""
    for rank, own in enumerate(settings):
        for name, value in settings[0].items():
            if own[name] != value:
                raise UserError(
                    f"{name}: expected {value} as on process 0, found {own[name]} on process {rank}"
                )


def require_one_run(cfg: Config, group: Group, what: str, checksum: str) -> None:
    """Raise UserError unless all processes have one configuration and the same volumes; `what`: of these."""
    require_one_configuration(group.gather_objects(shared_settings(cfg)))
    if len(set(group.gather_objects(checksum))) > 1:
        raise UserError(f"{cfg.data.store}: expected the same {what} volumes on every process, found others")


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
    """Raise UserError where a run would begin at step 0 whose directory has steps, without checkpoints."""
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
