"""What a run says of itself as it starts and as it ends, for the person who started it.

In: a run that is about to train, or has ended. Out: lines of the log; the last one is a command.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from data_setup.order import open_order
from pretraining.gauges.alarms import Alarm
from pretraining.gauges.alarms import closing as closing_lines
from pretraining.gauges.throughput import Throughput
from pretraining.progress import INIT_WEIGHT_LIMIT, Progress, init_weight
from pretraining.run import Run
from utils.config.load import accumulation_steps
from utils.config.recipes import recipe_name
from utils.config.schema import Config
from utils.provenance import git_commit

log = logging.getLogger(__name__)


def banner(run: Run, start: int) -> list[tuple[str, str]]:
    """(what, text): who computes, where, on what, and how to stop and go on."""
    cfg, model, runtime = run.cfg, run.model, run.runtime
    counts = {
        name: sum(p.numel() for p in getattr(model, name).parameters()) / 1e6
        for name in ("encoder", "predictor")
    }
    sharing = "processes" if runtime.num_devices == runtime.world_size else "devices"
    precision = "bfloat16" if runtime.use_bf16 else "float32"
    synthetic = ", synthetic" if run.store.attrs["synthetic"] else ""
    goes_on = "the same command goes on from there"
    if cfg.train.ckpt_dir is None:
        goes_on = "no checkpoint is written (train.ckpt_dir is null)"
    return [
        ("device", f"{runtime.device.type}: {runtime.device_name}, {precision}"),
        ("world", f"{_count(runtime.world_size, 'process')}, {_count(runtime.num_devices, 'device')}"),
        (
            "batch",
            f"global batch {cfg.train.global_batch_size} = {cfg.train.at_once} per device x "
            f"{runtime.num_devices} {sharing} x {accumulation_steps(cfg.train, runtime.num_devices)} "
            f"accumulated, on {runtime.device}",
        ),
        (
            "model",
            f"recipe {recipe_name(cfg.method)}, encoder {cfg.model.size} {counts['encoder']:.1f} M "
            f"parameters, predictor {counts['predictor']:.1f} M, {model.encoder.num_tokens} tokens",
        ),
        ("store", f"{cfg.data.store}: {len(run.rows.train)} volumes to train on{synthetic}"),
        *_passes(run),
        ("commit", git_commit() or "none: this is no git checkout, and OCT_COMMIT is not set"),
        ("run", f"{cfg.run.dir}: step {start} of {run.total_steps}"),
        ("stop", f"Ctrl-C, or kill {os.getpid()} (SIGTERM), writes a checkpoint; {goes_on}"),
    ]


def _passes(run: Run) -> list[tuple[str, str]]:
    """How often the whole run shows the volumes of each device, where it is not equally often."""
    if run.cfg.data.sampling != "device_balanced":
        return []
    order = open_order(run.cfg, run.store, run.rows.train)
    passes = order.passes(run.total_steps * run.cfg.train.global_batch_size).items()
    return [("passes", ", ".join(f"{name} {number:.3g}" for name, number in passes))]


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def log_start(run: Run, clock: Throughput, progress: Progress) -> None:
    """Log what is about to run, with the true counts; a warning where the target will not leave its start."""
    for what, text in banner(run, progress.step):
        log.info("%-7s %s", what, text)
    end_weight = progress.init_weight * init_weight(run.cfg, run.total_steps, run.total_steps, progress.step)
    if end_weight > INIT_WEIGHT_LIMIT:
        log.warning(
            "the target will still be %.0f %% of its random initialisation at the end; "
            "a longer run or a smaller method.ema_base lets it learn",
            100 * end_weight,
        )
    clock.log_start()


def next_command(cfg: Config, *, has_probe: bool) -> str:
    """What to do with a finished run; without a best checkpoint by probe, as without labels, look at it."""
    if cfg.train.ckpt_dir is None or not has_probe:
        return f"python -m utils.report {shlex.quote(cfg.run.dir)}"
    config = shlex.quote(str(Path(cfg.run.dir) / "config.yaml"))
    return f"python -m finetuning.evaluate --config {config}"


def log_end(cfg: Config, progress: Progress, raised: Sequence[Alarm], total: int, *, is_over: bool) -> None:
    """Log the alarms of the run, how it ended, and what to do next."""
    for line in closing_lines(raised):
        log.info("%s", line)
    if not is_over:
        next_time = (
            "to go on" if cfg.train.ckpt_dir is not None else "to start at step 0 (train.ckpt_dir is null)"
        )
        text = "stopped by %s at step %d of %d; run the same command again %s"
        log.info(text, progress.runtime.stopped_by, progress.step, total, next_time)
        return
    log.info("finished at step %d; run directory %s", total, cfg.run.dir)
    log.info("next: %s", next_command(cfg, has_probe="best_probe" in progress.best))
