"""What a run says: log.txt, metrics.jsonl, Weights & Biases and the progress bar, on one clock, the
optimizer step.

Only rank 0 writes. `metrics.jsonl` holds one JSON object per line: "step" and the metrics of that step. A
resumed run drops the lines after its checkpoint, so that the file is the one an uninterrupted run would
have written.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
import netrc
import os
import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from matplotlib.figure import Figure
from tqdm import tqdm

from utils.config import Config, flatten
from utils.storage import is_remote

log = logging.getLogger(__name__)
FORM = "%(asctime)s %(levelname)s %(message)s"
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
        log_to_file(self.run_dir / "log.txt")
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

    def image(self, step: int, name: str, figure: Figure) -> None:
        """Send a picture to Weights & Biases, where that is allowed."""
        if self._wandb is not None and self.log_images:
            import wandb

            self._wandb.log({name: wandb.Image(figure)}, step=step)

    def artifact(self, name: str, url: str) -> None:
        """Send a checkpoint to Weights & Biases, where that is allowed and online.

        Offline it would be copied outside the run directory; a bucket keeps its own.
        """
        if self._wandb is not None and self.log_artifacts and not self._wandb.offline and not is_remote(url):
            self._wandb.log_artifact(url, name=name, type="model")

    def close(self) -> None:
        self.bar.close()
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish()


def setup_logging() -> None:
    """Messages to stderr; they are also held back until `log_to_file` says where they belong."""
    held = logging.handlers.MemoryHandler(
        capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False
    )
    logging.basicConfig(level=logging.INFO, format=FORM, handlers=[_TqdmHandler(), held], force=True)
    for noisy in ("fsspec", "gcsfs", "urllib3", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_to_file(path: Path) -> None:
    """Append what was said so far, and all that follows, to a file."""
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter(FORM))
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file)
            handler.flush()
            root.removeHandler(handler)
            handler.close()
    root.addHandler(file)


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


def _has_api_key(base_url: str) -> bool:
    """Where the client itself looks: the environment, and ~/.netrc after `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        entry = netrc.netrc().authenticators(urlparse(base_url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return False
    return entry is not None


def _start_wandb(cfg: Config, run_dir: Path) -> Any | None:
    if cfg.wandb.mode == "disabled":
        return None
    import wandb

    mode = cfg.wandb.mode
    if mode == "online" and not _has_api_key(wandb.setup().settings.base_url):
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
