"""Public data sets: what each is, whether a folder is one, and the tables that training needs.

In: the name of a set and a folder in the set's own layout, on a disk or in a bucket. Nothing is downloaded:
get the set from its owners, under their licence. `index` writes manifest.tsv, participants.tsv and label
files into the folder (or --out), and prints the next two commands.

examples:
    python -m data_setup.plug list
    python -m data_setup.plug list octa500
    python -m data_setup.plug check octa500 OCTA-500
    python -m data_setup.plug index octa500 OCTA-500 --out tables
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections import Counter
from collections.abc import Sequence

from data_setup.plug.facts import Plug, Scan, Tree
from data_setup.plug.index import (
    Looked,
    Written,
    count_classes,
    look_all,
    needs_splits,
    read_labels,
    write_index,
)
from data_setup.plug.page import describe, overview
from data_setup.plug.sets import NO_VOLUMES, PLUGS
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.help_pages import Parser
from utils.storage import join

CONFIG = "configs/pretrain_oct_vjepa2.yaml"
_SHOWN = 3


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data_setup.plug",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list | check | index")
    one = verbs.add_parser("list", help="all sets, or everything about one")
    one.add_argument("name", nargs="?", metavar="NAME", help="of a set")
    texts = {
        "check": "whether a folder is the set, and what is in it",
        "index": "write the tables and label files of a folder",
    }
    for verb, text in texts.items():
        one = verbs.add_parser(verb, help=text)
        one.add_argument("name", metavar="NAME", help="of a set: see list")
        one.add_argument("folder", metavar="DIR", help="a folder or URL")
        if verb == "index":
            one.add_argument("--out", metavar="DIR", help="where the tables go (default: DIR)")
        one.add_argument("--endpoint-url", metavar="URL", help="an S3-compatible store, or an emulator")
        one.add_argument("--profile", metavar="NAME", help="of the AWS credentials file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; raises UserError for an unknown set, a wrong folder, a table that is there already."""
    args = _parse(argv)
    if args.verb == "list" and args.name is None:
        print("\n".join(overview()))
        return 0
    plug = plug_of(args.name)
    if args.verb == "list":
        print("\n".join(describe(plug)))
    else:
        options = StorageOptions(endpoint_url=args.endpoint_url, profile=args.profile)
        tree = Tree(args.folder.rstrip("/") or "/", options)
        scans = scans_of(plug, tree)
        every = look_all(tree, scans)
        _refuse_unread(plug, tree, every)
        if args.verb == "check":
            print("\n".join(_counted(plug, tree, every)))
        else:
            out = (args.out or tree.root).rstrip("/") or "/"
            written = write_index(plug, tree, every, out)
            print("\n".join(_indexed(plug, tree, every, out, written)))
    return 0


def plug_of(name: str) -> Plug:
    """The plug of a name; raises UserError, for a set of single images with the reason."""
    if name in PLUGS:
        return PLUGS[name]
    if name in NO_VOLUMES:
        raise UserError(f"{name}: expected a set of volumes, found one of single B-scans: {NO_VOLUMES[name]}")
    near = difflib.get_close_matches(name, [*PLUGS, *NO_VOLUMES], 1)
    hint = f" (near {near[0]})" if near else ""
    raise UserError(f"NAME: expected one of {', '.join(PLUGS)}, found {name!r}{hint}")


def scans_of(plug: Plug, tree: Tree) -> list[Scan]:
    """The volumes of a folder, by path; for a wrong folder prints the expected tree and raises UserError."""
    scans = sorted(plug.find(tree), key=lambda scan: scan.path)
    if not scans:
        _print_tree(plug)
        some = ", ".join(list(tree.sizes)[:_SHOWN]) or "nothing"
        raise UserError(
            f"{tree.root}: expected the tree of {plug.name} as above, found no volume of it in "
            f"{len(tree.sizes)} files ({some})"
        )
    return scans


def _print_tree(plug: Plug) -> None:
    print(f"expected, {plug.title} [{plug.layout.mark}]:\n{plug.layout.text}")


def _refuse_unread(plug: Plug, tree: Tree, every: Sequence[Looked]) -> None:
    if all(looked.fault for looked in every):
        _print_tree(plug)
        raise UserError(f"{tree.root}: expected volumes that open, found none: {every[0].fault}")


def _counted(plug: Plug, tree: Tree, every: Sequence[Looked]) -> list[str]:
    """What `check` says of a right folder."""
    people = {looked.scan.person_id for looked in every}
    lines = [f"{plug.title}: {len(every)} volumes of {len(people)} people in {tree.root}"]
    devices = Counter(f"{looked.scan.device} {looked.scan.protocol}" for looked in every)
    lines.append(f"devices and protocols: {_words(devices)}")
    shapes = Counter(" x ".join(map(str, looked.shape)) for looked in every if looked.shape)
    lines.append(f"shapes (D x H x W): {_words(shapes)}")
    if any("study_group" in looked.scan.facts for looked in every):
        lines.append(f"classes: {_words(count_classes(every))}")
    lines.append(f"splits: {_words(Counter(looked.scan.split or 'none official' for looked in every))}")
    labelled = [looked for looked in every if looked.scan.labels]
    lines.append(f"with label files: {len(labelled)}")
    faults = [looked.fault for looked in every if looked.fault]
    faults += [fault for looked in labelled[:_SHOWN] if (fault := read_labels(tree, looked)[1])]
    lines += _faults(faults)
    lines += _doubts(plug, every)
    return lines


def _indexed(plug: Plug, tree: Tree, every: Sequence[Looked], out: str, written: Written) -> list[str]:
    """What `index` says."""
    people = {looked.scan.person_id for looked in every}
    lines = [f"{plug.title}: {len(every)} volumes of {len(people)} people"]
    lines.append(f"labels: {written.with_classes} volumes with voxels, {written.with_surfaces} with surfaces")
    lines += _faults([*(looked.fault for looked in every if looked.fault), *written.faults])
    lines += _doubts(plug, every)
    if needs_splits({looked.scan.person_id: looked.scan.split for looked in every}):
        lines.append(
            "splits: none of the owners; recommended_split of participants.tsv gives a fifth of the people "
            "each to val and test"
        )
    lines += [f"written: {url}" for url in written.urls]
    places = [f"data.gcs_root={tree.root}", f"data.manifest_path={join(out, 'manifest.tsv')}"]
    places.append(f"data.participants_path={join(out, 'participants.tsv')}")
    given = {"endpoint_url": tree.options.endpoint_url, "profile": tree.options.profile}
    places += [f"data.storage_options.{key}={value}" for key, value in given.items() if value]
    places.append("data.store=STORE")
    prepare = ["python", "-m", "data_setup.prepare", "--config", CONFIG, *places]
    lines.append(f"next: {shlex.join(prepare)}")
    if written.with_classes or written.with_surfaces:
        lines.append(f"then: {shlex.join([*prepare, '--labels'])}")
    for task in plug.tasks:
        words = ["python", "-m", "finetuning.train", "--config", task.config, "model.checkpoint=RUN", *places]
        changes = [text.replace("{out}", out) for text in task.overrides]
        lines.append(f"then: {shlex.join([*words, *changes])}")
    return lines


def _faults(faults: Sequence[str]) -> list[str]:
    if not faults:
        return []
    more = ", ..." if len(faults) > _SHOWN else ""
    return [f"not usable: {len(faults)} ({'; '.join(faults[:_SHOWN])}{more})"]


def _doubts(plug: Plug, every: Sequence[Looked]) -> list[str]:
    """What nobody verified and the tables now rely on."""
    facts = {"layout": plug.layout, "orientation": plug.orientation, "labels": plug.labels}
    if any(looked.spacing_mm for looked in every):
        facts["spacing"] = plug.spacing
    doubtful = [name for name, fact in facts.items() if fact.mark == "n/v"]
    if not doubtful:
        return []
    return [f"not verified, look before you rely on it: {', '.join(doubtful)} (list {plug.name})"]


def _words(counts: Counter[str]) -> str:
    return (
        ", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda c: (-c[1], c[0]))) or "none"
    )
