"""TPU slices that `benchmarks.tpu_fit` compiles for: what libtpu calls them and what their datasheets say.

Peaks are per device in the compiler's sense, one chip (the two cores of a v4 act as one, "megacore").
Source: the system architecture pages of Cloud TPU v4 and v5e.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """One slice: its chips, how libtpu names it, and the peaks of one chip."""

    chips: int
    hosts: int
    libtpu_name: str
    chip_config: str | None  # libtpu's word for how the cores of a chip are joined; None: its default
    hbm_gib: float
    bf16_tflop_per_s: float
    hbm_gb_per_s: float
    link_gb_per_s: float  # all links of a chip between chips, one way


def _v4(chips: int, hosts: int, shape: str) -> Topology:
    return Topology(chips, hosts, f"v4:{shape}", "megacore", 32, 275, 1200, 300)


TOPOLOGIES: dict[str, Topology] = {
    "v4-8": _v4(4, 1, "2x2x1"),  # the number in a v4's name counts cores
    "v4-32": _v4(16, 4, "2x2x4"),
    "v5e-16": Topology(16, 4, "v5e:4x4", None, 16, 197, 819, 200),
}
