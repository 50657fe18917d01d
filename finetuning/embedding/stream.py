"""Volumes one after the other: read ahead of the encoder, and through it.

In: `Volumes` and an encoder. Out: each row's volume in turn, and its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
from torch import Tensor, nn

from data_setup.jobs import INTERNAL_ERROR, internal_error
from data_setup.normalisation import plain_view
from data_setup.transforms import identity_matrix, token_valid
from finetuning.embedding.volumes import Reject, Volume, Volumes
from utils.config.schema import Config
from utils.errors import TransientError, UserError
from utils.runtime.single import Runtime
from utils.workers import count_loaders, pool_of

NO_VALID_TOKEN, NOT_FINITE = "no_valid_token", "not_finite_features"
AHEAD = 2  # volumes read ahead for each reader


class NoFeaturesError(Exception):
    """A volume that the encoder has no use for; `status` is its name."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_ahead(cfg: Config, volumes: Volumes, rows: Sequence[int]) -> Iterator[tuple[int, Volume | Reject]]:
    """The rows in order, read ahead; TransientError where storage does not answer, or a reader was killed."""
    workers = count_loaders(cfg.data.workers) if volumes.uses_processes else 0
    with pool_of(workers) as pool:
        running: deque[tuple[int, Future[Volume | Reject]]] = deque()
        waiting = iter(rows)
        while True:
            while len(running) < AHEAD * max(1, workers) and (row := next(waiting, None)) is not None:
                running.append((row, pool.submit(volumes.reader(row))))
            if not running:
                return
            row, future = running.popleft()
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                problem = "expected a reader that lives, found it killed, for lack of memory perhaps"
                raise TransientError(f"row {row}: {problem}; run again with data.workers=0") from error
            with Fault() as fault:
                volume = future.result()
            if fault.error is not None:
                volume = rejected(volumes.known(row), fault.error)
            if isinstance(volume, Reject) and volume.is_away:
                raise TransientError(f"{volume.fields['message']}; finished rows are kept, run again")
            yield row, volume


class Fault:
    """Around the work on one file: keeps an error that nobody expected, so that it ends no other file."""

    error: BaseException | None = None

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return False
        self.error = error
        return True


def rejected(fields: dict[str, Any], error: BaseException) -> Reject:
    """A volume that the encoder has no use for, or at which the program failed: it ends no other."""
    if isinstance(error, NoFeaturesError):
        return Reject(fields | {"status": error.status, "message": str(error)})
    message = internal_error(str(fields["path"]), error)
    return Reject(fields | {"status": INTERNAL_ERROR, "message": message})


def batch_of(volume: Volume) -> dict[str, Tensor]:
    """A batch of one volume, unchanged by any augmentation, on the host."""
    return {
        "volume": torch.from_numpy(volume.voxels)[None],
        "matrix": torch.from_numpy(identity_matrix())[None],
        "valid_box": torch.from_numpy(volume.valid_box)[None],
        "mean": torch.tensor([volume.fields["intensity_mean"]], dtype=torch.float32),
        "std": torch.tensor([volume.fields["intensity_std"]], dtype=torch.float32),
    }


@torch.no_grad()
def tokens_of(encoder: nn.Module, cfg: Config, volume: Volume, runtime: Runtime) -> tuple[Tensor, Tensor]:
    """The tokens float32 [1, N, E] of a volume and their validity float32 [1, N], on the device.

    Raises NoFeaturesError for a volume without a valid token, or with tokens that are not finite.
    """
    batch = batch_of(volume)
    valid = token_valid(batch["matrix"], batch["valid_box"], cfg.grid, cfg.spatial.patch_size)
    if not bool(valid.any()):
        raise NoFeaturesError(NO_VALID_TOKEN, "expected a token inside the scan, found none")
    on_device = runtime.to_device(batch | {"valid": valid.to(torch.float32)})
    with runtime.autocast():
        tokens_BNE = encoder(plain_view(on_device)).float()
    if not bool(torch.isfinite(tokens_BNE).all()):
        raise NoFeaturesError(NOT_FINITE, "expected finite features, found NaN or infinity")
    return tokens_BNE, on_device["valid"]
