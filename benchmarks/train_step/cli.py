"""A pre-training step against the same step made of Hugging Face's V-JEPA 2 modules, and against dense.

    python -m benchmarks.train_step [--json FILE] [--repeats 5] [--rows bf16,float32,visible_vs_dense]
    python -m benchmarks.train_step --rows compiled

Rows `bf16` and `float32`: ViT-B, volume [32, 192, 192] (grid 8 x 12 x 12), batch 2, context 40 %, target
60 %, predictor 6 x 384. Both start from the same weights and get the same normalised views; they take turns
in one process. Row `visible_vs_dense`: a whole step of recipe `vjepa2` at [64, 384, 384] (context 0.4 N,
target 0.3 N) against the dense step of recipe `methods`, bfloat16, stochastic layers off. Every time is the
median of at least five. Utilisation is counted operations (models/flops.py) per second over this machine's
best matrix product, kept up for half a second: the median of two measurements in every turn. Exit code 1: the
reference is below the utilisation that it must reach to be a fair one. Row `compiled`: `train.compile`
against eager on the first rows' volume, in both precisions, on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe, matmul_peak, memory
from benchmarks.train_step.batches import synthetic_batch
from benchmarks.train_step.reference_vjepa2 import ReferenceVJEPA2
from data_setup.loader import Batch
from data_setup.normalisation import view
from models.engine_kernels import compile_blocks
from models.flops import encoder_flops, step_flops
from models.vjepa3d import VJEPA3D
from pretraining.step import Update, build_optimizer, train_step
from utils.cli import output_file
from utils.config.load import load_config
from utils.config.schema import Config
from utils.help_pages import Parser
from utils.runtime.open import keep_freed_memory, open_runtime
from utils.runtime.single import Runtime

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "pretrain_oct_vjepa2.yaml"
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
FAIR_REFERENCE = {"bf16": 0.38, "float32": 0.78}  # utilisation under which the comparison is void
LR, MOMENTUM = 1e-4, 0.999
ROWS = ("bf16", "float32", "visible_vs_dense")  # and, on request:
COMPILED = "compiled"


def configure(*overrides: str) -> Config:
    """The recommended recipe without regulariser, at one micro-batch a step."""
    plain = ["method.regulariser=none", "method.regulariser_weight=0", "method.neighbour_weight=0"]
    return load_config(CONFIG, [*plain, "train.max_steps=1000", *overrides])


def small_volume(use_bf16: bool) -> Config:
    """ViT-B on [32, 192, 192], batch 2."""
    return configure(
        "spatial.image_size=[32,192,192]", "spatial.patch_size=[4,16,16]", "model.size=b",
        "method.context_ratio=0.4", "method.target_ratio=0.6",
        "method.mask_blocks=[{scale: 0.15}]", "train.global_batch_size=2", "train.per_core_batch_size=2",
        f"train.use_bf16={str(use_bf16).lower()}",
    )  # fmt: skip


def large_volume(recipe: str) -> Config:
    """ViT-B on [64, 384, 384], batch 1: recipe vjepa2 or methods."""
    size = ["spatial.image_size=[64,384,384]", "spatial.patch_size=[4,16,16]", "model.size=b"]
    size += ["train.global_batch_size=1", "train.per_core_batch_size=1", "train.use_bf16=true"]
    own = {
        "vjepa2": ("method.context_ratio=0.4", "method.target_ratio=0.3"),
        "methods": ("method.recipe=methods", "method.mask_ratio=0.6", "method.ema_base=0.996"),
    }
    return configure(*size, *own[recipe])


def build(cfg: Config) -> tuple[VJEPA3D, torch.optim.AdamW, Batch]:
    torch.manual_seed(0)
    model = VJEPA3D(cfg).train()
    return model, build_optimizer(model, cfg), synthetic_batch(cfg, 0)


def reference_step(
    model: ReferenceVJEPA2, optimizer: torch.optim.AdamW, batch: Batch, cfg: Config, runtime: Runtime
) -> Tensor:
    """The same update by the reference's modules."""
    optimizer.zero_grad(set_to_none=True)
    context_view, target_view = (view(batch, 0), view(batch, 1))
    with runtime.autocast():
        loss = model(context_view, target_view, batch["context"], batch["target"])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.trained_parameters(), cfg.optim.clip_grad_norm)
    optimizer.step()
    model.update_target(MOMENTUM)
    return loss.detach()


def alternate(works: dict[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, float]:
    """Median seconds of each, in turns, after one turn to warm up where wanted."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + warm_up):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn >= warm_up:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def against_reference(name: str, repeats: int) -> dict[str, float]:
    """Rows 1 and 2: one precision."""
    cfg = small_volume(use_bf16=name == "bf16")
    runtime = Runtime(torch.device("cpu"), use_bf16=name == "bf16")
    model, optimizer, batch = build(cfg)
    model.encoder.rope = model.target_encoder.rope = model.predictor.rope = "tiled"
    reference = ReferenceVJEPA2(model).train()
    other = torch.optim.AdamW(reference.trained_parameters(), lr=LR, betas=cfg.optim.betas, fused=True)
    losses: dict[str, list[Tensor]] = {"ours": [], "reference": []}

    def ours() -> None:
        result = train_step(model, optimizer, [batch], cfg, runtime, Update(0, LR, MOMENTUM))
        losses["ours"].append(result.loss)

    def theirs() -> None:
        losses["reference"].append(reference_step(reference, other, batch, cfg, runtime))

    tokens, width, batch_tokens = model.encoder.num_tokens, model.encoder.width, 2
    rows = batch_tokens * tokens
    shapes = [(rows, width, 4 * width), (rows, 4 * width, width), (rows, width, 3 * width)]
    peaks: list[float] = []

    def product() -> None:
        peaks.append(matmul_peak(DTYPES[name], shapes))

    taken = alternate({"peak": product, "ours": ours, "reference": theirs, "peak again": product}, repeats)
    peak = statistics.median(peaks)
    flops = 2 * step_flops(model, batch["context"].shape[1], batch["target"].shape[1])
    first = float(losses["ours"][0]), float(losses["reference"][0])
    return {
        "ours_s": taken["ours"],
        "reference_s": taken["reference"],
        "ratio": taken["ours"] / taken["reference"],
        "loss_diff": abs(first[0] - first[1]) / first[1],
        "flops": flops,
        "matmul_flops_per_s": peak,
        "matmul_flops_per_s_lowest": min(peaks),
        "matmul_flops_per_s_highest": max(peaks),
        "utilisation": flops / taken["ours"] / peak,
        "reference_utilisation": flops / taken["reference"] / peak,
    }


class EncoderClock:
    """Seconds of the context encoder's forward and backward passes inside whole steps of `model`."""

    def __init__(self, model: VJEPA3D) -> None:
        self.seconds: list[float] = []
        self.started = self.forward_s = self.backward_started = self.backward_ended = 0.0
        model.encoder.register_forward_pre_hook(self._enter)
        model.encoder.register_forward_hook(self._leave)
        for parameter in model.encoder.parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient)

    def _enter(self, *_: object) -> None:
        self.started = time.perf_counter()

    def _leave(self, _module: object, _args: object, features_BKE: Tensor) -> None:
        self.forward_s = time.perf_counter() - self.started
        features_BKE.register_hook(self._enter_backward)

    def _enter_backward(self, _gradient: Tensor) -> None:
        self.backward_started = time.perf_counter()

    def _gradient(self, _parameter: Tensor) -> None:
        self.backward_ended = time.perf_counter()

    def close_step(self) -> None:
        """Call after each step."""
        self.seconds.append(self.forward_s + self.backward_ended - self.backward_started)


def step_memory(recipe: str, imported: int) -> int:
    """Peak bytes of a step in this process above what it held after its imports, parameters and optimizer
    state apart.
    """
    cfg = large_volume(recipe)
    runtime = Runtime(torch.device("cpu"), use_bf16=True)
    model, optimizer, batch = build(cfg)
    train_step(model, optimizer, [batch], cfg, runtime, Update(0, LR, MOMENTUM))
    moments = [m for state in optimizer.state.values() for m in state.values()]
    apart = sum(t.numel() * t.element_size() for t in (*model.parameters(), *moments))
    return memory("VmHWM") - imported - apart


def timed_step(
    clock: EncoderClock,
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    batch: Batch,
    cfg: Config,
    runtime: Runtime,
) -> None:
    train_step(model, optimizer, [batch], cfg, runtime, Update(0, LR, MOMENTUM))
    clock.close_step()


def visible_against_dense(repeats: int) -> dict[str, float]:
    """Row 3: recipe vjepa2 against the dense one of the Methods text, the encoders timed inside the steps."""
    runtime = Runtime(torch.device("cpu"), use_bf16=True)
    works: dict[str, Callable[[], object]] = {}
    flops: dict[str, int] = {}
    encoder: dict[str, int] = {}
    clocks: dict[str, EncoderClock] = {}
    for recipe in ("vjepa2", "methods"):
        cfg = large_volume(recipe)
        model, optimizer, batch = build(cfg)
        if model.dropout or model.drop_path:
            raise ValueError(
                f"{recipe}: expected no stochastic layers, found {model.dropout, model.drop_path}"
            )
        context, target = batch["context"].shape[1], batch["target"].shape[1]
        flops[recipe] = step_flops(model, context, target)
        encoder[recipe] = encoder_flops(model.encoder, context, backward=True)
        clock = clocks[recipe] = EncoderClock(model)
        works[recipe] = partial(timed_step, clock, model, optimizer, batch, cfg, runtime)
    taken = alternate(
        works, repeats, warm_up=False
    )  # a turn takes minutes, of which a warm-up would save little
    inside = {recipe: statistics.median(clock.seconds) for recipe, clock in clocks.items()}
    peaks = {}
    for recipe in ("vjepa2", "methods"):
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.train_step", "--memory", recipe],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks[recipe] = int(process.stdout)
    return {
        "vjepa2_s": taken["vjepa2"],
        "dense_s": taken["methods"],
        "time_ratio": taken["vjepa2"] / taken["methods"],
        "flop_ratio": flops["vjepa2"] / flops["methods"],
        "encoder_visible_s": inside["vjepa2"],
        "encoder_all_s": inside["methods"],
        "encoder_time_ratio": inside["vjepa2"] / inside["methods"],
        "encoder_flop_ratio": encoder["vjepa2"] / encoder["methods"],
        "vjepa2_step_bytes": peaks["vjepa2"],
        "dense_step_bytes": peaks["methods"],
        "memory_ratio": peaks["vjepa2"] / peaks["methods"],
    }


def compiled_against_eager(repeats: int) -> dict[str, float]:
    """`train.compile`: seconds of a step and of the first step, and the largest difference of the losses."""
    result: dict[str, float] = {}
    cache = TemporaryDirectory()  # or the first step would find the programs of an earlier call
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    for name in DTYPES:
        runs = {kind: StepOnDevice(name == "bf16", kind == "compiled") for kind in ("eager", "compiled")}
        first = alternate(dict(runs), 1, warm_up=False)
        taken = alternate(dict(runs), repeats)
        pairs = zip(runs["eager"].losses, runs["compiled"].losses, strict=True)
        result |= {
            f"{name}_eager_s": taken["eager"],
            f"{name}_compiled_s": taken["compiled"],
            f"{name}_ratio": taken["compiled"] / taken["eager"],
            f"{name}_first_step_s": first["compiled"],
            f"{name}_loss_diff": max(abs(a - b) / a for a, b in pairs),
        }
    cache.cleanup()
    return result


class StepOnDevice:
    """Steps of the first rows' volume on the best device of this machine; a call is one."""

    def __init__(self, use_bf16: bool, is_compiled: bool) -> None:
        self.cfg, self.losses = small_volume(use_bf16), list[float]()
        self.runtime = open_runtime(use_bf16)
        model, self.optimizer, batch = build(self.cfg)
        self.model, self.batch = model.to(self.runtime.device), self.runtime.to_device(batch)
        if is_compiled:
            compile_blocks(self.model, self.runtime.device)

    def __call__(self) -> None:
        result = train_step(
            self.model, self.optimizer, [self.batch], self.cfg, self.runtime, Update(0, LR, MOMENTUM)
        )
        self.losses.append(float(result.loss))  # waits for the device


def main(argv: list[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    parser = Parser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the numbers here")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every measurement")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, separated by commas")
    parser.add_argument("--memory", choices=["vjepa2", "methods"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.memory:
        print(step_memory(args.memory, memory("VmRSS")))
        return 0
    wanted = args.rows.split(",")
    if not set(wanted) <= {*ROWS, COMPILED} or args.repeats < 5:
        parser.error(f"expected --rows among {', '.join((*ROWS, COMPILED))} and --repeats 5 or more")
    print(describe(), flush=True)
    keep_freed_memory()  # as a run on a CPU does; the reference gains as much
    results: dict[str, dict[str, Any]] = {}
    for name in wanted:
        if name == "visible_vs_dense":
            results[name] = visible_against_dense(args.repeats)
        elif name == COMPILED:
            results[name] = compiled_against_eager(args.repeats)
        else:
            results[name] = against_reference(name, args.repeats)
        print(name)
        for key, value in results[name].items():
            print(f"  {key:28}{value:.4g}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    unfair = [
        n for n in wanted if n in FAIR_REFERENCE and results[n]["reference_utilisation"] < FAIR_REFERENCE[n]
    ]
    for name in unfair:
        print(f"{name}: reference handicapped: utilisation under {FAIR_REFERENCE[name]:.0%}", file=sys.stderr)
    return 1 if unfair else 0
