"""The table of what is laid on volumes: task.kind -> its row.

In: a head's kind. Out: the row that trains, opens and evaluates it.
"""

from __future__ import annotations

from typing import Any

from finetuning.dense.kind import Kind
from finetuning.dense.layers import LAYERS
from finetuning.dense.segmentation import SEGMENTATION
from finetuning.dense.translation import TRANSLATION

KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in (LAYERS, SEGMENTATION, TRANSLATION)}
