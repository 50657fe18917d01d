"""One validation of a fresh run, with every read of a volume counted by process: `python -m
tests.support.counted_validation --config FILE ...`, alone or under torchrun.

Writes run.dir/numbers_RANK.json, what `validate` returned, and for every volume read an empty file
run.dir/reads/RANK_PID_ROW_NUMBER; PID is `own` in the process that validates.
"""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np

from data_setup.store.reader import VolumeReader
from models import vit3d
from pretraining import run as run_module
from pretraining.gauges.validation import validate
from pretraining.run import open_run
from utils.cli import parse_cli
from utils.runtime.open import open_runtime

VAL_FRACTION = 0.9
RANK = os.environ.get("RANK", "0")


class CountedVolumes(VolumeReader):
    def read(self, row: int, compare: bool = False) -> np.ndarray:
        place = Path(os.environ["READS"])
        process = "own" if multiprocessing.parent_process() is None else str(os.getpid())
        number = len(list(place.glob(f"{RANK}_{process}_{row}_*")))
        (place / f"{RANK}_{process}_{row}_{number}").touch()
        return super().read(row, compare)


def main() -> None:
    cfg, _ = parse_cli("counted_validation", __doc__ or "", None)
    run_module.VAL_FRACTION = VAL_FRACTION
    vit3d.SIZES["ti"] = vit3d.Size(2, 48, 2)  # as the fixture small_encoder
    runtime = open_runtime(use_bf16=False, data_timeout_s=60.0)
    os.environ["READS"] = str(Path(cfg.run.dir) / "reads")
    Path(os.environ["READS"]).mkdir(parents=True, exist_ok=True)
    run: Any = open_run(cfg, runtime)
    run.store.volumes.__class__ = CountedVolumes
    numbers = validate(run)
    (Path(cfg.run.dir) / f"numbers_{RANK}.json").write_text(json.dumps(numbers))
    runtime.group.close()


if __name__ == "__main__":
    main()
