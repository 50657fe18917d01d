"""The panels that a person should look at, in order; docs/guides/dashboard.md shows them as a table.

In: nothing. Out: names of metrics, as metrics.jsonl and the dashboards have them. A test trains a run with
W&B offline and looks for points of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from utils.help_pages import PeopleParser


@dataclass(frozen=True)
class Panel:
    """One chart over the optimizer step."""

    title: str
    metrics: tuple[str, ...]
    question: str


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Does it learn?": (
        Panel("skill", ("val/skill_position", "val/skill_mean"), "above 0 and rising: more than position"),
        Panel("probe", ("val/probe", "val/ridge"), "what the features tell of the label"),
        Panel("loss", ("train/loss", "val/loss"), "no judge of features; a jump means trouble"),
    ),
    "Does it collapse?": (
        Panel(
            "rank",
            ("train/rankme", "val/rankme", "val/lidar"),
            "a fall to a quarter raises the alarm, with `method.neighbour_weight` to 13 %",
        ),
        Panel("spread", ("train/feature_std", "train/feature_cosine"), "std near 0, or cosine near 1"),
        Panel("volume", ("train/volume_share",), "near 0: the targets hold position alone"),
        Panel("alarms", ("alarm/collapse", "alarm/leak", "val/leak"), "0 is well"),
    ),
    "Does it cheat?": (
        Panel("device", ("val/knn_device", "val/ridge_device"), "the scanner: lower is better"),
        Panel("side", ("val/knn_laterality", "val/ridge_laterality"), "the eye: near 0.5 is better"),
    ),
    "Is the update sound?": (
        Panel("gradient", ("train/grad_norm", "train/update_ratio"), "spikes, or a ratio that drifts"),
        Panel("schedule", ("train/lr", "train/ema_momentum"), "never restarts"),
        Panel("target", ("ema/init_weight", "ema/drift"), "init_weight goes to 0, drift stays above 0"),
        Panel(
            "penalty",
            ("train/regulariser", "train/penalty_to_prediction"),
            "ratio far above 1: the penalty teaches",
        ),
        Panel("skipped", ("train/bad_steps",), "updates that were not finite: 0"),
        Panel("tokens", ("train/valid_context_tokens",), "what the encoder sees of the scan, of a volume"),
    ),
    "Is it fast?": (
        Panel("speed", ("perf/volumes_per_s", "perf/step_s"), "volumes a second, seconds a step"),
        Panel("waste", ("perf/data_wait_fraction", "perf/validation_fraction"), "shares of the time"),
        Panel("machine", ("perf/mfu", "perf/peak_memory_gib"), "share of the peak rate; GiB"),
    ),
}
PICTURES = {
    "views/": "first volume of a training batch: both views; context (blue) and target (orange) over one",
    "masks/": "B-scans of a validation volume of each device, context and target over them",
    "features/": "principal components of the target's features, B-scan and en face",
    "prediction/": "targets and predictions of hidden tokens in the same colours, and their error",
    "similarity/": "cosine of all tokens with one, in the B-scan and en face",
}
COUNTS = {
    "data/devices": "training volumes of each device",
    "data/rejects": "records that preparation rejected, by reason",
}


def metrics() -> list[str]:
    """Every metric of a panel."""
    return [name for panels in SECTIONS.values() for panel in panels for name in panel.metrics]


def markdown() -> str:
    """The tables of docs/guides/dashboard.md."""
    rows = ["| section | panel | metrics | what to look for |", "|---|---|---|---|"]
    for section, panels in SECTIONS.items():
        for panel in panels:
            names = ", ".join(f"`{name}`" for name in panel.metrics)
            rows.append(f"| {section} | {panel.title} | {names} | {panel.question} |")
    rows += ["", "| media | what it shows |", "|---|---|"]
    for name, meaning in {**{f"{key}...": text for key, text in PICTURES.items()}, **COUNTS}.items():
        rows.append(f"| `{name}` | {meaning} |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page, or what it is for."""
    PeopleParser("utils.dashboards.panels", __doc__ or "").parse_args(argv)
    print(markdown(), end="")


if __name__ == "__main__":
    main()
