"""What one of two processes of a run does: `python -m tests.support.two_processes OUT [compiled]`.

In: RANK and the other variables that torchrun sets. Out: the first saves to OUT what each of them has
("each"), what it met when the other one was gone half-way through an update ("lost"), and which modules of
transformers it has imported.
With `compiled`: what each has of the compiled cases, and its counts of programs and of graph breaks.
"""

import os
import sys
from typing import Any
from unittest.mock import patch

import torch

from models.batch_norm import WeightedBatchNorm
from models.engine_kernels import choose_kernels
from pretraining import train as loop
from pretraining.gauges.monitor import target_drift, update_ratio
from pretraining.run import Run
from pretraining.step import Update, Watch, build_optimizer, train_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from tests.support.planted_pickle import forbid_pickle
from utils.runtime.open import open_runtime
from utils.runtime.processes import LostPeer
from utils.runtime.single import Runtime

SAMPLES = 8
WATCHED = Watch(measures=lambda: True)
CASES = {  # recipe, overrides, accumulation
    "vjepa2": ("vjepa2", (), 1),
    "accumulated": ("vjepa2", (), 2),
    "methods": ("methods", ("method.dropout=0.1",), 1),
    "surroundings": ("surroundings", (), 1),
    "mae": ("mae", ("method.neighbour_weight=1",), 2),
}
COMPILE = "train.compile=true"
COMPILED = {"compiled": ("vjepa2", (COMPILE,), 1)}


def losses_and_weights(runtime: Runtime, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three updates of a case, of which the second is not finite."""
    recipe, overrides, accumulation = (CASES | COMPILED)[name]
    cfg = small_config(recipe, f"train.global_batch_size={SAMPLES}", *overrides)
    model = nano_model(cfg).train()
    for module in model.modules():
        if isinstance(module, WeightedBatchNorm):
            module.total = runtime.group.sum_with_gradient
    choose_kernels(model, cfg, runtime)
    optimizer = build_optimizer(model, cfg)
    losses, gauges = [], []
    for step in range(3):
        batch = uint8_batch(cfg, SAMPLES, step)
        if step == 1:
            batch["intensity"][-1] = float("nan")  # of the last process alone
        share = SAMPLES // runtime.world_size // accumulation
        firsts = [(n * runtime.world_size + runtime.rank) * share for n in range(accumulation)]
        parts = [{key: value[first : first + share] for key, value in batch.items()} for first in firsts]
        result = train_step(model, optimizer, parts, cfg, runtime, Update(step, 1e-3, 0.9), WATCHED)
        losses += [float(result.loss), float(result.grad_norm)]
        if result.penalty_to_prediction is not None:
            gauges += [float(result.penalty_to_prediction)]
    gauges += [float(update_ratio(optimizer)), float(target_drift(model))]
    return losses + gauges, {name: runtime.to_torch(value) for name, value in model.state_dict().items()}


def settled_batch(runtime: Runtime) -> tuple[int, float]:
    """The per-core batch after the second process could do with one volume, and the next loss."""
    cfg = small_config("mae", "train.global_batch_size=8", "train.per_core_batch_size=4")
    model = nano_model(cfg)
    run = Run(cfg, None, None, model, build_optimizer(model, cfg), runtime)  # type: ignore[arg-type]
    is_tried = True

    def limited(_module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        if is_tried and runtime.rank == 1 and len(arguments[0]) > 1:
            raise torch.OutOfMemoryError("planted")

    model.predictor.predictor_blocks[1].register_forward_pre_hook(limited)  # type: ignore[union-attr,index]
    with patch.object(
        loop, "open_loader", lambda run, *_: [[uint8_batch(run.cfg, run.cfg.train.per_core_batch_size)]]
    ):  # the loop itself opens its loader by this name
        settled = loop.settle_memory(run, 0).cfg.train.per_core_batch_size
    is_tried = False
    share = SAMPLES // runtime.world_size
    batch = {key: v[runtime.rank * share :][:share] for key, v in uint8_batch(cfg, SAMPLES).items()}
    return settled, float(train_step(model, run.optimizer, [batch], cfg, runtime, Update(0, 1e-3, 0.9)).loss)


def met_without_peer(runtime: Runtime) -> list[Any]:
    """The second process ends after its forward pass: the message and the exit code of the first one."""
    cfg = small_config("mae", f"train.global_batch_size={SAMPLES}")
    model = nano_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    passed = []

    def lap(part: str) -> None:
        passed.append(part)
        if runtime.rank == 1:
            os._exit(0)

    batch = uint8_batch(cfg, SAMPLES // runtime.world_size)
    try:
        train_step(model, optimizer, [batch], cfg, runtime, Update(0, 1e-3, 0.9), Watch(lap=lap))
    except LostPeer as error:
        return [passed, str(error), error.exit_code]
    raise AssertionError("expected the other process to be missed")


def save_compiled(runtime: Runtime, out: str) -> None:
    saved = {name: losses_and_weights(runtime, name) for name in COMPILED}
    counters = torch._dynamo.utils.counters
    counts = [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]
    everyone = runtime.group.gather_objects([saved, counts])
    if runtime.group.is_first:
        torch.save(everyone, out)
    runtime.group.close()


def main(out: str, what: str = "plain") -> None:
    torch.set_num_threads(1)
    runtime = open_runtime(use_bf16=False, data_timeout_s=1.0)
    if what == "compiled":
        save_compiled(runtime, out)
        return
    imported = [name for name in sys.modules if name.startswith("transformers.")]
    pickle_again = forbid_pickle()  # a peer may be anybody
    settled = settled_batch(runtime)
    saved = {name: losses_and_weights(runtime, name) for name in CASES}
    everyone = runtime.group.gather_objects([settled, saved])
    lost = met_without_peer(runtime)  # the group is gone after it
    pickle_again()
    torch.save({"each": everyone, "lost": lost, "imported": imported}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
