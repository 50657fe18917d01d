"""The XLA engine against plain torch: the same update from the same batch. `make test-xla` runs these, on
four devices of a CPU; whole runs are in tests/whole_runs/test_xla_run.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.optimizer import MOMENTS, SelectingAdamW
from pretraining.run import Run as TrainingRun
from pretraining.step import Update, train_step, trial_step
from pretraining.train import settle_memory
from tests.support.model_factory import small_config, uint8_batch
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import environment
from tests.support.xla_counters import count_compiled, count_fallbacks, count_read_back
from tests.support.xla_factory import BAD_STEP, BATCH, STEPS, Run, assert_close, assert_same_weights, open_xla
from utils.counter_rng import counter_bits, counter_normal, counter_uniform
from utils.errors import UserError
from utils.provenance import provenance
from utils.runtime.device_peak import device_peak
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

pytestmark = pytest.mark.xla
RECIPES = {
    "vjepa2": ("vjepa2", 2, ()),  # recipe, micro-batches, overrides
    "vjepa2_neighbours": ("vjepa2", 1, ("method.neighbour_weight=1",)),
    "mae": ("mae", 1, ()),
    "methods": ("methods", 1, ()),
    "surroundings": ("surroundings", 1, ()),
}


@pytest.fixture(scope="module")
def xla() -> Runtime:
    return open_xla()


@pytest.fixture(scope="module")
def plain(xla: Runtime) -> Runtime:
    return Runtime(torch.device("cpu"), use_bf16=False)


@pytest.mark.parametrize("name", list(RECIPES))
def test_losses_are_those_of_plain_torch(name: str, xla: Runtime, plain: Runtime) -> None:
    """With it: one program after the first step, nothing read back, nothing that XLA leaves to the CPU, the
    same optimizer state and gauges, and an update without finite loss moves nothing.
    """
    recipe, micro, overrides = RECIPES[name]
    cfg = small_config(recipe, *overrides)
    expected = Run.begin(cfg, plain)
    wanted = expected.steps(plain, range(STEPS), micro)
    run = Run.begin(cfg, xla)
    fallbacks = count_fallbacks()
    losses = run.steps(xla, range(3), micro)
    compiled, read_back = count_compiled(), count_read_back()
    losses += run.steps(xla, range(3, STEPS), micro)
    assert (count_compiled(), count_read_back()) == (compiled, read_back)
    assert count_fallbacks() == fallbacks

    assert [float(x) for x in losses[:5]] == pytest.approx([float(x) for x in wanted[:5]], rel=1e-4)
    assert [float(x) for x in losses] == pytest.approx([float(x) for x in wanted], rel=1e-3)
    before = run.state()
    assert_close(before, expected.state())

    (loss,) = run.steps(xla, range(BAD_STEP, BAD_STEP + 1), micro)
    assert not bool(torch.isfinite(loss))
    assert_same_weights(run.state(), before)


def test_a_batch_is_spread_and_the_weights_are_everywhere(xla: Runtime) -> None:
    import torch_xla

    placement = torch_xla._XLAC._get_xla_sharding_spec
    cfg = small_config("mae")
    run = Run.begin(cfg, xla)
    batch = xla.to_device(uint8_batch(cfg, BATCH))
    assert all(placement(value).startswith("{devices=[4") for value in batch.values())
    run.steps(xla, range(2))
    held = [*run.model.parameters(), *run.model.buffers(), run.gauges.skill.ring_RPE]
    held += [state[name] for state in run.optimizer.state.values() for name in MOMENTS]
    assert {placement(value) for value in held} <= {"{replicated}", ""}
    assert xla.num_devices == 4
    assert provenance(xla)["device"] == "xla: 4 x CPU"
    assert "torch_xla" in provenance(xla)["packages"]


def test_the_device_is_named_as_the_table_of_peaks_names_it(
    xla: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_xla's own answers raise under SPMD."""
    assert xla.device_kind == "CPU"
    assert xla.peak_memory_bytes() is None
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    for machine, name in (("v4", "TPU v4"), ("v5litepod", "TPU v5e")):
        monkeypatch.setattr("utils.runtime.xla.get_tpu_type", lambda machine=machine: machine)
        assert xla.device_kind == name
        assert device_peak(xla.device, name, use_bf16=True).flops_per_s is not None


def test_an_evaluation_batch_is_filled_up(xla: Runtime) -> None:
    placed = xla.to_device_padded({"x": torch.arange(10).view(5, 2)}, 8)["x"]
    expected = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], *[[8, 9]] * 4])
    assert torch.equal(xla.to_torch(placed), expected)
    assert torch.equal(xla.collect(placed, 5), expected[:5])


def test_random_numbers_are_the_same_bits(xla: Runtime) -> None:
    seed = torch.tensor([0, 5, 2**31 + 1, 2**40 + 7, 2**62 - 1]).unsqueeze(1)
    counter = torch.arange(5000, dtype=torch.int32)
    for function in (counter_bits, counter_uniform, counter_normal):
        drawn = function(seed.to(xla.device), counter.to(xla.device))
        assert torch.equal(drawn.cpu(), function(seed, counter)), function.__name__


def test_bfloat16_by_autocast_with_float32_parameters(xla: Runtime) -> None:
    import torch_xla

    cfg = small_config("mae")
    half = open_runtime(use_bf16=True, data_timeout_s=60.0)
    exact, rounded = (Run.begin(cfg, runtime) for runtime in (xla, half))
    batch = half.to_device(uint8_batch(cfg, BATCH))
    loss = train_step(rounded.model, rounded.optimizer, [batch], cfg, half, Update(0, 1e-3, 0.9)).loss
    products = [line for line in torch_xla._XLAC._get_xla_tensors_hlo([loss]).splitlines() if " dot(" in line]
    assert sum(" = bf16[" in line for line in products) > 20
    half.mark_step()
    (expected,) = exact.steps(xla, range(1))
    assert float(loss) == pytest.approx(float(expected), rel=0.02)
    assert float(loss) != float(expected)
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in rounded.optimizer.state.values()} == {torch.float32}


def test_the_optimizer_selects_only_where_nothing_fuses(xla: Runtime, plain: Runtime) -> None:
    cfg = small_config("mae")
    assert isinstance(Run.begin(cfg, xla).optimizer, SelectingAdamW)
    assert type(Run.begin(cfg, plain).optimizer) is torch.optim.AdamW


def test_out_of_memory_halves_the_batch_and_leaves_the_weights(
    xla: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failed program was to compute is lost; the weights come back from the host."""
    cfg = small_config("mae", "train.per_core_batch_size=4")
    run = Run.begin(cfg, xla)
    before = run.state()
    batch = uint8_batch(cfg, BATCH)
    monkeypatch.setattr("pretraining.train.open_loader", lambda *_: [[batch]])
    tried = []

    def trial(*arguments: Any) -> None:
        tried.append(arguments[3].train.per_core_batch_size)
        if len(tried) == 1:
            train_step(
                *arguments[:2], [arguments[2]], cfg, xla, Update(0, 1e-3, 0.5)
            )  # pending, and then lost
            raise RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 27.53G")
        trial_step(*arguments)

    monkeypatch.setattr("pretraining.train.trial_step", trial)
    nothing: Any = None  # of the store and its rows, which open_loader would read
    fitting = settle_memory(TrainingRun(cfg, nothing, nothing, run.model, run.optimizer, xla), 0).cfg
    assert tried == [4, 2]
    assert fitting.train.per_core_batch_size == 2
    assert_same_weights(run.state(), before)


def test_another_number_of_hosts_is_refused(xla: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """With wrong TPU_* variables every host would be the first of one, and write the same checkpoints."""
    monkeypatch.setenv("OCT_EXPECT_HOSTS", "4")
    with pytest.raises(UserError, match=r"^OCT_EXPECT_HOSTS: expected a TPU of 4 hosts, found 1; .*TPU_\*"):
        open_runtime(use_bf16=False, data_timeout_s=60.0)
    monkeypatch.setenv("OCT_EXPECT_HOSTS", "1")
    assert open_runtime(use_bf16=False, data_timeout_s=60.0).world_size == 1


def test_devices_in_another_order_are_refused(xla: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's rows would lie on other devices than the mesh says."""
    import torch_xla

    devices = torch_xla._XLAC._xla_get_runtime_devices()
    monkeypatch.setattr(torch_xla._XLAC, "_xla_get_runtime_devices", lambda: devices[::-1])
    with pytest.raises(AssertionError, match=r"ascending order, found \[3, 2, 1, 0\]"):
        open_runtime(use_bf16=False, data_timeout_s=60.0)


LEAVING = """
import logging.handlers, sys, time, torch
from utils.runtime.watchdog import leave
from utils.runtime.open import open_runtime
runtime = open_runtime(use_bf16=False, data_timeout_s=60.0)
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=logging.FileHandler(sys.argv[1])))
value = runtime.to_device_replicated(torch.eye(2000))
for _ in range(400):
    value = value @ value
runtime.mark_step()  # the device computes for minutes
logging.warning("lost a host")
print("leaving", flush=True)
time.sleep(1)  # so that a reader may go
print("and")
leave(75)
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_a_process_leaves_while_its_device_is_busy(is_read: bool, tmp_path: Path) -> None:
    """Its normal end waits for the device; logs are written, and output if anybody reads it."""
    argv = [sys.executable, "-W", "ignore", "-c", LEAVING, str(tmp_path / "log")]
    buffered = {**environment(), "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(argv, cwd=ROOT, env=buffered, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        if not is_read:
            process.stdout.close()
        try:
            assert process.wait(timeout=20) == 75
        finally:
            process.kill()
        assert not is_read or process.stdout.read() == "and\n"
    assert (tmp_path / "log").read_text() == "lost a host\n"


KEEPING = """
import logging, sys, torch
from pathlib import Path
from utils.runtime.open import open_runtime
logging.basicConfig(stream=sys.stdout, format="%(message)s")
runtime = open_runtime(use_bf16=False, data_timeout_s=60.0)
runtime.keep_programs(Path(sys.argv[1]))
print(float(runtime.to_torch(runtime.to_device({"x": torch.arange(8.0)})["x"].sum())))
"""


def test_programs_that_cannot_be_kept_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    argv = [sys.executable, "-W", "ignore", "-c", KEEPING, str(tmp_path / "a file")]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    warning, value = done.stdout.splitlines()
    assert "a file/host_0: compiled programs are not kept, training goes on: [Errno 20]" in warning
    assert float(value) == 28
