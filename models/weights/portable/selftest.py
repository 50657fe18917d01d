"""What is wrong with a pipeline that should give an encoder's features, by name.

In: a folder of write.py and, of a pipeline, a function or the features that it gave for the golden eye. Out:
lines about what agrees, or a `SelfTestError` that names the fault. The faults are tried one by one on the
folder's own encoder: the one that gives the pipeline's features is its fault. What no fault explains are
other weights, or a fault that is not in the list.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.weights.files import read_weights
from models.weights.portable import standalone
from models.weights.portable.program import NORMALISATION, PortableEncoder, Preprocess, can_run
from models.weights.portable.standalone import (
    AXES,
    INPUTS,
    ONNX,
    PREPROCESS,
    PROGRAM,
    READS,
    VIEW,
    Features,
    InputError,
    Portable,
    onnx_program,
    torch_program,
)
from models.weights.portable.write import (
    FORMAT_VERSION,
    GOLDEN,
    difference_of,
    file_names,
    of_answer,
    portable_encoder,
)
from models.weights.shape import BLENDED, NEAREST, Weights
from utils import storage
from utils.errors import UserError

# f(volume uint8 [D, H, W], spacing_mm, first_is_superior) -> pooled [2E], mean [E], tokens [N, E] or Features
Encode = Callable[[np.ndarray, tuple[float, float, float], bool], "np.ndarray | Features"]
READ_VERSIONS = (2, FORMAT_VERSION)
EXPLAINED = 0.05  # of a difference that a fault may leave and still be its name


class SelfTestError(UserError):
    """The fault of a pipeline or of a folder, in one line."""


def load_portable(folder: str, runtime: str = "torch") -> Portable:
    """The programs of a folder, also in a bucket. They are code: load none of somebody whom you do not trust.
    The folder's oct_portable.py does the same outside this repository.
    """
    return standalone.load_portable(
        folder, runtime, lambda name: storage.read_bytes(storage.join(folder, name))
    )


class _Folder(NamedTuple):
    url: str
    contract: dict[str, Any]
    golden: dict[str, np.ndarray]
    module: PortableEncoder  # of preprocess.json and model.safetensors

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        volume, spacing, first = (torch.from_numpy(np.asarray(self.golden[name])) for name in INPUTS)
        return volume, spacing, first


def selftest(folder: str, encode: Encode | None = None, features: np.ndarray | None = None) -> list[str]:
    """Lines about what agrees on the golden eye: the folder's files, its program and its weights, or a
    pipeline, by its function or by the features that it gave.

    Raises SelfTestError that names what is wrong.
    """
    opened = _open(folder)
    volume, spacing, first = opened.arguments
    d, h, w = spacing.tolist()
    eye = volume.numpy(), (d, h, w), bool(first)
    if encode is not None:
        output = encode(*eye)
        features = output.pooled if isinstance(output, Features) else np.asarray(output)
    if features is not None:
        return [_compare(opened, "pipeline", features)]
    lines = [_check_files(opened), *_check_programs(opened, eye, "torch", PROGRAM)]
    with torch.no_grad():
        lines.append(_compare(opened, "model.safetensors", opened.module(*opened.arguments)[2].numpy()))
    if opened.contract["onnx"] == "onnx" and can_run():
        lines += _check_programs(opened, eye, "onnxruntime", ONNX)
    elif opened.contract["onnx"] == "onnx":
        lines.append(f"{ONNX}: not compared, onnxruntime is not installed")
    if opened.contract["hf"] == "hf":
        lines.append(_check_hf(opened))
    return lines


def _open(folder: str) -> _Folder:
    url = storage.join(folder, PREPROCESS)
    if not storage.exists(url):
        raise UserError(
            f"{folder}: expected a folder of models.weights export --portable, found no {PREPROCESS}"
        )
    try:
        contract = json.loads(storage.read_text(url))
        preprocess = Preprocess.of(contract)
    except (ValueError, KeyError, TypeError) as error:
        raise SelfTestError(f"{url}: expected the contract of the export, found {error!r}") from error
    golden = _golden(storage.join(folder, GOLDEN))
    weights = read_weights(folder)
    _check_contract(url, contract, preprocess, weights)
    return _Folder(folder, contract, golden, portable_encoder(weights, "target", preprocess))


def _golden(url: str) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(storage.read_bytes(url))) as content:
            golden = {name: np.array(content[name]) for name in content.files}
        volume, spacing, first, pooled = (golden[name].shape for name in (*INPUTS, "pooled"))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError) as error:
        raise SelfTestError(
            f"{url}: expected the golden eye of the export, found damage ({error})"
        ) from error
    if (len(volume), spacing, first, len(pooled)) != (3, (3,), (), 1):
        raise SelfTestError(
            f"{url}: expected a volume [D, H, W], 3 spacings, features [2E] and a truth value, found "
            f"{list(volume)}, {list(spacing)}, {list(pooled)}"
        )
    return golden


def _check_contract(url: str, contract: dict[str, Any], preprocess: Preprocess, weights: Weights) -> None:
    """Raise SelfTestError where preprocess.json does not fit config.json and the weights beside it."""
    version = contract.get("format_version")
    if version not in READ_VERSIONS:
        raise SelfTestError(
            f"{url}: format_version: expected {FORMAT_VERSION}, found {version}; export again"
        )
    if lost := sorted({"hf", "onnx", "normalisation", "sha256", "tolerance"} - set(contract)):
        raise SelfTestError(f"{url}: expected the contract of the export, found no {', '.join(lost)}")
    head = contract.get("head")
    if head is not None and (not isinstance(head, dict) or head.get("reads") not in READS):
        raise SelfTestError(f"{url}: head: expected what reads {' or '.join(READS)}, found {head}"[:300])
    names = file_names(contract)
    if not isinstance(contract["sha256"], dict) or set(contract["sha256"]) != set(names):
        raise SelfTestError(f"{url}: sha256: expected {sorted(names)}, found {contract['sha256']}"[:300])
    grid = tuple(n * p for n, p in zip(weights.grid, weights.patch, strict=True))
    for name, actual, expected in (
        ("patch_size", preprocess.patch_size, weights.patch),
        ("image_size", preprocess.image_size, grid),
        ("normalisation", contract["normalisation"], NORMALISATION),
    ):
        if actual != expected:
            raise SelfTestError(f"{url}: {name}: expected {expected} of config.json, found {actual}")
    spacing = preprocess.target_spacing_mm
    if len(spacing) != 3 or not all(isinstance(v, int | float) and v > 0 for v in spacing):
        raise SelfTestError(f"{url}: target_spacing_mm: expected 3 values above 0, found {spacing}")
    if preprocess.resample not in ("spacing", "resize"):
        raise SelfTestError(f"{url}: resample: expected spacing or resize, found {preprocess.resample}")
    if preprocess.planes not in (NEAREST, BLENDED):
        raise SelfTestError(f"{url}: planes: expected {NEAREST} or {BLENDED}, found {preprocess.planes}")


def _check_files(opened: _Folder) -> str:
    for name, expected in opened.contract["sha256"].items():
        url = storage.join(opened.url, name)
        if not storage.exists(url):
            raise SelfTestError(f"{url}: expected a file of the export, found none")
        actual = hashlib.sha256(storage.read_bytes(url)).hexdigest()
        if actual != expected:
            what = "wrong weights" if name.endswith("model.safetensors") else "another file"
            raise SelfTestError(
                f"{opened.url}/{name}: {what}: expected sha256 {expected[:12]} of the export, "
                f"found {actual[:12]}"
            )
    return f"files: {len(opened.contract['sha256'])} as exported"


def _check_programs(
    opened: _Folder, eye: tuple[np.ndarray, tuple[float, float, float], bool], runtime: str, name: str
) -> list[str]:
    """What a runtime's program makes of the golden eye, and its head."""
    data = storage.read_bytes(storage.join(opened.url, name))
    program = (onnx_program if name == ONNX else torch_program)(data, INPUTS)
    features = program(*(argument.numpy() for argument in opened.arguments))
    lines, head = [_compare(opened, name, features[2])], opened.contract.get("head")
    if head is None or (head["reads"] == VIEW and name == ONNX):
        return lines
    try:
        answer = of_answer(load_portable(opened.url, runtime)(*eye))
    except InputError as error:
        raise SelfTestError(f"{opened.url}: {error}") from error
    tolerance = float(opened.contract["tolerance"])
    difference = difference_of(answer, opened.golden["answer"])
    if not difference <= tolerance:
        raise SelfTestError(
            f"{opened.url}: head by {runtime}: expected the golden answer to {tolerance:g}, found a "
            f"difference of {difference:.2g}"
        )
    return [*lines, f"head by {runtime}: golden answer to {difference:.1g}"]


def _check_hf(opened: _Folder) -> str:
    """The Hugging Face layout by Hugging Face's classes, where they are installed."""
    if importlib.util.find_spec("transformers") is None:
        return "hf: not compared, transformers is not installed"
    from transformers import VJEPA2Model

    model = VJEPA2Model.from_pretrained(storage.join(opened.url, "hf")).eval()
    with torch.no_grad():
        view, valid = opened.module.view(*opened.arguments)
        tokens = model(view.transpose(1, 2), skip_predictor=True).last_hidden_state[0]
    return _compare(opened, "hf", tokens.numpy()[valid.numpy()].mean(axis=0))


def _compare(opened: _Folder, what: str, features: np.ndarray) -> str:
    """A line, or a SelfTestError with the name of the fault that explains the difference."""
    values, tolerance = _pooled(opened, features), float(opened.contract["tolerance"])
    difference = _distance(values, opened.golden["pooled"])
    if difference <= tolerance:
        return f"{what}: golden features to {difference:.1g}"
    closest, name = EXPLAINED * difference, "wrong weights, or a fault that is not in the list"
    if not np.isfinite(values).all():
        difference, name = float("inf"), "NaN or infinity"
    else:
        for fault, pooled in _faults(opened):
            distance = _distance(values, pooled)
            if distance < closest:
                closest, name = distance, fault
            if distance <= tolerance:  # the same features: the others need not be tried
                break
    raise SelfTestError(
        f"{opened.url}: {what}: {name}: expected the golden features to {tolerance:g}, found a difference of "
        f"{difference:.2g}"
    )


def _pooled(opened: _Folder, features: np.ndarray) -> np.ndarray:
    """[2E] or its first half [E], as given or from tokens [N, E]; raises UserError for another shape."""
    values, encoder = np.asarray(features, np.float64), opened.module.encoder
    if values.shape == (1, *values.shape[1:]):
        values = values[0]
    width, num_tokens = encoder.feature_width, encoder.num_tokens
    if values.shape not in ((width,), (2 * width,), (num_tokens, width)):
        raise UserError(
            f"features: expected [{2 * width}], [{width}] or [{num_tokens}, {width}], "
            f"found {list(values.shape)}"
        )
    if values.ndim == 1:
        return values
    with torch.no_grad():
        _, valid = opened.module.view(*opened.arguments)
    return values[valid.numpy()].mean(axis=0)


def _distance(values: np.ndarray, pooled: np.ndarray) -> float:
    """The largest difference; NaN, which is near nothing, where one of them is not finite."""
    return float(np.abs(values - pooled[: len(values)]).max())


@torch.no_grad()
def _faults(opened: _Folder) -> Iterator[tuple[str, np.ndarray]]:
    """(name, pooled features) of the golden eye with one fault each."""
    volume, spacing, first = opened.arguments
    module = opened.module
    for name, changed, mm in _planted(volume, spacing):
        yield name, module(changed.contiguous(), mm, first)[2].numpy()
    grey, (in_d, in_h, in_w) = module.on_grid(volume, spacing, first)
    grey = grey.masked_fill(~(in_d[:, None, None] & in_h[:, None] & in_w), 0)[None, None]
    view, valid = module.view(volume, spacing, first)
    for name, changed in (
        ("grey values 0-255 for the z-score (no normalisation)", grey),
        ("grey values 0-1 for the z-score (grey / 255, no normalisation)", grey / 255),
        ("three channels (the kernel repeated, not divided)", 3 * view),  # what three equal ones add up to
    ):
        yield name, module.features(changed, valid)[2].numpy()


def _planted(volume: Tensor, spacing: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, volume, spacing) of an eye with one fault each before the program."""
    yield "H flipped (axial rows run upwards)", volume.flip(1), spacing
    yield "B-scans reversed", volume.flip(0), spacing
    yield "A-scans mirrored (W flipped)", volume.flip(2), spacing
    for name, factor in {
        "spacing x 10": 10,
        "spacing / 10": 0.1,
        "um for mm": 1000,
        "m for mm": 0.001,
    }.items():
        yield f"{name} (in the spacing)", volume, spacing * factor
    for order in list(itertools.permutations(range(3)))[1:]:
        swapped = f"axes swapped ({''.join(AXES[axis] for axis in order)} for {AXES}"
        yield f"{swapped})", volume.permute(order), spacing
        yield f"{swapped}, spacing too)", volume.permute(order), spacing[list(order)]
    for grey in (torch.round(volume / 255), torch.floor(volume / 255)):
        yield "grey values 0-1 for 0-255 (before the program)", grey.to(torch.uint8), spacing
