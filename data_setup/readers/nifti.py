"""NIfTI-1 and -2 (.nii, .nii.gz) as an OCT volume: spacing, axes and directions from the header, or a reject.

The world is right, anterior, superior. The sform or qform gives each axis of the array its direction:
left-right is W (A-scans), anterior-posterior H (axial), superior-inferior D (B-scans). H and W are flipped to
grow to posterior and to the patient's left; D stays in file order, and the header says whether it runs
upwards. The YAML has to give `axes` where neither form is set, or where the axial spacing would not be the
smallest: files made from OCT DICOM often put the axial direction along z.
"""

import gzip
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import nibabel as nib
import numpy as np

from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.pixels import PLAUSIBLE_VOLUME_BYTES
from data_setup.readers.sidecar import Sidecar, array_axes, check_length, checked_frames, make_header, reading

_NIFTI1, _NIFTI2 = 348, 540
_MM = {"mm": 1.0, "micron": 1e-3, "meter": 1e3}
_PIECE_BYTES = 2**22
_ALONG = 0.9  # cosine with the world's axis
_SQUARE = math.sin(math.radians(1))  # cosine between two axes of the array: at most 1 degree off 90
_AGREE = 1e-3  # relative: pixdim and the affine


@dataclass(frozen=True)
class _Layout:
    """What a header says, and the stream behind it."""

    stream: Any
    hdr: Any
    consumed: int  # bytes of the stream
    shape: tuple[int, ...]  # of the array, three axes
    dtype: np.dtype
    scale: tuple[float, float]  # slope, intercept
    order: list[int]  # array axes of D, H, W
    flips: list[int]  # steps of H and W
    flip_d: bool  # D runs upwards
    source: str  # of the axes: sidecar | nifti_affine
    size: int  # bytes of the file

    @property
    def volume_shape(self) -> tuple[int, int, int]:
        d, h, w = (self.shape[i] for i in self.order)
        return d, h, w

    @property
    def length(self) -> int:
        """Bytes of the voxels."""
        return math.prod(self.shape) * self.dtype.itemsize


def read(file: IO[bytes], url: str, sidecar: Sidecar) -> Iterator[Any]:
    """The header, then uint8 frames [H, W] in file order; raises OCTReadError."""
    layout = _read_layout(file, url, sidecar)
    header = make_header(
        url,
        "NIfTI",
        layout.volume_shape,
        layout.dtype,
        _spacing(layout.hdr, layout.order, url),
        sidecar,
        flip_d=layout.flip_d,
        orientation_source=layout.source if layout.source == "nifti_affine" else "unknown",
        scale=layout.scale,
        steps_hw=layout.flips,
    )
    yield header  # before the voxels: data_setup.index takes no more
    native = layout.dtype.newbyteorder("=")
    voxels = _read_voxels(layout, url)
    yield from checked_frames((np.ascontiguousarray(frame, native) for frame in voxels), header)


def read_array(file: IO[bytes], url: str, sidecar: Sidecar) -> tuple[np.ndarray, bool | None]:
    """(stored values [D, H, W] in file order with the header's scale, whether D runs upwards; None: unknown).
    What `read` makes of the axes, of values that are no grey levels. Raises OCTReadError.
    """
    layout = _read_layout(file, url, sidecar)
    voxels = _read_voxels(layout, url)
    slope, inter = layout.scale
    if layout.scale != (1.0, 0.0):
        voxels = voxels * slope + inter
    return voxels, layout.flip_d if layout.source == "nifti_affine" else None


def image_like(values_DHW: np.ndarray, file: IO[bytes], url: str, sidecar: Sidecar) -> nib.Nifti1Image:
    """uint8 values in the order of `read`, as an image with the array order and affine of the scan in `file`.
    Raises OCTReadError, also where the values have another shape than the scan.
    """
    layout = _read_layout(file, url, sidecar)
    if values_DHW.shape != layout.volume_shape:
        expected = f"the scan's shape {layout.volume_shape}"
        raise OCTReadError(url, RejectReason.FRAME_SIZE_MISMATCH, expected, values_DHW.shape)
    array = values_DHW[:, :: layout.flips[0], :: layout.flips[1]].transpose(np.argsort(layout.order))
    hdr = layout.hdr.copy()
    hdr.set_data_shape(array.shape)
    hdr.set_data_dtype(np.uint8)
    hdr.set_slope_inter(1.0, 0.0)
    kind = nib.Nifti2Image if isinstance(hdr, nib.Nifti2Header) else nib.Nifti1Image
    return kind(np.ascontiguousarray(array, np.uint8), None, hdr)


def _read_layout(file: IO[bytes], url: str, sidecar: Sidecar) -> _Layout:
    is_gzipped = file.read(2) == b"\x1f\x8b"
    size = file.seek(0, 2)
    file.seek(0)
    stream: Any = gzip.GzipFile(fileobj=file) if is_gzipped else file
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
        actual = "colour" if dtype.names else dtype.name
        raise OCTReadError(url, RejectReason.UNSUPPORTED_PIXELS, "one grey value a voxel", actual)
    length = math.prod(shape) * dtype.itemsize
    check_length(length, url)
    if not consumed <= offset <= consumed + 2**20:
        expected = "voxels that begin after the header"
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, expected, f"{length} at {offset}")
    if not is_gzipped and offset + length > size:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{offset + length} bytes", size)
    order, flips, flip_d, source = _axes(hdr, sidecar, url)
    scale = (1.0 if slope is None else float(slope), 0.0 if inter is None else float(inter))
    return _Layout(stream, hdr, consumed, shape, dtype, scale, order, flips, flip_d, source, size)


def _read_voxels(layout: _Layout, url: str) -> np.ndarray:
    """The stored values [D, H, W]; raises OCTReadError."""
    stream, length = layout.stream, layout.length
    with reading(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{length} bytes of voxels"):
        stream.read(int(layout.hdr.get_data_offset()) - layout.consumed)
        data = bytearray()  # in pieces: gzip would reserve at once all that a header claims
        while len(data) < length and (piece := stream.read(min(_PIECE_BYTES, length - len(data)))):
            data += piece
            if len(data) > PLAUSIBLE_VOLUME_BYTES:
                check_length(length, url, layout.size)
        if len(data) == length:
            stream.read(1)  # the end of a gzipped stream, where its checksum is
    if len(data) < length:
        raise OCTReadError(url, RejectReason.TRUNCATED_PIXEL_DATA, f"{length} bytes of voxels", len(data))
    array = np.frombuffer(data, layout.dtype).reshape(layout.shape, order="F")
    return array.transpose(layout.order)[:, :: layout.flips[0], :: layout.flips[1]]


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
        expected, actual = "header and voxels in one file (.nii)", "NIfTI .hdr/.img pair"
        raise OCTReadError(url, RejectReason.UNSUPPORTED_FORMAT, expected, actual)
    return hdr, len(head)


def _axes(hdr: Any, sidecar: Sidecar, url: str) -> tuple[list[int], list[int], bool, str]:
    """(array axes of D, H, W; steps of H and W: 1 or -1; D runs upwards; sidecar | nifti_affine)."""
    with reading(url, RejectReason.UNKNOWN_AXES, "an affine"):
        coded = [hdr.get_sform(coded=True)]
        if sidecar.axes is None:
            coded.append(hdr.get_qform(coded=True))
    forms = [form[:3, :3] for form, code in coded if code > 0]
    is_sheared = any(map(_is_sheared, forms))
    if is_sheared and (sidecar.axes is None or sidecar.spacing_mm is None):
        expected = "an sform of axes at right angles, by 1 degree; or axes and spacing_mm in the YAML"
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, expected, "a sheared one")
    zooms = np.asarray(hdr.get_zooms()[:3])
    has_steps = bool(forms) and _cosines(forms[0]) is not None
    norms = np.linalg.norm(forms[0], axis=0) if has_steps else zooms
    if sidecar.spacing_mm is None and not np.allclose(norms, zooms, rtol=_AGREE, atol=0, equal_nan=True):
        pixdim, steps = ([float(f"{length:.6g}") for length in lengths] for lengths in (zooms, norms))
        raise OCTReadError(url, RejectReason.HEADER_MISMATCH, f"pixdim {pixdim} as in the affine", steps)
    if sidecar.axes is not None:
        return *array_axes(sidecar, "the axes of a NIfTI file", url), False, "sidecar"
    orientations = [_orientation(form) for form in forms]
    if not forms or orientations[0] is None or any(o != orientations[0] for o in orientations):
        expected = (
            "an affine (sform or qform) along right, anterior, superior; or axes: [W, H, D] in the YAML"
        )
        actual = "none" if not forms else "an oblique one" if orientations[0] is None else "two that differ"
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, expected, actual)
    order, signs = orientations[0]
    if int(np.argmin(norms)) != order[1]:
        expected = "the smallest spacing along the A-scan; else axes in the YAML"
        actual = f"{norms[order[1]]:g} along anterior-posterior, {norms.min():g} along another axis"
        raise OCTReadError(url, RejectReason.UNKNOWN_AXES, expected, actual)
    return order, [-signs[1], -signs[2]], signs[0] > 0, "nifti_affine"


def _is_sheared(form: np.ndarray) -> bool:
    """Whether two axes [3, 3] are not at right angles: B-scans would be shifted against each other."""
    cosine = _cosines(form)
    return cosine is not None and bool(np.abs(np.triu(cosine.T @ cosine, 1)).max() > _SQUARE)


def _orientation(form: np.ndarray) -> tuple[list[int], list[int]] | None:
    """(array axes of D, H, W; 1 where it grows to superior, anterior or right, else -1); None: oblique."""
    cosine = _cosines(form)
    if cosine is None:
        return None
    nearest = np.abs(cosine).argmax(axis=1)[[2, 1, 0]].tolist()  # to superior, anterior, right
    along = [float(cosine[world, axis]) for world, axis in zip((2, 1, 0), nearest, strict=True)]
    if sorted(nearest) != [0, 1, 2] or min(map(abs, along)) < _ALONG:
        return None
    return nearest, [1 if value > 0 else -1 for value in along]


def _cosines(form: np.ndarray) -> np.ndarray | None:
    """The columns at length 1; None where they are no axes."""
    norms = np.linalg.norm(form, axis=0)
    return form / norms if np.all(np.isfinite(form)) and np.all(norms > 0) else None


def _spacing(hdr: Any, order: list[int], url: str) -> tuple[list[float] | None, str]:
    """(spacing of D, H, W in mm, "nifti_header"), or None and the reason."""
    with reading(url, RejectReason.MISSING_SPACING, "a unit of length"):
        unit = hdr.get_xyzt_units()[0]
    zooms = [hdr.get_zooms()[i] for i in order]
    if unit not in _MM:
        return None, f"unit {unit} in xyzt_units"
    if not np.all(np.isfinite(zooms)) or min(zooms) <= 0:
        return None, "a pixdim that is no length"
    # NIfTI-1 holds single precision: 0.12 comes as 0.119999997; the shortest decimal gives it back.
    return [float(str(z)) * _MM[unit] for z in zooms], "nifti_header"
