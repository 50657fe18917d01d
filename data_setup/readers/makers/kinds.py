"""The reader of each maker's kind, by its name; and which volumes one file holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, Any

from data_setup.readers.makers import e2e, topcon, vol, zeiss_img
from data_setup.readers.makers.library import Surfaces
from data_setup.readers.sidecar import Sidecar

E2E, VOL, FDA, FDS, IMG = "Heidelberg E2E", "Heidelberg VOL", "Topcon FDA", "Topcon FDS", "Zeiss IMG"
KINDS = (E2E, VOL, FDA, FDS, IMG)
LAYERED = (VOL, E2E, FDA)
HEADED = (E2E, VOL, FDA, FDS)  # the file says the eye and the person


def read(
    kind: str, file: IO[bytes], url: str, sidecar: Sidecar, listed: tuple[int, int, int] | None
) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in order; `listed`: the manifest's shape. Raises OCTReadError."""
    if kind == VOL:
        return vol.read(file, url, sidecar)
    if kind == E2E:
        return e2e.read(file, url, sidecar, split_part(url)[1])
    if kind == IMG:
        return zeiss_img.read(file, url, sidecar, listed)
    return topcon.read(file, url, sidecar, kind)


def patient_id(kind: str, file: IO[bytes], url: str) -> str:
    """The person's id of a HEADED kind, "" without one; it may identify somebody. Raises OCTReadError."""
    if kind == E2E:
        return e2e.patient_id(file, url, split_part(url)[1])
    return (vol if kind == VOL else topcon).patient_id(file, url)


def surfaces(kind: str, file: IO[bytes], url: str) -> Surfaces | None:
    """The layers of a LAYERED kind, in the order of the file; None without any. Raises OCTReadError.

    An FDA does not say to which end of the B-scans its first line belongs: data_setup/index/layers.py looks.
    """
    if kind == E2E:
        return e2e.surfaces(file, url, split_part(url)[1])
    return (vol if kind == VOL else topcon).surfaces(file, url)


def split_part(url: str) -> tuple[str, str | None]:
    """(the file, the volume in it): eye.E2E#12 -> eye.E2E, 12; every other URL -> itself, None."""
    match = re.fullmatch(r"(.+\.e2e)#(\d+)", url, re.IGNORECASE)
    return (match[1], match[2]) if match else (url, None)
