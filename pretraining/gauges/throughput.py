"""Throughput: how fast the steps are, where their time goes, and how much of the device they use.

In: laps that the loop and the step call out, each with the name of the part that has just ended. Out: the
`perf/` metrics of one log line, over the time since the line before; docs/guides/dashboard.md explains each.
A lap reads a clock or records an event: only `restart` and `metrics` wait for the device.

CPU: the host's clock. CUDA: events on the stream, so the parts are the device's time, its idle time
included. XLA: the host only traces forward, backward and update, so these are no parts there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from data_setup.masks import MaskPlan
from models.flops import encoder_flops, predictor_flops, step_flops
from models.vjepa3d import VJEPA3D
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.runtime.device_peak import device_peak
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
WARM_UP_STEPS, TRACED_STEPS = 5, 3
PARTS = ("data_wait", "forward", "backward", "update", "logging", "other")
UNSEEN_ON_XLA = ("forward", "backward", "update")


class Laps:
    """Seconds of each part since `clear`, on the host's clock."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last lap, or since `clear`, under `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    def settle(self, *, wait: bool = False) -> None:
        """Add the laps that have ended to `seconds`; with `wait`, all of them."""


class CudaLaps(Laps):
    """The same on the device's clock: each lap is an event of the current stream, read once it has passed."""

    def clear(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[tuple[str, torch.cuda.Event]] = deque()
        self._passed = self._record()

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, part: str) -> None:
        self._pending.append((part, self._record()))

    def settle(self, *, wait: bool = False) -> None:
        if wait and self._pending:
            self._pending[-1][1].synchronize()
        while self._pending and self._passed.query() and self._pending[0][1].query():
            part, event = self._pending.popleft()
            self.seconds[part] += self._passed.elapsed_time(event) / 1000
            self._free.append(self._passed)
            self._passed = event


class VolumeFlops(NamedTuple):
    """Counted operations of one volume: in a training step, in a forward pass with its target, in only the
    context encoder, and in only the target encoder.
    """

    training: int
    prediction: int
    context: int
    target: int


def volume_flops(cfg: Config, model: VJEPA3D, accumulation: int = 1) -> VolumeFlops:
    """3 x forward for trained modules, 1 x for the target encoder and, under accumulation, for the
    regulariser's own pass. Recomputation is not counted.
    """
    plan = MaskPlan.from_config(cfg)
    num_tokens = model.encoder.num_tokens
    context = encoder_flops(model.encoder, num_tokens if model.is_dense else plan.num_context)
    target = encoder_flops(model.target_encoder, num_tokens)
    prediction = context + predictor_flops(model.predictor, plan.num_context, plan.num_target) + target
    training = step_flops(model, plan.num_context, plan.num_target)
    if cfg.method.regulariser != "none" and accumulation > 1:
        training += context
    return VolumeFlops(training, prediction, context, target)


def flops_per_step(cfg: Config, model: VJEPA3D, accumulation: int) -> int:
    """Count the operations of one update on one device."""
    volumes = cfg.train.at_once * accumulation
    return volume_flops(cfg, model, accumulation).training * volumes


class Throughput:
    """The clock of the loop: `lap` after each part, `end_step`, and `metrics` for a log line."""

    def __init__(self, cfg: Config, model: VJEPA3D, runtime: Runtime) -> None:
        self.runtime = runtime
        self.global_batch_size = cfg.train.global_batch_size
        self.flops = flops_per_step(cfg, model, accumulation_steps(cfg.train, runtime.num_devices))
        self.peak = device_peak(runtime.device, runtime.device_kind, runtime.use_bf16)
        self.laps = CudaLaps() if runtime.device.type == "cuda" else Laps()
        self.lap = self.laps.lap
        self._start_window()

    def log_start(self) -> None:
        """Log the peak that `perf/mfu` refers to, or why there is none."""
        work = f"{self.flops / 1e9:.4g} GFLOP a step and device"
        if self.peak.flops_per_s is None:
            log.info("%s; no perf/mfu: %s", work, self.peak.source)
        else:
            log.info("%s; peak %.4g GFLOP/s (%s)", work, self.peak.flops_per_s / 1e9, self.peak.source)

    def _start_window(self) -> None:
        self._began, self._steps = time.perf_counter(), 0

    def restart(self) -> None:
        """Drop the time since the last log line, such as a validation's; waits for the device."""
        self.runtime.synchronise()
        self.laps.clear()
        self._start_window()

    def end_step(self) -> None:
        """One update has been handed to the device."""
        self._steps += 1
        self.laps.settle()

    def metrics(self) -> dict[str, float | None]:
        """The `perf/` metrics since the last call or `restart`; waits for the device."""
        self.runtime.synchronise()
        self.lap("other")
        seconds, steps = time.perf_counter() - self._began, self._steps
        self._start_window()
        self.laps.settle(wait=True)
        spent, self.laps.seconds = self.laps.seconds, dict.fromkeys(PARTS, 0.0)
        if self.runtime.device.type == "xla":
            spent["other"] += sum(spent.pop(part) for part in UNSEEN_ON_XLA)
        rate = self.flops * steps / seconds
        peak, memory = self.peak.flops_per_s, self.runtime.peak_memory_bytes()
        values: dict[str, float | None] = {
            "perf/volumes_per_s": steps * self.global_batch_size / seconds,
            "perf/step_s": seconds / steps,
            **{f"perf/{part}_fraction": spent[part] / seconds for part in PARTS if part in spent},
            "perf/flops_per_s": rate,
        }
        if peak is not None:
            values["perf/mfu"] = rate / peak
        if memory is not None:
            values["perf/peak_memory_gib"] = memory / 2**30
        return values


class StepTrace:
    """`run.profile=true`: a trace of a few steps after the start, in RUN/profile, by the first process. Call
    `at` before each step, and `close` at the end.

    On a CPU or GPU one Chrome trace, `steps_FIRST_LAST.json.gz`, for ui.perfetto.dev or chrome://tracing; on
    XLA a folder for TensorBoard's profile plugin. FIRST is the number of updates after the first traced step.
    """

    def __init__(self, cfg: Config, runtime: Runtime, start: int) -> None:
        self.is_wanted = cfg.run.profile and runtime.group.is_first
        self.runtime = runtime
        self.first, self.last = start + WARM_UP_STEPS, start + WARM_UP_STEPS + TRACED_STEPS - 1
        self.path = Path(cfg.run.dir) / "profile" / f"steps_{self.first + 1:08d}_{self.last + 1:08d}"
        self._open, self._is_open = ExitStack(), False

    def at(self, step: int) -> bool:
        """Start or end the trace before update number `step`; True where it has just ended, which takes a
        while.
        """
        if self.is_wanted and step == self.first:
            self.runtime.synchronise()
            self._open.enter_context(self.runtime.write_trace(self.path))
            self._is_open = True
        is_over = self.is_wanted and step == self.last + 1
        if is_over:
            self.close()
        return is_over

    def close(self) -> None:
        """End the trace, if one is running."""
        if not self.is_wanted:
            return
        self.is_wanted = False
        if not self._is_open:
            log.warning("run.profile: no trace, the run ended before step %d", self.first + 1)
            return
        self.runtime.synchronise()
        try:
            self._open.close()
        except OSError as error:
            log.warning("%s: trace not written, training goes on: %s", self.path.parent, error)
