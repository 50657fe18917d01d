"""One process at a time for one folder: of a run, of its checkpoints, of a command's output.

In: a folder or a bucket. The process that writes there holds a lease on it, a small file lease_NNNNNN.json
that says who holds it and until when; a thread renews it, the end of the work removes it.
The highest number counts. Whoever takes over creates the next one, which succeeds once (storage.create).

A holder on this machine counts as long as its process lives, so a run that was killed starts again at once.
One on another machine counts until its lease expires: a start waits for that, and gives up as soon as it sees
the lease renewed. Clocks of machines may differ by a few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import TransientError, UserError

LEASE_S = 300.0  # a holder that is silent for longer has lost it
RENEWALS = 5  # within that time
POLL_S = 5.0
_NAME = re.compile(r"lease_(\d{6})\.json")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease."""

    host: str
    machine: str  # its boot and its process namespace: where `pid` means something; "" where unknown
    pid: int
    process_start: int  # clock ticks after boot, since numbers of processes come again
    since: float  # Unix time
    expires: float  # Unix time

    def __str__(self) -> str:
        since, expires = (
            datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            for t in (self.since, self.expires)
        )
        return f"process {self.pid} on {self.host}, since {since}, until {expires}"

    @property
    def is_on_this_machine(self) -> bool:
        return self.machine != "" and self.machine == machine_id()

    @property
    def is_running(self) -> bool:
        """Whether its process is there, and is the one that took the lease; only for this machine."""
        return process_start(self.pid) == self.process_start


def machine_id() -> str:
    """Changes with every boot, and differs between containers; "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """Clock ticks from boot to the start of a process; -1 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Work:
    """What one process at a time does in a folder, in the words of a refusal."""

    name: str  # after "expected no other"
    elsewhere: str  # after "or use"


TRAINING = Work("training of this run", "another run.dir and train.ckpt_dir")


class LeaseError(TransientError):
    """A process out of this machine's sight holds the lease: it may end, or its lease expire."""


class Lease:
    """A lease that this process holds; see `hold`."""

    def __init__(self, directory: str, options: StorageOptions | None, work: Work = TRAINING) -> None:
        self.directory, self.options, self.work = directory, options, work
        self._since, self._expires = time.time(), 0.0
        self._number = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._renewer = threading.Thread(target=self._keep, name="lease", daemon=True)

    def take(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Become the holder; raises UserError while another process is. May wait for LEASE_S, and gives up
        the wait, not being the holder, once `is_stopped`.
        """
        first_seen: Holder | None = None
        while not is_stopped():
            number, holder = self._newest()
            if holder is not None and holder.is_on_this_machine:
                if holder.is_running:
                    raise self._refusal(holder)
            elif holder is not None and time.time() < holder.expires:
                if first_seen is None:
                    log.warning(
                        "%s: waiting for the lease of %s, unless it is renewed", self.directory, holder
                    )
                elif holder.since == first_seen.since and holder.expires > first_seen.expires:
                    raise self._refusal(holder)
                first_seen = holder
                time.sleep(max(0.0, min(POLL_S, holder.expires - time.time())))
                continue
            if self._create(number + 1):
                self._renewer.start()
                return

    def check(self) -> None:
        """Raise UserError where another process has taken over, while this one was frozen or cut off."""
        if time.time() > self._expires:
            with suppress(storage.StorageError):  # then nothing can be written either
                self._renew()

    def release(self) -> None:
        """End holding it; a failure is a warning, since the lease expires."""
        self._is_over.set()
        if self._renewer.ident is not None:
            self._renewer.join()
        try:
            self._remove_up_to(self._number)
        except storage.StorageError as error:
            log.warning("the lease is not released, it ends by itself: %s", error)

    def _refusal(self, holder: Holder) -> UserError:
        kind = UserError if holder.is_on_this_machine else LeaseError
        return kind(
            f"{self.directory}: expected no other {self.work.name}, found {holder}; wait for its end, stop "
            f"it, or use {self.work.elsewhere}; in a copy of its folder remove the copied lease_*.json"
        )

    def _newest(self) -> tuple[int, Holder | None]:
        """The highest number and who holds it; None where it was removed just now, or there is none."""
        number = max(self._numbers(), default=0)
        if number == 0:
            return 0, None
        url = self._url(number)
        try:
            holder = Holder(**json.loads(storage.read_text(url, self.options)))
            sum((holder.pid, holder.process_start, holder.since, holder.expires))  # are numbers
            return number, holder
        except storage.StorageNotFoundError:
            return number, None
        except (ValueError, TypeError) as error:
            raise UserError(f"{url}: expected a lease, found damage ({error}); remove it") from error

    def _numbers(self) -> list[int]:
        names = storage.list_names(self.directory, self.options)
        return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]

    def _url(self, number: int) -> str:
        return storage.join(self.directory, f"lease_{number:06d}.json")

    def _text(self) -> bytes:
        pid = os.getpid()
        expires = time.time() + LEASE_S
        holder = Holder(socket.gethostname(), machine_id(), pid, process_start(pid), self._since, expires)
        return json.dumps(asdict(holder)).encode()

    def _create(self, number: int) -> bool:
        """Whether this process now holds the lease of this number, and no higher one is there."""
        expires = time.time() + LEASE_S
        if not storage.create(self._url(number), self._text(), self.options):
            return False
        self._number, self._expires = number, expires
        if max(self._numbers(), default=0) > number:  # somebody was slow to look, and it is this process
            storage.remove(self._url(number), self.options)
            return False
        self._remove_up_to(number - 1)
        return True

    def _remove_up_to(self, number: int) -> None:
        for old in self._numbers():
            if old <= number:
                storage.remove(self._url(old), self.options)

    def _renew(self) -> None:
        with self._lock:
            number, holder = self._newest()
            if number > self._number and holder is not None:
                raise self._refusal(holder)
            if number != self._number:  # whoever takes over removes it
                text = f"another {self.work.name} has taken over and ended, or it was removed"
                raise LeaseError(
                    f"{self.directory}: expected its lease, found none: {text}; run the same command again"
                )
            expires = time.time() + LEASE_S
            storage.write_bytes(self._url(self._number), self._text(), self.options)
            self._expires = expires

    def _keep(self) -> None:
        while not self._is_over.wait(LEASE_S / RENEWALS):
            try:
                self._renew()
            except storage.StorageError as error:
                log.warning("%s: the lease is not renewed, the work goes on: %s", self.directory, error)
            except UserError:
                self._expires = 0.0  # so that `check` says it
                return


@contextmanager
def hold(
    directory: str,
    options: StorageOptions | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    work: Work = TRAINING,
) -> Iterator[Lease]:
    """Hold the lease of a folder, which is made; raises UserError while another process holds it. Where
    `is_stopped` ends the wait for it, the caller must end too: it holds nothing.
    """
    lease = Lease(directory, options, work)
    lease.take(is_stopped)
    try:
        yield lease
    finally:
        lease.release()
