"""Which way the B-scans of a map or a cube run where its own scan does not decide.

In: the table of all rows, which of them are unclear. Out: for unclear rows that were laid the other way than
the clear ones of their device and protocol, the way of those; where these do not decide, the file's order. A
device writes all scans of a protocol alike, so what many clear scans show is worth more than a symmetric eye.
What is laid follows from the table as it is now: a store that grew has the directions of one made at once.
"""

from __future__ import annotations

import pandas as pd

from data_setup.store.format import KEPT

LEAST_CLEAR = 3  # rows of a protocol that decide
LEAST_SHARE = 0.8  # of them run one way


def of_protocols(kept: pd.DataFrame, is_unclear: pd.Series) -> dict[tuple[str, str], bool]:
    """Device and protocol -> whether their clear rows are reversed; without those whose rows are few or
    disagree.
    """
    shares = kept[~is_unclear].groupby(["device", "protocol"]).reversed_d.agg(["size", "mean"])
    decided = shares[shares["size"] >= LEAST_CLEAR]
    return {
        key: bool(share > 0.5)
        for key, share in decided["mean"].items()
        if max(share, 1 - share) >= LEAST_SHARE
    }


def to_turn(index: pd.DataFrame, is_unclear: pd.Series) -> dict[int, bool]:
    """Row -> whether it is to be laid reversed: unclear rows that lie the other way than they should."""
    is_kept = index.status == KEPT
    known = of_protocols(index[is_kept], is_unclear[is_kept])
    unclear = index[is_kept & is_unclear]
    keys = zip(unclear.device, unclear.protocol, strict=True)
    wanted = [known.get(key, False) for key in keys]
    return {
        int(row): is_wanted
        for row, is_wanted, is_reversed in zip(unclear.row, wanted, unclear.reversed_d, strict=True)
        if is_wanted != is_reversed
    }
