"""eyepy and construct, the optional libraries: where they are missing, a reject with the pip line.

eyepy (MIT) knows the fields of Heidelberg's files. Its releases rename what it holds, so the pip line names
the one that was tried.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import reading

PIP_LINE = "pip install eyepy==0.21.0"


def eyepy_module(name: str, url: str) -> Any:
    """A module of eyepy, such as eyepy.io.he.vol_reader; raises OCTReadError missing_library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        expected = f"eyepy, which reads this kind: {PIP_LINE}"
        raise OCTReadError(url, RejectReason.MISSING_LIBRARY, expected, f"no {error.name}") from None


@contextmanager
def parsing(url: str, expected: str) -> Iterator[None]:
    """Turn what eyepy and construct raise about the file's bytes into corrupt_file."""
    import construct

    try:
        with reading(url, RejectReason.CORRUPT_FILE, expected):
            yield
    except construct.ConstructError as error:  # its text quotes bytes of the file
        raise OCTReadError(url, RejectReason.CORRUPT_FILE, expected, type(error).__name__) from None
