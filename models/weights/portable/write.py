"""`python -m models.weights export --checkpoint X.pt --portable DIR`, and with --head.

In: a checkpoint of ours, or a head's program with its encoder. Out, in DIR:
    model.safetensors, config.json, README.md   the encoder, as `export --out` writes it
    hf/                                         the same in Hugging Face's layout, where it can hold it
    program.pt2       torch.export of program.py: volume as acquired -> tokens, validity, pooled features
    program.onnx      the same for runtimes without torch, where onnx and onnxscript are installed
    head.pt2, head.onnx   of a head of labels: features -> scores and probabilities
    head.pt2          of another head, with its encoder: a window of the grid -> what is predicted there
    oct_portable.py   standalone.py, which checks what it is given and runs the programs
    oct_grid.py       of a head that reads voxels: data_setup/resample.py, to the grid and back
    preprocess.json   what the program does before the encoder, and the SHA-256 of every file
    golden.npz        an eye (under 300 kB) with its pooled features and some of its tokens; what a head says
Each program gives the golden features to 1e-4, or nothing is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from models.weights.export import export_encoder, why_not_hf
from models.weights.portable import standalone
from models.weights.portable.program import (
    NORMALISATION,
    PortableEncoder,
    Preprocess,
    can_run,
    to_onnx,
    why_no_onnx,
)
from models.weights.portable.standalone import (
    GRID,
    HEAD,
    HEAD_ONNX,
    ONNX,
    PREPROCESS,
    PROGRAM,
    READS,
    VIEW,
    Answer,
    Classes,
    Labels,
    Slabs,
    Surfaces,
    load_portable,
)
from models.weights.shape import Weights, new_encoder
from utils import storage
from utils.errors import UserError
from utils.terminal import say

FORMAT_VERSION = 3  # 1 had no word about ONNX, 2 neither heads nor a runner
RUNNER, GOLDEN = "oct_portable.py", "golden.npz"
HF_FILES = ("hf/model.safetensors", "hf/config.json")
TOLERANCE = 1e-4  # largest difference of features on the golden eye
GOLDEN_TOKENS = 12  # of the golden file, evenly over the grid
INPUT = {
    "volume": "uint8 [D, H, W]: B-scans, rows from the vitreous down, A-scans; grey 0..255, one channel",
    "spacing_mm": "float64 [3], mm, in the same order",
    "first_is_superior": "bool: whether the first B-scan is the superior one",
}
OUTPUT = {
    "tokens": "float32 [N, E], raster order of the grid",
    "valid": "bool [N]: at least half of the token lies inside the scan",
    "pooled": "float32 [2E]: mean and standard deviation over valid tokens",
}
OF_HEAD = {VIEW: ("outputs",), "features": ("scores", "probabilities")}
EYE_SHAPE = (16, 128, 96)
# 5.95 x 2.3 x 5.93 mm, and no multiple of a usual target spacing: there many sums fall on a half of a grey
# value, and the order in which a runtime adds decides how they are rounded
SPACING_MM = (0.3719, 0.01793, 0.0618)
FIRST_IS_SUPERIOR = True
# of the eye: thickness in mm and brightness, from the inner surface down
EYE_LAYERS = (
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
CARD = """
## The program

The folder takes a volume as it was acquired and does the rest: `preprocess.json`. `oct_portable.py` needs
numpy and torch, or onnxruntime, and nothing of the repository; it refuses what no volume can be. Load no
program of somebody whom you do not trust: unlike safetensors it is code.

```python
import sys

sys.path.insert(0, FOLDER)
from oct_portable import load_portable

{result} = load_portable(FOLDER)(volume, spacing_mm=(0.047, 0.0026, 0.0117), first_is_superior=True)
```

`python -m models.weights selftest FOLDER`, in the repository, names what is wrong with a folder, or with a
pipeline that should give these features.
"""
ONNX_CARD = """
`load_portable(FOLDER, "onnxruntime")` is the same without torch. Whoever runs `program.onnx` without
`oct_portable.py` checks the input: a graph cannot refuse.
"""
HEAD_CARD = """
The folder holds a head of {task} ({names}), {calibration}. `oct_portable.py` says what `answer` holds.
{num_people} people trained and validated it.
"""


@dataclass(frozen=True)
class HeadProgram:
    """A trained head for a folder: its encoder, what it makes of what it `reads` (READS of standalone.py),
    and plain values about it: task, names, calibration, and what a task needs on its way back to the scan.
    `grid`: the source of data_setup/resample.py, where it reads voxels.
    """

    weights: Weights
    module: nn.Module
    facts: dict[str, Any]
    grid: bytes | None = None


def portable_encoder(
    weights: Weights, which: Literal["target", "context"], preprocess: Preprocess
) -> PortableEncoder:
    """The encoder of a file with what comes before it, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        encoder = new_encoder(weights)
    encoder.load_state_dict(weights.target_encoder if which == "target" else weights.encoder)
    return PortableEncoder(encoder, preprocess).eval().requires_grad_(False)


def export_portable(
    weights: Weights, out: str, which: Literal["target", "context"], head: HeadProgram | None = None
) -> list[str]:
    """Write the folder; returns lines to print. Raises UserError for another normalisation, for a folder that
    is not empty, or where the program does not give the features of the encoder.
    """
    cfg = weights.cfg
    if cfg is None:
        raise UserError(f"{weights.where}: expected a checkpoint of ours to export, found {weights.layout}")
    if weights.facts["normalisation"] != NORMALISATION:
        raise UserError(
            f"{weights.where}: normalisation: expected {NORMALISATION}, which the program has, "
            f"found {weights.facts['normalisation']}"
        )
    spatial = cfg.spatial
    grid = spatial.image_size, spatial.target_spacing, spatial.resample, spatial.patch_size
    preprocess = Preprocess(*grid, weights.facts["planes"])
    module = portable_encoder(weights, which, preprocess)
    arguments = (
        torch.from_numpy(golden_eye()),
        torch.tensor(SPACING_MM, dtype=torch.float64),
        torch.tensor(FIRST_IS_SUPERIOR),
    )
    any_size = dict.fromkeys(range(3), torch.export.Dim.DYNAMIC)
    no_onnx = why_no_onnx(module)
    features, contents, lines = _programs(
        module, arguments, (any_size, None, None), (PROGRAM, ONNX), (tuple(INPUT), tuple(OUTPUT)), no_onnx
    )
    golden, problem = _golden(arguments[0], *features), why_not_hf(weights, cfg)
    contract = _contract(module.preprocess, which, head, problem or "hf", no_onnx or "onnx")
    if head is not None:
        given = features if head.grid is None else (module.view(*arguments)[0],)
        of_head, golden["answer"], more = _of_head(head, given, contents, contract)
        contents, lines = contents | of_head, lines + more
    lines += export_encoder(weights, out, which, "ours")
    if problem is None:
        lines += export_encoder(weights, storage.join(out, "hf"), which, "hf")
    np.savez_compressed(buffer := io.BytesIO(), allow_pickle=False, **golden)
    contents |= {GOLDEN: buffer.getvalue(), RUNNER: Path(standalone.__file__).read_bytes()}
    for name, content in contents.items():
        storage.write_bytes(storage.join(out, name), content)
    _add_to_card(storage.join(out, "README.md"), no_onnx, head)
    contract["sha256"] = {
        name: hashlib.sha256(storage.read_bytes(storage.join(out, name))).hexdigest()
        for name in file_names(contract)
    }
    storage.write_text(storage.join(out, PREPROCESS), json.dumps(contract, indent=1) + "\n")
    lines += [f"no Hugging Face layout: {problem}"] if problem else []
    lines += [f"no ONNX: {no_onnx}"] if no_onnx else []
    return [*lines, f"written to {out}"]


def _contract(
    preprocess: Preprocess, which: str, head: HeadProgram | None, hf: str, onnx: str
) -> dict[str, Any]:
    """The content of preprocess.json but for digests."""
    return {
        "format_version": FORMAT_VERSION,
        "input": INPUT,
        "output": OUTPUT,
        **asdict(preprocess),
        "normalisation": NORMALISATION,
        "encoder": which,
        "head": None if head is None else head.facts,
        "hf": hf,
        "onnx": onnx,
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
    }


def file_names(contract: dict[str, Any]) -> list[str]:
    """The files of a folder whose digests its preprocess.json holds."""
    has_onnx, has_head = contract["onnx"] == "onnx", bool(contract.get("head"))
    is_dense = has_head and contract["head"]["reads"] == VIEW
    names = {
        ONNX: has_onnx,
        HEAD: has_head,
        HEAD_ONNX: has_onnx and has_head and not is_dense,
        GRID: is_dense,
        RUNNER: contract["format_version"] > 2,
        **dict.fromkeys(HF_FILES, contract["hf"] == "hf"),
    }
    return ["model.safetensors", PROGRAM, GOLDEN, *(name for name, is_there in names.items() if is_there)]


def _add_to_card(url: str, no_onnx: str | None, head: HeadProgram | None) -> None:
    text = storage.read_text(url) + CARD.format(result="features" if head is None else "answer")
    if head is not None:
        facts = head.facts
        text += HEAD_CARD.format(**facts | {"names": ", ".join(facts["names"])})
    text += ONNX_CARD if no_onnx is None else f"\nNo `{ONNX}`: {no_onnx}.\n"
    storage.write_text(url, text)


def _of_head(
    head: HeadProgram, given: tuple[Tensor, ...], contents: dict[str, bytes], contract: dict[str, Any]
) -> tuple[dict[str, bytes], np.ndarray, list[str]]:
    """The files of a head by name, what it says of the golden eye, and lines as of `_programs`."""
    reads = head.facts["reads"]
    no_onnx = None if contract["onnx"] == "onnx" and head.grid is None else "only torch"
    named = READS[reads], OF_HEAD[reads]
    _, files, lines = _programs(head.module, given, None, (HEAD, HEAD_ONNX), named, no_onnx)
    files |= {} if head.grid is None else {GRID: head.grid}
    there = contents | files | {PREPROCESS: json.dumps(contract).encode()}
    answer = load_portable("", read=there.__getitem__)(golden_eye(), SPACING_MM, FIRST_IS_SUPERIOR)
    return files, of_answer(answer), lines


def _programs(
    module: nn.Module,
    arguments: tuple[Tensor, ...],
    dynamic_shapes: tuple[Any, ...] | None,
    names: tuple[str, str],
    named: tuple[Sequence[str], Sequence[str]],
    no_onnx: str | None,
) -> tuple[tuple[Tensor, ...], dict[str, bytes], list[str]]:
    """What the module makes of the arguments (`named`: inputs, outputs); its files by name, of torch.export
    and, unless there is a reason for none, of ONNX; a line for each, how far its last output is from the
    module's. Raises UserError over TOLERANCE.
    """
    with torch.no_grad():
        expected = module(*arguments)
    _begin(f"{names[0]}: torch.export traces the program")
    exported = torch.export.export(module, arguments, dynamic_shapes=dynamic_shapes)
    torch.export.save(exported, buffer := io.BytesIO())
    contents, lines = {names[0]: buffer.getvalue()}, []
    runs = {names[0]: standalone.torch_program}
    if no_onnx is None:
        _begin(f"{names[1]}: the program is translated")
        contents[names[1]] = to_onnx(exported, *named)
        if can_run():
            runs[names[1]] = standalone.onnx_program
        else:
            lines.append(f"{names[1]}: not run, onnxruntime is not installed")
    for name, opened in runs.items():
        _begin(f"{name}: it runs on the golden eye")
        values = opened(contents[name], named[0])(*(argument.numpy() for argument in arguments))[-1]
        difference = difference_of(values, expected[-1].numpy())
        if not difference <= TOLERANCE:
            raise UserError(
                f"{name}: expected outputs equal to {TOLERANCE}, found a difference of {difference:.2g}"
            )
        what = "features" if name in (PROGRAM, ONNX) else "answer"
        lines.append(f"{name}: golden {what} to {difference:.1g}")
    return expected, contents, lines


def _begin(text: str) -> None:
    """A line before each part that takes seconds."""
    say(text, file=sys.stderr, flush=True)


def difference_of(values: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of what is above 1; infinite where only one is NaN."""
    if values.shape != expected.shape or not np.array_equal(np.isnan(values), np.isnan(expected)):
        return float("inf")
    size = max(1.0, float(np.nanmax(np.abs(expected), initial=0)))
    return float(np.nanmax(np.abs(values.astype(float) - expected), initial=0)) / size


def of_answer(answer: Answer) -> np.ndarray:
    """The numbers of a head's answer."""
    match answer:
        case Labels():
            return np.array([*answer.scores.values()])
        case Surfaces():
            return answer.rows
        case Slabs():
            return answer.values
        case Classes():
            return answer.voxels
        case _:
            return answer.pooled


def _golden(volume: Tensor, tokens_NE: Tensor, valid_N: Tensor, pooled: Tensor) -> dict[str, np.ndarray]:
    """The golden eye, its features, and tokens of places that are inside the scan."""
    places = torch.nonzero(valid_N).flatten()
    chosen = places[torch.linspace(0, len(places) - 1, min(GOLDEN_TOKENS, len(places))).long()]
    return {
        "volume": volume.numpy(),
        "spacing_mm": np.array(SPACING_MM),
        "first_is_superior": np.array(FIRST_IS_SUPERIOR),
        "pooled": pooled.numpy(),
        "token_ids": chosen.numpy(),
        "tokens": tokens_NE[chosen].numpy(),
    }


def golden_eye() -> np.ndarray:
    """uint8 [D, H, W], the first B-scan superior, rows from the vitreous down: a small phantom scan that no
    flip, swap or other scale leaves as it is. Layers are tilted along both axes, the foveal pit is off the
    centre, disc and nerve fibres are on one side.
    """
    depth, height, width = EYE_SHAPE
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
    grey = np.full(EYE_SHAPE, float(VITREOUS))
    top = surface + pit
    for number, (thickness, brightness) in enumerate(EYE_LAYERS):
        grey = np.where(z >= top[:, None], brightness * (1 - 0.5 * disc[:, None]), grey)
        inner = 1 - np.clip(pit / 0.11, 0, 1) if number in (1, 2) else 1.0
        top = top + thickness * inner + (fibres if number == 0 else 0)
    grey = np.where(z >= top[:, None], SCLERA, grey)
    vessels = sum(
        np.exp(-((v - a * (u - 3) ** 2 - b) ** 2) / 0.02)
        for a, b in ((0.12, 0.9), (-0.2, -0.7), (-0.05, 2.1))
    )
    grey = np.where(z > surface[:, None] + 0.06, grey * (1 - 0.6 * np.clip(vessels, 0, 1)[:, None]), grey)
    speckle = np.random.default_rng(0).rayleigh(0.8, EYE_SHAPE)
    return np.clip(grey * (0.55 + 0.45 * speckle), 0, 255).astype(np.uint8)
