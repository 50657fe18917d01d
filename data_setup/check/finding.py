"""What the check knows about one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

_K = TypeVar("_K")

OK, NOT_OPENED = "ok", "not_opened"  # NOT_OPENED: of another kind than DICOM, so the header is not read


@dataclass(frozen=True)
class Finding:
    """What the first bytes of a file say; `status` is OK, NOT_OPENED, UNREAD or a RejectReason."""

    path: str
    url: str
    is_orphan: bool
    device: str | None
    protocol: str | None
    manifest_laterality: str | None
    is_double: bool = False
    size: int = 0
    status: str = OK
    message: str | None = None
    kind: str = "DICOM"
    shape: tuple[int, int, int] | None = None
    spacing_mm: tuple[float, float, float] | None = None
    spacing_source: str | None = None
    orientation_source: str | None = None
    laterality: str | None = None  # L | R | unknown; of the header
    transfer_syntax: str | None = None
    sop_instance_uid: str | None = None
    pixel_start: int | None = None  # bytes before the value of the pixel data
    sample: str | None = None  # digest of bytes from the middle of the pixel data
    pixel_hash: str | None = None  # digest of all bytes from pixel_start on
    fetched: dict[str, int] = field(default_factory=dict)  # bytes by purpose: header, sample, pixels
    requests: int = 0

    @property
    def pixel_bytes(self) -> int:
        return self.size - (self.pixel_start or 0)


def grouped(findings: Iterable[Finding], key: Callable[[Finding], _K]) -> dict[_K, list[Finding]]:
    """Key -> the findings that have it."""
    groups: dict[_K, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(key(finding), []).append(finding)
    return groups
