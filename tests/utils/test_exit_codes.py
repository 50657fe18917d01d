"""Exit codes: 2 for what a person has to mend, 75 for what passes by itself, at every command's boundary."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from data_setup import expand, prepare
from data_setup.export import __main__ as volumes
from data_setup.index import cli as index
from data_setup.loader import LoaderError, LostWorkerError
from data_setup.store.place import check_store
from finetuning import embed, evaluate, predict
from finetuning.cohort.labels import check_task
from models.weights import words as weights
from pretraining import train as loop
from pretraining.gauges.monitor import FrozenTargetError, LeakError
from tests.support.cloud_servers import log_in
from tests.support.dicom_factory import speckle, write_opt
from tests.support.pipeline_factory import ROOT, SMOKE, pipeline_overrides
from tests.support.process_factory import environment
from utils.checkpoint import CheckpointError, LastWriteError
from utils.cli import require_folder, run_cli
from utils.errors import EXIT_STOPPED, EXIT_TRY_AGAIN, EXIT_USER_ERROR, ConfigError, TransientError, UserError
from utils.log import log_to_file, setup_logging
from utils.runtime.processes import LostPeer
from utils.storage import StorageAwayError, StorageError, StorageNotFoundError

NOBODY = "http://127.0.0.1:9"  # the discard port: refused
SHELL = {126, 127, *range(128, 166), 255}  # of a shell: not executable, not found, signals, out of range


def exit_code(command: Callable[[], int | None]) -> int:
    with pytest.raises(SystemExit) as ending:
        run_cli(command)
    assert isinstance(ending.value.code, int)
    return ending.value.code


def test_the_codes_are_distinct_and_nobody_elses() -> None:
    codes = [0, EXIT_USER_ERROR, EXIT_TRY_AGAIN, EXIT_STOPPED]
    assert codes == [0, 2, 75, 76]  # the launcher and the documented rule go by these numbers
    assert not {EXIT_TRY_AGAIN, EXIT_STOPPED} & (SHELL | {1, 120})  # 1, 120: Python's own


STRANGE = "esc\x1b]0;title\x07 line\nforged\rover \u202e\udcff\x9b é.dcm"
ITS_ESCAPES = r"esc\x1b]0;title\x07 line\nforged\rover \u202e\udcff\x9b é.dcm"


def test_a_strangers_file_name_forges_no_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the error of a command, and in what is logged, on the console and in log.txt."""

    def fail() -> None:
        raise UserError(f"{STRANGE}: expected a scan")

    assert exit_code(fail) == 2
    assert capsys.readouterr().err == f"error: {ITS_ESCAPES}: expected a scan\n"
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    factory = logging.getLogRecordFactory()
    try:
        setup_logging()
        log_to_file(tmp_path / "log.txt")
        for arg in (STRANGE, Path(STRANGE), OSError(STRANGE)):
            logging.getLogger("test").warning("%s: %d of it", arg, 3)
    finally:
        logging.setLogRecordFactory(factory)
        for handler in logging.root.handlers:
            handler.close()
    for text in (capsys.readouterr().err, (tmp_path / "log.txt").read_text()):
        assert text.count(f"{ITS_ESCAPES}: 3 of it\n") == text.count("\n") == 3


FORGING = "1\x1b]0;title\x07\nforged\rover \u202e\x9b"
MODEL = ("ManufacturerModelName", "1\x07\nforged\rover")
GRID = ["spatial.target_spacing=[0.75,0.096,0.1875]", "spatial.image_size=[8,24,32]"]


def test_a_strangers_file_name_forges_no_line_of_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a tree, its people, files, devices and archives: what commands print is their own lines alone."""
    root = tmp_path / FORGING / "scans"
    for person, voxels in ((FORGING, speckle(16, 200, 48)), (f"{FORGING}2", speckle(16, 200, 48, seed=1))):
        write_opt(root / person, voxels, name=f"{FORGING}.dcm", edit=lambda ds: setattr(ds, *MODEL))
    (root / FORGING / f"bad{FORGING}.dcm").write_bytes(b"\0" * 128 + b"DICM damaged")
    commands: dict[str, Callable[[], int | None]] = {
        "index": lambda: index.main([str(root), "--workers", "0", "--person", "^([^/]+)/"]),
        "expand": lambda: expand.main(["--src", str(root / FORGING), "--dst", str(tmp_path / "dst")]),
    }
    tables = [f"data.{t}_path={root}/{t}.tsv" for t in ("manifest", "participants")]
    place = [
        f"data.gcs_root={root}",
        "data.max_reject_fraction=1",
        *tables,
        f"data.store={tmp_path / FORGING / 'store'}",
        "--workers",
        "0",
    ]
    for words in ((), ("--check-only",), ("--verify",), ("--audit",)):
        run = partial(prepare.main, ["--config", str(SMOKE), *place, *GRID, *words])
        commands[" ".join(("prepare", *words))] = run
    for name, command in commands.items():
        if name == "expand":
            (root / FORGING / f"{FORGING}.zip").write_bytes(b"no archive")
        if name == "prepare":
            (root / FORGING / f"{FORGING}.dcm").write_bytes(b"damaged now")
        exit_code(command)
        text = "".join(capsys.readouterr())
        assert [c for c in text if not c.isprintable() and c != "\n"] == [], name
        assert [line for line in text.splitlines() if line.startswith("forged")] == [], name
        assert r"\nforged\rover" in text, name


WHAT = "what happened"
PAGE = "; what to do: docs/reference/troubleshooting.md"
AGAIN = "; it may pass by itself: run the same command again"
HELP = "; examples and all options: the same command with --help"


@pytest.mark.parametrize(
    ("error", "code", "step"),
    [
        *((kind(WHAT), 2, PAGE) for kind in (UserError, StorageError, StorageNotFoundError)),
        *((kind(WHAT), 2, PAGE) for kind in (CheckpointError, LoaderError, LeakError, FrozenTargetError)),
        (ConfigError(WHAT), 2, "; every key: docs/reference/configuration.md"),
        *((kind(WHAT), 75, AGAIN) for kind in (TransientError, StorageAwayError, LastWriteError)),
        *((kind(WHAT), 75, AGAIN) for kind in (LostWorkerError, LostPeer)),
        (UserError("--shard: expected i/n with 0 <= i < n, found '5/2'"), 2, HELP),
        (UserError("NAME: expected one of octa500, found 'x'"), 2, HELP),
        (UserError("found none; run data_setup.prepare"), 2, ""),  # which names its next step
        (UserError("found none (docs/start/folder.md)"), 2, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_command_ends_with_its_errors_code_and_the_next_step(
    error: UserError,
    code: int,
    step: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("utils.cli.leave", lambda code: raise_exit(code))
    assert exit_code(fail) == code
    assert capsys.readouterr().err == f"error: {error}{step}\n"


LOST = """
import atexit, threading
from utils.cli import run_cli
from utils.runtime.processes import LostPeer
atexit.register(threading.Event().wait)  # as torch_xla waits for a collective of the lost process
def main():
    print("what was still to be written")
    raise LostPeer("rank 0 lost another")
run_cli(main)
"""


def test_after_a_lost_peer_the_process_leaves_at_once_with_its_logs_written() -> None:
    command = [sys.executable, "-c", LOST]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=50)
    assert done.returncode == EXIT_TRY_AGAIN
    assert (done.stdout, done.stderr) == (
        "what was still to be written\n",
        "error: rank 0 lost another; it may pass by itself: run the same command again\n",
    )


def raise_exit(code: int) -> None:
    raise SystemExit(code)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(monkeypatch, attempts=2, first_wait_s=0.01)


@pytest.mark.parametrize("command", ["prepare", "check", "expand", "train", "evaluate"])
def test_a_bucket_away_is_75_of_every_command(
    tmp_path: Path, impatient: None, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"data.storage_options.endpoint_url={NOBODY}"
    words = ["--config", str(SMOKE), *pipeline_overrides(tmp_path), place, f"run.dir={tmp_path / 'run'}"]
    words += ["data.gcs_root=s3://bucket/tree", "data.store=s3://bucket/store"]
    words += ["model.checkpoint=s3://bucket/x.pt"]
    archives = ["--src=s3://bucket/a.zip", "--dst=s3://bucket/tree", f"--endpoint-url={NOBODY}"]
    run = {
        "prepare": lambda: prepare.main(words),
        "check": lambda: prepare.main([*words, "--check-only"]),
        "expand": lambda: expand.main(archives),
        "train": lambda: loop.main(words),
        "evaluate": lambda: evaluate.main(words),
    }[command]
    assert exit_code(run) == EXIT_TRY_AGAIN
    assert "gave up after 2 attempts" in capsys.readouterr().err


PROBE = str(ROOT / "configs" / "cls_linear_probe.yaml")
EARLY: dict[str, Callable[[str, str], object]] = {  # of an output, and of a scan
    "predict": lambda out, scan: predict.main(["--checkpoint=.", f"--out={out}", "--files", scan]),
    "embed": lambda out, scan: embed.main(["--checkpoint=.", f"--out={out}", "--dicom", scan]),
    "export": lambda out, _: weights.parse(["export", "--checkpoint=.", f"--portable={out}"]),
    "train": lambda out, _: check_task(PROBE, ["model.checkpoint=.", f"run.dir={out}"]),
    "index": lambda out, scan: index.main([str(Path(scan).parent), f"--out={out}"]),
    "expand": lambda out, scan: expand.main([f"--src={scan}", f"--dst={out}"]),
    "of store": lambda out, scan: volumes.main([scan, "0", "--format=nifti", f"--out={out}"]),
    "pretrain": lambda out, _: check_store(str(SMOKE), [f"train.ckpt_dir={out}"]),
}


@pytest.mark.parametrize("command", EARLY)
def test_places_that_cannot_be_are_refused_before_torch_is_imported(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prediction", "embedding"):
        monkeypatch.setitem(sys.modules, f"finetuning.{name}.run", None)  # no import of it succeeds
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "closed")
    (tmp_path / "closed").mkdir()
    (scan := tmp_path / "eye.nii").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for out in ("eye.nii", "eye.nii/below/it", "gone/out", "closed/a/b"):
        what = "one without" if out.startswith("closed") else f"none at {tmp_path / out.partition('/')[0]}"
        with pytest.raises(UserError, match=f"{out}: expected a folder that can be written, found {what}"):
            EARLY[command](str(tmp_path / out), str(scan))
    require_folder("--out", "~nobody.has.this.name/out")  # as the shell takes it
    words = ["model.checkpoint=.", f"train.ckpt_dir={scan}"]
    check_task(PROBE, words, is_training=False)  # what evaluates reads it
    with pytest.raises(UserError, match=r"train\.ckpt_dir .*found none"):
        check_task(PROBE, words)
    if command == "predict":
        with pytest.raises(UserError, match="--fovea: expected centre, "):
            predict.main(["--checkpoint=.", "--fovea=middle", f"--out={tmp_path}", "--files", str(scan)])
    if command in ("predict", "embed"):
        with pytest.raises(UserError, match=r"--files, --dicom .*no\.nii: expected a file or a folder"):
            EARLY[command](str(tmp_path / "new"), str(tmp_path / "no.nii"))
        with pytest.raises(UserError, match="--out: expected a folder, found ''"):
            EARLY[command]("", str(scan))
