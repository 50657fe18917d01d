"""The imaging protocols of AI-READI: what a file name, a folder or ProtocolName says about a volume.

One table, used by the manifest (device, protocol and region from the path), the reader (the nominal field
where a device writes a wrong B-scan distance) and the phantom (names, shapes and spacings that it imitates).
Source: the public AI-READI documentation of the retinal OCT folder (structural_oct), versions 2 and 3.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

Shape = tuple[int, int, int]  # (D, H, W) = (frames, rows, columns)
Triple = tuple[float, float, float]  # the same of lengths in mm


@dataclass(frozen=True)
class Protocol:
    """One scan protocol. Shapes are (frames, rows, columns) = (D, H, W); lengths are mm in that order."""

    name: str  # file-name part, version 3
    name_v2: str | None  # file-name part, versions 1 and 2; None: not in those versions
    device: str  # folder under retinal_oct/structural_oct
    region: str  # the manifest's anatomic_region
    shape: Shape
    spacing_mm: Triple  # nominal (B-scan distance, axial, lateral)
    is_volume: bool = True  # False: radial and circle scans, which no D axis orders

    @property
    def protocol_name(self) -> str:
        """The DICOM ProtocolName text, as the AI-READI converters write it ('triton macula 6x6 octa')."""
        return self.name.removesuffix("_oct").replace("_", " ") if self.name_v2 != self.name else self.name

    @property
    def field_mm(self) -> Triple:
        """Nominal scanned field in mm: (frames - 1) B-scan distances, rows and columns times spacing."""
        frames, rows, columns = self.shape
        return ((frames - 1) * self.spacing_mm[0], rows * self.spacing_mm[1], columns * self.spacing_mm[2])


# manufacturer and model as the manifest spells them
DEVICES: dict[str, tuple[str, str]] = {
    "heidelberg_spectralis": ("Heidelberg", "Spectralis"),
    "topcon_maestro2": ("Topcon", "Maestro2"),
    "topcon_triton": ("Topcon", "Triton"),
    "zeiss_cirrus": ("Zeiss", "Cirrus"),
}

_S, _M, _T, _C = DEVICES
# fmt: off
PROTOCOLS: tuple[Protocol, ...] = (
    Protocol("spectralis_onh_rc_hr_oct_oct", "spectralis_onh_rc_hr_oct", _S,
             "Optic Disc", (27, 496, 768), (0.12, 0.003872, 0.012), False),
    Protocol("spectralis_ppol_mac_hr_oct_oct", "spectralis_ppol_mac_hr_oct", _S,
             "Macula", (61, 496, 768), (0.125, 0.003872, 0.012)),
    Protocol("spectralis_mac_20x20_hs_octa_oct", None, _S,
             "Macula, 20 x 20", (512, 496, 512), (0.0116, 0.003872, 0.0116)),
    Protocol("maestro2_3d_wide_oct_oct", "maestro2_3d_wide_oct", _M,
             "Wide Field", (128, 885, 512), (9 / 127, 0.0026, 12 / 512)),
    Protocol("maestro2_3d_macula_oct_oct", "maestro2_3d_macula_oct", _M,
             "Macula", (128, 885, 512), (6 / 127, 0.0026, 6 / 512)),
    Protocol("maestro2_macula_6x6_octa_oct", "maestro2_macula_6x6_oct", _M,
             "Macula, 6 x 6", (360, 885, 360), (6 / 360, 0.0026, 6 / 360)),
    Protocol("triton_3d_radial_oct_oct", "triton_3d_radial_oct", _T,
             "Optic Disc", (256, 992, 512), (9 / 256, 0.0026, 12 / 512)),
    Protocol("triton_macula_6x6_octa_oct", "triton_macula_6x6_oct", _T,
             "Macula, 6 x 6", (320, 992, 320), (6 / 320, 0.0026, 6 / 320)),
    Protocol("triton_macula_12x12_octa_oct", "triton_macula_12x12_oct", _T,
             "Macula, 12 x 12", (512, 992, 512), (12 / 512, 0.0026, 12 / 512)),
    Protocol("cirrus_mac_oct_oct", "cirrus_mac_oct_oct", _C,
             "Macula", (128, 1024, 512), (6 / 127, 2 / 1024, 6 / 512)),
    Protocol("cirrus_disc_oct_oct", "cirrus_disc_oct_oct", _C,
             "Optic Disc", (200, 1024, 200), (6 / 200, 2 / 1024, 6 / 200)),
    Protocol("cirrus_macula_6x6_octa_oct", "cirrus_macula_6x6_octa_oct", _C,
             "Macula, 6 x 6", (350, 1024, 350), (6 / 350, 2 / 1024, 6 / 350)),
    Protocol("cirrus_disc_6x6_octa_oct", "cirrus_disc_6x6_octa_oct", _C,
             "Optic Disc, 6 x 6", (350, 1024, 350), (6 / 350, 2 / 1024, 6 / 350)),
)
# fmt: on

# (least, most) mm of D, H, W in common rasters that are none of AI-READI's. Heidelberg's commonest: 25 lines
# over 20 x 20 degrees and 19 over 20 x 15, .24 to .25 apart by the length of the eye, and 1,536 A-scans over
# 30 degrees; 320 x 320 A-scans over 3 x 3 mm for angiography
OTHER_RASTERS_MM = ((3 / 320, 0.25), (0.0019, 0.0039), (0.0055, 0.03))

BY_NAME: dict[str, Protocol] = {name: p for p in PROTOCOLS for name in (p.name_v2, p.name) if name}


def device_of_path(path: str) -> str | None:
    """The device folder in a manifest filepath, or None when no known device folder is in it."""
    return next((part for part in PurePosixPath(path).parts if part in DEVICES), None)


def protocol_of_path(path: str) -> Protocol | None:
    """The protocol in a file name `{pid}_{name}_{l|r}_{uid}.dcm` (v2 or v3 name), or None when unknown."""
    _, _, rest = PurePosixPath(path).name.partition("_")
    matches = [name for name in BY_NAME if rest.startswith(name + "_")]
    return BY_NAME[max(matches, key=len)] if matches else None


def protocol_of_text(protocol_name: str) -> Protocol | None:
    """The protocol behind a DICOM ProtocolName text, or None when it is not a known one."""
    text = protocol_name.strip().lower()
    return next((p for p in PROTOCOLS if text == p.protocol_name), None)
