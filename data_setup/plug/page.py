"""The plugs as text: `list`, and the table of docs/guides/public-data.md, which a test keeps in step.

python -m data_setup.plug.page
"""

from __future__ import annotations

from collections.abc import Sequence

from data_setup.plug.facts import MARKS, Plug
from data_setup.plug.sets import NO_VOLUMES, PLUGS
from utils.help_pages import PeopleParser

_WIDTH = 11


def overview() -> list[str]:
    """A line for each set, those of single images with the reason why they are none, and the marks."""
    width = max(map(len, [*PLUGS, *NO_VOLUMES])) + 2
    lines = [f"{plug.name:<{width}}{plug.title}: {plug.content}; {plug.licence}" for plug in PLUGS.values()]
    lines += ["", "no volumes, so no plug:"]
    lines += [f"{name:<{width}}{reason}" for name, reason in NO_VOLUMES.items()]
    marks = "; ".join(f"[{mark}] {meaning}" for mark, meaning in MARKS.items())
    return [*lines, "", f"marks: {marks}"]


def describe(plug: Plug) -> list[str]:
    """Everything about one set."""
    facts = ("content", "licence", "access", "citation", "spacing", "orientation", "labels", "splits")
    lines = [f"{plug.name}: {plug.title}"]
    lines += [f"{name:<{_WIDTH}} {getattr(plug, name)}" for name in facts]
    if plug.classes:
        lines.append(f"{'classes':<{_WIDTH}} {', '.join(f'{k} -> {v}' for k, v in plug.classes.items())}")
    if plug.label_classes:
        values = ", ".join(f"{k} {v}" for k, v in plug.label_classes.items())
        lines.append(f"{'voxels':<{_WIDTH}} 0 background, {values}")
    if plug.surfaces:
        lines.append(f"{'surfaces':<{_WIDTH}} {', '.join(plug.surfaces)}")
    lines += [f"{'task':<{_WIDTH}} {' '.join((task.config, *task.overrides))}" for task in plug.tasks]
    return [*lines, f"tree [{plug.layout.mark}]:", *(f"    {line}" for line in plug.layout.text.splitlines())]


def markdown() -> str:
    """The table of the page: a row for each set."""
    columns = (
        "name",
        "data",
        "content",
        "labels",
        "splits",
        "licence, access",
        "spacing",
        "order of B-scans",
    )
    rows = [columns, ("---",) * len(columns)]
    for plug in PLUGS.values():
        licence = f"{plug.licence}; {plug.access}"
        cells = (plug.content, plug.labels, plug.splits, licence, plug.spacing, plug.orientation)
        rows.append((f"`{plug.name}`", plug.title, *map(str, cells)))
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page, or what it is for."""
    PeopleParser("data_setup.plug.page", __doc__ or "").parse_args(argv)
    print(markdown(), end="")


if __name__ == "__main__":
    main()
