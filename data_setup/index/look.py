"""One candidate as a row of the tables: what its header says, or why it is not a volume.

In: a `Candidate`. Out: an `Entry`. Read are the header of a file, or the first image of a folder; of a DICOM
header also the maker's words, PatientID and PatientAge. Names and dates of patients are not read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from data_setup.index.candidates import Candidate
from data_setup.index.people import digest_of, matched_person, person_of_path, side_of_path
from data_setup.manifest import Record, unknown_record
from data_setup.protocols import BY_NAME
from data_setup.readers import heidelberg
from data_setup.readers.dicom import PEEK_BYTES, OCTHeader, peek_dataset
from data_setup.readers.faults import OCTReadError, RejectReason, named_faults
from data_setup.readers.makers import kinds
from data_setup.readers.octa import OctaHeader, read_octa_header
from data_setup.readers.open_record import peek_record
from data_setup.readers.pixels import BoundedFile
from data_setup.store.format import UNREAD
from data_setup.tables.text import fact_of, person_id_of, twin_ids
from utils.config.schema import StorageOptions
from utils.storage import StorageAwayError, StorageError, join
from utils.storage.ranges import RangeFile

OK = "ok"
OCTA = "octa"  # a flow cube or an en-face image: no structural volume, a row of octa.tsv
# What a cell of the manifest or a YAML repairs: such a row is in the manifest all the same.
TO_FILL = (RejectReason.MISSING_SPACING, RejectReason.UNKNOWN_AXES, RejectReason.MISSING_SHAPE)
UNKNOWN = "unknown"
XML = "Heidelberg XML"
WITHOUT_YAML = ("DICOM", XML)
HEADED = (*WITHOUT_YAML, *kinds.HEADED)  # kinds whose header says the eye; of the others a YAML may
STAND_IN = (0.1, 0.003, 0.01)  # mm, to get past a missing spacing to the shape; written nowhere
_BURNED = "BurnedInAnnotation"
_TAGS = ["PatientID", "PatientAge", "Manufacturer", "ManufacturerModelName", "ProtocolName", _BURNED]
# what anonymisers write into every file: the path says more
_ANONYMOUS = re.compile(r"anon(ym(ous|i[sz]ed)?)?|de-?identified|redacted|removed", re.IGNORECASE)


@dataclass(frozen=True)
class Rules:
    """What the command line says about whose files they are."""

    person: re.Pattern[str] | None = None  # its group is the person in a path
    keep_ids: bool = False  # a header's ids as they are, not their digests


@dataclass(frozen=True)
class Entry:
    """A row of the tables; an empty text where nothing says it."""

    path: str
    kind: str
    status: str = OK  # else the reason of the reject
    message: str = ""
    person_id: str = ""
    person_source: str = ""  # --person | header | folder (another header's of it) | path | set
    place: str = ""  # the folder of the name in the path that is the person's
    path_name: str = ""  # that name, where the header has an id too
    id_key: str = ""  # a digest of the header's id without blanks and case, to compare
    facts: Mapping[str, str] = field(default_factory=dict)  # of the person, or of the eye: age, study_group
    visit: Mapping[str, str] = field(default_factory=dict)  # of this volume alone
    split: str = ""  # train | val | test, by a set's owners
    laterality: str = ""  # L | R
    other_side: str = ""  # L | R as the path says where the header says the other; of YAML the YAML's
    device: str = UNKNOWN
    protocol: str = UNKNOWN
    region: str = ""
    shape: tuple[int, int, int] | None = None
    spacing_mm: tuple[float, float, float] | None = None
    spacing_source: str = ""
    d_order: str = UNKNOWN
    files: str = ""  # of a folder: the pattern of its B-scans, where other images are in it
    sop_instance_uid: str = ""
    volume_yaml: str = ""  # keys of a volume.yaml in one line
    label_volume: str = ""  # the .npz of its classes of voxels, from the manifest's folder
    label_surfaces: str = ""  # the .npz of its layers
    without_labels: str = ""  # why those of the file are not used
    etdrs: dict[str, float] = field(default_factory=dict)
    octa: OctaHeader | None = None
    is_away: bool = False  # storage did not answer, but may later
    has_text: bool = False  # in its pixels, as the header says

    @property
    def is_row(self) -> bool:
        """Whether it is in the manifest; an XML takes no spacing from there, and is left out without one."""
        return self.status == OK or (self.status in TO_FILL and self.kind != XML)


def look(candidate: Candidate, root: str, rules: Rules, options: StorageOptions) -> Entry:
    """The row of a candidate; a fault of the file or of storage becomes its status. Raises UserError where
    the path of a volume has no person by --person.
    """
    entry = _look(candidate, root, rules, options)
    if candidate.files and entry.status == RejectReason.NOT_A_VOLUME:  # other images among the B-scans
        of_set = _look(candidate, root, rules, options, candidate.files)
        entry = of_set if of_set.is_row else entry
    if rules.person is None or not entry.is_row:
        return entry
    return replace(entry, person_id=matched_person(rules.person, entry.path), person_source="--person")


def _look(
    candidate: Candidate, root: str, rules: Rules, options: StorageOptions, files: str | None = None
) -> Entry:
    path, kind = candidate.path, candidate.kind
    person, place = candidate.person, candidate.place
    if not person:
        person, place = person_of_path(path, by_folder=kind in HEADED)
    entry = Entry(path, kind, person_id=person, person_source="path", place=place, path_name=person)
    entry = replace(entry, laterality=side_of_path(path) or "", files=files or "")
    record = replace(unknown_record(join(root, path), path), files=files)
    try:
        entry = _peeked(entry, record, candidate.size, options)
        if kind == "DICOM":
            return _with_dicom(entry, record.url, candidate.size, rules, options)
        if kind == XML:
            export = heidelberg.read_export(record.url, options)
            return replace(_with_id(entry, export.patient_id, rules), etdrs=export.etdrs)
        if kind in kinds.HEADED:
            with RangeFile(kinds.split_part(record.url)[0], candidate.size, options, PEEK_BYTES) as file:
                return _with_id(entry, kinds.patient_id(kind, file, record.url), rules)
    except OCTReadError as error:
        if kind == "DICOM" and error.reason == RejectReason.NOT_OPT:
            return _octa(entry, error, record.url, candidate, options)
        return replace(entry, status=error.reason.value, message=error.detail)
    except StorageError as error:
        is_away = isinstance(error, StorageAwayError)
        return replace(entry, status=UNREAD, message=error.problem, is_away=is_away)
    return entry


def _octa(
    entry: Entry, not_opt: OCTReadError, url: str, candidate: Candidate, options: StorageOptions
) -> Entry:
    """The row of a flow cube or an en-face image; of another class what the volume's reader said."""
    try:
        header = read_octa_header(BoundedFile(RangeFile(url, candidate.size, options, PEEK_BYTES)), url)
    except OCTReadError as error:
        reason = not_opt if error.reason == RejectReason.NOT_FLOW_CUBE else error
        return replace(entry, status=reason.reason.value, message=reason.detail)
    except StorageError as error:
        is_away = isinstance(error, StorageAwayError)
        return replace(entry, status=UNREAD, message=error.problem, is_away=is_away)
    return replace(entry, kind=header.kind, status=OCTA, laterality=header.laterality or "", octa=header)


def _peeked(entry: Entry, record: Record, size: int, options: StorageOptions) -> Entry:
    """What the header says; without the spacing where nothing says it, which no cell gives an XML."""
    try:
        return _described(entry, peek_record(record, size, options))
    except OCTReadError as error:
        if error.reason != RejectReason.MISSING_SPACING or entry.kind == XML:
            raise
        reason, message = error.reason.value, error.detail
    known = _described(entry, peek_record(replace(record, spacing_mm=STAND_IN), size, options))
    return replace(known, status=reason, message=message, spacing_mm=None, spacing_source="")


def _described(entry: Entry, header: OCTHeader) -> Entry:
    protocol = fact_of(header.protocol) or f"raster_{header.shape[0]}x{header.shape[2]}"
    known = BY_NAME.get(protocol)
    order = "inferior_to_superior" if header.flip_d else "superior_to_inferior"
    in_path, in_header = entry.laterality, header.laterality or ""
    first, second = (in_header, in_path) if entry.kind in HEADED else (in_path, in_header)
    side = first or second
    return replace(
        entry,
        laterality=side,
        other_side=second if second not in ("", side) else "",
        device=fact_of(header.device) or UNKNOWN,
        protocol=known.name if known else protocol,
        region=known.region if known else "",
        shape=header.shape,
        spacing_mm=header.spacing_mm,
        spacing_source=header.spacing_source,
        d_order=UNKNOWN if header.orientation_source == "unknown" else order,
        sop_instance_uid=header.sop_instance_uid,
    )


def _with_dicom(entry: Entry, url: str, size: int, rules: Rules, options: StorageOptions) -> Entry:
    """With the person, and the maker's words where the table of protocols does not know the device."""
    ds = peek_dataset(url, size, _TAGS, options)
    with named_faults(url, RejectReason.NOT_DICOM, "a whole DICOM header"):
        text = {tag: str(ds.get(tag) or "").strip() for tag in _TAGS}
    words = {tag: fact_of(value) or "" for tag, value in text.items()}  # a table has no device `none`
    if entry.device == UNKNOWN:
        device = _name(f"{words['Manufacturer']} {words['ManufacturerModelName']}")
        entry = replace(entry, device=device or UNKNOWN)
    if entry.protocol not in BY_NAME and words["ProtocolName"]:
        entry = replace(entry, protocol=_name(words["ProtocolName"]) or entry.protocol)
    if years := re.fullmatch(r"0*(\d{1,3})Y", text["PatientAge"]):
        entry = replace(entry, facts={"age": years[1]})
    entry = replace(entry, has_text=text[_BURNED] == "YES")
    return _with_id(entry, text["PatientID"] or None, rules)


def _with_id(entry: Entry, patient_id: str | None, rules: Rules) -> Entry:
    patient_id = (patient_id or "").strip()
    if not patient_id or _ANONYMOUS.fullmatch(patient_id):
        return entry
    person = patient_id if rules.keep_ids else digest_of(patient_id)
    key = digest_of("".join(patient_id.split()).casefold())
    return replace(entry, person_id=person, person_source="header", id_key=key)


def with_ids_of_folders(entries: Sequence[Entry]) -> list[Entry]:
    """Entries without an id get that of the headers below the same name in the path, where these have one.
    Each id is then the one that `prepare` reads in the table.
    """
    ids: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        if entry.person_source == "header":
            ids.setdefault((entry.place, entry.path_name), set()).add(entry.person_id)
    only = {where: min(some) for where, some in ids.items() if len(some) == 1}
    entries = [
        replace(entry, person_id=only[where], person_source="folder")
        if entry.person_source == "path" and (where := (entry.place, entry.path_name)) in only
        else entry
        for entry in entries
    ]
    twins = twin_ids(entry.person_id for entry in entries)
    return [replace(e, person_id=person_id_of(e.person_id, twins) or e.person_id) for e in entries]


def _name(text: str) -> str:
    """A maker's words as a name: lower case, figures and underscores, up to 40 characters."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:40].strip("_")
