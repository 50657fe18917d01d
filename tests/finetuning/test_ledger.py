"""Every look is a line that stays, its number counts looks at the same data, a damaged line is named."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from finetuning.cohort import ledger
from finetuning.cohort.ledger import count_looks, record_look
from utils import storage
from utils.errors import UserError
from utils.storage.line_files import append_line, read_lines

COMMAND = """
import sys
from finetuning.cohort.ledger import record_look
for _ in range(10):
    print(record_look(sys.argv[1], "weights", "test", "protocol", "a look of " + sys.argv[2]))
"""


def look(folder: str | Path, data: str = "test", checkpoint: str = "weights") -> int:
    return record_look(str(folder), checkpoint, data, "protocol", "a look")


def test_looks_are_counted_by_data(tmp_path: Path) -> None:
    assert [look(tmp_path), look(tmp_path, checkpoint="other"), look(tmp_path)] == [1, 2, 3]
    assert look(tmp_path, data="val") == 1
    assert look(tmp_path) == 4
    assert (count_looks(str(tmp_path), "test"), count_looks(str(tmp_path), "val")) == (4, 1)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [one["look"] for one in lines] == [1, 2, 3, 1, 4]
    assert lines[1]["checkpoint"] == "other"
    assert all(one["what"] == "a look" and one["protocol"] == "protocol" for one in lines)


def test_earlier_lines_never_change(tmp_path: Path) -> None:
    look(tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    look(tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes().startswith(before)


def test_no_ledger_is_no_look(tmp_path: Path) -> None:
    assert count_looks(str(tmp_path), "test") == 0
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("}", "", 1),
        lambda text: text.replace('"look": 1, ', "", 1),
        lambda text: text[:40],
        lambda text: "[]\n" + text,
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_recorded(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    look(tmp_path)
    path = tmp_path / "ledger.jsonl"
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"ledger.jsonl: line 1: expected a look"):
        look(tmp_path)
    with pytest.raises(UserError, match=r"line 1"):
        count_looks(str(tmp_path), "test")
    assert path.read_bytes() == before


def test_a_line_that_a_kill_cut_is_named_too(tmp_path: Path) -> None:
    look(tmp_path)
    look(tmp_path)
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"line 2"):
        look(tmp_path)


def test_the_second_writer_waits_and_sees_the_first_line(tmp_path: Path) -> None:
    path = str(tmp_path / "lines")
    first_reads, second_may_end = threading.Event(), threading.Event()

    def slow(lines: Sequence[str]) -> str:
        first_reads.set()
        second_may_end.wait(0.5)  # the second writer has begun; only the lock holds it back
        return f"after {len(lines)}"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(append_line, path, slow)
        first_reads.wait(10)
        second = pool.submit(append_line, path, lambda lines: second_may_end.set() or f"after {len(lines)}")
        assert (first.result(), second.result()) == ("after 0", "after 1")
    assert read_lines(path) == ["after 0", "after 1"]


def test_two_processes_lose_no_look(tmp_path: Path) -> None:
    words = [sys.executable, "-c", COMMAND, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    both = [subprocess.Popen([*words, n], stdout=subprocess.PIPE, text=True, cwd=root) for n in "ab"]
    numbers = [int(line) for process in both for line in process.communicate(timeout=60)[0].split()]
    assert all(process.returncode == 0 for process in both)
    assert sorted(numbers) == list(range(1, 21))
    assert count_looks(str(tmp_path), "test") == 20


def test_writers_of_a_bucket_lose_no_look() -> None:
    """Each line is an object of its own, created once."""
    folder = "memory://ledger-test/store"
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: look(folder), range(12)))
    assert sorted(numbers) == list(range(1, 13))
    assert count_looks(folder, "test") == 12
    name = storage.list_names(storage.join(folder, ledger.NAME))[4]
    storage.write_text(storage.join(folder, ledger.NAME, name), "{")
    with pytest.raises(UserError, match=r"line 5"):
        look(folder)
