"""Stages that run what users run: the phantom, pre-training, its truth, resume, and prediction.

In: the folder of the results. Out: the numbers of a stage. The phantom and its store lie in FOLDER/phantom
and FOLDER/store; where they are there already, as made on another machine, nothing is made.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import phantom_truth
from benchmarks.evidence.cohorts import make_phantom
from data_setup import prepare
from data_setup.jobs import Job, prepare_row
from data_setup.loader import PREFETCH, Loader
from data_setup.manifest import Record
from data_setup.normalisation import view
from data_setup.phantom.cohort import make_participants
from data_setup.phantom.dicom import write_volume
from data_setup.phantom.files import make_spec, rescaled, scan_volume
from data_setup.protocols import BY_NAME
from data_setup.store.format import KEPT
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, record_fields
from finetuning import predict
from finetuning import train as head
from pretraining import train as pretraining
from utils.checkpoint import list_steps, load_checkpoint
from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import EXIT_STOPPED
from utils.runtime.single import Runtime
from utils.storage import StorageError
from utils.workers import count_loaders

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = BY_NAME["maestro2_3d_macula_oct_oct"]
RENDERED = 32  # B-scans of the loader's scan: hundreds take minutes to draw
SMOKE, PROBE, RECOMMENDED = (
    ROOT / "configs" / f"{name}.yaml" for name in ("smoke_test", "cls_linear_probe", "pretrain_oct_vjepa2")
)
HEAD = "train.epochs=2", "wandb.mode=disabled"
CONTROL_STEPS = 4
WARM_UP, TIMED = 4, 12  # batches of the loader


@dataclass(frozen=True)
class Size:
    """How large the whole runs are."""

    people: int
    train_s: float  # of pre-training
    overrides: tuple[str, ...]
    grid: tuple[str, ...]  # of the input pipeline's store, over the large file
    scan: tuple[int, int, int]  # of the files behind the input pipeline's store
    volumes: int  # of that store
    resume_steps: int  # of the runs that are compared; one is stopped after a third of them


# validation before the first step and after the last
ALL = "train.val_every_steps=1000000", "train.use_bf16=true", "wandb.mode=disabled"
BATCH = "train.global_batch_size=32", "train.per_core_batch_size=32"
FULL = Size(100, 170, (*ALL, *BATCH, "model.size=s", "data.workers=null"), (), (64, 400, 400), 8, 12)
TINY_GRID = "spatial.image_size=[8,64,64]", "data.workers=0"
TINY = Size(16, 4, (*ALL, "data.workers=0", "val.max_volumes=4"), TINY_GRID, (16, 96, 96), 2, 6)


def gpu_tests(limit_s: float, put: Callable[[str, Any], None]) -> None:
    """`make test-gpu`, in another process: the last lines, of which one says how many passed; all are
    skipped where there is no GPU. RuntimeError where one fails.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
    files = sorted(path for path in (ROOT / "tests").glob("**/test_*.py") if "mark.gpu" in path.read_text())
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    put("tail", (done.stdout or done.stderr).strip().splitlines()[-30:])
    put("summary", "".join(f", {line}" for line in done.stdout.strip().splitlines()[-1:]))
    require_0(done.returncode)


def phantom_and_store(folder: Path, size: Size) -> dict[str, Any]:
    """The tree and its prepared store; bytes of each."""
    tree, store = folder / "phantom", folder / "store"
    make_phantom(tree, size.people, 0)
    if not (store / "prepare_report.json").exists():
        require_0(prepare.main(["--config", str(SMOKE), *places(folder)]))
    return {
        f"{path.name}_bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in (tree, store)
    }


def places(folder: Path) -> list[str]:
    """Overrides that name the phantom and its store."""
    return [f"data.gcs_root={folder / 'phantom'}", f"data.store={folder / 'store'}"]


def require_0(code: int | None) -> None:
    if code:
        raise RuntimeError(f"expected exit code 0, found {code}")


def prepared_store(folder: Path, cfg: Config, scan: tuple[int, int, int], volumes: int) -> PreparedStore:
    """A store of so many rows of one scan; what the folder holds already is taken."""
    store = folder / f"store_{'x'.join(map(str, cfg.spatial.image_size))}_{volumes}"
    if not (store / "index.parquet").exists():
        path = write_scan(folder / f"{'x'.join(map(str, scan))}.dcm", scan)
        writer = StoreWriter(str(store))
        writer.create(cfg.spatial, str(folder), synthetic=True)
        records = [
            Record(
                person_id=f"9{i:03d}", device="any", protocol="", region="", laterality="unknown",
                path=f"{i}/{path.name}", url=str(path), sop_instance_uid="", shape=None, split="train",
                study_group=None, clinical_site=None, age=None,
            )
            for i in range(volumes)
        ]  # fmt: skip
        rows = writer.append_records([record_fields(record) for record in records])
        for row, record in zip(rows, records, strict=True):
            outcome = prepare_row(Job(row, record, writer, cfg.spatial, cfg.data.storage_options))
            if outcome.status != KEPT:
                raise StorageError(record.url, f"{outcome.status}: {outcome.message}")
        writer.finalise(rows)
    return PreparedStore.open(str(store))


def write_scan(path: Path, shape: tuple[int, int, int]) -> Path:
    """A DICOM file of an eye of the phantom, of this shape: RENDERED B-scans, repeated back and forth."""
    person = make_participants(1, 0)[0]
    scan = replace(person.scans[0], protocol=PROTOCOL)
    drawn = (min(RENDERED, shape[0]), *shape[1:])
    voxels = scan_volume(person, scan, 0, "full", drawn)[0].voxels
    voxels = np.resize(np.concatenate([voxels, voxels[::-1]]), shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = make_spec(person, scan, rescaled(PROTOCOL, shape), 0, "full", "explicit")
    path.write_bytes(write_volume(voxels, spec))
    return path


def input_pipeline(folder: Path, size: Size, runtime: Runtime, needed: float | None) -> dict[str, Any]:
    """Volumes a second that the loader gives at the large grid, and over those that the step takes."""
    four = "train.global_batch_size=4", "train.per_core_batch_size=4", "data.sampling=natural"
    cfg = load_config(RECOMMENDED, [*four, "train.max_steps=1000", *size.grid])
    store = prepared_store(folder / "files", cfg, size.scan, size.volumes)
    # as many batches lie ready at the end as at the start, so that none comes for nothing
    ahead = count_loaders(cfg.data.workers) * PREFETCH
    loader = Loader(cfg, store, store.kept, num_steps=WARM_UP + TIMED + ahead)
    start = 0.0
    for step, micro_batches in enumerate(loader, start=1):
        for batch in map(runtime.to_device, micro_batches):
            (view(batch, 0), view(batch, 1))
        if step == WARM_UP:
            start = time.perf_counter()
        if step == WARM_UP + TIMED:
            break
    rate = TIMED * cfg.train.global_batch_size / (time.perf_counter() - start)
    return {"volumes_per_s": rate, "cpus": os.cpu_count(), "over_the_step": needed and rate / needed}


def run_config(folder: Path, name: str, size: Size, *overrides: str) -> list[str]:
    """Words of a pre-training run in FOLDER/NAME, which begins with nothing there."""
    shutil.rmtree(folder / name, ignore_errors=True)
    return ["--config", str(SMOKE), *places(folder), f"run.dir={folder / name}", *size.overrides, *overrides]


def pretrain(folder: Path, size: Size) -> dict[str, Any]:
    """The control of a few steps, whose pace says how many fill `train_s`; the run; its last gauges."""
    require_0(pretraining.main(run_config(folder, "control", size, f"train.max_steps={CONTROL_STEPS}")))
    pace = last_values(folder / "control")["perf/step_s"]
    steps = max(2 * CONTROL_STEPS, round(size.train_s / pace))
    start = time.perf_counter()
    require_0(pretraining.main(run_config(folder, "pretrained", size, f"train.max_steps={steps}")))
    seconds = time.perf_counter() - start
    return {"steps": steps, "seconds_of_the_run": seconds, **last_values(folder / "pretrained")}


def last_values(run: Path) -> dict[str, float]:
    """The last number of every metric of a run."""
    values: dict[str, float] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values |= {key: value for key, value in json.loads(line).items() if isinstance(value, int | float)}
    return values


def last_checkpoint(run: Path) -> str:
    """The newest checkpoint of a run."""
    folder = run / "checkpoints"
    return str(folder / f"step_{list_steps(str(folder))[-1]:08d}.pt")


def truth(folder: Path, size: Size) -> dict[str, Any]:
    """R2 of every row of benchmarks.phantom_truth: the encoder, its controls, and what needs no encoder."""
    last, control = (last_checkpoint(folder / name) for name in ("pretrained", "control"))
    words = ["--config", str(folder / "pretrained" / "config.yaml"), f"model.checkpoint={last}"]
    phantom_truth.main([*words, "--control", control])
    result = json.loads((folder / "pretrained" / "truth.json").read_text(encoding="utf-8"))
    r2 = {
        f"{asked['name']}, {row['name']}": row["r2"] for asked in result["questions"] for row in asked["rows"]
    }
    return {"r2": r2, "questions": result["questions"], "n_participants": result["n_participants"]}


def resume(folder: Path, size: Size) -> dict[str, Any]:
    """Whether a run that SIGTERM stopped ends with the weights of one that nothing stopped; and whether two
    of these agree, without which the first means nothing (flash attention adds up in any order).
    """
    words = f"train.max_steps={size.resume_steps}", "train.log_every_steps=1", "val.max_volumes=4"
    weights = []
    for name in ("whole", "again", "stopped"):
        run = run_config(folder, name, size, *words)
        if name == "stopped":
            threading.Thread(
                target=stop_at, args=(folder / name, size.resume_steps // 3), daemon=True
            ).start()
            code = pretraining.main(run)
            if code != EXIT_STOPPED:
                raise RuntimeError(
                    f"expected a run that SIGTERM stops ({EXIT_STOPPED}), found exit code {code}"
                )
        require_0(pretraining.main(run))
        weights.append(load_checkpoint(last_checkpoint(folder / name))["model"])
    equal = [all(torch.equal(a[k], b[k]) for k in a) for a, b in (weights[:2], weights[::2])]
    return {"two_runs_are_equal": equal[0], "a_stopped_run_is_equal": equal[1]}


def stop_at(run: Path, step: int) -> None:
    """SIGTERM for this process once the run has logged so many steps."""
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text(encoding="utf-8")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def predict_a_volume(folder: Path) -> dict[str, Any]:
    """Seconds from a scan's file to its line and picture, the second time, with a head trained here."""
    checkpoint = f"model.checkpoint={last_checkpoint(folder / 'pretrained')}"
    task = folder / "head"
    shutil.rmtree(task, ignore_errors=True)
    require_0(head.main(["--config", str(PROBE), *places(folder), checkpoint, f"run.dir={task}", *HEAD]))
    store, taken = PreparedStore.open(str(folder / "store")), list[float]()
    for scan in (folder / "phantom" / path for path in store.index.loc[store.kept[:2], "path"]):
        start = time.perf_counter()
        out = folder / "predictions" / scan.stem
        require_0(predict.main(["--checkpoint", str(task), "--dicom", str(scan), "--out", str(out)]))
        taken.append(time.perf_counter() - start)
    return {"first_s": taken[0], "second_s": taken[1]}
