"""The command trains, logs, keeps other runs' files, and refuses mistakes and idle keys in a line; its head's
file gives the numbers that were trained, and refuses what does not belong to it.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.source import UNREAD, evaluated_config, on_own_endpoint
from finetuning.features import kept
from finetuning.heads import frozen
from finetuning.heads.head_file import checkpoint_of, open_head, predict_rows
from finetuning.train import main
from tests.support.finetune_factory import PREPARED, RUNTIME, config, embed_rows, save_checkpoint
from tests.support.pipeline_factory import ROOT
from utils.checkpoint import CheckpointError, CheckpointWriter, load_checkpoint
from utils.cli import run_cli
from utils.config.load import config_of_yaml
from utils.config.schema import Config, StorageOptions, leaves
from utils.errors import ConfigError, UserError
from utils.report import cli as report

TASK = str(ROOT / "configs" / "cls_linear_probe.yaml")
QUICK = ["train.epochs=3", "head.learning_rates=[1e-3,1e-2]", "head.weight_decays=[0.01]", "data.workers=0"]
QUICK += ["train.log_every_steps=2", "wandb.mode=disabled"]


@pytest.fixture(scope="module")
def checkpoint(world: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(config(world, tmp_path_factory.mktemp("pretrained"), "data.workers=0"))


@pytest.fixture(scope="module")
def probe(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a linear probe, trained by the command."""
    run = tmp_path_factory.mktemp("runs") / "probe"
    assert main(["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", *QUICK]) == 0
    return run


def load_checkpoint_config(url: str) -> Config:
    return config_of_yaml(load_checkpoint(url)["config"], url)


def test_the_command_trains_and_says_what_is_next(
    probe: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again with other rates: nothing is computed, and no evaluated row is asked for."""
    asked: list[np.ndarray] = []
    compute = kept.KeptFeatures.pooled

    def spy(self: kept.KeptFeatures, rows: np.ndarray) -> np.ndarray:
        asked.append(rows)
        return compute(self, rows)

    def forbidden(*_: object) -> Iterator[None]:
        raise AssertionError("computed again")

    monkeypatch.setattr(kept.KeptFeatures, "pooled", spy)
    monkeypatch.setattr(kept.KeptFeatures, "compute", forbidden)
    with pytest.raises(AssertionError, match="computed again"):
        main(["--config", TASK, f"model.checkpoint={checkpoint}", f"run.dir={probe}/far/off", *QUICK])
    monkeypatch.setattr(
        kept.KeptFeatures, "compute", lambda self, rows: forbidden() if len(rows) else iter(())
    )
    run = probe.parent / "again $\n"
    assert main(["--config", TASK, f"model.checkpoint={checkpoint}", f"run.dir={run}", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.count("kept") == 1
    assert f"finetuning.evaluate --head '{probe.parent}/again $\\n/checkpoints/head.pt'" in out
    assert "Chosen only on validation" in out
    store = PreparedStore.open(load_checkpoint_config(checkpoint).data.store)
    splits = [set(store.index.loc[rows, "split"]) for rows in asked]
    assert set.union(*splits) == {"train", "val"}  # the distance of features reads those of train alone


def test_a_probe_has_the_log_and_the_report_of_a_run(
    probe: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """metrics.jsonl, log.txt, the same rows to W&B, and a page; a second training begins them anew."""
    sent: list[tuple[int, dict[str, float]]] = []

    class Service:
        offline = True
        dir = "wandb/run/files"

        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((step, values))

        def finish(self, exit_code: int) -> None:
            sent.append((-1, {"failed": exit_code}))

    def start(cfg: Config, run_dir: Path) -> Service:
        (run_dir / "wandb_id.txt").touch(exist_ok=False)
        return Service()

    monkeypatch.setattr("utils.run.log.start_wandb", start)
    run = probe.parent / "logged"
    for _ in range(2):
        sent.clear()
        assert main(["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", *QUICK]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sent == [
        *((row["step"], {k: row[k] for k in row if k != "step"}) for row in rows),
        (-1, {"failed": 0}),
    ]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert [row["step"] for row in rows if "val/balanced_accuracy" in row] == [1, 2, 3]
    assert "step 3: " in (run / "log.txt").read_text()
    assert not (run / "no_checkpoint_yet").exists()
    (run / "prepare_report.json").write_text(json.dumps(PREPARED))
    report.main([str(run)])
    page = (run / "report.html").read_text()
    assert "Fine-tuning on 3D retinal OCT" in page
    assert "Score of the task" in page


def test_a_folder_of_another_run_keeps_its_files(
    probe: Path, checkpoint: str, world: Path, tmp_path: Path
) -> None:
    """Of a pre-training, of the same probe with other settings, of the same probe on another encoder."""
    before = {path: path.read_bytes() for path in probe.rglob("*") if path.is_file()}
    assert (probe / "config.yaml").is_file()
    assert (probe / "provenance.json").is_file()
    command = ["--config", TASK, f"run.dir={probe}"]
    with pytest.raises(UserError, match=r"head.hidden: expected 256 as the run began, found 16"):
        main([*command, "--checkpoint", checkpoint, *QUICK, "head.hidden=16"])
    other = save_checkpoint(config(world, tmp_path / "other", "data.workers=0", "seed=7"))
    with pytest.raises(UserError, match=r"expected a head of .*other.*, found one of .*use another run.dir"):
        main([*command, "--checkpoint", other, *QUICK, "seed=0"])
    assert {path: path.read_bytes() for path in probe.rglob("*") if path.is_file()} == before


def test_mistakes_are_one_line(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            run_cli(lambda: main(["--config", TASK, *words]))
        assert stop.value.code == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    assert "model.checkpoint: expected a checkpoint or a run's folder, found null" in fails()
    assert "found no such file" in fails("--checkpoint", str(tmp_path / "absent.pt"))
    use = ("--checkpoint", checkpoint)
    assert "train.ckpt_dir: expected a folder for the head" in fails(*use, "train.ckpt_dir=null")
    assert "model.size: expected s of the configuration, found ti" in fails(*use, "model.size=s")
    assert "eval.protocol: expected official, found crossfit" in fails(*use, "eval.protocol=crossfit")
    run = tmp_path / "a \x1b run"
    for name, content in (("config.yaml", b"\xff"), ("config.yaml", None), ("log.txt", None)):
        shutil.rmtree(run, ignore_errors=True)
        (run / name).parent.mkdir()
        (run / name).mkdir() if content is None else (run / name).write_bytes(content)
        line = fails(*use, *QUICK, f"run.dir={run}")
        assert f"{name}: expected {'a file, found a folder' if content is None else 'UTF-8 text'}" in line
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "expected one process" in fails(*use, "data.workers=0")


def test_a_key_that_does_nothing_is_refused(checkpoint: str, tmp_path: Path) -> None:
    """On the command line and in a file; what a file must hold, and what is as it would be, is not."""

    def refused(file: Path | str, *words: str) -> str:
        with pytest.raises(ConfigError) as error:
            main(["--config", str(file), "--checkpoint", checkpoint, f"run.dir={tmp_path / 'run'}", *words])
        assert not (tmp_path / "run").exists()
        return str(error.value)

    def passes(file: Path | str, *words: str) -> None:
        """As far as the next mistake."""
        assert "train.ckpt_dir: expected a folder" in refused(file, *words, "train.ckpt_dir=null")

    assert refused(TASK, "optim.base_lr=0.5") == (
        "command line: optim.base_lr: expected the file's own with finetune.encoder=frozen, which does not "
        "read it (head.learning_rates are tried), found 0.5"
    )
    assert "augment.strength: expected its default 1.0" in refused(TASK, "augment.strength=0.5")
    assert "method.drop_path" in refused(TASK, "method.drop_path=0.2")
    assert "train.keep_last: expected its default 2" in refused(TASK, "train.keep_last=9")
    assert "optim.cooldown_ratio" in refused(TASK, "optim.cooldown_ratio=0.1")
    passes(TASK, "train.keep_last=2", "train.log_every_steps=1", "head.learning_rates=[1]")
    tuned = str(Path(TASK).with_name("cls_finetune.yaml"))
    assert "found [0.1]" in refused(tuned, "head.learning_rates=[0.1]")
    assert "(no trace is written), found True" in refused(tuned, "run.profile=true")
    assert "head.weight_decays: expected its default [0.0001, 0.01, 0.1]" in refused(
        tuned, "head.weight_decays=[0.5]"
    )
    passes(tuned, "optim.base_lr=0.5", "augment.strength=0.5", "finetune.layer_decay=0.5")
    layers = str(Path(TASK).with_name("layers.yaml"))
    assert "with task.kind=layers, which does not" in refused(layers, "head.learning_rates=[0.1]")
    passes(layers, "optim.base_lr=0.5", "optim.clip_grad_norm=2", "train.per_core_batch_size=4")
    own = tmp_path / "own.yaml"
    own.write_text(Path(TASK).read_text().replace("finetune:\n", "finetune:\n  layer_decay: 0.5\n"))
    assert refused(own).startswith(f"{own}: finetune.layer_decay: expected its default 0.75 with")
    assert not {key for table in UNREAD.values() for key in table} - {
        *(name for name, _, _ in leaves(Config())), "augment.",
    }  # fmt: skip


def test_the_head_names_its_encoder_from_any_folder(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(checkpoint).parent)
    changes = [f"run.dir={tmp_path / 'relative'}", *QUICK]
    assert main(["--config", TASK, "--checkpoint", Path(checkpoint).name, *changes]) == 0
    monkeypatch.chdir(tmp_path)
    assert open_head(str(tmp_path / "relative")).state["encoder"]["url"] == checkpoint


def test_the_head_loads_by_itself_and_predicts(probe: Path, checkpoint: str) -> None:
    head = open_head(str(probe))
    store = PreparedStore.open(head.cfg.data.store)
    rows = np.array([70, 3, 50, 51])
    scores = predict_rows(head, store, rows, RUNTIME)
    features = torch.from_numpy(embed_rows(head.encoder, head.cfg, store, rows, RUNTIME))
    scale = head.state["standardise"]
    weights = head.state["head"]
    outputs = ((features - scale["mean"]) / scale["std"]) @ weights["last.weight"].T + weights["last.bias"]
    np.testing.assert_allclose(scores, outputs.softmax(1), atol=1e-4)
    assert (head.kind, head.names) == ("classification", ("a", "b"))
    state = head.state
    assert state["task"] == {
        "kind": "classification",
        "names": ["a", "b"],
        "label_column": "study_group",
        "unit": "participant",
    }
    assert state["encoder"] == {"url": checkpoint, "checksum": load_checkpoint(checkpoint)["checksum"]}
    assert state["participants"]["train"] == [f"train{n:02d}" for n in range(16)]
    assert state["participants"]["val"] == [f"val{n:02d}" for n in range(8)]
    assert state["pretraining_participants"] == state["participants"]["train"]
    assert state["geometry"] == store.attrs["geometry"]
    assert state["normalisation"] == "zscore_valid"


@pytest.mark.parametrize("url", ["/home/me/head.pt", "gs://mine/head.pt", "memory://mine/head.pt"])
@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:9/e.pt", "gs://theirs/e.pt", "simplecache::http://x.org/e.pt"]
)
def test_no_address_is_asked_that_a_file_alone_names(
    url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's: a person says it, or it lies in the head's own bucket."""
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, where: asked.append(where))
    state = {"encoder": {"url": place, "checksum": "0"}}
    with pytest.raises(UserError, match=r"this file names; nothing was asked of it: add model\.checkpoint="):
        checkpoint_of(state, url, None, None)
    assert asked == []
    with pytest.raises(UserError, match="absent"):
        checkpoint_of({"encoder": {"url": "memory://mine/absent.pt"}}, "memory://mine/head.pt", None, None)


def test_the_endpoint_of_a_bucket_is_the_command_lines(checkpoint: str) -> None:
    cfg = load_checkpoint_config(checkpoint)
    theirs = replace(cfg, data=replace(cfg.data, storage_options=StorageOptions("http://127.0.0.1:9")))
    assert on_own_endpoint(theirs, []).data.storage_options == StorageOptions()
    of_command = on_own_endpoint(theirs, ["data.storage_options.endpoint_url=http://mine"])
    assert of_command.data.storage_options == StorageOptions("http://mine")


def test_attentive_heads_go_the_same_way(checkpoint: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "attentive"
    words = [*QUICK, "head.kind=attentive", "train.epochs=2", f"run.dir={run}", "model.feature_blocks=[1,2]"]
    assert main(["--config", TASK, "--checkpoint", checkpoint, *words]) == 0
    head = open_head(str(run / "checkpoints" / "head.pt"))
    assert head.standardise is None
    assert head.encoder.feature_width == 2 * head.encoder.width
    with pytest.raises(ConfigError, match=r"model.feature_blocks: expected \[1, 2\] as in training"):
        evaluated_config(head.cfg, head.url, ["model.feature_blocks=null"])
    other = [f"run.dir={tmp_path / 'other'}", "model.feature_blocks=[2,1]"]
    with pytest.raises(ConfigError, match=r"model.feature_blocks: expected rising numbers of 1 to 2, found"):
        main(["--config", TASK, "--checkpoint", checkpoint, *words, *other])
    store = PreparedStore.open(head.cfg.data.store)
    rows = np.array([60, 8, 61])
    scores = predict_rows(head, store, rows, RUNTIME)
    tokens, valid = next(
        (t, v) for _, t, v in kept.KeptFeatures(head.encoder, head.cfg, store, RUNTIME).compute(rows)
    )
    np.testing.assert_allclose(scores, head.module(tokens, valid).softmax(1), atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "x"},
        {"task": {"kind": "classification", "names": 3, "label_column": "a", "unit": "eye"}},
        {"encoder": None},
        {"encoder": {"url": None, "checksum": 5}},
        {"encoder": {}},
        *({"num_outputs": value} for value in (10**9, -1, 0, None, "2", 2.5, float("nan"))),
        *({"hidden": value, "head_kind": "mlp"} for value in ("9", None, 10**9, -1)),
        *({"head_kind": value} for value in (None, 3, ["mlp"], "deep")),
        *({"head": value} for value in ([], {"last.weight": "x"}, {3: 4}, {})),
        *({"standardise": value} for value in ([1], {"mean": "a", "std": None}, {})),
        *({"config": value} for value in ("5", "- a", "x: [", "seed: !!python/name:os.system", "")),
        {"encoder_weights": [1]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_strangers_head_is_one_line(probe: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """Right seal, odd values: nothing is run, no memory is asked for, and no traceback."""
    state = load_checkpoint(str(probe / "checkpoints" / "head.pt"))
    writer = CheckpointWriter(str(tmp_path), keep_last=None)
    del state["checksum"]
    writer.save(state | change, ["head"])
    writer.close()
    with pytest.raises(UserError, match=r"head\.pt: ") as error:
        open_head(str(tmp_path / "head.pt"))
    assert "\n" not in str(error.value)


def test_a_fine_tuned_encoder_is_that_of_the_head(probe: Path, world: Path, tmp_path: Path) -> None:
    """The file has encoder weights: they are used, and the checkpoint that it came from is not needed."""
    head = open_head(str(probe))
    encoder = kept.random_encoder(head.cfg, 5)
    state = {k: v for k, v in head.state.items() if k not in ("checksum", "format_version")}
    state |= {"encoder_weights": encoder.state_dict(), "encoder": {"url": "gone.pt", "checksum": "0"}}
    writer = CheckpointWriter(str(tmp_path), keep_last=None)
    writer.save(state | {"standardise": None}, ["head"])
    writer.close()
    tuned = open_head(str(tmp_path / "head.pt"))
    assert not tuned.is_frozen
    store = PreparedStore.open(head.cfg.data.store)
    rows = np.arange(3)
    features = torch.from_numpy(embed_rows(encoder, head.cfg, store, rows, RUNTIME))
    expected = tuned.module(features).softmax(1)
    before = set(Path(kept.features_folder(head.cfg)).rglob("*"))
    np.testing.assert_allclose(predict_rows(tuned, store, rows, RUNTIME), expected, atol=1e-4)
    assert set(Path(kept.features_folder(head.cfg)).rglob("*")) == before


def test_a_head_refuses_what_it_was_not_trained_on(probe: Path, world: Path, tmp_path: Path) -> None:
    other = save_checkpoint(config(world, tmp_path / "other"), step=41, participants=["val01", "test03"])
    with pytest.raises(CheckpointError, match=r"best_probe.pt: expected the encoder of .*head.pt, sha256"):
        open_head(str(probe), encoder_url=other)  # the same weights, another run
    with pytest.raises(UserError, match=r"split test in its pre-training, found 1 \(test03\)"):
        main(["--config", TASK, "--checkpoint", other, f"run.dir={tmp_path / 'run'}", *QUICK])
    head = open_head(str(probe))
    store = PreparedStore.open(head.cfg.data.store)
    for key, value in (("normalisation", "minmax"), ("geometry", {"image_size": [1, 2, 3]})):
        store.attrs = {**head.state, key: value}
        with pytest.raises(UserError, match=rf"{key}: expected .* of .*head.pt, found .*(minmax|1, 2, 3)"):
            predict_rows(head, store, np.arange(2), RUNTIME)


def test_a_changed_head_is_detected(probe: Path, tmp_path: Path) -> None:
    shutil.copytree(probe / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "head.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"head.pt: expected .* bytes with sha256 .*: the file is damaged"
    ):
        open_head(str(tmp_path))
    (tmp_path / "checkpoints" / "head.json").unlink()
    with pytest.raises(CheckpointError, match="expected its seal"):
        open_head(str(tmp_path))


def test_a_head_is_no_encoder_and_an_encoder_no_head(probe: Path, checkpoint: str) -> None:
    with pytest.raises(CheckpointError, match=r"best_probe.pt: expected the file of a head"):
        open_head(checkpoint)
    head = str(probe / "checkpoints" / "head.pt")
    with pytest.raises(
        CheckpointError, match=r"head.pt: expected a checkpoint of pretraining.train, found no"
    ):
        main(["--config", TASK, "--checkpoint", head])


def test_the_encoder_is_bit_identical_after_probing(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[nn.Module, str]] = []

    def remember(*args: Any) -> nn.Module:
        encoder = kept.pretrained_encoder(*args)
        seen.append((encoder, kept.weights_digest(encoder)))
        return encoder

    monkeypatch.setattr(frozen, "pretrained_encoder", remember)
    before = load_checkpoint(checkpoint)["checksum"]
    words = [*QUICK, "head.kind=attentive", "train.epochs=1", f"run.dir={tmp_path / 'runs' / 'a'}"]
    assert main(["--config", TASK, "--checkpoint", checkpoint, *words]) == 0
    ((encoder, digest),) = seen
    assert kept.weights_digest(encoder) == digest
    assert not any(p.requires_grad for p in encoder.parameters())
    assert load_checkpoint(checkpoint)["checksum"] == before


def test_weights_that_do_not_fit_are_named(world: Path, checkpoint: str) -> None:
    state = load_checkpoint(checkpoint)
    cfg = load_checkpoint_config(checkpoint)
    partial = {k: v for k, v in state["model"].items() if ".blocks.1." not in k}
    with pytest.raises(
        CheckpointError,
        match=r"x.pt: weights of model.size ti: expected the \d+ tensors of the model; the file lacks 12: "
        r"blocks.1.norm1.weight, blocks.1.norm1.bias, blocks.1.attn.qkv.weight, ...$",
    ):
        kept.pretrained_encoder(cfg, {**state, "model": partial}, "x.pt")
    foreign = {**state["model"], "target_encoder.cls_token": torch.zeros(1)}
    foreign["target_encoder.norm.weight"] = torch.zeros(7)
    with pytest.raises(
        CheckpointError,
        match=r"has in excess 1: cls_token; has in another shape 1: norm.weight \(\[7\] for \[48\]\)$",
    ):
        kept.pretrained_encoder(cfg, {**state, "model": foreign}, "x.pt")
    with pytest.raises(CheckpointError, match="found no model"):
        kept.pretrained_encoder(cfg, {"config": "", "normalisation": "", "participants": []}, "x.pt")
