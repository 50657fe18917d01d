"""The recipes of pre-training as one table: what a method is made of, and nothing else in the code asks which
it is.

In: the name in `method.recipe`. Out: a `Recipe` whose fields
the model, the masks, the schedules and the gauges read. A new recipe is a row here, its loss in
models/losses.py and a line in tests/pretraining/test_golden.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from utils.config.schema import MethodConfig


@dataclass(frozen=True)
class Recipe:
    """One method; every field is one decision."""

    # what the context encoder must not see: tokens that are left out, or targets that a mask token replaces
    hidden: Literal["all_but_context", "targets", "nothing"]
    # how targets may be drawn, the first by default; none: all tokens are targets
    masks: tuple[Literal["blocks", "uniform"], ...]
    positions: Literal["rotary", "learned"]
    predictor: Literal["transformer", "mlp", "linear"]
    # of the EMA target encoder, the voxels themselves, or fixed random features (models/surroundings.py)
    target: Literal["features", "pixels", "random_features"]
    # of each token; normalised: of its voxels; volume: each feature over the tokens of a volume
    target_norm: Literal["layer_norm", "unit", "normalised", "volume"]
    loss: Literal["l1", "l2", "normalised_l2"]  # models.losses.TOKEN_LOSSES
    ema: Literal["constant", "cosine"]  # the target encoder's momentum over the run
    lr: Literal["cooldown", "cosine"]  # after the warm-up: constant with a linear end, or a cosine

    @property
    def has_fixed_targets(self) -> bool:
        """Whether targets do not depend on weights, so that they can neither collapse nor stand still."""
        return self.target != "features"


RECIPES = {
    # the Methods text of the project
    "methods": Recipe(
        hidden="targets", masks=("uniform",), positions="learned", predictor="mlp",
        target="features", target_norm="unit", loss="normalised_l2", ema="cosine", lr="cosine",
    ),
    # V-JEPA 2, arXiv:2506.09985
    "vjepa2": Recipe(
        hidden="all_but_context", masks=("blocks",), positions="rotary",
        predictor="transformer", target="features", target_norm="layer_norm", loss="l1", ema="constant",
        lr="cooldown",
    ),
    # masked autoencoder, arXiv:2111.06377, with the encoder and the predictor of vjepa2
    "mae": Recipe(
        hidden="all_but_context", masks=("blocks", "uniform"), positions="rotary",
        predictor="transformer", target="pixels", target_norm="normalised", loss="l2", ema="constant",
        lr="cooldown",
    ),
    "surroundings": Recipe(
        hidden="nothing", masks=(), positions="rotary", predictor="linear",
        target="random_features", target_norm="volume", loss="l2", ema="constant", lr="cooldown",
    ),
}  # fmt: skip


def recipe_of(method: MethodConfig) -> Recipe:
    """The table's row for this configuration."""
    return RECIPES[method.recipe]


def recipe_name(method: MethodConfig) -> str:
    """'vjepa2', or with what it has beside its own: 'vjepa2 (neighbour_weight 1)'."""
    parts = {
        "neighbour_weight": f"{method.neighbour_weight:g}" if method.neighbour_weight > 0 else None,
        "control": method.control,
    }
    changed = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f"{method.recipe} ({changed})" if changed else method.recipe
