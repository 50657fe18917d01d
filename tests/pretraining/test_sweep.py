"""The file for `wandb sweep`: its values are configurations, and its command takes them."""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

import yaml

from tests.support.pipeline_factory import ROOT
from utils.config.load import load_config

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
