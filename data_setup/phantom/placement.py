"""Where a phantom's scan lies: on the fundus, and how deep in the field.

In: an eye, a protocol with shape and spacing, a random generator. Out: the fundus position of every A-scan,
and the depth of Bruch's membrane there.
"""

import numpy as np
from scipy.ndimage import gaussian_filter1d

from data_setup.phantom.anatomy import Anatomy, Eye
from data_setup.phantom.groups import ONH_CIRCLES_MM, ONH_RADIAL_SCALE
from data_setup.protocols import Protocol, Shape, Triple


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
