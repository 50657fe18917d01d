"""Alarms: they read the logged numbers, say in words that features collapse, and name what to try.

In: every line of metrics, in order, and nothing else. Out: alarms, and `alarm/...` fields that are 1 while
one holds. Alarms do not stop a run; pretraining.gauges.monitor has the two checks that do.

`alarm/collapse`, each sign a statement about features, not about one model:
  rank     train/rankme or val/rankme under RANK_FALL of the highest so far: most directions in use are gone.
           The highest, not the first, since what was learned may collapse too. In validation, of the target's
           features, recipes without a regulariser lose three of four without collapsing. Blind to features
           that shrink to a point in proportion. Not for fixed targets: mae's rank falls to a tenth with
           probes as good as anybody's (docs/LOG.md). Under
           NEIGHBOUR_RANK_FALL with method.neighbour_weight: good runs come to 17 %, a planted one to 10 %.
  few      either rank under RANK_FLOOR, whatever came before: a run may start collapsed.
  spread   train/feature_std under SPREAD_FLOOR. Unit vectors have variance + |mean|^2 = 1, so 0.1 says that
           99 % of the energy of every feature vector is one and the same vector. Or under NARROW_SPREAD with
           train/feature_cosine over ALIKE: what little spread there is lies within volumes, not between them.
           Not where nothing is hidden: features that point one way tell their fixed targets all the same.
  volume   train/volume_share under VOLUME_FLOOR: a table by position removes 90 % of what a constant leaves.
`alarm/leak`, a prediction that sees its targets:
  moves    val/leak over LEAK_LIMIT: the prediction changes when nothing but its targets' voxels does.
           Rounding is far below, and any path from a target to its prediction above, learned or not.
  perfect  val/skill_position over PERFECT_SKILL: even the noise in the views is more than that leaves. Not
           where nothing is hidden.
A sign counts after PERSISTENCE log lines in a row, or two validations; val/leak, which has no noise, at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

RANK_FALL = {"train/rankme": 0.25, "val/rankme": 0.15}
NEIGHBOUR_RANK_FALL = {"train/rankme": 0.13, "val/rankme": 0.13}
RANK_FLOOR = 2.5  # six runs of mae with useful features came down to 3.1 (python -m benchmarks.evidence)
SPREAD_FLOOR = 0.1
NARROW_SPREAD, ALIKE = 0.3, 0.98  # eyes of one device are alike too, at .41 and more (docs/LOG.md)
VOLUME_FLOOR = 0.1
LEAK_LIMIT = 1e-3
PERFECT_SKILL = 0.95
PERSISTENCE = 3
VAL_PERSISTENCE = {"val/rankme": 2, "val/skill_position": 2, "val/leak": 1}

BOUNDS = {  # metric: least, most, and what a value outside means
    "train/feature_std": (SPREAD_FLOOR, math.inf, "all features point one way"),
    "train/volume_share": (VOLUME_FLOOR, math.inf, "targets hold little but their position"),
    "val/skill_position": (-math.inf, PERFECT_SKILL, "nearer to the target than anything learned is"),
    "val/leak": (-math.inf, LEAK_LIMIT, "the prediction moves with the voxels of its targets"),
}
HEADLINE = {"collapse": "features collapse", "leak": "context sees targets"}
TRY = {
    "collapse": "try a lower optim.base_lr, or method.regulariser vicreg with a larger weight",
    "leak": "check the masks, and that nothing hands the target to the predictor",
}
OF_LATENTS = ", or a higher method.ema_base"
SIGNS = {
    "collapse": ("train/rankme", "val/rankme", "train/feature_std", "train/volume_share"),
    "leak": ("val/skill_position", "val/leak"),
}
OF_HIDDEN = ("train/feature_std", "val/skill_position")  # no signs where nothing is hidden
SHOWN = SIGNS["collapse"] + SIGNS["leak"]


@dataclass(frozen=True)
class Alarm:
    """One alarm as it began."""

    name: str
    step: int
    text: str


class Alarms:
    """Reads the history of a run one line at a time; its state is saved with the run. `has_fixed_targets`:
    what is predicted does not move with the encoder, so that a fall of the rank is not a sign.
    `has_neighbours`: every feature has a loss on its voxels, so that less of a rank is enough.
    """

    def __init__(
        self, has_fixed_targets: bool = False, has_neighbours: bool = False, has_hidden: bool = True
    ) -> None:
        self.has_fixed_targets, self.has_hidden = has_fixed_targets, has_hidden
        self.advice = TRY if has_fixed_targets else TRY | {"collapse": TRY["collapse"] + OF_LATENTS}
        self.rank_fall = NEIGHBOUR_RANK_FALL if has_neighbours else RANK_FALL
        self.raised: list[Alarm] = []
        self._seen: dict[str, float] = {}  # the newest value of what a text shows
        self._highest: dict[str, float] = {}  # of each rank
        self._in_a_row: dict[str, int] = {}  # lines that showed a sign, by metric

    def update(self, step: int, values: Mapping[str, float | None]) -> list[Alarm]:
        """Read the metrics of a line; returns the alarms that begin with it."""
        before = self.states()
        known = {key: v for key, v in values.items() if v is not None and math.isfinite(v)}
        self._seen |= {key: known[key] for key in SHOWN if key in known}
        shown = self._signs(known)
        for key in SHOWN:
            if key in known:
                self._in_a_row[key] = self._in_a_row.get(key, 0) + 1 if key in shown else 0
        begun = []
        for name, state in self.states().items():
            if state > before[name]:
                alarm = name.removeprefix("alarm/")
                words = [shown[key] for key in SIGNS[alarm] if self._holds(key) and key in shown]
                numbers = ", ".join(f"{key} {self._seen[key]:.3g}" for key in SHOWN if key in self._seen)
                text = f"{HEADLINE[alarm]}: {'; '.join(words)} (seen: {numbers}); {self.advice[alarm]}"
                begun.append(Alarm(alarm, step, text))
        self.raised += begun
        return begun

    def states(self) -> dict[str, float]:
        """`alarm/NAME`: 1 while a sign of it holds, else 0."""
        return {f"alarm/{name}": float(any(map(self._holds, keys))) for name, keys in SIGNS.items()}

    def _holds(self, key: str) -> bool:
        return self._in_a_row.get(key, 0) >= VAL_PERSISTENCE.get(key, PERSISTENCE)

    def _signs(self, values: Mapping[str, float]) -> dict[str, str]:
        """The metrics of this line that show collapse or a leak, each with words for it."""
        active = {}
        for key, fall in self.rank_fall.items():
            rank = values.get(key)
            if rank is None:
                continue
            highest = self._highest[key] = max(rank, self._highest.get(key, rank))
            if rank < RANK_FLOOR:
                active[key] = f"{key} is {rank:.1f}: hardly any direction is in use"
            elif rank < fall * highest and not self.has_fixed_targets:
                share = rank / highest
                active[key] = f"{key} fell from {highest:.1f} to {rank:.1f} ({share:.0%} of its highest)"
        for key, (low, high, meaning) in BOUNDS.items():
            if (value := values.get(key)) is not None and not low <= value <= high:
                active[key] = f"{meaning}, {key} is {value:.3g}"
        spread, cosine = (values.get(f"train/feature_{name}") for name in ("std", "cosine"))
        if spread is not None and cosine is not None and spread < NARROW_SPREAD and cosine > ALIKE:
            text = (
                f"volumes are alike, train/feature_cosine is {cosine:.3f} and train/feature_std {spread:.3f}"
            )
            active.setdefault("train/feature_std", text)
        return {key: text for key, text in active.items() if self.has_hidden or key not in OF_HIDDEN}

    def state_dict(self) -> dict[str, Any]:
        return {
            "raised": [asdict(alarm) for alarm in self.raised],
            "seen": dict(self._seen),
            "highest": dict(self._highest),
            "in_a_row": dict(self._in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.raised = [Alarm(**alarm) for alarm in state["raised"]]
        self._seen = dict(state["seen"])
        self._highest = dict(state["highest"])
        self._in_a_row = dict(state["in_a_row"])


def closing(raised: Sequence[Alarm]) -> list[str]:
    """What the last lines of a run say about its alarms."""
    if not raised:
        return ["no alarm"]
    return [f"alarm at step {alarm.step}: {alarm.text}" for alarm in raised]
