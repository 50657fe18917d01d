"""Numbers of benchmarks.evidence as the words and cells of its pages."""

from __future__ import annotations

from benchmarks.evidence.differences import Difference
from benchmarks.evidence.scores import HIDDEN
from models.probes.intervals import side
from utils.tables import NONE, with_interval

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
        return NONE
    value, ci95, doubt = difference
    unclear = "; cannot say" + (f", because {doubt}" if why else "") if doubt else ""
    text = with_interval(value, ci95, "+.3f") + unclear
    return text if verdict(difference) == NOT_SHOWN else f"**{text}**"


def verdict(difference: Difference) -> str:
    """The side of zero on which the whole interval lies: 'higher', 'lower' or NOT_SHOWN, also in doubt."""
    return {1: "higher", -1: "lower", 0: NOT_SHOWN}[side(*difference[1:])]
