"""Features of volumes and of tokens from a 2D image encoder: `2d` of the leaderboard, `slices` elsewhere.

In: a local folder of a Hugging Face image encoder (config.json, weights, preprocessor_config.json); nothing
is fetched. Every B-scan inside the acquired field, cut to it, is scaled to the encoder's image size, repeated
to its channels and normalised with its mean and standard deviation. Out: mean and standard deviation over
B-scans of the mean of its tokens, float32 [n, 2E]; or features of our tokens, each the mean over its B-scans
of the image tokens that lie in it. The tokens of several blocks are joined, each normalised.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from data_setup.store.reader import PreparedStore
from utils.errors import UserError
from utils.runtime.single import Runtime

AT_ONCE = 16  # B-scans
FILES = ("config.json", "preprocessor_config.json")


def image_encoder_of(args: argparse.Namespace) -> SliceEncoder | None:
    """The encoder that a command line names; raises UserError."""
    blocks = [word for word in args.image_blocks.split(",") if word]
    if not all(word.isdigit() for word in blocks) or (args.image_size or 1) < 1:
        raise UserError(
            "--image-size, --image-blocks: expected a number above 0 and blocks such as 3,6,9, found "
            f"{args.image_size} and {args.image_blocks}"
        )
    if args.image_encoder is None:
        return None
    return SliceEncoder(args.image_encoder, args.image_size, [int(word) for word in blocks])


class SliceEncoder:
    """An image encoder of a local folder; raises UserError for a folder that is none."""

    model: Any  # transformers has no common type of its models

    def __init__(self, folder: str, size: int | None = None, blocks: Sequence[int] = ()) -> None:
        """`size`: of the square image that it is given, its own by default; `blocks`: those whose tokens are
        joined, counted from 1, only the last by default.
        """
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
            raise UserError("--image-encoder: expected transformers, found none: pip install it") from error
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
        if getattr(config, "mask_ratio", 0):
            raise UserError(
                f"--image-encoder: {folder}: mask_ratio of config.json: expected 0, found "
                f"{config.mask_ratio}: this encoder hides patches at random"
            )
        own = getattr(config, "image_size", None)
        if own is None:
            raise UserError(f"--image-encoder: {folder}: expected image_size in config.json, found none")
        size = size or own
        self.size: tuple[int, int] = (size, size) if isinstance(size, int) else (size[0], size[1])
        self.is_resized = size != own
        depth = int(getattr(config, "num_hidden_layers", 0))
        if wrong := [block for block in blocks if not 1 <= block <= depth]:
            raise UserError(f"--image-blocks: expected blocks from 1 to {depth}, found {wrong[0]}")
        self.blocks = tuple(blocks)
        self.channels = int(getattr(config, "num_channels", 3))
        preprocessor = json.loads((self.folder / "preprocessor_config.json").read_text())
        self.mean, self.std = (
            torch.tensor(preprocessor[key], dtype=torch.float32).view(1, -1, 1, 1)
            for key in ("image_mean", "image_std")
        )

    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.size} {self.blocks}\n".encode())
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
        # one feature vector a B-scan: the mean of its tokens, a class token among them
        parts = [self._joined(part.to(runtime.device)).mean(dim=1) for part in inside.split(AT_ONCE)]
        features_DE = torch.cat(parts)
        pooled = torch.cat([features_DE.mean(dim=0), features_DE.std(dim=0, correction=0)])
        return np.asarray(pooled.cpu().numpy(), np.float32)

    @torch.no_grad()
    def tokens(self, volume_BDHW: Tensor, grid: tuple[int, int, int], runtime: Runtime) -> Tensor:
        """Features of the tokens of uint8 volumes [B, N, F]: outside the acquired field they say nothing."""
        self.model.to(runtime.device)
        of_scans = []
        for scans_DHW in volume_BDHW:
            parts = [self._maps(part.to(runtime.device)) for part in scans_DHW.split(AT_ONCE)]
            maps_DFhw = F.adaptive_avg_pool2d(torch.cat(parts), grid[1:])
            of_scans.append(rearrange(maps_DFhw, "(gd d) f h w -> gd d h w f", gd=grid[0]).mean(dim=1))
        return rearrange(torch.stack(of_scans), "b gd h w f -> b (gd h w) f")

    def _maps(self, planes_BHW: Tensor) -> Tensor:
        """The tokens of B-scans where they lie, [B, F, h, w]; class token and registers are left out."""
        tokens_BNF = self._joined(planes_BHW)
        patch = getattr(self.model.config, "patch_size", None)
        if patch is None:  # a convolutional encoder: its map is square, as the image is
            side = math.isqrt(tokens_BNF.shape[1])
            h, w = side, tokens_BNF.shape[1] // side
        else:
            h, w = (size // patch for size in self.size)
        return rearrange(tokens_BNF[:, -h * w :], "b (h w) f -> b f h w", h=h, w=w)

    def _joined(self, planes_BHW: Tensor) -> Tensor:
        """All tokens of B-scans [B, N, F], the blocks side by side."""
        images = F.interpolate(
            planes_BHW[:, None].float() / 255, self.size, mode="bilinear", align_corners=False, antialias=True
        ).expand(-1, self.channels, -1, -1)
        mean, std = (value.to(images.device) for value in (self.mean, self.std))
        words: dict[str, Any] = {"output_hidden_states": True} if self.blocks else {}
        if self.is_resized and "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters:
            words["interpolate_pos_encoding"] = True  # the others do it unasked, as DINOv2 does
        if self.model.config.model_type == "vit_mae":  # it shuffles the patches though it hides none
            places = math.prod(size // self.model.config.patch_size for size in self.size)
            words["noise"] = torch.arange(places, device=images.device).expand(len(images), -1).float()
        out = self.model(pixel_values=(images - mean) / std, **words)
        if not self.blocks:
            tokens = out.last_hidden_state.float()
            # convolutional encoders: [B, E, h, w]
            return tokens.flatten(2).mT if tokens.ndim == 4 else tokens
        parts = [out.hidden_states[block].float() for block in self.blocks]
        return torch.cat([F.layer_norm(part, part.shape[-1:]) for part in parts], dim=-1)
