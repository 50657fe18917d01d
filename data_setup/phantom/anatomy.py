"""The anatomy of a phantom eye: layer surfaces, vessels and lesions at any point of the fundus.

In: a person's `Factors` and a random generator. Out: an `Eye`, and for positions (u, v) an `Anatomy`:
heights of all surfaces over Bruch's membrane, vessel coverage, lesions. u is mm from the fovea towards the
disc (nasal), v is mm downwards (inferior), so one description serves right and left eyes; the scan decides
which way columns run. Layer thicknesses follow published normative maps of the macula in shape and size (mm
here; um in the truth). `scan_positions` and `place` say where a scan lies on the fundus, and how deep in the
field.
"""

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter1d
from scipy.spatial import cKDTree

from data_setup.phantom.cohort import Factors
from data_setup.phantom.dicom import ONH_CIRCLES_MM, ONH_RADIAL_SCALE
from data_setup.protocols import Protocol, Shape, Triple

SURFACES = (
    *("ILM", "RNFL_GCL", "GCL_IPL", "IPL_INL", "INL_OPL", "OPL_ONL"),
    *("ELM", "EZ", "RPE", "BM", "CSI"),
)
LAYERS = ("RNFL", "GCL", "IPL", "INL", "OPL", "ONL", "MYOID", "OS", "RPE", "CHOROID")  # between the surfaces
RPE_BAND_MM = 0.020


@dataclass(frozen=True)
class Eye:
    """One eye. Lesion rows: drusen (u, v, sigma, height); cysts (u, v, lateral, axial, level);
    foci (u, v, lateral, axial, level); srf (u, v, sigma, height). mm; level = layer index + fraction."""

    factors: Factors
    drusen: np.ndarray
    cysts: np.ndarray
    foci: np.ndarray
    srf: np.ndarray
    vessel_points: np.ndarray  # (u, v, radius) every ~0.03 mm
    ripples: np.ndarray  # slow thickness variation: (layer, wave) -> (ku, kv, phase, amplitude)
    hyaloid_mm: float  # height of the posterior hyaloid over the ILM, 0 when attached


@dataclass(frozen=True)
class Anatomy:
    """The eye at a grid of fundus positions [D,W]; heights in mm over Bruch's membrane, choroid below it."""

    heights_mm: np.ndarray  # [11, D, W], positive towards the vitreous
    drusen_mm: np.ndarray  # [D, W] drusen height
    srf_mm: np.ndarray  # [D, W] subretinal fluid height
    vessel: np.ndarray  # [D, W] 0..1, share of the A-scan's width inside a vessel
    vessel_radius_mm: np.ndarray  # [D, W] of the nearest vessel
    disc: np.ndarray  # [D, W] 0..1, inside the optic disc


def make_eye(factors: Factors, rng: np.random.Generator) -> Eye:
    """Draw one eye of a person; two eyes of a person share factors, not lesions or vessels."""

    def scatter(count: int, spread_mm: float) -> np.ndarray:
        return np.clip(rng.normal(0, spread_mm, (count, 2)), -3.2, 3.2)

    num = rng.poisson(factors.drusen_rate)
    drusen = np.column_stack([scatter(num, 1.2), rng.uniform(0.05, 0.16, num), rng.gamma(4, 0.010, num)])
    num, uniform = rng.poisson(factors.cyst_rate), rng.uniform
    size = [scatter(num, 1.0), uniform(0.14, 0.34, num), uniform(0.030, 0.065, num)]
    cysts = np.column_stack([*size, rng.choice([3.5, 4.6, 5.3], num)])
    num = rng.poisson(factors.foci_rate)
    size = [scatter(num, 1.5), uniform(0.05, 0.10, num), uniform(0.012, 0.024, num)]
    foci = np.column_stack([*size, uniform(3.2, 5.6, num)])
    num = int(rng.random() < factors.srf_probability)
    srf = np.column_stack([scatter(num, 0.4), rng.uniform(0.4, 0.8, num), rng.uniform(0.06, 0.16, num)])
    waves = (len(LAYERS), 3)
    numbers = [rng.normal(0, 0.9, waves), rng.normal(0, 0.9, waves), uniform(0, 2 * np.pi, waves)]
    ripples = np.stack([*numbers, rng.normal(0, 0.018, waves)], axis=-1)
    hyaloid = float(rng.uniform(0.08, 0.5)) if rng.random() < 0.45 else 0.0
    return Eye(factors, drusen, cysts, foci, srf, grow_vessels(factors, rng), ripples, hyaloid)


def _curve(controls: np.ndarray, radius: float, rng: np.random.Generator) -> np.ndarray:
    """Points (u, v, radius) along a wriggling cubic Bezier curve, tapering to half its radius."""
    length = np.linalg.norm(np.diff(controls, axis=0), axis=1).sum()
    num = max(int(length / 0.03), 8)
    t = np.linspace(0, 1, num)[:, None]
    a, b, c, d = controls
    points = (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d
    wriggle = gaussian_filter1d(rng.standard_normal((num, 2)), 7, axis=0, mode="nearest") * 0.16
    wriggle *= np.minimum(t * 6, 1)
    return np.column_stack([points + wriggle, radius * (1 - 0.5 * t[:, 0])])


def grow_vessels(factors: Factors, rng: np.random.Generator) -> np.ndarray:
    """The retinal vessels as points (u, v, radius) mm: arcades and nasal trunks from the disc, with branches.
    Nothing comes nearer to the foveal centre than 0.45 mm (the avascular zone and its capillary rim).
    """
    disc = np.array([factors.disc_u_mm, factors.disc_v_mm])
    calibre = 0.066 * factors.vessel_calibre
    trunks = []
    for side in (-1, 1):
        for radius in (calibre, calibre * 0.78):  # a vein and an artery
            jitter = rng.normal(0, 0.22, (4, 2))
            temporal = np.array(
                [[-0.2, 0.25 * side], [-0.9, 2.4 * side], [-4.0, 4.0 * side], [-9.5, 2.4 * side]]
            )
            nasal = np.array([[0.1, 0.2 * side], [1.2, 0.9 * side], [2.6, 2.2 * side], [5.0, 3.2 * side]])
            trunks.append(_curve(disc + temporal + jitter * [[0.3], [1], [1], [2]], radius, rng))
            trunks.append(_curve(disc + nasal + jitter[::-1] * [[0.3], [1], [1], [2]], radius * 0.8, rng))
    branches = []
    for trunk in trunks:
        for _ in range(rng.poisson(8 * factors.vessel_density)):
            start = trunk[rng.integers(len(trunk) // 12, len(trunk) - 4)]
            ahead = trunk[min(len(trunk) - 1, np.searchsorted(-trunk[:, 2], -start[2]) + 3), :2] - start[:2]
            heading = np.arctan2(ahead[1], ahead[0]) + rng.choice([-1, 1]) * rng.uniform(0.5, 1.3)
            way = np.array([np.cos(heading), np.sin(heading)])
            inward = -start[:2] / max(np.hypot(*start[:2]), 1e-6)
            length = rng.uniform(1.0, 2.6)
            ends = [
                start[:2] + s * length * (way * (1 - 0.35 * s) + inward * 0.35 * s) for s in (0, 0.35, 0.7, 1)
            ]
            branches.append(_curve(np.array(ends), start[2] * rng.uniform(0.38, 0.62), rng))
    points = np.concatenate(trunks + branches)
    return points[np.hypot(points[:, 0], points[:, 1]) > 0.45]


def layer_thickness(eye: Eye, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thickness in mm of the nine layers over Bruch's membrane and the choroid [10,D,W]; the disc [D,W]."""
    f = eye.factors
    r = np.hypot(u, v)
    du, dv = u - f.disc_u_mm, v - f.disc_v_mm
    from_disc = np.hypot(du, dv)

    def pit_of(width: float) -> np.ndarray:
        return np.asarray(1 - np.exp(-((r / (width * f.pit_width_mm)) ** 2)))

    angle = np.abs(np.arctan2(dv, -du))  # 0 towards the fovea, pi nasal
    bend = np.clip(from_disc - 1, 0, 6) * 0.10  # bundles arch back towards the raphe
    bundle = np.exp(-(((angle + bend - 1.35) / 0.55) ** 2))
    out = np.clip(from_disc - f.disc_radius_mm, 0, None)
    rnfl = (0.010 + (0.045 + 0.105 * bundle) * np.exp(-out / 2.1)) * (1 - np.exp(-((r / 0.9) ** 3)))
    thickness = np.stack(
        [
            f.rnfl * rnfl + 0.002,
            f.gcl_ipl * 0.052 * pit_of(1) * (0.22 + 0.78 * np.exp(-((r / 2.3) ** 2))) + 0.001,
            f.gcl_ipl * 0.042 * pit_of(0.9) * (0.5 + 0.5 * np.exp(-((r / 2.5) ** 2))) + 0.001,
            f.inl * 0.040 * pit_of(0.8) * (0.75 + 0.25 * np.exp(-((r / 2.5) ** 2))) + 0.001,
            0.028 * (1 - 0.7 * np.exp(-((r / 0.4) ** 2))),
            f.onl * (0.058 + 0.050 * np.exp(-((r / 0.8) ** 2))),
            0.026 + 0.006 * np.exp(-((r / 0.4) ** 2)),
            0.036 + 0.014 * np.exp(-((r / 0.4) ** 2)),
            np.full_like(u, RPE_BAND_MM),
            f.choroid_mm * (1.03 - 0.018 * (u + 0.4) - 0.010 * u**2 - 0.010 * v**2).clip(0.35, None),
        ]
    )
    ku, kv, phase, amplitude = np.moveaxis(eye.ripples, -1, 0)[..., None, None]
    waves = (amplitude * np.sin(ku * u + kv * v + phase)).sum(axis=1)
    thickness *= 1 + waves * np.array([1, 1, 1, 1, 1, 1, 0.3, 0.3, 0, 2.5])[:, None, None]
    disc = 1 / (1 + np.exp(np.clip((from_disc - f.disc_radius_mm) / 0.035, -40, 40)))
    return thickness, disc


def _bumps(rows: np.ndarray, u: np.ndarray, v: np.ndarray, power: int = 2) -> np.ndarray:
    """Largest of the bumps (u, v, width, height) at each position; power 4 gives flat-topped domes."""
    height = np.zeros_like(u)
    for cu, cv, width, peak in rows:
        np.maximum(height, peak * np.exp(-((np.hypot(u - cu, v - cv) / width) ** power)), out=height)
    return height


def sample(eye: Eye, u: np.ndarray, v: np.ndarray, column_mm: float) -> Anatomy:
    """The eye at fundus positions u, v [D,W] mm; `column_mm` is the A-scan distance."""
    f = eye.factors
    thickness, disc = layer_thickness(eye, u, v)
    drusen = _bumps(eye.drusen, u, v) * (1 - disc)
    srf = _bumps(eye.srf, u, v, power=4)
    srf = np.where(srf > 0.006, srf, 0.0) * (1 - disc)
    for cu, cv, lateral, axial, level in eye.cysts:  # swelling around each cyst
        thickness[int(level)] += axial * np.exp(-(((u - cu) ** 2 + (v - cv) ** 2) / (1.7 * lateral) ** 2))
    thickness[5] = np.maximum(thickness[5] - 0.45 * drusen, 0.012)  # the ONL thins over drusen
    # In the disc only nerve fibres remain: a rim falling into the cup, all deeper layers end.
    from_disc = np.hypot(u - f.disc_u_mm, v - f.disc_v_mm) / f.disc_radius_mm
    thickness[1:8] *= 1 - disc
    thickness[9] *= 1 - 0.9 * disc
    cup = np.exp(-((from_disc / 0.50) ** 3)) * (f.cup_depth_mm + 0.08)
    thickness[0] = thickness[0] * (1 - disc) + disc * np.maximum(0.20 * f.rnfl + 0.06 - cup, -0.35)
    heights = np.empty((len(SURFACES), *u.shape))
    heights[9] = 0.0
    heights[10] = -thickness[9]
    heights[8] = thickness[8] + drusen
    heights[7] = heights[8] + srf + thickness[7]
    for layer in range(6, -1, -1):
        heights[layer] = heights[layer + 1] + thickness[layer]
    ilm = heights[0].copy()
    for surface in range(1, 9):  # a deep cup pushes what is below it down
        heights[surface] = np.where(
            disc > 0.02, np.minimum(heights[surface], ilm - 0.004 * surface * disc), heights[surface]
        )
    heights[9] = np.minimum(heights[9], heights[8] - RPE_BAND_MM)
    heights[10] = np.minimum(heights[10], heights[9] - 0.02)
    distance, nearest = cKDTree(eye.vessel_points[:, :2]).query(np.column_stack([u.ravel(), v.ravel()]))
    radius = eye.vessel_points[nearest, 2].reshape(u.shape)
    coverage = np.clip((radius - distance.reshape(u.shape)) / column_mm + 0.5, 0, 1)
    coverage *= np.minimum(2 * radius / column_mm, 1)
    return Anatomy(heights, drusen, srf, coverage, radius, disc)


def scan_positions(
    protocol: Protocol, shape: Shape, spacing_mm: Triple, laterality: str, eye: Eye, rng: np.random.Generator
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
