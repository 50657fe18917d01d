"""The curves of a report as data for plotly: each chart once, every run in it.

In: metrics of runs (utils.report.run_files). Out: dictionaries that assets/report.js draws. MAIN
charts stand open in the page, the others behind a fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from utils.report.run_files import TASK_SCORES, Points, Run

MAX_POINTS = 1500  # of a curve; longer ones are thinned, first and last point kept
# title, metric keys, what it means
CHARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "Score of the task, on validation",
        TASK_SCORES,
        "Of participants, eyes or volumes as task.unit says; the best epoch is the one that is kept.",
    ),
    (
        "Loss",
        ("train/loss", "val/loss"),
        "In pre-training a low loss proves nothing: the target moves with the encoder.",
    ),
    (
        "Skill",
        ("val/skill_position", "val/skill_mean"),
        "1 - loss / loss of the best constant, in validation: one target encoder for all, fitted on half of "
        "the participants, scored on the others. Only skill_position counts as learning: its constant is the "
        "best vector for each token position.",
    ),
    (
        "Skill in training, a moving estimate",
        ("train/skill_position", "train/skill_mean"),
        "The same of single batches, against targets of the steps before: too good while the target moves "
        "fast. It decides nothing.",
    ),
    (
        "Leak",
        ("val/leak",),
        "How far a prediction moves when nothing but the voxels of its targets changes; above 0 by more than "
        "rounding, the prediction sees its targets.",
    ),
    (
        "RankMe",
        ("val/rankme", "train/rankme"),
        "Effective number of feature directions in use, of the target encoder (val) and the context encoder "
        "(train); a fall means collapse. Before step 1 val/rankme is of fewer volumes.",
    ),
    (
        "LiDAR",
        ("val/lidar",),
        "Effective number of directions in which volumes differ by more than their masks make them differ.",
    ),
    (
        "Validation probe",
        ("val/probe", "val/ridge"),
        "Balanced accuracy of kNN and of a ridge classifier, from training to official val participants; kNN "
        "selects best_probe.pt.",
    ),
    (
        "Shortcuts",
        ("val/knn_device", "val/ridge_device", "val/knn_laterality", "val/ridge_laterality"),
        "The same probes on the scanner and on the eye: what features tell that nobody asked for.",
    ),
    ("Feature std", ("train/feature_std",), "Spread of the context features; near zero is collapse."),
    (
        "Share of the volume",
        ("train/volume_share",),
        "What the position does not tell of the targets; near zero: they hold nothing else.",
    ),
    (
        "Penalty to prediction",
        ("train/penalty_to_prediction",),
        "Norms of the two gradients at the encoder's output; far above 1 the penalty teaches.",
    ),
    ("Neighbour loss", ("train/neighbour_loss",), "Of the voxels at and beside each token that is seen."),
    ("Size of an update", ("train/update_ratio",), "Norm of the last update / norm of the weights."),
    ("Lag of the target", ("ema/drift",), "Norm of encoder - target / norm of the target."),
    ("Learning rate", ("train/lr",), "A function of the optimizer step; it never restarts."),
    ("Gradient norm", ("train/grad_norm",), "Before clipping."),
    ("Target momentum", ("train/ema_momentum",), "Share of the target encoder that each step keeps."),
    ("Initial weights in the target", ("ema/init_weight",), "Product of the momenta so far."),
    ("Volumes per second", ("perf/volumes_per_s",), "Of the whole step, data included."),
    (
        "Time for validation",
        ("perf/validation_fraction",),
        "Share of the time since this start of the run; val.max_volumes, probe.max_volumes and "
        "train.val_every_steps set it.",
    ),
    (
        "Work for gauges",
        ("perf/gauges_fraction",),
        "Counted operations of LiDAR, the check for leaks and the probes, as a share of all.",
    ),
    ("Waiting for data", ("perf/data_wait_fraction",), "Share of the time; near zero: the loader keeps up."),
    ("Model FLOPs utilisation", ("perf/mfu",), "Counted operations a second / the device's peak."),
)
MAIN = 10  # the first of CHARTS, which tell learning from collapse


def charts_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The charts of which some run logged a metric: title, caption, is_main, and a curve for each run and
    metric (run: its number, x: optimizer steps, y: values).
    """
    charts = []
    for number, (title, keys, caption) in enumerate(CHARTS):
        curves = [
            {"run": place, "name": key, **_columns(run.series[key])}
            for place, run in enumerate(runs)
            for key in keys
            if key in run.series
        ]
        if curves:
            charts.append({"title": title, "caption": caption, "is_main": number < MAIN, "curves": curves})
    return charts


def _columns(points: Points) -> dict[str, list[float]]:
    """Steps and values with six digits; every n-th point of a long curve, and its last."""
    stride = -(-len(points) // MAX_POINTS)
    kept = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
    return {"x": [step for step, _ in kept], "y": [float(f"{value:.6g}") for _, value in kept]}
