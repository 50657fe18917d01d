"""What a run says: log.txt, metrics.jsonl, Weights & Biases and the progress bar, on one clock, the
optimizer step.

Only rank 0 writes. `metrics.jsonl` holds one JSON object per line: "step" and the metrics of that step. A
resumed run drops the lines after its checkpoint, so that the file is the one an uninterrupted run would
have written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.config import Config, flatten
from utils.storage import is_remote

log = logging.getLogger(__name__)
DATA_LICENCE = (
    "pictures or checkpoints of participants go to Weights & Biases: check that the data licence allows it"
)


class RunLog:
    """Writers of one run directory; `start_step` drops what an interrupted run logged after its
    checkpoint.
    """

    def __init__(self, cfg: Config, start_step: int, total_steps: int, *, synthetic: bool) -> None:
        self.run_dir = Path(cfg.run.dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        setup_logging(self.run_dir / "log.txt")
        path = self.run_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= start_step] if start_step else []
        path.write_text("".join(kept))
        self._metrics = path.open("a")
        self.log_images = _allowed("wandb.log_images", cfg.wandb.log_images, synthetic)
        self.log_artifacts = _allowed("wandb.log_artifacts", cfg.wandb.log_artifacts, synthetic)
        self._wandb = _start_wandb(cfg, self.run_dir)
        self.bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )

    def metrics(self, step: int, values: dict[str, float | None]) -> None:
        """Record the metrics after `step` updates; NaN and infinities are kept as text, null as null."""
        finite = {k: v if v is None or math.isfinite(v) else str(v) for k, v in values.items()}
        self._metrics.write(json.dumps({"step": step, **finite}) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in values.items() if v is not None}, step=step)
        shown = [f"{k.split('/')[1]} {v:.4g}" for k, v in values.items() if v is not None]
        log.info("step %d: %s", step, ", ".join(shown))

    def image(self, step: int, name: str, path: Path) -> None:
        """Send a picture to Weights & Biases, where that was allowed."""
        if self._wandb is not None and self.log_images:
            import wandb

            self._wandb.log({name: wandb.Image(str(path))}, step=step)

    def artifact(self, name: str, url: str) -> None:
        """Send a checkpoint on this machine to Weights & Biases, where that was allowed; a bucket keeps
        its own.
        """
        if self._wandb is not None and self.log_artifacts and not is_remote(url):
            self._wandb.log_artifact(url, name=name, type="model")

    def close(self) -> None:
        self.bar.close()
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish()


def setup_logging(path: Path | None = None) -> None:
    """Messages to stderr and, when given, to a file."""
    handlers: list[logging.Handler] = [_TqdmHandler()]
    if path is not None:
        handlers.append(logging.FileHandler(path))
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
    for noisy in ("fsspec", "gcsfs", "urllib3", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _TqdmHandler(logging.Handler):
    """Log lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _lines(path: Path) -> list[str]:
    """Whole lines of a file; a last one that a kill cut short is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _allowed(key: str, wanted: bool | None, synthetic: bool) -> bool:
    if wanted and not synthetic:
        log.warning("%s: %s", key, DATA_LICENCE)
    return synthetic if wanted is None else wanted


def _start_wandb(cfg: Config, run_dir: Path) -> Any | None:
    if cfg.wandb.mode == "disabled":
        return None
    import wandb

    mode = cfg.wandb.mode
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        log.warning("wandb.mode: online was asked for, but no API key was found; logging offline")
        mode = "offline"
    id_file = run_dir / "wandb_id.txt"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    return wandb.init(
        project=cfg.wandb.project,
        entity=cfg.wandb.entity,
        name=cfg.experiment_name,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=str(run_dir),
        mode=mode,
        config=dict(flatten(cfg)),
        settings=wandb.Settings(console="off", silent=True),
    )
