"""The file of trained surfaces' decoders: finetuning.dense.head with `surfaces`, `mean_heights` and
`familiarity` (finetuning/features/familiarity.py), which may be None.
"""

from __future__ import annotations

from typing import Any

from finetuning.dense.head import PRETRAINED as PRETRAINED
from finetuning.dense.head import RANDOM as RANDOM
from finetuning.dense.head import DenseHead, open_dense_head
from finetuning.dense.layers.volumes import LayerVolumes
from finetuning.features.familiarity import Familiarity
from utils.config.schema import StorageOptions

KIND = "layers"
LayersHead = DenseHead  # of surfaces


def layers_state(
    volumes: LayerVolumes,
    mean_heights: dict[str, list[float | None]],
    familiarity: Familiarity | None,
) -> dict[str, Any]:
    """What a head of surfaces holds beside dense_state. `mean_heights`: protocol -> mean height of each
    surface in voxels; `familiarity`: of the pre-trained arm's features.
    """
    return {
        "surfaces": list(volumes.names),
        "mean_heights": mean_heights,
        "familiarity": None if familiarity is None else familiarity.state(),
    }


def open_layers_head(wanted: str, options: StorageOptions, encoder_url: str | None = None) -> DenseHead:
    """A head of surfaces; as `open_dense_head`."""
    return open_dense_head(wanted, options, "surfaces", keys=("mean_heights",), encoder_url=encoder_url)
