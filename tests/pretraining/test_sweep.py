"""The sweep file: in the schema, drawn reproducibly, refused in one line, carried out without a server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretraining.sweep import best_of, draw, main, overrides_of, read_sweep, run_sweep, table
from tests.support.pipeline_factory import ROOT, SMOKE, make_store, pipeline_overrides
from utils.config.load import load_config
from utils.errors import ConfigError, UserError

SHIPPED = ROOT / "configs" / "sweep_pretrain.yaml"


def changed(tmp_path: Path, **changes: Any) -> Path:
    """The shipped file with other values on top."""
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(SHIPPED.read_text()), **changes}))
    return path


HALF = {"distribution": "int_uniform", "min": 0.5, "max": 3}


def lr(**bounds: Any) -> dict[str, Any]:
    """A file whose learning rate is drawn between these."""
    return {"parameters": {"optim.base_lr": {"distribution": "log_uniform_values", **bounds}}}


def test_a_sweep_file_without_keys_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    for text in ("", "- method\n", "3"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="expected keys and values, found"):
            read_sweep(path)


def test_every_draw_of_the_shipped_file_is_a_configuration() -> None:
    sweep = read_sweep(SHIPPED)
    drawn = draw(sweep, 40, seed=0)
    assert drawn[:3] == draw(sweep, 3, seed=0)
    assert drawn != draw(sweep, 40, seed=1)
    for parameters in drawn:
        cfg = load_config(ROOT / sweep.config, overrides_of(parameters))
        assert 1e-4 <= cfg.optim.base_lr <= 2e-3
        assert cfg.optim.base_lr == parameters["optim.base_lr"]  # no digit is lost on the way
    assert {0, 9} <= {parameters["seed"] for parameters in drawn} <= set(range(10))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"parameters": {"optim.base_rl": {"values": [1]}}},
            "keys of the configuration, found optim.b",
        ),
        ({"parameters": {"seed": {"min": 0, "max": 1}}}, r"parameters.seed: expected value, values, or min"),
        ({"method": "bayes"}, "method: expected one of random, grid, found bayes"),
        ({"method": "grid"}, "expected values alone with grid"),
        ({"metric": {"name": "val/probe", "goal": "up"}}, "metric: expected a name and a goal"),
        ({"command": ["python"]}, "command: expected --config FILE"),
        ({"command": "python"}, "command: expected a list of words, found 'python'"),
        ({"metric": "val/probe"}, "metric: expected a name and a goal, found 'val/probe'"),
        ({"metric": {"name": 3, "goal": "minimize"}}, "metric: expected a name and a goal"),
        ({"method": ["random"]}, r"method: expected a word, found \['random'\]"),
        ({"parameters": ["seed"]}, r"parameters: expected keys of the configuration, each .* \['seed'\]"),
        ({"parameters": {1: {"value": 1}, "a.b": {"value": 1}}}, "keys of the configuration, found 1"),
        ({"parameters": {"seed": 3}}, "parameters.seed: expected value, values, or min, max"),
        ({"parameters": {"seed": HALF}}, "parameters.seed: expected value, values, or min, max"),
        ({"parameters": {"seed": {"values": 3}}}, "parameters.seed: expected value, values, or min, max"),
        (lr(min="1e-4", max=1e-3), "parameters.optim.base_lr: expected .* 'min': '1e-4'"),  # YAML 1.1: a text
        (lr(min=0, max=1e-3), "parameters.optim.base_lr: expected value"),
        (lr(min=1e-3, max=1e-4), "parameters.optim.base_lr: expected .* min below max"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_sweep(changed(tmp_path, **changes))


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    parameters = {
        "seed": {"values": [0, 1]},
        "optim.base_lr": {"values": [1e-3, 1e-4]},
        "wandb.mode": {"value": "disabled"},
    }
    drawn = draw(read_sweep(changed(tmp_path, method="grid", parameters=parameters)), 10, seed=0)
    assert sorted((one["seed"], one["optim.base_lr"]) for one in drawn) == [
        (0, 1e-4),
        (0, 1e-3),
        (1, 1e-4),
        (1, 1e-3),
    ]


def test_the_table_has_the_best_first(tmp_path: Path) -> None:
    """Of each run its best validation of a trained encoder; one without a value is last."""
    sweep = read_sweep(changed(tmp_path, parameters={"seed": {"values": [0, 1, 2]}}))
    runs = []
    for seed, values in enumerate((["0.4", "0.5"], ["0.9", "0.1"], ["null"])):
        run = tmp_path / f"run_{seed}"
        run.mkdir()
        (run / "metrics.jsonl").write_text(
            "".join(f'{{"step": {step}, "val/probe": {v}}}\n' for step, v in enumerate(["0.99", *values]))
        )
        runs.append((run.name, {"seed": seed}, best_of(run, sweep)))
    rows = re.findall(r"\| (run_\d) \| ([\d.]+|none) \|", table(sweep, runs))
    assert rows == [("run_1", "0.9"), ("run_0", "0.5"), ("run_2", "none")]


def test_ctrl_c_lets_the_run_write_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to the sweep and to the run, which needs a while and ends with 76."""
    program = "import os, signal, sys, time; signal.signal(signal.SIGINT, lambda *_: None); "
    program += "os.kill(os.getppid(), signal.SIGINT); time.sleep(1); sys.exit(76)"
    real = subprocess.run
    monkeypatch.setattr("pretraining.sweep.subprocess.run", lambda _: real([sys.executable, "-c", program]))
    sweep = read_sweep(changed(tmp_path, command=["python", "--config", str(SMOKE), "${args_no_hyphens}"]))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(UserError, match="exit code 76; the same command again goes on"):
        run_sweep(sweep, tmp_path, 1, 0, [])
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_three_runs_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path)
    command = ["python", "--config", str(SMOKE), "${args_no_hyphens}"]
    # one person to validate on: no probe
    sweep = changed(tmp_path, command=command, metric={"name": "val/loss", "goal": "minimize"})
    short = [*pipeline_overrides(tmp_path), "train.max_steps=2", "train.ckpt_dir=null", "wandb.mode=offline"]
    short = [word for word in short if not word.startswith(("run.dir=", "optim.base_lr="))]
    main(["--sweep", str(sweep), "--runs", "3", "--dir", str(tmp_path / "sweep"), *short])
    text = capsys.readouterr().out
    assert sorted(re.findall(r"\| (run_\d+) \| 0\.\d+", text)) == ["run_000", "run_001", "run_002"]
    drawn = draw(read_sweep(sweep), 3, seed=0)
    for number, parameters in enumerate(drawn):
        cfg = load_config(tmp_path / "sweep" / f"run_{number:03d}" / "config.yaml")
        assert cfg.optim.base_lr == parameters["optim.base_lr"]
        assert cfg.seed == parameters["seed"]
        assert list((tmp_path / "sweep" / f"run_{number:03d}").glob("wandb/offline-run-*/*.wandb"))
