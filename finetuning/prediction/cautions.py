"""What weakens a prediction, from what was measured of its volume.

In: the fields of a volume, those of the store's index; a Familiarity and the distance percentile. Out: lines
for people. A volume that no line warns of is not thereby a good one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_setup.protocols import PROTOCOLS
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


def cautions_of(fields: Mapping[str, Any], percentile: float | None) -> list[str]:
    """Warnings of one volume; `percentile` of its feature distance, None where the head knows none."""
    texts = _spacing(fields)
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
    if percentile is not None and percentile >= FAR_PERCENTILE:
        texts.append(
            f"features farther from the training set than {percentile:.0f} % of its own held-out volumes"
        )
    return texts


def _spacing(fields: Mapping[str, Any]) -> list[str]:
    """Axes whose acquired spacing lies outside that of all known protocols."""
    texts = []
    for place, (axis, what) in enumerate(AXES.items()):
        known = [protocol.spacing_mm[place] for protocol in PROTOCOLS if protocol.is_volume]
        low, high = min(known) / SPACING_MARGIN, max(known) * SPACING_MARGIN
        value = float(fields[f"spacing_before_{axis}"])
        if not low <= value <= high:
            texts.append(
                f"spacing {what}: {1000 * value:.1f} um, outside {1000 * low:.1f} to {1000 * high:.1f} um, "
                "the range of known protocols"
            )
    return texts
