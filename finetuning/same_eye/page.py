"""same_eye.md: the page of one comparison of scanners.

In: the content of same_eye.json. Out: Markdown.
"""

from __future__ import annotations

from typing import Any

from finetuning.answers.answer import looks
from utils.tables import Table, number, page, with_interval

ICC = ("ICC(2,1) (95 %)", "ICC(3,1) (95 %)")
KINDS = ("same_eye_other_device", "other_eye_same_device", "other_eye_other_device")


def markdown(result: dict[str, Any]) -> str:
    """The page: who was compared, robustness, thickness of a phantom, the outputs of a head."""
    protocols = ", ".join(f"{device} ({protocol})" for device, protocol in result["protocols"].items())
    lines = [
        f"{result['n_volumes']} volumes of {result['n_eyes']} eyes of {result['n_participants']} "
        f"participants of split {result['split']}; {result['n_complete_eyes']} eyes were photographed by all "
        f"{len(result['protocols'])} devices: {protocols}.",
        *(["A phantom: it says nothing about real retinas."] if result["synthetic"] else []),
    ]
    tables = [_robustness(result)]
    if any("thickness" in row for row in result["rows"]):
        tables.append(_thickness(result))
    if "head" in result:
        rows = [
            [name, number(each["icc_agreement"]), number(each["icc_consistency"])]
            for name, each in result["head"]["each"].items()
        ]
        rows.append(["mean", *_agreement(result["head"])])
        tables.append(Table("Outputs of the head", ["output", *ICC], rows))
    return page("Same eye, many scanners", lines, looks(result), tables)


def _robustness(result: dict[str, Any]) -> Table:
    note = (
        "Of the same eye on another device and other eyes on the same device: how often the former is "
        "nearest. 1: the eye alone; 0: the device alone; in random order "
        f"{number(result['rows'][0]['robustness_chance'])}. Beside it the nearest of all volumes but the "
        "fellow eye's, and the balanced accuracy of a probe for the device."
    )
    header = ["features", "form", "index (95 %)", "nearest of all: same eye", "same device", "neither"]
    rows = [
        [
            row["label"],
            row["features"],
            with_interval(row["robustness"], row["robustness_ci95"]),
            *(number(row["nearest_of_all"][kind]) for kind in KINDS),
            number(row["device_balanced_accuracy"]),
        ]
        for row in result["rows"]
    ]
    return Table("Robustness index", [*header, "device"], rows, note)


def _thickness(result: dict[str, Any]) -> Table:
    note = (
        "R2 of split train's fit, less what is usual for the device; ICC(2,1) (agreement) and ICC(3,1) "
        "(consistency) of what it predicts, mean over layers, over the eyes that every device has."
    )
    rows = []
    for row in result["rows"]:
        part = row["thickness"]
        r2 = with_interval(part["r2"], part["r2_ci95"])
        rows.append([row["label"], row["features"], r2, *_agreement(part)])
    return Table("Layer thickness by ridge", ["features", "form", "R2 (95 %)", *ICC], rows, note)


def _agreement(part: dict[str, Any]) -> list[str]:
    return [with_interval(part[kind], part[f"{kind}_ci95"]) for kind in ("icc_agreement", "icc_consistency")]
