"""Whole expansions in a bucket: with faults, killed at any moment, without a local copy, in little memory."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_setup import expand
from tests.data_setup.test_expand import OCT, make_zip, tree_of
from tests.support.cloud_proxy import FAULTS, RESET, STALL, Proxy, Schedule, fault_proxy, seeded
from tests.support.cloud_servers import BUCKET, gcs_server, log_in
from utils import storage
from utils.config.schema import StorageOptions

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(1)
ARCHIVES = {
    f"{device}.zip": {
        f"retinal_oct/structural_oct/{device}/{9000 + n // 4}/{n}.dcm": RNG.bytes(30_000) for n in range(60)
    }
    for device in ("topcon_triton", "zeiss_cirrus")
}
WHOLE = {name: data for files in ARCHIVES.values() for name, data in files.items()}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, gcs_server() as endpoint:
        log_in(patch, first_wait_s=0.01, read_timeout_s=5)
        yield endpoint


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with fault_proxy(server) as server_proxy:
        yield server_proxy


def put_archives(root: str, options: StorageOptions) -> None:
    for name, files in ARCHIVES.items():
        storage.write_bytes(f"{root}/zips/{name}", make_zip(files), options)


def command(root: str, endpoint: str, *arguments: str) -> list[str]:
    where = ["--src", f"{root}/zips", "--dst", f"{root}/tree", "--endpoint-url", endpoint]
    return [*where, "--workers", "4", *arguments]


def test_with_faults_in_a_tenth_of_the_requests_the_tree_is_the_same(proxy: Proxy) -> None:
    options, root = StorageOptions(endpoint_url=proxy.endpoint), f"gs://{BUCKET}/faulty"
    put_archives(root, options)
    proxy.schedule = seeded(0, 0.1, tuple(f for f in FAULTS if f != STALL))
    assert expand.main(command(root, proxy.endpoint)) == 0
    injected = {k: n for k, n in proxy.faults.items() if k != "none"}
    assert len(injected) >= 7
    proxy.schedule = lambda method, target: None
    assert tree_of(f"{root}/tree", options) == WHOLE
    proxy.requests.clear()
    assert expand.main(command(root, proxy.endpoint)) == 0
    assert len(proxy.requests) < 20  # directories and one listing: nothing for each object


def kill_at(process: subprocess.Popen, upload: int) -> Schedule:
    """Kills the process when it begins this upload of a member; nothing of it gets through from then on."""
    seen = itertools.count(1)

    def schedule(method: str, target: str) -> str | None:
        if method == "POST" and "retinal_oct" in target and next(seen) >= upload:
            process.kill()
        return RESET if process.poll() is not None else None

    return schedule


def test_killed_again_and_again_it_ends_with_the_same_tree(proxy: Proxy, server: str) -> None:
    options, root = StorageOptions(endpoint_url=server), f"gs://{BUCKET}/killed"
    put_archives(root, options)
    counts = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "data_setup.expand", *command(root, proxy.endpoint)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        proxy.schedule = kill_at(process, 25)
        assert process.wait() == -signal.SIGKILL
        tree = tree_of(f"{root}/tree", options)
        counts.append(len(tree))
        assert tree.items() <= WHOLE.items()  # whole objects only
    assert 0 < counts[0] < counts[1] < len(WHOLE)
    proxy.schedule = lambda method, target: None
    proxy.requests.clear()
    assert expand.main(command(root, proxy.endpoint)) == 0
    assert tree_of(f"{root}/tree", options) == WHOLE
    uploads = {t for m, t in proxy.requests if m == "POST" and ".expand" not in t}
    assert 0 < len(uploads) <= len(WHOLE) - counts[-1]  # less what the server ended after the kill


CHILD = """
import json, resource, sys
written = []
def hook(event, args):
    if event == "open" and isinstance(args[0], str):
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
            written.append(args[0])
from data_setup import expand
from utils import storage
from utils.config.schema import StorageOptions
endpoint = sys.argv[sys.argv.index("--endpoint-url") + 1]
storage.exists(sys.argv[2], StorageOptions(endpoint_url=endpoint))  # the client and its imports
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.addaudithook(hook)
code = expand.main(sys.argv[1:])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"code": code, "grown_mb": (after - before) / 1024, "written": written}))
"""


def test_no_local_copy_and_little_memory(server: str, tmp_path: Path) -> None:
    """256 MiB in the archive, members of 8 MiB: neither a file on this machine nor the archive in memory."""
    options, root = StorageOptions(endpoint_url=server), f"gs://{BUCKET}/large"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for n in range(32):
            archive.writestr(f"{OCT}/9001/{n}.dcm", n.to_bytes(1) * (8 * 2**20))
    storage.write_bytes(f"{root}/zips/a.zip", data.getvalue(), options)
    del data
    empty = {name: str(tmp_path / name.lower()) for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME")}
    for folder in empty.values():
        Path(folder).mkdir()
    answer = subprocess.run(
        [sys.executable, "-c", CHILD, *command(root, server, "--workers", "2")],
        cwd=tmp_path,
        env=os.environ | empty | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result = json.loads(answer.stdout.splitlines()[-1])
    assert result["code"] == 0
    assert result["written"] == []
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert result["grown_mb"] < 150
    sizes = storage.find_sizes(f"{root}/tree/retinal_oct", options)
    assert list(sizes.values()) == [8 * 2**20] * 32


def test_an_archive_of_more_members_than_the_old_format_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """65,536 members and more need the directory of ZIP64; so many names are still judged in seconds."""
    (tmp_path / "zips").mkdir()
    with zipfile.ZipFile(tmp_path / "zips" / "a.zip", "w") as archive:
        for n in range(65_600):
            archive.writestr(f"__MACOSX/{n}" if n % 1000 else f"{OCT}/{n}.dcm", b"1")
    assert expand.main(["--src", str(tmp_path / "zips"), "--dst", str(tmp_path / "tree")]) == 0
    assert "a.zip: 66 written" in capsys.readouterr().out
