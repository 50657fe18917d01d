"""Features of volumes as acquired, and what a head says of them: by numpy, and torch or onnxruntime, alone.

    from oct_portable import load_portable

    features = load_portable("encoder")(volume, spacing_mm=(0.047, 0.0026, 0.0117), first_is_superior=True)

In: the folder that `python -m models.weights export --portable` wrote, which holds this file as
oct_portable.py. Out: `Features`, or of a folder with a head `Labels`. What cannot be a volume as acquired is
an `InputError`. The programs of a folder are code: load none of somebody whom you do not trust.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

PREPROCESS, PROGRAM, ONNX, HEAD, HEAD_ONNX = (
    "preprocess.json",
    "program.pt2",
    "program.onnx",
    "head.pt2",
    "head.onnx",
)
INPUTS = ("volume", "spacing_mm", "first_is_superior")
AXES = "DHW"
AXIAL_MM = (0.0005, 0.05)  # between neighbours of an A-scan; OCT has 0.002 to 0.004
OTHER_MM = (0.002, 2.0)
Program = Callable[..., tuple[np.ndarray, ...]]


class InputError(ValueError):
    """What a program was not made for, in one line."""


class Features(NamedTuple):
    """float32 arrays of one volume."""

    tokens: np.ndarray  # [N, E]
    valid: np.ndarray  # bool [N]
    pooled: np.ndarray  # [2E]: mean and standard deviation over valid tokens


class Labels(NamedTuple):
    """What a head of labels says of one volume."""

    scores: dict[str, float]  # of each class or label, or a value in its unit; not calibrated
    probabilities: dict[str, float] | None  # calibrated; None: the head's validation allowed no calibration
    features: Features


class Portable:
    """The programs of a folder, which refuse what they were not made for."""

    def __init__(self, contract: dict[str, Any], program: Program, head: Program | None = None) -> None:
        self.contract, self.program, self.head = contract, program, head

    def __call__(
        self, volume: np.ndarray, spacing_mm: Sequence[float], first_is_superior: bool
    ) -> Features | Labels:
        """Of uint8 [D, H, W]; raises InputError for another type, shape, range or unit, or for a field that
        the grid does not meet.
        """
        check_input(volume, spacing_mm, first_is_superior)
        spacing = np.array(spacing_mm, np.float64)
        features = Features(*self.program(volume, spacing, np.array(bool(first_is_superior))))
        if not features.valid.any():
            raise InputError(f"program: field of {_field(volume, spacing)}: no token of the grid is inside")
        if self.head is None:
            return features
        facts, (scores, probabilities) = self.contract["head"], self.head(*features)
        calibrated = _named(facts, probabilities) if facts["calibrated"] else None
        return Labels(_named(facts, scores), calibrated, features)


def load_portable(
    folder: str = os.path.dirname(os.path.abspath(__file__)),
    runtime: str = "torch",
    read: Callable[[str], bytes] | None = None,
) -> Portable:
    """The programs of a folder, run by `runtime`, torch or onnxruntime. `read`: bytes of a file of the folder
    by its name, where open() cannot reach it. Raises InputError.
    """

    def of_disk(name: str) -> bytes:
        with open(os.path.join(folder, name), "rb") as file:
            return file.read()

    runtimes = {"torch": (torch_program, PROGRAM, HEAD), "onnxruntime": (onnx_program, ONNX, HEAD_ONNX)}
    if runtime not in runtimes:
        raise InputError(f"runtime: expected {' or '.join(runtimes)}, found {runtime}")
    opened, program, head = runtimes[runtime]
    read = read or of_disk
    contract = json.loads(read(PREPROCESS))
    if runtime == "onnxruntime" and contract.get("onnx") != "onnx":
        raise InputError(f"{folder}: expected {ONNX}, found none: {contract.get('onnx')}")
    of_head = opened(read(head), Features._fields) if contract.get("head") else None
    return Portable(contract, opened(read(program), INPUTS), of_head)


def torch_program(data: bytes, inputs: Sequence[str]) -> Program:
    """A program of torch.export, from and to arrays on the host."""
    import torch  # here: onnxruntime does without

    module = torch.export.load(io.BytesIO(data)).module()

    def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(np.require(array, None, ["C", "W"])) for array in arrays))
        return tuple(output.numpy() for output in outputs)

    return run


def onnx_program(data: bytes, inputs: Sequence[str]) -> Program:
    """A program of an ONNX file, on the CPU; the file has no input that its program does not read."""
    import onnxruntime  # an extra, and a second to load

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    read = {of_program.name for of_program in session.get_inputs()}

    def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        values = dict(zip(inputs, arrays, strict=True))
        return tuple(session.run(None, {name: values[name] for name in inputs if name in read}))

    return run


def check_input(volume: np.ndarray, spacing_mm: Sequence[float], first_is_superior: bool = True) -> None:
    """Raise InputError for what cannot be a volume as acquired."""
    if not isinstance(volume, np.ndarray):
        raise InputError(f"program: expected an array of numpy, found {type(volume).__name__}")
    if 3 in volume.shape and volume.ndim == 4:
        raise InputError(f"program: three channels: expected [D, H, W] of one, found {list(volume.shape)}")
    if volume.ndim != 3 or min(volume.shape) < 2:
        raise InputError(f"program: expected a volume [D, H, W], found {list(volume.shape)}")
    if volume.dtype != np.uint8 or volume.max() <= 1:
        values = f"{volume.dtype} of {volume.min():.2g} to {volume.max():.3g}"
        raise InputError(f"program: grey values: expected uint8 of 0 to 255, found {values}")
    if len(spacing_mm) != 3:
        raise InputError(f"program: spacing: expected 3 values in mm, of D, H and W, found {len(spacing_mm)}")
    for axis, spacing, (low, high) in zip(AXES, spacing_mm, (OTHER_MM, AXIAL_MM, OTHER_MM), strict=True):
        if not low <= spacing <= high:  # NaN too
            unit = "; it looks like um" if low <= spacing / 1000 <= high else ""
            raise InputError(
                f"program: spacing of {axis}: expected {low:g} to {high:g} mm, found {spacing:g}{unit}"
            )
    if not isinstance(first_is_superior, bool | np.bool_):
        raise InputError(f"program: first_is_superior: expected True or False, found {first_is_superior!r}")


def _field(volume: np.ndarray, spacing_mm: np.ndarray) -> str:
    return " x ".join(f"{mm:.3g}" for mm in volume.shape * spacing_mm) + " mm"


def _named(facts: dict[str, Any], values: np.ndarray) -> dict[str, float]:
    return dict(zip(facts["names"], values.tolist(), strict=True))
