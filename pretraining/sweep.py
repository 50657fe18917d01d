"""A sweep without a server: `python -m pretraining.sweep --sweep configs/sweep_pretrain.yaml --runs 3`.

In: a file in the format of `wandb sweep` (method random or grid) whose parameters are keys of the
configuration. Out: a run each below --dir, one after the other, and sweep.md there, the best first by the
file's metric. The same command again goes on: runs are drawn from --seed, and a finished one is not repeated.
`wandb agent` draws from the same file, with a server.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import loguniform, randint, uniform
from sklearn.model_selection import ParameterGrid, ParameterSampler

from utils.cli import number_from, run_cli
from utils.config.keys import keys
from utils.config.load import load_config
from utils.errors import EXIT_FINISHED, ConfigError, UserError
from utils.help_pages import PeopleParser

log = logging.getLogger(__name__)
METHODS = ("random", "grid")
PARTS = {  # of a sweep file -> its kind, in words too
    "method": (str, "a word"),
    "metric": (dict, "a name and a goal"),
    "parameters": (dict, "keys of the configuration, each with its values"),
    "command": (list, "a list of words"),
}
BOUNDS = {
    "uniform": lambda low, high: uniform(low, high - low),
    "log_uniform_values": loguniform,
    "int_uniform": lambda low, high: randint(low, high + 1),
}


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    method: str
    metric: str
    sign: float  # +1: higher is better
    choices: dict[str, Any]  # key of the configuration -> its values, or a distribution
    config: str  # the file of --config in its command


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file; raises ConfigError that names the key."""
    if not path.is_file():
        raise ConfigError(f"{path}: expected a sweep file, found none")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected YAML, found {' '.join(str(error).split())}") from error
    _check_types(path, data)
    method, metric, parameters = data["method"], data["metric"], data["parameters"]
    if method not in METHODS:
        raise ConfigError(f"{path}: method: expected one of {', '.join(METHODS)}, found {method}")
    if metric.get("goal") not in ("maximize", "minimize") or not isinstance(metric.get("name"), str):
        raise ConfigError(f"{path}: metric: expected a name and a goal, maximize or minimize, found {metric}")
    unknown = sorted(map(str, set(parameters) - set(keys())))
    if unknown:
        raise ConfigError(f"{path}: parameters: expected keys of the configuration, found {unknown[0]}")
    command = " ".join(map(str, data["command"]))
    config = re.search(r"--config\s+(\S+)", command)
    if config is None or "${args_no_hyphens}" not in command:
        raise ConfigError(
            f"{path}: command: expected --config FILE and ${{args_no_hyphens}}, found {command}"
        )
    choices = {key: _choice(path, key, spec) for key, spec in parameters.items()}
    if method == "grid" and any(not isinstance(choice, list) for choice in choices.values()):
        raise ConfigError(f"{path}: method: expected values alone with grid, found a distribution")
    sign = 1.0 if metric["goal"] == "maximize" else -1.0
    return Sweep(method, metric["name"], sign, choices, config.group(1))


def _check_types(path: Path, data: Any) -> None:
    """Raise ConfigError unless the file is a mapping that has every part, each of its kind."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, found {data!r}")
    for name, (kind, words) in PARTS.items():
        if name not in data:
            raise ConfigError(f"{path}: expected {name}, found none")
        if not isinstance(data[name], kind):
            raise ConfigError(f"{path}: {name}: expected {words}, found {data[name]!r}")


def _choice(path: Path, key: str, spec: Any) -> Any:
    """The values of a parameter, or its distribution."""
    match spec:
        case {"value": value} if len(spec) == 1:
            return [value]
        case {"values": [*values]} if values and len(spec) == 1:
            return values
        case {"distribution": str(name), "min": int() | float() as low, "max": int() | float() as high}:
            if len(spec) == 3 and _is_drawable(name, low, high):
                return BOUNDS[name](low, high)
    expected = f"value, values, or min, max and a distribution of {', '.join(BOUNDS)}, min below max"
    raise ConfigError(f"{path}: parameters.{key}: expected {expected}, found {spec}")


def _is_drawable(name: str, low: float, high: float) -> bool:
    """Whether the distribution exists between these numbers: a logarithm above 0, whole numbers as such."""
    fits = {
        "uniform": True,
        "log_uniform_values": low > 0,
        "int_uniform": isinstance(low, int) and isinstance(high, int),
    }
    return fits.get(name, False) and low < high


def draw(sweep: Sweep, number: int, seed: int) -> list[dict[str, Any]]:
    """The parameters of the first `number` runs; a grid has no more than it has."""
    if sweep.method == "grid":
        return list(ParameterGrid(sweep.choices))[:number]
    drawn = ParameterSampler(sweep.choices, number, random_state=seed)
    return [
        {key: value.item() if hasattr(value, "item") else value for key, value in one.items()}
        for one in drawn
    ]


def overrides_of(parameters: Mapping[str, Any]) -> list[str]:
    """`section.key=value` words, as ${args_no_hyphens} gives them."""
    return [f"{key}={json.dumps(value)}" for key, value in sorted(parameters.items())]


def best_of(run_dir: Path, sweep: Sweep) -> float | None:
    """The best value of the metric after an update, as best checkpoints are chosen: before the first one it
    says nothing of the run. None where it has none.
    """
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    trained = (line for line in lines if line["step"] > 0)
    values = [line[sweep.metric] for line in trained if isinstance(line.get(sweep.metric), float)]
    return max(values, key=lambda value: sweep.sign * value, default=None)


def table(sweep: Sweep, runs: Sequence[tuple[str, Mapping[str, Any], float | None]]) -> str:
    """The runs as Markdown, the best first, those without a value last."""
    names = sorted(sweep.choices)
    rows = [f"| run | {sweep.metric} | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    order = sorted(runs, key=lambda run: (run[2] is None, -sweep.sign * (run[2] or 0.0)))
    for name, parameters, value in order:
        shown = "none" if value is None else f"{value:.4g}"
        numbers = [
            f"{parameters[key]:.3g}" if isinstance(parameters[key], float) else str(parameters[key])
            for key in names
        ]
        rows.append(f"| {name} | {shown} | {' | '.join(numbers)} |")
    return "\n".join(rows) + "\n"


def run_sweep(sweep: Sweep, folder: Path, number: int, seed: int, overrides: Sequence[str]) -> Path:
    """Train the drawn runs one after the other; returns the table's path. Raises UserError where one
    fails.
    """
    drawn = draw(sweep, number, seed)
    for parameters in drawn:  # all of them before the first one takes hours
        load_config(sweep.config, [*overrides, *overrides_of(parameters)])
    runs = []
    for index, parameters in enumerate(drawn):
        run_dir = folder / f"run_{index:03d}"
        words = [*overrides, *overrides_of(parameters), f"run.dir={run_dir}"]
        command = [sys.executable, "-m", "pretraining.train", "--config", sweep.config, *words]
        with _ctrl_c_is_the_runs():
            code = subprocess.run(command).returncode
        if code != EXIT_FINISHED:
            raise UserError(f"{run_dir}: the run ended with exit code {code}; the same command again goes on")
        runs.append((run_dir.name, parameters, best_of(run_dir, sweep)))
    path = folder / "sweep.md"
    path.write_text(table(sweep, runs))
    return path


@contextmanager
def _ctrl_c_is_the_runs() -> Iterator[None]:
    """A terminal sends Ctrl-C to all: the run writes its checkpoint, for which `subprocess` does not wait."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN, this is not inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = PeopleParser("pretraining.sweep", __doc__ or "")
    parser.add_argument("--sweep", type=Path, required=True, metavar="FILE", help="a file for wandb sweep")
    parser.add_argument(
        "--runs", type=number_from(1), default=3, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument("--seed", type=number_from(0), default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("runs/sweep"), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="the same for all runs")
    args = parser.parse_intermixed_args(argv)
    path = run_sweep(read_sweep(args.sweep), args.dir, args.runs, args.seed, args.overrides)
    print(path.read_text(), end="")
    print(f"written to {path}")


if __name__ == "__main__":
    run_cli(main)
