"""Read public weights in, give an encoder to others, and check how they feed it.

    python -m models.weights inspect runs/smoke_test/checkpoints/best_probe.pt
    python -m models.weights import FILE --config configs/pretrain_oct_vjepa2.yaml --out start.pt
    python -m models.weights export --checkpoint runs/smoke_test/checkpoints/best_probe.pt --portable encoder
    python -m models.weights export --head runs/cls_linear_probe --portable classifier
    python -m models.weights selftest encoder

inspect prints what a file holds. import fits weights to a configuration and prints a line for every key:
loaded, adapted, left out or missing. export writes an encoder for others: --out its weights, --portable also
a program that takes volumes as acquired, with a golden eye; with --head a head of finetuning.train and its
encoder. selftest checks that folder, or features that another pipeline gave for its golden eye, and names
what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from utils.cli import announce, errors_in_one_line, require_folder, require_there
from utils.help_pages import Parser, PeopleParser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line; no torch is needed to read them. Raises UserError."""
    parser = PeopleParser("models.weights", __doc__ or "")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=Parser)
    inspect = verbs.add_parser("inspect", help="what a file holds")
    inspect.add_argument("path")
    importer = verbs.add_parser("import", help="fit weights to a configuration of ours")
    importer.add_argument("path")
    importer.add_argument("--config", required=True, metavar="FILE")
    importer.add_argument("--out", required=True, metavar="X.pt")
    importer.add_argument("overrides", nargs="*", metavar="section.key=value")
    exporter = verbs.add_parser("export", help="an encoder as safetensors, config.json and a model card")
    exporter.add_argument("--checkpoint", metavar="X.pt", help="with --head: where its encoder lies now")
    exporter.add_argument("--head", metavar="HEAD", help="head.pt, or its run's folder; with --portable")
    place = exporter.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", metavar="DIR", help="only the weights")
    place.add_argument("--portable", metavar="DIR", help="weights, programs and golden eye")
    exporter.add_argument("--which", choices=["target", "context"], default="target")
    exporter.add_argument("--layout", choices=["ours", "hf"], default="ours")
    tester = verbs.add_parser("selftest", help="check a portable folder, or what a pipeline made of its eye")
    tester.add_argument("folder", metavar="DIR")
    tester.add_argument("--features", metavar="FILE.npy", help="of the golden eye, by another pipeline")
    for verb in (inspect, importer):
        verb.add_argument("--heads", type=int, metavar="N", help="of a research file's encoder")
        verb.add_argument("--predictor-heads", type=int, metavar="N", help="of a research file's predictor")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["import"]:  # its overrides may stand anywhere, which sub-commands do not allow
        return importer.parse_intermixed_args(arguments[1:], argparse.Namespace(verb="import"))
    args = parser.parse_args(arguments)
    if args.verb == "export":
        if args.head is None and args.checkpoint is None:
            exporter.error("--checkpoint: expected a checkpoint, or a head by --head, found neither")
        if args.head is not None and (args.portable is None or args.which != "target"):
            exporter.error("--head: expected it with --portable and --which target, found other words")
        require_folder("--portable" if args.out is None else "--out", args.out, args.portable)
    return args


def answer_early() -> None:
    """Refuse a wrong command line, or say what is begun, before torch is imported."""
    with errors_in_one_line():
        words = vars(parse(None))
        given = {name: words[name] for name in ("path", "checkpoint", "head", "folder") if words.get(name)}
        for name, place in given.items():
            require_there(f"--{name}" if name in ("checkpoint", "head") else name, place)
    places = ", ".join(given.values())
    announce(f"models.weights {words['verb']}: {places}; the libraries load, which takes seconds")
