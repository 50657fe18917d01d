"""A checkpoint is whole or absent; a damaged one is reported and skipped; loading executes nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pipeline_factory import ROOT
from utils import checkpoint, storage
from utils.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    _encode,
    list_steps,
    load_checkpoint,
    load_newest,
    wait_together,
)
from utils.config.schema import StorageOptions
from utils.runtime.processes import Group
from utils.storage.errors import storage_error


def write(directory: Path, steps: list[int], keep: int = 2) -> CheckpointWriter:
    writer = CheckpointWriter(str(directory), keep, is_kept=lambda step: step == 10)
    for step in steps:
        writer.save({"step": step, "w": torch.full((1000,), float(step))}, [f"step_{step:08d}"])
        writer.wait()
    return writer


def newest_step(directory: Path) -> int:
    newest = load_newest(str(directory))
    assert newest is not None
    return int(newest["step"])


def steps_of_bests(folder: Path | str, options: StorageOptions | None = None) -> dict[str, int]:
    names = "best_probe", "best_val_loss"
    return {name: load_checkpoint(f"{folder}/{name}.pt", options)["step"] for name in names}


def test_the_last_upload_feeds_the_watchdog_while_it_lasts(tmp_path: Path) -> None:
    """All processes ask until the first one's checkpoint is there; each question is a sign of life."""
    beats: list[str] = []

    class Uploading(Group):
        def any(self, flag: bool) -> bool:
            beats.append("asked")
            return beats.count("asked") < 4

    wait_together(Uploading(), None, lambda: beats.append("beat"))
    assert beats == ["beat", "asked", "beat", "asked", "beat", "asked", "beat", "asked"]


def test_round_trip_and_what_is_kept(tmp_path: Path) -> None:
    writer = write(tmp_path, [10])
    write(tmp_path, [20, 30, 40])
    writer.save({"step": 30, "w": torch.zeros(1)}, ["best_probe"])
    writer.close()
    assert list_steps(str(tmp_path)) == [10, 30, 40]
    newest = load_newest(str(tmp_path))
    assert newest is not None
    assert newest["step"] == 40
    assert torch.equal(newest["w"], torch.full((1000,), 40.0))
    assert load_checkpoint(str(tmp_path / "best_probe.pt"))["step"] == 30
    assert load_newest(str(tmp_path / "nowhere")) is None


def test_the_copy_is_taken_at_the_call(tmp_path: Path) -> None:
    weights = torch.ones(10)
    writer = CheckpointWriter(str(tmp_path), 1)
    writer.save({"step": 1, "w": weights}, ["step_00000001"])
    weights.zero_()
    writer.close()
    assert float(load_checkpoint(str(tmp_path / "step_00000001.pt"))["w"].sum()) == 10


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_newest_is_reported_and_the_one_before_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [1, 2])
    path = tmp_path / "step_00000002.pt"
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-100])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match="step_00000002"):
        load_checkpoint(str(path))
    with caplog.at_level(logging.WARNING):
        assert newest_step(tmp_path) == 1
    assert "step_00000002" in caplog.text
    (tmp_path / "step_00000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 damaged"):
        load_newest(str(tmp_path))


def test_a_flipped_bit_anywhere_in_a_seal_falls_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, [step])
    path = tmp_path / "step_00000002.json"
    seal = path.read_bytes()
    for bit in range(8 * len(seal)):
        flipped = bytearray(seal)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="step_00000002"):
            load_checkpoint(str(tmp_path / "step_00000002.pt"))
        if bit % 8 == 7:  # bytes that are no UTF-8
            assert newest_step(tmp_path) == 1, (bit, bytes(flipped))


@pytest.mark.parametrize(
    "seal",
    [
        *("null", "[]", "{}", "1", '"a"', "NaN", "{", '{"a":' * 100_000, "9" * 5000, "\ufeff{}"),
        *({"sha256": value} for value in (None, 1, ["a"], "é")),
        *({"size": value} for value in (None, "9", 1.5, True, -1, 10**30)),
        *({"permanent": value} for value in (None, "false", 0)),
        *({"step": value} for value in (None, "2", 1, 3.0)),
        {"another": 1},
    ],
    ids=lambda seal: str(seal)[:20],
)
def test_a_seal_of_other_values_is_damage(tmp_path: Path, seal: str | dict[str, Any]) -> None:
    for step in (1, 2):
        write(tmp_path, [step])
    path = tmp_path / "step_00000002.json"
    text = seal if isinstance(seal, str) else json.dumps({**json.loads(path.read_text()), **seal})
    path.write_text(text)
    with pytest.raises(CheckpointError, match="step_00000002") as error:
        load_checkpoint(str(tmp_path / "step_00000002.pt"))
    assert "\n" not in str(error.value)
    assert newest_step(tmp_path) == 1


def sealed(path: Path, data: bytes) -> str:
    """A checkpoint file of any bytes with the right seal."""
    path.write_bytes(data)
    seal = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "step": 1, "permanent": False}
    path.with_suffix(".json").write_text(json.dumps(seal))
    return str(path)


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, pickle_module=pickle)
    return file.getvalue()


@pytest.mark.parametrize(
    "state",
    [
        *([1], torch.zeros(2), None, "x", 5),
        *({"step": 1, "format_version": 1, name: value} for name, value in
          (("config", None), ("model", [1]), ("participants", 3), ("task", "x"), ("encoder", None))),
    ],
    ids=lambda state: str(state)[:50],
)  # fmt: skip
def test_a_sealed_file_of_other_content_is_one_line(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"odd\.pt: .*expected") as error:
        load_checkpoint(sealed(tmp_path / "odd.pt", saved(state)))
    assert "\n" not in str(error.value)


def test_a_sealed_zip_with_damage_is_one_line(tmp_path: Path) -> None:
    """Whatever torch raises for it; where the damage is in padding alone, the content is right."""
    whole = saved({"step": 1, "format_version": 1, "w": torch.arange(5)})
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0xA5
        with contextlib.suppress(CheckpointError):
            assert load_checkpoint(sealed(tmp_path / "odd.pt", bytes(damaged)))["step"] == 1, place


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (OSError(errno.ENOSPC, "full"), 2),
        (OSError(errno.EDQUOT, "full"), 2),
        (OSError(errno.EROFS, "read-only"), 2),
        (OSError(errno.EIO, "broken"), 2),
        (PermissionError(errno.EACCES, "not mine"), 2),
        (ConnectionError("away"), 75),
        (TimeoutError("away"), 75),
        (OSError(errno.ESTALE, "a mount that went"), 75),
    ],
    ids=str,
)
def test_what_a_person_must_mend_is_not_tried_again(
    tmp_path: Path, fault: OSError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stays full would make the rule of docs/guides/unattended.md train for ever."""

    def write(url: str, *_: Any) -> None:
        raise storage_error(url, fault)

    writer = CheckpointWriter(str(tmp_path), 2)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", write)
        writer.save({"step": 1}, ["step_00000001"])
        writer.wait()
    with pytest.raises(CheckpointError, match="the last checkpoint was not written") as error:
        writer.close()
    assert error.value.exit_code == code


def test_a_damaged_old_seal_does_not_stop_later_writes(tmp_path: Path) -> None:
    writer = write(tmp_path, [1, 2])
    (tmp_path / "step_00000001.json").write_text("[]")
    for step in (3, 4):
        writer.save({"step": step}, [f"step_{step:08d}"])
    writer.close()
    assert list_steps(str(tmp_path)) == [3, 4]


def test_a_write_cut_short_leaves_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    (tmp_path / "step_00000002.json").unlink()  # the seal comes last
    assert newest_step(tmp_path) == 1


def test_loading_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "owned",))

    with pytest.raises(CheckpointError, match="plain values"):
        load_checkpoint(sealed(tmp_path / "odd.pt", saved({"step": 1, "evil": Evil()})))
    assert not (tmp_path / "owned").exists()


def test_a_failed_write_is_reported_and_the_last_one_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A best checkpoint that failed is written with the next, as of its own step; a failed step is not."""
    blocked = tmp_path / "folder"
    blocked.write_text("a file where the directory should be")
    writer = CheckpointWriter(str(blocked), 2)
    writer.save({"step": 1}, ["best_probe", "best_val_loss", "step_00000001"])
    with caplog.at_level(logging.WARNING):
        writer.wait()
    assert "training goes on" in caplog.text
    blocked.unlink()
    writer.save({"step": 2}, ["best_val_loss", "step_00000002"])
    writer.close()
    assert steps_of_bests(blocked) == {"best_probe": 1, "best_val_loss": 2}
    assert list_steps(str(blocked)) == [2]


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.pt"):
        load_checkpoint(str(tmp_path / "nothing.pt"))


LEFTOVERS = [
    "step_00000005.pt",
    ".step_00000006.pt.partial",
    ".best_probe.pt.0f3a.partial",
    ".step_00000006.json.partial",
]
OTHERS = [
    "notes.txt",
    "best_rankme.pt",
    "lease_000001.json",
    ".lease_000001.json.partial",
    "step_00000003.pt.bak",
]


@pytest.mark.parametrize("keep_last", [1, None])
def test_what_kills_have_left_is_removed_and_nothing_else(tmp_path: Path, keep_last: int | None) -> None:
    for name in (*LEFTOVERS, *OTHERS):
        (tmp_path / name).write_text("")
    writer = CheckpointWriter(str(tmp_path), keep_last)
    writer.save({"step": 10}, ["best_probe", "step_00000010"])
    writer.close()
    names = {path.name for path in tmp_path.iterdir()}
    written = {f"{name}.{ending}" for name in ("best_probe", "step_00000010") for ending in ("pt", "json")}
    assert names == {*OTHERS, *written, *(LEFTOVERS if keep_last is None else ())}


def test_leftovers_are_gone_before_a_write_that_needs_their_space(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").write_text("")
    (tmp_path / "step_00000002.pt").mkdir()  # cannot be written
    (tmp_path / "step_00000002.json").mkdir()
    writer = CheckpointWriter(str(tmp_path), 1)
    writer.save({"step": 2}, ["step_00000002"])
    with pytest.raises(CheckpointError, match="last checkpoint was not written"):
        writer.close()
    assert not (tmp_path / "step_00000001.pt").exists()


def test_a_kill_while_an_old_one_is_removed_leaves_no_seal_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [20, 30])
    remove, removed = storage.remove, []

    def remove_one(url: str, *args: Any, **options: Any) -> None:
        if "step_00000020" in url:
            removed.append(url)
            if len(removed) > 1:
                raise storage.StorageError(url, "killed here")
        remove(url, *args, **options)

    monkeypatch.setattr(storage, "remove", remove_one)
    with contextlib.suppress(CheckpointError):
        write(tmp_path, [40])
    assert len(removed) == 2
    assert list_steps(str(tmp_path)) == [30, 40]


def test_names_of_one_checkpoint_share_their_bytes_on_a_disk(tmp_path: Path) -> None:
    writer = CheckpointWriter(str(tmp_path), 1)
    for step in (1, 2):
        writer.save(
            {"step": step, "w": torch.ones(1000)}, ["best_probe", "best_val_loss", f"step_{step:08d}"]
        )
        writer.wait()
    writer.save({"step": 3}, ["best_probe", "step_00000003"])
    writer.close()
    assert steps_of_bests(tmp_path) == {"best_probe": 3, "best_val_loss": 2}
    assert (tmp_path / "best_probe.pt").stat().st_ino == (tmp_path / "step_00000003.pt").stat().st_ino


def test_encoded_bytes_are_those_of_torch_and_no_copy_of_the_tensors(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {
        "a": torch.rand(300, 7),
        "b": [shared, shared[2:4]],
        "c": {"n": 3, "empty": torch.empty(0)},
        "d": shared.bool(),
    }
    expected = io.BytesIO()
    torch.save(state, expected)
    chunks = _encode(state)
    assert b"".join(chunks.parts) == chunks.open().read() == expected.getvalue()
    assert len(chunks) == len(expected.getvalue())
    assert b"".join(chunks[100:4000].parts) == expected.getvalue()[100:4000]
    before = bytes(chunks.parts[-1])
    state["a"].zero_()
    assert b"".join(chunks.parts) != expected.getvalue()
    assert bytes(chunks.parts[-1]) == before


PEAK = """
import sys, threading, torch
from pathlib import Path
from utils.checkpoint import CheckpointWriter
from utils.config.schema import StorageOptions

folder, endpoint = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
writer = CheckpointWriter(folder, 1, StorageOptions(endpoint_url=endpoint))
writer.save({"step": 1, "w": torch.ones(10)}, ["best_probe", "step_00000001"])  # loads what the clients need
writer.wait()
state = {"step": 2, "model": {str(n): torch.rand(2_500_000) for n in range(20)}}
size, resident, is_over = 20 * 10_000_000, [], threading.Event()

def watch():
    while not is_over.wait(0.002):
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)

watcher = threading.Thread(target=watch)
watcher.start()
while not resident:
    pass
before = resident[0]
writer.save(state, ["best_probe", "best_val_loss", "step_00000002"])
writer.close()
is_over.set()
watcher.join()
print((max(resident) - before) / size)
"""


def peak_of_saving(*arguments: str) -> float:
    """The most memory while a state of 200 MB is written, in units of the state, the live one not counted."""
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_saving_needs_one_copy_of_the_state_in_memory(tmp_path: Path) -> None:
    assert 0.9 < peak_of_saving(str(tmp_path)) < 1.5


@pytest.mark.parametrize("has_room", [True, False])
def test_a_checkpoint_that_waits_takes_no_memory_where_the_disk_has_room(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.01)
    may_go_on, write = threading.Event(), storage.write_bytes

    def slow(*arguments: Any) -> None:
        assert may_go_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(storage, "write_bytes", slow)
    waiting = tmp_path if has_room else tmp_path / "missing"
    writer = CheckpointWriter(str(tmp_path / "c"), 9, is_kept=lambda step: True, waiting_dir=waiting)
    weights = {"w": torch.rand(80_000), "half": torch.rand(3, 5).bfloat16(), "on": torch.tensor(True)}
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    writer.save({"step": 1, "model": weights}, ["step_00000001"])
    writer.save({"step": 2, "model": weights | {"none": torch.empty(0, 3)}}, ["step_00000002"])
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "checkpoint_waits_" in line
    ]
    assert len(mapped) == (3 if has_room else 0)  # a file for each tensor that is not empty
    weights["w"].zero_()
    assert [path.name for path in tmp_path.iterdir() if path.name != "c"] == []
    may_go_on.set()
    writer.close()
    saved = load_checkpoint(str(tmp_path / "c" / "step_00000002.pt"))["model"]
    assert saved.pop("none").shape == (0, 3)
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=0)
    assert ("no room for a checkpoint that waits" in caplog.text) != has_room
