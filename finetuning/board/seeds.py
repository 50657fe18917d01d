"""How far seeds of one recipe are apart, beside how far recipes are.

In: where each checkpoint comes from, and comparisons of rows. Out: sentences. A difference between recipes
that is no larger than one between seeds of either is no claim, whatever its interval over participants says:
that interval knows nothing of another pre-training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from finetuning.board.compare import Comparison
from finetuning.source import Source
from utils.config.load import config_of_yaml
from utils.config.schema import Config, leaves

NAMES = {"seed", "experiment_name"}
LENGTH = {"train.epochs", "train.max_steps"}  # a resumed run may change them; a recipe not


@dataclass(frozen=True)
class Origin:
    """What a checkpoint comes from: all that decides its weights but the seed, the seed, its step."""

    recipe: str
    seed: int
    step: int


def origin_of(source: Source) -> Origin:
    """Of the configuration that the checkpoint carries; that of the leaderboard has the first one's data."""
    cfg = config_of_yaml(source.state["config"], source.url)
    return Origin(recipe_of(cfg), cfg.seed, int(source.state["step"]))


def recipe_of(cfg: Config) -> str:
    """All keys that decide the weights, as text: not the seed, places, and what a resumed run may change."""
    kept = {
        name: value
        for name, part, value in leaves(cfg)
        if name in LENGTH
        or not (name in NAMES or part.metadata.get("is_place") or part.metadata.get("may_change"))
    }
    return repr(kept)


def seed_sentences(origins: Mapping[str, Origin], comparisons: Sequence[Comparison]) -> list[str]:
    """For every column: how far seeds of a recipe are apart, and whether recipes are farther.

    `origins` is by label, of the checkpoints alone. No sentence without two seeds of one recipe.
    """
    recipes: dict[str, list[str]] = {}
    for label, origin in origins.items():
        recipes.setdefault(origin.recipe, []).append(label)
    lines = []
    for column in dict.fromkeys(c.column for c in comparisons):
        signed = {(c.first, c.second): c.value for c in comparisons if c.column == column}
        signed |= {(second, first): 0.0 - value for (first, second), value in signed.items()}
        spread = {
            recipe: max((abs(signed[pair]) for pair in _seed_pairs(labels, origins)), default=None)
            for recipe, labels in recipes.items()
        }
        for recipe, apart in spread.items():
            if apart is not None:
                lines.append(f"{column}: {_seeds_text(recipes[recipe], origins)} are {apart:.3f} apart.")
        for one, other in combinations(recipes, 2):
            known = [apart for apart in (spread[one], spread[other]) if apart is not None]
            if known:
                lines.append(_recipes_text(column, recipes[one], recipes[other], signed, max(known)))
    return lines


def _seed_pairs(labels: Sequence[str], origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    """Pairs of another seed each: two checkpoints of one run are no two seeds."""
    return (pair for pair in combinations(labels, 2) if origins[pair[0]].seed != origins[pair[1]].seed)


def _seeds_text(labels: Sequence[str], origins: Mapping[str, Origin]) -> str:
    each = [f"{label} (seed {origins[label].seed}, step {origins[label].step})" for label in labels]
    return f"seeds of one recipe, {' and '.join(each)},"


def _recipes_text(
    column: str,
    first: Sequence[str],
    second: Sequence[str],
    signed: Mapping[tuple[str, str], float],
    apart: float,
) -> str:
    """Every checkpoint of a recipe against every one of another; the smallest difference decides."""
    pairs = list(product(first, second))
    each = ", ".join(f"{one} - {other} {signed[one, other]:+.3f}" for one, other in pairs)
    if min(abs(signed[pair]) for pair in pairs) <= apart:
        return (
            f"{column}: recipes, {each}: a difference between recipes that is no larger than that between "
            f"seeds ({apart:.3f}) is no claim."
        )
    return (
        f"{column}: recipes, {each}: each larger than between seeds ({apart:.3f}); so few seeds may be near "
        "each other by chance, so the claim needs `shown` as well."
    )
