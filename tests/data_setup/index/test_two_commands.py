"""Any tree becomes a store in two commands, on a disk, in a bucket, and as the page has them."""

import io
import os
import re
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydicom.dataset import FileDataset
from pydicom.uid import RLELossless

from data_setup import prepare
from data_setup.index import cli
from data_setup.store.reader import PreparedStore
from tests.data_setup.importers.reading import GRID, SPACING
from tests.data_setup.index.trees import index, run_prepare, table, write_dicoms, write_image_folders
from tests.support.cloud_servers import BUCKET, gcs_server
from tests.support.dicom_factory import rows_down, speckle, write_opt
from tests.support.import_factory import write_heyex_body, write_heyex_series, write_images, write_yaml
from tests.support.makers_factory import write_vol
from tests.support.pipeline_factory import ROOT
from utils import storage
from utils.config.schema import StorageOptions


def test_any_tree_becomes_a_store_in_two_commands(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line of YAML above all folders of images says their spacing."""
    write_yaml(tree / "images" / "volume.yaml", spacing_mm=list(SPACING), device="bioptigen")
    assert index(tree) == 0
    rows = table(tree / "manifest.tsv")
    counts = pd.Series([row["kind"] for row in rows.values()]).value_counts().to_dict()
    assert counts == {"DICOM": 8, "images": 6, "Heidelberg XML": 2, "NIfTI": 1, "TIFF": 1}
    one = rows["images/2/visit1/OS"]
    assert (one["person_id"], one["laterality"], one["device"]) == ("2", "L", "bioptigen")
    assert (one["number_of_frames"], one["height"], one["width"]) == ("6", "40", "36")
    assert rows["dicom/export1/IM003L"]["device"] == "optovue_avanti"
    assert {row["spacing_mm"] for row in rows.values()} == {"0.12, 0.0026, 0.03"}
    left_out = table(tree / "left_out.tsv")
    assert {path: row["reason"] for path, row in left_out.items()} == {"eye.e2e": "corrupt_file"}
    text = capsys.readouterr().out
    assert f"{tree}: 18 volumes of 11 people" in text
    assert "missing: no spacing" not in text
    assert "python -m data_setup.prepare --config" in text
    store = run_prepare(tree, tmp_path / "store")
    assert store.index.status.tolist() == ["kept"] * 18
    assert store.index.groupby("person_id").split.nunique().max() == 1
    assert set(store.index.split) == {"train", "val", "test"}
    sources = store.index.set_index("path").spacing_source
    assert sources["images/0/visit1/OD"] == "sidecar"
    assert sources["heyex/bob/a.xml"] == "frame_positions"
    ages = dict(zip(store.index.path, store.index.age, strict=True))
    assert ages["dicom/export0/IM000L"] == 61
    assert np.isnan(ages["images/0/visit1/OD"])


def test_a_tree_in_a_bucket_gets_the_tables_of_the_disk_and_the_printed_command_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcsfs over HTTP; the words after `next:` as they stand, but for the grid."""
    for name in [n for n in os.environ if n.startswith(("GOOGLE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    bucket, tree = f"gs://{BUCKET}/scans", tmp_path / "tree"
    write_dicoms(tree / "dicom", range(1))
    write_heyex_series(tree / "heyex" / "ann" / "5DD3.xml", speckle(4, 24, 24, seed=50), SPACING)
    write_images(tree / "images" / "2001" / "OS", speckle(4, 24, 24, seed=51))
    write_yaml(tree / "images" / "volume.yaml", spacing_mm=list(SPACING), device="bioptigen")
    write_vol(tree / "vol" / "3001" / "eye.vol", speckle(4, 24, 24, seed=52) / np.float32(255), SPACING)
    (tree / "eye.e2e").write_bytes(b"CMDb" + bytes(80))
    with gcs_server() as endpoint:
        options = StorageOptions(endpoint_url=endpoint)
        for path in (p for p in tree.rglob("*") if p.is_file()):
            storage.write_bytes(f"{bucket}/{path.relative_to(tree)}", path.read_bytes(), options)
        assert index(tree) == 0
        on_disk = capsys.readouterr().out
        assert index(bucket, "--endpoint-url", endpoint) == 0
        in_bucket = capsys.readouterr().out
        for name in ("manifest.tsv", "participants.tsv", "left_out.tsv"):
            copy = storage.read_bytes(f"{bucket}/{name}", options)
            assert copy.replace(bucket.encode(), str(tree).encode()) == (tree / name).read_bytes()
        labels = io.BytesIO(storage.read_bytes(f"{bucket}/labels.parquet", options))
        pd.testing.assert_frame_equal(pd.read_parquet(labels), pd.read_parquet(tree / "labels.parquet"))
        *same, line = in_bucket.replace(bucket, str(tree)).splitlines()
        assert same == on_disk.splitlines()[:-1]
        words = shlex.split(line.replace(str(tree), bucket))
        assert words[:4] == ["next:", "python", "-m", "data_setup.prepare"]
        assert prepare.main([*words[4:], "--workers", "0", *GRID]) == 0
        store, disk = PreparedStore.open(f"{bucket}_store", options), run_prepare(tree, tmp_path / "disk")
    assert store.index.status.tolist() == ["kept"] * 5
    columns = ["path", "spacing_source", "checksum"]
    pd.testing.assert_frame_equal(store.index[columns], disk.index[columns])


def test_scans_with_one_uid_are_told_apart_by_their_voxels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An anonymiser that gave one UID to all; a copy under another id; a damaged first copy of a scan."""
    root, store = tmp_path / "tree", tmp_path / "store"

    def edit(ds: FileDataset, patient: str) -> None:
        ds.PatientID, ds.PatientName = patient, ""

    for person, seed in {"1": 1, "2": 2, "3": 3, "4": 1, "5": 3}.items():
        options = {"spacing": SPACING, "references": rows_down(6), "edit": partial(edit, patient=person)}
        write_opt(root / person, speckle(seed=seed), name="eye.dcm", syntax=RLELossless, **options)
    cut = root / "3" / "eye.dcm"  # only decoding shows it
    cut.write_bytes(cut.read_bytes().replace(cut.read_bytes()[-900:], bytes(900)))
    assert index(root, "--keep-ids") == 0
    (root / "participants.tsv").unlink()
    assert len(run_prepare(root, store, "data.max_reject_fraction=0.5").index) == 5
    text = capsys.readouterr().out
    listed = PreparedStore.open(str(store)).index.set_index("person_id")
    assert listed.status.drop("3").to_dict() == {"1": "kept", "2": "kept", "4": "duplicate_row", "5": "kept"}
    assert listed.status["3"] not in ("kept", "duplicate_row")
    assert set(listed.sop_instance_uid[["1", "2", "5"]]) == {""}
    voxels = "found the SOPInstanceUID and the voxels of '1/eye.dcm', of another person, 1"
    doubt = "1 scans are of two people by one SOPInstanceUID: 1/eye.dcm of 1 and 2/eye.dcm of 2"
    assert doubt in text
    assert f"left out, the same scan again: 4/eye.dcm: expected another scan, {voxels}" in text
    assert "warning: one SOPInstanceUID, other voxels: 1/eye.dcm, 2/eye.dcm, 5/eye.dcm: each is" in text
    manifest = root / "manifest.tsv"
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:3]))
    (root / "2" / "eye.dcm").unlink()
    assert len(run_prepare(root, tmp_path / "other").index) == 1
    gone = "2/eye.dcm: expected its file, found none, and its SOPInstanceUID in '1/eye.dcm'\n"
    assert f"left out, the same scan again: {gone}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["DICOM", "Heidelberg XML", "images"])
def test_the_commands_of_the_page_make_a_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/start/folder.md as it stands, on a tree of one kind; the folder and the grid are the test's."""
    root, store = tmp_path / "own", tmp_path / "store"
    if kind == "DICOM":
        write_dicoms(root, range(3))
    elif kind == "images":
        write_image_folders(root, range(3))
        write_yaml(root / "volume.yaml", spacing_mm=list(SPACING))
    else:
        for n, write in enumerate((write_heyex_series, write_heyex_body) * 2):
            write(root / f"patient{n}" / "eye.xml", speckle(seed=n), SPACING)
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "start" / "folder.md").read_text()
    block = re.search(r"```\n(python -m data_setup\.index .*?)```", page, re.DOTALL)
    assert block
    assert block[0] in (ROOT / "README.md").read_text().split("## Start here")[1].split("\n## ")[0]
    commands = (
        re.sub(r"\\\n\s*", "", block[1]).replace("/data/own", str(root)).replace("/data/store", str(store))
    )
    words = [shlex.split(line)[2:] for line in commands.splitlines()]
    assert [line[0] for line in words] == ["data_setup.index", "data_setup.prepare"]
    assert cli.main([*words[0][1:], "--workers", "0"]) == 0
    assert prepare.main([*words[1][1:], "--workers", "0", *GRID]) == 0
    kept = PreparedStore.open(str(store)).index
    assert set(kept.status) == {"kept"}
    assert len(kept) == {"DICOM": 6, "images": 6, "Heidelberg XML": 4}[kind]
