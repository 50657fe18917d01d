"""Seeds of one recipe beside recipes: which checkpoints are seeds, and what the leaderboard says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetuning.board.compare import Comparison
from finetuning.board.seeds import Origin, origin_of, recipe_of, seed_sentences
from finetuning.source import Source
from tests.support.finetune_factory import config
from utils.config.load import to_yaml

ONE_DEVICE = ("data.list_strategy=single_domain", "data.device_filter=[zeiss_cirrus]")
NO_CLAIM = "a difference between recipes that is no larger than that between seeds"


def differences(values: dict[str, float], column: str = "linear") -> list[Comparison]:
    """Every pair of rows whose values are these."""
    labels = list(values)
    return [
        Comparison(column, one, other, values[one] - values[other], (-1.0, 1.0), 1.0, 1.0, 0.3)
        for place, one in enumerate(labels)
        for other in labels[place + 1 :]
    ]


MULTI, SINGLE = Origin("multi", 0, 160), [Origin("single", seed, 160) for seed in (0, 1)]
ORIGINS = {"m": MULTI, "s0": SINGLE[0], "s1": SINGLE[1]}


@pytest.mark.parametrize(
    ("values", "is_claim"),
    [
        ({"m": 0.75, "s0": 0.5, "s1": 0.375}, True),  # .25 and .375 from seeds that are .125 apart
        ({"m": 0.625, "s0": 0.5, "s1": 0.375}, False),  # as far from one seed as the seeds are apart
        ({"m": 0.4375, "s0": 0.5, "s1": 0.375}, False),  # between them
        ({"m": 0.125, "s0": 0.5, "s1": 0.375}, True),  # worse is a claim as well
        ({"m": 0.5, "s0": 0.5, "s1": 0.5}, False),
    ],
)
@pytest.mark.parametrize("order", [("m", "s0", "s1"), ("s1", "m", "s0")])
def test_a_difference_no_larger_than_between_seeds_is_no_claim(
    values: dict[str, float], is_claim: bool, order: tuple[str, ...]
) -> None:
    """Whatever the order of rows, and of random initialisation among them."""
    rows = {label: values[label] for label in order} | {"random initialisation": 0.0}
    seeds, recipes = seed_sentences(ORIGINS, differences(rows))
    assert f"s0 (seed 0, step 160) and s1 (seed 1, step 160), are {values['s0'] - values['s1']:.3f}" in seeds
    assert f"m - s0 {values['m'] - values['s0']:+.3f}, m - s1 {values['m'] - values['s1']:+.3f}" in recipes
    assert (NO_CLAIM in recipes) is not is_claim
    assert ("the claim needs `shown` as well" in recipes) is is_claim
    assert "random" not in seeds + recipes


def test_the_wider_spread_of_two_recipes_counts() -> None:
    origins = ORIGINS | {"m1": Origin("multi", 1, 160)}
    values = {"m": 0.75, "m1": 1.0, "s0": 0.5, "s1": 0.5}
    lines = seed_sentences(origins, differences(values))
    assert [line.partition(" are ")[2] for line in lines[:2]] == ["0.250 apart.", "0.000 apart."]
    assert "m - s0 +0.250" in lines[2]
    assert "m1 - s1 +0.500" in lines[2]
    assert NO_CLAIM in lines[2]


def test_every_column_has_its_own_sentence() -> None:
    near = differences({"m": 1.0, "s0": 0.5, "s1": 0.5})
    far = differences({"m": 1.0, "s0": 0.5, "s1": 0.0}, "fine-tuned")
    lines = seed_sentences(ORIGINS, near + far)
    assert [line.partition(":")[0] for line in lines] == ["linear", "linear", "fine-tuned", "fine-tuned"]
    assert [NO_CLAIM in line for line in lines] == [False, False, False, True]


def test_without_two_seeds_nothing_is_said() -> None:
    values = differences({"m": 1.0, "s0": 0.5, "s1": 0.4})
    apart = {"m": MULTI, "s0": SINGLE[0], "s1": Origin("third", 1, 160)}
    assert seed_sentences(apart, values) == []
    same_run = {"m": MULTI, "s0": SINGLE[0], "s1": Origin("single", 0, 40)}  # two checkpoints of one run
    assert seed_sentences(same_run, values) == []


def test_a_recipe_is_all_but_seed_places_and_machine(tmp_path: Path) -> None:
    one = config(tmp_path, tmp_path / "a", *ONE_DEVICE)
    moved = ("seed=1", "experiment_name=b", "wandb.mode=disabled", "train.per_core_batch_size=4")
    assert recipe_of(config(tmp_path, tmp_path / "b", *ONE_DEVICE, *moved)) == recipe_of(one)
    others = [("train.max_steps=2",), ("optim.base_lr=2.0e-3",), ("augment.strength=0.5",), ("model.size=s",)]
    others.append(("data.device_filter=[topcon_triton]",))
    for other in others:
        changed = config(tmp_path, tmp_path / "a", *ONE_DEVICE, *other)
        assert recipe_of(changed) != recipe_of(one), other
    assert recipe_of(config(tmp_path, tmp_path / "a")) != recipe_of(one)


def test_origin_is_the_checkpoints_own(tmp_path: Path) -> None:
    """The leaderboard gives every source the first one's data and seed."""
    own = config(tmp_path, tmp_path / "a", *ONE_DEVICE, "seed=1")
    state = {"config": to_yaml(own), "step": 40}
    origin = origin_of(Source(config(tmp_path, tmp_path / "board"), "runs/a", state))
    assert origin == Origin(recipe_of(own), 1, 40)
