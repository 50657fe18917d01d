"""Folders that play the workers of a TPU VM (tests/support/fake_gcloud.py), for the tests of this folder.

A small program stands in for the training, so that starting, stopping and refusing are seen in seconds;
tests/whole_runs/test_launcher_runs.py trains.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.launcher_factory import CONFIG, Pod
from tests.support.pipeline_factory import ROOT
from tests.support.process_factory import is_running

# Stands where .venv/bin/python would: each command of the launcher, in a way that a test can see. SIGTERM is
# taken as training takes it; what is deaf to it has a process that outlives it.
PYTHON = r"""#!/usr/bin/env bash
train() {
    trap 'echo "stopped by SIGTERM at step 3 of 8"; exit 76' TERM
    if [[ -f ~/deaf ]]; then trap '' TERM; setsid sleep 600 & fi
    while [[ -f ~/slow ]]; do sleep 0.05; done
    echo "opened: 2 x TPU, host 1 of 2"
    echo "resuming"
    until [[ -f ~/exit_code ]]; do sleep 0.05; done
    echo "error: the reason"
    exit "$(<~/exit_code)"
}
case "$*" in
*"torch_xla"*) [[ ! -f ~/no_package ]] ;;
"-m utils.doctor "*) if [[ -f ~/no_store ]]; then echo "error: data.store: none there" >&2; exit 2; fi
    echo "store readable" ;;
"-m pretraining.train "*)
    printf '%s\n' "$PJRT_DEVICE, $OCT_EXPECT_HOSTS hosts" "$@" >>~/argv
    if [[ -f ~/broken ]]; then echo "some words"; echo "error: optim.base_lr: too hot" >&2; exit 2; fi
    train ;;
*) echo "error: no such call: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Two workers, at the commit of the source tree; no test changes them for the next one."""
    folder = tmp_path_factory.mktemp("pod")
    pod = Pod(folder, 2, OCT_DEVICE_GLOB=str(folder / "accel*"))
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (folder / "accel0").touch()
    for name in ("run_tpu_xla.sh", "utils/tpu_worker.sh"):
        (pod.source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, pod.source / name)
    pod.commit(
        **{
            CONFIG: "seed: 0\n",
            "requirements.txt": "numpy\n",
            "requirements-tpu.txt": "-r requirements.txt\n",
            "constraints-tpu.txt": "numpy==2\n",
            ".gitignore": "/runs/\n.venv/\n",
        }
    )
    done = pod.launch("sync")
    assert done.returncode == 0, done
    return pod


@pytest.fixture
def pod(ready: Pod) -> Iterator[Pod]:
    """The workers, on which nothing runs and nothing is known of a run after the test."""
    yield ready
    if any(is_running(pid) for pid in ready.started()):
        ready.launch("stop", "--kill", OCT_STOP_WAIT_S="5")
    for worker in range(ready.size):
        shutil.rmtree(ready.clone(worker) / "runs", ignore_errors=True)
