"""What finetuning.embed costs beyond the encoder: CPU time of both, on one store of noise.

    python -m benchmarks.embed [--volumes 4] [--size 32 192 192] [--model b] [--patches]

The bare encoder goes through views that are in memory; the command reads, normalises, pools and writes too.
Processor seconds of the whole process, all threads: on a machine with other work they mean more than a clock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe
from data_setup.resample import Resampled
from data_setup.store.format import RECORD_COLUMNS
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, measure
from finetuning.embedding.folder import Folder
from finetuning.embedding.run import embed_rows
from finetuning.embedding.volumes import StoreVolumes
from finetuning.features.pooled import random_encoder
from utils.cli import number_from, run_cli
from utils.config.load import load_config
from utils.config.schema import Config
from utils.help_pages import Parser
from utils.runtime.open import open_runtime

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "smoke_test.yaml"
LIMIT = 1.15


def make_store(cfg: Config, count: int) -> PreparedStore:
    """Volumes of noise, valid everywhere."""
    writer = StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, "noise", synthetic=True)
    records = [dict.fromkeys(RECORD_COLUMNS) | {"path": f"{n}", "laterality": "L"} for n in range(count)]
    rows = writer.append_records(records)
    size = cfg.spatial.image_size
    for row in rows:
        voxels = np.random.default_rng(row).integers(0, 255, size, np.uint8)
        box = (0, size[0], 0, size[1], 0, size[2])
        volume = Resampled(voxels, box, cfg.spatial.target_spacing, 0.0)
        writer.write_row(row, voxels, measure(volume) | {"status": "kept"})
    writer.finalise(rows)
    return PreparedStore.open(cfg.data.store)


def main() -> None:
    """Print both times and their ratio."""
    parser = Parser(
        prog="python -m benchmarks.embed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--volumes", type=number_from(1), default=4)
    parser.add_argument("--size", type=number_from(1), nargs=3, default=[32, 192, 192])
    parser.add_argument("--model", default="b")
    parser.add_argument("--patches", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        shape = [
            f"spatial.image_size={args.size}",
            "spatial.patch_size=[4,16,16]",
            f"model.size={args.model}",
        ]
        cfg = load_config(CONFIG, [*shape, f"data.store={root}/store"])
        volumes = StoreVolumes(make_store(cfg, args.volumes))
        runtime = open_runtime(use_bf16=False)
        encoder = random_encoder(cfg, 0).to(runtime.device)
        view = torch.randn(1, 1, *args.size, device=runtime.device)
        folder = Folder(f"{root}/out", cfg.data.storage_options, args.patches)
        folder.begin({}, args.volumes, (encoder.num_tokens, encoder.width))
        with torch.no_grad():
            encoder(view)
            start = time.process_time()
            for _ in range(args.volumes):
                encoder(view)
        bare = time.process_time() - start
        start = time.process_time()
        embed_rows(encoder, cfg, volumes, volumes.rows, folder, runtime)
        whole = time.process_time() - start
    print(describe())
    print(
        f"{args.volumes} volumes {args.size}, model {args.model}: encoder {bare / args.volumes:.2f} s of CPU "
        f"a volume, command {whole / args.volumes:.2f} s, ratio {whole / bare:.3f} (goal {LIMIT})"
    )


if __name__ == "__main__":
    run_cli(main)
