"""Flow of blood in the phantom: how much each voxel of an OCTA-type scan moves, and its en-face slabs.

In: a scan's truth file, its person and eye. Out: uint8 flow [D, H, W] in the frame order of the scan, and
uint8 images [D, W] of four slabs. The vessels are those that the structural scan shows as bright walls with
shadows; capillaries lie in two plexuses and below Bruch's membrane, where no structural voxel shows them, and
none near the fovea nor in patches that severity makes. Below a vessel its flow repeats, weaker, in the bright
layers, as a projection artefact does in real cubes.
"""

from collections.abc import Mapping

import numpy as np
from scipy.ndimage import gaussian_filter

from data_setup.phantom.anatomy import make_eye, sample
from data_setup.phantom.cohort import Factors

SLABS = {  # name -> its borders: (surface's index, mm below it)
    "superficial": ((0, 0.0), (3, 0.0)),
    "deep": ((3, 0.0), (5, 0.0)),
    "outer_retina": ((5, 0.0), (8, 0.0)),
    "choriocapillaris": ((9, 0.0), (9, 0.020)),
}
GAIN = 2.2  # of an en-face image over the mean flow of its slab
CHORIO_MM = SLABS["choriocapillaris"][1][1]
CAPILLARY_MM = 0.04  # of a mesh: voxels wider than this show its mean
SVP, DCP, CHORIO, TAIL, NOISE = 0.42, 0.34, 0.35, 0.30, 0.05  # flow of each, 1: of a large vessel
FRAMES = 16  # B-scans that are made together


def flow_of(truth: Mapping[str, np.ndarray], person_id: int, laterality: str, seed: int) -> np.ndarray:
    """The flow cube uint8 [D, H, W] of a scan; a function of its arguments."""
    s = truth["surfaces"].astype(np.float32)
    d_mm, h_mm, w_mm = (float(mm) for mm in truth["spacing_mm"])
    rows = int(truth["shape"][1])
    u, v = truth["fundus_position_mm"].astype(float)
    identity = [seed, person_id, "RL".index(laterality)]
    values = dict(zip(truth["factor_names"].tolist(), truth["factors"].tolist(), strict=True))
    factors = Factors(**(values | {"age": int(values["age"])}))
    eye = make_eye(factors, np.random.default_rng([*identity, 1]))
    anatomy = sample(eye, u, v, w_mm)
    perfused = _perfused(factors, u, v, np.random.default_rng([*identity, 7])) * (1 - anatomy.disc)
    rng = np.random.default_rng([*identity, 8, s.shape[1]])
    networks = [_network(u.shape, d_mm, w_mm, size, rng) for size in (0.030, 0.040, 0.015)]
    svp, dcp, chorio = (amount * perfused for amount in (SVP, DCP, CHORIO))
    svp, dcp, chorio = svp * networks[0], dcp * networks[1], chorio * (0.5 + 0.5 * networks[2])
    chorio = np.where(perfused > 0, chorio, 0) * (1 - 0.5 * anatomy.vessel)
    z = np.arange(rows, dtype=np.float32)[None, :, None]
    cube = np.empty((s.shape[1], rows, s.shape[2]), np.uint8)
    for start in range(0, len(cube), FRAMES):
        part = slice(start, start + FRAMES)
        own = s[:, part, None, :]
        cover = anatomy.vessel[part, None, :]
        radius = anatomy.vessel_radius_mm[part, None, :] / h_mm
        centre = own[0] + 0.020 / h_mm + 0.9 * radius  # as render.py draws the wall
        flow = cover * np.exp(-(((z - centre) / np.maximum(radius, 0.8)) ** 2))
        flow = np.maximum(flow, svp[part, None, :] * _within(z, own[1], own[3]))
        flow = np.maximum(flow, dcp[part, None, :] * _within(z, own[3] + 0.5 * (own[4] - own[3]), own[5]))
        below = _within(z, own[9], own[9] + CHORIO_MM / h_mm)
        flow = np.maximum(flow, chorio[part, None, :] * below)
        noise = rng.standard_exponential(flow.shape, dtype=np.float32)
        tissue = NOISE * (0.25 + _within(z, own[0], own[10]))
        tail = _within(z, own[3], own[4]) + _within(z, own[7], own[9])
        flow = np.maximum(flow, TAIL * cover * tail * (z > centre))
        cube[part] = np.rint(255 * np.clip(flow + tissue * noise, 0, 1))
    return cube


def slab_image(cube_DHW: np.ndarray, truth: Mapping[str, np.ndarray], slab: str) -> np.ndarray:
    """The mean flow between a slab's borders, brightened, uint8 [D, W]. A row that a border cuts counts by
    the square of its share: a slab thinner than a row is no darker.
    """
    h_mm = float(truth["spacing_mm"][1])
    upper, lower = (truth["surfaces"][number] + mm / h_mm for number, mm in SLABS[slab])
    z = np.arange(cube_DHW.shape[1], dtype=np.float32)[None, :, None]
    weight = _within(z, upper[:, None, :], lower[:, None, :])
    mean = (weight * cube_DHW).sum(axis=1) / np.maximum(np.square(weight).sum(axis=1), 0.05)
    return np.rint(np.clip(GAIN * mean, 0, 255)).astype(np.uint8)


def _within(z: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """How much of each row lies between two heights, 0..1."""
    return np.clip(np.minimum(z + 0.5, lower) - np.maximum(z - 0.5, upper), 0, 1)


def _perfused(factors: Factors, u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Share of the capillaries that carry blood [D, W]: none by the fovea, few in patches."""
    radius = 0.26 + 0.03 * max(factors.severity, 0.0)
    result = 1 / (1 + np.exp(-np.clip((np.hypot(u, v) - radius) / 0.04, -40, 40)))
    for _ in range(int(rng.poisson(2.0 * max(factors.severity, 0.0)))):
        cu, cv = rng.normal(0, 1.8, 2)
        size = rng.uniform(0.25, 0.55)
        result = result * (1 - 0.85 * np.exp(-((np.hypot(u - cu, v - cv) / size) ** 4)))
    return result * factors.vessel_density


def _network(
    shape: tuple[int, ...], d_mm: float, w_mm: float, size_mm: float, rng: np.random.Generator
) -> np.ndarray:
    """A mesh of thin lines [D, W], 0..1: where smoothed noise passes through zero."""
    noise = rng.standard_normal(shape)
    noise = gaussian_filter(noise, (size_mm / d_mm, size_mm / w_mm), mode="wrap")
    lines = np.exp(-((noise / (0.5 * noise.std())) ** 2))
    contrast = min(1.0, CAPILLARY_MM / (d_mm * w_mm) ** 0.5)
    return np.asarray(0.6 + 0.65 * contrast * (lines - lines.mean()))
