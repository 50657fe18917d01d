"""Archives and tree in a bucket, with faults in the requests."""

import argparse
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data_setup import expand
from data_setup.expand import ArchiveFault, read_members
from tests.data_setup.expand.archives import NOISE, OCT, TREE, make_zip, tree_of
from tests.support.cloud_proxy import CORRUPT, CUT, RESET, UNFRAMED, Proxy, fault_proxy
from tests.support.cloud_servers import BUCKET, gcs_server
from utils import storage
from utils.config.schema import StorageOptions
from utils.storage import clients as cloud


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with pytest.MonkeyPatch.context() as patch, gcs_server() as server, fault_proxy(server) as server_proxy:
        for name in list(os.environ):
            if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
                patch.delenv(name)
        patch.setattr(cloud, "POLICY", replace(cloud.POLICY, attempts=4, first_wait_s=0.005))
        yield server_proxy


class Cloud:
    """Archives and the tree in a bucket behind a proxy."""

    def __init__(self, proxy: Proxy, name: str) -> None:
        self.proxy, self.options = proxy, StorageOptions(endpoint_url=proxy.endpoint)
        self.src, self.dst = f"gs://{BUCKET}/{name}/zips", f"gs://{BUCKET}/{name}/tree"

    def put(self, name: str, data: bytes) -> None:
        storage.write_bytes(f"{self.src}/{name}", data, self.options)

    def run(self, *arguments: str) -> int:
        self.proxy.requests.clear()
        where = ["--src", self.src, "--dst", self.dst, "--endpoint-url", self.proxy.endpoint]
        return expand.main([*where, "--workers", "4", *arguments])

    def media(self) -> list[str]:
        """What was asked for the bytes of an object since the run began."""
        return [t for m, t in self.proxy.requests if m == "GET" and "alt=media" in t]

    def tree(self) -> dict[str, bytes]:
        return tree_of(self.dst, self.options)


@pytest.fixture
def bucket(proxy: Proxy, tmp_path: Path) -> Iterator[Cloud]:
    yield Cloud(proxy, tmp_path.name)
    proxy.schedule = lambda method, target: None


def test_in_a_bucket(bucket: Cloud) -> None:
    bucket.put("a.zip", make_zip(TREE))
    bucket.put("b.zip", make_zip({"x": NOISE})[:-30])
    bucket.put("c.zip", make_zip({"y": b"1", "../z": b"2"}))
    assert bucket.run() == 2
    assert bucket.tree() == TREE
    assert bucket.run() == 2
    assert not [t for t in bucket.media() if "tree" in t and ".expand" not in t]  # no object is read again
    assert not [t for m, t in bucket.proxy.requests if m == "POST" and "topcon" in t]
    assert bucket.tree() == TREE


@pytest.mark.parametrize("fault", [CUT, UNFRAMED])
def test_a_part_of_an_object_is_whole_or_asked_for_again(bucket: Cloud, fault: str) -> None:
    """Without length and checksum, half of an answer looks like all of it."""
    bucket.put("x", NOISE)
    faults = iter([fault])
    bucket.proxy.schedule = lambda method, target: next(faults, None)
    url = f"{bucket.src}/x"
    assert storage.read_range(url, 100, 5000, bucket.options) == NOISE[100:5000]
    assert bucket.proxy.faults[fault] > 0
    size = len(NOISE)
    assert storage.read_range(url, size - 10, size + 10, bucket.options) == NOISE[-10:]
    assert storage.read_range(url, 10, 10, bucket.options) == b""
    assert storage.find_sizes(bucket.src, bucket.options) == {"x": size}


def test_uploads_that_fail_leave_nothing_and_the_next_run_goes_on(bucket: Cloud) -> None:
    bucket.put("a.zip", make_zip(TREE))
    bucket.proxy.schedule = lambda m, t: RESET if m == "POST" and "b.dcm" in t else None
    with pytest.raises(storage.StorageError, match=r"b\.dcm: gave up after 4 attempts"):
        bucket.run("--workers", "1")
    bucket.proxy.schedule = lambda m, t: None
    assert f"{OCT}/9002/b.dcm" not in bucket.tree()
    there = len(bucket.tree())
    assert there > 0
    bucket.proxy.schedule = lambda m, t: CUT if "b.dcm" in t and not bucket.proxy.faults[CUT] else None
    assert bucket.run() == 0
    assert bucket.tree() == TREE
    uploads = [t for m, t in bucket.proxy.requests if m == "POST" and ".expand" not in t]
    assert len([t for t in uploads if "b.dcm" not in t]) == len(TREE) - there - 1


def test_an_answer_with_a_flipped_bit_does_not_condemn_the_archive(bucket: Cloud) -> None:
    """A part of an object comes without a checksum; the archive's own tells, and the member is read again."""
    bucket.put("a.zip", make_zip({"x": NOISE}, zipfile.ZIP_STORED))
    url = f"{bucket.src}/a.zip"
    (member,) = read_members(url, bucket.options)
    expansion = expand.Expansion(argparse.Namespace(dst=bucket.dst), bucket.options, None)
    faults = iter([CORRUPT])
    bucket.proxy.schedule = lambda method, target: next(faults, None)
    assert expansion._read(url, member) == NOISE
    bucket.proxy.schedule = lambda method, target: CORRUPT
    with pytest.raises(ArchiveFault, match="damaged_header"):
        expansion._read(url, member)
