"""What a run says: log.txt, metrics.jsonl, Weights & Biases and the progress bar, on one clock, the
optimizer step.

Only rank 0 writes. `metrics.jsonl` holds one JSON object per line: "step" and the metrics of that step. A
resumed run drops the lines after its checkpoint, so that the file is the one an uninterrupted run would
have written.
"""

from __future__ import annotations

import contextlib
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

from utils import storage
from utils.config.load import flatten
from utils.config.schema import Config
from utils.errors import ConfigError, UserError

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
        storage.write_text(str(path), "".join(kept))  # whole: a kill must not take the history along
        self._metrics = LineFile(path)
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
        self._metrics.append(json.dumps({"step": step, **finite}))
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in values.items() if v is not None}, step=step)
        shown = [f"{k.split('/')[1]} {v:.4g}" for k, v in values.items() if v is not None]
        log.info("step %d: %s", step, ", ".join(shown))

    def alarm(self, step: int, name: str, text: str) -> None:
        """Warn, and record the words of an alarm as a line of its own, {"step", "alarm", "text"}."""
        log.warning("ALARM at step %d: %s", step, text)
        self._metrics.append(json.dumps({"step": step, "alarm": name, "text": text}))
        if self._wandb is not None:
            self._wandb.alert(title=f"{name} at step {step}", text=text)

    def image(self, step: int, name: str, figure: Figure) -> None:
        """Send a picture to Weights & Biases, where that is allowed."""
        if self._wandb is not None and self.log_images:
            import wandb

            self._wandb.log({name: wandb.Image(figure)}, step=step)

    def artifact(self, name: str, url: str) -> None:
        """Send a checkpoint to Weights & Biases, where that is allowed and online.

        Offline it would be copied outside the run directory; a bucket keeps its own.
        """
        if (
            self._wandb is not None
            and self.log_artifacts
            and not self._wandb.offline
            and not storage.is_remote(url)
        ):
            self._wandb.log_artifact(url, name=name, type="model")

    def close(self) -> None:
        self.bar.close()
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish()


class LineFile:
    """Appends lines to a file. What a full disk refuses is kept, and written with a later line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._pending: list[str] = []

    def append(self, line: str) -> None:
        """Add a line; a warning where it has to wait."""
        self._pending.append(line + "\n")
        left = memoryview("".join(self._pending).encode())
        try:
            size = self._size + len(left)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._size)  # no half lines
            if len(self._pending) == 1:
                log.warning("%s: not written, training goes on: %s", self.path, error)
            return
        self._pending, self._size = [], size

    def close(self) -> None:
        """End; says how many lines could not be written."""
        if self._pending:
            log.error("%s: the last %d lines could not be written", self.path, len(self._pending))
        self._file.close()


class NoLog:
    """What a process writes that is not the first: nothing."""

    log_images = False

    def __init__(self) -> None:
        self.bar = tqdm(disable=True)

    def metrics(self, step: int, values: dict[str, float | None]) -> None:
        """Nothing; as are the others."""

    def alarm(self, step: int, name: str, text: str) -> None: ...

    def artifact(self, name: str, url: str) -> None: ...

    def image(self, step: int, name: str, figure: Figure) -> None: ...


def setup_logging(rank: int = 0) -> None:
    """Messages to stderr; they are also held back until `log_to_file` says where they belong.

    Of the processes after the first, errors alone are shown.
    """
    if rank > 0:
        form = f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
        logging.basicConfig(level=logging.ERROR, format=form, handlers=[_TqdmHandler()], force=True)
        return
    held = logging.handlers.MemoryHandler(
        capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False
    )
    logging.basicConfig(level=logging.INFO, format=FORM, handlers=[_TqdmHandler(), held], force=True)
    for noisy in ("fsspec", "gcsfs", "aiobotocore", "urllib3", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _LogFile(logging.FileHandler):
    """log.txt; on a full disk the messages are on the console alone."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to_file(path: Path) -> None:
    """Append what was said so far, and all that follows, to a file."""
    file = _LogFile(path)
    file.setFormatter(logging.Formatter(FORM))
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file)
            handler.flush()
            root.removeHandler(handler)
            handler.close()
    root.addHandler(file)


def log_failure(error: BaseException) -> None:
    """Why the run ends, for log.txt; on the console whoever catches the error says it."""
    is_explained = isinstance(error, UserError | ConfigError)
    log.error("stopped: %s", error, exc_info=None if is_explained else error, extra={"is_shown": False})


class _TqdmHandler(logging.Handler):
    """Log lines above a progress bar instead of through it; a console that is gone or full stops no run."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_shown", True):
            with contextlib.suppress(OSError):
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
