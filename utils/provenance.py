"""What a reader needs to believe a number: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from utils.runtime.single import Runtime

PACKAGES = ("torch", "monai", "zarr", "pydicom", "omegaconf", "numpy", "scikit-learn", "wandb")

OCT_COMMIT = "OCT_COMMIT"  # of the environment


def provenance(runtime: Runtime) -> dict[str, Any]:
    """What a reader needs to believe a number: versions, commit, machine."""
    packages = (*PACKAGES, "torch_xla") if runtime.device.type == "xla" else PACKAGES
    return {
        "commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "device": f"{runtime.device.type}: {runtime.device_name}",
        "threads": torch.get_num_threads(),
        "world_size": runtime.world_size,
    }


def git_commit() -> str | None:
    """The commit of this checkout, with '+changes' when the tree differs. Where this is no checkout, as in
    an image, even inside another project's: OCT_COMMIT, which an image sets, or null.
    """
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return os.environ.get(OCT_COMMIT) or None
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "-uno")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get(OCT_COMMIT) or None
    return commit + ("+changes" if changes else "")
