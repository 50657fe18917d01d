"""A thinned layer in a disc of known place: `python -m data_setup.phantom --thin LAYER`.

In: the people of a phantom. Out: half of each split are thinned in both eyes, at a place of each eye's own,
whatever their class. Everybody has one macular scan of each eye, and as many people are tested as are trained
on: maps of a head are scored on eyes, not on people. thinned.tsv has the label of each person; a truth file
of a thinned eye also has the surfaces that it would have had, in the same place and with the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_setup.phantom.cohort import Participant, Scan, spread_splits
from data_setup.protocols import PROTOCOLS

# of anatomy.LAYERS; the pigment epithelium is a band of one thickness
THINNABLE = ("RNFL", "GCL", "IPL", "INL", "OPL", "ONL", "MYOID", "OS", "CHOROID")
FILE, COLUMN = "thinned.tsv", "thinned"
SPLITS = {"train": 0.45, "val": 0.10, "test": 0.45}
LOSS, MOST_LOSS = 0.6, 0.95  # of the layer's thickness, in the disc
RADIUS_MM = (0.9, 1.3)
MAX_FROM_FOVEA_MM = 1.2  # of the disc's centre
EDGE = 8  # power of the disc's profile: flat inside, nothing at 1.3 radii


@dataclass(frozen=True)
class Thinning:
    """A disc of an eye's fundus where a layer has lost a share of its thickness."""

    layer: int  # place in anatomy.LAYERS
    u_mm: float
    v_mm: float
    radius_mm: float
    loss: float

    def remaining(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The share of the thickness that is there at fundus positions u, v [D, W] in mm."""
        distance = np.hypot(u - self.u_mm, v - self.v_mm) / self.radius_mm
        return 1 - self.loss * np.exp(-(distance**EDGE))


def draw_thinning(layer: int, rng: np.random.Generator, loss: float = LOSS) -> Thinning:
    """The disc of one eye: its centre is evenly distributed around the fovea."""
    angle = rng.uniform(0, 2 * np.pi)
    distance = MAX_FROM_FOVEA_MM * np.sqrt(rng.uniform())
    u, v = distance * np.cos(angle), distance * np.sin(angle)
    return Thinning(layer, float(u), float(v), float(rng.uniform(*RADIUS_MM)), loss)


def plan_thinning(people: list[Participant], seed: int) -> tuple[list[Participant], frozenset[str]]:
    """The same people with splits and scans for --thin, and the ids of those who are thinned."""
    macular = [p for p in PROTOCOLS if p.is_volume and p.region.startswith("Macula")]
    rng = np.random.default_rng([seed, 0xD1])
    order = sorted(people, key=lambda p: p.index)
    splits = spread_splits(len(order), SPLITS)
    planned: list[Participant] = []
    thinned: set[str] = set()
    for split in SPLITS:
        members = [p for p, name in zip(order, splits, strict=True) if name == split]
        chosen = rng.permutation(len(members))[: len(members) // 2]
        thinned |= {members[place].person_id for place in chosen.tolist()}
        for rank in rng.permutation(len(members)).tolist():
            protocol = macular[len(planned) % len(macular)]
            scans = tuple(Scan(protocol, side, 0, index) for index, side in enumerate("RL"))
            planned.append(replace(members[rank], split=split, scans=scans))
    return sorted(planned, key=lambda p: p.person_id), frozenset(thinned)


def write_thinned(out: Path, people: list[Participant], thinned: frozenset[str]) -> None:
    """The labels, for task.labels_path=TREE/thinned.tsv and task.label_column=thinned."""
    lines = [f"person_id\t{COLUMN}"]
    lines += [f"{p.person_id}\t{'yes' if p.person_id in thinned else 'no'}" for p in people]
    (out / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
