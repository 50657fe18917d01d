"""NIfTI-1 and -2 (.nii, .nii.gz) as an OCT volume: spacing, axes and directions from the header, or a reject.

The world is right, anterior, superior. Where sform or qform is set, the axis nearest to each decides:
left-right is W (A-scans), anterior-posterior H (axial), superior-inferior D (B-scans). H and W are turned so
that the index grows to posterior and to the patient's left; D stays in file order and says whether it runs
upwards. Files made from OCT DICOM often hold another world (axial along z): there the axial spacing is not
the smallest, and the YAML has to give `axes`, as it has to where neither form is set.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Iterator
from typing import IO, Any

import nibabel as nib
import numpy as np

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.sidecar import MAX_VOLUME_BYTES, Sidecar, checked_frames, make_header, reading

_NIFTI1, _NIFTI2 = 348, 540
_MM = {"mm": 1.0, "micron": 1e-3, "meter": 1e3}
_PIECE_BYTES = 2**22
_WORLD = ("W", "H", "D")  # along right, anterior, superior
_ALONG = 0.9  # cosine with the world's axis
_SQUARE = math.sin(math.radians(1))  # cosine between two axes of the array: at most 1 degree off 90
_AGREE = 1e-3  # relative: pixdim and the affine


def read(file: IO[bytes], url: str, sidecar: Sidecar) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in file order; raises OCTReadError."""
    gzipped = file.read(2) == b"\x1f\x8b"
    size = file.seek(0, 2)
    file.seek(0)
    stream: Any = gzip.GzipFile(fileobj=file) if gzipped else file
    with reading(url, RejectReason.CORRUPT_FILE, "a NIfTI header"):
        hdr, consumed = _read_header(stream, url)
        shape, dtype = tuple(int(n) for n in hdr.get_data_shape()), hdr.get_data_dtype()
        offset = hdr.get_data_offset()
        slope, inter = hdr.get_slope_inter()
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3 or min(shape) < 1:
        raise OCTReadError(url, RejectReason.NOT_A_VOLUME, "three axes", f"shape {shape}")
    if dtype.kind not in "uif":
        found = "colour" if dtype.names else dtype.name
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "one grey value a voxel", found)
    length = math.prod(shape) * dtype.itemsize
    if length > MAX_VOLUME_BYTES or not consumed <= offset <= consumed + 2**20:
        said = f"up to {MAX_VOLUME_BYTES} bytes of voxels that begin after the header"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, said, f"{length} at {offset}")
    if not gzipped and offset + length > size:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{offset + length} bytes", size)
    order, flips, flip_d, source = _axes(hdr, sidecar, url)
    header = make_header(
        url,
        "NIfTI",
        # three of them, since order has three
        tuple(shape[i] for i in order),  # type: ignore[arg-type]
        dtype,
        _spacing(hdr, order, sidecar, source, url),
        sidecar,
        flip_d=flip_d,
        orientation_source=source if source == "nifti_affine" else "unknown",
        scale=(1.0 if slope is None else float(slope), 0.0 if inter is None else float(inter)),
    )
    with reading(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{length} bytes of voxels"):
        stream.read(int(offset) - consumed)
        data = _read_up_to(stream, length)
        if gzipped and len(data) == length:
            stream.read(1)  # the end of the stream, where its checksum is
    if len(data) < length:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{length} bytes of voxels", len(data))
    voxels = (
        np.frombuffer(data, dtype).reshape(shape, order="F").transpose(order)[:, :: flips[0], :: flips[1]]
    )
    native = dtype.newbyteorder("=")
    yield header
    yield from checked_frames((np.ascontiguousarray(frame, native) for frame in voxels), header)


def _read_up_to(stream: Any, length: int) -> bytearray:
    """That many bytes, or as many as there are: gzip would reserve all that a header asks for at once."""
    data = bytearray()
    while len(data) < length and (piece := stream.read(min(_PIECE_BYTES, length - len(data)))):
        data += piece
    return data


def _read_header(stream: Any, url: str) -> tuple[Any, int]:
    """(header, bytes read)."""
    head = stream.read(_NIFTI1)
    kind = nib.Nifti1Header
    if head[4:8] in (b"n+2\0", b"ni2\0"):
        head += stream.read(_NIFTI2 - _NIFTI1)
        kind = nib.Nifti2Header
    elif head[344:348] not in (b"n+1\0", b"ni1\0"):
        raise OCTReadError(url, RejectReason.WRONG_KIND, "NIfTI, as its name says", "another kind")
    hdr = kind.from_fileobj(io.BytesIO(head), check=False)
    if bytes(hdr["magic"]).startswith(b"ni"):
        raise OCTReadError(
            url,
            RejectReason.UNSUPPORTED_FORMAT,
            "header and voxels in one file (.nii)",
            "NIfTI .hdr/.img pair",
        )
    return hdr, len(head)


def _axes(hdr: Any, sidecar: Sidecar, url: str) -> tuple[list[int], tuple[int, int], bool, str]:
    """(array axes of D, H, W; steps of H and W: 1 or -1; D runs upwards; sidecar | nifti_affine)."""
    form, code = hdr.get_sform(coded=True)  # a qform is a rotation
    if code > 0 and _is_sheared(form) and (sidecar.axes is None or sidecar.spacing_mm is None):
        said = "an sform of axes at right angles, by 1 degree; or axes and spacing_mm in the YAML"
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, said, "a sheared one")
    if sidecar.axes is not None:
        names = [a.removeprefix("-") for a in sidecar.axes]
        order = [names.index(a) for a in "DHW"]
        return order, (_step(sidecar.axes[order[1]]), _step(sidecar.axes[order[2]])), False, "sidecar"
    with reading(url, RejectReason.UNKNOWN_AXES, "an affine"):
        forms = [f for f, code in (hdr.get_sform(coded=True), hdr.get_qform(coded=True)) if code > 0]
    found = [_oriented(form) for form in forms]
    said = "an affine (sform or qform) along right, anterior, superior; or axes: [W, H, D] in the YAML"
    if not found or found[0] is None or any(f != found[0] for f in found):
        what = "none" if not found else "an oblique one" if found[0] is None else "two that differ"
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, said, what)
    order, upwards = found[0]
    zooms = hdr.get_zooms()
    norms = np.linalg.norm(forms[0][:3, :3], axis=0)
    if not np.allclose(norms, zooms[:3], rtol=_AGREE, atol=0) and sidecar.spacing_mm is None:
        said = f"pixdim {[float(f'{z:.6g}') for z in zooms[:3]]} as in the affine"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, said, [float(f"{n:.6g}") for n in norms])
    if int(np.argmin(norms)) != order[1]:
        found_text = f"{norms[order[1]]:g} along anterior-posterior, {norms.min():g} along another axis"
        raise OCTReadError(
            url,
            RejectReason.UNKNOWN_AXES,
            "the smallest spacing along the A-scan; else axes in the YAML",
            found_text,
        )
    d, h, w = order
    return order, (-1 if upwards[h] else 1, -1 if upwards[w] else 1), upwards[d], "nifti_affine"


def _is_sheared(form: np.ndarray) -> bool:
    """Whether two axes are not at right angles: B-scans would be shifted against each other, and the length
    of a slanted step is no distance between them."""
    columns = form[:3, :3]
    norms = np.linalg.norm(columns, axis=0)
    if not np.all(np.isfinite(columns)) or np.any(norms == 0):
        return False  # no axes at all: `_oriented` says so
    cosine = columns / norms
    return bool(np.abs(np.triu(cosine.T @ cosine, 1)).max() > _SQUARE)


def _oriented(form: np.ndarray) -> tuple[list[int], tuple[bool, ...]] | None:
    """(array axes of D, H, W; whether each array axis grows to right, anterior, superior); None: oblique."""
    columns = form[:3, :3]
    norms = np.linalg.norm(columns, axis=0)
    if not np.all(np.isfinite(columns)) or np.any(norms == 0):
        return None
    cosine = columns / norms
    along = np.abs(cosine).argmax(axis=0).tolist()
    if sorted(along) != [0, 1, 2] or np.abs(cosine).max(axis=0).min() < _ALONG:
        return None
    names = [_WORLD[world] for world in along]
    return [names.index(a) for a in "DHW"], tuple(bool(cosine[world, i] > 0) for i, world in enumerate(along))


def _spacing(
    hdr: Any, order: list[int], sidecar: Sidecar, source: str, url: str
) -> tuple[list[float] | None, str]:
    """(spacing of D, H, W in mm, "nifti_header"), or (None, why there is none)."""
    with reading(url, RejectReason.MISSING_SPACING, "a unit of length"):
        unit = hdr.get_xyzt_units()[0]
    zooms = [hdr.get_zooms()[i] for i in order]
    if unit not in _MM:
        return None, f"unit {unit} in xyzt_units"
    if not np.all(np.isfinite(zooms)) or min(zooms) <= 0:
        return None, "a pixdim that is no length"
    # NIfTI-1 holds single precision: 0.12 comes as 0.119999997; the shortest decimal gives it back.
    return [float(str(z)) * _MM[unit] for z in zooms], "nifti_header"


def _step(axis: str) -> int:
    return -1 if axis.startswith("-") else 1
