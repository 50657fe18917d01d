"""What a plug says of a data set, and what it finds of it: plain values, no code of any one set.

In: a section of catalogue.yaml. Out: `Plug`, one for each set, with a mark of certainty on everything that
somebody wrote down; `Scan`, one volume of a tree; `Labels`, what comes with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from data_setup.index.candidates import IMAGES
from data_setup.index.look import UNKNOWN, Entry
from data_setup.protocols import Shape, Triple
from data_setup.readers.open_record import kind_by_name
from data_setup.tables.text import SIDES
from utils import storage
from utils.config.schema import StorageOptions

MARKS = {
    "c": "a catalogue says so, second hand",
    "+": "read in a loader's code",
    "r": "the set's own README or paper",
    "n/v": "not verified: look before you rely on it",
}
FACTS = ("content", "licence", "access", "citation", "layout", "spacing", "orientation", "labels", "splits")


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
class Scan(Entry):
    """One volume of a tree: a row of the manifest, before its file is looked at."""

    spacing: Callable[[Shape], Triple] | None = None  # (D, H, W) mm, where neither file nor YAML has one
    labels: Callable[[Shape], Labels] | None = None  # raises OCTReadError, UserError


@dataclass(frozen=True)
class Task:
    """A training that the labels allow: a file of configs/ and changes to it."""

    config: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plug:
    name: str
    title: str
    facts: Mapping[str, Fact]  # of FACTS; layout: a drawing of the tree
    tasks: tuple[Task, ...]
    row: Mapping[str, Any]  # how a volume is found, and its cells: the other keys of the catalogue
    classes: Mapping[str, str] = field(default_factory=dict)  # the set's word -> study_group
    label_classes: Mapping[int, str] = field(default_factory=dict)
    surfaces: tuple[str, ...] = ()  # from the vitreous down
    # what a line of the catalogue cannot say, made for a tree; raises UserError for a table that is damaged
    refine: Callable[[Plug, Tree], Callable[[Scan, re.Match[str]], Scan]] | None = None
    read_labels: Callable[[Tree, str, Shape], Labels] | None = None  # of the path of a volume
    read_classes: Callable[[Tree], Mapping[int, str]] | None = None  # where the tree itself names them

    @classmethod
    def of(cls, name: str, section: Mapping[str, Any], **code: Any) -> Plug:
        """The plug of a section of the catalogue; `code`: its callables, by field."""
        own = {f.name: section[f.name] for f in fields(cls) if f.name in section}
        facts = {key: section[key].rpartition(" ") for key in FACTS}
        own["facts"] = {key: Fact(text, mark.strip("[]")) for key, (text, _, mark) in facts.items()}
        tasks = (words.split() for words in section["tasks"])
        own["tasks"] = tuple(Task(config, tuple(changes)) for config, *changes in tasks)
        own["surfaces"] = tuple(section.get("surfaces", ()))
        row = {key: value for key, value in section.items() if key not in (*own, *FACTS)}
        return cls(name=name, row=row, **(own | code))

    def find(self, tree: Tree) -> list[Scan]:
        """The volumes of a tree; raises UserError for a table that cannot be read."""
        refine = self.refine(self, tree) if self.refine else lambda scan, match: scan
        matches: dict[str, re.Match[str]] = {}  # of a folder the first
        for match in tree.matches(self.row.get("files") or self.row["folders"]):
            matches.setdefault(match.string if "files" in self.row else folder_of(match.string), match)
        return [refine(self._scan(tree, path, match), match) for path, match in matches.items()]

    def _scan(self, tree: Tree, path: str, match: re.Match[str]) -> Scan:
        row, groups = self.row, match.groupdict(default="")
        group = self.classes.get(groups.get("kind", ""), "")
        return Scan(
            path,
            kind_by_name(path) or IMAGES,
            person_id=row["person"].format(group=group, **groups),
            person_source="set",
            device=row.get("device", UNKNOWN),
            protocol=row.get("protocol", UNKNOWN).format(**groups),
            laterality=SIDES.get(groups.get("eye", "").lower(), ""),
            region=row.get("region", "Macula"),
            spacing=fixed(*row["mm"]) if "mm" in row else of_field(*row["field"]) if "field" in row else None,
            volume_yaml=row.get("yaml", ""),
            facts={"study_group": group} if group else {},
            labels=partial(self.read_labels, tree, path) if self.read_labels else None,
        )

    def classes_of_voxels(self, tree: Tree) -> Mapping[int, str]:
        """{value: name} of the label volumes, 0 left out; raises UserError."""
        return self.label_classes if self.read_classes is None else self.read_classes(tree)


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def fixed(d: float, h: float, w: float) -> Callable[[Shape], Triple]:
    """A spacing in mm whatever the shape."""
    return lambda shape: (d, h, w)


def of_field(d: float, h: float, w: float) -> Callable[[Shape], Triple]:
    """A spacing from the field in mm that the whole shape covers."""
    return lambda shape: (d / shape[0], h / shape[1], w / shape[2])
