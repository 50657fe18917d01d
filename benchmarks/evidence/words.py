"""Numbers of benchmarks.evidence as the words and cells of its pages."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence.differences import Difference
from benchmarks.evidence.scores import HIDDEN
from models.probes.intervals import side

NOT_SHOWN = "no difference shown"
TASK_LABELS = {
    "classes": "4 classes, balanced accuracy",
    "thickness": "layer thickness, R2",
    "occupancy": "layer occupancy, R2",
}
TASK_LABELS |= {f"{task}{HIDDEN}": f"{label}, hidden layer" for task, label in TASK_LABELS.items()}


def signed(difference: Difference | None, why: bool = False) -> str:
    """'+0.050 (+0.010 to +0.090)', bold if a difference is shown; in doubt 'cannot say', and `why`."""
    if difference is None:
        return "-"
    value, (low, high), doubt = difference
    unclear = "; cannot say" + (f", because {doubt}" if why else "") if doubt else ""
    text = f"{value:+.3f} ({low:+.3f} to {high:+.3f}){unclear}"
    return text if verdict(difference) == NOT_SHOWN else f"**{text}**"


def verdict(difference: Difference) -> str:
    """The side of zero on which the whole interval lies: 'higher', 'lower' or NOT_SHOWN, also in doubt."""
    return {1: "higher", -1: "lower", 0: NOT_SHOWN}[side(*difference[1:])]


def table_head(cells: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table."""
    line = f"| {' | '.join(cells)} |"
    return [line, "|---" * (line.count(" | ") + 1) + "|"]
