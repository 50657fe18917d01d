"""Every key of the schema with its type, unit, default and meaning, in words.

In: the fields of utils/config/schema.py. Out: `keys`, for --help, for dashboards and for
docs/reference/configuration.md (docs/write_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from utils.config.fields import Bound
from utils.config.schema import Config


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    unit: str
    default: str
    may_change: bool
    meaning: str


def type_text(hint: Any, bound: Bound | None) -> str:
    """A type in words: 'one of a, b', '3 x float, a number above 0', 'int or null'."""
    if get_origin(hint) in (UnionType, Union):
        inner, *others = (part for part in get_args(hint) if part is not NoneType)
        words, other = type_text(inner, bound), "null"
        if others:  # a word in the place of a number or of yes and no
            other = f"`{get_args(others[0])[0]}`"
        if inner is bool:
            return f"`true`, `false` or {other}"
        return f"{words}; or {other}" if "," in words else f"{words} or {other}"
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(f'`{choice}`' for choice in choices)}"
    if get_origin(hint) is tuple:
        words = f"{len(choices)} x {choices[0].__name__}"
    elif get_origin(hint) is list:
        words = "list of sections" if is_dataclass(choices[0]) else f"list of {type_text(choices[0], None)}"
    else:
        words = {"str": "text", "bool": "`true` or `false`"}.get(hint.__name__, hint.__name__)
    return f"{words}, {bound.text}" if bound else words


def default_text(part: Field[Any]) -> str:
    """What holds where a file has no such key."""
    default = part.default
    if default is NO_DEFAULT:
        assert part.default_factory is not NO_DEFAULT
        default = part.default_factory()
    if default == MISSING:
        return "*required*"
    if default is None or isinstance(default, bool):
        return f"`{str(default).lower().replace('none', 'null')}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def _keys(section: type, prefix: str) -> Iterator[Key]:
    hints = get_type_hints(section)
    for part in fields(section):
        name, hint, known = f"{prefix}{part.name}", hints[part.name], part.metadata
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _keys(hint, f"{name}.")
            continue
        yield Key(
            name=name,
            type=type_text(hint, known["bound"]),
            unit=known["unit"],
            default=default_text(part),
            may_change=known["may_change"],
            meaning=known["meaning"],
        )
        inner = next((c for h in (hint, *get_args(hint)) for c in get_args(h) if is_dataclass(c)), None)
        if isinstance(inner, type):  # a list of sections
            yield from _keys(inner, f"{name}[].")


@cache
def keys() -> dict[str, Key]:
    """Every key of the schema by its name, in its order."""
    return {one.name: one for one in _keys(Config, "")}
