"""Whose eye a file is of, by its place in a tree: for files whose header does not say it.

In: a path below the root. Out: a name for the person, and the eye. Words for eyes and visits are no part of a
person's name: `1003/visit2/OD` is the right eye of 1003.
"""

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import PurePosixPath

from data_setup.tables.text import SIDES
from utils.errors import UserError

_VISIT = re.compile(
    r"(?i)(visits?|scans?|vols?|volumes?|octs?|series|exams?|eyes?|oeil|œil|auge|ojo|occhio|olho|img|images?|bscans?|exports?|baseline|bl|month"
    r"|week|year|day|tag|woche|monat|jahr|jour|mois|ses|session|timepoint|fu|fup|followup|follow|up|horizontal|vertical|masks?|labels?"
    r"|annotations?|segs?|segmentations?|gt|groundtruth|localizer|slo|enface|besuch|visite|visita|termin"
    r"|untersuchung|suivi|pre|post|before|after|avant|apr[eè]s|vorher|nachher)\d*|v\d{0,2}|t\d{1,2}|(?-i:ch\d)|chan(nel)?\d{1,2}|(images|labels)t[rs]"
)
_PROTOCOL = re.compile(
    r"(?i)[sf]?d|ss|cube|macula|macular|raster|radial|star|line|lines|disc|onh|angio|octa|wide|widefield|hd|3d|\d+(x\d+)+|\d+mm"
    r"|makula|fovea|papill[ae]|optic|nerve|sehnerv"
)
_DEVICE = re.compile(
    r"(?i)heidelberg|spectralis|topcon|maestro2?|triton|zeiss|cirrus|optovue|avanti|nidek|canon"
)
# Folders of many people: a number in one of them is a person of its own.
_MANY = re.compile(
    r"(?i)(site|center|centre|clinic|group|cohort|study|batch|part|set|data|dataset|raw|train|val|test|nifti|nii|tif"
    r"|tiff|dicom|dcm|png|jpg|amd|dme|dr|cnv|drusen|glaucoma|uveitis|cataract|myopia|[bc]?rvo|cscr?|normal|control|controls|healthy|patients|subjects|people)\d*"
)
_SHORT = re.compile(r"\d{1,3}")
_UID = re.compile(r"[12](\.\d+){3,}")  # of a study or a series: several are one person's
_MONTH = (  # between two numbers
    r"(?:[-_.]\d\d?[-_.]"
    r"|[-_. ](?:jan|feb|m[aä]r|apr|avr|ma[iy]|ju[nli]|aug|ao|sep|o[ck]t|nov|de[cz])[^\W\d_]*[-_. ])"
)
_DATE = re.compile(  # with the time behind it
    rf"(?i)(?<!\d)(?:(?:19|20)\d\d{_MONTH}\d\d?|\d\d?{_MONTH}(?:19|20)\d\d)(?!\d)"
    r"(?:[-_ T]+(?:[0-2]\d[-_.:h][0-5]\d(?:[-_.:][0-5]\d)?|[0-2]\d[0-5]\d[0-5]\d)(?!\d))?"
)
_YEAR = re.compile(r"20(0[6-9]|[123]\d)(_(0?[1-9]|1[0-2]))?")  # of such an OCT, or a month of it
_TIME_POINT = re.compile(r"[mwdy](0|[1-9]\d?)", re.IGNORECASE)  # a month, week, day or year of a trial
_TIME_POINTS = {0, 1, 3, 4, 6, 8, 9, 12, 16, 18, 24, 36, 48, 52, 60, 72, 96}
_TIME = re.compile(r"([01]\d|2[0-3])([0-5]\d){2}")  # behind a date; 1003 is a person there

# `Patient1`: a name whatever is below it, but a longer number or another such name
_PATIENT = re.compile(r"(?i)(pat(ient)?|sub(j(ect)?)?|participant|case|proband|pid|mrn)[-_ ]*\d+")
_NOBODY = re.compile(r"horizontal|vertical|masks?|labels?|visit\d*|[vt]\d{1,2}", re.IGNORECASE)
_FILE_NUMBER = re.compile(r"(?i)(im|img|image|i|z|dcm|dicom|file|frame|slice)_?\d+")  # IM0001
_COPY = re.compile(  # what a file manager adds to the name of a copy
    r"(?i)^(kopie|cop(y|ie|ia))( \d+)?[ _-]+(von|of|de|di)[ _-]+|[ _-]+(kopie|cop(y|ie|ia))\b| \(\d+\)$"
)
_CHANNEL = re.compile(r"(.*\d.*)_(\d{4})")  # nnU-Net: case_001_0000, case_001_0001
_MOST_CHANNELS = 10

# an eye right after a number, or a short number right after an eye
_GLUED = re.compile(
    r"(.*\d)(OD|OS|RE|LE|R|L|od|os|(?:Right|Left)(?=Eye|$))(?:Eye)?"
    r"|(OD|OS|RE|LE|od|os|[Rr]ight|[Ll]eft)(\d{1,3})|([RL])(\d)"
)
_DOTTED = re.compile(r"(?<![A-Za-z])(?:(O)\. ?([DS])|([RL])\. ?(E))\b\.?", re.IGNORECASE)  # O.D., L. E.
_SIDES = {"RE": "R", "LE": "L", "OG": "L", "OI": "L"}  # common words, or initials, in small letters
_SIDES_ABROAD = {
    **dict.fromkeys(("gauche", "links", "linkes", "izquierdo", "izquierda", "sinistro", "esquerdo"), "L"),
    **dict.fromkeys(("droit", "droite", "rechts", "rechtes", "derecho", "derecha", "destro", "direito"), "R"),
}


_Names = list[tuple[str, list[str]]]  # a name of a path, and the folders above it


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
    if not match or not (match[1] or "").strip():
        raise UserError(f"--person: expected {pattern.pattern!r} in every path, found none in {path}")
    return unicodedata.normalize("NFC", match[1])


def digest_of(patient_id: str) -> str:
    """A name that does not show the id, the same for the same id: p and 12 hex digits of BLAKE2b."""
    return "p" + hashlib.blake2b(patient_id.encode(), digest_size=6).hexdigest()


def person_of_path(
    path: str, by_folder: bool, ids: Collection[str] = (), channels: Collection[str] = ()
) -> tuple[str, str]:
    """(the nearest name that is more than an eye, a visit or a protocol, the folder that this name is in).

    A number of up to three digits is a name where no better one is above it: `1003/1.nii` and `1003/2/OD` are
    of 1003, `AMD/1.nii` and `data/1/OD` of 1. `by_folder`: the file's own name comes last. `ids`: dates that
    are names here; `channels`: files whose last number is a channel.
    """
    names = _parts(path, by_folder, channels)
    study = _study(names)
    accepted = _accepted(names, by_folder and not study, ids)
    if accepted and not (study and by_folder and accepted[0][1] == path.rpartition("/")[0]):
        return accepted[0]
    if study:  # better than the file's name
        return study
    for name, above in names:  # visit_1, OD_1: better a number than all in one; better a date than an eye
        if numbers := [w for w in _words(name) if _SHORT.fullmatch(w) or _TIME.fullmatch(w) or _is_date(w)]:
            return "_".join(numbers), "/".join(above)
    *folders, last = PurePosixPath(path).parts
    name, above = next(((name, above) for name, above in names if _names(name)), (_stem(last), folders))
    return "_".join(_names(name)) or name, "/".join(above)


def people_of_paths(paths: Sequence[tuple[str, bool]]) -> list[tuple[str, str]]:
    """`person_of_path` of all (path, by_folder) of a tree, with what only many paths show.

    Eight digits are no date where their neighbours are none; the last numbers `_0000`, `_0001` of one stem
    are channels; a word that recurs below several numbered folders, such as Lens or Lens1, is no person.
    Nor are months (M0, M6, M12), the one word that all files have, and a word or a year above several UIDs.
    """
    neighbours: dict[str, set[str]] = defaultdict(set)
    stems: dict[str, set[str]] = defaultdict(set)
    for path, by_folder in paths:
        *folders, last = PurePosixPath(path).parts
        for place, name in enumerate([*folders, _stem(last)]):
            if re.fullmatch(r"\d{8}", name):
                neighbours["/".join(folders[:place])].add(name)
        if not by_folder and (match := _CHANNEL.fullmatch(_stem(last))) and int(match[2]) < 100:
            stems["/".join([*folders, match[1]])].add(match[2])
    ids = {n for names in neighbours.values() if 2 * sum(map(_is_date, names)) < len(names) for n in names}
    several = {stem for stem, some in stems.items() if "0000" in some and len(some) <= _MOST_CHANNELS}
    channels = {p for p, _ in paths if (m := _CHANNEL.fullmatch(_stem(p))) and m[1] in several}
    people = [person_of_path(path, by_folder, ids, channels) for path, by_folder in paths]
    short = {person for person, _ in people if re.fullmatch(r"\d{6}", person)}
    dates = short if all(_is_date(f"20{d}") or _is_date(f"{d[:4]}20{d[4:]}") for d in short) else set()
    places: dict[str, set[str]] = defaultdict(set)
    times: dict[str, set[int]] = defaultdict(set)
    above: dict[int, tuple[str, str]] = {}
    parents: list[tuple[str, str]] = []
    for nth, ((path, by_folder), (person, _)) in enumerate(zip(paths, people, strict=True)):
        nearest = _accepted(_parts(path, by_folder, channels), by_folder, ids)[:2]
        parents += nearest[1:]
        # Lens1 is no id beside 1001, P1 is one beside A2
        number = r"\d{3}" if re.search(r"\d", person) else r"\d"
        if time := _TIME_POINT.fullmatch(person):
            times[_word_of(person)].add(int(time[1]))
            number = r"\d"
        is_word = person in dates or not re.search(r"\d{3}", person)
        # no file that is numbered below its folder
        is_above = len(nearest) == 2 and not (by_folder and _FILE_NUMBER.fullmatch(nearest[1][0]))
        if is_above and is_word and re.search(number, nearest[1][0]):
            above[nth] = nearest[1]
    years = {nth for nth, (name, _) in above.items() if _YEAR.fullmatch(name)}
    if len({above[nth][0] for nth in years}) <= len({people[nth][0] for nth in years}):  # 2019/Anna
        above = {nth: one for nth, one in above.items() if nth not in years}
    for nth, one in above.items():
        places[_word_of(people[nth][0])].add("/".join(one[::-1]))
    is_of_files = all(one[1] == path.rpartition("/")[0] for (path, _), one in zip(paths, people, strict=True))
    names = {one for one, _ in people}
    is_one_word = is_of_files and len(names) == 1 and not re.search(r"\d", min(names))
    if is_one_word and len(parents) == len(people) and len({one for one, _ in parents}) > 1:
        return parents  # Anna/stack.nii, Berta/stack.nii
    recur = {word for word, folders in places.items() if len(folders) > 1}
    recur -= {word for word, some in times.items() if len(some) < 2 or not some <= _TIME_POINTS}
    if len(recur) <= len(set().union(*places.values())):
        people = [above[n] if n in above and _word_of(p[0]) in recur else p for n, p in enumerate(people)]
    studies = [_study(_parts(path, by_folder, channels)) for path, by_folder in paths]
    below: dict[tuple[str, str], dict[str, set[str]]] = {}  # (word or year, its place) -> folder -> UIDs
    for (person, top), (uid, folder) in ((p, s) for p, s in zip(people, studies, strict=True) if s):
        is_right_below = folder and top == folder.rpartition("/")[0]
        is_inside = _MANY.fullmatch(person) and folder.startswith(f"{top}/" if top else person)
        if is_inside or (is_right_below and re.fullmatch(r"\D+|(19|20)\d\d", person)):
            below.setdefault((person, top), defaultdict(set))[folder].add(uid)
    shared = {place for place, folders in below.items() if max(map(len, folders.values())) > 1}
    return [s if s and p in shared else p for p, s in zip(people, studies, strict=True)]


def _study(names: _Names) -> tuple[str, str] | None:
    """(person, folder) of the UID nearest to the root, which is a study's where a series is below it."""
    uids = [(name.replace(".", "_"), "/".join(above)) for name, above in names if _UID.fullmatch(name)]
    return min(uids, key=lambda uid: len(uid[1]), default=None)


def is_study_of(folder: str, person: str) -> bool:
    """Whether a person has the name of a study, and its folder perhaps a person's: Anna/OD/1.2.8.1."""
    nearest = next(filter(None, map(_names, reversed(PurePosixPath(folder).parts))), [])
    is_person = not all(map(_MANY.fullmatch, nearest))
    return is_person and _UID.fullmatch(person.replace("_", ".")) is not None


def _word_of(person: str) -> str:
    """Without the number at its end: Lens1 -> Lens."""
    return re.sub(r"\d+$", "", person)


def is_nobody(person: str) -> bool:
    """Whether a name says an eye, a direction, a visit or a mask, and no person."""
    words = _words(person)
    return bool(words) and all(_side(word) or _NOBODY.fullmatch(word) for word in words)


def readings(paths: Sequence[str], people: Sequence[str]) -> list[tuple[str, int]]:
    """(--person, its number of people) of how the paths were read, and of the best other ways, if any. The
    first is empty where no pattern says it.

    Best is the way with most people. Where one name is in several folders (DME/001, Normal/001) that is one
    for each; of names without numbers (Anna/Lens, Berta/Lens) the folder's comes too.
    """
    starts = ["^" + "[^/]+/" * level for level in range(max(path.count("/") for path in paths) + 1)]
    ends = (r"[^/]+?)(?:_0\d{3})?(?:\.[a-z]+)?\.\w+$", r"[^/_. -]+)[^/]*$")
    ways: dict[tuple[int, ...], tuple[str, list[str]]] = {}
    for pattern in (
        *(f"{start}({folder}[^/]+)(?:/|$)" for start in starts[:-1] for folder in ("", "[^/]+/")),
        *(f"(?:^|/)({folder}{end}" for folder in ("", "[^/]+/") for end in ends),
        *(rf"{start}([^/\d]*\d+)" for start in starts),  # Patient_003 of Patient_003_RE
    ):
        names = [(match[1] if (match := re.search(pattern, path)) else "") for path in paths]
        if all(names) and any(_stem(name) == name for name in names):  # no file name with its ending
            ways.setdefault(_grouping(names), (pattern, names))
    own = ways.pop(_grouping(people), ("", []))[0]
    number = re.compile(r".*\d.*")
    has_uids = any(_UID.fullmatch(person.replace("_", ".")) for person in people)
    is_numbered = not has_uids and _share(number, people) >= 0.5
    best: dict[tuple[bool, bool], tuple[str, int]] = {}  # whether the folder parts the same names; numbers
    for pattern, names in ways.values():
        lasts, count, of_folder = [n.rpartition("/")[2] for n in names], len(set(names)), pattern[0] == "^"
        is_parted = _grouping(lasts) == _grouping(people)
        is_one = is_parted or len(set(people)) == 1  # so each file may be a person
        has_number = _share(number, names) >= 0.5 and (of_folder or "/" not in names[0])
        key = is_parted, has_number and not is_parted
        if (
            1 < count < len(names) + is_one
            and (is_parted or has_number or (of_folder and not is_numbered))
            and all(_names(last) or _UID.fullmatch(last) for last in set(lasts))
            and not any(_side(word) for last in set(lasts) for word in _words(last))
            and _share(_MANY, lasts) < 0.5
            and count > best.get(key, ("", 0))[1]
        ):
            best[key] = pattern, count
    ways_else = sorted(best.items(), reverse=True)[: 1 if is_numbered else 2]
    return [(own, len(set(people))), *(way for _, way in ways_else)]


def _share(pattern: re.Pattern[str], names: Sequence[str]) -> float:
    """Of different names, those that match."""
    return sum(bool(pattern.fullmatch(name)) for name in set(names)) / len(set(names))


def _grouping(names: Sequence[str]) -> tuple[int, ...]:
    """The same for two lists that put the same items together."""
    first: dict[str, int] = {}
    return tuple(first.setdefault(name, len(first)) for name in names)


def _parts(path: str, by_folder: bool, channels: Collection[str]) -> _Names:
    """The names of a path, the nearest first; with `by_folder` the file's own last."""
    # macOS writes an accent as a separate letter
    *folders, last = PurePosixPath(unicodedata.normalize("NFC", path)).parts
    stem = _stem(last)[: -len("_0000")] if path in channels else _stem(last)
    names = [(stem, folders), *((folders[i], folders[:i]) for i in reversed(range(len(folders))))]
    return [*names[1:], names[0]] if by_folder else names


def _accepted(names: _Names, by_folder: bool, ids: Collection[str]) -> list[tuple[str, str]]:
    """(person, folder) of the names that may be one, the best first."""
    most = len(max((above for _, above in names), key=len))
    patient = next((n for n, (name, _) in enumerate(names) if _PATIENT.match(name)), len(names))
    accepted: list[tuple[str, str]] = []
    for nth, (name, above) in enumerate(names):
        words = _names(name, ids)
        if not words or (nth < patient < len(names) and not re.search(r"\d{4}", "_".join(words))):
            continue
        is_short = all(map(_SHORT.fullmatch, words))
        is_file = len(above) == most
        is_hidden = is_short and any(_hides(_names(f, ids), is_file) for f in above)
        is_hidden |= (
            is_short and is_file and any(_DEVICE.fullmatch(word) for f in above for word in _words(f))
        )
        if not is_hidden and (by_folder or not all(map(_MANY.fullmatch, words))):
            accepted.append(("_".join(words), "/".join(above)))
    no_id = (_FILE_NUMBER, _YEAR)
    ids_of = [
        one for one, _ in accepted if re.search(r"\d{3}", one) and not any(p.fullmatch(one) for p in no_id)
    ]
    return sorted(accepted, key=lambda one: bool(ids_of and _MANY.fullmatch(one[0])))  # AMD/1001.dcm


def _is_date(word: str) -> bool:
    """20240131 or 31012024, of the years 1900 to 2099."""
    for order, year in (("%Y%m%d", word[:4]), ("%d%m%Y", word[4:])):
        if len(word) == 8 and word.isdecimal() and 1900 <= int(year) < 2100:
            with suppress(ValueError):
                datetime.strptime(word, order)
                return True
    return False


@lru_cache(maxsize=2**16)
def _names_of(name: str) -> tuple[tuple[str, bool], ...]:
    """The words that may name a person, and whether each is a date: no eye, visit or protocol, and no short
    number right after one.
    """
    names, is_after, is_dated = [], False, False
    for word in [] if _UID.fullmatch(name) else _words(name):
        is_date = _is_date(word)
        if _side(word) or _VISIT.fullmatch(word) or _PROTOCOL.fullmatch(word):
            is_after = True
        elif _DEVICE.fullmatch(word):
            continue
        elif not (is_after and _SHORT.fullmatch(word)) and not (is_dated and _TIME.fullmatch(word)):
            names.append((word, is_date))
            is_after = is_date
        is_dated = is_date
    return tuple(names)


def _names(name: str, ids: Collection[str] = ()) -> list[str]:
    """The words that may name a person; a date is none but where it is one of `ids`."""
    return [word for word, is_date in _names_of(name) if not is_date or word in ids]


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
    """The name without an ending of letters: eye.nii.gz -> eye; a UID keeps its numbers, O.D.tif the eye."""
    return re.sub(r"(\.(?=[^.]*[A-Za-z])[A-Za-z0-9]{2,5})?\.(?=[^.]*[A-Za-z])[A-Za-z0-9]{1,5}$", "", name)


def _side(word: str) -> str | None:
    return _SIDES.get(word) or SIDES.get(word.lower()) or _SIDES_ABROAD.get(word.lower())


def _words(name: str) -> list[str]:
    words: list[str] = []
    name = _DOTTED.sub(lambda match: f" {''.join(filter(None, match.groups())).upper()} ", name)
    for word in filter(None, re.split(r"[\W_]+", _DATE.sub(" ", _COPY.sub(" ", name)))):
        glued = _GLUED.fullmatch(word)  # S01OD, 1001R, Patient1RightEye, OD1
        words += filter(None, glued.groups()) if glued else (word,)
    return words
