"""Can this machine use a configuration's paths? `python -m utils.check_paths --config FILE [overrides ...]`

It reads the prepared store, and writes an object to train.ckpt_dir, reads it back and removes it, with the
credentials and the code of training. In: a configuration. Out: one line; exit code 2 when a path fails.
run_tpu_xla.sh runs it on every worker before anything starts.
"""

from __future__ import annotations

import os
import platform

from utils import storage
from utils.cli import parse_cli, run_cli
from utils.config.schema import Config
from utils.errors import UserError


def check_paths(cfg: Config) -> str:
    """Read the store and write to the checkpoints; returns a line on both, raises UserError."""
    options = cfg.data.storage_options
    try:
        storage.read_bytes(storage.join(cfg.data.store, "prepare_report.json"), options)
    except storage.StorageNotFoundError as error:
        raise UserError(
            f"data.store: {cfg.data.store}: expected a prepared store, found none that is finalised; run "
            "data_setup.prepare, after shards with --finalise"
        ) from error
    if cfg.train.ckpt_dir is None:
        return "store readable, no checkpoints (train.ckpt_dir is null)"
    data = os.urandom(16)
    probe = storage.join(cfg.train.ckpt_dir, f".write_check_{platform.node()}_{os.getpid()}")
    storage.write_bytes(probe, data, options)
    stored = storage.read_bytes(probe, options)
    storage.remove(probe, options)
    if stored != data:
        raise UserError(f"train.ckpt_dir: {probe}: expected the bytes that were written, found others")
    warning = (
        "" if storage.is_remote(cfg.train.ckpt_dir) else " (on the first worker's disk, lost with its VM)"
    )
    return f"store readable, checkpoints writable{warning}"


def main(argv: list[str] | None = None) -> int:
    cfg, _ = parse_cli("utils.check_paths", __doc__ or "", argv)
    print(check_paths(cfg))
    return 0


if __name__ == "__main__":
    run_cli(main)
