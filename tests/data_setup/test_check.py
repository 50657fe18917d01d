"""prepare --check-only: what a header shows is found, from few bytes, and no volume is written."""

import io
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from pydicom.dataset import FileDataset

from data_setup import check, prepare
from data_setup.check import Finding
from data_setup.index import cli as index
from data_setup.phantom import __main__ as phantom
from data_setup.readers.faults import RejectReason
from tests.support.cloud_proxy import Proxy, fault_proxy
from tests.support.cloud_servers import BUCKET, gcs_server
from tests.support.dicom_factory import speckle, steps_along, write_opt
from tests.support.pipeline_factory import SMOKE
from utils import storage
from utils.config.load import load_config
from utils.config.schema import StorageOptions
from utils.errors import UserError
from utils.run.folder import claim_run_dir
from utils.runtime.open import open_runtime
from utils.storage import clients as cloud
from utils.storage.ranges import RangeFile

TRITON = "retinal_oct/structural_oct/topcon_triton"
SHAPE = (32, 200, 200)
# Kinds of phantom/faults.py that the header pass does not see, or not by the name that decoding gives.
UNSEEN = {"corrupt_codestream", "truncated_codestream", "wrong_frame_count", "constant_volume"}
OTHER_NAME = {"wrong_frame_size": "header_mismatch"}


@dataclass
class Eye:
    """One file of a tree and its manifest row."""

    person: str
    uid: str
    seed: int
    side: str = "R"
    header_side: str = "R"
    in_manifest: bool = True
    shape: tuple[int, int, int] = SHAPE

    @property
    def path(self) -> str:
        name = f"{self.person}_triton_macula_6x6_octa_oct_{self.side.lower()}_{self.uid}.dcm"
        return f"{TRITON}/{self.person}/{name}"


def write_tree(root: Path, eyes: list[Eye]) -> Path:
    lines = ["person_id\tlaterality\theight\twidth\tnumber_of_frames\tsop_instance_uid\tfilepath"]
    for eye in eyes:

        def edit(ds: FileDataset, eye: Eye = eye) -> None:
            ds.SOPInstanceUID, ds.ImageLaterality = eye.uid, eye.header_side

        path = root / eye.path
        write_opt(path.parent, speckle(*eye.shape, seed=eye.seed), name=path.name, edit=edit)
        frames, height, width = eye.shape
        if eye.in_manifest:
            values = (eye.person, eye.side, height, width, frames, eye.uid, f"/{eye.path}")
            lines.append("\t".join(map(str, values)))
    people = sorted({e.person for e in eyes})
    table = ["person_id\tstudy_group\tclinical_site\tage\trecommended_split"]
    table += [f"{p}\thealthy\tUW\t50\ttrain" for p in people]
    (root / "participants.tsv").write_text("\n".join(table) + "\n")
    (root / "retinal_oct" / "manifest.tsv").write_text("\n".join(lines) + "\n")
    return root


GOOD = [Eye(str(9001 + n), f"1.2.3.{n}", n) for n in range(6)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("good"), GOOD)


def run(root: Path | str, folder: Path, *arguments: str) -> tuple[int, dict]:
    where = [f"data.gcs_root={root}", f"data.store={folder / 'store'}"]
    report = folder / "check_report.json"
    command = ["--config", str(SMOKE), *where, "--check-only", "--workers", "0", "--json", str(report)]
    code = prepare.main([*command, *arguments])
    return code, json.loads(report.read_text())


def test_every_planted_fault_that_a_header_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "phantom"
    phantom.write_tree(root, 1, 0, faults=True, workers=0)
    code, report = run(root, tmp_path)
    assert code == 1
    assert not (tmp_path / "store").exists()
    planted = json.loads((root / "synthetic.json").read_text())["faults"]
    status = {p["path"]: p["status"] for p in report["problems"]}
    for fault in planted:
        expected = fault["expected_reason"]
        if fault["kind"] in UNSEEN:
            expected = None
        assert status.get(fault["path"]) == OTHER_NAME.get(fault["kind"], expected), fault
    assert set(status) <= {f["path"] for f in planted}
    kinds = {f["kind"]: f["path"] for f in planted}
    assert report["orphans"] == [kinds["orphan"]]
    assert report["missing"] == [kinds["missing_file"]]
    output = capsys.readouterr().out
    for reason, count in report["unreadable"].items():
        assert f"{reason} {count}" in output
    assert kinds["orphan"] in output
    shapes = {shape for part in report["by_protocol"].values() for shape in part["shape"]}
    rejected = len(planted) - sum(f["expected_reason"] is None for f in planted)
    assert report["records"] - report["ok"] == rejected - len(UNSEEN)
    assert len(shapes) > 4


def test_a_sound_tree(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(good, tmp_path)
    assert code == 0
    assert report["is_fine"]
    group = report["by_protocol"]["triton_macula_6x6_octa_oct"]
    assert group["shape"] == {"32 x 200 x 200": 6}
    assert group["spacing_um"] == {"120 x 2.6 x 30": 6}
    assert group["transfer_syntax"] == {"Explicit VR Little Endian": 6}
    assert group["laterality"] == {"R": 6}
    assert report["by_device"]["topcon_triton"]["status"] == {"ok": 6}
    stored = sum((good / e.path).stat().st_size for e in GOOD)
    read = report["bytes"]
    assert read["stored"] == stored
    assert read["fetched"] == 6 * check.HEAD_BYTES
    output = capsys.readouterr().out
    assert f"bytes fetched / stored: {read['fetched']} / {stored}" in output
    assert "nothing wrong in the headers of 6 files" in output


def test_the_report_is_beside_the_rows_by_default(good: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["--config", str(SMOKE), f"data.gcs_root={good}", f"data.store={store}", "--workers", "0"]
    assert prepare.main([*command, "--check-only"]) == 0
    assert [p.name for p in store.iterdir()] == ["check_report.json"]
    with pytest.raises(UserError, match=r"--json: expected --check-only"):
        prepare.main([*command, "--json", "x.json"])


def test_what_contradicts_and_what_is_there_twice(tmp_path: Path) -> None:
    eyes = [
        *GOOD[:3],
        Eye("9005", "1.2.3.1", seed=7, in_manifest=False),  # the UID of the second
        Eye("9006", "1.2.3.5", seed=5, side="L", header_side="R"),
        Eye("9007", "1.2.3.8", seed=8),
    ]
    root = write_tree(tmp_path / "tree", eyes)
    (root / eyes[2].path).unlink()
    nifti = f"{TRITON}/9007/9007_triton_macula_6x6_octa_oct_r_x.nii"
    (root / nifti).write_bytes(b"\0" * 344 + b"n+1\0" + b"\0" * 100)
    manifest = root / "retinal_oct" / "manifest.tsv"
    manifest.write_text(manifest.read_text() + f"9007\tR\t\t\t\t\t/{nifti}\n")
    code, report = run(root, tmp_path)
    assert code == 1
    orphan = eyes[3].path
    assert report["duplicates"] == [[eyes[1].path, orphan]]
    assert report["orphans"] == [orphan]
    assert eyes[2].path in report["missing"]
    assert report["laterality_conflicts"] == [eyes[4].path]
    assert report["not_opened"] == {"NIfTI": 1}


def test_a_scan_filed_under_two_people_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """prepare uses one of two rows with one SOPInstanceUID and the same voxels."""
    twice = Eye("9009", GOOD[1].uid, seed=1)
    root = write_tree(tmp_path / "tree", [*GOOD[:3], twice])
    code, report = run(root, tmp_path)
    assert code == 1
    assert report["skipped"] == {}
    assert (report["records"], report["ok"], report["orphans"]) == (3, 3, [])
    assert report["doubles"] == [twice.path]
    assert report["duplicates"] == [[GOOD[1].path, twice.path]]
    output = capsys.readouterr().out
    doubles = "an earlier row has the SOPInstanceUID; prepare leaves out what has its voxels too: 1\n    "
    assert doubles + twice.path in output
    assert "something is wrong" in output

    write_opt((root / twice.path).parent, speckle(*SHAPE, seed=9), name=Path(twice.path).name)  # another UID
    code, report = run(root, tmp_path)
    assert (code, report["doubles"], report["duplicates"]) == (1, [twice.path], [])
    assert report["unreadable"] == {"header_mismatch": 1}

    (root / twice.path).unlink()  # nothing is lost, and nothing double: a row without a file
    code, report = run(root, tmp_path)
    assert (code, report["doubles"], report["unused_missing"]) == (0, [], [twice.path])


def test_files_in_the_root_are_found_as_prepare_finds_them(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_opt(root, speckle(*SHAPE), name="IM0001")
    write_opt(root, speckle(*SHAPE, seed=1), name="eye.dcm")
    write_opt(root / "deep/er", speckle(*SHAPE, seed=2), name="orphan.dcm", edit=set_uid)
    columns = "person_id\tfilepath\tdevice\tprotocol\tlaterality\n"
    (root / "manifest.tsv").write_text(f"{columns}1\tIM0001\tx\ty\tR\n2\teye.dcm\tx\ty\tR\n")
    people = "person_id\tstudy_group\tclinical_site\tage\n1\t\t\t\n2\t\t\t\n"
    (root / "participants.tsv").write_text(people)
    manifest = f"data.manifest_path={root / 'manifest.tsv'}"
    code, report = run(root, tmp_path, manifest)
    assert (code, report["missing"], report["orphans"]) == (1, [], ["deep/er/orphan.dcm"])
    assert report["unreadable"] == {}
    assert report["ok"] == report["records"] == 2


def test_what_prepare_would_open_as_dicom_is_opened(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", GOOD[:3])
    manifest = root / "retinal_oct" / "manifest.tsv"
    bare = GOOD[0].path.removesuffix(".dcm")  # the UID's last number looks like an ending
    (root / GOOD[0].path).unlink()
    (root / bare).write_bytes(b"garbage")
    folder = root / f"{TRITON}/9002/9002_triton_macula_6x6_octa_oct_r_frames"
    folder.mkdir()
    (folder / "0.png").write_bytes(b"x")
    row = f"9002\tR\t\t\t\t\t/{folder.relative_to(root)}\n"
    manifest.write_text(manifest.read_text().replace(GOOD[0].path, bare) + row)
    code, report = run(root, tmp_path)
    assert code == 1
    assert report["unreadable"] == {"not_dicom": 1}
    assert [p["path"] for p in report["problems"]] == [bare]
    assert report["not_opened"] == {"folder": 1}


def test_a_report_that_cannot_be_written_does_not_cost_the_verdict(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what can be no file is refused before a header is read."""
    (tmp_path / "file").write_text("")
    for place, message in ((tmp_path, "expected a file, found a folder"), (tmp_path / "file/a", "none at")):
        with pytest.raises(UserError, match=f"--json {tmp_path}.*{message}"):
            run(good, tmp_path, "--json", str(place))
    assert "headers of 6 files" not in capsys.readouterr().out
    fault = storage.StorageError("url", "no space")
    monkeypatch.setattr(storage, "write_text", Mock(side_effect=fault))
    with pytest.raises(storage.StorageError, match="no space"):
        run(good, tmp_path)
    assert "nothing wrong in the headers of 6 files" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "code"), [(storage.StorageError, 2), (storage.StorageAwayError, 75)])
def test_only_storage_that_is_away_is_to_be_tried_again(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[storage.StorageError], code: int
) -> None:
    """A file without permission is to mend, by the index too."""
    read = storage.read_range

    def read_range(url: str, *rest: Any) -> bytes:
        if url.endswith(GOOD[2].path):
            raise error(url, "no permission to read it")
        return read(url, *rest)

    monkeypatch.setattr(storage, "read_range", read_range)
    assert run(good, tmp_path)[0] == code
    assert index.main([str(good), "--workers", "0", "--out", str(tmp_path / "out")]) == code


def test_a_long_header_is_read_to_its_end_and_no_further(tmp_path: Path) -> None:
    eye = Eye("9001", "1.2.3.0", 0, shape=(1500, 20, 20))
    root = write_tree(tmp_path / "tree", [eye])
    path = root / eye.path
    steps = steps_along(1500, 1, 0.12)
    write_opt(path.parent, speckle(*eye.shape), name=path.name, positions=steps, edit=set_uid)
    header = path.stat().st_size - int(np.prod(eye.shape))
    code, report = run(root, tmp_path)
    assert code == 0
    assert report["by_device"]["topcon_triton"]["shape"] == {"1500 x 20 x 20": 1}
    assert report["requests"] >= 2
    assert check.HEAD_BYTES < header < report["bytes"]["fetched"] <= 2 * header
    assert "orientation from: assumed 1" in check.table(report)


def set_uid(ds: FileDataset) -> None:
    ds.SOPInstanceUID = "1.2.3.0"


def test_ranges_read_like_a_file(tmp_path: Path) -> None:
    data, rng = random.Random(0).randbytes(50_000), random.Random(1)
    (tmp_path / "x").write_bytes(data)
    file, plain = RangeFile(str(tmp_path / "x"), len(data), StorageOptions(), 100), io.BytesIO(data)
    for _ in range(500):
        whence = rng.choice((0, 1, 2))
        offset = {0: rng.randrange(50_000), 1: rng.randrange(200), 2: -rng.randrange(1000)}[whence]
        assert file.seek(offset, whence) == plain.seek(offset, whence)
        size = rng.randrange(300)
        assert file.read(size) == plain.read(size)
        assert file.tell() == plain.tell()


def test_every_cut_of_a_file_has_a_name(good: Path) -> None:
    """However little of a file there is, it is a finding."""
    eye = GOOD[0]
    data = (good / eye.path).read_bytes()
    url = "memory://cut/" + eye.path
    for size in [*range(0, 2000, 37), 10_000, len(data) - 1]:
        storage.write_bytes(url, data[:size])
        finding = check.read_finding(Finding(eye.path, url, size=size), StorageOptions())
        assert finding.status in set(RejectReason), (size, finding)
    storage.write_bytes(url, data)
    finding = check.read_finding(Finding(eye.path, url, size=len(data)), StorageOptions())
    assert finding.status == check.OK


# ---- in a bucket


class Counted(Proxy):
    """Adds up the bytes of every answer."""

    sent = 0

    async def _ask(self, head: str, body: bytes) -> bytes:
        answer = await super()._ask(head, body)
        self.sent += len(answer)
        return answer


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(cloud, "POLICY", replace(cloud.POLICY, attempts=3, first_wait_s=0.005))
    monkeypatch.setattr("tests.support.cloud_proxy.Proxy", Counted)
    with gcs_server() as server, fault_proxy(server) as proxy:
        yield proxy


def test_in_a_bucket_few_bytes_are_sent(
    bucket: Counted, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, root = StorageOptions(endpoint_url=bucket.endpoint), f"gs://{BUCKET}/tree"
    for path in (p for p in good.rglob("*") if p.is_file()):
        storage.write_bytes(f"{root}/{path.relative_to(good)}", path.read_bytes(), options)
    stored = sum((good / e.path).stat().st_size for e in GOOD)
    bucket.sent = 0
    endpoint = f"data.storage_options.endpoint_url={bucket.endpoint}"
    code, report = run(root, tmp_path, endpoint)
    assert code == 0
    assert report["bytes"]["stored"] == stored
    assert report["bytes"]["fetched"] < bucket.sent < 0.1 * stored  # as the server counts, listings included
    _, on_disk = run(good, tmp_path)
    times = ("tree", "seconds")
    assert {k: v for k, v in report.items() if k not in times} == {
        k: v for k, v in on_disk.items() if k not in times
    }
    capsys.readouterr()
    lost = GOOD[2].path
    bucket.schedule = lambda m, t: "503" if GOOD[2].uid in t and "alt=media" in t else None
    code, report = run(root, tmp_path, endpoint)
    assert code == 75
    assert (report["unread"], report["ok"], report["unreadable"]) == (1, 5, {})
    assert f"1 files could not be read, run again; first: {root}/{lost}: gave up" in capsys.readouterr().err


@pytest.mark.slow
def test_worker_processes_find_the_same(good: Path, tmp_path: Path) -> None:
    _, report = run(good, tmp_path)
    _, other = run(good, tmp_path, "--workers", "2")
    for key in ("seconds", "workers"):
        del report[key], other[key]
    assert other == report


# ---- in the HTML report


def test_a_run_takes_the_report_along(tmp_path: Path) -> None:
    where = [f"data.store={tmp_path / 'store'}", f"run.dir={tmp_path / 'run'}"]
    cfg, runtime = load_config(SMOKE, where), open_runtime(use_bf16=False)
    storage.write_text(f"{tmp_path}/store/prepare_report.json", "{}")
    claim_run_dir(cfg, runtime)
    assert not (tmp_path / "run/check_report.json").exists()
    storage.write_text(f"{tmp_path}/store/check_report.json", '{"a": 1}')
    claim_run_dir(cfg, runtime)
    assert (tmp_path / "run/check_report.json").read_text() == '{"a": 1}'
