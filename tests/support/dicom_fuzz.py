"""Mutated DICOM files, one per case number, and a process that reads them.

In: case numbers on stdin. Out: per case one line of JSON: what came of it (`ok`, `named: REASON`, or the text
of another exception), its seconds and the growth of the process's address space in bytes since the sound
files were read. A case that takes too long ends the process; `run_cases` starts another. The same number
always makes the same file: `python -m tests.support.dicom_fuzz FOLDER NUMBER` writes that file and reads it.
"""

import faulthandler
import io
import json
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from pydicom import config as pydicom_config
from pydicom import dcmread, dcmwrite
from pydicom.dataelem import DataElement
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.filebase import DicomBytesIO
from pydicom.tag import Tag
from pydicom.uid import (
    UID,
    AllTransferSyntaxes,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

from data_setup.readers.dicom import OCTReadError, open_volume, read_volume
from data_setup.resample import resample_frames
from tests.support.dicom_factory import (
    CIRRUS,
    decode_frames,
    item,
    opt_dataset,
    rows_down,
    speckle,
    steps_along,
    write_opt,
)
from utils.storage import write_bytes

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 5.0  # of a case
START_S = 120.0  # of a reading process, for what comes before its cases
LIMIT_BYTES = 2**30  # of memory for a case
_SHAPE = (3, 40, 36)
_PIXELS = struct.pack("<HH", 0x7FE0, 0x0010)
Mutation = Callable[[bytes, np.random.Generator], bytes]


# ---- sound files ------------------------------------------------------------------------------------------


def _split(streams_of: bool) -> Callable[[FileDataset], None]:
    def edit(ds: FileDataset) -> None:
        streams = list(generate_frames(ds.PixelData, number_of_frames=_SHAPE[0]))
        ds.PixelData = encapsulate(streams, fragments_per_frame=2, has_bot=streams_of)

    return edit


def _rescaled(ds: FileDataset) -> None:
    values = item(RescaleSlope="0.5", RescaleIntercept="10", RescaleType="US")
    ds.SharedFunctionalGroupsSequence[0].PixelValueTransformationSequence = [values]


def _baseline(ds: FileDataset) -> None:
    streams = []
    for frame in np.frombuffer(ds.PixelData, np.uint8).reshape(_SHAPE):
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "JPEG")
        streams.append(out.getvalue())
    ds.PixelData = encapsulate(streams)
    ds["PixelData"].is_undefined_length = True
    ds.file_meta.TransferSyntaxUID = JPEGBaseline8Bit


def sound_files(folder: Path) -> list[bytes]:
    """Every kind of file that the reader opens: codecs, byte orders, bits, and places of the geometry."""
    eight, sixteen = speckle(*_SHAPE), speckle(*_SHAPE, bits=16)
    down, along = {"references": rows_down(_SHAPE[0])}, {"positions": steps_along(_SHAPE[0], 1, 0.12)}
    paths = [
        write_opt(folder / "0", eight, **down),
        write_opt(folder / "1", sixteen, syntax=ImplicitVRLittleEndian, where="per_frame", **along),
        write_opt(folder / "2", eight, syntax=JPEG2000Lossless, **down),
        write_opt(folder / "3", sixteen, syntax=JPEG2000Lossless, where="root", edit=_split(False)),
        write_opt(folder / "4", sixteen, syntax=RLELossless, where="per_frame", **along),
        write_opt(folder / "5", eight, syntax=RLELossless, edit=_split(True)),
        write_opt(folder / "6", speckle(*_SHAPE, bits=12), bits_stored=12, edit=_rescaled),
        write_opt(folder / "7", eight, name=CIRRUS, **along),
        write_opt(folder / "8", eight, syntax=JPEG2000Lossless, edit=_split(True), **along),
        write_opt(folder / "9", eight, edit=_baseline, **down),
    ]
    big = opt_dataset(sixteen)
    big.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    big.PixelData = sixteen.byteswap().tobytes()
    paths.append(str(folder / "big.dcm"))
    dcmwrite(paths[-1], big, implicit_vr=False, little_endian=False, force_encoding=True)
    return [Path(p).read_bytes() for p in paths]


# ---- mutations --------------------------------------------------------------------------------------------

_LIES = (0, 1, 3, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def _put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _flip(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes anywhere, or in the header alone."""
    header = data.find(_PIXELS)
    end = header if header > 140 and rng.random() < 0.6 else len(data)
    changed = bytearray(data)
    for place in rng.integers(min(128, end - 1), end, rng.integers(1, 9)):
        changed[place] = rng.integers(256)
    return bytes(changed)


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def _move(data: bytes, rng: np.random.Generator) -> bytes:
    """A chunk removed, doubled, put elsewhere, or replaced by noise."""
    a, b = sorted(rng.integers(0, len(data), 2).tolist())
    b = min(b, a + int(rng.integers(1, 2000)))
    to = int(rng.integers(len(data)))
    match rng.integers(4):
        case 0:
            return data[:a] + data[b:]
        case 1:
            return data[:b] + data[a:b] + data[b:]
        case 2:
            return data[:to] + data[a:b] + data[to:]
        case _:
            return _put(data, a, rng.bytes(b - a))


def _length(data: bytes, rng: np.random.Generator) -> bytes:
    """The length field of an element or item, as a lie."""
    tags = [_PIXELS, b"\xfe\xff\x00\xe0", b"\x00\x52\x29\x92", b"\x00\x52\x30\x92", b"\x28\x00", b"\x08\x00"]
    tag = tags[rng.integers(len(tags))]
    places = [i for i in range(132, len(data)) if data.startswith(tag, i)]
    if not places:
        return _flip(data, rng)
    at = places[rng.integers(len(places))] + int(rng.choice([4, 6, 8]))
    lie = _LIES[rng.integers(len(_LIES))]
    return _put(data, at, struct.pack("<L", lie) if rng.random() < 0.6 else struct.pack("<H", lie & 0xFFFF))


_NUMBERS = ["nan", "inf", "-0.03", "0", "1e400", "1e-320", "1" * 200, "x" * 70000, "\\" * 5000, "1\\2\\3", ""]
_HEADER_LIES: dict[str, list[tuple[str, object]]] = {
    "Rows": [("US", 0), ("US", 65535), ("UL", 2**32 - 1), ("SL", -24), ("LO", "many"), ("US", [24, 20])],
    "Columns": [("US", 0), ("US", 65535), ("UL", 2**31), ("FD", float("nan")), ("LO", "")],
    "NumberOfFrames": [("IS", str(n)) for n in (-1, 0, 2, 4, 2**31 - 1, 2**31, 10**18)] + [("LO", "three")],
    "BitsAllocated": [("US", n) for n in (0, 1, 7, 8, 12, 16, 24, 32, 64, 65535)] + [("LO", "8")],
    "BitsStored": [("US", n) for n in (0, 1, 7, 12, 16, 33, 65535)],
    "HighBit": [("US", 0), ("US", 65535), ("LO", "seven")],
    "SamplesPerPixel": [("US", n) for n in (0, 2, 3, 4, 65535)],
    "PixelRepresentation": [("US", 1), ("US", 9), ("LO", "plus")],
    "PlanarConfiguration": [("US", 1), ("US", 7), ("LO", "x")],
    "PhotometricInterpretation": [("CS", v) for v in ("RGB", "YBR_FULL_422", "", "MONOCHROME9", "A\\B")],
    "PixelSpacing": [("LO", v) for v in _NUMBERS] + [("DS", f"{v}\\0.03") for v in _NUMBERS[:7]],
    "SliceThickness": [("DS", v) for v in _NUMBERS],
    "SpacingBetweenSlices": [("FD", v) for v in (float("nan"), -1.0, 1e308, 0.0)],
    "RescaleSlope": [("LO", v) for v in _NUMBERS],
    "RescaleIntercept": [("FD", v) for v in (float("inf"), 1e308, -1e308)],
    "ImagePositionPatient": [("LO", "1\\2"), ("LO", "nan\\0\\0"), ("FD", [1e308, -1e308, 1e308])],
    "ImageOrientationPatient": [("FD", [float("nan")] * 6), ("FD", [1e308] * 6), ("FD", [0.0] * 6)],
    "ReferenceCoordinates": [("FL", [float("inf")] * 4), ("FL", [3e38, -3e38, 3e38, 3e38]), ("LO", "a\\b")],
    "OphthalmicImageOrientation": [("CS", "NONLINEAR"), ("LO", "x" * 5000), ("US", 7)],
    "SOPClassUID": [("UI", "1.2.3"), ("LO", "a name"), ("US", 3)],
    "SOPInstanceUID": [("UI", "1." * 500), ("US", [1, 2])],
    "SpecificCharacterSet": [("CS", "NONE SUCH"), ("CS", "ISO 2022 IR 87"), ("US", 5)],
    "ImageLaterality": [("CS", "B"), ("US", 5)],
    "SharedFunctionalGroupsSequence": [("LO", "no sequence"), ("US", 1), ("SQ", [])],
    "PerFrameFunctionalGroupsSequence": [("LO", "no sequence"), ("SQ", []), ("UN", b"\xff" * 40)],
    "PixelMeasuresSequence": [("LO", "none"), ("FD", 3.0)],
    "PlanePositionSequence": [("LO", "none"), ("SQ", [])],
}


def _header(data: bytes, rng: np.random.Generator) -> bytes:
    """One to three attributes with values, kinds or lengths that nobody should write."""
    ds = dcmread(DicomBytesIO(data))
    groups = [ds, *ds.SharedFunctionalGroupsSequence, *ds.PerFrameFunctionalGroupsSequence]
    groups += [one for g in groups[1:] for e in g if e.VR == "SQ" for one in e.value]
    disguised = []
    for name in rng.choice(list(_HEADER_LIES), rng.integers(1, 4), replace=False):
        vr, value = _HEADER_LIES[name][rng.integers(len(_HEADER_LIES[name]))]
        holders = [g for g in groups if name in g] or [groups[rng.integers(len(groups))]]
        tag = Tag(name)
        if name.endswith("Sequence") and vr != "SQ":  # pydicom writes no such thing under its own tag
            disguised.append(tag)
            tag = Tag(tag.group + 0x100, tag.element)
        for holder in holders if rng.random() < 0.5 else holders[:1]:
            holder.pop(Tag(name), None)
            holder[tag] = DataElement(tag, vr, value, already_converted=vr != "SQ")
    data = _saved(ds, data)
    for tag in disguised:
        group, element = struct.pack("<H", tag.group), struct.pack("<H", tag.element)
        data = data.replace(struct.pack("<H", tag.group + 0x100) + element, group + element)
    return data


def _saved(ds: FileDataset, data: bytes) -> bytes:
    out = DicomBytesIO()
    try:
        ds.save_as(out, enforce_file_format=False)
    except (ValueError, TypeError, AttributeError, struct.error, OverflowError, KeyError):
        return data  # pydicom cannot write this one: the sound file is read once more
    return out.getvalue()


def _syntax(data: bytes, rng: np.random.Generator) -> bytes:
    """The transfer syntax of another codec, or of none."""
    ds = dcmread(DicomBytesIO(data))
    choices = [*AllTransferSyntaxes, UID("1.2.3.4"), UID("")]
    new = str(choices[rng.integers(len(choices))]).encode()
    old = str(ds.file_meta.TransferSyntaxUID).encode()
    at = data.find(old)
    size = len(old) + len(old) % 2
    new += b"\0" * (len(new) % 2)
    return data[: at - 2] + struct.pack("<H", len(new)) + new + data[at + size :]


def _nest(data: bytes, rng: np.random.Generator) -> bytes:
    """Sequences in sequences, whole or without their ends, at a place of the allow-list or of none."""
    depth = int(rng.choice([3, 50, 400, 3000]))
    tag = (b"\x00\x52\x29\x92", b"\x00\x52\x30\x92", b"\x28\x00\x10\x91", b"\x09\x00\x10\x10")[
        rng.integers(4)
    ]
    explicit = b"SQ\0\0" if rng.random() < 0.7 else b""
    opened = (tag + explicit + b"\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0" + b"\xff\xff\xff\xff") * depth
    closed = (b"\xfe\xff\x0d\xe0\0\0\0\0" + b"\xfe\xff\xdd\xe0\0\0\0\0") * (
        depth if rng.random() < 0.5 else 0
    )
    places = [data.find(_PIXELS), data.find(b"\x28\x00\x10\x00"), data.find(b"\x08\x00\x16\x00")]
    at = max(132, places[rng.integers(3)])
    return data[:at] + opened + closed + data[at:]


def _codestream(data: bytes, rng: np.random.Generator) -> bytes:
    """Lies in the headers of JPEG 2000 streams, with Rows and Columns that agree or not; RLE tables too."""
    places = [i for i in range(len(data)) if data.startswith(b"\xff\x4f\xff\x51", i)]
    if not places:
        return _fragments(data, rng)
    height, width = (int(rng.choice([24, 400, 5000, 20000, 60000, 65535])) for _ in range(2))
    agrees = rng.random() < 0.6
    field = rng.integers(6)
    tile = int(rng.choice([1, 2, 7, 64, 20000, 2**31, 2**32 - 1]))
    for at in places if rng.random() < 0.7 else places[:1]:
        if field == 0:  # Xsiz, Ysiz
            data = _put(data, at + 8, struct.pack(">LL", width, height))
        elif field == 1:  # and one tile of that size
            data = _put(data, at + 8, struct.pack(">LLLLLL", width, height, 0, 0, width, height))
        elif field == 2:  # tiles: as many as there are pixels, or none
            data = _put(data, at + 24, struct.pack(">LL", tile, tile))
        elif field == 3:  # components, and the precision of the first
            data = _put(data, at + 40, struct.pack(">HB", *rng.integers(0, [65535, 256]).tolist()))
        elif field == 4:  # an offset image
            data = _put(
                data, at + 8, struct.pack(">LLLL", width, height, *(int(v) for v in rng.choice(_LIES, 2)))
            )
        else:  # anything else up to the first tile-part: coding style, quantisation
            end = data.find(b"\xff\x90", at)
            for place in rng.integers(at + 4, max(at + 5, end), 3).tolist():
                data = _put(data, place, bytes([rng.integers(256)]))
    if agrees and field in (0, 1, 4):
        rows, columns = (data.find(b"\x28\x00" + e + b"\x00US\x02\x00") for e in (b"\x10", b"\x11"))
        if min(rows, columns) > 0:
            data = _put(data, rows + 8, struct.pack("<H", height))
            data = _put(data, columns + 8, struct.pack("<H", width))
    return data


def _fragments(data: bytes, rng: np.random.Generator) -> bytes:
    """Item lengths, offset tables, RLE segment tables, and thousands of items."""
    start = data.find(_PIXELS)
    items = [i for i in range(max(0, start), len(data)) if data.startswith(b"\xfe\xff\x00\xe0", i)]
    if not items:
        return _length(data, rng)
    at, lie = items[rng.integers(len(items))], struct.pack("<L", _LIES[rng.integers(len(_LIES))])
    match rng.integers(5):
        case 0:
            return _put(data, at + 4, lie)
        case 1:  # the first words of its value: an RLE table, an offset table, a codestream
            return _put(data, at + 8 + 4 * int(rng.integers(4)), lie)
        case 2:
            return data[:at] + b"\xfe\xff\x00\xe0\0\0\0\0" * int(rng.choice([1, 100, 20000])) + data[at:]
        case 3:
            return data[:at] + data[at:].replace(b"\xfe\xff\xdd\xe0", b"\xfe\xff\x0d\xe0", 1)
        case _:  # a table of any size
            table = rng.integers(0, 2**32, int(rng.choice([1, 3, 5000])), np.uint32).tobytes()
            head = items[0]
            return (
                data[:head] + b"\xfe\xff\x00\xe0" + struct.pack("<L", len(table)) + table + data[head + 8 :]
            )


MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _cut, _move, _length, _header, _header, _syntax, _nest, _codestream, _codestream, _fragments),
)


def _work(sound: Sequence[bytes], rng: np.random.Generator) -> bytes:
    """A small file whose header and codestreams agree on the frame, but not on the work that it makes."""
    side = int(rng.choice([40, 400, 2800]))  # below the size at which the bytes of a frame are weighed
    kind = rng.integers(4)
    ds = dcmread(DicomBytesIO(sound[9 if kind == 3 else rng.choice([2, 3, 8])]))
    count = int(rng.choice([1, 2, 4, 500, 16384, 65535]))
    streams = []
    for stream in generate_frames(ds.PixelData, number_of_frames=_SHAPE[0]):
        if kind == 3:  # a JPEG whose last scan comes again and again
            out = io.BytesIO()
            Image.new("L", (side, side)).save(out, "JPEG", progressive=rng.random() < 0.7)
            last = out.getvalue().rindex(b"\xff\xda")
            scan = out.getvalue()[last:-2]
            repeats = min(count, 1 + 2**17 // len(scan))  # a small file
            streams.append(out.getvalue()[:last] + scan * repeats + b"\xff\xd9")
            continue
        stream = _put(stream, 8, struct.pack(">8L", side, side, 0, 0, side, side, 0, 0))
        if kind == 0:  # components
            length, planes = struct.unpack_from(">H", stream, 4)[0], min(count, 16384)
            size = stream[6:40] + struct.pack(">H", planes) + stream[42:45] * planes
            stream = stream[:4] + struct.pack(">H", 38 + 3 * planes) + size + stream[4 + length :]
        elif kind == 1:  # tiles
            tile = max(1, int(side / count**0.5))
            stream = _put(stream, 24, struct.pack(">LL", tile, tile))
        else:  # precincts and layers
            at = stream.index(b"\xff\x52")
            end = at + 2 + struct.unpack_from(">H", stream, at + 2)[0]
            sizes = bytes([17 * int(rng.choice([1, 2, 4, 15]))]) * (stream[at + 9] + 1)
            style = bytes([stream[at + 4] | 1, stream[at + 5]]) + struct.pack(">H", count)
            cod = style + stream[at + 8 : at + 14] + sizes
            stream = stream[: at + 2] + struct.pack(">H", len(cod) + 2) + cod + stream[end:]
        streams.append(stream)
    ds.PixelData = encapsulate(streams)
    ds.Rows = ds.Columns = side
    return _saved(ds, sound[2])


def mutated(sound: Sequence[bytes], case: int) -> bytes:
    """The file of this case number: one or two mutations of a sound file."""
    rng = np.random.default_rng([20261122, case])
    if case % 10 == 4:  # none of those that once found something has such a number
        return _work(sound, rng)
    data = sound[rng.integers(len(sound))]
    first = MUTATIONS[rng.integers(len(MUTATIONS))]
    data = first(data, rng)
    if rng.random() < 0.25:  # those that parse the file come first
        data = (_flip, _length, _move, _codestream, _fragments)[rng.integers(5)](data or b"\0", rng)
    return data


# ---- the reading process ----------------------------------------------------------------------------------


def read(url: str, how: int) -> None:
    """One of the three ways in which files are read; nothing may be raised but OCTReadError."""
    if how == 0:
        read_volume(url)
    elif how == 1:
        decode_frames(url)
    else:
        header, frames = open_volume(url)
        try:
            resample_frames(frames, header.shape, header.spacing_mm, (8, 16, 16), (0.05, 0.006, 0.06))
        except ValueError as error:  # prepare takes this for a field that is too small for the grid
            if not str(error).startswith("field of "):
                raise


def _peak() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmPeak:")[1].split()[0]) * 1024


def serve(folder: Path, cases: Sequence[int]) -> None:
    """Read the cases one by one and print a line of JSON for each."""
    pydicom_config.settings.writing_validation_mode = pydicom_config.IGNORE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sound = sound_files(folder)
    warnings.simplefilter("error")  # a remark of numpy about a value is a value that nobody checked
    path = folder / "9001_triton_macula_6x6_octa_oct_r_1.2.3.dcm"
    for data in sound:  # they are sound; and codecs and tables load on first use
        path.write_bytes(data)
        for how in range(3):
            read(str(path), how)
    before = _peak()
    print(json.dumps("ready"), flush=True)
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = mutated(sound, case)
        path.write_bytes(data)
        url = str(path)
        if case % 2:
            url = f"memory://fuzz/{path.name}"
            write_bytes(url, data)
        start = time.perf_counter()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            read(url, case // 2 % 3)
            outcome = "ok"
        except OCTReadError as error:
            outcome = f"named: {error.reason}"
        except Exception as error:  # noqa: BLE001 (any other one is what this looks for)
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
            outcome = f"{type(error).__name__} at {where}: {error}"[:500]
        faulthandler.cancel_dump_traceback_later()
        growth = _peak() - before
        print(json.dumps([case, outcome, time.perf_counter() - start, growth]), flush=True)
        if growth >= LIMIT_BYTES:  # a fresh process, so that the next is measured
            return


# ---- the watching process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What became of a case."""

    case: int
    outcome: str  # ok | named: REASON | the text of another exception | ended it: CODE
    seconds: float
    bytes: int  # growth of the process so far

    @property
    def is_good(self) -> bool:
        named = self.outcome == "ok" or self.outcome.startswith("named: ")
        return named and self.seconds < LIMIT_S and self.bytes < LIMIT_BYTES


def run_cases(cases: Sequence[int], folder: Path, processes: int = 2) -> list[Result]:
    """Results in the order of the cases; those over the time limit once more alone: the machine may stall."""
    parts = [list(cases[i::processes]) for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        folders = [folder / str(i) for i in range(processes)]
        results = {r.case: r for part in pool.map(_watch, parts, folders) for r in part}
    slow = [r.case for r in results.values() if r.seconds >= LIMIT_S]
    results |= {r.case: r for r in _watch(slow, folder / "alone")}
    return [results[case] for case in cases]


def _watch(cases: Sequence[int], folder: Path) -> list[Result]:
    """What a process says of the cases, and another of those after one that ended it."""
    results: list[Result] = []
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.support.dicom_fuzz", str(folder)]
    while remaining := cases[len(results) :]:
        done = subprocess.run(
            command,
            cwd=ROOT,
            input=json.dumps(list(remaining)),
            stdout=subprocess.PIPE,
            text=True,
            timeout=START_S + LIMIT_S * len(remaining),
        )
        ready, *lines = done.stdout.splitlines() or [""]
        assert ready, "the reading process failed at the sound files"
        results += [Result(*json.loads(line)) for line in lines]
        if done.returncode:
            results.append(Result(remaining[len(lines)], f"ended it: {done.returncode}", LIMIT_S, 0))
    return results


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(Path(sys.argv[1]), [int(n) for n in sys.argv[2:]])
    else:
        serve(Path(sys.argv[1]), json.loads(sys.stdin.read()))
