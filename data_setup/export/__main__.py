"""Write volumes out of a store, or originals of a manifest, as NIfTI or OME-TIFF.

In: STORE and its rows, or --source MANIFEST and the paths of its rows (column filepath). Out: a file a volume
in --out, with its geometry: voxels, spacing, eye, and the direction of D where it is known. Beside it lies
a YAML with what the format has no place for. Another file is not written over.

examples:
    python -m data_setup.export STORE 0 5 --format nifti --out out
    python -m data_setup.export --source scans/manifest.tsv a/eye.vol --format ome-tiff --out out

A row of a store is on the store's grid, its padding included; an original is as it was acquired, with 8 bits.
Paths of a manifest are relative to its folder, or to --root.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from utils.cli import require_folder, run_cli
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.help_pages import Parser
from utils.terminal import say

FORMATS = ("nifti", "ome-tiff")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m data_setup.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="STORE ROW ...; with --source PATH ...")
    parser.add_argument("--source", metavar="MANIFEST", help="originals of this manifest, instead of a store")
    parser.add_argument("--root", metavar="URL", help="what the manifest's paths are below")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder or a URL")
    parser.add_argument("--endpoint-url", metavar="URL", help="an S3-compatible store, or an emulator")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0; raises UserError, StorageError."""
    args = _parse(argv)
    from data_setup.export.volume import nifti_files, ome_files, originals, rows_of_store  # not for --help
    from utils.storage import exists, join, read_bytes, write_bytes

    options = StorageOptions(endpoint_url=args.endpoint_url)
    require_folder("--out", args.out)
    files_of = {"nifti": nifti_files, "ome-tiff": ome_files}[args.format]
    if args.source:
        volumes = originals(args.source, args.root, args.names, options)
    elif args.root is not None:
        raise UserError("--root: expected it with --source, found a store")
    else:
        volumes = rows_of_store(*args.names, options=options)
    for volume in volumes:
        files = files_of(volume)
        for name, content in files.items():
            url = join(args.out, name)
            if exists(url, options) and read_bytes(url, options) != content:
                raise UserError(f"{url}: expected no other file, found one: remove it, or give another --out")
        for name, content in files.items():
            write_bytes(join(args.out, name), content, options)
        shape, mm = (
            " x ".join(map(str, volume.voxels.shape)),
            ", ".join(f"{s:.6g}" for s in volume.spacing_mm),
        )
        facts = f"{shape}, [{mm}] mm, eye {volume.laterality or 'unknown'}, {volume.d_order}"
        say(f"{join(args.out, next(iter(files)))}: {facts}", flush=True)
    return 0


if __name__ == "__main__":
    run_cli(main)
