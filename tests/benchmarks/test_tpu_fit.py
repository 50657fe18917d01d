"""tpu_fit: what is read from a compiler's answer, what follows from it, and, marked xla, the whole way."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.evidence.arms import JEPA
from benchmarks.tpu_fit import cli as tpu_fit
from benchmarks.tpu_fit.compile import collectives, shape_bytes, unpack_booleans, wanted_bytes
from benchmarks.tpu_fit.env import environment, requirements
from benchmarks.tpu_fit.topologies import TOPOLOGIES
from benchmarks.tpu_fit.verdict import PARTS, describe, facts_of
from tests.support.model_factory import small_config
from utils.config.load import load_config, to_yaml
from utils.errors import ConfigError, UserError
from utils.runtime.device_peak import device_peak

ROOT = Path(__file__).resolve().parents[2]
VJEPA2 = "configs/pretrain_oct_vjepa2.yaml"
# lines of two programs that libtpu 0.0.51 compiled for v4:2x2x4, attributes shortened; the last three, whose
# results come later, are written after the form that XLA documents for them
HLO = """
  %fusion.2 = f32[64,2048]{1,0:T(8,128)S(3)} fusion(%copy-done, %all-gather.1), kind=kOutput, calls=%fused
  %all-gather.1 = bf16[2048,2048]{1,0:T(8,128)(2,1)S(3)} all-gather(%convert.1), channel_id=2, dimensions={0}
  %all-to-all = f32[64,16,128]{2,0,1:T(8,128)S(3)} all-to-all(%copy_bitcast_fusion.3), channel_id=9
  %all-reduce.1 = f32[2048,2048]{1,0:T(8,128)S(3)} all-reduce(%fusion.2), channel_id=19, to_apply=%add.1.clone
  %all-reduce.2 = (f32[8]{0:T(128)}, f32[2,4]{1,0:T(8,128)}) all-reduce(%a, %b), channel_id=20, to_apply=%add
  ROOT %multiply_subtract_fusion = f32[128,2048]{1,0:T(8,128)} fusion(%custom-call, %all-reduce.1), kind=kLoop
  %all-gather-start = ((f32[8]{0:T(128)}), (f32[128]{0:T(128)})) all-gather-start(%c), channel_id=21
  %collective-permute-start = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%d)
  %all-gather-done = f32[128]{0:T(128)} all-gather-done(%all-gather-start)
"""
OUT_OF_HBM = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: the total memory required for HLO "
    "temporaries (48.83G) exceeds available HBM (30.75G). HLO module: big.\nSee https://openxla.org/xla/errors"
)
COMPILED = {
    "libtpu": "0.0.51",
    "argument_bytes": 3 * 2**30,
    "output_bytes": 2 * 2**30,
    "alias_bytes": 2 * 2**30,
    "temporary_bytes": 5 * 2**30,
    "code_bytes": 0,
    "flops": 300e12,
    "bytes_accessed": 2400e9,
    "collectives": {"all-reduce": {"count": 2, "bytes": 30_000_000_000}},
}
TRACED = {
    "accumulation": 1,
    "flops": {"model": 275e12},
    "bytes": {"parameters": 2**30, "target": 2**29, "optimizer": 2**30, "batch": 2**29},
    "volume_bytes": 10_000_000,
    "worker_libtpu": "0.0.21",
}


def facts(**compiled: Any) -> dict[str, Any]:
    cfg = load_config(ROOT / VJEPA2)
    return facts_of(VJEPA2, "v4-32", cfg, TRACED, COMPILED | compiled, volumes=57_600)


def test_collectives_are_counted_once_with_what_they_leave() -> None:
    assert collectives(HLO) == {
        "all-gather": {"count": 2, "bytes": 2048 * 2048 * 2 + 128 * 4},
        "all-to-all": {"count": 1, "bytes": 64 * 16 * 128 * 4},
        "all-reduce": {"count": 2, "bytes": 2048 * 2048 * 4 + 64},
        "collective-permute": {"count": 1, "bytes": 64},
    }


def test_a_type_without_a_size_is_no_zero() -> None:
    with pytest.raises(KeyError):
        shape_bytes("f4[3]")


def test_what_a_program_wanted_of_the_memory() -> None:
    assert wanted_bytes(OUT_OF_HBM) == (48.83 * 2**30, 30.75 * 2**30)
    assert wanted_bytes("Ran out of memory. Used 512M of 15.48G hbm.") == (2.0**29, 15.48 * 2**30)
    assert wanted_bytes("INVALID_ARGUMENT: expected a module") is None


def test_boolean_constants_are_unpacked() -> None:
    bits = np.random.default_rng(0).random((5, 13)) < 0.5
    packed = np.packbits(bits, bitorder="little").tobytes().hex().upper()
    text = (
        f'%c = constant dense<"0x{packed}"> : tensor<5x13xi1>\n%d = constant dense<"0x0102"> : tensor<2xi8>'
    )
    match = re.search(r'dense<"0x([0-9A-F]+)"> : tensor<5x13xi1>', unpack_booleans(text))
    assert match is not None
    assert np.array_equal(np.frombuffer(bytes.fromhex(match[1]), np.uint8).reshape(5, 13), bits)
    assert unpack_booleans(text).endswith(text.splitlines()[1])
    assert unpack_booleans(unpack_booleans(text)) == unpack_booleans(text)


def test_the_floor_is_the_slowest_of_the_datasheets_peaks() -> None:
    """275 TFLOP/s, 1.2 TB/s and 300 GB/s a chip; 32 volumes a step on 4 hosts."""
    row = facts()
    assert row["fits"]
    assert row["hbm_used_gib"] == 8
    assert sum(row["hbm_parts_gib"].values()) == pytest.approx(8)
    assert row["hbm_parts_gib"]["activations and temporaries"] == pytest.approx(5)
    assert row["floors_s"] == pytest.approx(
        {"arithmetic": 300 / 275, "memory traffic": 2.0, "traffic between chips": 0.1}
    )
    assert (row["step_floor_s"], row["volumes_per_s"]) == (2, 16)
    assert row["epochs_per_hour"] == 1
    assert (row["host_volumes_per_s"], row["host_mb_per_s"]) == (4, 40)
    assert facts(flops=1100e12)["step_floor_s"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        ({}, ("fits: 8.00 of 32 GiB", "+9%", "libtpu 0.0.51, on a TPU worker 0.0.21: memory and traffic")),
        ({"flops": 330e12}, ("+20%, since it also counts",)),
        ({"flops": 220e12}, ("-20%: fewer",)),
        ({"flops": 1100e12}, ("+300%: far more than the products",)),
        ({"libtpu": "0.0.21"}, ("libtpu 0.0.21, as on a TPU worker\n",)),
        (
            {"out_of_hbm": {"wanted_bytes": 48.83 * 2**30, "available_bytes": 30.75 * 2**30}},
            ("wants 48.83 of 30.75 GiB", "libtpu 0.0.51, on a TPU worker 0.0.21: memory and traffic"),
        ),
    ],
)
def test_the_verdict_says_what_was_measured(compiled: dict[str, Any], words: tuple[str, ...]) -> None:
    row = facts(**compiled)
    assert row["fits"] == ("out_of_hbm" not in compiled)
    assert (row["step_floor_s"] is None) == ("out_of_hbm" in compiled)
    assert all(word in describe(row) for word in words)
    assert ("softmax" in describe(row)) == ("+20%" in words[0])


@pytest.mark.xla
def test_a_workers_compiler_is_the_one_that_torch_xla_names() -> None:
    from benchmarks.tpu_fit.trace import libtpu_of_workers

    assert re.fullmatch(r"0\.0\.\d+", libtpu_of_workers())


@pytest.mark.parametrize(("limit", "expected"), [(8, 8), (5, 4), (3, 2), (1, 1), (0, None)])
def test_the_largest_batch_that_fits(
    limit: int,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried = []

    def measure(cfg: Any, topology: str) -> tuple[dict, dict]:
        tried.append(cfg.train.per_core_batch_size)
        too_large = {"out_of_hbm": {"wanted_bytes": 2.0**36, "available_bytes": 2.0**35}}
        return TRACED, COMPILED | (too_large if tried[-1] > limit else {})

    monkeypatch.setattr(tpu_fit, "measure", measure)
    batch = ["train.global_batch_size=256", "train.per_core_batch_size=16"]
    command = ["--config", str(ROOT / VJEPA2), "--topology", "v4-32", "--json", str(tmp_path / "fit.json")]
    assert tpu_fit.main([*command, *batch]) == 1
    assert json.loads((tmp_path / "fit.json").read_text())["largest_batch_that_fits"] == expected
    assert tried[0] == 16
    assert set(tried[1:]) <= {1, 2, 4, 8}
    assert len(tried) <= 4
    output = capsys.readouterr().out
    assert f"train.per_core_batch_size={expected}" in output if expected else "no smaller batch" in output


def test_mistakes_are_told_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu_fit, "measure", lambda cfg, topology: pytest.fail("compiled"))
    command = ["--config", str(ROOT / VJEPA2), "--topology"]
    with pytest.raises(UserError, match="--topology: expected one of v4-8, v4-32, v5e-16, found v9"):
        tpu_fit.main([*command, "v9"])
    with pytest.raises(ConfigError, match=r"train.global_batch_size: expected .* world 16"):
        tpu_fit.main([*command, "v4-32", "train.per_core_batch_size=3"])
    with pytest.raises(UserError, match="--volumes"):
        tpu_fit.main([*command, "v4-32", "--volumes", "0"])
    with pytest.raises(SystemExit, match="2"):
        tpu_fit.main([*command, "v4-32", "--json", "/nowhere/fit.json"])
    assert "argument --json: expected a folder /nowhere, found none" in capsys.readouterr().err


def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = []

    def run(name: str, module: str, arguments: list[str], folder: Path, own: dict[str, str]) -> None:
        if name == "xla":
            assert own == {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "16"}
            (folder / "program").write_bytes(f"program of {cfg.seed}".encode())
            (folder / "program.json").write_text(json.dumps(TRACED | {"aliases": [[0, 0]]}))
        else:
            compiled.append(arguments[1])
            Path(arguments[2]).write_text(json.dumps(COMPILED))

    monkeypatch.setattr(tpu_fit, "_run", run)
    monkeypatch.setattr(tpu_fit, "CACHE", tmp_path)
    for cfg in (small_config(), small_config(), small_config("vjepa2", "seed=1")):
        assert tpu_fit.measure(cfg, "v4-32")[1] == COMPILED
    assert compiled == ["v4-32", "v4-32"]
    assert len(list(tmp_path.iterdir())) == 2

    def fails(*_: object) -> None:
        raise UserError("planted")

    monkeypatch.setattr(tpu_fit, "_run", fails)
    with pytest.raises(UserError, match="planted"):
        tpu_fit.measure(small_config(), "v4-32")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_failure_of_a_process_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    monkeypatch.setattr(tpu_fit, "environment", lambda name: script)
    for code, error in ((2, ConfigError), (1, UserError)):
        script.write_text(f"#!/bin/sh\necho first >&2; echo 'error: the last' >&2; exit {code}\n")
        script.chmod(0o755)
        with pytest.raises(error, match="the last") as caught:
            tpu_fit._run("xla", "benchmarks.tpu_fit.trace", [], tmp_path / "1.partial", {})
        assert "\n" not in str(caught.value)
    assert (tmp_path / "1.log").read_text().startswith("first")
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(UserError, match="expected exit code 0, found its end by SIGKILL"):
        tpu_fit._run("aot", "benchmarks.tpu_fit.compile", [], tmp_path / "1.partial", {})


def test_datasheets() -> None:
    kinds = {"v4": "TPU v4", "v5e": "TPU v5 lite"}
    # GiB, GB/s of the memory, GB/s of the links: 2,400 and 1,600 Gbit/s in the architecture pages
    sheets = {"v4": (32, 1200, 2400 / 8), "v5e": (16, 819, 1600 / 8)}
    for name, place in TOPOLOGIES.items():
        sheet = sheets[place.libtpu_name.split(":")[0]]
        assert (place.hbm_gib, place.hbm_gb_per_s, place.link_gb_per_s) == sheet, name
        peak = device_peak(torch.device("xla"), kinds[place.libtpu_name.split(":")[0]], use_bf16=True)
        assert place.bf16_tflop_per_s * 1e12 == peak.flops_per_s, name
        assert place.chips % place.hosts == 0, name
        assert place.chips == np.prod([int(n) for n in place.libtpu_name.split(":")[1].split("x")]), name


def test_the_environment_that_records_holds_what_a_tpu_worker_holds() -> None:
    lines = requirements("xla")
    assert "torch_xla==2.9.0" in lines
    assert any(line.startswith("jax==") for line in lines)
    assert not [line for line in lines if line.startswith("-r")]


@pytest.mark.xla
def test_a_program_too_large_for_a_chip_is_no_crash(tmp_path: Path) -> None:
    shape = "tensor<100000x65536xf32>"
    body = f"%0 = stablehlo.add %a, %a : {shape}\n return %0 : {shape}"
    program = tmp_path / "program"
    program.write_text(f"module @big {{ func.func @main(%a: {shape}) -> {shape} {{ {body} }} }}")
    program.with_name("program.json").write_text('{"aliases": []}')
    command = [
        str(environment("aot")),
        "-m",
        "benchmarks.tpu_fit.compile",
        str(program),
        "v4-8",
        str(tmp_path / "result"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    memory = json.loads((tmp_path / "result").read_text())["out_of_hbm"]
    assert memory["wanted_bytes"] / 2**30 == pytest.approx(2 * 100000 * 65536 * 4 / 2**30, rel=0.01)
    assert 28 < memory["available_bytes"] / 2**30 < 32


def fit_small_step(folder: Path, *options: str) -> dict[str, Any]:
    """The row of one volume a chip, ViT-Ti, on four chips."""
    tiny = [*JEPA, "method.neighbour_weight=1", "spatial.image_size=[8,32,32]", "method.predictor_depth=1"]
    tiny += ["train.per_core_batch_size=1"]
    command = ["--config", str(ROOT / "configs/smoke_test.yaml"), "--topology", "v4-8"]
    options = ("model.tpu_attention=flash", "train.use_bf16=false", "train.global_batch_size=4", *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_fit, "CACHE", folder / "cache")
        assert tpu_fit.main([*command, "--json", str(folder / "fit.json"), *tiny, *options]) == 0
    return json.loads((folder / "fit.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit_small_step(tmp_path_factory.mktemp("fit"))


@pytest.mark.xla
def test_a_small_step_from_configuration_to_numbers(whole: dict[str, Any]) -> None:
    parts = whole["hbm_parts_gib"]
    trained = parts["optimizer"] / 2  # two moments
    assert parts["parameters"] == pytest.approx(trained, rel=0.01)
    assert 0.8 * trained < parts["target"] < trained  # without the predictor and the layer of the neighbours
    # all that an update moves lies in one buffer before and after; a chip pads small tensors
    assert 1 <= whole["updated_in_place_gib"] / sum(parts[p] for p in PARTS[:3]) < 1.1
    assert parts["activations and temporaries"] > 0
    assert whole["hbm_used_gib"] < 1
    assert whole["xla_flops_per_step"] > 0
    assert whole["libtpu"] in (ROOT / "requirements-aot.txt").read_text()
    # the gradients of all trained weights, in float32, pass between the chips, and no activation does
    moved = sum(entry["bytes"] for entry in whole["collectives"].values()) / 2**30
    assert moved == pytest.approx(trained, rel=0.2)


@pytest.mark.xla
def test_an_image_models_positions_and_tokens_of_no_place_are_traced(tmp_path: Path) -> None:
    folder, counts = tmp_path / "image", []
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "dinov2_with_registers", "num_register_tokens": 4}')
    small = ["spatial.image_size=[8,32,32]", "train.per_core_batch_size=1", "train.global_batch_size=4"]
    for start in ("null", folder):
        cfg = load_config(ROOT / "configs/smoke_test.yaml", [*small, f"method.init_from={start}"])
        config, program = tmp_path / "config.yaml", tmp_path / "program"
        config.write_text(to_yaml(cfg))
        words = ["--config", str(config), "--chips", "4", "--program", str(program)]
        own = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
        tpu_fit._run("xla", "benchmarks.tpu_fit.trace", words, tmp_path / "1.partial", own)
        counts.append(len(json.loads(program.with_name("program.json").read_text())["aliases"]))
    assert counts[1] - counts[0] == 2 * 5  # weight, target, step and two moments of each
