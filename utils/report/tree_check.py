"""The check of the tree (check_report.json of `prepare --check-only`) as tables of the report.

In: that file's dictionary. Out: a sentence, and tables for the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from utils.report.tables import file_digest
from utils.tables import Table

NAMED = 20  # files of a kind that the page names; check_report.json has all
_COLUMNS = {  # of the files by protocol and by device: key of the report -> title
    "by_protocol": {
        "shape": "D x H x W",
        "spacing_um": "spacing, um",
        "spacing_source": "spacing from",
        "laterality": "eye",
    },
    "by_device": {"transfer_syntax": "transfer syntax", "laterality": "eye"},
}
_KINDS = {
    "missing": "in the manifest, but there is no such file",
    "orphans": "a file in no manifest row",
    "doubles": "left out by prepare: an earlier row has the SOPInstanceUID",
    "unused_missing": "of a manifest row that is not used, but there is no such file",
    "laterality_conflicts": "another eye in the header than in the manifest",
}
_DUPLICATES = {"uid": "the same SOPInstanceUID", "pixels": "the same pixel data"}


def sentence(report: Mapping[str, Any]) -> str:
    """The verdict and what it rests on."""
    read = report["bytes"]
    share = "" if read["share"] is None else f" ({read['share']:.2%})"
    verdict = "Nothing wrong was found" if report["is_fine"] else "Something is wrong"
    unread = f" {report['unread']} files could not be read." if report["unread"] else ""
    return (
        f"{verdict} in {report['records']} files, of which {read['fetched']:,} of {read['stored']:,} bytes"
        f"{share} were fetched; {report['ok']} are fine by their headers.{unread}"
    )


def tables(report: Mapping[str, Any]) -> list[Table]:
    """What is wrong by kind and by name, then the files by protocol and by device."""
    counts = [[f"unreadable: {reason}", str(n)] for reason, n in report["unreadable"].items()]
    counts += [[meaning, str(len(report[kind]))] for kind, meaning in _KINDS.items() if kind in report]
    looked_for = report["pixel_hash"] != "none"
    for kind, meaning in _DUPLICATES.items():
        is_known = kind == "uid" or looked_for
        counts.append(
            [meaning, f"{len(report['duplicates'][kind])} groups" if is_known else "not looked for"]
        )
    counts += [[f"no DICOM, not opened: {kind}", str(n)] for kind, n in report["not_opened"].items()]
    counts += [[f"manifest rows not used: {reason}", str(n)] for reason, n in report["skipped"].items()]
    note = f"Only decoding shows, and only prepare finds: {'; '.join(report['full_pass_only'])}."
    shown = [Table("what was found", ("", "files"), counts, note)]
    named = _named(report)
    if named:
        more = len(named) - NAMED
        rest = "python -m utils.report RUN --file DIGEST tells the path."
        rest += f" {more} more are in check_report.json." if more > 0 else ""
        shown.append(Table("files to look at", ("what", "found", "file"), named[:NAMED], rest, is_text=True))
    for key, columns in _COLUMNS.items():
        rows = [_row(name, part, columns) for name, part in report[key].items()]
        header = ("", "files", "ok", *columns.values())
        shown.append(Table(key.replace("_", " "), header, rows, is_text=True))
    return shown


def _named(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [[p["status"], _without_name(p["message"], p["path"]), p["path"]] for p in report["problems"]]
    for kind in ("orphans", "laterality_conflicts"):
        rows += [[kind.replace("_", " ").rstrip("s"), _KINDS[kind], path] for path in report[kind]]
    rows = [[what, meaning, file_digest(path)] for what, meaning, path in rows]
    for kind, meaning in _DUPLICATES.items():
        groups = report["duplicates"][kind]
        rows += [["duplicates", meaning, ", ".join(map(file_digest, group))] for group in groups]
    return rows


def _without_name(message: str, path: str) -> str:
    """What was wrong with a file, where an error's text repeats its name."""
    for name in (path, path.rpartition("/")[2]):
        message = message.replace(name, file_digest(path))
    return message


def _row(name: str, part: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    cells = [_counted(part[column]) for column in columns]
    return [name, str(part["files"]), str(part["status"].get("ok", 0)), *cells]


def _counted(numbers: Mapping[str, int]) -> str:
    """The values with how often; one value alone without, the rarest of many left out."""
    values = [value.replace(" x ", "\u00a0x\u00a0") for value in numbers]  # never broken
    if len(numbers) == 1:
        return values[0]
    words = [f"{value} ({n})" for value, n in list(zip(values, numbers.values(), strict=True))[:3]]
    return ", ".join(words + ([f"{len(numbers) - 3} more"] if len(numbers) > 3 else [])) or "-"
