"""The house rules that no single module can keep: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("utils", "models", "data_setup", "pretraining", "finetuning")
MAY_IMPORT = {
    "utils": {"utils"},
    "models": {"models", "utils"},
    "data_setup": {"data_setup", "utils"},
    "pretraining": {"pretraining", "data_setup", "models", "utils"},
    "finetuning": {"finetuning", "data_setup", "models", "utils"},
}
URL_LIBRARIES = {"fsspec", "gcsfs", "s3fs", "google", "aiohttp"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.split(".")[0] for name in found}


MODULES = sorted(p for folder in FOLDERS for p in (ROOT / folder).glob("**/*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_dependency_direction(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    ours = imports(path) & {*FOLDERS, "tests", "benchmarks"}
    assert ours <= MAY_IMPORT[folder], f"{path}: {ours - MAY_IMPORT[folder]}"


def test_xla_stays_in_its_files() -> None:
    allowed = {"utils/runtime/xla.py", "models/kernels/xla.py", "pretraining/tpu_fit/trace.py"}
    assert {str(p.relative_to(ROOT)) for p in MODULES if "torch_xla" in imports(p)} <= allowed
    using = [p for p in MODULES if "from utils.runtime.xla import" in p.read_text()]
    assert [str(p.relative_to(ROOT)) for p in using] == ["utils/runtime/single.py"]


def test_only_storage_knows_urls() -> None:
    knowing = {str(p.relative_to(ROOT)) for p in MODULES if imports(p) & URL_LIBRARIES}
    assert knowing <= {"utils/storage/__init__.py", "utils/storage/clients.py"}


def test_only_the_store_opens_zarr() -> None:
    knowing = {str(p.relative_to(ROOT)) for p in MODULES if "zarr" in imports(p)}
    assert knowing <= {
        "data_setup/store/reader.py",
        "data_setup/store/writer.py",
        "utils/storage/zarr_keys.py",
    }


def test_pydicom_stays_in_data_setup() -> None:
    knowing = {p.relative_to(ROOT).parts[0] for p in MODULES if "pydicom" in imports(p)}
    assert knowing == {"data_setup"}
