"""Prepare against a plain loop: seconds a volume, by workers; see benchmarks/data/cli.py."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pydicom
import torch
from monai.data import MetaTensor
from monai.transforms import ResizeWithPadOrCrop, Spacing

from benchmarks.data.files import GRIDS, Shape, configure, dicom_files, make_jobs
from data_setup.jobs import run_jobs
from data_setup.readers.dicom import open_volume
from data_setup.resample import Resampled, resample_frames
from data_setup.store.format import KEPT
from utils.config.schema import Config
from utils.storage import StorageError

# AI-READI 3.0.0: rows of the OCT manifest, and the bytes of their pixels by protocol shapes.
AIREADI_VOLUMES, AIREADI_RAW_BYTES = 56_477, 5.4e12
HOSTS = (1, 4, 16)


def plain_loop(path: Path, cfg: Config) -> np.ndarray:
    """uint8 on the grid of cfg.spatial, as a loop of pydicom and MONAI makes it; nothing is stored."""
    ds = pydicom.dcmread(path)
    measures = ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    spacing = [float(v) for v in (measures.SliceThickness, *measures.PixelSpacing)]
    affine = torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64))
    image: torch.Tensor = MetaTensor(torch.from_numpy(ds.pixel_array[None]).float(), affine=affine)
    image = Spacing(cfg.spatial.target_spacing, mode="bilinear", padding_mode="border", dtype=np.float32)(
        image
    )
    image = ResizeWithPadOrCrop(cfg.spatial.image_size)(image)
    return image[0].round().to(torch.uint8).numpy()


def decode(path: Path) -> None:
    """All frames of our reader."""
    _, frames = open_volume(str(path))
    for _ in frames:
        pass


def decode_and_resample(path: Path, cfg: Config) -> Resampled:
    """What reading a volume would cost without a store."""
    header, frames = open_volume(str(path))
    grid = cfg.spatial
    return resample_frames(
        frames, header.shape, header.spacing_mm, grid.image_size, grid.target_spacing, flip_d=header.flip_d
    )


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def seconds_by_workers(path: Path, cfg: Config, workers: int, volumes: int) -> float:
    """Seconds a volume of our prepare, from when every worker has finished one: its start is not counted.

    `volumes` a worker are counted. Everything is: reading, checks, statistics, the write with its fsync.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        jobs = make_jobs([path] * (workers * (volumes + 1)), Path(folder) / "store", cfg)
        times = []
        for outcome in run_jobs(jobs, workers):
            if outcome.status != KEPT:
                raise StorageError(str(path), f"{outcome.status}: {outcome.message}")
            times.append(time.perf_counter())
        return (times[-1] - times[workers - 1]) / (workers * volumes)


def run(work: Path, shapes: dict[str, Shape], repeats: int, volumes: int) -> dict[str, Any]:
    """The part `prepare` of the benchmark: JPEG 2000 under the plain names, the rest under longer ones."""
    size, spacing_mm = next(iter(GRIDS.items()))
    cfg = configure(size, spacing_mm)
    files = dicom_files(work, shapes)
    taken: dict[str, dict[str, dict[str, list[float]]]] = {}
    for _ in range(repeats):  # in turns, so that a slow minute of the machine hits everything
        for syntax, by_name in files.items():
            for name, path in by_name.items():
                works = {
                    "plain": lambda path=path: seconds(lambda: plain_loop(path, cfg)),
                    "decode": lambda path=path: seconds(lambda: decode(path)),
                    "decode_resample": lambda path=path: seconds(lambda: decode_and_resample(path, cfg)),
                    "one_worker": lambda path=path: seconds_by_workers(path, cfg, 1, volumes),
                    "two_workers": lambda path=path: seconds_by_workers(path, cfg, 2, volumes),
                }
                for step, measure in works.items():
                    taken.setdefault(syntax, {}).setdefault(step, {}).setdefault(name, []).append(measure())
    # A volume of each protocol: the mean over the protocols of the median over the turns.
    typical = {
        syntax: {step: mean(median(v) for v in by_name.values()) for step, by_name in steps.items()}
        for syntax, steps in taken.items()
    }
    jpeg, plain_files = typical["jpeg2000"], typical["uncompressed"]
    raw = mean(float(np.prod(shape)) for shape in shapes.values())
    hours = AIREADI_RAW_BYTES / raw * jpeg["two_workers"] / 3600
    result: dict[str, Any] = {f"{step}_s": value for step, value in jpeg.items()}
    result |= {f"uncompressed_{step}_s": value for step, value in plain_files.items()}
    result |= {
        "speedup_1": jpeg["plain"] / jpeg["one_worker"],
        "speedup_2": jpeg["plain"] / jpeg["two_workers"],
        "uncompressed_speedup_1": plain_files["plain"] / plain_files["one_worker"],
        "uncompressed_speedup_2": plain_files["plain"] / plain_files["two_workers"],
        "scaling_2": jpeg["one_worker"] / jpeg["two_workers"],
        "hours_estimated": {
            f"{AIREADI_VOLUMES} volumes, {hosts} hosts of 2 workers": hours / hosts for hosts in HOSTS
        },
        "seconds_each": taken,
    }
    return result
