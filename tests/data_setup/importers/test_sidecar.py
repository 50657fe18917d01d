"""The YAML beside a volume: its name, what is wrong in it, and that the manifest agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_setup.readers.faults import RejectReason
from data_setup.readers.sidecar import sidecar_url
from tests.data_setup.importers.reading import SPACING, folder_of, read, reject
from tests.support.import_factory import write_yaml


@pytest.mark.parametrize(
    "sidecar",
    [
        {"spacing": [1, 1, 1]},
        {"spacing_mm": [0.1, 0.1]},
        {"spacing_mm": [0.1, 0.0, 0.1]},
        {"spacing_mm": [0.1, float("nan"), 0.1]},
        {"spacing_mm": "0.1"},
        {"laterality": "both"},
        {"axes": ["D", "H", "H"]},
        {"d_order": "down"},
        {"d_order": ["unknown"]},
        {"bits_stored": 17},
        {"num_frames": True},
        {"value_range": [1, 1]},
        {"files": ""},
    ],
    ids=str,
)
def test_a_wrong_yaml_is_named(tmp_path: Path, sidecar: dict[str, Any]) -> None:
    reason, text = reject(folder_of(tmp_path, **sidecar))
    assert reason == RejectReason.BAD_SIDECAR
    assert "volume.yaml" in text


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "\x00", "!!python/object/apply:os.system [ls]", "{1: 2}"]
)
def test_a_yaml_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    folder = folder_of(tmp_path)
    (folder / "volume.yaml").write_text(text)
    assert reject(folder)[0] == RejectReason.BAD_SIDECAR


def test_what_yaml_and_manifest_say_must_agree(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, laterality="R", device="heidelberg_spectralis", protocol="own", num_frames=12
    )
    read(folder, laterality="R")
    for wrong in ({"laterality": "L"}, {"device": "other"}, {"protocol": "other"}):
        assert reject(folder, **wrong)[0] == RejectReason.HEADER_MISMATCH
    write_yaml(folder / "volume.yaml", spacing_mm=list(SPACING), num_frames=13)
    assert reject(folder)[0] == RejectReason.FRAME_COUNT_MISMATCH
    write_yaml(folder / "volume.yaml", laterality="R")
    assert reject(folder)[0] == RejectReason.MISSING_SPACING
    write_yaml(folder / "volume.yaml", spacing_mm=[1, 1, 1])
    assert reject(folder)[0] == RejectReason.IMPLAUSIBLE_SPACING


def test_names_of_sidecars() -> None:
    assert {sidecar_url(f"gs://b/v1.2/eye{s}") for s in (".nii", ".nii.gz", ".tif", ".ome.tif", ".TIFF")} == {
        "gs://b/v1.2/eye.yaml"
    }
