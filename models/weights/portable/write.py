"""`python -m models.weights export --checkpoint X.pt --portable DIR`.

In: a checkpoint of ours. Out, in DIR:
    model.safetensors, config.json, README.md   the encoder, as `export --out` writes it
    hf/                                         the same in Hugging Face's layout, where it can hold it
    program.pt2       torch.export of program.py: volume as acquired -> tokens, validity, pooled features
    program.onnx      the same for runtimes without torch, where the packages of onnx_file.py are installed
    preprocess.json   what the program does before the encoder, and the SHA-256 of every file
    golden.npz        an eye (under 300 kB) with its pooled features and some of its tokens
Each program gives the golden features to 1e-4, or nothing is written.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.weights.export import export_encoder, why_not_hf
from models.weights.portable import onnx_file
from models.weights.portable.eye import FIRST_IS_SUPERIOR, SPACING_MM, golden_eye
from models.weights.portable.program import NORMALISATION, PortableEncoder, Preprocess
from models.weights.shape import Weights, new_encoder
from utils import storage
from utils.errors import UserError

FORMAT_VERSION = 2  # 1 had no word about ONNX
PREPROCESS, PROGRAM, ONNX, GOLDEN = "preprocess.json", "program.pt2", "program.onnx", "golden.npz"
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
CARD = """
## The program

`program.pt2` takes a volume as it was acquired and does the rest: `preprocess.json`. Load no program of
somebody whom you do not trust: unlike safetensors it is code.

```python
from models.weights.portable import load_portable, selftest

features = load_portable(FOLDER)(volume, spacing_mm=(0.047, 0.0026, 0.0117), first_is_superior=True)
selftest(FOLDER, my_pipeline)  # my_pipeline(volume, spacing_mm, first_is_superior) -> features
```
"""
ONNX_CARD = """
`program.onnx` is the same program without torch:

```python
import numpy, onnxruntime

session = onnxruntime.InferenceSession("program.onnx")
tokens, valid, pooled = session.run(
    ["tokens", "valid", "pooled"],
    {
        "volume": volume,  # uint8 [D, H, W]
        "spacing_mm": numpy.array([0.047, 0.0026, 0.0117]),
        "first_is_superior": numpy.array(True),
    },
)
```
"""


def portable_encoder(
    weights: Weights, which: Literal["target", "context"], preprocess: Preprocess
) -> PortableEncoder:
    """The encoder of a file with what comes before it, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        encoder = new_encoder(weights)
    encoder.load_state_dict(weights.target_encoder if which == "target" else weights.encoder)
    return PortableEncoder(encoder, preprocess).eval().requires_grad_(False)


def export_portable(weights: Weights, out: str, which: Literal["target", "context"]) -> list[str]:
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
    with torch.no_grad():
        tokens_NE, valid_N, pooled = module(*arguments)
    any_size = dict.fromkeys(range(3), torch.export.Dim.DYNAMIC)
    exported = torch.export.export(module, arguments, dynamic_shapes=(any_size, None, None))
    no_onnx = onnx_file.why_no_onnx(module)
    onnx = onnx_file.to_onnx(exported) if no_onnx is None else None
    differences = _differences(exported, onnx, arguments, pooled)
    lines = export_encoder(weights, out, which, "ours")
    problem = why_not_hf(weights, cfg)
    if problem is None:
        lines += export_encoder(weights, storage.join(out, "hf"), which, "hf")
    program = io.BytesIO()
    torch.export.save(exported, program)
    storage.write_bytes(storage.join(out, PROGRAM), program.getvalue())
    if onnx is not None:
        storage.write_bytes(storage.join(out, ONNX), onnx)
    storage.write_bytes(storage.join(out, GOLDEN), _golden(arguments[0], tokens_NE, valid_N, pooled))
    readme = storage.join(out, "README.md")
    onnx_card = f"\nNo `program.onnx`: {no_onnx}.\n" if onnx is None else ONNX_CARD
    storage.write_text(readme, storage.read_text(readme) + CARD + onnx_card)
    contract = {
        "format_version": FORMAT_VERSION,
        "input": INPUT,
        "output": OUTPUT,
        **asdict(module.preprocess),
        "normalisation": NORMALISATION,
        "encoder": which,
        "hf": problem or "hf",
        "onnx": no_onnx or "onnx",
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "sha256": {
            name: hashlib.sha256(storage.read_bytes(storage.join(out, name))).hexdigest()
            for name in file_names(has_hf=problem is None, has_onnx=onnx is not None)
        },
    }
    storage.write_text(storage.join(out, PREPROCESS), json.dumps(contract, indent=1) + "\n")
    lines += [f"no Hugging Face layout: {problem}"] if problem else []
    lines += [f"no ONNX: {no_onnx}"] if no_onnx else []
    return [*lines, *differences, f"written to {out}"]


def file_names(has_hf: bool, has_onnx: bool) -> list[str]:
    """The files of a folder whose digests preprocess.json holds."""
    extra = ([ONNX] if has_onnx else []) + (list(HF_FILES) if has_hf else [])
    return ["model.safetensors", PROGRAM, GOLDEN, *extra]


def _differences(
    exported: torch.export.ExportedProgram, onnx: bytes | None, arguments: tuple[Tensor, ...], pooled: Tensor
) -> list[str]:
    """A line for each program: how far its features are from the module's; raises UserError over 1e-4."""
    with torch.no_grad():
        features = {PROGRAM: exported.module()(*arguments)[2].numpy()}
    lines = []
    if onnx is not None and onnx_file.can_run():
        features[ONNX] = onnx_file.run_onnx(onnx, arguments)[2]
    elif onnx is not None:
        lines.append(f"{ONNX}: not run, onnxruntime is not installed")
    for name, values in features.items():
        difference = float(np.abs(values - pooled.numpy()).max())
        if not difference <= TOLERANCE:
            raise UserError(
                f"{name}: expected features equal to {TOLERANCE}, found a difference of {difference:.2g}"
            )
        lines.append(f"{name}: golden features to {difference:.1g}")
    return lines


def _golden(volume: Tensor, tokens_NE: Tensor, valid_N: Tensor, pooled: Tensor) -> bytes:
    """The golden eye, its features, and tokens of places that are inside the scan."""
    places = torch.nonzero(valid_N).flatten()
    chosen = places[torch.linspace(0, len(places) - 1, min(GOLDEN_TOKENS, len(places))).long()]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        volume=volume.numpy(),
        spacing_mm=np.array(SPACING_MM),
        first_is_superior=np.array(FIRST_IS_SUPERIOR),
        pooled=pooled.numpy(),
        token_ids=chosen.numpy(),
        tokens=tokens_NE[chosen].numpy(),
    )
    return buffer.getvalue()
