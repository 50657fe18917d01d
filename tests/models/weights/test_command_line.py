"""Inspect lists every key; an error is one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.weights.__main__ import main
from models.weights.files import read_weights
from tests.models.weights.weight_files import config, exit_line, own_checkpoint
from tests.support.pipeline_factory import SMOKE
from utils.cli import run_cli
from utils.errors import ConfigError


def test_inspect_lists_every_key(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(tiny)]) == 0
    text = capsys.readouterr().out
    assert "layout      research, recipe vjepa2" in text
    assert "3 blocks of width 128 with 2 heads, MLP ratio 4" in text
    assert "patch       [2, 8, 8], 3 channels, rotary positions, rotary form tiled" in text
    assert "left out: encoder.module.backbone.pos_embed (legacy position table" in text
    for role in ("encoder", "target_encoder", "predictor"):
        for name, tensor in read_weights(str(tiny)).role(role).items():
            assert f"  {name} {list(tensor.shape)}" in text
    assert "heads assumed: encoder 2 (64 wide), predictor 2" in text
    assert main(["inspect", str(tiny), "--heads", "4", "--predictor-heads", "8"]) == 0
    text = capsys.readouterr().out
    assert "3 blocks of width 128 with 4 heads" in text
    assert "2 blocks of width 64 with 8 heads" in text
    assert "heads assumed" not in text
    assert "heads: expected at least 1, found 0" in exit_line(["inspect", str(tiny), "--heads", "0"], capsys)
    assert main(["inspect", str(own_checkpoint(tmp_path, config()))]) == 0
    assert "saw         2 participants" in capsys.readouterr().out


def test_an_error_is_one_line_and_exit_code_2(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["import", str(tiny), "--config", str(SMOKE), "model.size=s"]
    with pytest.raises(SystemExit) as stop:
        run_cli(lambda: main([*command, "--out", str(tmp_path / "x.pt"), "model.rope=tiled"]))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "model.size s: expected" in error
    assert not (tmp_path / "x.pt").exists()
    for damage, message in [("model.sise=s", "model.sise: unknown key"), ("model.rope=round", "model.rope")]:
        with pytest.raises(ConfigError, match=message):
            main([*command, "--out", str(tmp_path / "x.pt"), damage])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--portable", "x"], "--checkpoint: expected a checkpoint, or a head by --head, found neither"),
        (["--head", "h", "--out", "x"], "--head: expected it with --portable and --which target"),
        (["--head", "h", "--portable", "x", "--which", "context"], "--head: expected it with --portable"),
    ],
)
def test_words_of_export_that_do_not_go_together(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
