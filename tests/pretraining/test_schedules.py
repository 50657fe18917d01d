"""Schedules: pure functions of the step over the whole run, never restarting."""

from __future__ import annotations

import json
import logging
import math
import re
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pretraining import banner
from pretraining.progress import Schedule, ema_momentum, init_weight, learning_rate
from tests.support.model_factory import small_config
from tests.support.pipeline_factory import ROOT
from utils.config.load import load_config
from utils.errors import UserError
from utils.run.calendar import VALIDATION_SHARE, Calendar, total_steps


@pytest.mark.parametrize("recipe", ["methods", "vjepa2"])
def test_learning_rate_warms_up_then_never_rises(recipe: str) -> None:
    cfg = small_config(recipe, "optim.warmup_ratio=0.03", "optim.min_lr_ratio=0.1")
    total = 3000
    rates = [learning_rate(cfg, s, total) for s in range(total)]
    assert rates[0] == pytest.approx(cfg.optim.base_lr / 90)
    assert rates[89] == pytest.approx(cfg.optim.base_lr)
    assert all(a < b for a, b in pairwise(rates[:90]))
    assert all(a >= b for a, b in pairwise(rates[89:]))
    assert rates[-1] == pytest.approx(0.1 * cfg.optim.base_lr)
    if recipe == "vjepa2":
        assert rates[90] == rates[2099] == cfg.optim.base_lr  # cool-down is the last 30 %
        assert rates[2550] == pytest.approx(cfg.optim.base_lr * (1 - 0.9 * 451 / 900))
    else:
        assert rates[90 + 1454] == pytest.approx(cfg.optim.base_lr * 0.55, rel=2e-3)


def test_methods_momentum_is_a_cosine_to_one() -> None:
    cfg = small_config("methods", "method.ema_base=0.996")
    values = [ema_momentum(cfg, s, 101) for s in range(101)]
    assert values[0] == pytest.approx(0.996)
    assert values[50] == pytest.approx(0.998)
    assert values[100] == 1.0
    assert all(a <= b for a, b in pairwise(values))


@pytest.mark.parametrize(("total", "expected"), [(200, 0.5**0.1), (2000, 0.5**0.01), (100_000, 0.9995)])
def test_default_momentum_has_a_half_life_of_five_percent(total: int, expected: float) -> None:
    assert ema_momentum(small_config(), 0, total) == pytest.approx(expected)


def test_init_weight_is_the_product_of_momenta() -> None:
    assert init_weight(small_config("vjepa2", "method.ema_base=0.9"), 7, 100) == pytest.approx(0.9**7)
    assert init_weight(small_config(), 200, 200) == pytest.approx(2**-20)
    assert init_weight(small_config(), 0, 200) == 1.0


@pytest.mark.parametrize(
    ("at_start", "step", "share"),
    [(1.0, 0, "48 %"), (0.6, 3, "39 %"), (0.0, 0, None)],  # new, resumed, from weights that are whole
)
def test_a_target_that_keeps_its_start_is_warned_of(
    at_start: float, step: int, share: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(banner, "banner", lambda run, start: [])
    run: Any = SimpleNamespace(cfg=small_config("vjepa2", "method.ema_base=0.9"), total_steps=7)
    clock: Any = SimpleNamespace(log_start=lambda: None)
    with caplog.at_level(logging.WARNING):
        banner.log_start(run, clock, SimpleNamespace(init_weight=at_start, step=step))  # type: ignore[arg-type]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (share is not None)
    assert share is None or f"will still be {share} of its random initialisation" in warned[0]


def test_epochs_become_steps() -> None:
    cfg = small_config("vjepa2", "train.max_steps=null", "train.epochs=3")
    assert total_steps(cfg, 50) == math.ceil(150 / 16) == 10
    assert total_steps(small_config("vjepa2", "train.max_steps=7", "train.epochs=3"), 50) == 7


def test_a_run_is_not_made_longer() -> None:
    began = Schedule(small_config("methods", "method.ema_base=0.996"), 160)
    with pytest.raises(UserError, match=r"at most 160 updates.*found 320; another run\.dir with method"):
        began.resumed(160, 320)
    assert began.resumed(0, 320).total == 320  # nothing was done yet


def test_a_shorter_end_leaves_the_schedule_alone() -> None:
    began = Schedule(small_config(), 160)
    assert began.resumed(40, 80) == began
    assert began.resumed(40, 80).resumed(80, 160) == began


def test_a_checkpoint_keeps_the_length_and_another_versions_longer_run_is_refused() -> None:
    cfg = small_config()
    state = Schedule(cfg, 160).state_dict()
    assert Schedule.of_state(cfg, state) == Schedule(cfg, 160)
    state["extensions"] = [[160, 200, "rewarm"]]
    with pytest.raises(UserError, match=r"began with, 160 updates, found one that optim\.extend made longer"):
        Schedule.of_state(cfg, state)


@pytest.mark.parametrize("keep", [1, 3, 10])
@pytest.mark.parametrize("epochs", [1, 4, 26, 100, 1000])
def test_checkpoints_of_epochs_are_thinned_evenly_over_the_run(epochs: int, keep: int) -> None:
    """With 48 volumes in batches of 16 an epoch has three updates; every second one has a checkpoint."""
    overrides = (
        f"train.epochs={epochs}",
        "train.ckpt_every_epochs=2",
        "train.ckpt_every_steps=null",
        f"train.keep_epochs={keep}",
    )
    calendar = Calendar.of(small_config("vjepa2", "train.max_steps=null", *overrides), 48)
    saved = [step for step in range(1, calendar.total + 1) if calendar.saves(step)]
    kept = [step for step in saved if step % calendar.keep_every == 0]
    assert saved == sorted({*range(6, 3 * epochs + 1, 6), 3 * epochs})
    assert min(keep, epochs // 2) / 2 <= len(kept) <= keep
    assert len(kept) == epochs // 2 or len({b - a for a, b in pairwise([0, *kept])}) == 1


def test_a_validation_reads_its_share_of_what_training_reads() -> None:
    """Every epoch where there are volumes enough, else every few epochs; a wish of the user's wins."""
    cfg = small_config("vjepa2", "train.val_every_steps=null")

    def epochs(num_volumes: int, read: int) -> int:
        epoch = round(num_volumes / cfg.train.global_batch_size)
        return Calendar.of(cfg, num_volumes, read).validate_every // epoch

    assert [epochs(35_600, 768), epochs(32_000, 800), epochs(32_000, 801), epochs(8_000, 768)] == [1, 1, 2, 4]
    for num_volumes, read in ((35_600, 768), (8_000, 768), (160, 183)):
        every = Calendar.of(cfg, num_volumes, read).validate_every * cfg.train.global_batch_size
        assert read <= VALIDATION_SHARE * every
    assert Calendar.of(small_config("vjepa2", "train.val_every_steps=5"), 160, 183).validate_every == 5


# ---- the file for `wandb sweep`: its values are configurations, and its command takes them
SWEEP = yaml.safe_load((ROOT / "configs" / "sweep_pretrain.yaml").read_text())
METHODS = {"grid", "random", "bayes"}  # https://docs.wandb.ai/guides/sweeps/sweep-config-keys
DISTRIBUTIONS = {"uniform", "log_uniform_values", "int_uniform"}  # of numbers from min to max


def ends(parameter: dict[str, Any]) -> list[Any]:
    """Every value of a parameter, or the ends of its distribution."""
    if parameter.keys() == {"values"}:
        return list(parameter["values"])
    assert parameter.keys() == {"distribution", "min", "max"}
    assert parameter["distribution"] in DISTRIBUTIONS
    assert parameter["min"] < parameter["max"]
    return [parameter["min"], parameter["max"]]


def test_every_value_of_the_sweep_is_a_configuration_of_the_file_that_it_trains() -> None:
    assert SWEEP["method"] in METHODS
    assert SWEEP["metric"] == {"name": "val/probe", "goal": "maximize"}  # what best_probe.pt is chosen by
    command = " ".join(SWEEP["command"])
    (config,) = re.findall(r"-m pretraining\.train --config (\S+)", command)
    assert command.endswith('"$@" sh ${args_no_hyphens}')
    given = [word for word in command.split() if re.match(r"[a-z.]+=", word)]
    every = [[f"{key}={json.dumps(v)}" for v in ends(part)] for key, part in SWEEP["parameters"].items()]
    for word in chain(*every):
        load_config(ROOT / config, [*given, word])
    for choice in (min, max):  # all parameters at once
        load_config(ROOT / config, [*given, *(choice(words) for words in every)])
