"""Whose eye a file is of, by its place in a tree: for files whose header does not say it.

In: a path below the root. Out: a name for the person, and the eye. Words for eyes and visits are no part of a
person's name: `1003/visit2/OD` is the right eye of 1003.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath

from data_setup.tables import SIDES
from utils.errors import UserError

_VISIT = re.compile(
    r"(v|visit|scan|vol|volume|oct|octs|series|exam|eye|img|image|images|bscan|bscans|export|baseline|month|week"
    r"|year|day)\d*|followup|\d{8}",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"(?<!\d)(19|20)\d\d[-_.]\d\d?[-_.]\d\d?(?!\d)|(?<!\d)\d\d?[-_.]\d\d?[-_.](19|20)\d\d(?!\d)"
)


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
    """(the nearest name that is more than an eye or a visit, the folder that this name is in).

    `by_folder`: the file's own name comes last.
    """
    *folders, last = PurePosixPath(path).parts
    names = [(_stem(last), folders), *((folders[i], folders[:i]) for i in reversed(range(len(folders))))]
    if by_folder:
        names = [*names[1:], names[0]]
    for name, above in names:
        words = [w for w in _words(name) if w.lower() not in SIDES and not _VISIT.fullmatch(w)]
        if words:
            return "_".join(words), "/".join(above)
    return _stem(last), "/".join(folders)


def side_of_path(path: str) -> str | None:
    """L | R by the nearest word for an eye in the path; None without one, or with both in one name."""
    *folders, last = PurePosixPath(path).parts
    for name in (_stem(last), *reversed(folders)):
        sides = {SIDES[word.lower()] for word in _words(name) if word.lower() in SIDES}
        if sides:
            return sides.pop() if len(sides) == 1 else None
    return None


def _stem(name: str) -> str:
    """The name without an ending of letters: `eye.nii.gz` -> eye; a UID keeps its numbers."""
    return re.sub(r"(\.(?=[^.]*[A-Za-z])[A-Za-z0-9]{1,5}){1,2}$", "", name)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", _DATE.sub(" ", name)) if word]
