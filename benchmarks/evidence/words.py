"""Numbers of benchmarks.evidence as the words and cells of docs/evidence/results.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence.differences import Difference

NOT_SHOWN = "no difference shown"
TASK_LABELS = {
    "classes": "4 classes, balanced accuracy",
    "thickness": "layer thickness, R2",
    "occupancy": "layer occupancy, R2",
}


def signed(found: Difference | None) -> str:
    """'+0.050 (+0.010 to +0.090)', bold when the interval excludes zero."""
    if found is None:
        return "-"
    value, (low, high) = found
    text = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
    return text if verdict(found) == NOT_SHOWN else f"**{text}**"


def verdict(found: Difference) -> str:
    """Which side of zero the interval is on, if it is on one."""
    _, (low, high) = found
    return "above" if low > 0 else "below" if high < 0 else NOT_SHOWN


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def span(values: Sequence[float] | None) -> str:
    """'0.610 to 0.640', the lowest and the highest."""
    return "-" if not values else f"{min(values):.3f} to {max(values):.3f}"
