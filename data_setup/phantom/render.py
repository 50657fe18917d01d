"""From anatomy to pixels: scan placement, device physics, speckle, 8-bit display values.

In: an `Eye`, a protocol shape and spacing, a random generator. Out: uint8 [D,H,W] in anatomical order
(superior to inferior; columns as the machine stores them) and the truth: surfaces in row coordinates and a
lesion volume. Signal model: a reflectivity in dB per layer, shadows below vessels, loss with range,
correlated fully developed speckle (complex Gaussian, averaged over looks) multiplied in linear intensity, a
noise floor, then the log display. Row coordinate r means r rows below the centre of the first row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from data_setup.phantom.anatomy import RPE_BAND_MM, Anatomy, Eye, sample
from data_setup.phantom.groups import ONH_CIRCLES_MM, ONH_RADIAL_SCALE
from data_setup.protocols import Protocol

LESIONS = ("none", "drusen", "intraretinal_fluid", "subretinal_fluid", "hyperreflective_focus")
SLAB = 16  # frames rendered together; part of the random stream, so fixed


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


def scan_positions(
    protocol: Protocol,
    shape: tuple[int, int, int],
    spacing_mm: tuple[float, float, float],
    laterality: str,
    eye: Eye,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Fundus position (u, v) in mm of every A-scan [D,W], superior B-scan first; columns run as stored."""
    frames, _, columns = shape
    f = eye.factors
    jitter_u, jitter_v = rng.normal(0, 0.18, 2)
    disc_scan = "Disc" in protocol.region and protocol.spacing_mm[2] * protocol.shape[2] < 9
    if disc_scan or not protocol.is_volume:
        centre_u, centre_v = f.disc_u_mm + jitter_u, f.disc_v_mm + jitter_v
    elif protocol.region in ("Wide Field", "Optic Disc"):  # 12 x 9 mm: fovea and disc in one field
        centre_u, centre_v = 1.9 + jitter_u, -0.2 + jitter_v
    else:
        centre_u, centre_v = jitter_u, jitter_v
    along = (np.arange(columns) - (columns - 1) / 2) * spacing_mm[2]
    if protocol.is_volume:
        across = (np.arange(frames) - (frames - 1) / 2) * spacing_mm[0]
        turn = np.deg2rad(rng.normal(0, 2.5))  # head tilt and cyclotorsion
        x, y = np.broadcast_to(along, (frames, columns)), np.broadcast_to(across[:, None], (frames, columns))
        x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    else:  # 24 radial lines, then 3 circles around the disc
        radial = frames - len(ONH_CIRCLES_MM)
        angle = np.arange(radial)[:, None] * np.pi / radial
        circle = np.linspace(-np.pi, np.pi, columns, endpoint=False)[None]
        diameter = np.array(ONH_CIRCLES_MM)[:, None]
        x = np.concatenate([along * np.cos(angle) * ONH_RADIAL_SCALE, diameter / 2 * np.cos(circle)])
        y = np.concatenate([along * np.sin(angle) * ONH_RADIAL_SCALE, diameter / 2 * np.sin(circle)])
    nasal = 1.0 if laterality == "R" else -1.0  # the disc is right of the fovea in a right eye
    return centre_u + nasal * x, centre_v + y


def place(
    anatomy: Anatomy,
    u: np.ndarray,
    v: np.ndarray,
    depth_mm: float,
    jitter_mm: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Depth in mm of Bruch's membrane's base [D,W]: curvature, tilt, motion, kept inside the field."""
    x, y = u - u.mean(), v - v.mean()
    relief = -(x**2 + y**2) / (2 * rng.uniform(28, 80))
    relief = relief + rng.normal(0, 0.035) * x + rng.normal(0, 0.025) * y
    relief = relief + 0.012 * np.sin(rng.uniform(0.4, 0.9) * x + rng.uniform(0, 6)) * np.cos(0.6 * y)
    frames = u.shape[0]
    motion = gaussian_filter1d(rng.standard_normal(frames), 1.0, mode="nearest") * 1.9 * jitter_mm
    allowed = depth_mm - 0.62 - 0.10 * depth_mm
    relief *= min(1.0, allowed / max(np.ptp(relief), 1e-6))
    base = relief - relief.mean() + motion[:, None] + rng.uniform(0.47, 0.60) * depth_mm
    top = (base - anatomy.heights_mm[0]).min()
    base += max(0.05 * depth_mm - top, 0.0)
    return base - max(base.max() - 0.94 * depth_mm, 0.0)


def _texture(shape: tuple[int, ...], sigma: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Unit-variance Gaussian noise smoothed by `sigma` samples per axis."""
    noise = gaussian_filter(rng.standard_normal(shape, dtype=np.float32), sigma, mode="wrap", truncate=3)
    return noise / max(float(noise.std()), 1e-6)


def render(
    eye: Eye,
    protocol: Protocol,
    shape: tuple[int, int, int],
    spacing_mm: tuple[float, float, float],
    laterality: str,
    seed: list[int],
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
    eye: Eye,
    anatomy: Anatomy,
    surfaces: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
    spacing_mm: tuple[float, float, float],
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
    s = surfaces[:, part, None, :]
    z = np.arange(rows, dtype=np.float32)[None, :, None]
    disc = anatomy.disc[part, None, :].astype(np.float32)
    srf = (anatomy.srf_mm[part, None, :] / h_mm).astype(np.float32)
    drusen = (anatomy.drusen_mm[part, None, :] / h_mm).astype(np.float32)
    ez_rows, rpe_rows = 0.015 / h_mm, RPE_BAND_MM / h_mm
    steps = [
        (s[0], "ILM"),
        (s[1], "RNFL_GCL"),
        (s[2], "GCL_IPL"),
        (s[3], "IPL_INL"),
        (s[4], "INL_OPL"),
        (s[5], "OPL_ONL"),
        (s[6], "ELM"),
        (s[7], "EZ"),
        (s[7] + ez_rows, "OS"),
        (s[8], "RPE"),
        (np.minimum(s[8] + rpe_rows, s[9]), "DRUSEN"),
        (s[9], "BM"),
        (s[10], "CSI"),
    ]
    out = np.zeros((s.shape[1], rows, s.shape[3]), np.float32)
    above = LAYER_DB["vitreous"]
    for surface, below in steps:
        jump = LAYER_DB[below] - above
        soft = max(SOFT_MM.get(below, 0.004) / h_mm, 1.0)  # no edge is sharper than a row
        ramp = np.clip((z - surface) / np.float32(soft) + np.float32(0.5), 0, 1)
        ramp *= jump if below in ("ILM",) else jump * (1 - disc)
        out += ramp
        above = LAYER_DB[below]
    line = 0.006 / h_mm  # thin bright lines: share of a row that they fill
    for surface, lift in ((s[0] + 0.4, 3.0), (s[6], 5.0)):
        out += lift * min(line * 1.6, 1.0) * np.exp(-(((z - surface) / max(0.7, line)) ** 2)) * (1 - disc)
    # below Bruch's membrane: choroidal vessels, then loss with path length; in the disc from the surface
    below_bm = z - s[9]
    depth_mm = np.clip(below_bm, 0, None) * h_mm
    cell = np.clip(depth_mm / 0.012, 0, lumina.shape[2] - 1).astype(np.intp)
    fine, coarse = (np.take_along_axis(t[part], cell, axis=1) for t in lumina)
    mix = np.clip(depth_mm / 0.12, 0, 1)
    inside = (below_bm > 0) * (1 - np.clip((z - s[10]) * h_mm / 0.06 + 0.5, 0, 1))
    pattern = np.tanh(1.5 * ((1 - mix) * fine + mix * coarse) - 0.25 * mix)
    out += np.maximum(inside * (1 - disc), 0.5 * disc) * (1 - np.exp(-depth_mm / 0.015)) * 3.6 * pattern
    out -= (
        np.float32(device.choroid_db_mm) * (0.25 * depth_mm + 0.75 * np.minimum(depth_mm, 0.25)) * (1 - disc)
    )
    out -= 30.0 * disc * np.clip((z - s[0]) * h_mm - 0.10, 0, None)
    out += capture.capillary_db[part, None, :] * np.clip((z - s[3]) * h_mm / 0.02, 0, 1)
    # vessels: a bright lumen wall in the inner retina and a shadow below
    cover = anatomy.vessel[part, None, :].astype(np.float32) * (1 - disc * 0.4)
    radius = (anatomy.vessel_radius_mm[part, None, :] / h_mm).astype(np.float32)
    centre = s[0] + 0.020 / h_mm + 0.9 * radius
    wall = np.exp(-(((z - centre) / np.maximum(radius, 0.8)) ** 2))
    out += cover * (5.0 * wall - device.shadow_db * np.clip((z - centre) / np.maximum(radius, 0.8), 0, 1))
    fluid = (z > s[8] - srf - 0.5) & (z < s[8] - 0.5) & (srf > 0.5)
    out = np.where(fluid, FLUID_DB, out)
    lesions[part][fluid] = 3
    lesions[part][(z > s[8] + rpe_rows) & (z < s[9]) & (drusen > 0.4)] = 1
    if capture.hyaloid_rows:
        out += 5.0 * np.exp(-(((z - s[0] + capture.hyaloid_rows) / 1.2) ** 2))
    out += capture.haze_db * (z < s[0]) * 0.5
    return out + (capture.gain_db + capture.lateral_db[part, None, :] - device.roll_off_db_mm * z * h_mm)


def display(
    decibel: np.ndarray, device: Device, spacing_mm: tuple[float, float, float], rng: np.random.Generator
) -> np.ndarray:
    """uint8 display values of a mean signal in dB: speckle, noise floor, logarithm, contrast."""
    shape = decibel.shape
    # one voxel of a coarse grid holds several speckles
    cells = max(spacing_mm[1] / device.speckle_mm[0], 1.0) * max(spacing_mm[2] / device.speckle_mm[1], 1.0)
    looks = int(min(device.looks * max(1.0, cells**0.5), 8))
    sigma = [max(c / s * 0.5, 0.0) for c, s in zip(device.speckle_mm, spacing_mm[1:], strict=True)]
    power = np.zeros(shape, np.float32)
    for _ in range(2 * looks):
        field = rng.standard_normal(shape, dtype=np.float32)
        for axis, width in ((1, sigma[0]), (2, max(sigma[1], 0.45))):
            if width > 0.3:
                field = gaussian_filter1d(field, width, axis=axis, mode="nearest", truncate=2.5)
        power += np.square(field)
    power /= power.mean()
    intensity = np.power(np.float32(10), decibel * np.float32(0.1)) * power
    intensity += rng.standard_exponential(shape, dtype=np.float32)
    level = (10 * np.log10(intensity + np.float32(1e-3)) - device.black_db) / device.range_db
    return np.rint(255 * np.clip(level, 0, 1) ** device.gamma).astype(np.uint8)
