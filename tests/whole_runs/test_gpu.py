"""One GPU: what a CPU cannot show. `make test-gpu` runs it; without a CUDA device every test is skipped.

Not run on a device yet: the tolerances are expectations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.attention import attention
from models.engine_kernels import choose_kernels
from pretraining import train as loop
from pretraining.run import Run
from pretraining.step import StepResult, Update, build_optimizer, train_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.config.schema import Config
from utils.runtime.open import open_runtime
from utils.runtime.processes import ALONE, Group, ProcessGroup
from utils.runtime.single import Runtime

# a warning is no error here until it is known which ones a device's libraries give
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
GIB = 2**30
RECIPES = ("vjepa2", "methods", "mae", "neighbour", "surroundings")


def steps(cfg: Config, runtime: Runtime, count: int = 2) -> list[StepResult]:
    """The first updates of a nano model on this device."""
    model = nano_model(cfg).to(runtime.device).train()
    choose_kernels(model, cfg, runtime)
    optimizer = build_optimizer(model, cfg)
    results = []
    for step in range(count):
        batch = runtime.to_device(uint8_batch(cfg, 16, step))
        results.append(train_step(model, optimizer, [batch], cfg, runtime, Update(step, 1e-3, 0.9)))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return results


def losses(results: list[StepResult]) -> list[float]:
    both = (loss for result in results for loss in (result.loss, result.neighbour))
    return [float(loss) for loss in both if loss is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_has_the_losses_of_a_cpu_and_nearly_so_in_bfloat16(recipe: str) -> None:
    cfg = small_config(recipe)
    expected = losses(steps(cfg, Runtime(torch.device("cpu"), use_bf16=False)))
    exact = losses(steps(cfg, open_runtime(use_bf16=False)))
    rough = losses(steps(cfg, open_runtime(use_bf16=True)))
    assert exact == pytest.approx(expected, rel=1e-4)
    assert rough == pytest.approx(expected, rel=0.03)
    assert rough != exact, "nothing was computed in bfloat16"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_update_moves_nothing(recipe: str) -> None:
    """The fused kernel of a GPU reads `found_inf` too: neither weights nor moments nor its count move."""
    cfg, runtime = small_config(recipe), open_runtime(use_bf16=True)
    model = nano_model(cfg).to(runtime.device).train()
    optimizer = build_optimizer(model, cfg)
    batches = [runtime.to_device(uint8_batch(cfg, 16, step)) for step in range(2)]
    train_step(model, optimizer, batches[:1], cfg, runtime, Update(0, 1e-3, 0.9))
    kept = [t.clone() for t in tensors(model, optimizer)]
    batches[1]["mean"][3] = float("nan")
    result = train_step(model, optimizer, batches[1:], cfg, runtime, Update(1, 1e-3, 0.9))
    assert not bool(result.is_finite)
    for old, new in zip(kept, tensors(model, optimizer), strict=True):
        assert torch.equal(old, new)


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights, buffers and moments, the optimizer's count of steps among them."""
    states = optimizer.state.values()
    return [*model.state_dict().values(), *(value for state in states for value in state.values())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_step_has_the_losses_of_a_plain_one(recipe: str) -> None:
    runtime = open_runtime(use_bf16=True)
    plain, compiled = (
        losses(steps(small_config(recipe, f"train.compile={value}"), runtime)) for value in ("false", "true")
    )
    assert compiled == pytest.approx(plain, rel=0.01)


def test_flash_attention_takes_what_the_model_gives_it() -> None:
    """No mask and no odd layout keeps torch from its flash kernel, forward and backward."""
    runtime = open_runtime(use_bf16=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # a RuntimeError where it cannot be used
        result = steps(small_config("neighbour"), runtime, 1)[0]
    assert bool(torch.isfinite(result.grad_norm))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 96, 64, generator=generator) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fast = attention(*(t.cuda().bfloat16() for t in (q, k, v)))
    torch.testing.assert_close(fast.float().cpu(), attention(q, k, v), atol=2e-2, rtol=2e-2)


@pytest.fixture
def nccl() -> Iterator[ProcessGroup]:
    """A group of one process, which goes through NCCL all the same."""
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    group = ProcessGroup(0, 1, store, 60.0)
    yield group
    group.close()


def test_nccl_sums_gathers_and_trains_as_no_group_does(nccl: ProcessGroup) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    value = torch.arange(6.0, device=device).view(2, 3)
    for collected in (nccl.sum(value), nccl.gather(value), nccl.sum_with_gradient(value)):
        torch.testing.assert_close(collected, value)
    assert torch.equal(nccl.gather(value > 2), value > 2)
    assert nccl.any(True)
    assert not nccl.any(False)
    assert torch.equal(nccl.broadcast({"x": value})["x"], value)
    cfg = small_config("neighbour")
    groups: tuple[Group, ...] = (ALONE, nccl)
    alone, together = (losses(steps(cfg, Runtime(device, use_bf16=False, group=g), 3)) for g in groups)
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("wanted", ["512", "auto"])
def test_a_trial_step_that_runs_out_of_memory_halves_the_batch(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real shortage: this process may take 2 GiB, and 512 volumes need more; `auto` comes from below."""
    runtime = open_runtime(use_bf16=False)
    sizes = ("spatial.image_size=[16,96,96]", "train.global_batch_size=512")
    cfg = small_config("vjepa2", *sizes, f"train.per_core_batch_size={wanted}")
    model = nano_model(cfg).to(runtime.device).train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    nothing: Any = None  # of the store and its rows, which open_loader would read
    run = Run(cfg, nothing, nothing, model, build_optimizer(model, cfg), runtime)
    tried = []

    def open_loader(run: Run, *_: object) -> list[list[dict]]:
        tried.append(run.cfg.train.per_core_batch_size)
        return [[uint8_batch(run.cfg, tried[-1])]]

    monkeypatch.setattr(loop, "open_loader", open_loader)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(runtime.device).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * GIB / whole)
    try:
        settled = loop.settle_memory(run, 0).cfg.train
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(tried) > 1, "the first batch did not exceed the memory"
    assert 2 * tried[-1] in tried, "a larger one was tried"
    assert settled.per_core_batch_size == tried[-1] < 512
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
