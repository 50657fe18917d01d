"""The layers that a maker's files hold, as the files that `prepare --labels` reads.

In: entries of a tree. Out: surfaces/PATH.surfaces.npz below the tables of each file with layers, and its
path in the entry, for the column label_surfaces. The tables have to lie in the tree: a manifest's paths are
below its root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data_setup.index.candidates import SURFACES_ENDING
from data_setup.index.look import OK, Entry
from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError
from data_setup.readers.vendor import kinds
from utils.config.schema import StorageOptions
from utils.storage import join, write_bytes

FOLDER = "surfaces"


def with_layers(root: str, out: str, entries: Sequence[Entry], options: StorageOptions) -> list[Entry]:
    """The entries, those of files with layers with the place of their .npz; raises StorageError."""
    return [_with_layers(root, out, entry, options) for entry in entries]


def _with_layers(root: str, out: str, entry: Entry, options: StorageOptions) -> Entry:
    if entry.kind not in kinds.LAYERED or entry.status != OK:
        return entry
    url = join(root, entry.path)
    try:
        with open_file(url, options) as file:
            drawn = kinds.surfaces(file, url)
    except OCTReadError:  # of the layers alone: the volume is read without them
        return entry
    if drawn is None:
        return entry
    path = f"{FOLDER}/{entry.path}{SURFACES_ENDING}"
    write_bytes(join(out, path), drawn.to_bytes(), options)
    return replace(entry, label_surfaces=f"./{path}")  # ./ is the manifest's folder
