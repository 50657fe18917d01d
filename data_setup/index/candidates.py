"""Which files and folders of a tree may be OCT volumes, from its listing.

In: every file below a folder with its size. Out: candidates, each a file or a folder of images, and the other
files counted by what they are. An export's XML claims its images; TIFF files of one page are the images of a
folder, those of several are a volume each.
"""

import fnmatch
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from data_setup.readers import heidelberg
from data_setup.readers.dicom import PEEK_BYTES
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.images import count_pages, differing_numbers, is_image
from data_setup.readers.makers import e2e, kinds
from data_setup.readers.open_record import kind_by_name
from data_setup.readers.sidecar import FOLDER_SIDECAR, sidecar_url
from utils.config.schema import StorageOptions
from utils.storage import join
from utils.storage.ranges import RangeFile

# what this command writes
TABLES = ("manifest.tsv", "participants.tsv", "left_out.tsv", "octa.tsv", "labels.parquet")
SURFACES_ENDING = ".surfaces.npz"  # what it writes of layers
IMAGES = "images"  # the kind of a folder
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar")
_DICOM_ENDINGS = (".dcm", ".dicom", ".dic", ".ima")


@dataclass(frozen=True)
class Candidate:
    """What may be a volume."""

    path: str  # below the root
    kind: str  # by its name
    size: int  # bytes of a file, 0 of a folder
    is_sure: bool = True  # False: a name without an ending, which may be no DICOM file
    files: str = ""  # of a folder with other images in it: the pattern of its only set of numbered ones
    person: str = ""  # by the paths of the tree
    place: str = ""  # the folder that this name is in


def find_candidates(
    root: str, sizes: Mapping[str, int], options: StorageOptions
) -> tuple[list[Candidate], Counter[str]]:
    """(candidates by path, number of the other files by kind); raises StorageError."""
    others: Counter[str] = Counter()
    files: dict[str, Candidate] = {}
    images: dict[str, list[str]] = defaultdict(list)  # folder -> names
    yaml: set[str] = set()
    for path, size in sizes.items():
        parts = PurePosixPath(path).parts
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            others["names that are no UTF-8"] += 1
        elif any(part.startswith(".") or part == "__MACOSX" for part in parts):
            others["hidden files"] += 1
        elif path.endswith(SURFACES_ENDING):
            others["surfaces of layers"] += 1
        elif path in TABLES or path.lower().endswith((".yaml", ".yml")) or parts[-1] == FOLDER_SIDECAR:
            others["tables and YAML"] += 1
            if path not in TABLES and parts[-1] != FOLDER_SIDECAR:
                yaml.add(path)
        elif path.endswith(".img") and f"{path[:-4]}.hdr" in sizes:
            others["NIfTI voxels with a .hdr beside them, which are read from one .nii"] += 1
        elif is_image(parts[-1]):
            images["/".join(parts[:-1])].append(parts[-1])
        elif kind := kind_by_name(path) or _dicom_by_name(parts[-1]):
            files[path] = Candidate(path, kind, size, kind_by_name(path) is not None)
        elif path.lower().endswith(_ARCHIVES):
            others["archives"] += 1
        else:
            others[f"*{PurePosixPath(path).suffix.lower()}"] += 1
    for one in [one for one in files.values() if one.kind == kinds.E2E]:
        for part in _parts(root, one, options):
            files[part] = replace(one, path=part)
            files.pop(one.path, None)
    claimed = _claimed_folders(root, files, options)
    for folder, names in images.items():
        if folder in claimed:
            continue
        for name in _volumes(root, folder, names, sizes, options):
            path = f"{folder}/{name}".lstrip("/")
            files[path] = Candidate(path, "TIFF", sizes[path])
            names.remove(name)
        if len(names) == 1:
            others["single images"] += 1
        elif names and folder:
            files[folder] = Candidate(folder, IMAGES, 0, files=pattern_of(names))
        elif names:
            others["images beside the folders"] += len(names)
    if unread := yaml - {sidecar_url(path) for path in files}:
        others["tables and YAML"] -= len(unread)
        others["YAML that nothing reads (a folder's is volume.yaml, a file's has its name)"] = len(unread)
    return [files[path] for path in sorted(files)], others


def _parts(root: str, one: Candidate, options: StorageOptions) -> list[str]:
    """The paths of the volumes in an E2E file of several; none for one, and where it cannot be read."""
    url = join(root, one.path)
    try:
        with RangeFile(url, one.size, options, PEEK_BYTES) as file:
            ids = e2e.volume_ids(file, url)
    except OCTReadError:  # met again, and named, when its header is read
        return []
    return [f"{one.path}#{volume}" for volume in ids] if len(ids) > 1 else []


def _dicom_by_name(name: str) -> str | None:
    """DICOM for the endings that it goes by, for no ending, and for one of digits, as in a UID."""
    suffix = PurePosixPath(name).suffix.lower().strip()
    return "DICOM" if suffix in ("", *_DICOM_ENDINGS) or suffix[1:].isdigit() else None


def _claimed_folders(root: str, files: Mapping[str, Candidate], options: StorageOptions) -> set[str]:
    """The folders of images that belong to the exports of the tree; another XML, of notes say, has none."""
    folders = set()
    for path in (path for path, one in files.items() if one.kind == "Heidelberg XML"):
        try:
            urls = heidelberg.image_urls(join(root, path), options)
        except OCTReadError as error:  # met again, and named, when its header is read
            urls = []
            if error.reason in (RejectReason.WRONG_KIND, RejectReason.CORRUPT_FILE):
                continue
        folders.add(path.rpartition("/")[0])
        folders |= {url.removeprefix(join(root)).lstrip("/").rpartition("/")[0] for url in urls[:1]}
    return folders


def pattern_of(names: Sequence[str]) -> str:
    """`files` of a folder: empty where all images are one set, or where several sets are numbered. A set are
    the names that differ in one number; `oct_1.png ... oct_49.png, slo.png` give oct_*.png.
    """
    sets = defaultdict(list)
    for name in names:
        sets[tuple(re.split(r"\d+", name))].append(name)
    numbered = [some for some in sets.values() if len(some) > 1]
    if len(sets) == 1 or len(numbered) != 1 or differing_numbers(numbered[0]) is None:
        return ""
    start = posixpath.commonprefix(numbered[0]).rstrip("0123456789")
    end = posixpath.commonprefix([name[::-1] for name in numbered[0]])[::-1].lstrip("0123456789")
    return f"{start}*{end}" if len(fnmatch.filter(names, f"{start}*{end}")) == len(numbered[0]) else ""


def _volumes(
    root: str, folder: str, names: list[str], sizes: Mapping[str, int], options: StorageOptions
) -> list[str]:
    """The TIFF files of a folder, where the first has several pages or is the only one; else none."""
    tiffs = sorted(name for name in names if kind_by_name(name) == "TIFF")
    if not tiffs or len(tiffs) == len(names) == 1:
        return tiffs
    path = f"{folder}/{tiffs[0]}".lstrip("/")
    url = join(root, path)
    try:
        with RangeFile(url, sizes[path], options, PEEK_BYTES) as file:
            return tiffs if count_pages(file, url) > 1 else []
    except OCTReadError:
        return []
