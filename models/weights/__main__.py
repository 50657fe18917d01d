"""What the verbs of `python -m models.weights` do; words.py reads the command line."""

from __future__ import annotations

from models.weights.words import answer_early, parse

if __name__ == "__main__":  # torch takes seconds to import
    answer_early()

import argparse
import importlib
import io
import posixpath
from collections.abc import Sequence

import numpy as np

from models.weights.export import export_encoder
from models.weights.files import read_weights
from models.weights.load import NORMALISATION, Line, fit, lineage, shown, summary
from models.weights.portable.selftest import selftest
from models.weights.portable.write import HeadProgram, export_portable
from models.weights.shape import ROLES, Weights
from utils import storage
from utils.checkpoint import CheckpointWriter
from utils.cli import run_cli
from utils.config.load import load_config, to_yaml
from utils.config.schema import Config
from utils.errors import UserError


def assumed_heads(weights: Weights, heads: int | None, predictor_heads: int | None) -> list[str]:
    """A line that says which numbers of heads were assumed: a research file does not hold them."""
    if weights.layout not in ("research", "research_2_1"):
        return []
    size, predictor = weights.size, weights.predictor_size
    parts = [] if heads else [f"encoder {size.heads} ({size.width // size.heads} wide)"]
    parts += [] if predictor_heads or predictor is None else [f"predictor {predictor.heads}"]
    return [f"heads assumed: {', '.join(parts)}"] if parts else []


def inspect_weights(weights: Weights) -> list[str]:
    """What a file holds: its shape, then every key."""
    text = [
        f"layout      {weights.layout}, recipe {weights.recipe}",
        f"encoder     {shown(weights.size)}",
        f"patch       {list(weights.patch)}, {weights.channels} channels, {weights.positions} positions"
        + (f", rotary form {weights.rope}" if weights.positions == "rotary" else ""),
    ]
    if weights.predictor_size is not None:
        text.append(f"predictor   {shown(weights.predictor_size)}")
    text += [f"{key:<11} {value}" for key, value in weights.facts.items() if key != "participants"]
    if "participants" in weights.facts:
        text.append(f"{'saw':<11} {len(weights.facts['participants'])} participants")
    for role in ROLES:
        tensors = weights.role(role)
        text.append(f"{role}: {sum(t.numel() for t in tensors.values())} parameters")
        text += [f"  {name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    return [*text, *(f"left out: {name} ({why})" for name, why in weights.left_out.items())]


def import_weights(
    path: str, cfg: Config, out: str, heads: int | None = None, predictor_heads: int | None = None
) -> tuple[list[Line], list[str]]:
    """Write the fitted weights as a checkpoint of ours; returns a line per key, and one on assumed heads."""
    if not out.endswith(".pt"):
        raise UserError(f"--out: expected a name that ends with .pt, found {out}")
    if storage.exists(out):
        raise UserError(f"--out: expected a new file, found {out}")
    weights = read_weights(path, cfg.data.storage_options, heads=heads, predictor_heads=predictor_heads)
    result, start = fit(weights, cfg), lineage(weights)
    state = {
        "step": 0,
        "model": result.tensors,
        "config": to_yaml(cfg),
        "recipe": cfg.method.recipe,
        "normalisation": weights.facts.get("normalisation", NORMALISATION),
        "participants": start.participants,
        "synthetic": weights.facts.get("synthetic", False),
        "progress": {"init_weight": start.init_weight},
        "imported_from": start.imported_from or f"{posixpath.basename(path.rstrip('/'))} ({weights.layout})",
    }
    folder, name = posixpath.split(out)
    writer = CheckpointWriter(folder or ".", keep_last=None)
    writer.save(state, [name.removesuffix(".pt")])
    writer.close()
    return result.lines, assumed_heads(weights, heads, predictor_heads)


def _array(path: str) -> np.ndarray:
    """The array of a .npy file; raises UserError."""
    try:
        return np.load(io.BytesIO(storage.read_bytes(path)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"--features: expected a .npy file of numbers, found {path}: {error}") from error


def _head_program(args: argparse.Namespace) -> HeadProgram:
    """The head of --head; raises UserError."""
    # heads stand above this room, which imports nothing of theirs and names one function here
    program: HeadProgram = importlib.import_module("finetuning.prediction.portable").head_program(
        args.head, args.checkpoint
    )
    return program


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.verb == "inspect":
        weights = read_weights(args.path, heads=args.heads, predictor_heads=args.predictor_heads)
        lines = inspect_weights(weights) + assumed_heads(weights, args.heads, args.predictor_heads)
    elif args.verb == "import":
        cfg = load_config(args.config, args.overrides)
        keys, lines = import_weights(args.path, cfg, args.out, args.heads, args.predictor_heads)
        lines += [f"{key.status:<9} {key.name}  {key.detail}".rstrip() for key in keys]
        lines.append(f"{summary(keys)}; written to {args.out}")
    elif args.verb == "selftest":
        lines = selftest(args.folder, features=_array(args.features) if args.features else None)
    elif args.portable:
        if args.layout != "ours":
            raise UserError("--layout: expected none with --portable, which writes both, found hf")
        head = _head_program(args) if args.head else None
        weights = read_weights(args.checkpoint) if head is None else head.weights
        lines = export_portable(weights, args.portable, args.which, head)
    else:
        lines = export_encoder(read_weights(args.checkpoint), args.out, args.which, args.layout)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    run_cli(main)
