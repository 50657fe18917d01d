"""Example pictures: what training sees, what it predicts, and what the features look like.

In: a run between two updates. Out: at its start and its end snapshots in run.dir (`.npz`, for the report),
and pictures for the dashboards, in between too. Nothing here moves a weight or a random stream; every process
takes part, and the first one draws.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from data_setup.loader import Batch, validation_batches
from data_setup.normalisation import view
from pretraining.run import Run
from pretraining.step import predict
from utils.report import pictures
from utils.report.pictures import Forecast, Snapshot, save_snapshot
from utils.run.log import NoLog, RunLog
from utils.runtime.single import StopRequested

log = logging.getLogger(__name__)
SNAPSHOTS, FORECASTS = 3, 1  # volumes
EVERY_STEPS = 1000  # pictures at the start, at the end and each so many updates between


class Examples:
    """Draws for a run on this process. The first process decides whether anybody looks: all must agree, since
    an engine may compute on all of them at once.
    """

    def __init__(self, run: Run, run_log: RunLog | NoLog) -> None:
        self.run, self.run_log = run, run_log
        self.is_watched: bool = run.runtime.group.broadcast(run_log.shows_images)

    def due(self, done: int) -> bool:
        """Whether pictures are drawn after update `done`, which is not the last."""
        return self.is_watched and done % EVERY_STEPS == 0

    def show(self, step: int, trained_on: Batch | None = None, *, keep: bool) -> None:
        """Draw what training sees (`trained_on`, a micro-batch on the device) and what it makes of a few
        volumes; `keep` also writes the snapshots. SIGTERM and Ctrl-C end it early: the loop meets them next.
        """
        try:
            for snapshot, row in snapshots(self.run, step):
                if keep:
                    self._keep(snapshot, step, row)
                if self.is_watched:
                    device = snapshot.title.split(",")[0]
                    self.run_log.image(step, f"masks/{device}", pictures.bscan_with_masks(snapshot))
                    self.run_log.image(step, f"features/{device}", pictures.feature_pca(snapshot))
            if self.is_watched:
                self._show_forecasts(step, trained_on)
        except StopRequested:
            log.info("pictures of step %d left out", step)
        finally:
            self.run.model.train()

    def _keep(self, snapshot: Snapshot, step: int, row: int) -> None:
        """A full disk costs the picture, not the run, nor what the other processes wait for."""
        path = Path(self.run.cfg.run.dir) / "snapshots" / f"step_{step:08d}_row_{row:06d}.npz"
        try:
            save_snapshot(path, snapshot)
        except OSError as error:
            log.warning("pictures of step %d not written, training goes on: %s", step, error)

    def _show_forecasts(self, step: int, trained_on: Batch | None) -> None:
        if trained_on is not None:
            self.run_log.image(step, "views/training", pictures.two_views(*views(self.run, trained_on)))
        for forecast in forecasts(self.run, step):
            device = forecast.seen.title.split(",")[0]
            self.run_log.image(step, f"prediction/{device}", pictures.prediction_map(forecast))


def example_batches(run: Run, limit: int) -> Iterator[tuple[int, str, Batch, Batch]]:
    """(row, its name, batch as read, batch on the device) of up to `limit` validation volumes, of different
    devices.
    """
    index, runtime = run.store.index, run.runtime
    by_device = {index.loc[int(r), "device"]: int(r) for r in reversed(run.rows.val)}
    chosen = np.array(sorted(by_device.values())[:limit])
    run.model.eval()
    for cpu_batch in runtime.until_stopped("pictures", validation_batches(run.cfg, run.store, chosen, 1)):
        row = int(cpu_batch["row"][0])
        record = index.loc[row]
        name = f"{record['device']} {record['protocol']} {record['laterality']}"
        yield row, name, cpu_batch, runtime.to_device_padded(cpu_batch, runtime.evaluation_devices)


@torch.no_grad()
def snapshots(run: Run, step: int) -> Iterator[tuple[Snapshot, int]]:
    """(snapshot, row) of the example volumes, on the first process; the others only compute."""
    for row, name, cpu_batch, batch in example_batches(run, SNAPSHOTS):
        with run.runtime.autocast():
            features = run.runtime.to_torch(run.model.target_encoder(view(batch, 1)))
        if not run.runtime.group.is_first:
            continue
        if not bool(torch.isfinite(features).all()):
            log.warning("no picture of row %d: its features are not finite", row)
            continue
        yield snapshot_of(run, cpu_batch, features[0], f"{name}, step {step}"), row


def snapshot_of(run: Run, cpu_batch: Batch, features_NE: torch.Tensor, title: str) -> Snapshot:
    """The first volume of a batch as it was read, with features of its tokens."""
    names = "volume", "context", "target", "token_valid"
    volume, context, target, valid = (cpu_batch[name][0].numpy() for name in names)
    spatial, features = run.cfg.spatial, features_NE.float().cpu().numpy()
    shape = run.cfg.grid, spatial.patch_size, spatial.target_spacing
    return Snapshot(volume, context, target, *shape, features, valid, title)


@torch.no_grad()
def forecasts(run: Run, step: int) -> Iterator[Forecast]:
    """What the model predicts of one of the example volumes, on the first process; the others only
    compute.
    """
    runtime = run.runtime
    for _, name, cpu_batch, batch in example_batches(run, FORECASTS):
        output = predict(run.model, batch, runtime, stochastic=False)
        outcome = output.target_all_BNE, output.prediction_BME
        targets, prediction = (runtime.to_torch(tensor)[0].float().cpu() for tensor in outcome)
        is_finite = all(bool(torch.isfinite(part).all()) for part in (targets, prediction))
        if runtime.group.is_first and is_finite:
            seen = snapshot_of(run, cpu_batch, targets, f"{name}, step {step}")
            yield Forecast(seen, targets.numpy(), prediction.numpy())


@torch.no_grad()
def views(run: Run, batch: Batch) -> tuple[np.ndarray, Snapshot]:
    """The first volume of a micro-batch as the encoders get it [2, D, H, W], and its tokens."""
    to_torch = run.runtime.to_torch
    both = [to_torch(view(batch, number))[0, 0].float().cpu().numpy() for number in (0, 1)]
    names = "volume", "context", "target", "token_valid"
    on_host = {name: to_torch(batch[name])[:1].cpu() for name in names}
    return np.stack(both), snapshot_of(run, on_host, torch.zeros(run.model.encoder.num_tokens, 0), "")
