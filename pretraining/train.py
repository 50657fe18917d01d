"""Pre-training: `python -m pretraining.train --config configs/smoke_test.yaml [section.key=value ...]`.

In: a prepared store. Out: a run directory with checkpoints, metrics and pictures. Running the same command
again goes on where the run stopped, bit for bit on a CPU; SIGTERM writes a checkpoint first and ends with
exit code 0.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from data_setup.loader import Loader
from data_setup.store import PreparedStore
from models.vjepa3d import VJEPA3D
from pretraining.data import Rows, open_rows
from pretraining.monitor import Gauges, SkillGauge, TargetMotion, check_no_leak
from pretraining.schedules import ema_momentum, init_weight, learning_rate, total_steps
from pretraining.state import (
    INIT_WEIGHT_LIMIT,
    best_names,
    check_run_dir,
    checkpoint_state,
    checkpoint_writer,
    claim_run_dir,
    last_good,
    report_bad_steps,
    restore,
)
from pretraining.step import Batch, build_optimizer, train_step, trial_step, views
from pretraining.validate import snapshot, validate
from utils import storage
from utils.config import Config, UserError, accumulation_steps, parse_cli, run_cli
from utils.log import RunLog, setup_logging
from utils.runtime import Runtime, is_out_of_memory
from utils.visualize import bscan_with_masks, feature_pca, load_snapshot

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    cfg, _ = parse_cli(__doc__ or "", argv)
    return train(cfg)


def train(cfg: Config) -> int:
    """Run the configuration to its end or to SIGTERM; returns the exit code."""
    with ExitStack() as stack:
        try:
            return _train(cfg, stack)
        except RuntimeError as error:
            if isinstance(error, UserError) or not is_out_of_memory(error):
                raise
            told = f"out of memory, although a trial step fitted. {last_good(cfg)}"
            raise UserError(told) from error


def _train(cfg: Config, stack: ExitStack) -> int:
    setup_logging()
    runtime = Runtime.create(cfg.train.use_bf16)
    runtime.catch_sigterm()

    # build
    accumulation_steps(cfg.train, runtime.world_size)
    check_run_dir(cfg)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    store.require_geometry(cfg.spatial)
    rows = open_rows(cfg, store)
    total = total_steps(cfg, len(rows.train))
    torch.manual_seed(cfg.seed)
    model = VJEPA3D(cfg).to(runtime.device).train()
    optimizer = build_optimizer(model, cfg)
    skill = SkillGauge(model.encoder.num_tokens, model.encoder.width, model.recipe, runtime.device)
    gauges = Gauges(skill)

    # restore: this run, else init_from, else scratch
    progress = restore(cfg, store, rows, model, optimizer, skill)
    start = progress["step"]

    # one trial step settles the memory and proves that no target leaks into the context
    if start >= total:
        log.info("nothing to do: the run is at step %d of %d", start, total)
        return 0
    fitting = settle_memory(cfg, store, rows, model, optimizer, runtime, start)
    claim_run_dir(cfg, runtime)
    run_log = stack.enter_context(
        closing(RunLog(cfg, start, total, synthetic=bool(store.attrs["synthetic"])))
    )
    log_start(cfg, model, rows, start, total)
    batches = iter(open_loader(fitting, store, rows, runtime, start, total))
    writer = checkpoint_writer(cfg)
    if writer is not None:
        stack.callback(writer.wait)
    motion, moves = TargetMotion(model), torch.zeros((), dtype=torch.long, device=runtime.device)
    steps_per_epoch = max(1, round(len(rows.train) / cfg.train.global_batch_size))
    val_every = cfg.train.val_every_steps or steps_per_epoch
    save_every = cfg.train.ckpt_every_steps or cfg.train.ckpt_every_epochs * steps_per_epoch
    keep_every = cfg.train.ckpt_every_epochs * steps_per_epoch
    if start == 0:
        first = validate(model, fitting, store, rows, runtime)
        run_log.metrics(0, {**first, "ema/init_weight": progress["init_weight"]})
        show_snapshots(model, cfg, store, rows, runtime, run_log, 0)

    recent: list[tuple[int, list[int], torch.Tensor]] = []  # steps since the last log line
    bad_run = torch.tensor(progress["bad_run"], device=runtime.device)
    bad_total = torch.tensor(progress["bad_total"], device=runtime.device)
    worst_run = bad_run
    left = torch.tensor(progress["init_weight"], dtype=torch.float64, device=runtime.device)
    clock, wait_s, timed_steps = time.perf_counter(), 0.0, 0
    for step in range(start, total):
        done = step + 1
        last = done == total
        is_logged = done % cfg.train.log_every_steps == 0 or last or done == 1
        is_validated = done % val_every == 0 or last
        before = time.perf_counter()
        on_host = next(batches)
        micro_batches: list[Batch] = [runtime.to_device(b) for b in on_host]
        wait_s += time.perf_counter() - before
        lr, momentum = learning_rate(cfg, step, total), ema_momentum(cfg, step, total)

        gauges.begin(measure=is_logged or is_validated)
        result = train_step(model, optimizer, micro_batches, cfg, runtime, step, lr, momentum, gauges.observe)
        measured_gauges = gauges.finish()

        bad_run = torch.where(result.is_finite, 0, bad_run + 1)
        worst_run = torch.maximum(worst_run, bad_run)
        bad_total = bad_total + (~result.is_finite).long()
        moves = moves + (result.is_finite & (momentum < 1)).long()
        left = left * torch.where(result.is_finite, momentum, 1.0)
        timed_steps += 1
        recent.append((step, [r for b in on_host for r in b["row"].tolist()], result.is_finite))

        if is_logged:
            runtime.synchronise()
            seconds = time.perf_counter() - clock
            valid_tokens = [float(b["context_valid"].sum(1).mean()) for b in on_host]
            run_log.metrics(
                done,
                {
                    "train/loss": float(result.loss),
                    "train/regulariser": None if result.regulariser is None else float(result.regulariser),
                    "train/lr": lr,
                    "train/grad_norm": float(result.grad_norm),
                    "train/ema_momentum": momentum,
                    "ema/init_weight": float(left),
                    **measured_gauges,
                    "train/bad_steps": int(bad_total),
                    "train/valid_context_tokens": sum(valid_tokens) / len(valid_tokens),
                    "perf/volumes_per_s": timed_steps * cfg.train.global_batch_size / seconds,
                    "perf/data_wait_fraction": wait_s / seconds,
                },
            )
            report_bad_steps(cfg, int(worst_run), recent)
            recent, worst_run = [], bad_run
            clock, wait_s, timed_steps = time.perf_counter(), 0.0, 0
        run_log.bar.update()

        names: list[str] = []
        if is_validated:
            motion.check(model, int(moves))
            moves = torch.zeros_like(moves)
            measured = validate(model, fitting, store, rows, runtime)
            progress["init_weight"] = float(left)
            run_log.metrics(done, measured)
            names = best_names(
                progress,
                measured,
                skill_position=measured_gauges["train/skill_position"],
                is_warm=done >= cfg.optim.warmup_ratio * total,
            )
            clock, wait_s, timed_steps = time.perf_counter(), 0.0, 0
        if last:
            show_snapshots(model, cfg, store, rows, runtime, run_log, done)
        stopping = runtime.stop_requested and not last
        if done % save_every == 0 or last or stopping:
            names = [*names, f"step_{done:08d}"]  # the step comes last: with it, the others are there
        if names and writer is not None:
            progress |= {"step": done, "bad_run": int(bad_run), "bad_total": int(bad_total)}
            progress["init_weight"] = float(left)
            state = checkpoint_state(cfg, store, rows, model, optimizer, skill, progress)
            writer.save(state, names, permanent=done % keep_every == 0)
        if stopping:
            break
    if writer is not None:
        writer.close()
    if done < total:
        next_time = "to go on" if writer is not None else "to start anew (train.ckpt_dir is null)"
        log.info("stopped by SIGTERM at step %d of %d; run the same command again %s", done, total, next_time)
    else:
        for name in progress["best"] if cfg.train.ckpt_dir is not None else ():
            run_log.artifact(name, storage.join(cfg.train.ckpt_dir, f"{name}.pt"))
        log.info("finished at step %d; run directory %s", total, cfg.run.dir)
    return 0


def open_loader(
    cfg: Config, store: PreparedStore, rows: Rows, runtime: Runtime, start: int, stop: int
) -> Loader:
    """Global batches of the steps start..stop, this process's share of each."""
    return Loader(
        cfg,
        store,
        rows.train,
        rank=runtime.rank,
        world=runtime.world_size,
        accum=accumulation_steps(cfg.train, runtime.world_size),
        start_step=start,
        num_steps=stop - start,
    )


def settle_memory(
    cfg: Config,
    store: PreparedStore,
    rows: Rows,
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    runtime: Runtime,
    step: int,
) -> Config:
    """The configuration with the largest per-core batch that fits, found before the first update.

    Halves per_core_batch_size and doubles the accumulation, so that the global batch stays; raises UserError
    when one volume does not fit. The first batch also proves that the context encoder sees no target.
    """
    while True:
        trial = replace(cfg, data=replace(cfg.data, workers=0))
        batch = runtime.to_device(next(iter(open_loader(trial, store, rows, runtime, step, step + 1)))[0])
        if runtime.attempt(partial(trial_step, model, optimizer, batch, cfg, runtime)):
            break
        share = cfg.train.global_batch_size // runtime.world_size
        half = cfg.train.per_core_batch_size // 2
        smaller = max((n for n in range(1, half + 1) if share % n == 0), default=0)
        if smaller == 0:
            raise UserError(
                f"out of memory: one volume of spatial.image_size {list(cfg.spatial.image_size)} does not "
                f"fit on {runtime.device}; a smaller image_size or model.size, or a larger patch_size, would"
            )
        log.warning("out of memory: per_core_batch_size %d -> %d", cfg.train.per_core_batch_size, smaller)
        cfg = replace(cfg, train=replace(cfg.train, per_core_batch_size=smaller, grad_accum_steps=None))
    model.eval()
    check_no_leak(model, views(batch)[0], batch["context"], batch["target"])
    model.train()
    return cfg


def show_snapshots(
    model: VJEPA3D,
    cfg: Config,
    store: PreparedStore,
    rows: Rows,
    runtime: Runtime,
    run_log: RunLog,
    step: int,
) -> None:
    """Write the arrays of example pictures, and send the pictures where that is allowed."""
    for path in snapshot(model, cfg, store, rows, runtime, step):
        if run_log.log_images:
            shown = load_snapshot(path)
            for name, figure in (("masks", bscan_with_masks(shown)), ("features", feature_pca(shown))):
                run_log.image(step, f"{name}/{shown.title.split(',')[0]}", figure)


def log_start(cfg: Config, model: VJEPA3D, rows: Rows, start: int, total: int) -> None:
    """What is about to run, with the true counts."""
    counts = {
        name: sum(p.numel() for p in getattr(model, name).parameters()) / 1e6
        for name in ("encoder", "predictor")
    }
    end_weight = init_weight(cfg, total, total)
    log.info(
        "recipe %s, encoder %s %.1f M parameters, predictor %.1f M, %d tokens; %d volumes; step %d of %d",
        cfg.method.recipe, cfg.model.size, counts["encoder"], counts["predictor"], model.encoder.num_tokens,
        len(rows.train), start, total,
    )  # fmt: skip
    if end_weight > INIT_WEIGHT_LIMIT:
        log.warning(
            "the target will still be %.0f %% of its random initialisation at the end; "
            "a longer run or a smaller method.ema_base lets it learn",
            100 * end_weight,
        )


if __name__ == "__main__":
    run_cli(main)
