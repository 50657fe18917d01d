"""Training steps of several kinds, from one volume a device upwards until memory ends.

In: sizes, and a device. Out: a row for each kind and batch: seconds of a step, the share of the peak that its
counted operations take (MFU), GiB at most. The reference is Hugging Face's V-JEPA 2 in the same loop, from
the same weights (reference_vjepa2.py); `plain` is our step with what it has, so without the penalty and the
loss of neighbours.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.accelerator.batches import synthetic_batch
from benchmarks.accelerator.reference_vjepa2 import ReferenceVJEPA2
from data_setup.loader import Batch
from data_setup.normalisation import view
from models.engine_kernels import compile_blocks
from models.vit3d import recompute_block
from models.vjepa3d import VJEPA3D
from pretraining.gauges.throughput import volume_flops
from pretraining.step import Update, build_optimizer, train_step
from utils.config.load import load_config
from utils.config.schema import Config
from utils.runtime.single import Runtime

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "pretrain_oct_vjepa2.yaml"
PLAIN = ("method.regulariser=none", "method.regulariser_weight=0", "method.neighbour_weight=0")
METHODS = (*PLAIN, "method.recipe=methods", "method.mask_ratio=0.6", "method.ema_base=0.996")
TIMED_STEPS = 3
LR, MOMENTUM = 1e-4, 0.999
Kind = Literal["ours", "checkpointing", "plain", "reference", "methods"]


@dataclass(frozen=True)
class Sizes:
    """What is stepped: overrides of pretrain_oct_vjepa2.yaml, and the largest batch that is tried."""

    overrides: tuple[str, ...]
    most: int


FULL = Sizes((), 64)
TINY = Sizes(
    (
        "spatial.image_size=[8,64,64]",
        "model.size=ti",
        "method.predictor_depth=2",
        "method.predictor_width=64",
    ),
    2,
)


def configure(kind: Kind, sizes: Sizes, batch: int) -> Config:
    """Its recipe at these sizes, its batch in one go."""
    own = {"ours": (), "checkpointing": ("train.activation_checkpointing=true",), "methods": METHODS}
    size = f"train.global_batch_size={batch}", f"train.per_core_batch_size={batch}", "train.max_steps=1000"
    return load_config(CONFIG, [*sizes.overrides, *own.get(kind, PLAIN), *size])


class Stepper:
    """One kind of step; a call with a batch is one update of it."""

    def __init__(self, kind: Kind, sizes: Sizes, runtime: Runtime, *, compiles: bool = False) -> None:
        self.cfg, self.runtime = configure(kind, sizes, 1), runtime
        torch.manual_seed(0)
        self.model = VJEPA3D(self.cfg).to(runtime.device).train()
        if kind == "checkpointing":
            self.model.checkpoint_activations(recompute_block)
        self.flops = volume_flops(self.cfg, self.model).training
        self.reference: ReferenceVJEPA2 | None = None
        if kind == "reference":
            for part in (self.model.encoder, self.model.target_encoder, self.model.predictor):
                part.rope = "tiled"  # the reference knows no other
            self.reference = ReferenceVJEPA2(self.model).to(runtime.device).train()
            del self.model
            weights = self.reference.trained_parameters()
            self.optimizer = torch.optim.AdamW(weights, lr=LR, betas=self.cfg.optim.betas, fused=True)
        else:
            self.optimizer = build_optimizer(self.model, self.cfg)
        if compiles and self.reference is not None:
            for layer in (*self.reference.encoder.layer, *self.reference.predictor.layer):
                layer.compile(dynamic=False)
            for layer in self.reference.target_encoder.layer:
                layer.compile(dynamic=False)
        elif compiles:
            compile_blocks(self.model, runtime.device)

    def batch(self, size: int) -> Batch:
        train = replace(self.cfg.train, global_batch_size=size, per_core_batch_size=size)
        self.cfg = replace(self.cfg, train=train)
        return self.runtime.to_device(synthetic_batch(self.cfg, 0))

    def __call__(self, batch: Batch) -> Tensor:
        """The loss."""
        if self.reference is None:
            update = Update(0, LR, MOMENTUM)
            return train_step(self.model, self.optimizer, [batch], self.cfg, self.runtime, update).loss
        self.optimizer.zero_grad(set_to_none=True)
        with self.runtime.autocast():
            loss = self.reference(view(batch, 0), view(batch, 1), batch["context"], batch["target"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.reference.trained_parameters(), self.cfg.optim.clip_grad_norm)
        self.optimizer.step()
        self.reference.update_target(MOMENTUM)
        return loss.detach()


def measure(stepper: Stepper, size: int, peak: float | None) -> dict[str, float | None] | None:
    """Median of the timed steps after one to warm up; None where the batch does not fit. Without a peak there
    is no MFU.
    """
    runtime, numbers = stepper.runtime, dict[str, float | None]()
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)

    def work() -> None:
        batch = stepper.batch(size)
        start = time.perf_counter()
        numbers["loss"] = float(stepper(batch))
        numbers["first_s"] = time.perf_counter() - start
        taken = []
        for _ in range(TIMED_STEPS):
            runtime.synchronise()
            start = time.perf_counter()
            stepper(batch)
            runtime.synchronise()
            taken.append(time.perf_counter() - start)
        seconds = statistics.median(taken)
        numbers["step_s"], numbers["volumes_per_s"] = seconds, size / seconds
        numbers["mfu"] = stepper.flops * size / seconds / peak if peak else None
        numbers["peak_gib"] = (runtime.peak_memory_bytes() or 0) / 2**30

    if not runtime.attempt(work):
        stepper.optimizer.zero_grad(set_to_none=True)
        return None
    return numbers


def sweep(
    kind: Kind,
    sizes: Sizes,
    runtime: Runtime,
    peak: float | None,
    batches: list[int],
    *,
    compiles: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row a batch; the first that does not fit is the last. What is held is let go before the next kind."""
    stepper = Stepper(kind, sizes, runtime, compiles=compiles)
    for size in batches:
        numbers = measure(stepper, size, peak)
        name = f"{kind}, compiled" if compiles else kind
        yield {"kind": name, "batch": size, "fits": numbers is not None, **(numbers or {})}
        if numbers is None:
            break
    del stepper
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()


def eager_steps(
    sizes: Sizes, runtime: Runtime, peak: float | None, write: Callable[[str, Any], None]
) -> None:
    """Every kind, eager; `write` gets all rows after each."""
    kinds: list[Kind] = ["ours", "reference", "plain", "checkpointing", "methods"]
    batches = [2**n for n in range(sizes.most.bit_length())]
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        for row in sweep(kind, sizes, runtime, peak, batches):
            rows.append(row)
            write("rows", rows)
    write("ratios", ratios(rows))


def compiled_steps(
    sizes: Sizes,
    runtime: Runtime,
    peak: float | None,
    rows: list[dict[str, Any]],
    write: Callable[[str, Any], None],
) -> None:
    """`train.compile`, and the reference's layers compiled, at the largest batch that fits each eager."""
    done: list[dict[str, Any]] = []
    kinds: list[Kind] = ["ours", "plain", "reference"]
    for kind in kinds:
        fitting = [row["batch"] for row in rows if row["kind"] == kind and row["fits"]] or [1]
        torch.compiler.reset()  # each kind begins with no program
        done += sweep(kind, sizes, runtime, peak, [max(fitting)], compiles=True)
        write("rows", done)
    write("ratios", ratios([*rows, *done]))


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Step time of `plain` over the reference's where both have a batch."""
    at = {(row["kind"], row["batch"]): row for row in rows if row["fits"]}
    shares = {}
    for (kind, batch), row in at.items():
        other = at.get((kind.replace("plain", "reference"), batch))
        if kind.startswith("plain") and other is not None:
            shares[f"{kind}, batch {batch}"] = row["step_s"] / other["step_s"]
    return shares
