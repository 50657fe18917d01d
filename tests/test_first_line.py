"""The first line of a command says what it is about to do, before torch takes seconds to import."""

from __future__ import annotations

import pytest

from tests.support.process_factory import MODULE_OF_WORDS, run_copies

IMPORTS = """
import sys
sys.modules["torch"] = None  # to import it is an error
import data_setup.jobs, data_setup.store.reader, utils.cli, utils.config.load
"""
FIRST_LINES = {  # command and words -> how its first line begins
    "data_setup.index no/folder": "index: files below no/folder",
    "data_setup.prepare --config configs/smoke_test.yaml data.gcs_root=no/tree": "prepare: no/tree/",
    "data_setup.prepare --config configs/smoke_test.yaml --check-only data.gcs_root=no/tree": (
        "prepare --check-only: no/tree: look at the headers"
    ),
    "data_setup.prepare --config configs/smoke_test.yaml --verify data.store=no/store": (
        "prepare --verify: no/store: read every volume"
    ),
    "models.weights export --checkpoint configs --out no/out": "models.weights export: configs;",
    "models.weights selftest configs": "models.weights selftest: configs;",
    "pretraining.train --config configs/smoke_test.yaml data.store=STORE": (
        "pretraining.train: configs/smoke_test.yaml;"
    ),
    "finetuning.train --config configs/layers.yaml model.checkpoint=configs": "finetuning.train: configs/",
    "finetuning.evaluate --head configs": "finetuning.evaluate: configs;",
    "finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints configs": "finetuning.compare: ",
    "finetuning.predict --checkpoint configs --files README.md --out no/out": "finetuning.predict: configs;",
    "finetuning.embed --checkpoint configs --store no/store --out no/out": "finetuning.embed: configs;",
}
TABLE = "task.labels_path=no/table.csv"
REFUSED = {  # command and words -> what the one line says
    f"finetuning.train --config configs/cls_linear_probe.yaml {TABLE}": "no/table.csv",
    f"finetuning.evaluate --config configs/cls_linear_probe.yaml {TABLE}": "no/table.csv",
    "finetuning.train --config configs/layers.yaml": "model.checkpoint: expected a checkpoint",
    "finetuning.train --config configs/layers.yaml model.checkpoint=no/run": "no/run",
    "finetuning.evaluate --config configs/layers.yaml model.checkpoint=no/run": "no/run",
    f"finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints docs {TABLE}": "no/table.csv",
    "finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints a --columns b": "--columns",
    "finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints configs no/run": "no/run",
    "finetuning.evaluate --head no/run": "no/run",
    "finetuning.predict --checkpoint no/run --out b --files no/scan": "no/run",
    "finetuning.predict data.workers --checkpoint configs --out b --files README.md": "data.workers",
    "finetuning.predict eval.split=val --checkpoint configs --out b --files docs": "'eval.split=val'",
    "finetuning.predict data.worker=2 --checkpoint configs --out b --files docs": "data.worker: unknown key",
    "finetuning.evaluate --head configs head.hidden=8": "expected only changes of data., eval., run., ",
    "finetuning.embed --checkpoint configs --out b --store c model.size=s": "override 'model.size=s'",
    "finetuning.embed --checkpoint no/run --out b --store c": "no/run",
    "finetuning.embed --checkpoint configs --out b --store c data.workers": "data.workers",
    "pretraining.train --config configs/smoke_test.yaml optim.base_lrr=1": "optim.base_lrr",
    "pretraining.train --config configs/smoke_test.yaml data.store=no/store": "no/store: expected a prepared",
    "models.weights inspect no/file.pt": "path no/file.pt",
    "models.weights export --checkpoint no/run.pt --out no/out": "--checkpoint no/run.pt",
    "benchmarks.evidence real --data no/eyes --only foo": "--only: expected some of surroundings, ",
    "benchmarks.phantom_truth --config configs/smoke_test.yaml --control no/run model.size=q": "model.size",
}


Done = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """What became of every line, where torch cannot be imported."""
    folder, lines = tmp_path_factory.mktemp("lines"), [*FIRST_LINES, *REFUSED]
    (folder / "index.parquet").touch()
    each = [line.replace("STORE", str(folder)).split() for line in lines]
    return dict(zip(lines, run_copies(IMPORTS, MODULE_OF_WORDS, each, folder, in_turn=True), strict=True))


@pytest.mark.parametrize("line", FIRST_LINES)
def test_a_command_first_says_what_it_is_about_to_do(line: str, done: Done) -> None:
    _, output, errors = done[line]
    assert output.startswith(FIRST_LINES[line]), errors


@pytest.mark.parametrize("line", REFUSED)
def test_words_and_tables_are_refused_before_torch(line: str, done: Done) -> None:
    code, output, errors = done[line]
    assert (code, output, errors.count("\n")) == (2, "", 1), errors
    assert REFUSED[line] in errors
