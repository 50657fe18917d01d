"""Experiments that no key of the configuration says: each a small patch of the product, for one arm or more.

In: the name in `Arm.patch`. Out: the classes of this process, changed; so a patched arm trains in a process
that does nothing else (`python -m benchmarks.evidence train`). A patch whose arm wins becomes the product's
own; one whose arm loses is deleted, and git keeps it.
"""

from __future__ import annotations

from collections.abc import Callable

from einops import reduce, repeat
from torch import Tensor

from models import vjepa3d
from models.losses import PixelNorm, pixel_targets
from models.vjepa3d import VJEPA3D


def mae_plain() -> None:
    """mae predicts the voxels as they are, not normalised in each patch."""
    VJEPA3D.pixel_norm = "plain"


def mean_ascans() -> None:
    """The loss of neighbours asks for the mean A-scan of each place in place of its voxels, whose speckle no
    frame of the scan has averaged out.
    """

    def targets(view_BCDHW: Tensor, patch: tuple[int, int, int], kind: PixelNorm) -> Tensor:
        values = pixel_targets(view_BCDHW, patch, kind)
        if kind != "plain":
            return values
        sizes = dict(zip("dhw", patch, strict=True))
        means = reduce(values, "b n (c d h w) -> b n c h", "mean", **sizes)
        return repeat(means, "b n c h -> b n (c d h w)", **{k: sizes[k] for k in "dw"})

    vjepa3d.pixel_targets = targets


PATCHES: dict[str, Callable[[], None]] = {"mae_plain": mae_plain, "mean_ascans": mean_ascans}
