"""The public sets as text: `--sets`, and `--sets NAME`."""

from __future__ import annotations

from data_setup.index.sets import NO_VOLUMES, PLUGS
from data_setup.index.sets.facts import MARKS, Plug

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
