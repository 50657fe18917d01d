"""What this machine can do, and the command for what is missing: `python -m utils.doctor`.

In: this machine. Out: a line for Python, packages, device, codecs and disk, and the command that adds what is
missing. Exit code 0: the demo can run; 1: it cannot. Nothing is installed or sent. --config makes it try only
the paths of this configuration: one line, exit code 2 when one fails. run_tpu_xla.sh does so on each worker.

This file is read by any Python 3, with no package installed: it imports only the standard library, and each
probe the packages that it is about.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from utils.help_pages import Parser

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)  # what docs/concepts/words.md says was tested
OK, ABSENT, UNTESTED, MISSING = "ok", "absent", "untested", "MISSING"  # absent: the demo needs it not
INSTALL = "pip install -r requirements.txt"
DEMO_GB = 1.0  # phantom, store, two runs with their checkpoints
PACKAGES_GB = 8.0 if shutil.which("nvidia-smi") else 2.0  # with CUDA's libraries, and without
PYTORCH = "https://pytorch.org/get-started/locally"
CODECS = (  # family, state where it is absent, keywords of pydicom.uid, what adds it
    ("DICOM", MISSING, ("ImplicitVRLittleEndian", "ExplicitVRLittleEndian", "RLELossless"), INSTALL),
    ("JPEG 2000", MISSING, ("JPEG2000Lossless", "JPEG2000", "HTJ2KLossless", "HTJ2K"), INSTALL),
    ("JPEG-LS", MISSING, ("JPEGLSLossless", "JPEGLSNearLossless"), INSTALL),
    ("JPEG", ABSENT, ("JPEGBaseline8Bit", "JPEGExtended12Bit", "JPEGLossless", "JPEGLosslessSV1"),
     "pip install python-gdcm  # only if your files need it"),
)  # fmt: skip
EXAMPLES = """examples:
    python -m utils.doctor
    python -m utils.doctor && make demo
    python -m utils.doctor --config configs/smoke_test.yaml data.store=gs://BUCKET/store
"""
# what a package that is half installed, or built for another one, raises as it is imported
BROKEN = (ImportError, OSError, ValueError, AttributeError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Finding:
    """What a probe says: one line, and what to do about it."""

    name: str
    state: str
    text: str
    command: str | None = None


def probe_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Whether the interpreter is one of those that were tried."""
    text, oldest, newest = (".".join(map(str, one)) for one in (version, OLDEST_PYTHON, NEWEST_PYTHON))
    if OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        return Finding("python", OK, f"{text}, {sys.executable}")
    state = MISSING if version[:2] < OLDEST_PYTHON else UNTESTED
    command = f"python{oldest} -m venv .venv && . .venv/bin/activate"
    return Finding("python", state, f"expected {oldest} to {newest}, found {text}", command)


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def probe_packages(lines: list[str]) -> Finding:
    """Whether every requirement is installed, in a version that it allows."""
    wrong = []
    for line in lines:
        name = re.split(r"[<>=!~;\[ ]", line)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(name)
            continue
        if not _allows(line, version):
            wrong.append(f"{name} (expected {line[len(name) :]}, found {version})")
    if wrong:
        return Finding("packages", MISSING, f"{len(wrong)} of {len(lines)}: {', '.join(wrong)}", INSTALL)
    return Finding("packages", OK, f"{len(lines)} of {len(lines)} requirements")


def _allows(line: str, version: str) -> bool:
    """Whether a requirement allows a version; True where nothing here can compare versions."""
    try:
        from packaging.requirements import Requirement
    except BROKEN:
        return True
    return bool(Requirement(line).specifier.contains(version, prereleases=True))


def probe_torch() -> Finding:
    """Whether torch can be loaded; an installation may be there and broken."""
    try:
        torch = importlib.import_module("torch")
    except BROKEN as error:
        return Finding("torch", MISSING, f"not loaded: {_one_line(error)}", INSTALL)
    return Finding("torch", OK, torch.__version__)


def probe_device() -> Finding:
    """What a training would run on: a CUDA device, else the CPU."""
    try:
        torch = importlib.import_module("torch")
    except BROKEN:
        return Finding("device", MISSING, "unknown without torch", INSTALL)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return Finding("device", OK, f"{len(names)} x {names[0]}, {memory:.0f} GB each")
    cpu = f"cpu: {platform.machine()}, {os.cpu_count()} cores"
    if shutil.which("nvidia-smi"):
        text = f"{cpu}; there is an NVIDIA driver, but this torch ({torch.__version__}) sees no CUDA device"
        return Finding("device", ABSENT, text, f"install torch for your CUDA version: {PYTORCH}")
    return Finding("device", OK, f"{cpu}; no CUDA device")


def probe_codecs() -> list[Finding]:
    """What pydicom decodes: a line for each family of transfer syntaxes, and for one that it cannot what its
    decoder lacks. The demo needs the first three; the package of the fourth is not in requirements.txt.
    """
    try:
        uid, pixels = (importlib.import_module(name) for name in ("pydicom.uid", "pydicom.pixels"))
    except BROKEN as error:
        return [Finding("DICOM", MISSING, f"not loaded: {_one_line(error)}", INSTALL)]
    findings = []
    for name, state, keywords, command in CODECS:
        decoders = [pixels.get_decoder(getattr(uid, keyword)) for keyword in keywords]
        plugins = sorted({plugin for decoder in decoders for plugin in decoder.available_plugins})
        absent = [key for key, decoder in zip(keywords, decoders, strict=True) if not decoder.is_available]
        if absent:
            missing = decoders[keywords.index(absent[0])].missing_dependencies
            lacks = (part.partition(" - ")[2] or part for part in missing if "pylibjpeg-libjpeg" not in part)
            text = f"{', '.join(absent)} cannot be decoded: {' or '.join(lacks)}"  # pylibjpeg-libjpeg is GPL
            findings.append(Finding(name, state, text, command))
        else:
            text = f"{len(decoders)} transfer syntaxes" + (f", by {', '.join(plugins)}" if plugins else "")
            findings.append(Finding(name, OK, text))
    return findings


def probe_disk(packages: Finding, folder: Path = Path("runs"), demo_gb: float = DEMO_GB) -> Finding:
    """Whether runs/ can be written and has room for the demo, and for the packages that are missing."""
    # one package that is absent is small; without torch all of them are to come
    has_all_to_come = packages.state == MISSING and "torch" in packages.text.replace(",", " ").split()
    needed_gb = demo_gb + (PACKAGES_GB if has_all_to_come else 0)
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    free_gb = shutil.disk_usage(place).free / 1e9
    if not os.access(place, os.W_OK):
        return Finding("disk", MISSING, f"{place} cannot be written", "run from a folder of yours")
    if free_gb < needed_gb:
        what = "the demo and its packages" if has_all_to_come else "the demo"
        text = f"expected {needed_gb:g} GB free in {place} for {what}, found {free_gb:.1f} GB"
        return Finding("disk", MISSING, text, "free some space, or run from a folder on another disk")
    return Finding("disk", OK, f"{free_gb:.0f} GB free in {place}")


def probe_programs() -> Finding:
    """Whether make and git are there: `make demo` needs the one, a run's commit the other."""
    gone = [name for name in ("make", "git") if shutil.which(name) is None]
    if gone:
        text = f"no {' and no '.join(gone)}; docs/start/demo.md has the commands without make"
        return Finding("programs", ABSENT, text, f"apt-get install {' '.join(gone)}")
    return Finding("programs", OK, "make, git")


def examine() -> list[Finding]:
    """All findings, in the order of the page."""
    packages = probe_packages(requirements())
    return [
        probe_python(),
        packages,
        probe_torch(),
        probe_device(),
        *probe_codecs(),
        probe_programs(),
        probe_disk(packages),
    ]


def page(findings: list[Finding]) -> str:
    """The findings for a terminal; the last line says whether the demo can run."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.name:<12} {finding.state:<8} {finding.text}")
        if finding.command:
            lines.append(f"{'':<21} -> {finding.command}")
    needed = [finding for finding in findings if finding.state == MISSING]
    if not needed:
        return "\n".join([*lines, "", "the demo can run; next: make demo"])
    commands = dict.fromkeys(finding.command for finding in needed if finding.command)
    if list(commands) == [INSTALL] and shutil.which("make"):
        text = f"the demo cannot run yet; next: make demo, which installs them into .venv, or {INSTALL}"
        return "\n".join([*lines, "", text])
    return "\n".join([*lines, "", f"the demo cannot run yet; next: {'; then '.join(commands)}"])


def check_paths(config: str, overrides: list[str]) -> str:
    """Read the store and write to the checkpoints as training does; a line on both; raises UserError."""
    from utils import storage
    from utils.config.load import load_config
    from utils.errors import UserError

    cfg = load_config(config, overrides)
    options = cfg.data.storage_options
    try:
        storage.read_bytes(storage.join(cfg.data.store, "prepare_report.json"), options)
    except storage.StorageNotFoundError as error:
        raise UserError(
            f"data.store: {cfg.data.store}: expected a prepared store, found none that is finalised; run "
            "data_setup.prepare"
        ) from error
    if cfg.train.ckpt_dir is None:
        return "store readable, no checkpoints (train.ckpt_dir is null)"
    data = os.urandom(16)
    probe = storage.join(cfg.train.ckpt_dir, f".write_check_{platform.node()}_{os.getpid()}")
    storage.write_bytes(probe, data, options)
    stored = storage.read_bytes(probe, options)
    storage.remove(probe, options)
    if stored != data:
        raise UserError(f"train.ckpt_dir: {probe}: expected the bytes that were written, found others")
    is_shared = storage.is_remote(cfg.train.ckpt_dir)
    warning = "" if is_shared else " (on the first worker's disk, lost with its VM)"
    return f"store readable, checkpoints writable{warning}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def main(argv: list[str] | None = None) -> int:
    """Print what this machine can do; 1 where the demo cannot run."""
    parser = Parser(
        prog="python -m utils.doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="try only the paths of this configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    args = parser.parse_intermixed_args(argv)
    if args.config:
        from utils.cli import errors_in_one_line

        with errors_in_one_line():
            print(check_paths(args.config, args.overrides))
        return 0
    print("the doctor looks at Python, packages, device, codecs and disk: seconds", flush=True)
    findings = examine()
    print(page(findings))
    return int(any(finding.state == MISSING for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
