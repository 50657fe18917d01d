"""One listing of the tree against the manifest: files that rows name and nobody has, files that no row names.

In: the `RecordList` of data_setup/manifest.py. Out: `list_tree` returns every file with its size,
`audit_files` the missing and the orphaned ones. A bucket is listed in pages of a thousand files, without a
request per person. Only retinal_oct/ is listed, unless a row names another place: then the whole root is.
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
    """All files and folders, from one listing; raises StorageError."""
    top = f"{TREE[0]}/"
    if not all(row.path.startswith(top) for row in [*listing.records, *listing.unused]):
        top = ""
    below = storage.find_sizes(storage.join(listing.root, top), options)
    sizes = {top + name: size for name, size in below.items()}
    folders: set[str] = set()
    for path in sizes:
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return Tree(sizes, frozenset(folders))


def audit_files(listing: RecordList, tree: Tree) -> dict[str, list[str]]:
    """Sorted paths: "missing" of records, "unused_missing" of other rows, "orphans" of no row at all.

    An orphan is a .dcm file anywhere in the listing.
    """
    used = {record.path for record in listing.records}
    unused = {row.path for row in listing.unused} - used
    dicoms = {path for path in tree.sizes if path.lower().endswith(".dcm")}
    return {
        "missing": sorted(path for path in used if path not in tree),
        "orphans": sorted(dicoms - used - unused),
        "unused_missing": sorted(path for path in unused if path not in tree),
    }
