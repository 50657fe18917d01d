"""A public data set as entries of the index: its volumes, whose headers are looked at, and its labels.

In: a plug and its tree. Out: entries, with what the plug says where the file does not; labels/*.npz below the
tables; and the sets as text, for `--sets`. Label arrays are read whole, one scan at a time.
"""

import difflib
import io
from dataclasses import replace

import numpy as np

from data_setup.index.look import STAND_IN, UNKNOWN, Entry
from data_setup.index.sets import NO_VOLUMES, PLUGS
from data_setup.index.sets.facts import MARKS, Labels, Plug, Scan, Tree
from data_setup.manifest import unknown_record
from data_setup.readers.faults import OCTReadError
from data_setup.readers.open_record import peek_record
from data_setup.store.format import UNREAD
from utils.errors import UserError
from utils.storage import StorageError, join, write_bytes
from utils.workers import in_threads

FOLDER = "labels"
_SHOWN = 3
_WIDTH = 11  # of a name in `--sets NAME`


def plug_of(name: str) -> Plug:
    """The plug of a name; raises UserError, for a set of single images with the reason."""
    if name in PLUGS:
        return PLUGS[name]
    if name in NO_VOLUMES:
        raise UserError(f"{name}: expected a set of volumes, found one of single B-scans: {NO_VOLUMES[name]}")
    near = difflib.get_close_matches(name, [*PLUGS, *NO_VOLUMES], 1)
    hint = f" (near {near[0]})" if near else ""
    raise UserError(f"--set: expected one of {', '.join(PLUGS)}, found {name!r}{hint}")


def entries_of(plug: Plug, tree: Tree, out: str) -> list[Entry]:
    """The volumes of a set by path, their labels written below `out`. Prints the expected tree and raises
    UserError for a wrong folder; raises StorageError.
    """
    scans = sorted(plug.find(tree), key=lambda scan: scan.path)
    scans = in_threads(lambda scan: _look(tree, scan), scans)
    if not any(scan.is_row for scan in scans):
        print(f"expected, {plug.title} [{plug.facts['layout'].mark}]:\n{plug.facts['layout'].text}")
    if not scans:
        some = ", ".join(list(tree.sizes)[:_SHOWN])
        raise UserError(
            f"{tree.root}: expected the tree of {plug.name} as above, found no volume of it in "
            f"{len(tree.sizes)} files ({some})"
        )
    return [_with_labels(plug, tree, out, scan) for scan in scans]


def _look(tree: Tree, scan: Scan) -> Scan:
    """The same with what its file says; a fault of it or of storage becomes its status."""
    record = replace(
        unknown_record(tree.url(scan.path), scan.path),
        device=scan.device,
        protocol=scan.protocol,
        laterality=scan.laterality or UNKNOWN,
        spacing_mm=STAND_IN if scan.spacing else None,
        files=scan.files or None,
        volume_yaml=scan.volume_yaml or None,
    )
    try:
        header = peek_record(record, tree.sizes.get(scan.path, 0), tree.options)
    except OCTReadError as error:
        return replace(scan, status=error.reason.value, message=error.detail)
    except StorageError as error:
        return replace(scan, status=UNREAD, message=error.problem)
    is_stand_in = scan.spacing is not None and header.spacing_source == "manifest"
    return replace(
        scan,
        shape=header.shape,
        spacing_mm=scan.spacing(header.shape) if scan.spacing and is_stand_in else header.spacing_mm,
        spacing_source="set" if is_stand_in else header.spacing_source,
        sop_instance_uid=header.sop_instance_uid,
    )


def _with_labels(plug: Plug, tree: Tree, out: str, scan: Scan) -> Entry:
    """The scan with what its labels say, and their file; raises StorageError, UserError."""
    if scan.labels is None or scan.shape is None:
        return scan
    try:
        labels = scan.labels(scan.shape)
    except OCTReadError as error:
        return replace(scan, without_labels=f"{error.reason}: {error.detail}")
    path = f"{FOLDER}/{scan.path.replace('/', '__')}.npz"
    if data := _npz(plug, labels):
        write_bytes(join(out, path), data, tree.options)
    return replace(
        scan,
        facts={**scan.facts, **labels.facts},
        label_volume="" if labels.classes is None else f"./{path}",  # ./ is the manifest's folder
        label_surfaces="" if labels.surfaces is None else f"./{path}",
    )


def _npz(plug: Plug, labels: Labels) -> bytes:
    """The label file of a volume; empty without labels."""
    arrays: dict[str, np.ndarray] = {}
    if labels.classes is not None:
        arrays["labels"] = np.ascontiguousarray(labels.classes, np.uint8)
    if labels.surfaces is not None:
        arrays["surfaces"] = np.ascontiguousarray(labels.surfaces, np.float32)
        arrays["names"] = np.array(plug.surfaces)
    if not arrays:
        return b""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def overview() -> list[str]:
    """A line for each set, those of single images with the reason why they are none, and the marks."""
    width = max(map(len, [*PLUGS, *NO_VOLUMES])) + 2
    lines = [
        f"{plug.name:<{width}}{plug.title}: {plug.facts['content']}; {plug.facts['licence']}"
        for plug in PLUGS.values()
    ]
    lines += ["", "no volumes, so no plug:"]
    lines += [f"{name:<{width}}{reason}" for name, reason in NO_VOLUMES.items()]
    marks = "; ".join(f"[{mark}] {meaning}" for mark, meaning in MARKS.items())
    return [*lines, "", f"marks: {marks}"]


def describe(plug: Plug) -> list[str]:
    """Everything about one set."""
    lines = [f"{plug.name}: {plug.title}"]
    lines += [f"{name:<{_WIDTH}} {fact}" for name, fact in plug.facts.items() if name != "layout"]
    if plug.classes:
        lines.append(f"{'classes':<{_WIDTH}} {', '.join(f'{k} -> {v}' for k, v in plug.classes.items())}")
    if plug.label_classes:
        values = ", ".join(f"{k} {v}" for k, v in plug.label_classes.items())
        lines.append(f"{'voxels':<{_WIDTH}} 0 background, {values}")
    if plug.surfaces:
        lines.append(f"{'surfaces':<{_WIDTH}} {', '.join(plug.surfaces)}")
    lines += [f"{'task':<{_WIDTH}} {' '.join((task.config, *task.overrides))}" for task in plug.tasks]
    return [
        *lines,
        f"tree [{plug.facts['layout'].mark}]:",
        *(f"    {line}" for line in plug.facts["layout"].text.splitlines()),
    ]
