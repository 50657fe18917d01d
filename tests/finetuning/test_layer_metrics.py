"""Errors of surfaces against kept libraries and by hand; ETDRS sectors against the phantom's anatomy."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance, compute_iou

from data_setup.attach.grid import lay_on_grid
from data_setup.phantom.anatomy import SURFACES, Eye, make_eye, place, sample, scan_positions
from data_setup.phantom.cohort import make_participants
from data_setup.protocols import BY_NAME
from finetuning.dense.surfaces import (
    QUADRANTS,
    SECTORS,
    boundary_error_um,
    etdrs,
    find_fovea,
    hausdorff95_um,
    layer_overlap,
)

SIZE = (5, 40, 7)
RECOMMENDED_MM, SMOKE_MM = (0.09375, 0.006, 0.015625), (0.375, 0.024, 0.09375)
LAYERS = ((0, 9), (4, 5), (0, 1))  # the retina, the outer plexiform and the nerve fibre layer


def surfaces(seed: int) -> np.ndarray:
    """Three ordered surfaces half way between voxels, so that layers are whole voxels [3, D, W]."""
    rng = np.random.default_rng(seed)
    steps = rng.integers([[[4]], [[3]], [[5]]], [[[9]], [[8]], [[12]]], (3, SIZE[0], SIZE[2]))
    return steps.cumsum(axis=0) - 0.5


def masks(some: np.ndarray) -> torch.Tensor:
    """One-hot layers [1, 2, D, H, W] of three surfaces."""
    h = np.arange(SIZE[1])[None, :, None]
    layers = [(h > a[:, None]) & (h < b[:, None]) for a, b in pairwise(some)]
    return torch.from_numpy(np.stack(layers))[None].float()


def test_overlap_is_that_of_monai() -> None:
    truth, predicted = surfaces(0), surfaces(1)
    dice, iou = layer_overlap(predicted, truth)
    np.testing.assert_allclose(dice, compute_dice(masks(predicted), masks(truth))[0], rtol=1e-6)
    np.testing.assert_allclose(iou, compute_iou(masks(predicted), masks(truth))[0], rtol=1e-6)
    assert layer_overlap(truth, truth)[0].tolist() == [1, 1]


def test_overlap_counts_known_a_scans_alone() -> None:
    """Where the device has no surface, whatever is predicted does not count."""
    truth, predicted = surfaces(0), surfaces(1)
    truth[1, :, 3:] = np.nan
    dice, _ = layer_overlap(predicted, truth)
    np.testing.assert_allclose(dice, layer_overlap(predicted[..., :3], truth[..., :3])[0])
    truth[1] = np.nan
    assert np.isnan(layer_overlap(predicted, truth)[0]).all()


@pytest.mark.filterwarnings("ignore:monai.metrics.utils get_mask_edges:FutureWarning")  # of its own call
def test_hausdorff_is_that_of_monai() -> None:
    """Of sheets one voxel thick, whose edge is the sheet itself."""
    rng = np.random.default_rng(2)
    truth, predicted = (rng.integers(5, 35, (SIZE[0], SIZE[2])) for _ in range(2))
    h = np.arange(SIZE[1])[None, :, None]
    sheets = [torch.from_numpy(h == s[:, None])[None, None].float() for s in (predicted, truth)]
    expected = compute_hausdorff_distance(
        *sheets, include_background=True, percentile=95, spacing=[100.0, 6.0, 15.0]
    )
    got = hausdorff95_um(predicted.astype(float), truth.astype(float), (0.1, 0.006, 0.015))
    assert got == pytest.approx(float(expected[0, 0]), rel=1e-6)


def test_boundary_error_by_hand() -> None:
    truth = np.array([[[10.0, 12.0], [np.nan, 11.0]], [[20.0, 20.0], [20.0, np.nan]], [[np.nan] * 2] * 2])
    predicted = truth + np.array([1.0, -2.0, 0.0])[:, None, None]
    predicted[np.isnan(predicted)] = 7
    predicted[0, 0, 0] += 3  # off by 4, 1 and 1
    error = boundary_error_um(predicted, truth, 0.005)
    np.testing.assert_allclose(error, [10, 10, np.nan])


@cache
def eye_and_scan(laterality: str) -> tuple[Eye, np.ndarray, np.ndarray, np.ndarray, tuple[float, ...]]:
    """An eye, the positions u, v of a full-size macular scan, its surfaces in rows, its spacing."""
    person = make_participants(4, 0)[2]
    eye = make_eye(person.factors, np.random.default_rng(7))
    protocol = BY_NAME["maestro2_3d_macula_oct_oct"]
    rng = np.random.default_rng(3)
    spacing = (protocol.spacing_mm[0], protocol.spacing_mm[1], 2 * protocol.spacing_mm[2])
    shape = (152, protocol.shape[1], 304)  # a field of 7 mm, which has the grid wherever the eye looks
    u, v = scan_positions(protocol, shape, spacing, laterality, eye, rng)
    anatomy = sample(eye, u, v, spacing[2])
    base = place(anatomy, u, v, shape[1] * spacing[1], 0.004, rng)
    return eye, u, v, (base - anatomy.heights_mm) / spacing[1] - 0.5, spacing


def analytic_um(eye: Eye, to_fundus: np.ndarray, laterality: str) -> dict[str, np.ndarray]:
    """Sector means of LAYERS of the anatomy itself, by another polar rule than the one that is tested.

    `to_fundus` [2, 2]: mm along (W, D) of the scan -> (u, v).
    """
    result = {}
    for sector in SECTORS:
        ring, _, quadrant = sector.partition("_")
        low, high = {"centre": (0.0, 0.5), "inner": (0.5, 1.5), "outer": (1.5, 3.0)}[ring]
        radius, weight = np.polynomial.legendre.leggauss(16)
        radius = low + (radius + 1) / 2 * (high - low)
        angle = np.linspace(-np.pi, np.pi, 360, endpoint=False) + np.pi / 360
        right, up = np.outer(radius, np.cos(angle)), np.outer(radius, np.sin(angle))
        u, v = np.einsum("ij,jrt->irt", to_fundus, np.stack([right, -up]))
        heights = sample(eye, u, v, 0.02).heights_mm
        inside = {
            "": np.ones_like(up, bool),
            "superior": up > np.abs(right),
            "inferior": -up > np.abs(right),
            "nasal": (right if laterality == "R" else -right) > np.abs(up),
            "temporal": (right if laterality == "L" else -right) > np.abs(up),
        }[quadrant]
        area = (weight * radius)[:, None] * inside
        thickness = np.stack([heights[upper] - heights[lower] for upper, lower in LAYERS])
        result[sector] = 1000 * (thickness * area).sum(axis=(1, 2)) / area.sum()
    return result


def fovea_of(laterality: str) -> tuple[np.ndarray, tuple[float, float]]:
    """(mm along (W, D) of the scan -> (u, v), where the fovea is in the scan's B-scans and A-scans)."""
    _, u, v, _, spacing = eye_and_scan(laterality)
    per_w = np.array([u[0, 1] - u[0, 0], v[0, 1] - v[0, 0]]) / spacing[2]
    per_d = np.array([u[1, 0] - u[0, 0], v[1, 0] - v[0, 0]]) / spacing[0]
    to_fundus = np.stack([per_w, per_d], axis=1)
    right_mm, down_mm = np.linalg.solve(to_fundus, -np.array([u[0, 0], v[0, 0]]))
    return to_fundus, (down_mm / spacing[0], right_mm / spacing[2])


@pytest.mark.parametrize("laterality", ["L", "R"])
def test_etdrs_of_the_phantom_is_its_anatomy(laterality: str) -> None:
    """Of the surfaces as a scan has them, motion and tilt included, to half a micrometre."""
    eye, _, _, rows, spacing = eye_and_scan(laterality)
    to_fundus, fovea = fovea_of(laterality)
    retina = (rows[9] - rows[0]) * spacing[1] * 1000
    sought = find_fovea(retina, (spacing[0], spacing[2]))
    assert np.hypot((sought[0] - fovea[0]) * spacing[0], (sought[1] - fovea[1]) * spacing[2]) < 0.1
    expected = analytic_um(eye, to_fundus, laterality)
    for number, layer in enumerate(LAYERS):
        thickness = (rows[layer[1]] - rows[layer[0]]) * spacing[1] * 1000
        table = etdrs(thickness, (spacing[0], spacing[2]), fovea, laterality)
        names = [SURFACES[surface] for surface in layer]
        for sector in SECTORS:
            assert table[sector].share == 1
            assert table[sector].um == pytest.approx(expected[sector][number], abs=0.5), (names, sector)
    assert table["outer_nasal"].um > table["outer_temporal"].um + 5  # nerve fibres


@pytest.mark.parametrize(("grid_mm", "limit_um"), [(RECOMMENDED_MM, 0.5), (SMOKE_MM, 4.0)])
def test_the_grid_of_a_store_keeps_the_sectors(grid_mm: tuple[float, float, float], limit_um: float) -> None:
    """B-scans 0.375 mm apart flatten the pit, those of the recipe do not."""
    eye, _, _, rows, spacing = eye_and_scan("R")
    to_fundus, place = fovea_of("R")
    shape = (rows.shape[1], BY_NAME["maestro2_3d_macula_oct_oct"].shape[1], rows.shape[2])
    record = {
        f"{name}_before_{a}": v
        for name, of in zip(("shape", "spacing"), (shape, spacing), strict=True)
        for a, v in zip("dhw", of, strict=True)
    }
    record |= {f"spacing_after_{a}": mm for a, mm in zip("dhw", grid_mm, strict=True)}
    size = [2 * round(n * own / mm / 2) for n, own, mm in zip(shape, spacing, grid_mm, strict=True)]
    upper, lower = lay_on_grid(rows[[0, 9]], pd.Series(record), {"image_size": size})
    d, w = (
        (at - (shape[axis] - 1) / 2) * spacing[axis] / grid_mm[axis] + (size[axis] - 1) / 2
        for at, axis in zip(place, (0, 2), strict=True)
    )
    table = etdrs((lower - upper) * grid_mm[1] * 1000, (grid_mm[0], grid_mm[2]), (d, w), "R")
    for sector, expected in analytic_um(eye, to_fundus, "R").items():
        assert table[sector].share == 1
        assert table[sector].um == pytest.approx(expected[0], abs=limit_um), sector


def test_coarse_b_scans_keep_the_pit() -> None:
    """A Gaussian pit on B-scans 0.19 mm apart: its mean over the disc has a closed form."""
    spacing, fovea, width, depth = (0.19, 0.09), (16.3, 33.8), 0.45, 120.0
    d, w = np.mgrid[:33, :67].astype(float)
    radius = np.hypot((d - fovea[0]) * spacing[0], (w - fovea[1]) * spacing[1])
    table = etdrs(300 - depth * np.exp(-((radius / width) ** 2)), spacing, fovea, "R")
    share = (width / 0.5) ** 2
    assert table["centre"].um == pytest.approx(300 - depth * share * (1 - np.exp(-1 / share)), abs=0.2)


def test_a_sector_that_is_not_in_the_map_has_no_thickness() -> None:
    thickness = np.full((40, 80), 250.0)  # 4 mm of d: the outer superior and inferior sectors are cut
    table = etdrs(thickness, (0.1, 0.1), (19.5, 39.5), "R")
    assert table["outer_nasal"].um == pytest.approx(250)
    assert np.isnan(table["outer_superior"].um)
    assert 0.2 < table["outer_superior"].share < 0.75
    holes = np.full((80, 80), np.nan)
    assert all(np.isnan(v.um) for v in etdrs(holes, (0.1, 0.1), (39.5, 39.5), "R").values())
    with pytest.raises(ValueError, match="thickness near the middle"):
        find_fovea(holes, (0.1, 0.1))
    with pytest.raises(ValueError, match="expected L or R"):
        etdrs(thickness, (0.1, 0.1), (20, 40), "unknown")
    assert len(QUADRANTS) * 2 + 1 == len(SECTORS) == 9
