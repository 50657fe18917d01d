"""Data at speed: prepare against a plain loop, and reading prepared volumes.

    python -m benchmarks.data [--json FILE] [--parts prepare,read] [--repeats 2] [--work FOLDER]

Part `prepare`: phantom files of full size (128 x 885 x 512 and 512 x 992 x 512; uncompressed and JPEG 2000,
lossy 8:1), each decoded, decoded and resampled, prepared by one and by two workers, and put through the plain
loop: pydicom `pixel_array`, MONAI `Spacing`, `ResizeWithPadOrCrop`. Seconds are those of one volume: the mean
of the two files, each the median of its turns.
Part `read`: one process reads the store of the recommended grid: page cache warm and dropped, the codec and a
memcpy, the same volumes from their DICOM files, and from a gs:// server on loopback (which needs
requirements-dev.txt). The whole input pipeline is a stage of benchmarks.accelerator.
Nothing else should run on the machine. Files and stores stay in --work for the next run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.data import prepare as data_prepare
from benchmarks.data import read as data_read
from benchmarks.data.files import FULL_SIZE
from benchmarks.machine import describe
from utils.cli import number_from, output_file
from utils.help_pages import PeopleParser

PARTS = ("prepare", "read")
VOLUMES = 8  # rows of the stores that are read


def measure(part: str, work: Path, repeats: int) -> dict[str, Any]:
    """The numbers of one part."""
    if part == "prepare":
        return data_prepare.run(work, FULL_SIZE, repeats, volumes=2)
    return data_read.read(work, FULL_SIZE, repeats, VOLUMES, bucket=True)


def lines(numbers: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number with its keys joined by dots."""
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from lines(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


def main(argv: list[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    parser = PeopleParser("benchmarks.data", __doc__ or "")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the numbers here")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, separated by commas")
    parser.add_argument("--repeats", type=number_from(1), default=2, help="turns of every measurement")
    parser.add_argument("--work", type=Path, default=Path("runs/data_bench"), help="files and stores")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if not set(wanted) <= set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, found {args.parts}")
    machine = f"{describe()}, load {os.getloadavg()[0]:.2f} at the start"
    print(machine, flush=True)
    results: dict[str, Any] = {"machine": machine}
    for part in wanted:
        results[part] = measure(part, args.work, args.repeats)
        print(part)
        for key, value in lines(results[part]):
            print(f"  {key:44}{value:.4g}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0
