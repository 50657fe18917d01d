"""The doctor: each probe is shown what it looks for, and that it is gone; the exit code is the demo's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydicom import pixels, uid

from tests.support.pipeline_factory import ROOT
from utils import doctor
from utils.doctor import ABSENT, MISSING, OK, UNTESTED, Finding
from utils.errors import UserError


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Importing one of them fails from now on."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


def without_packages(monkeypatch: pytest.MonkeyPatch, *gone: str, **versions: str) -> None:
    """These distributions are not installed, or installed in another version."""
    real = metadata.version

    def version(name: str) -> str:
        if name in gone:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


def give_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 2, "get_device_name": "NVIDIA H200",
        "get_device_properties": SimpleNamespace(total_memory=141 * 2**30),
        "get_device_capability": capability,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def test_python_too_old_or_not_tested() -> None:
    assert doctor.probe_python().state == OK
    for version, state in {(3, 9, 2): MISSING, (3, 14, 0): UNTESTED}.items():
        finding = doctor.probe_python(version)
        assert (finding.state, finding.text[:22]) == (state, "expected 3.11 to 3.13,")
        assert "python3.11 -m venv" in (finding.command or "")


def test_every_requirement_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = doctor.requirements()
    assert any(line.startswith("torch>=") for line in lines)
    assert doctor.probe_packages(lines).state == OK
    without_packages(monkeypatch, "einops", zarr="2.18.0")
    finding = doctor.probe_packages(lines)
    assert (finding.state, finding.command) == (MISSING, "pip install -r requirements.txt")
    assert f"2 of {len(lines)}: zarr (expected >=3.1, found 2.18.0), einops" in finding.text


def test_torch_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.probe_torch().text == torch.__version__
    without(monkeypatch, "torch")
    for probe in (doctor.probe_torch, doctor.probe_device):
        assert (probe().state, probe().command) == (MISSING, "pip install -r requirements.txt")


def test_a_gpu_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.probe_device().text.endswith("no CUDA device")
    (tmp_path / "nvidia-smi").touch(0o755)
    finding = doctor.probe_device()
    assert finding.state == ABSENT, "the demo runs on the CPU"
    assert "sees no CUDA device" in finding.text
    assert "pytorch.org" in (finding.command or "")
    give_gpu(monkeypatch, (9, 0))
    assert doctor.probe_device() == Finding("device", OK, "2 x NVIDIA H200, 141 GB each")


@pytest.mark.parametrize(
    ("syntax", "name", "state", "command"),
    [
        ("RLELossless", "DICOM", MISSING, "pip install -r requirements.txt"),
        ("JPEG2000", "JPEG 2000", MISSING, "pip install -r requirements.txt"),
        ("JPEGLSLossless", "JPEG-LS", MISSING, "pip install -r requirements.txt"),
        ("JPEGLosslessSV1", "JPEG", ABSENT, "pip install python-gdcm"),
    ],
)
def test_a_codec_is_gone(
    monkeypatch: pytest.MonkeyPatch, syntax: str, name: str, state: str, command: str
) -> None:
    """All that pydicom can tell of a decoder goes, or comes, and the line of its family says so."""
    real = pixels.get_decoder

    def decoder(wanted: uid.UID, gone: str | None) -> Any:
        known, is_gone = real(wanted), wanted == getattr(uid, gone or "", None)
        there = [] if is_gone else list(known.available_plugins) or ["a plugin"]
        lacks = ["gdcm - requires gdcm>=3.0.10", "pylibjpeg - requires pylibjpeg-libjpeg>=2.1"]
        return SimpleNamespace(is_available=not is_gone, available_plugins=there, missing_dependencies=lacks)

    monkeypatch.setattr(pixels, "get_decoder", lambda wanted: decoder(wanted, None))
    assert {finding.state for finding in doctor.probe_codecs()} == {OK}
    monkeypatch.setattr(pixels, "get_decoder", lambda wanted: decoder(wanted, syntax))
    (finding,) = (finding for finding in doctor.probe_codecs() if finding.state != OK)
    assert (finding.name, finding.state) == (name, state)
    assert finding.text == f"{syntax} cannot be decoded: requires gdcm>=3.0.10"
    assert (finding.command or "").startswith(command)


def test_of_each_transfer_syntax_the_doctor_says_what_the_decoder_says() -> None:
    decoded = {finding.name: finding.state == OK for finding in doctor.probe_codecs()}
    for name, _, keywords, _ in doctor.CODECS:
        assert decoded[name] == all(pixels.get_decoder(getattr(uid, k)).is_available for k in keywords), name
    assert decoded["JPEG-LS"], "requirements.txt has a decoder"


def test_a_pydicom_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pydicom.pixels")
    (finding,) = doctor.probe_codecs()
    assert (finding.name, finding.state, finding.command) == ("DICOM", MISSING, doctor.INSTALL)


def test_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "yet"
    packages, none = Finding("packages", OK, ""), Finding("packages", MISSING, "2 of 9: rich, torch")
    one = Finding("packages", MISSING, "1 of 9: torchmetrics")
    assert doctor.probe_disk(packages, folder, demo_gb=0).state == OK
    free = shutil.disk_usage(tmp_path).free / 1e9
    finding = doctor.probe_disk(packages, folder, demo_gb=free + 1)
    assert finding.state == MISSING
    assert "for the demo, found" in finding.text
    enough_for_the_demo = free - doctor.PACKAGES_GB / 2
    assert doctor.probe_disk(packages, folder, enough_for_the_demo).state == OK
    assert doctor.probe_disk(one, folder, enough_for_the_demo).state == OK
    finding = doctor.probe_disk(none, folder, enough_for_the_demo)
    assert finding.state == MISSING
    assert "for the demo and its packages" in finding.text
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)  # root may write anywhere
    finding = doctor.probe_disk(packages, folder, demo_gb=0)
    assert (finding.state, finding.text) == (MISSING, f"{tmp_path} cannot be written")


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.probe_programs().state == OK
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.probe_programs().command == "apt-get install make git"
    (tmp_path / "git").touch(0o755)
    assert doctor.probe_programs().text.startswith("no make;")


def test_the_exit_code_is_the_demos(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("one", OK, "there"), Finding("two", ABSENT, "not needed", "pip install two")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the demo can run; next: make demo"
    for name in ("three", "four"):
        findings.append(Finding(name, MISSING, "needed", "pip install it"))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the demo cannot run yet; next: pip install it"


def test_a_python_without_any_package_gets_an_answer() -> None:
    """The machine of a new user: no site-packages at all."""
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['doctor']; " + (
        "runpy.run_module('utils.doctor', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "packages     MISSING" in done.stdout
    last = "next: make demo, which installs them into .venv, or pip install -r requirements.txt"
    assert done.stdout.splitlines()[-1] == f"the demo cannot run yet; {last}"
    assert done.stderr == ""


def test_every_probe_is_in_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [name for name in vars(doctor) if name.startswith("probe_")]
    for name in probes:

        def probe(*_: object, name: str = name) -> Any:
            finding = Finding(name, OK, "")
            return [finding] if name == "probe_codecs" else finding

        monkeypatch.setattr(doctor, name, probe)
    assert sorted(finding.name for finding in doctor.examine()) == sorted(probes)


def test_the_paths_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, ckpt = tmp_path / "store", tmp_path / "ckpt"
    words = [f"data.store={store}", f"train.ckpt_dir={ckpt}"]
    smoke = str(ROOT / "configs" / "smoke_test.yaml")
    with pytest.raises(UserError, match=r"^data\.store: .*expected a prepared store, found none"):
        doctor.check_paths(smoke, words)
    store.mkdir()
    (store / "prepare_report.json").write_text("{}")
    assert doctor.check_paths(smoke, words) == (
        "store readable, checkpoints writable (on the first worker's disk, lost with its VM)"
    )
    assert list(ckpt.iterdir()) == []
    assert doctor.main(["--config", smoke, *words]) == 0
    assert capsys.readouterr().out.startswith("store readable, checkpoints writable")
    assert "no checkpoints" in doctor.check_paths(smoke, [words[0], "train.ckpt_dir=null"])
    ckpt.rmdir()
    ckpt.write_text("a file")
    with pytest.raises(UserError, match=str(ckpt)):
        doctor.check_paths(smoke, words)
    with pytest.raises(SystemExit) as end:
        doctor.main(["--config", smoke, *words])
    assert end.value.code == 2
