"""What an accelerator makes of this code, in a few minutes: steps, input, whole runs, against the reference.

    python -m benchmarks.accelerator --minutes 9 --out DIR
    python -m benchmarks.accelerator --tiny --minutes 9 --out DIR
    python -m benchmarks.accelerator --stages phantom --out DIR

In: the time, and a folder. Out: DIR/results.json, written again after every number, and DIR/page.md with its
tables; what an earlier call of the same commit and device left in them stays. One process; a stage that
fails or is out of time is a line, and the next one begins, with the time that earlier ones left:
  phantom     a phantom of 100 people and its store, where DIR does not hold them. The third command makes
              them beforehand: carry DIR/store along (27 MB; a folder that git ignores), and its phantom is
              made again from the seed. Runs that DIR holds are removed and made again
  device      what the driver tells, and the rate of matrix products; steps and compiled bring it along
  tests       the tests marked gpu, NCCL with one GPU among them
  steps       ViT-B [64, 384, 384] of configs/pretrain_oct_vjepa2.yaml from one volume upwards until memory
              ends: ours, with activation checkpointing, recipe methods, and without penalty and loss of
              neighbours against Hugging Face's V-JEPA 2
  compiled    the steps at their largest batch with torch.compile, the reference's too
  resume      a run that SIGTERM stops against one that nothing stops, bit for bit
  pretrain    three minutes of ViT-S on the phantom, its last gauges
  predict     seconds from a file to its answer
  truth       its answers beside the rows that need no encoder (benchmarks.phantom_truth)
  input       the loader from a store of that grid, over what the step takes
--tiny: the same stages at sizes for a CPU. The sizes of a table's rows are in it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.accelerator import steps, whole
from utils.cli import number_from
from utils.errors import UserError
from utils.help_pages import PeopleParser
from utils.log import setup_logging
from utils.provenance import git_commit
from utils.runtime.device_peak import device_peak, measure_matmul
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

SECONDS = {  # shares of the time; in the order in which the stages run
    "phantom": 40, "device": 10, "tests": 55, "steps": 80, "compiled": 50, "resume": 40, "pretrain": 185,
    "predict": 20, "truth": 40, "input": 20,
}  # fmt: skip
GRACE_S = 30  # beyond all, in which a call that never returns to Python is ended
OURS = "results.json", "store"
Values = dict[str, Any]


class TimeUp(BaseException):
    """The stage has had its time; no Exception, which a compiler would catch."""


def machine() -> str:
    """Processor, threads and PyTorch in one line."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


class Bench:
    """The stages' numbers so far, in a file that is whole after each of them."""

    def __init__(self, out: Path, minutes: float, wanted: Iterable[str] = SECONDS, *, tiny: bool) -> None:
        self.out, self.tiny, self.wanted = out, tiny, [name for name in SECONDS if name in set(wanted)]
        self.minutes, self.begins = minutes, time.monotonic()
        self.runtime: Runtime = open_runtime(use_bf16=True)
        self.stages: dict[str, Values] = {}
        self.facts: Values = {
            "commit": git_commit(),
            "machine": machine(),
            "device": self.runtime.device_name,
        }
        words = f"--minutes {minutes:g}{' --tiny' if tiny else ''} --stages {','.join(self.wanted)}"
        self.commands = [f"python -m benchmarks.accelerator {words}"]
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not any((out / name).exists() for name in OURS):
            raise UserError(
                f"--out: expected an empty folder, or one with {' or '.join(OURS)} of an earlier run, found "
                f"other files in {out}; runs are removed there, so name a new folder"
            )
        self._keep_earlier()
        self.write()

    def _keep_earlier(self) -> None:
        """What an earlier call has measured of other stages, if it was of this commit and device."""
        file = self.out / "results.json"
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if known and all(known.get(name) == value for name, value in self.facts.items()):
            self.stages = {name: v for name, v in known["stages"].items() if name not in self.wanted}
            self.commands = [*known["commands"], *self.commands]

    def ends(self, name: str) -> float:
        """When a stage has to be over: it has its share, and what those before it left."""
        shares = [SECONDS[other] for other in self.wanted]
        share = sum(shares[: self.wanted.index(name) + 1]) / sum(shares)
        return self.begins + 60 * self.minutes * share

    def write(self) -> None:
        """results.json and page.md of what is known."""
        stages = {name: self.stages[name] for name in SECONDS if name in self.stages}
        facts = {**self.facts, "commands": self.commands}
        text = json.dumps(finite({**facts, "stages": stages}), indent=1, allow_nan=False)
        for name, content in (("results.json", text), ("page.md", page(facts, stages))):
            partial_file = self.out / f"{name}.partial"
            partial_file.write_text(content + "\n", encoding="utf-8")
            partial_file.replace(self.out / name)

    def run(self, name: str, work: Callable[[Callable[[str, Any], None]], Values | None]) -> None:
        """One stage within its time; whatever ends it is written."""
        limit = self.ends(name) - time.monotonic()
        values = self.stages[name] = {"status": "no time left"}
        if limit <= 1:
            return self.write()
        values["status"], start = "running", time.monotonic()

        def put(key: str, value: Any) -> None:
            values[key] = value
            self.write()

        signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            values |= work(put) or {}
            values["status"] = "done"
        except TimeUp:
            values["status"] = f"out of time after {limit:.0f} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a stage that fails is a line, not the end
            (*_, line) = str(error).strip().splitlines() or [""]
            values["status"] = f"failed: {type(error).__name__}: {line}"
            if time.monotonic() - start >= limit:  # a compiler takes TimeUp for its own failure
                values["status"] = f"out of time after {limit:.0f} s"
            values["traceback"] = traceback.format_exc()[-3000:]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number in (signal.SIGTERM, signal.SIGINT):  # a training took them over
                signal.signal(number, signal.SIG_DFL)
        gc.collect()  # of a stage that was cut off
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        values["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: {values['status']}, {values['seconds']} s", flush=True)
        self.write()

    def best_step(self) -> Values:
        """The fastest row of our step; empty where there is none."""
        rows = [row for row in self.stages.get("steps", {}).get("rows", []) if row["kind"] == "ours"]
        return max((row for row in rows if row["fits"]), key=lambda row: row["volumes_per_s"], default={})


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _time_is_up(_signum: int, _frame: FrameType | None) -> None:
    raise TimeUp


def device_facts(bench: Bench) -> Values:
    """What the driver tells, and what matrix products reach."""
    runtime = bench.runtime
    sheet = device_peak(runtime.device, runtime.device_kind, use_bf16=True)
    facts: Values = {
        "matmul_bf16_flops_per_s": measure_matmul(torch.bfloat16, runtime.device),
        "matmul_float32_flops_per_s": measure_matmul(torch.float32, runtime.device),
        "peak_flops_per_s": sheet.flops_per_s,
        "summary": f", peak: {sheet.source}",
        "cpus": os.cpu_count(),
    }
    if runtime.device.type == "cuda":
        driver = torch.cuda.get_device_properties(runtime.device)
        facts |= {"memory_gib": driver.total_memory / 2**30, "cuda": torch.version.cuda}
    return facts


def run_stages(bench: Bench) -> None:
    """Those that are wanted, in their order."""
    out, runtime = bench.out, bench.runtime
    sizes, size = (steps.TINY, whole.TINY) if bench.tiny else (steps.FULL, whole.FULL)

    def peak() -> float | None:
        facts = bench.stages.get("device", {})
        return facts.get("peak_flops_per_s") or facts.get("matmul_bf16_flops_per_s")

    def compiled(put: Callable[[str, Any], None]) -> None:
        steps.compiled_steps(sizes, runtime, peak(), bench.stages.get("steps", {}).get("rows", []), put)

    works: dict[str, Callable[[Callable[[str, Any], None]], Values | None]] = {
        "phantom": lambda _: whole.phantom_and_store(out, size),
        "device": lambda _: device_facts(bench),
        "tests": lambda put: whole.gpu_tests(bench.ends("tests") - time.monotonic(), put),
        "steps": lambda put: steps.eager_steps(sizes, runtime, peak(), put),
        "pretrain": lambda _: whole.pretrain(out, size),
        "truth": lambda _: whole.truth(out, size),
        "input": lambda _: whole.input_pipeline(out, size, runtime, bench.best_step().get("volumes_per_s")),
        "compiled": compiled,
        "resume": lambda _: whole.resume(out, size),
        "predict": lambda _: whole.predict_a_volume(out),
    }
    for name in bench.wanted:
        bench.run(name, works[name])


def page(facts: Values, stages: dict[str, Values]) -> str:
    """The tables of docs/evidence/benchmarks.md."""
    lines = [f"# {facts['device']}", "", *(f"    {line}" for line in facts["commands"]), ""]
    lines += [
        f"Commit {facts['commit']}; {facts['machine']}.",
        "",
        "| stage | what came of it | s |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {values['status']}{values.get('summary', '')} | {values.get('seconds', '')} |"
        for name, values in stages.items()
    ]
    rows = [row for name in ("steps", "compiled") for row in stages.get(name, {}).get("rows", [])]
    if rows:
        lines += [
            "",
            "| step | volumes | ms | volumes/s | MFU | peak GiB | first step s |",
            "|---|---|---|---|---|---|---|",
        ]
    for row in rows:
        cells = ["does not fit"] + [""] * 4
        if row["fits"]:
            cells = [f"{1000 * row['step_s']:.1f}", f"{row['volumes_per_s']:.2f}", _shown(row["mfu"])]
            cells += [f"{row['peak_gib']:.1f}", f"{row['first_s']:.1f}"]
        lines.append(f"| {row['kind']} | {row['batch']} | {' | '.join(cells)} |")
    for name in stages:
        numbers = {
            k: v
            for k, v in stages[name].items()
            if isinstance(v, int | float | dict | None) and k != "seconds"
        }
        if numbers:
            lines += ["", f"## {name}", "", "| | |", "|---|---|", *_rows(numbers)]
    return "\n".join(lines)


def _rows(numbers: Values) -> list[str]:
    flat = {k: v for k, v in numbers.items() if not isinstance(v, dict)}
    for key, value in numbers.items():
        flat |= {f"{key}: {name}": inner for name, inner in value.items()} if isinstance(value, dict) else {}
    return [f"| {key} | {_shown(value)} |" for key, value in flat.items()]


def _shown(value: Any) -> str:
    if value is None or value != value:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    parser = PeopleParser("benchmarks.accelerator", __doc__ or "")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="results, and what the stages make"
    )
    parser.add_argument("--minutes", type=number_from(1), default=9, help="of all stages together")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--stages", default=",".join(SECONDS), help="which stages, separated by commas")
    args = parser.parse_args(argv)
    wanted = args.stages.split(",")
    if {"steps", "compiled"} & set(wanted):
        wanted.append("device")  # whose peak is that of the share that a step takes
    if not set(wanted) <= set(SECONDS):
        parser.error(f"--stages: expected some of {', '.join(SECONDS)}, found {args.stages}")
    setup_logging()
    faulthandler.dump_traceback_later(args.minutes * 60 + GRACE_S, exit=True)
    try:
        bench = Bench(args.out, args.minutes, wanted, tiny=args.tiny)
        print(f"{args.out}: {', '.join(bench.wanted)}, {args.minutes:g} minutes at most", flush=True)
        run_stages(bench)
    except OSError as error:
        raise UserError(f"--out: expected a folder that can be written, found {error}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(args.out / "page.md")
    return int(any(values["status"] != "done" for values in bench.stages.values()))
