"""Where a run's numbers can be watched: Weights & Biases, TensorBoard.

In: what utils/run/log.py hands over, by optimizer step, and section `wandb` of the configuration. Out: what
each service shows.

Weights & Biases has one run of rank 0, on its server or as files below run.dir for `wandb sync`. The id of
the run is in run.dir and beside the checkpoints, so that a resumed run goes on with its curve; of a sweep's
agent it is the agent's. `log.tensorboard: true` writes run.dir/tensorboard; `tensorboard --logdir runs` shows
it. That stays on this machine, so pictures of participants may be among it; what came after the checkpoint of
a resumed run is struck out.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np

from utils import storage
from utils.config.keys import keys
from utils.config.load import flatten
from utils.config.schema import Config
from utils.errors import UserError
from utils.storage.errors import describe

log = logging.getLogger(__name__)
WANDB_ID = "wandb_id.txt"  # of a run directory: the run there that a resumed one goes on with
INIT_TIMEOUT_S = 30.0  # a start waits so long for Weights & Biases
FINISH_TIMEOUT_S = 120.0  # and an end, for what is not sent yet
LOG_IN = "next: wandb login --relogin, or WANDB_API_KEY=KEY, then the same command"
LATER = "next: check the connection; wandb sync sends the files later"


class Writer:
    """One dashboard of a run. No method raises where the dashboard is away: a run outlives it."""

    takes_images: bool  # pictures of volumes may go there

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers after `step` updates."""

    def image(self, step: int, name: str, picture_HWC: np.ndarray) -> None:
        """A picture, uint8 RGB; ignored where `takes_images` is false."""

    def alert(self, title: str, text: str) -> None:
        """Something that a person should hear of now."""

    def summary(self, values: Mapping[str, float]) -> None:
        """The few numbers that stand for the whole run; later ones replace earlier ones."""

    def artifact(self, name: str, url: str) -> None:
        """A checkpoint, where it may be sent and can be."""

    def close(self, is_failed: bool) -> None:
        """Write what is left; `is_failed`: an error ended the run."""


class TensorBoardWriter(Writer):
    """Writes one run; a full disk costs the rest of its lines and one warning. The newest value of each curve
    is shown beside it and checkpoints lie there: summaries and artifacts ask for nothing.
    """

    takes_images = True

    def __init__(self, run_dir: Path, start_step: int) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "log.tensorboard: expected the package tensorboard, found none; pip install tensorboard"
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter | None = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=start_step + 1 if start_step else 0
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add("add_scalar", name, value, step)

    def image(self, step: int, name: str, picture_HWC: np.ndarray) -> None:
        self._add("add_image", name, picture_HWC, step, dataformats="HWC")

    def alert(self, title: str, text: str) -> None:
        self._add("add_text", "alert", f"**{title}**: {text}")

    def close(self, is_failed: bool) -> None:
        """TensorBoard has no word for a failure; log.txt has."""
        if self._writer is not None:
            self._add("close")

    def _add(self, method: str, *values: object, **options: object) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*values, **options)
        except OSError as error:
            self._writer = None
            log.warning("TensorBoard files are not written any more, training goes on: %s", error)


class WandbWriter(Writer):
    """Writes to one run of Weights & Biases until that fails: then once a warning, and nothing more."""

    def __init__(self, run: Any, *, takes_images: bool, takes_artifacts: bool) -> None:
        import wandb
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

        self._run = run
        self.takes_images, self._takes_artifacts = takes_images, takes_artifacts
        # what its calls raise once its process is gone or its answer is an error
        self._failures = (OSError, wandb.Error, HandleAbandonedError, MailboxClosedError)

    def _send(self, call: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except self._failures as error:
            self._run = None
            text = "Weights & Biases is gone, training goes on without it: %s; metrics.jsonl has every number"
            log.warning(text, describe(error))
            self._forget()

    def _forget(self) -> None:
        """Let go of its process, which would else be waited for, and complained of, when this one ends."""
        import wandb

        with contextlib.suppress(*self._failures):
            wandb.teardown()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._send(lambda run: run.log(dict(values), step=step))

    def image(self, step: int, name: str, picture_HWC: np.ndarray) -> None:
        if not self.takes_images or self._run is None:
            return
        import wandb

        self._send(lambda run: run.log({name: wandb.Image(picture_HWC)}, step=step))

    def alert(self, title: str, text: str) -> None:
        self._send(lambda run: run.alert(title=title, text=text))

    def summary(self, values: Mapping[str, float]) -> None:
        self._send(lambda run: run.summary.update(dict(values)))

    def artifact(self, name: str, url: str) -> None:
        """Offline W&B would copy a checkpoint outside the run directory; one in a bucket stays there."""
        if self._run is None or not self._takes_artifacts or self._run.offline:
            return
        if storage.is_remote(url):
            log.warning("wandb.send: %s stays in its bucket, Weights & Biases gets no copy", url)
            return
        self._send(lambda run: run.log_artifact(url, name=f"{name}-{run.id}", type="model"))

    def close(self, is_failed: bool) -> None:
        """Wait at most FINISH_TIMEOUT_S for the server; what it does not have by then stays on this disk."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=int(is_failed))
        except TimeoutError:
            self._leave(f"Weights & Biases has not taken everything within {FINISH_TIMEOUT_S:g} s")
        except self._failures as error:
            self._leave(f"Weights & Biases did not end: {describe(error)}")
        self._run = None

    def _leave(self, why: str) -> None:
        """Say what became of the end, and how the rest gets there."""
        log.warning("%s; later: wandb sync %s", why, Path(self._run.dir).parent)
        self._forget()


def has_api_key(base_url: str) -> bool:
    """True when a key is where the client looks: in the environment, or in ~/.netrc after `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        entry = netrc.netrc().authenticators(urlparse(base_url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return False
    return entry is not None


def start_wandb(cfg: Config, run_dir: Path) -> Any | None:
    """The run of Weights & Biases, offline where there is no key or no server; None with mode disabled."""
    if cfg.wandb.mode == "disabled":
        return None
    import wandb

    mode = cfg.wandb.mode
    if mode == "online" and not has_api_key(wandb.setup().settings.base_url):
        text = "wandb.mode: online was asked for, but no API key was found; %s until the next start; %s"
        log.warning(text, "logging offline", LOG_IN)
        mode = "offline"
    entity, _, project = cfg.wandb.project.rpartition("/")
    units = {name: key.unit for name, key in keys().items() if key.unit and "[]" not in name}
    begin = partial(
        wandb.init,
        project=os.environ.get("WANDB_PROJECT", project),
        entity=os.environ.get("WANDB_ENTITY", entity or None),
        name=os.environ.get("WANDB_NAME", cfg.experiment_name),
        # wandb itself reads these two once a process, and one process may hold several runs
        group=os.environ.get("WANDB_RUN_GROUP"),
        tags=[tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
        id=_run_id(run_dir),
        resume="allow",
        dir=str(run_dir),
        # flat, and the unit of each key that has one
        config={**dict(flatten(cfg)), "units": units},
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S)),
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
        ),
    )
    try:
        return begin(mode=mode)
    except wandb.errors.CommError as error:
        # a key that looks right and that the server refuses is no error of its own
        is_refused = isinstance(error, wandb.errors.AuthenticationError) or "error 401" in str(error)
        what = "takes no such API key" if is_refused else "is not reached"
        text = "wandb.mode: Weights & Biases %s, logging offline until the next start: %s; %s"
        log.warning(text, what, describe(error), LOG_IN if is_refused else LATER)
    wandb.teardown()  # else its process holds on to the id
    return begin(mode="offline")


def _run_id(run_dir: Path) -> str:
    """The id of this run: its own, a sweep agent's, or a new one."""
    id_file = run_dir / WANDB_ID
    if not id_file.exists():
        id_file.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return id_file.read_text().strip()
