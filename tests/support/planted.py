"""The training command with faults planted: `python -m tests.support.planted --config FILE ...`, and
PLANTED={...}.

PLANTED is JSON. {"rank": R, "out_of_memory_above": B}: on rank R a trial step of more than B volumes does
not fit. {"seen": DIR}: every process appends "step row row ..." of each step to DIR/RANK. {"nan_steps":
[...]}: the loss of these steps is NaN. {"pause_s": S}: every step takes S longer. {"impatient": true}: a
bucket that fails is given up within a second. {"max_bad_steps": N}: skipped_updates.MAX_BAD_STEPS.
{"grace_s": S}: loader.GRACE_S. {"data_s": S, "stall_s": S}: those of patience. {"hang_row": R}: a loader
worker never finishes reading row R of the store. {"no_pickle": true}: whatever reads a pickle fails.
"""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_setup import loader
from data_setup.store.reader import VolumeReader
from models.vjepa3d import Output
from pretraining import step as step_module
from pretraining import train as loop
from tests.support.planted_pickle import forbid_pickle
from utils.cli import run_cli
from utils.run import skipped_updates
from utils.runtime import patience
from utils.storage import clients as cloud

PLANTED: dict[str, Any] = json.loads(os.environ.get("PLANTED", "{}"))
RANK = int(os.environ.get("RANK", "0"))


def plant() -> None:
    real_trial, real_step, real_predict = loop.trial_step, loop.train_step, step_module.predict
    limit = PLANTED.get("out_of_memory_above", math.inf) if PLANTED.get("rank", RANK) == RANK else math.inf
    current = [-1]  # the step that is going on; the trial step is none

    def trial_step(model: Any, optimizer: Any, batch: dict, *rest: Any) -> None:
        if len(batch["row"]) > limit:
            raise torch.OutOfMemoryError("planted")
        real_trial(model, optimizer, batch, *rest)

    def train_step(
        model: Any, optimizer: Any, batches: list[dict], cfg: Any, runtime: Any, update: Any, *rest: Any
    ):
        time.sleep(PLANTED.get("pause_s", 0))
        current[0] = update.step
        if "seen" in PLANTED:
            rows = [row for batch in batches for row in batch["row"].tolist()]
            with (Path(PLANTED["seen"]) / str(RANK)).open("a") as file:
                print(update.step, *rows, file=file)
        return real_step(model, optimizer, batches, cfg, runtime, update, *rest)

    def predict(*args: Any, **kwargs: Any) -> Output:
        output = real_predict(*args, **kwargs)
        is_planted = current[0] in PLANTED.get("nan_steps", ()) and kwargs["stochastic"]
        return replace(output, loss_B=output.loss_B * math.nan) if is_planted else output

    if PLANTED.get("impatient"):
        cloud.POLICY = replace(cloud.POLICY, attempts=2, first_wait_s=0.01)
    if PLANTED.get("no_pickle"):
        forbid_pickle(writing=False)  # torch.save writes one, which torch.load reads by code of its own
    loader.GRACE_S = PLANTED.get("grace_s", loader.GRACE_S)
    patience.DATA_S = PLANTED.get("data_s", patience.DATA_S)
    patience.STALL_S = PLANTED.get("stall_s", patience.STALL_S)
    skipped_updates.MAX_BAD_STEPS = PLANTED.get("max_bad_steps", skipped_updates.MAX_BAD_STEPS)
    loop.trial_step, loop.train_step, step_module.predict = trial_step, train_step, predict


def hang() -> None:
    """In a loader worker, which imports this module under another name."""
    real_read = VolumeReader.read

    def read(volumes: VolumeReader, row: int, compare: bool = False) -> Any:
        if row == PLANTED["hang_row"]:
            time.sleep(3600)
        return real_read(volumes, row, compare)

    VolumeReader.read = read  # the fault is this method


if __name__ == "__mp_main__" and "hang_row" in PLANTED:
    hang()
if __name__ == "__main__":
    plant()
    run_cli(loop.main)
