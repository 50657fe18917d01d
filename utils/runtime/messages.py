"""What processes tell each other, without pickle: a message can be wrong, but it is never run as code.

In: plain values (None, bool, int, float, str), tensors, and lists, tuples and dictionaries of them. Out:
JSON, and the tensors in order, which travel as bytes; and the way back, where tuples are lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError

DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """The value as JSON, and its tensors on the host; raises TypeError for any other type."""
    tensors: list[Tensor] = []
    return json.dumps(_to_form(value, tensors)).encode(), tensors


def decode(data: bytes, sender: str) -> tuple[Any, list[Tensor]]:
    """The value, and its tensors, which are still to be filled; raises UserError for what is no message."""
    tensors: list[Tensor] = []
    try:
        return _of_form(json.loads(data), tensors), tensors
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{sender}: expected a message of this program, found {len(data)} other bytes; every process has "
            "to run the same version, and nobody else may reach their ports"
        ) from error


def _to_form(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": [str(value.dtype), list(value.shape)]}
    if isinstance(value, Mapping):  # as pairs, since JSON's own keys are texts alone
        return {"items": [[key, _to_form(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return [_to_form(part, tensors) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"expected tensors and plain values, found {type(value).__name__}")


def _of_form(form: Any, tensors: list[Tensor]) -> Any:
    if isinstance(form, list):
        return [_of_form(part, tensors) for part in form]
    if not isinstance(form, dict):
        return form
    if "items" in form:
        return {key: _of_form(part, tensors) for key, part in form["items"]}
    dtype, shape = form["tensor"]
    tensors.append(torch.empty(shape, dtype=DTYPES[dtype]))
    return tensors[-1]
