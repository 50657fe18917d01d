"""The accelerator benchmark: the reference computes our loss, a stage that fails or is late is a line."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accelerator import cli, steps, whole
from benchmarks.accelerator.steps import TINY, Stepper, configure, eager_steps, measure, ratios
from data_setup.normalisation import view
from models.vit3d import SIZES, Size
from models.vjepa3d import VJEPA3D
from utils.errors import UserError
from utils.runtime.single import Runtime

CPU = Runtime(torch.device("cpu"), use_bf16=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders of two blocks."""
    monkeypatch.setitem(SIZES, "ti", Size(2, 48, 2))


@pytest.mark.usefixtures("small")
def test_the_reference_has_our_loss_and_our_gradients() -> None:
    theirs = Stepper("reference", TINY, CPU)
    batch, reference = theirs.batch(2), theirs.reference
    assert reference is not None
    torch.manual_seed(0)
    ours = VJEPA3D(configure("plain", TINY, 2)).train()
    for part in (ours.encoder, ours.target_encoder, ours.predictor):
        part.rope = "tiled"
    context_view, target_view = view(batch, 0), view(batch, 1)
    loss = ours(
        context_view, target_view, batch["context"], batch["target"], batch["token_valid"]
    ).loss_B.mean()
    other = reference(context_view, target_view, batch["context"], batch["target"])
    loss.backward()
    other.backward()
    torch.testing.assert_close(loss, other)
    for name in ("encoder.blocks.0.mlp.fc1.weight", "predictor.predictor_blocks.1.attn.proj.weight"):
        same = (
            name.replace("predictor_blocks", "layer").replace("blocks", "layer").replace("attn", "attention")
        )
        torch.testing.assert_close(ours.get_parameter(name).grad, reference.get_parameter(same).grad)


@pytest.mark.usefixtures("small")
def test_batches_grow_until_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    real = steps.train_step

    def train_step(model: Any, optimizer: Any, batches: Any, *rest: Any) -> Any:
        if len(batches[0]["row"]) > 2:
            raise torch.OutOfMemoryError("planted")
        return real(model, optimizer, batches, *rest)

    monkeypatch.setattr(steps, "train_step", train_step)
    written: dict[str, Any] = {}
    eager_steps(steps.Sizes(TINY.overrides, 8), CPU, 1e11, written.__setitem__)
    fits = {(row["kind"], row["batch"]): row["fits"] for row in written["rows"]}
    for kind in ("ours", "checkpointing", "plain", "methods"):
        assert [fits.get((kind, batch)) for batch in (1, 2, 4, 8)] == [True, True, False, None]
    assert all(fits["reference", batch] for batch in (1, 2, 4, 8))
    row = next(row for row in written["rows"] if row["kind"] == "ours")
    flops = Stepper("ours", TINY, CPU).flops
    assert row["mfu"] == pytest.approx(flops / row["step_s"] / 1e11)
    assert set(written["ratios"]) == {"plain, batch 1", "plain, batch 2"}
    page = cli.page(
        {"device": "d", "commands": ["c"], "commit": "0", "machine": "m"},
        {"steps": {"status": "done", **written}},
    )
    assert "| ours | 4 | does not fit |" in page
    assert "| ratios: plain, batch 1 |" in page


def test_a_ratio_is_of_the_same_batch_and_the_same_compiler() -> None:
    rows = [
        {"kind": kind, "batch": 1, "fits": True, "step_s": s}
        for kind, s in (("plain", 3.0), ("reference", 4.0))
    ]
    rows += [{"kind": "plain, compiled", "batch": 1, "fits": True, "step_s": 1.0}]
    assert ratios(rows) == {"plain, batch 1": 0.75}
    rows += [{"kind": "reference, compiled", "batch": 1, "fits": True, "step_s": 2.0}]
    assert ratios(rows)["plain, compiled, batch 1"] == 0.5


def test_a_stage_that_fails_or_is_late_is_a_line_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"device": 2, "steps": 3, "compiled": 4, "input": 51}
    monkeypatch.setattr(cli, "SECONDS", shares)
    bench = cli.Bench(tmp_path, 1, shares, tiny=True)
    ends = [round(bench.ends(name) - bench.begins) for name in shares]
    assert ends == [2, 5, 9, 60], "what a stage leaves is for the next ones"

    def late(put: Any) -> None:
        put("rows", [])
        time.sleep(20)

    def mistaken(_: Any) -> None:
        try:
            time.sleep(20)
        except cli.TimeUp as error:
            raise ValueError("a compiler's own words") from error

    def failing(_: Any) -> None:
        raise ValueError("expected a device, found none")

    began = time.monotonic()
    numbers = {"a": 1.5, "inner": {"b": float("nan")}, "c": float("inf"), "d": None}
    works = ("device", lambda _: numbers), ("steps", late), ("compiled", mistaken), ("input", failing)
    for name, work in works:
        bench.run(name, work)
    assert time.monotonic() - began < 15
    text = (tmp_path / "results.json").read_text()
    stages = json.loads(text, parse_constant=pytest.fail)["stages"]  # NaN and Infinity are no JSON
    assert re.fullmatch("out of time after [1-5] s", stages["steps"]["status"])
    assert stages["steps"]["rows"] == [], "what was measured before stays"
    assert re.fullmatch("out of time after [1-8] s", stages["compiled"]["status"])
    assert stages["input"]["status"] == "failed: ValueError: expected a device, found none"
    assert stages["device"].pop("seconds") >= 0
    assert stages["device"] == {"status": "done", "a": 1.5, "inner": {"b": None}, "c": None, "d": None}
    text = (tmp_path / "page.md").read_text()
    for line in (
        f"steps | {stages['steps']['status']} |",
        "a | 1.5 |",
        "d | not measured |",
        "inner: b | not measured |",
    ):
        assert f"| {line}" in text


def test_what_cannot_be_begun_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, foreign = tmp_path / "file", tmp_path / "foreign"
    file.touch()
    (foreign / "pretrained").mkdir(parents=True)
    for out, words in ((file, "a folder that can be written, found .*exists"), (foreign, "an empty folder")):
        with pytest.raises(UserError, match=f"--out: expected {words}"):
            cli.main(["--out", str(out)])
    assert (foreign / "pretrained").exists()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--out", str(tmp_path / "new"), "--stages", "steps,step"])
    wanted: list[str] = []
    monkeypatch.setattr(cli, "run_stages", lambda bench: wanted.extend(bench.wanted))
    assert cli.main(["--out", str(tmp_path / "new"), "--stages", "steps"]) == 0
    assert wanted == ["device", "steps"], "MFU needs a peak"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "run_stages", full)
    with pytest.raises(UserError, match="No space left"):
        cli.main(["--out", str(tmp_path / "new")])


def test_a_second_call_keeps_what_the_first_one_measured(tmp_path: Path) -> None:
    first = cli.Bench(tmp_path, 9, ["steps", "input"], tiny=True)
    for name in first.wanted:
        first.run(name, lambda _: {"rows": [{"kind": "ours", "batch": 4, "fits": False}]})
    second = cli.Bench(tmp_path, 2, ["input"], tiny=True)
    known = json.loads((tmp_path / "results.json").read_text())
    assert (list(known["stages"]), second.stages["steps"]["rows"][0]["batch"]) == (["steps"], 4)
    assert [line.split("--minutes ")[1][0] for line in known["commands"]] == ["9", "2"]
    (tmp_path / "results.json").write_text(json.dumps(known | {"commit": "another"}))
    assert not cli.Bench(tmp_path, 2, ["input"], tiny=True).stages


def test_a_store_that_was_carried_along_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree is made again from the seed, and nothing is prepared."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "prepare_report.json").write_text("{}")
    made: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(whole, "make_phantom", lambda *words: made.append(words))
    monkeypatch.setattr(whole.prepare, "main", pytest.fail)
    cli.Bench(tmp_path, 9, tiny=True)
    assert whole.phantom_and_store(tmp_path, whole.FULL) == {"phantom_bytes": 0, "store_bytes": 2}
    assert made == [(tmp_path / "phantom", 100, 0)]


@pytest.mark.usefixtures("small")
def test_without_a_peak_there_is_no_share_of_it() -> None:
    row = measure(Stepper("plain", TINY, CPU), 1, None)
    assert row is not None
    assert row["mfu"] is None
    facts = {"device": "d", "commands": ["c"], "commit": "0", "machine": "m"}
    rows = [{"kind": "methods", "batch": 1, "fits": True, **row}]
    assert "| not measured |" in cli.page(facts, {"steps": {"status": "done", "rows": rows}})


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # a training of each stage, and torch's compiler
def test_the_whole_command_at_sizes_for_a_cpu(tmp_path: Path) -> None:
    code = cli.main(["--tiny", "--minutes", "90", "--out", str(tmp_path)])  # a share holds on a slow CPU
    stages = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert code == 0, {name: values["status"] for name, values in stages.items()}
    assert list(stages) == list(cli.SECONDS)
    assert stages["resume"]["a_stopped_run_is_equal"]
    assert stages["resume"]["two_runs_are_equal"]
    assert "skipped" in stages["tests"]["summary"] or torch.cuda.is_available()
    assert {question["name"] for question in stages["truth"]["questions"]} == {"occupancy", "thickness"}
    assert "plain, compiled, batch 2" in stages["compiled"]["ratios"]
    assert stages["input"]["over_the_step"] > 0
    assert stages["predict"]["second_s"] > 0
    assert stages["pretrain"]["train/loss"] > 0
