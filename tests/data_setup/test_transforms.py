"""data_setup/{transforms,field,normalisation}.py: where every voxel went and what is read of it."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform, Randomizable
from scipy.ndimage import map_coordinates

from data_setup import normalisation, transforms
from data_setup.masks import MaskPlan
from data_setup.normalisation import normalise
from data_setup.transforms import (
    EDGE_TOLERANCE,
    NEUTRAL_INTENSITY,
    Augmentation,
    JEPAMaskd,
    RandGeometryd,
    RandIntensityParamsd,
    geometry_matrix,
    identity_matrix,
    random_stream,
    resample,
    token_share,
    token_valid,
    voxel_valid,
)
from utils.config.schema import MaskFamily
from utils.counter_rng import counter_bits, counter_normal, counter_uniform

SIZE = (12, 40, 30)
SPACING = (0.1, 0.01, 0.03)  # mm; anisotropic on purpose
STILL = {
    "flip_w": False,
    "rotate_dw_deg": 0.0,
    "rotate_hw_deg": 0.0,
    "scale": 1.0,
    "shift_fraction": (0.0, 0.0, 0.0),
}
MOTIONS = {
    "flip": STILL | {"flip_w": True},
    "rotation": STILL | {"rotate_dw_deg": 10.0},
    "tilt": STILL | {"rotate_hw_deg": -3.0},
    "scale": STILL | {"scale": 1.1},
    "shift": STILL | {"shift_fraction": (0.05, -0.05, 0.04)},
    "all": {
        "flip_w": True,
        "rotate_dw_deg": -7.0,
        "rotate_hw_deg": 2.5,
        "scale": 0.93,
        "shift_fraction": (0.02, 0.03, -0.05),
    },
}
OFF = Augmentation().times(0)


def noise_volume(seed: int = 0, size: tuple[int, int, int] = SIZE) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def sample(volume: torch.Tensor | None = None) -> dict[str, object]:
    volume = noise_volume() if volume is None else volume
    box = np.array([v for n in volume.shape for v in (0, n)], np.float32)
    return {"volume": volume, "spacing": np.array(SPACING), "valid_box": box}


def source_of(matrix: np.ndarray, index: np.ndarray) -> np.ndarray:
    return matrix[:, :3].astype(np.float64) @ index + matrix[:, 3]


def boxes(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


@pytest.mark.parametrize("motion", MOTIONS.values(), ids=MOTIONS)
def test_resample_is_one_trilinear_sampling(motion: dict) -> None:
    """Against the plain three-dimensional way, which knows nothing of the factorisation."""
    volume, matrix = noise_volume(), geometry_matrix(SIZE, SPACING, **motion)
    index = np.stack(np.meshgrid(*map(np.arange, SIZE), indexing="ij")).reshape(3, -1)
    source = matrix[:, :3].astype(np.float64) @ index + matrix[:, 3:]
    plain = map_coordinates(volume.numpy().astype(np.float64), source, order=1, mode="grid-constant")
    difference = resample(volume, matrix).numpy().ravel() - plain
    assert np.abs(difference).max() < 0.51  # rounding to whole grey values


def test_motion_is_in_millimetres_about_the_centre() -> None:
    centre = (np.array(SIZE) - 1) / 2
    spacing = np.array(SPACING)

    def moved(offset_mm: tuple[float, float, float], **motion: object) -> np.ndarray:
        matrix = geometry_matrix(SIZE, SPACING, **(STILL | motion))
        return (source_of(matrix, centre + np.array(offset_mm) / spacing) - centre) * spacing

    turned = moved((0.3, 0.0, 0.4), rotate_dw_deg=10.0)
    assert np.hypot(turned[0], turned[2]) == pytest.approx(0.5, abs=1e-5)
    angle = math.atan2(turned[0], turned[2]) - math.atan2(0.3, 0.4)
    assert math.degrees(angle) == pytest.approx(10.0, abs=1e-3)
    assert moved((0.0, 0.0, 0.4), rotate_hw_deg=3.0)[1] == pytest.approx(
        0.4 * math.tan(math.radians(3)), abs=1e-5
    )
    assert moved((0.1, 0.1, 0.1), scale=1.1) == pytest.approx(np.full(3, 0.1 / 1.1), abs=1e-5)
    shifted = moved((0.0, 0.0, 0.0), shift_fraction=(0.05, -0.05, 0.0))
    assert shifted == pytest.approx([0.05 * 12 * 0.1, -0.05 * 40 * 0.01, 0.0], abs=1e-5)


def test_identity_is_exact() -> None:
    volume = noise_volume()
    geometry = RandGeometryd(OFF)
    geometry.set_random_state(state=random_stream(0, 0, 0, 0))
    out = geometry(sample(volume))
    assert torch.equal(out["volume"], volume)
    assert np.array_equal(out["matrix"], identity_matrix())


def test_geometry_is_drawn_once_and_intensity_per_view() -> None:
    """A view is the one volume seen through its own intensities: token i is the same place in both."""
    transforms = (
        RandGeometryd(Augmentation()),
        RandIntensityParamsd(replace(Augmentation(), intensity_prob=1.0)),
    )
    out: dict = sample()
    for stream, transform in enumerate(transforms):
        assert isinstance(transform, Randomizable)
        assert isinstance(transform, MapTransform)
        transform.set_random_state(state=random_stream(3, 1, 9, stream))
        out = transform(out)
    assert out["volume"].shape == SIZE
    assert out["volume"].dtype == torch.uint8
    assert not isinstance(out["volume"], MetaTensor)
    assert out["matrix"].shape == (3, 4)
    context, target = out["intensity"]
    assert (context != target).all()
    assert out["noise_seed"][0] != out["noise_seed"][1]
    assert torch.equal(out["volume"], resample(noise_volume(), out["matrix"]))


def test_a_stream_is_a_function_of_seed_step_and_position() -> None:
    def drawn(seed: int, step: int, position: int) -> tuple[bytes, bytes]:
        geometry, intensity = RandGeometryd(Augmentation()), RandIntensityParamsd(Augmentation())
        geometry.set_random_state(state=random_stream(seed, step, position, 0))
        intensity.set_random_state(state=random_stream(seed, step, position, 1))
        return geometry(sample())["matrix"].tobytes(), intensity({})["noise_seed"].tobytes()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    others = [drawn(0, 2, 3), drawn(1, 0, 3), drawn(1, 2, 4), drawn(1, 2, 3)]
    for values in zip(*others, strict=True):
        assert len(set(values)) == 4


def test_strength_narrows_all_ranges() -> None:
    usual, half = Augmentation(), Augmentation().times(0.5)
    assert usual.times(1) == usual
    assert half.scale_range == pytest.approx((0.95, 1.05))
    assert (half.flip_w_prob, half.rotate_dw_deg, half.noise_std) == (0.25, 5.0, 0.05)
    assert (OFF.scale_range, OFF.intensity_prob, OFF.gain, OFF.shift_fraction) == ((1.0, 1.0), 0, 0, 0)


def test_geometry_draws_fill_their_ranges() -> None:
    augment = Augmentation(flip_w_prob=0.5, rotate_dw_deg=10, rotate_hw_deg=3, shift_fraction=0.05)
    transform = RandGeometryd(augment)
    transform.set_random_state(state=np.random.RandomState(0))
    motions = []
    for _ in range(1000):
        transform.randomize()
        motions.append(transform.motion)
    assert abs(np.mean([m["flip_w"] for m in motions]) - 0.5) < 4 * 0.5 / math.sqrt(1000)
    shift = np.array([m["shift_fraction"] for m in motions])
    ranges = [
        ([m["rotate_dw_deg"] for m in motions], -10, 10),
        ([m["rotate_hw_deg"] for m in motions], -3, 3),
        ([m["scale"] for m in motions], *augment.scale_range),
        *((shift[:, axis], -0.05, 0.05) for axis in range(3)),
    ]
    for values, low, high in ranges:
        unit = (np.array(values) - low) / (high - low)
        assert 0 <= unit.min() < 0.01
        assert 0.99 < unit.max() <= 1
        assert abs(unit.mean() - 0.5) < 4 / math.sqrt(12 * len(unit))


def test_intensity_range_and_probability() -> None:
    augment = Augmentation(intensity_prob=0.8, gain=0.2, gamma=0.3, noise_std=0.1)
    transform = RandIntensityParamsd(augment)
    transform.set_random_state(state=np.random.RandomState(0))
    drawn = np.concatenate([transform({})["intensity"] for _ in range(1000)])
    neutral = (drawn == np.array(NEUTRAL_INTENSITY[0], np.float32)).all(1)
    assert abs(neutral.mean() - 0.2) < 4 * math.sqrt(0.16 / len(drawn))
    gain, gamma, noise = drawn[~neutral].T
    for values, limit in ((gain, 1.2), (gamma, 1.3)):
        assert values.min() >= 1 / limit - 1e-6
        assert values.max() <= limit + 1e-6
        assert abs(np.log(values).mean()) < 4 * np.log(values).std() / math.sqrt(len(values))
    assert noise.min() >= 0
    assert 0.09 < noise.max() <= 0.1
    transform.augment = OFF
    assert np.array_equal(transform({})["intensity"], np.array(NEUTRAL_INTENSITY, np.float32))


@pytest.mark.parametrize("motion", [STILL, *MOTIONS.values()], ids=["still", *MOTIONS])
def test_valid_voxels_are_those_made_of_the_field_alone(motion: dict) -> None:
    box = (2, 11, 5, 33, 4, 27)
    indicator = torch.zeros(SIZE, dtype=torch.uint8)
    indicator[2:11, 5:33, 4:27] = 255
    matrix = geometry_matrix(SIZE, SPACING, **motion)
    valid = voxel_valid(torch.from_numpy(matrix)[None], boxes(*box), SIZE)[0]
    moved = resample(indicator, matrix)
    assert valid.any()
    assert not valid.all()
    assert int(moved[valid].min()) >= 254  # nothing from outside within the tolerance of the edge
    # And none is missed, but for those within the tolerance of the edge.
    assert (moved == 255)[~valid].float().mean() < 0.02 + 20 * EDGE_TOLERANCE


@pytest.mark.parametrize("motion", [STILL, *MOTIONS.values()], ids=["still", *MOTIONS])
def test_token_share_is_the_mean_of_its_voxels(motion: dict) -> None:
    patch, grid = (4, 8, 10), (3, 5, 3)
    matrix = torch.from_numpy(geometry_matrix(SIZE, SPACING, **motion))[None].repeat(2, 1, 1)
    box = torch.cat([boxes(2, 11, 5, 33, 4, 27), boxes(0, 12, 0, 40, 0, 30)])
    valid = voxel_valid(matrix, box, SIZE).float()
    by_hand = valid.view(2, 3, 4, 5, 8, 3, 10).mean((2, 4, 6)).flatten(1)
    torch.testing.assert_close(token_share(matrix, box, grid, patch), by_hand)
    assert torch.equal(token_valid(matrix, box, grid, patch), by_hand >= 0.5)


def test_normalise_by_hand() -> None:
    volume = torch.stack([noise_volume(1), noise_volume(2)])
    matrix = torch.eye(3, 4).repeat(2, 1, 1)
    box = torch.cat([boxes(0, 12, 0, 40, 0, 30), boxes(2, 11, 5, 33, 4, 27)])
    inside = volume[1, 2:11, 5:33, 4:27].float()
    mean = torch.stack([volume[0].float().mean(), inside.mean()])
    std = torch.stack([volume[0].float().std(correction=0), inside.std(correction=0)])
    plain = normalise(volume, matrix, box, mean, std)
    assert plain.shape == (2, 1, *SIZE)
    assert plain.dtype == torch.float32
    z = plain[1, 0, 2:11, 5:33, 4:27]
    torch.testing.assert_close(z, (inside - mean[1]) / std[1])
    assert abs(float(z.mean())) < 1e-5
    assert float(z.std(correction=0)) == pytest.approx(1, abs=1e-5)
    outside = torch.ones(SIZE, dtype=torch.bool)
    outside[2:11, 5:33, 4:27] = False
    assert (plain[1, 0][outside] == 0).all()

    intensity = torch.tensor([[1.2, 0.8, 0.0], [0.9, 1.3, 0.1]])
    seeds = torch.tensor([5, 2**61 + 3])
    view = normalise(volume, matrix, box, mean, std, intensity, seeds)
    noise = counter_normal(seeds[1], torch.arange(volume[1].numel())).view(SIZE)
    by_hand = ((volume[1].float() / 255) ** 1.3 * 255 - mean[1]) / std[1] * 0.9 + 0.1 * noise
    torch.testing.assert_close(view[1, 0][~outside], by_hand[~outside])
    assert (view[1, 0][outside] == 0).all()
    neutral = torch.tensor(NEUTRAL_INTENSITY)
    torch.testing.assert_close(normalise(volume, matrix, box, mean, std, neutral, seeds), plain)


def test_normalise_does_not_depend_on_the_batch_layout() -> None:
    volume = torch.stack([noise_volume(i) for i in range(3)])
    matrix = torch.from_numpy(
        np.stack([geometry_matrix(SIZE, SPACING, **m) for m in list(MOTIONS.values())[:3]])
    )
    box = boxes(0, 12, 0, 40, 0, 30).repeat(3, 1)
    mean, std = torch.tensor([100.0, 90.0, 120.0]), torch.tensor([50.0, 60.0, 70.0])
    intensity, seeds = torch.tensor([[1.1, 1.2, 0.1]]).repeat(3, 1), torch.tensor([1, 2, 3])
    whole = normalise(volume, matrix, box, mean, std, intensity, seeds)
    for i in range(3):
        one = slice(i, i + 1)
        alone = normalise(volume[one], matrix[one], box[one], mean[one], std[one], intensity[one], seeds[one])
        assert torch.equal(alone[0], whole[i])


def test_a_processor_normalises_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cores belong to the loader's workers; the caller gets its threads back."""
    seen = []
    real = normalisation.blocks

    def counted(lines: int, line_voxels: int) -> Iterator[slice]:
        seen.append(torch.get_num_threads())
        return real(lines, line_voxels)

    monkeypatch.setattr(normalisation, "blocks", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        normalise(noise_volume()[None], torch.eye(3, 4)[None], boxes(0, 12, 0, 40, 0, 30), *torch.ones(2, 1))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def of_two_volumes(matrix: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Arguments of `normalise`."""
    return (
        torch.stack([noise_volume(1), noise_volume(2)]),
        torch.from_numpy(matrix).repeat(2, 1, 1),
        boxes(2, 11, 5, 33, 4, 27).repeat(2, 1),
        torch.tensor([100.0, 110.0]),
        torch.tensor([50.0, 60.0]),
        torch.tensor([[1.2, 0.8, 0.1], [0.9, 1.3, 0.05]]),
        torch.tensor([5, 2**61 + 3]),
    )


@pytest.mark.parametrize("voxels", [1, 2000, 5000])
def test_blocks_change_no_number(monkeypatch: pytest.MonkeyPatch, voxels: int) -> None:
    """The test volumes fit into one block; here they take several, the last one smaller."""
    matrix = geometry_matrix(SIZE, SPACING, **MOTIONS["all"])
    arguments = of_two_volumes(matrix)
    whole = resample(noise_volume(), matrix), normalise(*arguments)
    monkeypatch.setattr(transforms, "BLOCK_VOXELS", voxels)
    assert torch.equal(resample(noise_volume(), matrix), whole[0])
    torch.testing.assert_close(normalise(*arguments), whole[1], rtol=1e-6, atol=1e-6)


def test_mask_transform_prefers_valid_tokens() -> None:
    plan = MaskPlan((3, 5, 3), 18, 13, (MaskFamily(scale=0.3, tube=True),))
    transform = JEPAMaskd(plan, (4, 8, 10))
    transform.set_random_state(state=np.random.RandomState(0))
    data = sample() | {"matrix": identity_matrix(), "valid_box": np.array([0, 12, 0, 24, 0, 30], np.float32)}
    out = transform(data)
    is_valid = token_valid(torch.eye(3, 4)[None], boxes(0, 12, 0, 24, 0, 30), (3, 5, 3), (4, 8, 10))[0]
    for key, count in (("context", 18), ("target", 13)):
        assert out[key].shape == (count,)
        assert out[key].dtype == np.int64
        assert np.array_equal(out[f"{key}_valid"], is_valid[torch.from_numpy(out[key])].float().numpy())


def reference_bits(seed: int, counter: int) -> int:
    """The hash in plain integers."""
    word = 2**32 - 1

    def mix(x: int, key: int = 0) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D + key) & word
        x = ((x ^ x >> 15) * 0x846CA68B) & word
        return x ^ x >> 16

    low, high = seed & word, seed >> 32
    key_1 = mix(low ^ mix(high ^ 0x9E3779B9))
    key_2 = mix((key_1 + 0x9E3779B9 & word) ^ high)
    return mix(counter ^ key_1, key_2)


def test_counter_hash_is_the_same_in_plain_integers() -> None:
    for seed in (0, 1, 2**31, 2**32 + 7, 2**61 + 12345, 2**63 - 1):
        counters = [0, 1, 2, 255, 65536, 9437183, 2**31 - 1]
        bits = counter_bits(torch.tensor(seed), torch.tensor(counters))
        assert bits.dtype == torch.int32
        expected = [reference_bits(seed, c) for c in counters]
        assert [int(b) % 2**32 for b in bits] == expected
        uniform = counter_uniform(torch.tensor(seed), torch.tensor(counters))
        assert uniform.tolist() == [(e >> 8) / 2**24 for e in expected]


def test_counter_numbers_look_random() -> None:
    n = 400_000
    counters = torch.arange(n)
    streams = counter_normal(torch.tensor([[0], [1], [2**32], [2**61 + 5]]), counters).double()
    assert streams.mean(1).abs().max() < 4 / math.sqrt(n)
    assert (streams.var(1) - 1).abs().max() < 4 * math.sqrt(2 / n)
    for lag in (1, 2, 30, 384, 1200):
        assert (streams[:, lag:] * streams[:, :-lag]).mean(1).abs().max() < 4.5 / math.sqrt(n - lag)
    between = (streams @ streams.T / n).fill_diagonal_(0)
    assert between.abs().max() < 4.5 / math.sqrt(n)
    uniform = counter_uniform(torch.tensor(7), counters)
    assert 0 <= float(uniform.min()) < 1e-4
    assert 1 - 1e-4 < float(uniform.max()) < 1
    histogram = torch.histc(uniform, 64, 0, 1)
    chi_square = float(((histogram - n / 64) ** 2 / (n / 64)).sum())
    assert abs(chi_square - 63) < 4 * math.sqrt(2 * 63)


@pytest.mark.gpu
def test_device_gives_the_same_numbers() -> None:
    seeds, counters = torch.tensor([[1], [2**61 + 5]]), torch.arange(100_000)
    for function in (counter_bits, counter_uniform, counter_normal):
        assert torch.equal(function(seeds, counters), function(seeds.cuda(), counters.cuda()).cpu())
    arguments = of_two_volumes(geometry_matrix(SIZE, SPACING, **MOTIONS["all"]))
    on_device = normalise(*(a.cuda() for a in arguments)).cpu()
    torch.testing.assert_close(on_device, normalise(*arguments))
