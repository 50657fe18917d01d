"""The installed commands: `oct-prepare` is `python -m data_setup.prepare`, and so on ([project.scripts])."""

from __future__ import annotations

from runpy import run_module


def _run(module: str) -> None:
    """As `python -m MODULE`: help comes before anything that takes seconds to import."""
    run_module(module, run_name="__main__", alter_sys=True)


def check() -> None:
    _run("data_setup.check")


def doctor() -> None:
    _run("utils.doctor")


def embed() -> None:
    _run("finetuning.embed")


def evaluate() -> None:
    _run("finetuning.evaluate")


def expand() -> None:
    _run("data_setup.expand")


def finetune() -> None:
    _run("finetuning.train")


def index() -> None:
    _run("data_setup.index")


def phantom() -> None:
    _run("data_setup.phantom")


def plug() -> None:
    _run("data_setup.plug")


def predict() -> None:
    _run("finetuning.predict")


def prepare() -> None:
    _run("data_setup.prepare")


def pretrain() -> None:
    _run("pretraining.train")


def report() -> None:
    _run("utils.report")


def segment() -> None:
    _run("finetuning.segment")


def truth() -> None:
    _run("benchmarks.phantom_truth")


def weights() -> None:
    _run("models.weights")
