"""Train an encoder without labels on a prepared store; the same command goes on where it stopped.

    python -m pretraining.train --config configs/smoke_test.yaml
    python -m pretraining.train --config configs/pretrain_oct_surroundings.yaml data.store=STORE
    torchrun --nproc-per-node=2 -m pretraining.train --config configs/smoke_test.yaml

In: a prepared store. Out: a run directory with checkpoints, metrics and pictures. Running the same command
again goes on where the run stopped, bit for bit on a CPU; SIGTERM and Ctrl-C write a checkpoint first. Exit
codes: utils/errors.py. `torchrun --nproc-per-node=N -m pretraining.train ...` shares every global batch
among N processes; all of them take the same decisions, and only the first writes.

Keys that matter: data.store, run.dir, train.max_steps, train.global_batch_size,
train.per_core_batch_size, train.use_bf16, optim.base_lr, model.size, method.recipe, wandb.mode
"""

from __future__ import annotations

from data_setup.store.place import check_store
from utils.cli import answer_early, parse_cli, run_cli
from utils.runtime import patience

if __name__ == "__main__":  # torch and MONAI take seconds to import
    answer_early("pretraining.train", __doc__ or "", check=check_store)

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from data_setup.loader import Batch, Loader, next_or_stop, start_early
from data_setup.normalisation import view
from models.batch_norm import WeightedBatchNorm
from models.engine_kernels import uncompiled
from models.optimizer import keep_state
from pretraining.banner import log_end, log_start
from pretraining.gauges.examples import Examples
from pretraining.gauges.monitor import Gauges, check_disjoint, check_no_leak, target_drift, update_ratio
from pretraining.gauges.skill import SkillGauge
from pretraining.gauges.throughput import StepTrace, Throughput
from pretraining.gauges.validation import Validation, volumes_read
from pretraining.progress import Progress
from pretraining.resume import checkpoint_state, restore
from pretraining.run import Run, open_run
from pretraining.step import StepResult, Update, Watch, train_step, trial_step
from utils import storage
from utils.batch_size import settle_batch
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.errors import EXIT_FINISHED
from utils.run.calendar import Calendar
from utils.run.checkpoints import Checkpoints
from utils.run.folder import held_run
from utils.run.guard import guard, open_engine
from utils.run.log import AnyLog, open_log
from utils.runtime.single import Runtime

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    cfg, _ = parse_cli("pretraining.train", __doc__ or "", argv)
    return train(cfg)


def train(cfg: Config) -> int:
    """Run the configuration, or until SIGTERM; returns the exit code."""
    with open_engine(cfg) as runtime:
        return guard(cfg, runtime, partial(_train, cfg), "out of memory, although a trial step fitted")


def _train(cfg: Config, runtime: Runtime, stack: ExitStack) -> int:
    # ---- set-up: the leases before anything is read, so that of two starts one alone restores the run
    start_early(cfg.data)
    leases = stack.enter_context(held_run(cfg, runtime))
    run = open_run(cfg, runtime)
    gauges = open_gauges(run)
    # ---- restore: this run, else method.init_from, else the seed's own weights
    runtime.enter("restore")
    progress = restore(run, gauges)
    calendar = Calendar.of(cfg, len(run.rows.train), volumes_read(run))
    start, total = progress.step, calendar.total
    if start >= total and not progress.owes_validation:
        log.info("nothing to do: the run is at step %d of %d", start, total)
        return EXIT_FINISHED
    # ---- trial: with the restored moments, before any file; from here on `cfg` has the batch that fits
    runtime.enter("trial step")
    run = settle_memory(run, start)
    cfg = run.cfg
    # ---- log: only of a run that has proved to work; the first validation is of the weights before a step
    runtime.enter("start of the log")
    state = partial(checkpoint_state, run, gauges, progress)
    checkpoints = Checkpoints(cfg, runtime, progress, state, calendar.keep_every, leases)
    run_log = stack.enter_context(open_log(cfg, runtime, start, total, synthetic=run.is_synthetic))
    clock = Throughput(cfg, run.model, runtime)
    log_start(run, clock, progress)
    checkpoints.log_need([part.state_dict() for part in (run.model, run.optimizer, gauges)], total, bests=2)
    trace = stack.enter_context(closing(StepTrace(cfg, runtime, start)))
    batches = iter(loader := open_loader(run, start, total))
    stack.callback(checkpoints.wait)
    validation, examples = Validation(run, start), Examples(run, run_log)
    validate_at_start(validation, gauges, progress, checkpoints, run_log, examples)
    watch = Watch(gauges.observe, clock.lap, lambda: gauges.measure)
    clock.restart()
    for step in range(start, total):
        # ---- fetch: a signal ends the run here, between two updates, on all processes at once
        runtime.watchdog.beat(f"step {step + 1}")
        if trace.at(step):
            clock.restart()  # writing it was no part of a step
        clock.lap("other")
        on_host = next_or_stop(batches, runtime, patience.DATA_S)
        if on_host is None:
            break
        micro_batches = [runtime.to_device(batch) for batch in on_host]
        clock.lap("data_wait")
        # ---- step: nothing of it is read back to the host, so the device may run behind
        done = step + 1
        is_read = calendar.logs(done) or calendar.validates(done)
        update = Update(step, *progress.schedule.at(step))
        gauges.begin(measure=is_read)
        result = train_step(run.model, run.optimizer, micro_batches, cfg, runtime, update, watch)
        progress.count(step, result.is_finite, update.momentum)
        # ---- read: first the step itself, so that what is read does not compute it once more
        if is_read:
            runtime.mark_step()
        clock.lap("other")
        gauge_values = gauges.finish()
        clock.lap("logging")
        runtime.mark_step()
        clock.end_step()
        if calendar.logs(done):
            pace = clock.metrics()
            values = step_metrics(run, update, result, progress, micro_batches)
            report(run_log, gauges, done, {**values, **gauge_values, **pace})
            progress.alert_skipped(progress.skipped.check(loader.rows_of_step), run_log)
            clock.lap("logging")
        elif step == start:
            clock.restart()  # a resumed run starts its loader here
        run_log.advance()
        # ---- validate, then save: the checkpoint has what the validation found, and its names
        names: list[str] = []
        if calendar.validates(done):
            names = validate_now(validation, gauges, progress, run_log)
            clock.restart()
        checkpoints.save(names, with_step=calendar.saves(done))
        if done == total or examples.due(done):
            examples.show(done, micro_batches[0], keep=done == total)
            clock.restart()
    # ---- end: what is not saved yet, and what to do next
    checkpoints.close()
    return finish(cfg, gauges, progress, total, run_log)


def open_gauges(run: Run) -> Gauges:
    """The gauges of a run's global batch."""
    runtime = run.runtime
    skill = SkillGauge.of_model(run.model, runtime.device)
    batch = run.cfg.train.global_batch_size
    return Gauges(
        skill,
        batch,
        runtime.group,
        runtime.to_torch,
        has_fixed_targets=run.model.recipe.has_fixed_targets,
        has_neighbours=run.model.neighbour_head is not None and run.cfg.method.control != "penalty_only",
        has_hidden=run.model.recipe.hidden != "nothing",
    )


def step_metrics(
    run: Run, update: Update, result: StepResult, progress: Progress, micro_batches: list[Batch]
) -> dict[str, float | None]:
    """The metrics of one update; every process calls this, since it sums over them."""
    runtime = run.runtime
    # Here the host first reads this step's tensors, and waits for the device: so only for a line of the log.
    counts = [runtime.to_torch(batch["context_valid"]).sum() for batch in micro_batches]
    valid_tokens = torch.stack(counts).sum()
    return {
        "train/loss": float(result.loss),
        "train/regulariser": None if result.regulariser is None else float(result.regulariser),
        "train/neighbour_loss": _finite(result.neighbour),
        "train/penalty_to_prediction": _finite(result.penalty_to_prediction),
        "train/lr": update.lr,
        "train/grad_norm": float(result.grad_norm),
        "train/update_ratio": float(update_ratio(run.optimizer)),
        "train/ema_momentum": update.momentum,
        "ema/init_weight": progress.init_weight,
        "ema/drift": float(target_drift(run.model)),
        "train/bad_steps": progress.skipped.total,
        "train/valid_context_tokens": float(runtime.group.sum(valid_tokens))
        / run.cfg.train.global_batch_size,
    }


def _finite(value: torch.Tensor | None) -> float | None:
    """A number for the log; null where there is none, as of a ratio to 0."""
    return None if value is None or not math.isfinite(float(value)) else float(value)


def validate_at_start(
    validation: Validation,
    gauges: Gauges,
    progress: Progress,
    checkpoints: Checkpoints,
    run_log: AnyLog,
    examples: Examples,
) -> None:
    """Validate a new run, and one that owes it."""
    # Before the first update: the curves begin with weights that no step has moved, and what a signal cut
    # short is of the weights as they were saved.
    if progress.step == 0:
        if (measured := progress.validated(partial(validation, 0))) is not None:
            report(run_log, gauges, 0, {**measured, "ema/init_weight": progress.init_weight})
            examples.show(0, keep=True)
    elif progress.owes_validation:
        names = validate_now(validation, gauges, progress, run_log)
        checkpoints.save(names, with_step=True)


def validate_now(
    validation: Validation,
    gauges: Gauges,
    progress: Progress,
    run_log: AnyLog,
) -> list[str]:
    """Validate after the last update, with which the target must have moved; the names under which its
    checkpoint is kept.
    """
    # The check comes first: with a target that stands still the numbers would look well and mean nothing.
    validation.motion.check(validation.run.model, progress.take_moves())
    measured = progress.validated(partial(validation, progress.step))
    if measured is None:
        return []
    report(run_log, gauges, progress.step, measured)
    is_warm = progress.step >= validation.run.cfg.optim.warmup_ratio * progress.schedule.total
    names = progress.best_names(measured, is_warm=is_warm)
    run_log.summary(progress.best_values())
    return names


def finish(cfg: Config, gauges: Gauges, progress: Progress, total: int, run_log: AnyLog) -> int:
    """Log how the run ended and what to do next; returns the exit code. A run that is over hands on."""
    # Weights first, then the word that the run has ended: who hears it may look for them.
    is_over = progress.step >= total and not progress.owes_validation
    if is_over and cfg.train.ckpt_dir is not None:
        for name in progress.best:
            run_log.artifact(name, storage.join(cfg.train.ckpt_dir, f"{name}.pt"))
    best = ", ".join(f"{name} {value:.3g}" for name, value in progress.best_values().items())
    code = progress.end(total, best, run_log, is_over=is_over)
    log_end(cfg, progress, gauges.alarms.raised, total, is_over=is_over)
    return code


def report(run_log: AnyLog, gauges: Gauges, step: int, values: dict[str, float | None]) -> None:
    """Log the metrics of a line with the state of the alarms, and the alarms that begin with it."""
    # Alarms first, since the line holds their states too.
    begun = gauges.alarms.update(step, values)
    run_log.metrics(step, {**values, **gauges.alarms.states()})
    for alarm in begun:
        run_log.alarm(step, alarm.name, alarm.text)


def open_loader(run: Run, start: int, stop: int) -> Loader:
    """Global batches of the steps start..stop, this process's share of each."""
    return Loader(
        run.cfg,
        run.store,
        run.rows.train,
        rank=run.runtime.rank,
        world=run.runtime.world_size,
        accum=accumulation_steps(run.cfg.train, run.runtime.num_devices),
        start_step=start,
        num_steps=stop - start,
    )


def settle_memory(run: Run, step: int) -> Run:
    """The run with the largest per-core batch that fits every process, before the first update.

    Raises UserError when one volume does not fit. Where targets are hidden the first batch also proves that
    the context encoder sees none. From here on batch normalisation is over all processes.
    """
    model, optimizer, runtime = run.model, run.optimizer, run.runtime
    batch: Batch = {}

    def work_of(cfg: Config) -> Callable[[], None]:
        nonlocal batch
        cpu_batch = next(iter(open_loader(replace(run, cfg=cfg), step, step + 1)))[0]
        if model.recipe.hidden == "all_but_context":
            check_disjoint(cpu_batch)
        batch = runtime.to_device(cpu_batch)
        work = partial(trial_step, model, optimizer, batch, cfg, runtime)
        return work if cfg.train.compile else uncompiled(model)(work)

    cfg = settle_batch(run.cfg, runtime, work_of, keep_state(model, optimizer, runtime))
    # after the steps that may fail for lack of memory, which leave the model in training
    if model.recipe.hidden != "nothing":
        model.eval()
        check_no_leak(model, view(batch, 0), batch["context"], batch["target"], runtime.mark_step)
        model.train()
    for module in model.modules():
        if isinstance(module, WeightedBatchNorm):
            module.total = runtime.group.sum_with_gradient
    return replace(run, cfg=cfg)


if __name__ == "__main__":
    run_cli(main)
