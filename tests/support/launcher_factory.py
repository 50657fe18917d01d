"""A TPU VM of folders for run_tpu_xla.sh: a source tree under git, the stand-in for gcloud, the workers."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.pipeline_factory import ROOT

FAKE = ROOT / "tests" / "support" / "fake_gcloud.py"
IDENTITY = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Pod:
    """`run_tpu_xla.sh` of a tree of its own, and `size` workers that it reaches through gcloud."""

    def __init__(self, folder: Path, size: int, **environment: str) -> None:
        self.folder, self.size = folder, size
        self.source = folder / "source tree"
        self.source.mkdir(parents=True)
        self.state: dict[str, Any] = {
            "account": "someone@example.com",
            "name": "pod",
            "state": "READY",
            "addresses": ["127.0.0.1"] * size,
            "environment": environment,
            "unreachable": [],
        }
        for worker in range(size):
            self.home(worker).mkdir()
        program = folder / "bin" / "gcloud"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE}" "$@"\n')
        program.chmod(0o755)
        # The key that gcloud makes on its first connection; without it workers are visited one by one.
        key = folder / "home" / ".ssh" / "google_compute_engine"
        key.parent.mkdir(parents=True)
        key.touch()
        self.set()

    def home(self, worker: int) -> Path:
        return self.folder / f"worker_{worker}"

    def clone(self, worker: int) -> Path:
        return self.home(worker) / "the clone"

    def set(self, **changes: Any) -> None:
        """What the TPU VM is like from now on."""
        self.state.update(changes)
        (self.folder / "state.json").write_text(json.dumps(self.state))

    def calls(self) -> list[str]:
        """Every call of gcloud so far."""
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    def commit(self, **files: str) -> str:
        """Write files into the source tree and commit everything; returns the commit."""
        for name, text in files.items():
            path = self.source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if not (self.source / ".git").exists():
            git(self.source, "init", "-q")
        git(self.source, "add", "-A")
        git(self.source, "commit", "-q", "-m", "Test")
        return git(self.source, "rev-parse", "HEAD")

    def launch(
        self, *words: str, tpu: str | None = "pod", gcloud: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """The launcher's answer. With `tpu` None, a run in the foreground."""
        chosen = ["--tpu", tpu] if tpu else []
        return subprocess.run(
            [self.source / "run_tpu_xla.sh", *chosen, *words],
            cwd=self.folder,
            env=self.environment(gcloud, environment),
            capture_output=True,
            text=True,
            timeout=300,
        )

    def environment(self, gcloud: bool = True, more: dict[str, str] | None = None) -> dict[str, str]:
        """Of the machine that the launcher runs on."""
        paths = [str(self.folder / "bin"), os.environ["PATH"]]
        if not gcloud:  # the few programs that the launcher needs before it looks for gcloud
            paths = [str(self.folder / "few")]
            for name in ("bash", "dirname", "git", "env", "sed", "date"):
                link = Path(paths[0], name)
                link.parent.mkdir(exist_ok=True)
                if not link.exists():
                    link.symlink_to(shutil.which(name) or name)
        return {
            "PATH": os.pathsep.join(paths),
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "FAKE_GCLOUD": str(self.folder),
            "OCT_DIR": "the clone",
            "OCT_MIN_DISK_GB": "0",
            "OCT_START_GRACE_S": "240",
            **(more or {}),
        }

    def pid(self, worker: int) -> int:
        """Of the process that the worker's launcher started."""
        return int((self.clone(worker) / "runs/launcher/process").read_text().split()[0])

    def started(self) -> list[int]:
        """The last process of every worker on which there was one."""
        workers = [w for w in range(self.size) if (self.clone(w) / "runs/launcher/process").exists()]
        return [self.pid(worker) for worker in workers]

    def log_text(self, worker: int) -> str:
        return (self.clone(worker) / "runs/launcher/log").read_text()


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        time.sleep(0.05)


def copy_tree(target: Path) -> None:
    """The tree under test as it is, without what git ignores."""
    for name in ("configs", "data_setup", "models", "pretraining", "finetuning", "utils"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run_tpu_xla.sh", ".gitignore", "requirements.txt"):
        shutil.copy(ROOT / name, target / name)


CONFIG = "configs/small.yaml"
OVERRIDES = ("data.store=/the store/it's", "spatial.image_size=[8,24,32]", "a.b=$HOME;*")


def launch(pod: Pod, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return pod.launch(*words, OCT_VENV=str(pod.folder / "venv"), **environment)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return (done.stdout + done.stderr).splitlines()
