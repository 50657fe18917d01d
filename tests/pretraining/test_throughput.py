"""Throughput: parts on every engine, counted operations against PyTorch's counter, peaks by name."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data_setup.masks import MaskPlan
from models.vit3d import SelfAttention
from pretraining.gauges.throughput import CudaLaps, Laps, Throughput, flops_per_step
from pretraining.step import Update, build_optimizer, train_step
from tests.models.test_models import plain
from tests.pretraining.test_step import split
from tests.support.model_factory import nano_model, small_config, uint8_batch
from utils.config.schema import Config
from utils.runtime.device_peak import device_peak, measure_matmul
from utils.runtime.single import Runtime

CPU = Runtime(torch.device("cpu"), use_bf16=False)
CUDA, XLA = torch.device("cuda"), torch.device("xla")


class FakeEvent:
    """An event of a stream whose clock stands at `now_ms`; what lies ahead of it has not passed."""

    now_ms, enqueued_ms = 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = FakeEvent.enqueued_ms

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.now_ms

    def synchronize(self) -> None:
        FakeEvent.now_ms = max(FakeEvent.now_ms, self.at_ms)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query()
        assert later.query(), "torch raises on an event that has not passed"
        return later.at_ms - self.at_ms


def test_laps_on_a_gpu_are_the_streams_time_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    laps = CudaLaps()
    for _ in range(3):
        for part, taken_ms in (("data_wait", 10), ("forward", 200), ("backward", 400), ("update", 50)):
            FakeEvent.enqueued_ms += taken_ms
            laps.lap(part)
        FakeEvent.now_ms += 500  # the device lags behind the host
        laps.settle()
    assert laps.seconds["update"] == pytest.approx(0.1)  # two steps have passed, the third is under way
    assert FakeEvent.now_ms == 1500
    laps.settle(wait=True)
    expected = {"data_wait": 0.03, "forward": 0.6, "backward": 1.2, "update": 0.15, "logging": 0, "other": 0}
    assert laps.seconds == pytest.approx(expected)
    assert FakeEvent.now_ms == FakeEvent.enqueued_ms == 1980


def test_a_clear_forgets() -> None:
    laps = Laps()
    time.sleep(0.05)
    laps.lap("forward")
    assert laps.seconds["forward"] >= 0.05
    time.sleep(0.5)
    laps.clear()
    laps.lap("backward")
    assert laps.seconds["forward"] == 0
    assert laps.seconds["backward"] < 0.5


def speed_on(device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str = "TPU v4") -> Throughput:
    monkeypatch.setattr(Runtime, "device_kind", name)
    monkeypatch.setattr(Runtime, "peak_memory_bytes", lambda _: None)
    cfg = small_config("vjepa2", "train.use_bf16=true")
    return Throughput(cfg, nano_model(cfg).train(), Runtime(device, use_bf16=True))


def test_an_xla_device_tells_no_more_than_the_host_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = speed_on(XLA, monkeypatch)
    speed.restart()
    for part in ("data_wait", "forward", "backward", "update"):
        time.sleep(0.1)
        speed.lap(part)
    speed.end_step()
    values = speed.metrics()
    shares = {key for key in values if key.endswith("_fraction")}
    assert shares == {f"perf/{p}_fraction" for p in ("data_wait", "logging", "other")}
    assert sum(values[key] for key in shares) == pytest.approx(1, abs=0.02)
    assert values["perf/other_fraction"] > values["perf/data_wait_fraction"]
    assert "perf/peak_memory_gib" not in values
    assert values["perf/mfu"] == pytest.approx(values["perf/flops_per_s"] / 275e12)


def test_a_device_without_a_row_has_no_mfu_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speed = speed_on(XLA, monkeypatch, "TPU v99")
    with caplog.at_level(logging.INFO):
        speed.log_start()
    assert "no perf/mfu: no row for 'TPU v99'" in caplog.text
    speed.restart()
    speed.end_step()
    values = speed.metrics()
    assert "perf/mfu" not in values
    assert values["perf/flops_per_s"] > 0


@pytest.mark.parametrize(
    ("name", "bf16", "float32"),
    [
        ("TPU v4", 275, None),
        ("TPU v5 lite", 197, None),
        ("TPU v5", None, None),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", None, None),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA L4", None, None),
    ],
)
def test_peaks_of_data_sheets(name: str, bf16: float | None, float32: float | None) -> None:
    device = XLA if name.startswith("TPU") else CUDA
    for use_bf16, tera in ((True, bf16), (False, float32)):
        peak = device_peak(device, name, use_bf16)
        assert peak.flops_per_s == (None if tera is None else tera * 1e12)
        assert name in peak.source


def test_rounded_float32_products_have_no_float32_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device_peak(CUDA, "NVIDIA H200", use_bf16=False).flops_per_s is None
    assert device_peak(CUDA, "NVIDIA H200", use_bf16=True).flops_per_s == 989e12


def test_the_measured_peak_of_a_cpu_is_quick_and_draws_nothing() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measure_matmul.cache_clear()
    began = time.perf_counter()
    rate = measure_matmul(torch.float32)
    assert time.perf_counter() - began < 10  # under one second where nothing else runs
    assert torch.equal(torch.get_rng_state(), before)
    a = torch.randn(256, 256)
    began = time.perf_counter()
    a @ a
    assert rate > 0.5 * 2 * 256**3 / (time.perf_counter() - began)


def batch_of(cfg: Config) -> dict[str, torch.Tensor]:
    """A global batch with as many context and target tokens as the loader gives."""
    batch, plan = uint8_batch(cfg, cfg.train.global_batch_size), MaskPlan.from_config(cfg)
    tokens = batch["token_valid"].shape[1]
    order = torch.stack([torch.randperm(tokens) for _ in range(len(batch["row"]))])
    context, target = order[:, : plan.num_context], order[:, -plan.num_target :]
    valid = {
        f"{k}_valid": batch["token_valid"].gather(1, v).float()
        for k, v in (("context", context), ("target", target))
    }
    return {**batch, "context": context, "target": target, **valid}


def counted_by_torch(cfg: Config, parts: int) -> tuple[int, int]:
    """(ours, torch's) operations of one real update of so many micro-batches."""
    model = nano_model(cfg).train()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attention = plain
    batches = split(batch_of(cfg), parts)
    with FlopCounterMode(display=False) as counter:
        train_step(model, build_optimizer(model, cfg), batches, cfg, CPU, Update(0, 1e-3, 0.9))
    return flops_per_step(cfg, model, parts), counter.get_total_flops()


@pytest.mark.parametrize(
    ("recipe", "parts"), [("vjepa2", 1), ("vjepa2", 4), ("methods", 1), ("mae", 2), ("surroundings", 1)]
)
def test_flops_of_a_real_step_are_what_torch_counts(recipe: str, parts: int) -> None:
    """The penalty's covariance is no model FLOP, hence the few per cent."""
    cfg = small_config(recipe, f"train.per_core_batch_size={16 // parts}")
    ours, theirs = counted_by_torch(cfg, parts)
    assert ours == pytest.approx(theirs, rel=0.03)
