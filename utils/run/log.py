"""The log of a run: log.txt, metrics.jsonl, dashboards and the terminal's line, all by optimizer step.

Only the first process writes. `metrics.jsonl` holds one JSON object per line: "step" and the metrics of that
step. A resumed run drops the lines after its checkpoint, so the file is the same as without the interruption
(utils/run/folder.py).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure

from utils.config.schema import Config
from utils.dashboards import WANDB_ID, TensorBoardWriter, WandbWriter, Writer, start_wandb
from utils.log import LineFile, log_to_file
from utils.report.pictures import pixels
from utils.run.folder import LOG, METRICS, bring_back, claim_run_dir, save_last_words
from utils.run.line import TrainingLine
from utils.run.skipped_updates import NotFiniteError
from utils.runtime.single import Runtime, StopRequested
from utils.storage.errors import named_errors

log = logging.getLogger(__name__)
DATA_LICENCE = (
    "pictures or checkpoints of participants go to Weights & Biases: check that the data licence allows it"
)


@contextmanager
def open_log(cfg: Config, runtime: Runtime, start: int, total: int, *, synthetic: bool) -> Iterator[AnyLog]:
    """The log of a run that begins now, or goes on; only the first process writes one."""
    if not runtime.group.is_first:
        yield NoLog()
        return
    claim_run_dir(cfg, runtime)
    with RunLog(cfg, start, total, synthetic=synthetic) as run_log:
        try:
            yield run_log
        except NotFiniteError as error:
            run_log.alert("stopped: not finite", str(error))
            raise


def log_anew(cfg: Config, total: int, *, synthetic: bool) -> RunLog:
    """The log of a training that is never resumed: a second one is another run. `with` closes it."""
    (Path(cfg.run.dir) / WANDB_ID).unlink(missing_ok=True)
    return RunLog(cfg, 0, total, synthetic=synthetic)


class RunLog:
    """The writers of one run directory, whose history becomes that of `start_step`."""

    def __init__(self, cfg: Config, start_step: int, total_steps: int, *, synthetic: bool) -> None:
        self._cfg, self.run_dir = cfg, Path(cfg.run.dir)
        with named_errors(str(self.run_dir / LOG)):
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


class NoLog:
    """The log of every process but the first: it writes nothing."""

    shows_images = False

    def advance(self) -> None:
        """Do nothing, like the other methods."""

    def metrics(self, step: int, values: dict[str, float | None]) -> None: ...

    def alarm(self, step: int, name: str, text: str) -> None: ...

    def alert(self, title: str, text: str) -> None: ...

    def summary(self, values: Mapping[str, float]) -> None: ...

    def artifact(self, name: str, url: str) -> None: ...

    def image(self, step: int, name: str, figure: Figure) -> None: ...


AnyLog = RunLog | NoLog


def _open_writers(cfg: Config, start_step: int, synthetic: bool) -> list[Writer]:
    """The dashboards that the configuration asks for."""
    writers: list[Writer] = []
    if cfg.log.tensorboard:
        writers.append(TensorBoardWriter(Path(cfg.run.dir), start_step))
    send = cfg.wandb.send or ("both" if synthetic else "nothing")
    if send != "nothing" and not synthetic:
        log.warning("wandb.send: %s", DATA_LICENCE)
    wandb_run = start_wandb(cfg, Path(cfg.run.dir))
    if wandb_run is not None:
        takes = {"takes_images": send in ("images", "both"), "takes_artifacts": send in ("artifacts", "both")}
        writers.append(WandbWriter(wandb_run, **takes))
    return writers
