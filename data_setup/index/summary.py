"""What the index says in words: what was seen, what is missing and where to write it, what comes next."""

import posixpath
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import glob

from data_setup.index.candidates import IMAGES
from data_setup.index.look import HEADED, UNKNOWN, WITHOUT_YAML, Entry
from data_setup.index.people import is_study_of
from data_setup.index.sets.facts import Plug
from data_setup.index.write import Written
from data_setup.readers.faults import RejectReason
from data_setup.readers.makers import kinds
from data_setup.readers.sidecar import FOLDER_SIDECAR
from data_setup.store.summary import by_frequency, next_step, words
from data_setup.tables.splits import FEW_PEOPLE, seeded_split, shortfalls
from utils.config.schema import StorageOptions
from utils.storage import absolute, join

NAMES = 3  # examples of a line
# for a machine with an accelerator, and for one without
CONFIGS = {True: "configs/pretrain_oct_surroundings.yaml", False: "configs/smoke_test.yaml"}
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_SPACING, _AXES, _SHAPE = RejectReason.MISSING_SPACING, RejectReason.UNKNOWN_AXES, RejectReason.MISSING_SHAPE
# what may be missing -> (of which volumes, keys of a YAML that say it, columns of the manifest)
_NEEDS: dict[str, tuple[Callable[[Entry], bool], str, str]] = {
    "no spacing": (lambda e: e.status == _SPACING, "spacing_mm: [D, H, W]", "spacing_mm"),
    "axes unknown": (lambda e: e.status == _AXES, "axes: [W, H, D]", ""),
    "no shape": (lambda e: e.status == _SHAPE, "shape: [D, H, W]", "number_of_frames, height, width"),
    "device unknown": (lambda e: e.device == UNKNOWN, "device: NAME", "device"),
    "eye unknown": (lambda e: not e.laterality, "", "laterality"),
    "order of B-scans unknown": (
        lambda e: e.d_order == UNKNOWN,
        "d_order: superior_to_inferior, inferior_to_superior or unknown (look at one)",
        "d_order",
    ),
}


def summarise(
    root: str,
    out: str,
    entries: Sequence[Entry],
    others: Counter[str],
    written: Written,
    options: StorageOptions,
    octa: Sequence[str],
    plug: Plug | None,
    labels: Sequence[str] = (),
) -> list[str]:
    """The lines of the summary; `octa`, `labels`: of octa.tsv and --labels; `plug`: the set that it is."""
    rows = [entry for entry in entries if entry.is_row]
    lines = [
        f"{root}: {_count(len(rows), 'volume')} of {_count(len({e.person_id for e in rows}), 'person')}",
        f"kinds       {_words(e.kind for e in rows)}",
        f"devices     {_words(e.device for e in rows)}",
        f"protocols   {_words(e.protocol for e in rows)}",
        f"eyes        {_words(e.laterality or UNKNOWN for e in rows)}",
        f"order of D  {_words(e.d_order for e in rows)}",
        *_people(rows, written),
        *labels,
        *(_set(plug, rows) if plug else []),
        *_parts(rows),
        *_unused_labels(rows),
        *_missing(root, rows, written.filled),
        *_left_out([entry for entry in entries if not entry.is_row]),
    ]
    if others:
        lines.append("no OCT: " + words(by_frequency(others.elements())))
    if others["archives"]:
        lines.append("  archives are unpacked by: python -m data_setup.expand --src URL --dst URL")
    return [*lines, *_tables(written), *octa, *_next(root, out, rows, options, plug)]


def _people(rows: Sequence[Entry], written: Written) -> list[str]:
    """Where the names of people come from, with examples where it is a path."""
    texts = {
        "header": "of the headers (digests of PatientID, unless --keep-ids)",
        "folder": "of other headers below the same name, for files without PatientID",
        "path": "of the paths",
        "--person": "of --person",
        "set": "of the set",
    }
    lines = []
    for source, text in texts.items():
        part = [entry for entry in rows if entry.person_source == source]
        if not part:
            continue
        line = f"people      {len({e.person_id for e in part})} {text}"
        if source != "header":
            line += ": " + ", ".join(f"{e.path} -> {e.person_id}" for e in part[:NAMES])
        lines.append(line)
    places: dict[str, set[str]] = {}
    for entry in (e for e in rows if e.person_source == "path"):
        places.setdefault(entry.person_id, set()).add(entry.place)
    if some := _several(places, "in"):
        lines.append(f"  {len(some)} names are in several folders, each taken for one person: {_some(some)}")
    lines += _doubts([entry for entry in rows if entry.person_source != "set"])
    if places:
        lines.append("  is a name no person, or one person several? give --person PATTERN")
    if written.dealt:
        lines.append(
            "  splits: none of the owners; recommended_split of participants.tsv gives a fifth of the people "
            "each to val and test"
        )
    elif (count := len({e.person_id for e in rows})) < FEW_PEOPLE and not any(e.split for e in rows):
        lines.append(
            f"  {count} people are few: more of them later may move some to another split, unless "
            "recommended_split of participants.tsv says where each is"
        )
    if not written.dealt:
        people = {entry.person_id for entry in rows}
        splits = written.splits if any(written.splits.values()) else seeded_split(dict.fromkeys(people), 0)
        few = shortfalls((e.person_id, splits.get(e.person_id, "")) for e in rows)
        lines += [f"  {line}" for line in few]
    return lines


def _doubts(rows: Sequence[Entry]) -> list[str]:
    """Where one person may be several, or several one: a split would then share a person, or labels mix."""
    in_folder: dict[str, set[str]] = {}
    tops: dict[str, set[str]] = {}
    spellings: dict[str, set[str]] = {}
    scans: dict[str, dict[str, str]] = {}  # a UID, which no line names -> person -> path
    for entry in rows:
        scans.setdefault(entry.sop_instance_uid or entry.path, {}).setdefault(entry.person_id, entry.path)
        in_folder.setdefault(posixpath.dirname(entry.path) or ".", set()).add(entry.person_id)
        is_study = entry.person_source == "path" and is_study_of(entry.place, entry.person_id)
        place = entry.place if is_study else posixpath.join(entry.place, entry.path_name)
        in_folder.setdefault(place, set()).add(entry.person_id)
        if entry.person_source == "header":
            top = entry.path.partition("/")[0] if "/" in entry.path else "."
            tops.setdefault(entry.person_id, set()).add(top)
            spellings.setdefault(entry.id_key, set()).add(entry.person_id)
    alike = [" and ".join(sorted(ids)) for _, ids in sorted(spellings.items()) if len(ids) > 1]
    doubles = [" and ".join(f"{path} of {p}" for p, path in s.items()) for s in scans.values() if len(s) > 1]
    doubts = {
        "folders are of several people; are they? {}": _several(in_folder, "of"),
        "ids of headers are in several top folders, each taken for one person: {}": _several(tops, "in"),
        "ids of headers differ only in case or blanks, each taken for another person: {}": alike,
        "scans are of two people by one SOPInstanceUID: {}; of the same voxels prepare takes the first: "
        "correct person_id, or take the other file away": doubles,
    }
    return [f"  warning: {len(some)} {text.format(_some(some))}" for text, some in doubts.items() if some]


def _several(sets: Mapping[str, set[str]], word: str) -> list[str]:
    """The keys with more than one value, each with its first two."""
    return [f"{key} {word} {' and '.join(sorted(s)[:2])}" for key, s in sorted(sets.items()) if len(s) > 1]


def _set(plug: Plug, rows: Sequence[Entry]) -> list[str]:
    """What a public set has besides, and what nobody verified and the tables now rely on."""
    lines = [
        f"set         {plug.title}",
        f"shapes      {_words(' x '.join(map(str, e.shape)) for e in rows if e.shape)} (D x H x W)",
        f"splits      {_words(e.split or 'none of the owners' for e in rows)}",
        f"labels      {sum(bool(e.label_volume) for e in rows)} volumes with voxels, "
        f"{sum(bool(e.label_surfaces) for e in rows)} with surfaces",
    ]
    if any("study_group" in entry.facts for entry in rows):
        lines.append(f"classes     {_words(e.facts.get('study_group') or 'no class' for e in rows)}")
    used = ["layout", "orientation", "labels"] + ["spacing"] * any(e.spacing_source == "set" for e in rows)
    if doubtful := [name for name in used if plug.facts[name].mark == "n/v"]:
        lines.append(f"not verified, look before you rely on it: {', '.join(doubtful)} (--sets {plug.name})")
    return lines


def _parts(rows: Sequence[Entry]) -> list[str]:
    """The folders of which only a part of the images are taken for B-scans; the files with text in them."""
    part = [f"{entry.path}/{entry.files}" for entry in rows if entry.files]
    lines = [f"taken of folders with other images: {len(part)} ({_some(part)}): column files"] if part else []
    if texts := [entry for entry in rows if entry.has_text]:
        stays = "their text goes into the store: docs/reference/privacy.md"
        lines.append(f"warning: BurnedInAnnotation is YES: {len(texts)} ({_names(texts)}): {stays}")
    return lines


def _unused_labels(rows: Sequence[Entry]) -> list[str]:
    """The files whose labels are not used, with the reason of the first."""
    part = [entry for entry in rows if entry.without_labels]
    return [f"labels not used: {len(part)} ({_names(part)}): {part[0].without_labels}"] if part else []


def _missing(root: str, rows: Sequence[Entry], filled: Mapping[str, set[str]]) -> list[str]:
    """What neither a file nor the manifest says, and where to write it; `filled`: columns of each path."""
    lines, places_of = [], set()  # the groups whose places a line above has
    for name, (lacks, yaml, column) in _NEEDS.items():
        asked = set(column.split(", ")) if column else set()
        part = [e for e in rows if lacks(e) and not (asked and asked <= filled.get(e.path, set()))]
        if not part:
            continue
        opened = [e for e in part if e.kind not in WITHOUT_YAML]  # a YAML counts for these
        # One YAML for two devices would give one of them the other's spacing: each has its own line.
        alike = _alike(opened) if yaml else []
        text = f"missing: {name}: {len(part)} ({_names(part)})"
        column_of = [f"the column {column} of manifest.tsv"] if column else []
        if len(alike) < 2:
            places = [f"`{yaml}` into {_yaml_for(root, opened, opened)}"] if alike else []
            lines.append(f"{text}: write {', or '.join([*places, *column_of])}")
        elif (paths := tuple(e.path for e in opened)) in places_of:
            lines.append(f"{text}: write {', or '.join([f'`{yaml}` into the same files', *column_of])}")
        else:
            places_of.add(paths)
            lines.append(f"{text}: write{f' {column_of[0]}, or' if column_of else ''} for each group")
            for group in alike:
                what = f"{group[0].device}, {_size(group[0])}: {len(group)} ({_names(group)})"
                lines.append(f"  {what}: write `{yaml}` into {_yaml_for(root, group, opened)}")
        lines += [f"  {e.path}: {e.message}" for e in part[:1] if e.kind in kinds.KINDS and e.message]
    until = "prepare rejects them until the YAML or the column laterality of manifest.tsv is changed"
    for is_headed, text, then in (
        (True, "the path names the other eye", "the header counts"),
        (False, "a YAML names the other eye than the path", until),
    ):
        if part := [e for e in rows if e.other_side and (e.kind in HEADED) == is_headed]:
            lines.append(f"contradiction: {text}: {len(part)} ({_names(part)}); {then}")
    return lines


def _alike(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries by what one line of a YAML may be true of: a device, a kind and a size of B-scans."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device, entry.kind, entry.shape and entry.shape[1:]), []).append(entry)
    return list(groups.values())


def _size(entry: Entry) -> str:
    return f"{entry.kind} of {entry.shape[1]} x {entry.shape[2]}" if entry.shape else entry.kind


def _yaml_for(root: str, group: Sequence[Entry], entries: Sequence[Entry]) -> str:
    """The YAML above a group, where none of the other `entries` lies below it too; else one for each."""
    place = _yaml_above(group)
    top = place.removesuffix(FOLDER_SIDECAR)
    inside = [entry for entry in entries if f"{entry.path}/".startswith(top)]
    if len(inside) == len(group):
        return f"{join(root, place)}, once for all below it"
    return f"a YAML beside each of them (others below {join(root, top) if top else root} are of another kind)"


def _yaml_above(entries: Sequence[Entry]) -> str:
    """The volume.yaml of the deepest folder that is above all of them."""
    folders = [e.path if e.kind == IMAGES else posixpath.dirname(e.path) for e in entries]
    return posixpath.join(posixpath.commonpath(folders) if all(folders) else "", FOLDER_SIDECAR)


def _left_out(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for (kind, status), count in sorted(Counter((e.kind, e.status) for e in entries).items()):
        part = [e for e in entries if (e.kind, e.status) == (kind, status)]
        lines.append(f"left out: {kind} {count}: {status} ({_names(part)}): {part[0].message}")
        lines.append(f"  next: {next_step(status)}")
    return lines


def _tables(written: Written) -> list[str]:
    lines = [f"manifest.tsv: {written.added} rows added, {written.kept} kept as they were"]
    for text, some in (
        ("cells are not what the files say, and stay", written.differing),
        ("rows follow their file to another path", written.moved),
        ("rows may be another path's, and stay", written.unsure),
    ):
        lines += [f"  {len(some)} {text}: {_some(some)}"] if some else []
    if written.gone:
        what = "are taken out" if written.forgot else "stay"
        text = f"  {len(written.gone)} rows name what is no longer there, and {what}: {_some(written.gone)}"
        lines.append(text if written.forgot else f"{text}; --forget-missing takes them out")
    if written.without_split:
        what = "people added without recommended_split: fill it in, or they are not used"
        lines.append(f"participants.tsv: {written.without_split} {what}")
    if written.stale:
        why = "no file has a thickness grid; what is there is older: remove it"
        lines.append(f"not written: {written.stale}: {why}")
    return [*lines, *(f"written: {url}" for url in written.urls)]


def _next(
    root: str, out: str, rows: Sequence[Entry], options: StorageOptions, plug: Plug | None
) -> list[str]:
    """The next command; of a set also the training of each task that its labels allow."""
    places = [f"data.gcs_root={root}", f"data.manifest_path={join(out, 'manifest.tsv')}"]
    if out != root:
        places.append(f"data.participants_path={join(out, 'participants.tsv')}")
    if options.endpoint_url:
        places.append(f"data.storage_options.endpoint_url={options.endpoint_url}")
    place = absolute(out)
    is_bucket = "://" in place and place.count("/") == 2
    places.append(f"data.store={join(place, 'store') if is_bucket else f'{place}_store'}")
    has_accelerator = any(map(glob, ACCELERATORS))
    command = ["python", "-m", "data_setup.prepare", "--config", CONFIGS[has_accelerator], *places]
    lines = [f"next: {shlex.join(command)}"]
    if not has_accelerator:
        lines.insert(0, f"no accelerator is seen here, so a small grid is next; for one: {CONFIGS[True]}")
    if plug and any(entry.label_volume or entry.label_surfaces for entry in rows):
        lines.append(f"then: {shlex.join([*command, '--labels'])}")
    for task in plug.tasks if plug else ():
        changes = ["model.checkpoint=RUN", *places, *(text.replace("{out}", out) for text in task.overrides)]
        command = ["python", "-m", "finetuning.train", "--config", task.config, *changes]
        lines.append(f"then: {shlex.join(command)}")
    return lines


def _count(number: int, noun: str) -> str:
    plural = {"person": "people"}.get(noun, noun + "s")
    return f"{number} {noun if number == 1 else plural}"


def _words(values: Iterable[str]) -> str:
    return words(by_frequency(values))


def _names(entries: Sequence[Entry]) -> str:
    return _some([entry.path for entry in entries])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES]) + (", ..." if len(names) > NAMES else "")
