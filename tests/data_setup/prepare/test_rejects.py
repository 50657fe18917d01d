"""Files that cannot be used, runs that are refused, files that are missing or in no row."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_setup.jobs import Job, read_volume
from data_setup.manifest import read_records, unknown_record
from data_setup.prepare import Tally, main, work
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.resample import resample_frames
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter
from tests.data_setup.prepare.runs import CONFIG, arguments, contents, dicoms, start
from tests.support.dicom_factory import speckle, write_opt
from utils import storage
from utils.config.load import load_config
from utils.errors import UserError


def test_bad_files_are_named_and_repaired_ones_taken_up(
    own_tree: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, store = dicoms(own_tree), tmp_path / "store"
    whole = [f.read_bytes() for f in files[:3]]
    files[0].write_bytes(whole[0][: len(whole[0]) * 2 // 3])
    files[1].unlink()
    files[2].write_bytes(b"not a DICOM file at all")
    assert main(arguments(own_tree, store, "data.max_reject_fraction=0.9")) == 0
    index = PreparedStore.open(str(store)).index.set_index("path")
    reasons = [index.status[str(f.relative_to(own_tree))] for f in files[:3]]
    assert reasons == ["truncated_pixel_data", "missing_file", "not_dicom"]
    assert (index.status == "kept").sum() == len(files) - 3
    assert index.message[str(files[2].relative_to(own_tree))].startswith("expected")
    report = json.loads((store / "prepare_report.json").read_text())
    assert report["rejected"] == {"missing_file": 1, "not_dicom": 1, "truncated_pixel_data": 1}
    named = {reason: [str(files[i].relative_to(own_tree))] for i, reason in enumerate(reasons)}
    assert report["rejected_files"] == named
    assert "rejected: missing_file 1, not_dicom 1, truncated_pixel_data 1" in capsys.readouterr().out
    for file, data in zip(files[:3], whole, strict=True):
        file.write_bytes(data)
    assert main(arguments(own_tree, store, "data.max_reject_fraction=0.9")) == 0
    fixed = PreparedStore.open(str(store))
    assert fixed.index.checksum.to_list() == PreparedStore.open(str(clean)).index.checksum.to_list()
    assert json.loads((store / "prepare_report.json").read_text())["run"]["prepared"] == 3


def test_too_many_rejects_stop_with_the_table(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, store = dicoms(own_tree), tmp_path / "store"
    for file in files[: len(files) // 2]:
        file.write_bytes(b"junk")
    with pytest.raises(
        UserError, match=r"expected at most 10% of \d+ records rejected .*found \d+: not_dicom"
    ):
        main(arguments(own_tree, store, "data.max_reject_fraction=0.1"))
    out, err = capsys.readouterr()
    assert "not_dicom" in out
    rejects = [line for line in err.splitlines() if line.startswith("rejected: ")]
    assert len(rejects) == 3
    for line in rejects:
        match = re.fullmatch(r"rejected: (\S+): not_dicom: expected .*, found .*; next: .*export.*", line)
        assert match, line
        assert (own_tree / match[1]).read_bytes() == b"junk"
    statuses = PreparedStore.open(str(store)).index.status
    assert (statuses == "not_dicom").sum() == len(files) // 2, "a small set is looked at to its end"
    assert (statuses == "kept").sum() == len(files) - len(files) // 2
    assert main(arguments(own_tree, store, "data.max_reject_fraction=0.9")) == 0
    assert (PreparedStore.open(str(store)).index.status == "kept").sum() == len(files) - len(files) // 2


def test_a_large_set_stops_once_it_is_clear(tmp_path: Path, tree: Path) -> None:
    cfg = load_config(CONFIG, [f"data.gcs_root={tree}", f"data.store={tmp_path / 'store'}"])
    record = dataclasses.replace(read_records(cfg).records[0], url=str(tmp_path / "absent.dcm"))
    writer = StoreWriter(cfg.data.store)
    jobs = [Job(row, record, writer, cfg.spatial, cfg.data.storage_options) for row in range(130)]
    tally = Tally(num_rows=130)
    work(jobs, 0, 6.5, tally)
    assert tally.rejected == {"missing_file": 100}


@pytest.mark.parametrize(
    ("shape", "spacing"),
    [
        ((36, 100, 300), (0.0298, 0.024, 0.03)),  # two of sixteen planes of the grid
        ((12, 100, 2), (0.375, 0.024, 0.094)),
        ((2, 3, 300), (0.02, 0.003, 0.03)),
        ((12, 8, 64), (0.375, 0.004, 0.094)),  # no voxel's centre
    ],
)
def test_a_scan_without_a_token_is_a_reject_that_names_the_spacing_that_would_do(
    tmp_path: Path, shape: tuple[int, int, int], spacing: tuple[float, float, float]
) -> None:
    path = write_opt(tmp_path, speckle(*shape), spacing=spacing)
    cfg = load_config(CONFIG, [])
    with pytest.raises(OCTReadError, match="none: the scan has ") as caught:
        read_volume(unknown_record(path), cfg.spatial, cfg.data.storage_options)
    assert caught.value.reason == RejectReason.OUTSIDE_GRID
    setting = re.search(r"spatial.target_spacing=\S+(?= would do)", caught.value.detail)
    assert setting, caught.value.detail
    cfg = load_config(CONFIG, [setting[0]])
    _, volume, _ = read_volume(unknown_record(path), cfg.spatial, cfg.data.storage_options)
    assert volume.valid_fraction > 0.9


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("sop_instance_uid", "2.25.1", "expected SOPInstanceUID 2.25.1 as in the manifest, found another"),
        ("height", "7", "expected frames x height x width ("),
        ("number_of_frames", "7", "expected frames x height x width (7, "),
    ],
)
def test_a_file_that_is_not_the_one_of_its_row_is_a_reject(
    own_tree: Path, tmp_path: Path, column: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = own_tree / "retinal_oct" / "manifest.tsv", tmp_path / "store"
    header, *lines = [line.split("\t") for line in manifest.read_text().splitlines()]
    lines[0][header.index(column)] = text
    manifest.write_text("\n".join("\t".join(line) for line in (header, *lines[:2])) + "\n")
    resampled: list[Any] = []

    def count(frames: Any, *grid: Any) -> Any:
        resampled.append(grid)
        return resample_frames(frames, *grid)

    monkeypatch.setattr("data_setup.jobs.resample_frames", count)
    main(arguments(own_tree, store, "data.max_reject_fraction=0.9"))
    index = PreparedStore.open(str(store)).index
    assert sorted(index.status) == ["header_mismatch", "kept"]
    assert index.message.dropna().iloc[0].startswith(message)
    assert len(resampled) == 1  # the other file is refused by its header


def test_another_geometry_is_refused(tree: Path, clean: Path) -> None:
    before = contents(clean)
    with pytest.raises(UserError, match=r"geometry: expected .*found .*another data\.store"):
        main(arguments(tree, clean, "spatial.image_size=[16, 96, 72]"))
    assert contents(clean) == before


def test_another_source_is_refused_and_the_same_one_spelt_differently_is_not(
    tree: Path, own_tree: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative paths below another root would be taken for the same files."""
    store = Path(shutil.copytree(clean, tmp_path / "store"))
    with pytest.raises(UserError, match=rf"source_root: expected {own_tree}, found {tree}; .*data\.store"):
        main(arguments(own_tree, store))
    assert contents(store) == contents(clean)
    monkeypatch.chdir(tree.parent)
    assert main(arguments(Path("tree/"), store)) == 0
    assert json.loads((store / "prepare_report.json").read_text())["run"]["reused"] > 0
    assert contents(store) == contents(clean)
    row = json.loads((store / "rows" / "000000.json").read_text())
    assert row["source_url"] == str(tree / row["record"]["path"])


def test_user_errors_are_one_line_with_exit_code_two(tree: Path, tmp_path: Path) -> None:
    with start(tmp_path, tmp_path / "store") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out.count("\n") == 1  # what is begun
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "manifest.tsv: not found" in err


def test_missing_files_and_orphans_are_counted(
    own_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, first = tmp_path / "store", dicoms(own_tree)[0]
    orphans = [first.with_name(f"left_over_{n:02d}.dcm") for n in range(21)]
    for orphan in orphans:
        shutil.copy(dicoms(own_tree)[-1], orphan)
    first.unlink()
    main(arguments(own_tree, store, "data.max_reject_fraction=0.9"))
    assert "files: 1 of the manifest missing, 21 in no manifest row" in capsys.readouterr().out
    audit = json.loads((store / "prepare_report.json").read_text())["run"]["audit"]
    assert audit["missing"] == {"count": 1, "first": [str(first.relative_to(own_tree))]}
    assert audit["orphans"]["count"] == 21
    assert audit["orphans"]["first"] == [str(o.relative_to(own_tree)) for o in orphans[:20]]


def test_a_remote_tree_is_listed_on_request_only(tree: Path, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}/tree"
    for file in (p for p in tree.rglob("*") if p.is_file() and p.suffix != ".npz"):
        storage.write_bytes(storage.join(root, str(file.relative_to(tree))), file.read_bytes())
    places = [f"data.gcs_root={root}", f"data.store={tmp_path / 'store'}"]
    for more, audit in (
        ([], None),
        (["--audit"], {k: {"count": 0, "first": []} for k in ("missing", "orphans", "unused_missing")}),
    ):
        assert main(["--config", CONFIG, "--workers", "0", *places, *more]) == 0
        assert json.loads((tmp_path / "store" / "prepare_report.json").read_text())["run"]["audit"] == audit
