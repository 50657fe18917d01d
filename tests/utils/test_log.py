"""The log of a run: offline without a key and with a warning, nothing without W&B, one clock."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import wandb
from matplotlib.figure import Figure

from tests.support.model_factory import small_config
from tests.support.process_factory import free_port
from tests.support.wandb_reader import history, run_ids
from utils.dashboards import has_api_key, start_wandb
from utils.errors import UserError
from utils.log import LineFile, log_failure, log_to_file, setup_logging
from utils.run.folder import bring_back, refuse_lost_checkpoints
from utils.run.log import RunLog


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return tmp_path


def test_a_key_comes_from_the_environment_or_netrc(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://wandb.example.org"
    assert not has_api_key(url)
    (no_key / ".netrc").write_text("machine wandb.example.org login user password 123\n")
    (no_key / ".netrc").chmod(0o600)
    assert has_api_key(url)
    assert not has_api_key("https://elsewhere.example.org")
    monkeypatch.setenv("WANDB_API_KEY", "123")
    assert has_api_key("https://elsewhere.example.org")


def test_online_without_a_key_logs_offline_and_says_so(
    no_key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = small_config("vjepa2", "wandb.mode=online", f"run.dir={no_key / 'run'}")
    with caplog.at_level(logging.WARNING):
        run_log = RunLog(cfg, 0, 10, synthetic=True)
    (warned,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "no API key was found; logging offline until the next start; next: wandb login" in warned
    assert "WANDB_API_KEY" in warned
    run_log.metrics(3, {"train/loss": 0.5, "val/probe": None})
    run_log.close()
    assert [r["train/loss"] for r in history(no_key / "run")] == [0.5]


def test_online_with_the_server_away_logs_offline_and_says_so_once(
    no_key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real client against a port of loopback where nothing listens; one run, under the id of the run."""
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    wandb.teardown()  # its settings are read once
    try:
        run_log = RunLog(
            small_config("vjepa2", "wandb.mode=online", f"run.dir={no_key / 'run'}"), 0, 10, synthetic=True
        )
        run_log.metrics(3, {"train/loss": 0.5})
        run_log.close()
    finally:
        wandb.teardown()
    assert caplog.text.count("Weights & Biases is not reached, logging offline until the next start") == 1
    assert "wandb sync" in caplog.text
    assert "wandb login" not in caplog.text
    assert [r["train/loss"] for r in history(no_key / "run")] == [0.5]
    assert run_ids(no_key / "run") == {(no_key / "run" / "wandb_id.txt").read_text()}


@pytest.mark.parametrize(
    "refused",
    [
        wandb.errors.AuthenticationError("WANDB_API_KEY invalid: 3 characters"),
        wandb.errors.CommError("Failed to get resume status for run 1: returned error 401: {}"),  # a server
    ],
)
def test_a_wrong_key_costs_one_warning(
    refused: Exception, no_key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """W&B refuses it, and its own telemetry is refused later, which is no news."""
    modes: list[str] = []

    def init(mode: str, **_: Any) -> OnlineRun:
        modes.append(mode)
        if mode == "online":
            raise refused
        return OnlineRun()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "123")
    setup_logging()
    RunLog(
        small_config("vjepa2", "wandb.mode=online", f"run.dir={no_key / 'run'}"), 0, 1, synthetic=True
    ).close()
    logging.getLogger("opentelemetry.exporter.otlp").error("Failed to export metrics batch code: 401")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"logging offline until the next start: {type(refused).__name__}: {refused}" in line
    assert "; next: wandb login --relogin, or WANDB_API_KEY=KEY" in line
    assert modes == ["online", "offline"]


def test_the_environment_wins_over_project_and_entity(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a sweep, whose agent sets both; without an entity W&B takes the account's."""
    places: list[tuple[str, str | None]] = []
    monkeypatch.setattr(wandb, "init", lambda **words: places.append((words["project"], words["entity"])))
    cfg = small_config("vjepa2", "wandb.project=lab/eyes")
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    start_wandb(cfg, no_key)
    start_wandb(small_config("vjepa2"), no_key)
    monkeypatch.setenv("WANDB_PROJECT", "sweeps")
    monkeypatch.setenv("WANDB_ENTITY", "another")
    start_wandb(cfg, no_key)
    assert places == [("eyes", "lab"), ("oct-foundation", None), ("sweeps", "another")]


def test_pictures_of_participants_are_announced(no_key: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["wandb.mode=disabled", "wandb.send=images", f"run.dir={no_key / 'run'}"]
    with caplog.at_level(logging.WARNING):
        run_log = RunLog(small_config("vjepa2", *overrides), 0, 10, synthetic=False)
    run_log.close()
    assert "data licence" in caplog.text
    assert not run_log.shows_images  # W&B is disabled, so nobody looks


class OnlineRun:
    """A run of Weights & Biases that reaches its server."""

    offline, id = False, "id"

    def __init__(self) -> None:
        self.sent: list[str] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.sent += values

    def log_artifact(self, url: str, **_: str) -> None:
        self.sent.append(url)

    def finish(self, exit_code: int) -> None:
        self.sent.append("end")


@pytest.mark.parametrize(
    ("synthetic", "asked", "sent"),
    [
        (False, [], []),
        (False, ["wandb.send=images"], ["masks/a"]),
        (False, ["wandb.send=artifacts"], ["best.pt"]),
        (True, [], ["masks/a", "best.pt"]),
        (True, ["wandb.send=nothing"], []),
    ],
)
def test_pictures_and_checkpoints_of_participants_leave_only_when_asked_for(
    no_key: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    synthetic: bool,
    asked: list[str],
    sent: list[str],
) -> None:
    """Also where TensorBoard, which stays here, has them drawn."""
    online = OnlineRun()
    monkeypatch.setattr("utils.run.log.start_wandb", lambda *_: online)
    cfg = small_config("vjepa2", *asked, "log.tensorboard=true", f"run.dir={no_key / 'run'}")
    run_log = RunLog(cfg, 0, 10, synthetic=synthetic)
    assert run_log.shows_images
    run_log.image(0, "masks/a", Figure())
    run_log.artifact("best", "best.pt")
    run_log.artifact("best", "gs://bucket/best.pt")
    run_log.close()
    assert online.sent == [*sent, "end"]
    assert ("gs://bucket/best.pt stays in its bucket" in caplog.text) == ("best.pt" in sent)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(no_key: Path) -> None:
    cfg = small_config("vjepa2", "wandb.mode=disabled", f"run.dir={no_key / 'run'}")
    setup_logging()
    logging.getLogger("test").info("before the run directory existed")
    first = RunLog(cfg, 0, 10, synthetic=True)
    for step in (1, 2, 3):
        first.metrics(step, {"train/loss": float(step), "train/odd": float("nan")})
    first.close()
    assert "before the run directory" in (no_key / "run" / "log.txt").read_text()
    path = no_key / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "tra')  # a kill cut the line
    again = RunLog(cfg, 2, 10, synthetic=True)
    again.metrics(3, {"train/loss": 9.0})
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["train/loss"]) for r in rows] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert rows[0]["train/odd"] == "nan"


def test_lines_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the file size stands for a full disk: both let a part of a line through."""
    path = tmp_path / "metrics.jsonl"
    lines = LineFile(path)
    lines.append("first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        lines.append("second")
        lines.append("third")
        assert path.read_text() == "first\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.append("fourth")
    lines.close()
    assert path.read_text().split() == ["first", "second", "third", "fourth"]
    assert caplog.text.count("training goes on") == 1


def test_why_a_run_ended_is_in_its_log_and_not_twice_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging()
    log_to_file(tmp_path / "log.txt")
    log_failure(UserError("the reason"))
    assert "stopped: the reason" in (tmp_path / "log.txt").read_text()
    assert "the reason" not in capsys.readouterr().err
    setup_logging(rank=3)
    logging.getLogger("test").warning("from the first process")
    logging.getLogger("test").error("a broken disk")
    stderr = capsys.readouterr().err
    assert "rank 3: a broken disk" in stderr
    assert "first process" not in stderr


# --- after a power cut ---


def test_half_a_line_and_one_of_zeros_are_left_out(tmp_path: Path) -> None:
    cfg = small_config("vjepa2", f"run.dir={tmp_path}", f"train.ckpt_dir={tmp_path / 'checkpoints'}")
    lines = '{"step": 1}\n', "\0\0\0\0\n", '{"step": 2}\n', '{"st\n', '{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match=r"expected checkpoints of this run, which is at step 3, found none"):
        refuse_lost_checkpoints(cfg)
    (tmp_path / "checkpoints" / "history").mkdir(parents=True)
    bring_back(cfg, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == lines[0] + lines[2]
