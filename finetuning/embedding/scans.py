"""Which scans a command line means: files and folders of all kinds that data_setup.prepare opens.

In: places. Out: a `Scan` each, as data_setup.index finds them in a folder: files, folders of images, the
volumes of an E2E file, with the YAML beside them. Where the folder has a manifest its rows say what no file
does (person, side, spacing, direction, drawn surfaces); what it does not list is looked at too. Label maps
are no scans. A named file is a scan whatever it holds: its reader says why it is none.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import NamedTuple

from data_setup.attach.labels import SURFACES, VOLUME
from data_setup.index.cli import NAME, read_tree
from data_setup.index.label_maps import LABEL_MAP, with_label_maps
from data_setup.index.look import OCTA, Entry, Rules
from data_setup.index.people import is_nobody, person_of_path
from data_setup.manifest import TREE, Record, records_of_table, unknown_record
from data_setup.protocols import BY_NAME
from data_setup.readers.dicom import OCTHeader
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import is_image
from data_setup.readers.makers import kinds
from data_setup.readers.open_record import identify, kind_by_name, source_digest, source_stat
from data_setup.tables.text import PERSON_COLUMNS, clean_path, read_cells, read_table
from finetuning.cohort.ledger import values_digest
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError, shown
from utils.storage.errors import split_scheme
from utils.terminal import say
from utils.workers import count_loaders

MANIFEST, LEFT_OUT = "manifest.tsv", "left_out.tsv"
NO_SCANS = (OCTA, LABEL_MAP, RejectReason.NOT_OPT)  # whatever else the index left out may be mended by now
MANIFESTS = (MANIFEST, f"{TREE[0]}/{MANIFEST}", f"dataset/{TREE[0]}/{MANIFEST}")
_BESIDE = re.compile(r"(dataset/)?retinal_(?!oct/)\w+/")  # AI-READI's other kinds: maps, flow, photographs
HEAD_BYTES = 132
UNKNOWN = ("", "unknown")


class Places(NamedTuple):
    """What a command line names; one of the two."""

    dicoms: Sequence[str] = ()  # of a folder its DICOM files alone
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Scan:
    """One scan, and what is known of it before it is read; picklable."""

    record: Record  # `path`: as a line names it
    name: str  # below the folder that was asked about: of what is written of it
    person: str = ""  # by the manifest, the header (a digest) or the path, as data_setup.index says
    laterality: str = ""
    protocol: str = ""
    region: str = ""
    surfaces: str = ""  # URL of what somebody drew: the manifest's label_surfaces

    def facts(self, header: OCTHeader) -> dict[str, str | None]:
        """Side, device, protocol and region: the header's word, else that of table or path."""
        protocol = header.protocol or self.protocol or None
        known = BY_NAME.get(protocol or "")
        return {
            "laterality": header.laterality or self.laterality or "unknown",
            "device": header.device or _known(self.record.device) or None,
            "protocol": protocol,
            "region": known.region if known else self.region or None,
        }


def find_scans(places: Places, options: StorageOptions, workers: int | None, out: str = "") -> list[Scan]:
    """The scans that `places` mean, each once, none below `out`; UserError for a place without one."""
    scans: dict[str, Scan] = {}
    only_dicom = bool(places.dicoms)
    num_workers = count_loaders(workers)
    word, what = ("--dicom", "DICOM files") if only_dicom else ("--files", "scans")
    for place in places.dicoms or places.files:
        sizes = {} if is_special(place) else storage.find_sizes(place, options)
        sizes = {} if list(sizes) == [""] else _without(sizes, place, out)
        if not sizes:
            if only_dicom and not storage.exists(place, options):
                raise UserError(f"{word}: expected a DICOM file or a folder, found none at {place}")
            some = _of_file(place, options)
        else:
            some = _below(place.rstrip("/") or "/", sizes, options, num_workers, only_dicom)
            if not some:
                raise UserError(f"{word}: expected {what} below {place}, found none in {len(sizes)} files")
        for scan in some:
            scans.setdefault(storage.absolute(scan.record.path), scan)
    return list(scans.values())


def _without(sizes: Mapping[str, int], place: str, out: str) -> dict[str, int]:
    """Files of a place that do not lie in the folder `out`."""
    own, above = f"{storage.absolute(out)}/", f"{storage.absolute(place).rstrip('/')}/"
    if not out or not own.startswith(above) or own == above:
        return dict(sizes)
    return {path: n for path, n in sizes.items() if not path.startswith(own.removeprefix(above))}


def _of_file(place: str, options: StorageOptions) -> list[Scan]:
    """A file by its name, and the volumes of an E2E file."""
    named = Scan(unknown_record(place), posixpath.basename(place))
    if is_special(place) or _is_odd(place) or kinds.split_part(place)[1] is not None:
        return [named]
    try:
        size = storage.stat(place, options).size
    except storage.StorageError:
        return [named]  # its reader meets the same error, and names it
    folder, _, name = storage.absolute(place).rpartition("/")
    entries, _ = read_tree(folder or "/", {name: size}, Rules(), options, 0)
    parts = {entry.path: place + entry.path.removeprefix(name) for entry in entries}
    return [_of_entry(entry, parts[entry.path], entry.path) for entry in entries] or [named]


def _below(
    place: str, sizes: Mapping[str, int], options: StorageOptions, workers: int, only_dicom: bool
) -> list[Scan]:
    is_set = not sizes.keys().isdisjoint(MANIFESTS[1:])
    beside = {path for path in sizes if is_set and _BESIDE.match(path)}
    sizes = {path: size for path, size in sizes.items() if path not in beside}
    listed, known = _listed(place, sizes, options)
    odd = [path for path in sizes if _is_odd(path) and _may_be_scan(path, place, options, only_dicom)]
    entries, others = read_tree(place, sizes, Rules(), options, workers, known)
    entries = [entry for entry in entries if entry.status != NAME]
    elsewhere = [path for path in sorted(beside) if kind_by_name(path) == "DICOM"]
    elsewhere += [entry.path for entry in entries if entry.status in (OCTA, RejectReason.NOT_OPT)]
    if elsewhere:
        what = "DICOM files that are no OCT volume, such as height maps,"
        say(f"{len(elsewhere)} {what} are left out: {shown(', '.join(elsewhere[:3]))}")
        left_out = set(elsewhere)
        entries = [entry for entry in entries if entry.path not in left_out]
    if only_dicom:
        entries = [entry for entry in entries if entry.kind == "DICOM"]
        listed = [scan for scan in listed if kind_by_name(scan.record.url) in (None, "DICOM")]
    else:
        entries = with_label_maps(place, sizes, entries, options)
        if maps := [entry.path for entry in entries if entry.status == LABEL_MAP]:
            say(f"{len(maps)} label maps are no scans and are left out: {shown(', '.join(maps[:3]))}")
            entries = [entry for entry in entries if entry.status != LABEL_MAP]
        if others["images beside the folders"]:
            entries += _itself(place, sizes, options)
    scans = [*listed, *(_of_entry(e, storage.join(place, e.path), e.path) for e in entries)]
    folders = [posixpath.dirname(path) for path in odd]  # of images each is one scan
    odd = [f if is_image(path) and _is_odd(f) else path for path, f in zip(odd, folders, strict=True)]
    return [*scans, *(Scan(unknown_record(storage.join(place, one)), one) for one in dict.fromkeys(odd))]


def _itself(place: str, sizes: Mapping[str, int], options: StorageOptions) -> list[Entry]:
    """A folder that is the volume: the images that lie in it, as one entry with an empty path."""
    above, _, name = storage.absolute(place).rpartition("/")
    images = {f"{name}/{path}": n for path, n in sizes.items() if "/" not in path and is_image(path)}
    entries, _ = read_tree(above or "/", images, Rules(), options, 0)
    return [replace(entry, path="") for entry in entries if entry.path == name]


def _of_entry(entry: Entry, url: str, name: str) -> Scan:
    record = replace(unknown_record(url), files=entry.files or None, volume_yaml=entry.volume_yaml or None)
    name, person = name or posixpath.basename(url.rstrip("/")), entry.person_id
    if entry.person_source == "path" and is_nobody(person):  # OD.nii of a folder P01 that was named
        person = person_of_path(storage.absolute(url), by_folder=False)[0]
    return Scan(record, name, person, entry.laterality, _known(entry.protocol), _known(entry.region))


def _known(text: str) -> str:
    return "" if text in UNKNOWN else text


def _listed(
    place: str, sizes: Mapping[str, int], options: StorageOptions
) -> tuple[list[Scan], Collection[str]]:
    """(the scans of the folder's manifest whose files are here, paths that its tables name)."""
    table = next((path for path in MANIFESTS if path in sizes), None)
    if table is None:
        return [], ()
    url = storage.join(place, table)
    columns, _ = read_cells(url, options, PERSON_COLUMNS)
    if "filepath" not in columns or not set(PERSON_COLUMNS) & set(columns):
        return [], ()  # somebody else's
    lines, _, _ = read_table(url, options, ("filepath",))
    own, above = f"{posixpath.basename(storage.absolute(place))}/", ""
    if table == MANIFEST and own == f"{TREE[0]}/":  # AI-READI's paths begin above its table
        place, above = storage.absolute(place).rpartition("/")[0] or "/", own
    elif table == MANIFESTS[-1]:
        place, above = storage.join(place, "dataset"), ""
    here = {above + path.removeprefix("dataset/") for path in sizes}
    here |= {str(folder) for path in here for folder in PurePosixPath(path).parents}
    rows = [
        of_row(record, lines[record.line].get(SURFACES), url, place)
        for record in records_of_table(url, place, options)
    ]
    scans = [scan for scan in rows if kinds.split_part(scan.name)[0] in here]
    if len(scans) < len(rows):
        say(f"{shown(url)}: {len(rows) - len(scans)} of {len(rows)} rows have no file here: left out")
    known = {scan.name for scan in scans}
    for cell in (line.get(column) for line in lines.values() for column in (SURFACES, VOLUME)):
        path = (clean_path(cell) or "").removeprefix("./")
        known.add(posixpath.dirname(path) if "*" in path else path)
    if LEFT_OUT in sizes and table == MANIFEST:
        left_out, _, _ = read_table(storage.join(place, LEFT_OUT), options, ("reason",), ("filepath",))
        known |= {line["filepath"] for line in left_out.values() if line["reason"] in NO_SCANS}
    known |= {f"dataset/{path}" for path in known} | {path.removeprefix(above) for path in known}
    return [replace(scan, record=replace(scan.record, path=scan.record.url)) for scan in scans], known


def of_row(record: Record, surfaces: str | None, manifest_url: str, root: str) -> Scan:
    """The scan of a manifest's row; `surfaces`: its cell of label_surfaces."""
    path = clean_path(surfaces)
    top = manifest_url.rpartition("/")[0] if path and path.startswith("./") else root
    return Scan(
        record,
        record.path,
        _known(record.person_id),
        _known(record.laterality),
        _known(record.protocol),
        _known(record.region),
        storage.join(top, path.removeprefix("./")) if path else "",
    )


def version_of(record: Record, options: StorageOptions) -> str:
    """A digest that changes with the files; "" of what cannot be looked at: its reader names the error."""
    if is_special(record.url):
        return ""
    try:
        source, digest = source_stat(record, options), source_digest(record, options)
    except (storage.StorageError, OCTReadError):
        return ""
    return ".".join([values_digest([record.url, source.size, source.etag_or_mtime]), digest]).strip(".")


def is_of(written: str, version: str | None) -> bool:
    """Whether a line or row is of this version of its source; older ones know no digest of its ends."""
    return version is not None and written in (version, version.partition(".")[0])


def is_special(url: str) -> bool:
    """Whether a path is a pipe, a socket or a device, whose bytes may never come."""
    scheme, path = split_scheme(url)
    is_plain = os.path.isfile(path) or os.path.isdir(path)
    return scheme == "file" and os.path.exists(path) and not is_plain


def require_file(url: str) -> None:
    """Raise OCTReadError for what `is_special`."""
    if is_special(url):
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, "a file or a folder", "a pipe or a device")


def _is_odd(path: str) -> bool:
    """Whether bytes of it are no text, so that no table can hold it."""
    return any("\ud800" <= letter <= "\udfff" for letter in path)


def _may_be_scan(path: str, place: str, options: StorageOptions, only_dicom: bool) -> bool:
    """Whether a file that no table can hold is to be tried: a row says what became of it."""
    return _is_dicom(storage.join(place, path), options) or (
        not only_dicom and kind_by_name(path) is not None
    )


def _is_dicom(url: str, options: StorageOptions) -> bool:
    """By its name, or the first bytes of a name without a known ending."""
    if kind_by_name(url) is not None:
        return kind_by_name(url) == "DICOM"
    return identify(storage.read_range(url, 0, HEAD_BYTES, options))[0] == "DICOM"
