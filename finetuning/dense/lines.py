"""segments.jsonl: a line a scan, written as the scan is done, so that the same command goes on after a kill.

In: the folder of the files, what is common to all lines, the scans that are asked about. Out: the scans that
are still to do, and the file. A line is done when scan, format and precision are those of now and its file is
there. Lines of rejects are made again; those of other scans and formats stay; a half line does not count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_setup.manifest import Record
from data_setup.store.format import KEPT
from finetuning.embedding.volumes import version_of
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.log import LineFile

NAME = "segments.jsonl"
AT_ONCE = 20  # lines that a bucket gets together: an object cannot grow
NEEDED = ("path", "format", "version", "status", "head_sha256", "precision")


class SegmentLines:
    """The lines of a folder, those of earlier starts among them."""

    def __init__(
        self, out: str, form: str, records: Sequence[Record], common: dict[str, Any], options: StorageOptions
    ) -> None:
        """Raises UserError for lines of another head, or a file that is none of this command's."""
        self.url, self._form, self._common, self._options = storage.join(out, NAME), form, common, options
        self._version = {record.path: version_of(record.url, options) for record in records}
        earlier = self._earlier()
        self.done = {line["path"]: line for line in earlier if self._is_done(line)}
        others = [line for line in earlier if (line["path"], line["format"]) not in self._asked()]
        self._lines = [*others, *self.done.values()]
        self._file: LineFile | None = None
        if not storage.is_remote(self.url):
            self._write_all()
            self._file = LineFile(Path(self.url))

    def add(self, line: dict[str, Any]) -> None:
        """Write the line of a scan."""
        whole = line | self._common | {"version": self._version[line["path"]]}
        self._lines.append(whole)
        if self._file is not None:
            self._file.append(json.dumps(whole, sort_keys=True))
        elif len(self._lines) % AT_ONCE == 0:
            self._write_all()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._file is not None:
            self._file.close()
        else:
            self._write_all()

    def _asked(self) -> set[tuple[str, str]]:
        return {(path, self._form) for path in self._version}

    def _is_done(self, line: dict[str, Any]) -> bool:
        version = self._version.get(line["path"])
        return (
            bool(version)
            and (line["version"], line["format"]) == (version, self._form)
            and (line["status"], line["precision"]) == (KEPT, self._common["precision"])
            and storage.exists(line["file"], self._options)
        )

    def _write_all(self) -> None:
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in self._lines)
        storage.write_text(self.url, text, self._options)

    def _earlier(self) -> list[dict[str, Any]]:
        """The lines of earlier starts with this head."""
        if not storage.exists(self.url, self._options):
            return []
        lines = []
        for text in storage.read_text(self.url, self._options).splitlines(keepends=True):
            if not text.endswith("\n"):
                continue
            try:
                line = json.loads(text)
                of_head = {key: line[key] for key in NEEDED}["head_sha256"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.url}: expected lines of finetuning.segment, found another one ({error})"
                ) from error
            if of_head != self._common["head_sha256"]:
                raise UserError(
                    f"{self.url}: expected lines of the head with sha256 {self._common['head_sha256'][:12]}, "
                    f"found one of {str(of_head)[:12]}; give another --out"
                )
            lines.append(line)
        return lines
