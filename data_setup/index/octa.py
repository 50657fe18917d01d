"""The OCTA files of a tree as a table that `prepare --flow` reads.

In: entries of structural volumes, of flow cubes and of en-face images. Out: octa.tsv, a row for every
structural volume that this file names as its source, with the columns of AI-READI's
retinal_octa/manifest.tsv that `prepare --flow` reads; and lines of the summary. A file of OCTA is paired by
the SOPInstanceUID that its header refers to, and by nothing else; one that refers to no volume of the tree
has a separate row, without a structural path. Every run writes the table again.
"""

from collections import Counter
from collections.abc import Sequence

from data_setup.index.look import Entry
from data_setup.readers.octa import EN_FACE, FLOW_CUBE, SLABS, OctaHeader, slab_of
from data_setup.tables.text import table_text
from utils.config.schema import StorageOptions
from utils.storage import exists, join, write_text

NAME = "octa.tsv"
OTHER = "other"  # than the slabs
STRUCTURAL = "associated_structural_oct"
ENFACE_COLUMNS = ("ophthalmic_image_type", "sop_instance_uid", "file_path")
COLUMNS = (
    *("person_id", "laterality", "kinds", f"{STRUCTURAL}_sop_instance_uid", f"{STRUCTURAL}_file_path"),
    *("flow_cube_number_of_frames", "flow_cube_height", "flow_cube_width"),
    *("flow_cube_sop_instance_uid", "flow_cube_file_path"),
    *(f"associated_enface_{n}_{part}" for n in range(1, len(SLABS) + 1) for part in ENFACE_COLUMNS),
)


def write_octa(
    out: str, entries: Sequence[Entry], octa: Sequence[Entry], options: StorageOptions
) -> list[str]:
    """Write octa.tsv below `out`; returns lines that say what is in it. Raises StorageError. Without a file
    of OCTA nothing is written: a table that is there may be somebody's own, and is named.
    """
    if not octa:
        if not exists(join(out, NAME), options):
            return []
        return [f"not written: {join(out, NAME)}: no file of OCTA; what is there is older: remove it"]
    volumes = {e.sop_instance_uid: e for e in entries if e.is_row and e.sop_instance_uid}
    of_volume: dict[str, list[Entry]] = {}
    alone: list[Entry] = []
    for entry in octa:
        named = sorted(_octa(entry).references & volumes.keys())  # of several none
        (of_volume.setdefault(named[0], []) if len(named) == 1 else alone).append(entry)
    rows = [_row(volumes[uid], files) for uid, files in sorted(of_volume.items())]
    rows += [_row(None, [entry]) for entry in alone]
    second = sum(_surplus(files) for files in of_volume.values())
    write_text(join(out, NAME), table_text(COLUMNS, rows), options)
    counts = Counter(entry.kind for entry in octa)
    words = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    lines = [f"OCTA        {words}: of {len(of_volume)} structural volumes (octa.tsv)"]
    if alone:
        names = ", ".join(entry.path for entry in alone[:3])
        lines.append(f"  {len(alone)} refer to no structural volume of the tree: {names}")
    if second:
        lines.append(f"  {second} are a second file of their kind and slab, and are not in octa.tsv")
    return [*lines, f"written: {join(out, NAME)}"]


def _octa(entry: Entry) -> OctaHeader:
    assert entry.octa is not None
    return entry.octa


def _row(volume: Entry | None, files: Sequence[Entry]) -> dict[str, str]:
    """The cells of a volume with its OCTA files; of `None` with the one that has no volume."""
    first = volume or files[0]
    row = {"person_id": first.person_id, "laterality": first.laterality}
    if volume is not None:
        row[f"{STRUCTURAL}_sop_instance_uid"] = volume.sop_instance_uid
        row[f"{STRUCTURAL}_file_path"] = volume.path
    cubes = [entry for entry in files if entry.kind == FLOW_CUBE]
    for entry in cubes[:1]:
        frames, height, width = map(str, _octa(entry).shape)
        row |= {"flow_cube_number_of_frames": frames, "flow_cube_height": height, "flow_cube_width": width}
        row["flow_cube_sop_instance_uid"] = _octa(entry).sop_instance_uid
        row["flow_cube_file_path"] = entry.path
    images = _images(files)
    for number, entry in enumerate(images, start=1):
        slab = slab_of(_octa(entry).image_type) or OTHER  # a header's own words may name somebody
        cells = (slab, _octa(entry).sop_instance_uid, entry.path)
        for part, text in zip(ENFACE_COLUMNS, cells, strict=True):
            row[f"associated_enface_{number}_{part}"] = text
    row["kinds"] = ", ".join([FLOW_CUBE] * bool(cubes) + [f"{EN_FACE} {len(images)}"] * bool(images))
    return row


def _images(files: Sequence[Entry]) -> list[Entry]:
    """The first en-face image of each slab from the vitreous down, then those of no known slab."""
    images = [(slab_of(_octa(entry).image_type), entry) for entry in files if entry.kind == EN_FACE]
    by_slab = dict(reversed(images))  # of a slab the first
    others = [entry for slab, entry in images if slab is None]
    return [*(by_slab[slab] for slab in SLABS if slab in by_slab), *others][: len(SLABS)]


def _surplus(files: Sequence[Entry]) -> int:
    """Files of a volume that its row does not name."""
    cubes = sum(entry.kind == FLOW_CUBE for entry in files)
    images = sum(entry.kind == EN_FACE for entry in files)
    return max(cubes - 1, 0) + images - len(_images(files))
