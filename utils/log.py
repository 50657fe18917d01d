"""The log of a run: log.txt, metrics.jsonl, dashboards and the terminal's line, all by optimizer step.

Only rank 0 writes. `metrics.jsonl` holds one JSON object per line: "step" and the metrics of that step. A
resumed run drops the lines after its checkpoint, so the file is the same as without the interruption
(utils/run/history.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from utils.config.schema import Config
from utils.dashboards.pictures import pixels
from utils.dashboards.tensorboard import TensorBoardWriter
from utils.dashboards.weights_and_biases import WandbWriter, start_wandb
from utils.dashboards.writer import Writer
from utils.errors import ConfigError, UserError
from utils.run.history import LOG, METRICS, bring_back, save_last_words
from utils.run.line import TrainingLine
from utils.runtime.single import StopRequested
from utils.terminal import is_interactive

log = logging.getLogger(__name__)
FORM = "%(asctime)s %(levelname)s %(message)s"
DATA_LICENCE = (
    "pictures or checkpoints of participants go to Weights & Biases: check that the data licence allows it"
)


class RunLog:
    """The writers of one run directory, whose history becomes that of `start_step`."""

    def __init__(self, cfg: Config, start_step: int, total_steps: int, *, synthetic: bool) -> None:
        self._cfg, self.run_dir = cfg, Path(cfg.run.dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        bring_back(cfg, start_step)
        log_to_file(self.run_dir / LOG)
        self._writers = _open_writers(cfg, start_step, synthetic)
        self._metrics = LineFile(self.run_dir / METRICS)
        self._line = TrainingLine(start_step, total_steps)

    def advance(self) -> None:
        """One more update has been handed to the device."""
        self._line.advance()

    def metrics(self, step: int, values: dict[str, float | None]) -> None:
        """Record the metrics after `step` updates; NaN and infinities are written as text, None as null. A
        few of them are shown (utils/run/line.py).
        """
        finite = {k: v if v is None or math.isfinite(v) else str(v) for k, v in values.items()}
        self._metrics.append(json.dumps({"step": step, **finite}))
        numbers = {k: v for k, v in values.items() if v is not None}
        for writer in self._writers:
            writer.metrics(step, numbers)
        self._line.metrics(step, values)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Warn, and record the alarm as a separate line {"step", "alarm", "text"}."""
        log.warning("ALARM at step %d: %s", step, text)
        self._metrics.append(json.dumps({"step": step, "alarm": name, "text": text}))
        self.alert(f"{name} at step {step}", text)

    def alert(self, title: str, text: str) -> None:
        """Send word to whoever watches a dashboard."""
        for writer in self._writers:
            writer.alert(title, text)

    @property
    def shows_images(self) -> bool:
        """Whether a dashboard takes pictures of volumes."""
        return any(writer.takes_images for writer in self._writers)

    def image(self, step: int, name: str, figure: Figure) -> None:
        """Send a picture to the dashboards that may have it."""
        if not self.shows_images:
            return
        picture_HWC = pixels(figure)
        for writer in self._writers:
            if writer.takes_images:
                writer.image(step, name, picture_HWC)

    def counts(self, step: int, name: str, counts: Mapping[str, int]) -> None:
        """Send a histogram to the dashboards; nothing where there is nothing to count."""
        for writer in self._writers if counts else []:
            writer.counts(step, name, counts)

    def summary(self, values: Mapping[str, float]) -> None:
        """The numbers that stand for the whole run, so far."""
        for writer in self._writers:
            writer.summary(values)

    def artifact(self, name: str, url: str) -> None:
        """Send a checkpoint to Weights & Biases if that is allowed and W&B is online."""
        for writer in self._writers:
            writer.artifact(name, url)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close; a run that an error ends has failed, and one that a signal ends has not."""
        self.close(is_failed=error is not None and not isinstance(error, StopRequested))

    def close(self, *, is_failed: bool = False) -> None:
        """Write what is left; the dashboards show a run that failed as such."""
        self._line.close()
        self._metrics.close()
        for writer in self._writers:
            writer.close(is_failed)
        save_last_words(self._cfg)


class LineFile:
    """Appends lines to a file; lines that a full disk refuses are kept and written with a later line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._pending: list[str] = []

    def append(self, line: str) -> None:
        """Add a line; a warning when it cannot be written yet."""
        self._pending.append(line + "\n")
        data = memoryview("".join(self._pending).encode())
        try:
            size = self._size + len(data)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(self._size)  # no half lines
            if len(self._pending) == 1:
                log.warning("%s: not written, training goes on: %s", self.path, error)
            return
        self._pending, self._size = [], size

    def close(self) -> None:
        """Close the file; log how many lines could not be written."""
        if self._pending:
            log.error("%s: the last %d lines could not be written", self.path, len(self._pending))
        self._file.close()


class NoLog:
    """The log of every process but the first: it writes nothing."""

    shows_images = False

    def advance(self) -> None:
        """Do nothing, like the other methods."""

    def metrics(self, step: int, values: dict[str, float | None]) -> None: ...

    def alarm(self, step: int, name: str, text: str) -> None: ...

    def alert(self, title: str, text: str) -> None: ...

    def counts(self, step: int, name: str, counts: Mapping[str, int]) -> None: ...

    def summary(self, values: Mapping[str, float]) -> None: ...

    def artifact(self, name: str, url: str) -> None: ...

    def image(self, step: int, name: str, figure: Figure) -> None: ...


def setup_logging(rank: int = 0) -> None:
    """Show messages on stderr, and keep them until `log_to_file` names their file.

    Processes after the first show only errors.
    """
    if rank > 0:
        form = f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
        logging.basicConfig(level=logging.ERROR, format=form, handlers=[_Console()], force=True)
        return
    early = logging.handlers.MemoryHandler(
        capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False
    )
    console = _Console()
    if is_interactive():
        console.setFormatter(_ForPeople(datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, format=FORM, handlers=[console, early], force=True)
    for noisy in ("fsspec", "gcsfs", "aiobotocore", "urllib3", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # W&B's own telemetry: that a server refuses it is no news of a run, and W&B has had its warning
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


class _LogFile(logging.FileHandler):
    """log.txt; when the disk is full, messages appear only on the console."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to_file(path: Path) -> None:
    """Append all messages so far, and all later ones, to a file."""
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
    """Write why the run ends to log.txt; the console gets it from whoever catches the error."""
    is_explained = isinstance(error, UserError | ConfigError)
    log.error("stopped: %s", error, exc_info=None if is_explained else error, extra={"is_shown": False})


class _Console(logging.Handler):
    """Prints messages on stderr, above the live line where there is one, which takes the place of sys.stderr;
    a console that is gone or full does not stop the run.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_shown", True):
            with contextlib.suppress(OSError):
                print(self.format(record), file=sys.stderr, flush=True)


class _ForPeople(logging.Formatter):
    """The time of day, and the level only where it asks for attention."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        return f"{record.asctime} {level}{record.message}"

    def usesTime(self) -> bool:
        return True


def _open_writers(cfg: Config, start_step: int, synthetic: bool) -> list[Writer]:
    """The dashboards that the configuration asks for."""
    writers: list[Writer] = []
    if cfg.log.tensorboard:
        writers.append(TensorBoardWriter(Path(cfg.run.dir), start_step))
    images = _allowed("wandb.log_images", cfg.wandb.log_images, synthetic)
    artifacts = _allowed("wandb.log_artifacts", cfg.wandb.log_artifacts, synthetic)
    wandb_run = start_wandb(cfg, Path(cfg.run.dir))
    if wandb_run is not None:
        writers.append(WandbWriter(wandb_run, takes_images=images, takes_artifacts=artifacts))
    return writers


def _allowed(key: str, wanted: bool | None, synthetic: bool) -> bool:
    if wanted and not synthetic:
        log.warning("%s: %s", key, DATA_LICENCE)
    return synthetic if wanted is None else wanted
