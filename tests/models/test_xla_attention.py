"""The kernels of utils/runtime/xla_kernels.py: flash attention against the plain path, its kernels run by
Pallas' interpreter on the CPU, and activation checkpointing against none. `make test-xla` runs these.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_xla", reason="needs the environment of make test-xla")
pytest.importorskip("jax", reason="needs the environment of make test-xla")

import jax
import jax.numpy as jnp
import torch_xla

from models.engine_kernels import choose_kernels
from models.kernels import pallas_flash as flash_kernels
from models.vit3d import gather_tokens
from pretraining.step import Update, build_optimizer, predict, train_step
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.runtime.xla_kernels import FlashAttention, RowGather, Shape, _payload, call_on_tpu

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of jax' own modules, on import
]


@pytest.fixture(scope="module", autouse=True)
def xla() -> Runtime:
    """The engine, opened before the first backward pass of plain torch: autograd would not find it later."""
    return open_runtime(use_bf16=False, data_timeout_s=60.0)


def interpret(name: str, operands: list[Tensor], tokens: int, results: list[Shape]) -> list[Tensor]:
    """One kernel by Pallas' interpreter, from torch to torch."""
    made = _kernel(name, tokens)(*(_to_jax(x) for x in operands))
    tensors = [torch.from_numpy(np.array(x.astype(jnp.float32))) for x in made]
    assert [tuple(x.shape) for x in tensors] == [shape for shape, _ in results]
    assert [x.dtype.name for x in made] == [str(dtype).removeprefix("torch.") for _, dtype in results]
    return [x.to(dtype) for x, (_, dtype) in zip(tensors, results, strict=True)]


@cache
def _kernel(name: str, tokens: int) -> Callable[..., list[jax.Array]]:
    return jax.jit(partial(getattr(flash_kernels, name), tokens=tokens, interpret=True))


def _to_jax(x: Tensor) -> jax.Array:
    return jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


FLASH = FlashAttention(None, flash_kernels, interpret)
# tokens: fewer than a block; whole blocks; padding in a block of 128, of 384; two passes over far tokens
SHAPES = [(2, 2, 24, 32), (1, 2, 256, 64), (1, 1, 300, 32), (1, 1, 1100, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"]
)
def test_output_and_gradients_are_those_of_the_plain_path(
    shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator).mul(1.5).to(dtype) for _ in range(4))
    results = []
    for run in (FLASH, plain):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = run(*inputs)
        out.backward(grad.to(out.dtype))
        results.append([out, *(x.grad for x in inputs)])
    for name, ours, expected in zip(("output", "q", "k", "v"), *results, strict=True):
        error = (ours.double() - expected.double()).abs().max() / expected.abs().max()
        assert error < tolerance, f"{name}: {error}"


def in_torch(name: str, operands: list[torch.Tensor], tokens: int, _results: object) -> list[torch.Tensor]:
    """The kernels' work in plain operations, which XLA can run on a CPU inside a program of four devices."""
    q, k, v, *rest = operands if name != "grad_kv" else (operands[i] for i in (2, 0, 1, 3, 4, 5))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    scores[:, :, tokens:] = float("-inf")
    if name == "forward":
        return [torch.softmax(scores, -1) @ v, scores.logsumexp(-1).unsqueeze(1)]
    do, lse, di = rest
    p = torch.exp(scores - lse.transpose(1, 2))
    ds = p * (do @ v.transpose(1, 2) - di.transpose(1, 2)) * q.shape[-1] ** -0.5
    return [ds @ k] if name == "grad_q" else [ds.transpose(1, 2) @ q, p.transpose(1, 2) @ do]


def test_every_device_of_a_mesh_attends_to_its_own_samples(xla: Runtime) -> None:
    """Four devices, two samples each: output and gradients of the whole batch, padded and put together."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 8, 2, 100, 32, generator=generator).unbind(0)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = plain(*inputs)
    expected.backward(grad.to(expected.dtype))
    batch = xla.to_device({"q": q, "k": k, "v": v, "grad": grad})
    placed = [batch[name].detach().requires_grad_() for name in "qkv"]
    out = FlashAttention(xla.mesh, flash_kernels, in_torch)(*placed)
    out.backward(batch["grad"])
    results = [out, *(x.grad for x in placed)]
    wanted = [expected, *(x.grad for x in inputs)]
    for ours, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(xla.to_torch(ours.detach()), theirs.detach().float(), atol=2e-5, rtol=1e-4)


def test_rows_by_id_are_those_of_gather_on_the_device_that_has_the_sample(xla: Runtime) -> None:
    """Eight samples on four devices; rows that were read twice get both gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 30, 5, generator=generator)
    ids = torch.randint(30, (8, 20), generator=generator)
    grad = torch.randn(8, 20, 5, generator=generator)
    wanted = x.clone().requires_grad_()
    expected = gather_tokens(wanted, ids)
    expected.backward(grad)
    assert wanted.grad is not None
    batch = xla.to_device({"x": x, "ids": ids, "grad": grad})
    placed = batch["x"].detach().requires_grad_()
    cfg = small_config()
    model = nano_model(cfg)
    choose_kernels(model, cfg, xla)
    assert isinstance(model.target_encoder.patch_embed.gather, RowGather)
    gather = model.gather
    assert isinstance(gather, RowGather)
    rows = gather(placed, batch["ids"])
    rows.backward(batch["grad"])
    assert placed.grad is not None
    program = torch_xla._XLAC._get_xla_tensors_hlo([rows, placed.grad])
    (line,) = (line for line in program.splitlines() if " gather(" in line)
    assert "slice_sizes={1,5}" in line  # whole rows, not single values
    assert "f32[60,5]" in line  # of the two samples of this device
    torch.testing.assert_close(xla.to_torch(rows.detach()), expected.detach())
    torch.testing.assert_close(xla.to_torch(placed.grad), wanted.grad)
    odd = gather(batch["x"][:3], batch["ids"][:3])  # no sample for each device
    torch.testing.assert_close(xla.to_torch(odd.detach()), expected[:3].detach())


def test_far_tokens_that_do_not_fit_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 1, 1100, 32, generator=torch.Generator().manual_seed(1))
    assert flash_kernels._resident(1152, 384, 4) == 1152
    whole = FLASH(q, k, v)
    monkeypatch.setattr(flash_kernels, "RESIDENT_BYTES", 0)
    _kernel.cache_clear()
    assert flash_kernels._resident(1152, 384, 4) == 384
    torch.testing.assert_close(FLASH(q, k, v), whole, atol=1e-5, rtol=1e-5)


def test_scores_far_below_zero_leave_no_trace_of_the_padding() -> None:
    """exp(-log-sum-exp) of a padded key is infinite here; nothing of it may reach a gradient."""
    q, k = torch.full((1, 1, 100, 32), 30.0), torch.full((1, 1, 100, 32), -30.0)
    v = torch.randn(1, 1, 100, 32, generator=torch.Generator().manual_seed(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = FLASH(*inputs)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-5, rtol=1e-5)
    out.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in inputs)


@pytest.mark.parametrize("tokens", [1, 24, 128, 300, 1100, 3686, 6451, 9216])
def test_a_block_pads_little(tokens: int) -> None:
    block = flash_kernels.block_of(tokens)
    assert -(-tokens // block) * block <= max(1.05 * tokens, tokens + 127)


def test_a_training_step_takes_it() -> None:
    cfg = small_config("vjepa2")
    losses = []
    for use_flash in (False, True):
        model = nano_model(cfg).train()
        if use_flash:
            for module in model.modules():
                if hasattr(module, "attention"):
                    module.attention = FLASH
        optimizer = build_optimizer(model, cfg)
        runtime = Runtime(torch.device("cpu"), use_bf16=False)
        for step in (0, 1):
            batch = uint8_batch(cfg, 16, step)
            losses.append(
                float(train_step(model, optimizer, [batch], cfg, runtime, Update(step, 1e-3, 0.9)).loss)
            )
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize("recipe", ["vjepa2", "methods"])
def test_checkpointing_on_xla_changes_no_gradient(recipe: str, xla: Runtime) -> None:
    losses, gradients = [], []
    for on in ("false", "true"):
        noise = ("method.dropout=0.2", "method.drop_path=0.3")
        cfg = small_config(recipe, *noise, f"train.activation_checkpointing={on}")
        model = nano_model(cfg).to(xla.device).train()
        choose_kernels(model, cfg, xla)
        optimizer = build_optimizer(model, cfg)
        batch = xla.to_device(uint8_batch(cfg, 16))
        loss = train_step(model, optimizer, [batch], cfg, xla, Update(0, 1e-3, 0.9)).loss
        xla.mark_step()
        losses.append(float(loss))
        gradients.append({name: p.grad.cpu() for name, p in model.trained_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_checkpointing_reaches_the_recorded_program(xla: Runtime) -> None:
    """A barrier keeps XLA from merging the second computation of a block with the first."""
    barriers = []
    for on in ("false", "true"):
        cfg = small_config("vjepa2", f"train.activation_checkpointing={on}")
        model = nano_model(cfg).to(xla.device).train()
        choose_kernels(model, cfg, xla)
        output = predict(model, xla.to_device(uint8_batch(cfg, 16)), xla, stochastic=False)
        output.loss_B.sum().backward()
        grads = [p.grad for _, p in model.trained_parameters()]
        barriers.append(torch_xla._XLAC._get_xla_tensors_hlo(grads).count("opt-barrier"))
    assert barriers[0] == 0
    assert barriers[1] >= 4  # two blocks of each transformer


def test_the_kernels_become_custom_calls_of_a_tpu(xla: Runtime) -> None:
    q, k, v = (torch.zeros(2, 256, 64, dtype=torch.bfloat16).to(torch_xla.device()) for _ in range(3))
    shapes: list[Shape] = [((2, 256, 64), torch.bfloat16), ((2, 1, 256), torch.float32)]
    out = call_on_tpu(flash_kernels, "forward", [q, k, v], 256, shapes)
    assert "tpu_custom_call" in torch_xla._XLAC._get_xla_tensors_hlo(out)


def test_the_kernels_have_the_form_that_the_workers_compiler_reads() -> None:
    """libtpu 0.0.21, which torch_xla 2.9 installs, refuses version 8 of a Mosaic module."""
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    kind = ((2, 256, 64), "bfloat16")
    body = base64.b64decode(
        json.loads(_payload(flash_kernels, "forward", (kind,) * 3, 256))["custom_call_config"]["body"]
    )
    with make_ir_context() as context:
        context.allow_unregistered_dialects = True
        version = ir.Module.parse(body).operation.attributes["stable_mosaic.version"]
        assert ir.IntegerAttr(version).value <= 7
