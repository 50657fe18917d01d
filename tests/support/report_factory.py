"""A run directory as the stages write it, small and made by hand: for tests of the report."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from models.probes.intervals import verdict
from utils.report.pictures import Snapshot, save_snapshot

GRID, PATCH = (4, 12, 8), (4, 8, 8)


GROUP = {
    "kept": 48,
    "rejected": {"missing_file": 1, "truncated_pixel_data": 2},
    "shape_before": [32, 256, 128],
    "spacing_before": [0.19, 0.0078, 0.0469],
    "spacing_after": [0.375, 0.024, 0.09375],
    "valid_fraction": 0.9312345,
    "lost_fraction": 0.01,
    "spacing_source": {"frame_positions": 48},
    "orientation_source": {"unknown": 48},
}


def write_snapshot(path: Path, title: str = "step 200, row 3") -> None:
    """A curved bright band: features follow the distance to it, the last two token columns are outside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_snapshot(title))


@cache
def _snapshot(title: str) -> bytes:
    d, h, w = np.meshgrid(*(np.arange(g * p) for g, p in zip(GRID, PATCH, strict=True)), indexing="ij")
    depth = h - 40 - 0.01 * (w - 30) ** 2 - d
    noise = np.random.default_rng(0).uniform(0.6, 1.0, d.shape)
    volume = 230 * noise * np.where((depth > 0) & (depth < 22), np.exp(-depth / 15), 0.08)
    tokens = depth.reshape(4, 4, 12, 8, 8, 8).mean(axis=(1, 3, 5)).ravel()
    order = np.random.default_rng(0).permutation(tokens.size)
    valid = np.ones(GRID)
    valid[:, :, -2:] = 0
    with TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.npz"
        snapshot = Snapshot(
            volume=volume.astype(np.uint8),
            context=order[:150],
            target=order[150:260],
            grid=GRID,
            patch=PATCH,
            spacing=(0.375, 0.024, 0.09375),
            features=np.stack([np.sin(tokens * f) for f in np.linspace(0.01, 0.2, 12)], axis=1),
            valid=valid.ravel(),
            title=title,
        )
        save_snapshot(path, snapshot)
        return path.read_bytes()


def evaluation_json(low: float, high: float) -> dict:
    """evaluation.json of a checkpoint's classes: the parts that the report reads."""

    def row(name: str, label: str, value: float) -> dict:
        area = {"value": 0.7, "ci95": [0.6, 0.8]} if name == "pretrained" else {"value": None, "ci95": None}
        accuracy = {"value": value, "ci95": [value - 0.1, value + 0.1]}
        return {
            "name": name,
            "label": label,
            "metrics": {"balanced_accuracy": accuracy, "macro_auroc": area},
            "chosen_c": 0.01,
            "val_score": 0.5,
            "num_features": 384,
        }

    mean = (low + high) / 2
    return {
        "title": "study_group: 4 classes, 31 participants; split test of the official splits",
        "subject": {"name": "probe", "url": "checkpoints/best_probe.pt", "step": 150},
        "kind": "classification",
        "names": ["a", "b", "c", "d"],
        "n_participants": 31,
        "rows": [
            row("pretrained", "pre-trained encoder", 0.5 + mean),
            row("random_init", "random initialisation", 0.5),
            row("voxel_pca", "raw-voxel PCA", 0.3),
        ],
        "difference": {
            "rows": ["pretrained", "random_init"],
            "metric": "balanced_accuracy",
            "mean": mean,
            "ci95": [low, high],
            "could_have_shown": 0.1,
        },
        "verdict": verdict(mean, (low, high)),
        "cautions": ["OVERLAP: pre-training saw 3 of the evaluated participants."],
        "notes": ["Random initialisation: best of 3 seeds on validation participants."],
    }


def write_run(path: Path) -> Path:
    """A healthy run of 200 steps with pictures of one volume, without an evaluation."""
    path.mkdir()
    lines = []
    for step in range(10, 201, 10):
        line = {
            "step": step,
            "train/loss": 0.7 - 0.001 * step,
            "train/lr": 5e-4 * min(1, step / 20),
            "train/grad_norm": 1 / step,
            "train/ema_momentum": 0.96,
            "ema/init_weight": 0.96**step,
            "train/feature_std": 0.8,
            "val/skill_mean": None if step == 10 else 0.3,
            "val/skill_position": 0.001 * step,
            "train/skill_position": -0.5,
            "perf/volumes_per_s": float(step),
            "perf/data_wait_fraction": 0.02,
            "perf/forward_fraction": 0.98,
            "perf/mfu": 0.25,
            "perf/gauges_fraction": 0.0001 * step,
        }
        if step % 50 == 0:
            line |= {"val/loss": 0.6, "val/rankme": 10 + step / 10, "val/probe": 0.4}
        lines.append(json.dumps(line))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "config.yaml").write_text("experiment_name: my_run\nnote: <b>not bold</b>\n")
    (path / "provenance.json").write_text(json.dumps({"commit": "abc", "packages": {"torch": "2.9.1"}}))
    (path / "prepare_report.json").write_text(
        json.dumps(
            {
                "synthetic": True,
                "run": {"seconds": 1.5, "audit": None},
                "kept": 48,
                "rejected": {"missing_file": 1, "truncated_pixel_data": 2},
                "by_device": {"zeiss_cirrus": GROUP},
                "by_protocol": {"cirrus_mac_oct_oct": GROUP},
                "participants": {"train": 16, "test": 8},
            }
        )
    )
    (path / "stages.tsv").write_text("prepare\t10.0\ntrain\t100.5\nprepare\t2.25\n")
    write_snapshot(path / "snapshots" / "step_00000000_row_000003.npz", "step 0, row 3")
    write_snapshot(path / "snapshots" / "step_00000200_row_000003.npz")
    return path


def own_part(page: Path) -> str:
    """The text of a page without plotly.js, whose authors' names stand in it."""
    before, _, rest = page.read_text().partition("<script>/**\n* plotly.js")
    assert rest, "plotly.js is in the page once"
    return before + rest.partition("</script>")[2]
