"""TensorBoard, for those without Weights & Biases: `log.tensorboard: true` writes run.dir/tensorboard.

In: what utils/run/log.py hands over. Out: event files; `tensorboard --logdir runs` shows them. They stay on
this machine, so pictures of participants may be among them. A resumed run goes on with its curves: what came
after its checkpoint is struck out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from utils.errors import UserError

log = logging.getLogger(__name__)
FOLDER = "tensorboard"


class TensorBoardWriter:
    """Writes one run; a full disk costs the rest of its lines and one warning."""

    takes_images = True

    def __init__(self, run_dir: Path, start_step: int) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter | None = SummaryWriter(
            str(run_dir / FOLDER), purge_step=start_step + 1 if start_step else 0
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add("add_scalar", name, value, step)

    def image(self, step: int, name: str, picture_HWC: np.ndarray) -> None:
        self._add("add_image", name, picture_HWC, step, dataformats="HWC")

    def alert(self, title: str, text: str) -> None:
        self._add("add_text", "alert", f"**{title}**: {text}")

    def summary(self, values: Mapping[str, float]) -> None:
        """Nothing: the newest value of each curve is shown beside it."""

    def artifact(self, name: str, url: str) -> None:
        """Nothing: checkpoints lie beside it."""

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


def require_tensorboard() -> None:
    """Raise UserError where the package is missing."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "log.tensorboard: expected the package tensorboard, found none; pip install tensorboard"
        )
