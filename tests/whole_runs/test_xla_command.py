"""The documented command under XLA, on four devices of a CPU, in processes of its own: `make test-xla`."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from tests.support.pipeline_factory import make_store
from tests.support.process_factory import Running, command, losses, run_to_end
from utils.errors import EXIT_STOPPED

STEPS = 16
pytestmark = [pytest.mark.xla, pytest.mark.timeout(3600)]


def test_the_command_stops_at_sigterm_and_goes_on(tmp_path: Path) -> None:
    """In bfloat16, with a trace of three steps of the second start."""
    make_store(tmp_path)
    run = tmp_path / "run"
    sizes = "train.global_batch_size=4", "train.per_core_batch_size=1", f"train.max_steps={STEPS}"
    mae = "method.recipe=mae", "method.regulariser=none", "method.regulariser_weight=0"
    options = "train.use_bf16=true", "run.profile=true", "data.workers=1"
    argv = command(tmp_path, f"run.dir={run}", *sizes, *mae, *options)
    assert argv[1:3] == ["-m", "pretraining.train"]
    running = Running(argv, run)
    try:
        running.wait_for_step(2)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == EXIT_STOPPED, running.output[-3000:]
    finally:
        Running.end_all()
    assert "global batch 4 = 1 per device x 4 devices x 1 accumulated, on xla:0" in running.output
    assert "stopped by SIGTERM at step" in running.output
    output = run_to_end(argv, run)
    assert "resuming from step" in output
    assert f"finished at step {STEPS}" in output
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for loss in losses(run).values())
    (trace,) = (run / "profile").glob("steps_*/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
