"""same_eye.md: the page of one comparison of scanners.

In: the content of same_eye.json. Out: Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("same_eye_other_device", "other_eye_same_device", "other_eye_other_device")


def markdown(result: dict[str, Any]) -> str:
    """The page: who was compared, robustness, thickness of a phantom, the outputs of a head."""
    lines = [
        "# Same eye, many scanners",
        "",
        f"{result['n_volumes']} volumes of {result['n_eyes']} eyes of {result['n_participants']} "
        f"participants of split {result['split']}; {result['n_complete_eyes']} eyes were photographed by all "
        f"{len(result['protocols'])} devices: "
        + ", ".join(f"{device} ({protocol})" for device, protocol in result["protocols"].items())
        + ".",
    ]
    if result["synthetic"]:
        lines.append("A phantom: it says nothing about real retinas.")
    if result["look"] is not None:
        lines.append(f"This is look {result['look']} at these test participants.")
    if result["overlap"]:
        lines.append(f"OVERLAP: training saw {result['overlap']} of these participants.")
    chance = result["rows"][0]["robustness_chance"]
    lines += [
        "",
        "## Robustness index",
        "",
        "Of the same eye on another device and other eyes on the same device: how often the former is "
        f"nearest. 1: the eye alone; 0: the device alone; in random order {chance:.3f}. "
        "Beside it the nearest of all volumes but the fellow eye's, and the balanced accuracy of a probe "
        "for the device.",
        "",
        "| features | form | index (95 %) | nearest of all: same eye | same device | neither | device |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        shares = " | ".join(f"{row['nearest_of_all'][kind]:.3f}" for kind in KINDS)
        lines.append(
            f"| {row['label']} | {row['features']} | {_with(row['robustness'], row['robustness_ci95'])} | "
            f"{shares} | {_number(row['device_balanced_accuracy'])} |"
        )
    if any("thickness" in row for row in result["rows"]):
        lines += [
            "",
            "## Layer thickness by ridge",
            "",
            "R2 of split train's fit, less what is usual for the device; ICC(2,1) (agreement) and ICC(3,1) "
            "(consistency) of what it predicts, mean over layers, over the eyes that every device has.",
            "",
            "| features | form | R2 (95 %) | ICC(2,1) (95 %) | ICC(3,1) (95 %) |",
            "|---|---|---|---|---|",
        ]
        for row in result["rows"]:
            part = row["thickness"]
            r2 = _with(part["r2"], part["r2_ci95"])
            lines.append(f"| {row['label']} | {row['features']} | {r2} | {_agreement(part)} |")
    if "head" in result:
        head = result["head"]
        lines += [
            "",
            "## Outputs of the head",
            "",
            "| output | ICC(2,1) (95 %) | ICC(3,1) (95 %) |",
            "|---|---|---|",
        ]
        lines += [
            f"| {name} | {_number(each['icc_agreement'])} | {_number(each['icc_consistency'])} |"
            for name, each in head["each"].items()
        ]
        lines.append(f"| mean | {_agreement(head)} |")
    return "\n".join(lines)


def _agreement(part: dict[str, Any]) -> str:
    pairs = [(part[kind], part[f"{kind}_ci95"]) for kind in ("icc_agreement", "icc_consistency")]
    return " | ".join(_with(*pair) for pair in pairs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _with(value: float | None, ci95: Sequence[float] | None) -> str:
    """A value with its interval."""
    return _number(value) if ci95 is None else f"{_number(value)} ({ci95[0]:.3f} to {ci95[1]:.3f})"
