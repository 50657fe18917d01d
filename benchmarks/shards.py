"""What spreading a model over processes saves: `python -m benchmarks.shards [--size b] [--processes 2]`.

In: a model size. Out: a row for whole weights (DistributedDataParallel) and one for train.shard_parameters,
each from processes of torchrun of its own: bytes that a process holds of weights, target, gradients and
moments; its most memory in the steps beyond that before the model (on a GPU allocated, on a CPU resident);
seconds a step; the losses. Random volumes of a small grid, so that weights weigh more than features.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.train_step.batches import synthetic_batch
from data_setup.loader import Batch
from models.optimizer import shard_state
from models.vjepa3d import VJEPA3D
from pretraining.step import Update, build_optimizer, train_step
from utils.cli import number_from, run_cli
from utils.config.load import load_config
from utils.config.schema import Config
from utils.help_pages import Parser
from utils.runtime import patience
from utils.runtime.open import open_runtime
from utils.runtime.shards import part
from utils.runtime.single import Runtime

ROWS = {"whole": "false", "spread": "true"}
STEPS = 4
GRID = ("spatial.image_size=[16,96,96]", "spatial.patch_size=[4,16,16]")


def row_config(name: str, size: str, processes: int, overrides: Sequence[str]) -> Config:
    """One volume a process and step."""
    words = [f"model.size={size}", f"train.shard_parameters={ROWS[name]}", "train.per_core_batch_size=1"]
    words += [f"train.global_batch_size={processes}", *GRID, *overrides]
    return load_config("configs/pretrain_oct_vjepa2.yaml", words)


def own_batch(cfg: Config, step: int, runtime: Runtime) -> Batch:
    """This process's volume of the global batch of a step, in the form that the loader gives."""
    whole = synthetic_batch(cfg, step)
    return runtime.to_device({key: value[runtime.rank :][:1] for key, value in whole.items()})


def measure(cfg: Config) -> dict[str, Any] | None:
    """The row of the processes of this run; None but on the first of them."""
    runtime = open_runtime(cfg.train.use_bf16, patience.DATA_S)
    before = runtime.peak_memory_bytes()
    torch.manual_seed(0)
    model = VJEPA3D(cfg).to(runtime.device).train()
    optimizer = build_optimizer(model, cfg)
    shard_state(model, optimizer, cfg, runtime)
    losses, seconds = [], []
    for step in range(STEPS):
        batch = own_batch(cfg, step, runtime)
        began = time.perf_counter()
        result = train_step(model, optimizer, [batch], cfg, runtime, Update(step, 1e-4, 0.99))
        losses.append(float(result.loss))
        seconds.append(time.perf_counter() - began)
    held = [part(weight) for weight in model.parameters()]
    held += [part(weight.grad) for weight in model.parameters() if weight.grad is not None]
    held += [part(value) for state in optimizer.state.values() for value in state.values()]
    peak = runtime.peak_memory_bytes()
    own = {"held": sum(tensor.nbytes for tensor in held), "peak": (peak or 0) - (before or 0)}
    everyone = runtime.group.gather_objects(own)
    runtime.group.close()
    if not runtime.group.is_first:
        return None
    most = {key: max(one[key] for one in everyone) for key in own}
    return {"losses": losses, "step_s": statistics.median(seconds[1:]), **most}


def start(name: str, size: str, processes: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure a row in processes of torchrun."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={processes}", "-m", "benchmarks.shards"]
    words = ["--row", name, "--size", size, "--processes", str(processes), *overrides]
    argv = [sys.executable, "-m", *launcher, *words]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m benchmarks.shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", default="b", help="model.size")
    parser.add_argument("--processes", type=number_from(1), default=2)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    if args.row is not None:
        row = measure(row_config(args.row, args.size, args.processes, args.overrides))
        if row is not None:
            print(json.dumps(row))
        return
    print(f"ViT-{args.size}, {args.processes} processes, {os.cpu_count()} CPUs, torch {torch.__version__}")
    print(f"{'':<8}{'held GB':>9}{'peak GB':>9}{'step s':>8}  losses")
    for name in ROWS:
        row = start(name, args.size, args.processes, args.overrides)
        losses = " ".join(f"{loss:.6f}" for loss in row["losses"])
        print(f"{name:<8}{row['held'] / 1e9:>9.2f}{row['peak'] / 1e9:>9.2f}{row['step_s']:>8.2f}  {losses}")


if __name__ == "__main__":
    run_cli(main)
