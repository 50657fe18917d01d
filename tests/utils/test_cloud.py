"""gs:// and s3:// against real HTTP servers on loopback, with and without faults in between."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from data_setup.readers.dicom import read_volume
from tests.support.cloud_proxy import (
    CORRUPT,
    CUT,
    DAMAGED,
    FAULTS,
    LATENCY,
    LOST,
    RESET,
    STALL,
    UNFRAMED,
    Proxy,
    fault_proxy,
)
from tests.support.cloud_servers import BUCKET, gcs_server, log_in, s3_server
from tests.support.dicom_factory import TRITON, speckle, write_opt
from tests.utils.test_checkpoint import peak_of_saving, steps_of_bests
from tests.utils.test_storage import check_operations
from utils import checkpoint, storage
from utils.checkpoint import CheckpointWriter, list_steps, load_checkpoint
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.run.lease import hold
from utils.storage import clients as cloud
from utils.storage.errors import VERSIONS, RetryPolicy

PLANTED = "pl4nted-s3cret"  # must not come out anywhere
QUICK = replace(cloud.POLICY, attempts=5, first_wait_s=0.005)
HASTY = replace(QUICK, attempts=2, read_timeout_s=0.5)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Credentials that the servers do not ask for, and none of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        log_in(patch, PLANTED)
        yield


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    with gcs_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


class Bucket:
    """A folder of its own in the bucket, behind a proxy."""

    def __init__(self, scheme: str, proxy: Proxy, name: str) -> None:
        self.scheme, self.proxy = scheme, proxy
        self.root = f"{scheme}://{BUCKET}/{name}"
        self.options = StorageOptions(endpoint_url=proxy.endpoint)

    def url(self, *parts: str) -> str:
        return storage.join(self.root, *parts)


@pytest.fixture(scope="module")
def proxies(gcs: str, s3: str) -> Iterator[dict[tuple[str, RetryPolicy], Proxy]]:
    """A client keeps the time limits that it was made with, so each policy has endpoints of its own."""
    with ExitStack() as stack:
        yield {
            (scheme, policy): stack.enter_context(fault_proxy(server))
            for scheme, server in (("gs", gcs), ("s3", s3))
            for policy in (QUICK, HASTY)
        }


@pytest.fixture(params=["gs", "s3"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def policy() -> RetryPolicy:
    return QUICK


@pytest.fixture
def bucket(
    scheme: str,
    policy: RetryPolicy,
    proxies: dict[tuple[str, RetryPolicy], Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bucket]:
    monkeypatch.setattr(cloud, "POLICY", policy)
    proxy = proxies[scheme, policy]
    yield Bucket(scheme, proxy, tmp_path.name)
    proxy.schedule = lambda method, target: None
    proxy.requests.clear()
    proxy.faults.clear()


def test_operations(bucket: Bucket) -> None:
    check_operations(bucket.root, bucket.options)


# aiohttp repeats GET, PUT, HEAD and DELETE itself when it loses a connection; an upload to gs:// is a POST.
NO_WARNING = {"gs": (LATENCY,), "s3": (LATENCY, LOST, RESET)}


def first_only(fault: str) -> Callable[[str, str], str | None]:
    faults = iter([fault])
    return lambda method, target: next(faults, None)


def always(fault: str) -> Callable[[str, str], str | None]:
    return lambda method, target: fault


@pytest.mark.parametrize("fault", [f for f in (*FAULTS, CORRUPT, UNFRAMED) if f != STALL])
def test_a_single_fault_passes(bucket: Bucket, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    url, options, data = bucket.url("x"), bucket.options, bytes(range(256)) * 8
    bucket.proxy.schedule = first_only(fault)
    storage.write_bytes(url, data, options)
    bucket.proxy.schedule = first_only(fault)
    assert storage.read_bytes(url, options) == data
    if fault not in (CORRUPT, UNFRAMED):  # only objects have checksums
        bucket.proxy.schedule = first_only(fault)
        assert storage.list_names(bucket.root, options) == ["x"]
        bucket.proxy.schedule = first_only(fault)
        assert storage.stat(url, options).size == len(data)
        bucket.proxy.schedule = first_only(fault)
        storage.remove(url, options)
        assert not storage.exists(url, options)
    assert bucket.proxy.faults[fault] >= 2
    messages = [r.getMessage() for r in caplog.records if r.name == "utils.storage.errors"]
    if fault not in NO_WARNING[bucket.scheme]:
        line = re.compile(rf"{re.escape(url)}: attempt 1 of 5 failed \(.+\); again in 0\.0 s")
        assert any(line.fullmatch(m) for m in messages)
    assert PLANTED not in caplog.text


@pytest.mark.parametrize("fault", ["429", "503", CUT, UNFRAMED, CORRUPT, LOST])
def test_a_lasting_fault_ends_after_the_attempts(bucket: Bucket, fault: str) -> None:
    """The clients' own retries would multiply ours: gcsfs 6 times, s3fs and botocore 25 times."""
    url, options = bucket.url("x"), bucket.options
    storage.write_bytes(url, b"abc" * 100, options)
    bucket.proxy.requests.clear()
    bucket.proxy.schedule = always(fault)
    # aiohttp repeats a request that may be repeated once, without a word, when its connection is lost.
    expected = QUICK.attempts * (2 if fault == LOST else 1)
    with pytest.raises(storage.StorageError, match=rf"{url}: gave up after 5 attempts in .+; check the conn"):
        storage.read_bytes(url, options)
    assert len(bucket.proxy.requests) == expected
    if fault == "503":
        with pytest.raises(storage.StorageError, match=rf"{url}: gave up after 5 attempts"):
            storage.write_bytes(url, b"def", options)
        with pytest.raises(storage.StorageError, match=rf"{bucket.root}: gave up after 5 attempts"):
            storage.list_names(bucket.root, options)
        assert len(bucket.proxy.requests) == 3 * expected


@pytest.mark.parametrize("policy", [HASTY])
def test_a_stall_ends_with_the_read_timeout(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    url, options = bucket.url("x"), bucket.options
    storage.write_bytes(url, b"abc" * 100, options)
    bucket.proxy.schedule = first_only(STALL)
    assert storage.read_bytes(url, options) == b"abc" * 100
    assert f"{url}: attempt 1 of 2 failed" in caplog.text
    bucket.proxy.schedule = always(STALL)
    with pytest.raises(storage.StorageError, match=rf"{url}: gave up after 2 attempts"):
        storage.read_bytes(url, options)
    assert bucket.proxy.faults[STALL] == 3


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("401", {"gs": "gcloud auth application-default login", "s3": "AWS_ACCESS_KEY_ID"}),
        ("403", {"gs": f"storage.objects.get.* on the bucket {BUCKET}", "s3": f"s3:GetObject.* {BUCKET}"}),
        ("404", {"gs": f"the bucket name {BUCKET}", "s3": f"the bucket name {BUCKET}"}),
    ],
)
def test_what_cannot_pass_fails_at_once(bucket: Bucket, code: str, advice: dict[str, str]) -> None:
    bucket.proxy.schedule = always(code)
    with pytest.raises(storage.StorageError, match=advice[bucket.scheme]) as caught:
        storage.read_bytes(bucket.url("x"), bucket.options)
    assert str(caught.value).startswith(bucket.url("x") + ": ")
    assert len(bucket.proxy.requests) == 1
    assert isinstance(caught.value, storage.StorageNotFoundError) == (code == "404")


@pytest.mark.parametrize("list_objects", [storage.find_names, storage.find_sizes, storage.list_names])
def test_a_listing_that_is_not_allowed_is_not_empty(bucket: Bucket, list_objects: Callable) -> None:
    bucket.proxy.schedule = always("403")
    with pytest.raises(storage.StorageError, match="no permission"):
        list_objects(bucket.root, bucket.options)


def test_a_missing_bucket_is_named_when_writing(bucket: Bucket) -> None:
    url = f"{bucket.scheme}://no-such-bucket/x"
    with pytest.raises(storage.StorageError, match="expected the bucket no-such-bucket") as caught:
        storage.write_bytes(url, b"1", bucket.options)
    assert not isinstance(caught.value, storage.StorageNotFoundError)


def test_create_happens_once_also_when_the_answer_is_lost(bucket: Bucket) -> None:
    url, options = bucket.url("lock"), bucket.options
    bucket.proxy.schedule = first_only(LOST)
    assert storage.create(url, b"mine", options)
    assert len(bucket.proxy.requests) >= 2
    assert not storage.create(url, b"theirs", options)
    assert storage.read_bytes(url, options) == b"mine"


@pytest.mark.parametrize("data", [b"a\r", b"a\n", b"\r\n--==0==--", b"\x00" * 3_000_000], ids=range(4))
def test_bytes_come_back_as_they_went(bucket: Bucket, data: bytes) -> None:
    storage.write_bytes(bucket.url("x"), data, bucket.options)
    assert storage.read_bytes(bucket.url("x"), bucket.options) == data


def uploads(proxy: Proxy) -> list[str]:
    """The files whose bytes went up, in order."""
    names = []
    for method, target in proxy.requests:
        path = urlsplit(target).path
        if method == "POST" and path.startswith("/upload/"):
            names.append(parse_qs(urlsplit(target).query)["name"][0])
        elif method == "PUT":
            names.append(path)
    return [name.rpartition("/")[2] for name in names if name.endswith(".pt")]


def test_a_checkpoint_of_three_names_goes_up_once(bucket: Bucket) -> None:
    names = ["best_probe", "best_val_loss", "step_00000004"]
    writer = CheckpointWriter(bucket.root, 1, bucket.options)
    writer.save({"step": 4, "w": torch.rand(100_000)}, names)
    writer.close()
    copies = 2 if bucket.scheme == "s3" else 0  # a copy is a PUT there
    assert uploads(bucket.proxy)[0] == "best_probe.pt"
    assert len(uploads(bucket.proxy)) == 1 + copies
    states = [load_checkpoint(bucket.url(f"{name}.pt"), bucket.options) for name in names]
    assert len({state["checksum"] for state in states}) == 1


@pytest.mark.slow
def test_saving_into_a_bucket_needs_one_copy_of_the_state_in_memory(
    scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    endpoint = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    assert 0.9 < peak_of_saving(f"{scheme}://{BUCKET}/{tmp_path.name}", endpoint) < 1.5


def test_a_slow_bucket_does_not_stop_training(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the first checkpoint goes up, the newest step displaces those that wait; bests stay."""
    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.1)
    is_there, may_go_on = threading.Event(), threading.Event()

    def slow(method: str, target: str) -> None:
        if "step_00000001.pt" in unquote(target) and method in ("POST", "PUT"):
            is_there.set()
            may_go_on.wait(30)

    bucket.proxy.schedule = slow
    writer = CheckpointWriter(bucket.root, 9, bucket.options, is_kept=lambda step: step == 3)
    bests = {2: ["best_probe"], 4: ["best_val_loss"], 5: ["best_val_loss"]}
    for step in range(1, 7):
        writer.save({"step": step}, [*bests.get(step, []), f"step_{step:08d}"])
        assert is_there.wait(30)
    assert not writer.wait(0.0)
    may_go_on.set()
    writer.close()
    assert list_steps(bucket.root, bucket.options) == [1, 3, 6]
    assert steps_of_bests(bucket.root, bucket.options) == {"best_probe": 2, "best_val_loss": 5}
    assert "step_00000005: not written, since writing is slow" in caplog.text


def test_one_training_at_a_time_in_a_bucket(bucket: Bucket) -> None:
    """The answer to the first creation is lost: it is the holder's own all the same."""
    first = itertools.count()
    bucket.proxy.schedule = lambda method, _: LOST if method in ("POST", "PUT") and next(first) == 0 else None
    with hold(bucket.root, bucket.options) as lease:
        again = hold(bucket.root, bucket.options)
        with (
            pytest.raises(UserError, match=f"expected no other training .* process {os.getpid()} on "),
            again,
        ):
            pass
        lease._renew()
        assert storage.list_names(bucket.root, bucket.options) == ["lease_000001.json"]
        assert not storage.create(bucket.url("lease_000001.json"), b"another's", bucket.options)
    assert storage.list_names(bucket.root, bucket.options) == []


def test_an_upload_slower_than_the_limit_counts_as_stalled() -> None:
    """1.5 GB used to have 97 minutes for one attempt."""
    assert cloud.upload_limit_s(1_500_000_000) < 400


def test_a_request_that_the_server_calls_wrong_is_an_error_in_one_line(bucket: Bucket) -> None:
    bucket.proxy.schedule = always("400")
    with pytest.raises(storage.StorageError, match=rf"{bucket.url('x')}: "):
        storage.write_bytes(bucket.url("x"), b"1", bucket.options)
    assert len(bucket.proxy.requests) == 1


def test_an_upload_that_fails_leaves_the_old_content(bucket: Bucket) -> None:
    url, options = bucket.url("x"), bucket.options
    storage.write_bytes(url, b"old", options)
    bucket.proxy.schedule = lambda method, target: RESET if method in ("POST", "PUT") else None
    with pytest.raises(storage.StorageError, match="gave up"):
        storage.write_bytes(url, b"new" * 1000, options)
    assert storage.read_bytes(url, options) == b"old"
    assert storage.list_names(bucket.root, options) == ["x"]


@pytest.mark.parametrize("scheme", ["gs"])  # on s3 the client sends the checksum, and the server compares
def test_an_upload_that_arrives_damaged_is_sent_again(bucket: Bucket) -> None:
    url, options, data = bucket.url("x"), bucket.options, bytes(range(256))
    bucket.proxy.schedule = first_only(DAMAGED)
    storage.write_bytes(url, data, options)
    assert storage.read_bytes(url, options) == data
    bucket.proxy.schedule = always(DAMAGED)
    with pytest.raises(storage.StorageError, match=r"gave up after 5 attempts.+expected crc32c"):
        storage.write_bytes(url, data, options)


def test_volume_and_archive_are_read_from_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    local = write_opt(tmp_path, speckle())
    url, options = bucket.url(TRITON), bucket.options
    storage.write_bytes(url, Path(local).read_bytes(), options)
    bucket.proxy.schedule = first_only(CUT)
    np.testing.assert_array_equal(read_volume(url, options).voxels, read_volume(local).voxels)
    bucket.proxy.schedule = always(CUT)
    with pytest.raises(storage.StorageError, match="gave up"):  # says nothing about the file: no reject
        read_volume(url, options)
    bucket.proxy.schedule = first_only("503")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("retinal_oct/a.txt", "text")
    storage.write_bytes(bucket.url("a.zip"), archive.getvalue(), options)
    with storage.open_url(bucket.url("a.zip"), options=options) as file, zipfile.ZipFile(file) as members:
        assert members.read("retinal_oct/a.txt") == b"text"


def test_waits_grow_vary_and_end() -> None:
    policy = RetryPolicy()
    draws = [[policy.wait_s(attempt) for _ in range(200)] for attempt in range(1, 12)]
    assert all(len(set(d)) > 100 for d in draws)
    assert all(max(earlier) <= min(later) for earlier, later in itertools.pairwise(draws[:7]))
    assert max(draws[0]) <= policy.first_wait_s
    assert min(draws[-1]) >= 16
    assert max(draws[-1]) <= policy.max_wait_s


def test_azure_names_its_container_before_the_account() -> None:
    accounts = []

    class Azure(MemoryFileSystem):
        """As adlfs takes the two apart."""

        protocol = ("abfs", "abfss")
        cachable = False

        def __init__(self, account_name: str, **options: Any) -> None:
            super().__init__(**options)
            accounts.append(account_name)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return re.sub(r"abfss?://(\w+)@[^/]*", r"/\1", path)

    for name in Azure.protocol:
        fsspec.register_implementation(name, Azure, clobber=True)
    storage.write_bytes("abfs://box@eyes.dfs.core.windows.net/x", b"1")
    assert storage.read_bytes("abfss://box@eyes.dfs.core.windows.net/x") == b"1"
    assert set(accounts) == {"eyes"}


@pytest.mark.parametrize("package", ["gcsfs", "s3fs"])
def test_a_client_is_one_of_the_versions_that_were_tried(package: str) -> None:
    """Private names of theirs are used, so their next version may have others."""
    written = Path("requirements.txt").read_text()
    bounds = re.search(rf"^{package}(.+)$", written, re.MULTILINE)[1]
    assert re.fullmatch(r">=[\d.]+,<[\d.]+", bounds)
    assert bounds == VERSIONS[package]
    assert Version(version(package)) in SpecifierSet(bounds)


def test_s3_without_its_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(storage.StorageError, match=r"s3://b/x: s3:// needs .+: pip install 's3fs>=.+'$"):
        storage.read_bytes("s3://b/x", StorageOptions(endpoint_url="http://127.0.0.1:2"))
