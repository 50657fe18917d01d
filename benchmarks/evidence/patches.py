"""Experiments that no key of the configuration says: each a small patch of the product, for one arm or more.

In: the name in `Arm.patch`. Out: the classes of this process, changed; so a patched arm trains in a process
that does nothing else (`python -m benchmarks.evidence train`). A patch whose arm wins becomes the product's
own; one whose arm loses is deleted, and git keeps it.
"""

from __future__ import annotations

from collections.abc import Callable

from models.vjepa3d import VJEPA3D


def mae_plain() -> None:
    """mae predicts the voxels as they are, not normalised in each patch."""
    VJEPA3D.pixel_norm = "plain"


PATCHES: dict[str, Callable[[], None]] = {"mae_plain": mae_plain}
