"""What every dashboard takes; utils/run/log.py hands the same things to each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

WANDB_ID = "wandb_id.txt"  # of a run directory: the run there that a resumed one goes on with


class Writer(Protocol):
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
