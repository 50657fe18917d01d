"""The golden eye: a small phantom scan that no flip, swap or other scale leaves as it is.

In: nothing. Out: uint8 [16, 128, 96], its spacing in mm and its direction. Layers of different brightness
under a surface that is tilted along both axes, a foveal pit off the centre, a disc and nerve fibres on one
side, vessels with shadows, speckle. data_setup/phantom draws eyes like people's; this one only has to tell
faults apart, and is small enough to lie beside the weights.
"""

from __future__ import annotations

import numpy as np

SHAPE = (16, 128, 96)
# 5.95 x 2.3 x 5.93 mm, and no multiple of a usual target spacing: there many sums fall on a half of a grey
# value, and the order in which a runtime adds decides how they are rounded
SPACING_MM = (0.3719, 0.01793, 0.0618)
FIRST_IS_SUPERIOR = True
# thickness in mm and brightness, from the inner surface down
LAYERS = (
    (0.03, 170),
    (0.06, 120),
    (0.04, 150),
    (0.04, 95),
    (0.09, 60),
    (0.03, 185),
    (0.02, 225),
    (0.25, 110),
)
VITREOUS, SCLERA = 14, 45


def golden_eye() -> np.ndarray:
    """uint8 [D, H, W]: the first B-scan is superior, axial rows run from the vitreous down."""
    depth, height, width = SHAPE
    v, u = np.meshgrid(
        (np.arange(depth) + 0.5) * SPACING_MM[0] - 3.4,  # mm from the fovea, inferior
        (np.arange(width) + 0.5) * SPACING_MM[2] - 2.6,  # mm from the fovea, nasal
        indexing="ij",
    )
    pit = 0.1 * np.exp(-(u**2 + v**2) / 0.5)
    fibres = 0.05 * np.exp(-((u - 2.2) ** 2) / 2 - (v + 1) ** 2 / 3)
    disc = np.exp(-(((u - 3) ** 2 + (v - 0.4) ** 2) ** 2) / 0.3)
    surface = 0.75 + 0.05 * u - 0.04 * v + 0.012 * (u**2 + v**2)
    z = ((np.arange(height) + 0.5) * SPACING_MM[1])[None, :, None]
    grey = np.full(SHAPE, float(VITREOUS))
    top = surface + pit
    for number, (thickness, brightness) in enumerate(LAYERS):
        grey = np.where(z >= top[:, None], brightness * (1 - 0.5 * disc[:, None]), grey)
        inner = 1 - np.clip(pit / 0.11, 0, 1) if number in (1, 2) else 1.0
        top = top + thickness * inner + (fibres if number == 0 else 0)
    grey = np.where(z >= top[:, None], SCLERA, grey)
    vessels = sum(
        np.exp(-((v - a * (u - 3) ** 2 - b) ** 2) / 0.02)
        for a, b in ((0.12, 0.9), (-0.2, -0.7), (-0.05, 2.1))
    )
    grey = np.where(z > surface[:, None] + 0.06, grey * (1 - 0.6 * np.clip(vessels, 0, 1)[:, None]), grey)
    speckle = np.random.default_rng(0).rayleigh(0.8, SHAPE)
    return np.clip(grey * (0.55 + 0.45 * speckle), 0, 255).astype(np.uint8)
