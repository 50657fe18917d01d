"""kill -9 at drawn moments, a full disk, a read-only target, two at once: nothing is lost.

Real processes of `data_setup.prepare` and `data_setup.expand`; what they end with is compared byte by byte
with an uninterrupted run, timestamps aside. docs/guides/unattended.md.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_setup.store.reader import PreparedStore
from tests.support.pipeline_factory import ROOT
from tests.support.prepare_runs import arguments, contents

TIMEOUT_S = 300.0  # of one process; a machine may be loaded
pytestmark = pytest.mark.timeout(7200)
KILLS = [pytest.param(5, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.soak)]
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1  # of prctl(2) and capabilities(7)


def start(module: str, arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    """A process group of its own, so that its workers can be killed with it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def finish(module: str, arguments: list[str], **options: Any) -> tuple[int, str]:
    """(exit code, stderr) of a process that is left alone."""
    with start(module, arguments, **options) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, err


# ---- kill -9 ----------------------------------------------------------------------------------------------


@dataclass
class Victim:
    """A command, how far it is (0..total), and what has to hold after every kill and at the end."""

    module: str
    arguments: list[str]
    progress: Callable[[], int]
    total: int
    check_killed: Callable[[], None]
    check_finished: Callable[[], None]
    start_over: Callable[[], None]


def kill_again_and_again(victim: Victim, kills: int, seed: int) -> list[int]:
    """Progress at each kill, at moments drawn from the seed.

    Half of them are drawn over the time of an uninterrupted run, half over what is left to do (starting takes
    longer than the work). A run that ends before its moment, or that a kill leaves nothing to do, is finished
    and checked, and the next one starts from nothing.
    """
    rng = random.Random(seed)

    def complete() -> float:
        begin = time.monotonic()
        code, err = finish(victim.module, victim.arguments)
        assert code == 0, err
        victim.check_finished()
        return time.monotonic() - begin

    span = complete()
    victim.start_over()
    progress: list[int] = []
    while len(progress) < kills:
        before = victim.progress()
        by_time, fraction, extra = rng.random() < 0.5, rng.random(), rng.uniform(0, 0.02)
        with start(victim.module, victim.arguments) as process:
            begin = time.monotonic()
            while process.poll() is None:
                if by_time and time.monotonic() - begin >= fraction * span:
                    break
                if not by_time and victim.progress() > before + fraction * (victim.total - before):
                    time.sleep(extra)
                    break
                time.sleep(0.001)
            # The whole group, or the main process alone: then its workers have to notice.
            alone = rng.random() < 0.3
            ended = process.poll() is not None
            if not ended:
                process.send_signal(signal.SIGKILL) if alone else os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_S)
        if not ended:
            progress.append(victim.progress())
            victim.check_killed()
        if ended or progress[-1] == victim.total:
            complete()
            victim.start_over()
    complete()
    return progress


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("workers", [0, 2])
def test_prepare_killed_at_drawn_moments_ends_with_the_same_store(
    tree: Path, clean: Path, tmp_path: Path, workers: int, kills: int
) -> None:
    store, expected = tmp_path / "store", contents(clean)
    rows = len(list((clean / "rows").iterdir()))

    def check_killed() -> None:
        """What counts as written is whole: rows with their chunks."""
        digests = contents(store) if store.exists() else {}
        written = {k: v for k, v in digests.items() if k.startswith(("rows/0", "volumes/c."))}
        assert written.items() <= expected.items()
        kept = {int(Path(k).stem) for k in written if k.startswith("rows/")}
        assert {f"volumes/c.{row}.0.0.0" for row in kept} <= written.keys()

    def check_finished() -> None:
        assert contents(store) == expected

    victim = Victim(
        "data_setup.prepare",
        arguments(tree, store, "--workers", str(workers)),
        lambda: len(list((store / "rows").glob("0*.json"))),
        rows,
        check_killed,
        check_finished,
        lambda: shutil.rmtree(store),
    )
    progress = kill_again_and_again(victim, kills, seed=workers)
    assert any(0 < n < rows for n in progress), f"no kill hit the work: {progress} of {rows} rows"


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of an expanded tree, hidden ones included, but for the notes of expand itself."""
    files = (p for p in folder.rglob("*") if p.is_file() and ".expand" not in p.relative_to(folder).parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def dicoms_in(folder: Path) -> int:
    """How many there are, written or half written; the process may remove folders meanwhile."""
    return sum(name.endswith(".dcm") for _, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize("kills", KILLS)
def test_expand_killed_at_drawn_moments_ends_with_the_same_tree(tmp_path: Path, kills: int) -> None:
    rng, members = np.random.default_rng(3), 120
    folder = "retinal_oct/structural_oct/topcon_triton"
    expected = {}
    (tmp_path / "zips").mkdir()
    for name in ("a", "b"):
        with zipfile.ZipFile(tmp_path / "zips" / f"{name}.zip", "w") as archive:
            for n in range(members):
                path, data = f"{folder}/{9000 + n // 4}/{name}_{n}.dcm", rng.bytes(30_000)
                archive.writestr(path, data)
                expected[path] = data
    target, whole = tmp_path / "tree", tmp_path / "whole"
    sources = ["--src", str(tmp_path / "zips"), "--workers", "2"]
    assert finish("data_setup.expand", [*sources, "--dst", str(whole)])[0] == 0
    assert tree_bytes(whole) == expected

    def check_killed() -> None:
        files = tree_bytes(target) if target.exists() else {}
        visible = {k: v for k, v in files.items() if not Path(k).name.startswith(".")}
        assert visible.items() <= expected.items()

    def check_finished() -> None:
        assert tree_bytes(target) == tree_bytes(whole)

    victim = Victim(
        "data_setup.expand",
        [*sources, "--dst", str(target)],
        lambda: dicoms_in(target),
        len(expected),
        check_killed,
        check_finished,
        lambda: shutil.rmtree(target),
    )
    progress = kill_again_and_again(victim, kills, seed=0)
    assert any(0 < n < len(expected) for n in progress), (
        f"no kill hit the work: {progress} of {len(expected)}"
    )


# ---- a target that cannot be written ----------------------------------------------------------------------


def check_one_line(err: str, *words: str) -> None:
    """Of the error; how far the work was may be said before it, at every few seconds."""
    lines = [line for line in err.splitlines() if not line.startswith("prepare: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: "), err
    for word in words:
        assert word in lines[0]


@dataclass
class Target:
    """A place that refuses to be written until `repair`; `options` are those of the process that writes."""

    path: Path
    words: tuple[str, ...]  # of the error
    options: dict[str, Any]
    repair: Callable[[], object]


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 400 KB: room for some volumes of the tree."""
    place = tmp_path / "mount"
    place.mkdir()
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)):
        pytest.skip("cannot mount here; the tests without a mount say the same")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _without_privilege() -> None:
    """After exec, root is bound by the permissions of files like everybody else."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)


@pytest.fixture(params=["full_disk", "file_limit", "read_only_mount", "no_permission"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """The first and third are what users meet and need a mount; the others run everywhere."""
    if request.param in ("full_disk", "read_only_mount"):
        place = request.getfixturevalue("small_mount")
        read_only = request.param == "read_only_mount"
        words = "read-only file system" if read_only else "no space left"
        if read_only:
            assert mount("-o", "remount,ro", str(place))
        return Target(place / "store", (words,), {}, lambda: mount("-o", "remount,rw,size=100m", str(place)))
    place = tmp_path / "place"
    place.mkdir()
    if request.param == "file_limit":
        limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))}
        return Target(place / "store", ("File too large", "check the disk"), limit, lambda: None)
    place.chmod(0o555)
    refused = {"preexec_fn": _without_privilege} if os.geteuid() == 0 else {}
    return Target(place / "store", ("no permission",), refused, lambda: place.chmod(0o755))


@pytest.mark.slow
def test_a_target_that_cannot_be_written_is_one_line_and_loses_nothing(
    tree: Path, clean: Path, target: Target
) -> None:
    command = arguments(tree, target.path, "--workers", "1")
    whole = contents(clean)
    for _ in range(2):  # the second time meets what the first one left
        code, err = finish("data_setup.prepare", command, **target.options)
        check_one_line(err, str(target.path), *target.words)
        assert code == 2
    digests = contents(target.path) if target.path.exists() else {}
    rows = {k: v for k, v in digests.items() if k.startswith("rows/0")}
    assert rows.items() <= whole.items()
    assert rows or "no space left" not in target.words  # there was room for some
    target.repair()
    code, err = finish("data_setup.prepare", command)
    assert code == 0, err
    assert contents(target.path) == whole


@pytest.mark.slow
def test_a_finished_store_on_a_read_only_disk_is_read_and_not_touched(
    tree: Path, clean: Path, small_mount: Path
) -> None:
    assert mount("-o", "remount,size=100m", str(small_mount))
    store = Path(shutil.copytree(clean, small_mount / "store"))
    assert mount("-o", "remount,ro", str(small_mount))
    code, err = finish("data_setup.prepare", arguments(tree, store))
    assert code == 2
    check_one_line(err, "read-only file system")
    prepared = PreparedStore.open(str(store))
    assert all(prepared.read(row).any() for row in prepared.kept)
    assert contents(store) == contents(clean)


# ---- two at once, and more to do than before --------------------------------------------------------------


def wait_for_rows(process: subprocess.Popen[str], store: Path, count: int = 1) -> None:
    """Until so many rows are written; the process must still be at work then."""
    while len(list(store.glob("rows/0*.json"))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


@pytest.mark.slow
def test_two_prepares_at_once_both_finish_with_the_same_store(
    tree: Path, clean: Path, tmp_path: Path
) -> None:
    """The second does all the work while the first is stopped in the middle of its own."""
    store = tmp_path / "store"
    command = arguments(tree, store, "--workers", "2")
    with start("data_setup.prepare", command) as first:
        wait_for_rows(first, store)
        os.killpg(first.pid, signal.SIGSTOP)
        code, err = finish("data_setup.prepare", command)
        assert code == 0, err
        prepared = PreparedStore.open(str(store))
        assert all(prepared.read(row).any() for row in prepared.kept)
        os.killpg(first.pid, signal.SIGCONT)
        _, err = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, err
    assert contents(store) == contents(clean)


@pytest.mark.slow
def test_a_run_killed_while_another_works_ends_with_the_same_store(
    tree: Path, clean: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    command = arguments(tree, store, "--workers", "1")
    with start("data_setup.prepare", command) as other:
        with start("data_setup.prepare", command) as killed:
            wait_for_rows(killed, store)
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate(timeout=TIMEOUT_S)
        code, err = finish("data_setup.prepare", command)
        assert code == 0, err
        other.communicate(timeout=TIMEOUT_S)
    assert other.returncode == 0
    assert contents(store) == contents(clean)


@pytest.mark.slow
def test_a_manifest_that_grows_between_kills_ends_with_the_same_volumes(
    tree: Path, clean: Path, tmp_path: Path
) -> None:
    """The records come in another order, so the rows do too; each file has its volume, once."""
    own, store = Path(shutil.copytree(tree, tmp_path / "tree")), tmp_path / "store"
    manifest = own / "retinal_oct" / "manifest.tsv"
    header, *lines = manifest.read_text().splitlines(keepends=True)
    for count in (len(lines) // 2, len(lines)):
        manifest.write_text("".join([header, *lines[-count:]]))
        with start("data_setup.prepare", arguments(own, store, "--workers", "2")) as process:
            wait_for_rows(process, store, len(list(store.glob("rows/0*.json"))) + 2)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_S)
    assert finish("data_setup.prepare", arguments(own, store))[0] == 0
    index, expected = (PreparedStore.open(str(s)).index.set_index("path") for s in (store, clean))
    assert index.index.is_unique
    assert index.checksum.sort_index().to_dict() == expected.checksum.sort_index().to_dict()
    assert (index.status == "kept").all()
