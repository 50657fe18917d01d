"""`python -m models.weights`: public V-JEPA 2 weights in and out.

In: a checkpoint of this project, of the original code or of Hugging Face. Out: weights for an encoder of this
configuration, or a file that the Hugging Face classes load. Read load.py first, then shape.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.weights.load import load_encoder

__all__ = ["load_encoder"]


def __getattr__(name: str) -> Any:
    """`load_encoder`, and torch with it, once somebody asks: --help does without."""
    if name == "load_encoder":
        from models.weights.load import load_encoder

        return load_encoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
