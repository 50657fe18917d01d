"""Which volume is at which global position: a function of the seed, known before anything is read.

In: a seed, the rows of a store, their devices. Out: `DataOrder.row(position)`. So any step can be the first
one of a process, and resuming needs nothing of a loader's state.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from data_setup.store.reader import PreparedStore
from utils.config.schema import Config

# Second words of the data order's seeds. Its generator is not random_stream's, so no two streams meet.
ORDER_EPOCH, ORDER_DEVICES = 0, 1
# of device_balanced: the volumes of a rare device come so many times as often as volumes do on the mean, not
# more; shares that are not equal are dealt in turns of so many positions, with one of each device at least
MOST_PASSES, TURN = 2.0, 1024


class DataOrder:
    """Which store row is at which global position."""

    def __init__(self, seed: int, rows: np.ndarray, groups: Sequence[str] | None = None) -> None:
        """`groups`: each row's device, for equal shares as far as MOST_PASSES allows, or None."""
        if len(rows) == 0:
            raise ValueError("data order: expected at least one store row, found none")
        self.seed = seed
        self.names = sorted(set(groups)) if groups is not None else [""]
        labels = np.asarray(groups)
        self.pools = [rows[labels == name] for name in self.names] if groups is not None else [rows]
        self.slots = np.repeat(np.arange(len(self.pools)), turn_counts([len(pool) for pool in self.pools]))
        self._keep_draws()

    def _keep_draws(self) -> None:
        self._permutation = lru_cache(maxsize=2 * len(self.pools))(self._draw_permutation)
        self._turn = lru_cache(maxsize=2)(self._draw_turn)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("seed", "names", "pools", "slots")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._keep_draws()

    def _draw_permutation(self, pool: int, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, ORDER_EPOCH, pool, epoch])
        return rng.permutation(self.pools[pool])

    def _draw_turn(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """The device at each position of a turn, and how many of the device came before it in the turn."""
        drawn = self.slots
        if len(self.pools) > 1:
            drawn = np.random.default_rng([self.seed, ORDER_DEVICES, turn]).permutation(self.slots)
        before = np.zeros(len(drawn), int)
        for pool in range(len(self.pools)):
            before[drawn == pool] = np.arange(np.sum(drawn == pool))
        return drawn, before

    def row(self, position: int) -> int:
        """The store row at a global position."""
        # Device-balanced: every turn holds each device as often, in an order drawn for that turn.
        turn, offset = divmod(position, len(self.slots))
        devices, before = self._turn(turn)
        pool = int(devices[offset])
        number = turn * int(np.sum(self.slots == pool)) + int(before[offset])
        epoch, place = divmod(number, len(self.pools[pool]))
        return int(self._permutation(pool, epoch)[place])

    def passes(self, positions: int) -> dict[str, float]:
        """How often so many positions show each volume of a device."""
        counts = np.bincount(self.slots) * positions / len(self.slots)
        return {
            name: float(n) / len(pool) for name, n, pool in zip(self.names, counts, self.pools, strict=True)
        }


def turn_counts(sizes: Sequence[int]) -> list[int]:
    """How often devices with these counts come in a turn: once, or in TURN positions where a rare one is."""
    shares, rest = np.full(len(sizes), 1 / len(sizes)), set(range(len(sizes)))
    most = MOST_PASSES * np.asarray(sizes) / sum(sizes)
    if (shares <= most).all():
        return [1] * len(sizes)
    while rare := {d for d in rest if shares[d] > most[d]}:
        rest -= rare
        shares[list(rare)] = most[list(rare)]
        capped = [d for d in range(len(sizes)) if d not in rest]
        shares[list(rest)] = (1 - shares[capped].sum()) / len(rest)
    return [max(1, round(TURN * share)) for share in shares]


def open_order(cfg: Config, store: PreparedStore, rows: np.ndarray) -> DataOrder:
    """The order of these rows under data.sampling."""
    is_balanced = cfg.data.sampling == "device_balanced"
    return DataOrder(cfg.seed, rows, list(store.index.loc[rows, "device"]) if is_balanced else None)
