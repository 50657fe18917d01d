"""Plant one file of each known kind of fault, and the oddities that are no fault, into a phantom tree.

In: the tree's root, its participants and manifest rows. Out: more files and rows, and a list that says what
was planted: {"path", "kind", "expected_reason"}, where the reason is how the reader names the rejection and
null means that the file is usable (or never looked at). Bad files are small at every size and have no
truth.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import JPEGLosslessSV1, OphthalmicPhotography8BitImageStorage

from data_setup.export.items import fill, to_bytes
from data_setup.phantom.cohort import Participant, Scan
from data_setup.phantom.dicom import FileSpec, add_pixels, build_dataset, write_volume
from data_setup.phantom.files import (
    file_path,
    geometry,
    make_spec,
    manifest_row,
    save_npz,
    scan_volume,
    truth_arrays,
    write_file,
)
from data_setup.phantom.render import Scan3D
from data_setup.protocols import BY_NAME

FIRST_INDEX = 100  # scan numbers from here on belong to planted files
PPOL, MACULA = "spectralis_ppol_mac_hr_oct_oct", "maestro2_3d_macula_oct_oct"
TRITON, CUBE = "triton_macula_6x6_octa_oct", "cirrus_mac_oct_oct"


def _without(name: str) -> Callable[[FileDataset], None]:
    return lambda ds: delattr(ds, name)


def _streams(change: Callable[[list[bytes], int], list[bytes]]) -> Callable[[FileDataset], None]:
    """`change` of the codestreams and the number of the middle one."""

    def edit(ds: FileDataset) -> None:
        frames = list(generate_frames(ds.PixelData, number_of_frames=int(ds.NumberOfFrames)))
        ds.PixelData = encapsulate(change(frames, len(frames) // 2), has_bot=False)

    return edit


def _corrupt(frames: list[bytes], middle: int) -> list[bytes]:
    """One codestream claims 99 wavelet levels (32 is the most), its length unchanged."""
    levels = frames[middle].index(b"\xff\x52") + 9  # in the coding style default (COD) segment
    frames[middle] = frames[middle][:levels] + b"\x63" + frames[middle][levels + 1 :]
    return frames


def _half(frames: list[bytes], middle: int) -> list[bytes]:
    """One codestream is only half there, the file around it whole."""
    return [f[: len(f) // 4 * 2] if index == middle else f for index, f in enumerate(frames)]


def _missing_spacing(ds: FileDataset) -> None:
    """No PixelMeasures and no positions anywhere."""
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    for frame in ds.PerFrameFunctionalGroupsSequence:
        del frame.PlanePositionSequence
        del frame.OphthalmicFrameLocationSequence


def _implausible_spacing(ds: FileDataset) -> None:
    """1 mm in every direction, as a reader's default would have left it."""
    measures = ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.PixelSpacing, measures.SliceThickness = ["1", "1"], "1"


def _wrong_sop_class(ds: FileDataset) -> None:
    """A photograph's SOP class and modality."""
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = OphthalmicPhotography8BitImageStorage
    ds.Modality = "OP"


def _jpeg_lossless(ds: FileDataset) -> None:
    """For which there is no permissive codec; the frames are empty shells."""
    shell = b"\xff\xd8\xff\xc3\x00\x0b\x08" + b"\0" * 8 + b"\xff\xd9\0"
    ds.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    ds.PixelData = encapsulate([shell] * int(ds.NumberOfFrames), has_bot=False)
    ds["PixelData"].is_undefined_length = True


def _colour(ds: FileDataset) -> None:
    """Three samples per pixel, as a rendered screen shot has."""
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PlanarConfiguration = 3, "RGB", 0
    ds.PixelData = np.repeat(np.frombuffer(ds.PixelData, np.uint8), 3).tobytes()


def _single_frame(ds: FileDataset) -> None:
    """One B-scan under the name of a volume."""
    ds.NumberOfFrames = 1
    ds.PerFrameFunctionalGroupsSequence = ds.PerFrameFunctionalGroupsSequence[:1]
    ds.PixelData = ds.PixelData[: ds.Rows * ds.Columns]


def _nan_rescale(ds: FileDataset) -> bytes:
    fill(ds, {"RescaleIntercept": "0", "RescaleSlope": "1.234567"})
    return to_bytes(ds).replace(b"1.234567", b"NaN     ", 1)


# kind, (protocol, syntax, change in place or to other bytes, the reader's reason)
BAD_FILES: dict[str, tuple[str, str, Callable[[FileDataset], bytes | None], str]] = {
    "no_pixel_data": (TRITON, "explicit", _without("PixelData"), "missing_pixel_data"),
    "truncated_pixel_data": (  # the file ends in the middle of the pixels
        *(MACULA, "explicit", lambda ds: to_bytes(ds)[: -(len(ds.PixelData) * 2 // 5)]),
        "truncated_pixel_data",
    ),
    "corrupt_codestream": (TRITON, "j2k", _streams(_corrupt), "corrupt_pixel_data"),
    "truncated_codestream": (MACULA, "j2k", _streams(_half), "truncated_pixel_data"),
    "wrong_frame_count": (MACULA, "j2k", _streams(lambda frames, _: frames[:-2]), "frame_count_mismatch"),
    "more_frames_than_pixels": (
        *(CUBE, "explicit", lambda ds: fill(ds, {"NumberOfFrames": 2 * int(ds.NumberOfFrames)})),
        "frame_count_mismatch",
    ),
    "wrong_frame_size": (  # more columns than the compressed frames have
        *(TRITON, "j2k", lambda ds: fill(ds, {"Columns": int(ds.Columns) + 8})),
        "frame_size_mismatch",
    ),
    "constant_volume": (
        *(MACULA, "explicit", lambda ds: fill(ds, {"PixelData": b"\x10" * len(ds.PixelData)})),
        "constant_volume",
    ),
    "missing_spacing": (PPOL, "explicit", _missing_spacing, "missing_spacing"),
    "implausible_spacing": (TRITON, "explicit", _implausible_spacing, "implausible_spacing"),
    "wrong_sop_class": (PPOL, "explicit", _wrong_sop_class, "not_opt"),
    "not_dicom": (
        *(CUBE, "explicit", lambda ds: np.random.default_rng(len(ds.PixelData)).bytes(4096)),
        "not_dicom",
    ),
    "unsupported_codec": (TRITON, "explicit", _jpeg_lossless, "missing_codec"),
    "colour_pixels": (CUBE, "explicit", _colour, "unsupported_pixels"),
    "single_frame": (PPOL, "explicit", _single_frame, "not_a_volume"),
    "missing_rows": (MACULA, "explicit", _without("Rows"), "header_mismatch"),
    "not_finite": (CUBE, "explicit", _nan_rescale, "not_finite"),
}


def plant_faults(
    out: Path, people: list[Participant], rows: list[dict[str, object]], seed: int, size: str, naming: str
) -> list[dict[str, object]]:
    """Write the faulty and the odd files, add their rows to `rows` in place, and return what was planted."""
    rng = np.random.default_rng([seed, 0xFA])
    order = rng.permutation(len(people))
    planted: list[dict[str, object]] = []
    good = [row for row in rows if row["slice_thickness"] != "Not reported"]

    def plan(
        protocol: str, volume_size: str, shape: tuple[int, int, int] | None = None
    ) -> tuple[Participant, FileSpec, Scan3D]:
        number = len(planted)
        person = people[order[number % len(people)]]
        scan = Scan(BY_NAME[protocol], "RL"[number % 2], 0, FIRST_INDEX + number)
        volume, spacing = scan_volume(person, scan, seed, volume_size, shape)
        return person, make_spec(person, scan, spacing, seed, size, "explicit"), volume

    def add(kind: str, reason: str | None, spec: FileSpec, volume: Scan3D, data: bytes | None) -> None:
        side = kind if kind == "unknown_laterality" else None
        path = file_path(spec, other if kind == "orphan" else naming, side)
        if data is not None:
            write_file(out / path, data)
        planted.append({"path": path, "kind": kind, "expected_reason": reason})
        row = manifest_row(spec, volume.voxels.shape, f"/{path}")
        if kind != "orphan":  # which is in no manifest
            rows.append(row | {"laterality": side} if side else row)

    other = "v3" if naming == "v2" else "v2"

    for kind, (protocol, syntax, change, reason) in BAD_FILES.items():
        _, spec, volume = plan(protocol, "small")
        ds = build_dataset(spec, volume.voxels.shape)
        add_pixels(ds, volume.voxels, syntax)
        add(kind, reason, spec, volume, change(ds) or to_bytes(ds))
    _, spec, volume = plan(CUBE, "small")
    add("missing_file", "missing_file", spec, volume, None)
    _, spec, volume = plan(MACULA, "small")  # named as in the other version
    add("orphan", None, spec, volume, write_volume(volume.voxels, spec))

    maestro_frames = round(geometry(BY_NAME["maestro2_macula_6x6_octa_oct"], size)[0][0] * 320 / 360)
    ppol_frames = geometry(BY_NAME[PPOL], size)[0][0] - 1
    odd = {
        "unknown_laterality": (TRITON, None),
        "empty_image_position": (PPOL, None),
        "maestro2_320_frames": ("maestro2_macula_6x6_octa_oct", maestro_frames),
        "ppol_60_frames": (PPOL, ppol_frames),
    }
    for kind, (protocol, frames) in odd.items():
        default = geometry(BY_NAME[protocol], size)[0]
        person, spec, volume = plan(protocol, size, (frames or default[0], *default[1:]))
        ds = build_dataset(spec, volume.voxels.shape)
        if kind == "empty_image_position":
            for groups in ds.PerFrameFunctionalGroupsSequence:
                groups.PlanePositionSequence[0].ImagePositionPatient = None
        if kind == "unknown_laterality":
            ds.ImageLaterality = None
            ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence[0].FrameLaterality = None
        add_pixels(ds, volume.voxels, "j2k")
        add(kind, None, spec, volume, to_bytes(ds))
        save_npz(out / "truth" / f"{spec.sop_instance_uid}.npz", truth_arrays(volume, spec, person))
    planted += _odd_texts(good)
    return planted


def _odd_texts(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Write texts seen in real manifests into the first rows; returns what was planted."""
    changes: list[dict[str, str]] = [{"filepath": "dataset{}"}, {"filepath": "/dataset{}"}]
    changes.append({"slice_thickness": "Not reported"})
    if len(rows) > 4:
        changes.append({"pixel_spacing": "None", "reference_filepath": "Not reported"})
        changes.append({"filepath": str(rows[4]["filepath"]).lstrip("/")})
    planted = []
    for row, odd in zip(rows, changes, strict=False):
        path = str(row["filepath"])
        row.update({key: text.format(path) for key, text in odd.items()})
        fact: dict[str, object] = {"path": path.lstrip("/"), "kind": "odd_manifest_text"}
        planted.append(fact | {"expected_reason": None})
    return planted
