"""NIfTI and OME-TIFF of a volume, each with a YAML beside it for what the format has no place for.

In: an `ExportVolume`. Out: the files' names and bytes. The NIfTI world is right, anterior, superior in mm,
as data_setup/readers/nifti.py reads it: W to the patient's left, H to posterior, D to inferior. The YAML
(data_setup/readers/sidecar.py) says eye, device, protocol, and whether the direction of D is known.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import uuid

import nibabel as nib
import numpy as np
import tifffile
import yaml

from data_setup.export.volume import ExportVolume

_ALIGNED = 2  # the code of a form that was measured


def nifti_files(volume: ExportVolume) -> dict[str, bytes]:
    """{name: content} of a .nii.gz [W, H, D] and its YAML."""
    d, h, w = volume.spacing_mm
    image = nib.Nifti1Image(volume.voxels.transpose(2, 1, 0), np.diag([-w, -h, -d, 1.0]))
    image.header.set_xyzt_units("mm")
    image.set_sform(image.affine, _ALIGNED)
    image.set_qform(image.affine, _ALIGNED)
    return {f"{volume.stem}.nii.gz": _gzipped(image.to_bytes()), f"{volume.stem}.yaml": _sidecar(volume)}


def ome_files(volume: ExportVolume) -> dict[str, bytes]:
    """{name: content} of an .ome.tif, a page a B-scan, and its YAML."""
    d, h, w = volume.spacing_mm
    physical = {"PhysicalSizeZ": d, "PhysicalSizeY": h, "PhysicalSizeX": w}
    units = {f"{name}Unit": "mm" for name in physical}
    buffer = io.BytesIO()
    digest = hashlib.blake2b(volume.voxels.tobytes() + volume.stem.encode(), digest_size=16).digest()
    metadata = {"axes": "ZYX", **physical, **units, "UUID": str(uuid.UUID(bytes=digest))}  # else a random one
    tifffile.imwrite(buffer, volume.voxels, ome=True, metadata=metadata, photometric="minisblack")
    return {f"{volume.stem}.ome.tif": buffer.getvalue(), f"{volume.stem}.yaml": _sidecar(volume)}


def _sidecar(volume: ExportVolume) -> bytes:
    facts = {
        "d_order": volume.d_order,
        "laterality": volume.laterality,
        "device": volume.device,
        "protocol": volume.protocol,
    }
    known = {key: value for key, value in facts.items() if value is not None}
    return yaml.safe_dump(known, sort_keys=False).encode()


def _gzipped(data: bytes) -> bytes:
    """The same bytes for the same volume: no time in the header."""
    return gzip.compress(data, mtime=0)
