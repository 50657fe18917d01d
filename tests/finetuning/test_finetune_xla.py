"""Full fine-tuning on the XLA engine against plain torch: the same updates from the same batches. `make
test-xla` runs these, on four devices of a CPU.
"""

from __future__ import annotations

import pytest
import torch

from data_setup.loader import Batch
from finetuning.heads.tuning import TunedModel, layer_groups, update_model
from models.engine_kernels import choose_kernels
from models.optimizer import build_adamw
from models.vjepa3d import build_encoder
from tests.support.model_factory import small_config, uint8_batch
from tests.support.xla_counters import count_compiled, count_fallbacks, count_read_back
from tests.support.xla_factory import BATCH, open_xla
from utils.config.schema import Config
from utils.runtime.single import Runtime

pytestmark = pytest.mark.xla
STEPS = 12
SETTINGS = ("method.drop_path=0.2",)


@pytest.fixture(scope="module")
def xla() -> Runtime:
    return open_xla()


def labelled(cfg: Config, number: int) -> Batch:
    batch = uint8_batch(cfg, BATCH, number)
    batch["truth"] = (torch.arange(BATCH) % 3).float()[:, None]
    batch["weight"] = 0.5 + batch["truth"]
    return batch


@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_losses_are_those_of_plain_torch(xla: Runtime, kind: str) -> None:
    """One program, nothing read back or left to the CPU; an update without finite loss moves nothing."""
    cfg = small_config("vjepa2", f"head.kind={kind}", *SETTINGS)
    losses: dict[str, list[torch.Tensor]] = {}
    weights = {}
    for runtime in (Runtime(torch.device("cpu"), use_bf16=False), xla):
        torch.manual_seed(0)
        model = TunedModel(build_encoder(cfg), 3, cfg).to(runtime.device)
        choose_kernels(model, cfg, runtime)
        optimizer = build_adamw(layer_groups(model.encoder, model.top, 0.05, 0.75), cfg.optim, runtime.device)
        runtime.mark_step()
        counts = []
        before = {}
        for step in range(STEPS + 1):
            batch = labelled(cfg, step)
            if step == STEPS:
                batch["mean"][3] = float("nan")
                before = {name: runtime.to_torch(value).clone() for name, value in model.state_dict().items()}
            result = update_model(model, optimizer, [runtime.to_device(batch)], cfg, runtime, 1e-3)
            runtime.mark_step()
            losses.setdefault(runtime.device.type, []).append(result.loss)
            if runtime is xla and step in (1, STEPS - 1):
                counts.append((count_compiled(), count_read_back(), count_fallbacks()))
        after = {name: runtime.to_torch(value) for name, value in model.state_dict().items()}
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        weights[runtime.device.type] = {name: value.cpu() for name, value in after.items()}
    assert counts[0] == counts[1]
    measured, expected = ([float(loss) for loss in losses[name]] for name in ("xla", "cpu"))
    assert measured[:5] == pytest.approx(expected[:5], rel=1e-4)
    assert measured[:STEPS] == pytest.approx(expected[:STEPS], rel=1e-3)
    torch.testing.assert_close(weights["xla"], weights["cpu"], rtol=1e-2, atol=1e-3)
