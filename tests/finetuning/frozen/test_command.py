"""The command trains, logs, keeps other runs' files, and refuses mistakes and idle keys in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_setup.store.reader import PreparedStore
from finetuning.cohort.source import UNREAD
from finetuning.features.kept import KeptFeatures
from finetuning.train import main
from tests.finetuning.frozen.probing import QUICK, TASK, load_checkpoint_config
from tests.support.finetune_factory import CONFIG, PREPARED, config, save_checkpoint
from utils.cli import run_cli
from utils.config.load import load_config
from utils.config.schema import Config, leaves
from utils.errors import ConfigError, UserError
from utils.report import cli as report


def test_the_command_trains_and_says_what_is_next(
    probe: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again with other rates: nothing is computed, and no evaluated row is asked for."""
    asked: list[np.ndarray] = []
    compute = KeptFeatures.pooled

    def spy(self: KeptFeatures, rows: np.ndarray) -> np.ndarray:
        asked.append(rows)
        return compute(self, rows)

    def forbidden(*_: object) -> Iterator[None]:
        raise AssertionError("computed again")

    monkeypatch.setattr(KeptFeatures, "pooled", spy)
    monkeypatch.setattr(KeptFeatures, "compute", forbidden)
    with pytest.raises(AssertionError, match="computed again"):
        main(["--config", TASK, f"model.checkpoint={checkpoint}", f"run.dir={probe}/far/off", *QUICK])
    monkeypatch.setattr(KeptFeatures, "compute", lambda self, rows: forbidden() if len(rows) else iter(()))
    run = probe.parent / "again"
    assert main(["--config", TASK, f"model.checkpoint={checkpoint}", f"run.dir={run}", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.count("kept") == 1
    assert f"next: python -m finetuning.evaluate --head {run}/checkpoints/head.pt" in out
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.learning_rates=[]", "head.learning_rates: expected one number above 0 or more"),
        ("head.learning_rates=[0.1,-1]", "head.learning_rates"),
        ("head.weight_decays=[-1]", "head.weight_decays: expected one number of 0 or more"),
        (
            "head.learning_rates=[1e-3,0.001]",
            "head.learning_rates: expected different numbers, found .*0.001",
        ),
        ("head.weight_decays=[0.1,0,0.10]", "head.weight_decays: expected different numbers"),
    ],
)
def test_rules_of_the_head(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, [override])
