"""The recipes of pre-training as one table: what a method is made of, and nothing else in the code asks which
it is.

In: the name in `method.recipe` and, for comparisons, a part of another recipe. Out: a `Recipe` whose fields
the model, the masks, the schedules and the gauges read. A new recipe is a row here, its loss in
models/losses.py and a line in tests/pretraining/test_golden.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from utils.config.schema import MethodConfig


@dataclass(frozen=True)
class Recipe:
    """One method; every field is one decision."""

    context: Literal[
        "visible", "dense"
    ]  # tokens that the context encoder computes; dense: all, some replaced
    hidden: Literal["all_but_context", "targets"]  # what the context encoder must not see
    masks: tuple[Literal["blocks", "uniform"], ...]  # how targets may be drawn; the first is the default
    positions: Literal["rotary", "learned"]
    predictor: Literal["transformer", "mlp"]
    target: Literal["features", "pixels"]  # of the EMA target encoder, or the voxels themselves
    target_norm: Literal[
        "layer_norm", "unit", "normalised", "plain"
    ]  # the last two: of pixels, method.mae_target
    loss: Literal["l1", "l2", "normalised_l2"]  # models.losses.TOKEN_LOSSES
    ema: Literal["constant", "cosine"]  # the target encoder's momentum over the run
    lr: Literal["cooldown", "cosine"]  # after the warm-up: constant with a linear end, or a cosine
    takes_parts: bool = False  # method.context, method.predictor and method.loss may be another recipe's

    @property
    def has_fixed_targets(self) -> bool:
        """Whether targets do not depend on weights, so that they can neither collapse nor stand still."""
        return self.target == "pixels"


RECIPES = {
    # the Methods text of the project
    "methods": Recipe(
        context="dense", hidden="targets", masks=("uniform",), positions="learned", predictor="mlp",
        target="features", target_norm="unit", loss="normalised_l2", ema="cosine", lr="cosine",
    ),
    # V-JEPA 2, arXiv:2506.09985
    "vjepa2": Recipe(
        context="visible", hidden="all_but_context", masks=("blocks",), positions="rotary",
        predictor="transformer", target="features", target_norm="layer_norm", loss="l1", ema="constant",
        lr="cooldown", takes_parts=True,
    ),
    # masked autoencoder, arXiv:2111.06377, with the encoder and the predictor of vjepa2
    "mae": Recipe(
        context="visible", hidden="all_but_context", masks=("blocks", "uniform"), positions="rotary",
        predictor="transformer", target="pixels", target_norm="normalised", loss="l2", ema="constant",
        lr="cooldown",
    ),
}  # fmt: skip


def recipe_of(method: MethodConfig) -> Recipe:
    """The table's row for this configuration, with the parts that it takes from another recipe."""
    recipe = RECIPES[method.recipe]
    if method.context is not None:
        recipe = replace(recipe, context=method.context)
    if method.predictor is not None:
        recipe = replace(recipe, predictor=method.predictor)
    if method.loss is not None:
        recipe = replace(recipe, loss=method.loss)
    if method.mae_target is not None:
        recipe = replace(recipe, target_norm=method.mae_target)
    return recipe


def recipe_name(method: MethodConfig) -> str:
    """'vjepa2', or with what it has beside or in place of its own: 'vjepa2 (loss l2, pixel_weight 1)'."""
    second = "ascan_weight", "pixel_weight", "context_weight", "neighbour_weight"
    parts: dict[str, object] = {
        "context": method.context,
        "predictor": method.predictor,
        "loss": method.loss,
        **{name: f"{weight:g}" for name in second if (weight := getattr(method, name)) > 0},
        "predictor_weight": None if method.predictor_weight == 1 else f"{method.predictor_weight:g}",
        "neighbour_places": None if method.neighbour_places == "all" else method.neighbour_places,
        "target_layers": method.target_layers,
        "control": method.control,
    }
    changed = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f"{method.recipe} ({changed})" if changed else method.recipe
