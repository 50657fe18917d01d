"""What weakens a prediction, from what was measured of its volume.

In: the fields of a volume, those of the store's index; a Familiarity and the distance percentile. Out: lines
for people. A volume that no line warns of is not thereby a good one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_setup.protocols import OTHER_RASTERS_MM, PROTOCOLS
from data_setup.store.summary import LOW_VALID_FRACTION
from finetuning.features.familiarity import FAR_PERCENTILE

HIGH_LOST_FRACTION = 0.25  # of the scan, outside the grid
LOW_SIGNAL_DB = 6.0  # half of what quality asks for
HIGH_CLIPPED_SHARE = 0.1
FAULTS = {  # column of the index -> (value that is warned of, the line)
    "motion_um": (30.0, "B-scans jump by {:.0f} um axially on average"),
    "missing_share": (0.05, "{:.0%} of the B-scans are blank or repeated"),
    "saturated_share": (0.05, "{:.0%} of the grey values are saturated"),
}
SPACING_MARGIN = 1.1  # beyond the protocols' own extremes
AXES = {"d": "between B-scans", "h": "axial", "w": "between A-scans"}
# what no eye of those that were measured shows (finetuning/embedding/looks.py)
UPRIGHT_SHARE, UPSIDE_DOWN_SHARE = 0.85, 0.15
INVERTED_SKEW = -0.25
DARK_GREY = 80.0
UNORDERED_SHARE = 0.75
FIELD_MM = {"d": (2.5, 16.0), "h": (1.0, 7.0), "w": (2.5, 24.0)}  # of 15 x 10 degrees to ultra-wide
ACROSS_SHARE = (0.55, 1.6)  # of a field across its B-scans, to that along them
FIELDS = {"d": "across B-scans", "h": "in depth", "w": "along B-scans"}
NO_ANSWER = "NO ANSWER: too far from what the head was trained on"


def cautions_of(fields: Mapping[str, Any], percentile: float | None) -> list[str]:
    """Warnings of one volume; `percentile` of its feature distance, None where the head knows none."""
    texts = [*_looks(fields), *_spacing(fields)]
    if fields["valid_fraction"] < LOW_VALID_FRACTION:
        texts.append(f"{fields['valid_fraction']:.0%} of the grid lies inside the scan")
    if fields["lost_fraction"] > HIGH_LOST_FRACTION:
        texts.append(f"{fields['lost_fraction']:.0%} of the scan lies outside the grid")
    if fields["orientation_source"] in ("assumed", "unknown"):
        texts.append(f"direction of the B-scans: {fields['orientation_source']}")
    if fields["signal_db"] < LOW_SIGNAL_DB:
        texts.append(f"weak signal: {fields['signal_db']:.1f} dB over the background")
    if fields["clipped_share"] > HIGH_CLIPPED_SHARE:
        texts.append(f"the retina touches the scan's edge in {fields['clipped_share']:.0%} of the A-scans")
    for name, (limit, text) in FAULTS.items():
        if fields[name] > limit:
            texts.append(text.format(fields[name]))
    if is_far(percentile):
        texts.append(
            f"features farther from the training set than {percentile:.0f} % of its held-out volumes"
        )
    return texts


def is_far(percentile: float | None) -> bool:
    """Whether a head has no answer for a volume; one that knows no distance has."""
    return percentile is not None and percentile >= FAR_PERCENTILE


def _looks(fields: Mapping[str, Any]) -> list[str]:
    """What is no retina, or not as devices write it; nothing of a volume whose frames were not looked at."""
    if "upright_share" not in fields:
        return []
    texts, upright = [], fields["upright_share"]
    if fields["grey_skew"] < INVERTED_SKEW:
        texts.append("grey values seem inverted: most of the scan is bright")
        upright = 1 - upright
    if upright <= UPSIDE_DOWN_SHARE:
        texts.append("the retina seems upside down: brightness rises sharply upwards, not downwards")
    elif not upright >= UPRIGHT_SHARE:
        texts.append("no layers as a retina has them: another body part, another axis, or noise")
    if fields["brightest_grey"] < DARK_GREY:
        texts.append(f"dark: 99.9 % of the grey values are {fields['brightest_grey']:.0f} of 255 or less")
    if fields["step_share"] > UNORDERED_SHARE:
        texts.append("neighbouring B-scans are as unlike as any two: they seem to be in another order")
    return [*texts, *_field(fields)]


def _field(fields: Mapping[str, Any]) -> list[str]:
    """Lengths that no raster has: another pitch than the header says, or a part of a scan."""
    texts = []
    for axis, (low, high) in FIELD_MM.items():
        if not low <= fields[f"field_{axis}"] <= high:
            texts.append(
                f"field {FIELDS[axis]}: {fields[f'field_{axis}']:.1f} mm, expected {low:g} to {high:g} mm: "
                "another spacing than the file says, or part of a scan"
            )
    across, along = fields["field_d"], fields["field_w"]
    if not ACROSS_SHARE[0] * along <= across <= ACROSS_SHARE[1] * along:
        texts.append(
            f"field {across:.1f} mm across B-scans and {along:.1f} mm along them: another spacing than the "
            "file says, or a strip"
        )
    return texts


def _spacing(fields: Mapping[str, Any]) -> list[str]:
    """Axes whose acquired spacing lies outside that of all known protocols."""
    texts = []
    for place, (axis, what) in enumerate(AXES.items()):
        known = [protocol.spacing_mm[place] for protocol in PROTOCOLS if protocol.is_volume]
        known += OTHER_RASTERS_MM[place]
        low, high = min(known) / SPACING_MARGIN, max(known) * SPACING_MARGIN
        value = float(fields[f"spacing_before_{axis}"])
        if not low <= value <= high:
            texts.append(
                f"spacing {what}: {1000 * value:.1f} um, outside {1000 * low:.1f} to {1000 * high:.1f} um, "
                "the range of known protocols"
            )
    return texts
