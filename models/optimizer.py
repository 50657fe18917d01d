"""AdamW whose update a flag on the device can call off, with the same state dict on every engine.

In: parameters with gradients, and the attribute `found_inf`, 1.0 where this update is to move nothing. The
fused kernels of CPU and GPU know it. Where there is none, `SelectingAdamW` does the same by a select.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from utils.checkpoint import to_host
from utils.config.schema import OptimConfig
from utils.runtime.single import Runtime

FUSED_DEVICES = ("cpu", "cuda")
FUSED_FLAGS = {"fused": True, "foreach": None, "capturable": False}  # of a state dict, whichever engine
SELECTING_FLAGS = {"fused": None, "foreach": False, "capturable": True}
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Trained(Protocol):
    """A model that knows its trained parameters by name."""

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]: ...


class SelectingAdamW(torch.optim.AdamW):
    """AdamW of plain operations; every number that changes from step to step is a tensor on the device."""

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **{**settings, **SELECTING_FLAGS})
        for group in self.param_groups:  # now, so that the first step is the same program as the next
            for weight in group["params"]:
                zeros = {name: torch.zeros_like(weight, requires_grad=False) for name in MOMENTS[1:]}
                self.state[weight] = {"step": torch.zeros((), device=weight.device), **zeros}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        """Update, then undo the update where found_inf is 1."""
        is_skipped = self.found_inf > 0
        del self.found_inf  # the class above refuses to see it
        weights = [weight for group in self.param_groups for weight in group["params"]]
        moved = [*weights, *(self.state[weight][name] for weight in weights for name in MOMENTS)]
        before = [value.clone() for value in moved]
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor([rate]).to(is_skipped.device)[0]  # an input even where it is 0
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for value, old in zip(moved, before, strict=True):
            value.copy_(torch.where(is_skipped, old, value))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "param_groups": [{**group, **FUSED_FLAGS} for group in state["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(SELECTING_FLAGS)


def warmup_cosine(optim: OptimConfig, step: int, total: int, peak: float | None = None) -> float:
    """Learning rate of update `step` of `total`: linear warm-up to `peak`, by default the base rate, then a
    cosine, whose last update has min_lr_ratio of it. The one such schedule here.
    """
    peak = optim.base_lr if peak is None else peak
    warmup = round(optim.warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    factor = optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return peak * factor


def parameter_groups(
    model: Trained, weight_decay: float, layer_decay: float = 1.0, depth: int = 0
) -> list[dict[str, Any]]:
    """AdamW groups, each with `rate_share`: 1, and of the encoder's `depth` blocks layer_decay to the power
    of the number of blocks above. Weight decay on matrices only; mask tokens, positions, norms and biases
    have none. With a layer_decay of 1 there are two groups, the matrices first.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for name, parameter in model.trained_parameters():
        is_table = name.endswith(("pos_embed", "mask_token", "prefix_tokens")) or ".mask_tokens." in name
        above = blocks_above(name.removeprefix("encoder."), depth) if name.startswith("encoder.") else 0
        groups.setdefault((layer_decay**above, parameter.ndim > 1 and not is_table), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "rate_share": share}
        for (share, is_matrix), parameters in groups.items()
    ]


def blocks_above(name: str, depth: int) -> int:
    """How many of an encoder's `depth` blocks lie above one of its parameters; patches and positions lie
    below all of them, the last norm above.
    """
    part, _, rest = name.partition(".")
    if part == "blocks":
        return depth - 1 - int(rest.partition(".")[0])
    return depth if part in ("patch_embed", "pos_embed", "prefix_tokens") else 0


def build_adamw(groups: list[dict[str, Any]], optim: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW of these parameter groups, fused where the device has that kernel."""
    settings: dict[str, Any] = {"lr": optim.base_lr, "betas": optim.betas, "eps": optim.eps}
    if device.type in FUSED_DEVICES:
        return torch.optim.AdamW(groups, fused=True, **settings)
    return SelectingAdamW(groups, **settings)


def keep_state(model: nn.Module, optimizer: torch.optim.AdamW, runtime: Runtime) -> Callable[[], None]:
    """What puts weights and moments back to those of now. It does nothing where a step that fails does not
    touch them; elsewhere a copy is kept on the host.
    """
    if runtime.failure_is_clean:
        return lambda: None
    weights, moments = to_host((model.state_dict(), optimizer.state_dict()))

    def put_back() -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)

    return put_back
