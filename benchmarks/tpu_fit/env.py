"""The two environments of `benchmarks.tpu_fit`, built on first use, or ahead by
`python -m benchmarks.tpu_fit.env`.

.venv-xla records a training step (torch_xla, and the jax that its kernels need), .venv-aot compiles it (jax
and libtpu). Together about 9 GB; neither needs a TPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.cli import run_cli
from utils.errors import UserError
from utils.help_pages import PeopleParser

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("xla", "aot")


def requirements(name: str) -> list[str]:
    """The requirements of .venv-NAME; recording a program does not need the TPU's own library."""
    if name == "aot":
        return (ROOT / "requirements-aot.txt").read_text().splitlines()
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    own = [line.replace("[tpu]", "") for line in lines if not line.startswith("-r")]
    return (ROOT / "requirements.txt").read_text().splitlines() + own


def environment(name: str) -> Path:
    """The interpreter of .venv-NAME, built if it is missing; UserError if that fails."""
    folder = ROOT / f".venv-{name}"
    python, mark = folder / "bin" / "python", folder / "tpu_fit.txt"
    wanted = "".join(f"{line}\n" for line in requirements(name))
    if mark.is_file() and mark.read_text() == wanted:
        return python
    print(f"building {folder.name}: minutes and gigabytes, once", file=sys.stderr, flush=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder)], folder)
    listed = folder / "tpu_fit.wanted.txt"
    listed.write_text(wanted)
    _run(
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(listed)], folder
    )
    listed.replace(mark)
    return python


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode:
        raise UserError(f"{folder}: expected pip to fill it, found exit code {done.returncode}: see above")


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is missing and print where both lie."""
    assert __doc__ is not None
    PeopleParser("benchmarks.tpu_fit.env", __doc__).parse_args(argv)
    for name in NAMES:
        print(environment(name))
    return 0


if __name__ == "__main__":
    run_cli(main)
