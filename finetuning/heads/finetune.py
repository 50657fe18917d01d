"""Full fine-tuning: encoder and head together, layer by layer at different rates.

In: a checkpoint of pre-training, the prepared store, a labelled cohort. Out: a run directory like that of
pre-training, and `head.pt` of the best epoch, with the encoder that belongs to it. Running the same command
again goes on where the run stopped, bit for bit on a CPU; SIGTERM and Ctrl-C write a checkpoint first.
Volumes are trained on one by one; validation pools them. Volumes to evaluate are never read.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from data_setup.loader import EVALUATION_BATCH, evaluation_batches, next_or_stop
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import VAL, Cohort
from finetuning.cohort.source import Source
from finetuning.features.kept import load_strictly
from finetuning.heads.confidence import Calibration, calibrate, stored_calibration
from finetuning.heads.head_file import head_state, write_head
from finetuning.heads.objective import METRICS, judge, metric_name
from finetuning.heads.tuning import (
    Progress,
    Tuning,
    UpdateResult,
    checkpoint_state,
    open_tuning,
    restore,
    settle_memory,
    update_model,
)
from models.heads import build_head, rescale_output
from models.optimizer import warmup_cosine
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.errors import UserError
from utils.run.checkpoints import Checkpoints
from utils.run.folder import held_run
from utils.run.guard import guard
from utils.run.log import AnyLog, NoLog, open_log
from utils.runtime import patience
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)
BEST = "best_epoch"  # the checkpoint with the best validation
OUT_OF_MEMORY = "out of memory, although a trial step fitted"


def finetune(source: Source, store: PreparedStore, cohort: Cohort, runtime: Runtime) -> int:
    """Run the configuration of a source, or until SIGTERM; returns the exit code. Raises UserError."""
    if source.cfg.train.ckpt_dir is None:
        raise UserError("train.ckpt_dir: expected a folder for the best epoch, found null")
    runtime.catch_signals()
    return guard(source.cfg, runtime, partial(_finetune, source, store, cohort), OUT_OF_MEMORY)


def _finetune(
    source: Source, store: PreparedStore, cohort: Cohort, runtime: Runtime, stack: ExitStack
) -> int:
    # ---- set-up, and restore this run, if there is one
    cfg = source.cfg
    leases = stack.enter_context(held_run(cfg, runtime))
    tuning = open_tuning(source, store, cohort, runtime)
    model, optimizer, calendar = tuning.model, tuning.optimizer, tuning.calendar
    runtime.enter("restore")
    progress = restore(tuning)
    if progress.is_over(tuning):
        log.info("nothing to do: the run ended at step %d of %d", progress.step, calendar.total)
        return finish(tuning, progress, NoLog())
    # ---- trial, then the log of a run that has proved to work
    runtime.enter("trial step")
    tuning = settle_memory(tuning, progress.step)
    cfg = tuning.cfg
    runtime.enter("start of the log")
    synthetic = bool(store.attrs["synthetic"])
    run_log = stack.enter_context(open_log(cfg, runtime, progress.step, calendar.total, synthetic=synthetic))
    log_start(tuning, progress)
    state = partial(checkpoint_state, tuning, progress)
    checkpoints = Checkpoints(cfg, runtime, progress, state, calendar.keep_every, leases)
    tensors = [model.state_dict()] * 3  # weights, and two moments of each
    checkpoints.log_need(tensors, calendar.total, bests=1)
    stack.callback(checkpoints.wait)
    if progress.owes_validation:
        checkpoints.save(validate_now(tuning, progress, run_log), with_step=True)
    loader, batches = tuning.examples.batches(runtime, progress.step, calendar.total)
    runtime.mark_step()
    began, first = time.perf_counter(), progress.step
    # ---- loop: fetch, update, log, validate, save
    while not progress.is_over(tuning):
        step = progress.step
        runtime.watchdog.beat(f"step {step + 1}")
        on_host = next_or_stop(batches, runtime, patience.DATA_S)
        if on_host is None:
            break
        micro_batches = [runtime.to_device(batch) for batch in on_host]
        rate = warmup_cosine(cfg.optim, step, calendar.total)
        result = update_model(model, optimizer, micro_batches, cfg, runtime, rate)
        progress.skipped.count(step, result.is_finite)
        progress.step = done = step + 1
        runtime.mark_step()
        if calendar.logs(done):
            runtime.synchronise()
            pace = (done - first) * cfg.train.global_batch_size / (time.perf_counter() - began)
            run_log.metrics(done, update_metrics(progress, result, rate) | {"perf/volumes_per_s": pace})
            progress.alert_skipped(progress.skipped.check(loader.rows_of_step), run_log)
            began, first = time.perf_counter(), done
        run_log.advance()
        names: list[str] = []
        if calendar.validates(done):
            names = validate_now(tuning, progress, run_log)
            began, first = time.perf_counter(), done
        checkpoints.save(names, with_step=calendar.saves(done) or bool(names))
    checkpoints.close()
    return finish(tuning, progress, run_log)


def log_start(tuning: Tuning, progress: Progress) -> None:
    calendar, cfg = tuning.calendar, tuning.cfg
    millions = sum(p.numel() for p in tuning.model.parameters()) / 1e6
    trained = sum(p.numel() for group in tuning.optimizer.param_groups for p in group["params"]) / 1e6
    log.info(
        "fine-tuning %s: encoder %s with a head (%s), %.1f M parameters, of which %.3g M are trained; %d "
        "volumes; step %d of %d, validation every %d steps",
        tuning.source.url, cfg.model.size, cfg.head.kind, millions, trained, len(tuning.examples),
        progress.step, calendar.total, calendar.validate_every,
    )  # fmt: skip


def update_metrics(progress: Progress, result: UpdateResult, rate: float) -> dict[str, float | None]:
    """The metrics of one update; the rate is the head's."""
    return {
        "train/loss": float(result.loss),
        "train/lr": rate,
        "train/grad_norm": float(result.grad_norm),
        "train/bad_steps": progress.skipped.total,
    }


def validate_now(tuning: Tuning, progress: Progress, run_log: AnyLog) -> list[str]:
    """Validate after the last update; the names under which its checkpoint is kept."""
    measured = progress.validated(partial(validate, tuning))
    if measured is None:
        return []
    score, loss, calibration = measured
    metric = METRICS[tuning.cohort.kind]
    run_log.metrics(progress.step, {"val/loss": loss, metric_name(metric): score})
    best = progress.best
    # equal scores go by the loss
    if best is not None and not (score, -loss) > (best["score"], -best["loss"]):
        return []
    epoch = progress.step / tuning.calendar.epoch
    progress.best = {"metric": metric, "score": score, "loss": loss, "epoch": epoch, "step": progress.step}
    progress.best["calibration"] = calibration.state()
    return [BEST]


@torch.no_grad()
def validate(tuning: Tuning) -> tuple[float, float, Calibration]:
    """The score of finetuning.heads.objective on the units of VAL, the mean loss of its volumes, and what
    they say of the model's confidence; the same on every process. Raises StopRequested.
    """
    cohort = tuning.cohort
    chosen = cohort.fold == VAL
    outputs_nC = predict(tuning, cohort.rows[chosen]).double()
    if not bool(outputs_nC.isfinite().all()):
        raise UserError(
            f"validation after training: expected finite outputs, found {outputs_nC[:3].tolist()}"
        )
    score, loss = judge(cohort, outputs_nC, tuning.examples.scale)
    return score, loss, calibrate(cohort.kind, outputs_nC, cohort.target[chosen], cohort.person[chosen])


@torch.no_grad()
def predict(tuning: Tuning, rows: np.ndarray) -> torch.Tensor:
    """Outputs of the model [n, C], on the host, in the order of `rows`, which the processes share."""
    runtime, cfg = tuning.runtime, tuning.cfg
    devices = runtime.evaluation_devices
    size = -(-EVALUATION_BATCH // devices) * devices
    tuning.model.eval()
    parts = []
    batches = evaluation_batches(cfg, tuning.store, runtime.group.share(rows), size)
    for on_host in runtime.until_stopped("validation", batches):
        batch = runtime.to_device_padded(on_host, size)
        with runtime.autocast():
            outputs = tuning.model(plain_view(batch), batch["context_valid"])
        parts.append(runtime.collect(outputs.float(), len(on_host["row"])))
    return torch.cat(parts)[: len(rows)]


def finish(tuning: Tuning, progress: Progress, run_log: AnyLog) -> int:
    """Write the best epoch's head where the run is over; log how it ended; returns the exit code."""
    total, is_over, best = tuning.calendar.total, progress.is_over(tuning), ""
    if progress.best is not None:
        best = "{metric} {score:.4f} after epoch {epoch:.3g}".format(**progress.best)
    if not is_over:
        text = "stopped by %s at step %d of %d; run the same command again to go on"
        log.info(text, tuning.runtime.stopped_by, progress.step, total)
    elif tuning.runtime.group.is_first:
        url, kept = write_best(tuning)
        run_log.artifact("head", url)
        early = "" if progress.step == total else ", early: no better validation since"
        log.info(
            "finished at step %d of %d%s; best epoch %.3g: %s %.4f; next: python -m finetuning.evaluate "
            "--head %s",
            progress.step, total, early, kept["epoch"], kept["metric"], kept["score"], url,
        )  # fmt: skip
    return progress.end(total, best, run_log, is_over=is_over)


def write_best(tuning: Tuning) -> tuple[str, dict[str, Any]]:
    """Write the head of the best epoch with its encoder; returns its URL and what validation said of it."""
    cfg = tuning.cfg
    url = storage.join(str(cfg.train.ckpt_dir), f"{BEST}.pt")
    state = load_checkpoint(url, cfg.data.storage_options)
    best = state["progress"]["best"]
    parts: dict[str, dict[str, torch.Tensor]] = {"encoder.": {}, "top.head.": {}}
    for name, value in state["model"].items():
        (prefix,) = (p for p in parts if name.startswith(p))
        parts[prefix][name.removeprefix(prefix)] = value
    cohort, width = tuning.cohort, tuning.model.encoder.feature_width
    head = build_head(cfg.head.kind, width, cohort.num_outputs, cfg.head.hidden)
    load_strictly(head, parts["top.head."], url)
    if cohort.kind == "regression":
        rescale_output(head, *tuning.examples.scale)
    content = head_state(
        tuning.source,
        tuning.store,
        cohort,
        head,
        None,
        {name: value for name, value in best.items() if name != "calibration"},
        parts["encoder."],
        calibration=stored_calibration(best),
        familiarity=None,  # the features of the best epoch were not kept
    )
    return write_head(cfg, content), best
