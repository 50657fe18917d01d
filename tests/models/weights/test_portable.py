"""The portable encoder: the features of prepare and the loop, and a self-test that names each fault."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from packaging.requirements import Requirement
from torch import Tensor

from data_setup.normalisation import plain_view
from data_setup.resample import BLENDED, NEAREST, resample_frames
from data_setup.store.writer import measure
from data_setup.transforms import identity_matrix, token_valid
from models.probes.features import pool_tokens
from models.vit3d import SIZES, Size
from models.vjepa3d import build_encoder
from models.weights import load_encoder
from models.weights.__main__ import main
from models.weights.portable import load_portable, program, selftest
from models.weights.portable.program import PortableEncoder, Preprocess
from models.weights.portable.selftest import SelfTestError
from models.weights.portable.standalone import InputError, Portable
from models.weights.portable.write import EYE_SHAPE, SPACING_MM, golden_eye
from tests.models.weights.weight_files import config, own_checkpoint
from utils.errors import UserError

Triple = tuple[float, float, float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _small_ti: None) -> Path:
    """An exported encoder of two blocks whose weights are far from their initialisation."""
    SIZES["ti"] = Size(2, 128, 2)  # _small_ti puts it back
    root = tmp_path_factory.mktemp("portable")
    words = ["export", "--checkpoint", str(own_checkpoint(root / "run", config()))]
    words += ["--portable", str(root / "out")]
    assert main(words) == 0
    with pytest.raises(UserError, match="--out: expected a new or empty folder"):
        main(words)
    return root / "out"


@pytest.fixture(scope="module")
def portable(folder: Path) -> Portable:
    return load_portable(str(folder))


def loop(
    folder: Path,
    volume: np.ndarray,
    spacing: Triple,
    first_is_superior: bool,
    change: Callable[[Tensor, dict[str, Tensor]], Tensor] = lambda view, batch: view,
    seed: int | None = None,
) -> np.ndarray:
    """What prepare, the store and the training loop make of a volume: pooled [2E].

    `change`: of the encoder's input. `seed`: other weights.
    """
    spatial = config().spatial
    size, target = spatial.image_size, spatial.target_spacing
    on_grid = resample_frames(
        volume, volume.shape, spacing, size, target, "spacing", flip_d=not first_is_superior
    )
    facts = measure(on_grid)
    batch = {
        "volume": torch.from_numpy(on_grid.voxels)[None],
        "matrix": torch.from_numpy(identity_matrix())[None],
        "valid_box": torch.tensor([on_grid.valid_box], dtype=torch.float32),
        "mean": torch.tensor([facts["intensity_mean"]]),
        "std": torch.tensor([facts["intensity_std"]]),
    }
    valid = token_valid(batch["matrix"], batch["valid_box"], config().grid, spatial.patch_size)
    encoder = load_encoder(str(folder))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in encoder.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    tokens = encoder(change(plain_view(batch), batch))
    return pool_tokens(tokens, valid.float())[0].numpy()


@pytest.mark.slow  # writes and runs both programs
def test_an_encoder_with_an_images_positions_is_portable(tmp_path: Path) -> None:
    words = ["export", "--checkpoint", str(own_checkpoint(tmp_path / "run", config(), num_prefix=3))]
    assert main([*words, "--portable", str(tmp_path / "out")]) == 0
    lines = selftest(str(tmp_path / "out"))
    assert sum("golden features to" in line for line in lines) >= 2, lines
    assert load_encoder(str(tmp_path / "out")).num_prefix == 3


def other_volume(seed: int) -> tuple[np.ndarray, Triple]:
    """Of another size, another field than the grid's, and without a symmetry."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(6, 90, 3))
    ramp = np.linspace(0, 150, shape[1])[:, None] + np.linspace(0, 60, shape[2])
    volume = np.clip(ramp + rng.uniform(0, 80, shape), 0, 255).astype(np.uint8)
    d, h, w = rng.uniform(0.5, 1.6, 3) * np.multiply(config().spatial.target_spacing, (8, 32, 32)) / shape
    return volume, (float(d), float(h), float(w))


@pytest.mark.parametrize("seed", range(2))
def test_the_program_gives_the_features_of_the_loop(folder: Path, portable: Portable, seed: int) -> None:
    """Other sizes than the exported one, both directions, fields smaller and larger than the grid."""
    volume, spacing = other_volume(seed)
    onnx = load_portable(str(folder), "onnxruntime")
    for first_is_superior in (True, False):
        arguments = volume, np.array(spacing), np.array(first_is_superior)
        expected = loop(folder, volume, spacing, first_is_superior)
        tokens, valid, pooled = portable.program(*arguments)
        np.testing.assert_allclose(pooled, expected, atol=1e-4)
        same = onnx.program(*arguments)
        np.testing.assert_allclose(same[2], expected, atol=1e-4)
        np.testing.assert_allclose(same[0], tokens, atol=1e-4)
        assert np.array_equal(same[1], valid)


@pytest.mark.parametrize("mode", ["spacing", "resize"])
@pytest.mark.parametrize("planes", [NEAREST, BLENDED])
def test_the_grid_is_that_of_prepare(mode: Literal["spacing", "resize"], planes: str) -> None:
    """The same grey values but for rounding, and voxels inside; the last have few B-scans as planes."""
    spatial = config().spatial
    preprocess = Preprocess(spatial.image_size, spatial.target_spacing, mode, spatial.patch_size, planes)
    module = PortableEncoder(build_encoder(config()), preprocess)
    for seed, pitch in enumerate([*[None] * 6, 0.51, 0.8, 1.0, 1.03, 2.0, 2.1]):
        volume, spacing = other_volume(seed)
        if pitch is not None:
            volume, spacing = volume[: 5 + seed % 3], (pitch * spatial.target_spacing[0], *spacing[1:])
        grid = spatial.image_size, spatial.target_spacing, mode
        expected = resample_frames(volume, volume.shape, spacing, *grid, flip_d=True, planes=planes)
        arguments = torch.from_numpy(volume), torch.tensor(spacing, dtype=torch.float64), torch.tensor(False)
        grey, inside = module.on_grid(*arguments)
        difference = np.abs(grey.numpy() - expected.voxels)
        assert difference.max() <= 1
        assert (difference > 0).mean() < 1e-3
        box = [(int(axis.nonzero()[0]), int(axis.nonzero()[-1]) + 1) for axis in inside]
        assert tuple(edge for ends in box for edge in ends) == expected.valid_box


def test_the_folder_tests_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["files", "program.pt2", "model.safetensors", "program.onnx", "hf"]
    assert [line.partition(":")[0] for line in lines] == names
    for line in lines[1:]:
        assert float(line.rpartition(" ")[2]) <= 1e-4
    assert (folder / "golden.npz").stat().st_size < 300_000
    selftest(str(folder), load_portable(str(folder)))
    (line,) = selftest(str(folder), lambda *words: loop(folder, *words))  # another pipeline, without fault
    assert line.startswith("pipeline: golden features to")


BARE = """
import sys

runtime, other = sys.argv[1:]
sys.path = ["", "out", *sys.path, "packages"]
import numpy as np
from oct_portable import load_portable

golden = np.load("out/golden.npz")
eye = golden["volume"], golden["spacing_mm"], bool(golden["first_is_superior"])
features = load_portable(runtime=runtime)(*eye)
np.testing.assert_allclose(features.pooled, golden["pooled"], atol=1e-4)
assert "utils" not in sys.modules
import utils

print(utils.__file__)
for name in ("models", other):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
"""


def plain_name(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def requirements(distribution: str) -> set[str]:
    """A distribution and all that it requires here, without extras."""
    names: set[str] = set()
    waiting = {distribution}
    while waiting:
        names.add(name := plain_name(waiting.pop()))
        for line in map(Requirement, metadata.requires(name) or []):
            if not line.marker or line.marker.evaluate({"extra": ""}):
                waiting |= {plain_name(line.name)} - names
    return names


@pytest.mark.parametrize(("runtime", "other"), [("torch", "onnxruntime"), ("onnxruntime", "torch")])
def test_the_folder_needs_nothing_of_the_repository(
    folder: Path, tmp_path: Path, runtime: str, other: str
) -> None:
    """Beside a utils.py, with numpy and one runtime and what these require, and no other package."""
    shutil.copytree(folder, tmp_path / "out")
    (tmp_path / "utils.py").write_text("SOMEBODY_ELSES = True\n")
    (tmp_path / "packages").mkdir()
    wanted = requirements(runtime) | requirements("numpy")
    packages = metadata.packages_distributions().items()
    modules = {module for module, owners in packages if wanted & {plain_name(owner) for owner in owners}}
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.partition(".")[0] in modules:
            (tmp_path / "packages" / path.name).symlink_to(path)
    words = [sys.executable, "-I", "-S", "-c", BARE, runtime, other]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lacking = [f"No module named '{name}'" for name in ("models", other)]
    assert done.stdout.splitlines() == [str(tmp_path / "utils.py"), *lacking]


def test_without_the_packages_there_is_no_onnx_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so in a line, the card and preprocess.json say which files there are."""
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    checkpoint = str(folder.parent / "run" / "best_probe.pt")
    assert main(["export", "--checkpoint", checkpoint, "--portable", str(tmp_path / "out")]) == 0
    reason = "onnxscript not installed (pip install onnx onnxscript)"
    assert f"no ONNX: {reason}" in capsys.readouterr().out.splitlines()
    contract = json.loads((tmp_path / "out" / "preprocess.json").read_text())
    assert contract["onnx"] == reason
    assert "program.onnx" not in contract["sha256"]
    assert not (tmp_path / "out" / "program.onnx").exists()
    assert f"No `program.onnx`: {reason}." in (tmp_path / "out" / "README.md").read_text()
    assert 'load_portable(FOLDER, "onnxruntime")' in (folder / "README.md").read_text()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not program.can_run()
    assert "program.onnx: not compared, onnxruntime is not installed" in selftest(str(folder))


def test_an_onnx_file_holds_two_gigabytes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LARGEST_BYTES", 1_000_000)
    reason = program.why_no_onnx(torch.nn.Linear(500, 500))
    assert reason == "one file holds 0.001 GB, the weights are 0.001 GB"
    assert program.why_no_onnx(torch.nn.Linear(500, 400)) is None


Change = Callable[[np.ndarray, Triple], tuple[np.ndarray, Triple]]
BEFORE: dict[str, Change] = {
    "H flipped": lambda volume, spacing: (volume[:, ::-1], spacing),
    "B-scans reversed": lambda volume, spacing: (volume[::-1], spacing),
    "axes swapped (DWH for DHW)": lambda volume, spacing: (volume.transpose(0, 2, 1), spacing),
    "axes swapped (WHD for DHW, spacing too)": lambda volume, spacing: (
        volume.transpose(2, 1, 0),
        (spacing[2], spacing[1], spacing[0]),
    ),
    "spacing x 10": lambda volume, spacing: (volume, tuple(10 * s for s in spacing)),
    "um for mm": lambda volume, spacing: (volume, tuple(1000 * s for s in spacing)),
    "grey values 0-1 for 0-255": lambda volume, spacing: ((volume / 255).round().astype(np.uint8), spacing),
}


@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_encoder_has_its_name(folder: Path, fault: str) -> None:
    def pipeline(volume: np.ndarray, spacing: Triple, first_is_superior: bool) -> np.ndarray:
        changed, other = BEFORE[fault](volume, spacing)
        return loop(folder, np.ascontiguousarray(changed), other, first_is_superior)

    with pytest.raises(SelfTestError) as caught:
        selftest(str(folder), pipeline)
    assert f"pipeline: {fault}" in str(caught.value)


def raw(scale: float) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    """The grey values in place of the z-score."""
    return lambda view, batch: batch["volume"][:, None].float() * scale


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"change": raw(1.0)}, "grey values 0-255 for the z-score"),
        ({"change": raw(1 / 255)}, "grey values 0-1 for the z-score"),
        ({"change": lambda view, batch: view.repeat(1, 3, 1, 1, 1).sum(1, keepdim=True)}, "three channels"),
        ({"seed": 1}, "wrong weights, or a fault that is not in the list"),
        ({"change": lambda view, batch: view.roll(5, dims=3)}, "wrong weights, or a fault that is not"),
    ],
)
def test_a_fault_in_the_encoders_input_or_weights_has_its_name(
    folder: Path, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(SelfTestError) as caught:
        selftest(str(folder), lambda *words: loop(folder, *words, **options))
    assert f"pipeline: {name}" in str(caught.value)


def test_features_of_a_file(folder: Path, portable: Portable, tmp_path: Path) -> None:
    """Pooled, their mean alone, or tokens; the command names the fault of another program."""
    with np.load(folder / "golden.npz") as golden:
        volume, spacing = golden["volume"], tuple(golden["spacing_mm"])
    assert (volume.shape, spacing) == (EYE_SHAPE, SPACING_MM)
    assert np.array_equal(volume, golden_eye())
    whole = portable(volume, spacing, True)
    path = str(tmp_path / "features.npy")
    for features in (whole.pooled, whole.pooled[:128], whole.tokens, whole.tokens[None]):
        np.save(path, features)
        assert main(["selftest", str(folder), "--features", path]) == 0
    np.save(path, loop(folder, volume[::-1].copy(), spacing, True)[:128])
    with pytest.raises(SelfTestError, match="B-scans reversed"):
        main(["selftest", str(folder), "--features", path])
    np.save(path, np.zeros(7))
    with pytest.raises(UserError, match=r"features: expected \[256\], \[128\] or \[32, 128\], found \[7\]"):
        main(["selftest", str(folder), "--features", path])


def test_a_changed_folder_is_named(folder: Path, tmp_path: Path) -> None:
    """Other weights by their digest, and a changed contract by its features."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    tensors["norm.bias"] = tensors["norm.bias"] + 0.5
    safetensors.torch.save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SelfTestError, match=r"model\.safetensors: wrong weights: expected sha256"):
        main(["selftest", str(other)])
    shutil.copy(folder / "model.safetensors", other)
    contract = json.loads((other / "preprocess.json").read_text())
    contract["target_spacing_mm"] = [10 * mm for mm in contract["target_spacing_mm"]]
    (other / "preprocess.json").write_text(json.dumps(contract))
    with pytest.raises(SelfTestError, match=r"expected the golden features to 0\.0001"):
        main(["selftest", str(other)])
    with pytest.raises(UserError, match=r"expected a folder of models\.weights export --portable"):
        selftest(str(tmp_path))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def with_words(**words: Any) -> Callable[[Path], Any]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | words))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("golden.npz", cut, r"golden\.npz: expected the golden eye of the export, found damage"),
        ("preprocess.json", cut, r"preprocess\.json: expected the contract of the export, found"),
        (
            "preprocess.json",
            with_words(patch_size=[4, 4, 4]),
            r"patch_size: expected \(4, 8, 8\) of config\.json, found",
        ),
        ("hf/model.safetensors", cut, r"hf/model\.safetensors: wrong weights: expected sha256"),
        ("preprocess.json", with_words(sha256={}), r"sha256: expected .*hf/model\.safetensors.*, found {}"),
        ("program.onnx", cut, r"program\.onnx: another file: expected sha256"),
        (
            "preprocess.json",
            with_words(format_version=1),
            r"format_version: expected 3, found 1; export again",
        ),
        ("program.pt2", Path.unlink, r"program\.pt2: expected a file of the export, found none"),
        (
            "preprocess.json",
            with_words(head="linear"),
            "head: expected what reads features or view, found linear",
        ),
    ],
)
def test_a_damaged_file_is_named(
    folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(folder, tmp_path / "out")
    damage(tmp_path / "out" / name)
    with pytest.raises(SelfTestError, match=message):
        selftest(str(tmp_path / "out"))


FAR = (0.002, 0.0005, 0.002)  # a field that lies between the centres of an even grid's middle


@pytest.fixture(scope="module")
def runtimes(folder: Path, portable: Portable) -> list[Portable]:
    return [portable, load_portable(str(folder), "onnxruntime")]


@pytest.mark.parametrize(
    ("volume", "spacing", "first", "message"),
    [
        (np.zeros((3, 8, 9, 10), np.uint8), SPACING_MM, True, r"three channels: expected \[D, H, W\] of one"),
        (
            golden_eye() / 255,
            SPACING_MM,
            True,
            "grey values: expected uint8 of 0 to 255, found float64 of 0.0",
        ),
        (np.full(EYE_SHAPE, np.nan), SPACING_MM, True, "grey values: expected uint8.*, found float64 of nan"),
        (golden_eye() // 255, SPACING_MM, True, "grey values: expected uint8 .*, found uint8 of 0 to 1"),
        (
            golden_eye(),
            tuple(1000 * s for s in SPACING_MM),
            True,
            "spacing of D: expected .*it looks like um",
        ),
        (golden_eye(), (0.2, 0.2, 0.2), True, "spacing of H: expected 0.0005 to 0.05 mm, found 0.2"),
        (golden_eye(), (0.0, *SPACING_MM[1:]), True, "spacing of D: expected 0.002 to 2 mm, found 0"),
        (golden_eye(), (0.2, 0.01, np.nan), True, "spacing of W: expected 0.002 to 2 mm, found nan"),
        (golden_eye(), SPACING_MM[:2], True, "spacing: expected 3 values in mm, of D, H and W, found 2"),
        (golden_eye()[0], SPACING_MM, True, r"expected a volume \[D, H, W\], found \[128, 96\]"),
        (golden_eye()[:1], SPACING_MM, True, r"expected a volume \[D, H, W\], found \[1, 128, 96\]"),
        (golden_eye()[:0], SPACING_MM, True, r"expected a volume \[D, H, W\], found \[0, 128, 96\]"),
        (golden_eye().tolist(), SPACING_MM, True, "expected an array of numpy, found list"),
        (golden_eye(), SPACING_MM, None, "first_is_superior: expected True or False, found None"),
        (golden_eye()[:2, :2, :2] + 2, FAR, True, "expected a token of the grid inside, found none"),
    ],
)
def test_what_the_program_was_not_made_for(
    runtimes: list[Portable], volume: Any, spacing: Triple, first: Any, message: str
) -> None:
    """By torch and by onnxruntime, whose graph cannot refuse."""
    for portable in runtimes:
        with pytest.raises(InputError, match=message):
            portable(volume, spacing, first)
