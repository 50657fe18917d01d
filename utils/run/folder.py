"""The run directory: it belongs to one configuration, and one training at a time writes its checkpoints.

In: the configuration of a training. Out: a UserError where the directory is another run's, or the files that
say what the run is: config.yaml, provenance.json, the store's reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from utils import storage
from utils.checkpoint import list_steps
from utils.config.load import changed_keys, config_of_yaml, to_yaml
from utils.config.schema import Config, keys_with, leaves
from utils.errors import UserError
from utils.provenance import provenance
from utils.run.lease import Lease, hold
from utils.runtime.processes import Group
from utils.runtime.single import Runtime


def check_run_dir(cfg: Config) -> None:
    """A resumed run must have the same configuration, except for the keys that may change (schema.py)."""
    path = Path(cfg.run.dir) / "config.yaml"
    if path.exists():
        began_as = config_of_yaml(path.read_text(), str(path), to_go_on=True)
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
    """Raise UserError for the first key in which a process differs from the first one: they would run
    different programs and wait for each other.
    """
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
