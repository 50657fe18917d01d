"""Does a training step fit a TPU slice, and how fast can it be at best? Answered without a TPU:

    python -m benchmarks.tpu_fit --config configs/pretrain_oct_vjepa2.yaml --topology v4-32
        [--volumes N] [--json FILE] [section.key=value ...]

The step that trains is recorded (benchmarks.tpu_fit.trace) and compiled by the TPU's own compiler
(benchmarks.tpu_fit.compile), each in an environment that is built on first use (benchmarks.tpu_fit.env).
Out: memory, arithmetic, memory traffic and traffic between chips of one step, and the shortest time that the
datasheet allows: a floor, not a forecast. Exit code 1 when it does not fit; the largest batch that does is
looked for. Compiling takes minutes, results are kept in runs/tpu_fit. method.init_from has to be there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.tpu_fit.compile import RESULT_VERSION
from benchmarks.tpu_fit.env import ROOT, environment
from benchmarks.tpu_fit.topologies import TOPOLOGIES
from benchmarks.tpu_fit.verdict import describe, facts_of
from utils.cli import parse_cli
from utils.config.load import accumulation_steps, load_config, to_yaml
from utils.config.schema import Config
from utils.errors import EXIT_USER_ERROR, ConfigError, UserError

CACHE = ROOT / "runs" / "tpu_fit"
AI_READI_VOLUMES = 56_477  # OCT volumes of its third release, the default of --volumes
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PJRT_DEVICE", "CPU_NUM_DEVICES")  # never inherited
Facts = dict[str, Any]


def output_file(text: str) -> Path:
    """For argparse: a file that will be written after long work, so its folder must be there now."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder {path.parent}, found none")
    return path


def main(argv: list[str] | None = None) -> int:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--topology", required=True, help=f"one of {', '.join(TOPOLOGIES)}")
        parser.add_argument(
            "--volumes", type=int, default=AI_READI_VOLUMES, help="of the data set, for epochs"
        )
        parser.add_argument("--json", type=output_file, metavar="FILE", help="write the numbers there")

    _, args = parse_cli("benchmarks.tpu_fit", __doc__ or "", argv, add_arguments)
    if args.topology not in TOPOLOGIES:
        raise UserError(f"--topology: expected one of {', '.join(TOPOLOGIES)}, found {args.topology}")
    if args.volumes < 1:
        raise UserError(f"--volumes: expected 1 or more, found {args.volumes}")
    row = row_of(args, [])
    if not row["fits"]:
        row["largest_batch_that_fits"] = largest_batch(args, row)
    print(describe(row))
    if args.json is not None:
        args.json.write_text(json.dumps(row, indent=2) + "\n")
    return 0 if row["fits"] else 1


def row_of(args: argparse.Namespace, changes: list[str]) -> Facts:
    """Trace and compile one configuration, and what follows from it; raises ConfigError where it does not
    divide among the chips.
    """
    cfg = load_config(args.config, [*args.overrides, *changes])
    accumulation_steps(cfg.train, TOPOLOGIES[args.topology].chips)
    return facts_of(args.config, args.topology, cfg, *measure(cfg, args.topology), args.volumes)


def largest_batch(args: argparse.Namespace, row: Facts) -> int | None:
    """The largest smaller per-core batch of the row's global batch that fits, found by halving the range;
    None if not even one volume fits.
    """
    total, chips = row["global_batch_size"], TOPOLOGIES[args.topology].chips
    sizes = [n for n in range(1, row["per_core_batch_size"]) if total % (n * chips) == 0]
    best = None
    while sizes:
        middle = sizes[len(sizes) // 2]
        if row_of(args, [f"train.per_core_batch_size={middle}"])["fits"]:
            best, sizes = middle, sizes[len(sizes) // 2 + 1 :]
        else:
            sizes = sizes[: len(sizes) // 2]
    return best


def measure(cfg: Config, topology: str) -> tuple[Facts, Facts]:
    """(what was traced, what the compiler says) of one configuration; compiled once for each program."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"{os.getpid()}.partial"
    folder.mkdir(exist_ok=True)
    try:
        return _measure(cfg, topology, folder)
    finally:
        shutil.rmtree(folder)


def _measure(cfg: Config, topology: str, folder: Path) -> tuple[Facts, Facts]:
    program, result, config = folder / "program", folder / "result.json", folder / "config.yaml"
    config.write_text(to_yaml(cfg))
    chips = TOPOLOGIES[topology].chips
    own = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips)}
    arguments = ["--config", str(config), "--chips", str(chips), "--program", str(program)]
    _run("xla", "benchmarks.tpu_fit.trace", arguments, folder, own)
    traced = json.loads(program.with_name("program.json").read_text())
    kept = CACHE / f"{program_key(program.read_bytes(), traced['aliases'], topology)}.json"
    if not kept.exists():
        _run("aot", "benchmarks.tpu_fit.compile", [str(program), topology, str(result)], folder, {})
        result.replace(kept)
    return traced, json.loads(kept.read_text())


def program_key(program: bytes, aliases: list[list[int]], topology: str) -> str:
    """What the compiler's answer depends on: the program, its shared buffers, the slice, the compiler."""
    text = json.dumps([aliases, topology, RESULT_VERSION, (ROOT / "requirements-aot.txt").read_text()])
    return hashlib.sha256(program + text.encode()).hexdigest()[:32]


def _run(name: str, module: str, arguments: list[str], folder: Path, own: dict[str, str]) -> None:
    """One of the two processes; its last line on failure, and where the rest is."""
    command = [str(environment(name)), "-m", module, *arguments]
    inherited = {key: value for key, value in os.environ.items() if key not in COMPILER_VARIABLES}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | own,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or ["no output"]
    if done.returncode == EXIT_USER_ERROR:
        raise ConfigError(lines[-1].removeprefix("error: "))
    log = folder.with_suffix(".log")
    log.write_text(done.stderr)
    code = done.returncode
    end = f"{code}: {lines[-1]}" if code > 0 else f"its end by {signal.Signals(-code).name}"
    raise UserError(f"{module}: expected exit code 0, found {end} (its output: {log})")
