"""The embed command: right features, right rows, bad files by name, and the same folder after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr

from data_setup.jobs import Job, prepare_row
from data_setup.manifest import unknown_record
from data_setup.store.format import chunk_key
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, record_fields
from finetuning.embed import main
from finetuning.embedding import run
from finetuning.embedding.run import Embedded, Folder
from finetuning.embedding.volumes import Volume
from finetuning.features.kept import pretrained_encoder
from tests.support.dicom_factory import TRITON, speckle, write_opt
from tests.support.finetune_factory import RUNTIME, config, embed_rows, make_world, save_checkpoint
from tests.support.process_factory import Running, run_to_end
from utils.checkpoint import load_checkpoint
from utils.config.schema import StorageOptions
from utils.errors import ConfigError, UserError
from utils.run.lease import hold

PEOPLE = {"train": 2, "val": 1, "test": 2}


@pytest.fixture(scope="module", autouse=True)
def _two_blocks() -> None:
    """None of them here: other processes read the checkpoint, with sizes of their own."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), PEOPLE)


@pytest.fixture(scope="module")
def checkpoint(world: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    small = ["method.predictor_depth=2", "method.predictor_width=64"]
    cfg = config(world, tmp_path_factory.mktemp("pretrained"), *small)
    return save_checkpoint(cfg, participants=["train00", "train01"])


def features(table: pd.DataFrame) -> np.ndarray:
    """Mean and standard deviation [n, 2E]."""
    return np.concatenate([np.stack(table[name].to_list()) for name in ("mean", "std")], axis=1)


@pytest.fixture(scope="module")
def done(world: Path, checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole store, patches too."""
    out = tmp_path_factory.mktemp("done") / "features"
    words = ["--checkpoint", checkpoint, "--store", str(world / "store"), "--out", str(out), "--patches"]
    assert main(words) == 0
    return out


def test_rows_and_features_are_those_of_the_store(world: Path, checkpoint: str, done: Path) -> None:
    store = PreparedStore.open(str(world / "store"))
    table = pd.read_parquet(done / "features.parquet")
    pd.testing.assert_frame_equal(table[list(store.index)], store.index.reset_index(drop=True))
    assert table["seen_in_pretraining"].tolist() == [True] * 4 + [False] * 6
    cfg, state = config(world, world / "run"), load_checkpoint(checkpoint)
    expected = embed_rows(pretrained_encoder(cfg, state, checkpoint), cfg, store, store.kept, RUNTIME)
    np.testing.assert_allclose(features(table), expected, atol=1e-5)


def test_features_of_several_blocks_are_joined(
    world: Path, checkpoint: str, done: Path, tmp_path: Path
) -> None:
    words = ["--checkpoint", checkpoint, "--store", str(world / "store")]
    assert main([*words, "--out", str(tmp_path / "out"), "model.feature_blocks=[2,12]"]) == 0
    both, last = (pd.read_parquet(folder / "features.parquet")["mean"] for folder in (tmp_path / "out", done))
    np.testing.assert_allclose(np.stack(both.to_list())[:, 192:], np.stack(last.to_list()), atol=1e-5)
    with pytest.raises(UserError, match="feature_blocks"):
        main([*words, "--out", str(tmp_path / "out"), "model.feature_blocks=[3,12]"])


def test_patches_are_the_tokens_and_pool_to_the_features(world: Path, done: Path) -> None:
    group = zarr.open_group(done / "patches.zarr", mode="r")
    tokens, valid = group["tokens"], group["valid"]
    assert (tokens.shape, tokens.dtype, tokens.chunks) == ((10, 24, 192), np.float16, (1, 24, 192))
    assert len(list((done / "patches.zarr" / "tokens" / "c").iterdir())) == 10
    inside = valid[:]
    # 20 of 24 axial rows are inside the field: the third patch of 8 holds half of its voxels
    assert inside.all()
    table = pd.read_parquet(done / "features.parquet")
    np.testing.assert_allclose(
        np.stack(table["mean"].to_list()), tokens[:].astype(np.float32).mean(axis=1), atol=2e-3
    )
    np.testing.assert_allclose(
        np.stack(table["std"].to_list()), tokens[:].astype(np.float32).std(axis=1), atol=2e-3
    )


def assert_same_features(one: Path, other: Path) -> None:
    """Bit for bit, patches too."""
    ours, theirs = (pd.read_parquet(folder / "features.parquet") for folder in (one, other))
    pd.testing.assert_frame_equal(ours.drop(columns=["mean", "std"]), theirs.drop(columns=["mean", "std"]))
    assert np.array_equal(features(ours), features(theirs))
    for name in ("tokens", "valid"):
        arrays = [zarr.open_group(folder / "patches.zarr", mode="r")[name][:] for folder in (one, other)]
        assert arrays[0].tobytes() == arrays[1].tobytes()


def test_only_what_changed_is_embedded_again(
    world: Path, checkpoint: str, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged volume is a row with its reason; mended, and with other rows changed, only these run."""
    store, out = tmp_path / "store", tmp_path / "out"
    shutil.copytree(world / "store", store)
    chunk = store / "volumes" / chunk_key(3)
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-9])
    words = ["--checkpoint", checkpoint, "--store", str(store), "--out", str(out), "--patches"]
    assert main(words) == 1
    first = pd.read_parquet(out / "features.parquet")
    assert first["status"].tolist() == ["kept"] * 3 + ["damaged"] + ["kept"] * 6
    assert first["mean"][3] is None
    assert "expected the volume of row 3, found" in first["message"][3]
    assert np.isnan(zarr.open_group(out / "patches.zarr", mode="r")["tokens"][3]).all()
    captured = capfd.readouterr()
    assert "9 volumes with features, 1 without; embedded now 9, before 0" in captured.out
    assert "rejected: train01_R.dcm: damaged: " in captured.err

    chunk.write_bytes(whole)
    index = pd.read_parquet(store / "index.parquet")
    index.loc[5, "intensity_mean"] += 9.0
    index.loc[6, "split"] = "train"
    index.to_parquet(store / "index.parquet", index=False)
    row = out / "rows" / "000002.npz"
    row.write_bytes(row.read_bytes()[:100])
    for number, facts in {
        7: "3",
        8: '{"version": "x"}',
        9: '{"version": "x", "fields": {}, "more": 1}',
    }.items():
        np.savez(out / "rows" / f"00000{number}.npz", facts=facts, **({"more": 1} if number == 9 else {}))
    before = {path.name: path.stat().st_mtime_ns for path in (out / "rows").iterdir()}
    assert main(words) == 0
    assert "10 volumes with features, 0 without; embedded now 6, before 4" in capfd.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in (out / "rows").iterdir()}
    assert {int(name[:6]) for name in after if after[name] != before[name]} == {2, 3, 5, 7, 8, 9}
    second, unbroken = (pd.read_parquet(folder / "features.parquet") for folder in (out, done))
    assert (first["split"][6], second["split"][6]) == ("test", "train")
    changed = np.abs(features(second) - features(unbroken)).max(axis=1) > 0
    assert np.flatnonzero(changed).tolist() == [5]

    chunk.write_bytes(whole[:-9])  # damaged again: no patches stay
    (out / "rows" / "000003.npz").unlink()
    assert main(words) == 1
    group = zarr.open_group(out / "patches.zarr", mode="r")
    assert np.isnan(group["tokens"][3]).all()
    assert group["valid"][:].any(axis=1).tolist() == [True] * 3 + [False] + [True] * 6


def test_a_first_start_may_be_killed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the patches, or between the two arrays: the next goes on."""
    folder, about = Folder(str(tmp_path / "out"), StorageOptions(), with_patches=True), {"width": 3}
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_make_patches", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            folder.begin(about, 2, (4, 3))
    real = zarr.Group.create_array

    def killed(self: zarr.Group, name: str, **options: Any) -> zarr.Array:
        return 1 / 0 if name == "valid" else real(self, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Group, "create_array", killed)
        with pytest.raises(ZeroDivisionError):
            folder.begin(about, 2, (4, 3))
    folder.begin(about, 2, (4, 3))
    ones = np.ones((4, 3), np.float32)
    folder.write(1, "a", Embedded({}, ones[0], ones[0], ones, ones[:, 0] > 0))
    folder.begin(about, 3, (4, 3))  # the rows that are there stay
    group = zarr.open_group(tmp_path / "out" / "patches.zarr", mode="r")
    assert (group["tokens"].shape, group["valid"].shape) == ((3, 4, 3), (3, 4))
    assert group["valid"][:].any(axis=1).tolist() == [False, True, False]


def test_another_question_needs_another_folder(
    world: Path, checkpoint: str, done: Path, tmp_path: Path
) -> None:
    words = ["--checkpoint", checkpoint, "--store", str(world / "store"), "--out"]
    before = (done / "embed.json").read_text()
    for text in (before[:9], "[1]", "null", ""):
        (tmp_path / "embed.json").write_text(text)
        with pytest.raises(UserError, match=r"embed\.json: expected .* of finetuning\.embed, found another"):
            main([*words, str(tmp_path)])
    with pytest.raises(UserError, match=r"embed\.json: patches: expected false of this command, found true"):
        main([*words, str(done)])
    assert (done / "embed.json").read_text() == before
    (tmp_path / "embed.json").write_text(json.dumps(json.loads(before) | {"checkpoint_sha256": "0"}))
    with pytest.raises(UserError, match=r"embed\.json: checkpoint_sha256: expected .*; give another --out"):
        main([*words, str(tmp_path), "--patches"])
    (tmp_path / "embed.json").rename(tmp_path / "notes.txt")
    with pytest.raises(UserError, match="--out: expected a new folder or one of this command, found files"):
        main([*words, str(tmp_path)])
    with pytest.raises(ConfigError, match=r"model\.size=s.: expected only changes of data\., train"):
        main([*words, str(done), "model.size=s"])
    with pytest.raises(
        UserError, match=r"--dicom: expected a DICOM file or a folder, found none at .*absent"
    ):
        main([*words[:2], "--out", str(done), "--dicom", str(tmp_path / "absent"), str(world)])


def test_dicom_files_have_the_features_of_their_volumes_in_the_store(
    world: Path, checkpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prepared and read directly: bit for bit. A broken file is a row with its reason."""
    cfg, files = config(world, tmp_path), tmp_path / "files"
    write_opt(files, speckle(16, 200, 48, seed=1))
    write_opt(files, speckle(20, 200, 48, seed=2), name="1.2.840.9")  # as archives name them
    writer = StoreWriter(str(tmp_path / "store"))
    writer.create(cfg.spatial, str(files), synthetic=True)
    records = [
        replace(unknown_record(str(files / name)), path=name, split="test") for name in (TRITON, "1.2.840.9")
    ]
    rows = writer.append_records([record_fields(record) for record in records])
    for row, record in zip(rows, records, strict=True):
        job = Job(row, record, writer, cfg.spatial, cfg.data.storage_options)
        assert prepare_row(job).status == "kept"
    writer.finalise(rows)
    (files / "broken.dcm").write_bytes(b"\0" * 128 + b"DICM and no more")
    (files / "notes.txt").write_text("no DICOM")
    common = ["--checkpoint", checkpoint, "--out"]
    of_store = ["--store", str(tmp_path / "store"), "--patches"]
    assert main([*common, str(tmp_path / "1"), *of_store]) == 0
    assert main([*common, str(tmp_path / "2"), "--dicom", str(files)]) == 1
    prepared, direct = (pd.read_parquet(tmp_path / name / "features.parquet") for name in "12")
    assert len(direct) == 3
    store = PreparedStore.open(str(tmp_path / "store"))
    encoder = pretrained_encoder(cfg, load_checkpoint(checkpoint), checkpoint)
    expected = embed_rows(encoder, cfg, store, store.kept, RUNTIME)
    np.testing.assert_allclose(features(prepared), expected, atol=1e-5)
    valid = zarr.open_group(tmp_path / "1" / "patches.zarr", mode="r")["valid"][:]
    assert 0 < valid.mean() < 1  # part of the grid lies outside the scan
    (broken,) = direct[direct["status"] != "kept"].itertuples()
    assert (broken.path, broken.mean) == (str(files / "broken.dcm"), None)
    assert f"rejected: {broken.path}: not_dicom: {broken.message}" in capfd.readouterr().err
    kept = direct[direct["status"] == "kept"].set_index("checksum").loc[prepared["checksum"]].reset_index()
    assert np.array_equal(features(kept), features(prepared))
    assert np.abs(features(kept)[0] - features(kept)[1]).max() > 1e-3
    same = ["laterality", "spacing_before_d", "valid_fraction", "flipped_d", "intensity_mean"]
    pd.testing.assert_frame_equal(kept[same], prepared[same])
    assert kept["seen_in_pretraining"].isna().all()


def test_odd_names_faults_and_two_at_once(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A name of bytes that are no text is a row; a pipe and a fault of ours are rows with their reasons."""
    files, out = tmp_path / "files", tmp_path / "out"
    for name in (os.fsdecode(b"\xff.dcm"), "a$\\frac{$b$^$.dcm", "faulty\x1b.dcm"):
        write_opt(files, speckle(16, 200, 48), name=name)
    os.mkfifo(files / "pipe.dcm")
    embed_volume = run.embed_volume

    def faulty(encoder: Any, cfg: Any, volume: Volume, *words: Any) -> Embedded:
        return 1 / 0 if "faulty" in volume.fields["path"] else embed_volume(encoder, cfg, volume, *words)

    monkeypatch.setattr(run, "embed_volume", faulty)
    words = ["--checkpoint", checkpoint, "--out", str(out), "--dicom", str(files), str(files / "pipe.dcm")]
    with hold(str(out)), pytest.raises(UserError, match=r"finetuning\.embed into this .* another --out"):
        main(words)
    assert main(words) == 1
    table = pd.read_parquet(out / "features.parquet")
    status = {Path(path).name: value for path, value in zip(table["path"], table["status"], strict=True)}
    assert status == {"\\xff.dcm": "kept", "a$\\frac{$b$^$.dcm": "kept"} | {
        "faulty\x1b.dcm": "internal_error",
        "pipe.dcm": "unsupported_format",
    }
    assert "\x1b" not in capfd.readouterr().err
    assert not list(out.glob("lease_*"))


SLOWLY = """
import sys, time
from finetuning.embedding import run
real = run.embed_volume
def slow(*words):
    time.sleep(0.2)
    return real(*words)
run.embed_volume = slow
from finetuning.embed import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_kill_costs_one_row(world: Path, checkpoint: str, done: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle, then two processes: the unbroken run's bytes, nothing embedded twice."""
    out, rows = tmp_path / "out", tmp_path / "out" / "rows"
    words = ["--checkpoint", checkpoint, "--store", str(world / "store"), "--out", str(out), "--patches"]
    running = Running([sys.executable, "-c", SLOWLY, *words], tmp_path / "first")
    running.wait_for(lambda: len(list(rows.glob("*.npz"))) >= 4)
    running.process.kill()
    assert running.wait() == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in rows.glob("*.npz")}
    assert 4 <= len(before) < 10
    assert not (out / "features.parquet").exists()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    text = run_to_end([*launcher, "-m", "finetuning.embed", *words], tmp_path / "second")
    assert f"embedded now {10 - len(before)}, before {len(before)}" in text
    half = -(-(10 - len(before)) // 2)
    assert f"embedded {half} volumes, " in text  # the first process's share
    after = {path.name: path.stat().st_mtime_ns for path in rows.glob("*.npz")}
    assert {name: after[name] for name in before} == before
    assert_same_features(out, done)
    assert (out / "features.parquet").read_bytes() == (done / "features.parquet").read_bytes()
