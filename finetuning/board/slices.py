"""Features of volumes from a 2D image encoder: `2d` of the leaderboard.

In: a local folder of a Hugging Face image encoder (config.json, weights, preprocessor_config.json); nothing
is fetched. Every B-scan inside the acquired field, cut to it, is scaled to the encoder's image size, repeated
to its channels and normalised with its mean and standard deviation. Out: mean and standard deviation over
B-scans of the mean of its last tokens, float32 [n, 2E].
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_setup.store.reader import PreparedStore
from utils.errors import UserError
from utils.runtime.single import Runtime

AT_ONCE = 16  # B-scans
FILES = ("config.json", "preprocessor_config.json")


class SliceEncoder:
    """An image encoder of a local folder; raises UserError for a folder that is none."""

    model: Any  # transformers has no common type of its models

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        for name in FILES:
            if not (self.folder / name).is_file():
                raise UserError(
                    f"--image-encoder: {folder}: expected a folder with {' and '.join(FILES)} and the "
                    f"weights of a Hugging Face image encoder, found no {name}"
                )
        try:
            from transformers import AutoModel
        except ImportError as error:
            raise UserError(
                "--image-encoder: expected the package transformers, found none: pip install transformers"
            ) from error
        try:
            self.model, loaded = AutoModel.from_pretrained(
                folder, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--image-encoder: {folder}: expected an image encoder: {reason}") from error
        if lost := sorted(key for key in loaded["missing_keys"] if not key.startswith("pooler.")):
            raise UserError(
                f"--image-encoder: {folder}: expected all weights of the encoder, found no "
                f"{', '.join(lost[:3])} ({len(lost)} in all)"
            )
        self.model.eval()
        config = self.model.config
        size = getattr(config, "image_size", None)
        if size is None:
            raise UserError(
                f"--image-encoder: {folder}: expected image_size in config.json, found none: it "
                "is no image encoder"
            )
        self.size: tuple[int, int] = (size, size) if isinstance(size, int) else (size[0], size[1])
        self.channels = int(getattr(config, "num_channels", 3))
        preprocessor = json.loads((self.folder / "preprocessor_config.json").read_text())
        self.mean, self.std = (
            torch.tensor(preprocessor[key], dtype=torch.float32).view(1, -1, 1, 1)
            for key in ("image_mean", "image_std")
        )

    def digest(self) -> str:
        """SHA-256 over the names and contents of the folder's files."""
        digest = hashlib.sha256()
        for path in sorted(p for p in self.folder.iterdir() if p.is_file()):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def embed(self, store: PreparedStore, rows: np.ndarray, runtime: Runtime) -> np.ndarray:
        """float32 [n, 2E] in the order of `rows`."""
        self.model.to(runtime.device)
        boxes = store.index.loc[rows, [f"valid_{axis}{end}" for axis in "dhw" for end in "01"]].to_numpy(int)
        return np.stack(
            [self._volume(store.read(row), box, runtime) for row, box in zip(rows, boxes, strict=True)]
        )

    @torch.no_grad()
    def _volume(self, voxels_DHW: np.ndarray, box: np.ndarray, runtime: Runtime) -> np.ndarray:
        d0, d1, h0, h1, w0, w1 = box.tolist()
        inside = torch.from_numpy(np.ascontiguousarray(voxels_DHW[d0:d1, h0:h1, w0:w1]))
        parts = [self._images(part.to(runtime.device)) for part in inside.split(AT_ONCE)]
        features_DE = torch.cat(parts)
        pooled = torch.cat([features_DE.mean(dim=0), features_DE.std(dim=0, correction=0)])
        return np.asarray(pooled.cpu().numpy(), np.float32)

    def _images(self, planes_BHW: Tensor) -> Tensor:
        """One feature vector a B-scan, [B, E]."""
        images = F.interpolate(
            planes_BHW[:, None].float() / 255, self.size, mode="bilinear", align_corners=False, antialias=True
        ).expand(-1, self.channels, -1, -1)
        mean, std = (value.to(images.device) for value in (self.mean, self.std))
        tokens = self.model(pixel_values=(images - mean) / std).last_hidden_state.float()
        if tokens.ndim == 4:  # convolutional encoders: [B, E, h, w]
            return tokens.mean(dim=(2, 3))
        return tokens.mean(dim=1)
