"""The layers that a maker's files hold, as the files that `prepare --labels` reads.

In: entries of a tree. Out: surfaces/PATH.surfaces.npz below the tables of each file with layers, and its
path in the entry, for the column label_surfaces. The tables have to lie in the tree: a manifest's paths are
below its root. Whether the lines of an FDA begin at its first B-scan or at its last is not written in it, and
programs differ: the brightness step at the first boundary decides, in a few B-scans, as for height maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import IO

import numpy as np

from data_setup.attach.directions import CLEARER_STEP, LEAST_STEP, edge_step
from data_setup.index.candidates import SURFACES_ENDING
from data_setup.index.look import Entry
from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.makers import kinds, topcon
from data_setup.readers.makers.library import Surfaces
from utils.config.schema import StorageOptions
from utils.storage import join, write_bytes

FOLDER = "surfaces"
_LOOKED_AT = 8  # B-scans that say which way lines run


def with_layers(root: str, out: str, entries: Sequence[Entry], options: StorageOptions) -> list[Entry]:
    """The entries, those of files with layers with the place of their .npz; raises StorageError."""
    return [_with_layers(root, out, entry, options) for entry in entries]


def _with_layers(root: str, out: str, entry: Entry, options: StorageOptions) -> Entry:
    if not entry.is_row:
        return entry
    try:
        drawn = layers_in(join(root, entry.path), entry.kind, entry.spacing_mm, options)
    except OCTReadError as error:  # of the layers alone: the volume is read without them
        return replace(entry, without_labels=f"{error.reason}: {error.detail}")
    if drawn is None:
        return entry
    path = f"{FOLDER}/{entry.path}{SURFACES_ENDING}"
    write_bytes(join(out, path), drawn.to_bytes(), options)
    return replace(entry, label_surfaces=f"./{path}")  # ./ is the manifest's folder


def layers_in(
    url: str, kind: str, spacing_mm: tuple[float, float, float] | None, options: StorageOptions
) -> Surfaces | None:
    """The layers in a file of a kind, in the order of its frames; None without any. Raises OCTReadError,
    StorageError.
    """
    if kind not in kinds.LAYERED:
        return None
    with open_file(kinds.split_part(url)[0], options) as file:
        drawn = kinds.surfaces(kind, file, url)
        if drawn is not None and kind == kinds.FDA:
            return _directed(drawn, file, url, spacing_mm)
        return drawn


def _directed(
    drawn: Surfaces, file: IO[bytes], url: str, spacing_mm: tuple[float, float, float] | None
) -> Surfaces:
    """The same with its lines as the B-scans run; raises OCTReadError no_edge where these do not tell."""
    first = drawn.heights[0]
    chosen = np.unique(np.linspace(0, len(first) - 1, _LOOKED_AT).astype(int))
    frames = np.stack(list(topcon.stored_frames(file, url, set(chosen.tolist()))))
    spacing = spacing_mm[1] if spacing_mm else np.inf  # of what a YAML still has to say: 1 row
    steps = [edge_step(frames, rows[chosen], spacing) for rows in (first, first[::-1])]
    if max(steps) < LEAST_STEP or max(steps) < CLEARER_STEP * min(steps):
        expected = f"B-scans that get brighter below {drawn.names[0]} one way alone"
        raise OCTReadError(url, RejectReason.NO_EDGE, expected, f"steps of {steps[0]:.2f} and {steps[1]:.2f}")
    return drawn if steps[0] > steps[1] else replace(drawn, heights=drawn.heights[:, ::-1])
