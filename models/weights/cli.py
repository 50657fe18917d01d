"""Public weights in, ours out: `python -m models.weights inspect|import|export`, `load_vjepa2`, `start_from`.

In: any file that models/weights/files.py reads. Out: modules of the file's own shape, or the weights fitted
to a configuration of ours (models/weights/fit.py), with a line for every key: loaded, adapted, left out or
missing.
"""

from __future__ import annotations

import argparse
import logging
import posixpath
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from models.predictor import Predictor3D
from models.vit3d import VisionTransformer3D
from models.vjepa3d import VJEPA3D
from models.weights.export import export_encoder
from models.weights.files import read_weights
from models.weights.fit import ADAPTED_PLANES, GRAY, NORMALISATION, Line, adapt_patches, fit, shown, summary
from models.weights.shape import Weights, new_encoder, new_predictor
from utils import storage
from utils.checkpoint import CheckpointError, CheckpointWriter
from utils.config.load import load_config, to_yaml
from utils.config.schema import Config
from utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What a run that starts from weights has to know about them."""

    participants: list[str]
    init_weight: float  # share of random initialisation in the target


def load_vjepa2(
    path: str,
    adapt: bool = False,
    *,
    heads: int | None = None,
    predictor_heads: int | None = None,
    mask_token: int = 0,
) -> tuple[VisionTransformer3D, VisionTransformer3D, Predictor3D]:
    """(encoder, target_encoder, predictor) of the file's own shape, in evaluation mode.

    `encoder(volume_BCDHW, keep_BK=None) -> BKE`, `predictor(ctx_BKE, keep_BK, target_BM) -> BME`. Positions
    follow the volume: any size that the patch divides, and the predictor takes the grid of the volume that
    either encoder saw last (before the first: the file's, 8 x 16 x 16 for a research file). `mask_token`:
    which of the predictor's is used; 0 is the one that the published recipe trains with clips of one length,
    1 is what Hugging Face's bare predictor uses by default. `adapt`: one channel fed gray in [0, 1] and
    patches of 4 planes. `heads` and `predictor_heads`: of a research file whose heads are not of 64 and 32
    channels.
    """
    weights = read_weights(str(path), heads=heads, predictor_heads=predictor_heads)
    if weights.predictor_size is None:
        raise CheckpointError(f"{path}: expected a transformer predictor, found none")
    if "mask_token" in weights.encoder:
        raise CheckpointError(
            f"{path}: expected an encoder of visible tokens, found one with a mask token (method.context "
            "dense)"
        )
    if adapt:
        patch = (ADAPTED_PLANES, *weights.patch[1:])
        tensors, target = (
            adapt_patches(weights, role, patch, 1, GRAY)[0] for role in ("encoder", "target_encoder")
        )
        weights = replace(weights, encoder=tensors, target_encoder=target)
    with torch.random.fork_rng(devices=[]):
        encoder, target_encoder, predictor = (
            new_encoder(weights),
            new_encoder(weights),
            new_predictor(weights, mask_token),
        )
    encoder.load_state_dict(weights.encoder)
    target_encoder.load_state_dict(weights.target_encoder)
    predictor.load_state_dict(weights.predictor)
    if weights.positions == "rotary":
        for module in (encoder, target_encoder):
            _follow_volumes(module, predictor)
    return encoder.eval(), target_encoder.eval().requires_grad_(False), predictor.eval()


def load_encoder(path: str) -> VisionTransformer3D:
    """The target encoder of any layout, in evaluation mode; positions follow the volume."""
    weights = read_weights(str(path))
    with torch.random.fork_rng(devices=[]):
        encoder = new_encoder(weights)
    encoder.load_state_dict(weights.target_encoder)
    if weights.positions == "rotary":
        _follow_volumes(encoder)
    return encoder.eval().requires_grad_(False)


def _follow_volumes(encoder: VisionTransformer3D, *others: VisionTransformer3D | Predictor3D) -> None:
    """Before each call, give the encoder and the others the token grid of the volume."""

    def set_grid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        volume = args[0] if args else kwargs["volume_BCDHW"]
        assert isinstance(module, VisionTransformer3D)
        patch = module.patch_embed.patch
        sizes = tuple(volume.shape[2:])
        if len(sizes) != 3 or any(size % p or size == 0 for size, p in zip(sizes, patch, strict=True)):
            raise ValueError(
                f"expected a volume [B, C, D, H, W] of whole patches {patch}, found {tuple(volume.shape)}"
            )
        d, h, w = (size // p for size, p in zip(sizes, patch, strict=True))
        module.num_tokens = d * h * w
        for follower in (module, *others):
            follower.grid = (d, h, w)

    encoder.register_forward_pre_hook(set_grid, with_kwargs=True)


def start_from(model: VJEPA3D, cfg: Config, normalisation: str) -> Start:
    """Put the weights of method.init_from into the model; logs what was not simply loaded."""
    url = cfg.method.init_from
    assert url is not None
    weights = read_weights(url, cfg.data.storage_options)
    found = weights.facts.get("normalisation", NORMALISATION)  # public weights are adapted to it
    if found != normalisation:
        raise CheckpointError(f"{url}: normalisation: expected {normalisation} of the store, found {found}")
    result, start = fit(weights, cfg), lineage(weights)
    model.load_state_dict({**model.state_dict(), **result.tensors})
    for line in result.lines:
        if line.status != "loaded":
            log.info("%s %s: %s", line.status, line.name, line.detail)
    missing = [line for line in result.lines if line.status == "missing"]
    if missing:
        log.warning("%s: the predictor starts at %s", url, missing[0].detail)
    log.info("weights start from %s: %s", url, summary(result.lines))
    return start


def lineage(weights: Weights) -> Start:
    """Which participants the weights saw; raises CheckpointError where they are counted but not named."""
    facts = weights.facts
    if "participants" not in facts and facts.get("num_participants"):
        raise CheckpointError(
            f"{weights.where}: expected the participants that these weights saw, found only their number, "
            f"{facts['num_participants']}; start from the checkpoint that was exported"
        )
    return Start(list(facts.get("participants", [])), facts.get("init_weight", 0.0))


def assumed_heads(weights: Weights, heads: int | None, predictor_heads: int | None) -> list[str]:
    """A line on the heads that nobody told: a research file says nothing of them."""
    if weights.layout != "research" or (heads and predictor_heads):
        return []
    size, predictor = weights.size, weights.predictor_size
    assert predictor is not None  # a research file without one is refused
    parts = [] if heads else [f"encoder {size.heads} ({size.width // size.heads} wide)"]
    parts += [] if predictor_heads else [f"predictor {predictor.heads}"]
    return [f"heads assumed: {', '.join(parts)}"]


def inspect_weights(weights: Weights) -> list[str]:
    """What a file holds: its shape, then every key."""
    size = weights.size
    text = [
        f"layout      {weights.layout}, recipe {weights.recipe}",
        f"encoder     {shown(size)}",
        f"patch       {list(weights.patch)}, {weights.channels} channels, {weights.positions} positions"
        + (f", rotary form {weights.rope}" if weights.positions == "rotary" else ""),
    ]
    if weights.predictor_size is not None:
        text.append(f"predictor   {shown(weights.predictor_size)}")
    text += [f"{key:<11} {value}" for key, value in weights.facts.items() if key != "participants"]
    if "participants" in weights.facts:
        text.append(f"{'saw':<11} {len(weights.facts['participants'])} participants")
    for role in ("encoder", "target_encoder", "predictor"):
        tensors = weights.role(role)
        text.append(f"{role}: {sum(t.numel() for t in tensors.values())} parameters")
        text += [f"  {name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    return [*text, *(f"left out: {name} ({why})" for name, why in weights.left_out.items())]


def import_weights(
    path: str, cfg: Config, out: str, heads: int | None = None, predictor_heads: int | None = None
) -> tuple[list[Line], list[str]]:
    """Write the weights, fitted, as a checkpoint of ours; returns a line per key, and of assumed heads."""
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
        "imported_from": f"{posixpath.basename(path.rstrip('/'))} ({weights.layout})",
    }
    folder, name = posixpath.split(out)
    writer = CheckpointWriter(folder or ".", keep_last=sys.maxsize)  # prunes no neighbour
    writer.save(state, [name.removesuffix(".pt")], permanent=True)
    writer.close()
    return result.lines, assumed_heads(weights, heads, predictor_heads)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m models.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    inspect = verbs.add_parser("inspect", help="what a file holds")
    inspect.add_argument("path")
    importer = verbs.add_parser("import", help="fit weights to a configuration of ours")
    importer.add_argument("path")
    importer.add_argument("--config", required=True, metavar="FILE")
    importer.add_argument("--out", required=True, metavar="X.pt")
    importer.add_argument("overrides", nargs="*", metavar="section.key=value")
    exporter = verbs.add_parser("export", help="an encoder as safetensors, config.json and a model card")
    exporter.add_argument("--checkpoint", required=True, metavar="X.pt")
    exporter.add_argument("--out", required=True, metavar="DIR")
    exporter.add_argument("--which", choices=["target", "context"], default="target")
    exporter.add_argument("--layout", choices=["ours", "hf"], default="ours")
    for verb in (inspect, importer):
        verb.add_argument("--heads", type=int, metavar="N", help="of a research file's encoder")
        verb.add_argument("--predictor-heads", type=int, metavar="N", help="of a research file's predictor")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["import"]:  # its overrides may stand anywhere, which sub-commands do not know
        args = importer.parse_intermixed_args(arguments[1:], argparse.Namespace(verb="import"))
    else:
        args = parser.parse_args(arguments)
    if args.verb == "inspect":
        weights = read_weights(args.path, heads=args.heads, predictor_heads=args.predictor_heads)
        told = assumed_heads(weights, args.heads, args.predictor_heads)
        print("\n".join([*inspect_weights(weights), *told]))
    elif args.verb == "import":
        cfg = load_config(args.config, args.overrides)
        lines, told = import_weights(args.path, cfg, args.out, args.heads, args.predictor_heads)
        print("".join(f"{text}\n" for text in told), end="")
        print("\n".join(f"{line.status:<9} {line.name}  {line.detail}".rstrip() for line in lines))
        print(f"{summary(lines)}; written to {args.out}")
    else:
        for text in export_encoder(read_weights(args.checkpoint), args.out, args.which, args.layout):
            print(text)
    return 0
