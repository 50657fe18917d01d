"""The portable program as an ONNX file (opset of torch.onnx), for runtimes without torch.

In: the program of torch.export. Out: the bytes of one file, or the reason why there is none. Writing needs
onnx and onnxscript, running needs onnxruntime: `pip install onnx onnxscript onnxruntime`.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

LARGEST_BYTES = 2**31 - 2**20  # of one protocol buffer, less what is no weight


def why_no_onnx(module: torch.nn.Module, largest_bytes: int = LARGEST_BYTES) -> str | None:
    """The first reason why this program has no ONNX file; None if it has one."""
    lacking = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed (pip install onnx onnxscript)"
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if size > largest_bytes:
        return f"one file holds {largest_bytes / 1e9:.2g} GB, the weights are {size / 1e9:.2g} GB"
    return None


def to_onnx(exported: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """The program as one ONNX file."""
    with _quiet():
        program = torch.onnx.export(
            exported, dynamo=True, input_names=inputs, output_names=outputs, verbose=False
        )
    assert program is not None
    return program.model_proto.SerializeToString()


def can_run() -> bool:
    """Whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on torchvision, and torch's own use of what it is about to drop."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            yield
    finally:
        log.setLevel(level)
