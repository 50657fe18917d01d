"""A field of the schema with all that is known of it beside its type.

In: its default, its meaning, its bound, its unit. Out: `key`, a dataclass field that holds them as metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Bound:
    """What a number must be; of a tuple each value."""

    text: str
    holds: Callable[[float], bool]
    unit: str = ""  # of what is counted


AT_LEAST_1 = Bound("1 or more", lambda value: value >= 1)
EPOCHS, UPDATES, VOLUMES, CHECKPOINTS = (
    replace(AT_LEAST_1, unit=unit) for unit in ("epochs", "updates", "volumes", "checkpoints")
)
AT_LEAST_2 = Bound("2 or more", lambda value: value >= 2)
AT_LEAST_0 = Bound("0 or more", lambda value: value >= 0)
ABOVE_0 = Bound("a number above 0", lambda value: value > 0)
SHARE = Bound("a number in [0, 1]", lambda value: 0 <= value <= 1, "share")
UP_TO_1 = Bound("a number in (0, 1]", lambda value: 0 < value <= 1)
BELOW_1 = Bound("a number in [0, 1)", lambda value: 0 <= value < 1)
WHOLE_HEADS = Bound(
    "a multiple of 32, the width of an attention head", lambda value: value >= 32 and value % 32 == 0
)
INNER_SHARE = Bound("a number in (0, 1)", lambda value: 0 < value < 1, "share")


def key(
    default: Any,
    meaning: str,
    bound: Bound | None = None,
    *,
    unit: str = "",
    may_change: bool = False,
    identity: bool = False,
    is_place: bool = False,
    per_machine: bool = False,
) -> Any:
    """A field with what else is known of it; null passes its bound where the type allows null.

    `may_change`: a resumed run may have another value. `identity`: weights and features of a checkpoint rest
    on it. `is_place`: it names a place to which a run may have been moved. `per_machine`: processes of one
    run may differ in it, as they may in its places.
    """
    metadata = {
        "meaning": meaning,
        "bound": bound,
        "unit": unit or (bound.unit if bound else ""),
        "may_change": may_change,
        "identity": identity,
        "is_place": is_place,
        "per_machine": per_machine or is_place,
    }
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
