"""Files in makers' own formats with known voxels: VOL by eyepy's fields, the others byte by byte."""

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Triple = tuple[float, float, float]
LARGEST = float(np.finfo(np.float32).max)


def write_vol(path: Path, values: np.ndarray, spacing: Triple, **changes: Any) -> Path:
    """float32 [D, H, W] as HSF-OCT; `layers` [D, S, W]; the first B-scan is the lowest (y falls)."""
    import construct
    from eyepy.io.he.vol_reader import vol_format

    time = construct.Bytes(8)  # eyepy builds no exam_time
    fields = construct.Struct(
        *["exam_time" / time if f.name == "exam_time" else f for f in vol_format.subcons]
    )

    frames, height, width = values.shape
    layers = changes.pop("layers", np.zeros((frames, 3, width), np.float32))
    places = changes.pop("places", [5.0 - i * spacing[0] for i in range(frames)])
    day = "2000-01-01T00:00:00"
    b_scans = [
        {
            "version": "HSF-BS-103".ljust(12),
            "bscan_hdr_size": 256 + layers[i].nbytes + 20,
            "start_x": 1.0,
            "start_y": places[i],
            "end_x": 1.0 + width * spacing[2],
            "end_y": places[i],
            "num_seg": len(layers[i]),
            "quality": 30.0,
            "shift": 0,
            "iv_transformation": [0.0] * 6,
            "layer_segmentations": layers[i],
            "data": values[i],
        }
        for i in range(frames)
    ]
    facts = {
        "version": "HSF-OCT-103".ljust(12),
        "size_x": width,
        "n_bscans": frames,
        "size_y": height,
        "scale_x": spacing[2],
        "distance": spacing[0],
        "scale_y": spacing[1],
        "size_x_slo": 6,
        "size_y_slo": 5,
        "scale_x_slo": 0.01,
        "scale_y_slo": 0.01,
        "scan_position": "OS".ljust(4, "\0"),
        "scan_pattern": 3,
        "bscan_hdr_size": 256 + layers[0].nbytes + 20,
        "id": "1",
        "reference_id": "1",
        "patient_id": "P-77",
        "dob": day,
        "exam_time": bytes(8),
        "visit_date": day,
        "grid_type": 0,
        "grid_offset": 0,
        "grid_type1": 0,
        "grid_offset1": 0,
        "prog_id": "",
        "localizer": np.zeros((5, 6), np.uint8),
        "bscans": b_scans,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(fields.build(facts | changes))
    return path


def write_e2e(path: Path, series: Sequence[dict[str, Any]]) -> Path:
    """One chunk of folders; each series: id, side, values uint16 [D, H, W], count, axial, layers, places."""
    folders: list[tuple[tuple[int, ...], bytes]] = []  # (patient, study, series, slice, ind, type), content
    patient = (
        b"Given".ljust(31, b"\0") + b"Name".ljust(66, b"\0") + bytes(4) + b"F" + b"P-78".ljust(25, b"\0")
    )
    folders.append(((1, -1, -1, -1, 65535, 9), patient))
    for one in series:
        ids = (1, 2, one["id"])
        folders.append(((*ids, -1, 65535, 11), bytes(14) + one["side"].encode() + bytes(12)))
        values = one["values"]
        for index, frame in enumerate(values):
            y = 10.0 - index * 0.5
            places = one["places"][index] if "places" in one else (-15.0, y, 15.0, y)
            meta = struct.pack(
                "<3I4fI3fI2f2I", 0, *frame.shape, *places, 0, 0, one["axial"], 0, 0, 0, 0, 0, frame.shape[1]
            )
            meta += struct.pack("<3I2f", one.get("count", len(values)), index, one.get("pattern", 3), 0, y)
            folders.append(((*ids, 2 * index, 65535, 10004), meta.ljust(428, b"\0")))
            for number, rows in one.get("layers", {}).items():
                head = struct.pack("<5I", 0, number, 0, frame.shape[1], 0)
                layer = head + rows[index].astype("<f4").tobytes()
                folders.append(((*ids, 2 * index, 65535, 10019), layer))
            image = struct.pack("<5I", 2 * frame.size, 35652097, frame.size, *frame.shape) + frame.tobytes()
            folders.append(((*ids, 2 * index, 1, 1073741824), image))
    head = struct.pack("<12sI10H", b"CMDb", 100, *[0] * 10)
    start = len(head) + 52
    place = start + 52 + 44 * len(folders)
    directory, contents = b"", b""
    for number, ((*ids, ind, kind), content) in enumerate(folders):
        at = start + 52 + 44 * number
        directory += struct.pack("<4I4i2H2I", at, place, len(content), 0, *ids, ind, 0, kind, 0)
        contents += struct.pack(
            "<12s5I4i2H2I", b"MDbData", 0, at, place, len(content), 0, *ids, ind, 0, kind, 0
        )
        contents += content
        place += 60 + len(content)
    block = struct.pack("<12sI10H", b"MDbDir", 100, *[0] * 10)
    main = block + struct.pack("<4I", 1, start, start, 0)
    chunk = block + struct.pack("<4I", len(folders), start, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + main + chunk + directory + contents)
    return path


def chunks_of(**chunks: bytes) -> bytes:
    parts = [
        bytes([len(name) + 1]) + b"@" + name.encode() + struct.pack("<I", len(c)) + c
        for name, c in chunks.items()
    ]
    return b"".join(parts) + b"\0"


def write_topcon(
    path: Path, voxels: np.ndarray, field_mm: tuple[float, float], axial_um: float, **more: Any
) -> Path:
    """uint8 [D, H, W] as FDA with JPEG 2000, uint16 as FDS; field_mm: width, height; date: of its capture."""
    frames, height, width = voxels.shape
    mode = more.get("mode", 2)
    if voxels.dtype == np.uint8:
        streams = [codestream(frame) for frame in voxels]
        head = struct.pack("<B6I", mode, 0, 0, width, height, frames, 0)
        scan = {"IMG_JPEG": head + b"".join(struct.pack("<I", len(s)) + s for s in streams)}
    else:
        head = struct.pack("<B4IBI", mode, width, height, 16, frames, 0, voxels.nbytes)
        scan = {"IMG_SCAN_03": head + voxels.astype("<u2").tobytes()}
    kind = b"FDA" if voxels.dtype == np.uint8 else b"FDS"
    patient = more.get("patient", "P-79 Ä").encode("latin-1")
    date = struct.pack("<3H", *more["date"]) if "date" in more else b""
    chunks = {
        "HW_INFO_03": more.get("model", b"3DOCT-1Maestro2").ljust(100, b"\0"),
        "PATIENT_INFO_02": (patient.ljust(104, b"\0") + b"\1").ljust(615, b"\0"),
        "CAPTURE_INFO_02": (bytes([more.get("eye", 1), mode]).ljust(106, b"\0") + date).ljust(118, b"\0"),
        "PARAM_SCAN_04": struct.pack("<3I5d", 0, 0, 0, *field_mm, axial_um, 0, 0).ljust(61, b"\0"),
    }
    contours = b""
    for name, rows in more.get("contours", {}).items():  # a chunk each, all with one name
        head = struct.pack("<20sBBIII", name.encode(), 0, 0, width, len(rows), 2 * rows.size)
        content = head + rows.astype("<u2").tobytes() + b"3.21".ljust(32, b"\0")
        contours += chunks_of(CONTOUR_INFO=content)[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = b"FOCT" + kind + struct.pack("<II", 2, 1000)
    path.write_bytes(
        mark
        + contours
        + chunks_of(**{k: v for k, v in (scan | chunks).items() if k not in more.get("without", ())})
    )
    return path


def codestream(frame: np.ndarray) -> bytes:
    """Lossless JPEG 2000 without a JP2 box."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG2000", no_jp2=True, irreversible=False)
    return buffer.getvalue()
