"""data_setup/resample.py: values, anti-aliasing and geometry against closed forms and MONAI."""

import numpy as np
import pandas as pd
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Spacing

from data_setup.attach.grid import lay_on_grid, lay_on_scan, nearest_voxels
from data_setup.resample import (
    BLENDED,
    NEAREST,
    Resampled,
    axis_weights,
    left_out,
    plane_weights,
    resample_frames,
)

ONE = (1.0, 1.0, 1.0)


def resample(volume: np.ndarray, spacing: tuple, size: tuple, target: tuple, **options: object) -> Resampled:
    """By the triangle along D too, as it is along the other axes."""
    return resample_frames(
        iter(volume), volume.shape, spacing, size, target, **{"planes": BLENDED, **options}
    )


def smooth(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    grid = np.stack(np.meshgrid(*(np.linspace(0, 1, n) for n in shape), indexing="ij"))
    phase = np.random.default_rng(seed).uniform(0, 6, 3)[:, None, None, None]
    return np.rint(127 + 100 * np.prod(np.sin(5 * grid + phase), axis=0)).astype(np.uint8)


def test_identity() -> None:
    volume = np.random.default_rng(0).integers(0, 256, (5, 7, 9), dtype=np.uint8)
    out = resample(volume, (0.1, 0.003, 0.01), (5, 7, 9), (0.1, 0.003, 0.01))
    np.testing.assert_array_equal(out.voxels, volume)
    assert out.valid_box == (0, 5, 0, 7, 0, 9)
    assert out.valid_fraction == 1.0
    assert out.lost_fraction == pytest.approx(0.0)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.37, 0.8, 1.0, 1.9, 3.3])
def test_a_ramp_stays_a_ramp(axis: int, factor: float) -> None:
    """Against the line itself at the target's centres; near the field's edge the kernel is one-sided."""
    size = 60
    ramp = np.rint(np.linspace(0, 255, size)).astype(np.uint8)
    shape = [1, 1, 1]
    shape[axis] = size
    spacing, target = list(ONE), list(ONE)
    target[axis] = factor
    out_size = [1, 1, 1]
    out_size[axis] = round(size / factor) - 1
    out = resample(ramp.reshape(shape), tuple(spacing), tuple(out_size), tuple(target)).voxels.ravel()
    position = (np.arange(out_size[axis]) + 0.5 - out_size[axis] / 2) * factor + size / 2 - 0.5
    inner = (position > factor + 1) & (position < size - 2 - factor)
    assert inner.sum() > 8
    assert np.abs(out[inner] - position[inner] * 255 / (size - 1)).max() <= 1.0


def test_fine_stripes_average_out() -> None:
    """Rows 0, 255, 0, 255 at 2.4 to 1: sampling them without a filter gives stripes that are not there."""
    volume = np.zeros((2, 240, 8), np.uint8)
    volume[:, 1::2] = 255
    out = resample(volume, (1, 1, 1), (2, 100, 8), (1, 2.4, 1)).voxels[:, 2:-2].astype(float)
    position = np.clip((np.arange(100) + 0.5) * 2.4 - 0.5, 0, 239)
    plain = np.interp(position, np.arange(240), volume[0, :, 0])[2:-2]
    assert np.ptp(plain) > 150
    assert np.ptp(out) < 16
    assert abs(out.mean() - 127.5) < 1


def test_the_grids_are_centred_on_each_other_and_the_box_is_exact() -> None:
    volume = np.full((4, 10, 6), 9, np.uint8)
    out = resample(volume, ONE, (8, 6, 7), ONE)
    # D padded 2 + 2, H cropped, W one voxel wider: centres half a voxel outside the field are on its edge
    assert out.valid_box == (2, 6, 0, 6, 0, 7)
    assert out.valid_fraction == pytest.approx(4 / 8)
    assert out.lost_fraction == pytest.approx(0.4)
    assert not out.voxels[:2].any()
    assert not out.voxels[6:].any()
    narrower = resample(volume, (1.0, 1.0, 0.99), (8, 6, 7), ONE)
    assert narrower.valid_box == (2, 6, 0, 6, 1, 6)


def test_growing_equals_monai_spacing() -> None:
    """MONAI samples from the first voxel's centre on; with 2 n - 1 voxels our grid is the same."""
    volume, spacing, target = smooth((6, 10, 8), seed=3), (0.4, 0.3, 0.5), (0.2, 0.15, 0.25)
    size = tuple(2 * n - 1 for n in volume.shape)
    ours = resample(volume, spacing, size, target).voxels
    affine = torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64))
    image = MetaTensor(torch.from_numpy(volume[None].astype(np.float32)), affine=affine)
    theirs = Spacing(pixdim=target, mode="bilinear", padding_mode="border", align_corners=True)(image)[0]
    assert theirs.shape == size
    assert np.abs(ours - theirs.numpy()).max() <= 0.51


@pytest.mark.parametrize(
    ("size", "target", "image_size"),
    [
        ((40, 70, 50), (1.0, 1.0, 1.0), (9, 30, 20)),  # wider than the grid: most of it is cut off
        ((9, 120, 33), (2.7, 3.1, 0.6), (5, 60, 60)),  # shrinks, shrinks into padding, grows
        ((7, 40, 90), (0.4, 0.9, 3.0), (30, 20, 21)),
    ],
)
@pytest.mark.parametrize("flip_d", [False, True])
def test_blocks_and_crops_are_the_plain_product(
    size: tuple[int, int, int],
    target: tuple[float, float, float],
    image_size: tuple[int, int, int],
    flip_d: bool,
) -> None:
    """Against the whole matrices in float64: nothing of the order of work is left but rounding."""
    volume = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    axes = [axis_weights(*a) for a in zip(size, ONE, image_size, target, strict=True)]
    exact = np.einsum(
        "dhw,xd,yh,zw->xyz", volume[::-1] if flip_d else volume, *(a.weights for a in axes),
        dtype=np.float64, optimize=True,
    )  # fmt: skip
    out = resample(volume, ONE, image_size, target, flip_d=flip_d)
    assert np.abs(out.voxels - exact).max() < 0.5001


def test_a_field_smaller_than_a_voxel_is_named() -> None:
    with pytest.raises(ValueError, match=r"field of 3 x 0\.001 mm: expected more than one voxel of the grid"):
        axis_weights(3, 0.001, 8, 0.5)


def test_resize_maps_the_whole_field() -> None:
    volume = smooth((10, 40, 30))
    out = resample(volume, (0.1, 0.01, 0.02), (5, 20, 60), (9.0, 9.0, 9.0), mode="resize")
    assert out.spacing_mm == pytest.approx((0.2, 0.02, 0.01))
    assert out.valid_box == (0, 5, 0, 20, 0, 60)
    assert out.lost_fraction == pytest.approx(0.0)
    assert abs(out.voxels.mean() - volume.mean()) < 1.0


def test_weights_sum_to_one_inside_and_nothing_outside() -> None:
    for size, spacing, target_size, target_spacing in [
        (7, 1.0, 30, 0.3),
        (900, 0.0026, 96, 0.024),
        (3, 1, 3, 9),
    ]:
        axis = axis_weights(size, spacing, target_size, target_spacing)
        start, stop = axis.valid
        np.testing.assert_allclose(axis.weights[start:stop].sum(axis=1), 1.0, rtol=1e-6)
        assert not axis.weights[:start].any()
        assert not axis.weights[stop:].any()


def test_too_few_frames_is_an_error() -> None:
    with pytest.raises(AssertionError, match="3 frames of a volume of 5"):
        resample_frames(iter(np.ones((3, 4, 4), np.uint8)), (5, 4, 4), ONE, (5, 4, 4), ONE)


COUNTS = (11, 12, 25, 48, 97, 144, 145)  # B-scans of a scan
PITCHES = [  # between B-scans, and between planes of the grid, mm
    *((0.03, 0.03), (0.0605, 0.12), (0.1, 0.12), (0.115, 0.12), (0.12, 0.12), (0.123, 0.12)),
    *((0.24, 0.12), (0.25, 0.12), (0.36, 0.12), (0.25, 0.25)),
]


@pytest.mark.parametrize(("pitch", "target"), PITCHES)
@pytest.mark.parametrize("planes", [NEAREST, BLENDED])
def test_no_b_scan_is_mixed_with_another(pitch: float, target: float, planes: str) -> None:
    """Image, surfaces and classes of a plane are of one B-scan, and come back; BLENDED mixes them."""
    worst_um = 0.0
    for count in COUNTS:
        for more in (-4, 1, 2):  # planes than the field has, odd and even
            size = max(4, round(count * pitch / target) + more)
            shape, spacing = (count, 20, 3), (pitch, 0.004, 0.02)
            rng = np.random.default_rng(count)
            label = rng.permutation(count).astype(np.uint8) + 1
            volume = np.broadcast_to(label[:, None, None], shape)
            rows = rng.uniform(2, 18, (1, count, 1)).repeat(3, axis=2).astype(np.float32)
            laid = resample(volume, spacing, (size, 20, 3), (target, 0.004, 0.02), planes=planes)
            record = {f"shape_before_{a}": n for a, n in zip("dhw", shape, strict=True)}
            record |= {f"spacing_before_{a}": mm for a, mm in zip("dhw", spacing, strict=True)}
            record |= {f"spacing_after_{a}": mm for a, mm in zip("dhw", laid.spacing_mm, strict=True)}
            geometry = {"image_size": [size, 20, 3], "planes": planes}
            for is_flipped in (False, True):
                facts = pd.Series(record | {"flipped_d": is_flipped})
                heights = lay_on_grid(rows, facts, geometry)
                back = lay_on_scan(heights, facts, geometry)[:, :: -1 if is_flipped else 1]
                own = np.setdiff1d(
                    np.flatnonzero(~np.isnan(back[0, :, 1])), left_out(count, pitch, size, target, planes)
                )
                worst_um = max(worst_um, np.abs(back - rows)[0, own].max() * 4)
            if planes == BLENDED:
                continue
            classes, _ = nearest_voxels(volume, facts, geometry)
            np.testing.assert_array_equal(classes, laid.voxels)
            d0, d1 = laid.valid_box[:2]
            source = np.argsort(label)[laid.voxels[d0:d1, 0, 0].astype(int) - 1]
            np.testing.assert_allclose(heights[0, d0:d1, 1], rows[0, source, 1], atol=1e-4)
            assert set(source) == set(own)
    assert (worst_um < 1) == (planes == NEAREST)


@pytest.mark.parametrize(
    ("count", "pitch", "size", "expected"),
    [
        (5, 0.12, 5, [0, 1, 2, 3, 4]),
        (5, 0.12, 6, [0, 1, 2, 3, 4, None]),  # half a step aside, where they coincide
        (4, 0.12, 6, [None, 0, 1, 2, 3, None]),
        (4, 0.24, 8, [0, 0, 1, 1, 2, 2, 3, 3]),
        (8, 0.08, 5, [0, 2, 3, 5, 6]),  # closer than planes: some are left out
    ],
)
def test_which_b_scan_a_plane_is(count: int, pitch: float, size: int, expected: list[int | None]) -> None:
    weights = plane_weights(count, pitch, size, 0.12).weights
    assert [int(row.argmax()) if row.any() else None for row in weights] == expected
    assert left_out(count, pitch, size, 0.12, NEAREST).tolist() == ([1, 4, 7] if pitch == 0.08 else [])


def test_dense_b_scans_are_filtered_as_before() -> None:
    for arguments in ((60, 0.06, 30, 0.12), (200, 0.012, 16, 0.12)):
        np.testing.assert_array_equal(plane_weights(*arguments).weights, axis_weights(*arguments).weights)


@pytest.mark.parametrize("is_flipped", [False, True])
def test_the_way_back_to_the_scan(is_flipped: bool) -> None:
    """A smooth surface goes to the grid and comes back, in the order of its file."""
    shape, spacing = (40, 200, 60), (0.15, 0.01, 0.1)
    record = {f"shape_before_{a}": n for a, n in zip("dhw", shape, strict=True)}
    record |= {f"spacing_before_{a}": s for a, s in zip("dhw", spacing, strict=True)}
    record |= {f"spacing_after_{a}": s for a, s in zip("dhw", (0.1, 0.02, 0.08), strict=True)}
    record |= {"flipped_d": is_flipped}
    d, w = np.meshgrid(np.linspace(0, 3, 40), np.linspace(0, 2, 60), indexing="ij")
    surface = (90 + 12 * np.sin(d) + 5 * w)[None].astype(np.float32)
    geometry = {"image_size": [64, 128, 80]}
    on_grid = lay_on_grid(surface, pd.Series(record), geometry)
    back = lay_on_scan(on_grid, record, geometry)
    expected = surface[:, ::-1] if is_flipped else surface
    assert back.shape == surface.shape
    np.testing.assert_allclose(back[:, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=0.25)
