"""The launcher on the workers of a test, and what it answers."""

from __future__ import annotations

import subprocess

from tests.support.launcher_factory import Pod

CONFIG = "configs/small.yaml"
OVERRIDES = ("data.store=/the store/it's", "spatial.image_size=[8,24,32]", "a.b=$HOME;*")


def launch(pod: Pod, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return pod.launch(*words, OCT_VENV=str(pod.folder / "venv"), **environment)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return (done.stdout + done.stderr).splitlines()
