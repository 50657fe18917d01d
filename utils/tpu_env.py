"""The two environments of `pretraining.tpu_fit`, built on first use; `python -m utils.tpu_env` does it ahead.

.venv-xla records a training step (torch_xla, and the jax that its kernels need), .venv-aot compiles it (jax
and libtpu). Together about 9 GB; neither needs a TPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from utils.config import UserError, run_cli

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = {
    "xla": ("-r", "requirements.txt", "torch==2.9.1", "torch_xla==2.9.0", "jax==0.7.1", "jaxlib==0.7.1"),
    "aot": ("-r", "requirements-aot.txt"),
}


def environment(name: str) -> Path:
    """The interpreter of .venv-NAME, which is built if it is not there; UserError when that fails."""
    folder = ROOT / f".venv-{name}"
    python, mark = folder / "bin" / "python", folder / "tpu_fit.installed"
    wanted = "\n".join([*REQUIREMENTS[name], *_pins(name)])
    if mark.is_file() and mark.read_text() == wanted:
        return python
    print(f"building {folder.name}: minutes and gigabytes, once", file=sys.stderr, flush=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder)], folder)
    _run(
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *REQUIREMENTS[name]],
        folder,
    )
    mark.write_text(wanted)
    return python


def _pins(name: str) -> list[str]:
    return [(ROOT / part).read_text() for part in REQUIREMENTS[name] if part.endswith(".txt")]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PIP_NO_INPUT": "1"}, check=False)
    if done.returncode:
        raise UserError(f"{folder}: expected pip to fill it, found exit code {done.returncode}: see above")


def main() -> int:
    for name in REQUIREMENTS:
        print(environment(name))
    return 0


if __name__ == "__main__":
    run_cli(main)
