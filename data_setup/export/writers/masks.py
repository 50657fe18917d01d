"""Classes of voxels as NIfTI, or as a folder of PNG; both are what `prepare --labels` reads.

In: uint8 [D, H, W]; for PNG in the order of the scan's file, for NIfTI as its reader sorts the frames, side
by side. Out: a NIfTI of the scan's own array order and affine where the scan is NIfTI, else [W, H, D] with W
to the patient's left, H to posterior, and D as the frames run; or a PNG for each B-scan, whose grey values
are the classes.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence

import nibabel as nib
import numpy as np
from PIL import Image

from data_setup.readers import nifti
from data_setup.readers.dicom import OCTHeader, open_file
from data_setup.readers.sidecar import read_sidecars, sidecar_urls
from utils import storage
from utils.config.schema import StorageOptions


def write_nifti(
    labels_DHW: np.ndarray, header: OCTHeader, path: str, url: str, options: StorageOptions
) -> None:
    """Write a .nii.gz at `url`; `path`: of the scan below its root. Raises OCTReadError, StorageError."""
    if header.transfer_syntax == "NIfTI":
        with open_file(header.url, options) as file:
            sidecar = read_sidecars(sidecar_urls(header.url, path, False), options)
            image = nifti.image_like(labels_DHW, file, header.url, sidecar)
    else:
        d, h, w = header.spacing_mm
        along = np.diag([-w, -h, d if header.flip_d else -d, 1.0])
        image = nib.Nifti1Image(labels_DHW.transpose(2, 1, 0), along)
        image.header.set_xyzt_units("mm")
    storage.write_bytes(url, gzip.compress(image.to_bytes(), mtime=0), options)


def write_png(labels_DHW: np.ndarray, url: str, options: StorageOptions) -> None:
    """Write a PNG for each B-scan into the folder `url`: frame_0001.png, ..."""
    for name, plane in zip(frame_names(len(labels_DHW)), labels_DHW, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(plane)).save(buffer, format="PNG")
        storage.write_bytes(storage.join(url, name), buffer.getvalue(), options)


def frame_names(count: int) -> Sequence[str]:
    """The names of the images of a volume."""
    return [f"frame_{number:04d}.png" for number in range(1, count + 1)]
