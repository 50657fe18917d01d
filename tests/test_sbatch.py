"""docs/guides/train.sbatch with stand-ins for srun and scontrol: what it starts, when it requeues the job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "train.sbatch"
STAND_INS = {
    "srun": 'SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 "$@"',
    "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT: $*"; exit $CODE',
    "scontrol": '[ "$1" = show ] && printf "node7\\nnode8\\n" || echo "scontrol $*"',
}


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [
        *((0, 0, False), (1, 0, False), (2, 0, False)),
        *((75, 9, True), (76, 9, True), (143, 9, True)),
        *((137, 0, True), (137, 4, True), (137, 5, False)),
    ],
)
def test_a_job_goes_back_where_it_helps(code: int, restarts: int, is_requeued: bool, tmp_path: Path) -> None:
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "20017", "SLURM_JOB_NODELIST": "node[7-8]", "CODE": str(code)}
    job |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}  # a first start has none
    done = subprocess.run(
        ["bash", str(FILE), "configs/smoke_test.yaml", "run.dir=runs/my run"],
        env=os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    started = "3 1 4 node7 20017: -m pretraining.train --config configs/smoke_test.yaml run.dir=runs/my run"
    assert done.stdout.splitlines()[0] == started
    assert done.returncode == code
    assert ("scontrol requeue 20017" in done.stdout) == is_requeued
    options = FILE.read_text()
    for option in ("--requeue", "--signal=TERM@300", "--open-mode=append"):
        assert f"#SBATCH {option}\n" in options
