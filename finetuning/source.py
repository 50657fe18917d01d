"""What a task starts from: a checkpoint of pre-training, and the configuration of the task on top of it.

In: a task file of configs/ and `model.checkpoint`, a file or a run's folder. Out: a `Source`: the weights,
and a whole configuration whose data, geometry, model and method are those of the checkpoint unless the file
or the command line says otherwise. What the weights rest on may not be said otherwise: pooled.check_fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from finetuning.pooled import require_pretraining
from utils import storage
from utils.checkpoint import list_steps, load_checkpoint
from utils.config.load import config_of_yaml, load_config, to_yaml
from utils.config.schema import Config, StorageOptions
from utils.errors import ConfigError, UserError

# sections of the checkpoint's configuration that a task goes on with
INHERITED = ("data", "spatial", "augment", "model", "method")
BEST_FIRST = ("best_probe.pt", "best_rankme.pt")


@dataclass(frozen=True)
class Source:
    """A configuration for a task and the checkpoint that it names."""

    cfg: Config
    url: str
    state: dict[str, Any]  # of utils.checkpoint.load_checkpoint


def open_source(path: str | Path, overrides: Sequence[str]) -> Source:
    """Read a task's file, its overrides and its checkpoint; raises UserError naming what is missing."""
    written = _written(path, overrides)
    wanted = OmegaConf.select(written, "model.checkpoint")
    if wanted is None:
        raise ConfigError(
            f"{path}: model.checkpoint: expected a checkpoint or a run's folder, found null; add "
            "model.checkpoint=RUN_OR_FILE to the command"
        )
    options = StorageOptions(**(OmegaConf.select(written, "data.storage_options") or {}))
    url = find_checkpoint(str(wanted), options)
    state = load_checkpoint(url, options)
    require_pretraining(state, url)
    saved = yaml.safe_load(to_yaml(config_of_yaml(state["config"], url)))
    base = {name: saved[name] for name in INHERITED} | {"seed": saved["seed"]}
    base["model"]["checkpoint"] = None
    base["method"]["init_from"] = None
    cfg = load_config(path, [*overrides, f"model.checkpoint={url}"], base)
    return Source(cfg, url, state)


def find_checkpoint(wanted: str, options: StorageOptions) -> str:
    """The checkpoint that a file name or a run's folder means: in a folder the best by probe, else by RankMe,
    else the newest; raises UserError where there is none.
    """
    if wanted.endswith(".pt"):
        return wanted
    for folder in (storage.join(wanted, "checkpoints"), wanted):
        for name in BEST_FIRST:
            if storage.exists(url := storage.join(folder, name), options):
                return url
        if steps := list_steps(folder, options):
            return storage.join(folder, f"step_{steps[-1]:08d}.pt")
    raise UserError(
        f"model.checkpoint: expected a checkpoint file (.pt) or the folder of a run with one, found {wanted}"
        "; give a run.dir of pretraining.train, which keeps them in its checkpoints/"
    )


def is_task_file(path: str | Path) -> bool:
    """Whether a file of configs/ names no method: that of a task, which stands on a checkpoint. False for a
    file that cannot be read: load_config says what is wrong.
    """
    try:
        loaded = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return OmegaConf.is_dict(loaded) and "method" not in loaded


def _written(path: str | Path, overrides: Sequence[str]) -> Any:
    """The file and the overrides, unchecked: load_config checks them, and says what is wrong."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: expected a YAML configuration, found no such file")
    try:
        return OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected YAML, found: {error}") from error
