"""utils/storage: whole writes, named errors, the same behaviour on a disk and on an object store."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from data_setup.store.writer import StoreWriter
from utils import storage
from utils.config.schema import SpatialConfig, StorageOptions
from utils.storage import local_writes
from utils.storage.errors import redact, storage_error
from utils.storage.zarr_keys import ObjectStore, read_through


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder on a disk and in fsspec's in-memory object store."""
    return str(tmp_path / "root") if request.param == "disk" else f"memory://{tmp_path.name}/root"


def check_operations(root: str, options: StorageOptions | None = None) -> None:
    """Write, read, list and remove, on whatever holds the root."""
    inside = partial(storage.join, root)
    storage.write_bytes(inside("a", "b.bin"), b"\x00one", options)
    storage.write_text(inside("a/c.txt"), "zwei é", options)
    storage.write_bytes(inside("a", "empty"), b"", options)
    assert storage.read_bytes(inside("/a/", "/b.bin"), options) == b"\x00one"
    assert storage.read_text(inside("a", "c.txt"), options) == "zwei é"
    assert storage.read_bytes(inside("a", "empty"), options) == b""
    with storage.open_url(inside("a", "b.bin"), options=options) as file:
        file.seek(1)
        assert file.read(2) == b"on"
    assert storage.list_names(inside("a"), options) == ["b.bin", "c.txt", "empty"]
    assert storage.list_names(root, options) == ["a"]
    assert storage.find_names(root, options) == ["a/b.bin", "a/c.txt", "a/empty"]
    assert storage.list_names(inside("absent"), options) == []
    assert "b.bin" not in storage.list_names(inside("a", "c.txt"), options)
    assert storage.exists(inside("a"), options)
    assert not storage.exists(inside("b"), options)
    first = storage.stat(inside("a", "b.bin"), options)
    time.sleep(0.02)
    storage.write_bytes(inside("a", "b.bin"), b"\x00two", options)
    assert (first.size, storage.stat(inside("a", "b.bin"), options).size) == (4, 4)
    assert first.etag_or_mtime != storage.stat(inside("a", "b.bin"), options).etag_or_mtime
    for _ in range(2):
        storage.remove(inside("a", "b.bin"), options)
    assert not storage.exists(inside("a", "b.bin"), options)
    storage.remove(inside("a"), options, recursive=True)
    assert storage.find_names(root, options) == []


def test_operations(root: str) -> None:
    check_operations(root)
    assert not storage.exists(storage.join(root, "a"))


def test_create_happens_once(root: str) -> None:
    url = storage.join(root, "locks", "one")
    assert storage.create(url, b"mine")
    assert not storage.create(url, b"theirs")
    assert storage.read_bytes(url) == b"mine"


@pytest.mark.parametrize("is_there", [False, True])
def test_create_on_a_disk_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    url = tmp_path / "one"
    if is_there:
        url.write_bytes(b"old")
    monkeypatch.setattr(os, "link", refuse)
    assert storage.create(str(url), b"new") is not is_there
    assert url.read_bytes() == (b"old" if is_there else b"new")
    assert os.listdir(tmp_path) == ["one"]


def test_missing_object_names_the_url_and_survives_pickling(root: str) -> None:
    url = storage.join(root, "absent.dcm")
    for read in (storage.read_bytes, storage.stat, storage.open_url):
        with pytest.raises(storage.StorageNotFoundError, match=r"absent\.dcm: not found; check the path"):
            read(url)
    error = pickle.loads(pickle.dumps(storage.StorageNotFoundError(url, "not found")))
    assert (error.url, str(error)) == (url, f"{url}: not found")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_where_a_folder_would_be_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    url = str(tmp_path / place / "one")
    for write in (
        *(partial(write, data=b"") for write in (storage.write_bytes, storage.create)),
        storage.make_dirs,
    ):
        with pytest.raises(storage.StorageError, match=r"one: expected a folder, found a file at .*/file"):
            write(url)


class _Unreadable(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise storage.StorageNotFoundError("gs://bucket/x", "not found")


def test_an_error_of_a_loader_worker_keeps_its_name_and_text() -> None:
    with pytest.raises(storage.StorageNotFoundError, match="gs://bucket/x: not found"):
        next(iter(torch.utils.data.DataLoader(_Unreadable(), num_workers=1)))
    error = pickle.loads(pickle.dumps(storage.StorageError("only a message")))
    assert (error.url, error.problem, str(error)) == ("", "only a message", "only a message")


def test_no_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> bytes:
        raise PermissionError(
            13, "Permission denied"
        )  # root may read everything, so chmod proves nothing here

    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(storage.StorageError, match="no permission") as caught:
        storage.read_bytes(str(tmp_path / "secret"))
    assert not isinstance(caught.value, storage.StorageNotFoundError)


def test_cloud_client_errors_are_named() -> None:
    from google.auth.exceptions import DefaultCredentialsError

    error = storage_error("gs://bucket/x", DefaultCredentialsError("no default credentials"))
    assert "gcloud auth application-default login" in str(error)
    assert str(error).startswith("gs://bucket/x: no permission")


def test_unknown_scheme_and_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(storage.StorageError, match="gz://bucket"):
        storage.read_bytes("gz://bucket/x")
    storage.write_bytes(str(tmp_path / "t"), b"\xff\xfe\x00")
    with pytest.raises(storage.StorageError, match="expected UTF-8 text"):
        storage.read_text(str(tmp_path / "t"))


def test_join() -> None:
    assert storage.join("gs://b/x/", "/retinal_oct/a.dcm") == "gs://b/x/retinal_oct/a.dcm"
    assert storage.join("/", "a") == "/a"
    assert storage.join("rel", "a", "", "b/") == "rel/a/b"
    assert storage.join("", "a") == "a"
    assert storage.is_remote("gs://b/x")
    assert not storage.is_remote("/a/b")
    assert not storage.is_remote("file:///a/b")


def test_one_place_has_one_absolute_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["a/b", "a/b/", "./a/c/../b", f"{tmp_path}/a/b", f"file://{tmp_path}/a/b/"]
    assert {storage.absolute(n) for n in names} == {str(tmp_path / "a" / "b")}
    assert storage.absolute("gcs://b/x/") == storage.absolute("gs://b/x") == "gs://b/x"


def test_the_home_folder_is_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no folder is called ~, which a person would remove with all that is in the home folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    storage.make_dirs("~/a")
    storage.write_text("~/a/b.txt", "text")
    assert storage.create("~/a/c.txt", b"text")
    storage.copy("~/a/b.txt", "~/a/d.txt")
    assert storage.list_names("~/a") == ["b.txt", "c.txt", "d.txt"] == storage.find_names("~/a")
    with storage.open_url("~/a/d.txt") as file:
        assert file.read() == storage.read_bytes("file://~/a/c.txt") == storage.read_range("~/a/b.txt", 0, 4)
    assert storage.stat("~/a/b.txt").size == 4
    assert storage.free_bytes("~/a")
    assert storage.absolute("~/a") == str(tmp_path / "a")
    storage.remove("~/a/b.txt")
    assert not storage.exists("~/a/b.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "here"]
    assert not list(Path.cwd().iterdir())


def test_gs_endpoint_reaches_gcsfs_without_this_machines_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    fs, path = storage._filesystem("gs://bucket/a/b", StorageOptions(endpoint_url="http://127.0.0.1:1"))
    assert path == "bucket/a/b"
    assert fs.storage_options["endpoint_url"] == "http://127.0.0.1:1"
    assert fs.storage_options["token"] == "anon"


def test_a_killed_write_leaves_the_old_content(tmp_path: Path) -> None:
    """A writer killed at any moment leaves one whole version, and no name that list_names shows."""
    url = tmp_path / "object"
    size = 1 << 20
    code = (
        "import sys; from utils.storage import write_bytes\n"
        f"write_bytes({str(url)!r}, bytes([0]) * {size}); print('ready', flush=True); n = 0\n"
        f"while True: n += 1; write_bytes({str(url)!r}, bytes([n % 256]) * {size})"
    )
    for delay in (0.0, 0.004, 0.011, 0.017):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
        data = url.read_bytes()
        assert len(data) == size
        assert len(set(data)) == 1
        assert storage.list_names(str(tmp_path)) == ["object"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    url = str(tmp_path / "object")
    storage.write_bytes(url, b"old")

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, no_space)
    with pytest.raises(storage.StorageError, match="no space left; free some and run again"):
        storage.write_bytes(url, b"new")
    monkeypatch.undo()
    assert storage.read_bytes(url) == b"old"
    assert storage.list_names(str(tmp_path)) == ["object"]


def test_zarr_on_the_store(root: str) -> None:
    zarr.create_group(ObjectStore(root, read_only=False))
    array = zarr.create_array(
        ObjectStore(root, read_only=False), name="v", shape=(3, 4, 5), chunks=(1, 4, 5), dtype="uint8"
    )
    plane = np.arange(20, dtype=np.uint8).reshape(4, 5)
    array[1] = plane
    again = zarr.open_array(ObjectStore(root), path="v", mode="r")
    np.testing.assert_array_equal(again[1], plane)
    assert not again[0].any()
    assert list(zarr.open_group(ObjectStore(root), mode="r").array_keys()) == ["v"]
    assert storage.find_names(root) == ["v/c/1/0/0", "v/zarr.json", "zarr.json"]
    with pytest.raises(ValueError, match="read-only"):
        ObjectStore(root).with_read_only(True)._check_writable()


def test_a_copy_answers_when_the_remote_is_gone(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/x"
    storage.write_bytes(url, b"abc")
    copy = tmp_path / "cache" / "k" / "x"
    assert read_through(url, copy) == b"abc"
    storage.remove(url)
    assert read_through(url, copy) == b"abc"
    assert os.listdir(copy.parent) == ["x"]
    with pytest.raises(storage.StorageNotFoundError):
        read_through(url, tmp_path / "other")


@pytest.mark.parametrize("fault", ["full", "read_only", "no_folder", "copies_are_folders"])
def test_copies_that_cannot_be_kept_cost_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Whatever is wrong with the disk of the copies, the data comes, with one warning a process."""
    root = f"memory://{tmp_path.name}"
    cache, fsyncs = tmp_path / "cache", []

    def refuse(descriptor: int) -> None:
        fsyncs.append(descriptor)
        raise OSError(errno.ENOSPC if fault == "full" else errno.EROFS, "refused")

    if fault in ("full", "read_only"):
        monkeypatch.setattr(os, "fsync", refuse)
    elif fault == "no_folder":
        cache.write_text("a file")
    for name in ("a", "b", "c"):
        storage.write_bytes(f"{root}/{name}", name.encode())
        if fault == "copies_are_folders":
            (cache / name).mkdir(parents=True)
    for name in ("a", "b", "c", "a"):
        assert read_through(f"{root}/{name}", cache / name) == name.encode()
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith(f"data.cache_dir {cache}: no more local copies")
    assert len(fsyncs) <= 1
    if fault in ("full", "read_only"):
        assert os.listdir(cache) == []  # a full disk needs the space


def test_a_copy_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes(f"memory://{tmp_path.name}/x", b"abc")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((tmp_path / "copy").exists()))
    read_through(f"memory://{tmp_path.name}/x", tmp_path / "copy")
    assert synced[0] is False
    assert (tmp_path / "copy").read_bytes() == b"abc"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer S3CR.ET-1_2/x=",
        "authorization: Basic S3CRET==",
        "{'Authorization': 'Bearer S3CRET'}",
        '{"authorization":"S3CRET"}',
        "AWS4-HMAC-SHA256 Credential=S3CRET/2020, Signature=S3CRET",
        "refresh_token=S3CRET client_secret=S3CRET",
        '{"refresh_token": "S3CRET", "private_key": "-----BEGIN KEY-----\\nS3CRET S3CRET"}',
        r'"{\"access_token\": \"S3CRET\"}"',
        "X-Amz-Security-Token: S3CRET",
        "https://h/o?a=S3CRET&X-Goog-Signature=S3CRET",
        "http://user:p@S3CRET@host/x",
        "gs://AKIA1:12/S3CRET@bucket/x",
        "s3://AKIA1:S3C/S3CRET@bucket/x",
    ],
)
def test_no_secret_is_repeated(text: str) -> None:
    assert "S3C" not in redact(f"before {text} after")
    assert redact(f"before {text} after").startswith("before ")
    assert redact(f"before {text} after").endswith(" after")


@pytest.mark.parametrize(
    "text",
    [
        "gs://bucket/a@b: not found",
        "gs://bucket/a:b@c",
        "http://127.0.0.1:9000/bucket/a@b",
        "http://[::1]:9000/bucket/a@b",
        "no default credentials: see the manual",
        "expected crc32c abc, found def",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "url",
    [
        "gs://AKIA1:S3C/RET@bucket/x",
        "s3://AKIA1:12/RET@bucket/x",
        "s3://key:S3CRET@bucket/x",
        "https://host/manifest.tsv?X-Goog-Signature=S3CRET",
        "abfs://c@a.dfs.core.windows.net/x?sig=S3CRET",
        "abfs://c:S3CRET@a.dfs.core.windows.net/x",
        *(
            f"memory://container/x?{q}"
            for q in ("sv=2024&sig=S3C%2FRET", "sig=S3CRET", "X-Goog-Signature=S3CRET")
        ),
    ],
)
def test_credentials_in_a_url_are_refused_before_a_request(url: str) -> None:
    for name, endpoint in ((url, "http://127.0.0.1:1"), ("gs://bucket/x", "http://user:S3CRET@127.0.0.1:1")):
        with pytest.raises(storage.StorageError, match="expected no credentials in a URL") as caught:
            storage.read_bytes(name, StorageOptions(endpoint_url=endpoint))
        assert not re.search("S3C|RET", str(caught.value))


def test_an_at_sign_in_a_name_is_no_credential(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/a:b@c"
    storage.write_bytes(url, b"1")
    assert storage.read_bytes(url) == b"1"
    storage._filesystem("gs://bucket/a@b", StorageOptions(endpoint_url="http://127.0.0.1:1"))
    with pytest.raises(storage.StorageNotFoundError):
        storage.read_bytes("memory://container/x?design=1")


def test_what_is_no_file_is_named_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.dcm").write_bytes(b"one")
    os.mkfifo(tmp_path / "pipe.dcm")
    links = {"zero.dcm": "/dev/zero", "self.dcm": "self.dcm", "annex.dcm": "../none", "above": "."}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    deep = tmp_path / "deep"
    deep.mkdir()
    for _ in range(1500):
        deep /= "d"
        os.mkdir(deep)
    (deep / "b.dcm").write_bytes(b"2")
    sizes = storage.find_sizes(str(tmp_path))
    subprocess.run(["rm", "-r", tmp_path / "deep"], check=True)  # deeper than Python removes it
    assert {name.rpartition("/")[2]: size for name, size in sizes.items()} == {"a.dcm": 3, "b.dcm": 1}
    named = {"a named pipe": "pipe", "a device or a socket": "zero", "a link to itself": "self"}
    named["a link to nowhere, not fetched perhaps (git annex get)"] = "annex"
    texts = [f"skipped: {what}: 1 ('{tmp_path}/{name}.dcm')" for what, name in sorted(named.items())]
    assert caplog.messages == texts
    ring = f"{tmp_path}/self.dcm"
    assert (storage.exists(ring), storage.list_names(ring), storage.find_sizes(ring)) == (False, [], {})
    for name in ("pipe.dcm", "zero.dcm", "self.dcm"):
        url = f"{tmp_path}/{name}"
        for read in (storage.read_bytes, storage.open_url, partial(storage.read_range, start=0, end=9)):
            with pytest.raises(
                storage.StorageNotFoundError, match=r"expected a file, found a (named|device|link to itself)"
            ):
                read(url)


def test_a_folder_that_may_not_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("open/a.dcm", "secret/b.dcm"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"1")
    listed = os.scandir

    def refuse(folder: str) -> Any:
        if str(folder).endswith("secret"):
            raise PermissionError(13, "Permission denied", folder)
        return listed(folder)

    monkeypatch.setattr(storage.os, "scandir", refuse)
    assert storage.find_sizes(str(tmp_path)) == {"open/a.dcm": 1}
    assert f"{tmp_path}/secret: no permission to list this folder" in caplog.text


def test_a_file_that_another_process_renamed_before_the_lock_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers of one object: what the slower one has open is the faster one's whole file."""
    partial_file, target = tmp_path / ".x.partial", tmp_path / "x"
    lock = local_writes.fcntl.flock

    def rename_first(file: Any, how: int) -> None:
        partial_file.write_bytes(b"of the faster one")
        os.replace(partial_file, target)
        if is_there_again:
            partial_file.touch()
        lock(file, how)

    monkeypatch.setattr(local_writes.fcntl, "flock", rename_first)
    for is_there_again in (False, True):  # noqa: B007 (read by the writer above)
        assert not local_writes.replace_whole(partial_file, b"mine", target)
        assert target.read_bytes() == b"of the faster one"


def test_a_row_costs_one_request_for_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zarr_format Zarr asks for the files of version 2 as well, for every row of a bucket."""
    size, spacing = (4, 6, 8), (1.0, 1.0, 1.0)
    writer = StoreWriter("memory://one-request")
    writer.create(SpatialConfig(spacing, size, (1, 1, 1)), str(tmp_path), synthetic=True)
    (row,) = writer.append_records([{"path": "a", "sop_instance_uid": "b"}])
    asked: list[str] = []
    real = storage.read_bytes

    def read_bytes(url: str, *arguments: object) -> bytes:
        asked.append(url.rsplit("/", 1)[1])
        return real(url, *arguments)

    monkeypatch.setattr(storage, "read_bytes", read_bytes)
    writer.write_row(row, np.ones(size, np.uint8), {"status": "kept"})
    assert [name for name in asked if name != f"c.{row}.0.0.0"] == ["zarr.json"]
