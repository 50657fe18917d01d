"""One listing of the tree against the manifest: files that rows name and nobody has, files that no row names.

In: the `RecordList` of data_setup/manifest.py. Out: `list_tree` every file with its size, `audit_files` what
is missing and what is orphaned. A bucket is listed in pages of a thousand files, so no request per person is
needed. Below an AI-READI root only retinal_oct/ is looked through; where rows name other places, all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_setup.manifest import TREE, RecordList
from utils import storage
from utils.config.schema import StorageOptions


@dataclass(frozen=True)
class Tree:
    """Files and folders by their path relative to the root."""

    sizes: dict[str, int]  # of files, bytes
    folders: frozenset[str]

    def __contains__(self, path: str) -> bool:
        return path in self.sizes or path in self.folders


def list_tree(listing: RecordList, options: StorageOptions) -> Tree:
    """The files that are there, from one listing; raises StorageError."""
    top = f"{TREE[0]}/"
    if not all(row.path.startswith(top) for row in [*listing.records, *listing.unused]):
        top = ""
    found = storage.find_sizes(storage.join(listing.root, top), options)
    sizes = {top + name: size for name, size in found.items()}
    folders: set[str] = set()
    for path in sizes:
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return Tree(sizes, frozenset(folders))


def audit_files(listing: RecordList, tree: Tree) -> dict[str, list[str]]:
    """Paths, sorted: "missing" of records, "unused_missing" of rows that are no records, "orphans": .dcm
    files anywhere in the listing that no row of the manifest names.
    """
    used = {record.path for record in listing.records}
    unused = {row.path for row in listing.unused} - used
    dicoms = {path for path in tree.sizes if path.lower().endswith(".dcm")}
    return {
        "missing": sorted(path for path in used if path not in tree),
        "orphans": sorted(dicoms - used - unused),
        "unused_missing": sorted(path for path in unused if path not in tree),
    }
