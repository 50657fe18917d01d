"""What a plug says of a data set, and what it finds of it: plain values, no code of any one set.

In: nothing. Out: `Plug`, one for each set, with a mark of certainty on everything that somebody wrote down;
`Scan`, one volume of a tree; `Labels`, what comes with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from utils import storage
from utils.config.schema import StorageOptions

MARKS = {
    "c": "a catalogue says so, second hand",
    "+": "read in a loader's code",
    "r": "the set's own README or paper",
    "n/v": "not verified: look before you rely on it",
}
PROBE = "configs/cls_linear_probe.yaml"
OF_VOLUMES = ("task.labels_path={out}/labels.tsv", "task.unit=volume")  # where a task's labels are of visits
Shape = tuple[int, int, int]
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Fact:
    """A sentence and how certain it is: a key of MARKS."""

    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.text} [{self.mark}]"


@dataclass(frozen=True)
class Tree:
    """The files below a folder or a URL."""

    root: str
    options: StorageOptions

    @cached_property
    def sizes(self) -> dict[str, int]:
        """{path below the root: bytes}, sorted by path."""
        return dict(sorted(storage.find_sizes(self.root, self.options).items()))

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """Each path in which the regular expression is found, in order."""
        compiled = re.compile(pattern)
        return [match for path in self.sizes if (match := compiled.search(path))]

    def folders(self, pattern: str) -> dict[str, re.Match[str]]:
        """{folder: match of its first file}, of the files that match."""
        found_in: dict[str, re.Match[str]] = {}
        for match in self.matches(pattern):
            found_in.setdefault(match.string.rpartition("/")[0], match)
        return found_in

    def url(self, path: str) -> str:
        """The URL of a path below the root."""
        return storage.join(self.root, path)

    def read(self, path: str) -> bytes:
        """The file; raises StorageError."""
        return storage.read_bytes(self.url(path), self.options)


@dataclass(frozen=True)
class Labels:
    """What comes with a volume, in the frame order of its file."""

    classes: np.ndarray | None = None  # uint8 [D, H, W], keys of Plug.label_classes
    surfaces: np.ndarray | None = None  # float32 [S, D, W] in rows, NaN: unknown; Plug.surfaces in that order
    facts: Mapping[str, str] = field(default_factory=dict)  # of the person or eye, read off the labels


@dataclass(frozen=True)
class Scan:
    """One volume of a tree: a row of the manifest."""

    path: str  # a file or a folder of images, below the root
    person_id: str
    device: str
    protocol: str
    laterality: str = ""  # L | R
    region: str = "Macula"
    spacing: Callable[[Shape], Triple] | None = None  # (D, H, W) mm, where neither file nor YAML has one
    d_order: str = "unknown"
    files: str = ""  # of a folder: pattern of the B-scans
    yaml: Mapping[str, Any] = field(default_factory=dict)  # keys of volume.yaml: axes, array, columns ...
    split: str = ""  # train | val | test, by the set's owners
    facts: Mapping[str, str] = field(default_factory=dict)  # of the person, or of the eye
    visit: Mapping[str, str] = field(default_factory=dict)  # of this volume alone
    labels: Callable[[Shape], Labels] | None = None  # raises OCTReadError, UserError


@dataclass(frozen=True)
class Task:
    """A training that the labels allow: a file of configs/ and changes to it."""

    config: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plug:
    """One data set."""

    name: str
    title: str
    content: Fact
    licence: Fact
    access: Fact
    citation: Fact
    layout: Fact  # a drawing of the tree
    spacing: Fact
    orientation: Fact
    labels: Fact
    splits: Fact
    find: Callable[[Tree], list[Scan]]  # raises UserError for a table that cannot be read
    tasks: tuple[Task, ...]
    classes: Mapping[str, str] = field(default_factory=dict)  # the set's word -> study_group
    label_classes: Mapping[int, str] = field(default_factory=dict)
    surfaces: tuple[str, ...] = ()  # from the vitreous down
    read_classes: Callable[[Tree], Mapping[int, str]] | None = None  # where the tree itself names them

    def classes_of_voxels(self, tree: Tree) -> Mapping[int, str]:
        """{value: name} of the label volumes, 0 left out; raises UserError."""
        return self.label_classes if self.read_classes is None else self.read_classes(tree)


def fixed(d: float, h: float, w: float) -> Callable[[Shape], Triple]:
    """A spacing in mm whatever the shape."""
    return lambda shape: (d, h, w)


def of_field(d: float, h: float, w: float) -> Callable[[Shape], Triple]:
    """A spacing from the field in mm that the whole shape covers."""
    return lambda shape: (d / shape[0], h / shape[1], w / shape[2])
