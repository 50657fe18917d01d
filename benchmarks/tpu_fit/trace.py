"""Record one training step for a TPU slice without running it: the first process of `benchmarks.tpu_fit`.

`python -m benchmarks.tpu_fit.trace --config FILE --chips N --program OUT [section.key=value ...]`, in the
environment with torch_xla, with PJRT_DEVICE=CPU and CPU_NUM_DEVICES=N. It calls what training calls: the
model, the optimizer, the engine and `train_step`; parameters and optimizer state are placeholders without
data. Out: the step as StableHLO, and OUT.json with the bytes of one device's parameters, target, optimizer
and batch, which outputs share an argument's buffer, the operations counted from the shapes, and the compiler
that a TPU worker gets.
"""

from __future__ import annotations

import sys

from utils.cli import parse_cli, parse_words, run_cli
from utils.runtime import patience

if __name__ == "__main__":  # torch_xla is in an environment of its own
    if {"-h", "--help"} & set(sys.argv[1:]):  # torch_xla comes with the imports
        parse_words("benchmarks.tpu_fit.trace", __doc__ or "", ["--help"])

import argparse
import json
import os
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from benchmarks.accelerator.batches import synthetic_batch
from data_setup.masks import MaskPlan
from models.engine_kernels import choose_kernels
from models.flops import encoder_flops, flash_backward_flops, recomputed_flops, step_flops
from models.vjepa3d import VJEPA3D
from models.weights.load import prefix_of_start
from pretraining.step import Update, build_optimizer, train_step
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.runtime.open import open_runtime

CLASSES = ("parameters", "target", "optimizer", "batch")


def main(argv: list[str] | None = None) -> int:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--chips", type=int, required=True)
        parser.add_argument("--program", type=Path, required=True)

    cfg, args = parse_cli("benchmarks.tpu_fit.trace", __doc__ or "", argv, add_arguments)
    program, facts = trace(cfg, args.chips)
    args.program.write_bytes(program)
    args.program.with_name(f"{args.program.name}.json").write_text(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # a normal end would run the recorded step


def trace(cfg: Config, chips: int) -> tuple[bytes, dict[str, Any]]:
    """The program of one update on `chips` devices, and the facts about its arguments."""
    runtime = open_runtime(cfg.train.use_bf16, patience.DATA_S)
    assert runtime.num_devices == chips, (runtime.num_devices, chips)
    accumulation = accumulation_steps(cfg.train, chips)
    with torch.device("meta"):
        model = VJEPA3D(cfg, prefix_of_start(cfg)).train()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model._apply(_placeholder)
    choose_kernels(model, cfg, runtime, is_for_tpu=True)
    optimizer = build_optimizer(model, cfg)
    for _, weight in model.trained_parameters():
        optimizer.state[weight] = {
            "step": _placeholder(torch.empty((), device="meta")),
            "exp_avg": _placeholder(weight.detach()),
            "exp_avg_sq": _placeholder(weight.detach()),
        }
    of_all_chips = replace(cfg, train=replace(cfg.train, global_batch_size=cfg.train.at_once * chips))
    batches = [runtime.to_device(synthetic_batch(of_all_chips, n)) for n in range(accumulation)]
    state = _state(model, optimizer)
    before = {_id(tensor): place for place, (_, tensor) in enumerate(state)}
    result = train_step(model, optimizer, batches, cfg, runtime, Update(0, cfg.optim.base_lr, 0.999))

    outputs = [tensor for _, tensor in _state(model, optimizer)]
    outputs += [result.loss, result.grad_norm, result.is_finite]
    ids, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    program = torch_xla._XLAC._get_stablehlo(outputs, "", [], False)
    batch_bytes = sum(x.numel() * x.element_size() for batch in batches for x in batch.values()) // chips
    held = dict.fromkeys(CLASSES, 0) | {"batch": batch_bytes}
    for kind, tensor in state:
        held[kind] += tensor.numel() * tensor.element_size()
    return program, {
        "accumulation": accumulation,
        "flops": _flops(model, cfg, accumulation),
        "bytes": held,
        "aliases": [(number, before[i]) for number, i in enumerate(ids) if i in before],
        "volume_bytes": batches[0]["volume"][0].numel(),
        "worker_libtpu": libtpu_of_workers(),
    }


def libtpu_of_workers() -> str:
    """The compiler that a TPU worker gets: the libtpu which torch_xla[tpu] names."""
    (version,) = (
        line[8:].partition(";")[0] for line in requires("torch_xla") or () if line[:8] == "libtpu=="
    )
    return version.strip()


def _flops(model: VJEPA3D, cfg: Config, accumulation: int) -> dict[str, int]:
    """Operations of one device and step, counted from the shapes, by what they are for."""
    plan, samples = MaskPlan.from_config(cfg), cfg.train.at_once * accumulation
    counts = (model, plan.num_context, plan.num_target)
    flops = {"model": step_flops(*counts)}
    if cfg.train.activation_checkpointing:
        flops["activation checkpointing"] = recomputed_flops(*counts)
    if cfg.model.tpu_attention == "flash":
        flops["flash attention"] = flash_backward_flops(*counts)
    if cfg.method.regulariser != "none" and accumulation > 1:
        seen = model.encoder.num_tokens if model.is_dense else plan.num_context
        flops["means of the regulariser"] = encoder_flops(model.encoder, seen)
    return {purpose: samples * count for purpose, count in flops.items()}


def _placeholder(like: Tensor) -> Tensor:
    return xb.create_placeholder_tensor(like.shape, like.dtype)


def _id(tensor: Tensor) -> int:
    return torch_xla._XLAC._xla_get_tensor_id(tensor)


def _state(model: VJEPA3D, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """(class, tensor) of everything that an update changes, in a fixed order."""
    state: list[tuple[str, Tensor]] = [("parameters", weight) for _, weight in model.trained_parameters()]
    state += [("parameters", buffer) for buffer in model.buffers()]
    state += [("target", weight) for weight in model.target_encoder.parameters()]
    for _, weight in model.trained_parameters():
        state += [("optimizer", value) for value in optimizer.state[weight].values()]
    return state


if __name__ == "__main__":
    run_cli(main)
