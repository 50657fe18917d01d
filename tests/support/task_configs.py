"""Task files of configs/ are whole only on top of a checkpoint's configuration; tests give them one."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from utils.config.load import load_config, to_yaml

SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke_test.yaml"
INHERITED = ("seed", "data", "spatial", "augment", "model", "method")  # as finetuning.cohort.source does


def below(path: Path) -> dict[str, Any]:
    """What lies below a task's file: sections of a checkpoint; nothing below a file that names its data."""
    if "data" in OmegaConf.load(path):
        return {}
    saved = yaml.safe_load(to_yaml(load_config(SMOKE)))
    return {name: saved[name] for name in INHERITED}
