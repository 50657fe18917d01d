"""The documented command under XLA, on four devices of a CPU, in processes of its own: `make test-xla`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.pipeline_factory import make_store
from tests.process_factory import Running, command, losses, run_to_end

pytestmark = [pytest.mark.xla, pytest.mark.timeout(3600)]


def test_the_command_stops_at_sigterm_and_goes_on(tmp_path: Path) -> None:
    make_store(tmp_path)
    run = tmp_path / "run"
    sizes = "train.global_batch_size=4", "train.per_core_batch_size=1", "train.max_steps=8"
    mae = "method.recipe=mae", "method.mae_target=normalised", "method.regulariser=none"
    mae += ("method.regulariser_weight=0",)
    argv = command(tmp_path, f"run.dir={run}", *sizes, *mae, "data.workers=1")
    running = Running(argv, run)
    try:
        running.wait_for_step(2)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0, running.said[-3000:]
    finally:
        Running.end_all()
    assert "global batch 4 = 1 per device x 4 devices x 1 accumulated, on xla:0" in running.said
    assert "stopped by SIGTERM at step" in running.said
    said = run_to_end(argv, run)
    assert "resuming from step" in said
    assert "finished at step 8" in said
    assert list(losses(run)) == list(range(1, 9))
