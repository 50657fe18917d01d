"""`train.compile`: the same losses as eager; who cannot compile is told so."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.engine_kernels import choose_kernels
from pretraining import train as loop
from pretraining.train import train
from tests.support.model_factory import nano_model, small_config
from tests.support.pipeline_factory import pipeline_config, stop_after
from tests.support.process_factory import losses as losses_of
from tests.support.process_factory import run_two
from tests.support.two_processes import COMPILED, losses_and_weights
from utils.checkpoint import load_checkpoint
from utils.errors import EXIT_STOPPED, UserError
from utils.runtime.single import Runtime

ON = "train.compile=true"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
def test_a_compiled_run_has_the_losses_of_an_eager_one(folder: Path, tmp_path: Path) -> None:
    """A whole run: trial step, stochastic layers, validation, and on from its checkpoint without."""
    noise = ("method.dropout=0.1", "method.drop_path=0.1")
    runs = tmp_path / "eager", tmp_path / "compiled"
    noise += ("train.max_steps=12",)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for run, *compiled in ((runs[0],), (runs[1], ON)):
        with stop_after(8):
            assert train(pipeline_config(folder, f"run.dir={run}", *noise, *compiled)) == EXIT_STOPPED
        assert train(pipeline_config(folder, f"run.dir={run}", *noise)) == 0
    # both branches, for context, target and predictor; validation has none of its own
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 6
    assert not torch._dynamo.utils.counters["graph_break"]
    losses = [list(losses_of(run).values()) for run in runs]
    assert len(losses[0]) == len(losses[1]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1] != losses[0]  # by rounding: another program ran
    last = (load_checkpoint(str(run / "checkpoints" / "step_00000012.pt"))["model"] for run in runs)
    assert len({tuple(state) for state in last}) == 1  # names of parameters


@pytest.mark.slow
def test_two_processes_compile(tmp_path: Path) -> None:
    """Losses and norms of one eager process; each process compiles both branches once a case."""
    out = tmp_path / "compiled.pt"
    run_two("tests.support.two_processes", [str(out), "compiled"], tmp_path)
    losses, weights = losses_and_weights(Runtime(torch.device("cpu"), use_bf16=False), "vjepa2")
    for saved, (graphs, breaks) in torch.load(out, weights_only=True):
        assert (graphs, breaks) == (6 * len(COMPILED), 0)
        for name in COMPILED:
            assert saved[name][0] == pytest.approx(losses, rel=1e-4, nan_ok=True), name
            assert saved[name][1].keys() == weights.keys()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
def test_growing_and_halving_batches_stay_below_the_limit_of_programs(
    folder: Path, tmp_path: Path, small_encoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size is another program, of which torch allows eight for a branch; past them fullgraph is an
    error. The sizes that an automatic batch tries are not compiled, and a halved batch forgets its programs.
    """
    real, tried = loop.trial_step, list[tuple[int, bool]]()

    def trial_step(model: Any, optimizer: Any, batch: Any, *rest: Any) -> None:
        is_compiled = model.encoder.blocks[0].compiled is not None
        tried.append((len(batch["row"]), is_compiled))
        real(model, optimizer, batch, *rest)
        if is_compiled and len(batch["row"]) > 1:
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(loop, "trial_step", trial_step)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(Runtime, "has_room", lambda *_: True)
    torch._dynamo.reset()
    batch = "train.global_batch_size=16", "train.per_core_batch_size=auto", "train.max_steps=1"
    train(pipeline_config(folder, f"run.dir={tmp_path}", ON, *batch))
    grown, settled = [(2**n, False) for n in range(5)], [(2**n, True) for n in (4, 3, 2, 1, 0)]
    assert tried == [*grown, *settled]


def test_who_cannot_compile_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small_config("vjepa2", ON)
    monkeypatch.setenv("CXX", "no_such_compiler")
    with pytest.raises(
        UserError, match=r"train.compile: expected a C\+\+ compiler .* found no no_such_compiler"
    ):
        choose_kernels(nano_model(cfg), cfg, Runtime(torch.device("cpu"), False))
    xla = SimpleNamespace(device=SimpleNamespace(type="xla"))
    with pytest.raises(UserError, match="expected false with PyTorch/XLA"):
        choose_kernels(nano_model(cfg), cfg, xla)
