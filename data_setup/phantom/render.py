"""From anatomy to pixels: device physics, speckle, 8-bit display values.

In: an `Eye`, a protocol shape and spacing, a random generator. Out: uint8 [D,H,W] in anatomical order
(superior to inferior; columns as the machine stores them) and the truth: surfaces in row coordinates and a
lesion volume. Signal model: a reflectivity in dB per layer, shadows below vessels, loss with range,
correlated fully developed speckle (complex Gaussian, averaged over looks) multiplied in linear intensity, a
noise floor, then the log display. Row coordinate r means r rows below the centre of the first row.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d
from scipy.special import gammaincinv, ndtri

from data_setup.phantom.anatomy import RPE_BAND_MM, Anatomy, Eye, place, sample, scan_positions
from data_setup.protocols import Protocol, Shape, Triple

LESIONS = ("none", "drusen", "intraretinal_fluid", "subretinal_fluid", "hyperreflective_focus")
SLAB = 16  # frames rendered together; part of the random stream, so fixed
SMOOTHED = 0.3  # grains of speckle narrower than this, in voxels of standard deviation, lie in one voxel
_Place = Any  # an index into columns [d,W]: ... or the index arrays of some


@dataclass(frozen=True)
class Device:
    """How one scanner sees: dB display range, black level, contrast, noise, resolution and its own habits."""

    black_db: float
    range_db: float
    gamma: float
    looks: int  # speckle averaging
    speckle_mm: tuple[float, float]  # correlation (axial, lateral)
    roll_off_db_mm: float
    choroid_db_mm: float  # loss per mm below Bruch's membrane
    shadow_db: float
    jitter_mm: float  # axial motion between B-scans


DEVICE_PHYSICS = {
    "heidelberg_spectralis": Device(3.0, 29.0, 1.3, 3, (0.0050, 0.016), 1.5, 52.0, 7.0, 0.001),
    "topcon_maestro2": Device(-1.0, 34.0, 1.05, 2, (0.0050, 0.018), 2.5, 50.0, 6.5, 0.004),
    "topcon_triton": Device(-1.5, 34.0, 1.10, 2, (0.0065, 0.020), 0.6, 34.0, 6.0, 0.003),
    "zeiss_cirrus": Device(-3.0, 37.0, 0.95, 1, (0.0045, 0.016), 3.0, 52.0, 6.0, 0.005),
}

# dB over the noise floor, from the vitreous down; index = what lies below that surface
LAYER_DB = {
    "vitreous": 0.0,
    "ILM": 26.5,
    "RNFL_GCL": 20.0,
    "GCL_IPL": 21.5,
    "IPL_INL": 17.0,
    "INL_OPL": 20.5,
    "OPL_ONL": 13.5,
    "ELM": 15.0,
    "EZ": 27.5,
    "OS": 21.0,
    "RPE": 30.5,
    "DRUSEN": 17.5,
    "BM": 23.0,
    "CSI": 16.0,
}
FLUID_DB = 1.5
SOFT_MM = {"CSI": 0.09, "GCL_IPL": 0.010, "IPL_INL": 0.008, "INL_OPL": 0.010, "OPL_ONL": 0.012}


@dataclass(frozen=True)
class Capture:
    """What varies between captures with one device."""

    gain_db: float
    lateral_db: np.ndarray  # [D,W] uneven illumination
    capillary_db: np.ndarray  # [D,W] loss below the inner plexiform layer
    haze_db: float  # vitreous haze
    hyaloid_rows: float  # height of the posterior hyaloid over the ILM, 0 when attached


@dataclass(frozen=True)
class Scan3D:
    """A rendered volume with its truth."""

    voxels: np.ndarray  # uint8 [D,H,W]
    surfaces: np.ndarray  # float32 [11,D,W] rows
    lesions: np.ndarray  # uint8 [D,H,W], index into LESIONS
    vessels: np.ndarray  # [D,W] 0..1, share of the A-scan in a retinal vessel
    disc: np.ndarray  # [D,W] 0..1, inside the optic disc
    u_mm: np.ndarray  # [D,W] fundus position, nasal of the fovea
    v_mm: np.ndarray  # [D,W] below the fovea


def _texture(shape: tuple[int, ...], sigma: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Unit-variance Gaussian noise smoothed by `sigma` samples per axis."""
    noise = gaussian_filter(rng.standard_normal(shape, dtype=np.float32), sigma, mode="wrap", truncate=3)
    return noise / max(float(noise.std()), 1e-6)


def render(
    eye: Eye, protocol: Protocol, shape: Shape, spacing_mm: Triple, laterality: str, seed: list[int]
) -> Scan3D:
    """Scan `eye`: voxels uint8 and truth, superior to inferior; a pure function of its arguments."""
    rng = np.random.default_rng(seed)
    device = DEVICE_PHYSICS[protocol.device]
    frames, rows, columns = shape
    d_mm, h_mm, w_mm = spacing_mm
    u, v = scan_positions(protocol, shape, spacing_mm, laterality, eye, rng)
    anatomy = sample(eye, u, v, w_mm)
    base = place(anatomy, u, v, rows * h_mm, device.jitter_mm, rng)
    surfaces = ((base - anatomy.heights_mm) / h_mm - 0.5).astype(np.float32)
    # choroid: stroma and vessel lumina as thresholded noise in coordinates that follow Bruch's membrane
    cells = 40
    lumina = np.stack(
        [
            _texture((frames, cells, columns), (lateral / d_mm, axial / 0.012, lateral / w_mm), rng)
            for lateral, axial in ((0.035, 0.014), (0.085, 0.030))
        ]
    )
    capillaries = np.abs(_texture((frames, columns), (0, 0.012 / w_mm), rng))
    grain = _texture((frames, columns), (0.2 / d_mm, 0.6 / w_mm), rng)
    capture = Capture(
        gain_db=rng.normal(0, 1.3),
        lateral_db=(1.1 * grain - rng.uniform(0, 1.5) * np.linspace(-1, 1, columns) ** 4).astype(np.float32),
        capillary_db=(-1.1 * np.clip(capillaries - 0.8, 0, 2)).astype(np.float32),
        haze_db=abs(rng.normal(0, 1.2)),
        hyaloid_rows=eye.hyaloid_mm / h_mm,
    )
    voxels = np.empty(shape, np.uint8)
    lesions = np.zeros(shape, np.uint8)
    foci_cysts = lesion_boxes(eye, anatomy, surfaces, u, v, spacing_mm)
    for start in range(0, frames, SLAB):
        part = slice(start, min(start + SLAB, frames))
        slab_rng = np.random.default_rng([*seed, start])
        decibel = signal_db(part, rows, h_mm, device, anatomy, surfaces, lumina, capture, lesions)
        for frame, rows_, columns_, weight, kind in foci_cysts:
            if part.start <= frame < part.stop:
                box = (frame - part.start, rows_, columns_)
                target = FLUID_DB if kind == 2 else 25.0
                decibel[box] += weight * (target - decibel[box])
                lesions[frame, rows_, columns_][weight > 0.5] = kind
        voxels[part] = display(decibel, device, spacing_mm, slab_rng)
    return Scan3D(voxels, surfaces, lesions, anatomy.vessel, anatomy.disc, u, v)


def lesion_boxes(
    eye: Eye, anatomy: Anatomy, surfaces: np.ndarray, u: np.ndarray, v: np.ndarray, spacing_mm: Triple
) -> list[tuple[int, slice, slice, np.ndarray, int]]:
    """Cysts and foci as (frame, rows, columns, weight [h,w], kind): ellipsoids where the B-scans cut them."""
    boxes = []
    h_mm = spacing_mm[1]
    for kind, lesions in ((2, eye.cysts), (4, eye.foci)):
        for cu, cv, lateral, axial, level in lesions:
            squared = ((u - cu) ** 2 + (v - cv) ** 2) / lateral**2
            for frame in np.flatnonzero((squared < 1).any(axis=1)):
                inner = np.flatnonzero(squared[frame] < 1)
                columns = slice(max(inner[0] - 1, 0), inner[-1] + 2)
                layer = int(level)
                upper, lower = surfaces[layer, frame, columns], surfaces[layer + 1, frame, columns]
                inside = 1 - squared[frame, columns]
                if anatomy.disc[frame, columns].max() > 0.05:
                    continue
                best = int(inside.argmax())
                centre = upper[best] + (level - layer) * (lower[best] - upper[best])
                half = axial / h_mm * np.sqrt(np.clip(inside, 0, None))
                first, last = int(np.floor(centre - half.max() - 1)), int(np.ceil(centre + half.max() + 2))
                rows = np.arange(max(first, 0), max(last, 1))[:, None]
                weight = np.clip(half + 0.5 - np.abs(rows - centre), 0, 1) * np.minimum(2 * half, 1)
                boxes.append(
                    (int(frame), slice(int(rows[0, 0]), int(rows[-1, 0]) + 1), columns, weight, kind)
                )
    return boxes


class _Columns:
    """The signal of columns of voxels, made from its edges: a step is written where it begins, and one sum
    down the rows makes them all. Thin lines come after it.
    """

    def __init__(self, frames: int, rows: int, columns: int) -> None:
        self.rows = rows
        self.values = np.zeros((frames, rows + 1, columns), np.float32)  # the last row takes what lies below
        self.first = np.arange(frames)[:, None] * ((rows + 1) * columns) + np.arange(columns)

    def _add(self, row: np.ndarray, value: np.ndarray | float, at: _Place) -> None:
        self.values.ravel()[self.first[at] + row * self.values.shape[2]] += value

    def step(
        self, centre: np.ndarray, height: np.ndarray | float, soft: np.ndarray | float = 1.0, at: _Place = ...
    ) -> None:
        """Add `height` below the row `centre`, over `soft` rows, in the columns `at`; before `sum`."""
        begin = np.floor(centre - np.float32(0.5) * soft).astype(np.intp) + 1
        before: np.ndarray | float = 0.0
        for further in range(int(np.ceil(np.max(soft, initial=0))) + 1):
            share = np.clip((begin + further - centre) / soft + np.float32(0.5), 0, 1, dtype=np.float32)
            self._add(np.clip(begin + further, 0, self.rows), height * (share - before), at)
            before = share

    def sum(self) -> None:
        np.cumsum(self.values, axis=1, out=self.values)

    def line(
        self, centre: np.ndarray, height: np.ndarray | float, width: np.ndarray | float, at: _Place = ...
    ) -> None:
        """Add a Gaussian line of `width` rows around the row `centre`; after `sum`."""
        nearest = np.rint(centre).astype(np.intp)
        reach = int(np.ceil(2.5 * np.max(width, initial=0)))
        for row in (nearest + further for further in range(-reach, reach + 1)):
            inside = (row >= 0) & (row < self.rows)
            bump = height * np.exp(-(((row - centre) / width) ** 2), dtype=np.float32)
            self._add(np.where(inside, row, self.rows), bump, at)


def signal_db(
    part: slice,
    rows: int,
    h_mm: float,
    device: Device,
    anatomy: Anatomy,
    surfaces: np.ndarray,
    lumina: np.ndarray,
    capture: Capture,
    lesions: np.ndarray,
) -> np.ndarray:
    """Mean signal in dB over the noise floor for the frames `part`, float32 [d,H,W]; marks lesions."""
    s = surfaces[:, part]
    disc = anatomy.disc[part].astype(np.float32)
    columns = _Columns(s.shape[1], rows, s.shape[2])
    columns.step(s[0], -0.5 * float(capture.haze_db))
    above = LAYER_DB["vitreous"]
    for surface, below in _edges(s, h_mm):
        jump = LAYER_DB[below] - above
        soft = max(SOFT_MM.get(below, 0.004) / h_mm, 1.0)  # no edge is sharper than a row
        columns.step(surface, jump if below == "ILM" else jump * (1 - disc), soft)
        above = LAYER_DB[below]
    loss = 0.02 / h_mm  # rows over which the capillaries' loss comes about
    columns.step(s[3] + loss / 2, capture.capillary_db[part], loss)
    # vessels: a bright lumen wall in the inner retina and a shadow below
    at = np.nonzero(anatomy.vessel[part])
    cover = anatomy.vessel[part][at].astype(np.float32) * (1 - disc[at] * 0.4)
    radius = (anatomy.vessel_radius_mm[part][at] / h_mm).astype(np.float32)
    wall = s[0][at] + 0.020 / h_mm + 0.9 * radius
    thick = np.maximum(radius, 0.8)
    columns.step(wall + thick / 2, -device.shadow_db * cover, thick, at)
    columns.sum()
    columns.line(wall, 5.0 * cover, thick, at)
    line = 0.006 / h_mm  # thin bright lines: share of a row that they fill
    for surface, lift in ((s[0] + 0.4, 3.0), (s[6], 5.0)):
        columns.line(surface, lift * min(line * 1.6, 1.0) * (1 - disc), max(0.7, line))
    if capture.hyaloid_rows:
        columns.line(s[0] - capture.hyaloid_rows, 5.0, 1.2)
    out = columns.values[:, :rows]
    _below_bruch(out, s, disc, [texture[part] for texture in lumina], h_mm, device)
    _mark_lesions(out, lesions[part], s, anatomy, part, h_mm)
    out += (capture.gain_db + capture.haze_db * 0.5 + capture.lateral_db[part])[:, None, :]
    out -= np.float32(device.roll_off_db_mm * h_mm) * np.arange(rows, dtype=np.float32)[:, None]
    return out


def _edges(s: np.ndarray, h_mm: float) -> list[tuple[np.ndarray, str]]:
    """The surfaces [d,W] at which the signal changes, from the vitreous down, and what lies below each."""
    inner = ("ILM", "RNFL_GCL", "GCL_IPL", "IPL_INL", "INL_OPL", "OPL_ONL", "ELM", "EZ")
    return [
        *((s[number], name) for number, name in enumerate(inner)),
        (s[7] + 0.015 / h_mm, "OS"),
        (s[8], "RPE"),
        (np.minimum(s[8] + RPE_BAND_MM / h_mm, s[9]), "DRUSEN"),
        (s[9], "BM"),
        (s[10], "CSI"),
    ]


def _below_bruch(
    out: np.ndarray, s: np.ndarray, disc: np.ndarray, lumina: list[np.ndarray], h_mm: float, device: Device
) -> None:
    """Choroidal vessels below Bruch's membrane, then loss with path length; in the disc from the surface."""
    rows = out.shape[1]
    has_disc = bool(disc.max() > 1e-3)
    first = int(np.clip(np.floor(s[9].min()), 0, rows - 1))
    z = np.arange(rows, dtype=np.float32)[:, None]
    depth_mm = np.clip((z[first:] - s[9][:, None]) * np.float32(h_mm), 0, None)
    kept = (1 - disc)[:, None]
    out[:, first:] -= kept * device.choroid_db_mm * (0.25 * depth_mm + 0.75 * np.minimum(depth_mm, 0.25))
    if has_disc:
        out -= 30.0 * disc[:, None] * np.clip((z - s[0][:, None]) * np.float32(h_mm) - 0.10, 0, None)
    # no vessel lies below the choroid, except in the disc
    last = rows if has_disc else int(np.clip(np.ceil(s[10].max() + 0.03 / h_mm), first, rows))
    depth_mm = depth_mm[:, : last - first]
    cell = np.minimum(depth_mm * np.float32(1 / 0.012), lumina[0].shape[1] - 1).astype(np.intp)
    fine, coarse = (np.take_along_axis(texture, cell, axis=1) for texture in lumina)
    mix = np.minimum(depth_mm * np.float32(1 / 0.12), 1)
    pattern = np.tanh(1.5 * (fine + mix * (coarse - fine)) - 0.25 * mix)
    inside = kept * np.clip((s[10][:, None] - z[first:last]) * np.float32(h_mm / 0.06) + 0.5, 0, 1)
    if has_disc:
        inside = np.maximum(inside, 0.5 * disc[:, None])
    out[:, first:last] += inside * (1 - np.exp(depth_mm * np.float32(-1 / 0.015))) * 3.6 * pattern


def _mark_lesions(
    out: np.ndarray, lesions: np.ndarray, s: np.ndarray, anatomy: Anatomy, part: slice, h_mm: float
) -> None:
    """Fluid under the retina: dark in `out`, 3 in `lesions`; drusen, which have their layers already: 1."""
    z = np.arange(out.shape[1], dtype=np.float32)
    srf, drusen = anatomy.srf_mm[part] / h_mm, anatomy.drusen_mm[part] / h_mm
    for kind, (d, w) in ((3, np.nonzero(srf > 0.5)), (1, np.nonzero(drusen > 0.4))):
        rpe, bruch = s[8][d, w, None], s[9][d, w, None]
        if kind == 3:
            column, row = np.nonzero((z > rpe - srf[d, w, None] - 0.5) & (z < rpe - 0.5))
            out[d[column], row, w[column]] = FLUID_DB
        else:
            column, row = np.nonzero((z > rpe + RPE_BAND_MM / h_mm) & (z < bruch))
        lesions[d[column], row, w[column]] = kind


def display(decibel: np.ndarray, device: Device, spacing_mm: Triple, rng: np.random.Generator) -> np.ndarray:
    """uint8 display values of a mean signal in dB: speckle, noise floor, logarithm, contrast."""
    level = np.exp(decibel * np.float32(np.log(10) / 10))
    level *= _speckle(decibel.shape, device, spacing_mm, rng)
    level += _draw(rng, decibel.shape, 1)
    np.log(level + np.float32(1e-3), out=level)
    level *= np.float32(10 / np.log(10) / device.range_db)
    np.clip(level - np.float32(device.black_db / device.range_db), 1e-9, 1, out=level)
    np.exp(np.float32(device.gamma) * np.log(level, out=level), out=level)
    return np.rint(np.float32(255) * level).astype(np.uint8)


def _speckle(
    shape: tuple[int, ...], device: Device, spacing_mm: Triple, rng: np.random.Generator
) -> np.ndarray:
    """Speckle of mean 1, float32 [d,H,W]: the power of complex Gaussian fields, over the device's looks."""
    # one voxel of a coarse grid holds several speckles
    cells = max(spacing_mm[1] / device.speckle_mm[0], 1.0) * max(spacing_mm[2] / device.speckle_mm[1], 1.0)
    looks = int(min(device.looks * max(1.0, cells**0.5), 8))
    sigma = [max(c / s * 0.5, 0.0) for c, s in zip(device.speckle_mm, spacing_mm[1:], strict=True)]
    if max(sigma) < SMOOTHED:  # no voxel shares its speckle with a neighbour: the sum of the looks at once
        return _draw(rng, shape, looks)
    power = np.zeros(shape, np.float32)
    for _ in range(2 * looks):
        field = _draw(rng, shape, None)
        for axis, width in ((1, sigma[0]), (2, max(sigma[1], 0.45))):
            if width > SMOOTHED:
                field = gaussian_filter1d(field, width, axis=axis, mode="nearest", truncate=2.5)
        power += np.square(field)
    return power / power.mean()


@cache
def _quantiles(looks: int | None) -> np.ndarray:
    """65,536 quantiles float32 of the mean power of `looks` complex Gaussians; None: of one Gaussian."""
    share = (np.arange(1 << 16) + 0.5) / (1 << 16)
    values = ndtri(share) if looks is None else gammaincinv(looks, share) / looks
    return np.asarray(values, np.float32)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], looks: int | None) -> np.ndarray:
    """Random numbers of `_quantiles`, float32: fast, and finer than 8 bits show."""
    return _quantiles(looks)[rng.integers(0, 1 << 16, shape, np.uint16)]
