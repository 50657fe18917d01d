"""The OCT reader as a MONAI `ImageReader`: `LoadImage(reader=OCTReader())` reads an OPT file like any image.

In: paths or URLs of OPT DICOM files. Out: uint8 [D, H, W], an affine in mm (the axes' spacing, with origin 0:
the eye's place in space is not known) and the header's fields as metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from monai.config import PathLike
from monai.data import ImageReader
from monai.utils import ensure_tuple

from data_setup.readers.dicom import OCTVolume, read_volume
from utils.config.schema import StorageOptions


class OCTReader(ImageReader):
    """Reads OPT volumes for MONAI transforms; several files become channels. Raises OCTReadError."""

    def __init__(self, options: StorageOptions | None = None) -> None:
        super().__init__()
        self.options = options

    def verify_suffix(self, filename: Sequence[PathLike] | PathLike) -> bool:
        """True for names that end in .dcm."""
        return all(str(name).lower().endswith(".dcm") for name in ensure_tuple(filename))

    def read(self, data: Sequence[PathLike] | PathLike, **kwargs: Any) -> list[OCTVolume]:
        """One OCTVolume per name."""
        return [read_volume(str(name), self.options) for name in ensure_tuple(data)]

    def get_data(self, img: OCTVolume | Sequence[OCTVolume]) -> tuple[np.ndarray, dict[str, Any]]:
        """(uint8 [D, H, W], or [C, D, H, W] for several volumes of one shape and spacing; metadata)."""
        volumes = [img] if isinstance(img, OCTVolume) else list(img)
        head = volumes[0].header
        for volume in volumes[1:]:
            expected, actual = ((h.shape, h.spacing_mm) for h in (head, volume.header))
            if actual != expected:
                problem = f"expected shape and spacing {expected}, found {actual}"
                raise ValueError(f"{volume.header.url}: {problem}")
        affine = np.diag([*head.spacing_mm, 1.0])
        meta = {
            **asdict(head),
            "affine": affine,
            "original_affine": affine.copy(),
            "spatial_shape": np.array(head.shape),
            "original_channel_dim": float("nan") if len(volumes) == 1 else 0,  # MONAI's word for "no channel"
        }
        voxels = volumes[0].voxels if len(volumes) == 1 else np.stack([v.voxels for v in volumes])
        return voxels, meta
