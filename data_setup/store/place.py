"""Where a store's index is, and whether it is there: asked before anything that takes seconds to import."""

from __future__ import annotations

from collections.abc import Sequence

from utils import storage
from utils.cli import require_folder
from utils.config.load import load_config
from utils.errors import UserError

INDEX = "index.parquet"


def no_store(url: str) -> UserError:
    """The error where nothing was prepared."""
    return UserError(
        f"{url}: expected a prepared store, found no index.parquet; run data_setup.prepare first"
    )


def check_store(config: str, overrides: Sequence[str]) -> None:
    """Raise UserError where this machine lacks data.store or cannot hold the run; buckets are asked later."""
    cfg = load_config(config, overrides)
    require_folder("run.dir, train.ckpt_dir", cfg.run.dir, cfg.train.ckpt_dir)
    url = cfg.data.store
    if not storage.is_remote(url) and not storage.exists(storage.join(url, INDEX)):
        raise no_store(url)
