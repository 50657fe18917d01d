"""Whose eye a file is of, by its place in a tree: for files whose header does not say it.

In: a path below the root. Out: a name for the person, and the eye. Words for eyes and visits are no part of a
person's name: `1003/visit2/OD` is the right eye of 1003.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from data_setup.tables.text import SIDES
from utils.errors import UserError

_VISIT = re.compile(
    r"(visit|scan|vol|volume|oct|octs|series|exam|eye|eyes|img|image|images|bscan|bscans|export|baseline|bl|month"
    r"|week|year|day|ses|session|timepoint|fu|fup|followup|follow|up)\d*|v\d{0,2}|t\d{1,2}|\d{8}",
    re.IGNORECASE,
)
_PROTOCOL = re.compile(
    r"cube|macula|macular|raster|radial|star|line|lines|disc|onh|angio|octa|wide|widefield|hd|3d|\d+(x\d+)+|\d+mm",
    re.IGNORECASE,
)
# Folders of many people: a number in one of them is a person of its own.
_MANY = re.compile(
    r"(site|center|centre|clinic|group|cohort|study|batch|part|set|data|dataset|raw|train|val|test|nifti|nii|tif"
    r"|tiff|dicom|dcm|png|jpg|amd|dme|dr|cnv|drusen|normal|control|controls|healthy|patients|subjects|people)\d*",
    re.IGNORECASE,
)
_SHORT = re.compile(r"\d{1,3}")
_DATE = re.compile(
    r"(?<!\d)(19|20)\d\d[-_.]\d\d?[-_.]\d\d?(?!\d)|(?<!\d)\d\d?[-_.]\d\d?[-_.](19|20)\d\d(?!\d)"
)

# an eye right after a number, and two words for eyes that are common English in small letters
_GLUED = re.compile(r"(.*\d)(OD|OS|RE|LE|R|L|od|os|(?:Right|Left)(?=Eye|$))(?:Eye)?")
_SIDES = {"RE": "R", "LE": "L"}


def compile_pattern(text: str) -> re.Pattern[str]:
    """--person: a regular expression with one group; raises UserError."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UserError(f"--person: expected a regular expression, found {text!r}: {error}") from error
    if pattern.groups != 1:
        raise UserError(f"--person: expected one group, found {pattern.groups} in {text!r}")
    return pattern


def matched_person(pattern: re.Pattern[str], path: str) -> str:
    """What the group of --person is in a path; raises UserError where the pattern is not in it."""
    match = pattern.search(path)
    if not match or not match[1]:
        raise UserError(f"--person: expected {pattern.pattern!r} in every path, found none in {path}")
    return match[1]


def digest_of(patient_id: str) -> str:
    """A name that does not show the id, the same for the same id: p and 12 hex digits of BLAKE2b."""
    return "p" + hashlib.blake2b(patient_id.encode(), digest_size=6).hexdigest()


def person_of_path(path: str, by_folder: bool) -> tuple[str, str]:
    """(the nearest name that is more than an eye, a visit or a protocol, the folder that this name is in).

    A number of up to three digits is a name where no better one is above it: `1003/1.nii` and `1003/2/OD` are
    of 1003, `AMD/1.nii` and `data/1/OD` of 1. `by_folder`: the file's own name comes last.
    """
    *folders, last = PurePosixPath(path).parts
    names = [(_stem(last), folders), *((folders[i], folders[:i]) for i in reversed(range(len(folders))))]
    if by_folder:
        names = [*names[1:], names[0]]
    for name, above in names:
        words = _names(name)
        is_file = len(above) == len(folders)
        is_hidden = _are_short(words) and any(_hides(_names(folder), is_file) for folder in above)
        if words and not is_hidden and (by_folder or not all(map(_MANY.fullmatch, words))):
            return "_".join(words), "/".join(above)
    for name, above in names:  # visit_1, OD_1: better a number than all in one
        if numbers := [word for word in _words(name) if _SHORT.fullmatch(word)]:
            return "_".join(numbers), "/".join(above)
    name, above = next(((name, above) for name, above in names if _names(name)), (_stem(last), folders))
    return "_".join(_names(name)) or name, "/".join(above)


def _names(name: str) -> list[str]:
    """The words that may name a person: no eye, visit or protocol, and no short number right after one."""
    names, is_after = [], False
    for word in _words(name):
        if _side(word) or _VISIT.fullmatch(word) or _PROTOCOL.fullmatch(word):
            is_after = True
        elif not (is_after and _SHORT.fullmatch(word)):
            names.append(word)
            is_after = False
    return names


def _are_short(words: Sequence[str]) -> bool:
    return all(_SHORT.fullmatch(word) for word in words)


def _hides(words: Sequence[str], is_file: bool) -> bool:
    """Whether a folder of this name is the person of a short number below: a folder's only by an id."""
    own = [word for word in words if not _MANY.fullmatch(word) and not _SHORT.fullmatch(word)]
    return any(is_file or re.search(r"\d", word) for word in own)


def side_of_path(path: str) -> str | None:
    """L | R by the nearest word for an eye in the path; None without one, or with both in one name."""
    *folders, last = PurePosixPath(path).parts
    for name in (_stem(last), *reversed(folders)):
        sides = {side for word in _words(name) if (side := _side(word))}
        if sides:
            return sides.pop() if len(sides) == 1 else None
    return None


def _stem(name: str) -> str:
    """The name without an ending of letters: `eye.nii.gz` -> eye; a UID keeps its numbers."""
    return re.sub(r"(\.(?=[^.]*[A-Za-z])[A-Za-z0-9]{1,5}){1,2}$", "", name)


def _side(word: str) -> str | None:
    return _SIDES.get(word) or SIDES.get(word.lower())


def _words(name: str) -> list[str]:
    words: list[str] = []
    for word in filter(None, re.split(r"[\W_]+", _DATE.sub(" ", name))):
        glued = _GLUED.fullmatch(word)  # S01OD, 1001R, Patient1RightEye
        words += glued.groups() if glued else (word,)
    return words
