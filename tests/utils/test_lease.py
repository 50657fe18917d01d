"""One holder at a time: real processes on one machine, another machine by its name, a folder and memory."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipeline_factory import ROOT
from utils import storage
from utils.errors import EXIT_TRY_AGAIN, UserError
from utils.run import lease as lease_module
from utils.run.lease import Lease, LeaseError, hold

pytestmark = pytest.mark.timeout(120)
HOLD = """
import sys, time
from utils.run.lease import LeaseError, hold
with hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = (
        str(tmp_path / "checkpoints")
        if request.param == "folder"
        else f"memory://{tmp_path.name}/checkpoints"
    )
    yield url
    storage.remove(url, recursive=True)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a second, so that a test can wait for their end."""
    monkeypatch.setattr(lease_module, "LEASE_S", 1.0)
    monkeypatch.setattr(lease_module, "POLL_S", 0.05)


class Elsewhere(Lease):
    """A lease of a process of another machine."""

    def _text(self) -> bytes:
        return json.dumps({**json.loads(super()._text()), "machine": "another boot"}).encode()


def test_another_process_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError) as error, hold(str(tmp_path)):
            pass
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        who = rf"process {other.pid} on {re.escape(os.uname().nodename)}, since {stamp}, until {stamp}"
        assert re.search(f"expected no other training of this run, found {who}; ", str(error.value))
        other.send_signal(signal.SIGKILL)
        while lease_module.process_start(other.pid) >= 0:  # a zombie until it is waited for
            time.sleep(0.01)
        with hold(str(tmp_path)):
            assert storage.list_names(str(tmp_path)) == ["lease_000002.json"]
    assert storage.list_names(str(tmp_path)) == []


def test_one_that_is_silent_on_another_machine_is_waited_for(
    place: str, brief: None, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Elsewhere(place, None)
    silent._renewer = threading.Thread(target=lambda: None)
    silent.take()
    expires = silent._expires
    with hold(place) as ours:
        assert time.time() >= expires
        assert "waiting for the lease of process" in caplog.text
        with pytest.raises(UserError, match="expected no other training of this run, found process"):
            silent.check()
        silent.release()
        ours.check()
        assert storage.list_names(place) == ["lease_000002.json"]
    with pytest.raises(LeaseError, match="another training of this run has taken over and ended"):
        silent.check()


def test_one_that_goes_on_on_another_machine_is_not_waited_for(place: str, brief: None) -> None:
    other = Elsewhere(place, None)
    other.take()
    refused = pytest.raises(LeaseError, match="expected no other training of this run")
    with refused as error, hold(place):
        pass
    assert error.value.exit_code == EXIT_TRY_AGAIN  # it may be about to end
    assert storage.list_names(place) == ["lease_000001.json"]
    other.release()


def test_sigterm_ends_the_wait_for_another_machines_lease(place: str, brief: None) -> None:
    other = Elsewhere(place, None)
    other.take()
    checks = []

    def is_stopped() -> bool:
        checks.append(1)
        return len(checks) > 2  # while it waits

    with hold(place, is_stopped=is_stopped):
        assert storage.list_names(place) == ["lease_000001.json"]
    assert len(checks) == 3
    assert storage.list_names(place) == ["lease_000001.json"]  # what it did not hold it does not remove
    other.release()


def test_of_many_that_start_at_once_one_holds(place: str, brief: None) -> None:
    """After one that was killed: its successors race for its place."""
    storage.write_text(f"{place}/lease_000007.json", storage.read_text(_of_the_dead(place)))
    holding, refused, start = [], [], threading.Barrier(6)
    finish = threading.Event()

    def compete() -> None:
        start.wait()
        try:
            with hold(place) as lease:
                holding.append(lease)
                finish.wait()
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=compete) for _ in range(6)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(holding) + len(refused) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    finish.set()
    for thread in threads:
        thread.join()
    assert (len(holding), len(refused)) == (1, 5)
    assert [n for n in storage.list_names(place) if n.startswith("lease")] == []


def _of_the_dead(place: str) -> str:
    """A file with the lease of a process of this machine that has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = lease_module.Holder("here", lease_module.machine_id(), gone.pid, 1, time.time(), time.time() + 900)
    url = f"{place}/dead.txt"
    storage.write_text(url, json.dumps(asdict(dead)))
    return url


@pytest.mark.parametrize(
    ("start", "expires_s", "is_held"),
    [
        (lambda: lease_module.process_start(os.getpid()), 900, True),
        (lambda: lease_module.process_start(os.getpid()), -900, True),  # it was frozen, or a clock jumped
        (lambda: 1, 900, False),  # its number was given to another process
    ],
)
def test_a_process_of_this_machine_holds_as_long_as_it_lives(
    place: str, start: Callable[[], int], expires_s: float, is_held: bool
) -> None:
    now, machine = time.time(), lease_module.machine_id()
    holder = lease_module.Holder("here", machine, os.getpid(), start(), now, now + expires_s)
    storage.write_text(f"{place}/lease_000001.json", json.dumps(asdict(holder)))
    expected = pytest.raises(UserError, match="expected no other training") if is_held else nullcontext()
    with expected, hold(place):
        assert storage.list_names(place) == ["lease_000002.json"]


def test_whoever_creates_a_lower_number_than_another_does_not_hold(place: str) -> None:
    """It was slow to look: the other one had removed the number in between."""
    storage.write_text(f"{place}/lease_000007.json", storage.read_text(_of_the_dead(place)))
    storage.remove(f"{place}/dead.txt")
    assert not Lease(place, None)._create(6)
    assert storage.list_names(place) == ["lease_000007.json"]


def test_a_successor_on_another_machine_is_no_renewal(place: str, brief: None) -> None:
    """While a start waits for a silent holder another one takes its place, and is silent too."""
    now, checks = time.time(), []

    def is_stopped() -> bool:
        checks.append(1)
        if len(checks) < 3:
            since = now + len(checks)
            holder = lease_module.Holder("there", "another boot", 1, 1, since, now + len(checks) / 5)
            storage.write_text(f"{place}/lease_000001.json", json.dumps(asdict(holder)))
        return False

    with hold(place, is_stopped=is_stopped):
        assert time.time() >= now + 0.4


def test_a_renewal_that_fails_is_a_warning_and_the_lease_goes_on_later(
    tmp_path: Path, brief: None, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "checkpoints"
    with caplog.at_level(logging.WARNING), hold(str(place)) as lease:
        fault = place / ".lease_000001.json.partial"
        fault.mkdir()
        before = (place / "lease_000001.json").read_bytes()
        while "not renewed, the work goes on" not in caplog.text:
            time.sleep(0.02)
        lease.check()
        fault.rmdir()
        while (place / "lease_000001.json").read_bytes() == before:
            time.sleep(0.02)


@pytest.mark.parametrize("edit", [{"expires": "tomorrow"}, {"pid": None}, {"more": 1}, None])
def test_a_damaged_lease_is_named(tmp_path: Path, edit: dict[str, Any] | None) -> None:
    holder = json.loads(Lease(str(tmp_path), None)._text())
    (tmp_path / "lease_000001.json").write_text(json.dumps(holder | edit) if edit else "{")
    with (
        pytest.raises(UserError, match=r"lease_000001\.json: expected a lease, found damage"),
        hold(str(tmp_path)),
    ):
        pass
