"""Setup installs the lock once, with uv or what brings it, and the lock has every requirement."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement

from tests.support.launcher_factory import Pod, git
from tests.support.pipeline_factory import ROOT
from tests.utils.launcher.launching import lines

# Stand for programs of a worker's image: uv, and what brings uv where it is missing. Their calls are noted.
IMAGE = {
    "uv/uv": r"""
        if [[ -f ~/no_index ]]; then echo "Resolving"; echo "error: no index"; exit 1; fi >&2
        if [[ $1 == venv ]]; then exec PYTHON -m venv --clear --without-pip .venv; fi
        packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
        mkdir -p "$packages/torch_xla"
        if [[ -f ~/broken_wheel ]]; then echo "import _XLAC"; fi >"$packages/torch_xla/__init__.py"
        """.replace("PYTHON", sys.executable),
    "no_uv/python3": r"""
        if [[ ! -f ~/pip ]]; then echo "No module named pip" >&2; exit 1; fi
        if [[ $3 == install ]]; then mkdir -p "$6/bin" && cp "${0%/*}/../uv/uv" "$6/bin"; fi""",
    "no_uv/sudo": '[[ $* != *" install "* ]] || touch ~/pip',
}
INSTALL = "uv pip install --python .venv/bin/python -r requirements-tpu.txt -c constraints-tpu.txt"


@pytest.fixture
def image(pod: Pod) -> Iterator[dict[str, str]]:
    """A PATH of workers that have uv, and of workers that have neither uv nor pip."""
    for name, text in IMAGE.items():
        program = pod.folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/usr/bin/env bash\necho "{program.name} $*" >>~/calls\n{text}\n')
        program.chmod(0o755)
    yield {name: f"{pod.folder}/bin:{pod.folder}/{name}:/usr/bin:/bin" for name in ("uv", "no_uv")}
    for worker in range(pod.size):
        shutil.rmtree(pod.clone(worker) / ".venv", ignore_errors=True)
        (pod.home(worker) / "calls").unlink()


def calls(pod: Pod) -> list[str]:
    return (pod.home(1) / "calls").read_text().splitlines()


def test_setup_installs_the_lock_once_and_shows_its_log_where_it_fails(pod: Pod, image: dict) -> None:
    (pod.home(0) / "broken_wheel").touch()
    done = pod.launch("setup", PATH=image["uv"])
    (pod.home(0) / "broken_wheel").rename(pod.home(0) / "no_index")
    assert done.returncode == 1
    assert "worker 0: ModuleNotFoundError: No module named '_XLAC'" in lines(done)
    done = pod.launch("setup", PATH=image["uv"])
    (pod.home(0) / "no_index").unlink()
    assert done.returncode == 1
    log = pod.clone(0) / "runs/launcher/setup.log"
    assert lines(done) == [
        "worker 0: Resolving",
        "worker 0: error: no index",
        f"worker 0: error: environment .venv: not installed, see above and {log}",
        "worker 1: environment .venv: nothing to do",
        "error: not set up: see worker 0",
    ]
    done = pod.launch("setup", PATH=image["uv"])
    assert lines(done) == [
        "worker 0: environment .venv: installed constraints-tpu.txt",
        "worker 1: environment .venv: nothing to do",
    ]
    assert calls(pod) == ["uv venv --clear --python 3.11 .venv", f"{INSTALL} --torch-backend=cpu"]
    soname = sysconfig.get_config_var("INSTSONAME")
    links = list(pod.clone(0).glob("**/torch_xla/lib/*"))
    assert [(link.name, link.exists()) for link in links] == [(soname, True)] * (not soname.endswith(".a"))
    assert git(pod.clone(0), "status", "--porcelain") == ""
    options = {"OCT_UV_OPTIONS": "--extra-index-url file:///wheels", "OCT_PYTHON": "3.12"}
    assert pod.launch("setup", PATH=image["uv"], **options).returncode == 0
    assert calls(pod)[2:] == [
        "uv venv --clear --python 3.12 .venv",
        f"{INSTALL} --extra-index-url file:///wheels",
    ]


def test_setup_brings_uv_where_there_is_none(pod: Pod, image: dict) -> None:
    done = pod.launch("setup", PATH=image["no_uv"])
    assert done.returncode == 0, done
    apt = "sudo -n apt-get -o DPkg::Lock::Timeout=600 -q"
    assert calls(pod) == [
        "python3 -m pip --version",
        f"{apt} update",
        f"{apt} install -y python3-pip",
        "python3 -m pip install -q --target runs/launcher/uv uv",
        "uv venv --clear --python 3.11 .venv",
        f"{INSTALL} --torch-backend=cpu",
    ]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-tpu.txt"])
def test_every_requirement_of_a_worker_is_locked(name: str) -> None:
    locked = dict(
        line.split("==") for line in (ROOT / "constraints-tpu.txt").read_text().splitlines() if "==" in line
    )
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-r")):
            wanted = Requirement(line)
            assert wanted.specifier.contains(locked[wanted.name.replace("_", "-")]), line
    assert not [package for package in locked if package.startswith(("nvidia", "triton"))]
