"""Pre-training: `python -m pretraining.train --config configs/smoke_test.yaml [section.key=value ...]`.

In: a prepared store. Out: a run directory with checkpoints, metrics and pictures. Running the same command
again goes on where the run stopped, bit for bit on a CPU; SIGTERM writes a checkpoint first and ends with
exit code 0. `torchrun --nproc-per-node=N -m pretraining.train ...` shares every global batch among N
processes; all of them take the same decisions, and the first alone writes.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from contextlib import ExitStack, closing
from functools import partial

import torch

from data_setup.store.reader import PreparedStore
from models.vjepa3d import VJEPA3D
from pretraining.engine_kernels import choose_kernels
from pretraining.gauges.alarms import closing as closing_lines
from pretraining.gauges.monitor import Gauges, TargetMotion, target_drift, update_ratio
from pretraining.gauges.profiling import StepTrace
from pretraining.gauges.skill import SkillGauge
from pretraining.gauges.throughput import Throughput
from pretraining.gauges.validation import snapshot, validate
from pretraining.resume import (
    NotFiniteError,
    best_names,
    check_run_dir,
    checkpoint_state,
    checkpoint_writer,
    claim_run_dir,
    last_good,
    report_bad_steps,
    restore,
)
from pretraining.rows import Rows, open_rows
from pretraining.schedules import ema_momentum, learning_rate, total_steps
from pretraining.sharding import shard_state
from pretraining.step import Batch, build_optimizer, train_step, trial_step
from pretraining.trial import log_start, next_or_stop, open_loader, rows_of_step, settle_memory
from utils import storage
from utils.cli import parse_cli, run_cli
from utils.config.load import accumulation_steps
from utils.config.schema import Config
from utils.errors import EXIT_USER_ERROR, UserError
from utils.log import NoLog, RunLog, log_failure, setup_logging
from utils.report.pictures import bscan_with_masks, feature_pca, load_snapshot
from utils.runtime.open import open_runtime
from utils.runtime.processes import LostPeer
from utils.runtime.single import Runtime, is_out_of_memory

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    cfg, _ = parse_cli("pretraining.train", __doc__ or "", argv)
    return train(cfg)


def train(cfg: Config) -> int:
    """Run the configuration to its end or to SIGTERM; returns the exit code."""
    runtime = open_runtime(cfg.train.use_bf16, cfg.data.data_timeout_s)
    setup_logging(runtime.rank)
    runtime.catch_sigterm()
    with ExitStack() as outer:
        outer.push(partial(_leave_word, runtime))
        try:
            with ExitStack() as stack:  # once it is left, the checkpoint under way is there to be named
                return _train(cfg, runtime, stack)
        except LostPeer as error:
            if not runtime.group.is_first:
                return EXIT_USER_ERROR  # the first process says it
            raise UserError(f"{error}. {last_good(cfg)}") from error
        except NotFiniteError as error:
            raise UserError(f"{error}. {last_good(cfg)}") from error
        except RuntimeError as error:
            if isinstance(error, UserError) or not is_out_of_memory(error):
                raise
            told = f"out of memory, although a trial step fitted. {last_good(cfg)}"
            raise UserError(told) from error


def _leave_word(runtime: Runtime, _kind: object, error: BaseException | None, _trace: object) -> None:
    """What ends the run goes into its log, and to the processes that are left behind."""
    if error is not None:
        log_failure(error)
        for worker in multiprocessing.active_children():
            worker.kill()  # one that hangs would keep this process, and with it the others, from ending
        told = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        runtime.group.tell(str(told))


def _train(cfg: Config, runtime: Runtime, stack: ExitStack) -> int:
    # build
    accumulation_steps(cfg.train, runtime.num_devices)
    is_first = runtime.group.is_first
    if is_first:
        check_run_dir(cfg)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    store.require_geometry(cfg.spatial)
    rows = open_rows(cfg, store)
    total = total_steps(cfg, len(rows.train))
    torch.manual_seed(cfg.seed)
    model = VJEPA3D(cfg).to(runtime.device).train()
    choose_kernels(model, cfg, runtime)
    optimizer = build_optimizer(model, cfg)
    skill = SkillGauge.of_model(model, runtime.device)
    gauges = Gauges(
        skill,
        cfg.train.global_batch_size,
        runtime.group,
        runtime.read,
        has_fixed_targets=model.recipe.has_fixed_targets,
    )

    # restore: this run, else init_from, else scratch
    progress = restore(cfg, store, rows, model, optimizer, gauges, runtime.group)
    start = progress["step"]
    shard_state(model, optimizer, cfg, runtime)

    # one trial step settles the memory and proves that no target leaks into the context
    if start >= total:
        log.info("nothing to do: the run is at step %d of %d", start, total)
        runtime.group.close()
        return 0
    fitting = settle_memory(cfg, store, rows, model, optimizer, runtime, start, trial_step)
    run_log: RunLog | NoLog = NoLog()
    writer = None
    if is_first:
        claim_run_dir(cfg, runtime)
        run_log = RunLog(cfg, start, total, synthetic=bool(store.attrs["synthetic"]))
        stack.enter_context(closing(run_log))
        writer = checkpoint_writer(cfg)
    log_start(fitting, model, rows, runtime, start, total)
    speed = Throughput(fitting, model, runtime)
    speed.log_start()
    trace = StepTrace(cfg, runtime, start)
    stack.callback(trace.close)
    loader = open_loader(fitting, store, rows, runtime, start, total)
    batches = iter(loader)
    if writer is not None:
        stack.callback(writer.wait)
    motion, moves = TargetMotion(model, runtime.read), runtime.place(torch.tensor(0))
    steps_per_epoch = max(1, round(len(rows.train) / cfg.train.global_batch_size))
    val_every = cfg.train.val_every_steps or steps_per_epoch
    save_every = cfg.train.ckpt_every_steps or cfg.train.ckpt_every_epochs * steps_per_epoch
    keep_every = cfg.train.ckpt_every_epochs * steps_per_epoch
    if start == 0:
        first = runtime.group.broadcast(validate(model, fitting, store, rows, runtime))
        report(run_log, gauges, 0, {**first, "ema/init_weight": progress["init_weight"]})
        show_snapshots(model, cfg, store, rows, runtime, run_log, 0)

    recent: list[tuple[int, torch.Tensor]] = []  # steps since the last log line, and whether they were finite
    bad_run = runtime.place(torch.tensor(progress["bad_run"]))
    bad_total = runtime.place(torch.tensor(progress["bad_total"]))
    worst_run = runtime.place(torch.tensor(progress["bad_run"]))
    left = runtime.place(torch.tensor(progress["init_weight"], dtype=torch.float64))
    validated = time.perf_counter()
    done = saved = start
    runtime.end_step()

    def save(names: list[str]) -> None:
        if not names or (writer is None and not runtime.is_sharded):
            return
        progress.update(step=done, bad_run=int(bad_run), bad_total=int(bad_total), init_weight=float(left))
        state = runtime.gather(checkpoint_state(cfg, store, rows, model, optimizer, gauges, progress))
        if writer is not None:
            writer.save(state, names, permanent=done % keep_every == 0)

    speed.restart()
    for step in range(start, total):
        if trace.at(step):
            speed.restart()  # writing it was no part of a step
        speed.lap("other")
        on_host = next_or_stop(batches, runtime, cfg.data.data_timeout_s)
        if on_host is None:
            break
        micro_batches: list[Batch] = [runtime.to_device(b) for b in on_host]
        speed.lap("data_wait")
        done = step + 1
        last = done == total
        is_logged = done % cfg.train.log_every_steps == 0 or last or done == 1
        is_validated = done % val_every == 0 or last
        lr, momentum = learning_rate(cfg, step, total), ema_momentum(cfg, step, total)

        gauges.begin(measure=is_logged or is_validated)
        result = train_step(
            model, optimizer, micro_batches, cfg, runtime, step, lr, momentum, gauges.observe, speed.lap
        )
        kept = runtime.scalar(momentum)
        bad_run = torch.where(result.is_finite, 0, bad_run + 1)
        worst_run = torch.maximum(worst_run, bad_run)
        bad_total = bad_total + (~result.is_finite).long()
        moves = moves + (result.is_finite & (kept < 1)).long()
        left = left * torch.where(result.is_finite, kept, 1.0)
        recent.append((step, result.is_finite))
        if is_logged or is_validated:
            runtime.end_step()  # now, so that what is read below does not compute it once more
        speed.lap("other")
        measured_gauges = gauges.finish()
        speed.lap("logging")
        runtime.end_step()
        speed.end_step()

        if is_logged:
            runtime.synchronise()
            pace = speed.metrics()
            valid_tokens = sum(runtime.read(b["context_valid"]).sum() for b in micro_batches)
            report(
                run_log,
                gauges,
                done,
                {
                    "train/loss": float(result.loss),
                    "train/regulariser": None if result.regulariser is None else float(result.regulariser),
                    "train/lr": lr,
                    "train/grad_norm": float(result.grad_norm),
                    "train/update_ratio": float(update_ratio(optimizer)),
                    "train/ema_momentum": momentum,
                    "ema/init_weight": float(left),
                    "ema/drift": float(target_drift(model)),
                    **measured_gauges,
                    "train/bad_steps": int(bad_total),
                    "train/valid_context_tokens": float(runtime.group.sum(valid_tokens))
                    / cfg.train.global_batch_size,
                    **pace,
                },
            )
            if is_first:
                report_bad_steps(cfg, int(worst_run), recent, partial(rows_of_step, loader))
            recent, worst_run = [], runtime.place(torch.tensor(0))
            speed.lap("logging")
        elif step == start:
            speed.restart()  # a resumed run starts its loader here
        run_log.bar.update()

        names: list[str] = []
        if is_validated:
            motion.check(model, int(moves))
            moves = runtime.place(torch.tensor(0))
            began = time.perf_counter()
            measured = runtime.group.broadcast(validate(model, fitting, store, rows, runtime))
            now = time.perf_counter()
            measured["perf/validation_fraction"] = (now - began) / (now - validated)
            validated = now
            progress["init_weight"] = float(left)
            report(run_log, gauges, done, measured)
            names = best_names(
                progress,
                measured,
                skill_position=measured_gauges["train/skill_position"],
                is_warm=done >= cfg.optim.warmup_ratio * total,
            )
            speed.restart()
        if last:
            show_snapshots(model, cfg, store, rows, runtime, run_log, done)
        if done % save_every == 0 or done % keep_every == 0 or last:
            names = [*names, f"step_{done:08d}"]  # the step comes last: with it, the others are there
            saved = done
        save(names)
    if done > saved:  # stopped
        save([f"step_{done:08d}"])
    if writer is not None:
        writer.close()
    runtime.group.close()
    for line in closing_lines(gauges.alarms.raised):
        log.info("%s", line)
    if done < total:
        next_time = "to go on" if cfg.train.ckpt_dir is not None else "to start anew (train.ckpt_dir is null)"
        log.info("stopped by SIGTERM at step %d of %d; run the same command again %s", done, total, next_time)
    else:
        for name in progress["best"] if cfg.train.ckpt_dir is not None else ():
            run_log.artifact(name, storage.join(cfg.train.ckpt_dir, f"{name}.pt"))
        log.info("finished at step %d; run directory %s", total, cfg.run.dir)
    return 0


def report(run_log: RunLog | NoLog, gauges: Gauges, step: int, values: dict[str, float | None]) -> None:
    """Log the metrics of a line with the state of the alarms, and the alarms that begin with it."""
    begun = gauges.alarms.update(step, values)
    run_log.metrics(step, {**values, **gauges.alarms.states()})
    for alarm in begun:
        run_log.alarm(step, alarm.name, alarm.text)


def show_snapshots(
    model: VJEPA3D,
    cfg: Config,
    store: PreparedStore,
    rows: Rows,
    runtime: Runtime,
    run_log: RunLog | NoLog,
    step: int,
) -> None:
    """Write the arrays of example pictures, and send the pictures where that is allowed; a full disk has
    none.
    """
    try:
        for path in snapshot(model, cfg, store, rows, runtime, step):
            if run_log.log_images:
                shown = load_snapshot(path)
                for name, figure in (("masks", bscan_with_masks(shown)), ("features", feature_pca(shown))):
                    run_log.image(step, f"{name}/{shown.title.split(',')[0]}", figure)
    except OSError as error:
        model.train()
        log.warning("pictures of step %d not written, training goes on: %s", step, error)


if __name__ == "__main__":
    run_cli(main)
