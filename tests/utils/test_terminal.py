"""What a person sees: one live line on a terminal, short lines elsewhere, and nothing that stops the work."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetuning.heads.finetune import metric_name
from finetuning.heads.objective import METRICS
from pretraining.banner import next_command
from tests.support.model_factory import small_config
from tests.support.pipeline_factory import ROOT
from utils import terminal
from utils.log import setup_logging
from utils.run.line import VALIDATION, TrainingLine, health
from utils.run.log import RunLog
from utils.terminal import Pace, duration, is_interactive, track

LOGGED = {
    "train/loss": 0.51234567, "train/lr": 1e-4, "train/grad_norm": 3.25, "train/skill_position": -0.0123,
    "train/rankme": 61.24, "train/bad_steps": 0.0, "perf/volumes_per_s": 11.21, "perf/mfu": 0.46,
    "perf/data_wait_fraction": 0.014, "perf/step_s": 1.5, "alarm/collapse": 0.0, "alarm/leak": 0.0,
}  # fmt: skip
VALIDATED = {
    "val/loss": 0.5, "val/skill_position": 0.01, "val/rankme": 60.0, "val/lidar": 9.0, "val/probe": 0.4,
    "alarm/collapse": 0.0,
}  # fmt: skip


class Screen:
    """A pseudo terminal in the place of stderr, and what has been written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w")
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "40"}.items():
            monkeypatch.setenv(name, value)
        for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "stderr", self.stream)

    def text(self) -> str:
        """What came since the last call; less than a pseudo terminal holds (4 KB)."""
        self.stream.flush()
        os.set_blocking(self.master, False)
        parts = []
        with contextlib.suppress(BlockingIOError):
            while True:
                parts.append(os.read(self.master, 4096))
        return b"".join(parts).decode()

    def go_away(self) -> None:
        os.close(self.master)
        with pytest.raises(OSError, match="Input/output error"):
            print("into the void", file=self.stream, flush=True)


@pytest.fixture
def open_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Screen]]:
    """To be called inside a test: pytest puts its own stderr in place before each."""
    screens = []

    def open_one() -> Screen:
        screens.append(Screen(monkeypatch))
        return screens[-1]

    yield open_one
    for screen in screens:
        with contextlib.suppress(OSError):  # of the one that went away
            screen.stream.close()


def words_only(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def run_log(folder: Path) -> RunLog:
    cfg = small_config("vjepa2", "wandb.mode=disabled", f"run.dir={folder / 'run'}")
    return RunLog(cfg, 0, 480, synthetic=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5400, "90 min"), (11_400, "3 h 10 min"),
     (3 * 86_400 + 7200, "3 d 2 h"), (4 * 86_400 - 60, "4 d 0 h")],
)  # fmt: skip
def test_a_forecast_is_as_exact_as_it_can_be(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_end_is_expected_at_the_pace_so_far() -> None:
    """10 of 100 were done before; 20 more took 40 s, so the other 70 take 140 s."""
    pace = Pace(10, 100, now=1000.0)
    assert pace.text(10, 1001.0) == ""
    assert pace.seconds_left(30, 1040.0) == 140.0


def test_a_line_of_plain_text_has_the_numbers_that_matter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = TrainingLine(119, 480)
    line.metrics(120, LOGGED)
    line.advance()
    line.metrics(120, VALIDATED)
    first, validation = caplog.messages
    assert first == (
        "step 120 of 480, no alarm: loss 0.5123, skill -0.012, RankMe 61.2, 11.2 volumes/s, data wait 1 %"
    )
    assert validation == "validation at step 120: loss 0.5, skill 0.010, RankMe 60.0, probe 0.400, no alarm"
    caplog.clear()
    scores = {"loss": 1.5, "error_um": 7.25, "dice": 0.8125, "l1": 0.5}
    line.metrics(130, {f"random_init/val/{name}": value for name, value in scores.items()})
    line.metrics(130, {"random_init/train/loss": 2.5})
    of_arm, update = [record.getMessage() for record in caplog.records]
    assert of_arm == (
        "validation of random_init at step 130: loss 1.5, boundary error 7.25 um, Dice 0.812, L1 0.5000"
    )
    assert update.endswith("no alarm: loss 2.5")
    line.metrics(121, LOGGED | {"train/skill_position": None, "train/loss": float("nan")})
    assert re.match(r"step 121 of 480, \d+ s left, no alarm: loss nan, RankMe", caplog.messages[-1])


def test_a_word_of_health() -> None:
    assert health(LOGGED) == "no alarm"
    assert health(LOGGED | {"alarm/collapse": 1.0, "train/bad_steps": 3.0}) == "ALARM: collapse"
    assert health(LOGGED | {"alarm/collapse": 1.0, "alarm/leak": 1.0}) == "ALARM: collapse and leak"
    assert health(LOGGED | {"train/bad_steps": 3.0}, 2.0) == "updates skipped: not finite"
    assert health(LOGGED | {"train/bad_steps": 3.0}, 3.0) == "no alarm"
    assert health(LOGGED | {"perf/data_wait_fraction": 0.5}) == "waits for data"


def test_updates_that_were_skipped_before_a_resume_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = TrainingLine(100, 480)
    for step, skipped in ((110, 2.0), (120, 3.0), (130, 3.0)):
        line.metrics(step, LOGGED | {"train/bad_steps": skipped})
    assert [m.partition(", ")[2].partition(": loss")[0] for m in caplog.messages] == [
        "no alarm", "updates skipped: not finite", "no alarm",
    ]  # fmt: skip


def test_an_alarm_of_a_validation_is_the_word_at_once() -> None:
    line = TrainingLine(5, 100)
    line.metrics(5, {"train/loss": 1.0})
    assert "no alarm" in line._text(5)
    line.metrics(5, {"val/loss": 1.0, "alarm/leak": 1.0})
    assert "no alarm" not in line._text(6)


def test_every_metric_of_fine_tuning_has_its_word() -> None:
    assert {metric_name(metric) for metric in METRICS.values()} <= set(VALIDATION)


def test_on_a_terminal_one_line_stays_and_messages_scroll_above_it(
    tmp_path: Path, open_screen: Callable[[], Screen]
) -> None:
    screen = open_screen()
    setup_logging()
    log = run_log(tmp_path)
    log.metrics(1, LOGGED)
    log.advance()
    drawn = words_only(screen.text())
    assert "step 1 of 480, no alarm: loss 0.5123" in drawn
    assert "INFO" not in drawn, "the step is no message of its own"
    assert "\n" not in drawn.strip(), "it is drawn over, not again below"
    logging.getLogger("test").warning("something [else] happened")
    logging.getLogger("test").warning("a command of %s", 30 * "many words ")
    log.metrics(1, VALIDATED)
    drawn = words_only(screen.text())
    assert re.search(r"\d\d:\d\d:\d\d WARNING something \[else\] happened\r\n", drawn)
    assert 30 * "many words " in drawn, "a line break would end up in what is copied"
    assert re.search(r"\d\d:\d\d:\d\d validation at step 1: loss 0.5, .*\r\n", drawn)
    log.close()
    assert "\x1b[?25h" in screen.text(), "the cursor is back"
    assert sys.stderr is screen.stream
    lines = (tmp_path / "run" / "log.txt").read_text()
    assert lines.count("step 1 of 480, no alarm: loss 0.5123") == 1
    assert "WARNING something [else] happened" in lines


def test_a_narrow_terminal_shows_one_line_that_begins_with_what_matters(
    open_screen: Callable[[], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = open_screen()
    monkeypatch.setenv("COLUMNS", "60")
    line = TrainingLine(0, 480)
    screen.text()
    line.metrics(1, LOGGED | {"alarm/collapse": 1.0})
    (drawn,) = words_only(screen.text()).strip("\r\n").splitlines()
    line.close()
    assert drawn.startswith("step 1 of 480, ALARM: collapse: loss 0.5123")
    assert drawn.endswith("…")
    assert len(drawn) == 60


def test_a_terminal_that_goes_away_does_not_stop_the_run(
    tmp_path: Path, open_screen: Callable[[], Screen]
) -> None:
    screen = open_screen()
    setup_logging()
    log = run_log(tmp_path)
    screen.go_away()
    log.metrics(1, LOGGED)
    log.advance()
    log.metrics(2, VALIDATED)
    log.close()
    assert "validation at step 2" in (tmp_path / "run" / "log.txt").read_text()
    assert list(track("ab", 2, "title", "letters")) == ["a", "b"]


@pytest.mark.parametrize("variable", [("CI", "true"), ("TERM", "dumb")])
def test_ci_and_a_dumb_terminal_get_plain_lines(
    open_screen: Callable[[], Screen], monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    screen = open_screen()
    assert is_interactive()
    monkeypatch.setenv(*variable)
    assert not is_interactive()
    setup_logging()
    line = TrainingLine(0, 10)
    line.metrics(1, LOGGED)
    line.close()
    drawn = screen.text()
    assert "\x1b" not in drawn
    assert re.search(r"INFO step 1 of 10, no alarm: loss 0.5123.*\r\n$", drawn)


def test_progress_on_a_terminal_counts_and_ends_clean(open_screen: Callable[[], Screen]) -> None:
    screen = open_screen()
    assert list(track("abc", 3, "phantom", "people")) == ["a", "b", "c"]
    raw = screen.text()
    assert "phantom" in raw
    assert re.search(r"3/3 .*people.*left", words_only(raw))
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_progress_elsewhere_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 2 s, then twice as long each, up to every half minute."""
    times = [1.0, 2.0, 5.0, 6.0, 14.0, 30.0, 59.0, 60.0, 89.0, 90.0]
    now = iter([0.0, *times])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    assert [*track(times, 10, "prepare", "volumes")] == times
    counts = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert counts == ["2", "4", "5", "6", "8", "10"]


def test_work_that_stops_early_stops_counting(open_screen: Callable[[], Screen]) -> None:
    screen = open_screen()
    items: Any = track("abc", 3, "prepare", "volumes")
    assert next(items) == "a"
    items.close()
    assert "\x1b[?25h" in screen.text()


def test_terminal_words_need_no_torch() -> None:
    """`data_setup.phantom` and `--help` use them."""
    command = "import sys, utils.terminal, utils.run.line; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_run_without_a_probe_is_looked_at_and_not_evaluated(tmp_path: Path) -> None:
    """`finetuning.evaluate` would refuse it: it takes the best checkpoint by probe."""
    cfg = small_config("vjepa2", f"run.dir={tmp_path}")
    assert (
        next_command(cfg, has_probe=True) == f"python -m finetuning.evaluate --config {tmp_path}/config.yaml"
    )
    assert next_command(cfg, has_probe=False) == f"python -m utils.report {tmp_path}"
