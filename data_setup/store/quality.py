"""How good a scan is, only from its frames: no label, no reference, no model.

In: uint8 frames [H, W] of one scan, as they pass on their way to the grid (`Meter.watch`), and the spacing.
Out: QUALITY_COLUMNS of the store's index.

    signal_db        20 log10((retina - background) / noise of the background). Retina and background: the two
                     classes of Otsu (1979) among means of small blocks; noise: of values half a block apart
    clipped_share    share of A-scans whose retina touches the upper edge, or whose brightest part, the RPE,
                     touches the lower one
    motion_um        mean axial jump between neighbouring B-scans, beyond the slope of the anatomy: phase
                     correlation (Kuglin and Hines 1975) of low frequencies. Lateral jumps do not count:
                     layers that run along a B-scan do not say where they are along it
    missing_share    share of B-scans that are blank, or the one before once more
    saturated_share  share of grey values at 255
    quality          0 to 1: the worst of the five, each scaled between LIMITS

The limits are conventions. Nobody has compared them with a grader.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import fft
from scipy.ndimage import median_filter

BLOCKS = 128  # about so many along each axis of a frame
BLANK_STD = 0.2  # of the median frame's standard deviation; less is a blank frame
EDGE_BLOCKS = 2  # of a column that touch an edge
RETINA_SHARE = 0.5  # of the way from background to retina: what touches the upper edge
RPE_SHARE = 1.2  # the same at the lower edge, where the choroid may be
LOW_FREQUENCY = 0.12  # cycles a block: standard deviation of the band that is registered
NEIGHBOURS = 5  # B-scans over which the slope of the anatomy is a line
MAP = 32  # the side of the coarse picture by which B-scans are compared
FEWEST_COMPARED = 8  # B-scans
ALIKE, NEARER = 0.9, 0.1  # correlations: neighbours of one scan, and by how much distant ones are below
FEWEST_SORTED, FEWEST_CUTS, CUT_SHARE = 18, 3, 0.1  # B-scans; places between two that have nothing in common
# Correlation: how far the only such place lies below all others; up to .04 in real eyes, .12 in phantoms
SEAM = 0.15
LEAST_NOISE = 0.5  # grey values: rounding alone makes 0.3
# column -> (value that is worth 0, value that is worth 1)
LIMITS = {
    "signal_db": (0.0, 12.0),
    "clipped_share": (0.5, 0.0),
    "motion_um": (60.0, 0.0),
    "missing_share": (0.3, 0.0),
    "saturated_share": (0.1, 0.0),
}


class Meter:
    """Looks at frames as they pass; small numbers are kept of each, and of one the blocks."""

    def __init__(self) -> None:
        self._levels = np.zeros(256)  # blocks by mean grey value
        self._noise = np.zeros(256)  # their summed squared differences
        self._std: list[float] = []
        self._repeats: list[bool] = []
        self._saturated: list[float] = []
        self._top: list[np.ndarray] = []  # of each frame, a column of blocks each: brightness at the edges
        self._bottom: list[np.ndarray] = []
        self._shifts: list[float] = []  # blocks down, from the frame before
        self._before: np.ndarray | None = None  # blocks
        self._spectrum: np.ndarray | None = None
        self._block = (1, 1)
        self._maps: list[np.ndarray] = []  # coarse pictures, without mean, of length 1

    def watch(self, frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """The same frames."""
        for frame in frames:
            self._look(frame)
            yield frame

    def _look(self, frame: np.ndarray) -> None:
        height, width = (max(1, round(n / BLOCKS)) for n in frame.shape)
        self._block = height, width
        rows, columns = (n // b for n, b in zip(frame.shape, self._block, strict=True))
        whole = frame[: rows * height, : columns * width].reshape(rows, height, columns, width)
        lines = frame[: rows * height].reshape(rows, height, -1).sum(axis=1, dtype=np.uint16)
        sums = lines[:, : columns * width].reshape(rows, columns, width).sum(axis=2, dtype=np.uint32)
        blocks = sums.astype(np.float32) / (height * width)
        one, other = whole[:, 0, :, 0].astype(np.float32), whole[:, height // 2, :, width // 2]
        level = blocks.ravel().astype(np.uint8)
        self._levels += np.bincount(level, minlength=256)
        self._noise += np.bincount(level, weights=((one - other) ** 2).ravel() / 2, minlength=256)
        self._std.append(float(blocks.std()))
        self._saturated.append(np.count_nonzero(frame == 255) / frame.size)
        self._top.append(blocks[:EDGE_BLOCKS].mean(axis=0))
        self._bottom.append(blocks[-EDGE_BLOCKS:].mean(axis=0))
        self._repeats.append(self._before is not None and np.array_equal(self._before, blocks))
        self._before = blocks
        self._maps.append(_coarse(blocks))
        spectrum = _spectrum(blocks)
        before = self._spectrum
        self._shifts.append(0.0 if before is None else _shift(before, spectrum, blocks.shape))
        self._spectrum = spectrum

    def columns(self, spacing_mm: tuple[float, float, float]) -> dict[str, float]:
        """QUALITY_COLUMNS of the frames that have passed; spacing (d, h, w)."""
        std, repeats = np.array(self._std), np.array(self._repeats)
        missing = (std < BLANK_STD * np.median(std)) | repeats
        background, retina, noise = _two_classes(self._levels, self._noise)
        contrast = retina - background
        touches_top = np.array(self._top) > background + RETINA_SHARE * contrast
        touches_bottom = np.array(self._bottom) > background + RPE_SHARE * contrast
        seen = ~missing if not missing.all() else np.ones_like(missing)
        values = {
            "signal_db": 20 * math.log10(max(contrast, 0.1) / max(noise, LEAST_NOISE)),
            "clipped_share": float((touches_top | touches_bottom)[seen].mean()),
            "motion_um": self._motion_um(missing, spacing_mm),
            "missing_share": float(missing.mean()),
            "saturated_share": float(np.mean(self._saturated)),
        }
        values = {name: round(value, 4) for name, value in values.items()}
        return {"quality": round(overall(values), 4), **values}

    def strangers(self) -> tuple[float, float] | None:
        """Mean correlations of neighbours and of distant frames where the first are no better, everywhere or
        at one place in ten: pictures of different scans, sorted by scan or not, or B-scans in no order. None
        else, and for few frames.
        """
        count = len(self._maps)
        if count < FEWEST_COMPARED:
            return None
        products = np.array(self._maps) @ np.array(self._maps).T
        near = float(np.diag(products, 1).mean())
        far = float(np.concatenate([np.diag(products, k) for k in range(count // 3, count)]).mean())
        if near < ALIKE and near - far < NEARER:
            return near, far
        across = _across(products)
        cuts = across[across < min(ALIKE, far + NEARER / 4)]
        is_sorted = count >= FEWEST_SORTED and len(cuts) >= max(FEWEST_CUTS, CUT_SHARE * count)
        return (float(cuts.mean()), far) if is_sorted else None

    def seam(self) -> int | None:
        """The number of the B-scan before the only place across which nothing goes on, as between two eyes;
        None without one, and for few frames.
        """
        if len(self._maps) < FEWEST_SORTED:
            return None
        across = _across(np.array(self._maps) @ np.array(self._maps).T)
        place = int(across.argmin())
        others = np.delete(across, range(max(0, place - 2), min(len(across), place + 3)))
        is_inside = FEWEST_COMPARED <= place + 2 <= len(self._maps) - FEWEST_COMPARED
        return place + 2 if is_inside and others.min() - across[place] > SEAM else None

    def _motion_um(self, missing: np.ndarray, spacing_mm: tuple[float, float, float]) -> float:
        """Mean distance between the shift of a B-scan and the median shift of its neighbours."""
        pair = ~missing[1:] & ~missing[:-1]
        if pair.sum() < NEIGHBOURS:
            return 0.0
        shifts = np.array(self._shifts[1:])[pair] * 1000 * spacing_mm[1] * self._block[0]
        return float(np.abs(shifts - median_filter(shifts, size=NEIGHBOURS, mode="nearest")).mean())


def overall(values: dict[str, float]) -> float:
    """The worst of the five, 0 to 1."""
    return float(np.clip(min(share_between(name, values[name]) for name in LIMITS), 0.0, 1.0))


def share_between(name: str, value: Any) -> Any:
    """How far a number lies between its limits, below 0 and above 1 too; of a float or an array."""
    worst, best = LIMITS[name]
    return (value - worst) / (best - worst)


def _across(products: np.ndarray) -> np.ndarray:
    """Correlations of two frames before a place with two after it, from that behind frame 2 on. A jump of the
    eye parts neighbours too, but comes back.
    """
    return np.array([products[n - 1 : n + 1, n + 1 : n + 3].mean() for n in range(1, len(products) - 2)])


def _two_classes(levels: np.ndarray, noise: np.ndarray) -> tuple[float, float, float]:
    """(mean of the darker class, of the brighter one, noise of the darker one), grey values; Otsu's threshold
    among blocks that are not pure black, which is no tissue.
    """
    counts, squares = levels.copy(), noise.copy()
    counts[0] = squares[0] = 0.0
    if np.count_nonzero(counts) < 2:
        return 0.0, 0.0, 0.0
    grey = np.arange(256)
    below, total = np.cumsum(counts), counts.sum()
    sums = np.cumsum(counts * grey)
    with np.errstate(divide="ignore", invalid="ignore"):
        dark, bright = sums / below, (sums[-1] - sums) / (total - below)
        between = np.where((below > 0) & (below < total), below * (total - below) * (bright - dark) ** 2, -1)
    at = int(np.argmax(between))
    spread = float(squares[: at + 1].sum() / below[at])
    return float(dark[at]), float(bright[at]), math.sqrt(spread)


def _coarse(blocks: np.ndarray) -> np.ndarray:
    for axis, size in enumerate(blocks.shape):
        starts = np.linspace(0, size, min(MAP, size), endpoint=False).astype(int)
        sums = np.add.reduceat(blocks, starts, axis)
        counts = np.diff([*starts, size])
        blocks = sums / (counts[:, None] if axis == 0 else counts)
    values = (blocks - blocks.mean()).ravel()
    return np.asarray(values / max(float(np.linalg.norm(values)), 1e-6), np.float32)


def _spectrum(blocks: np.ndarray) -> np.ndarray:
    """The frame's spectrum, without its mean, faded out towards the edges."""
    return np.asarray(fft.rfft2((blocks - blocks.mean()) * _filters(blocks.shape)[0]))


@lru_cache(maxsize=8)
def _filters(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(window over blocks, low pass of their spectrum), float32."""
    window = np.hanning(shape[0])[:, None] * np.hanning(shape[1])[None, :]
    down, right = fft.fftfreq(shape[0])[:, None], fft.rfftfreq(shape[1])[None, :]
    low = np.exp(-(down**2 + right**2) / (2 * LOW_FREQUENCY**2))
    return window.astype(np.float32), low.astype(np.float32)


def _shift(one: np.ndarray, other: np.ndarray, shape: tuple[int, int]) -> float:
    """How far `other` lies below `one` in blocks, by the peak of their phase correlation."""
    product = other * one.conj()
    product = product / np.maximum(np.abs(product), 1e-9) * _filters(shape)[1]
    peak = fft.irfft2(product, s=shape)
    place, column = (int(n) for n in np.unravel_index(int(peak.argmax()), peak.shape))
    line, size = peak[:, column], shape[0]
    before, here, after = line[place - 1], line[place], line[(place + 1) % size]
    bend = before - 2 * here + after  # the top of the parabola through the peak and its neighbours
    at = place + (0.5 * (before - after) / bend if bend < 0 else 0.0)
    return float(at - size if at > size / 2 else at)
