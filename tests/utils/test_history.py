"""The history of a run whose files a power cut has spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_factory import small_config
from utils.errors import UserError
from utils.run.folder import bring_back, refuse_lost_checkpoints


def test_half_a_line_and_one_of_zeros_are_left_out(tmp_path: Path) -> None:
    cfg = small_config("vjepa2", f"run.dir={tmp_path}", f"train.ckpt_dir={tmp_path / 'checkpoints'}")
    lines = '{"step": 1}\n', "\0\0\0\0\n", '{"step": 2}\n', '{"st\n', '{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match=r"expected checkpoints of this run, which is at step 3, found none"):
        refuse_lost_checkpoints(cfg)
    (tmp_path / "checkpoints" / "history").mkdir(parents=True)
    bring_back(cfg, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == lines[0] + lines[2]
