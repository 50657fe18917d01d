"""data_setup/readers/geometry.py: the frames of a file in order, and every contradiction by its name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.datadict import tag_for_keyword
from pydicom.dataset import Dataset, FileDataset
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless

from data_setup.manifest import Record, unknown_record
from data_setup.protocols import BY_NAME
from data_setup.readers.dicom import OCTHeader, open_volume, read_volume
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.open_record import open_record, peek_record
from tests.data_setup.dicom.reading import assign
from tests.data_setup.importers.reading import refused
from tests.support.dicom_factory import item, measures, rows_down, speckle, steps_along, write_opt
from utils.config.schema import StorageOptions

SPACING = (0.12, 0.0026, 0.03)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # an interleaved scan: the even lines first
COUNT = len(ORDER)
LINES, STEPS = rows_down(COUNT), steps_along(COUNT, 1, SPACING[0])
Edit = Callable[[FileDataset], None]


def content(numbers: Sequence[int] | None = None, stacks: Sequence[str] | None = None) -> Edit:
    """InStackPositionNumber and StackID of every frame."""

    def edit(ds: FileDataset) -> None:
        for index, frame in enumerate(ds.PerFrameFunctionalGroupsSequence):
            one = item()
            if numbers is not None:
                one.InStackPositionNumber = numbers[index]
            if stacks is not None:
                one.StackID = stacks[index]
            frame.FrameContentSequence = [one]

    return edit


def dimensions(rows: Sequence[Sequence[int]], *pointers: str) -> Edit:
    """DimensionIndexValues of every frame, and the attributes that they are said to count."""

    def edit(ds: FileDataset) -> None:
        for frame, row in zip(ds.PerFrameFunctionalGroupsSequence, rows, strict=True):
            frame.FrameContentSequence = [item(DimensionIndexValues=list(row))]
        ds.DimensionIndexSequence = [item(DimensionIndexPointer=tag_for_keyword(p)) for p in pointers]

    return edit


def in_frames(keyword: str, values: Sequence[object], sequence: str = "FrameContentSequence") -> Edit:
    """An attribute of an item of every frame."""

    def edit(ds: FileDataset) -> None:
        for frame, value in zip(ds.PerFrameFunctionalGroupsSequence, values, strict=True):
            setattr(frame, sequence, [item(**{keyword: value})])

    return edit


def directions(rows: Sequence[Sequence[float]]) -> Edit:
    """ImageOrientationPatient of every frame."""

    def edit(ds: FileDataset) -> None:
        for frame, row in zip(ds.PerFrameFunctionalGroupsSequence, rows, strict=True):
            frame.PlaneOrientationSequence = [item(ImageOrientationPatient=list(row))]

    return edit


def shared(**values: Any) -> Edit:
    """Attributes of the shared Pixel Measures item."""

    def edit(ds: FileDataset) -> None:
        for keyword, value in values.items():
            setattr(ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0], keyword, value)

    return edit


def reject(path: str) -> tuple[RejectReason, str]:
    with pytest.raises(OCTReadError) as caught:
        read_volume(path)
    return caught.value.reason, caught.value.detail


def chosen(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [values[i] for i in order]


def at(level: str, **values: Any) -> Edit:
    """Attributes of a level of the header: root, or the item of a sequence of shared or of all frames."""

    def edit(ds: FileDataset) -> None:
        place, _, sequence = level.partition(" ")
        groups = {"root": [ds], "shared": ds.SharedFunctionalGroupsSequence}
        groups |= {
            "frames": ds.PerFrameFunctionalGroupsSequence,
            "half": ds.PerFrameFunctionalGroupsSequence[4:],
        }
        for group in groups[place]:
            if sequence and sequence not in group:
                setattr(group, sequence, [item()])
            for keyword, value in values.items():
                setattr(getattr(group, sequence)[0] if sequence else group, keyword, value)

    return edit


def region(code: str = "", meaning: str = "", of: str = "81745001") -> dict[str, list[Dataset]]:
    """An AnatomicRegionSequence of a code with one modifier."""
    modifiers = [item(CodeValue=code, CodeMeaning=meaning)]
    return {"AnatomicRegionSequence": [item(CodeValue=of, AnatomicRegionModifierSequence=modifiers)]}


def steps(mm: float) -> Edit:
    """ImagePositionPatient of every frame."""
    return in_frames("ImagePositionPatient", [[0, i * mm, 0] for i in range(COUNT)], "PlanePositionSequence")


def numbered(ds: FileDataset) -> None:
    """InStackPositionNumber of every frame, beside what its item has."""
    for index, frame in enumerate(ds.PerFrameFunctionalGroupsSequence, start=1):
        frame.FrameContentSequence[0].InStackPositionNumber = index


def drop(keyword: str) -> Edit:
    return lambda ds: delattr(ds, keyword)


def all_of(*edits: Edit) -> Edit:
    return lambda ds: [edit(ds) for edit in edits] and None


def second(level: str, **values: Any) -> Edit:
    """Another item with these attributes behind the first, which has others."""

    def edit(ds: FileDataset) -> None:
        place, sequence = level.split()
        groups = [*ds.SharedFunctionalGroupsSequence, *ds.PerFrameFunctionalGroupsSequence]
        for group in groups[:1] if place == "shared" else groups[1:]:
            setattr(group, sequence, [*group.get(sequence, []), item(**values)])

    return edit


def another_shared_group(**values: Any) -> Edit:
    """A second item of the whole shared sequence, with these Pixel Measures."""

    def edit(ds: FileDataset) -> None:
        groups = [*ds.SharedFunctionalGroupsSequence, item(PixelMeasuresSequence=[item(**values)])]
        ds.SharedFunctionalGroupsSequence = groups

    return edit


# ---- the order of the frames ------------------------------------------------------------------------------


@pytest.mark.parametrize("upwards", [False, True])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, JPEG2000Lossless], ids=["native", "j2k"])
@pytest.mark.parametrize("stated", ["positions", "references", "both", "numbers"])
def test_interleaved_frames_give_the_ordered_volume(
    tmp_path: Path, stated: str, syntax: str, upwards: bool
) -> None:
    def write(name: str, order: Sequence[int]) -> tuple[np.ndarray, OCTHeader]:
        path = write_opt(
            tmp_path,
            speckle(COUNT)[order],
            name=name,
            syntax=syntax,
            edit=content([n + 1 for n in order]) if stated == "numbers" else None,
            positions=chosen(STEPS, order) if stated in ("positions", "both") else None,
            references=chosen(LINES, order) if stated in ("references", "both") else None,
        )
        volume = read_volume(path)
        return volume.voxels, volume.header

    ordered = list(range(COUNT))[:: -1 if upwards else 1]
    mixed = ORDER[:: -1 if upwards else 1]
    (voxels, header), (again, scrambled) = write("ordered.dcm", ordered), write("mixed.dcm", mixed)
    np.testing.assert_array_equal(voxels, speckle(COUNT))
    np.testing.assert_array_equal(again, voxels)
    assert scrambled.orientation_source == header.orientation_source
    assert scrambled.spacing_mm == header.spacing_mm


def test_positions_that_are_all_the_same_state_nothing(tmp_path: Path) -> None:
    """So are numbers: placeholders order nothing, and the file is read as one without them."""
    path = write_opt(tmp_path, speckle(), positions=[[0, 0, 0]] * 6, edit=content([1] * 6))
    volume = read_volume(path)
    np.testing.assert_array_equal(volume.voxels, speckle())
    assert volume.header.orientation_source == "unknown"


def test_coordinates_rounded_to_pixels_are_even(tmp_path: Path) -> None:
    for step in (2.4, 0.7):
        lines = [[round(100 + i * step), 0, round(100 + i * step), 500] for i in range(20)]
        volume = read_volume(write_opt(tmp_path, speckle(20), references=lines))
        np.testing.assert_array_equal(volume.voxels, speckle(20))


# ---- contradictions ---------------------------------------------------------------------------------------

VOLUME, MISMATCH = RejectReason.NOT_A_VOLUME, RejectReason.HEADER_MISMATCH
MISSING, RANGE = RejectReason.FRAME_COUNT_MISMATCH, RejectReason.IMPLAUSIBLE_SPACING
PIXELS = RejectReason.UNSUPPORTED_PIXELS
ANATOMY, MEASURES = "FrameAnatomySequence", "PixelMeasuresSequence"
VALUES, PLANES = "PixelValueTransformationSequence", "PlaneOrientationSequence"
LOCATION, TAKEN = "OphthalmicFrameLocationSequence", "FrameAcquisitionDateTime"
DISTANCE = at(f"shared {MEASURES}", SpacingBetweenSlices=0.12)
BACK = {"ImageOrientationPatient": [-1, 0, 0, 0, 0, -1]}
PLANE, FRAME, CONTENT = "PlanePositionSequence", "FrameContentSequence", content(range(1, 9))
NINE, ONES = {"ImagePositionPatient": [0, 9, 0]}, "1, 0, 1 (per_frame)"
LINE, CURVED = {"ReferenceCoordinates": [7, 0, 7, 500]}, {"OphthalmicImageOrientation": "NONLINEAR"}
GAP = [0, 1, 2, 3, 4, 5, 6, 10]
TIME, PLACE, OFFSET = "TemporalPositionIndex", "InStackPositionNumber", "TemporalPositionTimeOffset"
VISITS = [(time, place) for place in range(1, 5) for time in (1, 2)]
BY_NUMBER = content([n + 1 for n in ORDER])
BY_INDEX = dimensions([(1, n + 1) for n in ORDER], "StackID", PLACE)
LOOSE = "UnassignedSharedConvertedAttributesSequence"
RIGHT, LEFT = (1, 0, 0, 0, 0, -1), (-1, 0, 0, 0, 0, -1)
TO_LEFT = [[a, d, c, b] for a, b, c, d in LINES]


@pytest.mark.parametrize(
    ("options", "reason", "words"),
    [
        (content(stacks=list("11112222")), VOLUME, "2 stacks"),
        (assign(InConcatenationTotalNumber=4, InConcatenationNumber=1), VOLUME, "one of 4 parts"),
        (assign(ConcatenationUID="1.2.9"), VOLUME, "(ConcatenationUID) that does not say 1 of 1"),
        (assign(InConcatenationNumber=2), VOLUME, "InConcatenationNumber"),
        (assign(ConcatenationFrameOffsetNumber=8), VOLUME, "ConcatenationFrameOffsetNumber"),
        (assign(SOPInstanceUIDOfConcatenationSource="1.2.9"), VOLUME, "ConcatenationSource"),
        (assign(InConcatenationTotalNumber=1, InConcatenationNumber=2), VOLUME, "1 of 1"),
        (assign(InConcatenationTotalNumber=1, ConcatenationFrameOffsetNumber=8), VOLUME, "1 of 1"),
        (content(range(9, 17)), VOLUME, "B-scans 9 to 16 of a stack"),
        ({"edit": content(range(9, 17)), "positions": STEPS}, VOLUME, "B-scans 9 to 16 of a stack"),
        ({"edit": content([1, 1, 2, 2, 3, 3, 4, 4]), "positions": STEPS}, VOLUME, "4 places for 8 frames"),
        (dimensions([(1, n) for n in range(9, 17)]), VOLUME, "B-scans 9 to 16 of a stack"),
        (dimensions(VISITS), VOLUME, "2 places for 8 frames"),
        ({"edit": dimensions(VISITS, TIME, PLACE), "positions": STEPS}, VOLUME, "neither stack nor place"),
        (dimensions([(2, n) for n in range(1, 9)], TIME, PLACE), VOLUME, TIME),
        (dimensions([(n, 1) for n in range(1, 9)], "EffectiveEchoTime", PLACE), VOLUME, "Echo"),
        (dimensions(VISITS, "StackID", PLACE), VOLUME, "2 stacks"),
        (dimensions([(1, n + 1) for n in GAP], "StackID", PLACE), MISSING, "DimensionIndexValues"),
        (in_frames(TIME, [1, 2] * 4), VOLUME, TIME),
        ({"edit": in_frames(TIME, [2] * 8), "positions": STEPS}, VOLUME, TIME),
        (in_frames(OFFSET, [0.0, 9.0] * 4, "TemporalPositionSequence"), VOLUME, OFFSET),
        (assign(NumberOfTemporalPositions=2), VOLUME, "NumberOfTemporalPositions"),
        (assign(TemporalPositionIdentifier=2), VOLUME, "TemporalPositionIdentifier"),
        (assign(NumberOfTimeSlices=2), VOLUME, "NumberOfTimeSlices"),
        (in_frames(TAKEN, ["20240131101010", "20240201101010"] * 4), VOLUME, "B-scans of 2 days"),
        (in_frames(TAKEN, ["20240131101010", "20240131101011"] * 4), None, ""),
        (content(GAP), MISSING, "InStackPositionNumber"),
        (content([1, 2, 3, 4, 4, 5, 6, 7]), MISSING, "InStackPositionNumber"),
        ({"positions": chosen(steps_along(11, 1, 0.12), GAP)}, MISSING, "steps of 0.12 to 0.48 mm"),
        ({"references": chosen(rows_down(11), GAP)}, MISSING, "steps of 10 to 40 pixels"),
        ({"positions": chosen(STEPS, [0, 0, 1, 1, 2, 2, 3, 3])}, VOLUME, "one place"),
        ({"references": chosen(LINES, [0, 1, 2, 3, 0, 1, 2, 3])}, VOLUME, "one place"),
        ({"positions": [[0, 0.12 * i + 0.04 * (i % 2), 0] for i in range(8)]}, MISSING, "two scans"),
        ({"positions": [[0, np.sin(i), np.cos(i)] for i in range(8)]}, VOLUME, "one line"),
        ({"positions": STEPS, "references": chosen(LINES, ORDER)}, MISMATCH, "another order"),
        ({"positions": STEPS, "edit": BY_NUMBER}, MISMATCH, "of InStackPositionNumber, found another order"),
        ({"references": LINES, "edit": BY_NUMBER}, MISMATCH, "ReferenceCoordinates"),
        ({"positions": STEPS, "edit": content(range(8, 0, -1))}, None, ""),  # from the other end
        ({"edit": BY_INDEX, "positions": STEPS}, MISMATCH, "of DimensionIndexValues, found another order in"),
        (all_of(BY_INDEX, numbered), MISMATCH, "Number, found another order in DimensionIndexValues"),
        ({"references": [*LINES[:3], TO_LEFT[3], *LINES[4:]]}, VOLUME, "B-scan 4"),
        ({"references": TO_LEFT}, MISMATCH, "right to left"),
        (directions([*[RIGHT] * 3, LEFT, *[RIGHT] * 4]), VOLUME, "B-scan 4"),
        (directions([*[RIGHT] * 6, (1, 0, 0, 0, 0, 1), RIGHT]), VOLUME, "B-scan 7"),
        (directions([LEFT] * 8), MISMATCH, "right to left"),
        (directions([(1, 0, 0, 1, 0, 0)] * 8), MISMATCH, "at right angles"),
        (directions([(0, 0, 0, 0, 0, 0)] * 8), None, ""),  # placeholders
        (assign(PresentationLUTShape="INVERSE"), MISMATCH, "INVERSE (PresentationLUTShape)"),
        (assign(PresentationLUTShape="IDENTITY"), None, ""),
        (drop("PhotometricInterpretation"), MISMATCH, "a complete pixel description"),
        ({"positions": steps_along(COUNT, 1, 0.2)}, MISMATCH, "5 %"),
        ({"positions": steps_along(COUNT, 2, 0.127)}, MISMATCH, "5 %"),
        ({"spacing": (0.12, 0.0117, 0.0039)}, RANGE, "axial"),
        # one fact at two levels; the file's own values: R, 0.12, 0.0026, 0.03 mm in the shared group
        (at("root", Laterality="L"), MISMATCH, "R (ImageLaterality) and L (Laterality)"),
        (at(f"shared {ANATOMY}", FrameLaterality="L"), MISMATCH, "R (ImageLaterality) and L"),
        (at(f"half {ANATOMY}", FrameLaterality="L"), MISMATCH, "R (ImageLaterality) and L"),
        (at(f"frames {ANATOMY}", FrameLaterality="B"), MISMATCH, "R (ImageLaterality) and both eyes"),
        (at("root", ImageLaterality="B"), MISMATCH, "found both eyes (ImageLaterality)"),
        (at(f"half {ANATOMY}", FrameLaterality="U"), MISMATCH, "and another value (FrameLaterality"),
        (at(f"half {ANATOMY}", FrameLaterality="UNKNOWN"), None, ""),
        (at("root", ImageLaterality="U"), None, ""),  # the only one, and no eye
        (
            lambda ds: ds.add_new("AnatomicRegionSequence", "LO", "Retina"),
            None,
            "",
        ),  # text where a sequence belongs
        (at("root", **region("7771000")), MISMATCH, "and L (AnatomicRegionMod"),
        (at("root", **region("X", "left")), MISMATCH, "and L (AnatomicRegionMod"),
        (at("root", **region("24028007")), None, ""),
        (at("root", **region("260521003", "Internal")), None, ""),
        (at("root", **region(of="8966001")), MISMATCH, "L (AnatomicRegionS"),
        (at(f"half {ANATOMY}", **region("G-A102")), MISMATCH, "both eyes (AnatomicRegionModif"),
        (at(f"shared {LOOSE}", FrameLaterality="L"), MISMATCH, "and L (FrameLaterality in Shared"),
        (at("root", PixelSpacing=[0.0039, 0.03]), MISMATCH, "(shared) and 0.0039 mm (root)"),
        (at(f"frames {MEASURES}", PixelSpacing=[0.0026, 0.04]), MISMATCH, "(per_frame)"),
        (at(f"half {MEASURES}", PixelSpacing=[0.0026, 0.04]), MISMATCH, "(per_frame)"),
        (at(f"frames {MEASURES}", SliceThickness=0.3), MISMATCH, "SliceThickness"),
        (all_of(DISTANCE, at("root", SpacingBetweenSlices=0.3)), MISMATCH, "SpacingBetweenSlices"),
        (all_of(DISTANCE, steps(0.2)), MISMATCH, "SpacingBetweenSlices within 5 %"),
        (all_of(at("root", RescaleSlope=0.9), at(f"shared {VALUES}", RescaleSlope=1)), MISMATCH, "0.9"),
        (at(f"half {VALUES}", RescaleSlope=0.5), MISMATCH, "1 and 0 (per_frame)"),
        (at("root", ModalityLUTSequence=[item()]), PIXELS, "ModalityLUTSequence"),
        (at(f"shared {VALUES}", ModalityLUTSequence=[item()]), PIXELS, "ModalityLUTSequence"),
        # several items where one is allowed, and one fact in the shared group and in the frames
        (second(f"shared {MEASURES}", PixelSpacing=[0.0026, 0.04]), MISMATCH, "0.04 (shared)"),
        (second(f"shared {MEASURES}", SpacingBetweenSlices=0.2), MISMATCH, "none (shared)"),
        (another_shared_group(PixelSpacing=[0.0026, 0.04]), MISMATCH, "0.04 (shared)"),
        (all_of(*(second(f"shared {VALUES}", RescaleSlope=n) for n in (1, 0.5))), MISMATCH, "1 (shared) and"),
        ({"edit": second(f"frame {PLANE}", **NINE), "positions": STEPS}, MISMATCH, f"{ONES} and 0, 9, 0 (p"),
        ({"edit": at(f"shared {PLANE}", **NINE), "positions": STEPS}, MISMATCH, f"9, 0 (shared) and {ONES}"),
        ({"edit": second(f"frame {LOCATION}", **LINE), "references": LINES}, MISMATCH, "ReferenceCoord"),
        ({"edit": at(f"shared {LOCATION}", **CURVED), "references": LINES}, MISMATCH, "a text (shared) and"),
        (all_of(CONTENT, second(f"frame {FRAME}", InStackPositionNumber=9)), MISMATCH, "1 (per_frame) and 9"),
        (all_of(CONTENT, at(f"shared {FRAME}", StackID="2")), None, ""),
        (all_of(content(stacks="11111111"), at(f"shared {FRAME}", StackID="2")), MISMATCH, "StackID"),
        (all_of(directions([RIGHT] * 8), at(f"shared {PLANES}", **BACK)), MISMATCH, "ImageOrientation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_rejects(
    tmp_path: Path, options: dict[str, Any] | Edit, reason: RejectReason | None, words: str
) -> None:
    more = {"edit": options} if callable(options) else options
    path = write_opt(tmp_path, speckle(COUNT), name="eye.dcm", **more)
    if reason is None:
        read_volume(path)
    else:
        refused(reject(path), reason, words)


@pytest.mark.parametrize(
    ("shape", "spacing", "words"),
    [
        ((60, 8, 8), (0.5, 0.0026, 0.03), "up to 20 mm along D, found 60 x 0.5 mm = 30 mm (shared)"),
        ((8, 200, 8), (0.12, 0.04, 0.06), "up to 6 mm along H"),
        ((8, 8, 60), (0.12, 0.0026, 0.4), "up to 20 mm along W"),
    ],
)
def test_a_field_that_no_device_scans_is_a_reject(
    tmp_path: Path, shape: tuple[int, int, int], spacing: tuple[float, float, float], words: str
) -> None:
    path = write_opt(tmp_path, speckle(*shape), name="eye.dcm", spacing=spacing)
    row, size = unknown_record(path, "eye.dcm"), Path(path).stat().st_size
    for look in (lambda: list(open_record(row)[1]), lambda: peek_record(row, size, StorageOptions())):
        with pytest.raises(OCTReadError) as caught:
            look()
        assert (caught.value.reason, words in caught.value.detail) == (RANGE, True), caught.value.detail


def test_what_says_one_of_one_is_a_whole_volume(tmp_path: Path) -> None:
    """As the converters of AI-READI write it, some with the attributes empty."""
    for total, number, offset, time in ((1, 1, 0, 1), (None, None, None, None), (1, None, None, None)):

        def edit(ds: FileDataset, row: tuple[Any, ...] = (total, number, offset, time)) -> None:
            ds.InConcatenationTotalNumber, ds.InConcatenationNumber, ds.ConcatenationFrameOffsetNumber = row[
                :3
            ]
            ds.ConcatenationUID = "1.2.9" if row[0] else None
            ds.NumberOfTemporalPositions = row[3]
            dimensions([(1, 1, n) for n in range(1, 9)], TIME, "StackID", PLACE)(ds)
            for frame in ds.PerFrameFunctionalGroupsSequence:
                frame.FrameContentSequence[0].TemporalPositionIndex = row[3]

        np.testing.assert_array_equal(
            read_volume(write_opt(tmp_path, speckle(COUNT), edit=edit)).voxels, speckle(COUNT)
        )


def test_dimension_indices_order_frames_that_nothing_else_orders(tmp_path: Path) -> None:
    path = write_opt(tmp_path, speckle(COUNT)[ORDER], edit=BY_INDEX)
    np.testing.assert_array_equal(read_volume(path).voxels, speckle(COUNT))


def test_five_percent_between_thickness_and_positions_are_allowed(tmp_path: Path) -> None:
    header = read_volume(write_opt(tmp_path, speckle(COUNT), positions=steps_along(COUNT, 1, 0.125))).header
    assert (header.spacing_mm[0], header.spacing_source) == (0.12, "shared")


def test_the_distance_is_spacing_between_slices_not_their_thickness(tmp_path: Path) -> None:
    """SliceThickness is the nominal width of a B-scan (PS3.3 C.7.6.2); the other one is the distance."""
    edit = shared(SpacingBetweenSlices=0.12, SliceThickness=0.05)
    for positions in (None, STEPS):
        header = read_volume(write_opt(tmp_path, speckle(COUNT), edit=edit, positions=positions)).header
        assert header.spacing_mm[0] == 0.12

    def per_frame(ds: FileDataset) -> None:
        for frame in ds.PerFrameFunctionalGroupsSequence:
            frame.PixelMeasuresSequence = measures((0.05, *SPACING[1:]))
            frame.PixelMeasuresSequence[0].SpacingBetweenSlices = 0.12

    header = read_volume(write_opt(tmp_path, speckle(COUNT), where="none", edit=per_frame)).header
    assert header.spacing_mm[0] == 0.12


UNKNOWN = at("root", ManufacturerModelName="Model X")
LISTED = replace(unknown_record("eye.dcm", "eye.dcm"), spacing_mm=SPACING)
KEPT_EMPTY = at("root", InConcatenationTotalNumber=None, ConcatenationFrameOffsetNumber=None)


@pytest.mark.parametrize(
    ("edit", "record", "distance", "source"),
    [
        (UNKNOWN, None, None, "SliceThickness 0.12, only the thickness of a B-scan"),
        (UNKNOWN, LISTED, 0.12, "manifest"),
        (all_of(UNKNOWN, KEPT_EMPTY), None, 0.12, "shared"),  # AI-READI's converters write it so
        (all_of(UNKNOWN, steps(0.09)), None, 0.09, "frame_positions"),  # B-scans that overlap
        (all_of(UNKNOWN, at("root", SpacingBetweenSlices=0.09)), None, 0.09, "root"),
        (all_of(UNKNOWN, at(f"frames {MEASURES}", SpacingBetweenSlices=0.09)), None, 0.09, "per_frame"),
    ],
)
def test_the_thickness_of_a_b_scan_is_no_distance(
    tmp_path: Path, edit: Edit, record: Record | None, distance: float | None, source: str
) -> None:
    path = write_opt(tmp_path, speckle(COUNT), name="eye.dcm", edit=edit)
    if distance is None:
        refused(reject(path), RejectReason.MISSING_SPACING, source)
    else:
        header, _ = open_volume(path, None, record)
        assert (header.spacing_mm[0], header.spacing_source) == (distance, source)


@pytest.mark.parametrize(
    ("name", "start_of_text"),
    [
        ("maestro2_3d_wide_oct_oct", "0.07086614173"),
        ("maestro2_3d_macula_oct_oct", "0.04724409449"),
        ("maestro2_macula_6x6_octa_oct", "0.0166"),
        ("triton_3d_radial_oct_oct", "0.03"),
        ("triton_macula_6x6_octa_oct", "0.01875"),
        ("triton_macula_12x12_octa_oct", "0.0234375"),
    ],
)
def test_nominal_distances_are_those_by_which_the_converters_know_a_protocol(
    name: str, start_of_text: str
) -> None:
    """AI-READI's converters sort Topcon's exports by the text of SliceThickness (aireadi_retinal_imaging)."""
    assert f"{BY_NAME[name].spacing_mm[0]:.11f}".startswith(start_of_text)
