"""One planned scan of the phantom to its files: the DICOM, its truth and its manifest row.

In: a participant, a scan, a size. Out: files under the tree's root. Every file is a function only of the
seed, the size and the scan, so the order of work does not matter.
"""

import io
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_setup.export.items import make_uid
from data_setup.phantom.anatomy import LAYERS, SURFACES, Eye, make_eye
from data_setup.phantom.cohort import Factors, Participant, Scan
from data_setup.phantom.dicom import POSITION_STYLES, FileSpec, write_volume, written_spacing
from data_setup.phantom.render import LESIONS, Scan3D, render
from data_setup.protocols import DEVICES, Protocol, Shape, Triple

# compression takes most of the time of a small file
MIXED_WEIGHTS = {"explicit": 0.75, "j2k": 0.12, "rle": 0.05, "j2k_lossy": 0.08}
MANIFEST_COLUMNS = (
    *("person_id", "manufacturer", "manufacturers_model_name", "anatomic_region", "imaging", "laterality"),
    *("height", "width", "number_of_frames", "pixel_spacing", "slice_thickness", "sop_instance_uid"),
    *("filepath", "reference_instance_uid", "reference_filepath"),
)


def small_geometry(protocol: Protocol) -> tuple[Shape, Triple]:
    """Shape and spacing (D,H,W) of a protocol at size small: the same field in fewer, larger voxels."""
    frames, rows, columns = protocol.shape
    shape = (
        frames if not protocol.is_volume else round(32 * (frames / 128) ** 0.25),
        round(128 * (rows / 496) ** 0.3),
        round(64 * (columns / 200) ** 0.3),
    )
    return shape, rescaled(protocol, shape)


def rescaled(protocol: Protocol, shape: Shape) -> Triple:
    """The spacing at which `shape` covers the protocol's field."""
    field = protocol.field_mm
    return (field[0] / (shape[0] - 1), field[1] / shape[1], field[2] / shape[2])


def geometry(protocol: Protocol, size: str) -> tuple[Shape, Triple]:
    """Shape and spacing (D,H,W) of a protocol at size "small" or "full"."""
    return small_geometry(protocol) if size == "small" else (protocol.shape, protocol.spacing_mm)


def scan_volume(
    person: Participant, scan: Scan, seed: int, size: str, shape: Shape | None = None
) -> tuple[Scan3D, Triple]:
    """Render one planned scan, frames in stored order; returns it with its true spacing."""
    default_shape, spacing = geometry(scan.protocol, size)
    if shape is not None:
        spacing = rescaled(scan.protocol, shape)
    identity = (seed, int(person.person_id), "RL".index(scan.laterality))
    volume = render(
        _eye(person.factors, identity),
        scan.protocol,
        shape or default_shape,
        spacing,
        scan.laterality,
        [*identity, 2, scan.index],
    )
    return (flip(volume) if POSITION_STYLES[scan.protocol.name].inferior_first else volume), spacing


@lru_cache(maxsize=2)  # both eyes of a person
def _eye(factors: Factors, identity: Shape) -> Eye:
    return make_eye(factors, np.random.default_rng([*identity, 1]))


def flip(volume: Scan3D) -> Scan3D:
    """The same scan with its B-scans in reverse order."""
    turned = {name: values[::-1] for name, values in vars(volume).items() if name != "surfaces"}
    return Scan3D(surfaces=volume.surfaces[:, ::-1], **turned)


def choose_syntax(transfer_syntax: str, person: Participant, scan: Scan, seed: int) -> str:
    """The syntax of one file; "mixed" draws it with MIXED_WEIGHTS."""
    if transfer_syntax != "mixed":
        return transfer_syntax
    rng = np.random.default_rng([seed, int(person.person_id), 3, scan.index])
    return str(rng.choice(list(MIXED_WEIGHTS), p=list(MIXED_WEIGHTS.values())))


def make_spec(
    person: Participant, scan: Scan, spacing_mm: Triple, seed: int, size: str, syntax: str
) -> FileSpec:
    """The file identity of a scan: UIDs are functions of seed, size, person and scan."""
    key = (seed, size, person.person_id, scan.protocol.name, scan.laterality, scan.index)
    return FileSpec(
        person_id=person.person_id,
        protocol=scan.protocol,
        laterality=scan.laterality,
        spacing_mm=spacing_mm,
        sop_instance_uid=make_uid("oct", *key),
        reference_uid=make_uid("localizer", *key),
        visit_date=person.study_visit_date,
        syntax=syntax,
    )


def truth_arrays(volume: Scan3D, spec: FileSpec, person: Participant) -> dict[str, np.ndarray]:
    """What is known about a volume, in stored frame order: see docs/concepts/phantom.md."""
    axial_um = spec.spacing_mm[1] * 1000
    outside = volume.disc < 0.1
    thickness = np.diff(volume.surfaces, axis=0)[:, outside].mean(axis=1) * axial_um
    voxel_mm3 = float(np.prod(spec.spacing_mm))
    lesion_mm3 = np.bincount(volume.lesions.ravel(), minlength=len(LESIONS)) * voxel_mm3
    factors = asdict(person.factors)
    return {
        "surface_names": np.array(SURFACES),
        "surfaces": volume.surfaces.astype(np.float32),
        "layer_names": np.array(LAYERS),
        "layer_thickness_um": thickness.astype(np.float32),
        "lesion_names": np.array(LESIONS),
        "lesions": volume.lesions,
        "lesion_volume_mm3": lesion_mm3.astype(np.float32),
        "vessels": volume.vessels > 0.5,
        "vessel_fraction": np.float32(volume.vessels[outside].mean()),
        "disc": volume.disc > 0.5,
        "fundus_position_mm": np.stack([volume.u_mm, volume.v_mm]).astype(np.float32),
        "spacing_mm": np.array(spec.spacing_mm),
        "shape": np.array(volume.voxels.shape),
        "factor_names": np.array(list(factors)),
        "factors": np.array(list(factors.values()), dtype=np.float64),
    }


def manifest_row(spec: FileSpec, shape: Shape, filepath: str) -> dict[str, object]:
    frames, rows, columns = shape
    manufacturer, model = DEVICES[spec.protocol.device]
    thickness, axial, lateral = written_spacing(spec)
    reference = "ir" if spec.protocol.device == "heidelberg_spectralis" else "cfp"
    folder = f"/retinal_photography/{reference}/{spec.protocol.device}/{spec.person_id}"
    missing = int(spec.reference_uid[-2:]) % 10 == 0  # the localizer of one file in ten is not in the release
    volume = spec.protocol.is_volume
    return {
        "person_id": spec.person_id,
        "manufacturer": manufacturer,
        "manufacturers_model_name": model,
        "anatomic_region": spec.protocol.region,
        "imaging": "OCT",
        "laterality": spec.laterality,
        "height": rows,
        "width": columns,
        "number_of_frames": frames,
        "pixel_spacing": f"[{axial}, {lateral}]" if volume else "Varies by frame",
        "slice_thickness": thickness if volume else "Not reported",
        "sop_instance_uid": spec.sop_instance_uid,
        "filepath": filepath,
        "reference_instance_uid": spec.reference_uid,
        "reference_filepath": ""
        if missing
        else f"{folder}/{spec.person_id}_{spec.protocol.name_v2 or spec.protocol.name}_{reference}_"
        f"{spec.laterality.lower()}_{spec.reference_uid}.dcm",
    }


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write compressed arrays (numpy stamps members 1980-01-01: the bytes depend on the arrays only)."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=True, **arrays)
    path.write_bytes(buffer.getvalue())


def file_path(spec: FileSpec, naming: str, side: str | None = None) -> str:
    """A file's path under the root, its name in the naming of version 3 or 2; `side` replaces its l or r."""
    name = spec.protocol.name_v2 if naming == "v2" and spec.protocol.name_v2 else spec.protocol.name
    folder = f"retinal_oct/structural_oct/{spec.protocol.device}/{spec.person_id}"
    eye, uid = side or spec.laterality.lower(), spec.sop_instance_uid
    return f"{folder}/{spec.person_id}_{name}_{eye}_{uid}.dcm"


def write_file(path: Path, data: bytes) -> None:
    """Write bytes, making the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_person(
    person: Participant, out: Path, seed: int, size: str, naming: str, transfer_syntax: str
) -> list[dict[str, object]]:
    """Write a person's files and truth; returns the manifest rows."""
    rows = []
    for scan in person.scans:
        volume, spacing = scan_volume(person, scan, seed, size)
        syntax = choose_syntax(transfer_syntax, person, scan, seed)
        spec = make_spec(person, scan, spacing, seed, size, syntax)
        path = file_path(spec, naming)
        write_file(out / path, write_volume(volume.voxels, spec))
        save_npz(out / "truth" / f"{spec.sop_instance_uid}.npz", truth_arrays(volume, spec, person))
        rows.append(manifest_row(spec, volume.voxels.shape, f"/{path}"))
    return rows
