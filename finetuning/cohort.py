"""Who a task is learnt from and judged on: labelled volumes of the store in three folds.

In: a configuration, the store, the labels of finetuning.labels. Out: a `Cohort`: for every volume its row in
the store, its fold, its target and whom its prediction is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TRAIN, VAL, EVALUATED = 0, 1, 2


@dataclass(frozen=True)
class Cohort:
    """Labelled volumes of the folds, each fold in store order; no person is in two folds.

    With eval.split=val the rows of val come twice: as VAL and as EVALUATED.
    """

    kind: str  # of cfg.task.kind
    names: tuple[str, ...]  # classes (ordinal: lowest first), labels of multilabel, or the one value's column
    rows: np.ndarray  # store rows [n]
    fold: np.ndarray  # TRAIN, VAL or EVALUATED [n]
    target: np.ndarray  # float64 [n, T]: a class number or a value (T = 1); multilabel: 0 or 1 a name
    unit: np.ndarray  # str [n]: whom the prediction is for: SOP instance, PERSON_L or PERSON_R, or person
    person: np.ndarray  # str [n]
    unmatched: tuple[str, ...] = ()  # ids of the labels' table that the store does not have

    @property
    def num_outputs(self) -> int:
        """Numbers that a head predicts: one a class, one a label, or one value."""
        return 1 if self.kind == "regression" else len(self.names)
