"""The processes of a run and the hosts of a TPU, as far as one machine can tell: who loads what, and what is
agreed between them. tests/whole_runs/test_torchrun.py has real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_setup.loader import LoaderError, MicroBatches, next_or_stop
from pretraining.run import Run
from pretraining.train import settle_memory
from tests.support.model_factory import nano_model, small_config, uint8_batch
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import free_port, run_copies, run_two
from tests.support.two_processes import CASES, losses_and_weights, settled_batch
from utils.config.load import accumulation_steps, flatten
from utils.errors import EXIT_TRY_AGAIN, UserError
from utils.run import guard
from utils.run.folder import require_one_configuration, shared_settings
from utils.runtime import open as open_module
from utils.runtime.open import open_runtime
from utils.runtime.processes import ALONE, Group, decode, join
from utils.runtime.single import Runtime, is_out_of_memory


class OneOf(Group):
    """A rank of several."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_what_is_shared_comes_together_again(size: int, count: int) -> None:
    """All parts have one length, and the last item fills them up."""
    items = np.arange(10, 10 + count)
    parts = [OneOf(rank, size).share(items) for rank in range(size)]
    assert {len(part) for part in parts} == {math.ceil(count / size)}
    joined = torch.cat([torch.from_numpy(part) for part in parts])
    together = OneOf(0, size).interleave(joined).tolist()
    assert together[:count] == items.tolist()
    assert set(together[count:]) <= set(items[-1:].tolist())


def test_one_process_is_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join(torch.device("cpu"), 1.0) is ALONE
    weight = torch.ones(3, requires_grad=True)
    total = ALONE.sum_with_gradient(weight * 2).sum()
    ALONE.backward(total)
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert ALONE.any(True)
    assert not ALONE.any(False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two real processes have settled and learned, and how one of them ended the other."""
    out = tmp_path_factory.mktemp("two") / "two.pt"
    run_two("tests.support.two_processes", [str(out)], out.parent)
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def two(both: dict[str, Any]) -> list[list[Any]]:
    return both["each"]


def test_a_process_lost_half_way_through_an_update_is_named(both: dict[str, Any]) -> None:
    passed, text, code = both["lost"]
    assert passed == ["forward"]
    assert "rank 0 lost another of the 2 processes of this run" in text
    assert code == EXIT_TRY_AGAIN
    assert both["imported"] == [], "MONAI would bring all of transformers, seconds of every start"


def test_out_of_memory_on_one_process_halves_the_batch_of_both(two: list[list[Any]]) -> None:
    """Its pass is cut short half-way; then training goes on."""
    _, loss = settled_batch(Runtime(torch.device("cpu"), use_bf16=False))
    for settled, _ in two:
        assert settled[0] == 1
        assert settled[1] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_what_one_does(two: list[list[Any]], name: str) -> None:
    """The same losses and norms, and one set of weights; what is not finite on one is skipped on both."""
    losses, weights = losses_and_weights(Runtime(torch.device("cpu"), use_bf16=False), name)
    of_first, of_second = (saved[name] for _, saved in two)
    assert math.isnan(losses[2])
    assert of_first[0] == pytest.approx(losses, rel=1e-4, nan_ok=True)
    assert of_second[0] == pytest.approx(of_first[0], rel=1e-12, nan_ok=True)
    assert weights.keys() == of_first[1].keys()
    for key, value in of_first[1].items():
        assert torch.equal(value, of_second[1][key]), key


class HearsAnother(Group):
    """A rank of several, of which another one has the flag set."""

    def any(self, flag: bool) -> bool:
        return True


def test_another_processs_sigterm_is_a_stop() -> None:
    runtime = Runtime(torch.device("cpu"), use_bf16=False, group=HearsAnother())
    assert next_or_stop(iter([[{}]]), runtime, 60.0) is None


def failing(error: Exception) -> Iterator[list[dict]]:
    raise error
    yield


def test_a_loader_that_a_signal_ended_is_a_stop_and_no_error() -> None:
    runtime = Runtime(torch.device("cpu"), use_bf16=False)
    assert next_or_stop(iter([[{}]]), runtime, 60.0) == [{}]
    with pytest.raises(LoaderError, match="dead worker"):
        next_or_stop(failing(LoaderError("dead worker")), runtime, 60.0)

    def dies_of_the_signal() -> Iterator[list[dict]]:
        runtime.stop_requested = True
        raise LoaderError("dead worker")
        yield

    assert next_or_stop(dies_of_the_signal(), runtime, 60.0) is None
    assert next_or_stop(iter([[{}]]), runtime, 60.0) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cposix\nsystem\n",
        b'{"tensor": ["torch.float32", [-1]]}',
        b'{"tensor": ["os.system", [1]]}',
        b'{"code": 1}',
        b'{"items": [[[1], 2]]}',
        b"[" * 100_000,
    ],
    ids=range(6),
)
def test_what_is_no_message_is_one_line(data: bytes) -> None:
    with pytest.raises(UserError, match=rf"^rank 1: expected a message .+, found {len(data)} other bytes"):
        decode(data, "rank 1")


# --- hosts ---

DEVICES_PER_HOST = 4


@pytest.mark.parametrize("hosts", range(1, 17))
def test_the_hosts_share_every_global_batch(hosts: int) -> None:
    """Each loads as much as its devices take, all together every position once, in the order of the hosts."""
    per_core, accum = 2, 3
    devices = hosts * DEVICES_PER_HOST
    total = devices * per_core * accum
    sizes = f"train.global_batch_size={total}", f"train.per_core_batch_size={per_core}"
    assert accumulation_steps(small_config("mae", *sizes).train, devices) == accum
    parts = [list(MicroBatches(range(5, 7), total, host, hosts, accum)) for host in range(hosts)]
    assert {len(batch) for part in parts for batch in part} == {DEVICES_PER_HOST * per_core}
    micro_batches = zip(*parts, strict=True)
    visited = [key for micro in micro_batches for batch in micro for key in batch]
    assert visited == [(step, step * total + n) for step in (5, 6) for n in range(total)]


HOST = """
import sys, numpy as np, torch
import torch.distributed as dist
from tests.support.planted_pickle import Evil, forbid_pickle
from utils.errors import UserError
from utils.runtime.processes import join_hosts
rank, port, evil_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
undo = forbid_pickle()
group = join_hosts(rank, 2, "127.0.0.1", 60.0, port)
print(group.any(rank == 1), group.any(False), group.broadcast({"step": rank + 7}), group.gather_objects(rank))
whole = torch.arange(3.0)  # as on the device: each host has all of it
print(group.sum(whole).tolist(), group.gather(whole).tolist(), group.sum_with_gradient(whole).tolist())
print(group.share(np.arange(1, 4)).tolist(), group.interleave(torch.arange(4)).tolist(), group.is_first)
state = {
    0: {"step": torch.tensor(5.0), "moment": torch.full((3, 4), rank + 0.5, dtype=torch.bfloat16)},
    "mask": torch.tensor([True, False]), "none": [None, (1, float("inf"), "\u00fc")],
    "rows": torch.empty(0, 7),
    "big": torch.arange(2**23) + rank, "wide": torch.arange(6).view(2, 3).T,
}
first = group.broadcast(state)
print(first[0]["step"].shape, first[0]["moment"].tolist(), first["mask"].tolist(), [*first["none"][1]])
print(first["rows"].shape, int(first["big"][-1]), first["wide"].tolist(), [*first])
print([one[0]["moment"][0, 0].item() for one in group.gather_objects(state)])
if rank == 0:
    undo()
    dist.broadcast_object_list([Evil(evil_path)], src=0)  # a peer that is not this program
else:
    try:
        group.broadcast(None)
    except UserError as error:
        print(error)
group.close()
"""


def two_hosts(folder: Path, script: str, *words: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of the script, started as RANK PORT WORDS... on two hosts."""
    port = str(free_port())
    imports = "import torch.distributed, utils.cli, utils.runtime.single"
    return run_copies(imports, script, [(rank, port, *words) for rank in "01"], folder)


def test_two_hosts_agree_without_pickle_and_what_is_global_stays_as_it_is(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    ends = two_hosts(tmp_path, HOST, str(evil))
    assert not evil.exists(), "what the other host sent was run as code"
    for rank, (code, output, errors) in enumerate(ends):
        assert code == 0, errors
        lines = output.splitlines()
        assert lines[:6] == [
            "True False {'step': 7} [0, 1]",
            "[0.0, 1.0, 2.0] [0.0, 1.0, 2.0] [0.0, 1.0, 2.0]",
            f"{[[1, 3], [2, 3]][rank]} [0, 2, 1, 3] {rank == 0}",
            f"torch.Size([]) {[[0.5] * 4] * 3} [True, False] [1, inf, 'ü']",
            f"torch.Size([0, 7]) {2**23 - 1} [[0, 3], [1, 4], [2, 5]] "
            "[0, 'mask', 'none', 'rows', 'big', 'wide']",
            "[0.5, 1.5]",
        ]
        assert len(lines) == 6 + rank
    assert lines[6].startswith("rank 0: expected a message of this program, found ")


UNTIL = """
import os, signal, sys, torch
import torch.distributed as dist
from utils.runtime.processes import ProcessGroup, join_hosts
from utils.runtime.single import Runtime, StopRequested
rank, port = int(sys.argv[1]), int(sys.argv[2])
join_hosts(rank, 2, "127.0.0.1", 20.0, port)
group = ProcessGroup(rank, 2, dist.distributed_c10d._get_default_store(), 20.0)
runtime = Runtime(torch.device("cpu"), False, group)
runtime.catch_signals()
print([*runtime.until_stopped("validation", range(3 - 2 * rank))])
done = []
try:
    for batch in runtime.until_stopped("validation", range(4 - rank)):
        done.append(batch)
        if rank == 1 and batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)
except StopRequested:
    print("stopped", done)
group.close()
"""


def test_batches_of_unequal_number_end_together_at_a_peers_sigterm(tmp_path: Path) -> None:
    for rank, (code, output, errors) in enumerate(two_hosts(tmp_path, UNTIL)):
        assert code == 0, errors
        assert output.splitlines() == ["[0, 1, 2]" if rank == 0 else "[0]", "stopped [0, 1]"]


FAULT = """
import sys, torch
import torch.distributed as dist
from utils.cli import run_cli
from utils.errors import UserError
from utils.runtime.processes import ProcessGroup, join_hosts
rank, port, faulty, fault = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
join_hosts(rank, 2, "127.0.0.1", 60.0, port)
group = ProcessGroup(rank, 2, dist.distributed_c10d._get_default_store(), 60.0)
def main():
    try:
        if rank == faulty and fault == "config":
            raise UserError("run.dir: expected another")
        group.sum(torch.ones(3).to(torch.uint16 if rank == faulty else torch.float))  # gloo knows no uint16
    except UserError as error:
        group.leave_message(str(error), error.exit_code)
        raise
run_cli(main)
"""


@pytest.mark.parametrize(
    ("fault", "faulty", "code", "text"),
    [
        ("collective", 0, 75, "met RuntimeError: Invalid scalar type"),
        ("config", 1, 2, "run.dir: expected another"),
    ],
)
def test_the_first_error_is_named_on_all_with_its_code(
    fault: str, faulty: int, code: int, text: str, tmp_path: Path
) -> None:
    """Also where the process that keeps the messages, the first, is the one that fails."""
    ends = two_hosts(tmp_path, FAULT, str(faulty), fault)
    for rank, (own_code, _, errors) in enumerate(ends):
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert (own_code, text in line) == (code, True), errors
        assert (f"rank {faulty}: " in line) == (rank != faulty), errors
    assert ("Traceback" in ends[faulty][2]) == (fault == "collective")


def test_xla_is_asked_for_by_pjrt_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only by training: other commands are plain torch wherever they run."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^PJRT_DEVICE is set: expected torch_xla, found none; pip install"):
        open_runtime(use_bf16=False, data_timeout_s=1.0)
    assert open_runtime(use_bf16=False).device.type in ("cpu", "cuda")
    monkeypatch.delenv("PJRT_DEVICE")
    assert open_runtime(use_bf16=False, data_timeout_s=1.0).device.type in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("device", "variables", "is_refused"),
    [
        ("accel0", {}, True),
        ("vfio/0", {}, True),
        ("vfio/vfio", {}, False),  # of any machine that gives its devices to virtual ones
        ("accel/accel0", {}, False),  # of Linux's own accelerators
        ("accel0", {"PJRT_DEVICE": "CPU"}, False),
        ("accel0", {"OCT_DEVICE_GLOB": "none"}, False),
        ("accel0", {"cuda": "1"}, False),
    ],
)
def test_a_training_beside_a_tpu_takes_no_cpu_in_silence(
    device: str, variables: dict[str, str], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    shell = (ROOT / "utils/tpu_worker.sh").read_text()
    assert all(pattern in shell for pattern in open_module.TPU_DEVICES)
    patterns = [pattern.replace("/dev", str(tmp_path)) for pattern in open_module.TPU_DEVICES]
    monkeypatch.setattr(open_module, "TPU_DEVICES", patterns)
    monkeypatch.setattr("torch.cuda.is_available", lambda: "cuda" in variables)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(guard, "open_runtime", lambda *_: Runtime(torch.device("cpu"), False))
    text = rf"^PJRT_DEVICE: expected .*{device}.* found none, .* run_tpu_xla\.sh or with PJRT_DEVICE=TPU; "
    expected = pytest.raises(UserError, match=text) if is_refused else nullcontext()
    with expected as error, guard.open_engine(small_config("mae", f"run.dir={tmp_path}")):
        pass
    assert (error is not None) == is_refused


def test_xla_runs_out_of_memory_in_its_own_words() -> None:
    assert is_out_of_memory(RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: reserving 27G"))
    assert not is_out_of_memory(RuntimeError("INVALID_ARGUMENT: shapes differ"))


class LosesWhatFails(Runtime):
    """An engine whose tensors are lost with the program that was to compute them."""

    @property
    def failure_is_clean(self) -> bool:
        return False


def test_weights_that_a_failed_trial_lost_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small_config("mae", "train.per_core_batch_size=8")
    model = nano_model(cfg)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr("pretraining.train.open_loader", lambda *_: [[uint8_batch(cfg, 2)]])
    tried = []

    def trial(*arguments: object) -> None:
        tried.append(arguments[3].train.per_core_batch_size)
        if len(tried) == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
            raise RuntimeError("RESOURCE_EXHAUSTED: out of HBM")

    runtime = LosesWhatFails(torch.device("cpu"), use_bf16=False)
    monkeypatch.setattr("pretraining.train.trial_step", trial)
    nothing: Any = None  # of the store and its rows, which open_loader would read
    fitting = settle_memory(Run(cfg, nothing, nothing, model, optimizer, runtime), 0).cfg
    assert tried == [8, 4]
    assert fitting.train.per_core_batch_size == 4
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_processes_with_other_settings_are_named() -> None:
    """They would run other programs, and wait for each other without end."""
    first = shared_settings(small_config("vjepa2", "train.use_bf16=false"))
    second = shared_settings(small_config("vjepa2", "train.use_bf16=true"))
    require_one_configuration([first, first])
    with pytest.raises(
        UserError, match=r"train\.use_bf16: expected False .* process 0, found True on process 1"
    ):
        require_one_configuration([first, second])
    alike = dict(flatten(small_config("vjepa2"))).keys() - shared_settings(small_config("vjepa2")).keys()
    assert alike == {
        *("data.gcs_root", "data.manifest_path", "data.participants_path", "data.octa_manifest_path"),
        *("data.store", "data.storage_options.endpoint_url", "data.cache_dir", "data.workers", "run.dir"),
        *("train.ckpt_dir", "model.checkpoint", "method.init_from", "task.labels_path"),
    }
    places = shared_settings(small_config("vjepa2", "run.dir=elsewhere", "data.cache_dir=/tmp/cache"))
    require_one_configuration([shared_settings(small_config("vjepa2")), places])
    balanced = shared_settings(small_config("vjepa2", "data.sampling=device_balanced"))
    with pytest.raises(UserError, match=r"data\.sampling: expected 'natural' as on process 0"):
        require_one_configuration([first, balanced])
