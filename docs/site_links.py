"""A hook of mkdocs.yml: links to files of the repository that are no pages become their names.

GitHub follows `../CONTRIBUTING.md`; the site has no such page. tests/test_readme.py checks that the file is
there.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)]*)?\)")


def plain_links(markdown: str, page: str) -> str:
    """The page, whose path is relative to docs/, with the links that leave docs/ as plain text."""

    def name(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[2]))
        return match[0] if path.startswith("docs/") else f"{match[1]} (`{path}` in the repository)"

    return _LINK.sub(name, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return plain_links(markdown, page.file.src_uri)
