"""Which way the B-scans of a map or a cube run: as its scan's do, or the other way.

In: how well both ways fit the scan; the table of all rows. Out: the way that fits better, where one does
clearly. For unclear rows that were laid the other way than the clear ones of their device and protocol, the
way of those; where these do not decide, the file's order. A device writes all scans of a protocol alike, so
what many clear scans show is worth more than a symmetric eye. What is laid follows from the table as it is
now: a store that grew has the directions of one made at once.
"""

import numpy as np
import pandas as pd

from data_setup.store.format import KEPT

LEAST_CLEAR = 3  # rows of a protocol that decide
LEAST_SHARE = 0.8  # of them run one way
STEP_MM = 0.045  # rows above and below the first surface that are compared: a few tissue layers
LEAST_STEP = 0.25  # standard deviations; no first surface of a retina is fainter
CLEARER_STEP = 1.1  # so much better must one direction be, or the scan does not decide
LEAST_FIT = 0.2  # correlation; a cube of the same scan has more
CLEARER_FIT = 1.02


def edge_step(volume_DHW: np.ndarray, surface_DW: np.ndarray, spacing_h: float) -> float:
    """Mean brightness below a surface less that above it, in standard deviations of the volume; -inf where
    no A-scan has both.
    """
    reach = max(1, round(STEP_MM / spacing_h))
    size = volume_DHW.shape[1]
    inside = (surface_DW >= reach) & (surface_DW < size - 1 - reach)  # False for NaN
    d, w = np.nonzero(inside)
    if not len(d):
        return -np.inf
    at = np.ceil(surface_DW[d, w]).astype(int)
    offsets = np.arange(reach)
    below = volume_DHW[d[:, None], at[:, None] + offsets, w[:, None]].mean()
    above = volume_DHW[d[:, None], at[:, None] - 1 - offsets, w[:, None]].mean()
    return float((below - above) / max(float(volume_DHW.std()), 1e-6))


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two arrays of one shape; 0 where one of them is constant."""
    a, b = (part.astype(np.float32).ravel() for part in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else 0.0


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
