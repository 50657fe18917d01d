"""The fields of the lines of finetuning.predict, as the page that documents them says."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "embedding.md"
KINDS = ("labels", "surfaces", "slabs", "files", "classes", "layers")
SOMETIMES = {"fovea_option", "anonymous"}  # where the command line asked for it


def documented(*kinds: str) -> set[str]:
    """The fields that a line of these kinds has, whatever was asked."""
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", PAGE.read_text(), re.MULTILINE)
    of_kinds = {field: set(re.split(", ", cell)) for field, cell in rows if field and cell}
    lines = {field: some for field, some in of_kinds.items() if some <= {"all", *KINDS}}
    return {field for field, some in lines.items() if some & {"all", *kinds}} - SOMETIMES
