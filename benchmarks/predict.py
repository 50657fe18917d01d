"""What finetuning.predict costs a file, imports apart: reading, one forward of the encoder, the picture.

    python -m benchmarks.predict --dicom FILE [--config configs/pretrain_oct_vjepa2.yaml] [--keep DIR]

The encoder and the linear head are random, of the configuration's size, with a training set of noise to be
far from: the same work as a trained one, and a prediction that means nothing. Wall time; the first file pays
for torch's warm-up and for opening the head.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe
from data_setup.store.format import NORMALISATION, geometry_of
from finetuning.features.familiarity import fit_familiarity
from finetuning.heads.calibration import Calibration
from finetuning.heads.head_file import write_head
from finetuning.prediction.run import Scans, predict
from models.heads import build_head
from models.vjepa3d import VJEPA3D
from utils.checkpoint import CheckpointWriter, load_checkpoint
from utils.cli import run_cli
from utils.config.load import load_config, to_yaml
from utils.config.schema import Config
from utils.help_pages import Parser

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "pretrain_oct_vjepa2.yaml"
NAMES = ("healthy", "pre-diabetes", "oral medication", "insulin")
GOAL_S = 30.0
TRAINING_VOLUMES = 40


def make_head(cfg: Config, folder: Path) -> str:
    """A random checkpoint and a random head on it; returns the head's URL."""
    torch.manual_seed(0)
    model = VJEPA3D(cfg)
    writer = CheckpointWriter(str(folder / "encoder"), keep_last=1)
    content = {"step": 0, "model": model.state_dict(), "config": to_yaml(cfg)}
    writer.save(content | {"normalisation": NORMALISATION, "participants": []}, ["best_probe"])
    writer.close()
    url = str(folder / "encoder" / "best_probe.pt")
    width = model.encoder.width
    head = build_head("linear", width, len(NAMES), 8, 0.0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    noise = np.random.default_rng(0).normal(size=(TRAINING_VOLUMES, 2 * width))
    familiarity = fit_familiarity(noise, np.arange(TRAINING_VOLUMES).astype(str))
    assert familiarity is not None
    return write_head(
        cfg,
        {
            "kind": "head",
            "step": 0,
            "head": head.state_dict(),
            "head_kind": "linear",
            "hidden": 8,
            "dropout": 0.0,
            "num_outputs": len(NAMES),
            "task": {
                "kind": "classification",
                "names": list(NAMES),
                "label_column": "study_group",
                "unit": "participant",
            },
            "encoder": {"url": url, "checksum": load_checkpoint(url)["checksum"]},
            "encoder_weights": None,
            "normalisation": NORMALISATION,
            "geometry": geometry_of(cfg.spatial),
            "config": to_yaml(cfg),
            "standardise": None,
            "participants": {"train": [], "val": []},
            "pretraining_participants": [],
            "validation": {"epoch": 0, "score": 0.0},
            "calibration": Calibration(1.4, None, 60, 1.36, 1.31).state(),
            "familiarity": familiarity.state(),
        },
    )


def main() -> None:
    """Predict the files, and print how long one took."""
    parser = Parser(
        prog="python -m benchmarks.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dicom", nargs="+", required=True, metavar="FILE_OR_FOLDER")
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--keep", metavar="DIR", help="where predictions and pictures stay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        place = [f"train.ckpt_dir={root}/head", "data.workers=0", f"run.dir={root}/run"]
        cfg = load_config(args.config, [*place, f"data.store={root}/store", "train.use_bf16=false"])
        url = make_head(cfg, Path(root))
        out = Path(args.keep or f"{root}/out")
        start, used = time.perf_counter(), time.process_time()
        predict(url, Scans(args.dicom), None, str(out), False, [])
        seconds, used = time.perf_counter() - start, time.process_time() - used
        count = len((out / "predictions.jsonl").read_text().splitlines())
    print(describe())
    print(
        f"{count} files on {list(cfg.spatial.image_size)}, model {cfg.model.size}: {seconds / count:.1f} s "
        f"each (goal {GOAL_S:.0f}), {used / count:.1f} s of CPU, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    run_cli(main)
