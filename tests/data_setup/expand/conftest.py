"""Archives and a tree on the disk, for the tests of this folder."""

from pathlib import Path

import pytest

from tests.data_setup.expand.archives import Disk


@pytest.fixture
def disk(tmp_path: Path, capsys: pytest.CaptureFixture) -> Disk:
    return Disk(tmp_path, capsys)
