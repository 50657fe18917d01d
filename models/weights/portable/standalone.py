"""Features of volumes as acquired, and what a head says of them: by only numpy, and torch or onnxruntime.

    from oct_portable import load_portable

    features = load_portable("encoder")(volume, spacing_mm=(0.047, 0.0026, 0.0117), first_is_superior=True)

In: the folder that `python -m models.weights export --portable` wrote, which holds this file as
oct_portable.py. Out: `Features`, or of a folder with a head `Labels`, `Surfaces`, `Classes` or `Slabs`, whose
B-scans are in the order of the volume's. What cannot be a volume as acquired is an `InputError`. The programs
of a folder are code: load none of somebody whom you do not trust.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

PREPROCESS, PROGRAM, ONNX = "preprocess.json", "program.pt2", "program.onnx"
HEAD, HEAD_ONNX, GRID = "head.pt2", "head.onnx", "oct_grid.py"
INPUTS = ("volume", "spacing_mm", "first_is_superior")
AXES = "DHW"
AXIAL_MM = (0.0005, 0.05)  # between neighbours of an A-scan; OCT has 0.002 to 0.004
OTHER_MM = (0.002, 2.0)
LEAST_WEIGHT = 0.5  # share of known heights under an A-scan
LOWEST_WEIGHT = 1e-3  # of a voxel at the edge of a window
Program = Callable[..., tuple[np.ndarray, ...]]
Triple = tuple[float, float, float]


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


FEATURES, VIEW = "features", "view"
READS = {FEATURES: Features._fields, VIEW: ("window",)}  # what a head's program is given


class Surfaces(NamedTuple):
    """What a head of layers says of one volume; NaN where its grid does not reach."""

    names: list[str]  # [S], from the vitreous down
    rows: np.ndarray  # float32 [S, B-scans, A-scans]: rows of the volume, 0 the centre of the first
    um: np.ndarray  # float32, the same from the volume's upper edge


class Classes(NamedTuple):
    """What a head of segmentation says of one volume."""

    names: dict[str, int]  # of classes: their value; 0 is none of them
    voxels: np.ndarray  # uint8 [D, H, W], of the volume's own voxels


class Slabs(NamedTuple):
    """What a head of translation says of one volume; NaN where its grid does not reach."""

    names: list[str]  # [S]
    values: np.ndarray  # float32 [S, B-scans, A-scans], 0..1


Answer = Features | Labels | Surfaces | Classes | Slabs


class Portable:
    """The programs of a folder, which refuse what they were not made for. `grid`: the module of oct_grid.py,
    of a folder whose head reads voxels.
    """

    def __init__(
        self, contract: dict[str, Any], program: Program, head: Program | None, grid: ModuleType | None
    ) -> None:
        """`program`: of the encoder, or, with a grid, of the head."""
        self.contract, self.program, self.head, self.grid = contract, program, head, grid

    def __call__(self, volume: np.ndarray, spacing_mm: Sequence[float], first_is_superior: bool) -> Answer:
        """Of uint8 [D, H, W]; raises InputError for another type, shape, range or unit, or for a field that
        the grid does not meet.
        """
        check_input(volume, spacing_mm, first_is_superior)
        d, h, w = (float(mm) for mm in spacing_mm)
        if self.grid is not None:
            laid = _Dense(self.grid, self.contract, self.program, volume, (d, h, w), bool(first_is_superior))
            return laid.answer()
        features = Features(*self.program(volume, np.array((d, h, w)), np.array(bool(first_is_superior))))
        if not features.valid.any():
            raise InputError(_outside(volume.shape, (d, h, w)))
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
    facts = contract.get("head")
    if facts and facts["reads"] == VIEW:
        if runtime != "torch":
            raise InputError(f"{folder}: expected torch for a head of {facts['task']}, found {runtime}")
        grid = ModuleType("oct_grid")
        sys.modules[grid.__name__] = grid  # where its dataclasses look for their annotations
        exec(compile(read(GRID), GRID, "exec"), grid.__dict__)
        return Portable(contract, opened(read(head), READS[VIEW]), None, grid)
    of_head = opened(read(head), READS[FEATURES]) if facts else None
    return Portable(contract, opened(read(program), INPUTS), of_head, None)


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


def _outside(shape: Sequence[int], spacing_mm: Triple) -> str:
    field = " x ".join(f"{count * mm:.3g}" for count, mm in zip(shape, spacing_mm, strict=True))
    return f"program: field of {field} mm: expected a token of the grid inside, found none"


def _named(facts: dict[str, Any], values: np.ndarray) -> dict[str, float]:
    return dict(zip(facts["names"], values.tolist(), strict=True))


class _Dense:
    """A volume on the grid of a head that reads voxels, and what the head says at the volume's own voxels."""

    def __init__(
        self,
        grid: ModuleType,
        contract: dict[str, Any],
        head: Program,
        volume: np.ndarray,
        spacing_mm: Triple,
        first_is_superior: bool,
    ) -> None:
        self.grid, self.head, self.facts = grid, head, contract["head"]
        self.flip, self.shape, self.own = not first_is_superior, volume.shape, spacing_mm
        size, mode = tuple(contract["image_size"]), contract["resample"]
        target = tuple(contract["target_spacing_mm"])
        self.rule = [contract["planes"]] if "planes" in contract else []  # what a plane of the grid is
        spacing = grid.output_spacing(volume.shape, spacing_mm, size, target, mode)
        self.size, self.windows = size, size
        if self.facts["task"] == "segmentation":  # a scan larger than the grid is read in windows
            needed = [n * own / to for n, own, to in zip(self.shape, spacing_mm, spacing, strict=True)]
            more = [max(0, math.ceil((n - s) / 2 - 1e-6)) for n, s in zip(needed, size, strict=True)]
            self.size = tuple(s + 2 * m for s, m in zip(size, more, strict=True))
        try:
            on_grid = grid.resample_frames(
                volume, volume.shape, spacing_mm, self.size, target, mode, self.flip, *self.rule
            )
        except ValueError as error:
            raise InputError(f"program: {error}") from error
        self.target, box = on_grid.spacing_mm, on_grid.valid_box
        if not grid.valid_tokens(box, self.size, tuple(contract["patch_size"])):
            raise InputError(_outside(self.shape, spacing_mm))
        self.box = [slice(box[2 * axis], box[2 * axis + 1]) for axis in range(3)]
        self.view = self._normalised(on_grid.voxels)

    def answer(self) -> Surfaces | Classes | Slabs:
        if self.facts["task"] == "segmentation":
            values = self.facts["classes"]
            stored = np.array([0, *(values[name] for name in self.facts["names"])], np.uint8)
            voxels = stored[self._classes(self._windows())]
            return Classes(values, voxels[::-1].copy() if self.flip else voxels)
        predicted = self.head(self.view[None, None])[0]
        d, _, w = self.box
        inside = np.full_like(predicted, np.nan)
        inside[:, d, w] = predicted[:, d, w]
        means = self._on_scan(inside)
        names = list(self.facts["names"])
        if self.facts["task"] == "translation":
            return Slabs(names, means.astype(np.float32))
        # both fields are centred on each other; row r has its centre at r + 1/2 spacings
        mm = (means + 0.5 - self.size[1] / 2) * self.target[1]
        rows = (mm / self.own[1] + self.shape[1] / 2 - 0.5).astype(np.float32)
        return Surfaces(names, rows, ((rows + 0.5) * self.own[1] * 1000).astype(np.float32))

    def _normalised(self, grey: np.ndarray) -> np.ndarray:
        """z-score over the valid voxels of the middle, which a store would hold; 0 outside the scan."""
        middle = []
        for side, whole, size in zip(self.box, self.size, self.windows, strict=True):
            before = (whole - size) // 2
            middle.append(slice(max(side.start, before), min(side.stop, before + size)))
        valid = grey[tuple(middle)].astype(np.float64)
        mean = valid.sum() / valid.size
        std = max(0.0, np.square(valid).sum() / valid.size - mean * mean) ** 0.5
        if std == 0:
            raise InputError(f"program: grey values: expected several on the grid, found {mean:g} alone")
        view, box = np.zeros(grey.shape, np.float32), tuple(self.box)
        view[box] = (grey[box].astype(np.float32) - np.float32(mean)) * (np.float32(1) / np.float32(std))
        return view

    def _windows(self) -> np.ndarray:
        """Outputs [S, D, H, W] of the whole view, from windows whose middles weigh most."""
        weight, axes = np.ones(self.windows, np.float32), []
        for axis, (whole, size) in enumerate(zip(self.size, self.windows, strict=True)):
            step = size if whole == size else max(1, int(size * (1 - self.facts["overlap"])))
            count = math.ceil((whole - size) / step) + 1
            axes.append([min(place * step, whole - size) for place in range(count)])
            x = (np.arange(size) - (size - 1) / 2) / (self.facts["sigma"] * size)
            weight *= (
                np.exp(-x * x / 2).astype(np.float32).reshape([-1 if a == axis else 1 for a in range(3)])
            )
        weight = np.maximum(weight, max(float(weight.min()), LOWEST_WEIGHT))
        total, sums = np.zeros(self.size, np.float32), None
        for corner in itertools.product(*axes):
            place = tuple(slice(c, c + n) for c, n in zip(corner, self.windows, strict=True))
            outputs = self.head(self.view[place][None, None])[0]
            sums = np.zeros((len(outputs), *self.size), np.float32) if sums is None else sums
            sums[(slice(None), *place)] += outputs * weight
            total[place] += weight
        assert sums is not None
        return sums / total

    def _classes(self, outputs_SDHW: np.ndarray) -> np.ndarray:
        """The likeliest output at every voxel of the scan [D, H, W], in the grid's order; probabilities
        between voxels of the grid are linear.
        """
        odds = np.exp(outputs_SDHW - outputs_SDHW.max(axis=0))
        probability = odds / odds.sum(axis=0)
        along_d, along_h, along_w = self._places()
        result = np.empty(self.shape, np.uint8)
        for d, (low, share) in enumerate(zip(*along_d, strict=True)):
            plane = _between(probability, 1, np.array([low]), np.array([share], np.float32))[:, 0]
            result[d] = _between(_between(plane, 1, *along_h), 2, *along_w).argmax(axis=0)
        return result

    def _places(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each axis, where the scan's voxels lie: the voxel of the grid before, and the share of the
        next; of a B-scan its own plane.
        """
        for axis, (count, own, size, target) in enumerate(self._axes()):
            if axis == 0 and self.rule and self.grid.is_nearest(own, target, *self.rule):
                weights = self.grid.scan_weights(count, own, size, target, *self.rule)
                there = np.flatnonzero(
                    weights.any(axis=1)
                )  # what the grid does not reach is as its last plane
                weights = weights[np.arange(count).clip(there[0], there[-1])]
                first = (weights > 0).argmax(axis=1)
                yield first, (1 - weights[np.arange(count), first]).astype(np.float32)
                continue
            place = (np.arange(count) + 0.5 - count / 2) * own / target + size / 2 - 0.5
            place = place.clip(0, size - 1)
            low = np.floor(place).clip(max=max(size - 2, 0)).astype(int)
            yield low, (place - low).astype(np.float32)

    def _axes(self) -> list[tuple[int, float, int, float]]:
        """Of each axis, voxels and spacing of the scan and of the grid."""
        return list(zip(self.shape, self.own, self.size, self.target, strict=True))

    def _on_scan(self, values_SDW: np.ndarray) -> np.ndarray:
        """Means of what is no NaN at the scan's A-scans [S, B-scans, A-scans], in the volume's order."""
        (count, own, size, target), _, of_w = self._axes()
        if self.rule:
            along_d = self.grid.scan_weights(count, own, size, target, *self.rule)
        else:
            along_d = self.grid.axis_weights(size, target, count, own).weights
        along_w = self.grid.axis_weights(of_w[2], of_w[3], of_w[0], of_w[1]).weights
        known = ~np.isnan(values_SDW)
        sums, shares = (
            along_d @ part.astype(np.float64) @ along_w.T for part in (np.where(known, values_SDW, 0), known)
        )
        means = np.divide(sums, shares, out=np.full(sums.shape, np.nan), where=shares >= LEAST_WEIGHT)
        return means[:, ::-1] if self.flip else means


def _between(values: np.ndarray, axis: int, low: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Values between those at `low` and after it along an axis."""
    before = values.take(low, axis)
    after = values.take((low + 1).clip(max=values.shape[axis] - 1), axis)
    return before + (after - before) * share.reshape([-1 if a == axis else 1 for a in range(values.ndim)])
