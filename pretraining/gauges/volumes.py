"""Which volumes a validation reads, and each process's share of them.

In: a run. Out: rows, and batches of them on the device. All processes of a run have as many batches: each
reads its part of the rows with the workers of data_setup.loader, none in the training process (where
data.workers is above 0), and what it computes is collected from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from data_setup.loader import VALIDATION_SEED, Batch
from data_setup.store.reader import PreparedStore
from pretraining.run import Run
from utils.config.schema import Config
from utils.indices import evenly_spaced

Load = Callable[[Config, PreparedStore, np.ndarray, int], Iterator[Batch]]  # of data_setup.loader


def participants_in_turn(rows: np.ndarray, person_of_row: Mapping[int, str], limit: int) -> np.ndarray:
    """At most `limit` rows: one of every participant, then a second of each, and so on, in an order that is
    drawn once for all runs. A smaller limit gives the beginning of a larger one's.
    """
    rng = np.random.default_rng(VALIDATION_SEED)
    turns: dict[str, int] = {}
    order = []
    for row in rng.permutation(np.sort(rows)).tolist():
        person = person_of_row[row]
        order.append((turns.setdefault(person, 0), row))
        turns[person] += 1
    return np.array([row for _, row in sorted(order, key=lambda entry: entry[0])[:limit]], dtype=int)


def quarters(people: Sequence[str]) -> np.ndarray:
    """0..3 for every volume: the same for all volumes of a participant, as many participants in each."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(person, len(number)) % 4 for person in people], dtype=int)


def choose_rows(side: np.ndarray, label_of_row: Mapping[int, str], limit: int) -> np.ndarray:
    """At most `limit` rows, evenly spread: of those with a label where any has one."""
    labelled = np.array([int(r) for r in side if int(r) in label_of_row], dtype=int)
    pool = labelled if len(labelled) else np.asarray(side, dtype=int)
    if len(pool) == 0:
        return pool
    return pool[evenly_spaced(len(pool), limit).numpy()]


def evaluation_size(run: Run) -> int:
    """The volumes of this process's part of an evaluation batch."""
    return run.cfg.train.at_once * run.runtime.evaluation_devices


def shared_batches(run: Run, rows: np.ndarray, load: Load) -> Iterator[tuple[Batch, Batch]]:
    """This process's part of `rows`: each batch as it was read, and on the device, where it may be filled up.

    `Runtime.collect` of the results, joined and cut to len(rows), is in the order of `rows`.
    """
    size = evaluation_size(run)
    batches = load(run.cfg, run.store, run.runtime.group.share(rows), size)
    for cpu_batch in run.runtime.until_stopped("validation", batches):
        yield cpu_batch, run.runtime.to_device_padded(cpu_batch, size)
