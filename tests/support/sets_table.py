"""The table of docs/guides/importers.md, printed by `python -m tests.support.sets_table`."""

from __future__ import annotations

from data_setup.index.sets import PLUGS

COLUMNS = ("name", "data", "labels", "licence, access")


def markdown() -> str:
    """A row for each set."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for plug in PLUGS.values():
        licence = f"{plug.licence}; {plug.access}"
        cells = (plug.labels, licence)
        rows.append((f"`{plug.name}`", plug.title, *map(str, cells)))
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
