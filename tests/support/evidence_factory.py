"""A small evaluation cohort of benchmarks.evidence, made by hand."""

import numpy as np

from benchmarks.evidence.cohorts import Truth, fold_of_rows


def small_truth(people: int = 40, seed: int = 0) -> Truth:
    """Two volumes a person, 8 tokens of grid (2, 2, 2) each, three layers."""
    rng = np.random.default_rng(seed)
    person = np.repeat([f"{i:03d}" for i in range(people)], 2)
    label = np.repeat(np.arange(people) % 4, 2)
    n = len(person)
    tokens = np.tile(np.arange(8), (n, 1))
    tokens[:, -1] = -1
    return Truth(
        rows=np.arange(n),
        person=person,
        protocol=np.tile(["a", "b"], people),
        label=label,
        classes=("p", "q", "r", "s"),
        thickness_um=rng.normal(size=(n, 3)) + 10 * np.tile([[0.0], [1.0]], (people, 1)),
        layers=("x", "y", "z"),
        tokens=tokens,
        occupancy=rng.random((n, 8, 3)),
        fold=fold_of_rows(person, label),
    )
