"""What is shipped beside the code: the container's files, conda's environment, the citation."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import yaml

from utils.doctor import OLDEST_PYTHON

ROOT = Path(__file__).resolve().parents[1]


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
